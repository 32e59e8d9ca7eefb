"""Which client is where: one session per client identifier in the whole fabric, wherever its client connects.

Brokers tell each other of the sessions they have (PRESENCE): everything when a link comes up, then what changed. A session has
a *stamp*, made when a client took it up last; of two sessions of one client the one with the later stamp holds, and whoever
has the other ends it as soon as it hears of that.

A client that connects here and has a session elsewhere waits for its CONNACK while that broker is asked (SESSION_ASK)::

    clean start      the other broker ends the session, its connection gets 0x8E          ENDED
    otherwise        it closes the connection, and the session moves here as one of a      COMING, then the session
                     client that is away (nearcast.fabric.handover): nothing is lost
    another user     the session is not theirs (docs/decisions/0006)                       REFUSED
    someone was      a client connected there after this one did                           LATER
    faster
    not there        it never was, ended, or moved on, and then to whom                    NONE, MOVED

All this takes ``takeover_timeout_seconds`` at most; then the client is let in without its old session, and so it is when the
other broker cannot be reached. What that broker has is ended when it is back: the client was told that there is no session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.fabric import frames
from nearcast.fabric.departing import FROZEN, Departure
from nearcast.fabric.frames import frame
from nearcast.fabric.parts import FOREVER, Part, Peer
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Verdict
from nearcast.mqtt.connection import CLOSED, Connection
from nearcast.mqtt.records import Fields, blob, number, text
from nearcast.mqtt.session import Session

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric

#: Bytes of one PRESENCE frame, and how long until the next one to the same broker: there may be a million clients.
PIECE_BYTES: Final = 65_536
PIECE_S: Final = 0.005
LOOK_S: Final = 0.05
MAX_QUESTIONS: Final = 16
"""Brokers that are asked for one session, one after the other, when each says that it moved on."""

MAX_WENT: Final = 10_000
"""Sessions that moved to another broker and are remembered until all were told where they went."""

MAX_NEWS: Final = 1_000
"""Clients that were let in late and are remembered until a driver asks."""

# How PRESENCE begins: these are changes, or the first or last of all there are.
FIRST: Final = 1
LAST: Final = 2

# What PRESENCE says of a client.
GONE: Final = 0
AWAY: Final = 1
CONNECTED: Final = 2
WENT: Final = 3
CONTINUES: Final = 4
"""Added: it goes on with a session that other brokers may have more of (:mod:`nearcast.fabric.leftovers`)."""

# How SESSION_ASK wants a session.
KEPT: Final = 0
CLEAN: Final = 1
RESUMED: Final = 2

# What SESSION_ANSWER says.
NONE: Final = 0
ENDED: Final = 1
COMING: Final = 2
REFUSED: Final = 3
LATER: Final = 4
MOVED: Final = 5

_IN_USE: Final = "this client identifier is in use by another user"


class Claim:
    """A client that waits here for its session."""

    def __init__(self, connection: Connection, verdict: Verdict, clean_start: bool, stamp: int, deadline: float) -> None:
        self.connection = connection
        self.verdict = verdict
        self.clean_start = clean_start
        self.stamp = stamp
        self.deadline = deadline
        #: The broker that was asked last, the number of that question, and how many there were.
        self.asked = ""
        self.question = 0
        self.questions = 0
        self.coming = False
        #: The session that is here already, and older than the one that comes.
        self.before: Session | None = None
        #: Who asked us for the same session meanwhile: the number of the question, by broker.
        self.others: dict[str, Question] = {}


class Question:
    """A broker asks for a session."""

    def __init__(self, fields: Fields) -> None:
        self.number = fields.number()
        self.client_id = fields.blob().decode("utf-8")
        self.username = fields.text()
        how = fields.number()
        self.clean_start = how == CLEAN
        #: The client has noticed nothing: its gateway lost the broker it was at, and went on elsewhere.
        self.resumes = how == RESUMED
        self.stamp = fields.number()


class Presence(Part):
    """See the module."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._engine = fabric.engine
        self._sessions = fabric.engine.sessions
        self._timeout_s: float = fabric.settings.takeover_timeout_seconds
        self._now = 0.0
        self.piece_bytes: int = PIECE_BYTES
        #: By broker: the stamps of its sessions, by client identifier.
        self.elsewhere: dict[str, dict[str, int]] = {}
        #: By broker: clients whose session there goes on where others were lost.
        self._continuing: dict[str, set[str]] = {}
        #: The same from before its link broke, until it has told all anew.
        self._former: dict[str, dict[str, int]] = {}
        # By broker: clients it is yet to be told of, whether it was told of any and of all, when it may be told more.
        self._untold: dict[str, dict[str, None]] = {}
        self._begins: set[str] = set()
        self._all_untold: set[str] = set()
        self._next_at: dict[str, float] = {}
        self._has_untold = False
        self._claims: dict[str, Claim] = {}
        self._settled: set[Connection] = set()
        #: Sessions that moved from here: to whom, and the stamp they have there.
        self._went: dict[str, tuple[str, int]] = {}
        self._let_in_late: list[Connection] = []
        self._refused: list[Connection] = []
        self._claimed_at = 0
        #: Sessions that are on their way to a broker because it asked: its name and the question.
        self._sought: dict[str, tuple[str, Question]] = {}
        #: Questions for sessions that are on their way here, and by whom.
        self._early: list[tuple[str, Question]] = []
        #: Clients with a later session elsewhere, which the broker that ours is on its way to will not take.
        self._contested: set[str] = set()
        self.takeovers = 0
        self.given = 0
        fabric.engine.handshake.claims = self
        fabric.engine.sessions.recovered_will_delay_seconds = self._timeout_s
        fabric.engine.sessions.watchers.append(self)
        fabric.add_part(self, [frames.PRESENCE, frames.SESSION_ASK, frames.SESSION_ANSWER])

    def begin(self, now: float) -> None:
        """The journal was read: later stamps than those in it are to come."""
        self._now = now
        for session in self._sessions.by_client.values():
            self._fabric.seen_stamp(session.stamp)

    # --- who is here ----------------------------------------------------------------------------------------------------

    def attached(self, session: Session) -> None:
        # A client that had to wait counts from when it came, not from when it was let in.
        session.stamp = self._claimed_at or self._fabric.stamp(self._now)
        self.changed(session.client_id)

    def left(self, session: Session) -> None:
        if not session.stamp:
            session.stamp = self._fabric.stamp(self._now)  # it came from another broker
        self.changed(session.client_id)

    def ended(self, session: Session) -> None:
        self._went.pop(session.client_id, None)
        self.changed(session.client_id)

    def went(self, session: Session, target: str) -> None:
        """The session ended here because another broker has it. Whoever hears of the one must not miss the other: the client
        may connect there before that broker's own word arrives."""
        self._went[session.client_id] = (target, session.stamp + 1)
        if len(self._went) > MAX_WENT:
            del self._went[next(iter(self._went))]

    def shared(self, topic_filter: str) -> None:
        """Not of interest here."""

    def changed(self, client_id: str) -> None:
        """Brokers are to be told anew of a client."""
        self._has_untold = True
        for untold in self._untold.values():
            untold[client_id] = None

    def peer_up(self, peer: Peer, now: float) -> None:
        self._untold[peer.name] = {
            session.client_id: None for session in self._sessions.by_client.values() if not session.is_peer
        }
        self._begins.add(peer.name)
        self._all_untold.add(peer.name)
        self._has_untold = True
        self._next_at[peer.name] = 0.0

    def peer_down(self, peer: Peer, now: float) -> None:
        self._untold.pop(peer.name, None)
        self._next_at.pop(peer.name, None)
        for claim in list(self._claims.values()):
            if claim.asked == peer.name:
                claim.stamp = 0
                self._let_in(claim, now)

    def peer_gone(self, peer: Peer, now: float) -> None:
        self.elsewhere.pop(peer.name, None)
        self._former.pop(peer.name, None)
        self._continuing.pop(peer.name, None)

    def _tell(self, peer: Peer, untold: dict[str, None], now: float) -> None:
        """Say the next of what a broker does not know."""
        begins = peer.name in self._begins
        if now < self._next_at[peer.name] or not (untold or begins):
            return
        if not peer.has_room():
            self._next_at[peer.name] = now + LOOK_S
            return
        parts: list[bytes] = []
        size = 0
        while untold and size < self.piece_bytes:
            client_id = next(iter(untold))
            del untold[client_id]
            session = self._sessions.by_client.get(client_id)
            part = blob(client_id.encode("utf-8"))
            name, stamp = self._went.get(client_id, ("", 0))
            if session is None and name and name != peer.name:
                part += number(WENT) + number(stamp) + blob(name.encode("utf-8"))
            elif session is None:
                part += number(GONE)
            else:
                state = (AWAY if session.connection is None else CONNECTED) | (CONTINUES if session.lost else 0)
                part += number(state) + number(session.stamp)
            parts.append(part)
            size += len(part)
        kind = FIRST if begins else 0
        self._begins.discard(peer.name)
        if not untold and peer.name in self._all_untold:
            self._all_untold.discard(peer.name)
            kind |= LAST
        self._next_at[peer.name] = now + PIECE_S if untold else 0.0
        # Behind the records: whoever has an older session ends it then.
        peer.send_held(frame(frames.PRESENCE, number(kind), number(len(parts)), *parts))

    def _heard(self, peer: Peer, fields: Fields, now: float) -> None:
        known = self.elsewhere.setdefault(peer.name, {})
        kind = fields.number()
        if kind & FIRST:
            self._former[peer.name] = known
            known = {}
            self.elsewhere[peer.name] = known
        former = self._former.get(peer.name)
        if kind & LAST:
            self._former.pop(peer.name, None)
        for _ in range(fields.number()):
            client_id = fields.blob().decode("utf-8")
            state = fields.number()
            continuing = self._continuing.setdefault(peer.name, set())
            continued = client_id in continuing
            if state & CONTINUES:
                continuing.add(client_id)
            else:
                continuing.discard(client_id)
            stamp = 0 if state == GONE else fields.number()
            if state in (GONE, WENT):
                known.pop(client_id, None)
                if former is not None:
                    former.pop(client_id, None)
                if state == WENT:
                    name = fields.blob().decode("utf-8")
                    there = self.elsewhere.setdefault(name, {})
                    there[client_id] = max(stamp, there.get(client_id, 0))
                    if continued:
                        self._continuing.setdefault(name, set()).add(client_id)
                continue
            known[client_id] = stamp
            self._fabric.seen_stamp(stamp)
            session = self._sessions.by_client.get(client_id)
            if session is not None and not session.is_peer and self._is_later(stamp, peer.name, session):
                self._give_way(session, peer, now)

    def _is_later(self, stamp: int, name: str, session: Session) -> bool:
        return (stamp, name) > (session.stamp, self._fabric.name)

    def _give_way(self, session: Session, peer: Peer, now: float) -> None:
        """The client has a later session at another broker: this one is over."""
        departures = self._fabric.handover.departures
        departure = departures.by_client.get(session.client_id)
        if self.continues(peer.name, session.client_id):
            self._give_leftovers(session, departure, now)
            return
        if departure is not None and departure.target == peer.name:
            if departure.state == FROZEN:
                self._contested.add(session.client_id)  # how the move ends is the two brokers' to settle
                return
            departures.fail(departure, "the client has another session there", now)
        connection = session.connection
        if connection is not None:
            self.takeovers += 1
            self._engine.stats.takeovers += 1
            self._engine.drop(connection, reasons.SESSION_TAKEN_OVER, now, None)
        else:
            session.will = None  # the client is there
        if self._sessions.by_client.get(session.client_id) is session:
            self._sessions.end(session, now)

    def _give_leftovers(self, session: Session, departure: Departure | None, now: float) -> None:
        """It goes on there with this session: what is here of it follows."""
        if departure is not None and departure.state == FROZEN:
            self._contested.add(session.client_id)
            return
        if departure is not None and not departure.leftovers:
            self._fabric.handover.departures.fail(departure, "the client went on elsewhere", now)
        session.will = None
        if session.connection is not None:
            self.takeovers += 1
            self._engine.stats.takeovers += 1
            self._engine.drop(session.connection, reasons.SESSION_TAKEN_OVER, now, None)
        if self._sessions.by_client.get(session.client_id) is session:
            self._fabric.leftovers.give(session, now)

    def continues(self, name: str, client_id: str) -> bool:
        """Whether a client's session at a broker goes on with one that others lost."""
        return client_id in self._continuing.get(name, set())

    def later(self, session: Session) -> str:
        """The broker that has the latest session of a client, whether it can be reached or not; empty when that is here."""
        latest = (session.stamp, self._fabric.name)
        for name, known in self.elsewhere.items():
            former = self._former.get(name, {})
            stamp = known.get(session.client_id, former.get(session.client_id, -1))
            latest = max(latest, (stamp, name))
        return "" if latest[1] == self._fabric.name else latest[1]

    # --- a client that comes --------------------------------------------------------------------------------------------

    def claim(self, connection: Connection, verdict: Verdict, clean_start: bool, now: float) -> bool:
        self._now = now
        if connection in self._settled:
            self._settled.remove(connection)
            return False
        client_id = connection.client_id
        before = self._claims.get(client_id)
        holder = self._holder(client_id)
        departure = self._fabric.handover.departures.by_client.get(client_id)
        if departure is not None and departure.state == FROZEN:
            # Its session is on the way to another broker: it has to come back from there.
            target = self._fabric.peers.get(departure.target)
            holder = target if target is not None and target.up else None
        elif departure is not None and departure.without_client:
            self._keep(client_id, departure, now)
        if holder is None and before is None:
            return False
        if before is not None and before.verdict.username != verdict.username:
            self._refused.append(connection)  # as if the other one's session were here
            return True
        claim = Claim(connection, verdict, clean_start, self._fabric.stamp(now), now + self._timeout_s)
        if before is not None:
            # Two clients of one name wait here: the later one has it, as if the earlier one had been let in first.
            del self._claims[client_id]
            claim.others = before.others
            claim.asked = before.asked
            claim.question = before.question
            claim.coming = before.coming
            unavailable = Verdict(False, reasons.SERVER_UNAVAILABLE, "another client of this name connected")
            self._engine.authenticated(before.connection, unavailable, now)
        claim.before = self._sessions.by_client.get(client_id) if before is None else before.before
        self._claims[client_id] = claim
        if holder is None:
            holder = self._fabric.peers.get(claim.asked)
        if holder is not None and not claim.coming:
            self._ask(claim, holder)
        return True

    def _keep(self, client_id: str, departure: Departure, now: float) -> None:
        """The client is here again before its session left."""
        self._fabric.handover.departures.fail(departure, "the client came back", now)
        name, question = self._sought.pop(client_id, ("", None))
        peer = self._fabric.peers.get(name)
        if peer is not None and question is not None:
            self._answer(peer, question, LATER)

    def _holder(self, client_id: str) -> Peer | None:
        """The broker to ask for a client's session: the one with the latest, unless that is here or cannot be reached."""
        session = self._sessions.by_client.get(client_id)
        latest = (0, "") if session is None else (session.stamp, self._fabric.name)
        found: Peer | None = None
        for name, known in self.elsewhere.items():
            stamp = known.get(client_id, -1)
            if stamp < 0 and name in self._former:
                stamp = self._former[name].get(client_id, -1)
            if stamp < 0 or (stamp, name) <= latest:
                continue
            peer = self._fabric.peers.get(name)
            if peer is not None and peer.up:
                latest = (stamp, name)
                found = peer
        return found

    def _ask(self, claim: Claim, peer: Peer) -> None:
        claim.asked = peer.name
        claim.question = claim.stamp
        claim.questions += 1
        how = RESUMED if claim.connection.resumption is not None else CLEAN if claim.clean_start else KEPT
        peer.send(
            frame(
                frames.SESSION_ASK,
                number(claim.stamp),
                blob(claim.connection.client_id.encode("utf-8")),
                text(claim.verdict.username),
                number(how),
                number(claim.stamp),
            )
        )

    def _answered(self, peer: Peer, fields: Fields, now: float) -> None:
        question = fields.number()
        client_id = fields.blob().decode("utf-8")
        answer = fields.number()
        claim = self._claims.get(client_id)
        if claim is None:
            return
        if answer == COMING:
            claim.asked = peer.name
            claim.question = question
            claim.coming = True
        elif claim.asked != peer.name or claim.question != question:
            return  # the answer to an earlier client of this name, that is not there any more
        elif answer == REFUSED:
            self._refuse(claim, reasons.NOT_AUTHORIZED, _IN_USE, now)
        elif answer == LATER:
            self._refuse(claim, reasons.SERVER_UNAVAILABLE, f"the client connected at {peer.name} meanwhile", now)
        elif answer == MOVED and claim.questions < MAX_QUESTIONS:
            claim.coming = False
            there = self._fabric.peers.get(fields.blob().decode("utf-8"))
            if there is not None and there.up:
                self._ask(claim, there)
            else:
                self._let_in(claim, now)
        elif self._is_arriving(client_id):
            claim.coming = True
        else:
            there = self._holder(client_id)
            if answer == NONE and there is not None and there is not peer and claim.questions < MAX_QUESTIONS:
                self._ask(claim, there)
            else:
                self._let_in(claim, now)

    def _let_in(self, claim: Claim, now: float) -> None:
        self._over(claim)
        self._settled.add(claim.connection)
        self._claimed_at = claim.stamp
        self._engine.authenticated(claim.connection, claim.verdict, now)
        self._claimed_at = 0
        self._settled.discard(claim.connection)
        self._let_in_late = [*self._let_in_late[-MAX_NEWS:], claim.connection]
        self._answer_others(claim, now)

    def take_let_in(self) -> list[Connection]:
        """The clients that were let in after they had to wait, since the last time: a driver may want to say so."""
        taken = self._let_in_late
        if taken:
            self._let_in_late = []
        return taken

    def _refuse(self, claim: Claim, reason_code: int, reason: str, now: float) -> None:
        self._over(claim)
        self._engine.authenticated(claim.connection, Verdict(False, reason_code, reason), now)
        self._answer_others(claim, now)

    def _over(self, claim: Claim) -> None:
        client_id = claim.connection.client_id
        if self._claims.get(client_id) is claim:
            del self._claims[client_id]

    def _answer_others(self, claim: Claim, now: float) -> None:
        for name, question in claim.others.items():
            peer = self._fabric.peers.get(name)
            if peer is not None and peer.up:
                self._asked(peer, question, now)

    # --- a client that went elsewhere -----------------------------------------------------------------------------------

    def _asked(self, peer: Peer, question: Question, now: float) -> None:
        """Another broker wants a session, for a client that connected there."""
        client_id = question.client_id
        self._fabric.seen_stamp(question.stamp)
        claim = self._claims.get(client_id)
        if claim is not None:
            if claim.asked == peer.name and question.stamp > claim.stamp and self._knows_nothing(client_id):
                self._answer_absent(peer, question)  # each thought that the other had it
            else:
                claim.others[peer.name] = question  # first ours, whoever is later
            return
        if self._is_arriving(client_id):
            self._early.append((peer.name, question))
            return
        session = self._sessions.by_client.get(client_id)
        departures = self._fabric.handover.departures
        departure = departures.by_client.get(client_id)
        if departure is not None and departure.state == FROZEN and departure.abandoned:
            departures.stay(departure, now)
            departure = None
        if departure is not None and departure.state == FROZEN:
            if departure.target == peer.name:
                self._answer(peer, question, COMING)
            else:
                self._answer(peer, question, MOVED, departure.target)
            return
        if session is None:
            self._answer_absent(peer, question)
            return
        if session.username != question.username:
            self._answer(peer, question, REFUSED)
            return
        connection = session.connection
        if connection is not None and (session.stamp, self._fabric.name) > (question.stamp, peer.name):
            self._answer(peer, question, LATER)
            return
        if departure is not None and connection is None:
            if departure.target == peer.name and not question.clean_start:
                if client_id in self._sought:
                    self._sought[client_id] = (peer.name, question)
                self._answer(peer, question, COMING)
                return
            name, before = self._sought.get(client_id, ("", question))
            if name == departure.target and name != peer.name and (before.stamp, name) > (question.stamp, peer.name):
                self._answer(peer, question, MOVED, name)
                return
            other = self._fabric.peers.get(name)
            if other is not None and other is not peer:
                self._answer(other, before, MOVED, peer.name)
        if departure is not None:
            departures.fail(departure, "the client connected elsewhere", now)
            if departure.state == FROZEN:
                departures.stay(departure, now)
        if connection is not None:  # [MQTT-3.1.4-3]
            self.takeovers += 1
            self._engine.stats.takeovers += 1
            if question.resumes:
                self._sessions.suspend(session, now)
            self._engine.drop(connection, reasons.SESSION_TAKEN_OVER, now, None)
        if self._sessions.by_client.get(client_id) is not session:
            self._answer(peer, question, NONE)
        elif question.clean_start or (session.expiry_seconds == 0 and not question.resumes):
            self._sessions.end(session, now)
            self._answer(peer, question, ENDED)
        else:
            self._hand_over(peer, question, session, now)

    def _knows_nothing(self, client_id: str) -> bool:
        return client_id not in self._sessions.by_client and not self._is_arriving(client_id)

    def _is_arriving(self, client_id: str) -> bool:
        arrivals = self._fabric.handover.arrivals.by_move
        return bool(arrivals) and client_id in [arrival.client_id for arrival in arrivals.values()]

    def _hand_over(self, peer: Peer, question: Question, session: Session, now: float) -> None:
        move = self._fabric.rng.getrandbits(60)
        reason = self._fabric.handover.departures.begin(move, session, peer.name, None, now)
        if reason:
            self._answer(peer, question, NONE)
            return
        self.given += 1
        self._sought[session.client_id] = (peer.name, question)
        self._answer(peer, question, COMING)

    def _answer_absent(self, peer: Peer, question: Question) -> None:
        there = self._holder(question.client_id)
        if there is not None and there is not peer:
            self._answer(peer, question, MOVED, there.name)
        else:
            self._answer(peer, question, NONE)

    def _answer(self, peer: Peer, question: Question, answer: int, name: str = "") -> None:
        # Behind the records: what is said to be over must stay so.
        peer.send_held(
            frame(
                frames.SESSION_ANSWER,
                number(question.number),
                blob(question.client_id.encode("utf-8")),
                number(answer),
                blob(name.encode("utf-8")),
            )
        )

    # --- events ---------------------------------------------------------------------------------------------------------

    def handle(self, peer: Peer, content: bytes, now: float) -> None:
        self._now = now
        fields = Fields(content)
        if content[0] == frames.PRESENCE:
            self._heard(peer, fields, now)
        elif content[0] == frames.SESSION_ASK:
            self._asked(peer, Question(fields), now)
        else:
            self._answered(peer, fields, now)

    def settle(self, now: float) -> None:
        self._now = now
        if self._refused:
            refused = self._refused
            self._refused = []
            for connection in refused:
                self._engine.authenticated(connection, Verdict(False, reasons.NOT_AUTHORIZED, _IN_USE), now)
        if self._claims:
            for claim in list(self._claims.values()):
                self._look(claim, now)
        if self._early:
            early = self._early
            self._early = []
            for name, question in early:
                peer = self._fabric.peers.get(name)
                if peer is not None and peer.up:
                    self._asked(peer, question, now)
        if self._sought or self._contested:
            self._check_departures(now)
        if self._has_untold:
            self._has_untold = False
            for name, untold in self._untold.items():
                listener = self._fabric.peers.get(name)
                if listener is not None and (untold or name in self._begins):
                    self._tell(listener, untold, now)
                    self._has_untold = self._has_untold or bool(untold) or name in self._begins

    def _check_departures(self, now: float) -> None:
        """Of the sessions that were to leave, some have, and some did not get away."""
        under_way = self._fabric.handover.departures.by_client
        for client_id in [client_id for client_id in self._sought if client_id not in under_way]:
            name, question = self._sought.pop(client_id)
            peer = self._fabric.peers.get(name)
            kept = self._sessions.by_client.get(client_id)
            if peer is not None and kept is not None and kept.connection is None:
                self._answer(peer, question, MOVED, self._fabric.name)  # it did not get away: ask again
        for client_id in [client_id for client_id in self._contested if client_id not in under_way]:
            self._contested.discard(client_id)
            session = self._sessions.by_client.get(client_id)
            there = self._holder(client_id)
            if session is not None and there is not None:
                self._give_way(session, there, now)

    def _look(self, claim: Claim, now: float) -> None:
        """Whether the session came, or the client left."""
        if claim.connection.state == CLOSED:
            self._over(claim)
            self._answer_others(claim, now)
            return
        session = self._sessions.by_client.get(claim.connection.client_id)
        if session is not None and session is not claim.before:
            self._let_in(claim, now)

    def tick(self, now: float) -> None:
        for claim in list(self._claims.values()):
            if now >= claim.deadline:
                claim.stamp = 0  # whatever became of the session: this client is later
                self._let_in(claim, now)
        self.settle(now)

    def next_deadline(self) -> float:
        deadline = FOREVER
        for claim in self._claims.values():
            deadline = min(deadline, claim.deadline)
        for name, untold in self._untold.items():
            if untold or name in self._begins:
                deadline = min(deadline, self._next_at[name])
        return deadline
