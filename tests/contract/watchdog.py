"""Ends what a killed test run would leave behind, since engines outlive whoever started them.

Waits until its standard input closes, which the end of the test process brings about in any case, and then ends every
start under a folder: ``python -m tests.contract.watchdog FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from models_app.engines.process import cleanup, terminate
from models_app.engines.rundir import run_dirs


def main() -> None:
    sys.stdin.read()
    for run_dir in run_dirs(Path(sys.argv[1])):
        terminate(run_dir, limit_s=0)
        cleanup(run_dir)


if __name__ == "__main__":
    main()
