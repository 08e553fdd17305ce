from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connection

from models_app import transitions
from models_app.models import Instance, InstanceEvent
from models_app.states import InstanceState
from tests.builders import make_instance

S = InstanceState
pytestmark = pytest.mark.django_db


def test_move_writes_state_event_and_fields_together() -> None:
    row = make_instance(state=S.SCHEDULED)
    assert transitions.move(row.pk, S.STARTING, expected=S.SCHEDULED, reason="Claimed.", actor="anna", port=20001)
    row.refresh_from_db()
    assert (row.state, row.port, row.reason, row.state_version) == (S.STARTING, 20001, "Claimed.", 1)
    event = row.events.get()
    assert (event.from_state, event.to_state, event.actor, event.reason) == (
        "scheduled",
        "starting",
        "anna",
        "Claimed.",
    )


def test_move_from_an_unexpected_state_changes_nothing() -> None:
    row = make_instance(state=S.STOPPED)
    assert not transitions.move(row.pk, S.STARTING, expected=S.SCHEDULED, reason="late")
    row.refresh_from_db()
    assert row.state == S.STOPPED
    assert not row.events.exists()


def test_illegal_step_is_an_error_of_the_caller() -> None:
    row = make_instance(state=S.STOPPED)
    with pytest.raises(ValueError, match="no step from stopped to ready"):
        transitions.move(row.pk, S.READY, expected=S.STOPPED, reason="no")


def test_ready_and_end_are_stamped() -> None:
    row = make_instance(state=S.STARTING)
    transitions.move(row.pk, S.READY, expected=S.STARTING, reason="up")
    row.refresh_from_db()
    assert row.ready_at is not None
    transitions.move(row.pk, S.FAILED, expected=S.READY, reason="down")
    row.refresh_from_db()
    assert row.ended_at is not None
    transitions.move(row.pk, S.PENDING, expected=S.FAILED, reason="again")
    row.refresh_from_db()
    assert row.ended_at is None
    assert row.ready_at is None


def test_report_never_writes_the_state() -> None:
    row = make_instance()
    with pytest.raises(ValueError, match="move"):
        transitions.report(row.pk, state=S.FAILED)


def test_report_holds_back_when_the_instance_has_moved_on() -> None:
    row = make_instance(state=S.STOPPING)
    assert not transitions.report(row.pk, expected=S.STARTING, stage="compiling")


def test_report_of_an_older_revision_does_not_cover_a_newer_one() -> None:
    row = make_instance(limit_revision=3)
    assert not transitions.report(row.pk, matching={"limit_revision": 2}, limit_status="applied")
    assert transitions.report(row.pk, matching={"limit_revision": 3}, limit_status="applied")


def test_long_reasons_are_cut_not_refused() -> None:
    row = make_instance()
    transitions.move(row.pk, S.FAILED, expected=S.READY, reason="x" * 5000)
    row.refresh_from_db()
    assert len(row.reason) == 1000


@pytest.mark.django_db(transaction=True)
def test_of_racing_moves_exactly_one_wins() -> None:
    rows = [make_instance(state=S.SCHEDULED, replica_index=index) for index in range(5)]
    barrier = threading.Barrier(4)
    won: list[int] = []

    def race() -> None:
        try:
            barrier.wait(10)
            won.extend(
                row.pk for row in rows if transitions.move(row.pk, S.STARTING, expected=S.SCHEDULED, reason="claimed")
            )
        finally:
            connection.close()

    _run([race] * 4)
    assert sorted(won) == [row.pk for row in rows]
    assert InstanceEvent.objects.filter(to_state="starting").count() == len(rows)
    assert set(Instance.objects.values_list("state_version", flat=True)) == {1}


def _run(targets: list[Any]) -> None:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
