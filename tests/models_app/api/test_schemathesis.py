"""Generated requests against the whole schema: no 5xx, no status that is not documented, answers as the schema says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CHECKS, load_all_checks

from models_app.api.v1 import api as ninja_api
from tests.builders import make_gpu, make_instance, make_key

load_all_checks()
CHECKS_USED = [
    CHECKS.get_one(name)
    for name in (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
    )
]
schema = schemathesis.openapi.from_dict(ninja_api.get_openapi_schema())
schema.app = get_wsgi_application()


@schema.parametrize()
@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@pytest.mark.slow
@pytest.mark.django_db
def test_nonsense_is_answered_as_documented(case: Any, admin_token: str) -> None:
    response = case.call(headers={"Authorization": f"Bearer {admin_token}"})
    case.validate_response(response, checks=CHECKS_USED)


@pytest.fixture
def admin_token(db: None) -> Iterator[str]:
    """A key, with the test's connection kept open over requests as Django's own test client keeps it."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    try:
        yield _admin_token()
    finally:
        for signal in (request_started, request_finished):
            signal.connect(close_old_connections)


def _admin_token() -> str:
    make_instance(gpus=[make_gpu()])
    return make_key(role="admin")[1]
