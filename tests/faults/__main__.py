"""``python -m tests.faults --seed N --steps 300``: random acts and kills, a quiet moment, the invariants, and again.

Exit code 0 when every invariant held after every burst and at the end; 1 with each violation and how to replay it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from models_app.engines import family, process
from models_app.engines.identity import installation_id
from tests.faults import checks
from tests.faults.plan import plan
from tests.faults.world import World
from tests.sardeenz_site.stack import Stack

#: Within so long after the last act of a burst everything must be right.
QUIET_S = 60.0
SETTINGS = {
    "SARDEENZ_SIM_SPEED": "20",
    "SARDEENZ_SIM_GPUS": "2",
    "SARDEENZ_RESTART_BACKOFF_S": "0.5",
    "SARDEENZ_RESTART_BACKOFF_MAX_S": "2",
    "SARDEENZ_RESTART_LIMIT": "1000",
    "SARDEENZ_START_GRACE_S": "8",
}


def say(text: str) -> None:
    print(text, flush=True)


def run(seed: int, steps: int, burst: int, *, keep: Path | None = None) -> list[str]:
    """One run on a Sardeenz of its own. Returns the violations. Leaves no process behind, whatever happened."""
    stack = Stack(start=False, **SETTINGS)
    installation = installation_id(stack.home)
    try:
        return _run(stack, seed, steps, burst, keep)
    finally:
        left = process.end_processes(family.find_marked(installation), limit_s=2.0)
        if left:
            say(f"these processes would not end: {[one.pid for one in left]}")


def _run(stack: Stack, seed: int, steps: int, burst: int, keep: Path | None) -> list[str]:
    begun = time.monotonic()
    with stack:
        world = World(stack)
        world.start()
        say(f"up after {time.monotonic() - begun:.0f} s; seed {seed}, {steps} steps in bursts of {burst}")
        found: list[str] = []
        todo = plan(seed, steps)
        for first in range(0, steps, burst):
            for step in todo[first : first + burst]:
                say(f"{time.monotonic() - begun:6.1f} {step}: {world.act(step)}")
                time.sleep(step.pause_s)
            found = _quiet(world, begun)
            found += world.violations + [text for one in world.streamers for text in one.violations]
            if found:
                break
        if not found:
            for streamer in world.streamers:
                streamer.end()
            for streamer in world.streamers:
                streamer.join(60)
            found = [text for one in world.streamers for text in one.violations]
        for kind, outcomes in sorted(world.outcomes.items()):
            say(f"  {kind:12} " + ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items())))
        for one in world.streamers:
            say(f"  client of {one.name}: {one.whole} whole, {one.refused} refused, {one.excused} excused")
        if found and keep is not None:
            _keep(stack, keep)
        if not found:
            found = _end(stack)
    say(f"{time.monotonic() - begun:.0f} s in all")
    return found


def _quiet(world: World, begun: float) -> list[str]:
    """Wait until the invariants hold, twice in a row; what still does not hold at the limit."""
    end = time.monotonic() + QUIET_S
    quiet = time.monotonic()
    good = 0
    while True:
        found = checks.violations(world)
        good = 0 if found else good + 1
        if good == 2:
            say(f"{time.monotonic() - begun:6.1f} all well {time.monotonic() - quiet:.1f} s after the burst")
            return []
        if time.monotonic() > end:
            return found or ["the invariants do not stay"]
        time.sleep(1.0)


def _end(stack: Stack) -> list[str]:
    """Ctrl-C, after which nothing may be left."""
    installation = installation_id(stack.home)
    code = stack.end(signal.SIGINT)
    found = checks.nothing_left(stack.home, installation)
    return [f"Ctrl-C ended with {code}", *found] if code else found


def _keep(stack: Stack, keep: Path) -> None:
    shutil.rmtree(keep, ignore_errors=True)
    shutil.copytree(stack.home, keep, ignore=shutil.ignore_patterns("valkey"), ignore_dangling_symlinks=True)
    (keep / "launcher.log").write_text(stack.text)
    events = checks.read(
        stack.home, "SELECT instance_id, at, kind, from_state, to_state, actor, reason FROM models_app_instanceevent"
    )
    (keep / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    say(f"its home is kept in {keep}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--burst", type=int, default=20, help="steps between two quiet moments")
    parser.add_argument("--keep", type=Path, help="where the home of a failed run is kept: logs, database, events")
    given = parser.parse_args()
    found = run(given.seed, given.steps, given.burst, keep=given.keep)
    for text in found:
        say(f"VIOLATION: {text}")
    if found:
        say(f"Replay: python -m tests.faults --seed {given.seed} --steps {given.steps} --burst {given.burst}")
    else:
        say(f"Every invariant held: seed {given.seed}, {given.steps} steps.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
