"""The limit with which an instance starts beside others.

vLLM sizes its pool as if the card were empty: two neighbours would each believe that they own most of it until somebody
sets a limit. Where the controller rules a card, a newcomer gets what nobody else holds, at least what it needs to make
progress, before it serves; the controller raises it from there. A sleeper that wakes comes into a card that others have
divided meanwhile, and is given its share in the same way: the limit from before its sleep would promise bytes twice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from gpus_app.models import Gpu, GpuPolicy
from gpus_app.policies.base import GIB
from gpus_app.policies.fit import Need
from models_app.errors import SardeenzError
from models_app.models import Instance
from models_app.services.memory import placement
from models_app.services.memory.cards import cards
from models_app.services.memory.kvcache import limit_write
from models_app.states import InstanceState

log = logging.getLogger(__name__)

#: First limit where a model's floor is not known before its engine tells: raised or lowered at the next look.
UNKNOWN_NEED_BYTES = 2 * GIB
_TO_COME = frozenset({InstanceState.SCHEDULED, InstanceState.STARTING})


def first_share(row: Instance, uuids: Sequence[str], need: Need) -> int | None:
    """Bytes per GPU of the first limit; None when it is alone on its cards, or nobody divides them.

    Beside one who starts at the same time it is just the need: what that one will hold is not known before it serves.
    """
    if not row.model.kvcached:
        return None
    rooms = []
    for card in cards(uuids).values():
        others = [one for one in card.rows if one.id != row.pk]
        elastic = [card.instances[one.id] for one in others if card.instances[one.id].model.kvcached]
        if card.policy.rebalance != GpuPolicy.Rebalance.ON or not elastic:
            continue
        if any(one.state in _TO_COME and not one.limit_bytes for one in elastic):
            rooms.append(0)
            continue
        view = card.view
        claimed = sum(one.held_bytes for one in others)
        rooms.append(view.total_bytes - view.kept_bytes - view.foreign_bytes - claimed - need.baseline_bytes)
    return max(min(rooms), need.kv_bytes or UNKNOWN_NEED_BYTES) if rooms else None


def wake_share(row: Instance) -> int | None:
    """The same for a sleeper about to wake, by what its model needs on its own cards; None: its limit stays."""
    if not row.limit_automatic:
        return None
    gpus = list(Gpu.objects.filter(uuid__in=row.gpu_uuids))
    needs = [placement.need_on(row.model, gpu_name=gpu.name, gpu_total_bytes=gpu.total_bytes) for gpu in gpus]
    if not needs:
        return None
    need = max(needs, key=lambda need: need.total_bytes)
    told = max(row.safety_floor_bytes or 0, row.hard_minimum_bytes or 0)
    return first_share(row, row.gpu_uuids, replace(need, kv_bytes=max(need.kv_bytes, told)))


def wake_share_write(row: Instance) -> bool:
    """Write a sleeper's share as its wanted limit, to be told before it is woken. False: nothing to tell."""
    share = wake_share(row)
    if share is None or share == row.limit_bytes:
        return False
    reason = "Its share of a card that others have divided since it fell asleep."
    try:
        limit_write(row, share, actor="controller", reclaim="wait", reason=reason, automatic=None)
    except SardeenzError as exc:
        log.info("%s wakes with its earlier limit: %s", row, exc.message)
        return False
    return True
