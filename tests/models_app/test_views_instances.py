"""The page of one instance, its log, and the questions and acts on it; the playground."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.test import AsyncClient, Client

from gpus_app.models import Host
from models_app.models import Instance, InstanceEvent, LaunchAttempt
from models_app.services.memory.kvcache import LimitAnswer
from models_app.states import Stage
from models_app.views import instances, playground
from tests.builders import GIB, make_gpu, make_host, make_instance, make_model, make_user
from tests.models_app.pages import client_of, htmx, read

pytestmark = pytest.mark.django_db


@pytest.fixture
def row() -> Instance:
    model = make_model(served_model_name="qwen", enable_sleep_mode=True)
    return make_instance(model=model, gpus=[make_gpu(host=make_host())], limit_bytes=8 * GIB, limit_status="applied")


def answer(row: Instance, **fields: Any) -> LimitAnswer:
    defaults: dict[str, Any] = {
        "instance_id": row.pk,
        "status": "applied",
        "message": "",
        "revision": 1,
        "requested_bytes": 3 * GIB,
        "limit_bytes": 3 * GIB,
        "effective_limit_bytes": 3 * GIB,
    }
    return LimitAnswer(**(defaults | fields))


def toast(response: Any) -> dict[str, str]:
    """What the browser is told to show."""
    events = json.loads(response.headers["HX-Trigger"])
    found: dict[str, str] = events["sz:toast"]
    return found


# --- the page --------------------------------------------------------------------------------------


def test_a_start_under_way_shows_its_stages_and_its_log(row: Instance, tmp_path: Path, settings: Any) -> None:
    settings.SARDEENZ_HOST_NAME = "gpu-a"
    (tmp_path / "engine.log").write_text("INFO loading\nRuntimeError: out of memory\n")
    row.state, row.stage, row.stage_progress = "starting", Stage.LOADING_WEIGHTS, 0.62
    row.save()
    LaunchAttempt.objects.update(run_dir=str(tmp_path))
    text = client_of().get(f"/instances/{row.pk}/").content.decode()
    assert "loading weights 62 %" in text
    assert 'aria-current="step"' in text
    assert '<span class="bad">RuntimeError: out of memory' in text


def test_a_failure_names_its_cause_its_advice_and_its_log(row: Instance) -> None:
    row.state, row.first_cause = "failed", "Out of GPU memory."
    row.save()
    LaunchAttempt.objects.update(cause="Out of GPU memory.", advice="Make room.", exit_code=1, log_tail="the end")
    text = client_of().get(f"/instances/{row.pk}/").content.decode()
    for words in ("Out of GPU memory.", "Make room.", "Read its log", "the end", "Download"):
        assert words in text


def test_the_engine_token_is_on_no_page(row: Instance) -> None:
    client = client_of("admin", is_staff=True, is_superuser=True)
    attempt = LaunchAttempt.objects.get()
    for path in (
        f"/instances/{row.pk}/",
        f"/models/{row.model_id}/",
        "/gpus/",
        f"/attempts/{attempt.pk}/log/",
        f"/admin/models_app/instance/{row.pk}/change/",
    ):
        response = client.get(path)
        assert response.status_code == 200
        assert row.engine_token not in response.content.decode()


def test_what_happened_is_listed_newest_first(row: Instance) -> None:
    for reason in ("earlier", "later"):
        InstanceEvent.objects.create(instance=row, kind="limit", reason=reason, actor="anna")
    text = client_of().get(f"/instances/{row.pk}/").content.decode()
    assert text.index("later") < text.index("earlier")


def test_the_same_log_again_is_not_sent_again(row: Instance) -> None:
    LaunchAttempt.objects.update(log_tail="one\ntwo")
    client = client_of()
    first = client.get(f"/instances/{row.pk}/log/", **htmx("log-body")).content.decode()
    digest = first.split('value="')[1].split('"')[0]
    assert client.get(f"/instances/{row.pk}/log/?have={digest}", **htmx("log-body")).status_code == 204
    LaunchAttempt.objects.update(log_tail="one\ntwo\nthree")
    assert client.get(f"/instances/{row.pk}/log/?have={digest}", **htmx("log-body")).status_code == 200


def test_the_log_of_an_earlier_start_can_be_read_and_downloaded(row: Instance) -> None:
    LaunchAttempt.objects.update(log_tail="of the first start")
    attempt = LaunchAttempt.objects.get()
    client = client_of("viewer")
    assert "of the first start" in client.get(f"/instances/{row.pk}/log/?attempt=1").content.decode()
    response = client.get(f"/attempts/{attempt.pk}/log/")
    assert response.headers["Content-Disposition"].startswith('attachment; filename="qwen-')
    assert response.headers["Content-Type"].startswith("text/plain")


# --- limits ----------------------------------------------------------------------------------------


def test_the_limit_dialog_is_a_page_without_script_and_a_fragment_with_it(row: Instance) -> None:
    client = client_of()
    assert "<html" in client.get(f"/instances/{row.pk}/limit/").content.decode()
    text = client.get(f"/instances/{row.pk}/limit/", **htmx("dialog")).content.decode()
    assert "<html" not in text
    for words in ("Asked", "In force", "Still mapped", "Safety floor", "Enforced inside the engine"):
        assert words in text


def test_a_limit_is_passed_on_as_it_was_typed(row: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(instances, "kvcache_limit_set", lambda _row, **kw: seen.update(kw) or answer(row))
    client_of(name="anna").post(f"/instances/{row.pk}/limit/", {"size": "40%", "reclaim": "preempt", "force": "on"})
    assert seen == {"size": "40%", "actor": "anna", "force": True, "reclaim": "preempt"}


@pytest.mark.parametrize(
    ("fields", "tone", "words"),
    [
        ({"freed_bytes": 2 * GIB}, "ok", "2.0 GiB came back"),
        ({"clamped": True}, "warn", "cut to what this start can hold"),
        ({"status": "deferred", "overage_bytes": GIB}, "warn", "1.0 GiB still to come back"),
        ({"status": "starved"}, "bad", "Raise the limit"),
        ({"status": "unavailable", "message": "The engine did not answer."}, "bad", "did not answer"),
        ({"preempted": {"requests": 3, "tokens": 900, "pause_s": 1.25}}, "ok", "3 requests were set back"),
    ],
)
def test_the_answer_to_a_limit_is_told_in_a_sentence(
    row: Instance, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], tone: str, words: str
) -> None:
    monkeypatch.setattr(instances, "kvcache_limit_set", lambda _row, **_kw: answer(row, **fields))
    response = client_of().post(f"/instances/{row.pk}/limit/", {"size": "3G"}, **htmx("dialog"))
    assert response.status_code == 204
    assert toast(response)["tone"] == tone
    assert words in toast(response)["text"]


@pytest.mark.parametrize("size", ["", "plenty", "-1G", "0", "NaN", "1e400", "140%"])
def test_a_size_that_cannot_be_read_is_told_at_the_field(row: Instance, size: str) -> None:
    response = client_of().post(f"/instances/{row.pk}/limit/", {"size": size}, **htmx("dialog"))
    assert response.status_code == 422
    assert 'aria-invalid="true"' in response.content.decode()


def test_a_limit_below_the_floor_is_refused_with_the_reason(valkey: str, row: Instance) -> None:
    response = client_of().post(f"/instances/{row.pk}/limit/", {"size": "300M"}, **htmx("dialog"))
    assert response.status_code == 422
    assert "floor" in response.content.decode().lower()
    row.refresh_from_db()
    assert row.limit_bytes == 8 * GIB


def test_the_preview_draws_the_gpu_now_and_after(valkey: str, row: Instance) -> None:
    read(Host.objects.get(), [row])
    text = client_of().post(f"/instances/{row.pk}/limit/preview/", {"size": "2G"}, **htmx()).content.decode()
    assert "GPU now, free 74.0 GiB" in text
    assert "GPU after, free 76.0 GiB" in text
    row.refresh_from_db()
    assert row.limit_revision == 0


def test_a_trim_tells_the_measured_bytes(row: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "kvcache_trim", lambda _row, **_kw: answer(row, freed_bytes=GIB))
    response = client_of().post(f"/instances/{row.pk}/trim/", **htmx())
    assert toast(response)["text"] == "Trimmed: 1.0 GiB came back. The limit is unchanged."


# --- stop, sleep, move -----------------------------------------------------------------------------


def test_stopping_asks_first_and_tells_what_is_in_flight(valkey: str, row: Instance) -> None:
    read(Host.objects.get(), [row])
    client = client_of()
    assert "4 running, 1 waiting" in client.get(f"/instances/{row.pk}/stop/").content.decode()
    client.post(f"/instances/{row.pk}/stop/")
    row.refresh_from_db()
    assert row.desired_state == "stopped"


def test_stop_all_names_what_it_ends(valkey: str, row: Instance) -> None:
    client = client_of()
    assert "qwen" in client.get("/stop-all/").content.decode()
    client.post("/stop-all/")
    row.refresh_from_db()
    assert row.desired_state == "stopped"


def test_an_act_that_its_state_does_not_allow_is_refused_in_a_sentence(valkey: str, row: Instance) -> None:
    response = client_of().post(f"/instances/{row.pk}/wake/", **htmx())
    assert response.status_code in (204, 409)
    Instance.objects.update(state="failed")
    response = client_of().post(f"/instances/{row.pk}/sleep/", **htmx())
    assert response.status_code == 409
    assert toast(response)["tone"] == "bad"


def test_without_script_an_act_leads_back_to_where_it_was_asked(valkey: str, row: Instance) -> None:
    client = client_of()
    response = client.post(f"/instances/{row.pk}/stop/", {"next": "/gpus/"})
    assert response.headers["Location"] == "/gpus/"
    assert "is being stopped" in client.get("/gpus/").content.decode()


def test_an_act_leads_to_no_foreign_site(valkey: str, row: Instance) -> None:
    response = client_of().post(f"/instances/{row.pk}/stop/", {"next": "//elsewhere.example/"})
    assert response.headers["Location"] == f"/instances/{row.pk}/"


def test_moving_offers_the_other_gpus_only(row: Instance) -> None:
    other = make_gpu(host=Host.objects.get(), index=1)
    text = client_of().get(f"/instances/{row.pk}/move/").content.decode()
    here = text.split('name="gpu"')
    assert len(here) == 3
    assert "disabled" in here[1].split(">")[0]
    assert f'value="{other.pk}"' in here[2]


def test_moving_to_nowhere_is_told_so(valkey: str, row: Instance) -> None:
    response = client_of().post(f"/instances/{row.pk}/move/", **htmx("dialog"))
    assert response.status_code == 422
    assert "Say where to" in response.content.decode()


# --- playground ------------------------------------------------------------------------------------


class Engine(httpx.AsyncBaseTransport):
    """An engine that streams three words; remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        engine = self

        class Words(httpx.AsyncByteStream):
            async def __aiter__(self) -> Any:
                for word in ("one", "two", "three"):
                    chunk = {"choices": [{"delta": {"content": word}}]}
                    yield f"data: {json.dumps(chunk)}\n\n".encode()
                yield b"data: [DONE]\n\n"

            async def aclose(self) -> None:
                engine.closed = True

        return httpx.Response(200, stream=Words())


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    found = Engine()
    real = httpx.AsyncClient
    monkeypatch.setattr(playground.httpx, "AsyncClient", lambda **kw: real(transport=found, **kw))
    return found


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "qwen", "messages": [{"role": "user", "content": "Hello"}]} | fields


