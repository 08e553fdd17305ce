"""``manage.py run_sampler``: the loop that reads GPUs and engines of this host every second."""

from __future__ import annotations

import argparse
import logging
import signal
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from gpus_app.events import HintSender, hint_sender
from gpus_app.probes.base import Probe
from gpus_app.probes.nvml import NvmlProbe
from gpus_app.probes.sim_ledger import ensure_gpus
from gpus_app.probes.simulated import SimulatedProbe
from gpus_app.sampler.loop import SamplerLoop
from gpus_app.sampler.observer import Observer
from gpus_app.sampler.publisher import Publisher
from gpus_app.sampler.recorder import HostFacts, Recorder

log = logging.getLogger(__name__)


class Command(BaseCommand):
    help = "Read the GPUs and engines of this host every second, publish and record (one process per GPU host)."
    # The checks import every page and form of the site: memory that this process would keep for nothing.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--looks", type=int, default=None, help="End after so many looks.")

    def handle(self, *args: Any, **options: Any) -> None:
        probe = make_probe()
        observer = Observer(host_name=settings.SARDEENZ_HOST_NAME, probe=probe, run_dir=settings.SARDEENZ_RUN_DIR)
        facts = HostFacts(settings.SARDEENZ_HOST_NAME, settings.SARDEENZ_HOST_ADDRESS, settings.SARDEENZ_ENGINE)
        recorder = Recorder(facts, driver_version=lambda: probe.driver_version, send_hint=_sender())
        loop = SamplerLoop(observer, Publisher(settings.REDIS_URL), recorder)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: loop.stop())
        log.info("sampling %s, %s GPUs", facts.name, facts.engine_kind if facts.engine_kind != "vllm" else "NVIDIA")
        loop.run(options["looks"])


def make_probe() -> Probe:
    """Real cards where real engines run, else the simulated ones of this host."""
    if settings.SARDEENZ_ENGINE == "vllm":
        return NvmlProbe()
    folder = settings.SARDEENZ_SIM_DIR
    folder.mkdir(parents=True, exist_ok=True)
    ensure_gpus(folder, settings.SARDEENZ_SIM_GPUS, settings.SARDEENZ_SIM_GPU_BYTES, settings.SARDEENZ_HOST_NAME)
    return SimulatedProbe(folder)


def _sender() -> HintSender | None:
    path = getattr(settings, "SARDEENZ_HINT_SENDER", "")
    return hint_sender(path) if path else None
