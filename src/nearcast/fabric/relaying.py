"""From a broker to the cloud: who relays what, and until when its origin keeps it (Hasenburg et al., section II-B).

The origin of a message is responsible for it. What clients publish here in topics of class ``broadcast`` stands, from QoS 1
on, in the queue of the :class:`RelaySession` (journal, files and bounds are those of another broker's session) until the cloud
has acknowledged it, whoever relayed it. A leader relays for its members, and is allowed to forget everything at any moment::

    leading   ──► the queue goes to the cloud itself
    PUSHING   ──► a leader said go: the queue goes to it, as PUSHED messages
    LIVE      ──► all of it did. From here on the leader takes what it is flooded with anyway, and nothing is sent twice
    waiting   ──► there is no leader with a cloud at the moment

Every go of a leader (RELAY_STATE) has a number, its *turn*; 0 is a stop. A member that hears go begins again with all that is
not confirmed; what belongs to another turn is ignored. RELAY_LIVE says up to which number everything was pushed. RELAYED
says up to which number the cloud has everything; that is true whoever says it.

Messages may thus reach the cloud twice. Their identity goes with them, so that no broker takes them twice.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from nearcast.fabric import errands, frames, messages
from nearcast.fabric.frames import frame
from nearcast.fabric.identities import Identity
from nearcast.fabric.outgoing import PeerSession
from nearcast.fabric.parts import Peer
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.publication import Publication, Terms
from nearcast.mqtt.records import number
from nearcast.mqtt.routing import SERVED, VIA_SEPARATOR, Target
from nearcast.mqtt.subscriptions import Subscription

if TYPE_CHECKING:
    from nearcast.fabric.broadcast import Broadcast

RELAY_NAME: Final = "\0"
"""In the place of a broker's name, which is printable."""

MAX_BACKLOG_BYTES: Final = 8_388_608
"""Of one member, at its leader, before the leader says stop. A member that pushes has less than ``max_unconfirmed_bytes``
under way."""

RESUME_S: Final = 0.5
"""How often a leader looks whether it can go on for those it stopped."""

CHECK_S: Final = 1.0


class _UnderWay:
    """A message that was given to the cloud."""

    def __init__(self, source: Source, sequence: int) -> None:
        self.source = source
        self.sequence = sequence
        self.done = False


class Waiting:
    """Messages that the cloud has no room for yet. Empty: all that was pushed is in front of it."""

    def __init__(self, publication: Publication | None, errand: errands.Errand | None) -> None:
        self.publication = publication
        self.errand = errand


class Source:
    """Whose messages are relayed here: this broker's own (no peer), or a member's, in one turn."""

    def __init__(self, peer: Peer | None, turn: int) -> None:
        self.peer = peer
        self.turn = turn
        #: Messages up to this one were pushed: those after it are taken from what is flooded. None: not that far yet.
        self.live_after = -1
        self.backlog: deque[Waiting] = deque()
        self.backlog_bytes = 0
        self.reached = 0
        self.told = 0
        self._under_way: deque[_UnderWay] = deque()

    def given(self, sequence: int) -> _UnderWay:
        entry = _UnderWay(self, sequence)
        self._under_way.append(entry)
        return entry

    def advance(self) -> None:
        """See how far everything is done."""
        under_way = self._under_way
        while under_way and under_way[0].done:
            self.reached = under_way.popleft().sequence


class RelaySession(PeerSession):
    """This broker's messages that the cloud is to have. See the module."""

    def __init__(self, session_number: int, effects: Effects, max_messages: int, max_bytes: int) -> None:
        super().__init__(RELAY_NAME, session_number, effects, max_messages, max_bytes)
        self.relay: Relay | None = None

    def takes(self) -> bool:
        return self.relay is not None and self.relay.takes()

    def emptied(self, now: float) -> None:
        if self.relay is not None:
            self.relay.emptied(now)

    def deliver(self, publication: Publication, terms: Terms, now: float) -> int:
        if self.relay is not None:
            self.relay.published(publication)
        return super().deliver(publication, terms, now)

    def send_reliable(self, publication: Publication, via: str, flags: int, now: float) -> None:
        if self.relay is not None:
            self.relay.send_own(publication, via, flags, now)

    def forward(self, publication: Publication, via: str, now: float) -> None:
        if self.relay is not None:
            self.relay.send_own_unreliable(publication, via, now)

    def orphans(self) -> list[tuple[str, Publication]]:
        return []  # its `via` says who was served, not who is to be


