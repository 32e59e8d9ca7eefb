"""One broker's side of the fabric: who is there, the links to them, and the parts that use those links.

A driver moves bytes and opens connections; everything else is decided here and in the parts::

    accepted(handle) / connected(address, handle) ─► Link ─► receive(link, data) ─► Part.handle(peer, frame)

After every call the driver calls ``settle(now)`` once, then the broker's usual flush (output of links is that of
:class:`~nearcast.mqtt.connection.Connection` objects like any client's), then dials what ``take_dials()`` says.

Between two brokers there is one link. Where both dial at once, the one dialled by the smaller name stays.
"""

from __future__ import annotations

import random
from typing import Final

from nearcast.config import Limits
from nearcast.errors import RemoteProtocolError
from nearcast.fabric import links
from nearcast.fabric.channels import Channels, PeerSession
from nearcast.fabric.interest import Interest
from nearcast.fabric.links import Greeting, Link
from nearcast.fabric.parts import LinkUser, Part, Peer
from nearcast.fabric.sharing import Sharing
from nearcast.fabric.trunks import Trunks
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Peer as TransportPeer
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.engine import Engine

FRAME_OVERHEAD_BYTES: Final = 1_048_576
"""What a frame may be longer than the largest packet: a session that moves, an interest table, come in pieces below this."""

FIRST_RETRY_S: Final = 0.2
LAST_RETRY_S: Final = 10.0
GREETING_S: Final = 10.0

#: Sequences begin with the wall clock, so that they rise over restarts without being written down one by one: sixteen per
#: microsecond is more than any broker numbers.
SEQUENCES_PER_MICROSECOND: Final = 16


class Dialing:
    """An address that is to be connected to, and how that goes."""

    def __init__(self, address: str, name: str, now: float) -> None:
        self.address = address
        self.name = name
        self.retry_s = FIRST_RETRY_S
        self.due_at = now
        self.under_way = False
        self.link: Link | None = None


