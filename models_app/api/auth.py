"""Who calls: a bearer key, or a logged-in browser session (with CSRF). Roles rise: viewer < operator < admin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.middleware.csrf import CsrfViewMiddleware
from ninja.errors import AuthorizationError
from ninja.security.base import AuthBase

from models_app.permissions import may_capture, role_of
from models_app.services.keys import api_key_check

RANK = {"viewer": 0, "operator": 1, "admin": 2}


@dataclass(frozen=True)
class Caller:
    """The authenticated caller; ``actor`` is what events and the audit log show, ``key_name`` its key if it has one."""

    actor: str
    role: str
    address: str | None
    key_name: str | None = None
    may_capture: bool = False


class _SessionCsrf(CsrfViewMiddleware):
    def _reject(self, request: HttpRequest, reason: str) -> Any:
        return reason


class RoleAuth(AuthBase):
    """Accepts a key or session whose role is at least ``role``; a known caller with too little gets 403, not 401."""

    openapi_type = "http"
    openapi_scheme = "bearer"

    def __init__(self, role: str) -> None:
        self.role = role
        super().__init__()

    def __call__(self, request: HttpRequest) -> Caller | None:
        caller = self._from_key(request) or self._from_session(request)
        if caller is None:
            return None
        if RANK[caller.role] < RANK[self.role]:
            raise AuthorizationError(403, f"This needs the role {self.role}; {caller.actor} is {caller.role}.")
        return caller

    def _from_key(self, request: HttpRequest) -> Caller | None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return None
        key = api_key_check(token.strip())
        if key is None:
            return None
        captures = key.may_capture and key.role == "admin"
        return Caller(f"key:{key.name}", key.role, request.META.get("REMOTE_ADDR"), key.name, captures)

    def _from_session(self, request: HttpRequest) -> Caller | None:
        user = getattr(request, "user", None)
        if user is None or not user.is_authenticated or "Authorization" in request.headers:
            return None
        middleware = _SessionCsrf(lambda _: None)  # type: ignore[arg-type]
        middleware.process_request(request)
        if middleware.process_view(request, lambda _: None, (), {}):  # type: ignore[arg-type, return-value]
            raise AuthorizationError(403, "The CSRF token is missing or wrong.")
        role = role_of(user)
        if role is None:
            return None
        return Caller(user.get_username(), role, request.META.get("REMOTE_ADDR"), None, may_capture(user))


viewer, operator, admin = RoleAuth("viewer"), RoleAuth("operator"), RoleAuth("admin")


def caller_of(request: HttpRequest) -> Caller:
    """The caller that the operation's auth put on the request."""
    caller = request.auth  # type: ignore[attr-defined]
    assert isinstance(caller, Caller)  # noqa: S101  set by RoleAuth on every operation
    return caller
