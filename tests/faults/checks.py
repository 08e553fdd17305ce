"""What must hold once nothing is done any more: the invariants of a quiet Sardeenz, looked at from outside.

Rows are read from the database, processes and ports from ``/proc``, bytes from the ledger of the simulated cards:
nothing here asks the product whether it is well.
"""

from __future__ import annotations

import re
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import httpx

from gpus_app.probes.sim_ledger import Ledger
from models_app.engines import family, procfs, rundir
from models_app.engines.identity import GUARDIAN_MARKER, installation_id, parse_ipc_name, parse_marker
from models_app.states import HAS_PROCESS, LIVE
from tests.faults.clients import wrong_answer
from tests.faults.database import Database, Row, value, when
from tests.faults.world import World

_HAS_PROCESS = frozenset(str(state) for state in HAS_PROCESS)
_LIVE = frozenset(str(state) for state in LIVE)
_SHM, _TMP = Path("/dev/shm"), Path("/tmp")
#: A restart that is due and not done after so long is overdue.
_OVERDUE_S = 10.0


def instances(database: Database) -> list[Row]:
    return database.read(
        "SELECT i.*, m.served_model_name AS model, m.deployed, m.replicas FROM models_app_instance i "
        "JOIN models_app_model m ON m.id = i.model_id ORDER BY i.id"
    )


def violations(world: World) -> list[str]:
    """Everything that is not as it must be, as sentences; empty when all is well."""
    home, database = world.stack.home, world.database
    rows = instances(database)
    found = [*_launcher(world), *_desired(database, rows), *_operations(database), *_events(database, rows)]
    found += [*_owners(home, rows), *_left_over(home, rows), *_bytes(home, rows)]
    return found if found else _answers(world, rows)


def _launcher(world: World) -> list[str]:
    there = world.stack.children()
    names = ("valkey", "web", "router", "control", "beat", "host", "sampler")
    return [f"{name} was not started again" for name in names if name not in there]


def _desired(database: Database, rows: list[Row]) -> list[str]:
    """Deployed models have their replicas as wanted, or failed with a cause and a due restart; others have nothing."""
    found = []
    for model in database.read("SELECT * FROM models_app_model"):
        mine = [row for row in rows if row["model_id"] == model["id"]]
        by_index: dict[int, list[Row]] = defaultdict(list)
        for row in mine:
            by_index[row["replica_index"]].append(row)
        for index in range(model["replicas"] if model["deployed"] else 0):
            newest = [row for row in by_index[index] if row["state"] in _LIVE] or by_index[index][-1:]
            if not newest:
                found.append(f"{model['served_model_name']}#{index} is wanted and was never made")
            found += [text for row in newest if (text := _not_as_wanted(row))]
            if len(newest) > 1:
                found.append(f"{model['served_model_name']}#{index} runs twice: {[row['id'] for row in newest]}")
        for row in mine:
            wanted = model["deployed"] and row["replica_index"] < model["replicas"]
            if not wanted and row["state"] in _LIVE:
                found.append(f"{_name(row)} lives ({row['state']}: {row['reason']}) and nobody wants it")
    return found


def _not_as_wanted(row: Row) -> str:
    state, desired = row["state"], row["desired_state"]
    text = f"{_name(row)} is {state}, wanted {desired}: {row['reason']}"
    if (state, desired) in (("ready", "running"), ("sleeping", "sleeping"), ("stopped", "stopped")):
        return ""
    if state == "failed":
        if not row["first_cause"]:
            return f"{text} (no cause)"
        if row["next_restart_at"] is None:
            return "" if desired != "running" or "not tried again" in row["reason"] else f"{text} (no restart due)"
        return text if (datetime.now(UTC) - when(row["next_restart_at"])).total_seconds() > _OVERDUE_S else ""
    # Another model was given its bytes: it waits for room, visibly.
    return "" if state == "pending" and "GiB" in row["reason"] else text


def _operations(database: Database) -> list[str]:
    rows = database.read("SELECT * FROM models_app_operation WHERE state IN ('pending', 'running')")
    return [f"operation {row['id']} ({row['title']}) is still {row['state']}: {row['message']}" for row in rows]


def _events(database: Database, rows: list[Row]) -> list[str]:
    """Every change of state has its event, and the events of an instance join up."""
    chains: dict[int, list[Row]] = defaultdict(list)
    for event in database.read("SELECT * FROM models_app_instanceevent WHERE kind = 'state' ORDER BY id"):
        chains[event["instance_id"]].append(event)
    found = []
    for row in rows:
        state = "pending"
        for event in chains[row["id"]]:
            if event["from_state"] != state:
                found.append(f"{_name(row)}: event {event['id']} leaves {event['from_state']}, but it was {state}")
            if not event["reason"]:
                found.append(f"{_name(row)}: event {event['id']} gives no reason")
            state = event["to_state"]
        if state != row["state"] or len(chains[row["id"]]) != row["state_version"]:
            found.append(f"{_name(row)} is {row['state']} (change {row['state_version']}), its events end at {state}")
    return found


