"""Publishers without subscribers: how many messages a second a broker takes at QoS 1, and how long each waits for its PUBACK.

What an acknowledgement stands for is the broker's business: here it is counted. All publishers share a process and a loop;
each has a ring of packets, as many as its window, so that a packet identifier is used again when it was acknowledged.
"""

from __future__ import annotations

import random
import select
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np

from nearcast.bench.traffic import packet, packet_end, text
from nearcast.bench.wire import RECEIVE_BYTES, Wire, open_session
from nearcast.errors import ConfigError, ConnectionClosed

_PUBLISH_QOS_1 = 0x32
_PUBACK = 0x40
_ACK_BYTES = 4
_MOST_BATCH_BYTES = 1 << 18
"""Written at a time: enough for one system call, and little enough that publishers take turns."""
_PATIENCE_S = 30.0
"""With nothing acknowledged for so long, the broker is taken for stuck."""


class PersistedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What is published."""

    publishers: int = 16
    window: int = 128
    """Messages of each publisher that are not acknowledged yet."""

    payload_bytes: int = 8_192
    seconds: float = 5.0
    warmup_seconds: float = 1.0
    rate: float = 0.0
    """Messages a second of all publishers together, one by one, to measure latency; 0: all that is taken."""

    prefix: str = "bench/kept"
    """Publisher *n* publishes on ``prefix/n``."""


class PersistedResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it. Latencies are from writing PUBLISH to reading PUBACK."""

    seconds: float
    acknowledged: int
    messages_per_second: float
    total: int
    """Messages that were acknowledged since the first, warm-up included."""

    unexpected: int
    """Acknowledgements of nothing, refusals among them."""

    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0


