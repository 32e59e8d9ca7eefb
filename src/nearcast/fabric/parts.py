"""What the pieces of a fabric look like to :class:`~nearcast.fabric.fabric.Fabric`: another broker, and a part that talks to
it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from nearcast.fabric.links import Link
from nearcast.mqtt.origins import Origin

if TYPE_CHECKING:
    from nearcast.fabric.channels import PeerSession

FOREVER: Final = float("inf")


class Peer:
    """Another broker. It stays known while it is away; ``number`` is its short name here, 1 and up (0 is this broker).

    ``epoch`` is what its sequence numbers belong to: the same after a restart that recovered its journal, another one after
    any other restart. ``session`` keeps what it is to get; ``received`` is the last sequence it sent that was taken on,
    reliable messages and others apart, because the former may wait for a disk and be overtaken."""

    def __init__(self, name: str, number: int, session: PeerSession, origin: Origin) -> None:
        self.name = name
        self.number = number
        self.session = session
        self.origin = origin
        self.link: Link | None = None
        self.up = False
        self.received_unreliable = 0
        #: Whether some of its messages were delivered elsewhere (:mod:`nearcast.fabric.fences`).
        self.fenced = False
        #: When it was up last, while it is not.
        self.last_seen = 0.0
        self.former_epochs: list[int] = []

    @property
    def epoch(self) -> int:
        return self.origin.epoch

    @property
    def received(self) -> int:
        return self.origin.received

    def begins_anew(self, epoch: int) -> None:
        """Its sequences have nothing to do with those before."""
        self.origin.epoch = epoch
        self.origin.received = 0
        self.received_unreliable = 0

    def has_room(self) -> bool:
        """Whether the way to it takes more output now; if not, the session is drained when it does."""
        link = self.link
        return link is not None and self.up and link.connection.has_room()

    def send(self, data: bytes) -> bool:
        """Send a frame that waits for nothing; false when there is no way to the peer now."""
        link = self.link
        if link is None or not self.up:
            return False
        link.send(data)
        return True

    def send_held(self, data: bytes) -> bool:
        """Send a frame that must not leave before the records that are pending now are durable."""
        link = self.link
        if link is None or not self.up:
            return False
        link.send_held(data)
        return True


@mypyc_attr(allow_interpreted_subclasses=True)
class Part:
    """One concern of the fabric: it handles its kinds of frames, and is told who comes and goes. All of this does nothing."""

    def peer_up(self, peer: Peer, now: float) -> None:
        """There is a way to a broker (again). Whatever it must know that is not kept in its session is to be said now."""

    def peer_down(self, peer: Peer, now: float) -> None:
        """There is none any more: what was sent may or may not have arrived."""

    def peer_gone(self, peer: Peer, now: float) -> None:
        """The broker left for good, or was away too long."""

    def handle(self, peer: Peer, content: bytes, now: float) -> None:
        """A frame of one of this part's kinds. ``ValueError`` and RemoteProtocolError end the link."""

    def leave(self, now: float) -> None:
        """This broker is going to stop: bring elsewhere what can be."""

    def has_left(self) -> bool:
        """Whether nothing is left that :meth:`leave` can bring elsewhere."""
        return True

    def settle(self, now: float) -> None:
        """Called once after every event, before output is sent: the place to send what gathered meanwhile as one frame."""

    def tick(self, now: float) -> None:
        """Time passed."""

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next."""
        return FOREVER


@mypyc_attr(allow_interpreted_subclasses=True)
class LinkUser:
    """What is done with links of one role other than broker (gateways, controllers)."""

    def link_up(self, link: Link, now: float) -> None:
        """A link of this role is authenticated."""

    def link_frame(self, link: Link, content: bytes, now: float) -> None:
        """A frame arrived on it."""

    def link_down(self, link: Link, now: float) -> None:
        """It is gone."""

    def link_writable(self, link: Link, now: float) -> None:
        """It has room again."""

    def leave(self, now: float) -> None:
        """As :meth:`Part.leave`."""

    def has_left(self) -> bool:
        """As :meth:`Part.has_left`."""
        return True

    def settle(self, now: float) -> None:
        """As :meth:`Part.settle`."""

    def tick(self, now: float) -> None:
        """Time passed."""

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next."""
        return FOREVER
