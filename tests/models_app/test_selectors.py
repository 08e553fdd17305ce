from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpus_app.models import Host
from models_app.models import Instance
from models_app.selectors import instance_log, instances_for_dashboard, live_by_gpu, replicas_of
from models_app.services.access import share_log
from models_app.states import InstanceState
from tests.builders import make_gpu, make_host, make_instance, make_model

S = InstanceState
pytestmark = pytest.mark.django_db


@pytest.fixture
def row(settings: Any, tmp_path: Path) -> Instance:
    """An instance of this host whose run directory holds a log of 20 lines, 12 of them rotated away."""
    row = make_instance(host=make_host(name=settings.SARDEENZ_HOST_NAME))
    assert row.attempt is not None
    row.attempt.run_dir = str(tmp_path)
    row.attempt.log_tail = "the tail that was stored"
    row.attempt.save()
    (tmp_path / "engine.log.1").write_text("".join(f"line {n}\n" for n in range(12)))
    (tmp_path / "engine.log").write_text("".join(f"line {n}\n" for n in range(12, 20)))
    return row


def test_dashboard_is_one_query_for_any_number(django_assert_num_queries: Any) -> None:
    host = make_host()
    for index in range(6):
        make_instance(host=host, gpus=[make_gpu(host=host, index=index)])
    with django_assert_num_queries(1):
        for row in instances_for_dashboard():
            assert row.model.served_model_name
            assert row.host is not None
            assert row.attempt is not None


def test_instance_over_two_cards_stands_under_each() -> None:
    host = make_host()
    gpus = [make_gpu(host=host, index=index) for index in range(2)]
    row = make_instance(host=host, gpus=gpus)
    make_instance(host=host, gpus=gpus[:1], state=S.FAILED)
    assert {uuid: [one.pk for one in rows] for uuid, rows in live_by_gpu().items()} == {
        gpu.uuid: [row.pk] for gpu in gpus
    }


def test_live_row_stands_for_its_replica() -> None:
    model = make_model()
    live = make_instance(model=model)
    make_instance(model=model, state=S.FAILED)
    ended = make_instance(model=model, replica_index=1, state=S.STOPPED)
    assert {index: one.pk for index, one in replicas_of(model).items()} == {0: live.pk, 1: ended.pk}


@pytest.mark.parametrize("lines", [1, 8, 10, 20])
def test_log_has_as_many_lines_as_asked_over_its_rotation(row: Instance, lines: int) -> None:
    assert instance_log(row, lines) == [f"line {n}" for n in range(20 - lines, 20)]


def test_log_asked_for_nothing_is_empty(row: Instance) -> None:
    assert instance_log(row, 0) == []


def test_log_is_readable_after_its_directory_is_gone(row: Instance, tmp_path: Path) -> None:
    for path in tmp_path.iterdir():
        path.unlink()
    tmp_path.rmdir()
    assert instance_log(row) == ["the tail that was stored"]


def test_log_of_another_host_is_what_its_worker_left(row: Instance, settings: Any, valkey: str) -> None:
    assert row.attempt is not None
    share_log(row.attempt)
    Host.objects.update(name="elsewhere")
    fresh = instances_for_dashboard().get(pk=row.pk)
    assert instance_log(fresh, 3) == ["line 17", "line 18", "line 19"]


def test_instance_without_a_start_has_no_log() -> None:
    assert instance_log(make_instance(state=S.PENDING)) == []
