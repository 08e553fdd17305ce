from __future__ import annotations

import pytest
from django.contrib.auth.models import AnonymousUser, Group
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from models_app.permissions import may, may_risk, require_role, role_of, roles_ensure
from tests.builders import make_user

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
def test_role_comes_from_the_group(role: str) -> None:
    assert role_of(make_user(role=role)) == role


def test_user_in_no_group_is_a_viewer() -> None:
    assert role_of(make_user(role=None)) == "viewer"


def test_superuser_is_an_admin() -> None:
    assert role_of(make_user(role=None, is_superuser=True)) == "admin"


def test_stranger_and_deactivated_user_have_no_role() -> None:
    assert role_of(AnonymousUser()) is None
    assert role_of(make_user(role="admin", is_active=False)) is None


def test_higher_roles_may_what_lower_ones_may() -> None:
    operator = make_user(role="operator")
    assert may(operator, "viewer")
    assert may(operator, "operator")
    assert not may(operator, "admin")


def test_risky_arguments_need_their_own_permission() -> None:
    assert not may_risk(make_user(role="operator"))
    assert may_risk(make_user(role="admin"))


def test_groups_are_made_again_without_doubling() -> None:
    roles_ensure()
    roles_ensure()
    assert sorted(Group.objects.values_list("name", flat=True)) == ["admin", "operator", "viewer"]


@require_role("operator")
def _view(request: HttpRequest) -> HttpResponse:
    return HttpResponse("done")


def _ask(user: object) -> HttpRequest:
    request = RequestFactory().post("/models/a/stop?x=1")
    request.user = user  # type: ignore[assignment]
    return request


def test_stranger_is_sent_to_the_login_page() -> None:
    answer = _view(_ask(AnonymousUser()))
    assert answer.status_code == 302
    assert "next=/models/a/stop" in answer["Location"]


def test_viewer_is_refused_by_an_operators_view() -> None:
    with pytest.raises(PermissionDenied, match="operator"):
        _view(_ask(make_user(role="viewer")))


def test_operator_passes_an_operators_view() -> None:
    assert _view(_ask(make_user(role="operator"))).status_code == 200
