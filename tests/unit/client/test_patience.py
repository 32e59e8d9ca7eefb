"""A client of the bulk port does not try for ever, nor as fast as it can, where it gets nowhere."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nearcast.client import BlockingTopics, Topics
from nearcast.client.patience import RETRY_SECONDS, Patience
from nearcast.errors import ConnectionClosed
from nearcast.topiclog import wire


def test_pauses_grow_until_it_is_enough() -> None:
    patience = Patience(10.0)
    assert patience.wait_seconds(100.0) == 0.0
    pauses = [patience.wait_seconds(100.0 + number) for number in range(1, 10)]
    assert all(pause is not None and pause <= RETRY_SECONDS[1] for pause in pauses)
    assert pauses[0] is not None
    assert pauses[0] < 0.1
    assert patience.wait_seconds(110.0) is None


def test_what_goes_well_makes_patient() -> None:
    patience = Patience(10.0)
    patience.wait_seconds(0.0)
    patience.rewarded()
    assert patience.wait_seconds(100.0) == 0.0
    assert patience.wait_seconds(109.9) == pytest.approx(0.04, abs=0.02)
    assert Patience(0.0).wait_seconds(1.0) == 0.0


@contextmanager
def fickle_broker() -> Iterator[tuple[str, list[int]]]:
    """Welcomes every client, and closes at its first question."""
    connections: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    accepted, _ = listening.accept()
                except OSError:
                    return
                connections.append(1)
                with accepted:
                    accepted.recv(65_536)
                    accepted.sendall(wire.message(0, wire.Welcome(wire.VERSION, "c", 60.0, 1_000_000)))
                    accepted.recv(65_536)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"nearcast://127.0.0.1:{listening.getsockname()[1]}", connections
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(10.0)


def test_a_broker_that_ends_every_conversation_is_given_up() -> None:
    with fickle_broker() as (url, connections):
        with BlockingTopics(url, reconnect_seconds=0.3) as topics, pytest.raises(ConnectionClosed):
            topics.rules()
        assert 2 <= len(connections) < 20
        with BlockingTopics(url, reconnect_seconds=0.3) as topics, pytest.raises(ConnectionClosed):
            next(topics.tail("a"))
    with fickle_broker() as (url, connections):

        async def ask() -> None:
            async with Topics(url, reconnect_seconds=0.3) as topics:
                with pytest.raises(ConnectionClosed):
                    await topics.rules()
                with pytest.raises(ConnectionClosed):
                    await anext(aiter(topics.tail("a")))

        asyncio.run(ask())
        assert 2 <= len(connections) < 40
