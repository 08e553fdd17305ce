"""Logs of every start: downloadable by page and REST, bounded, without secrets, from whichever host they lie on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from gpus_app.models import Host
from models_app import dispatch
from models_app.engines.redact import redact
from models_app.models import Instance, LaunchAttempt
from models_app.services import logs
from tests.builders import make_attempt, make_gpu, make_host, make_instance, make_key
from tests.models_app.pages import client_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def row(settings: Any, tmp_path: Path) -> Instance:
    """Two starts: the first failed, the second runs."""
    host = make_host(name=settings.SARDEENZ_HOST_NAME)
    make_gpu(host=host)
    row = make_instance(host=host)
    assert row.attempt is not None
    newer = make_attempt(instance=row, number=2)
    for attempt, text in ((row.attempt, "first: out of memory\n"), (newer, "second: ready\n")):
        folder = tmp_path / str(attempt.pk)
        folder.mkdir()
        (folder / "engine.log").write_text(text)
        LaunchAttempt.objects.filter(pk=attempt.pk).update(run_dir=str(folder))
    Instance.objects.filter(pk=row.pk).update(attempt=newer)
    return Instance.objects.select_related("model", "host", "attempt").get(pk=row.pk)


def _folder(row: Instance, number: int = 1) -> Path:
    return Path(row.attempts.get(number=number).run_dir)


def test_log_of_every_start_is_downloaded_by_page_and_by_rest(row: Instance, client: Client) -> None:
    headers = {"Authorization": f"Bearer {make_key(role='viewer')[1]}"}
    for number, text in ((1, "first: out of memory\n"), (2, "second: ready\n")):
        attempt = row.attempts.get(number=number)
        page = client_of("viewer").get(f"/attempts/{attempt.pk}/log/")
        rest = client.get(f"/api/v1/instances/{row.pk}/attempts/{number}/log", headers=headers)
        assert page.content.decode() == rest.content.decode() == text
        assert f'-start{number}.log"' in rest["Content-Disposition"]
        assert rest["Content-Type"].startswith("text/plain")
    missing = client.get(f"/api/v1/instances/{row.pk}/attempts/9/log", headers=headers)
    assert missing.status_code == 404


def test_download_is_bounded_and_gives_the_newest_part(row: Instance, settings: Any) -> None:
    settings.LOG_DOWNLOAD_BYTES = 1000
    (_folder(row) / "engine.log").write_text("".join(f"line {number}\n" for number in range(10_000)))
    text = logs.attempt_log(row.attempts.get(number=1))
    assert len(text) <= 1001
    assert text.endswith("line 9999\n")


def test_secrets_are_masked_wherever_a_log_is_read(row: Instance, settings: Any, client: Client) -> None:
    settings.SARDEENZ_HF_TOKEN = "a-token-of-no-known-form"
    secrets = [row.engine_token, settings.SARDEENZ_HF_TOKEN, "hf_abcdefghijklmnopqrstuvwx", "hunter22secret"]
    (_folder(row, 2) / "engine.log").write_text(
        f"using {secrets[0]}\nHF {secrets[1]}\ntoken={secrets[2]}\nredis://user:{secrets[3]}@host/0\napi_key='{secrets[3]}'\n"
    )
    headers = {"Authorization": f"Bearer {make_key()[1]}"}
    browser = client_of()
    texts = [
        browser.get(f"/instances/{row.pk}/").content.decode(),
        browser.get(f"/instances/{row.pk}/log/?download=1").content.decode(),
        client.get(f"/api/v1/instances/{row.pk}/logs", headers=headers).content.decode(),
        client.get(f"/api/v1/instances/{row.pk}/attempts/2/log", headers=headers).content.decode(),
    ]
    for text in texts:
        assert "***" in text
        assert not [secret for secret in secrets if secret in text]


def test_words_that_are_no_secrets_stay() -> None:
    lines = ["max_tokens=4096, tokenizer='Qwen'", "'api_key': None", "loaded in 12.3 s", "http://host:8000/v1"]
    assert redact(lines) == lines


def test_whole_log_of_another_host_is_fetched_from_its_worker(
    row: Instance, settings: Any, valkey: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only the lines that were stored: the worker is asked, and leaves all of it in the broker."""
    (_folder(row) / "engine.log").write_text("".join(f"line {number}\n" for number in range(5000)))
    asked: list[Any] = []

    def worker(name: str, attempt_id: int, *, queue: str, **_: Any) -> None:
        asked.append((name, queue))
        settings.SARDEENZ_HOST_NAME = "gpu-b"
        logs.attempt_log_leave(attempt_id)
        settings.SARDEENZ_HOST_NAME = "desk"

    Host.objects.update(name="gpu-b")
    settings.SARDEENZ_HOST_NAME = "desk"
    monkeypatch.setattr(dispatch, "send", worker)
    text = logs.attempt_log(row.attempts.select_related("host", "instance").get(number=1))
    assert text.splitlines() == [f"line {number}" for number in range(5000)]
    assert asked == [(dispatch.LOG, "host.gpu-b")]


def test_silent_host_gives_the_stored_lines_and_says_so(
    row: Instance, settings: Any, valkey: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_WAIT_S", 0.1)
    monkeypatch.setattr(dispatch, "send", lambda *_, **__: None)
    Host.objects.update(name="gpu-b")
    LaunchAttempt.objects.update(log_tail="the last line")
    text = logs.attempt_log(row.attempts.select_related("host", "instance").get(number=1))
    assert text == "[The whole log is not to be had from host gpu-b; these are its last lines.]\nthe last line\n"


def test_first_and_last_cause_of_a_crash_loop_are_shown(row: Instance, client: Client) -> None:
    Instance.objects.filter(pk=row.pk).update(
        state="failed", restart_count=4, first_cause="The GPU is full.", reason="It failed 5 times in a row."
    )
    LaunchAttempt.objects.filter(instance=row, number=2).update(cause="A driver error.")
    page = client_of().get(f"/instances/{row.pk}/").content.decode()
    assert "<dt>First cause</dt><dd>The GPU is full.</dd><dt>Last cause</dt><dd>A driver error.</dd>" in page
    headers = {"Authorization": f"Bearer {make_key()[1]}"}
    shown = client.get(f"/api/v1/instances/{row.pk}", headers=headers).json()
    assert (shown["first_cause"], shown["last_cause"]) == ("The GPU is full.", "A driver error.")
