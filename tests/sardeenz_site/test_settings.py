"""Settings: the signing key, addresses of database and broker, the choice of engine, and the system checks."""

from __future__ import annotations

import io
import json
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command

from gpus_app.models import Host
from sardeenz_site import checks, engine_choice
from sardeenz_site.management.commands.prepare import first_admin
from sardeenz_site.redis_url import celery_broker_url, private_url_file, redis_url
from sardeenz_site.settings.database import database_from_url
from sardeenz_site.settings.security import secret_key

ROOT = Path(__file__).resolve().parent.parent.parent


# --- signing key (case SZ-007) -------------------------------------------------------------------------


def test_signing_key_is_made_once_and_only_its_owner_reads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SECRET_KEY", raising=False)
    key = secret_key(tmp_path)
    assert len(key) >= 50
    assert secret_key(tmp_path) == key
    assert stat.S_IMODE((tmp_path / "secret_key").stat().st_mode) == 0o600


def test_processes_that_start_at_once_end_with_one_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SECRET_KEY", raising=False)
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: secret_key(tmp_path), range(8)))
    assert len(keys) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["secret_key"]


def test_two_installations_have_two_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SECRET_KEY", raising=False)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert secret_key(tmp_path / "a") != secret_key(tmp_path / "b")


def test_given_key_is_used_and_not_written_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_KEY", "given")
    assert secret_key(tmp_path) == "given"
    assert list(tmp_path.iterdir()) == []


# --- database ------------------------------------------------------------------------------------------


def test_sqlite_takes_the_write_lock_first_and_writes_ahead(tmp_path: Path) -> None:
    config = database_from_url(f"sqlite:///{tmp_path}/x.sqlite3", base=Path("/base"))
    assert config["NAME"] == f"{tmp_path}/x.sqlite3"
    assert config["CONN_MAX_AGE"] == 0
    assert config["OPTIONS"]["transaction_mode"] == "IMMEDIATE"
    assert "journal_mode=WAL" in config["OPTIONS"]["init_command"]


def test_relative_sqlite_file_lies_beside_the_code_and_not_in_the_current_folder() -> None:
    assert database_from_url("sqlite:///here.sqlite3", base=Path("/base"))["NAME"] == "/base/here.sqlite3"


def test_postgresql_address_is_taken_apart() -> None:
    config = database_from_url("postgresql://u:p%40ss@db:5433/sz?sslmode=require", base=Path("/"))
    assert (config["USER"], config["PASSWORD"], config["HOST"], config["PORT"]) == ("u", "p@ss", "db", 5433)
    assert config["OPTIONS"] == {"connect_timeout": 5, "sslmode": "require"}
    assert config["CONN_MAX_AGE"] == 0


@pytest.mark.parametrize("url", ["mysql://u:geheim@h/x", "nonsense", "postgresql://u:geheim@h:port/x"])
def test_other_database_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="DATABASE_URL") as caught:
        database_from_url(url, base=Path("/"))
    assert "geheim" not in str(caught.value)


# --- broker --------------------------------------------------------------------------------------------


def test_broker_of_a_running_launcher_is_found_by_commands_beside_it(tmp_path: Path) -> None:
    assert redis_url(None, tmp_path) == "redis://127.0.0.1:6379/0"
    private_url_file(tmp_path).parent.mkdir()
    private_url_file(tmp_path).write_text("unix:///run/v.sock?db=0")
    assert redis_url(None, tmp_path) == "unix:///run/v.sock?db=0"
    assert redis_url("redis://elsewhere:1/2", tmp_path) == "redis://elsewhere:1/2"


def test_broker_address_is_respelt_for_celery() -> None:
    assert celery_broker_url("unix:///run/v.sock?db=3") == "redis+socket:///run/v.sock?virtual_host=3"
    assert celery_broker_url("rediss://h:1/2") == "rediss://h:1/2"


def test_broker_that_is_no_redis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImproperlyConfigured, match="REDIS_URL"):
        redis_url("amqp://h", tmp_path)


