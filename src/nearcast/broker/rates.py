"""Messages per second by topic and by client, for the busiest few.

The engine counts per topic and per connection anyway. A sample takes the differences since the last one and keeps the top N.
Of every other topic that the router remembers, only the counters stay here, found by the hash of the name: names are the
client's to choose, and must not be kept twice.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable, Iterator

import msgspec

from nearcast.broker.transports import ClientTransport

SAMPLE_SECONDS = 5.0
CLIENTS_PER_SLICE = 2_000

_NOTHING = (0, 0)


class TopicRate(msgspec.Struct, frozen=True):
    """A topic's traffic into the broker."""

    topic: str
    messages_per_second: float
    bytes_per_second: float


class ClientRate(msgspec.Struct, frozen=True):
    """A client's PUBLISH packets: received from it, and sent to it."""

    client: str
    messages_in_per_second: float
    messages_out_per_second: float


class Rates:
    """The latest sample. ``topics`` and ``clients`` are busiest first."""

    def __init__(self, top_n: int) -> None:
        self.top_n = top_n
        self.topics: list[TopicRate] = []
        self.clients: list[ClientRate] = []
        self._previous: dict[int, tuple[int, int]] = {}

    def sample_topics(self, counts: Iterable[tuple[str, int, int]], seconds: float) -> None:
        """Take the router's counters. A counter below its last value was begun anew."""
        busiest = heapq.nlargest(self.top_n, self._moved(counts))
        self.topics = [
            TopicRate(topic, round(messages / seconds, 3), round(size / seconds, 3)) for messages, size, topic in busiest
        ]

    def _moved(self, counts: Iterable[tuple[str, int, int]]) -> Iterator[tuple[int, int, str]]:
        """(messages, bytes, topic) since the last sample, of the topics that had any."""
        previous = self._previous
        seen: dict[int, tuple[int, int]] = {}
        for topic, messages, size in counts:
            # Two names of one hash would have a wrong rate for one sample: once in 2**64 pairs, and a rate is all it is.
            key = hash(topic)
            before = previous.get(key, _NOTHING)
            if messages < before[0]:
                before = _NOTHING
            if messages > before[0]:
                yield messages - before[0], size - before[1], topic
                seen[key] = (messages, size)
            else:
                seen[key] = before
        self._previous = seen

    async def sample_clients(self, handles: Iterable[ClientTransport], seconds: float) -> None:
        """Look at every connection, in slices so that the event loop is never held up for long."""
        busiest: list[tuple[int, int, int, str]] = []
        for number, handle in enumerate(list(handles)):
            if number % CLIENTS_PER_SLICE == CLIENTS_PER_SLICE - 1:
                await asyncio.sleep(0)
            connection = handle.connection
            if connection is None:
                continue
            received = connection.messages_in - handle.sampled_in
            sent = connection.messages_out - handle.sampled_out
            if received or sent:
                handle.sampled_in = connection.messages_in
                handle.sampled_out = connection.messages_out
                entry = (received + sent, received, sent, connection.client_id)
                if len(busiest) < self.top_n:
                    heapq.heappush(busiest, entry)
                elif busiest and entry > busiest[0]:
                    heapq.heapreplace(busiest, entry)
        ordered = sorted(busiest, reverse=True)
        self.clients = [
            ClientRate(client, round(received / seconds, 3), round(sent / seconds, 3)) for _, received, sent, client in ordered
        ]

    async def run(
        self,
        topic_counts: Callable[[], Iterable[tuple[str, int, int]]],
        handles: Iterable[ClientTransport],
        monotonic: Callable[[], float],
    ) -> None:
        """Sample for ever."""
        last = monotonic()
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            now = monotonic()
            seconds, last = max(now - last, 0.001), now
            if self.top_n:
                self.sample_topics(topic_counts(), seconds)
                await self.sample_clients(handles, seconds)
            else:
                self.topics, self.clients = [], []
