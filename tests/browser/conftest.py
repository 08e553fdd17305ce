"""A real browser before a real server: Debian's Chromium, uvicorn with the site's own ASGI application.

Each test has its own server, rows and Valkey. The browser lives as long as its module: while it does, an event loop
counts as running in this thread, which Django would refuse to query under.
"""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from tests.builders import make_user

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
PASSWORD = "a-long-password"
expect.set_options(timeout=20_000)  # bounds a hang; two busy cores are slow


@pytest.fixture(autouse=True)
def queries_beside_the_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def site(transactional_db: None, valkey: str) -> Iterator[str]:
    """The address of a running site."""
    from sardeenz_site.asgi import application

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(application, log_level="error", ws="websockets-sansio", lifespan="on")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        limit = time.monotonic() + 20
        while not server.started and time.monotonic() < limit:
            time.sleep(0.02)
        assert server.started, "the test server did not start"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(20)


@dataclass
class Visitor:
    """A browser window of somebody who is logged in; ``complaints`` are errors of its console."""

    page: Page
    base: str
    context: BrowserContext
    complaints: list[str] = field(default_factory=list)

    def open(self, path: str) -> Page:
        response = self.page.goto(self.base + path)
        assert response is not None
        assert response.status == 200, f"{path}: {response.status}"
        return self.page

    def wait_live(self) -> None:
        self.page.locator('html[data-link="live"]').wait_for(state="attached", timeout=30_000)

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        width: int = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        return width


@pytest.fixture
def visit(browser: Browser, site: str) -> Iterator[Callable[..., Visitor]]:
    """``visit(role, width=…, **options of the context)``: a window after logging in through the form."""
    opened: list[BrowserContext] = []

    def enter(role: str = "operator", *, width: int = 1280, **options: Any) -> Visitor:
        user = make_user(role=role, password=PASSWORD)
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        context.set_default_timeout(30_000)
        opened.append(context)
        visitor = Visitor(context.new_page(), site, context)

        def note(message: ConsoleMessage) -> None:
            if message.type == "error" and "status of 422" not in message.text:
                visitor.complaints.append(message.text)

        visitor.page.on("console", note)
        visitor.page.on("pageerror", lambda error: visitor.complaints.append(str(error)))
        visitor.page.goto(f"{site}/login/")
        visitor.page.fill("#id_username", user.username)
        visitor.page.fill("#id_password", PASSWORD)
        visitor.page.click("button:has-text('Log in')")
        visitor.page.wait_for_url(f"{site}/")
        return visitor

    yield enter
    for context in opened:
        context.close()
