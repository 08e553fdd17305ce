"""What becomes of instances on a card that is out of order: moved once, or ended with the reason and placed anew.

The card itself was closed when its fault was seen (``gpus_app.services.gpus_sync``), so nothing is placed on it again:
there is no restart loop, what fits nowhere else waits and says for what. Only *fatal* faults count. A card of which
the driver tells nothing takes nobody new, and what runs on it is left alone: it may serve on.
"""

from __future__ import annotations

import logging

from gpus_app.models import Gpu, Host
from gpus_app.probes.grades import Grade
from models_app import transitions
from models_app.engines.causes import Cause
from models_app.errors import Conflict, DoesNotFit
from models_app.models import Instance, Model, Operation
from models_app.services.lifecycle import host_loss
from models_app.services.lifecycle.ending import instance_fail
from models_app.services.lifecycle.requeue import place_again
from models_app.services.lifecycle.restart_policy import GPU_FAULT
from models_app.services.plans.operations import OPEN
from models_app.services.plans.rollout import REPLACE, REPLACEABLE, instance_leave
from models_app.states import DesiredState, InstanceState

log = logging.getLogger(__name__)
S = InstanceState
ACTOR = "GPU fault"
EVENT = "gpu_fault"
_AFFECTED = REPLACEABLE | {S.SCHEDULED, S.STARTING}


def gpu_faults_check() -> None:
    """Look at every instance on a card with a fatal fault; not at those on hosts that are silent, nor in a freeze."""
    faulty = Gpu.objects.filter(grade=Grade.FATAL).exclude(state=Gpu.State.OK).select_related("host")
    cards = {gpu.uuid: gpu for gpu in faulty if gpu.host.reachable}
    if not cards or host_loss.is_frozen(Host.objects.all()):
        return
    rows = Instance.objects.filter(host__in={gpu.host_id for gpu in cards.values()}, state__in=_AFFECTED)
    rows = rows.exclude(desired_state=DesiredState.STOPPED).select_related("model__host", "host", "attempt__host")
    for row in rows:
        gpu = next((cards[uuid] for uuid in row.gpu_uuids if uuid in cards), None)
        if gpu is not None:
            _off(row, gpu)


def _off(row: Instance, gpu: Gpu) -> None:
    sentence = f"GPU {gpu.index} of {gpu.host.name} is out of order: {gpu.state_reason}"
    if row.state == S.SCHEDULED:
        place_again(row, reason=f"{sentence} It is placed again.", actor=ACTOR)
        return
    if Operation.objects.filter(kind=REPLACE, model=row.model, state__in=OPEN).exists():
        return  # it is being moved, or its model renewed: looked at again afterwards
    movable = row.state in REPLACEABLE and row.model.restart_policy != Model.RestartPolicy.NEVER
    if movable and not _tried(row, gpu) and _moved(row, gpu, sentence):
        return
    instance_fail(row, Cause(GPU_FAULT, sentence, "", ""))


def _tried(row: Instance, gpu: Gpu) -> bool:
    """Whether this fault has moved it already: a move that came to nothing is not begun again and again."""
    since = gpu.state_since.isoformat()
    return row.events.filter(kind=EVENT, facts__gpu=gpu.uuid, facts__since=since).exists()


def _moved(row: Instance, gpu: Gpu, sentence: str) -> bool:
    facts = {"gpu": gpu.uuid, "since": gpu.state_since.isoformat()}
    try:
        operation = instance_leave(row, actor=ACTOR, why=f"GPU {gpu.index} of {gpu.host.name} is out of order")
    except (DoesNotFit, Conflict) as exc:
        transitions.note(row.pk, EVENT, f"{sentence} {exc.message}", actor=ACTOR, facts=facts)
        return False
    facts["operation"] = str(operation.pk)
    transitions.note(row.pk, EVENT, f"{sentence} It moves to another GPU.", actor=ACTOR, facts=facts)
    return True