class Relay:
    """What goes to the cloud through this broker, and what of this broker goes through its leader."""

    def __init__(self, broadcast: Broadcast, session: RelaySession) -> None:
        self._broadcast = broadcast
        self._fabric = broadcast.fabric
        self.session = session
        session.relay = self
        target = Target(Subscription(session, "#", 2, retain_as_published=True))
        target.informed = True
        self.target = target
        # As a member.
        self.turn = 0
        self.is_live = False
        self._turns: dict[str, int] = {}
        # As a leader.
        self._own: Source | None = None
        self.sources: dict[str, Source] = {}
        self._last_turn = 0
        self._tokens: dict[int, _UnderWay] = {}
        self._last_token = 0
        self._changed: dict[str, Source] = {}
        self._next_check = 0.0
        self._resume_at = 0.0
        #: Messages relayed to the cloud, of which for members; QoS 0 messages that found no room; stops.
        self.relayed_messages = 0
        self.relayed_for_members = 0
        self.dropped_messages = 0
        self.refused_messages = 0
        self.stops = 0

    @property
    def _cloud_up(self) -> bool:
        cloud = self._broadcast.cloud
        return cloud is not None and cloud.connected

    def state(self) -> str:
        """In a word, for people."""
        if self._broadcast.leads:
            return "live" if self._cloud_up else "no cloud"
        return "live" if self.is_live else "catching up" if self.turn else "held"

    # --- this broker's own messages -------------------------------------------------------------------------------------

    def takes(self) -> bool:
        cloud = self._broadcast.cloud
        if self._own is not None:
            return cloud is not None and cloud.connected and cloud.has_room()
        leader = self._leader()
        return not self.is_live and self.turn > 0 and leader is not None and leader.has_room()

    def _leader(self) -> Peer | None:
        return self._fabric.peers.get(self._broadcast.formation.leader)

    def role_changed(self, now: float) -> None:
        """This broker leads now, or another one does, or the cloud came."""
        session = self.session
        if not self._broadcast.leads:
            if self._own is not None:
                self._own = None
                session.closed()
            return
        self.turn = 0
        self.is_live = False
        if self._own is None and self._cloud_up:
            self._own = Source(None, 0)
            session.opened(session.last_confirmed, now)
        elif self._own is not None:
            session.drain(now)
        else:
            session.closed()

    def leader_changed(self, now: float) -> None:
        """Another broker leads: wait for its go."""
        self.turn = 0
        self.is_live = False
        self._own = None
        self.session.closed()
        self.role_changed(now)
        leader = self._leader()
        if leader is not None and not self._broadcast.leads and leader.name in self._turns:
            self.told_state(leader, self._turns[leader.name], now)

    def told_state(self, peer: Peer, turn: int, now: float) -> None:
        """A leader said go, or stop. It may say so before we know that it is our leader."""
        self._turns[peer.name] = turn
        if peer.name != self._broadcast.formation.leader or self._broadcast.leads:
            return
        self.turn = turn
        self.is_live = False
        if turn:
            self.session.opened(self.session.last_confirmed, now)
        else:
            self.session.closed()

    def link_lost(self, peer: Peer, now: float) -> None:
        """What was said on a link is forgotten with it, at both ends."""
        self.forget(peer.name)
        self.told_state(peer, 0, now)
        del self._turns[peer.name]

    def told_relayed(self, last: int, now: float) -> None:
        """The cloud has everything of ours up to this number."""
        self.session.confirmed(last, now)

    def emptied(self, now: float) -> None:
        if self._own is None and self.turn and not self.is_live:
            leader = self._leader()
            if leader is not None:
                self.is_live = True
                # Held like the messages that are flooded, so that it cannot overtake those that it does not cover.
                position = max(self.session.last_sent, self._fabric.engine.router.next_sequence - 1)
                leader.send_held(frame(frames.RELAY_LIVE, number(self.turn), number(position)))

    def send_own(self, publication: Publication, via: str, flags: int, now: float) -> None:
        flood = errands.parse(via)
        own = self._own
        if own is not None:
            if flags & messages.VOID:
                own.given(publication.sequence + publication.count - 1).done = True
                self._advanced(own, now)
            else:
                self._give(own, publication, flood, now)
            return
        leader = self._leader()
        if leader is None or flags & messages.VOID:
            return  # what is void needs no relaying: RELAY_LIVE, which follows, covers its numbers
        head = messages.head(publication, 0, errands.pushed(self.turn, flood.view) + flood.rest, now, 0)
        leader.send_held(head + publication.packets)

    def published(self, publication: Publication) -> None:
        """A client of ours published messages."""
        self._broadcast.adaptation.published(publication.count)

    def send_own_unreliable(self, publication: Publication, via: str, now: float) -> None:
        """QoS 0: now or never. A member's leader has it already."""
        self.published(publication)
        if self._broadcast.leads:
            self._give_unreliable(publication, self._fabric.name, self._fabric.epoch, errands.parse(via), now)

    # --- for members ----------------------------------------------------------------------------------------------------

    def go(self, peer: Peer, now: float) -> None:
        """Have a member give us what it has for the cloud, from what is not confirmed on."""
        if not self._broadcast.leads or not self._cloud_up or not peer.up:
            return
        self._last_turn += 1
        self.sources[peer.name] = Source(peer, self._last_turn)
        peer.send(frame(frames.RELAY_STATE, number(self._last_turn)))

    def stop(self, source: Source, now: float) -> None:
        """There is no room for a member's messages: it keeps them."""
        peer = source.peer
        if peer is not None and self.sources.get(peer.name) is source:
            del self.sources[peer.name]
            self.stops += 1
            peer.send(frame(frames.RELAY_STATE, number(0)))

    def forget(self, name: str) -> None:
        """A broker is no longer served here."""
        self.sources.pop(name, None)
        self._changed.pop(name, None)

    def live(self, peer: Peer, turn: int, position: int, now: float) -> None:
        """A member has pushed everything up to this number."""
        source = self.sources.get(peer.name)
        if source is not None and source.turn == turn:
            source.live_after = position
            if source.backlog:
                # The numbers up to here count once the last message that was pushed is done; an empty one stands for them.
                source.backlog.append(Waiting(None, None))
            else:
                source.given(position).done = True
                self._advanced(source, now)

    def pushed(self, peer: Peer, publication: Publication, errand: errands.Errand, now: float) -> None:
        """Messages of a member, to be relayed."""
        source = self.sources.get(peer.name)
        if source is not None and source.turn == errand.turn:
            self._offer(source, publication, errand, now)
        elif source is None:
            peer.send(frame(frames.RELAY_STATE, number(0)))

    def flooded(self, peer: Peer, publication: Publication, errand: errands.Errand, now: float) -> None:
        """Messages of a member, as every broker of the group gets them."""
        source = self.sources.get(peer.name)
        if publication.qos == 0:
            if self._broadcast.leads:
                self._give_unreliable(publication, peer.name, peer.epoch, errand, now)
        elif source is not None and source.live_after >= 0:
            new = publication.sequence + publication.count - 1 - source.live_after
            if new >= publication.count:
                self._offer(source, publication, errand, now)
            elif new > 0:
                self._offer(source, publication.cut(publication.count - new, new), errand, now)

    def _offer(self, source: Source, publication: Publication, errand: errands.Errand, now: float) -> None:
        cloud = self._broadcast.cloud
        if not source.backlog and cloud is not None and cloud.connected and cloud.has_room():
            self._give(source, publication, errand, now)
            return
        source.backlog.append(Waiting(publication, errand))
        source.backlog_bytes += len(publication.packets)
        if source.backlog_bytes > MAX_BACKLOG_BYTES:
            self.stop(source, now)

    # --- to the cloud ---------------------------------------------------------------------------------------------------

    def _give(self, source: Source, publication: Publication, errand: errands.Errand, now: float) -> None:
        """Give reliable messages to the cloud, which keeps them until they are acknowledged.

        The cloud does not give them back to us, so this is the moment at which the whole group must have them, also those
        that came after they were flooded.
        """
        cloud = self._broadcast.cloud
        if cloud is None:
            return
        peer = source.peer
        origin = self._fabric.name if peer is None else peer.name
        epoch = self._fabric.epoch if peer is None else peer.epoch
        self._broadcast.coverage.carry_missing(publication, origin, epoch, errand.view, now)
        served = _served(errand.rest)
        self.relayed_messages += publication.count
        if peer is not None:
            self.relayed_for_members += publication.count
        refused = publication.topic[:1] == b"$"
        for index in range(publication.count):
            entry = source.given(publication.sequence + index)
            if refused:  # topics like this are the cloud's own
                entry.done = True
                continue
            self._last_token += 1
            self._tokens[self._last_token] = entry
            stamp = publication.stamp if index == publication.count - 1 else 0
            identity = Identity(origin, epoch, entry.sequence, served, self._fabric.name, stamp)
            self._witness(publication, index, now)
            cloud.relay(publication, index, identity, self._last_token, now)
        if refused:
            self.refused_messages += publication.count
            self._advanced(source, now)

    def _give_unreliable(self, publication: Publication, origin: str, epoch: int, errand: errands.Errand, now: float) -> None:
        self._broadcast.coverage.carry_missing(publication, origin, epoch, errand.view, now)
        served = _served(errand.rest)
        cloud = self._broadcast.cloud
        if cloud is None or not cloud.connected or not cloud.has_room() or publication.topic[:1] == b"$":
            self.dropped_messages += publication.count
            return
        self.relayed_messages += publication.count
        for index in range(publication.count):
            stamp = publication.stamp if index == publication.count - 1 else 0
            identity = Identity(origin, epoch, publication.sequence + index, served, self._fabric.name, stamp)
            self._witness(publication, index, now)
            cloud.relay(publication, index, identity, 0, now)

    def _witness(self, publication: Publication, index: int, now: float) -> None:
        witness = self._fabric.engine.effects.witness
        if witness is not None:
            witness.relayed(publication, index, now)

    def relayed(self, token: int, accepted: bool, now: float) -> None:
        """The cloud has a message, or refuses it, which is as final."""
        entry = self._tokens.pop(token, None)
        if entry is None:
            return
        entry.done = True
        if not accepted:
            self.refused_messages += 1
        self._advanced(entry.source, now)

    def _advanced(self, source: Source, now: float) -> None:
        before = source.reached
        source.advance()
        if source.reached == before:
            return
        peer = source.peer
        if peer is not None:
            self._changed[peer.name] = source
        elif source is self._own:
            self.session.confirmed(source.reached, now)

    def pump(self, now: float) -> None:
        """The cloud may have room: give it what waited, in turn."""
        cloud = self._broadcast.cloud
        if cloud is None or not cloud.connected:
            return
        waiting = [source for source in self.sources.values() if source.backlog]
        while waiting and cloud.has_room():
            for source in waiting:
                waited = source.backlog.popleft()
                if waited.publication is not None and waited.errand is not None:
                    source.backlog_bytes -= len(waited.publication.packets)
                    self._give(source, waited.publication, waited.errand, now)
                else:
                    source.given(source.live_after).done = True
                    self._advanced(source, now)
                if not cloud.has_room():
                    break
            waiting = [source for source in waiting if source.backlog]
        self.session.drain(now)

    # --- time -----------------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        self.pump(now)
        if self._changed:
            for source in self._changed.values():
                peer = source.peer
                if peer is not None and source.reached > source.told:
                    source.told = source.reached
                    peer.send(frame(frames.RELAYED, number(source.reached)))
            self._changed = {}

    def tick(self, now: float) -> None:
        session = self.session
        if session.catching_up:
            session.drain(now)
        if now >= self._resume_at:
            self._resume_at = now + RESUME_S
            cloud = self._broadcast.cloud
            if self._broadcast.leads and cloud is not None and cloud.connected and cloud.has_room():
                for name in self._broadcast.members():
                    peer = self._fabric.peers.get(name)
                    if peer is not None and peer.up and name not in self.sources:
                        self.go(peer, now)
        if now >= self._next_check:
            self._next_check = now + CHECK_S
            spool = self._fabric.channels.spool
            if session.useless_files and spool is not None:
                files, session.useless_files = session.useless_files, []
                for file_number in files:
                    spool.remove(session.number, file_number)
            session.try_files_again(now)

    def next_deadline(self) -> float:
        if self.session.catching_up:
            return min(self._next_check, self._resume_at, self._next_check - CHECK_S + 0.05)
        return min(self._next_check, self._resume_at)


def _served(via: str) -> list[str]:
    """The shared subscriptions that a ``via`` names, whoever serves them."""
    return [name.lstrip(SERVED) for name in via.split(VIA_SEPARATOR) if name]