class Publisher:
    """One connection. ``sent`` and ``done`` count its messages."""

    def __init__(self, address: tuple[str, int], number: int, load: PersistedLoad) -> None:
        topic = f"{load.prefix}/{number}"
        self._window = load.window
        self._packets, self._size = ring(topic, load.window, load.payload_bytes, number)
        self._most = max(1, min(load.window // 2, _MOST_BATCH_BYTES // self._size))
        self._on_its_way = np.zeros(load.window, np.bool_)
        self._sent_at = np.zeros(load.window, np.float64)
        self.wire = Wire(open_session(address, f"bench-keep-{number}", 4), self._parse)
        self.sent = 0
        self.done = 0
        self.unexpected = 0
        self.latencies: list[float] = []

    def pump(self, now: float) -> None:
        """Write as much as window and batch allow."""
        if self.wire.blocked or self.wire.closed:
            return
        place = self.sent % self._window
        count = min(self._window - (self.sent - self.done), self._window - place)
        if count < self._most and self.sent != self.done and place + count != self._window:
            return
        self._write(place, min(count, self._most), now)

    def one(self, now: float) -> bool:
        """Write one message, if there is room."""
        if self.wire.blocked or self.wire.closed or self.sent - self.done >= self._window:
            return False
        self._write(self.sent % self._window, 1, now)
        return True

    def _write(self, place: int, count: int, now: float) -> None:
        # An acknowledgement out of order leaves a place taken behind the oldest.
        taken = self._on_its_way[place : place + count]
        if taken.any():
            count = int(taken.argmax())
        if not count:
            return
        self._on_its_way[place : place + count] = True
        self._sent_at[place : place + count] = now
        self.sent += count
        self.wire.write(self._packets[place * self._size : (place + count) * self._size])

    def _parse(self, buffer: bytearray, position: int, end: int) -> int:
        now = time.monotonic()
        while end - position >= _ACK_BYTES:
            if buffer[position] != _PUBACK or buffer[position + 1] != 2:
                _, following = packet_end(buffer, position, end)
                if not following:
                    break
                self.unexpected += 1
                position = following
                continue
            words = np.frombuffer(buffer, ">u2", (end - position) // _ACK_BYTES * 2, position).reshape(-1, 2)
            other = np.flatnonzero(words[:, 0] != _PUBACK << 8 | 2)
            count = int(other[0]) if len(other) else len(words)
            self._acknowledged(words[:count, 1].astype(np.int64) - 1, now)
            position += count * _ACK_BYTES
        return position

    def _acknowledged(self, places: np.ndarray[tuple[int], np.dtype[np.int64]], now: float) -> None:
        known = places[places < self._window]
        known = known[self._on_its_way[known]]
        self.unexpected += len(places) - len(known)
        self._on_its_way[known] = False
        self.done += len(known)
        self.latencies += (now - self._sent_at[known]).tolist()


def ring(topic: str, count: int, payload_bytes: int, seed: int) -> tuple[memoryview, int]:
    """``count`` PUBLISH packets of QoS 1 with identifiers from 1 on, and the size of each. No two payloads are alike."""
    if not 0 < count < 65_536 or payload_bytes < 1:
        raise ConfigError("a window is 1 to 65,535 messages, and a payload one byte at least")
    source = random.Random(seed)
    made = b"".join(
        packet(_PUBLISH_QOS_1, text(topic) + struct.pack(">H", number + 1) + source.randbytes(payload_bytes))
        for number in range(count)
    )
    return memoryview(made), len(made) // count


@contextmanager
def _publishers(addresses: Sequence[tuple[str, int]], load: PersistedLoad) -> Iterator[list[Publisher]]:
    made: list[Publisher] = []
    try:
        for number in range(load.publishers):
            made.append(Publisher(addresses[number % len(addresses)], number, load))
        yield made
    finally:
        for publisher in made:
            publisher.wire.close()


def publish_persisted(addresses: Sequence[tuple[str, int]], load: PersistedLoad) -> PersistedResult:
    """Publish for a while, at these brokers in turn. Raises :class:`ConnectionClosed` when one ends a connection."""
    with _publishers(addresses, load) as publishers:
        return _Loop(publishers, load).run()


class _Loop:
    def __init__(self, publishers: list[Publisher], load: PersistedLoad) -> None:
        self._publishers = publishers
        self._load = load
        self._buffer = bytearray(2 * RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._poll = select.epoll()
        self._by_descriptor = {publisher.wire.descriptor: publisher for publisher in publishers}
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.EPOLLIN)

    def run(self) -> PersistedResult:
        load = self._load
        try:
            return self._run(time.monotonic() + load.warmup_seconds)
        finally:
            self._poll.close()

    def _run(self, start: float) -> PersistedResult:
        end = start + self._load.seconds
        begun: tuple[float, int] | None = None
        progress_at, progress = time.monotonic(), -1
        due, turn = time.monotonic(), 0
        now = due
        while now < end:
            if begun is None and now >= start:
                begun = (now, self._done)
                for publisher in self._publishers:
                    publisher.latencies.clear()
            if self._load.rate:
                while due <= now:
                    self._publishers[turn % len(self._publishers)].one(now)
                    turn += 1
                    due += 1 / self._load.rate
                self._turn(min(0.01, max(0.0, due - now)))
            else:
                for publisher in self._publishers:
                    publisher.pump(now)
                self._turn(0.01)
            now = time.monotonic()
            if self._done != progress:
                progress, progress_at = self._done, now
            elif now - progress_at > _PATIENCE_S:
                raise ConnectionClosed(f"nothing was acknowledged for {_PATIENCE_S:.0f} s")
        first, before = begun or (now, 0)
        acknowledged = self._done - before
        latencies = np.array([each for publisher in self._publishers for each in publisher.latencies]) * 1e3
        self._drain()
        quantiles = np.quantile(latencies, (0.5, 0.99, 1.0)) if len(latencies) else np.zeros(3)
        return PersistedResult(
            seconds=now - first,
            acknowledged=acknowledged,
            messages_per_second=acknowledged / (now - first),
            total=self._done,
            unexpected=sum(publisher.unexpected for publisher in self._publishers),
            p50_ms=float(quantiles[0]),
            p99_ms=float(quantiles[1]),
            max_ms=float(quantiles[2]),
        )

    def _drain(self) -> None:
        until = time.monotonic() + _PATIENCE_S
        while any(publisher.sent > publisher.done for publisher in self._publishers):
            self._turn(0.01)
            if time.monotonic() >= until:
                raise ConnectionClosed(f"messages were not acknowledged within {_PATIENCE_S:.0f} s")

    @property
    def _done(self) -> int:
        return sum(publisher.done for publisher in self._publishers)

    def _turn(self, wait_s: float) -> None:
        for descriptor, _ in self._poll.poll(wait_s):
            publisher = self._by_descriptor[descriptor]
            publisher.wire.read(self._buffer, self._view)
            if publisher.wire.closed:
                raise ConnectionClosed("the broker closed the connection of a publisher")
        for publisher in self._publishers:
            if publisher.wire.blocked:
                publisher.wire.flush()
