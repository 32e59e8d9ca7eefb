"""One broker's side of the fabric: who is there, the links to them, and the parts that use those links.

A driver moves bytes and opens connections (:mod:`nearcast.fabric.linking`); what arrives is a peer's, and goes to the part
that handles frames of its kind::

    receive(link, data) ─► Link ─► Fabric.dispatch(peer, frame) ─► Part.handle(peer, frame)

After every call the driver calls ``settle(now)`` once, then the broker's usual flush (output of links is that of
:class:`~nearcast.mqtt.connection.Connection` objects like any client's), then dials what ``take_dials()`` says.

Between two brokers there is one link. Where both dial at once, the one dialled by the smaller name stays; one of their own
goes before one that others relay (:mod:`nearcast.fabric.routes`).
"""

from __future__ import annotations

import random
from typing import Final

from nearcast.config import Limits
from nearcast.errors import RemoteProtocolError
from nearcast.fabric import links
from nearcast.fabric.branches import Branches
from nearcast.fabric.broadcast import Broadcast
from nearcast.fabric.channels import PEER_PREFIX, Channels
from nearcast.fabric.classes import TopicClasses
from nearcast.fabric.handover import Handover
from nearcast.fabric.interest import Interest
from nearcast.fabric.leftovers import Leftovers
from nearcast.fabric.linking import Dialing, Linking
from nearcast.fabric.links import Greeting, Link
from nearcast.fabric.owner_hints import OwnerHints
from nearcast.fabric.ownership import Ownership
from nearcast.fabric.parking import PARKING_PREFIX
from nearcast.fabric.parts import Part, Peer
from nearcast.fabric.presence import Presence
from nearcast.fabric.reading_lines import ReadingLines
from nearcast.fabric.relaying import RELAY_NAME
from nearcast.fabric.replica_sets import ReplicaSets
from nearcast.fabric.replication import Replication
from nearcast.fabric.ring import Ring
from nearcast.fabric.routes import Routes
from nearcast.fabric.set_sessions import SET_PREFIX
from nearcast.fabric.sharing import Sharing
from nearcast.fabric.trunks import Trunks
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Peer as TransportPeer
from nearcast.mqtt.connection import Producer
from nearcast.mqtt.engine import Engine

#: Sequences begin with the wall clock, so that they rise over restarts without being written down one by one: sixteen per
#: microsecond is more than any broker numbers.
SEQUENCES_PER_MICROSECOND: Final = 16


MAX_EPOCHS: Final = 16
"""Former epochs of a broker that are remembered, to notice two brokers of one name."""

NAMESAKE_S: Final = 30.0
"""How long a broker must be away before one with a former epoch of it is let in. Two of one name, both alive, would else take
turns; one that was started without its data directory for a while comes back."""

DIAL_SECOND_S: Final = 0.5
"""Two brokers that hear of each other would dial each other; the one with the larger name waits so long."""

MAX_LINKS: Final = 65_536
"""Links of all kinds at once: brokers, gateways, controllers."""


class LinkProducer(Producer):
    """Goes on with what waited for room on a link."""

    def __init__(self, fabric: Fabric, link: Link) -> None:
        self._fabric = fabric
        self._link = link

    def drain(self, now: float) -> None:
        if self._link.state == links.UP:
            self._fabric.link_writable(self._link, now)


