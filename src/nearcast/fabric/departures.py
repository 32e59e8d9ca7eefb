"""A client, or a session whose client is away, leaves this broker for another one. The whole protocol is told in
:mod:`nearcast.fabric.handover`; here is the old broker's side of it::

    PREPARING ──SHADOWED──► CATCHING_UP ──all arrived──► READY ──FREEZE──► FROZEN ──INSTALLED──► over
        ▲                        │ subscriptions or brokers changed │          └──ABANDON, ADOPT here──► thawed
        └────────────────────────┴──────────────────────────────────┘

Until FROZEN nothing has changed for the client, and everything can be given up. FREEZE may find that the client subscribed to
something meanwhile: then its connection goes on as before until the new broker has caught up with that, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.fabric import frames
from nearcast.fabric.departing import (
    CATCHING_UP,
    FROZEN,
    LEFTOVERS,
    PREPARING,
    READY,
    WITHOUT_CLIENT,
    Departure,
    abandon_frame,
    discard,
    reached_fields,
    send_owed,
    turn_away,
)
from nearcast.fabric.frames import frame
from nearcast.fabric.parts import Peer
from nearcast.fabric.session_state import Agreement, encode_connection, encode_session, encode_subscriptions
from nearcast.fabric.set_cursors import CURSOR_PREFIX
from nearcast.fabric.shadows import Buffer, Waiting
from nearcast.fabric.trunks import Channel
from nearcast.mqtt import records
from nearcast.mqtt.access import Peer as TransportPeer
from nearcast.mqtt.connection import CLOSED, Connection
from nearcast.mqtt.publication import Publication
from nearcast.mqtt.records import Fields, blob, number, text
from nearcast.mqtt.session import Session

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric
    from nearcast.fabric.handover import Handover

STATE_PIECE_BYTES: Final = 262_144
"""A session travels in frames of this size."""

LOST_LATELY_S: Final = 30.0
"""A broker that was lost may be back within this time, with messages that it numbered for the client's old broker alone.
Until then no client is moved away. Too low loses what a short outage holds up; too high keeps clients where they are."""

UNREACHABLE_TIMES: Final = 6
"""So many times ``move_timeout_seconds`` a session that left waits for word from a broker that cannot be reached."""

ASK_AGAIN_S: Final = 0.1
"""How long the old broker waits before it asks the same again: for a broker that only one of the two reaches."""

MAX_SUPERSEDED: Final = 1_000
"""Moves that are remembered after their client connected anew, for gateways that have yet to hear of it."""


class Departures:
    """All of them, by the number of the move."""

    def __init__(self, fabric: Fabric, handover: Handover) -> None:
        self._fabric = fabric
        self._engine = fabric.engine
        self._handover = handover
        self.by_move: dict[int, Departure] = {}
        self.by_client: dict[str, Departure] = {}
        self.moved = 0
        self.failed = 0
        self.thawed = 0
        #: Moves that ended because the client connected anew: whoever comes back with one of them is too late.
        self.superseded: dict[int, None] = {}

    def recovered(self, session: Session, now: float) -> None:
        """This broker crashed after it had sent a session away: the new one says whether it has it, once it is there."""
        departure = Departure(session.departing_by, session, session.departing_to, None, now)
        departure.recovered = True
        self.by_move[departure.move] = departure
        self.by_client[session.client_id] = departure
        self._detach(departure, None, now)
        self._fabric.peer(departure.target)

    # --- preparing ------------------------------------------------------------------------------------------------------

    def begin(
        self, move: int, session: Session, target: str, channel: Channel | None, now: float, leftovers: bool = False
    ) -> str:
        """Prepare to hand a session over; returns why that is not possible, or nothing."""
        peer = self._fabric.peers.get(target)
        if target == self._fabric.name:
            return "the client is here already"
        if peer is None or not peer.up:
            return f"{target} cannot be reached from {self._fabric.name}"
        if session.client_id in self.by_client or move in self.by_move:
            return "the client is being moved already"
        for other in [] if channel is None or self._handover.leaving else self._fabric.peers.values():
            if not other.up and now - other.last_seen < LOST_LATELY_S:
                # It may have messages for the client, and would bring them here, where the client is no more.
                return f"{other.name} was lost a moment ago and may come back with messages for the client"
        departure = Departure(move, session, target, channel, now)
        departure.leftovers = leftovers
        departure.deadline = now + self._fabric.settings.move_timeout_seconds
        self.by_move[move] = departure
        self.by_client[session.client_id] = departure
        self._shadow(departure, peer, now)
        return ""

    def _shadow(self, departure: Departure, peer: Peer, now: float) -> None:
        """Tell the new broker what the client wants: for the first time, or again."""
        session = departure.session
        departure.state = PREPARING
        departure.round += 1
        departure.told = encode_subscriptions(session)
        departure.ask_again_at = now + ASK_AGAIN_S
        places = self._fabric.sets.cursors.all()
        peer.send(
            frame(
                frames.SHADOW,
                number(departure.move),
                number(departure.round),
                number((WITHOUT_CLIENT if departure.channel is None else 0) | (LEFTOVERS if departure.leftovers else 0)),
                blob(session.client_id.encode("utf-8")),
                text(session.username),
                departure.told,
                number(len(places)),
                *[blob(name.encode("utf-8")) + number(place) for name, place in places],
            )
        )

    def shadowed(self, peer: Peer, fields: Fields, now: float) -> None:
        """The new broker gets everything by now; from which sequences on is what it says."""
        departure = self.by_move.get(fields.number())
        current_round = fields.number()
        members: dict[str, int] = {}
        for _ in range(fields.number()):
            name = fields.blob().decode("utf-8")
            members[name] = fields.number()
        if departure is None or departure.target != peer.name or departure.state != PREPARING:
            return
        if departure.round == current_round:
            departure.members = members
            departure.state = CATCHING_UP
            departure.asked.clear()
            self.advance(departure, now)

    def progressed(self, peer: Peer, now: float) -> None:
        """More arrived from a broker, or its word that nothing is left."""
        for departure in list(self.by_move.values()):
            if departure.state == CATCHING_UP and peer.name in departure.members:
                self.advance(departure, now)

    def cursors_moved(self, now: float) -> None:
        """More came from replica sets."""
        for departure in list(self.by_move.values()):
            if departure.state == CATCHING_UP:
                self.advance(departure, now)

    def advance(self, departure: Departure, now: float) -> None:
        """Go as far as what has arrived allows."""
        if departure.state != CATCHING_UP and departure.state != READY:
            return
        if not self._is_current(departure) or (not self._is_known_everywhere(departure) and now >= departure.ask_again_at):
            peer = self._fabric.peers.get(departure.target)
            if peer is not None:
                self._shadow(departure, peer, now)
            return
        if not self._is_known_everywhere(departure):
            return
        if not self._has_caught_up(departure):
            departure.state = CATCHING_UP
            return
        departure.state = READY
        if departure.channel is not None and not departure.said_ready:
            departure.said_ready = True
            departure.channel.say(frames.MOVE_READY, departure.move)
        if (departure.without_client or departure.freeze_asked) and self._is_quiet(departure):
            self._freeze(departure, now)

    def _is_current(self, departure: Departure) -> bool:
        """Whether the new broker knows what the client wants by now."""
        return encode_subscriptions(departure.session) == departure.told

    def _is_known_everywhere(self, departure: Departure) -> bool:
        """Whether every broker that is there for us knows that the new one wants it. If one does not, it came just now, or
        the new broker cannot reach it."""
        for peer in self._fabric.peers.values():
            if peer.up and peer.name != departure.target and peer.name not in departure.members:
                return False
        return True

    def _has_caught_up(self, departure: Departure) -> bool:
        """Whether all is here that the brokers sent before they knew of the new broker's interest. Asks those it is not."""
        complete = True
        for name, sequence in departure.members.items():
            if name == self._fabric.name:
                continue
            if name[:1] == CURSOR_PREFIX:
                complete = complete and self._fabric.sets.cursors.number_of(name) >= sequence
                continue
            peer = self._fabric.peers.get(name)
            if peer is not None and self._has_all(peer, sequence):
                continue
            complete = False
            if peer is not None and name not in departure.asked and self._fabric.channels.ask_progress(peer, departure.move):
                departure.asked.add(name)
        return complete

    def _has_all(self, peer: Peer, sequence: int) -> bool:
        return peer.received >= sequence and peer.received_unreliable >= sequence

    def _is_quiet(self, departure: Departure) -> bool:
        """Whether nothing is left of what the client asked for: all its bytes are processed and answered. What a replica set
        has not committed yet is answered here, or never: the new broker would take it for kept."""
        connection = departure.session.connection
        if connection is not None and (connection.pending_verdict or connection.answers is not None):
            return False
        return departure.leftovers or departure.session.is_kept()

    # --- the moment -----------------------------------------------------------------------------------------------------

    def freeze(self, channel: Channel, move: int, now: float) -> None:
        """The gateway sends the client's further bytes to the new broker."""
        departure = self.by_move.get(move)
        connection = channel.connection
        session = None if connection is None else connection.session
        if departure is None and session is not None and session.client_id not in self.by_client:
            # It was given up while this was on its way: the client is about to come back.
            departure = Departure(move, session, "", channel, now)
            departure.freeze_asked = True
            self.by_move[move] = departure
            self.by_client[session.client_id] = departure
            self.fail(departure, "this move was given up", now)
            return
        if departure is None or departure.channel is not channel:
            channel.fail(move, "this move is not under way")
            return
        departure.freeze_asked = True
        departure.deadline = now + self._fabric.settings.move_timeout_seconds
        self.advance(departure, now)

    def _freeze(self, departure: Departure, now: float) -> None:
        """From here on the session is nobody's: it is on its way."""
        session = departure.session
        connection = session.connection
        if connection is not None:
            self._fabric.interest.answer(connection)
            send_owed(self._engine, connection, session, now)
            departure.agreement = encode_connection(connection)
        reached = reached_fields(self._fabric, self._handover.fences, session)
        content = encode_session(self._fabric, session, now)
        departure.content = b"".join((blob(departure.agreement), reached, blob(content)))
        self._detach(departure, connection, now)
        self._note(session, departure.move, departure.target)
        self._fabric.seen_stamp(session.stamp + 1)  # the new broker's; whoever connects here from now on is later
        self.send_state(departure)

    def _note(self, session: Session, move: int, target: str) -> None:
        """Have it in the journal where the session may be."""
        session.departing_by = move
        session.departing_to = target
        if session.durable:
            self._engine.effects.records.append(records.departing(session.number, move, target))

    def _detach(self, departure: Departure, connection: Connection | None, now: float) -> None:
        session = departure.session
        limits = self._fabric.limits
        departure.state = FROZEN
        departure.deadline = now + self._fabric.settings.move_timeout_seconds
        departure.ask_until = now + UNREACHABLE_TIMES * self._fabric.settings.move_timeout_seconds
        departure.queued_before = 0 if session.queue is None else len(session.queue)
        if connection is None:
            return
        departure.buffer = Buffer(self._engine.effects, limits.max_output_bytes + limits.max_queued_bytes)
        departure.waiting = Waiting(self._engine.effects, TransportPeer("moving"), now, limits, departure.buffer)
        departure.waiting.session = session
        session.connection = departure.waiting
        connection.session = None
        connection.state = CLOSED
        connection.partial = None
        connection.aliases_in = None
        connection.aliases_out = None
        connection.allowed_topics = None
        connection.close_reason = "moved"
        # What is still to be said to the client is sent first; only then the driver closes, and that says FROZEN.
        channel = departure.channel
        if channel is not None:
            channel.freezing = departure.move
            departure.channel = None
        connection.closing = True
        connection.touch()

    def send_state(self, departure: Departure) -> None:
        """Send the session, behind the records of what it promised."""
        peer = self._fabric.peers.get(departure.target)
        if peer is None or departure.abandoned:
            return
        if departure.recovered:
            peer.send(abandon_frame(departure.move, "the old broker crashed"))
            return
        content = departure.content
        pieces = max(1, -(-len(content) // STATE_PIECE_BYTES))
        for piece in range(pieces):
            part = content[piece * STATE_PIECE_BYTES : (piece + 1) * STATE_PIECE_BYTES]
            peer.send_held(frame(frames.STATE, number(departure.move), number(piece), number(pieces), blob(part)))

    # --- how it ends ----------------------------------------------------------------------------------------------------

    def installed(self, peer: Peer, move: int, now: float) -> None:
        """The new broker has the session: this copy is over. What came for it since is the new one's, too, but for messages
        of shared subscriptions, which were given to this copy alone: others get them."""
        departure = self.by_move.get(move)
        if departure is None or departure.target != peer.name:
            return
        if departure.leftovers and departure.state != FROZEN:  # nothing of it is wanted there
            self._forget(departure)
            self._engine.sessions.end(departure.session, now)
            return
        if departure.state != FROZEN:
            return
        if self._was_taken_over(departure):
            return
        self._forget(departure)
        self.moved += 1
        session = departure.session
        passed_on: list[tuple[str, Publication]] = []
        if departure.buffer is not None:
            for kept in departure.buffer.take():
                if kept.terms.via:
                    passed_on.append((kept.terms.via, kept.publication))
        discard(session, departure.queued_before)
        self._let_go(departure)
        session.will = None
        self._engine.sessions.end(session, now)
        self._fabric.presence.went(session, departure.target)
        for topic_filter, publication in passed_on:
            self._engine.router.pass_on(topic_filter, publication, now)
        if departure.returning is not None:
            departure.returning.refuse(move, f"the client is at {departure.target}")

    def refused(self, peer: Peer, move: int, reason: str, now: float) -> None:
        """The new broker does not have the session, and will not."""
        departure = self.by_move.get(move)
        if departure is None or departure.target != peer.name:
            return
        if departure.state != FROZEN:
            self.fail(departure, reason, now)
            return
        departure.abandoned = True
        departure.deadline = now + self._fabric.settings.move_timeout_seconds
        if departure.returning is not None or departure.without_client:
            self._thaw(departure, now)

    def fail(self, departure: Departure, reason: str, now: float) -> None:
        """Give up before anything has changed for the client. If its bytes go elsewhere already, it has to come back."""
        self.failed += 1
        peer = self._fabric.peers.get(departure.target)
        if peer is not None:
            peer.send(abandon_frame(departure.move, reason))
        channel = departure.channel
        if channel is not None:
            channel.fail(departure.move, reason)
        if not departure.freeze_asked:
            self._forget(departure)
            return
        connection = departure.session.connection
        departure.abandoned = True
        if connection is not None:
            departure.answers = self._fabric.interest.take(connection)
            departure.pledged = connection.take_answers()
            send_owed(self._engine, connection, departure.session, now)
            departure.agreement = encode_connection(connection)
        self._detach(departure, connection, now)

    def bring_back(self, departure: Departure, channel: Channel, now: float) -> None:
        """The gateway wants the client here again: ADOPT came to the old broker. The new one must not have it, then."""
        if departure.state != FROZEN:
            departure.freeze_asked = True
            self.fail(departure, "the gateway gave the move up", now)
        departure.returning = channel
        departure.deadline = now + self._fabric.settings.move_timeout_seconds
        peer = self._fabric.peers.get(departure.target)
        if departure.abandoned or peer is None or not peer.up:
            self._thaw(departure, now)
        else:
            peer.send(abandon_frame(departure.move, "the client came back"))

    def stay(self, departure: Departure, now: float) -> None:
        """Nobody else has the session, and its client connects elsewhere: it is here, as that of a client that is away."""
        channel = departure.returning
        departure.returning = None
        self._thaw(departure, now)
        self._supersede(departure.move, channel)

    def _supersede(self, move: int, channel: Channel | None) -> None:
        self.superseded[move] = None
        if len(self.superseded) > MAX_SUPERSEDED:
            del self.superseded[next(iter(self.superseded))]
        if channel is not None:
            turn_away(channel)

    def _thaw(self, departure: Departure, now: float) -> None:
        """The session stays after all, as it was."""
        if self._was_taken_over(departure):
            return
        self._forget(departure)
        session = departure.session
        self._note(session, 0, "")
        self._let_go(departure)
        channel = departure.returning
        if departure.without_client and (not departure.recovered or session.expires_at or session.will_due_at):
            self._engine.sessions.schedule(session, now)
            return
        if channel is None or channel.closed:
            self._engine.sessions.leave(session, False, now)
            return
        self.thawed += 1
        session.stamp += 2  # the new broker's copy, if it has one, has the next one
        self._handover.attach(channel, session, Agreement(departure.agreement), departure.move, now)
        if channel.connection is not None:
            self._fabric.interest.give(channel.connection, departure.answers)
            channel.connection.give_answers(departure.pledged)
        if departure.buffer is not None:
            for kept in departure.buffer.take():
                if not kept.publication.expired(now):
                    self._engine.router.deliver(session, kept.publication, kept.terms, now)
        self._handover.go_on(channel, session, now)

    def _let_go(self, departure: Departure) -> None:
        """Nobody stands in for the client any more."""
        if departure.waiting is not None:
            self._engine.stats.connected_clients -= 1
        departure.session.connection = None

    def _forget(self, departure: Departure) -> None:
        self.by_move.pop(departure.move, None)
        self.by_client.pop(departure.session.client_id, None)

    # --- what happens meanwhile -----------------------------------------------------------------------------------------

    def channel_ended(self, channel: Channel, now: float) -> None:
        """A client's transport is gone, or its gateway."""
        for departure in list(self.by_move.values()):
            if departure.channel is channel:
                departure.channel = None
                departure.freeze_asked = False
                self.fail(departure, "the client left", now)
            elif departure.returning is channel:
                departure.returning = None

    def peer_up(self, peer: Peer, now: float) -> None:
        for departure in list(self.by_move.values()):
            if departure.target != peer.name:
                continue
            if departure.state == FROZEN:
                self.send_state(departure)  # it has it already, or will have it now; either way it says so
            elif departure.state == PREPARING:
                self._shadow(departure, peer, now)

    def peer_down(self, peer: Peer, now: float) -> None:
        for departure in list(self.by_move.values()):
            if departure.target == peer.name:
                if departure.state != FROZEN:
                    self.fail(departure, f"{peer.name} cannot be reached any more", now)
                elif departure.returning is not None:
                    self._thaw(departure, now)
            elif departure.state == PREPARING or (
                departure.state == CATCHING_UP and not self._has_all(peer, departure.members.get(peer.name, 0))
            ):
                # What it had for us and had not sent may yet come, once it is back: the client has to be here then.
                self.fail(departure, f"{peer.name} cannot be reached any more", now)

    def settle(self, now: float) -> None:
        """Look again at those whose client is waited for, and at those whose session somebody took over."""
        for departure in list(self.by_move.values()):
            if departure.state == FROZEN:
                self._was_taken_over(departure)
            elif self._engine.sessions.by_client.get(departure.session.client_id) is not departure.session:
                self.fail(departure, "the session ended", now)
            elif departure.freeze_asked or (departure.without_client and departure.state == READY):
                self.advance(departure, now)

    def _was_taken_over(self, departure: Departure) -> bool:
        """Whether the client connected here again, and has the session or ended it. Then the move is over."""
        session = departure.session
        is_here = self._engine.sessions.by_client.get(session.client_id) is session
        if is_here and session.connection is departure.waiting:
            return False
        self._forget(departure)
        if is_here:
            self._note(session, 0, "")
        peer = self._fabric.peers.get(departure.target)
        if peer is not None:
            peer.send(abandon_frame(departure.move, "the client connected again"))
        self._supersede(departure.move, departure.returning)
        return True

    def tick(self, now: float) -> None:
        for departure in list(self.by_move.values()):
            if departure.state != FROZEN:
                if now >= departure.deadline:
                    self.fail(departure, "preparing took too long", now)
                elif now >= departure.ask_again_at:
                    departure.asked.clear()
                    self.advance(departure, now)
                    departure.ask_again_at = now + ASK_AGAIN_S
            elif now >= departure.deadline:
                self._overdue(departure, now)

    def _overdue(self, departure: Departure, now: float) -> None:
        """Nobody said for long where the session is to be."""
        peer = self._fabric.peers.get(departure.target)
        if departure.abandoned or peer is None or (not peer.up and now >= departure.ask_until):
            self._thaw(departure, now)
            return
        departure.deadline = now + self._fabric.settings.move_timeout_seconds
        self.send_state(departure)

    def peer_gone(self, peer: Peer, now: float) -> None:
        """The new broker left for good: whatever it did not say that it has is ours."""
        for departure in list(self.by_move.values()):
            if departure.target == peer.name:
                departure.abandoned = True
                if departure.state == FROZEN:
                    self._thaw(departure, now)
                else:
                    self.fail(departure, f"{peer.name} left", now)

    def next_deadline(self) -> float:
        deadline = float("inf")
        for departure in self.by_move.values():
            deadline = min(deadline, departure.deadline)
            if departure.state != FROZEN:
                deadline = min(deadline, departure.ask_again_at)
        return deadline
