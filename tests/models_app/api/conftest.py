"""A client per role; the catalogue's smallest model as what everybody makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from tests.builders import make_key

MODEL = {"served_model_name": "a", "source": "catalogue", "model": "Qwen/Qwen3-0.6B"}


class Api:
    """Django's test client with a bearer key and JSON in and out."""

    def __init__(self, token: str | None = None) -> None:
        self.client = Client(headers={"authorization": f"Bearer {token}"} if token else {})

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        answer = self.client.generic(
            method,
            f"/api/v1{path}",
            data=b"" if body is None else __import__("json").dumps(body),
            content_type="application/json",
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )
        return answer.status_code, answer.json() if answer.content else None


@pytest.fixture
def api_as(db: None) -> Callable[[str], Api]:
    """``api_as("viewer")``: calls with a fresh key of that role."""
    return lambda role: Api(make_key(role=role)[1])


@pytest.fixture
def api(api_as: Callable[[str], Api]) -> Api:
    return api_as("operator")
