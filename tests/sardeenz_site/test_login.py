"""Logging in: failures are limited per name and address (case SZ-123), on every login page, and are on record."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client, RequestFactory
from django.utils import timezone

from models_app.models import AuditEntry
from sardeenz_site.login import client_address

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery"


@pytest.fixture(autouse=True)
def user() -> User:
    return User.objects.create_user("ada", password=PASSWORD)


def attempt(client: Client, password: str, name: str = "ada", path: str = "/login/", address: str = "192.0.2.1") -> int:
    return client.post(path, {"username": name, "password": password}, REMOTE_ADDR=address).status_code


def test_right_password_leads_to_the_pages(client: Client) -> None:
    answer = client.post("/login/?next=/gpus/", {"username": "ada", "password": PASSWORD, "next": "/gpus/"})
    assert (answer.status_code, answer.headers["Location"]) == (302, "/gpus/")
    assert AuditEntry.objects.filter(actor="ada", action="login", outcome="ok").count() == 1


def test_sixth_failure_within_a_minute_is_429_even_with_the_right_password(client: Client) -> None:
    assert [attempt(client, "wrong") for _ in range(5)] == [422] * 5
    answer = client.post("/login/", {"username": "ada", "password": PASSWORD}, REMOTE_ADDR="192.0.2.1")
    assert answer.status_code == 429
    assert answer.headers["Retry-After"] == "60"
    assert "Wait a minute" in answer.content.decode()
    assert "_auth_user_id" not in client.session


def test_refused_waiting_attempts_do_not_prolong_the_wait(client: Client) -> None:
    for _ in range(8):
        attempt(client, "wrong")
    assert AuditEntry.objects.filter(outcome="refused").count() == 5
    AuditEntry.objects.update(at=timezone.now() - timedelta(seconds=61))
    assert attempt(client, PASSWORD) == 302


def test_other_address_is_not_locked_out_with_it(client: Client) -> None:
    for _ in range(6):
        attempt(client, "wrong")
    assert attempt(client, PASSWORD, address="192.0.2.2") == 302


def test_one_address_cannot_try_names_without_end(client: Client) -> None:
    codes = [attempt(client, "wrong", name=f"name{n}") for n in range(21)]
    assert codes == [422] * 20 + [429]


def test_admin_has_no_login_page_beside_the_limited_one(client: Client) -> None:
    for _ in range(5):
        attempt(client, "wrong", path="/admin/login/")
    assert attempt(client, PASSWORD, path="/admin/login/") == 429


def test_user_who_may_not_open_the_admin_is_told_so_and_not_sent_round(client: Client) -> None:
    client.force_login(User.objects.get(username="ada"))
    answer = client.get("/admin/", follow=True)
    assert answer.status_code == 403


def test_login_does_not_lead_to_foreign_sites(client: Client) -> None:
    answer = client.post("/login/?next=https://evil.example/", {"username": "ada", "password": PASSWORD})
    assert answer.headers["Location"] == "/"


def test_logout_ends_the_session_and_takes_only_post(client: Client) -> None:
    client.force_login(User.objects.get(username="ada"))
    key = client.session.session_key
    assert client.get("/logout/").status_code == 405
    client.post("/logout/")
    client.cookies["sardeenz_session"] = key
    assert client.get("/gpus/").status_code in (302, 404)


@pytest.mark.parametrize(
    ("peer", "forwarded", "proxies", "address"),
    [
        ("192.0.2.9", "198.51.100.7", [], "192.0.2.9"),
        ("10.0.0.1", "198.51.100.7", ["10.0.0.0/8"], "198.51.100.7"),
        ("10.0.0.1", "1.1.1.1, 198.51.100.7", ["10.0.0.0/8"], "198.51.100.7"),
        ("10.0.0.1", "nonsense", ["10.0.0.0/8"], "10.0.0.1"),
        ("", "198.51.100.7", ["10.0.0.0/8"], None),
    ],
)
def test_forwarded_address_is_believed_from_our_proxies_only(
    settings: Any, peer: str, forwarded: str, proxies: list[str], address: str | None
) -> None:
    settings.TRUSTED_PROXIES = proxies
    request = RequestFactory().get("/", REMOTE_ADDR=peer, headers={"X-Forwarded-For": forwarded})
    assert client_address(request) == address
