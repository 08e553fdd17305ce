from __future__ import annotations

import json
import stat
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone
from redis import Redis

from models_app import route_table, transitions
from models_app.models import ApiKey
from models_app.router.table import RouteTable
from models_app.selectors import routes_snapshot, token_limit
from models_app.services.keys import api_key_revoke
from models_app.services.routes import route_save
from models_app.states import InstanceState
from tests.builders import make_host, make_instance, make_key, make_model

S = InstanceState
pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, settings: Any) -> Path:
    settings.SARDEENZ_HOME = tmp_path
    return tmp_path


def _only_model(snapshot: dict[str, Any]) -> dict[str, Any]:
    (model,) = snapshot["models"]
    return dict(model)


def test_ready_instance_is_a_target_with_its_token() -> None:
    row = make_instance(model=make_model(served_model_name="a", aliases=["b"]))
    model = _only_model(routes_snapshot())
    assert (model["name"], model["aliases"], model["status"]) == ("a", [{"name": "b", "defaults": {}}], "ready")
    assert model["instances"] == [
        {
            "id": row.pk,
            "url": f"http://127.0.0.1:{row.port}",
            "token": row.engine_token,
            "weight": 1,
            "token_limit": token_limit(row),
        }
    ]


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (S.PENDING, "starting"),
        (S.SCHEDULED, "starting"),
        (S.STARTING, "starting"),
        (S.UNREACHABLE, "failed"),
        (S.DRAINING, "draining"),
        (S.STOPPING, "draining"),
        (S.SLEEPING, "sleeping"),
        (S.FAILED, "failed"),
        (S.STOPPED, "stopped"),
    ],
)
def test_no_other_state_is_routed_to(state: InstanceState, status: str) -> None:
    make_instance(state=state, reason="because")
    model = _only_model(routes_snapshot())
    assert model["instances"] == []
    assert (model["status"], model["reason"]) == (status, "because")


def test_one_ready_replica_makes_the_model_ready() -> None:
    model = make_model()
    make_instance(model=model, state=S.FAILED)
    make_instance(model=model, replica_index=1)
    assert _only_model(routes_snapshot())["status"] == "ready"


def test_model_that_was_never_launched_is_stopped() -> None:
    make_model()
    assert _only_model(routes_snapshot())["status"] == "stopped"


def test_only_valid_keys_and_only_digests_are_in_the_table() -> None:
    _key, token = make_key(name="ci", models=[make_model(served_model_name="a")])
    gone, _ = make_key(name="gone")
    api_key_revoke(gone, actor="test")
    old, _ = make_key(name="old")
    ApiKey.objects.filter(pk=old.pk).update(expires_at=timezone.now() - timedelta(seconds=1))
    snapshot = routes_snapshot()
    assert [entry["name"] for entry in snapshot["keys"]] == ["ci"]
    assert snapshot["keys"][0]["models"] == ["a"]
    assert token not in json.dumps(snapshot)


def test_longest_request_follows_the_limit_in_force() -> None:
    # Measured on an H200: 9 bundles of 112 MiB hold one request of 8,192 tokens, 8 bundles do not.
    row = make_instance(bundle_bytes=117_440_512, effective_limit_bytes=9 * 117_440_512)
    held = token_limit(row)
    assert held is not None
    assert held >= 8192
    row.effective_limit_bytes = 8 * 117_440_512
    held = token_limit(row)
    assert held is not None
    assert held < 8192


def test_resting_instance_is_asked_for_as_much_as_it_gets_when_it_works() -> None:
    row = make_instance(bundle_bytes=117_440_512, effective_limit_bytes=2 * 117_440_512)
    row.awake_limit_bytes, row.limit_automatic = 9 * 117_440_512, True
    held = token_limit(row)
    assert held is not None
    assert held >= 8192
    row.limit_automatic = False  # by hand: nobody raises it
    held = token_limit(row)
    assert held is not None
    assert held < 8192


def test_table_costs_the_same_queries_for_many_models(django_assert_max_num_queries: Any) -> None:
    host = make_host()
    for index in range(12):
        model = make_model(aliases=[f"alias-{index}"])
        make_instance(model=model, host=host)
        make_key(models=[model])
        route_save(f"split-{index}", actor="test", targets={model.served_model_name: 1})
    with django_assert_max_num_queries(8):
        routes_snapshot()


def test_file_is_the_routers_table_and_only_its_owner_may_read_it(_home: Path) -> None:
    make_instance()
    make_key()
    route_table.publish()
    path = _home / "routes.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    table = RouteTable.from_snapshot(json.loads(path.read_bytes()))
    assert len(table.models) == 1
    assert len(table.keys) == 1


def test_change_of_state_is_published_on_commit(valkey: str, on_commit: Any) -> None:
    row = make_instance(state=S.STARTING)
    with Redis.from_url(valkey) as client:
        heard = client.pubsub(ignore_subscribe_messages=True)
        heard.subscribe(route_table.CHANNEL)
        heard.get_message(timeout=5)
        with on_commit():
            transitions.move(row.pk, S.READY, expected=S.STARTING, reason="up")
        message = heard.get_message(timeout=5)
        heard.close()
        stored = json.loads(client.get(route_table.KEY))  # type: ignore[arg-type]
    assert message is not None
    assert int(message["data"]) == stored["version"]
    assert stored["models"][0]["status"] == "ready"


def test_unchanged_table_is_written_but_not_announced(valkey: str) -> None:
    make_instance()
    first = route_table.publish()
    with Redis.from_url(valkey) as client:
        heard = client.pubsub(ignore_subscribe_messages=True)
        heard.subscribe(route_table.CHANNEL)
        heard.get_message(timeout=5)
        second = route_table.publish()
        assert heard.get_message(timeout=0.3) is None
        heard.close()
        assert json.loads(client.get(route_table.KEY))["version"] == second["version"]  # type: ignore[arg-type]
    assert second["version"] > first["version"]


def test_late_writer_does_not_cover_a_newer_table(valkey: str, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = route_table.publish()
    monkeypatch.setattr(route_table, "_clock", lambda connection: (newest["version"] - 1, connection))
    route_table.publish()
    with Redis.from_url(valkey) as client:
        assert json.loads(client.get(route_table.KEY))["version"] == newest["version"]  # type: ignore[arg-type]


def test_with_the_broker_away_the_file_is_still_written(
    _home: Path, settings: Any, valkey: str, on_commit: Any
) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    row = make_instance(state=S.STARTING)
    with on_commit():
        transitions.move(row.pk, S.READY, expected=S.STARTING, reason="up")
    assert json.loads((_home / "routes.json").read_bytes())["models"][0]["status"] == "ready"
