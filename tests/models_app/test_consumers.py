"""The one socket of a page: who may open it, latest wins, acknowledgements, rights looked at again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import channels.consumer
import pytest
from asgiref.sync import sync_to_async
from channels.auth import AuthMiddlewareStack
from channels.layers import get_channel_layer
from channels.routing import URLRouter
from channels.testing import WebsocketCommunicator
from django.conf import settings
from django.contrib.auth.models import User
from django.test import Client

from models_app import consumers
from models_app.consumers import LiveConsumer, origin_is_ours
from models_app.events import LIVE_GROUP
from models_app.ws_urls import websocket_urlpatterns
from tests.models_app.pages import client_of

pytestmark = pytest.mark.django_db(transaction=True)

application = AuthMiddlewareStack(URLRouter(websocket_urlpatterns))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of service become hundredths; verdicts are never remembered."""
    monkeypatch.setattr(consumers, "FRAME_GAP_S", 0.01)
    monkeypatch.setattr(consumers, "HEARTBEAT_S", 0.3)
    monkeypatch.setattr(consumers, "VERDICT_AGE_S", 0.0)
    monkeypatch.setattr(consumers, "broker_alive", lambda: True)


def socket(client: Client | None, *, query: str = "?samples=1", origin: str = "") -> WebsocketCommunicator:
    headers = [(b"host", b"testserver")]
    if client is not None:
        name = settings.SESSION_COOKIE_NAME
        headers.append((b"cookie", f"{name}={client.cookies[name].value}".encode()))
    if origin:
        headers.append((b"origin", origin.encode()))
    return WebsocketCommunicator(application, f"/ws/live{query}", headers=headers)


@pytest.fixture
async def open_socket() -> AsyncIterator[WebsocketCommunicator]:
    """A viewer's socket whose first, empty frame has come and is acknowledged."""
    found = socket(await sync_to_async(client_of)("viewer"))
    connected, _ = await found.connect()
    assert connected
    first = await found.receive_json_from()
    assert first == {"n": 1}
    await found.send_json_to({"ack": 1})
    yield found
    await found.disconnect()


def sample(number: int, host: str = "gpu-a") -> dict[str, Any]:
    record = {"type": "sample", "host": host, "t": float(number), "seq": number, "gpus": []}
    return {"type": "sample", "record": record}


async def tell(*messages: dict[str, Any]) -> None:
    layer = get_channel_layer()
    assert layer is not None
    for message in messages:
        await layer.group_send(LIVE_GROUP, message)
    await asyncio.sleep(0.05)


async def test_a_stranger_is_refused() -> None:
    connected, code = await socket(None).connect()
    assert (connected, code) == (False, consumers.NOT_LOGGED_IN)


async def test_a_page_of_another_site_is_refused() -> None:
    client = await sync_to_async(client_of)("admin")
    connected, code = await socket(client, origin="https://elsewhere.example").connect()
    assert (connected, code) == (False, consumers.BAD_ORIGIN)


async def test_the_own_origin_is_let_in() -> None:
    found = socket(await sync_to_async(client_of)("viewer"), origin="http://testserver")
    connected, _ = await found.connect()
    assert connected
    await found.disconnect()


def test_a_trusted_origin_is_ours(settings: Any) -> None:  # pytest-django's
    scope = {"headers": [(b"host", b"inner:8000"), (b"origin", b"https://outer.example")]}
    assert not origin_is_ours(scope)
    settings.CSRF_TRUSTED_ORIGINS = ["https://outer.example"]
    assert origin_is_ours(scope)


async def test_of_many_readings_only_the_newest_of_each_host_is_sent(open_socket: WebsocketCommunicator) -> None:
    await tell(sample(0))
    frame = await open_socket.receive_json_from()
    await tell(*[sample(number) for number in range(1, 6)], sample(9, "gpu-b"))  # while the browser is busy
    await open_socket.send_json_to({"ack": frame["n"]})
    later = await open_socket.receive_json_from()
    assert {record["host"]: record["t"] for record in later["samples"]} == {"gpu-a": 5.0, "gpu-b": 9.0}


async def test_nothing_more_is_sent_before_the_last_frame_is_acknowledged(open_socket: WebsocketCommunicator) -> None:
    await tell(sample(1))
    frame = await open_socket.receive_json_from()
    await tell(sample(2), sample(3))
    assert await open_socket.receive_nothing(timeout=0.5)
    await open_socket.send_json_to({"ack": frame["n"]})
    later = await open_socket.receive_json_from()
    assert later["samples"][0]["t"] == 3.0