class Fabric:
    """See the module."""

    def __init__(
        self,
        settings: FabricSettings,
        limits: Limits,
        engine: Engine,
        name: str,
        epoch: int,
        secret: bytes,
        facts: bytes,
        rng: random.Random,
        now: float,
    ) -> None:
        self.settings = settings
        self.limits = limits
        self.engine = engine
        self.name = name
        self.epoch = epoch
        self.rng = rng
        self.greeting = Greeting(links.BROKER, name, epoch, facts)
        self._secret = secret
        self.peers: dict[str, Peer] = {}
        self.by_number: list[Peer | None] = [None]
        self.links: dict[Link, None] = {}
        self.users: dict[int, LinkUser] = {}
        self._parts: list[Part] = []
        self._handlers: dict[int, Part] = {}
        self._dialing: dict[str, Dialing] = {}
        self._dials: list[str] = []
        self._next_check = 0.0
        self.last_stamp = 0
        self.duplicates = 0
        wall_us = int((now + engine.effects.wall_offset) * 1e6)
        engine.router.next_sequence = max(engine.router.next_sequence, wall_us * SEQUENCES_PER_MICROSECOND)
        self.channels = Channels(self)
        self.interest = Interest(self)
        self.sharing = Sharing(self)
        self.trunks = Trunks(self)
        self.users[links.GATEWAY] = self.trunks

    # --- composition ----------------------------------------------------------------------------------------------------

    def add_part(self, part: Part, kinds: list[int]) -> None:
        """A part that handles these kinds of frames from other brokers."""
        self._parts.append(part)
        for kind in kinds:
            self._handlers[kind] = part

    def stamp(self, now: float) -> int:
        """A time for "the last one wins": microseconds of wall clock, above every stamp made or seen here before."""
        wall_us = int((now + self.engine.effects.wall_offset) * 1e6)
        self.last_stamp = max(self.last_stamp + 1, wall_us)
        return self.last_stamp

    def seen_stamp(self, stamp: int) -> None:
        """Another broker's stamp: ours come after it from now on."""
        self.last_stamp = max(self.last_stamp, stamp)

    def peer(self, name: str) -> Peer:
        """The peer of this name, known from now on."""
        found = self.peers.get(name)
        if found is None:
            session = self.channels.session_for(name)
            found = Peer(name, len(self.by_number), session)
            session.peer = found
            self.by_number.append(found)
            self.peers[name] = found
        return found

    # --- who is there ---------------------------------------------------------------------------------------------------

    def dial(self, address: str, now: float, name: str = "") -> None:
        """Keep a link to this address from now on."""
        if address and address not in self._dialing:
            self._dialing[address] = Dialing(address, name, now)

    def forget_address(self, address: str) -> None:
        """No longer keep a link to it. One that is open stays."""
        self._dialing.pop(address, None)

    def take_dials(self) -> list[str]:
        """Addresses to connect to now. Each is answered by :meth:`connected` or :meth:`dial_failed`."""
        taken = self._dials
        if taken:
            self._dials = []
        return taken

    def dial_failed(self, address: str, now: float) -> None:
        """Nobody answered there. It is tried again, less and less often."""
        dialing = self._dialing.get(address)
        if dialing is not None:
            self._retry(dialing, now)

    def _retry(self, dialing: Dialing, now: float) -> None:
        dialing.under_way = False
        dialing.link = None
        dialing.due_at = now + dialing.retry_s * (0.5 + self.rng.random())
        dialing.retry_s = min(dialing.retry_s * 2, LAST_RETRY_S)

    def _dial_due(self, now: float) -> None:
        for dialing in self._dialing.values():
            if dialing.under_way or dialing.link is not None or dialing.due_at > now:
                continue
            peer = self.peers.get(dialing.name)
            if peer is not None and peer.up:
                dialing.due_at = now + LAST_RETRY_S  # the other end was first
                continue
            dialing.under_way = True
            self._dials.append(dialing.address)

    # --- links ----------------------------------------------------------------------------------------------------------

    def accepted(self, handle: object, peer: TransportPeer, now: float) -> Link:
        """Another node connected to us."""
        return self._open(handle, peer, "", now)

    def connected(self, address: str, handle: object, now: float) -> Link:
        """A connection that :meth:`take_dials` asked for is there."""
        link = self._open(handle, TransportPeer(address, "link"), address, now)
        dialing = self._dialing.get(address)
        if dialing is not None:
            dialing.under_way = False
            dialing.link = link
        return link

    def _open(self, handle: object, peer: TransportPeer, dialed: str, now: float) -> Link:
        connection = Connection(self.engine.effects, peer, handle, now, self.limits)
        link = Link(self.greeting, self._secret, connection, dialed, self.rng, now)
        self.links[link] = None
        return link

    def receive(self, link: Link, data: bytes, now: float) -> None:
        """Bytes arrived on a link."""
        if link.state == links.CLOSED:
            return
        was_up = link.state == links.UP
        try:
            found = link.feed(data, now)
            if not was_up and link.state == links.UP:
                self._link_up(link, now)
            for content in found:
                if link.state == links.CLOSED:
                    break
                self._frame(link, content, now)
        except RemoteProtocolError as error:
            self._break(link, error.message, now)
        except ValueError as error:
            self._break(link, f"a frame that makes no sense: {error}", now)
        if link.state == links.CLOSED:
            self._ended(link, now)

    def _break(self, link: Link, reason: str, now: float) -> None:
        self.engine.stats.protocol_errors += 1
        link.close(reason)
        self._ended(link, now)

    def lost(self, link: Link, now: float) -> None:
        """The link's transport is gone."""
        if not link.close_reason:
            link.close_reason = "connection lost"
        link.state = links.CLOSED
        self._ended(link, now)
        link.connection.out = []
        link.connection.held = None
        link.connection.out_bytes = 0

    def writable(self, link: Link, now: float) -> None:
        """The link's transport has room again."""
        self.engine.writable(link.connection, now)
        if link.state != links.UP or link.theirs is None:
            return
        if link.theirs.role == links.BROKER:
            peer = self.peers.get(link.theirs.name)
            if peer is not None and peer.link is link:
                peer.session.drain(now)
        else:
            user = self.users.get(link.theirs.role)
            if user is not None:
                user.link_writable(link, now)

    def _link_up(self, link: Link, now: float) -> None:
        theirs = link.theirs
        if theirs is None:
            return
        link.max_frame_bytes = self.limits.max_packet_bytes + FRAME_OVERHEAD_BYTES
        dialing = self._dialing.get(link.dialed)
        if dialing is not None:
            dialing.name = theirs.name
            dialing.retry_s = FIRST_RETRY_S
        if theirs.role != links.BROKER:
            user = self.users.get(theirs.role)
            if user is None:
                raise RemoteProtocolError(reasons.NOT_AUTHORIZED, "nodes of this kind do not connect here")
            user.link_up(link, now)
            return
        if theirs.name == self.name:
            raise RemoteProtocolError(reasons.NOT_AUTHORIZED, f"this broker is called {self.name}, too: names must differ")
        peer = self.peer(theirs.name)
        before = peer.link
        if before is not None:
            if before.theirs is not None and before.theirs.epoch == theirs.epoch and not self._replaces(link, before):
                link.close("there is another link between the two")
                return
            before.close("a newer link took over")
            self._ended(before, now)
        if theirs.epoch != peer.epoch:
            peer.epoch = theirs.epoch
            peer.received = 0
            peer.received_unreliable = 0
        peer.link = link
        peer.up = True
        peer.last_seen = now
        link.probe(now)
        self.channels.peer_up(peer, now)
        for part in self._parts:
            part.peer_up(peer, now)

    def _replaces(self, link: Link, before: Link) -> bool:
        """Whether a second link to the same broker is the one to keep."""
        if bool(link.dialed) == bool(before.dialed):
            return True  # whoever dialled has lost the one before
        theirs = link.theirs
        smaller_dialed = (theirs is not None and self.name < theirs.name) == bool(link.dialed)
        return smaller_dialed

    def _frame(self, link: Link, content: bytes, now: float) -> None:
        theirs = link.theirs
        if theirs is None:
            return
        if theirs.role != links.BROKER:
            self.users[theirs.role].link_frame(link, content, now)
            return
        peer = self.peers.get(theirs.name)
        if peer is None or peer.link is not link:
            return
        peer.last_seen = now
        self.dispatch(peer, content, now)

    def dispatch(self, peer: Peer, content: bytes, now: float) -> None:
        """A frame from a broker, over its own link or another one's."""
        if self.channels.handles(content[0]):
            self.channels.handle(peer, content, now)
            return
        part = self._handlers.get(content[0])
        if part is None:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"frame {content[0]} is not known here")
        part.handle(peer, content, now)

    def _ended(self, link: Link, now: float) -> None:
        if link not in self.links:
            return
        del self.links[link]
        dialing = self._dialing.get(link.dialed)
        if dialing is not None and dialing.link is link:
            self._retry(dialing, now)
        theirs = link.theirs
        if theirs is None:
            return
        if theirs.role != links.BROKER:
            user = self.users.get(theirs.role)
            if user is not None:
                user.link_down(link, now)
            return
        peer = self.peers.get(theirs.name)
        if peer is None or peer.link is not link:
            return
        peer.link = None
        peer.up = False
        self.channels.peer_down(peer, now)
        for part in self._parts:
            part.peer_down(peer, now)

    # --- time -----------------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        """After every event, also those of clients: send what gathered."""
        self.channels.settle(now)
        for part in self._parts:
            part.settle(now)
        for user in self.users.values():
            user.settle(now)

    def tick(self, now: float) -> None:
        """Time passed: probes, time-outs, dials that are due."""
        if now >= self._next_check:
            self._next_check = now + self.settings.probe_interval_seconds / 2
            self._check_links(now)
        self._dial_due(now)
        self.channels.tick(now)
        for part in self._parts:
            part.tick(now)
        for user in self.users.values():
            user.tick(now)

    def _check_links(self, now: float) -> None:
        settings = self.settings
        for link in list(self.links):
            if link.state != links.UP:
                if now - link.opened_at > GREETING_S:
                    self._break(link, "no greeting in time", now)
            elif now - link.last_seen > settings.fail_after_seconds:
                self._break(link, f"silent for {settings.fail_after_seconds:g} s", now)
            elif now - link.last_ping >= settings.probe_interval_seconds:
                link.probe(now)

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next."""
        deadline = min(self._next_check, self.channels.next_deadline())
        for dialing in self._dialing.values():
            if not dialing.under_way and dialing.link is None:
                deadline = min(deadline, dialing.due_at)
        for part in self._parts:
            deadline = min(deadline, part.next_deadline())
        for user in self.users.values():
            deadline = min(deadline, user.next_deadline())
        return deadline


def is_peer(session: object) -> bool:
    """Whether a session is another broker's."""
    return isinstance(session, PeerSession)
