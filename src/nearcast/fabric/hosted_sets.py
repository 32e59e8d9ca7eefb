"""One replica of one replica set at this broker: from what brokers propose to what the set has committed.

A turn of the event loop makes one entry of all that was proposed meanwhile (decision 0034). The replica that leads takes
messages of a *producer* (a broker, since it began to number) in the order of their numbers, each once: the producer's mark in
the log says how far it is. Whoever proposed hears of it when it is committed; readers get it then.

What is to be written goes to a :class:`SetLog`, what is to be sent to :class:`~nearcast.fabric.replica_sets.ReplicaSets`. Two
positions tell how far a leader is: ``commit``, and ``served``, up to which retained messages and shared subscriptions have had
theirs; the log keeps the latter as a mark, so that a new leader begins there.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from nearcast.errors import NotLeader, ProposalRefused, RecordUnavailable, RemoteProtocolError, StorageCorrupt
from nearcast.fabric.classes import SET
from nearcast.fabric.messages import Arrived
from nearcast.fabric.set_cursors import publications
from nearcast.fabric.set_functions import SetFunctions, is_outbox, posted
from nearcast.fabric.set_readers import Readers
from nearcast.mqtt.topics import is_string, topic_fault
from nearcast.raft.node import RaftNode
from nearcast.raft.storage import Log
from nearcast.topiclog.blocks import RETAIN
from nearcast.topiclog.entries import EntryWriter, Item, Run
from nearcast.topiclog.marks import Mark

if TYPE_CHECKING:
    from nearcast.fabric.replica_sets import ReplicaSets
    from nearcast.mqtt.publication import Publication
    from nearcast.raft.messages import Message
    from nearcast.raft.ready import Ready
    from nearcast.raft.settings import RaftSettings
    from nearcast.topiclog.batches import Record
    from nearcast.topiclog.log import TopicLog

SERVED: Final = "$served"
"""The mark that says up to where retained messages and shared subscriptions have had theirs."""

ENTRY_BYTES: Final = 4_194_304
"""An entry is proposed when it has so much, whatever comes still."""

MAX_UNCOMMITTED_BYTES: Final = 33_554_432
"""Proposed and not committed. Beyond, proposers are made to wait: they have it in their queues."""

REFUSED_S: Final = 0.02
"""How long proposers wait whose messages a leader could not propose because it is handing over."""

_MESSAGE_EXPIRY: Final = b"\x02"


class SetLog(Log, Protocol):
    """The log of a replica, as the broker uses it."""

    @property
    def readable(self) -> TopicLog:
        """The log as readers see it: what is committed."""

    def flushed(self, number: int) -> None:
        """The disk has what was written up to a Ready."""

    def write(self, ready: Ready) -> None:
        """Write what a Ready brings, in its order; raises :class:`~nearcast.errors.StorageUnavailable`. It is not flushed."""

    def commit(self, index: int) -> None:
        """Readers see everything up to an entry."""

    def runs(self, index: int) -> list[Run] | None:
        """The messages of an entry, oldest first; None if it has to be fetched or is not kept any more."""

    def first_indexes(self, index: int) -> list[int]:
        """For each run of an entry that was written lately, the index of its first message in its topic; empty if that is
        not known any more."""

    def knows(self, index: int, pieces: list[bytes], items: list[Item]) -> None:
        """What is in an entry that was just proposed."""

    def latest_mark(self, producer: str) -> Mark | None:
        """The last mark of a producer, committed or not."""

    def committed_mark(self, producer: str) -> Mark | None:
        """The last one that is committed."""


class _Proposed:
    """An entry that is not committed yet: how far producers are with it, and which of its runs are theirs."""

    def __init__(self, index: int, size: int, upto: dict[str, tuple[str, int]], runs: list[tuple[str, int, int]]) -> None:
        self.index = index
        self.size = size
        self.upto = upto
        self.runs = runs


class HostedSet:
    """See the module. ``members`` are the brokers of the set, by their numbers as replicas."""

    def __init__(
        self,
        sets: ReplicaSets,
        name: str,
        replica: int,
        members: dict[int, str],
        log: SetLog,
        settings: RaftSettings,
        rng: random.Random,
        now: float,
    ) -> None:
        self.name = name
        self.members = members
        self.log = log
        self.node = RaftNode(replica, log, settings, rng, now)
        self.commit = self.node.commit
        self.served = 0
        self.leads = False
        self.leader = ""
        self.term = self.node.term
        self._sets = sets
        self._engine = sets.fabric.engine
        self.readers = Readers(name, self._engine.router, log.runs)
        self._writer = EntryWriter()
        self._places: list[tuple[str, int, int]] = []
        """Of the entry that is being made: whose messages, under which number, stand at which place among its items."""
        self._upto: dict[str, tuple[str, int]] = {}
        """By producer: its broker, and the number of its last message in the entry that is being made."""
        self._received: dict[str, int] = {}
        self._proposed: deque[_Proposed] = deque()
        self._uncommitted_bytes = 0
        self._refused: set[str] = set()
        self._go_on_at = 0.0
        self._asked: dict[int, int] = {}
        """Reads that wait for the quorum, and the term they belong to."""
        self._confirmed: list[int] = []
        self.wants_settling = False
        """Whether something was asked of the core that :meth:`settle` has to carry out."""
        self.functions = SetFunctions(self)
        self._reads: dict[int, Callable[[bool], None]] = {}
        self._due_reads: list[tuple[int, Callable[[bool], None]]] = []
        """Confirmed reads, and up to where the log here has to be committed for them."""
        self._failed_reads: list[int] = []
        self._last_read = 0
        """Reads that are asked for here have numbers below 0, those of the ring above."""
        self._max_topic_levels = sets.fabric.limits.max_topic_levels
        #: Counters since the start.
        self.entries = 0
        self.committed_messages = 0
        self.duplicates = 0

    # --- what brokers propose -------------------------------------------------------------------------------------------

    def opens(self, source: str, epoch: int) -> None:
        """A broker wants to propose: tell it what is committed of its messages."""
        if not self.leads:
            self._sets.tell_leader(source, self)
            return
        mark = self.log.committed_mark(producer(source, epoch))
        self._refused.discard(source)
        self._sets.tell_channel(source, self, 0 if mark is None else mark.batch)

    def proposes(self, source: str, epoch: int, content: bytes, now: float) -> None:
        """Messages of a broker. What makes no sense is a ``ValueError``."""
        arrived = Arrived(content, now)
        publication = arrived.publication
        if not self.leads:
            self._sets.tell_leader(source, self)
        if not arrived.reliable and publication is not None:
            if self.leads and self.has_room():
                self._add(source, publication, arrived.via, now)
            else:
                self._engine.stats.dropped_slow_consumer += publication.count
        if not self.leads or not arrived.reliable:
            return
        key = producer(source, epoch)
        received = self._has_of(key)
        if arrived.last <= received:
            self.duplicates += arrived.count
            self._answer_again(source, key)
            return
        if arrived.previous > received or not self.has_room():
            self._refused.add(source)
            return
        if publication is not None and arrived.sequence <= received:
            known = received - arrived.sequence + 1
            self.duplicates += known
            publication = publication.cut(known, publication.count - known)
        # Before the messages: an entry that is full with them has the mark that says so.
        self._received[key] = arrived.last
        self._upto[key] = (source, arrived.last)
        if publication is not None:
            self._add(source, publication, arrived.via, now)

    def _has_of(self, key: str) -> int:
        """The last number of a producer that is in the log, or about to be."""
        received = self._received.get(key)
        if received is None:
            mark = self.log.latest_mark(key)
            received = self._received[key] = 0 if mark is None else mark.batch
        return received

    def has_room(self) -> bool:
        """Whether more may be proposed now."""
        return self._uncommitted_bytes + self._writer.size < MAX_UNCOMMITTED_BYTES

    def _add(self, source: str, publication: Publication, publisher: str, now: float) -> None:
        topic = publication.topic
        if not is_string(topic) or topic_fault(topic, self._max_topic_levels):
            return
        properties = publication.properties
        if publication.expires_at > 0:
            left_s = max(0, int(publication.expires_at - now + 0.5))
            properties += _MESSAGE_EXPIRY + left_s.to_bytes(4, "big")
        time_us = int((now + self._engine.effects.wall_offset) * 1e6)
        flags = publication.qos | RETAIN if publication.retain else publication.qos
        self._writer.run(topic, publisher.encode("utf-8"), flags, properties, publication.payloads(), max(time_us, 0))
        self._places.append((source, publication.sequence, len(self._writer.items) - 1))
        if self._writer.size >= ENTRY_BYTES:
            self._propose(now)

    def _answer_again(self, source: str, key: str) -> None:
        """Something came that the log has: whoever sent it again may not have heard that it is committed."""
        mark = self.log.committed_mark(key)
        if mark is not None:
            self._sets.tell_committed(source, self, mark.batch, {})

    # --- what functions do ----------------------------------------------------------------------------------------------

    def begin_group(self, now: float) -> EntryWriter:
        """The entry that is being made, for things that belong together: they are added before anything else happens."""
        if self._writer.size >= ENTRY_BYTES:
            self._propose(now)
        return self._writer

    def time_us(self, now: float) -> int:
        return max(int((now + self._engine.effects.wall_offset) * 1e6), 0)

    def keeps(self, topic: bytes) -> bool:
        """Whether this set keeps a topic."""
        return self._sets.fabric.classes.class_of(topic) == SET + self.name

    def topics(self) -> list[bytes]:
        """All topics that have records here."""
        return list(self.log.readable.topics)

    def first_index(self, topic: bytes) -> int:
        found = self.log.readable.topics.get(topic)
        return 1 if found is None else found.first_index

    def last_index(self, topic: bytes) -> int:
        """Of the last committed record of a topic; 0: there is none."""
        found = self.log.readable.topics.get(topic)
        return 0 if found is None else found.committed_index - 1

    def record(self, topic: bytes, index: int) -> Record:
        """A committed record; raises :class:`~nearcast.errors.RecordUnavailable`."""
        found = self.log.readable.topics.get(topic)
        if found is None:
            raise RecordUnavailable(topic.decode("utf-8", "replace"), index, 1, 1)
        return self.log.readable.get(found, index)

    def last_record(self, topic: bytes) -> Record | None:
        """The last committed record of a topic, if it has one."""
        last = self.last_index(topic)
        try:
            return self.record(topic, last) if last else None
        except (RecordUnavailable, StorageCorrupt):
            return None

    # --- what the ring does ---------------------------------------------------------------------------------------------

    def propose_own(self, writer: EntryWriter, now: float) -> bool:
        """Make an entry of this set's own; false if it was refused. It is committed, or this replica leads no more."""
        if not self.leads:
            return False
        pieces = writer.finish()
        try:
            index = self.node.propose(pieces, now)
        except (NotLeader, ProposalRefused):
            return False
        self.log.knows(index, pieces, writer.items)
        self.entries += 1
        self.wants_settling = True
        return True

    def confirm(self, number: int, now: float) -> None:
        """Find out whether this replica leads, and everything that is committed now is known here (Raft's read index). If so,
        :meth:`take_confirmed` has the number some time."""
        if not self.leads:
            return
        try:
            self.node.read(number, now)
        except (NotLeader, ProposalRefused):
            return
        self.wants_settling = True
        self._asked[number] = self.term

    def take_confirmed(self) -> list[int]:
        """What was confirmed since the last time."""
        confirmed, self._confirmed = self._confirmed, []
        return confirmed

    def _answered(self, ready: Ready) -> None:
        for read in ready.reads:
            if self._asked.pop(read.token, 0) == ready.term and ready.leads:
                self._confirmed.append(read.token)
        for token in ready.failed_reads:
            self._asked.pop(token, None)

    # --- reading --------------------------------------------------------------------------------------------------------

    def read_index(self, done: Callable[[bool], None], now: float) -> None:
        """Say ``done(True)`` once all that the set has committed now may be read here (linearizable, thesis §6.4);
        ``done(False)`` if that cannot be known now. Not before this returns."""
        self._last_read -= 1
        self._reads[self._last_read] = done
        self.wants_settling = True
        try:
            self.node.read(self._last_read, now)
        except (NotLeader, ProposalRefused):
            self._failed_reads.append(self._last_read)

    def _answer_reads(self, ready: Ready) -> None:
        for read in ready.reads:
            done = self._reads.pop(read.token, None)
            if done is not None:
                self._due_reads.append((read.index, done))
        self._failed_reads += ready.failed_reads

    def _settle_reads(self) -> None:
        failed, self._failed_reads = self._failed_reads, []
        for token in failed:
            done = self._reads.pop(token, None)
            if done is not None:
                done(False)
        if self._due_reads:
            due, self._due_reads = self._due_reads, []
            for index, done in due:
                if index <= self.commit:
                    done(True)
                else:
                    self._due_reads.append((index, done))

    # --- entries --------------------------------------------------------------------------------------------------------

    def _propose(self, now: float) -> None:
        """Make an entry of what gathered."""
        writer = self._writer
        if self.functions.has_beginnings:
            self.functions.beginnings(writer)
        if not writer.items and not self._upto:
            return
        for key, (_, last) in self._upto.items():
            writer.mark(Mark(producer=key, batch=last))
        if self.served > self._served_mark():
            writer.mark(Mark(producer=SERVED, batch=self.served))
        size = writer.size
        runs = _runs_of(writer.items, self._places)
        upto = self._upto
        self._begin_entry()
        pieces = writer.finish()
        try:
            index = self.node.propose(pieces, now)
        except (NotLeader, ProposalRefused):
            self._forget_proposals()
            # A leader that hands over takes nothing until that is done or given up: not asked for again at the speed of light.
            self._go_on_at = now + REFUSED_S
            return
        self.log.knows(index, pieces, writer.items)
        self.entries += 1
        self._uncommitted_bytes += size
        self._proposed.append(_Proposed(index, size, upto, runs))

    def _begin_entry(self) -> None:
        self._writer = EntryWriter()
        self._places = []
        self._upto = {}

    def _forget_proposals(self) -> None:
        """What was proposed here may never be committed: those whose it is send it again, to whoever leads."""
        for source in {name for name, _ in self._upto.values()}:
            self._refused.add(source)
        for proposed in self._proposed:
            for source, _ in proposed.upto.values():
                self._refused.add(source)
        self._begin_entry()
        self._received = {}
        self._proposed.clear()
        self._uncommitted_bytes = 0
        if self.leads:
            self.functions.begin()

    def _served_mark(self) -> int:
        mark = self.log.latest_mark(SERVED)
        return 0 if mark is None else mark.batch

    # --- the core -------------------------------------------------------------------------------------------------------

    def step(self, message: Message, now: float) -> None:
        """Another replica said something."""
        self.node.step(message, now)

    def persisted(self, number: int, now: float) -> None:
        """Everything written up to a Ready is on disk."""
        self.log.flushed(number)
        self.node.persisted(number, now)

    def settle(self, now: float) -> None:
        """After every event: propose what gathered, and carry out what the core wants."""
        self.wants_settling = False
        if self._writer.items or self._upto or (self.leads and self.functions.has_beginnings):
            self._propose(now)
        ready = self.node.ready()
        while ready is not None:
            for message in ready.messages:
                self._sets.send_raft(self, message)
            if ready.must_sync:
                self.log.write(ready)
            self.log.commit(ready.commit)
            self._led_by(ready, now)
            self.commit = ready.commit
            self._committed(now)
            if ready.reads or ready.failed_reads:
                self._answered(ready)
                self._answer_reads(ready)
            self.node.advance()
            if ready.must_sync:
                self._sets.request_sync(self.name, ready.number)
            ready = self.node.ready()
        if self._failed_reads or self._due_reads:
            self._settle_reads()
        if self.leads:
            self._serve(now)
            self._let_go_on(now)

    def _led_by(self, ready: Ready, now: float) -> None:
        leader = self.members.get(ready.leader, "")
        if ready.leads != self.leads:
            self.leads = ready.leads
            self._forget_proposals()
            self.readers.clear()
            if not self.leads:
                self.functions.end()
            if self.leads:
                self.served = max(self.served, self._served_mark())
                self._refused.clear()
        elif leader == self.leader and ready.term == self.term:
            return
        self.leader = leader
        self.term = ready.term
        self._sets.led_by(self, now)

    def _committed(self, now: float) -> None:
        """Tell those whose messages are committed."""
        found: dict[str, int] = {}
        indexes: dict[str, dict[int, int]] = {}
        while self._proposed and self._proposed[0].index <= self.commit:
            proposed = self._proposed.popleft()
            self._uncommitted_bytes -= proposed.size
            for source, last in proposed.upto.values():
                found[source] = max(last, found.get(source, 0))
            firsts = self.log.first_indexes(proposed.index)
            for source, sequence, run in proposed.runs:
                if run < len(firsts):
                    indexes.setdefault(source, {})[sequence] = firsts[run]
        for source, last in found.items():
            self._sets.tell_committed(source, self, last, indexes.get(source, {}))

    def _let_go_on(self, now: float) -> None:
        """Those that were refused for want of room, or whose messages had a gap, begin behind what is committed."""
        if not self._refused or now < self._go_on_at or not self.has_room():
            return
        refused, self._refused = self._refused, set()
        for source in refused:
            self._sets.tell_leader(source, self)

    # --- what is committed ----------------------------------------------------------------------------------------------

    def _serve(self, now: float) -> None:
        """Retained messages and shared subscriptions, once each; then the brokers that read."""
        while self.served < self.commit:
            runs = self.log.runs(self.served + 1)
            if runs is None:
                break
            self.served += 1
            for run in runs:
                self._serve_run(run, now)
        self._sets.serve_here(self, now)
        self.readers.serve(self.commit)

    def _serve_run(self, run: Run, now: float) -> None:
        self.committed_messages += run.count
        for name in self.functions.committed(run.topic):
            self._sets.function_has_work(self.name, name)
        if is_outbox(run.topic):
            self._empty(run, now)
        route = self._engine.router.route_for(run.topic)
        if not route.groups and not run.flags & RETAIN:
            return
        for publication in publications(self._engine, run):
            if publication.retain:
                self._engine.inbound.retain(publication, now)
            if route.groups:
                self._engine.router.share(route, publication, now)

    def _empty(self, run: Run, now: float) -> None:
        """What functions published for topics that are kept elsewhere, or nowhere."""
        for payload in run.payloads():
            try:
                message = posted(payload)
                self._engine.inbound.check_topic(message.topic.encode("utf-8"))
            except (ValueError, RemoteProtocolError):
                continue
            self._engine.publish(message.topic, message.payload, message.qos, message.retain, now)

    def tick(self, now: float) -> None:
        self.node.tick(now)
        if self.leads:
            self.readers.tick(now)

    def next_deadline(self) -> float:
        deadline = self.node.next_deadline()
        return min(deadline, self._go_on_at) if self.leads and self._refused and self.has_room() else deadline


def producer(broker: str, epoch: int) -> str:
    """The name under which the log remembers how far a broker is."""
    return f"{epoch:x}@{broker}"


def _runs_of(items: list[Item], places: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The same with the number of the run, among all runs of the entry, in place of the place among its items."""
    numbers: dict[int, int] = {}
    for at, item in enumerate(items):
        if isinstance(item, Run):
            numbers[at] = len(numbers)
    return [(source, sequence, numbers[at]) for source, sequence, at in places]
