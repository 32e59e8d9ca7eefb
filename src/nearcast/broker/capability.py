"""What this broker could relay, measured: how fast its processor is at a broker's work, how busy the machine is, and what fits
on the way to the cloud. What becomes of the figures is :class:`~nearcast.groups.capability.Capability`'s.

The processor is measured once, at the start, with the work itself: an engine of its own, in memory, passes QoS 1 messages from
one client to another for a few hundredths of a second. The way to the cloud is not measured with traffic of its own, which may
be paid for: the kernel knows what its TCP connection delivered and what it may have under way (Linux; elsewhere the processor
alone counts).
"""

from __future__ import annotations

import math
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from typing import Final, Protocol

from nearcast.config import EngineSettings, Limits
from nearcast.groups.capability import Capability
from nearcast.mqtt.access import AllowAll, Peer
from nearcast.mqtt.codec import encode
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.engine import Engine
from nearcast.mqtt.packets import MQTT_5, Connect, Packet, Publish, Subscribe, SubscriptionRequest

TRIAL_SECONDS: Final = 0.01
TRIALS: Final = 3
"""The best of three counts: whatever else ran meanwhile can only have made it slower."""

BATCH: Final = 16
"""Messages that arrive together, each of another topic."""

REFRESH_SECONDS: Final = 30.0

# Where Linux keeps what it knows of a TCP connection, struct tcp_info: u32 segment size and congestion window in segments, u32
# round-trip time in microseconds, u64 delivery rate in bytes a second.
_SEGMENT_BYTES_AT: Final = 16
_ROUND_TRIP_AT: Final = 68
_WINDOW_AT: Final = 80
_DELIVERY_RATE_AT: Final = 160
_INFO_BYTES: Final = 168


class KernelSocket(Protocol):
    """A socket as far as the kernel is asked about it; uvloop has its own kind."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


class CapabilityMeter:
    """Keeps a broker's LCM up to date."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.capability = Capability()
        self._monotonic = monotonic
        self._messages_per_s = engine_messages_per_s()
        self._messages = 0
        self._message_bytes = 0
        self._due_at = -math.inf

    def refresh(self, cloud: KernelSocket | None, messages: int, message_bytes: int) -> float | None:
        """The measure, when it is time to look again; none when it is not. ``messages`` and their bytes are those that this
        broker has received since it started."""
        now = self._monotonic()
        if now < self._due_at:
            return None
        self._due_at = now + REFRESH_SECONDS
        self.capability.processor(self._messages_per_s, idle_share())
        self.capability.messages(messages - self._messages, message_bytes - self._message_bytes)
        self._messages, self._message_bytes = messages, message_bytes
        if cloud is not None:
            self.capability.cloud(tcp_bytes_per_s(cloud))
        return self.capability.lcm()

    def soon(self) -> None:
        """The way to the cloud is another one: look at it with the next refresh."""
        self._due_at = -math.inf


def engine_messages_per_s() -> float:
    """How many messages a second an engine passes on here, one core for itself."""
    engine = Engine(EngineSettings(limits=Limits()), AllowAll(), None, random.Random(0))
    subscriber = engine.open(Peer("subscriber"), None, 0.0)
    publisher = engine.open(Peer("publisher"), None, 0.0)
    _feed(engine, subscriber, Connect("subscriber"), Subscribe(1, [SubscriptionRequest("t/+", 0)]))
    _feed(engine, publisher, Connect("publisher"))
    batch = b"".join(encode(Publish(f"t/{number}", bytes(100), 1, packet_id=1 + number), MQTT_5) for number in range(BATCH))
    best = 0.0
    for _ in range(TRIALS):
        passed = 0
        began = time.perf_counter()
        while time.perf_counter() - began < TRIAL_SECONDS:
            engine.receive(publisher, batch, 0.0)
            _flush(engine)
            passed += BATCH
        best = max(best, passed / (time.perf_counter() - began))
    return best


def _feed(engine: Engine, connection: Connection, *packets: Packet) -> None:
    engine.receive(connection, b"".join(encode(packet, MQTT_5) for packet in packets), 0.0)
    _flush(engine)


def _flush(engine: Engine) -> None:
    for connection in engine.ready():
        connection.take()
        connection.take_held()
        connection.committed()


def idle_share() -> float:
    """Share of the machine's processors that nothing waits for, over the last minute."""
    try:
        load = os.getloadavg()[0]
    except OSError:
        return 1.0
    return max(0.0, 1.0 - load / (os.cpu_count() or 1))


def tcp_bytes_per_s(connection: KernelSocket) -> float:
    """What fits on a TCP connection, as its kernel sees it: what it delivered of late, or what its window lets it have under
    way in a round trip, whichever is more. 0 where the kernel does not say."""
    if sys.platform != "linux":
        return 0.0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return 0.0
    if len(info) < _INFO_BYTES:
        return 0.0
    segment_bytes = int.from_bytes(info[_SEGMENT_BYTES_AT : _SEGMENT_BYTES_AT + 4], sys.byteorder)
    round_trip_us = int.from_bytes(info[_ROUND_TRIP_AT : _ROUND_TRIP_AT + 4], sys.byteorder)
    window = int.from_bytes(info[_WINDOW_AT : _WINDOW_AT + 4], sys.byteorder)
    delivery_rate = int.from_bytes(info[_DELIVERY_RATE_AT : _DELIVERY_RATE_AT + 8], sys.byteorder)
    return max(float(delivery_rate), segment_bytes * window * 1e6 / max(round_trip_us, 1))
