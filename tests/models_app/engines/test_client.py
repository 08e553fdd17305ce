"""Control calls to an engine, against a fake at the transport's edge."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from models_app.engines.client import EngineClient, EngineRefused
from models_app.engines.metrics import parse_metrics
from models_app.errors import EngineUnavailable

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \\"b\\" {c}"} 2.0
vllm:num_requests_running{engine="1",model_name="a"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a",reason="capacity"} 4.0
vllm:engine_sleep_state{engine="0",model_name="a",sleep_state="awake"} 0.0
vllm:engine_sleep_state{engine="0",model_name="a",sleep_state="weights_offloaded"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.997
vllm:num_preemptions_total{engine="0",model_name="a"} 7.0
vllm:num_preemptions_created{engine="0",model_name="a"} 1.7960528072894356e+09
vllm:prompt_tokens_total{engine="0",model_name="a"} 14.0
vllm:generation_tokens_total{engine="0",model_name="a"} 1.5e+03
vllm:request_success_total{engine="0",finished_reason="stop",model_name="a"} 3.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="a"} 2.0
vllm:broken{ 3
process_open_fds 34.0
"""


def client(handler: Callable[[httpx.Request], httpx.Response]) -> EngineClient:
    return EngineClient("http://127.0.0.1:1/", "t0ken", 1.0, transport=httpx.MockTransport(handler))


def answering(status: int, body: object) -> EngineClient:
    return client(lambda request: httpx.Response(status, json=body))


def test_metrics_are_summed_and_sleep_is_read() -> None:
    found = parse_metrics(METRICS)
    assert (found.running, found.waiting, found.preemptions) == (3, 4, 7)
    assert (found.prompt_tokens, found.generation_tokens, found.requests_finished) == (14, 1500, 5)
    assert (found.sleep_state, found.sleep_level, found.busy) == ("weights_offloaded", 1, True)
    assert parse_metrics("").busy is False


def test_the_token_goes_with_every_call() -> None:
    seen: list[httpx.Request] = []

    def note(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"data": [{"id": "qwen"}], "choices": [{"text": "2"}], "status": "ok"})

    engine = client(note)
    assert engine.models() == ["qwen"]
    assert engine.probe_token() == "2"
    engine.kvcache_limit(3 << 30, revision=4, force=True, reclaim="preempt", by="ann")
    engine.sleep(2)
    engine.wake(["weights"])
    assert {request.headers["authorization"] for request in seen} == {"Bearer t0ken"}
    bodies = {request.url.path: json.loads(request.content) for request in seen if request.content}
    assert bodies["/kvcache/limit"] == {
        "size_bytes": 3 << 30, "revision": 4, "force": True, "reclaim": "preempt", "by": "ann",
    }  # fmt: skip
    assert bodies["/kvcache/sleep"] == {"level": 2}
    assert bodies["/kvcache/wake"] == {"tags": ["weights"]}


def test_health_is_true_only_for_200() -> None:
    assert answering(200, {}).health()
    assert not answering(503, {}).health()

    def refused(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert not client(refused).health()


def test_a_timeout_names_the_call_and_the_limit() -> None:
    def slow(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("slow")

    with pytest.raises(EngineUnavailable, match=r"did not answer /kvcache/status within 1 s") as caught:
        client(slow).kvcache_status()
    assert caught.value.facts["reason"] == "timeout"


def test_a_refusal_keeps_the_engine_s_sentence_code_and_numbers() -> None:
    body = {"error": "below the floor", "code": "below_safety_floor", "safety_floor_bytes": 42}
    with pytest.raises(EngineRefused) as caught:
        answering(409, body).kvcache_limit(1)
    assert (caught.value.message, caught.value.code, caught.value.status) == (
        "below the floor",
        "below_safety_floor",
        409,
    )
    assert caught.value.facts == {"safety_floor_bytes": 42}


def test_pending_is_an_answer_not_an_error() -> None:
    assert answering(202, {"status": "pending"}).kvcache_limit(1)["status"] == "pending"


@pytest.mark.parametrize(
    ("body", "sentence", "code"),
    [
        ({"error": {"message": "no model", "type": "NotFoundError", "code": 404}}, "no model", "not_found_error"),
        ({"error": "Unauthorized"}, "Unauthorized", "http_404"),
        ({"detail": "Not Found"}, "Not Found", "http_404"),
        ({}, "The engine answered 404.", "http_404"),
    ],
)
def test_refusals_of_vllm_itself_are_read_too(body: object, sentence: str, code: str) -> None:
    with pytest.raises(EngineRefused) as caught:
        answering(404, body).kvcache_trim()
    assert (caught.value.message, caught.value.code) == (sentence, code)


def test_a_dying_server_is_unavailable_not_a_refusal() -> None:
    with pytest.raises(EngineUnavailable):
        answering(503, {"error": "engine dead"}).metrics()


def test_an_answer_that_is_no_json_is_not_taken_for_one() -> None:
    with pytest.raises(EngineUnavailable, match="cannot be read"):
        client(lambda request: httpx.Response(200, text="<html>")).kvcache_status()


def test_an_open_client_is_used_again_and_closed() -> None:
    with answering(200, {"status": "ok"}) as engine:
        engine.kvcache_status()
        engine.safety_floor()
    assert engine.kvcache_trim() == {"status": "ok"}


def test_no_proxy_of_the_environment_comes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid:1")
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:1"):
        EngineClient("http://127.0.0.1:1", "", 0.5).metrics()
