"""The HTTP surface: shapes, streams, refusals and metrics as vLLM gives them."""

from __future__ import annotations

import base64
import json
import socket
import struct
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.models_app.simulator.engine import TOKEN, Engine, eventually, running

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    arguments = ("--max-model-len", "2048", "--enable-server-load-tracking")
    with running(tmp_path_factory.mktemp("http"), *arguments, speed=200.0) as engine:
        yield engine


def post(engine: Engine, path: str, body: Any, **options: Any) -> httpx.Response:
    return engine.http.post(path, json=body, **options)


def events(engine: Engine, path: str, body: dict[str, Any]) -> list[str]:
    with engine.http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]


# -- models and state --------------------------------------------------------------------------------------------


def test_models_lists_every_served_name(tmp_path: Path) -> None:
    with running(tmp_path, "--served-model-name", "first", "second", name="ignored") as engine:
        cards = engine.http.get("/v1/models").json()["data"]
        assert [(card["id"], card["owned_by"], card["max_model_len"]) for card in cards] == [
            ("first", "vllm", 40960),
            ("second", "vllm", 40960),
        ]
        for name in ("first", "second"):
            answer = post(engine, "/v1/completions", {"model": name, "prompt": "x", "max_tokens": 1})
            assert answer.json()["model"] == name
        assert engine.metric("num_requests_running", model_name="first") == 0


def test_small_endpoints_answer_as_vllm_does(engine: Engine) -> None:
    assert engine.http.get("/version").json() == {"version": "0.30.0"}
    assert engine.http.get("/load").json() == {"server_load": 0}
    for answer in (engine.http.get("/health"), engine.http.get("/ping"), engine.http.post("/ping")):
        assert (answer.status_code, answer.content) == (200, b"")


def test_unknown_path_and_wrong_method(engine: Engine) -> None:
    answer = engine.http.get("/v1/nothing")
    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})
    answer = engine.http.get("/v1/completions")
    assert (answer.status_code, answer.json()) == (405, {"detail": "Method Not Allowed"})


def test_developer_routes_are_off(engine: Engine) -> None:
    for path in ("/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache", "/pause"):
        assert engine.http.post(path).status_code == 404


# -- chat --------------------------------------------------------------------------------------------------------


def test_chat_answer_has_vllms_fields(engine: Engine) -> None:
    body = post(engine, "/v1/chat/completions", {**CHAT, "max_tokens": 9}).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    assert "tool_calls" not in choice["message"]
    assert len(choice["message"]["content"].split()) == 9
    usage = body["usage"]
    assert usage["completion_tokens"] == 9
    assert usage["total_tokens"] == usage["prompt_tokens"] + 9
    assert body["system_fingerprint"] == "vllm-0.30.0-simulated"


def test_answer_ends_by_itself_with_stop(engine: Engine) -> None:
    body = post(engine, "/v1/chat/completions", CHAT).json()
    assert body["choices"][0]["finish_reason"] == "stop"
    # The end-of-text token is counted and shows as nothing.
    assert body["usage"]["completion_tokens"] == len(body["choices"][0]["message"]["content"].split()) + 1


def test_chat_stream_is_role_then_content_then_reason_then_usage_then_done(engine: Engine) -> None:
    lines = events(engine, "/v1/chat/completions", {**CHAT, "max_tokens": 6, "stream_options": {"include_usage": True}})
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_stream_without_options_has_no_usage(engine: Engine) -> None:
    lines = events(engine, "/v1/chat/completions", {**CHAT, "max_tokens": 3})
    assert not any('"usage"' in line for line in lines)


def test_streamed_text_is_the_text_of_the_plain_answer(engine: Engine) -> None:
    plain = post(engine, "/v1/chat/completions", {**CHAT, "max_tokens": 60}).json()
    lines = events(engine, "/v1/chat/completions", {**CHAT, "max_tokens": 60})
    parts = [json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-1]]
    assert "".join(parts) == plain["choices"][0]["message"]["content"]


def test_same_prompt_gives_the_same_answer_and_another_prompt_another(engine: Engine) -> None:
    first = engine.complete("one", max_tokens=30)["choices"][0]["text"]
    assert engine.complete("one", max_tokens=30)["choices"][0]["text"] == first
    assert engine.complete("two", max_tokens=30)["choices"][0]["text"] != first


