"""The product under test, and one act on it at a time: REST calls as operators make them, and kill -9.

Only processes that this run started are killed: children of its own launcher, and those that the run directories of its
own throw-away home name by pid and start ticks.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from models_app.engines import procfs, rundir
from tests.faults.cast import STEADY, Cast
from tests.faults.clients import Caller, Disturbances, Streamer, ask_once, wrong_answer
from tests.faults.database import Database
from tests.faults.plan import Step
from tests.sardeenz_site.stack import Stack, wait_for
from tests.sardeenz_site.traffic import Api

#: Answers by which the product refuses an act, or says that it cannot now. Anything else is a fault of its own.
REFUSALS = frozenset({404, 409, 422, 503})
#: The pages may be coming back; an act waits so long for them.
_WEB_S = 6.0


class World:
    """``start`` brings everything up with the models of every preset launched; ``act`` does one step."""

    def __init__(self, cast: Cast, stack: Stack, database: Database) -> None:
        self.cast = cast
        self.stack = stack
        self.database = database
        self.violations: list[str] = []
        self.kills = 0
        self.outcomes: dict[str, dict[str, int]] = {}
        self.disturbances = Disturbances()
        self.streamers: list[Streamer] = []
        self.callers: list[Caller] = []

    @property
    def chat_url(self) -> str:
        return f"{self.stack.router_url}/v1/chat/completions"

    @property
    def run_root(self) -> Path:
        return self.stack.home / "runs"

    def start(self) -> None:
        self.stack.start()
        self.api = Api(self.stack)
        for name, fields in self.cast.models.items():
            model = str(fields["model"]).format(models=self.stack.home / "models")
            self.api.post("/models", served_model_name=name, **{"source": "catalogue", **fields, "model": model})
        launched: set[str] = set()
        for preset, names in self.cast.presets.items():
            for name in sorted({*names} - launched):
                self.api.post(f"/models/{name}/launch")
            launched |= {*names}
            for name in names:
                wait_for(lambda name=name: self._ready(name), self.cast.start_s, f"{name} is ready")  # type: ignore[misc]
            self.api.post("/presets", name=preset)
        self.gpus = [str(gpu["uuid"]) for gpu in self.api.get("/gpus")]
        for name in self.cast.clients:
            streamer = Streamer(
                self.chat_url, self.api.key, name, self.disturbances,
                tokens=self.cast.tokens, pause_s=self.cast.pause_s, must_serve=name == STEADY,
            )  # fmt: skip
            streamer.start()
            self.streamers.append(streamer)

    def _ready(self, model: str) -> bool:
        return any(row["state"] == "ready" for row in self.api.get(f"/instances?model={model}&live=true"))

    def faults(self) -> list[str]:
        """What acts and clients saw that must not be."""
        clients: list[Streamer | Caller] = [*self.streamers, *self.callers]
        return self.violations + [text for one in clients for text in one.violations]

    def brought_up(self) -> list[str]:
        """Each model that requests bring up comes now that nothing disturbs it, one after the other and back again."""
        for caller in self.callers:
            caller.join(Caller.LIMIT_S + 10)
        names = self.cast.on_demand
        return [text for name in (*names, *names[:1]) if (text := self._comes(name))]

    def _comes(self, model: str) -> str:
        """Empty when it answers within the time for a start; a refusal meanwhile is asked again, as clients do."""
        end = time.monotonic() + self.cast.start_s
        said = ""
        while time.monotonic() < end:
            try:
                code, said = ask_once(self.chat_url, self.api.key, model, self.cast.start_s)
            except httpx.HTTPError as exc:
                code, said = 0, repr(exc)
            if code == 200:
                return wrong_answer([said], model)
            time.sleep(0.5)
        return f"{model} is asked for and does not come within {self.cast.start_s:.0f} s: {said[:500]}"

    def end_clients(self) -> None:
        for streamer in self.streamers:
            streamer.end()
        for streamer in self.streamers:
            streamer.join(60)

    # --- acts -----------------------------------------------------------------------------------------

    def act(self, step: Step) -> str:
        """Do the step; what came of it, in a word."""
        outcome = str(getattr(self, f"_{step.kind}")(step))
        counts = self.outcomes.setdefault(f"{step.kind} {step.target}" if "kill" in step.kind else step.kind, {})
        counts[outcome] = counts.get(outcome, 0) + 1
        return outcome

    def _call(self, method: str, path: str, **body: Any) -> httpx.Response | None:
        """One call; None when nothing answers for long. A *500* is a violation."""
        end = time.monotonic() + _WEB_S
        while True:
            try:
                answer = self.api.client.request(method, path, json=body if method != "GET" else None)
                break
            except httpx.HTTPError:
                if time.monotonic() > end:
                    return None
                time.sleep(0.3)
        if answer.status_code >= 400 and answer.status_code not in REFUSALS:
            self.violations.append(f"{method} {path} {body} answered {answer.status_code}: {answer.text[:400]}")
        return answer

    def _post(self, path: str, **body: Any) -> str:
        answer = self._call("POST", path, **body)
        return "no answer" if answer is None else str(answer.status_code)

    def _instance(self, step: Step) -> dict[str, Any] | None:
        answer = self._call("GET", f"/instances?model={step.target}&live=true")
        rows: list[dict[str, Any]] = answer.json() if answer is not None and answer.status_code == 200 else []
        return rows[int(step.number * len(rows))] if rows else None

    def _on_instance(self, step: Step, act: str, **body: Any) -> str:
        row = self._instance(step)
        return self._post(f"/instances/{row['id']}/{act}", **body) if row else "none"

    def _launch(self, step: Step) -> str:
        return self._post(f"/models/{step.target}/launch")

    def _scale(self, step: Step) -> str:
        return self._post(f"/models/{step.target}/launch", replicas=1 + int(step.number * 2))

    def _stop(self, step: Step) -> str:
        return self._on_instance(step, "stop")

    def _force_stop(self, step: Step) -> str:
        self.disturbances.add(step.target)
        return self._on_instance(step, "stop", force=True)

    def _restart(self, step: Step) -> str:
        return self._on_instance(step, "restart")

    def _sleep(self, step: Step) -> str:
        return self._on_instance(step, "sleep", level=1 + int(step.number * 100) % 2)

    def _wake(self, step: Step) -> str:
        return self._on_instance(step, "wake")

    def _move(self, step: Step) -> str:
        row = self._instance(step)
        others = [uuid for uuid in self.gpus if row and uuid not in row["gpu_uuids"]]
        if row is None or not others:
            return "none"
        return self._post(f"/instances/{row['id']}/move", gpu_uuids=others[:1])

    def _edit(self, step: Step) -> str:
        low, high = self.cast.edit
        context = low + int(step.number * (high - low)) // 64 * 64
        answer = self._call("PATCH", f"/models/{step.target}", max_model_len=context)
        if answer is None or answer.status_code != 200:
            return "not edited"
        return self._post(f"/models/{step.target}/roll")

    def _cancel(self, step: Step) -> str:
        answer = self._call("GET", "/operations?limit=20")
        rows = answer.json() if answer is not None and answer.status_code == 200 else []
        open_ones = [
            row for row in rows if row["state"] in ("pending", "running") and (row["model"] or "") == step.target
        ]
        return self._post(f"/operations/{open_ones[0]['id']}/cancel") if open_ones else "none"

    def _ask(self, step: Step) -> str:
        """A request that is not waited for: what follows may fall into whatever it sets off."""
        caller = Caller(self.chat_url, self.api.key, step.target, self.disturbances)
        caller.start()
        self.callers.append(caller)
        return "asked"

    def _limit(self, step: Step) -> str:
        return self._on_instance(step, "limit", percent=3 + int(step.number * 25))

    def _trim(self, step: Step) -> str:
        return self._on_instance(step, "trim")

    def _make_room(self, step: Step) -> str:
        return self._post(f"/models/{step.target}/make_room")

    def _preset(self, step: Step) -> str:
        return self._post(f"/presets/{step.target}/apply")

    # --- kills ----------------------------------------------------------------------------------------

    def _kill(self, step: Step) -> str:
        """One of the launcher's children, which it then starts again."""
        child = self.stack.children().get(step.target)
        if child is None:
            return "none"
        if step.target == "router":
            self.disturbances.add("router")
        try:
            child.kill()
        except psutil.NoSuchProcess:
            return "none"
        self.kills += 1
        return "killed"

    def _kill_engine(self, step: Step) -> str:
        """Guardian, API server or EngineCore of a living start of any model but the steady one."""
        living = [*self.living(*self.cast.others)]
        for folder, model, status in living[int(step.number * len(living)) :] + living:
            pid, ticks = {
                "guardian": (status.guardian_pid, status.guardian_start_ticks),
                "engine": (status.engine_pid, status.engine_start_ticks),
                "core": self._core(folder, status),
            }[step.target]
            if pid and ticks is not None:
                self.disturbances.add(model)
                if procfs.send(pid, ticks, signal.SIGKILL):
                    self.kills += 1
                    return "killed"
        return "none"

    def _database(self, step: Step) -> str:
        """Its connections cut, or itself gone for a while; the next steps fall into that."""
        faults = self.database.faults
        name = sorted(faults)[int(step.number * len(faults))]
        self.kills += 1
        return f"{name}: {faults[name](step.number * len(faults) % 1)}"

    def living(self, *models: str) -> Iterator[tuple[Path, str, rundir.Status]]:
        """Starts of these models, newest first, of which the guardian or the engine lives."""
        for folder in reversed(rundir.run_dirs(self.run_root)):
            attempt, status = rundir.read_attempt(folder), rundir.read_status(folder)
            if attempt is None or status is None or attempt["served_model_name"] not in models:
                continue
            if status.engine_alive or status.guardian_alive:
                yield folder, attempt["served_model_name"], status

    @staticmethod
    def _core(folder: Path, status: rundir.Status) -> tuple[int | None, int | None]:
        for one in procfs.processes():
            child = one.parent == status.engine_pid and not procfs.is_resource_tracker(one.pid)
            if child and procfs.working_directory(one.pid) == str(folder.resolve()):
                return one.pid, one.start_ticks
        return None, None
