"""What the suite needs from outside, started by the suite itself: Valkey for each process, PostgreSQL when asked for.

Fixtures:

``postgres_url`` address of a real PostgreSQL, for tests of whole stacks
``valkey_url``   address of a real Valkey of this test process (session-wide)
``valkey``       the same, emptied, with Django's channel layer, REDIS_URL and Celery's broker set to it
``on_commit``    runs what a test's code left for after the commit
"""

from __future__ import annotations

import gc
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest
from django.conf import settings as django_settings

from tests.postgres import start_postgres, throw_away_postgres

# A shared machine may be slow at any moment: an example that took long is no fault.
hypothesis.settings.register_profile("suite", deadline=None, print_blob=True)
hypothesis.settings.load_profile("suite")

_postgres: Any = None


def pytest_configure(config: pytest.Config) -> None:
    """Start PostgreSQL once, in the process that the person started; xdist's workers use it."""
    global _postgres
    if django_settings.TEST_DB == "postgres" and not hasattr(config, "workerinput"):
        _postgres = start_postgres(django_settings.POSTGRES_FOLDER)


def pytest_unconfigure(config: pytest.Config) -> None:
    global _postgres
    if _postgres is not None:
        _postgres.cleanup()
        _postgres = None
        shutil.rmtree(django_settings.POSTGRES_FOLDER, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """PostgreSQL is for tests that touch the database; the others have run already."""
    if django_settings.TEST_DB != "postgres":
        return
    fixtures = {"db", "transactional_db", "django_db_reset_sequences", "live_server"}
    kept = [i for i in items if i.get_closest_marker("django_db") or fixtures & {*getattr(i, "fixturenames", ())}]
    config.hook.pytest_deselected(items=[i for i in items if i not in kept])
    items[:] = kept


def pytest_collection_finish() -> None:
    """Thousands of collected tests live to the end: the garbage collector need not walk them again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows what the whole stacks that live beside it have said."""
    report = yield
    module = sys.modules.get("tests.sardeenz_site.stack")
    if report.failed and module is not None:
        for stack in module.living:
            report.sections.append((f"the last that {stack.url} said", "\n".join(stack.lines[-400:])))
    return report


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL for tests that start whole stacks, whatever this process's own database is."""
    with throw_away_postgres() as (_, url):
        yield url


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """Django's own; at the end nobody else is left in the database (a thread of an async view may be)."""
    yield
    from django.db import connection

    if connection.vendor == "postgresql":
        with django_db_blocker.unblock(), connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Valkey, private to this test process."""
    from sardeenz_site.run import valkey as private
    from sardeenz_site.run.child import die_with_parent

    folder = private.socket_folder(tmp_path_factory.mktemp("vk"))
    private.make_folder(folder)
    server = subprocess.Popen(
        private.command(private.find_server(), folder),
        stdout=subprocess.DEVNULL,
        preexec_fn=die_with_parent(signal.SIGTERM),  # noqa: PLW1509 - a killed test run must not leave it
    )
    try:
        assert private.wait_until_up(folder, server), "the test Valkey did not start"
        yield private.url(folder)
    finally:
        server.terminate()
        server.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def valkey(valkey_url: str, settings: Any) -> Iterator[str]:
    """The real Valkey, emptied, behind everything of ours that speaks to Redis."""
    from redis import Redis

    from sardeenz_site.redis_url import celery_broker_url
    from tests.broker import celery_broker

    with Redis.from_url(valkey_url) as client:
        client.flushall()
    settings.REDIS_URL = valkey_url
    settings.CHANNEL_LAYERS = {
        "default": {
            "BACKEND": "sardeenz_site.channel_layer.SharedPubSubChannelLayer",
            "CONFIG": {"hosts": [valkey_url], "prefix": "sardeenz"},
        }
    }
    with celery_broker(celery_broker_url(valkey_url)):
        yield valkey_url


@pytest.fixture
def on_commit(django_capture_on_commit_callbacks: Any) -> Any:
    """``with on_commit(): …`` runs the callbacks that the block left for after the commit."""
    return lambda: django_capture_on_commit_callbacks(execute=True)
