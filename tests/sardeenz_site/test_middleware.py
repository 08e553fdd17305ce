"""Headers of every page: a strict policy without inline anything, under which the admin works too."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth.models import User
from django.contrib.staticfiles import finders
from django.test import AsyncClient, Client

from sardeenz_site.middleware import CONTENT_SECURITY_POLICY

PAGES = ("/healthz", "/login/", "/nowhere")


@pytest.mark.django_db
@pytest.mark.parametrize("path", PAGES)
def test_every_answer_carries_the_policy(client: Client, path: str) -> None:
    answer = client.get(path)
    assert answer.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert answer.headers["Cache-Control"] == "no-store" or "no-store" in answer.headers["Cache-Control"]
    assert "camera=()" in answer.headers["Permissions-Policy"]


@pytest.mark.django_db(transaction=True)
async def test_policy_is_there_under_the_async_handler(async_client: AsyncClient) -> None:
    answer = await async_client.get("/healthz")
    assert answer.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
    assert len(answer.headers["X-Request-ID"]) == 16


def test_policy_allows_no_inline_code_and_no_foreign_origin() -> None:
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "http" not in CONTENT_SECURITY_POLICY
    assert CONTENT_SECURITY_POLICY.startswith("default-src 'none'")
    for rule in ("form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'"):
        assert rule in CONTENT_SECURITY_POLICY


@pytest.mark.parametrize(("given", "kept"), [("abcdef-12345", True), ("short", False), ("bad id\r\nX: y", False)])
def test_request_id_is_taken_over_only_when_it_is_harmless(client: Client, given: str, kept: bool) -> None:
    answer = client.get("/healthz", headers={"X-Request-ID": given})
    assert (answer.headers["X-Request-ID"] == given) is kept


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["/login/", "/admin/", "/admin/auth/user/", "/admin/auth/user/add/"])
def test_page_has_no_inline_script_and_no_inline_style(client: Client, path: str) -> None:
    if path != "/login/":
        client.force_login(User.objects.create_superuser("root", password="x"))
    answer = client.get(path)
    assert answer.status_code == 200
    html = answer.content.decode()
    assert not re.search(r"<script(?![^>]*\b(?:src=|type=\"application/json\"))[^>]*>", html)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=\"", html)


@pytest.mark.django_db
def test_page_of_the_rest_interface_takes_nothing_from_elsewhere(client: Client) -> None:
    html = client.get("/api/v1/docs").content.decode()
    sources = re.findall(r"(?:src|href)=\"([^\"]+)\"", html)
    assert any(source.endswith("swagger-ui-bundle.js") for source in sources)
    assert all(source.startswith("/static/") for source in sources)
    assert all(finders.find(source.removeprefix("/static/")) for source in sources)
    assert not re.search(r"<script(?![^>]*\b(?:src=|type=\"application/json\"))[^>]*>", html)
