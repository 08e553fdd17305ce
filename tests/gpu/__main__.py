"""``python -m tests.gpu [STEP …] [--out FILE]``: run the product on this machine's GPU and measure it.

Needs a GPU, vLLM with kvcached (SARDEENZ_VLLM names the command) and model folders under SARDEENZ_GPU_MODELS
(``qwen3-0.6b``, ``llama-1b``, ``qwen2.5-0.5b``, ``qwen3-8b``: config and tokenizer suffice, weights are random).
Results are JSON, one object a step; a step that fails leaves its error and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.gpu import story  # noqa: F401  registers its steps
from tests.gpu.product import Meter, Product
from tests.gpu.steps import FOLDERS, STEPS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", default=list(STEPS), metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--out", type=Path, default=Path("gpu-results.json"))
    parser.add_argument("--home", type=Path, default=None)
    parser.add_argument("--limit-s", type=float, default=520, help="start no further step after this time")
    args = parser.parse_args()
    home = args.home or Path(tempfile.mkdtemp(prefix="sardeenz-gpu-"))
    results: dict[str, Any] = {}
    meter = Meter()
    meter.start()
    began = time.monotonic()
    with Product(home, SARDEENZ_MODEL_ROOTS=str(FOLDERS)) as product:
        results["hosts"] = product.call("GET", "/hosts")
        for name in args.steps:
            if time.monotonic() - began > args.limit_s:
                results[name] = {"skipped": "out of time"}
                continue
            since = time.monotonic()
            try:
                results[name] = STEPS[name](product, meter)
            except Exception as exc:
                results[name] = {"error": f"{type(exc).__name__}: {exc}", "trace": traceback.format_exc()[-2000:]}
            results[name]["step_s"] = round(time.monotonic() - since, 1)
            args.out.write_text(json.dumps(results, indent=1))
            print(f"== {name}\n{json.dumps(results[name], indent=1)[:3000]}", flush=True)
    meter.ended.set()
    return 1 if any("error" in value for value in results.values() if isinstance(value, dict)) else 0


if __name__ == "__main__":
    sys.exit(main())