class Fabric(Linking):
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
        super().__init__(Greeting(links.BROKER, name, epoch, facts), secret, settings, limits, engine.effects, rng, MAX_LINKS)
        self.engine = engine
        self.name = name
        self.epoch = epoch
        self.peers: dict[str, Peer] = {}
        self.by_number: list[Peer | None] = [None]
        self._parts: list[Part] = []
        self._handlers: dict[int, Part] = {}
        self.last_stamp = 0
        rules: list[tuple[str, str]] = [(rule.topic, rule.effective_class) for rule in settings.classes]
        bounds = {rule.topic: rule.max_latency_ms for rule in reversed(settings.classes) if rule.max_latency_ms}
        self.classes = TopicClasses(engine.router, rules, bounds)
        self.channels = Channels(self)
        self.broadcast = Broadcast(self, secret, now)
        self.interest = Interest(self)
        self.sharing = Sharing(self)
        self.replication = Replication(self)
        self.routes = Routes(self)
        self.handover = Handover(self)
        self.presence = Presence(self)
        self.leftovers = Leftovers(self)
        self.trunks = Trunks(self)
        self.ownership = Ownership(self)
        self.branches = Branches(self)
        self.hints = OwnerHints(self)
        self.ownership.on_owner = self.hints.owner_changed
        self.ownership.on_producer = self.hints.published
        self.sets = ReplicaSets(self, settings.replica_sets)
        self.classes.sets = self.sets
        self.ring = Ring(self, settings.ring)
        self.lines = ReadingLines(self)
        self.broadcast.take_part()
        self.users[links.GATEWAY] = self.trunks
        self._begun = False

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
            origin_number = self.engine.effects.origin_number(name)
            found = Peer(name, origin_number, session, self.engine.origins.of(name))
            session.peer = found
            while len(self.by_number) <= origin_number:
                self.by_number.append(None)
            self.by_number[origin_number] = found
            self.peers[name] = found
        return found

    def begin(self, now: float) -> None:
        """Go on with what the journal knows, which was read by now if there is one. Done with the first link or event.

        A broker whose journal knows no epoch, or that has none, begins one: nothing it numbered before is known to it.
        """
        self._begun = True
        engine = self.engine
        origins = engine.origins
        if not origins.epoch:
            origins.begin(self.epoch)
        self.epoch = origins.epoch
        self.greeting.epoch = origins.epoch
        wall_us = int((now + engine.effects.wall_offset) * 1e6)
        engine.router.next_sequence = max(engine.router.next_sequence, origins.reserved, wall_us * SEQUENCES_PER_MICROSECOND)
        for client_id in list(engine.sessions.by_client):
            name = client_id[1:]
            if client_id[:1] == PEER_PREFIX and name != RELAY_NAME and name[:1] not in (PARKING_PREFIX, SET_PREFIX):
                self.peer(name).last_seen = now
        self.interest.recount()
        self.broadcast.begin(now)
        self.ownership.begin(now)
        self.sets.begin(now)
        self.sharing.begin()
        self.handover.begin(now)
        self.presence.begin(now)
        self.leftovers.begin(now)
        self.replication.begin(now)

    def forget(self, peer: Peer, now: float) -> None:
        """A broker left for good, or was away too long: nothing of it stays."""
        link = peer.link
        if link is not None:
            link.close("this broker is no longer part of the fabric")
            self.end_link(link, now)
        self.ownership.forgets(peer, now)
        self.peers.pop(peer.name, None)
        self.by_number[peer.number] = None
        self.channels.forget(peer, now)
        for part in self._parts:
            part.peer_gone(peer, now)

    def link_writable(self, link: Link, now: float) -> None:
        theirs = link.theirs
        if theirs is None or theirs.role != links.BROKER:
            super().link_writable(link, now)
            return
        peer = self.peers.get(theirs.name)
        if peer is not None and peer.link is link:
            peer.session.drain(now)
            self.sets.writable(peer.name, now)

    def dial_delay_s(self, name: str) -> float:
        return DIAL_SECOND_S if name and name < self.name else 0.0

    def needs_dial(self, dialing: Dialing, now: float) -> bool:
        """Not where the other end was first. One that others relay is worse than one of our own."""
        peer = self.peers.get(dialing.name)
        return peer is None or peer.link is None or peer.link.relayed

    # --- links ----------------------------------------------------------------------------------------------------------

    def open_link(self, handle: object, peer: TransportPeer, dialed: str, expected: str, now: float) -> Link:
        if not self._begun:
            self.begin(now)
        link = super().open_link(handle, peer, dialed, expected, now)
        link.connection.producer = LinkProducer(self, link)
        return link

    def link_up(self, link: Link, now: float) -> None:
        theirs = link.theirs
        if theirs is None or theirs.role != links.BROKER:
            super().link_up(link, now)
            return
        peer = self.peer(theirs.name)
        if theirs.epoch in peer.former_epochs:
            if peer.up or now - peer.last_seen < NAMESAKE_S:
                raise RemoteProtocolError(
                    reasons.NOT_AUTHORIZED, f"two brokers are called {theirs.name}: every node needs a name of its own"
                )
            peer.former_epochs.remove(theirs.epoch)
        before = peer.link
        if before is not None:
            if before.theirs is not None and before.theirs.epoch == theirs.epoch and not self._replaces(link, before):
                link.close("there is another link between the two")
                return
            before.close("a newer link took over")
            self.end_link(before, now)
        if theirs.epoch != peer.epoch:
            if peer.epoch:
                peer.former_epochs = [*peer.former_epochs[1 - MAX_EPOCHS :], peer.epoch]
            peer.begins_anew(theirs.epoch)
        peer.link = link
        peer.up = True
        peer.last_seen = now
        self.channels.peer_up(peer, now)
        for part in self._parts:
            part.peer_up(peer, now)

    def _replaces(self, link: Link, before: Link) -> bool:
        """Whether a second link to the same broker is the one to keep."""
        if link.relayed != before.relayed:
            return before.relayed
        if bool(link.dialed) == bool(before.dialed):
            return True  # whoever dialled has lost the one before
        theirs = link.theirs
        smaller_dialed = (theirs is not None and self.name < theirs.name) == bool(link.dialed)
        return smaller_dialed

    def link_frame(self, link: Link, content: bytes, now: float) -> None:
        theirs = link.theirs
        if theirs is None or theirs.role != links.BROKER:
            super().link_frame(link, content, now)
            return
        peer = self.peers.get(theirs.name)
        if peer is None or peer.link is not link:
            return
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

    def link_down(self, link: Link, now: float) -> None:
        theirs = link.theirs
        if theirs is None or theirs.role != links.BROKER:
            super().link_down(link, now)
            return
        peer = self.peers.get(theirs.name)
        if peer is None or peer.link is not link:
            return
        peer.link = None
        peer.up = False
        peer.last_seen = now
        self.channels.peer_down(peer, now)
        for part in self._parts:
            part.peer_down(peer, now)

    # --- leaving --------------------------------------------------------------------------------------------------------

    def leave(self, now: float) -> None:
        """This broker is going to stop: bring elsewhere what can be."""
        for part in self._parts:
            part.leave(now)
        for user in self.users.values():
            user.leave(now)

    def has_left(self) -> bool:
        """Whether nothing is left that could be brought elsewhere."""
        return all(part.has_left() for part in self._parts) and all(user.has_left() for user in self.users.values())

    # --- time -----------------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        """After every event, also those of clients: send what gathered."""
        if not self._begun:
            self.begin(now)
        self.channels.settle(now)
        for part in self._parts:
            part.settle(now)
        for user in self.users.values():
            user.settle(now)

    def tick(self, now: float) -> None:
        """Time passed: probes, time-outs, dials that are due."""
        self.tick_links(now)
        self.channels.tick(now)
        for part in self._parts:
            part.tick(now)
        for user in self.users.values():
            user.tick(now)

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next."""
        deadline = min(self.links_deadline(), self.channels.next_deadline())
        for part in self._parts:
            deadline = min(deadline, part.next_deadline())
        for user in self.users.values():
            deadline = min(deadline, user.next_deadline())
        return deadline
