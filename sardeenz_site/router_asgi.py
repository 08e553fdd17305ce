"""The router as a program: ``app`` for uvicorn, ``mount()`` for the web process, ``python -m`` for several workers.

Read from the environment (README's table): the addresses of Redis and of the routes file, and the limits whose names
begin with SARDEENZ_ROUTER. No Django settings, apps or database are loaded here.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from pathlib import Path

from models_app.router.app import RouterApp
from models_app.router.config import MIB, RouterConfig
from models_app.router.metrics_share import MetricsFiles
from models_app.router.request import Receive, Scope, Send
from models_app.router.table import TableSource
from sardeenz_site.env import env_bool, env_bytes, env_float, env_int, env_path, env_secret, load_env_file
from sardeenz_site.redis_url import celery_broker_url, redis_url
from sardeenz_site.router_feed import RouterFeed

BASE_DIR = Path(__file__).resolve().parent.parent
#: daphne never waits for a slow reader, so what one answer may pile up in its memory is bounded here.
_DAPHNE_RESPONSE_BYTES = 64 * MIB


def config_from_env() -> RouterConfig:
    """Raises ImproperlyConfigured with a sentence for a value that makes no sense."""
    base = RouterConfig()
    return replace(
        base,
        max_body_bytes=env_bytes("SARDEENZ_ROUTER_MAX_BODY", base.max_body_bytes),
        max_upload_bytes=env_bytes("SARDEENZ_ROUTER_MAX_UPLOAD", base.max_upload_bytes),
        first_byte_s=env_float("SARDEENZ_ROUTER_FIRST_BYTE_S", base.first_byte_s, minimum=1.0),
        answer_s=env_float("SARDEENZ_ROUTER_ANSWER_S", base.answer_s, minimum=1.0),
        idle_s=env_float("SARDEENZ_ROUTER_IDLE_S", base.idle_s, minimum=1.0),
        queue_wait_s=env_float("SARDEENZ_ROUTER_QUEUE_WAIT_S", base.queue_wait_s, minimum=0.0),
        queue_limit=env_int("SARDEENZ_ROUTER_QUEUE_LIMIT", base.queue_limit, minimum=1),
        key_age_limit_s=env_float("SARDEENZ_ROUTER_KEY_AGE_LIMIT_S", base.key_age_limit_s, minimum=5.0),
        metrics_open=env_bool("SARDEENZ_ROUTER_METRICS_OPEN", base.metrics_open),
    )


def _collect_rarely() -> None:
    """What was imported is never garbage, and a request leaves no cycles: look for them less often than Python does."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


class FedRouter:
    """RouterApp and its feed as one ASGI application; both start at the lifespan, or else at the first request."""

    def __init__(self, router: RouterApp, feed: RouterFeed, *, own_process: bool) -> None:
        self.router = router
        self.feed = feed
        self._own_process = own_process
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._started:
            self._started = True
            self.feed.start(self.router)
            if self._own_process:
                _collect_rarely()
        await self.router(scope, receive, send)
        if scope["type"] == "lifespan":
            await self.feed.stop()
            self._started = False


def _build(*, inside_web: bool) -> FedRouter:
    load_env_file(BASE_DIR / ".env")
    config = config_from_env()
    if inside_web:
        config = replace(config, max_response_bytes=_DAPHNE_RESPONSE_BYTES)
    home = env_path("SARDEENZ_HOME", BASE_DIR / "var")
    url = redis_url(env_secret("REDIS_URL"), home)
    source = TableSource()
    feed = RouterFeed(source, file=home / "routes.json", redis_url=url, celery_url=celery_broker_url(url))
    router = RouterApp(
        source,
        on_demand=feed.on_demand,
        on_usage=feed.on_usage,
        on_event=feed.on_event,
        on_capture=feed.on_capture,
        on_suspect=feed.on_suspect,
        config=config,
        metrics_files=None if inside_web else MetricsFiles(home / "router-metrics"),
    )
    return FedRouter(router, feed, own_process=not inside_web)


def mount() -> FedRouter:
    """The router inside the web process, under ``/v1``: its own table and connections, bounded answers."""
    return _build(inside_web=True)


def __getattr__(name: str) -> FedRouter:
    """``app`` is made when it is first asked for: importing this module for ``mount`` makes no second router."""
    if name == "app":
        globals()["app"] = made = _build(inside_web=False)
        return made
    raise AttributeError(name)


def main() -> None:
    """``python -m sardeenz_site.router_asgi --port 8001 --workers 2``: uvicorn with the options that fit a router."""
    import uvicorn

    parser = argparse.ArgumentParser(prog="router")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--log-level", default="warning")
    args = parser.parse_args()
    uvicorn.run(
        "sardeenz_site.router_asgi:app",
        host=args.host,
        port=args.port,
        workers=args.workers,
        log_level=args.log_level,
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=2048,
        timeout_graceful_shutdown=3,
    )


if __name__ == "__main__":
    main()
