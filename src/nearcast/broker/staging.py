"""Batches on their way into the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearcast.errors import BatchRefused, RemoteProtocolError
from nearcast.topiclog import wire

if TYPE_CHECKING:
    from nearcast.broker.bulk import BulkTransport
    from nearcast.broker.bulk_requests import BulkRequests
    from nearcast.broker.process import Broker


class Staging:
    def __init__(self, broker: Broker, requests: BulkRequests) -> None:
        self._broker = broker
        self._requests = requests

    def handle(self, transport: BulkTransport, number: int, content: wire.FromClient) -> None:
        raise BatchRefused("batches are not taken yet")

    def data(self, transport: BulkTransport, number: int, body: bytes) -> None:
        raise RemoteProtocolError(0x82, "data that belongs to no upload")

    def closed(self, transport: BulkTransport, number: int) -> None:
        pass

    def lost(self, transport: BulkTransport) -> None:
        pass

    async def close(self) -> None:
        pass
