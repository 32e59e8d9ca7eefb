"""A session comes to this broker from another one. The whole protocol is told in :mod:`nearcast.fabric.handover`; here is the
new broker's side of it::

    SHADOWING ──all brokers know──► SHADOWED ──STATE complete and ADOPT──► installed

ADOPT and STATE come over different links, in any order; the client's bytes that come with ADOPT are kept until the session is
there. Whatever fails before it is installed leaves it with the old broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.fabric import frames
from nearcast.fabric.departing import LEFTOVERS, WITHOUT_CLIENT
from nearcast.fabric.fences import Reached, stretch
from nearcast.fabric.frames import frame
from nearcast.fabric.parts import Peer
from nearcast.fabric.session_state import Agreement, decode_session, decode_subscriptions, install, origin_name
from nearcast.fabric.set_cursors import CURSOR_PREFIX
from nearcast.fabric.shadows import Kept, Shadow
from nearcast.fabric.trunks import Channel
from nearcast.mqtt import records
from nearcast.mqtt.records import Fields, blob, number
from nearcast.mqtt.session import Session
from nearcast.mqtt.subscriptions import Subscription

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric
    from nearcast.fabric.handover import Handover

MAX_ARRIVALS: Final = 1_000
"""Sessions that may be on their way here at once. Further ones are asked to come later: each may need much memory."""

MAX_REMEMBERED: Final = 10_000
"""Moves that are remembered after they are done, for brokers that ask because the answer got lost."""


class Arrival:
    """One session on its way in."""

    def __init__(self, move: int, origin: str, shadow: Shadow, client_id: str, without_client: bool) -> None:
        self.move = move
        self.origin = origin
        self.shadow = shadow
        self.client_id = client_id
        self.without_client = without_client
        self.round = 0
        self.version = 0
        self.answered = False
        self.deadline = 0.0
        self.channel: Channel | None = None
        self.pieces: dict[int, bytes] = {}
        self.content: bytes | None = None


class Arrivals:
    """All of them, by the number of the move; and how those went that are done."""

    def __init__(self, fabric: Fabric, handover: Handover) -> None:
        self._fabric = fabric
        self._engine = fabric.engine
        self._handover = handover
        self.by_move: dict[int, Arrival] = {}
        #: Moves that ended with the session here: the client.
        self.done: dict[int, str] = {}
        self.installed = 0
        self.refused = 0

    # --- the shadow -----------------------------------------------------------------------------------------------------

    def shadow(self, peer: Peer, fields: Fields, now: float) -> None:
        """A broker prepares to hand a session over, or says anew what its client wants."""
        move = fields.number()
        current_round = fields.number()
        flags = fields.number()
        if flags & LEFTOVERS:
            self._fabric.leftovers.offered(peer, move, current_round, fields, now)
            return
        without_client = (flags & WITHOUT_CLIENT) != 0
        client_id = fields.blob().decode("utf-8")
        username = fields.text()
        arrival = self.by_move.get(move)
        if arrival is None:
            reason = self._fault(client_id, username, without_client)
            if reason:
                self.refused += 1
                _abandon(peer, move, reason)
                return
            shadow = Shadow(client_id, move, self._engine.effects, self._fabric.limits, now)
            arrival = Arrival(move, peer.name, shadow, client_id, without_client)
            self.by_move[move] = arrival
        elif arrival.origin != peer.name:
            return
        try:
            wanted = decode_subscriptions(self._fabric, fields, arrival.shadow)
        except ValueError as error:  # the limits here are others; ending the link would bring the same again
            self.give_up(arrival, f"{self._fabric.name} does not take what the client subscribed to: {error}", now)
            return
        for _ in range(fields.number()):
            name = fields.blob().decode("utf-8")
            self._fabric.sets.cursors.begin_at(name, fields.number())
        self._subscribe(arrival.shadow, wanted)
        arrival.round = current_round
        arrival.answered = False
        arrival.deadline = now + 2 * self._fabric.settings.move_timeout_seconds
        self._fabric.interest.settle(now)
        arrival.version = self._fabric.interest.version
        self._answer(arrival)

    def _fault(self, client_id: str, username: str | None, without_client: bool) -> str:
        """Why a client cannot come here, or nothing."""
        sessions = self._engine.sessions
        known = sessions.by_client.get(client_id)
        if self._handover.leaving:
            return f"{self._fabric.name} is stopping"
        if len(self.by_move) >= MAX_ARRIVALS:
            return f"too many sessions are on their way to {self._fabric.name}"
        if not without_client and self._engine.stats.connections >= self._fabric.limits.max_connections:
            return f"{self._fabric.name} has no room for another client"
        if known is None and sessions.is_full():
            return f"{self._fabric.name} has no room for another session"
        if known is not None and (known.connection is not None or known.username != username):
            return f"another client of this name is at {self._fabric.name}"
        if not without_client and client_id in self._fabric.leftovers.copies:
            return f"{self._fabric.name} has yet to hand over what it has of the client's session"
        return ""

    def _subscribe(self, shadow: Shadow, wanted: list[Subscription]) -> None:
        sessions = self._engine.sessions
        names = {subscription.topic_filter for subscription in wanted}
        for topic_filter in [name for name in shadow.subscriptions if name not in names]:
            sessions.unsubscribe(shadow, topic_filter)
        for subscription in wanted:
            sessions.subscribe(shadow, subscription)

    def _answer(self, arrival: Arrival) -> None:
        """Say from which sequences on everything comes here, once all brokers have confirmed that."""
        interest = self._fabric.interest
        fabric = self._fabric
        ours = fabric.engine.router.next_sequence - 1
        parts = [blob(fabric.name.encode("utf-8")) + number(ours)]
        for peer in fabric.peers.values():
            if not peer.up:
                continue
            if interest.confirmed.get(peer.name, -1) < arrival.version:
                return
            # Where filters were known before, what the peer sent came past the shadow: the old broker must have it.
            passed = max(interest.confirmed_at[peer.name], peer.received, peer.received_unreliable)
            parts.append(blob(peer.name.encode("utf-8")) + number(passed))
        parts.extend([blob(name.encode("utf-8")) + number(place) for name, place in fabric.sets.cursors.all()])
        arrival.answered = True
        peer = fabric.peers[arrival.origin]
        peer.send(frame(frames.SHADOWED, number(arrival.move), number(arrival.round), number(len(parts)), *parts))

    # --- the session ----------------------------------------------------------------------------------------------------

    def state(self, peer: Peer, fields: Fields, now: float) -> None:
        """A piece of the session."""
        move = fields.number()
        piece = fields.number()
        pieces = fields.number()
        content = fields.blob()
        if piece >= pieces:
            raise ValueError("more pieces of a session than it has")
        arrival = self.by_move.get(move)
        if arrival is None:
            if piece == pieces - 1:
                self.ask(peer, move)
            return
        if arrival.origin != peer.name:
            return
        arrival.pieces[piece] = content
        arrival.deadline = now + 2 * self._fabric.settings.move_timeout_seconds
        if len(arrival.pieces) == pieces:
            arrival.content = b"".join([arrival.pieces[index] for index in range(pieces)])
            arrival.pieces = {}
            self._install_if_complete(arrival, now)

    def ask(self, peer: Peer, move: int) -> None:
        """The old broker wants to know how it ended."""
        client_id = self.done.get(move)
        if client_id is not None:
            peer.send_held(frame(frames.INSTALLED, number(move)))
        else:
            _abandon(peer, move, f"{self._fabric.name} does not know of this move")

    def adopt(self, arrival: Arrival, channel: Channel, now: float) -> None:
        """The gateway sends the client's bytes here from now on."""
        if arrival.channel is not None:
            channel.refuse(arrival.move, "the client is being adopted already")
            return
        arrival.channel = channel
        arrival.deadline = now + 2 * self._fabric.settings.move_timeout_seconds
        self._install_if_complete(arrival, now)

    def _install_if_complete(self, arrival: Arrival, now: float) -> None:
        if arrival.content is None or (arrival.channel is None and not arrival.without_client):
            return
        known = self._engine.sessions.by_client.get(arrival.client_id)
        if known is not None and known.connection is not None:
            self.give_up(arrival, f"another client of this name is at {self._fabric.name}", now)
            return
        own = b""
        if arrival.client_id in self._fabric.leftovers.copies and not arrival.without_client:
            self.give_up(arrival, f"{self._fabric.name} has yet to hand over what it has of the client's session", now)
            return
        if known is not None:  # a copy from before: what comes is newer
            own = self._fabric.leftovers.own(known, now)
            known.will = None
            self._engine.sessions.end(known, now)
        self._install(arrival, arrival.content, own, now)

    def _install(self, arrival: Arrival, content: bytes, own: bytes, now: float) -> None:
        fabric = self._fabric
        engine = self._engine
        fields = Fields(b"\x00" + content)
        agreement = fields.blob()
        reached: dict[str, Reached] = {}
        for _ in range(fields.number()):
            name = fields.blob().decode("utf-8")
            reached[name] = Reached(fields.number(), fields.number())
        session = decode_session(fabric, fields.blob(), now)
        session.arrived_by = arrival.move
        # Later than the old broker's copy, and before every connection that the client made since it got that.
        session.stamp += 1
        fabric.seen_stamp(session.stamp)
        install(fabric, session, now)
        for peer in fabric.peers.values():
            if peer.name in reached:
                self._handover.fences.put(peer, session, reached[peer.name])
        for name, place in reached.items():
            if name[:1] == CURSOR_PREFIX:
                fabric.sets.cursors.begin_at(name, place.reliable)
                self._handover.fences.put_place(name, session, place)
        if session.durable:
            engine.effects.records.append(records.arrived(session))
        waiting = arrival.shadow.buffer.take()
        self._forget(arrival)
        self.installed += 1
        self.remember(arrival.move, arrival.client_id)
        channel = arrival.channel
        if channel is None:
            for watcher in engine.sessions.watchers:
                watcher.left(session)
        else:
            self._handover.attach(channel, session, Agreement(agreement), arrival.move, now)
        self._deliver(session, waiting, reached, now)
        fabric.interest.settle(now)
        if session.lost:
            fabric.leftovers.installed(session, own, now)
        fabric.peer(arrival.origin).send_held(frame(frames.INSTALLED, number(arrival.move)))
        if channel is not None:
            self._handover.go_on(channel, session, now)

    def _deliver(self, session: Session, waiting: list[Kept], reached: dict[str, Reached], now: float) -> None:
        """What the shadow kept and the old broker did not deliver."""
        router = self._engine.router
        for kept in waiting:
            publication = kept.publication
            had = 0
            if not kept.terms.via:
                there = reached.get(origin_name(self._fabric, publication.origin))
                had = 0 if there is None else there.has(publication)
            if had == publication.count:
                continue
            if publication.expired(now):
                self._engine.stats.dropped_expired += publication.count - had
                continue
            for part in stretch(publication, had, publication.count - had):
                router.deliver(session, part, kept.terms, now)
                part.forget_forms()

    def remember(self, move: int, client_id: str) -> None:
        """A move ended with the session here."""
        self.done[move] = client_id
        if len(self.done) > MAX_REMEMBERED:
            del self.done[next(iter(self.done))]

    # --- giving up ------------------------------------------------------------------------------------------------------

    def abandon(self, peer: Peer, move: int, now: float) -> None:
        """The old broker keeps the session, or has given it to somebody else; it asks what we have."""
        arrival = self.by_move.get(move)
        if arrival is not None:
            if arrival.origin == peer.name:
                self.give_up(arrival, "the old broker gave the move up", now)
            return
        self.ask(peer, move)

    def give_up(self, arrival: Arrival, reason: str, now: float) -> None:
        """This session does not come here. What was given to the shadow alone, others get."""
        waiting = arrival.shadow.buffer.take()
        self._forget(arrival)
        self.refused += 1
        for kept in waiting:
            if kept.terms.via:
                self._engine.router.pass_on(kept.terms.via, kept.publication, now)
        if arrival.channel is not None:
            arrival.channel.refuse(arrival.move, reason)
        peer = self._fabric.peers.get(arrival.origin)
        if peer is not None:
            _abandon(peer, arrival.move, reason)

    def _forget(self, arrival: Arrival) -> None:
        self.by_move.pop(arrival.move, None)
        for topic_filter in list(arrival.shadow.subscriptions):
            self._engine.sessions.unsubscribe(arrival.shadow, topic_filter)

    def channel_ended(self, channel: Channel, lost_gateway: bool, now: float) -> None:
        """The client is gone before its session came, or its gateway is."""
        for arrival in list(self.by_move.values()):
            if arrival.channel is channel and lost_gateway:
                # The gateway may live and bring the client back to its old broker: that one is to have the session.
                arrival.channel = None
                self.give_up(arrival, "the gateway is gone", now)

    def peer_down(self, peer: Peer, now: float) -> None:
        """The old broker cannot be reached. Its copy is the one that counts, and the gateway may reach it."""
        for arrival in list(self.by_move.values()):
            if arrival.origin == peer.name:
                self.give_up(arrival, f"{peer.name} cannot be reached any more", now)

    def settle(self, now: float) -> None:
        for arrival in list(self.by_move.values()):
            if not arrival.answered:
                self._answer(arrival)
            if arrival.shadow.buffer.overflowed and arrival.channel is None and arrival.content is None:
                self.give_up(arrival, f"{self._fabric.name} cannot keep up with the client's messages", now)

    def tick(self, now: float) -> None:
        for arrival in list(self.by_move.values()):
            if now >= arrival.deadline:
                self.give_up(arrival, "the session did not come", now)

    def next_deadline(self) -> float:
        deadline = float("inf")
        for arrival in self.by_move.values():
            deadline = min(deadline, arrival.deadline)
        return deadline


def _abandon(peer: Peer, move: int, reason: str) -> None:
    """The new broker's ABANDON: it does not have the session, and will not."""
    peer.send(frame(frames.ABANDON, number(move), number(0), blob(reason.encode("utf-8"))))
