"""``python -m tests.bench``: what our router costs, beside the Rust router's cost in the same run.

Prints a Markdown table and writes ``bench.json``. CPU is the processes' own time, per small request or per relayed
chunk; it holds on a shared machine where times do not, and even so only the ratios between two lines of one run say
much. Every scenario is run ``--rounds`` times, target by target in turn, and the round with the least CPU counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.load import Plan
from tests.bench.targets import KEY, ROOT, Target, fake_engine, our_router, rust_router, rust_router_command


@dataclass(frozen=True)
class Scenario:
    name: str
    unit: str  # what the CPU is divided by
    plan: Plan

    @property
    def units(self) -> int:
        return self.plan.requests * (self.plan.chunks if self.plan.stream else 1)


def scenarios(scale: float) -> list[Scenario]:
    small = max(200, int(10_000 * scale))
    return [
        Scenario("small requests, 32 at once", "request", Plan(32, small, key=KEY)),
        Scenario("small requests, 256 at once", "request", Plan(256, small, key=KEY)),
        Scenario("100 streams × 200 chunks", "chunk", Plan(100, 100, stream=True, key=KEY)),
        Scenario("500 streams × 200 chunks", "chunk", Plan(500, 500, stream=True, key=KEY)),
    ]


def measure(target: Target, scenario: Scenario) -> dict[str, Any]:
    before = target.cpu_s()
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.load", str(target.port), json.dumps(asdict(scenario.plan))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=330,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    result: dict[str, Any] = json.loads(done.stdout)
    if result["failed"]:
        raise RuntimeError(f"{target.name}, {scenario.name}: {result['failed']} failed: {result['first_error']}")
    spent = target.cpu_s() - before
    result["cpu_us"] = round(spent / scenario.units * 1e6, 1) if target.pid is not None else None
    result["rss_mib"] = round(target.rss_bytes() / 2**20)
    return result


def best(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several rounds, the least disturbed: the least CPU, and the least of each time."""
    return {
        name: min(values) if all(isinstance(value, (int, float)) for value in values) else values[0]
        for name in rounds[0]
        if (values := [one[name] for one in rounds])
    }


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = [
        "| what | target | CPU µs per unit | against Rust | added to first byte, p50 / p99 ms | "
        "age of a chunk, p50 / p99 ms | RSS MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for scenario, by_target in results.items():
        direct = by_target["direct"]
        rust = next((one for name, one in by_target.items() if "Rust" in name), None)
        for name, one in by_target.items():
            cpu = "" if one["cpu_us"] is None else f"{one['cpu_us']:.1f}"
            ratio = f"{one['cpu_us'] / rust['cpu_us']:.2f}" if rust and one["cpu_us"] is not None else ""
            added = [one[f"ttfb_{q}_ms"] - (0 if name == "direct" else direct[f"ttfb_{q}_ms"]) for q in ("p50", "p99")]
            first = f"{added[0]:.1f} / {added[1]:.1f}" + (" (in all)" if name == "direct" else "")
            age = f"{one['age_p50_ms']:.2f} / {one['age_p99_ms']:.2f}" if one["events"] else ""
            rss = one["rss_mib"] or ""
            lines.append(f"| {scenario} | {name} | {cpu} | {ratio} | {first} | {age} | {rss} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="number of small requests, 1 = 10,000 a round")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "sardeenz-bench")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    command = rust_router_command(args.cache)
    chosen = [scenario for scenario in scenarios(args.scale) if args.only in scenario.name]
    with tempfile.TemporaryDirectory(prefix="sardeenz-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        engine = stack.enter_context(fake_engine(folder))
        targets = [engine]
        if command is not None:
            targets.append(stack.enter_context(rust_router(folder, command, engine.port)))
        targets += [stack.enter_context(our_router(folder, [engine.port], workers=workers)) for workers in (1, 2)]
        idle = {target.name: round(target.rss_bytes() / 2**20) for target in targets if target.pid is not None}
        for target in targets:  # connections are made and code is warm before anything counts
            measure(target, Scenario("warm-up", "request", Plan(32, 500, key=KEY)))
        results: dict[str, dict[str, dict[str, Any]]] = {}
        for scenario in chosen:
            rounds: dict[str, list[dict[str, Any]]] = {target.name: [] for target in targets}
            for _ in range(args.rounds):
                for target in targets:
                    rounds[target.name].append(measure(target, scenario))
            results[scenario.name] = {name: best(measured) for name, measured in rounds.items()}
            print(f"{scenario.name}: done", file=sys.stderr)
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "load": [round(one, 1) for one in os.getloadavg()],
        "idle_rss_mib": idle,
        "rounds": args.rounds,
    }
    args.out.write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")
    print(table(results))
    print(f"\n{facts}")


if __name__ == "__main__":
    main()
