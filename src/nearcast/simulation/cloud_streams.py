"""The way to the cloud on a simulated stream: what :mod:`nearcast.broker.cloud` is for a socket.

The cloud is a host of the same world with a broker on it; ``mqtt://host:port`` names the host. When to connect, what to say
and when to try again is :class:`nearcast.fabric.cloud.Cloud`'s business.
"""

from __future__ import annotations

import math

from nearcast.fabric.cloud import Cloud
from nearcast.simulation.handles import StreamHandle
from nearcast.simulation.hosts import Host
from nearcast.simulation.link_streams import DIAL_TIMEOUT_S
from nearcast.simulation.programs import Program
from nearcast.simulation.streams import Stream

DEFAULT_PORT = 1883


class CloudStreams:
    """One program's streams to the cloud: one at a time. ``address`` is a URL, or a host's name and a port."""

    def __init__(self, cloud: Cloud, address: str, host: Host, owner: Program, owners: dict[Stream, Program]) -> None:
        self._cloud = cloud
        self._host = host
        self._owner = owner
        self._owners = owners
        self._name, self._port = split_url(address)
        self._end: StreamHandle | None = None
        self._dialling: Stream | None = None
        self._give_up_at = math.inf
        self.closed: list[StreamHandle] = []

    # --- as of links (simulation.link_streams): false means that the stream is not ours ---------------------------------

    def opened(self, stream: Stream) -> bool:
        """The cloud took the connection."""
        if stream is not self._dialling:
            return False
        self._dialling = None
        self._give_up_at = math.inf
        end = StreamHandle(stream, self.closed.append)
        self._end = end
        end.connection = self._cloud.opened(end, self._host.now)
        return True

    def received(self, stream: Stream, data: bytes) -> bool:
        """Bytes arrived."""
        if self._end is None or self._end.stream is not stream:
            return False
        if self._end.connection is not None:
            self._cloud.receive(data, self._host.now)
        return True

    def writable(self, stream: Stream) -> bool:
        """There is room again."""
        if self._end is None or self._end.stream is not stream:
            return False
        if self._end.connection is not None:
            self._cloud.writable(self._host.now)
        return True

    def lost(self, stream: Stream) -> bool:
        """The stream ended, or was never taken."""
        if stream is self._dialling:
            self._dialling = None
            self._give_up_at = math.inf
            self._cloud.dial_failed(self._host.now)
            return True
        if self._end is None or self._end.stream is not stream:
            return False
        self._lose(self._end)
        return True

    def reap(self) -> bool:
        """Tell the machine of a stream that it closed itself, after the fact. Whether there was one."""
        closed = list(self.closed)
        self.closed.clear()
        for end in closed:
            self._owners.pop(end.stream, None)
            self._lose(end)
        return bool(closed)

    def close(self) -> None:
        """The broker stops."""
        if self._end is not None:
            self._end.close()

    def _lose(self, end: StreamHandle) -> None:
        if end is self._end:
            self._end = None
            end.connection = None
            self._cloud.lost(self._host.now)

    def dial(self) -> None:
        """Connect if the machine says so. Called after every flush."""
        if not self._cloud.wants_dial(self._host.now):
            return
        world = self._host.world
        if not world.has_host(self._name):
            self._cloud.dial_failed(self._host.now)
            return
        self._dialling = self._host.connect(world.host(self._name).index, self._port)
        self._give_up_at = self._host.now + DIAL_TIMEOUT_S
        self._owners[self._dialling] = self._owner

    # --- time -----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Give up a cloud that did not answer in time. The machine's own time is its owner's to tell."""
        stream = self._dialling
        if stream is not None and self._give_up_at <= self._host.now:
            self._owners.pop(stream, None)
            self._dialling = None
            self._give_up_at = math.inf
            stream.reset()
            self._cloud.dial_failed(self._host.now)

    def next_deadline(self) -> float:
        return self._give_up_at


def split_url(address: str) -> tuple[str, int]:
    """A host's name and a port; ``mqtt://`` in front may be there, and 1883 is what is meant without a port."""
    place = address.rpartition("://")[2].rstrip("/")
    name, colon, port = place.rpartition(":")
    return (name, int(port)) if colon else (place, DEFAULT_PORT)
