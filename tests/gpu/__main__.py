"""``python -m tests.gpu [STEP …] [--engine simulated] [--out FILE]``: run the product on GPUs and measure it.

Needs a GPU, vLLM with kvcached (SARDEENZ_VLLM names the command) and model folders under SARDEENZ_GPU_MODELS
(``qwen3-0.6b``, ``llama-1b``, ``qwen2.5-0.5b``, ``qwen3-8b``: config and tokenizer suffice, weights are random).
Results are JSON, one object a step, with what must hold under ``claims``; a step that fails leaves its error and the
next one runs. With ``--engine simulated`` the same steps run on simulated GPUs: that proves the steps, and measures
nothing.
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

from tests.gpu import parallel, story  # noqa: F401  they register their steps
from tests.gpu.product import Meter, Product
from tests.gpu.steps import STEPS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", default=list(STEPS), metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--out", type=Path, default=Path("gpu-results.json"))
    parser.add_argument("--engine", choices=["vllm", "simulated"], default="vllm")
    parser.add_argument("--home", type=Path, default=None)
    parser.add_argument("--port", type=int, default=8000, help="of the pages; the router takes the next one")
    parser.add_argument("--limit-s", type=float, default=520, help="start no further step after this time")
    args = parser.parse_args()
    home = args.home or Path(tempfile.mkdtemp(prefix="sardeenz-gpu-"))
    results: dict[str, Any] = {}
    began = time.monotonic()
    with Product(home, engine=args.engine, port=args.port, router_port=args.port + 1) as product:
        meter = Meter(product)
        meter.start()
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
    failed = [name for name, value in results.items() if isinstance(value, dict) and not _holds(value)]
    print(f"failed: {', '.join(failed)}" if failed else "every claim holds")
    return 1 if failed else 0


def _holds(result: dict[str, Any]) -> bool:
    return "error" not in result and all(result.get("claims", {}).values())


if __name__ == "__main__":
    sys.exit(main())
