from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from models_app.models import ApiKey, Model
from models_app.services.keys import api_key_check
from tests.builders import make_key, make_model

pytestmark = pytest.mark.django_db


def test_key_command_prints_the_key_alone() -> None:
    out, err = StringIO(), StringIO()
    call_command("create_api_key", "ci", "--role", "operator", stdout=out, stderr=err)
    (token,) = out.getvalue().splitlines()
    key = api_key_check(token)
    assert key is not None
    assert key.role == "operator"
    assert token not in err.getvalue()


def test_key_command_refuses_a_name_that_exists() -> None:
    call_command("create_api_key", "ci", stdout=StringIO(), stderr=StringIO())
    with pytest.raises(CommandError, match="exists already"):
        call_command("create_api_key", "ci", stdout=StringIO(), stderr=StringIO())


def test_key_command_binds_the_key_to_models() -> None:
    model = make_model(served_model_name="a")
    call_command("create_api_key", "ci", "--model", "a", stdout=StringIO(), stderr=StringIO())
    assert list(ApiKey.objects.get().allowed_models.all()) == [model]
    with pytest.raises(CommandError, match="no model 'b'"):
        call_command("create_api_key", "other", "--model", "b", stdout=StringIO(), stderr=StringIO())


def test_rotation_command_prints_the_new_secret_alone() -> None:
    key, old = make_key(name="ci")
    out, err = StringIO(), StringIO()
    call_command("rotate_api_key", "ci", "--grace", "60", stdout=out, stderr=err)
    (token,) = out.getvalue().splitlines()
    assert api_key_check(token) == api_key_check(old) == key
    assert "works until" in err.getvalue()
    assert token not in err.getvalue()
    call_command("rotate_api_key", "ci", "--grace", "0", stdout=out, stderr=err)
    assert "has ended" in err.getvalue()
    with pytest.raises(CommandError, match="no key 'x'"):
        call_command("rotate_api_key", "x", "--grace", "0", stdout=out, stderr=err)
    with pytest.raises(CommandError, match="30 days"):
        call_command("rotate_api_key", "ci", "--grace", "99999999", stdout=out, stderr=err)


def test_revocation_command_ends_a_key() -> None:
    _, token = make_key(name="ci")
    call_command("revoke_api_key", "ci", stdout=StringIO())
    assert api_key_check(token) is None
    with pytest.raises(CommandError, match="no key 'x'"):
        call_command("revoke_api_key", "x", stdout=StringIO())


def test_demo_models_are_entered_once() -> None:
    out = StringIO()
    call_command("seed_demo", stdout=out)
    call_command("seed_demo", stdout=out)
    assert out.getvalue().count("entered") == 3
    assert Model.objects.count() == 3
