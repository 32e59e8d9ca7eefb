"""Where this broker is in the logs of replica sets: what it gets of them goes to its subscribers, each record once.

A *cursor* is an entry of a set: everything up to it that anybody here wanted was delivered. It stands in the journal as an
origin's number does (:mod:`nearcast.mqtt.origins`), in the same frame as what the deliveries did; so after a crash, and
whoever leads the set by then, records go on behind it.

A set is an origin of messages as brokers are: a record's number is that of its entry and its place in it (:func:`place_of`),
the same at every broker. So a session that goes from a broker to another, whose cursor is elsewhere, gets each record once:
fences (:mod:`nearcast.fabric.fences`), shadows and windows compare these numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.errors import RemoteProtocolError
from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.mqtt.publication import Publication, build_all
from nearcast.mqtt.records import Fields, blob, number
from nearcast.mqtt.wire import encode_varint
from nearcast.topiclog.blocks import QOS_MASK, RETAIN
from nearcast.topiclog.entries import Run, decode

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric
    from nearcast.fabric.parts import Peer
    from nearcast.mqtt.engine import Engine
    from nearcast.mqtt.origins import Origin
    from nearcast.mqtt.routing import Target

CURSOR_PREFIX: Final = "\2"
"""Begins the name under which a set is an origin; brokers' names are printable."""

PLACE_BITS: Final = 24
"""Of a record's number: its place in its entry, which has fewer messages than that many bits can count."""


def place_of(index: int, at: int = 0) -> int:
    """The number of a message: its entry, and how many messages precede it there."""
    return (index << PLACE_BITS) + at


def end_of(index: int) -> int:
    """The number that everything up to an entry's end is not beyond; 0 for a cursor that is not known."""
    return place_of(index + 1) - 1 if index else 0


