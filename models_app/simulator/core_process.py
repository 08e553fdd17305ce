"""The EngineCore process: it holds the simulated GPU memory and the segment, and takes the scheduler's steps.

One thread, one ``poll`` loop, standard library only. It sleeps while there is nothing to do, except for kvcached's look
at the segment every 100 ms. A step's outputs are sent when its time is over; utility calls are answered between steps.

When the API server dies this process lives on with its memory, as the real one does (measured: 40 s and longer). So
that nobody's machine collects such orphans for ever, it ends by itself after ``SARDEENZ_SIM_ORPHAN_S`` (15 minutes).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from models_app.simulator import logs, processes
from models_app.simulator.cards import Cards, LedgerCards, LooseCards
from models_app.simulator.channel import CoreChannel
from models_app.simulator.config import Config
from models_app.simulator.core import EngineCore, Later
from models_app.simulator.faults import Faults
from models_app.simulator.loading import Loader, StartFailed
from models_app.simulator.pages import EngineFatal
from models_app.simulator.scheduler import Step

TITLE = "VLLM::EngineCore"
#: kvcached's watcher: how often the segment is looked at.
WATCH_S = 0.1
#: Steps shorter than this are taken several at a time, so that a fast model doesn't wake the machine a thousand times.
MIN_BATCH_S = 0.005
#: A step that could schedule nothing is tried again after this long, or as soon as anything happens.
STARVED_S = 0.05
USAGE_PERIOD_S = 1.0


class Terminated(BaseException):
    """SIGTERM or SIGINT reached EngineCore itself."""


class EngineCoreProc(EngineCore):
    """EngineCore with its loop."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._started = time.monotonic()
        self._next_watch = self._started
        self._step: Step | None = None
        self._step_ends = 0.0
        self._starved_until = 0.0
        self._starved_stats: dict[str, Any] = {}
        self._busy_s = 0.0
        self._usage_since = self._started
        self._usage_shown = 0.0
        self._orphaned_at: float | None = None
        self._calls: list[dict[str, Any]] = []
        self._deferred: list[tuple[int, Callable[[], bool], Callable[[], Any]]] = []

    def run_busy_loop(self) -> None:
        """Serve until a signal ends it, or the fault that kills it."""
        self.channel.send({"k": "ready", "num_blocks": self.num_blocks, "faults": self.faults.active()})
        poll = select.poll()
        poll.register(self.channel.socket, select.POLLIN)
        while True:
            now = time.monotonic()
            self._look_around(now)
            if self._step and now >= self._step_ends:
                self._end_step()
            if not self._step:
                self._answer_calls()
                self._begin_step(now)
            if self.channel.closed:
                self._be_orphan(poll)
            else:
                poll.modify(self.channel.socket, select.POLLIN | (select.POLLOUT if self.channel.wants_to_write else 0))
            poll.poll(max(0.0, self._next_event() - time.monotonic()) * 1000)
            if not self.channel.closed:
                self.channel.flush()
                self._read()

    def _next_event(self) -> float:
        times = [self._next_watch]
        if self._step:
            times.append(self._step_ends)
        elif self.scheduler.has_work() and not self._hangs():
            times.append(self._starved_until)
        return min(times)

    def _hangs(self) -> bool:
        return "hang" in self.faults

    def _read(self) -> None:
        for message in self.channel.receive():
            kind = message["k"]
            self._starved_until = 0.0
            if kind == "add":
                self.add(message)
            elif kind == "abort":
                # At once, not between steps: a client that left must not cost another step.
                self.abort(message["ids"])
            else:
                self._calls.append(message)

    def _be_orphan(self, poll: select.poll) -> None:
        now = time.monotonic()
        if self._orphaned_at is None:
            self._orphaned_at = now
            poll.unregister(self.channel.socket)
        elif now - self._orphaned_at > self.config.orphan_s:
            raise Terminated

    # -- steps ---------------------------------------------------------------------------------------------------

    def _begin_step(self, now: float) -> None:
        if now < self._starved_until or self._hangs() or not self.scheduler.has_work():
            return
        batch = Step()
        seconds = 0.0
        while seconds < MIN_BATCH_S and self.scheduler.has_work():
            step = self.scheduler.step()
            self.release_retired()
            if not step.duration_s:
                break
            seconds += step.duration_s / self.config.speed
            for ident, count in step.tokens.items():
                batch.tokens[ident] = batch.tokens.get(ident, 0) + count
            batch.finished += step.finished
            if step.finished:
                break
        if self.pool:
            self.pool.page_allocator.preallocate()
        if not seconds:
            self._starved_until = now + STARVED_S
            stats = self.stats()
            if stats != self._starved_stats:
                self._starved_stats = stats
                self.channel.send({"k": "out", "tokens": {}, "stats": stats})
            return
        self._busy_s += seconds
        self._step = batch
        self._step_ends = now + seconds

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step:
            queued, self.scheduler.queued_s = self.scheduler.queued_s, []
            message = {"k": "out", "tokens": step.tokens, "stats": self.stats()}
            self.channel.send({**message, "queued_s": [round(each, 4) for each in queued]} if queued else message)

    # -- calls ---------------------------------------------------------------------------------------------------

    def _answer_calls(self) -> None:
        if self._hangs():
            return
        calls, self._calls = self._calls, []
        for call in calls:
            self._starved_until = 0.0
            self._answer(call["n"], partial(self._invoke, call["method"], call["args"]))
        waiting, self._deferred = self._deferred, []
        for number, ready, finish in waiting:
            if ready():
                self._answer(number, finish)
            else:
                self._deferred.append((number, ready, finish))

    def _invoke(self, method: str, arguments: list[Any]) -> Any:
        return getattr(self, method)(*arguments)

    def _answer(self, number: int, run: Callable[[], Any]) -> None:
        try:
            result = run()
        except EngineFatal:
            raise
        except Exception as error:
            self.log.bad("core.py:1288", f"Invocation of utility method failed: {error!r}")
            reply = {"k": "result", "n": number, "error": f"{type(error).__name__}: {error}"}
        else:
            if isinstance(result, Later):
                self._deferred.append((number, result.ready, result.finish))
                return
            reply = {"k": "result", "n": number, "value": result}
        self.channel.send({**reply, "stats": self.stats()})

    # -- what happens by the clock -------------------------------------------------------------------------------

    def _look_around(self, now: float) -> None:
        if now < self._next_watch:
            return
        self._next_watch = now + WATCH_S
        if self.faults.refresh():
            self.channel.send({"k": "faults", "faults": self.faults.active()})
            if self.pool:
                self.pool.options.overshoot_crashes = "overshoot" in self.faults
        if "die_after" in self.faults and now - self._started >= self.faults.number("die_after", 0.0):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.pool:
            self.pool.page_allocator.watch()
            if not self._step:
                self.release_retired()
                self.pool.page_allocator.preallocate()
        if now - self._usage_since >= USAGE_PERIOD_S:
            self._show_usage(now)

    def _show_usage(self, now: float) -> None:
        """Utilisation of the cards: how much of the time a step ran, and how full the batches were."""
        share = min(1.0, self._busy_s / (now - self._usage_since))
        batch = min(1.0, len(self.scheduler.running) / 32)
        percent = 100 * share * (0.6 + 0.4 * batch)
        self._busy_s, self._usage_since = 0.0, now
        if isinstance(self.cards, LedgerCards) and abs(percent - self._usage_shown) >= 1:
            self._usage_shown = percent
            self.cards.busy(percent)


