"""Who a topic's clients at this broker are, and where they are (ePulsar §3.2, §4).

- *Consumers* are connected and have a matching subscription here, shared ones included.
- *Producers* published here within :data:`PRODUCER_S` and are connected still; or did so through a gateway straight to this
  broker, the owner, and neither left it nor were heard through another one since.

Clients of gateways have the gateway's coordinate (:mod:`nearcast.fabric.places`), or as long as it says none, that of gossip,
or this broker's own raised by the link's round-trip time; all others have this broker's. Each is raised by the client's own
latency. Where this broker does not know its own coordinate, nobody has a place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from nearcast.coordinates.coordinate import Coordinate
from nearcast.fabric.crowds import Anchor, Gathering
from nearcast.fabric.owned_topics import OwnedTopic
from nearcast.fabric.parts import FOREVER
from nearcast.fabric.places import Agent, own_place
from nearcast.fabric.trunks import Channel, Trunk
from nearcast.mqtt.session import Session

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric

PRODUCER: Final = 0
CONSUMER: Final = 1

PRODUCER_S: Final = 60.0
"""Who published nothing for so long is no producer any more. Too low forgets those that publish rarely, and their topics move
to and fro; too high keeps topics near clients that have finished."""

MEASURES_AT_ONCE: Final = 400
"""Connections whose round-trip time is asked for between two calls of :meth:`Audience.may_measure`, a system call each."""

MEASURE_S: Final = 15.0
"""How long such a time holds: what is not known yet is asked for before what may be old."""

Witness = Callable[[OwnedTopic, str, int, Anchor, float], None]
"""Told of every client that has a place: topic, client identifier, role, what it is connected through, latency to that."""


class Audience:
    """See the module. What is found out of gateways and owners holds for one round of reports (:meth:`begin`)."""

    def __init__(self, fabric: Fabric, agent: Agent | None) -> None:
        self._fabric = fabric
        self._tree = fabric.engine.tree
        self._sessions = fabric.engine.sessions
        self._agent = agent
        self.own: Coordinate | None = None
        self.witness: Witness | None = None
        self._here: Anchor | None = None
        self._anchors: dict[Trunk, Anchor | None] = {}
        self._trunks: dict[str, Trunk] = {}
        self._owners: dict[str, Coordinate | None] = {}
        # By session: round-trip time, and in which round that was asked for.
        self._latencies: dict[int, tuple[float, float]] = {}
        self._begun_at = 0.0
        self._measures = 0

    def begin(self, witness: Witness | None, now: float) -> None:
        """Places as they are now."""
        fabric = self._fabric
        self.witness = witness
        self.own = own_place(self._agent)
        self._here = None if self.own is None else Anchor(fabric.name, self.own, True)
        self._anchors.clear()
        self._owners.clear()
        self._trunks = {trunk.name: trunk for trunk in fabric.trunks.by_link.values()}
        self._begun_at = now
        sessions = self._sessions.by_number
        if len(self._latencies) > 1_000 + 2 * len(sessions):  # of sessions that ended
            self._latencies = {number: known for number, known in self._latencies.items() if number in sessions}

    def may_measure(self) -> None:
        """Some more connections may be asked."""
        self._measures = MEASURES_AT_ONCE

    # --- clients --------------------------------------------------------------------------------------------------------

    def consumers(self, topic: OwnedTopic, crowd: Gathering) -> int:
        """Add the consumers to a crowd; returns how many of them get each message."""
        match = self._tree.match(topic.name)
        sessions: dict[int, Session] = {}
        for subscription in match.subscriptions:
            session = subscription.session
            if not session.is_peer and session.connection is not None:
                sessions[session.number] = session
        receivers = len(sessions)
        for group in match.groups:
            has_some = False
            for member in group.members.values():
                session = member.session
                if not session.is_peer and session.connection is not None:
                    sessions[session.number] = session
                    has_some = True
            if has_some:
                receivers += 1
        for session in sessions.values():
            self._add(topic, session, CONSUMER, crowd)
        return receivers

    def producers(self, topic: OwnedTopic, crowd: Gathering, now: float) -> int:
        """Add the producers to a crowd, and forget those that are none any more; returns how many were looked at."""
        looked_at = len(topic.producers) + len(topic.gateway_producers)
        sessions = self._sessions.by_number
        finished: list[int] = []
        for number, at in topic.producers.items():
            session = sessions.get(number)
            if session is None or now - at > PRODUCER_S:
                finished.append(number)
            elif session.connection is not None:
                self._add(topic, session, PRODUCER, crowd)
                if topic.gateway_producers and isinstance(session.connection.handle, Channel):
                    # It followed the topic to this broker.
                    topic.gateway_producers.pop((session.connection.handle.trunk.name, session.client_id), None)
        for number in finished:
            del topic.producers[number]
        if not topic.mine:
            topic.gateway_producers.clear()  # they publish elsewhere now
        elif topic.gateway_producers:
            self._gateway_producers(topic, crowd, now)
        return looked_at

    def _gateway_producers(self, topic: OwnedTopic, crowd: Gathering, now: float) -> None:
        """Clients that publish through a gateway straight to this broker. One that went to another gateway counts there."""
        newest: dict[str, tuple[float, str, float]] = {}
        finished: list[tuple[str, str]] = []
        for key, (at, latency_ms) in topic.gateway_producers.items():
            gateway, client = key
            trunk = self._trunks.get(gateway)
            if now - at > PRODUCER_S or (trunk is not None and trunk.whereabouts.gone.get(client, -FOREVER) >= at):
                finished.append(key)
            elif trunk is not None:
                known = newest.get(client)
                if known is None or at > known[0]:
                    newest[client] = (at, gateway, latency_ms)
        for key in finished:
            del topic.gateway_producers[key]
        for client, (_, gateway, latency_ms) in newest.items():
            anchor = self._anchor(self._trunks[gateway])
            crowd.add(anchor, latency_ms)
            if self.witness is not None and anchor is not None:
                self.witness(topic, client, PRODUCER, anchor, latency_ms)

    def _add(self, topic: OwnedTopic, session: Session, role: int, crowd: Gathering) -> None:
        """One more connected client of this broker, by what it is connected through."""
        connection = session.connection
        handle = None if connection is None else connection.handle
        if isinstance(handle, Channel):
            anchor = self._anchor(handle.trunk)
            latency_ms = handle.latency_ms
        else:
            anchor = self._here
            latency_ms = self._latency_ms(session.number, handle)
        crowd.add(anchor, latency_ms)
        if self.witness is not None and anchor is not None:
            self.witness(topic, session.client_id, role, anchor, latency_ms)

    def _latency_ms(self, number: int, handle: object) -> float:
        known = self._latencies.get(number)
        if self._measures > 0 and (known is None or self._begun_at - known[1] >= MEASURE_S):
            measure = getattr(handle, "rtt_ms", None)  # tests' transports have none
            if measure is not None:
                self._measures -= 1
                known = (float(measure()), self._begun_at)
                self._latencies[number] = known
        return 0.0 if known is None else known[0]

    # --- places ---------------------------------------------------------------------------------------------------------

    def _anchor(self, trunk: Trunk) -> Anchor | None:
        if trunk in self._anchors:
            return self._anchors[trunk]
        place = trunk.whereabouts.coordinate
        if not self._fits(place) and self._agent is not None:
            place = self._agent.coordinate_of(trunk.name)
        if not self._fits(place):
            place = None if self.own is None else self.own.raised(trunk.link.rtt_ms)
        anchor = None if place is None else Anchor(trunk.name, place, False)
        self._anchors[trunk] = anchor
        return anchor

    def _fits(self, place: Coordinate | None) -> bool:
        """Whether it is a place in the same space."""
        return place is not None and self.own is not None and len(place.vector) == len(self.own.vector)

    def place_of(self, owner: str) -> Coordinate | None:
        """Where the owner of a topic is, as far as that is known."""
        if owner == self._fabric.name:
            return self.own
        if owner not in self._owners:
            place = None if self._agent is None or not owner else self._agent.coordinate_of(owner)
            self._owners[owner] = place if self._fits(place) else None
        return self._owners[owner]
