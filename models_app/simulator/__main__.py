"""``python -m models_app.simulator serve MODEL …``: an engine for machines without a GPU, with vLLM's command line."""

from __future__ import annotations

import sys
import time

USAGE = "usage: python -m models_app.simulator [-v | --version] serve [model_tag] [options]\n"


def main() -> int:
    """Dispatch the subcommand; only ``serve`` does anything."""
    started = time.monotonic()
    arguments = sys.argv[1:]
    if arguments[:1] in (["-v"], ["--version"]):
        from os import environ

        from models_app.simulator.config import DEFAULT_VLLM

        sys.stdout.write(f"{environ.get('SARDEENZ_SIM_VLLM_VERSION') or DEFAULT_VLLM}\n")
        return 0
    if arguments[:1] != ["serve"]:
        sys.stderr.write(USAGE)
        return 2
    from models_app.simulator.server import main as serve

    return serve(arguments[1:], started)


if __name__ == "__main__":
    sys.exit(main())
