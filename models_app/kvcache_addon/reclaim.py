"""Memory back from a busy engine at once: preempt (recompute later) or abort running requests, youngest first, no
more than needed. On EngineCore's thread, between two steps.

Preempting one request is private to vLLM's scheduler and differs by version, so it is done only where the source was
read (``PARTIAL_VERSIONS``); elsewhere vLLM's public ``reset_prefix_cache(reset_running_requests=True)`` preempts all
of them.

Before anything is taken the batches under way are finished, with the scheduler paused so that no new ones start. Then
no request has output in flight: nothing has to be discarded (0.24 counts discarded frames by hand and is wrong about
it with speculative tokens), no worker writes to a page that is about to go, and the answer of every preempted request
goes on where it stood. vLLM's own pause with ``keep`` rests on the same steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from models_app.kvcache_addon.versions import major_minor, vllm_version
from models_app.kvcache_addon.wire import Refused

log = logging.getLogger("vllm.sardeenz")

#: vLLM versions whose scheduler was read line by line: 0.19.1, 0.24.0, 0.30.0.
PARTIAL_VERSIONS = frozenset({(0, 19), (0, 24), (0, 30)})
#: A request preempted this often without one new token in between is left alone while others can be taken.
MAX_FRUITLESS = 3


class Reclaimer:
    """Takes memory from running requests, and keeps count of what it cost them."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.partial = major_minor(vllm_version()) in PARTIAL_VERSIONS and hasattr(engine.scheduler, "_preempt_request")
        #: Preemptions of a request since its last new token: id -> (count, output tokens then).
        self._fruitless: dict[str, tuple[int, int]] = {}
        #: Preempted requests that have not produced a token since: id -> (when, output tokens then).
        self._open: dict[str, tuple[float, int]] = {}
        self.last: dict[str, Any] | None = None
        self._longest_s = 0.0

    def reclaim(self, how: str, more: Callable[[], bool], settle: Callable[[], Any]) -> dict[str, Any]:
        """Take running requests, youngest first, while ``more()`` says that memory is still wanting.

        ``how``: "preempt" or "abort". ``settle()`` is called after each one and drops the prefix cache it leaves
        behind. Answers ``{"requests", "tokens", "pause_s", "warnings"}``; ``pause_s`` is None until the requests go
        on (``self.last`` has it then). Never raises for lack of candidates: what is missing comes back as requests
        end.
        """
        warnings: list[str] = []
        taken: dict[str, Any] = {"requests": 0, "tokens": 0, "pause_s": None, "warnings": warnings}
        scheduler = self.engine.scheduler
        if how == "preempt" and getattr(scheduler, "connector", None) is not None:
            warnings.append("requests of an engine with a KV connector are not preempted: waiting for them to end")
            return taken
        if not self.drain():
            warnings.append("the batches under way could not be finished first: waiting for requests to end")
            return taken
        settle()
        if how == "preempt" and not self.partial and more():
            self._preempt_all(taken)
            settle()
        while more():
            request = self._youngest(self.candidates(), spare=how == "preempt")
            if request is None:
                if how == "preempt" and self.candidates():
                    warnings.append("some requests were preempted several times in a row and are left to go on")
                break
            taken["requests"] += 1
            taken["tokens"] += int(request.num_computed_tokens)
            if how == "preempt":
                self._preempt(request)
            else:
                self.abort([request.request_id])
            settle()
        if how == "preempt" and taken["requests"]:
            self._watch()
        self._record(how, taken)
        return taken

    def preempt_count(self, count: int) -> dict[str, Any]:
        """Preempt so many of the youngest; what the self-test asks for on an engine without kvcached."""
        start = len(self.candidates())
        return self.reclaim("preempt", lambda: start - len(self.candidates()) < count, lambda: None)

    def candidates(self) -> list[Any]:
        return [request for request in self.engine.scheduler.running if request.status.name == "RUNNING"]

    def abort(self, request_ids: list[str]) -> list[str]:
        """End requests for good: their clients get what there is, with ``finish_reason`` "abort"."""
        from vllm.v1.request import RequestStatus

        ended = self.engine.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        send = getattr(self.engine, "_send_abort_outputs", None)
        if ended and callable(send):
            send(ended)
        return [each[0] if isinstance(each, tuple) else each.request_id for each in ended or ()]

    def drain(self) -> bool:
        """Finish the batches under way without starting new ones. False where that cannot be done (data parallelism:
        the ranks step together)."""
        engine, scheduler = self.engine, self.engine.scheduler
        if not getattr(engine, "batch_queue", None):
            return True
        if hasattr(engine, "dp_group") or not hasattr(engine, "_process_engine_step"):
            return False
        before = scheduler.pause_state
        scheduler.set_pause_state(type(before).PAUSED_ALL)
        try:
            for _ in range(2 * int(engine.batch_queue_size) + 2):
                if not engine.batch_queue:
                    break
                engine._process_engine_step()
        except Exception as exc:
            # A failed step must end the engine as it would have outside of this call, which only reports exceptions.
            engine.step_fn = _raiser(exc)
            raise Refused(500, "step_failed", f"the step under way failed: {exc}") from exc
        finally:
            scheduler.set_pause_state(before)
        return not engine.batch_queue

    # --- one request ---------------------------------------------------------------------------------------------

    def _youngest(self, candidates: list[Any], *, spare: bool) -> Any | None:
        """The one that vLLM itself would take first: lowest priority, then the latest arrival."""
        if spare:
            candidates = [request for request in candidates if self._fruitless_count(request) < MAX_FRUITLESS]
        return max(candidates, key=lambda request: (request.priority, request.arrival_time), default=None)

    def _fruitless_count(self, request: Any) -> int:
        count, tokens = self._fruitless.get(request.request_id, (0, -1))
        return count if request.num_output_tokens <= tokens else 0

    def _preempt(self, request: Any) -> None:
        scheduler = self.engine.scheduler
        self._note(request)
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        # It may be resumed in the very next step; the workers must then take it for one they had not seen in the last.
        getattr(scheduler, "prev_step_scheduled_req_ids", set()).discard(request.request_id)

    def _preempt_all(self, taken: dict[str, Any]) -> None:
        for request in self.candidates():
            self._note(request)
            taken["requests"] += 1
            taken["tokens"] += int(request.num_computed_tokens)
        self.engine.reset_prefix_cache(reset_running_requests=True)

    def _note(self, request: Any) -> None:
        tokens = int(request.num_output_tokens)
        self._fruitless[request.request_id] = (self._fruitless_count(request) + 1, tokens)
        self._open.setdefault(request.request_id, (time.monotonic(), tokens))

    # --- what it cost --------------------------------------------------------------------------------------------

    def _record(self, how: str, taken: dict[str, Any]) -> None:
        if not taken["requests"]:
            return
        self._longest_s = 0.0
        self.last = {
            "how": how,
            "requests": taken["requests"],
            "tokens": taken["tokens"],
            "pause_s": None,
            "open": len(self._open),
            "at": time.time(),
        }

    def _watch(self) -> None:
        """Look at every step's output until each preempted request has gone on, then look no more."""
        scheduler = self.engine.scheduler
        if "update_from_output" in scheduler.__dict__:
            return
        original = scheduler.update_from_output

        def update_from_output(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.look()
            if not self._open:
                scheduler.__dict__.pop("update_from_output", None)
            return result

        scheduler.update_from_output = update_from_output

    def look(self) -> None:
        """Close the pauses of requests that have a new token, or are gone."""
        now = time.monotonic()
        requests = self.engine.scheduler.requests
        for request_id, (since, tokens) in list(self._open.items()):
            request = requests.get(request_id)
            if request is not None and request.num_output_tokens <= tokens:
                continue
            del self._open[request_id]
            self._longest_s = max(self._longest_s, now - since)
        for request_id in [each for each in self._fruitless if each not in requests]:
            del self._fruitless[request_id]
        if self.last is not None and self.last["how"] == "preempt":
            self.last["open"] = len(self._open)
            oldest = min((since for since, _ in self._open.values()), default=now)
            self.last["pause_s"] = round(max(self._longest_s, now - oldest), 4)


def _raiser(error: Exception) -> Callable[[], Any]:
    def step() -> Any:
        raise error

    return step
