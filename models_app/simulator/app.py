"""The HTTP application: routes, keys, and the endpoints that are not about generating. All async, plain ASGI."""

from __future__ import annotations

import contextlib
import hmac
import time
import uuid
from types import SimpleNamespace
from typing import Any

from models_app.simulator import prompts, text
from models_app.simulator.client import Aborted, EngineClient, EngineDeadError
from models_app.simulator.core import vllm_config
from models_app.simulator.generate import Generator
from models_app.simulator.http import ApiError, ClientGone, Handler, Receive, Request, Scope, Send, invalid_all
from models_app.simulator.metrics import Metrics, render
from models_app.simulator.pooling import Pooling, tasks
from models_app.simulator.pr324 import Endpoints

#: What ``--api-key`` guards: prefixes by the first vLLM version that has them.
GUARDED = (((0, 0), "/v1"), ((0, 24), "/v2"), ((0, 24), "/inference"), ((0, 32), "/cohere"))


class App:
    """Everything that the simulated ``vllm serve`` answers, except ``/kvcache``."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.config = client.config
        self.metrics = Metrics()
        client.on_queued = self.metrics.queue.observe
        self.created = int(time.time())
        self.in_flight = 0
        #: What the add-on finds in ``scope["app"].state``, as in vLLM's own application.
        self.state = SimpleNamespace(engine_client=client, vllm_config=vllm_config(self.config, 0))
        self._guarded = tuple(prefix for since, prefix in GUARDED if self.config.version >= since)
        self._cache_info = {
            "block_size": str(self.config.block_tokens),
            "enable_prefix_caching": str(self.config.prefix_caching),
            "gpu_memory_utilization": str(self.config.gpu_memory_utilization),
        }
        self.handlers: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self.health,
            ("GET", "/ping"): self.health,
            ("POST", "/ping"): self.health,
            ("GET", "/metrics"): self.show_metrics,
            ("GET", "/version"): self.version,
            ("GET", "/load"): self.load,
            ("GET", "/v1/models"): self.models,
            ("POST", "/tokenize"): self.tokenize,
            ("POST", "/detokenize"): self.detokenize,
            **Pooling(client).handlers(),
        }
        if "generate" in tasks(self.config):
            generator = Generator(client, self.metrics)
            self.handlers |= {
                ("POST", "/v1/chat/completions"): generator.chat,
                ("POST", "/v1/completions"): generator.completions,
                ("POST", "/v1/responses"): generator.responses,
            }
        if self.config.dev_mode:
            self._add_developer_routes()
        if "pr324" in client.faults:
            self.handlers |= Endpoints(self.config, self.config.gpu_bytes).handlers
        self._paths = {path for _, path in self.handlers}
        #: As a Starlette application has it: the add-on looks here for the pull request's own endpoints.
        self.routes = [SimpleNamespace(path=path) for path in self._paths]

    def route_table(self) -> list[tuple[str, str]]:
        """Path and methods, for the start-up log."""
        return [
            (path, ", ".join(method for method, each in self.handlers if each == path)) for path in sorted(self._paths)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        root = self.config.root_path
        if root and path.startswith(root + "/"):
            path = path.removeprefix(root)
        request = Request(scope, receive, send, path)
        self.in_flight += 1
        try:
            await self._answer(request)
        except (ClientGone, OSError):
            pass
        finally:
            self.in_flight -= 1

    async def _answer(self, request: Request) -> None:
        if self._needs_key(request):
            await request.reply_json({"error": "Unauthorized"}, 401)
            return
        handler = self.handlers.get((request.method, request.path))
        if handler is None:
            found = request.path in self._paths
            status, text_ = (405, "Method Not Allowed") if found else (404, "Not Found")
            await request.reply_json({"detail": text_}, status)
            return
        try:
            await handler(request)
        except ApiError as error:
            await request.reply_json(error.body, error.status)
        except (EngineDeadError, Aborted, RuntimeError) as error:
            await request.reply_json(ApiError(500, str(error), "InternalServerError").body, 500)

    def _needs_key(self, request: Request) -> bool:
        if not self.config.api_keys or request.method == "OPTIONS" or not request.path.startswith(self._guarded):
            return False
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        known = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in self.config.api_keys]
        return scheme.lower() != "bearer" or not any(known)

    # -- state of the server -------------------------------------------------------------------------------------

    async def health(self, request: Request) -> None:
        """200 as long as EngineCore lives: asleep, starved or hung."""
        await request.reply_empty(503 if self.client.errored and not self.client.draining else 200)

    async def show_metrics(self, request: Request) -> None:
        page = render(
            self.metrics,
            self.client.stats,
            self.config.served_names[0],
            self.client.sleep_level,
            self._cache_info,
        )
        await request.reply(200, page.encode(), "text/plain; version=1.0.0; charset=utf-8")

    async def version(self, request: Request) -> None:
        await request.reply_json({"version": self.config.vllm_version})

    async def load(self, request: Request) -> None:
        await request.reply_json({"server_load": self.client.in_flight if self.config.load_tracking else 0})

    async def models(self, request: Request) -> None:
        permission = {
            "id": f"modelperm-{uuid.uuid4().hex[:16]}",
            "object": "model_permission",
            "created": self.created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self.created,
                "owned_by": "vllm",
                "root": self.config.model,
                "parent": None,
                "max_model_len": self.config.max_model_len,
                "permission": [permission],
            }
            for name in self.config.served_names
        ]
        await request.reply_json({"object": "list", "data": cards})

    async def tokenize(self, request: Request) -> None:
        body = await request.json()
        model = prompts.served_model(self.config, body)
        if "messages" in body:
            given = prompts.chat_prompt(body, model)
        elif isinstance(body.get("prompt"), str):
            given = body["prompt"]
        else:
            raise invalid_all([(f"body.{name}", "Field required", "missing", body) for name in ("prompt", "messages")])
        tokens = text.encode(given)
        strings = [text.decode([token]) for token in tokens] if body.get("return_token_strs") else None
        await request.reply_json(
            {
                "count": len(tokens),
                "max_model_len": self.config.max_model_len,
                "tokens": tokens,
                "token_strs": strings,
            }
        )

    async def detokenize(self, request: Request) -> None:
        body = await request.json()
        prompts.served_model(self.config, body)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise ApiError(400, "tokens must be a list of integers")
        await request.reply_json({"prompt": text.decode(tokens)})

    # -- VLLM_SERVER_DEV_MODE ------------------------------------------------------------------------------------

    def _add_developer_routes(self) -> None:
        client = self.client

        async def sleep(request: Request) -> None:
            level = int(request.query.get("level", "1"))
            await client.sleep(level, request.query.get("mode", "abort"))
            await self._done(request, {"status": "sleeping", "level": level})

        async def wake(request: Request) -> None:
            tags = request.query.get("tags")
            await client.wake_up([tags] if tags else None)
            await self._done(request, {"status": "awake"})

        async def is_sleeping(request: Request) -> None:
            await request.reply_json({"is_sleeping": await client.is_sleeping()})

        async def pause(request: Request) -> None:
            await client.pause_generation(mode=request.query.get("mode", "abort"))
            await request.reply_json({"status": "paused"})

        async def resume(request: Request) -> None:
            await client.resume_generation()
            await request.reply_json({"status": "resumed"})

        async def is_paused(request: Request) -> None:
            await request.reply_json({"is_paused": await client.is_paused()})

        async def reset(request: Request) -> None:
            running = request.query.get("reset_running_requests", "").lower() in ("1", "true")
            await client.reset_prefix_cache(reset_running_requests=running)
            await request.reply_empty()

        async def info(request: Request) -> None:
            await request.reply_json({"vllm_config": str(self.state.vllm_config)})

        self.handlers |= {
            ("POST", "/sleep"): sleep,
            ("POST", "/wake_up"): wake,
            ("GET", "/is_sleeping"): is_sleeping,
            ("POST", "/pause"): pause,
            ("POST", "/resume"): resume,
            ("GET", "/is_paused"): is_paused,
            ("POST", "/reset_prefix_cache"): reset,
            ("GET", "/server_info"): info,
        }

    async def _done(self, request: Request, content: dict[str, Any]) -> None:
        """An empty 200 up to vLLM 0.31, JSON afterwards."""
        if self.config.version >= (0, 32):
            await request.reply_json(content)
        else:
            await request.reply_empty()


async def _lifespan(receive: Receive, send: Send) -> None:
    with contextlib.suppress(Exception):
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return
