"""What a lost broker still has of a session that went on without it: it comes back with its journal and hands that over.

A client behind a gateway goes on at another broker N at once when its own broker O is lost
(:mod:`nearcast.fabric.resumption`). O may be back later: its copy of the session has messages that were acknowledged to
publishers, other brokers have kept more for O, and the copy may know subscriptions that the gateway has never seen. Presence
tells O that the client is at N, and that N goes on with the session. Then the copy moves as one of a client that is away does
(:mod:`nearcast.fabric.handover`), but N has no shadow and installs nothing: it takes what its own session has not had, and O
ends the copy::

    O ──SHADOW (leftovers)──► N        subscriptions that only O knew are N's from now on
    O ◄─SHADOWED────────────── N       c(X): what X numbered from there on comes to N by itself
    O ◄─PROGRESS── X                   O has all that X kept for it up to c(X)
    O ──STATE──► N, O ◄─INSTALLED── N  N has it in its journal; or it does not want it, because the client began anew

What N's session had itself is known by identity (:mod:`nearcast.fabric.windows`). The rest is O's to bring. Of QoS 2 messages
in flight the gateway said which the client has.

N remembers this for each broker that the client was lost at, in the session, its journal and wherever the session goes, until
the copy came or the broker is forgotten (``keep_for_seconds``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.fabric.parts import FOREVER, Part, Peer
from nearcast.fabric.session_state import decode_session, decode_subscriptions, encode_session, origin_name
from nearcast.fabric.set_cursors import CURSOR_PREFIX
from nearcast.fabric.windows import Lost, Window, any_has, decode_lost, encode_lost, plain_filters
from nearcast.mqtt import records
from nearcast.mqtt.publication import Publication, Terms
from nearcast.mqtt.records import Fields, blob, number
from nearcast.mqtt.session import RELEASED, Session, packet_ids_of

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric

MAX_OFFERS: Final = 1_000
"""Copies that may be on their way here at once. Further ones are asked to come later."""

MAX_WINDOWS: Final = 64
"""Windows of one session. What it subscribes to beyond may come twice when a lost broker is back."""

MAX_PASSED: Final = 10_000
"""Stretches of messages that are remembered for windows that are open. More than that may come twice."""

ASK_S: Final = 1.0
"""How often a broker is asked whether all has come that it numbered before it confirmed."""

MAX_AT_ONCE: Final = 64
"""Copies that are on their way out at once."""

RETRY_S: Final = 0.5
MAX_RETRY_S: Final = 10.0
"""How long a copy waits before it is offered again, at first and at the most."""

LOST_LATELY_S: Final = 30.0
"""A third broker that was lost may be back within this time with messages for the copy, which waits for it."""

NOWHERE_S: Final = 10.0
"""How long a copy is kept when no broker has the client's session any more: it ended, or is between two of them."""


class Offer:
    """A copy on its way here."""

    def __init__(self, move: int, origin: str, client_id: str) -> None:
        self.move = move
        self.origin = origin
        self.client_id = client_id
        self.round = 0
        self.answered = False
        self.deadline = 0.0
        self.pieces: dict[int, bytes] = {}


class Copy:
    """A copy that is to be handed over."""

    def __init__(self, session: Session, now: float) -> None:
        self.session = session
        self.held_at = now
        self.next_at = now
        self.retry_s = RETRY_S


