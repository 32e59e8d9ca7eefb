"""A client goes from one broker to another and notices nothing: no message is lost, none comes twice, none out of order.

Old broker O, new broker N, the client's gateway G, any broker X::

    G ──MOVE──► O ──SHADOW──► N          N keeps what comes for the client from now on (a shadow), and tells all brokers
                O ◄─SHADOWED── N         of its interest. Every X confirmed it at its sequence c(X).
                O ◄─PROGRESS── X         O has everything that X numbered up to c(X), in both streams.
    G ◄─MOVE_READY── O
    G ──FREEZE──► O ──STATE──► N         The session, and how far O had come with every origin's messages: V(X).
    G ──ADOPT──────────────────► N       The client's further bytes follow at once.
    G ◄─FROZEN── O                       Behind the last bytes O has for the client.
                O ◄─INSTALLED── N        O forgets the session.
    G ◄─ADOPTED──────────────── N

What X numbered up to c(X) went to O alone, and O has delivered it. What came after went to O and N. O delivered it up to V(X),
N delivers what is beyond. Messages of shared subscriptions go to one broker anyway: whoever has one keeps it or, when the
session leaves or does not come, gives it to another member. For records of replica sets, c and V are N's and O's cursors
(:mod:`nearcast.fabric.set_cursors`): what the brokers in between passed over, because nobody wanted it, is behind both.

Until FREEZE everything can be given up and nothing has happened. After it, whoever does not have the session says so
(ABANDON), and the gateway brings the client back to O (ADOPT there). O keeps the session, in its journal, too, until N has it
in its own. Both brokers may crash at any moment: a session that left is asked for when the link is back.

This file joins the old broker's side (:mod:`nearcast.fabric.departures`) and the new one's (:mod:`nearcast.fabric.arrivals`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from nearcast.fabric import frames
from nearcast.fabric.arrivals import Arrivals
from nearcast.fabric.departing import turn_away
from nearcast.fabric.departures import Departures
from nearcast.fabric.fences import Fences
from nearcast.fabric.frames import frame
from nearcast.fabric.parts import FOREVER, Part, Peer
from nearcast.fabric.session_state import Agreement
from nearcast.fabric.set_cursors import CURSOR_PREFIX
from nearcast.fabric.trunks import Channel
from nearcast.mqtt import records
from nearcast.mqtt.connection import CLOSED, CONNECTED
from nearcast.mqtt.records import Fields, number
from nearcast.mqtt.session import Session

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric

MAX_AWAY_AT_ONCE: Final = 64
"""Sessions without a client that are on their way at once when a broker is being left."""

LOOK_S: Final = 0.1
"""How often a broker that is being left looks for sessions whose clients went away: there may be a million to look at."""

FENCES_S: Final = 1.0
"""How often an origin is asked whether its messages have passed the fences."""


class Handover(Part):
    """See the module."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._engine = fabric.engine
        self.leaving = False
        self._ask_again_at = 0.0
        #: When this broker is being left: sessions that are to go next, those that no other broker took, when to look again.
        self._next: deque[Session] = deque()
        self._stays: set[str] = set()
        self._look_at = 0.0
        self.fences = Fences(fabric)
        self.departures = Departures(fabric, self)
        self.arrivals = Arrivals(fabric, self)
        fabric.channels.watcher = self
        fabric.add_part(self, [frames.SHADOW, frames.SHADOWED, frames.STATE, frames.INSTALLED, frames.ABANDON])

    def begin(self, now: float) -> None:
        """The journal was read: some sessions were on their way, or had come."""
        for session in list(self._engine.sessions.by_client.values()):
            if session.arrived_by:
                self.arrivals.done[session.arrived_by] = session.client_id
                self.fences.recovered(session)
            if session.departing_by:
                self.departures.recovered(session, now)

    # --- what brokers say -----------------------------------------------------------------------------------------------

    def handle(self, peer: Peer, content: bytes, now: float) -> None:
        kind = content[0]
        fields = Fields(content)
        if kind == frames.SHADOW:
            self.arrivals.shadow(peer, fields, now)
        elif kind == frames.SHADOWED:
            self.departures.shadowed(peer, fields, now)
        elif kind == frames.STATE:
            if Fields(content).number() in self._fabric.leftovers.offers:
                self._fabric.leftovers.state(peer, fields, now)
            else:
                self.arrivals.state(peer, fields, now)
        elif kind == frames.INSTALLED:
            self.departures.installed(peer, fields.number(), now)
        else:
            move = fields.number()
            by_old_broker = fields.number() != 0
            if by_old_broker:
                self._fabric.leftovers.offers.pop(move, None)
                self.arrivals.abandon(peer, move, now)
            else:
                self.departures.refused(peer, move, fields.blob().decode("utf-8"), now)

    def progressed(self, peer: Peer, token: int, stream: int, now: float) -> None:
        """PROGRESS came: all that a peer numbered before it was asked is here, in one of the streams."""
        if peer.fenced:
            self.fences.progressed(peer)
            self._fabric.leftovers.progressed(peer)
        self.departures.progressed(peer, now)

    def peer_up(self, peer: Peer, now: float) -> None:
        if peer.fenced:
            self.fences.ask(peer)
        self.departures.peer_up(peer, now)

    def peer_down(self, peer: Peer, now: float) -> None:
        self.departures.peer_down(peer, now)
        self.arrivals.peer_down(peer, now)

    def peer_gone(self, peer: Peer, now: float) -> None:
        self.fences.forget(peer)
        self.departures.peer_gone(peer, now)

    # --- what gateways say ----------------------------------------------------------------------------------------------

    def move(self, channel: Channel, move: int, target: str, now: float) -> None:
        """MOVE: prepare to hand a client over."""
        connection = channel.connection
        session = None if connection is None else connection.session
        if connection is None or session is None or connection.state != CONNECTED:
            channel.fail(move, "the client is not connected")
            return
        reason = self.departures.begin(move, session, target, channel, now)
        if reason:
            channel.fail(move, reason)

    def freeze(self, channel: Channel, move: int, now: float) -> None:
        """FREEZE: hand it over."""
        self.departures.freeze(channel, move, now)

    def adopt(self, channel: Channel, move: int, now: float) -> None:
        """ADOPT: a client comes here, or comes back."""
        arrival = self.arrivals.by_move.get(move)
        departure = self.departures.by_move.get(move)
        if arrival is not None:
            self.arrivals.adopt(arrival, channel, now)
        elif departure is not None:
            self.departures.bring_back(departure, channel, now)
        elif move in self.departures.superseded:
            turn_away(channel)
        else:
            channel.refuse(move, f"{self._fabric.name} does not know of this move")

    def channel_ended(self, channel: Channel, lost_gateway: bool, now: float) -> None:
        """A channel is over."""
        self.departures.channel_ended(channel, now)
        self.arrivals.channel_ended(channel, lost_gateway, now)

    # --- a session and its client ---------------------------------------------------------------------------------------

    def attach(self, channel: Channel, session: Session, agreement: Agreement, move: int, now: float) -> None:
        """Make a channel the session's connection, as if it had always been."""
        engine = self._engine
        connection = engine.open(agreement.peer, channel, now)
        channel.connection = connection
        channel.adopting = move
        unprocessed = agreement.apply(connection)
        if unprocessed:
            channel.kept = [unprocessed, *channel.kept]
        connection.client_id = session.client_id
        connection.username = session.username
        connection.state = CONNECTED
        connection.session = session
        # What the client is told rests on the session being here: none of it leaves before the journal has that.
        connection.awaits_disk = engine.effects.gated
        session.connection = connection
        engine.stats.connected_clients += 1
        if connection.keep_alive_seconds:
            engine.timers.schedule(connection, now + 1.5 * connection.keep_alive_seconds, now)
        stamp = session.stamp
        for watcher in engine.sessions.watchers:
            watcher.attached(session)
        session.stamp = stamp  # the client did not connect anew: whoever did since is later
        if session.durable:
            engine.effects.records.append(records.session(session, engine.effects.wall_offset, False))

    def go_on(self, channel: Channel, session: Session, now: float) -> None:
        """The session is complete: process what its client sent meanwhile, and send what waits."""
        connection = session.connection
        channel.trunk.link.send_held(frame(frames.ADOPTED, number(channel.number), number(channel.adopting)))
        channel.adopting = 0
        session.drain(now)
        kept = channel.kept
        channel.kept = []
        if connection is None:
            return
        if kept:
            self._engine.receive(connection, b"".join(kept), now)
        if not channel.closed:
            channel.trunk.trunks.grant(channel, connection)
        elif connection.state != CLOSED:
            # It left while its session was on its way.
            channel.connection = None
            self._engine.lose(connection, now)

    # --- the broker is being left ---------------------------------------------------------------------------------------

    def leave(self, now: float) -> None:
        """Give the sessions of clients that are away to other brokers. Gateways see to those that are here."""
        self.leaving = True
        self._send_away(now)

    def has_left(self) -> bool:
        return not self.departures.by_move and (self._nearest() is None or not self._away())

    def _away(self) -> list[Session]:
        departures = self.departures.by_client
        return [
            session
            for session in self._engine.sessions.by_client.values()
            if session.connection is None
            and not session.is_peer
            and session.client_id not in departures
            and session.client_id not in self._stays
        ]

    def _nearest(self) -> Peer | None:
        nearest: Peer | None = None
        nearest_ms = float("inf")
        for peer in self._fabric.peers.values():
            if peer.up and peer.link is not None and peer.link.rtt_ms < nearest_ms:
                nearest = peer
                nearest_ms = peer.link.rtt_ms
        return nearest

    def _send_away(self, now: float) -> None:
        if not self._next and now >= self._look_at:
            self._look_at = now + LOOK_S
            self._next.extend(self._away())
        peer = self._nearest() if self._next else None
        while peer is not None and self._next and len(self.departures.by_move) < MAX_AWAY_AT_ONCE:
            session = self._next.popleft()
            is_here = self._engine.sessions.by_client.get(session.client_id) is session
            if is_here and session.connection is None and session.client_id not in self._stays:
                # Once: where it is refused it stays, in the journal if there is one.
                self._stays.add(session.client_id)
                self.departures.begin(self._fabric.rng.getrandbits(60), session, peer.name, None, now)

    # --- time -----------------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        if self.departures.by_move:
            self.departures.settle(now)
        if self.arrivals.by_move:
            self.arrivals.settle(now)
        if self.leaving:
            self._send_away(now)

    def tick(self, now: float) -> None:
        if self.departures.by_move:
            self.departures.tick(now)
        if self.arrivals.by_move:
            self.arrivals.tick(now)
        if self.fences.by_origin and now >= self._ask_again_at:
            # The question may have got lost, or have come before the two channels were open.
            self._ask_again_at = now + FENCES_S
            for name in list(self.fences.by_origin):
                if name[:1] != CURSOR_PREFIX:
                    self.fences.ask(self._fabric.peer(name))

    def next_deadline(self) -> float:
        deadline = self._ask_again_at if self.fences.by_origin else FOREVER
        if self.leaving:
            deadline = min(deadline, self._look_at)
        return min(deadline, self.departures.next_deadline(), self.arrivals.next_deadline())
