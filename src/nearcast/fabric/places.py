"""PLACE: a gateway tells its brokers where it is and how far its clients are from it.

A gateway is the coordinate proxy of its clients (ePulsar §4): they have its coordinate, raised by their own latency to it,
which the gateway knows from its connections to them. Every broker it has a link to is told within a second of a client that
comes, and within :data:`AROUND_S` of what changed since::

    PLACE   coordinate b (8-byte floats, big-endian: vector, height, adjustment, error; empty: as before),
            latencies n (each: channel n, round-trip time in microseconds n),
            clients n that left (each: client identifier b), said to brokers that got messages straight from them

:class:`PlaceTeller` is the gateway's side, :class:`Whereabouts` what a broker knows of one gateway. A gateway that does not
say where it is (its coordinate is not known yet, or it has no controller to find others by) is taken to be as far away as its
link says (:mod:`nearcast.fabric.telemetry`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Protocol

from nearcast.coordinates.coordinate import LEAST_HEIGHT_MS, Coordinate
from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.fabric.tunnels import Channel, Tunnel
from nearcast.mqtt.records import Fields, blob, number

if TYPE_CHECKING:
    from nearcast.fabric.gateway import Gateway
    from nearcast.fabric.trunk_lines import TrunkLine

TELL_S: Final = 1.0
"""How often there is a look at what is new."""

AROUND_S: Final = 5.0
"""Every client is measured once in so long, a few at a time."""

LEAST_CHANGE_MS: Final = 0.2
CHANGE_SHARE: Final = 0.1
"""A latency is told again when it changed by more than both."""

MOVED_MS: Final = 0.5
"""A coordinate that moved farther is told at once, else within :data:`AROUND_S`."""

FARTHEST_MS: Final = 60_000.0
"""Nothing on earth is farther away than a minute: whoever says so is mistaken, and is not believed."""

MAX_GONE: Final = 10_000
"""Clients that left and are not told of yet; more, and the oldest are forgotten (they are forgotten there after a while, too).
Also how many of them a broker remembers of a gateway."""

_FLOAT_BYTES: Final = 8
_BESIDE_VECTOR: Final = 3


class Agent(Protocol):
    """Coordinates, as :class:`nearcast.membership.gossip.Gossip` has them."""

    @property
    def coordinate(self) -> Coordinate: ...

    def coordinate_of(self, name: str, /) -> Coordinate | None: ...


def own_place(agent: Agent | None) -> Coordinate | None:
    """Where a node is itself; none while it has heard nobody and is where every node begins."""
    if agent is None:
        return None
    coordinate = agent.coordinate
    return coordinate if coordinate.height != LEAST_HEIGHT_MS or any(coordinate.vector) else None


def pack_coordinate(coordinate: Coordinate) -> bytes:
    """As PLACE carries it."""
    values = (*coordinate.vector, coordinate.height, coordinate.adjustment, coordinate.error)
    return struct.pack(f">{len(values)}d", *values)


def unpack_coordinate(data: bytes) -> Coordinate | None:
    """The opposite; none for what no node can mean."""
    count, rest = divmod(len(data), _FLOAT_BYTES)
    if rest or count <= _BESIDE_VECTOR:
        return None
    values = struct.unpack(f">{count}d", data)
    if not all(math.isfinite(value) and abs(value) <= FARTHEST_MS for value in values):
        return None
    *vector, height, adjustment, error = values
    return Coordinate(vector, height, adjustment, error) if height >= 0 and error >= 0 else None


class Whereabouts:
    """What a broker knows of one gateway: its coordinate, and clients that were there."""

    def __init__(self) -> None:
        self.coordinate: Coordinate | None = None
        self.gone: dict[str, float] = {}

    def read(self, fields: Fields, now: float) -> list[tuple[int, float]]:
        """A PLACE arrived; returns the latencies in it by channel, in milliseconds. Raises ``ValueError``."""
        packed = fields.blob()
        if packed:
            self.coordinate = unpack_coordinate(packed)
        latencies: list[tuple[int, float]] = []
        for _ in range(fields.number()):
            channel = fields.number()
            latencies.append((channel, min(fields.number() / 1e3, FARTHEST_MS)))
        gone = self.gone
        for _ in range(fields.number()):
            client = fields.blob().decode("utf-8")
            gone.pop(client, None)
            gone[client] = now
            if len(gone) > MAX_GONE:
                del gone[next(iter(gone))]
        return latencies


class LineMemory:
    """What one broker was told, and what it is to be told next."""

    def __init__(self) -> None:
        #: Channels whose latency the broker does not know, or not as it is now.
        self.untold: list[Channel] = []
        self.gone: dict[str, None] = {}
        self.told: Coordinate | None = None
        self.told_at = -math.inf

    def moved(self, coordinate: Coordinate | None, now: float) -> bool:
        """Whether the coordinate is worth telling."""
        if coordinate is None:
            return False
        told = self.told
        if told is None or len(told.vector) != len(coordinate.vector):
            return True
        by_ms = math.dist(told.vector, coordinate.vector) + abs(told.height - coordinate.height)
        by_ms += abs(told.adjustment - coordinate.adjustment)
        return by_ms > MOVED_MS or (by_ms > 0 and now - self.told_at >= AROUND_S)


class PlaceTeller:
    """See the module. ``agent`` knows where this gateway is; a driver that has one sets it."""

    def __init__(self, gateway: Gateway) -> None:
        self.agent: Agent | None = None
        self._gateway = gateway
        self._next_at = 0.0
        self._around: list[Tunnel] = []

    def left(self, client_id: str, brokers: Iterable[str]) -> None:
        """A client is gone that sent messages straight to these brokers."""
        for name in brokers:
            line = self._gateway.lines.get(name)
            if line is not None:
                gone = line.memory.gone
                gone[client_id] = None
                if len(gone) > MAX_GONE:
                    del gone[next(iter(gone))]

    def tick(self, now: float) -> None:
        """Time passed."""
        if now < self._next_at:
            return
        self._next_at = now + TELL_S
        gateway = self._gateway
        if not gateway.lines:
            return
        self._measure()
        coordinate = own_place(self.agent)
        for line in gateway.lines.values():
            self._tell(line, coordinate, now)

    def next_deadline(self) -> float:
        return self._next_at

    def _measure(self) -> None:
        """Look at a part of the clients again."""
        tunnels = self._gateway.tunnels
        if not self._around:
            self._around = list(tunnels)
        for _ in range(min(len(self._around), math.ceil(len(tunnels) * TELL_S / AROUND_S))):
            tunnel = self._around.pop()
            channel = channel_of(tunnel)
            if channel is None or tunnel not in tunnels:
                continue
            measure(tunnel)
            change_ms = abs(tunnel.latency_ms - channel.told_ms)
            if channel.told_ms >= 0 and change_ms > max(LEAST_CHANGE_MS, CHANGE_SHARE * channel.told_ms):
                channel.line.memory.untold.append(channel)

    def _tell(self, line: TrunkLine, coordinate: Coordinate | None, now: float) -> None:
        memory = line.memory
        if not line.link.connection.has_room():
            return
        packed = b""
        if coordinate is not None and memory.moved(coordinate, now):
            packed = pack_coordinate(coordinate)
            memory.told = coordinate
            memory.told_at = now
        untold, memory.untold = memory.untold, []
        latencies: list[bytes] = []
        for channel in untold:
            if channel.closed:
                continue
            tunnel = channel.tunnel
            if channel.told_ms < 0:
                measure(tunnel)
            channel.told_ms = tunnel.latency_ms
            latencies.append(number(channel.number) + number(int(tunnel.latency_ms * 1e3)))
        gone, memory.gone = memory.gone, {}
        if packed or latencies or gone:
            names = [blob(client_id.encode("utf-8")) for client_id in gone]
            line.link.send(frame(frames.PLACE, blob(packed), number(len(latencies)), *latencies, number(len(names)), *names))


def channel_of(tunnel: Tunnel) -> Channel | None:
    """The channel through which a client is served now."""
    upstream = tunnel.upstream
    return upstream if isinstance(upstream, Channel) else None


def measure(tunnel: Tunnel) -> None:
    """Ask a client's transport how far away it is; what is not known stays as it was."""
    measured_ms = tunnel.handle.rtt_ms()
    if measured_ms > 0:
        tunnel.latency_ms = min(measured_ms, FARTHEST_MS)
