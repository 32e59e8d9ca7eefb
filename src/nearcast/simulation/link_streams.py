"""Links of the fabric on simulated streams: what :mod:`nearcast.serving.links` is for sockets.

What is said on a link, whom to dial and when to try again is the machine's business: a broker's
:class:`~nearcast.fabric.fabric.Fabric`, or what a gateway or a controller has in its place. An address is a host's name and a
port.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Protocol

from nearcast.mqtt.access import Peer
from nearcast.simulation.handles import StreamHandle
from nearcast.simulation.hosts import Host
from nearcast.simulation.programs import Program
from nearcast.simulation.streams import Stream

DIAL_TIMEOUT_S: Final = 5.0
"""As of the real one."""


class Machine(Protocol):
    """What a driver of links needs of whoever has them; see :class:`nearcast.serving.links.Machine`."""

    def accepted(self, handle: Any, peer: Peer, now: float) -> Any: ...

    def connected(self, address: str, handle: Any, now: float) -> Any: ...

    def dial_failed(self, address: str, now: float) -> None: ...

    def receive(self, link: Any, data: bytes, now: float) -> None: ...

    def writable(self, link: Any, now: float) -> None: ...

    def lost(self, link: Any, now: float) -> None: ...

    def take_dials(self) -> list[str]: ...


class LinkEnd(StreamHandle):
    """One end of a link."""

    def __init__(self, stream: Stream, on_close: Callable[[Any], None]) -> None:
        super().__init__(stream, on_close)
        self.link: Any = None


class LinkStreams:
    """All links of one program. ``watcher`` is shown what arrives: the host that sent it, and the bytes."""

    def __init__(self, machine: Machine, host: Host, owner: Program, owners: dict[Stream, Program]) -> None:
        self._machine = machine
        self._host = host
        self._owner = owner
        self._owners = owners
        self.ends: dict[Stream, LinkEnd] = {}
        self.closed: list[LinkEnd] = []
        self.lost_links = 0
        self.watcher: Callable[[Stream, bytes], None] | None = None
        self.reachable: set[str] | None = None
        """Addresses that can be dialled; None: all."""
        self._dialing: dict[Stream, tuple[str, float]] = {}

    def accepted(self, stream: Stream) -> None:
        """Another node connected."""
        end = LinkEnd(stream, self.closed.append)
        self.ends[stream] = end
        end.link = self._machine.accepted(end, Peer(stream.remote_host.name), self._host.now)
        end.connection = end.link.connection

    def opened(self, stream: Stream) -> bool:
        """A node that was dialled answered; False if the stream is no link's."""
        dialing = self._dialing.pop(stream, None)
        if dialing is None:
            return False
        end = LinkEnd(stream, self.closed.append)
        self.ends[stream] = end
        end.link = self._machine.connected(dialing[0], end, self._host.now)
        end.connection = end.link.connection
        return True

    def received(self, stream: Stream, data: bytes) -> bool:
        """Bytes arrived; False if the stream is no link's."""
        end = self.ends.get(stream)
        if end is None:
            return False
        if self.watcher is not None:
            self.watcher(stream, data)
        self._machine.receive(end.link, data, self._host.now)
        return True

    def writable(self, stream: Stream) -> bool:
        """There is room again; False if the stream is no link's."""
        end = self.ends.get(stream)
        if end is None:
            return False
        if end.connection is not None:
            end.connection.congested = False
        self._machine.writable(end.link, self._host.now)
        return True

    def lost(self, stream: Stream) -> bool:
        """A stream ended; False if it is no link's."""
        dialing = self._dialing.pop(stream, None)
        if dialing is not None:
            self._machine.dial_failed(dialing[0], self._host.now)
            return True
        end = self.ends.pop(stream, None)
        if end is None:
            return False
        self._lose(end)
        return True

    def reap(self) -> bool:
        """Tell the machine of links that it closed itself, as an event loop would: after the fact. Whether there were any."""
        closed = list(self.closed)
        self.closed.clear()
        for end in closed:
            self._owners.pop(end.stream, None)
            if self.ends.pop(end.stream, None) is not None:
                self._lose(end)
        return bool(closed)

    def _lose(self, end: LinkEnd) -> None:
        end.connection = None
        if "link" not in end.link.close_reason:  # else it gave way to another one between the same two
            self.lost_links += 1
        self._machine.lost(end.link, self._host.now)

    def dial(self) -> None:
        """Connect to whatever the machine says. Called after every flush."""
        for address in self._machine.take_dials():
            name, _, port = address.rpartition(":")
            world = self._host.world
            if not world.has_host(name) or (self.reachable is not None and address not in self.reachable):
                self._machine.dial_failed(address, self._host.now)
                continue
            stream = self._host.connect(world.host(name).index, int(port))
            self._owners[stream] = self._owner
            self._dialing[stream] = (address, self._host.now + DIAL_TIMEOUT_S)

    def tick(self) -> None:
        """Give up those that did not answer in time."""
        for stream, (address, until) in list(self._dialing.items()):
            if until <= self._host.now:
                del self._dialing[stream]
                self._owners.pop(stream, None)
                stream.reset()
                self._machine.dial_failed(address, self._host.now)

    def next_deadline(self) -> float:
        return min([until for _, until in self._dialing.values()], default=math.inf)
