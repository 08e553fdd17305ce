"""Headers on every answer of Django's: what a browser may load, and a request id that the log repeats.

Both middlewares run as they are under sync and async handlers, so that no view pays a thread hop for them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from typing import Any, cast

from django.http import HttpRequest, HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

from sardeenz_site.logs import REQUEST_ID

Handler = Callable[[HttpRequest], Any]

_USABLE_ID = re.compile(r"^[A-Za-z0-9._-]{8,64}$")

# 'self' covers ws:// and wss:// to our own origin in every browser that follows CSP level 3.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
PERMISSIONS_POLICY = "camera=(), geolocation=(), microphone=(), payment=(), usb=(), display-capture=()"


def _wrap(get_response: Handler, before: Callable[[HttpRequest], None], after: Callable[..., None]) -> Handler:
    if iscoroutinefunction(get_response):

        async def around_async(request: HttpRequest) -> HttpResponseBase:
            before(request)
            response = await cast("Awaitable[HttpResponseBase]", get_response(request))
            after(request, response)
            return response

        return around_async

    def around(request: HttpRequest) -> HttpResponseBase:
        before(request)
        response = cast("HttpResponseBase", get_response(request))
        after(request, response)
        return response

    return around


@sync_and_async_middleware
def security_headers(get_response: Handler) -> Handler:
    def after(request: HttpRequest, response: HttpResponseBase) -> None:
        response.headers.setdefault("Content-Security-Policy", CONTENT_SECURITY_POLICY)
        response.headers.setdefault("Permissions-Policy", PERMISSIONS_POLICY)
        response.headers.setdefault("Cross-Origin-Resource-Policy", "same-origin")
        # A page shows what its reader may see; no shared cache and no back button after logout may show it again.
        response.headers.setdefault("Cache-Control", "no-store")

    return _wrap(get_response, lambda request: None, after)


@sync_and_async_middleware
def request_id(get_response: Handler) -> Handler:
    def before(request: HttpRequest) -> None:
        given = request.headers.get("X-Request-ID", "")
        REQUEST_ID.set(given if _USABLE_ID.match(given) else secrets.token_hex(8))

    def after(request: HttpRequest, response: HttpResponseBase) -> None:
        response.headers["X-Request-ID"] = REQUEST_ID.get()

    return _wrap(get_response, before, after)
