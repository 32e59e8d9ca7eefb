"""The ring of replica sets in brokers: every set hosted here is one of its nodes, and any broker uses the directory.

Joins :mod:`nearcast.chord`, which knows neither brokers nor Raft, to :mod:`nearcast.fabric.replica_sets`:

* What a ring node proposes becomes records of the topic ``$nearcast/directory`` of its set, so it is replicated, kept and
  recovered as any topic is. All replicas apply these records in their order.
* ``Confirm`` is a read of the set's consensus: answered once its leader has heard from a majority, after everything that was
  committed by then is applied here.
* Messages are frames of one kind, ``RING``, from broker to broker. Whoever has no link now is unreachable, and another
  replica is asked.

=========================== ======================================================================================
``$nearcast/directory``       commands (:mod:`nearcast.chord.commands`)
``$nearcast/directory/state`` snapshots: after which record, part, parts (8, 4 and 4 bytes), then that much of the state
=========================== ======================================================================================

A set joins when it is hosted. The first of all, by name, founds the ring once every other set has said that it is on none.
"""

from __future__ import annotations

import functools
import random
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from nearcast.chord import snapshots
from nearcast.chord.calls import Caller
from nearcast.chord.contacts import Contact
from nearcast.chord.effects import Confirm, Effect, Finished, Propose, Send
from nearcast.chord.messages import AnyBody, Check, Checked, Message, NotLeader, Route, Value, Write, decode, encode
from nearcast.chord.node import RingNode
from nearcast.chord.seeking import Seeker
from nearcast.chord.settings import RingSettings
from nearcast.chord.state import OUT
from nearcast.errors import RecordUnavailable, RemoteProtocolError
from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.fabric.parts import FOREVER, Part, Peer
from nearcast.topiclog.entries import EntryWriter

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric
    from nearcast.fabric.hosted_sets import HostedSet
    from nearcast.fabricconfig import ReplicaSet

COMMANDS: Final = b"$nearcast/directory"
STATE: Final = b"$nearcast/directory/state"

SNAPSHOT_RECORDS: Final = 10_000
"""Commands after which a leader puts its state in the log, so that a start need not read them all."""

PART_BYTES: Final = 1_048_576
PART_HEAD: Final = struct.Struct(">QII")
MAX_PARTS_LOOKED_AT: Final = 65_536
"""How far back a whole snapshot is looked for: behind parts of one whose leader was lost while it wrote it."""

FOUND_AFTER_S: Final = 3.0
"""How long all others must have been on no ring. A set that others know of, and this broker not yet, shows up by then."""

FOUND_LOOK_S: Final = 0.5

QOS: Final = 1

STANDINGS: Final = ("out", "joining", "in", "leaving")

Answered = Callable[[Value | None, float], None]
"""Takes the directory's answer, or none if there was none in time (a write may have been done all the same)."""


