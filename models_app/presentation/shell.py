"""What every page needs: theme, role, the places to go, the number of operations under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from django.http import HttpRequest
from django.utils.functional import SimpleLazyObject

from models_app.models import Operation
from models_app.permissions import Role, may_capture, role_at_least, role_of
from models_app.services.capture import keys_captured

THEME_COOKIE = "theme"
Theme = Literal["auto", "light", "dark"]
THEMES: tuple[Theme, ...] = ("auto", "light", "dark")


@dataclass(frozen=True, slots=True)
class Place:
    """One entry of the navigation. ``prefix``: addresses that belong to it."""

    title: str
    href: str
    icon: str
    least: Role = "viewer"

    def holds(self, path: str) -> bool:
        return path == "/" if self.href == "/" else path.startswith(self.href)


PLACES = (
    Place("Overview", "/", "layout-dashboard"),
    Place("GPUs", "/gpus/", "cpu"),
    Place("Models", "/models/", "box"),
    Place("Playground", "/playground/", "message-circle"),
    Place("Policies", "/policies/", "scale"),
    Place("Usage", "/usage/", "chart-bar", "operator"),
    Place("Keys", "/keys/", "key", "admin"),
    Place("Audit", "/audit/", "history"),
)


def theme_of(request: HttpRequest) -> Theme:
    chosen = request.COOKIES.get(THEME_COOKIE, "auto")
    return chosen if chosen in THEMES else "auto"


def shell(request: HttpRequest) -> dict[str, Any]:
    """Context processor of every page. The count of operations is read only where it is shown."""
    theme = theme_of(request)
    user = getattr(request, "user", None)
    role = role_of(user) if user is not None else None
    path = request.path
    if path.startswith(("/instances/", "/presets/", "/routes/")):
        path = "/models/"
    if path.startswith("/limits/"):
        path = "/policies/"
    return {
        "theme": theme,
        "theme_now": "dark" if theme == "dark" else "light",
        "role": role,
        "may_operate": role_at_least(role, "operator"),
        "may_administer": role_at_least(role, "admin"),
        "captured_keys": SimpleLazyObject(keys_captured),
        "may_capture": SimpleLazyObject(lambda: user is not None and may_capture(user)),
        "places": [
            {"place": place, "current": place.holds(path)} for place in PLACES if role_at_least(role, place.least)
        ],
        "open_operations": SimpleLazyObject(
            lambda: Operation.objects.filter(state__in=(Operation.State.PENDING, Operation.State.RUNNING)).count()
        ),
    }
