"""An engine that serves: readiness, requests, metrics, guard, environment, and its end under an open stream.

The tests share one engine and run in the order of this file; the last one ends it.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest

from models_app.engines import procfs
from models_app.engines.environment import ALLOWED, OURS
from models_app.engines.identity import MARKER
from models_app.engines.process import cleanup, find_marked, members, port_is_ours, terminate
from models_app.states import Stage
from tests.contract.kit import Started, wait_for

pytestmark = pytest.mark.xdist_group("contract")

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}


def test_stages_are_seen_in_order_until_ready(served: Started) -> None:
    assert served.stages[0] is Stage.STARTING
    assert served.stages[-1] is Stage.READY
    order = [Stage.STARTING, Stage.LOADING_WEIGHTS, Stage.WARMING_UP, Stage.READY]
    seen = [stage for stage in dict.fromkeys(served.stages) if stage in order]
    assert seen == [stage for stage in order if stage in seen]
    memory = served.memory()
    assert memory.engine_core_pids and memory.max_model_len == 512
    assert memory.graphs_bytes == 0  # eager
    assert memory.kvcached_active is False


def test_our_name_and_aliases_are_listed(served: Started) -> None:
    assert served.client.models() == ["tiny", "tiny-alias"]
    assert served.client.version().startswith("0.30")


def test_only_our_processes_listen_on_the_port(served: Started) -> None:
    assert port_is_ours(served.run_dir, served.port) is True


def test_chat_answers(served: Started) -> None:
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json=CHAT)
        body = answer.json()
    assert answer.status_code == 200
    assert body["choices"][0]["finish_reason"] in ("length", "stop")
    assert body["usage"]["completion_tokens"] >= 1


def test_what_we_ask_every_second_leaves_no_line_in_the_log_and_a_request_does(served: Started) -> None:
    served.client.metrics()
    assert served.client.health()
    served.client.version()
    log = served.run_dir / "engine.log"
    wait_for(lambda: "GET /version" in log.read_text(), 20)
    text = log.read_text()
    assert "GET /metrics" not in text
    assert "GET /health" not in text


def test_chat_streams_events_with_usage_and_an_end(served: Started) -> None:
    order = {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    with served.http() as http, http.stream("POST", "/v1/chat/completions", json=order) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "length"


def test_an_unknown_model_is_404(served: Started) -> None:
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json={**CHAT, "model": "nope"})
    assert answer.status_code == 404
    assert "nope" in answer.json()["error"]["message"]


def test_one_token_proves_that_it_works(served: Started) -> None:
    before = served.client.metrics().generation_tokens
    served.client.probe_token("tiny")
    wait_for(lambda: served.client.metrics().generation_tokens > before, 30)


def test_metrics_have_the_names_that_the_controller_reads(served: Started) -> None:
    metrics = served.client.metrics()
    assert metrics.prompt_tokens > 0
    assert metrics.requests_finished >= 2
    assert (metrics.running, metrics.waiting, metrics.preemptions) == (0, 0, 0)
    assert metrics.sleep_state == "awake"
    with served.http() as http:
        text = http.get("/metrics").text
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
        "vllm:engine_sleep_state", "vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total", "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
    ):  # fmt: skip
        assert f"\n{name}{{" in text, name


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/kvcache/status", "/docs", "/tokenize", "/no"])
@pytest.mark.parametrize("token", ["", "wrong"])
def test_without_the_token_only_health_answers(served: Started, path: str, token: str) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    answer = httpx.get(served.url + path, headers=headers, timeout=30, trust_env=False)
    assert answer.status_code == 401
    assert "error" in answer.json()
    assert httpx.get(f"{served.url}/health", timeout=30, trust_env=False).status_code == 200


def test_developer_endpoints_are_not_there(served: Started) -> None:
    with served.http() as http:
        for path in ("/sleep", "/collective_rpc", "/reset_prefix_cache", "/server_info"):
            assert http.post(path).status_code in (404, 405), path


def test_kv_status_answers_and_says_that_there_is_no_kvcached(served: Started) -> None:
    status = served.client.kvcache_status()
    assert status["kvcached_active"] is False


def test_environment_holds_nothing_of_the_worker_s_secrets(served: Started) -> None:
    seen = 0
    for process in members(served.run_dir):
        data = Path(f"/proc/{process.pid}/environ").read_bytes().strip(b"\0")
        assert b"secret-" not in data
        names = {item.partition(b"=")[0].decode() for item in data.split(b"\0") if item}
        seen += MARKER in names
        assert not names & {"DATABASE_URL", "SARDEENZ_SECRET_KEY", "REDIS_URL", "VLLM_API_KEY", "HF_TOKEN"}
    assert seen >= 1
    assert "DATABASE_URL" not in ALLOWED and "DATABASE_URL" in OURS


def test_command_line_holds_no_secret(served: Started) -> None:
    assert served.token not in procfs.command_line(served.record.engine_pid or 0)
    assert served.token not in served.log()


def test_every_process_of_it_is_found_and_nothing_else(served: Started) -> None:
    found = {p.pid for p in find_marked(served.installation) if p.marker.attempt_id == served.attempt_id}
    assert found == {p.pid for p in members(served.run_dir)}
    assert set(served.memory().engine_core_pids) <= found


def test_its_sockets_and_files_lie_in_its_own_temporary_folder(served: Started) -> None:
    assert served.tmp.is_dir()
    assert served.tmp.stat().st_mode & 0o777 == 0o700


def test_stop_with_an_open_stream_ends_without_waiting_for_the_client(served: Started) -> None:
    order = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 480, "ignore_eos": True, "stream": True}).encode()
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.settimeout(60)
        reader.connect(("127.0.0.1", served.port))
        reader.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
            + f"Authorization: Bearer {served.token}\r\nContent-Length: {len(order)}\r\n\r\n".encode()
            + order
        )
        assert b"200 OK" in reader.recv(64)
        progress = terminate(served.run_dir, limit_s=60)  # and nobody reads on
        assert progress.done
        assert progress.asked_s < 60
    status = served.wait_end(30)
    assert status.stop_requested and not status.failed
    cleanup(served.run_dir)
    served.nothing_left()