class RingMember:
    """One replica of a set that is hosted here, as a node of the ring. ``applied``: how many commands of the log it has."""

    def __init__(self, hosted: HostedSet, node: RingNode) -> None:
        self.hosted = hosted
        self.node = node
        self.applied = 0
        self.snapshot_at = 0
        """After which command the newest snapshot is."""
        self.term = 0
        self.proposed: list[Propose] = []
        self.commit = -1
        self.led_by = ""

    @property
    def leads(self) -> bool:
        return self.node.leads

    def recover(self, now: float) -> list[Effect]:
        """Begin with the newest snapshot that is whole, if there is one, and apply what came after it."""
        found = newest_snapshot(self.hosted)
        if found is not None:
            self.applied, state = found
            self.snapshot_at = self.applied
            self.node.restore(snapshots.unpack(state))
        return self.apply(now)

    def apply(self, now: float) -> list[Effect]:
        """What the set has committed."""
        hosted = self.hosted
        if hosted.commit == self.commit:
            return []
        self.commit = hosted.commit
        effects: list[Effect] = []
        last = hosted.last_index(COMMANDS)
        if self.applied < last and self.applied + 1 < hosted.first_index(COMMANDS):
            # This replica got the log anew, from somewhere behind: a snapshot covers what it missed.
            found = newest_snapshot(hosted)
            if found is not None and found[0] > self.applied:
                self.applied, state = found
                self.node.restore(snapshots.unpack(state))
        while self.applied < last:
            self.applied += 1
            try:
                entry = bytes(hosted.record(COMMANDS, self.applied).payload)
                effects += self.node.commit(entry, now)
            except RemoteProtocolError:
                continue  # somebody else's record in this topic: it is none of ours on any replica
        return effects

    def write(self, now: float) -> list[Effect]:
        """Hand what was proposed to consensus, as one entry."""
        proposed, self.proposed = self.proposed, []
        hosted = self.hosted
        writer = EntryWriter()
        time_us = hosted.time_us(now)
        for propose in proposed:
            writer.run(COMMANDS, b"", QOS, b"", [propose.entry], time_us)
        if self.leads and hosted.propose_own(writer, now):
            return []
        effects: list[Effect] = []
        for propose in proposed:
            effects += self.node.dropped(propose.number, now)
        return effects

    def snapshot(self, now: float) -> None:
        """Put the state in the log, if much was applied since the last time."""
        if not self.leads or self.applied - self.snapshot_at < SNAPSHOT_RECORDS:
            return
        self.snapshot_at = self.applied
        data = snapshots.pack(self.node.state)
        parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
        for number, part in enumerate(parts):
            writer = EntryWriter()
            payload = PART_HEAD.pack(self.applied, number, len(parts)) + part
            writer.run(STATE, b"", QOS, b"", [payload], self.hosted.time_us(now))
            if not self.hosted.propose_own(writer, now):
                return  # the next one, or the next leader's, will be whole

    def follow_leader(self, now: float) -> list[Effect]:
        """Tell the node who leads; after everything committed is applied."""
        hosted = self.hosted
        if hosted.leads and (not self.node.leads or hosted.term != self.term):
            self.term = hosted.term
            self.led_by = hosted.leader
            self.proposed.clear()
            return self.node.lead(now)
        if not hosted.leads and (self.node.leads or hosted.leader != self.led_by):
            self.led_by = hosted.leader
            self.proposed.clear()
            return self.node.follow(hosted.leader, now)
        return []


def newest_snapshot(hosted: HostedSet) -> tuple[int, bytes] | None:
    """The newest whole snapshot of a set's log: after which command, and the state."""
    last = hosted.last_index(STATE)
    first = max(hosted.first_index(STATE), last - MAX_PARTS_LOOKED_AT)
    parts: dict[tuple[int, int], dict[int, bytes]] = {}
    for index in range(last, first - 1, -1):
        try:
            payload = bytes(hosted.record(STATE, index).payload)
        except RecordUnavailable:
            return None
        if len(payload) < PART_HEAD.size:
            continue
        after, number, count = PART_HEAD.unpack_from(payload)
        held = parts.setdefault((after, count), {})
        held[number] = payload[PART_HEAD.size :]
        if len(held) == count:
            return after, b"".join(held[part] for part in range(count))
    return None


