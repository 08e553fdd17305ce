"""Every limit of time, and the few of size, that acts end by: as they are set now, with what happens at their end."""

from __future__ import annotations

from dataclasses import dataclass

from django.conf import settings

from models_app.presentation.words import duration, size


@dataclass(frozen=True, slots=True)
class Limit:
    """``name``: the environment variable; ``value``: seconds, a number or bytes; ``text``: the same for people."""

    group: str
    name: str
    value: float
    text: str
    what: str


_START, _STOP, _SLEEP = "Launch", "Stop", "Sleep and wake"
_HEALTH, _RESTART, _HOSTS, _KEPT = "Health", "Restart", "Hosts and operations", "Kept"

#: The settings are named as their environment variables are, without the prefix; this one is not.
_ATTRIBUTES = {"SARDEENZ_HEARTBEAT_LIMIT_S": "HOST_HEARTBEAT_LIMIT_S"}

#: group, environment variable, what happens at its end.
_TABLE: tuple[tuple[str, str, str], ...] = (
    (_START, "SARDEENZ_PLACE_LIMIT_S", "A launch that finds no room until then fails."),
    (_START, "SARDEENZ_RESIDENCE_S", "Who is ready for less is no victim for a newcomer."),
    (_START, "SARDEENZ_START_GRACE_S", "A start without a process until then has failed."),
    (_START, "SARDEENZ_START_LIMIT_S", "An engine that is not ready until then is ended: failed."),
    (_START, "SARDEENZ_DOWNLOAD_LIMIT_S", "A download that is not through until then has failed."),
    (_STOP, "SARDEENZ_ROUTE_GRACE_S", "After it no router sends requests any more."),
    (_STOP, "SARDEENZ_DRAIN_LIMIT_S", "Requests that run then are cut by a stop; a sleep is given up."),
    (_STOP, "SARDEENZ_STOP_LIMIT_S", "An engine that has not ended then is killed."),
    (_STOP, "SARDEENZ_KILL_LIMIT_S", "A killed process that is there then: the stop has failed."),
    (_STOP, "SARDEENZ_MEMORY_BACK_LIMIT_S", "Memory that is not back then is told in the event."),
    (_SLEEP, "SARDEENZ_WAKE_CALL_LIMIT_S", "An engine that does not answer the call stays as it is."),
    (_SLEEP, "SARDEENZ_WAKE_LIMIT_S", "A wake that is not through then has failed: still asleep."),
    (_SLEEP, "SARDEENZ_CONTROL_CALL_LIMIT_S", "A limit or trim not answered then is asked again."),
    (_HEALTH, "SARDEENZ_HUNG_AFTER_S", "An engine that moves nothing for so long is probed."),
    (_HEALTH, "SARDEENZ_PROBE_EVERY_S", "An idle engine proves so often that it lives; 0 is never."),
    (_HEALTH, "SARDEENZ_PROBE_LIMIT_S", "An engine that gives no token until then hangs."),
    (_RESTART, "SARDEENZ_RESTART_LIMIT", "Failed more often in a row: a crash loop, not started again."),
    (_RESTART, "SARDEENZ_RESTART_BACKOFF_S", "Wait before the first restart; it doubles each time."),
    (_RESTART, "SARDEENZ_RESTART_BACKOFF_MAX_S", "The longest wait before a restart."),
    (_RESTART, "SARDEENZ_RESTART_JITTER", "Waits are spread by up to this share."),
    (_RESTART, "SARDEENZ_RESTART_RESET_S", "After so long a life the count begins again."),
    (_HOSTS, "SARDEENZ_HEARTBEAT_LIMIT_S", "A host silent for longer is away: no routes to it."),
    (_HOSTS, "SARDEENZ_HOST_BACK_AFTER_S", "Its instances stay out of the routes at least so long."),
    (_HOSTS, "SARDEENZ_HOST_LOST_S", "Away for longer: its instances start elsewhere; 0 is never."),
    (_HOSTS, "SARDEENZ_OPERATION_LIMIT_S", "A move, edit, preset or drain still open then has failed."),
    (_HOSTS, "SARDEENZ_CAPTURE_MAX_S", "A capture of requests ends at the latest after it."),
    (_HOSTS, "SARDEENZ_SLEEP_RAM_BYTES", "A sleep of level 1 beyond it is refused; 0 is half a host."),
    (_KEPT, "SARDEENZ_RUNS_KEEP_S", "Log and record of an ended start are removed then."),
    (_KEPT, "SARDEENZ_EVENTS_KEEP_S", "An instance's older history is removed."),
    (_KEPT, "SARDEENZ_LOG_DOWNLOAD_BYTES", "Of a longer log the newest part is given."),
)


def limits() -> list[Limit]:
    rows = [(group, name, _value(name), what) for group, name, what in _TABLE]
    return [Limit(group, name, float(value), _text(name, value), what) for group, name, value, what in rows]


def _value(name: str) -> float:
    value: float = getattr(settings, _ATTRIBUTES.get(name) or name.removeprefix("SARDEENZ_"))
    return value


def _text(name: str, value: float) -> str:
    if name.endswith("_S"):
        return f"{value:g} s" if value < 120 else f"{value:.0f} s ({duration(value)})"
    return size(int(value)) if name.endswith("_BYTES") and value else f"{value:g}"
