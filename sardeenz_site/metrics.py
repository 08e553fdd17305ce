"""``/metrics``: the newest readings and rows as Prometheus text. Nothing is kept between two scrapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.db.models import Count, Sum
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpus_app.models import Gpu, Host
from gpus_app.selectors import latest
from models_app.models import Instance, UsageRecord
from models_app.services.keys import api_key_check
from models_app.services.memory.sleep_ram import sleep_ram

GPU_LABELS = ("host", "gpu", "index", "name")
INSTANCE_LABELS = ("host", "gpu", "model", "instance", "replica")

#: name, help, key in the sample record, factor
GPU_GAUGES = (
    ("memory_total_bytes", "Memory of the GPU.", "total", 1.0),
    ("memory_used_bytes", "Memory in use, by whomever.", "used", 1.0),
    ("memory_other_bytes", "Memory in use by processes that are not ours.", "other", 1.0),
    ("utilization_ratio", "Share of the last second in which a kernel ran.", "util", 0.01),
    ("temperature_celsius", "Temperature.", "temp", 1.0),
    ("power_watts", "Power draw.", "power", 1.0),
)
INSTANCE_GAUGES = (
    ("resident_bytes", "Memory of the instance's processes on the GPU.", "resident", 1.0),
    ("kv_used_bytes", "KV memory in use, prefix cache included, per GPU.", "used", 1.0),
    ("kv_prealloc_bytes", "KV memory mapped but idle, per GPU.", "prealloc", 1.0),
    ("kv_limit_bytes", "KV limit in force, per GPU.", "limit", 1.0),
    ("kv_capacity_bytes", "Largest KV limit that the instance can honour, per GPU.", "capacity", 1.0),
    ("requests_running", "Requests being computed.", "running", 1.0),
    ("requests_waiting", "Requests that wait in the engine.", "waiting", 1.0),
)
INSTANCE_COUNTERS = (
    ("preemptions", "Requests thrown back to the queue for lack of KV memory.", "preemptions"),
    ("generation_tokens", "Tokens generated.", "gen_tokens"),
)


class Readings(Collector):
    """Reads on each scrape; a host whose sampler is silent shows in ``sardeenz_host_up`` and gives no stale numbers."""

    def collect(self) -> Iterator[Metric]:
        hosts = list(Host.objects.all())
        up = GaugeMetricFamily("sardeenz_host_up", "Whether the host was heard of lately.", labels=("host",))
        for host in hosts:
            up.add_metric((host.name,), float(host.reachable))
        yield up
        records = [record for host in hosts if host.reachable and (record := latest(host.name)) is not None]
        yield from _gpu_metrics(records)
        yield from _instance_metrics(records)
        yield from _row_metrics()


def _gpu_metrics(records: list[dict[str, Any]]) -> Iterator[Metric]:
    for name, text, key, factor in GPU_GAUGES:
        gauge = GaugeMetricFamily(f"sardeenz_gpu_{name}", text, labels=GPU_LABELS)
        for record, gpu in _gpus(records):
            if gpu.get(key) is not None:
                labels = (record["host"], gpu["uuid"], str(gpu["index"]), gpu["name"])
                gauge.add_metric(labels, gpu[key] * factor)
        yield gauge


def _instance_metrics(records: list[dict[str, Any]]) -> Iterator[Metric]:
    rows = [
        ((record["host"], gpu["uuid"], row["name"], str(row["id"]), str(row["replica"])), row)
        for record, gpu in _gpus(records)
        for row in gpu.get("instances", ())
    ]
    for name, text, key, factor in INSTANCE_GAUGES:
        gauge = GaugeMetricFamily(f"sardeenz_instance_{name}", text, labels=INSTANCE_LABELS)
        for labels, row in rows:
            if row.get(key) is not None:
                gauge.add_metric(labels, row[key] * factor)
        yield gauge
    for name, text, key in INSTANCE_COUNTERS:
        counter = CounterMetricFamily(f"sardeenz_instance_{name}", text, labels=INSTANCE_LABELS)
        for labels, row in rows:
            if row.get(key) is not None:
                counter.add_metric(labels, row[key])
        yield counter


def _gpus(records: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for record in records:
        for gpu in record["gpus"]:
            yield record, gpu


def _row_metrics() -> Iterator[Metric]:
    faulty = GaugeMetricFamily("sardeenz_gpu_faulty", "1 when the GPU is faulty or missing.", labels=GPU_LABELS)
    cards = list(Gpu.objects.select_related("host"))
    for card in cards:
        faulty.add_metric((card.host.name, card.uuid, str(card.index), card.name), float(card.state != Gpu.State.OK))
    yield faulty
    closed = GaugeMetricFamily("sardeenz_gpu_cordoned", "1 when the GPU takes no new instances.", labels=GPU_LABELS)
    for card in cards:
        closed.add_metric((card.host.name, card.uuid, str(card.index), card.name), float(card.cordoned))
    yield closed

    kept = GaugeMetricFamily("sardeenz_host_sleep_ram_bytes", "Host memory kept for sleepers.", labels=("host",))
    for ram in sleep_ram(list(Host.objects.all())).values():
        kept.add_metric((ram.host,), float(ram.held_bytes))
    yield kept

    states = GaugeMetricFamily("sardeenz_instances", "Instances by state.", labels=("model", "state"))
    counts = Instance.objects.order_by().values_list("model__served_model_name", "state").annotate(n=Count("pk"))
    for name, state, count in counts:
        states.add_metric((name, state), count)
    yield states

    by_model = UsageRecord.objects.order_by().values_list("served_model_name")
    for total in ("requests", "errors", "prompt_tokens", "completion_tokens"):
        text = f"{total.replace('_', ' ').capitalize()} of clients, by model."
        counter = CounterMetricFamily(f"sardeenz_router_{total}", text, labels=("model",))
        for name, value in by_model.annotate(value=Sum(total)):
            counter.add_metric((name,), value)
        yield counter


def _may_read(request: HttpRequest) -> bool:
    if settings.METRICS_PUBLIC or request.user.is_authenticated:
        return True
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return scheme.lower() == "bearer" and api_key_check(token.strip()) is not None


@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """For a logged-in user, any valid API key as bearer, or everyone with SARDEENZ_METRICS_PUBLIC."""
    if not _may_read(request):
        return HttpResponse(
            "An API key is needed: Authorization: Bearer <key>. Any role will do.\n",
            status=401,
            content_type="text/plain; charset=utf-8",
            headers={"WWW-Authenticate": 'Bearer realm="sardeenz"'},
        )
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Readings())
    return HttpResponse(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)
