"""``make run`` as a person meets it: ready by itself, kept running, ended without a trace, refusing in a sentence."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.sardeenz_site.stack import Stack, wait_for

pytestmark = pytest.mark.slow
NAMES = {"valkey", "web", "router", "control", "beat", "host", "sampler"}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        yield running


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code < 500
    except httpx.HTTPError:
        return False


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_says_where_it_is_and_that_gpus_are_simulated(stack: Stack) -> None:
    assert f"http://127.0.0.1:{stack.port}/" in stack.text
    assert f"http://127.0.0.1:{stack.router_port}/v1" in stack.text
    assert "simulated" in stack.text


def test_all_processes_run_and_all_answer(stack: Stack) -> None:
    assert set(stack.children()) == NAMES
    assert httpx.get(f"{stack.url}/readyz").json()["status"] == "ok"
    assert httpx.get(f"{stack.url}/healthz").status_code == 200
    assert answers(f"{stack.router_url}/healthz")


def test_password_that_was_printed_logs_in(stack: Stack) -> None:
    assert stack.password
    with stack.login(stack.password) as client:
        assert client.get("/admin/").status_code == 200


def test_static_files_come_with_validators_and_admin_is_styled(stack: Stack) -> None:
    answer = httpx.get(f"{stack.url}/static/admin/css/base.css")
    assert answer.status_code == 200
    again = httpx.get(answer.url, headers={"If-None-Match": answer.headers["ETag"]})
    assert again.status_code == 304
    assert httpx.get(f"{stack.url}/static/../manage.py").status_code == 404


def test_v1_is_served_by_web_and_router_alike_and_needs_a_key(stack: Stack) -> None:
    for base in (stack.url, stack.router_url):
        answer = httpx.get(f"{base}/v1/models")
        assert answer.status_code == 401
        assert answer.json()["error"]["type"]


def test_key_made_on_the_command_line_works_on_rest_and_v1(stack: Stack) -> None:
    key = stack.manage("create_api_key", "script", "--role", "operator").split()[-1]
    headers = {"Authorization": f"Bearer {key}"}
    assert httpx.get(f"{stack.url}/api/v1/models", headers=headers).status_code == 200
    wait_for(
        lambda: httpx.get(f"{stack.router_url}/v1/models", headers=headers).status_code == 200,
        20,
        "router knows the key",
    )


def test_valkey_is_on_a_socket_for_its_owner_and_on_no_port(stack: Stack) -> None:
    folder = stack.home / "valkey"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "valkey.sock").is_socket()
    assert stack.children()["valkey"].net_connections("tcp") == []


def test_pages_listen_on_loopback_alone(stack: Stack) -> None:
    for name in ("web", "router"):
        links = stack.children()[name].net_connections("tcp")
        assert {link.laddr.ip for link in links if link.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


def test_idle_processes_together_stay_under_900_mib(stack: Stack) -> None:
    assert stack.process is not None
    launcher = psutil.Process(stack.process.pid)
    taken = {p.pid: p.memory_info().rss for p in [launcher, *launcher.children(recursive=True)]}
    assert sum(taken.values()) < 900 * 1024**2, taken


@pytest.mark.parametrize("name", ["router", "sampler", "valkey"])
def test_process_that_dies_is_started_again(stack: Stack, name: str) -> None:
    old = stack.children()[name]
    old.kill()
    wait_for(lambda: stack.children().get(name, old).pid != old.pid, 30, f"{name} is there again")
    wait_for(lambda: answers(f"{stack.url}/readyz") and answers(f"{stack.router_url}/healthz"), 30, "all answer again")


def test_second_launcher_on_the_same_home_is_refused_in_a_sentence(stack: Stack) -> None:
    with Stack(start=False, SARDEENZ_HOME=str(stack.home)) as second:
        code, text = second.run_to_end()
    assert code == 1
    assert text.strip().endswith("Stop it, or set SARDEENZ_HOME to another folder.")


def test_end_leaves_no_process_port_socket_or_segment_and_the_next_start_keeps_the_users() -> None:
    with Stack() as stack:
        first_password = stack.password
        assert first_password
        before = stack.children()
        assert stack.end() == 0
        assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in before.values())
        assert not listens(stack.port)
        assert not listens(stack.router_port)
        assert not (stack.home / "valkey").exists()
        installation = (stack.home / "installation_id").read_text().strip()
        assert not list(Path("/dev/shm").glob(f"sz-{installation}-*"))
        assert "simulated engine" in stack.text

        stack.start()
        assert stack.password is None
        with stack.login(first_password):
            pass
        assert stack.end(signal.SIGTERM) == 0


def test_killed_launcher_leaves_no_children() -> None:
    with Stack() as stack:
        children = stack.children()
        assert stack.process is not None
        stack.process.kill()
        stack.process.wait(10)
        wait_for(
            lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in children.values()),
            15,
            "gone",
        )
        # And nothing that it left is in the way of the next.
        stack.start()


def test_end_while_starting_is_an_end() -> None:
    with Stack(start=False) as stack:
        stack.launch()
        wait_for(lambda: "Preparing" in stack.text, 60, "it begins")
        assert stack.end() == 0
        assert not (stack.home / "valkey").exists()


def test_taken_port_is_told_with_its_holder_and_the_way_out() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        with Stack(start=False, PORT=str(port)) as stack:
            code, text = stack.run_to_end()
    assert code == 1
    assert f"Port {port} on 127.0.0.1 is taken by" in text
    assert f"(process {os.getpid()})" in text
    assert f"PORT={port + 100}" in text


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"PORT": "80a"}, "PORT='80a' is not a number"),
        ({"SARDEENZ_SIM_GPUS": "1.5"}, "SARDEENZ_SIM_GPUS='1.5' is not a whole number"),
        ({"DATABASE_URL": "postgresql://u:geheim@127.0.0.1:1/x"}, "The database of DATABASE_URL does not answer"),
        ({"REDIS_URL": "redis://:geheim@127.0.0.1:1/0"}, "Redis/Valkey at REDIS_URL does not answer"),
        ({"HOST": "192.0.2.1"}, "HOST=192.0.2.1 is no address of this machine"),
        ({"SARDEENZ_HOME": "/proc/nowhere"}, "SARDEENZ_HOME=/proc/nowhere cannot be written"),
    ],
)
def test_start_that_cannot_be_is_refused_in_one_sentence(env: dict[str, str], sentence: str) -> None:
    with Stack(start=False, **env) as stack:
        code, text = stack.run_to_end()
    assert code == 1
    last = text.strip().splitlines()[-1]
    assert last.startswith("Sardeenz cannot start: ")
    assert sentence in last
    assert "Traceback" not in text
    assert "geheim" not in text


def test_valkey_that_does_not_start_is_told_with_its_own_last_words(tmp_path: Path) -> None:
    fake = tmp_path / "valkey-server"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "v=9.1.0" && exit\necho "no luck today" >&2\nexit 1\n')
    fake.chmod(0o755)
    with Stack(start=False, PATH=f"{tmp_path}:{os.environ['PATH']}") as stack:
        code, text = stack.run_to_end()
    assert code == 1
    assert "did not start: no luck today" in text


def test_long_home_and_given_password_are_taken_as_they_are() -> None:
    """A Unix socket's path has at most 107 bytes; the password is for the first start alone."""
    with Stack(start=False, SARDEENZ_ADMIN_PASSWORD="correct horse battery") as stack:
        deep = stack.home / ("d" * 60) / ("e" * 60)
        deep.mkdir(parents=True)
        stack.env["SARDEENZ_HOME"] = str(deep)
        stack.start()
        socket_file = (deep / "valkey" / "url").read_text().removeprefix("unix://").partition("?")[0]
        assert Path(socket_file).is_socket()

        assert "battery" not in stack.text
        for child in stack.children().values():
            assert b"battery" not in Path(f"/proc/{child.pid}/environ").read_bytes()
        with stack.login("correct horse battery") as client:
            assert client.get("/admin/").status_code == 200

        assert stack.end() == 0
        assert not Path(socket_file).parent.exists()
