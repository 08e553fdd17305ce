"""Faults that the driver reports of a GPU (XID errors), waited for without waiting.

How bad each is stands in ``grades``. Most XIDs are the fault of a program and say nothing of the card.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from gpus_app.probes.grades import Grade, grade_of, sentence_of

log = logging.getLogger(__name__)

#: How long an XID that passes is shown.
PASSING_S = 60.0
#: Events are taken from the queue without waiting, at most so many a poll.
MOST_EVENTS = 32


class XidWatch:
    """Collects XID events of the cards that it was told to watch. Where NVML has no events it is silent."""

    def __init__(self, nvml: Any, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._clock = clock
        self._set: Any = None
        self._watched: dict[str, Any] = {}
        self._faults: dict[str, tuple[int, float]] = {}

    def watch(self, uuid: str, handle: Any) -> None:
        """Ask for the events of a card, by a handle that is new."""
        self._watched[uuid] = handle
        nvml = self._nvml
        try:
            if self._set is None:
                self._set = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)
        except nvml.NVMLError as exc:
            log.info("no XID events from %s: %s", uuid, exc)

    def forget(self, uuid: str) -> None:
        """The card left the driver's list and came back: it was reset."""
        self._faults.pop(uuid, None)

    def poll(self) -> None:
        """Take what is there."""
        if self._set is None:
            return
        nvml = self._nvml
        for _ in range(MOST_EVENTS):
            try:
                event = nvml.nvmlEventSetWait_v2(self._set, 0)
            except nvml.NVMLError:  # a time limit of 0 that passed, or events that this driver does not have
                return
            xid = int(event.eventData)
            uuid = self._uuid_of(event.device)
            if uuid is None:
                continue
            log.warning("XID %d on %s", xid, uuid)
            known = grade_of(self._faults[uuid][0]) if uuid in self._faults else Grade.NONE
            if grade_of(xid) is Grade.FATAL or (grade_of(xid) is Grade.PASSING and known is not Grade.FATAL):
                self._faults[uuid] = (xid, self._clock())

    def fault(self, uuid: str) -> tuple[str, Grade] | None:
        """Sentence and grade for a card with an XID; None when there is none, or not any more."""
        if uuid not in self._faults:
            return None
        xid, at = self._faults[uuid]
        grade = grade_of(xid)
        if grade is not Grade.FATAL and self._clock() - at > PASSING_S:
            del self._faults[uuid]
            return None
        return sentence_of(xid), grade

    def close(self) -> None:
        """Give the event set back; faults are remembered, handles are not."""
        if self._set is not None:
            try:
                self._nvml.nvmlEventSetFree(self._set)
            except self._nvml.NVMLError as exc:
                log.debug("event set not freed: %s", exc)
        self._set = None
        self._watched = {}

    def _uuid_of(self, device: Any) -> str | None:
        try:
            uuid = self._nvml.nvmlDeviceGetUUID(device)
        except self._nvml.NVMLError:
            return next((known for known, handle in self._watched.items() if handle == device), None)
        return uuid.decode() if isinstance(uuid, bytes) else str(uuid)