class Ring(Part):
    """See the module. One per broker; it does nothing unless ``enabled``."""

    def __init__(self, fabric: Fabric, enabled: bool, settings: RingSettings | None = None) -> None:
        self.enabled = enabled
        self.settings = RingSettings() if settings is None else settings
        self.members: dict[str, RingMember] = {}
        self._fabric = fabric
        self._rng = random.Random(fabric.rng.getrandbits(64)) if enabled else random.Random(0)
        self._outgoing: list[Effect] = []
        self._caller = Caller(self.settings, self._rng, self._outgoing)
        self.seeker = Seeker(self.settings, self._rng, self._outgoing, self._caller)
        self._waiting: dict[int, Answered] = {}
        self._known: dict[str, ReplicaSet] = {}
        self._looped: list[Message] = []
        self._leaving: set[str] = set()
        self._alone_since: dict[str, float] = {}
        """Sets that all others said of that they are on no ring: since when."""
        self._look_at = 0.0
        fabric.add_part(self, [frames.RING])

    # --- what is wanted --------------------------------------------------------------------------------------------------

    def get(self, topic: str, answered: Answered, now: float) -> None:
        """Read a topic's record."""
        self._waiting[self.seeker.get(topic, now)] = answered

    def write(self, write: Write, answered: Answered, now: float) -> None:
        """Change a topic's record, or remove it, if a condition holds."""
        self._waiting[self.seeker.write(write, now)] = answered

    def leave_ring(self, set_name: str, now: float) -> None:
        """A set is to leave the ring in order, before it is given up. To be told to all brokers that host it."""
        self._leaving.add(set_name)
        member = self.members.get(set_name)
        if member is not None:
            self._do(member, member.node.leave(now), now)

    def has_left_ring(self, set_name: str) -> bool:
        """Whether a set hosted here is on no ring, as far as this replica knows."""
        member = self.members.get(set_name)
        return member is None or member.node.state.phase == OUT

    def standing(self, set_name: str) -> str:
        """What a set is on the ring, as far as a broker that hosts it knows: ``out``, ``joining``, ``in``, ``leaving``; of one
        that is not hosted here, or without a ring, nothing."""
        member = self.members.get(set_name)
        return "" if member is None else STANDINGS[member.node.state.phase]

    # --- what happens ----------------------------------------------------------------------------------------------------

    def handle(self, peer: Peer, content: bytes, now: float) -> None:
        if self.enabled:
            self._receive(peer.name, decode(content[1:]), now)

    def peer_down(self, peer: Peer, now: float) -> None:
        if self.enabled:
            self._unreachable(peer.name, now)

    def settle(self, now: float) -> None:
        if not self.enabled:
            return
        self._meet(now)
        again = True
        while again:
            again = self._flush(now)
            for member in list(self.members.values()):
                self._do(member, member.apply(now), now)
                self._do(member, member.follow_leader(now), now)
                for number in member.hosted.take_confirmed():
                    self._do(member, member.node.confirmed(number, now), now)
                if member.proposed:
                    self._do(member, member.write(now), now)
                    again = True
                member.snapshot(now)
            looped, self._looped = self._looped, []
            for message in looped:
                again = True
                self._receive(self._fabric.name, message, now)
            if any(member.hosted.wants_settling for member in self.members.values()):
                self._fabric.sets.settle(now)
                again = True

    def tick(self, now: float) -> None:
        if not self.enabled:
            return
        for member in self.members.values():
            if now >= member.node.next_deadline():
                self._do(member, member.node.tick(now), now)
        self.seeker.tick(now)
        if now >= self._look_at:
            self._look_at = now + FOUND_LOOK_S
            for member in self.members.values():
                self._consider_founding(member, now)

    def next_deadline(self) -> float:
        if not self.enabled:
            return FOREVER
        deadline = self.seeker.next_deadline()
        if self.members:
            deadline = min(deadline, self._look_at)
        for member in self.members.values():
            deadline = min(deadline, member.node.next_deadline())
        return deadline

    # --- messages --------------------------------------------------------------------------------------------------------

    def _receive(self, broker: str, message: Message, now: float) -> None:
        if message.is_request:
            member = self.members.get(message.replica_set)
            if member is None:
                # A set that there is no more is on no ring; of one that is elsewhere another broker knows more.
                is_there = message.replica_set in self._known
                self._send(broker, Message("", message.number, NotLeader("") if is_there else Route(False, ())), now)
            else:
                self._do(member, member.node.receive(broker, message, now), now)
            return
        # Numbers of requests are drawn at random: nobody takes another one's answer for its own.
        for member in list(self.members.values()):
            self._do(member, member.node.receive(broker, message, now), now)
        self.seeker.receive(broker, message, now)

    def _send(self, broker: str, message: Message, now: float) -> bool:
        if broker == self._fabric.name:
            self._looped.append(message)
            return True
        peer = self._fabric.peers.get(broker)
        return peer is not None and peer.send(frame(frames.RING, encode(message)))

    def _unreachable(self, broker: str, now: float) -> None:
        for member in list(self.members.values()):
            self._do(member, member.node.unreachable(broker, now), now)
        self.seeker.unreachable(broker, now)

    # --- effects ---------------------------------------------------------------------------------------------------------

    def _do(self, member: RingMember, effects: list[Effect], now: float) -> None:
        lost: list[str] = []
        for effect in effects:
            if isinstance(effect, Send):
                if not self._send(effect.broker, effect.message, now) and effect.message.is_request:
                    lost.append(effect.broker)
            elif isinstance(effect, Propose):
                member.proposed.append(effect)
            elif isinstance(effect, Confirm):
                member.hosted.confirm(effect.number, now)
        for broker in lost:
            self._do(member, member.node.unreachable(broker, now), now)

    def _flush(self, now: float) -> bool:
        """What the seeker of this broker wants; returns whether there was anything."""
        outgoing = self._outgoing[:]
        self._outgoing.clear()
        for effect in outgoing:
            if isinstance(effect, Send):
                if not self._send(effect.broker, effect.message, now):
                    self.seeker.unreachable(effect.broker, now)
            elif isinstance(effect, Finished):
                answered = self._waiting.pop(effect.number, None)
                if answered is not None:
                    answered(effect.answer if isinstance(effect.answer, Value) else None, now)
        return bool(outgoing)

    # --- sets come and go ------------------------------------------------------------------------------------------------

    def _meet(self, now: float) -> None:
        """Follow which sets there are, and which of them are here."""
        sets = self._fabric.sets
        if self._known != sets.definitions:
            self._known = dict(sets.definitions)
            self.seeker.meet(contact_of(definition) for definition in self._known.values())
            self._alone_since.clear()
        for name in [name for name, member in self.members.items() if sets.hosted.get(name) is not member.hosted]:
            del self.members[name]
        for name, hosted in sets.hosted.items():
            if name not in self.members and name in self._known:
                self._host(name, hosted, now)

    def _host(self, name: str, hosted: HostedSet, now: float) -> None:
        fabric = self._fabric
        node = RingNode(
            fabric.name,
            contact_of(self._known[name]),
            self.settings,
            random.Random(self._rng.getrandbits(64)),
            now,
            fabric.engine.effects.wall_offset,
            [contact_of(definition) for definition in self._known.values()],
        )
        member = self.members[name] = RingMember(hosted, node)
        self._do(member, member.recover(now), now)
        self._do(member, node.leave(now) if name in self._leaving else node.join(now), now)

    # --- founding --------------------------------------------------------------------------------------------------------

    def _consider_founding(self, member: RingMember, now: float) -> None:
        """The first set of all, by name, begins the ring; if there is none yet, which only the others can tell."""
        name = member.node.contact.name
        if name != min(self._known, default=name):
            return
        if not member.leads or member.node.state.phase != OUT or name in self._leaving:
            self._alone_since.clear()
            return
        others = [definition for definition in self._known.values() if definition.name != name]
        for other in others:
            self._caller.ask(contact_of(other), Check(), functools.partial(self._checked, other.name, now), now)
        since = [self._alone_since.get(other.name, FOREVER) for other in others]
        self._alone_since.setdefault(name, now)
        if now - max([*since, self._alone_since[name]]) >= FOUND_AFTER_S:
            self._do(member, member.node.found(now), now)

    def _checked(self, name: str, asked_at: float, body: AnyBody | None, now: float) -> None:
        if isinstance(body, Checked) and body.over:
            self._alone_since.setdefault(name, asked_at)
        else:
            self._alone_since.pop(name, None)


def contact_of(definition: ReplicaSet) -> Contact:
    """A replica set as the ring knows it."""
    return Contact(definition.name, definition.members, definition.preferred)
