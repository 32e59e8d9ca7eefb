"""From a broker to the cloud: who relays what, and until when its origin keeps it (Hasenburg et al., section II-B).

The origin of a message is responsible for it. What clients publish here in topics of class ``broadcast`` stands, from QoS 1
on, in the queue of the :class:`RelaySession` (journal, files and bounds are those of another broker's session) until the cloud
has acknowledged it, whoever relayed it. A leader relays for its members, and is allowed to forget everything at any moment::

    leading   ──► the queue goes to the cloud itself
    PUSHING   ──► a leader said go: the queue goes to it, as PUSHED messages
    LIVE      ──► all of it did. From here on the leader takes what it is flooded with anyway, and nothing is sent twice
    waiting   ──► there is no leader with a cloud at the moment

Every go of a leader (RELAY_STATE) has a number, its *turn*; 0 is a stop. A member that hears go begins again with all that is
not confirmed; what belongs to another turn is ignored. A member that has waited for long asks (RELAY_ASK). RELAY_LIVE says up
to which number everything was pushed. RELAYED says up to which number the cloud has everything; that is true whoever says it.

Messages may thus reach the cloud twice. Their identity goes with them, so that no broker takes them twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.fabric import errands, frames, messages
from nearcast.fabric.frames import frame
from nearcast.fabric.identities import Identity
from nearcast.fabric.outgoing import PeerSession
from nearcast.fabric.parts import Peer
from nearcast.fabric.relay_sources import Source, UnderWay, Waiting
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

MAX_BACKLOGS_BYTES: Final = 67_108_864
"""Of all members together."""

RESUME_S: Final = 0.5
"""How often a leader looks whether it can go on for those it stopped."""

ASK_S: Final = 1.0
"""How often a member without a turn asks its leader for one. Leaders give it unasked; this is for what got lost between two
views."""

PACE_S: Final = 0.05
CHECK_S: Final = 1.0


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
        self._ask_at = 0.0
        # As a leader.
        self._own: Source | None = None
        self.sources: dict[str, Source] = {}
        self._last_turn = 0
        self._backlogs_bytes = 0
        self._has_backlog = False
        # By the number under which the cloud knows it: what it was given. Its window is the bound.
        self._tokens: dict[int, UnderWay] = {}
        self._last_token = 0
        # By member: how far the cloud has its messages, where it was not told so yet.
        self._reached: dict[str, int] = {}
        self._pace_at = 0.0
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
        if not self.turn or not self._broadcast.leader_has_cloud:
            return "held"
        return "live" if self.is_live else "catching up"

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
            self._open(self._fabric.limits.max_packet_bytes, now)
        elif self._own is not None:
            session.drain(now)
        else:
            session.closed()

    def _open(self, max_packet_bytes: int, now: float) -> None:
        """There is a way for the queue: begin with what is not confirmed."""
        session = self.session
        session.max_packet_bytes = max_packet_bytes
        session.opened(session.last_confirmed, now)

    def leader_changed(self, now: float) -> None:
        """Another broker leads: wait for its go."""
        self.turn = 0
        self.is_live = False
        self._own = None
        self._ask_at = now + ASK_S
        self.session.closed()
        self.role_changed(now)

    def told_state(self, peer: Peer, turn: int, now: float) -> None:
        """A leader said go, or stop."""
        if peer.name != self._broadcast.formation.leader:
            return
        self.turn = turn
        self.is_live = False
        self._ask_at = now + ASK_S
        if turn:
            self._open(peer.session.max_packet_bytes, now)
        else:
            self.session.closed()

    def link_lost(self, peer: Peer, now: float) -> None:
        """What was said on a link is forgotten with it, at both ends."""
        self.forget(peer.name)
        self.told_state(peer, 0, now)

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
        if self._broadcast.leads and self._cloud_up and peer.up:
            self.forget(peer.name)
            self._last_turn += 1
            self.sources[peer.name] = Source(peer, self._last_turn)
            peer.send(frame(frames.RELAY_STATE, number(self._last_turn)))

    def go_all(self, now: float) -> None:
        """Have those members do so that do not."""
        for name in self._broadcast.members():
            peer = self._fabric.peers.get(name)
            if peer is not None and name not in self.sources:
                self.go(peer, now)

    def stop(self, source: Source, now: float) -> None:
        """There is no room for a member's messages: it keeps them."""
        peer = source.peer
        if peer is not None and self.sources.get(peer.name) is source:
            self.forget(peer.name)
            self.stops += 1
            peer.send(frame(frames.RELAY_STATE, number(0)))

    def forget(self, name: str) -> None:
        """A broker is no longer served here. It is still told when the cloud has what that was given."""
        source = self.sources.pop(name, None)
        if source is not None:
            self._backlogs_bytes -= source.backlog_bytes
            source.backlog.clear()
            source.backlog_bytes = 0

    def live(self, peer: Peer, turn: int, position: int, now: float) -> None:
        """A member has pushed everything up to this number."""
        source = self.sources.get(peer.name)
        if source is not None and source.turn == turn:
            source.live_after = position
            if source.backlog:
                # The numbers up to here count once the last message that was pushed is done; an empty one stands for them.
                source.backlog.append(Waiting(None, None))
                self._has_backlog = True
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
        # The group does not wait for the cloud. Whoever comes until there is room for it gets it then.
        peer = source.peer
        if peer is not None:
            self._broadcast.coverage.carry_missing(publication, peer.name, peer.epoch, errand.view, now)
            if self._broadcast.leads:
                errand = errands.Errand(errand.kind, errand.rest, self._broadcast.formation.view.version, errand.turn)
        source.backlog.append(Waiting(publication, errand))
        source.backlog_bytes += len(publication.packets)
        self._backlogs_bytes += len(publication.packets)
        self._has_backlog = True
        if source.backlog_bytes > MAX_BACKLOG_BYTES or self._backlogs_bytes > MAX_BACKLOGS_BYTES:
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
        if cloud is None or not cloud.takes_unreliable() or publication.topic[:1] == b"$":
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
            if peer.epoch == source.epoch:  # else its numbers, and what they were of, are gone
                self._reached[peer.name] = max(source.reached, self._reached.get(peer.name, 0))
        else:  # also when another broker leads by now
            self.session.confirmed(source.reached, now)

    def pump(self, now: float) -> None:
        """The cloud may have room: give it what waited, in turn."""
        cloud = self._broadcast.cloud
        if cloud is None or not cloud.connected:
            return
        waiting = [source for source in self.sources.values() if source.backlog]
        while waiting and cloud.has_room():
            for source in waiting:
                if not source.backlog:
                    continue
                waited = source.backlog.popleft()
                if waited.publication is not None and waited.errand is not None:
                    source.backlog_bytes -= len(waited.publication.packets)
                    self._backlogs_bytes -= len(waited.publication.packets)
                    self._give(source, waited.publication, waited.errand, now)
                else:
                    source.given(source.live_after).done = True
                    self._advanced(source, now)
                if not cloud.has_room():
                    break
            waiting = [source for source in waiting if source.backlog]
        self._has_backlog = bool(waiting)

    # --- time -----------------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        if self._has_backlog:
            self.pump(now)
        if self.session.ready and not self.is_live:
            self.session.drain(now)
        if self._reached:
            for name, reached in self._reached.items():
                peer = self._fabric.peers.get(name)
                if peer is not None:
                    peer.send(frame(frames.RELAYED, number(reached)))
            self._reached = {}

    def tick(self, now: float) -> None:
        session = self.session
        self._pace_at = now + PACE_S
        if session.catching_up:
            session.drain(now)
        if now >= self._resume_at:
            self._resume_at = now + RESUME_S
            self._resume(now)
        if now >= self._next_check:
            self._next_check = now + CHECK_S
            spool = self._fabric.channels.spool
            if session.useless_files and spool is not None:
                files, session.useless_files = session.useless_files, []
                for file_number in files:
                    spool.remove(session.number, file_number)
            session.try_files_again(now)

    def _resume(self, now: float) -> None:
        broadcast = self._broadcast
        if broadcast.leads:
            cloud = broadcast.cloud
            if cloud is not None and cloud.has_room():
                self.go_all(now)
        elif (not self.turn or not broadcast.knows_coverage()) and now >= self._ask_at:
            leader = self._leader()
            if leader is not None and leader.send(frame(frames.RELAY_ASK, number(0 if self.turn else 1))):
                self._ask_at = now + ASK_S

    def asked(self, peer: Peer, wants_turn: bool, now: float) -> None:
        """A member has waited in vain for a go, or for word of what is covered of it."""
        if self._broadcast.leads and peer.name in self._broadcast.formation.view.members:
            self._broadcast.coverage.tell_again(peer.name)
            if wants_turn:
                self.go(peer, now)

    def next_deadline(self) -> float:
        deadline = min(self._next_check, self._resume_at)
        return min(deadline, self._pace_at) if self.session.catching_up else deadline


def _served(via: str) -> list[str]:
    """The shared subscriptions that a ``via`` names, whoever serves them."""
    return [name.lstrip(SERVED) for name in via.split(VIA_SEPARATOR) if name]