def run(config: Config, connection: socket.socket) -> int:
    """The whole life of the child process. Returns its exit code."""
    log = logs.Log("EngineCore")
    processes.set_title(TITLE)
    faults = config.open_faults()
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, _terminate)
    channel = CoreChannel(connection)
    cards: Cards = LedgerCards(config.sim_dir, config.gpu_uuids) if config.sim_dir else LooseCards(config.gpu_bytes)
    loader = Loader(config, log, faults, cards)
    try:
        engine_class = _prepare_addon(config, log, faults)
        engine_class(config, channel, log, faults, loader.run()).run_busy_loop()
    except StartFailed:
        return 1
    except Terminated:
        log.say("core.py:1342", "[shutdown] EngineCore: trigger received signal=SIGTERM")
        log.say("core.py:1524", "[shutdown] EngineCore: request processing complete; starting resource teardown")
        log.say("core.py:1355", "[shutdown] EngineCore: exiting busy loop")
        return 0
    except EngineFatal as error:
        log.bad("core.py:1299", "EngineCore encountered a fatal error.")
        log.traceback(
            "core.py:1299", ['  File "vllm/v1/core/block_pool.py", line 320, in get_new_blocks'], f"IndexError: {error}"
        )
        return 1
    finally:
        loader.elastic.close()
        if loader.segment and "leak_segment" not in faults:
            loader.segment.unlink()
        if isinstance(cards, LedgerCards):
            with contextlib.suppress(OSError):
                cards.ledger.release()
    return 0


def _terminate(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise Terminated


def _prepare_addon(config: Config, log: logs.Log, faults: Faults) -> type[EngineCoreProc]:
    """The class to run: with the add-on's engine half on it, unless a fault leaves that out."""
    if {"stock", "no_addon", "pr324"} & set(faults.names()):
        return EngineCoreProc
    from models_app.simulator.pretend import install_addon

    install_addon(config.vllm_version, config.kvcached_version if config.kvcached else "", log)
    return EngineCoreProc