def _owners(home: Path, rows: list[Row]) -> list[str]:
    """No process without a row, one start an instance, and no row without its process."""
    by_id = {row["id"]: row for row in rows}
    mine = installation_id(home)
    starts = {one.marker for one in family.find_marked(mine)}
    found = []
    for marker in sorted(starts):
        row = by_id.get(marker.instance_id)
        if row is None:
            found.append(f"start {marker.attempt_id} lives, and its instance {marker.instance_id} has no row")
        elif row["state"] not in _HAS_PROCESS or row["attempt_id"] != marker.attempt_id:
            found.append(f"start {marker.attempt_id} lives, but {_name(row)} is {row['state']}, {row['attempt_id']}")
    living = {marker.attempt_id for marker in starts}
    bare = [row for row in rows if row["state"] in ("ready", "sleeping") and row["attempt_id"] not in living]
    found += [f"{_name(row)} is {row['state']} without a process" for row in bare]
    guardians: dict[int, list[int]] = defaultdict(list)
    for process in procfs.processes():
        value = procfs.environment_value(process.pid, GUARDIAN_MARKER)
        guarded = parse_marker(value) if value else None
        if guarded and guarded.installation == mine:
            guardians[guarded.attempt_id].append(process.pid)
    for attempt, pids in guardians.items():
        if attempt not in living or len(pids) > 1:
            found.append(f"guardians {pids} of start {attempt}, which {'lives' if attempt in living else 'is over'}")
    return found


def _left_over(home: Path, rows: list[Row]) -> list[str]:
    """Segments, folders and ports of starts that are over."""
    mine = installation_id(home)
    current = {row["attempt_id"] for row in rows if row["state"] in _HAS_PROCESS}
    found = []
    for path in _SHM.glob(f"*sz-{mine}-*"):
        marker = parse_ipc_name(path.name)
        if marker is None or marker.attempt_id not in current:
            found.append(f"left over: {path}")
    for path in _TMP.glob(f"*sz-{mine}-*"):
        number = re.fullmatch(rf"sz-{mine}-(\d+)|kvcached-tp-sz-{mine}-i\d+-a(\d+)-[0-9a-f]+", path.name)
        if number is None or int(number[1] or number[2]) not in current:
            found.append(f"left over: {path}")
    used = {row["port"] for row in rows if row["state"] in _HAS_PROCESS}
    for folder in rundir.run_dirs(home / "runs"):
        attempt = rundir.read_attempt(folder) or {}
        over = int(folder.name) not in current
        port = attempt.get("port")
        if port and port not in used and over and procfs.listening_inodes(port):
            found.append(f"port {port} of start {folder.name}, which is over, is still listened on")
        seen = (status.shared_memory or {}) if over and (status := rundir.read_status(folder)) else {}
        found += [f"left over of start {folder.name}: {name}" for name in seen if Path(name).exists()]
    return found


def _bytes(home: Path, rows: list[Row]) -> list[str]:
    """Every simulated byte belongs to a process of an instance that may have one, on its own cards."""
    owners = {row["attempt_id"]: row for row in rows if row["state"] in _HAS_PROCESS}
    marked = {one.pid: one.marker.attempt_id for one in family.find_marked(installation_id(home))}
    found = []
    for folder in (home / "simgpu").glob("*"):
        for uuid, holdings in Ledger(folder).read().items():
            for pid, _, name, size in holdings:
                owner = owners.get(marked.get(pid, -1))
                if size and (owner is None or uuid not in value(owner["gpu_uuids"])):
                    found.append(f"{size} bytes on {uuid} are held by {name} ({pid}), which no instance explains")
    return found


def _answers(world: World, rows: list[Row]) -> list[str]:
    """Each model with a ready instance answers through the router, with its own name."""
    found = []
    headers = {"Authorization": f"Bearer {world.api.key}"}
    for model in sorted({row["model"] for row in rows if row["state"] == "ready"}):
        body = {"model": model, "prompt": "hello", "max_tokens": 3}
        try:
            url = f"{world.stack.router_url}/v1/completions"
            answer = httpx.post(url, headers=headers, json=body, timeout=60)
        except httpx.HTTPError as exc:
            found.append(f"{model} does not answer through the router: {exc!r}")
            continue
        if answer.status_code != 200:
            found.append(f"{model} is ready, but the router says {answer.status_code}: {answer.text[:300]}")
        elif wrong := wrong_answer([answer.text], model):
            found.append(wrong)
    return found


def nothing_left(home: Path, installation: str) -> list[str]:
    """After the end: no process of this home, no segment, no folder."""
    found = [f"process {one.pid} {one.name} lives on" for one in family.find_marked(installation)]
    for process in procfs.processes():
        words = procfs.command_line(process.pid)
        value = procfs.environment_value(process.pid, "SARDEENZ_HOME")
        if str(home) in words or value == str(home):
            found.append(f"process {process.pid} lives on: {words[:150]}")
    found += [f"left over: {path}" for path in _SHM.glob(f"*sz-{installation}-*")]
    found += [f"left over: {path}" for path in _TMP.glob(f"*sz-{installation}-*")]
    return found


def _name(row: Row) -> str:
    return f"instance {row['id']} ({row['model']}#{row['replica_index']})"
