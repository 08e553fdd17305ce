"""``/metrics`` in vLLM's names and labels, as Prometheus text; histograms with vLLM's buckets."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from typing import Any

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


class Histogram:
    """Counts by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Metrics:
    """What the API server has seen of requests."""

    def __init__(self) -> None:
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.first_token = Histogram(_TTFT)
        self.between_tokens = Histogram(_ITL)
        self.whole = Histogram(_LATENCY)
        self.queue = Histogram(_LATENCY)
        self.prompt_tokens = Histogram(_TOKENS)
        self.output_tokens = Histogram(_TOKENS)
        self.started_at = time.time()

    def request(self, prompt_tokens: int, max_tokens: int) -> Watch:
        """Begin to watch a request."""
        self.prompt_tokens.observe(prompt_tokens)
        return Watch(self)


class Watch:
    """The times of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = self._last = time.monotonic()
        self._count = 0

    def tokens(self, count: int) -> None:
        now = time.monotonic()
        if not self._count:
            self._metrics.first_token.observe(now - self._began)
            count_after_first = count - 1
        else:
            count_after_first = count
        if count_after_first:
            self._metrics.between_tokens.observe((now - self._last) / count, count_after_first)
        self._count += count
        self._last = now

    def finished(self, reason: str) -> None:
        self._metrics.finished[reason] = self._metrics.finished.get(reason, 0) + 1
        self._metrics.whole.observe(time.monotonic() - self._began)
        self._metrics.output_tokens.observe(self._count)


def render(metrics: Metrics, stats: dict[str, Any], model_name: str, sleep_level: int, cache: dict[str, str]) -> str:
    """The whole page. ``stats`` is EngineCore's last report, so an idle engine shows the values of its last step."""
    page = _Page(model_name)
    page.gauge("num_requests_running", "Number of requests in model execution batches.", stats.get("running", 0))
    waiting = stats.get("waiting", 0)
    page.gauge("num_requests_waiting", "Number of requests waiting to be processed.", waiting)
    page.labelled(
        "num_requests_waiting_by_reason",
        "gauge",
        "Number of waiting requests by reason.",
        [({"reason": "capacity"}, waiting), ({"reason": "deferred"}, 0)],
    )
    awake = {0: "awake", 1: "weights_offloaded", 2: "discard_all"}
    page.labelled(
        "engine_sleep_state",
        "gauge",
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
        "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
        [({"sleep_state": name}, int(level == sleep_level)) for level, name in awake.items()],
    )
    page.gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", stats.get("usage", 0.0))
    for name, key, text in (
        ("prefix_cache_queries", "prefix_queries", "Prefix cache queries, in terms of number of queried tokens."),
        ("prefix_cache_hits", "prefix_hits", "Prefix cache hits, in terms of number of cached tokens."),
        ("num_preemptions", "preemptions", "Cumulative number of preemption from the engine."),
        ("prompt_tokens", "prompt_tokens", "Number of prefill tokens processed."),
        ("generation_tokens", "generation_tokens", "Number of generation tokens processed."),
    ):
        page.counter(name, text, stats.get(key, 0), metrics.started_at)
    page.labelled(
        "request_success_total",
        "counter",
        "Count of successfully processed requests.",
        [({"finished_reason": reason}, count) for reason, count in metrics.finished.items()],
    )
    for name, text, histogram in (
        ("request_prompt_tokens", "Number of prefill tokens processed.", metrics.prompt_tokens),
        ("request_generation_tokens", "Number of generation tokens processed.", metrics.output_tokens),
        ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", metrics.first_token),
        ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", metrics.between_tokens),
        ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", metrics.whole),
        ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", metrics.queue),
    ):
        page.histogram(name, text, histogram)
    page.labelled("cache_config_info", "gauge", "Information of the LLMEngine CacheConfig", [(cache, 1)])
    return page.text()


class _Page:
    def __init__(self, model_name: str) -> None:
        self._base = {"engine": "0", "model_name": model_name}
        self._lines: list[str] = []

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def gauge(self, name: str, text: str, value: float) -> None:
        self.labelled(name, "gauge", text, [({}, value)])

    def counter(self, name: str, text: str, value: float, created: float) -> None:
        self.labelled(f"{name}_total", "counter", text, [({}, value)])
        self.labelled(f"{name}_created", "gauge", text, [({}, created)])

    def labelled(self, name: str, kind: str, text: str, rows: Sequence[tuple[dict[str, str], float]]) -> None:
        self._head(name, kind, text)
        for labels, value in rows:
            self._row(name, labels, value)

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        self._head(name, "histogram", text)
        total = 0
        for bound, count in zip((*map(repr, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            total += count
            self._row(f"{name}_bucket", {"le": bound}, total)
        self._row(f"{name}_count", {}, total)
        self._row(f"{name}_sum", {}, histogram.sum)

    def _head(self, name: str, kind: str, text: str) -> None:
        self._lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} {kind}"]

    def _row(self, name: str, labels: dict[str, str], value: float) -> None:
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in sorted({**self._base, **labels}.items()))
        self._lines.append(f"vllm:{name}{{{shown}}} {float(value)!r}")


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
