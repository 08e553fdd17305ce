"""A door for the tests: one of the add-on's operations, by HTTP. Runs in the engine's process (``--middleware
addon_door.Door``).

The product has no such door: operations are reached through ``/kvcache`` only, and ``preempt`` not at all.
"""

from __future__ import annotations

import json
from typing import Any


class Door:
    """``POST /test/OPERATION`` with the arguments as JSON."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/test/"):
            await self.app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        core = scope["app"].state.engine_client.engine_core
        answer = await core.call_utility_async("sardeenz_op", scope["path"][6:], json.loads(body or b"{}"))
        content = json.dumps(answer).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": content})
