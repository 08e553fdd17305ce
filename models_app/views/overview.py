"""The first page: what needs attention, then how full and how busy everything is."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET

from models_app.models import Model, Operation
from models_app.permissions import require_role
from models_app.presentation import words
from models_app.presentation.attention import attention, of_operations
from models_app.presentation.board import build_board
from models_app.presentation.demand import of_demand
from models_app.views.common import role_for, target_is


@require_GET
@require_role("viewer")
def overview(request: HttpRequest) -> HttpResponse:
    role = role_for(request)
    board = build_board(role)
    failed = list(
        Operation.objects.filter(state=Operation.State.FAILED, ended_at__gte=timezone.now() - timedelta(hours=1))[:5]
    )
    may_operate = role in ("operator", "admin")
    items = sorted(
        attention(board, may_operate=may_operate) + of_demand(may_operate=may_operate) + of_operations(failed),
        key=lambda item: item.rank,
    )
    known = [card for card in board.cards if card.bar.known]
    once = {row.instance.pk: row for row in board.rows}.values()
    counts = Counter(words.state_word(row.instance).text for row in once)
    context = {
        "board": board,
        "items": items,
        "counts": [(word, counts[word.text]) for word in words.ORDER if counts[word.text]],
        "ready": counts[words.READY.text],
        "instances": len(once),
        "models": Model.objects.count(),
        "total_bytes": sum(card.bar.total_bytes for card in known),
        "used_bytes": sum(card.bar.used_bytes for card in known),
        "kv_bytes": sum(share.used_bytes for card in known for share in card.bar.shares),
        "idle_bytes": sum(share.prealloc_bytes for card in known for share in card.bar.shares),
        "running": sum(row.running or 0 for row in once),
        "waiting": sum(row.waiting or 0 for row in once),
        "simulated": any(host.host.engine_kind == "simulated" for host in board.hosts),
    }
    template = "models_app/_overview.html" if target_is(request, "overview") else "models_app/overview.html"
    return render(request, template, context)
