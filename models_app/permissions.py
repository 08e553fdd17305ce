"""Who may do what: three roles over Django's groups and permissions.

viewer: any active user who is logged in. operator: ``models_app.operate``. admin: ``models_app.administer``. The
three groups are made after every ``migrate`` (and after a flush of the tables); a user gets a role by joining one.
``models_app.capture_prompts`` comes with no role: who may read what others ask is chosen by name, among the admins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, cast

from django.apps import AppConfig
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, Group, Permission, User
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.db.models.signals import post_migrate
from django.http import HttpRequest, HttpResponseBase

Role = Literal["viewer", "operator", "admin"]
ROLES: tuple[Role, ...] = ("viewer", "operator", "admin")
OPERATE = "models_app.operate"
ADMINISTER = "models_app.administer"
RISKY_ARGUMENTS = "models_app.risky_arguments"
CAPTURE_PROMPTS = "models_app.capture_prompts"

_GROUP_PERMISSIONS: dict[Role, tuple[str, ...]] = {
    "viewer": (),
    "operator": ("operate",),
    "admin": ("operate", "administer", "risky_arguments"),
}

P = ParamSpec("P")
View = Callable[Concatenate[HttpRequest, P], HttpResponseBase]


def role_of(user: AbstractBaseUser | AnonymousUser) -> Role | None:
    """The highest role of a user; None for someone who is not logged in or no longer active."""
    if not user.is_authenticated or not user.is_active:
        return None
    known = cast("User", user)
    if known.has_perm(ADMINISTER):
        return "admin"
    return "operator" if known.has_perm(OPERATE) else "viewer"


def role_at_least(role: str | None, wanted: Role) -> bool:
    return role in ROLES and ROLES.index(role) >= ROLES.index(wanted)


def may(user: AbstractBaseUser | AnonymousUser, wanted: Role) -> bool:
    """Whether the user's role is at least ``wanted``."""
    return role_at_least(role_of(user), wanted)


def may_risk(user: AbstractBaseUser | AnonymousUser) -> bool:
    """Whether the user may give engine arguments that run foreign code or read files."""
    return may(user, "operator") and cast("User", user).has_perm(RISKY_ARGUMENTS)


def may_capture(user: AbstractBaseUser | AnonymousUser) -> bool:
    """Whether the user may have a key's requests captured, and read them."""
    return may(user, "admin") and cast("User", user).has_perm(CAPTURE_PROMPTS)


def require_role(wanted: Role) -> Callable[[View[P]], View[P]]:
    """Decorate a view: strangers go to the login page, users below ``wanted`` get 403."""

    def decorate(view: View[P]) -> View[P]:
        @wraps(view)
        def guarded(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
            role = role_of(request.user)
            if role is None:
                return redirect_to_login(request.get_full_path())
            if not role_at_least(role, wanted):
                raise PermissionDenied(f"This needs the role {wanted}; yours is {role}.")
            return view(request, *args, **kwargs)

        return cast("View[P]", guarded)

    return decorate


def require_capture(view: View[P]) -> View[P]:
    """Decorate a view: admins without the permission to capture get 403, like everybody else."""

    @wraps(view)
    def guarded(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        if not may_capture(request.user):
            raise PermissionDenied("This needs the permission to capture the requests of a key.")
        return view(request, *args, **kwargs)

    return require_role("admin")(cast("View[P]", guarded))


def roles_ensure(**_: Any) -> None:
    """Make the three groups and give them their permissions; runs after every migrate, safe to repeat."""
    for role, names in _GROUP_PERMISSIONS.items():
        group, _created = Group.objects.get_or_create(name=role)
        wanted = Permission.objects.filter(content_type__app_label="models_app", codename__in=names)
        group.permissions.add(*wanted)


def connect(app: AppConfig) -> None:
    post_migrate.connect(roles_ensure, sender=app, dispatch_uid="models_app.roles")