# --- engine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "vllm", "kind", "reason"),
    [
        (0, True, "simulated", "No NVIDIA GPU"),
        (2, False, "simulated", "SARDEENZ_VLLM"),
        (2, True, "vllm", "2 NVIDIA GPU"),
    ],
)
def test_engine_of_auto_follows_what_is_there_and_says_why(
    monkeypatch: pytest.MonkeyPatch, gpus: int, vllm: bool, kind: str, reason: str
) -> None:
    monkeypatch.setattr(engine_choice, "nvidia_gpus", lambda: gpus)
    monkeypatch.setattr(engine_choice, "vllm_found", lambda _command: vllm)
    found, why = engine_choice.choose_engine("auto", "vllm")
    assert found == kind
    assert reason in why


def test_engine_that_was_asked_for_is_taken_without_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "nvidia_gpus", lambda: 1 / 0)
    assert engine_choice.choose_engine("vllm", "x")[0] == "vllm"


# --- checks ---------------------------------------------------------------------------------------------


def test_misspelt_setting_is_pointed_at_with_the_right_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in checks.unknown_names():  # what this process happens to carry is not the matter here
        monkeypatch.delenv(name)
    monkeypatch.setenv("SARDEENZ_SIM_GPU", "4")
    found = checks.check_names()
    assert [m.id for m in found] == ["sardeenz.W001"]
    assert "SARDEENZ_SIM_GPUS" in (found[0].hint or "")


def test_variables_that_no_engine_may_get_are_pointed_at(settings: Any) -> None:
    settings.SARDEENZ_ENGINE_ENV = ["MY_TUNING", "VLLM_SERVER_DEV_MODE"]
    found = checks.check_engine_env()
    assert [m.id for m in found] == ["sardeenz.W003"]
    assert "VLLM_SERVER_DEV_MODE" in found[0].msg


def test_memory_layer_is_refused_beside_a_real_broker(settings: Any) -> None:
    assert checks.check_layer() == []
    settings.CELERY_BROKER_URL = "redis://127.0.0.1/0"
    assert [m.id for m in checks.check_layer()] == ["sardeenz.E001"]


@pytest.mark.django_db
def test_sqlite_with_a_second_host_is_refused(settings: Any) -> None:
    if settings.TEST_DB == "postgres":
        pytest.skip("PostgreSQL may have as many as it likes")
    Host.objects.create(name=settings.SARDEENZ_HOST_NAME)
    assert checks.check_single_host(databases=["default"]) == []
    Host.objects.create(name="elsewhere")
    found = checks.check_single_host(databases=["default"])
    assert [m.id for m in found] == ["sardeenz.E002"]
    assert "elsewhere" in found[0].msg


def test_broker_is_asked_under_deploy(settings: Any, valkey: str) -> None:
    assert checks.check_redis() == []
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    assert [m.id for m in checks.check_redis()] == ["sardeenz.E003"]


def test_debug_and_any_host_are_found_under_deploy(settings: Any) -> None:
    settings.DEBUG = True
    settings.ALLOWED_HOSTS = ["*"]
    assert [m.id for m in checks.check_deployment()] == ["sardeenz.E004", "sardeenz.W002"]


# --- documentation --------------------------------------------------------------------------------------


def names_in_code() -> set[str]:
    call = re.compile(r"\benv_(?:str|choice|bool|float|int|port|bytes|list|path|secret)\(\s*\"([A-Z][A-Z0-9_]+)\"")
    sources = (ROOT / "sardeenz_site").rglob("*.py")
    return {"SARDEENZ_ENV_FILE"} | {name for p in sources for name in call.findall(p.read_text())}


def test_every_setting_stands_in_the_readme_and_every_one_there_exists() -> None:
    table = set(re.findall(r"^\| `([A-Z][A-Z0-9_]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert names_in_code() == table


@pytest.mark.django_db
def test_start_tells_of_misspelt_settings_and_refuses_what_cannot_work(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    monkeypatch.setenv("SARDEENZ_SIM_GPU", "4")
    out = io.StringIO()
    call_command("prepare", "--json", "--no-broker", "--no-admin", stdout=out)
    assert "SARDEENZ_SIM_GPUS" in json.loads(out.getvalue())["warnings"][0]
    settings.CELERY_BROKER_URL = "redis://127.0.0.1/0"
    with pytest.raises(CommandError, match="channel layer is in memory"):
        call_command("prepare", "--no-broker", "--no-admin")


@pytest.mark.django_db
def test_first_admin_is_made_once_and_only_while_there_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SARDEENZ_ADMIN_PASSWORD", raising=False)
    password = first_admin()
    assert password
    assert User.objects.get().check_password(password)
    assert User.objects.get().is_superuser
    assert first_admin() is None