class Leftovers(Part):
    """Both sides of it. See the module."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._engine = fabric.engine
        #: By client: the brokers that it was lost at.
        self.by_client: dict[str, dict[str, Lost]] = {}
        #: By client: the copies of sessions that went on elsewhere.
        self.copies: dict[str, Copy] = {}
        self.offers: dict[int, Offer] = {}
        # By broker: windows that are not complete there, and what has come from it since the first of them was opened.
        self._open: dict[str, dict[Window, None]] = {}
        self._log: dict[str, list[tuple[int, int]]] = {}
        self._owners: dict[Window, str] = {}
        #: Filters that clients which brokers lost subscribed to since, and our sequence then.
        self._fresh: dict[str, tuple[int, list[str]]] = {}
        self._look_at = 0.0
        self._ask_again_at = 0.0
        self.taken = 0
        self.given = 0
        self.messages = 0
        fabric.engine.sessions.watchers.append(self)
        fabric.add_part(self, [])

    def begin(self, now: float) -> None:
        """The journal was read."""
        for session in list(self._engine.sessions.by_client.values()):
            if session.lost:
                self.installed(session, b"", now)

    # --- where the client went on: what its session has by itself ---------------------------------------------------------

    def resumed(self, session: Session, lost_at: list[tuple[str, bytes]], known: list[str], now: float) -> None:
        """A client was lost at these brokers and goes on here; of its filters the session had ``known`` ones before."""
        fabric = self._fabric
        names = [name for name, _ in lost_at if name != fabric.name]
        if not names:
            return
        windows: list[Window] = []
        if known:
            windows.append(Window(plain_filters(known), True, 0))
        fresh = plain_filters([name for name in session.subscriptions if name not in known])
        if fresh:
            windows.append(self._window(session.client_id, fresh, now))
        entries = self.by_client.setdefault(session.client_id, {})
        for name, had in lost_at:
            if name == fabric.name or name in entries:
                continue
            peer = fabric.peer(name)
            if not peer.up:
                peer.last_seen = peer.last_seen or now
            entries[name] = Lost(set(packet_ids_of(had)), list(windows))
        self._fresh.pop(session.client_id, None)
        self._note(session)

    def _window(self, client_id: str, filters: list[str], now: float) -> Window:
        """Filters were just subscribed to."""
        self._fabric.interest.settle(now)
        window = Window(filters, False, self._fabric.interest.version)
        window.since[self._fabric.name] = self._engine.router.next_sequence - 1
        window.complete.add(self._fabric.name)
        self._watch(client_id, window)
        return window

    def _watch(self, client_id: str, window: Window) -> None:
        self._owners[window] = client_id
        for peer in list(self._fabric.peers.values()):
            if peer.name not in window.complete:
                self._open.setdefault(peer.name, {})[window] = None
                window.begins[peer.name] = len(self._log.setdefault(peer.name, []))
                peer.fenced = True
                if peer.up:
                    self._confirm(peer, window)
        for name, _ in self._fabric.sets.cursors.all():
            if name not in window.complete:
                self._open.setdefault(name, {})[window] = None
                window.begins[name] = len(self._log.setdefault(name, []))
        self._confirm_places()
        self._ask_all()

    def _confirm_places(self) -> None:
        """Of replica sets, whatever comes behind the cursor is what whoever leads sends to those who confirmed."""
        everywhere = self._fabric.interest.everywhere()
        for name in [name for name in self._open if name[:1] == CURSOR_PREFIX]:
            place = self._fabric.sets.cursors.number_of(name)
            done = [window for window in self._open[name] if window.version <= everywhere]
            for window in done:
                window.since[name] = place
            self._complete(name, done)

    def _ask_all(self) -> None:
        for name in list(self._open):
            peer = self._fabric.peers.get(name)
            if peer is not None and peer.up:
                self._check(peer)
                self._ask(peer)

    def _ask(self, peer: Peer) -> None:
        """Have a broker say when all has come that it numbered before it confirmed."""
        if any(peer.name in window.since for window in self._open.get(peer.name, {})):
            self._fabric.channels.ask_progress(peer, 0)

    def records(self, name: str) -> bool:
        """Whether what comes from a broker is to be told to :meth:`passes`."""
        return name in self._open

    def passes(self, name: str, publication: Publication) -> None:
        """Messages of a broker, or of a replica set, are about to be handed to whoever wants them."""
        log = self._log.get(name)
        if log is None or publication.qos == 0:
            return
        first = publication.sequence
        last = first + publication.count - 1
        if len(log) < MAX_PASSED:
            log.append((first, last))

    def confirmed(self, peer: Peer) -> None:
        """A broker confirmed a version of our interest."""
        windows = self._open.get(peer.name)
        if windows is None:
            windows = {}
        for window in windows:
            self._confirm(peer, window)
        self._check(peer)
        self._ask(peer)
        self._confirm_places()

    def _confirm(self, peer: Peer, window: Window) -> None:
        interest = self._fabric.interest
        if peer.name in window.since or interest.confirmed.get(peer.name, -1) < window.version:
            return
        since = interest.confirmed_at[peer.name]
        if window.begins[peer.name] == len(self._log[peer.name]):
            since = max(since, peer.received)  # what came up to here came before
        window.since[peer.name] = since

    def _check(self, peer: Peer) -> None:
        """Whether all has come that a broker numbered before it confirmed."""
        windows = self._open.get(peer.name)
        if windows is None:
            return
        done = [window for window in windows if peer.name in window.since and window.since[peer.name] <= peer.received]
        self._complete(peer.name, done)

    def _complete(self, name: str, done: list[Window]) -> None:
        """All has come that these windows do not get by themselves."""
        windows = self._open[name]
        up = len([other for other in self._fabric.peers.values() if other.up]) + 1
        for window in done:
            since = window.since[name]
            came = self._log[name][window.begins[name] :]
            passed = [(first, last) for first, last in came if first <= since]
            if passed:
                window.passed[name] = passed
            window.complete.add(name)
            del windows[window]
            client_id = self._owners.get(window, "")
            session = self._engine.sessions.by_client.get(client_id)
            if len(window.complete) >= up and session is not None:
                self._note(session)
        if not windows:
            self._close(name)

    def _close(self, name: str) -> None:
        self._open.pop(name, None)
        self._log.pop(name, None)
        peer = self._fabric.peers.get(name)
        if peer is not None:
            peer.fenced = name in self._fabric.handover.fences.by_origin

    def _note(self, session: Session) -> None:
        """Have it in the session, and in the journal."""
        entries = self.by_client.get(session.client_id)
        if entries is not None and not entries:
            del self.by_client[session.client_id]
        before = session.lost
        session.lost = b"" if not entries else encode_lost(entries)
        if session.durable and before != session.lost:
            self._engine.effects.records.append(records.lost(session.number, session.lost))
        if bool(before) != bool(session.lost):
            self._fabric.presence.changed(session.client_id)

    def installed(self, session: Session, own: bytes, now: float) -> None:
        """A session came here with what is known of brokers that lost it. This may be one of them (:meth:`own`)."""
        entries = decode_lost(session.lost)
        self.by_client[session.client_id] = entries
        if self._fabric.name in entries:
            if own:
                self._take(session, self._fabric.name, own, now)
            entries.pop(self._fabric.name, None)
        for name, lost in entries.items():
            peer = self._fabric.peer(name)
            if not peer.up:
                peer.last_seen = peer.last_seen or now
            for window in lost.windows:
                if not window.whole:
                    window.version = self._fabric.interest.version
                    self._watch(session.client_id, window)
        self._note(session)

    def subscribed(self, client_id: str, topic_filter: str) -> None:
        """A client that brokers lost wants something more, which they may have known of: it may have asked them first."""
        if client_id not in self._fresh:
            self._fresh[client_id] = (self._engine.router.next_sequence - 1, [])
        self._fresh[client_id][1].append(topic_filter)

    def _open_fresh(self, now: float) -> None:
        fresh = self._fresh
        self._fresh = {}
        for client_id, (sequence, filters) in fresh.items():
            session = self._engine.sessions.by_client.get(client_id)
            wanted = plain_filters(filters)
            entries = self.by_client.get(client_id, {})
            if session is None or not wanted or not entries:
                continue
            if max(len(lost.windows) for lost in entries.values()) >= MAX_WINDOWS:
                continue
            window = self._window(client_id, wanted, now)
            window.since[self._fabric.name] = sequence
            for lost in entries.values():
                lost.windows.append(window)
            self._note(session)

    def unsubscribed(self, client_id: str, topic_filter: str) -> None:
        """A client that brokers lost wants something no more: they are not to bring it back."""
        session = self._engine.sessions.by_client.get(client_id)
        for lost in self.by_client[client_id].values():
            lost.unwanted.add(topic_filter)
        if session is not None:
            self._note(session)

    # --- what becomes of sessions (as a watcher) ----------------------------------------------------------------------------

    def attached(self, session: Session) -> None:
        self.copies.pop(session.client_id, None)

    def left(self, session: Session) -> None:
        """It stays what it is."""

    def ended(self, session: Session) -> None:
        client_id = session.client_id
        copy = self.copies.get(client_id)
        if copy is not None and copy.session is session:
            del self.copies[client_id]
        entries = self.by_client.get(client_id)
        if entries is not None and self._engine.sessions.by_client.get(client_id) is session:
            del self.by_client[client_id]
            for lost in entries.values():
                self._forget_windows(lost)

    def shared(self, topic_filter: str) -> None:
        """Not of interest here."""

    def _forget_windows(self, lost: Lost) -> None:
        for window in lost.windows:
            self._owners.pop(window, None)
            for name in list(self._open):
                windows = self._open[name]
                windows.pop(window, None)
                if not windows:
                    self._close(name)

    def _remove(self, session: Session, name: str) -> None:
        """A broker has nothing more of the session."""
        entries = self.by_client.get(session.client_id, {})
        lost = entries.pop(name, None)
        if lost is not None and not entries:
            self._forget_windows(lost)
        self._note(session)

    # --- where the client went on: a copy comes -----------------------------------------------------------------------------

    def offered(self, peer: Peer, move: int, current_round: int, fields: Fields, now: float) -> None:
        """A broker that lost the client is back, and has something of it."""
        client_id = fields.blob().decode("utf-8")
        username = fields.text()
        session = self._engine.sessions.by_client.get(client_id)
        if move in self._fabric.handover.arrivals.done:
            self._say_installed(peer, move)
            return
        if session is None or session.client_id in self._fabric.handover.departures.by_client or client_id in self.copies:
            _refuse(peer, move, f"the client is not at {self._fabric.name}")
            return
        lost = self.by_client.get(client_id, {}).get(peer.name)
        if lost is None or session.username != username:
            self._say_installed(peer, move)  # the client began anew: nothing of it is wanted
            return
        offer = self.offers.get(move)
        if offer is None:
            if len(self.offers) >= MAX_OFFERS:
                _refuse(peer, move, f"too many sessions are on their way to {self._fabric.name}")
                return
            offer = Offer(move, peer.name, client_id)
            self.offers[move] = offer
        wanted = decode_subscriptions(self._fabric, fields, session)
        added: list[str] = []
        for subscription in wanted:
            name = subscription.topic_filter
            if name not in session.subscriptions and name not in lost.unwanted:
                self._engine.sessions.subscribe(session, subscription)
                added.append(name)
        added = plain_filters(added)
        if added:
            window = self._window(client_id, added, now)
            for each in self.by_client[client_id].values():
                each.windows.append(window)
            self._fresh.pop(client_id, None)
            self._note(session)
        offer.round = current_round
        offer.answered = False
        offer.deadline = now + 2 * self._fabric.settings.move_timeout_seconds
        self._answer(offer, peer)

    def _answer(self, offer: Offer, peer: Peer) -> None:
        """Say up to where the copy is needed, once that is known of all brokers that are there."""
        lost = self.by_client.get(offer.client_id, {}).get(offer.origin)
        if lost is None:
            return
        fabric = self._fabric
        names = [fabric.name, *[other.name for other in fabric.peers.values() if other.up]]
        names += [name for name, _ in fabric.sets.cursors.all()]
        parts: list[bytes] = []
        for name in names:
            since = 0
            for window in lost.windows:
                if not window.whole:
                    if name not in window.complete:
                        return
                    since = max(since, window.since[name])
            parts.append(blob(name.encode("utf-8")) + number(since))
        offer.answered = True
        peer.send(frame(frames.SHADOWED, number(offer.move), number(offer.round), number(len(parts)), *parts))

    def state(self, peer: Peer, fields: Fields, now: float) -> None:
        """A piece of the copy."""
        offer = self.offers[fields.number()]
        piece = fields.number()
        pieces = fields.number()
        if offer.origin != peer.name:
            return
        offer.pieces[piece] = fields.blob()
        offer.deadline = now + 2 * self._fabric.settings.move_timeout_seconds
        if len(offer.pieces) < pieces:
            return
        content = Fields(b"\x00" + b"".join([offer.pieces[index] for index in range(pieces)]))
        del self.offers[offer.move]
        content.blob()
        for _ in range(content.number()):
            content.blob()
            content.number()
            content.number()
        session = self._engine.sessions.by_client.get(offer.client_id)
        if session is None or session.client_id in self._fabric.handover.departures.by_client:
            _refuse(peer, offer.move, f"the client is not at {self._fabric.name}")
            return
        if peer.name in self.by_client.get(offer.client_id, {}):
            self._take(session, peer.name, content.blob(), now)
            session.arrived_by = offer.move
            if session.durable:
                self._engine.effects.records.append(records.arrived(session))
        self._fabric.handover.arrivals.remember(offer.move, offer.client_id)
        self._say_installed(peer, offer.move)

    def _take(self, session: Session, name: str, data: bytes, now: float) -> None:
        """Deliver what a copy has and the session has not had."""
        lost = self.by_client[session.client_id][name]
        copy = decode_session(self._fabric, data, now)
        self.taken += 1
        for packet_id, sent in copy.inflight.items():
            if sent is not RELEASED and not (sent.qos == 2 and packet_id in lost.had):
                self._deliver(session, lost, sent.publication, sent.start + packet_id - sent.first_id, 1, sent.terms, now)
        for pending in copy.queue or []:
            self._deliver(session, lost, pending.publication, pending.start, pending.count, pending.terms, now)
        for subscription in copy.subscriptions.values():
            if subscription.topic_filter not in session.subscriptions and subscription.topic_filter not in lost.unwanted:
                subscription.session = session
                self._engine.sessions.subscribe(session, subscription)
        # What the copy itself knows of brokers that were lost before it.
        entries = self.by_client[session.client_id]
        for other, before in decode_lost(copy.lost).items():
            if other != self._fabric.name and other not in entries:
                before.windows.extend(lost.windows)
                entries[other] = before
        self._remove(session, name)

    def _deliver(
        self, session: Session, lost: Lost, publication: Publication, start: int, count: int, terms: Terms, now: float
    ) -> None:
        if publication.expired(now):
            self._engine.stats.dropped_expired += count
            return
        windows: list[Window] = []
        if not terms.via:  # those of shared subscriptions went to one broker alone
            topic = publication.topic.decode("utf-8")
            windows = [window for window in lost.windows if window.wants(topic)]
        name = origin_name(self._fabric, publication.origin)
        stop = start + count
        while start < stop:
            had = any_has(windows, name, publication.sequence + start)
            end = start + 1
            while end < stop and any_has(windows, name, publication.sequence + end) == had:
                end += 1
            if not had:
                self.messages += end - start
                self._engine.router.deliver(session, publication.cut(start, end - start), terms, now)
            start = end

    def _say_installed(self, peer: Peer, move: int) -> None:
        peer.send_held(frame(frames.INSTALLED, number(move)))

    # --- where the client was lost ------------------------------------------------------------------------------------------

    def give(self, session: Session, now: float) -> None:
        """The client went on elsewhere with this session: hand over what is here of it."""
        if session.client_id in self.copies:
            return
        session.will = None  # the client is there
        session.will_due_at = 0.0
        session.expires_at = 0.0
        if session.durable:
            self._engine.effects.records.append(records.session(session, self._engine.effects.wall_offset, False))
        self.copies[session.client_id] = Copy(session, now)
        self._look_at = now

    def _go_on(self, copy: Copy, now: float) -> None:
        session = copy.session
        client_id = session.client_id
        departures = self._fabric.handover.departures
        if self._engine.sessions.by_client.get(client_id) is not session:
            self.copies.pop(client_id, None)
            return
        copy.next_at = now + copy.retry_s
        if client_id in departures.by_client or len(departures.by_move) >= MAX_AT_ONCE:
            return
        presence = self._fabric.presence
        name = presence.later(session)
        if not name:
            if now - copy.held_at >= NOWHERE_S:
                self._engine.sessions.end(session, now)
            return
        copy.held_at = now
        if not presence.continues(name, client_id):
            self._engine.sessions.end(session, now)
            return
        for other in self._fabric.peers.values():
            if not other.up and now - other.last_seen < LOST_LATELY_S:
                return
        copy.retry_s = min(2 * copy.retry_s, MAX_RETRY_S)
        if not departures.begin(self._fabric.rng.getrandbits(60), session, name, None, now, leftovers=True):
            self.given += 1

    def own(self, session: Session, now: float) -> bytes:
        """What is here of a session that is about to come back, for :meth:`installed`."""
        return encode_session(self._fabric, session, now)

    # --- time -----------------------------------------------------------------------------------------------------------

    def progressed(self, peer: Peer) -> None:
        """All that a broker numbered before it was asked has come."""
        self._check(peer)

    def peer_up(self, peer: Peer, now: float) -> None:
        for window, _ in list(self._owners.items()):
            if peer.name not in window.complete and window not in self._open.get(peer.name, {}):
                self._open.setdefault(peer.name, {})[window] = None
                window.begins[peer.name] = len(self._log.setdefault(peer.name, []))
        peer.fenced = peer.fenced or peer.name in self._open
        for copy in self.copies.values():
            copy.next_at = now
        self._look_at = now

    def peer_down(self, peer: Peer, now: float) -> None:
        for offer in list(self.offers.values()):
            if offer.origin == peer.name:
                del self.offers[offer.move]

    def peer_gone(self, peer: Peer, now: float) -> None:
        for client_id in [client_id for client_id, entries in self.by_client.items() if peer.name in entries]:
            session = self._engine.sessions.by_client.get(client_id)
            if session is not None:
                self._remove(session, peer.name)
        self._close(peer.name)

    def settle(self, now: float) -> None:
        if self._fresh:
            self._open_fresh(now)
        if self.offers:
            for offer in self.offers.values():
                peer = self._fabric.peers.get(offer.origin)
                if not offer.answered and peer is not None:
                    self._answer(offer, peer)
        if self.copies and now >= self._look_at:
            self._look_at = FOREVER
            for copy in list(self.copies.values()):
                if now >= copy.next_at:
                    self._go_on(copy, now)
                self._look_at = min(self._look_at, copy.next_at)

    def tick(self, now: float) -> None:
        self.settle(now)
        if self._open and now >= self._ask_again_at:
            self._ask_again_at = now + ASK_S  # the question may have got lost
            self._ask_all()
        for offer in list(self.offers.values()):
            if now >= offer.deadline:
                del self.offers[offer.move]
                peer = self._fabric.peers.get(offer.origin)
                if peer is not None:
                    _refuse(peer, offer.move, "the session did not come")

    def next_deadline(self) -> float:
        deadline = FOREVER
        for offer in self.offers.values():
            deadline = min(deadline, offer.deadline)
        if self.copies:
            deadline = min(deadline, self._look_at)
        if any(name in self._fabric.peers and self._fabric.peers[name].up for name in self._open):
            deadline = min(deadline, self._ask_again_at)
        return deadline


def _refuse(peer: Peer, move: int, reason: str) -> None:
    peer.send(frame(frames.ABANDON, number(move), number(0), blob(reason.encode("utf-8"))))
