from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from models_app import dispatch
from models_app.errors import Conflict
from models_app.models import AuditEntry, Operation
from models_app.services.plans import operations
from models_app.services.plans.operations import HANDLERS, Progress, operation_cancel, operation_create, operation_step

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    messages: list[Any] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, **_: messages.append((name, *args)))
    return messages


@pytest.fixture
def answers() -> Iterator[list[Any]]:
    """What the handler of kind ``test`` answers, one after the other."""
    todo: list[Any] = []

    def handler(operation: Operation) -> Progress:
        answer = todo.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer(operation) if callable(answer) else answer

    HANDLERS["test"] = handler
    yield todo
    del HANDLERS["test"]


def _make(**fields: Any) -> Operation:
    return operation_create("test", title="A test", actor="anna", steps=[{"name": "one"}], **fields)


def test_steps_go_on_until_done(answers: list[Any], sent: list[Any], on_commit: Any) -> None:
    answers += [Progress(phase="one", progress=0.5), Progress(done=True, message="All done.")]
    with on_commit():
        operation = _make()
    assert sent == [(dispatch.OPERATION_STEP, operation.pk)]
    assert operation_step(operation.pk)
    assert not operation_step(operation.pk)
    operation.refresh_from_db()
    assert (operation.state, operation.message, operation.is_open) == ("succeeded", "All done.", False)
    assert operation.ended_at is not None


def test_done_operation_is_not_run_again(answers: list[Any]) -> None:
    answers += [Progress(done=True)]
    operation = _make()
    operation_step(operation.pk)
    assert not operation_step(operation.pk)


def test_named_error_of_a_step_is_a_visible_failure(answers: list[Any]) -> None:
    answers += [Conflict("No room on any card.")]
    operation = _make()
    assert not operation_step(operation.pk)
    operation.refresh_from_db()
    assert (operation.state, operation.message) == ("failed", "No room on any card.")
    assert AuditEntry.objects.get(action="operation.test.end").outcome == "failed"


def test_overtaken_worker_writes_nothing(answers: list[Any]) -> None:
    def overtaken(operation: Operation) -> Progress:
        Operation.objects.filter(pk=operation.pk).update(fence=operation.fence + 1, message="newer")
        return Progress(done=True, message="older")

    answers += [overtaken]
    operation = _make()
    assert not operation_step(operation.pk)
    operation.refresh_from_db()
    assert (operation.state, operation.message) == ("running", "newer")


def test_time_limit_ends_in_a_failure(answers: list[Any]) -> None:
    operation = _make()
    Operation.objects.filter(pk=operation.pk).update(deadline_at=timezone.now() - timedelta(seconds=1))
    operation_step(operation.pk)
    operation.refresh_from_db()
    assert operation.state == "failed"
    assert "time limit" in operation.message


def test_cancelling_is_a_wish_that_the_handler_sees(answers: list[Any]) -> None:
    answers += [lambda one: Progress(done=True, cancelled=one.cancel_requested)]
    operation = _make()
    operation_cancel(operation, actor="bert")
    operation_cancel(operation, actor="bert")
    operation_step(operation.pk)
    operation.refresh_from_db()
    assert operation.state == "cancelled"
    assert AuditEntry.objects.filter(action="operation.cancel").count() == 1


def test_unknown_kind_is_an_error_of_the_caller() -> None:
    with pytest.raises(ValueError, match="no handler"):
        operation_create("nonsense", title="x", actor="anna", steps=[])


def test_kind_of_a_newer_version_fails_with_a_sentence() -> None:
    operation = Operation.objects.create(kind="from the future", title="x")
    operations.operation_step(operation.pk)
    operation.refresh_from_db()
    assert "from the future" in operation.message
