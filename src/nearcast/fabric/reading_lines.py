"""Lines on which brokers read each other's logs: what travels on the link between them is the bulk port's own protocol.

A broker that is asked for a topic of a replica set and is no member asks one that is (Canal, section III-D: any node answers).
To each such member it opens a *line*: bytes there and back, as if it had connected to the member's bulk port, but over the
link that is there anyway, and without a hello: a broker of the fabric may read what its clients may, and has looked::

    LINE_ASK     broker → member    the line's number, and bytes of requests
    LINE_ANSWER  member → broker    the line's number, and bytes of answers

A line ends with the link. Its number tells the bytes of one that began anew from those of the one before. What the bytes
mean, and who may ask for what, is the driver's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.fabric.parts import Part, Peer
from nearcast.mqtt.records import Fields, number

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric

PIECE_BYTES: Final = 65_536
"""Of what is sent, in one frame: other frames of the link come between."""


class LineDriver(Protocol):
    """What a broker's process does for lines."""

    def asked(self, name: str, line: int, data: bytes) -> None:
        """A broker asks, on a line of its own number."""

    def answered(self, name: str, line: int, data: bytes) -> None:
        """A member answers on one of ours."""

    def peer_up(self, name: str) -> None:
        """A broker can be reached."""

    def peer_down(self, name: str) -> None:
        """It cannot: its lines and ours to it are gone."""

    def settle(self) -> None:
        """Something happened: ways that were full may have room."""


class ReadingLines(Part):
    """See the module. One per broker."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.driver: LineDriver | None = None
        fabric.add_part(self, [frames.LINE_ASK, frames.LINE_ANSWER])

    def ask(self, name: str, line: int, data: bytes) -> bool:
        """Send bytes to a member; false when there is no way to it."""
        return self._send(frames.LINE_ASK, name, line, data)

    def answer(self, name: str, line: int, data: bytes) -> bool:
        """Send bytes to a broker that asked."""
        return self._send(frames.LINE_ANSWER, name, line, data)

    def _send(self, kind: int, name: str, line: int, data: bytes) -> bool:
        peer = self._fabric.peers.get(name)
        if peer is None or not peer.up:
            return False
        for begin in range(0, len(data), PIECE_BYTES):
            peer.send(frame(kind, number(line), data[begin : begin + PIECE_BYTES]))
        return True

    def has_room(self, name: str) -> bool:
        """Whether the way to a broker takes more now."""
        peer = self._fabric.peers.get(name)
        return peer is not None and peer.has_room()

    def handle(self, peer: Peer, content: bytes, now: float) -> None:
        if self.driver is None:
            return
        fields = Fields(content)
        line = fields.number()
        data = content[fields.position :]
        if content[0] == frames.LINE_ASK:
            self.driver.asked(peer.name, line, data)
        else:
            self.driver.answered(peer.name, line, data)

    def peer_up(self, peer: Peer, now: float) -> None:
        if self.driver is not None:
            self.driver.peer_up(peer.name)

    def peer_down(self, peer: Peer, now: float) -> None:
        if self.driver is not None:
            self.driver.peer_down(peer.name)

    def settle(self, now: float) -> None:
        if self.driver is not None:
            self.driver.settle()
