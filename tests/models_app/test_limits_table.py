"""Every limit that an act ends by is a setting, and is shown: on a page, in REST and in the README."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from models_app.presentation.limits_table import limits
from tests.builders import make_key
from tests.models_app.pages import client_of

ROOT = Path(__file__).resolve().parent.parent.parent
#: The router has limits of its own for each request, shown in its answers.
SETTINGS = re.findall(
    r'^\w+ = env_float\("(SARDEENZ_(?!ROUTER_)\w+_S)"', (ROOT / "sardeenz_site/settings/base.py").read_text(), re.M
)


def test_every_limit_of_time_is_in_the_table() -> None:
    assert set(SETTINGS) <= {limit.name for limit in limits()}
    assert len(SETTINGS) > 20


@pytest.mark.parametrize("limit", limits(), ids=lambda limit: limit.name)
def test_every_limit_is_in_the_readme(limit: Any) -> None:
    assert f"| `{limit.name}` |" in (ROOT / "README.md").read_text()


@pytest.mark.django_db
def test_limits_are_shown_as_they_are_set(settings: Any, client: Client) -> None:
    settings.DRAIN_LIMIT_S, settings.SLEEP_RAM_BYTES = 600.0, 32 * 1024**3
    page = client_of("viewer").get("/limits/").content.decode()
    assert "600 s (10 min)" in page
    assert "32.0 GiB" in page
    assert "16 MiB" in page
    headers = {"Authorization": f"Bearer {make_key(role='viewer')[1]}"}
    shown = {one["name"]: one["value"] for one in client.get("/api/v1/limits", headers=headers).json()}
    assert (shown["SARDEENZ_DRAIN_LIMIT_S"], len(shown)) == (600.0, len(limits()))


@pytest.mark.django_db
def test_limits_are_found_from_the_policies() -> None:
    assert 'href="/limits/"' in client_of("viewer").get("/policies/").content.decode()
