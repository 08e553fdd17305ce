"""The channel layer of service, on a real Valkey."""

from __future__ import annotations

import asyncio

from sardeenz_site.channel_layer import SharedPubSubChannelLayer


async def test_what_came_once_is_decoded_once_for_all_who_listen(valkey: str) -> None:
    layer = SharedPubSubChannelLayer(hosts=[valkey], prefix="t")
    try:
        channels = [await layer.new_channel() for _ in range(3)]
        for channel in channels:
            await layer.group_add("pages", channel)
        for number in (1, 2):
            await layer.group_send("pages", {"type": "sample", "number": number})
        for number in (1, 2):
            async with asyncio.timeout(15):
                first, *others = [await layer.receive(channel) for channel in channels]
            assert first == {"type": "sample", "number": number}
            assert all(other is first for other in others)
    finally:
        await layer.flush()
