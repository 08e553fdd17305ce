"""This machine as a host: what it is, and that its worker lives."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import psutil
from django.conf import settings

from gpus_app import services as gpu_services
from gpus_app.models import Host
from models_app.engines.simulated import VERSIONS as simulated_versions
from models_app.engines.versions import detect_versions

log = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def boot_id() -> str:
    """The kernel's id of this boot; empty where there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def this_host_register() -> Host:
    """Enter this machine, or bring its row up to date, and say that its worker lives."""
    name = settings.SARDEENZ_HOST_NAME
    simulated = settings.SARDEENZ_ENGINE == "simulated"
    versions: dict[str, Any] = dict(simulated_versions if simulated else detect_versions(settings.SARDEENZ_VLLM))
    host = gpu_services.host_register(
        name,
        address=settings.SARDEENZ_HOST_ADDRESS,
        engine_kind=settings.SARDEENZ_ENGINE,
        versions=versions,
        total_ram_bytes=psutil.virtual_memory().total,
        boot_id=boot_id(),
    )
    this_host_beat()
    return host


def this_host_beat() -> bool:
    """Note that the worker of this machine lives. False: its row is gone, register again."""
    return gpu_services.host_heartbeat(
        settings.SARDEENZ_HOST_NAME, source="worker", available_ram_bytes=psutil.virtual_memory().available
    )
