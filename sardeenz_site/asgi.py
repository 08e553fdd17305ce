"""The web process: ``/v1`` goes to the router, ``/static`` to files, sockets to consumers, the rest to Django."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sardeenz_site.settings")

from django.core.asgi import get_asgi_application

django_app = get_asgi_application()  # sets Django up; what follows needs its apps

from channels.auth import AuthMiddlewareStack
from channels.routing import URLRouter
from channels.security.websocket import AllowedHostsOriginValidator

from models_app.ws_urls import websocket_urlpatterns
from sardeenz_site.router_asgi import mount
from sardeenz_site.static_files import static_app

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_router = mount()
_static = static_app(django_app)
_sockets = AllowedHostsOriginValidator(AuthMiddlewareStack(URLRouter(websocket_urlpatterns)))


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Dispatch by kind and path. The router has no Django in its path: no session, no ORM, no middleware."""
    kind = scope["type"]
    if kind == "lifespan":  # uvicorn sends it, daphne does not; only the router has something to open and close
        await _router(scope, receive, send)
    elif kind == "websocket":
        await _sockets(scope, receive, send)
    elif scope["path"] == "/v1" or scope["path"].startswith("/v1/"):
        await _router(scope, receive, send)
    else:
        await _static(scope, receive, send)
