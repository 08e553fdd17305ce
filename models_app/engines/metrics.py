"""The few figures of ``/metrics`` that the controller lives by, from Prometheus' text format.

vLLM's ``kv_cache_usage_perc`` is left out on purpose: under kvcached it is no share of the limit (an idle instance
with one bundle in use has reported 0.997, another −0.025), and it stands still while the engine is idle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)(?: \d+)?$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_SLEEP_LEVELS = {"awake": None, "weights_offloaded": 1, "discard_all": 2}


@dataclass(frozen=True)
class EngineMetrics:
    """Sums over all engines of the server. Counters count since the start of the process.

    ``sleep_state``: ``awake``, ``weights_offloaded`` (level 1), ``discard_all`` (level 2), or empty when not told.
    """

    running: float = 0.0
    waiting: float = 0.0
    preemptions: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    requests_finished: float = 0.0
    prefix_cache_queries: float = 0.0
    prefix_cache_hits: float = 0.0
    sleep_state: str = ""

    @property
    def sleep_level(self) -> int | None:
        return _SLEEP_LEVELS.get(self.sleep_state)

    @property
    def busy(self) -> bool:
        return self.running + self.waiting > 0


_FIELDS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:request_success_total": "requests_finished",
    "vllm:prefix_cache_queries_total": "prefix_cache_queries",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits",
}


def samples(text: str, prefix: str = "vllm:") -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each sample whose name begins with ``prefix``; lines that are none are passed over."""
    for line in text.splitlines():
        if not line.startswith(prefix):
            continue
        match = _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        yield match[1], dict(_LABEL.findall(match[2] or "")), value


def parse_metrics(text: str) -> EngineMetrics:
    """Read an engine's answer. What it does not tell is 0."""
    sums = dict.fromkeys(_FIELDS.values(), 0.0)
    sleep_state = ""
    for name, labels, value in samples(text):
        if name in _FIELDS:
            sums[_FIELDS[name]] += value
        elif name == "vllm:engine_sleep_state" and value == 1.0:
            sleep_state = labels.get("sleep_state", "")
    return EngineMetrics(**sums, sleep_state=sleep_state)
