"""The limit with which an instance starts beside others.

vLLM sizes its pool as if the card were empty: two neighbours would each believe that they own most of it until somebody
sets a limit. Where the controller rules a card, a newcomer gets what nobody else holds, at least what it needs to make
progress, before it serves; the controller raises it from there.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpus_app.models import GpuPolicy
from gpus_app.policies.base import GIB
from gpus_app.policies.fit import Need
from models_app.models import Instance
from models_app.services.cards import cards
from models_app.states import InstanceState

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
