"""Numbers out of /metrics and /kvcache/status."""

from __future__ import annotations

import json

import pytest

from gpus_app.probes.engine_metrics import LimitFacts, parse_metrics, parse_status
from tests.gpus_app.fake_host import metrics_text


def test_the_needed_numbers_are_found_among_others() -> None:
    found = parse_metrics(metrics_text(running=4, waiting=2, tokens=1234, preemptions=7, filler=50).encode())
    assert (found.running, found.waiting, found.preemptions, found.generation_tokens) == (4, 2, 7, 1234)
    assert found.sleep_state == "awake"


def test_a_longer_name_is_another_metric() -> None:
    body = b'vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'
    assert parse_metrics(body).waiting == 1


def test_engines_of_one_server_are_added_up() -> None:
    body = b'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_running{engine="1"} 2.0\n'
    assert parse_metrics(body).running == 3


@pytest.mark.parametrize(
    "body", [b"", b"\n", b"vllm:num_requests_running", b"<html>", b"vllm:num_requests_running{} x\n"]
)
def test_what_is_not_told_is_unknown(body: bytes) -> None:
    found = parse_metrics(body)
    assert found.running is None and found.sleep_state is None


def test_nan_and_negative_values_are_unknown() -> None:
    assert parse_metrics(b"vllm:num_requests_running{} NaN\nvllm:num_requests_waiting{} -1\n").running is None


def test_large_counters_in_scientific_form_are_whole_numbers() -> None:
    assert parse_metrics(b"vllm:generation_tokens_total{} 1.234567e+06\n").generation_tokens == 1_234_567


def test_a_sleeping_engine_says_so() -> None:
    body = b'vllm:engine_sleep_state{sleep_state="awake"} 0.0\n'
    body += b'vllm:engine_sleep_state{sleep_state="weights_offloaded"} 1.0\n'
    assert parse_metrics(body).sleep_state == "weights_offloaded"


def test_the_usage_metric_is_not_read() -> None:
    """E3: 0.997 on an idle engine is no alarm; use comes from the segment."""
    assert not hasattr(parse_metrics(b"vllm:kv_cache_usage_perc{} 0.997\n"), "usage")


def test_a_status_tells_capacity_and_whether_a_stranger_wrote() -> None:
    body = json.dumps({"segments": [{"capacity_bytes": 20, "limit_bytes": 8, "drift_bytes": 3}]}).encode()
    assert parse_status(body) == LimitFacts(20, 8, True)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"segments": []}', b'{"segments": [null]}', b'{"segments": 3}'])
def test_an_answer_without_segment_is_no_status(body: bytes) -> None:
    assert parse_status(body) is None