async def test_an_old_acknowledgement_counts_for_nothing(open_socket: WebsocketCommunicator) -> None:
    await tell(sample(1))
    frame = await open_socket.receive_json_from()
    await open_socket.send_json_to({"ack": frame["n"] - 1})
    await open_socket.send_to(text_data="no json")
    await tell(sample(2))
    assert await open_socket.receive_nothing(timeout=0.4)


async def test_changes_are_told_by_id_and_once(open_socket: WebsocketCommunicator) -> None:
    note = {"type": "instance.changed", "instance_id": 7}
    await tell(note, note, {"type": "operation.changed", "operation_id": 3}, {"type": "models.changed"})
    frame = await open_socket.receive_json_from()
    while "instances" not in frame or "models" not in frame:
        await open_socket.send_json_to({"ack": frame["n"]})
        frame |= await open_socket.receive_json_from()
    assert frame["instances"] == [7]
    assert frame["operations"] == [3]
    assert frame["models"] is True


async def test_a_page_that_draws_no_readings_gets_none() -> None:
    found = socket(await sync_to_async(client_of)("viewer"), query="")
    await found.connect()
    await found.receive_json_from()
    await found.send_json_to({"ack": 1})
    await tell(sample(1))
    frame = await found.receive_json_from()
    assert "samples" not in frame
    await found.disconnect()


async def test_a_quiet_link_is_told_from_a_dead_one_by_an_empty_frame(open_socket: WebsocketCommunicator) -> None:
    assert await open_socket.receive_json_from(timeout=3) == {"n": 2}


async def test_a_broker_that_went_away_is_told(
    open_socket: WebsocketCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "broker_alive", lambda: False)
    assert (await open_socket.receive_json_from(timeout=3))["broker"] is False


@pytest.mark.parametrize("how", ["inactive", "logged out", "password"])
async def test_rights_that_are_lost_end_the_socket_at_the_next_frame(
    open_socket: WebsocketCommunicator, how: str
) -> None:
    def lose() -> None:
        user = User.objects.get()
        if how == "inactive":
            user.is_active = False
        elif how == "password":
            user.set_password("another-password")
        else:
            from django.contrib.sessions.models import Session

            Session.objects.all().delete()
        user.save()

    await sync_to_async(lose)()
    await tell(sample(1))
    closed = await open_socket.receive_output(timeout=3)
    assert closed == {"type": "websocket.close", "code": consumers.RIGHTS_LOST}


async def test_two_hundred_browsers_ask_the_database_once_per_session(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(consumers, "VERDICT_AGE_S", 60.0)
    monkeypatch.setattr(consumers, "_still_allowed", lambda key: asked.append(key) or True)
    verdicts = consumers._Verdicts()
    for _ in range(5):
        for session in ("a", "b"):
            assert await verdicts.ask(session)
    assert sorted(asked) == ["a", "b"]


async def test_a_broker_that_is_away_at_the_start_is_told_and_the_page_is_sent_to_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Away:
        async def new_channel(self, *_args: Any) -> str:
            return "x"

        async def group_add(self, *_args: Any) -> None:
            raise ConnectionError

        async def receive(self, _channel: str) -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

    monkeypatch.setattr("channels.consumer.get_channel_layer", lambda _alias: Away())
    found = socket(await sync_to_async(client_of)("viewer"))
    connected, _ = await found.connect()
    assert connected
    assert await found.receive_json_from() == {"n": 1, "broker": False}
    assert (await found.receive_output())["code"] == consumers.TRY_LATER


def test_the_consumer_handles_every_kind_of_live_message() -> None:
    from gpus_app.events import Payload as GpusPayload
    from models_app.events import Payload

    kinds = [kind.__annotations__["type"] for union in (Payload, GpusPayload) for kind in union.__args__]
    for kind in kinds:
        name = str(getattr(kind, "__forward_arg__", kind)).split("'")[1].split('"')[0]
        assert hasattr(LiveConsumer, name.replace(".", "_")), name


async def test_readings_reach_the_page_without_a_thread_for_each(
    open_socket: WebsocketCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def visit() -> None:
        raise AssertionError("a message went by way of a thread")

    monkeypatch.setattr(channels.consumer, "aclose_old_connections", visit)
    await tell(sample(1))
    frame = await open_socket.receive_json_from()
    assert frame["samples"][0]["t"] == 1.0


async def test_message_that_nobody_handles_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no\.such"):
        await LiveConsumer().dispatch({"type": "no.such"})