class Cursors:
    """All of this broker's. One per broker."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._engine = fabric.engine
        self._moved: dict[str, Origin] = {}
        # Whom to tell that they moved: the leader that sent the records.
        self._tell: dict[str, str] = {}
        #: Messages of replicated topics that went to subscribers here, and those that came again.
        self.delivered = 0
        self.duplicates = 0

    def of(self, set_name: str) -> int:
        """Up to which entry everything of a set is here; 0: that is not known."""
        origin = self._engine.origins.by_name.get(CURSOR_PREFIX + set_name)
        return 0 if origin is None else origin.received

    def all(self) -> list[tuple[str, int]]:
        """All sets of which something is here, by the name under which they are origins, and the number up to which it is."""
        by_name = self._engine.origins.by_name
        return [(name, end_of(origin.received)) for name, origin in by_name.items() if name[:1] == CURSOR_PREFIX]

    def number_of(self, name: str) -> int:
        """The same for one set, by that name."""
        return end_of(self.of(name[len(CURSOR_PREFIX) :]))

    def begin_at(self, name: str, place: int) -> None:
        """A session came with records of a set of which nothing was ever here: this broker begins where it is."""
        set_name = name[len(CURSOR_PREFIX) :]
        if place and not self.of(set_name):
            self.reached(set_name, place >> PLACE_BITS)

    def forget(self, set_name: str) -> None:
        """A set is no more. One of the same name would begin anew."""
        self._moved.pop(set_name, None)
        self._tell.pop(set_name, None)
        self._engine.origins.forget(CURSOR_PREFIX + set_name)

    def arrived(self, peer: Peer, set_name: str, fields: Fields, now: float) -> None:
        """SET_RECORDS: records of a set, from whoever leads it. ``ValueError`` ends the link."""
        previous = fields.number()
        last = fields.number()
        if last < previous:
            raise ValueError("records that go backwards")
        ats = [fields.number() for _ in range(fields.number())]
        origin = self._engine.origins.of(CURSOR_PREFIX + set_name)
        if origin.received and (previous > origin.received or (not previous and last > origin.received)):
            # Something is missing between: the leader took us for a broker that begins, or had been told of what we lost in a
            # crash. It is told where we are.
            peer.send(frame(frames.SET_READER, blob(set_name.encode("utf-8")), number(origin.received)))
            return
        is_new = last > origin.received
        items = decode(fields.data[fields.position :]) if fields.position < len(fields.data) else []
        if len(items) != len(ats):
            raise ValueError("records without their places")
        for item, at in zip(items, ats, strict=True):
            if not isinstance(item, Run):
                raise ValueError("what is no message was sent to a reader")
            if is_new:
                self.deliver(set_name, last, at, item, now)
            else:
                self.duplicates += item.count
        if is_new:
            origin.epoch = 1
            origin.received = last
            self._moved[set_name] = origin
        self._tell[set_name] = peer.name

    def reached(self, set_name: str, index: int) -> None:
        """This broker, which leads the set, has delivered everything up to an entry."""
        origin = self._engine.origins.of(CURSOR_PREFIX + set_name)
        origin.epoch = 1
        origin.received = index
        self._moved[set_name] = origin

    def deliver(self, set_name: str, index: int, at: int, run: Run, now: float) -> None:
        """Hand committed messages, of an entry, to plain subscribers here; ``at``: how many precede them in it."""
        topic = run.topic
        router = self._engine.router
        if router.remembered(topic) is None:
            try:
                self._engine.inbound.check_topic(topic)
            except RemoteProtocolError:
                return  # more levels than this broker allows: no subscription of its clients can match
        route = router.route_for(topic)
        if not route.targets:
            return
        self.delivered += run.count
        name = CURSOR_PREFIX + set_name
        fenced = self._own_no_local(route.targets, run)
        # Whoever had one of an entry's messages elsewhere had all of them.
        fenced |= self._fabric.handover.fences.behind(name, place_of(index, at))
        origin = self._engine.effects.origin_number(name)
        sequence = place_of(index, at)
        for publication in publications(self._engine, run):
            publication.origin = origin
            publication.sequence = sequence
            publication.fenced = fenced or None
            sequence += publication.count
            self._fabric.leftovers.passes(name, publication)
            router.publish_bridged(route, publication, "", now)

    def _own_no_local(self, targets: list[Target], run: Run) -> set[int]:
        """Sessions that do not want what they published themselves."""
        fenced: set[int] = set()
        for target in targets:
            if target.no_local and target.own is None and target.session.client_id.encode("utf-8") == run.publisher():
                fenced.add(target.session.number)
        return fenced

    def settle(self, now: float) -> None:
        """After every event: note how far this broker is, behind the records that keep what it got, and say so."""
        if not self._moved and not self._tell:
            return
        for origin in self._moved.values():
            self._engine.origins.advanced(origin)
            self._fabric.handover.fences.passed(origin.name, end_of(origin.received))
        if self._moved:
            self._moved = {}
            self._fabric.handover.departures.cursors_moved(now)
        tell, self._tell = self._tell, {}
        for set_name, leader in tell.items():
            peer = self._fabric.peers.get(leader)
            if peer is not None:
                peer.send_held(frame(frames.SET_READ, blob(set_name.encode("utf-8")), number(self.of(set_name))))


def publications(engine: Engine, run: Run) -> list[Publication]:
    """Records as messages again. What expires does so as long after its arrival as its publisher said."""
    properties = run.properties()
    expires_at = 0.0
    if properties:
        facts = engine.inbound.facts_of(encode_varint(len(properties)) + properties)
        properties = facts.forwarded
        if facts.expiry_seconds >= 0:
            expires_at = max(run.time_us / 1e6 - engine.effects.wall_offset + facts.expiry_seconds, 1e-9)
    found = build_all(run.topic, run.payloads(), run.flags & QOS_MASK, (run.flags & RETAIN) != 0, properties)
    if expires_at:
        for publication in found:
            publication.expires_at = expires_at
            publication.raw_flags = -1
    return found
