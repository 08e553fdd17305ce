"""Which acts an instance offers now, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

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
MOVE = Action("move", "Move", icon="arrows-move-horizontal")
START_AGAIN = Action("restart", "Restart", dialog=False, icon="refresh")


def actions_for(instance: Instance, role: str | None) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """The acts to show as buttons and those behind *more*; none for viewers."""
    if not role_at_least(role, "operator"):
        return (), ()
    state = instance.state
    if state in (S.PENDING, S.SCHEDULED, S.STARTING):
        return (CANCEL,), (LIMIT,)
    if state == S.READY:
        sleep = (SLEEP,) if instance.model.enable_sleep_mode else ()
        return (LIMIT, TRIM, *sleep, STOP), (MOVE, RESTART)
    if state == S.SLEEPING:
        return (WAKE, STOP), (LIMIT, MOVE, RESTART)
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


def render(pk: int, key: str, label: str, main: Sequence[Action], more: Sequence[Action]) -> SafeString:
    """The buttons of one row. ``app.js`` makes ``data-dialog`` and ``data-act`` quick; both work without it."""
    if not main and not more:
        return mark_safe("")
    text = _skeleton(tuple(main), tuple(more))
    return mark_safe(text.replace("[pk]", str(pk)).replace("[key]", key).replace("[label]", escape(label)))  # noqa: S308


@lru_cache(maxsize=64)
def _skeleton(main: tuple[Action, ...], more: tuple[Action, ...]) -> str:
    """There are few sets of buttons and many rows: the markup of each set is put together once."""
    hidden = '<span class="visually-hidden"> [label]</span>'
    out = ['<div class="btn-list nowrap">']
    for action in main:
        identity = f'class="btn btn-xs" id="a-[key]-{action.verb}"'
        out.append(_control(action, identity, f"{action.label}{hidden}"))
    if more:
        out.append(
            '<details class="menu" id="m-[key]"><summary class="btn btn-xs" aria-label="More for [label]">'
            '<i class="ti ti-dots" aria-hidden="true"></i></summary><div class="menu-body">'
        )
        for action in more:
            words = f'<i class="ti ti-{action.icon}" aria-hidden="true"></i>{action.label}'
            out.append(_control(action, 'class="item"', words))
        out.append(
            '<a class="item" href="/instances/[pk]/"><i class="ti ti-file-text" aria-hidden="true"></i>'
            "Log and history</a>"
            "</div></details>"
        )
    out.append("</div>")
    return "".join(out)


def _control(action: Action, attributes: str, words: str) -> str:
    address = f"/instances/[pk]/{action.verb}/"
    if action.dialog:
        return f'<a {attributes} href="{address}" data-dialog>{words}</a>'
    return f'<button {attributes} formaction="{address}" data-act>{words}</button>'
