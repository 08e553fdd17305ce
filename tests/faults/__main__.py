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
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from models_app.engines import family, process
from models_app.engines.identity import installation_id
from tests.faults import checks
from tests.faults.cast import CASTS
from tests.faults.database import Postgres, Sqlite
from tests.faults.plan import plan
from tests.faults.real import prepare
from tests.faults.world import World
from tests.sardeenz_site.stack import Stack

#: While everything is not right yet, this is told so often.
TELL_S = 10.0


def say(text: str) -> None:
    print(text, flush=True)


@dataclass(frozen=True)
class Run:
    """What the command line asks for. ``keep``: where the home of a failed run goes."""

    seed: int
    cast: str
    steps: int
    kills: int | None
    burst: int
    database: str
    keep: Path | None

    def __str__(self) -> str:
        given = vars(self).items()
        return " ".join(f"--{name} {value}" for name, value in given if name != "keep" and value is not None)


def run(asked: Run) -> list[str]:
    """One run on a Sardeenz of its own. Returns the violations. Leaves no process behind, whatever happened."""
    cast = CASTS[asked.cast]
    stack = Stack(start=False, **cast.settings)
    if cast.engine == "vllm":
        prepare(stack)
    installation = installation_id(stack.home)
    database = Sqlite(stack.home) if asked.database == "sqlite" else Postgres(Path(tempfile.mkdtemp(prefix="sz-pg-")))
    stack.env["DATABASE_URL"] = database.url
    try:
        with stack:
            return _run(World(cast, stack, database), asked)
    finally:
        left = process.end_processes(family.find_marked(installation), limit_s=2.0)
        database.end()
        if left:
            say(f"these processes would not end: {[one.pid for one in left]}")


def _run(world: World, asked: Run) -> list[str]:
    begun = time.monotonic()
    world.start()
    say(f"up after {time.monotonic() - begun:.0f} s; {asked}")
    todo = plan(world.cast, asked.seed, asked.steps if asked.kills is None else 50 * asked.kills)
    found: list[str] = []
    for first in range(0, len(todo), asked.burst):
        for step in todo[first : first + asked.burst]:
            say(f"{time.monotonic() - begun:6.1f} {step}: {world.act(step)}")
            time.sleep(step.pause_s)
        found = _quiet(world, begun) or world.brought_up()
        found += world.faults()
        if found or (asked.kills is not None and world.kills >= asked.kills):
            break
    if not found:
        world.end_clients()
        found = world.faults()
    _tell(world)
    if found and asked.keep is not None:
        _keep(world, asked.keep)
    if not found:
        found = _end(world)
    done = sum(sum(counts.values()) for counts in world.outcomes.values())
    say(f"{done} acts, {world.kills} kills and losses, {time.monotonic() - begun:.0f} s in all")
    return found


def _tell(world: World) -> None:
    for kind, outcomes in sorted(world.outcomes.items()):
        say(f"  {kind:20} " + ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items())))
    for one in world.streamers:
        say(f"  client of {one.name}: {one.whole} whole, {one.refused} refused, {one.excused} excused")


def _quiet(world: World, begun: float) -> list[str]:
    """Wait until the invariants hold, twice in a row; what still does not hold at the limit."""
    world.database.settle()
    quiet = time.monotonic()
    end = quiet + world.cast.quiet_s
    good, told = 0, quiet
    while True:
        found = checks.violations(world)
        if found and time.monotonic() - told > TELL_S:
            told = time.monotonic()
            say(f"{told - begun:6.1f} not yet: {' / '.join(found)}")
        good = 0 if found else good + 1
        if good == 2:
            say(f"{time.monotonic() - begun:6.1f} all well {time.monotonic() - quiet:.1f} s after the burst")
            return []
        if time.monotonic() > end:
            return found or ["the invariants do not stay"]
        time.sleep(1.0)


def _end(world: World) -> list[str]:
    """Ctrl-C, after which nothing may be left; real engines serve on until they are told to end as well."""
    home = world.stack.home
    code = world.stack.end(signal.SIGINT)
    if world.cast.engine != "simulated":
        say(world.stack.manage("stop_engines", "--all"))
    found = checks.nothing_left(home, installation_id(home))
    return [f"Ctrl-C ended with {code}", *found] if code else found


def _keep(world: World, keep: Path) -> None:
    home = world.stack.home
    shutil.rmtree(keep, ignore_errors=True)
    shutil.copytree(home, keep, ignore=shutil.ignore_patterns("valkey"), ignore_dangling_symlinks=True)
    (keep / "launcher.log").write_text(world.stack.text)
    for table in ("model", "instance", "instanceevent", "operation", "launchattempt"):
        rows = world.database.read(f"SELECT * FROM models_app_{table} ORDER BY id")
        (keep / f"{table}.jsonl").write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
    say(f"its home is kept in {keep}")


def _ask_to_end(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--cast", choices=sorted(CASTS), default="simulated", help="the models and what may happen")
    parser.add_argument("--kills", type=int, help="instead of --steps: bursts until so much was killed or lost")
    parser.add_argument("--burst", type=int, default=30, help="steps between two quiet moments")
    parser.add_argument("--database", choices=("postgres", "sqlite"), default="postgres")
    parser.add_argument("--keep", type=Path, help="where the home of a failed run is kept: logs, rows, events")
    asked = Run(**vars(parser.parse_args()))
    signal.signal(signal.SIGTERM, _ask_to_end)  # so that nothing is left of a run that took too long
    found = run(asked)
    for text in found:
        say(f"VIOLATION: {text}")
    if found:
        say(f"Replay: python -m tests.faults {asked}")
    else:
        say(f"Every invariant held: {asked}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
