"""Many engines asked at once over kept connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from gpus_app.probes import engine_poll
from gpus_app.probes.engine_poll import Answer, EnginePoll
from tests.gpus_app.fake_host import FakeEngine, metrics_text


@pytest.fixture
def poll() -> Iterator[EnginePoll]:
    poll = EnginePoll()
    yield poll
    poll.close()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(metrics=metrics_text(running=3, filler=3000))
    yield engine
    engine.close()


def ask(poll: EnginePoll, engine: FakeEngine, number: int = 1, path: str = "/metrics") -> bool:
    return poll.ask((number, path), address="127.0.0.1", port=engine.port, token=engine.token)


def listener(answers: list[bytes | None]) -> tuple[int, socket.socket]:
    """A server of raw bytes: one connection per entry, answered with it (None: closed without a word)."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for answer in answers:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                if answer is not None:
                    connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return server.getsockname()[1], server


def test_an_answer_in_chunks_is_put_together(poll: EnginePoll, engine: FakeEngine) -> None:
    assert ask(poll, engine)
    answer = poll.collect(5)[1, "/metrics"]
    assert answer.status == 200 and answer.body.decode() == engine.metrics


def test_the_connection_is_kept(poll: EnginePoll, engine: FakeEngine) -> None:
    ports = set()
    for _ in range(3):
        ask(poll, engine)
        assert poll.collect(5)[1, "/metrics"].status == 200
        connection = poll._connections[1, "/metrics"].socket
        assert connection is not None
        ports.add(connection.getsockname())
    assert len(ports) == 1


def test_the_token_is_sent(poll: EnginePoll, engine: FakeEngine) -> None:
    poll.ask((1, "/metrics"), address="127.0.0.1", port=engine.port, token="wrong")
    assert poll.collect(5)[1, "/metrics"].status == 401


def test_a_refused_connection_is_an_answer_without_status(poll: EnginePoll) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    poll.ask((1, "/metrics"), address="127.0.0.1", port=port, token="")
    assert poll.collect(5)[1, "/metrics"].status == 0


def test_a_slow_engine_is_waited_for_once_and_its_answer_taken_later(poll: EnginePoll, engine: FakeEngine) -> None:
    engine.delay_s = 0.6
    ask(poll, engine)
    assert poll.collect(0.1) == {}
    assert not ask(poll, engine)
    began = time.monotonic()
    assert poll.collect(30) == {}
    assert time.monotonic() - began < 5, "a late engine must not be waited for"
    time.sleep(0.8)
    assert poll.collect(0)[1, "/metrics"].status == 200
    assert engine.requests == {"/metrics": 1}


def test_one_slow_engine_does_not_delay_the_others(poll: EnginePoll, engine: FakeEngine) -> None:
    slow = FakeEngine(delay_s=30)
    try:
        ask(poll, slow, 1)
        poll.collect(0.05)
        ask(poll, engine, 2)
        assert set(poll.collect(5)) == {(2, "/metrics")}
    finally:
        slow.server.server_close()


def test_an_answer_that_never_comes_is_given_up(poll: EnginePoll, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_poll, "GIVE_UP_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        poll.ask((1, "/metrics"), address="127.0.0.1", port=server.getsockname()[1], token="")
        poll.collect(0.05)
        answers = poll.collect(0)
        answers = answers or poll.collect(0)
        assert poll._connections[1, "/metrics"].asked_at is None


def test_a_kept_connection_that_the_engine_closed_is_made_anew(poll: EnginePoll) -> None:
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    port, server = listener([ok, ok])
    with server:
        for _ in range(2):
            poll.ask((1, "/metrics"), address="127.0.0.1", port=port, token="")
            assert poll.collect(5)[1, "/metrics"].body == b"ok"


def test_an_answer_without_length_ends_with_the_connection(poll: EnginePoll) -> None:
    port, server = listener([b"HTTP/1.0 200 OK\r\n\r\nbody"])
    with server:
        poll.ask((1, "/metrics"), address="127.0.0.1", port=port, token="")
        assert poll.collect(5)[1, "/metrics"] == Answer(200, b"body", pytest.approx(time.monotonic(), abs=10))


@pytest.mark.parametrize(
    "rubbish", [b"SSH-2.0-OpenSSH_9\r\n", b"\0" * 100, b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"]
)
def test_something_that_is_not_http_is_an_answer_without_status(poll: EnginePoll, rubbish: bytes) -> None:
    port, server = listener([rubbish])
    with server:
        poll.ask((1, "/metrics"), address="127.0.0.1", port=port, token="")
        assert poll.collect(5)[1, "/metrics"].status == 0


def test_a_body_without_end_is_cut_off(poll: EnginePoll, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_poll, "MOST_BYTES", 1000)
    port, server = listener([b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"x" * 50000])
    with server:
        poll.ask((1, "/metrics"), address="127.0.0.1", port=port, token="")
        assert poll.collect(5)[1, "/metrics"] == Answer(0, b"", pytest.approx(time.monotonic(), abs=10))


def test_an_engine_at_another_port_gets_another_connection(poll: EnginePoll, engine: FakeEngine) -> None:
    other = FakeEngine(metrics="x 1\n")
    try:
        ask(poll, engine)
        poll.collect(5)
        ask(poll, other)
        assert poll.collect(5)[1, "/metrics"].body == b"x 1\n"
    finally:
        other.close()


def test_connections_of_engines_that_are_gone_are_closed(poll: EnginePoll, engine: FakeEngine) -> None:
    ask(poll, engine, 1)
    ask(poll, engine, 2)
    poll.collect(5)
    poll.forget({2})
    assert [key[0] for key in poll._connections] == [2]
