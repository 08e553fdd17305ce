"""Which acts an instance offers now, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models_app.models import Instance
from models_app.permissions import role_at_least
from models_app.states import LIVE, InstanceState

S = InstanceState


@dataclass(frozen=True, slots=True)
class Action:
    """A button of an instance. ``dialog``: it opens a page that asks; otherwise it acts at once by POST."""

    verb: str
    label: str
    dialog: bool = True
    icon: str = ""


LIMIT = Action("limit", "Limit", icon="ruler-measure")
TRIM = Action("trim", "Trim", dialog=False, icon="scissors")
SLEEP = Action("sleep", "Sleep", icon="moon")
WAKE = Action("wake", "Wake", dialog=False, icon="sun")
STOP = Action("stop", "Stop", icon="player-stop")
CANCEL = Action("stop", "Cancel", icon="x")
RESTART = Action("restart", "Restart", icon="refresh")
START_AGAIN = Action("restart", "Restart", dialog=False, icon="refresh")


def actions_for(instance: Instance, role: str | None) -> tuple[Sequence[Action], Sequence[Action]]:
    """The acts to show as buttons and those behind *more*; none for viewers."""
    if not role_at_least(role, "operator"):
        return (), ()
    state = instance.state
    if state in (S.PENDING, S.SCHEDULED, S.STARTING):
        return (CANCEL,), (LIMIT,)
    if state == S.READY:
        sleep = (SLEEP,) if instance.model.enable_sleep_mode else ()
        return (LIMIT, TRIM, *sleep, STOP), (RESTART,)
    if state == S.SLEEPING:
        return (WAKE, STOP), (LIMIT, RESTART)
    if state in (S.UNREACHABLE, S.DRAINING):
        return (STOP,), (LIMIT, RESTART)
    if state == S.STOPPING:
        return (), (STOP,)
    return (START_AGAIN,), ()


def allowed(instance: Instance, verb: str) -> bool:
    """Whether the state lets this act begin (the services decide again)."""
    if verb == "restart":
        return True
    if verb == "stop":
        return instance.state in LIVE or instance.state == S.FAILED
    return any(action.verb == verb for group in actions_for(instance, "operator") for action in group)