def test_several_choices_differ_and_are_all_streamed(engine: Engine) -> None:
    body = post(engine, "/v1/chat/completions", {**CHAT, "n": 3, "max_tokens": 8}).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert len(set(texts)) == 3
    assert body["usage"]["completion_tokens"] == 24
    lines = events(engine, "/v1/chat/completions", {**CHAT, "n": 3, "max_tokens": 8})
    seen: dict[int, str] = {}
    for line in lines[:-1]:
        choice = json.loads(line)["choices"][0]
        seen[choice["index"]] = seen.get(choice["index"], "") + choice["delta"].get("content", "")
    assert [seen[index] for index in range(3)] == texts


def test_stop_word_ends_the_answer_before_it(engine: Engine) -> None:
    whole = engine.complete("stop here", max_tokens=40)["choices"][0]["text"]
    word = whole.split()[5]
    choice = engine.complete("stop here", max_tokens=40, stop=[word])["choices"][0]
    assert choice["text"] == whole[: whole.index(word)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", word)
    lines = events(engine, "/v1/completions", {"model": "tiny", "prompt": "stop here", "max_tokens": 40, "stop": word})
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == choice["text"]


def test_required_tool_is_called(engine: Engine) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
            },
        },
    }
    body = post(engine, "/v1/chat/completions", {**CHAT, "tools": [tool], "tool_choice": "required"}).json()
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "simulated", "days": 1}
    lines = events(engine, "/v1/chat/completions", {**CHAT, "tools": [tool], "tool_choice": "required"})
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    arguments = "".join(
        delta["tool_calls"][0]["function"].get("arguments", "") for delta in deltas if "tool_calls" in delta
    )
    assert json.loads(arguments) == {"city": "simulated", "days": 1}


def test_json_is_json_when_asked_for(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    for wanted in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    ):
        body = post(engine, "/v1/chat/completions", {**CHAT, "response_format": wanted}).json()
        assert isinstance(json.loads(body["choices"][0]["message"]["content"]), dict)


