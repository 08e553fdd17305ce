"""The processes of one machine: how each is started, in which order they end, and how long each may take to."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from sardeenz_site.run.config import Config


@dataclass(frozen=True)
class Process:
    """``wave``: processes end wave by wave, those that take new work first."""

    name: str
    argv: tuple[str, ...]
    wave: int
    stop_limit_s: float


def _python(*args: str) -> tuple[str, ...]:
    return (sys.executable, *args)


def _worker(name: str, queue: str, threads: int, host_name: str) -> tuple[str, ...]:
    # Threads: tasks wait for HTTP and files, and a pool of processes would cost 90 MB each.
    return _python(
        *("-m", "celery", "--quiet", "-A", "sardeenz_site.celery", "worker"),
        *("--hostname", f"{name}@{host_name}", "--queues", queue, "--pool", "threads", "--concurrency", str(threads)),
        *("--loglevel", "INFO", "--without-gossip", "--without-mingle", "--without-heartbeat"),
    )


def web(config: Config) -> Process:
    return Process(
        "web",
        _python(
            *("-m", "daphne", "-v", "0", "--bind", config.host, "--port", str(config.port), "--no-server-name"),
            *("--application-close-timeout", "3", "sardeenz_site.asgi:application"),
        ),
        wave=0,
        stop_limit_s=6,
    )


def router(config: Config) -> Process:
    return Process(
        "router",
        _python(
            *("-m", "sardeenz_site.router_asgi", "--host", config.host, "--port", str(config.router_port)),
        ),
        wave=0,
        stop_limit_s=6,
    )


def processes(config: Config) -> list[Process]:
    """In order of start."""
    serving = [
        web(config),
        router(config),
        Process("control", _worker("control", "control", 4, config.host_name), wave=1, stop_limit_s=10),
        Process(
            "beat",
            _python(
                *("-m", "celery", "--quiet", "-A", "sardeenz_site.celery", "beat", "--loglevel", "INFO"),
                # In memory: every entry is a short period, so there is nothing to remember over a restart.
                *("--scheduler", "celery.beat:Scheduler", "--pidfile", ""),
            ),
            wave=0,
            stop_limit_s=6,
        ),
    ]
    on_host = [
        Process("host", _worker("host", f"host.{config.host_name}", 4, config.host_name), wave=1, stop_limit_s=10),
        Process("sampler", _python("manage.py", "run_sampler"), wave=1, stop_limit_s=5),
    ]
    return {"all": [*serving, *on_host], "control": serving, "host": on_host}[config.role]