@pytest.mark.django_db(transaction=True)
async def test_an_answer_is_streamed_with_the_engines_own_token(engine: Engine) -> None:
    from asgiref.sync import sync_to_async

    def make() -> tuple[Any, str]:
        one = make_instance(model=make_model(served_model_name="qwen"), gpus=[make_gpu(host=make_host())])
        return make_user(role="viewer"), one.engine_token

    user, token = await sync_to_async(make)()
    client = AsyncClient()
    await client.aforce_login(user)
    response = await client.post("/playground/chat/", json.dumps(ask()), content_type="application/json")
    assert response.status_code == 200
    text = b"".join([chunk async for chunk in response.streaming_content]).decode()
    assert [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in text.split("\n\n")[:3]] == [
        "one",
        "two",
        "three",
    ]
    assert engine.requests[0].headers["Authorization"] == f"Bearer {token}"
    assert engine.closed
    assert response.headers["X-Accel-Buffering"] == "no"


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"model": "nobody"}, 404, "no model named"),
        ({"messages": []}, 422, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 422, "role"),
        ({"temperature": 9}, 422, "temperature"),
        ({"max_tokens": "many"}, 422, "tokens"),
    ],
)
def test_what_cannot_be_asked_is_answered_in_a_sentence(
    row: Instance, fields: dict[str, Any], status: int, words: str
) -> None:
    data = json.dumps(ask(**fields))
    response = client_of("viewer").post("/playground/chat/", data, content_type="application/json")
    assert response.status_code == status
    assert words in response.json()["error"]


def test_a_model_that_is_not_ready_says_what_it_is(row: Instance) -> None:
    Instance.objects.update(state="sleeping")
    response = client_of("viewer").post("/playground/chat/", json.dumps(ask()), content_type="application/json")
    assert response.status_code == 503
    assert "sleeping" in response.json()["error"]


def test_no_json_is_a_bad_request(row: Instance) -> None:
    response = client_of("viewer").post("/playground/chat/", "no json", content_type="application/json")
    assert response.status_code == 400


def test_without_script_the_whole_answer_comes_with_the_page(row: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = {"choices": [{"message": {"content": "<b>Good day</b>"}}]}
    monkeypatch.setattr(playground.httpx, "post", lambda *_a, **_kw: httpx.Response(200, json=reply))
    client: Client = client_of("viewer")
    text = client.post("/playground/", {"model": "qwen", "prompt": "Hello"}).content.decode()
    assert "&lt;b&gt;Good day&lt;/b&gt;" in text
    assert '<div class="bubble user">' in text