def test_parts_of_a_message_are_read_and_pictures_refused(engine: Engine) -> None:
    parts = [{"type": "text", "text": "hello"}]
    plain = post(engine, "/v1/chat/completions", {**CHAT, "max_tokens": 5}).json()
    same = post(
        engine, "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": parts}], "max_tokens": 5}
    ).json()
    assert same["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
    parts.append({"type": "image_url", "image_url": {"url": "data:,"}})  # type: ignore[dict-item]
    answer = post(engine, "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": parts}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "tiny is not a multimodal model"


def test_request_id_of_the_client_is_kept(engine: Engine) -> None:
    answer = post(engine, "/v1/chat/completions", {**CHAT, "max_tokens": 1}, headers={"X-Request-Id": "abc"})
    assert answer.json()["id"] == "chatcmpl-abc"


# -- completions and the rest --------------------------------------------------------------------------------------


def test_completion_takes_texts_and_tokens(engine: Engine) -> None:
    tokens = post(engine, "/tokenize", {"model": "tiny", "prompt": "hello world"}).json()["tokens"]
    by_text = engine.complete("hello world", max_tokens=8)
    by_tokens = post(engine, "/v1/completions", {"model": "tiny", "prompt": tokens, "max_tokens": 8}).json()
    assert by_tokens["choices"][0]["text"] == by_text["choices"][0]["text"]
    two = post(engine, "/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 2}).json()
    assert [choice["index"] for choice in two["choices"]] == [0, 1]


def test_completion_has_sixteen_tokens_by_default_and_echoes_when_asked(engine: Engine) -> None:
    body = engine.complete("say")
    assert body["usage"]["completion_tokens"] == 16
    assert engine.complete("say", echo=True)["choices"][0]["text"].startswith("say")


def test_ignore_eos_runs_to_the_limit(engine: Engine) -> None:
    body = engine.complete("x", max_tokens=600, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 600
    assert body["choices"][0]["finish_reason"] == "length"


def test_tokens_survive_the_way_there_and_back(engine: Engine) -> None:
    text = 'Grüße, 漢字 and {"json": [1, 2]}\n'
    found = post(engine, "/tokenize", {"model": "tiny", "prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 2048
    assert post(engine, "/detokenize", {"model": "tiny", "tokens": found["tokens"]}).json() == {"prompt": text}


def test_responses_api_answers_whole_and_streamed(engine: Engine) -> None:
    body = post(engine, "/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 5}).json()
    assert body["object"] == "response"
    assert body["status"] == "incomplete"
    assert len(body["output"][0]["content"][0]["text"].split()) == 5
    assert body["usage"]["output_tokens"] == 5
    lines = events(engine, "/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 5})
    kinds = [json.loads(line)["type"] for line in lines]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


# -- refusals ----------------------------------------------------------------------------------------------------


#: As a real vLLM 0.30.0 answered, but for the length of its context.
REFUSALS = [
    ({**CHAT, "model": "nope"}, 404, "The model `nope` does not exist.", "NotFoundError", "model"),
    (
        {"model": "tiny"},
        400,
        "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', "
        "'input': '<dict of 1 items>'}",
        "Bad Request",
        "body.messages",
    ),
    (
        {**CHAT, "max_tokens": "many"},
        400,
        "1 validation error:\n  {'type': 'int_parsing', 'loc': 'body.max_tokens', 'msg': 'Input should be a valid "
        "integer, unable to parse string as an integer', 'input': 'many'}",
        "Bad Request",
        "body.max_tokens",
    ),
    (
        {**CHAT, "messages": []},
        400,
        "Cannot apply chat template to an empty conversation. Provide at least one message.",
        "BadRequestError",
        None,
    ),
    (
        {**CHAT, "max_tokens": 0},
        400,
        "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
        "BadRequestError",
        "max_tokens",
    ),
    (
        {**CHAT, "temperature": -1},
        400,
        "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
        "BadRequestError",
        "temperature",
    ),
    ({**CHAT, "n": 0}, 400, "n must be at least 1, got 0.", "BadRequestError", None),
    (
        {**CHAT, "stream_options": {"include_usage": True}},
        400,
        "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
        "BadRequestError",
        "stream_options",
    ),
    (
        {**CHAT, "max_tokens": 5000},
        400,
        "max_tokens=5000 cannot be greater than max_model_len=max_total_tokens=2048. Please request fewer output "
        "tokens. (parameter=max_tokens, value=5000)",
        "BadRequestError",
        "max_tokens",
    ),
    (
        {**CHAT, "messages": [{"role": "user", "content": "x y z " * 3000}]},
        400,
        "This model's maximum context length is 2048 tokens. However, you requested 0 output tokens and your prompt "
        "contains at least 2049 input tokens, for a total of at least 2049 tokens. Please reduce the length of the "
        "input prompt or the number of requested output tokens. (parameter=input_tokens, value=2049)",
        "BadRequestError",
        "input_tokens",
    ),
    (
        {**CHAT, "tool_choice": "required"},
        400,
        "When using `tool_choice`, `tools` must be set. (parameter=tool_choice)",
        "BadRequestError",
        "tool_choice",
    ),
    (
        {**CHAT, "tools": []},
        400,
        "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely. "
        "(parameter=tools)",
        "BadRequestError",
        "tools",
    ),
    (
        {**CHAT, "tools": [TOOL]},
        400,
        '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
        "BadRequestError",
        None,
    ),
]


@pytest.mark.parametrize(("body", "status", "message", "kind", "param"), REFUSALS)
def test_bad_requests_are_refused_in_the_real_engines_words(
    engine: Engine, body: dict[str, Any], status: int, message: str, kind: str, param: str | None
) -> None:
    answer = post(engine, "/v1/chat/completions", body)
    assert answer.status_code == status
    assert answer.json() == {"error": {"message": message, "type": kind, "param": param, "code": status}}


def test_completion_that_does_not_fit_counts_the_tokens_it_asked_for(engine: Engine) -> None:
    error = post(engine, "/v1/completions", {"model": "tiny", "prompt": "one " * 3000}).json()["error"]
    assert "you requested 16 output tokens and your prompt contains at least 2033 input tokens" in error["message"]
    error = post(engine, "/v1/completions", {"model": "tiny", "prompt": ""}).json()["error"]
    assert error["message"] == "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
    error = post(engine, "/v1/completions", {"model": "tiny", "prompt": []}).json()["error"]
    assert error["message"] == "You must pass at least one prompt"


def test_tools_may_be_left_to_the_model_with_their_flags(tmp_path: Path) -> None:
    with running(tmp_path, "--enable-auto-tool-choice", "--tool-call-parser", "hermes") as engine:
        body = post(engine, "/v1/chat/completions", {**CHAT, "tools": [TOOL], "max_tokens": 3}).json()
        assert body["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"{", "'type': 'json_invalid', 'loc': 'body.1', 'msg': 'JSON decode error', 'input': '<dict of 0 items>'"),
        (b"[]", "'type': 'model_attributes_type', 'loc': 'body'"),
        (b"", "'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'"),
        (b"null", "'type': 'model_attributes_type'"),
        (b"\xff", "'type': 'json_invalid'"),
    ],
)
def test_body_that_is_no_json_object_is_400_not_422(engine: Engine, raw: bytes, words: str) -> None:
    answer = engine.http.post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "Bad Request"
    assert words in answer.json()["error"]["message"]


def test_text_model_has_no_pooling_routes_and_takes_any_role(engine: Engine) -> None:
    for path in ("/v1/embeddings", "/rerank", "/v1/audio/transcriptions"):
        answer = post(engine, path, {"model": "tiny", "input": "x"})
        assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})
    odd = {**CHAT, "messages": [{"role": "clown", "content": "x"}], "max_tokens": 1}
    assert post(engine, "/v1/chat/completions", odd).status_code == 200


# -- clients that leave, many at once ----------------------------------------------------------------------------


def test_client_that_leaves_is_aborted_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "--enforce-eager", speed=1.0) as engine:
        stream = engine.stream(max_tokens=5000, ignore_eos=True)
        eventually(lambda: engine.metric("num_requests_running") == 1)
        eventually(lambda: stream.events > 1)
        stream.hang_up()
        stream.finished()
        left = time.monotonic()
        eventually(lambda: engine.metric("num_requests_running") == 0)
        # Hangs, not speed, is what this bound is about: the abort itself takes some ten milliseconds.
        assert time.monotonic() - left < 5
        assert engine.metric("generation_tokens_total") < 3000


def test_client_that_leaves_a_plain_request_is_aborted_too(tmp_path: Path) -> None:
    with running(tmp_path, "--enforce-eager", speed=1.0) as engine:
        with pytest.raises(httpx.ReadTimeout):
            post(
                engine,
                "/v1/completions",
                {"model": "tiny", "prompt": "x", "max_tokens": 5000, "ignore_eos": True},
                timeout=0.5,
            )
        eventually(lambda: engine.metric("num_requests_running") == 0)


def test_many_streams_at_once_all_finish_with_their_own_text(engine: Engine) -> None:
    streams = [engine.stream(f"prompt {number}", max_tokens=40) for number in range(24)]
    texts = [stream.finished().text for stream in streams]
    assert len(set(texts)) == 24
    assert all(stream.reasons == ["length"] and stream.done for stream in streams)


@pytest.mark.slow
def test_load_counts_what_is_under_way(tmp_path: Path) -> None:
    with running(tmp_path, "--enforce-eager", "--enable-server-load-tracking", speed=1.0) as engine:
        streams = [engine.stream(max_tokens=5000, ignore_eos=True) for _ in range(3)]
        eventually(lambda: engine.http.get("/load").json() == {"server_load": 3})
        for stream in streams:
            stream.hang_up()


# -- metrics -----------------------------------------------------------------------------------------------------


def test_metrics_have_vllms_names_and_count(tmp_path: Path) -> None:
    with running(tmp_path, speed=200.0) as engine:
        engine.complete("hello", max_tokens=10)
        engine.complete("hello", max_tokens=1)
        page = engine.http.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain; version=1.0.0")
        for name in (
            "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
            "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total",
            "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_sum",
            "e2e_request_latency_seconds_count",
            "prefix_cache_queries_total", "prefix_cache_hits_total", "engine_sleep_state", "cache_config_info",
        ):  # fmt: skip
            assert f"\nvllm:{name}{{" in page.text, name
        assert engine.metric("generation_tokens_total") == 11
        assert engine.metric("request_success_total", finished_reason="length") == 2
        assert engine.metric("time_to_first_token_seconds_count") == 2
        assert engine.metric("inter_token_latency_seconds_count") == 9
        assert engine.metric("request_queue_time_seconds_count") == 2
        assert engine.metric("engine_sleep_state", sleep_state="awake") == 1


def test_metrics_page_is_valid_prometheus_text(engine: Engine) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    families = list(text_string_to_metric_families(engine.http.get("/metrics").text))
    assert {family.name for family in families} >= {"vllm:num_requests_running", "vllm:time_to_first_token_seconds"}
    for family in families:
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"


# -- keys --------------------------------------------------------------------------------------------------------


def test_engine_port_is_useless_without_its_token(engine: Engine) -> None:
    bare = httpx.Client(base_url=f"http://127.0.0.1:{engine.port}", trust_env=False)
    with bare:
        assert bare.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/kvcache/status", "/tokenize"):
            answer = bare.get(path)
            assert answer.status_code == 401, path
        assert bare.get("/v1/models", headers={"Authorization": f"Bearer {TOKEN}x"}).status_code == 401


def test_api_key_guards_only_vllms_prefixes(tmp_path: Path) -> None:
    with running(tmp_path, "--api-key", "secret", token=False) as engine:
        bare = httpx.Client(base_url=f"http://127.0.0.1:{engine.port}", trust_env=False)
        with bare:
            answer = bare.get("/v1/models")
            assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})
            assert bare.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
            for path in ("/health", "/ping", "/metrics", "/version", "/load"):
                assert bare.get(path).status_code == 200, path
            assert bare.post("/tokenize", json={"model": "tiny", "prompt": "x"}).status_code == 200


def test_root_path_may_or_may_not_be_on_the_request(tmp_path: Path) -> None:
    with running(tmp_path, "--root-path", "/m1") as engine:
        assert engine.http.get("/m1/v1/models").status_code == 200
        assert engine.http.get("/v1/models").status_code == 200


# -- other kinds of model ----------------------------------------------------------------------------------------


def test_embedding_model_embeds_and_does_not_chat(tmp_path: Path) -> None:
    with running(tmp_path, model="BAAI/bge-small-en-v1.5", facts=None) as engine:
        body = post(engine, "/v1/embeddings", {"model": "tiny", "input": ["one", "two"], "dimensions": 8}).json()
        first, second = (row["embedding"] for row in body["data"])
        assert len(first) == 8
        assert first != second
        assert sum(value**2 for value in first) == pytest.approx(1, abs=1e-4)
        assert body["usage"]["prompt_tokens"] > 0
        packed = post(
            engine,
            "/v1/embeddings",
            {"model": "tiny", "input": "one", "dimensions": 8, "encoding_format": "base64"},
        ).json()["data"][0]["embedding"]
        assert struct.unpack("<8f", base64.b64decode(packed)) == pytest.approx(first, abs=1e-6)
        assert len(post(engine, "/pooling", {"model": "tiny", "input": "one"}).json()["data"][0]["data"]) > 100
        assert post(engine, "/v1/chat/completions", CHAT).status_code == 404


def test_reranker_ranks_scores_and_classifies(tmp_path: Path) -> None:
    with running(tmp_path, model="BAAI/bge-reranker-base", facts=None) as engine:
        documents = ["nothing of it", "a red fox jumps", "red"]
        for path in ("/rerank", "/v1/rerank"):
            body = post(engine, path, {"model": "tiny", "query": "red fox", "documents": documents, "top_n": 2}).json()
            assert [row["index"] for row in body["results"]] == [1, 2]
        scores = post(engine, "/score", {"model": "tiny", "text_1": "red fox", "text_2": documents}).json()["data"]
        assert scores[1]["score"] > scores[2]["score"] > scores[0]["score"]
        row = post(engine, "/classify", {"model": "tiny", "input": "x"}).json()["data"][0]
        assert sum(row["probs"]) == pytest.approx(1)


def test_speech_model_transcribes_an_upload(tmp_path: Path) -> None:
    with running(tmp_path, model="openai/whisper-small", facts=None) as engine:
        answer = engine.http.post(
            "/v1/audio/transcriptions", data={"model": "tiny"}, files={"file": ("a.wav", b"\0" * 64_000)}
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["text"]
        assert answer.json()["usage"] == {"type": "duration", "seconds": 2}
        assert engine.http.post("/v1/audio/transcriptions", json={}).status_code == 400


# -- developer mode ----------------------------------------------------------------------------------------------


def test_developer_mode_has_its_routes(tmp_path: Path) -> None:
    with running(tmp_path, "--enable-sleep-mode", env={"VLLM_SERVER_DEV_MODE": "1"}) as engine:
        assert engine.http.get("/is_sleeping").json() == {"is_sleeping": False}
        answer = engine.http.post("/sleep?level=1")
        assert (answer.status_code, answer.content) == (200, b"")
        assert engine.http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert engine.health() == 200
        stream = engine.stream(max_tokens=3)
        time.sleep(0.3)
        assert stream.events == 0
        assert engine.http.post("/wake_up").status_code == 200
        assert stream.finished().reasons == ["length"]
        assert engine.http.post("/pause?mode=abort").json() == {"status": "paused"}
        assert engine.http.post("/resume").status_code == 200
        assert engine.http.post("/reset_prefix_cache?reset_running_requests=true").status_code == 200


def test_answers_do_not_wait_for_acknowledgements() -> None:
    # asyncio sets TCP_NODELAY on connections of listeners that name their protocol; otherwise each answer takes 40 ms.
    from models_app.simulator.config import read
    from models_app.simulator.server import _bind

    with _bind(read(["Qwen/Qwen3-0.6B", "--host", "127.0.0.1", "--port", "0"], {})) as listener:
        assert listener.proto == socket.IPPROTO_TCP
