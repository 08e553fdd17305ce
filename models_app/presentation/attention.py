"""What needs an operator first, as lines: worst on top, each with since when, why and where to go."""

from __future__ import annotations

from datetime import timedelta

from django.utils import timezone

from gpus_app.models import Gpu, Host
from models_app.models import Instance, Operation
from models_app.presentation import words
from models_app.presentation.board import Board, Row
from models_app.presentation.item import Item
from models_app.presentation.memory_alerts import memory_items
from models_app.services.lifecycle.host_loss import freeze_sentence
from models_app.states import InstanceState, LimitStatus

#: A limit that waits for requests to finish is normal for this long.
DEFERRED_IS_NEWS_AFTER = timedelta(seconds=10)
#: A host with a smaller share of its memory free is about to kill something.
RAM_LOW = 0.05
#: A container has 64 MiB of /dev/shm by default: segments fill it slowly, the queues of tensor parallel engines fast.
SHM_LOW_BYTES = 32 * 1024**2


def attention(board: Board, *, may_operate: bool) -> list[Item]:
    """Failures, then starved and stuck instances, hosts and GPUs that are away or full, then what only waits."""
    found: list[Item] = []
    if frozen := freeze_sentence([host.host for host in board.hosts]):
        found.append(Item(0, "bad", "server-off", "Most hosts are away: nothing is decided", frozen, "/gpus/"))
    for host in board.hosts:
        if not host.reachable:
            found.append(
                Item(
                    1,
                    "bad",
                    "server-off",
                    f"Host {host.host.name} is away",
                    "Neither its worker nor its sampler was heard lately. Its engines may serve on.",
                    f"/gpus/#host-{host.host.pk}",
                    host.host.worker_seen_at or host.host.sampler_seen_at,
                )
            )
        elif _ram_low(host.host):
            free, total = words.gib(host.host.available_ram_bytes), words.gib(host.host.total_ram_bytes)
            kept = words.gib(host.sleep_ram.held_bytes if host.sleep_ram else 0)
            found.append(
                Item(
                    2,
                    "warn",
                    "gauge",
                    f"The memory of host {host.host.name} is nearly full",
                    f"{free} of {total} GiB free; sleepers keep {kept} GiB. Wake or stop a sleeper, or use level 2.",
                    f"/gpus/#host-{host.host.pk}",
                )
            )
        elif _shm_low(host.host):
            free, total = words.size(host.host.available_shm_bytes), words.size(host.host.total_shm_bytes)
            found.append(
                Item(
                    2,
                    "warn",
                    "gauge",
                    f"Shared memory of host {host.host.name} is nearly full",
                    f"{free} of {total} of its /dev/shm are free. An engine that finds no room there does not start or "
                    "dies of a bus error: remove what no longer serves, or make it larger (--shm-size of a container).",
                    f"/gpus/#host-{host.host.pk}",
                )
            )
        elif host.stale:
            found.append(
                Item(
                    3,
                    "warn",
                    "clock-exclamation",
                    f"No fresh readings from {host.host.name}",
                    "Its sampler is silent: memory figures are old.",
                    f"/gpus/#host-{host.host.pk}",
                    host.read_at,
                )
            )
        for left in host.leftovers:
            orphan, name = left.orphan, left.title
            found.append(
                Item(
                    2,
                    "warn",
                    "ghost-2",
                    f"Leftover processes of {name} on {host.host.name}",
                    f"Start {orphan.attempt_id} belongs to no instance"
                    + (f" and holds {words.gib(left.total_bytes)} GiB." if left.total_bytes else "."),
                    f"/gpus/#host-{host.host.pk}",
                    left.since,
                )
            )
        for card in host.cards:
            gpu = card.gpu
            name = f"GPU {gpu.index} of {host.host.name}"
            if gpu.state != Gpu.State.OK:
                found.append(
                    Item(
                        1,
                        "bad",
                        "alert-triangle",
                        f"{name} is {gpu.get_state_display().lower()}",
                        gpu.state_reason,
                        f"/gpus/{gpu.pk}/",
                        gpu.state_since,
                    )
                )
            elif gpu.cordoned and gpu.cordon_reason:
                found.append(
                    Item(
                        3,
                        "warn",
                        "barrier-block",
                        f"{name} is closed by a fault",
                        f"{gpu.cordon_reason} It answers again: open it once it was reset.",
                        f"/gpus/{gpu.pk}/",
                        gpu.state_since,
                    )
                )
            elif card.bar.near_full:
                reserve = f", reserve {words.gib(card.bar.reserve_bytes)} GiB" if card.bar.reserve_bytes else ""
                found.append(
                    Item(
                        4,
                        "warn",
                        "gauge",
                        f"{name} is nearly full",
                        f"{words.gib(card.bar.free_bytes)} of {words.gib(card.bar.total_bytes)} GiB free{reserve}. "
                        "Trim, or lower a limit, before the next launch.",
                        f"/gpus/{gpu.pk}/",
                    )
                )
            if card.held and card.policy:
                found.append(
                    Item(
                        7,
                        "warn",
                        "hand-stop",
                        f"The controller is on hold for {name}",
                        f"By {card.policy.held_by}, until {card.policy.held_until:%H:%M} UTC.",
                        "/policies/",
                    )
                )
    seen: set[int] = set()
    cards = {card.gpu.pk: card for card in board.cards}
    for row in board.rows:
        if row.instance.pk not in seen:
            seen.add(row.instance.pk)
            found.extend(_of_instance(row, may_operate))
            found.extend(memory_items(row, cards.get(row.gpu.pk) if row.gpu else None, may_operate=may_operate))
    return sorted(found, key=lambda item: item.rank)


