"""``Client(on_connection=...)``: told about every connection and every loss, not about its own goodbye."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nearcast.client import Backoff, Client
from tests.integration.brokers import NearcastBroker

pytestmark = pytest.mark.integration


def test_connections_and_losses_are_told_in_order(tmp_path: Path) -> None:
    async def follow(broker: NearcastBroker) -> list[str | None]:
        news: list[str | None] = []
        lost = asyncio.Event()

        def told(reason: str | None) -> None:
            news.append(reason)
            if reason is not None:
                lost.set()

        backoff = Backoff(initial_seconds=0.05, max_seconds=0.2)
        async with asyncio.timeout(60), Client(broker.url, reconnect=backoff, on_connection=told) as client:
            broker.kill()
            await lost.wait()
            assert not client.connected
            await asyncio.to_thread(broker.start)
            await client.wait_connected()
            return news

    with NearcastBroker(tmp_path) as broker:
        news = asyncio.run(follow(broker))
    assert [entry is None for entry in news] == [True, False, True]
    assert news[1]
