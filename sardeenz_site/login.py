"""Log in and out. Failures are counted from the audit table, so the limit holds over processes, hosts and restarts."""

from __future__ import annotations

import ipaddress
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth import views as auth_views
from django.contrib.auth.forms import AuthenticationForm
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.utils import timezone

from models_app.models import AuditEntry
from models_app.services.audit import audit

ACTION = "login"
WINDOW = timedelta(minutes=1)
#: One address may try this many names as often as one name, before it has to wait.
NAMES_PER_ADDRESS = 4


def client_address(request: HttpRequest) -> str | None:
    """The peer's address; X-Forwarded-For is believed only when the peer is in SARDEENZ_TRUSTED_PROXIES."""
    peer = _address(request.META.get("REMOTE_ADDR", ""))
    if peer is None or not any(peer in ipaddress.ip_network(net, strict=False) for net in settings.TRUSTED_PROXIES):
        return str(peer) if peer else None
    # The nearest proxy appended the last entry; what stands before it came from the client.
    forwarded = _address(request.headers.get("X-Forwarded-For", "").rpartition(",")[2])
    return str(forwarded or peer)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.strip())
    except ValueError:
        return None


def must_wait(name: str, address: str | None) -> bool:
    """Whether this name from this address, or this address at all, failed too often within the last minute."""
    limit = settings.LOGIN_FAILURES_PER_MINUTE
    failures = AuditEntry.objects.filter(
        action=ACTION, outcome="refused", address=address, at__gt=timezone.now() - WINDOW
    )
    return failures.filter(actor=name[:150]).count() >= limit or failures.count() >= limit * NAMES_PER_ADDRESS


class LoginForm(AuthenticationForm):
    """Refuses before the password is looked at, so that waiting tells nothing about it."""

    waiting = False

    def clean(self) -> dict[str, Any]:
        address = client_address(self.request) if self.request else None
        if must_wait(self.cleaned_data.get("username", ""), address):
            self.waiting = True
            raise ValidationError("Too many failed attempts. Wait a minute, then try again.", code="too_many_attempts")
        return super().clean()


class LoginView(auth_views.LoginView):
    """Django's, with the limit; also stands in for the admin's own page, which has none."""

    authentication_form = LoginForm

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if request.user.is_authenticated:
            if self.get_redirect_url().startswith("/admin/") and not request.user.is_staff:
                # The admin sends such a user here; sending them back would go round for ever.
                raise PermissionDenied("Your account may not open the admin.")
            return redirect(self.get_success_url())
        return super().dispatch(request, *args, **kwargs)

    def form_valid(self, form: AuthenticationForm) -> HttpResponse:
        audit(form.get_user().get_username(), ACTION, address=client_address(self.request))
        return super().form_valid(form)

    def form_invalid(self, form: AuthenticationForm) -> HttpResponse:
        response = super().form_invalid(form)
        if isinstance(form, LoginForm) and form.waiting:
            response.status_code = 429
            response.headers["Retry-After"] = str(int(WINDOW.total_seconds()))
        else:
            name = form.data.get("username", "")[:150]
            audit(name, ACTION, outcome="refused", address=client_address(self.request))
            response.status_code = 422
        return response