def _ram_low(host: Host) -> bool:
    return 0 < host.available_ram_bytes < host.total_ram_bytes * RAM_LOW


def _shm_low(host: Host) -> bool:
    return host.total_shm_bytes > 0 and host.available_shm_bytes < SHM_LOW_BYTES


def _of_instance(row: Row, may_operate: bool) -> list[Item]:
    i = row.instance
    href = f"/instances/{i.pk}/"
    if i.state == InstanceState.FAILED:
        acts = (("Log", f"{href}#log", False), *([("Restart", f"{href}restart/", True)] if may_operate else []))
        return [Item(0, "bad", words.FAILED.icon, f"{row.label} failed", _reason(i), href, i.state_since, acts)]
    found = []
    if words.state_word(i) is words.STUCK:
        acts = (("Restart", f"{href}restart/", True),) if may_operate else ()
        found.append(
            Item(0, "bad", words.STUCK.icon, f"{row.label} is stuck", words.why(i), href, i.last_progress_at, acts)
        )
    if i.state == InstanceState.UNREACHABLE:
        found.append(
            Item(2, "warn", words.UNREACHABLE.icon, f"{row.label} is unreachable", words.why(i), href, i.state_since)
        )
    limit_acts = (("Limit", f"{href}limit/", True),) if may_operate else ()
    if i.limit_status == LimitStatus.STARVED:
        found.append(
            Item(
                0,
                "bad",
                "alert-triangle",
                f"{row.label} is starved",
                "Requests wait and no page of KV memory can be had: raise its limit.",
                href,
                i.limit_set_at,
                limit_acts,
            )
        )
    elif i.limit_status in (LimitStatus.REJECTED, LimitStatus.CONFLICT, LimitStatus.STALE):
        found.append(
            Item(3, "warn", "ban", f"The limit of {row.label} was refused", i.limit_message, href, i.limit_set_at)
        )
    elif (
        i.limit_status == LimitStatus.DEFERRED
        and i.limit_set_at
        and timezone.now() - i.limit_set_at > DEFERRED_IS_NEWS_AFTER
    ):
        acts = (("Reclaim now", f"{href}limit/?reclaim=preempt", True),) if may_operate else ()
        found.append(
            Item(
                5,
                "warn",
                "arrow-bar-down",
                f"{row.label} is still over its limit",
                words.limit_sentence(i, row.share.footprint_bytes),
                href,
                i.limit_set_at,
                acts,
            )
        )
    if row.drift_bytes:
        found.append(
            Item(
                4,
                "warn",
                "pencil-exclamation",
                f"Somebody else changed the limit of {row.label}",
                f"Its segment says {words.gib(row.drift_bytes)} GiB, asked is {words.gib(i.limit_bytes)} GiB.",
                href,
                None,
                limit_acts,
            )
        )
    if i.state == InstanceState.PENDING and timezone.now() - i.state_since > timedelta(seconds=15):
        acts = (("Make room", f"/models/{i.model_id}/launch/", True),) if may_operate else ()
        title = f"{row.label} waits for a GPU"
        found.append(Item(5, "warn", words.QUEUED.icon, title, i.reason, href, i.state_since, acts))
    if row.outdated:
        acts = (("Restart", f"{href}restart/", True),) if may_operate else ()
        found.append(
            Item(
                8,
                "info",
                "refresh-dot",
                f"{row.label} runs older options",
                f"It runs revision {i.spec_revision}, saved is {i.model.spec_revision}.",
                href,
                None,
                acts,
            )
        )
    return found


def of_operations(operations: list[Operation]) -> list[Item]:
    """Operations that failed lately; those under way have the tray."""
    return [
        Item(
            2,
            "bad",
            "list-details",
            f"{operation.title} failed",
            operation.message,
            f"/operations/{operation.pk}/",
            operation.ended_at,
        )
        for operation in operations
    ]


def _reason(i: Instance) -> str:
    text = words.why(i)
    follow = words.next_step(i)
    return f"{text} {follow}".strip()
