"""The topic log as the log of a replica set: entries that consensus numbers, in the very files that readers read.

An entry is a group in the log, which is there whole or not at all: the blocks of its runs, the marks of whoever sent them, and
one mark with the entry's index and term. Readers see exactly what is committed (Canal, section III-D); the tail behind can be
cut when another replica's log wins. Indexes of topics follow from the order of runs alone, so they are the same on all
replicas; numbers of topics, borders of segments and what retention has removed are each replica's own. So that a topic never
begins with 1 on one replica and goes on with 8 on another, names of topics without records are not forgotten here.

The order of calls, which all come from one thread::

    recover(commit)                  what was known to be committed is visible, the rest waits for a word about it
    append(...) append(...) write()  one call of the storage for many entries; all of them are there, or none
    ... a flush ...                  flushed(index)
    commit(index)                    readers see it; whether the disk here has it already does not matter
    cut(index)                       what is behind an entry, and not committed, is gone

Who is the leader, which entries conflict and when something is committed is the consensus core's business.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final

from nearcast.errors import LocalProtocolError
from nearcast.topiclog.catalog import OFFSET_BITS, OFFSET_MASK
from nearcast.topiclog.entries import Deletion, Item, Run, decode
from nearcast.topiclog.installing import Installation, first_sequence
from nearcast.topiclog.log import Job, Topic, TopicLog
from nearcast.topiclog.marks import RAFT, Mark, remember
from nearcast.topiclog.places import Places
from nearcast.topiclog.remaking import StoredEntry, remake, uncommitted_tail
from nearcast.topiclog.segments import Segment
from nearcast.topiclog.snapshots import CHUNK_BYTES, SnapshotSource
from nearcast.topiclog.storage import Storage
from nearcast.topiclog.walking import (
    COMMITTED,
    CONFIGURATION,
    CONFIGURATIONS,
    DATA,
    TERMS,
    committed_by,
    decode_configurations,
    decode_terms,
    encode_configurations,
    encode_terms,
    entry_mark,
)

MAX_TERMS: Final = 1_000
"""Beginnings of terms that are remembered. Entries before the oldest cannot be given to others any more."""
MAX_CONFIGURATION_BYTES: Final = 262_144
"""The same, of configurations."""
_NO_LIMIT: Final = 1 << 40


class ReplicaLog:
    """See the module."""

    def __init__(self, storage: Storage, segment_bytes: int, max_topics: int) -> None:
        self.log = TopicLog(storage, segment_bytes, _NO_LIMIT)
        """For readers. Nobody else writes to it."""
        self.last_index: int = 0
        """Of the newest entry, also of one that is gathered only."""
        self.last_term: int = 0
        self.committed_index: int = 0
        self.base_index: int = 0
        """The entry before the oldest one that can still be given to others; its term is known."""
        self.lost_index: int = 0
        """What was committed here once, but is not there any more, up to this entry: the disk lost it. 0: nothing."""
        self.marks: dict[str, Mark] = {}
        """The latest mark of each producer in what was appended, committed or not."""
        self._storage = storage
        self._segment_bytes = segment_bytes
        self._max_topics = max_topics
        self._places = Places(self.log.catalog)
        # Where terms begin, from the base on, and configurations, the first of which holds at the base.
        self._term_firsts: list[int] = [0]
        self._terms: list[int] = [0]
        self._configurations: list[tuple[int, bytes]] = []
        self._configured_from: int = 0
        """Configurations before this entry are not known any more."""
        self._positions: deque[int] = deque()
        """Where the entries end that are written and not committed."""
        self._flushed_index: int = 0
        self._unflushed: deque[int] = deque()
        """Where the entries end that are written and not known to be on disk."""
        self._gathered: int = 0
        self._installation: Installation | None = None
        self.log.remembers_names = True
        self.log.flushed_position = 0

    @property
    def written_index(self) -> int:
        """Of the newest entry that was handed to the storage."""
        return self.last_index - self._gathered

    # --- opening and closing --------------------------------------------------------------------------------------------

    def recover(self, committed_index: int) -> None:
        """Read what the storage holds; its owner flushes it before anything else.

        Up to ``committed_index`` it is known to be committed, perhaps more: the log itself has a word about it. The rest is
        there, and waits.
        """
        log = self.log
        self._installation = None
        log.first_sequence = first_sequence(self._storage)
        log.recover_unsettled()
        self._places.clear()
        self._positions.clear()
        self._unflushed.clear()
        self._gathered = 0
        self.base_index = 0
        marks = log.written_marks()
        last = marks.get(RAFT)
        self.last_index = last.batch if last is not None else 0
        self.last_term = last.part if last is not None else 0
        known = max(committed_index, committed_by(last) if last is not None else 0)
        if COMMITTED in marks:
            known = max(known, marks[COMMITTED].batch)
            log.forget_mark(COMMITTED)
        self.lost_index = known if known > self.last_index else 0
        self._flushed_index = self.last_index
        # Retention and index files wait until all of a segment is committed.
        self.committed_index = max(min(known, self.last_index), self._sealed_index(), self._oldest_index())
        log.flushed_position = log.written_position  # what was read from the disk is flushed before anything else happens
        self._restore(marks)
        if self.committed_index == self.last_index:
            log.settle(log.written_position, [], log.marks, log.latest_time_us)
        else:
            self._settle()
        self._find_base()

    def _sealed_index(self) -> int:
        """The last entry of the newest segment with an index: that waits until all is committed, unless it was made when the
        log was closed, and says so."""
        for segment in reversed(self.log.catalog.segments):
            if segment.has_index:
                latest = {mark.producer: mark.batch for mark in segment.marks}
                return latest.get(COMMITTED, latest.get(RAFT, 0))
        return 0

    def _restore(self, marks: dict[str, Mark]) -> None:
        """What the latest marks say about all entries."""
        self.marks = {producer: mark for producer, mark in marks.items() if not producer.startswith(RAFT)}
        firsts, terms = decode_terms(marks[TERMS].body) if TERMS in marks else ([], [])
        if not firsts or terms[-1] != self.last_term:
            firsts, terms = [self.last_index], [self.last_term]
        self._term_firsts, self._terms = firsts, terms
        self._configured_from, self._configurations = 0, []
        if CONFIGURATIONS in marks:
            self._configured_from, self._configurations = decode_configurations(marks[CONFIGURATIONS].body)

    def _settle(self) -> None:
        """Find what is not committed yet: only what was, is there for readers."""
        tail = uncommitted_tail(self.log.catalog, self._places, self.committed_index)
        if len(tail.divisions) != self.last_index - self.committed_index:
            raise LocalProtocolError(f"entries {self.committed_index + 1} to {self.last_index} are not all in the log")
        for division in tail.divisions:
            self._positions.append(division.position)
        self.log.settle(tail.position, tail.divisions, tail.marks, tail.time_us)

    def close(self) -> None:
        """Write down what spares the next opening to read the newest segment; all was flushed by now."""
        self._refuse_gathered()
        self.log.close([Mark(producer=COMMITTED, batch=self.committed_index)])

    # --- what the consensus core asks -----------------------------------------------------------------------------------

    def term_of(self, index: int) -> int:
        """Of an entry from the base on."""
        at = bisect_right(self._term_firsts, index) - 1
        if index < self.base_index or index > self.last_index or at < 0:
            raise LocalProtocolError(f"the log has entries {self.base_index + 1} to {self.last_index}, not {index}")
        return self._terms[at]

    def terms(self) -> list[tuple[int, int]]:
        """Where terms begin: (entry, term), beginning with the base."""
        at = max(bisect_right(self._term_firsts, self.base_index) - 1, 0)
        rest = zip(self._term_firsts[at + 1 :], self._terms[at + 1 :], strict=True)
        return [(self.base_index, self._terms[at]), *rest]

    def configurations(self) -> list[tuple[int, bytes]]:
        """Entries about who belongs to the set: (entry, payload), beginning with the one that holds at the base, if there is
        one."""
        at = 0
        while at + 1 < len(self._configurations) and self._configurations[at + 1][0] <= self.base_index:
            at += 1
        return self._configurations[at:]

    def entries(self, first: int, last: int, max_bytes: int) -> list[StoredEntry]:
        """Entries from ``first`` to ``last``, made again from their blocks: about ``max_bytes``, but at least one.

        What is not in memory is read from the disk meanwhile. Raises :class:`StorageCorrupt` for one that the disk damaged.
        """
        if not self.base_index < first <= last <= self.written_index:
            raise LocalProtocolError(
                f"the log has entries {self.base_index + 1} to {self.written_index}, not {first} to {last}"
            )
        found: list[StoredEntry] = []
        left = max_bytes
        while first <= last and (left > 0 or not found):
            more = remake(self.log.catalog, self._places, first, last, left)
            found += more
            first += len(more)
            for entry in more:
                left -= entry.size
        return found

    # --- writing --------------------------------------------------------------------------------------------------------

    def has_room(self, topic: bytes) -> bool:
        """Whether a leader may take messages of a topic: it is known, or the log may have one more."""
        topics = self.log.topics
        return topic in topics or len(topics) < self._max_topics

    def append(self, index: int, term: int, kind: int, pieces: list[bytes], items: list[Item] | None = None) -> None:
        """Gather the next entry. Whoever knows already what is in it says so with ``items``; otherwise ``pieces`` are decoded.

        Raises :class:`~nearcast.errors.RemoteProtocolError` for pieces that are no entry; nothing of them is gathered then.
        """
        if self._installation is not None:
            raise LocalProtocolError("a snapshot comes in")
        if index != self.last_index + 1 or term < self.last_term:
            raise LocalProtocolError(f"entry {index} of term {term} cannot follow {self.last_index} of term {self.last_term}")
        log = self.log
        payload = b""
        if kind != DATA:
            payload = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        else:
            if items is None:
                items = decode(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            for item in items:
                if isinstance(item, Run):
                    log.append_run(self._topic(item.topic), item)
                elif isinstance(item, Deletion):
                    log.delete_when_committed(self._topic(item.topic))
                else:
                    log.append_group_mark(item)
                    remember(self.marks, item)
        if term != self.last_term:
            self._begin_term(index, term)
        if kind == CONFIGURATION:
            self._add_configuration(index, payload)
        log.append_mark(entry_mark(index, term, kind, self.committed_index, payload))
        log.divide()
        self.last_index = index
        self.last_term = term
        self._gathered += 1

    def _topic(self, name: bytes) -> Topic:
        topic = self.log.topics.get(name)
        if topic is None:
            topic = self.log.topic(name)
        if topic is None:
            raise LocalProtocolError("a replica takes any number of topics")
        return topic

    def _begin_term(self, index: int, term: int) -> None:
        firsts, terms = self._term_firsts, self._terms
        firsts.append(index)
        terms.append(term)
        needless = max(bisect_right(firsts, self.base_index) - 1, len(firsts) - MAX_TERMS)
        if needless > 0:
            del firsts[:needless]
            del terms[:needless]
            self.base_index = max(self.base_index, firsts[0])
        self.log.append_group_mark(Mark(producer=TERMS, batch=index, body=encode_terms(firsts, terms)))

    def _add_configuration(self, index: int, payload: bytes) -> None:
        kept = [*self.configurations(), (index, payload)]
        size = sum([len(each) for _, each in kept])
        while size > MAX_CONFIGURATION_BYTES and len(kept) > 1:
            size -= len(kept[0][1])
            del kept[0]
            self.base_index = max(self.base_index, kept[0][0])
        if self._configurations and kept[0] != self._configurations[0]:
            self._configured_from = kept[0][0]  # a file that was to be removed may be there again after a restart
        self._configurations = kept
        body = encode_configurations(self._configured_from, kept)
        self.log.append_group_mark(Mark(producer=CONFIGURATIONS, batch=index, body=body))

    def write(self) -> int:
        """Hand all that was gathered to the storage; returns the newest entry.

        Raises :class:`~nearcast.errors.StorageUnavailable`; then nothing of it is there.
        """
        if not self._gathered:
            return self.last_index
        log = self.log
        first = self.written_index + 1
        begin = log.written_position
        try:
            log.write()
        except BaseException:
            self._go_back(self.written_index)
            raise
        self._gathered = 0
        for position in log.divided:
            sequence = position >> OFFSET_BITS
            if begin >> OFFSET_BITS == sequence:
                self._places.note(sequence, first, begin & OFFSET_MASK)
            self._positions.append(position)
            self._unflushed.append(position)
            begin = position
            first += 1
        return self.last_index

    def _go_back(self, last_index: int) -> None:
        """What is known of entries behind this one is forgotten; the log has dropped them."""
        self.last_index = last_index
        self._gathered = 0
        while len(self._term_firsts) > 1 and self._term_firsts[-1] > last_index:
            self._term_firsts.pop()
            self._terms.pop()
        self.last_term = self._terms[-1]
        while self._configurations and self._configurations[-1][0] > last_index:
            self._configurations.pop()
        self.marks = {producer: mark for producer, mark in self.log.written_marks().items() if not producer.startswith(RAFT)}

    def flushed(self, index: int) -> None:
        """The disk has everything up to an entry."""
        while self._unflushed and self._flushed_index < index:
            self.log.flushed_position = self._unflushed.popleft()
            self._flushed_index += 1

    def commit(self, index: int) -> None:
        """Readers see everything up to an entry from now on."""
        if index > self.written_index:
            raise LocalProtocolError(f"entry {index} is not written and cannot be committed")
        if index <= self.committed_index:
            return
        position = 0
        while self.committed_index < index:
            position = self._positions.popleft()
            self.committed_index += 1
        self.log.commit(position)

    def cut(self, last_index: int) -> None:
        """Drop all entries behind one, which is not before what is committed; also those that are merely gathered."""
        if last_index < self.committed_index:
            raise LocalProtocolError(f"entry {last_index} cannot be the last one: {self.committed_index} is committed")
        if last_index >= self.last_index:
            return
        self.give_up_installation()
        log = self.log
        position = log.committed_position
        kept = last_index - self.committed_index
        if kept >= len(self._positions):  # only what is gathered is behind it
            position = log.written_position
        elif kept:
            position = self._positions[kept - 1]
        log.cut_tail(position)
        while len(self._positions) > kept:
            self._positions.pop()
        while self._unflushed and self._unflushed[-1] > position:
            self._unflushed.pop()
        if self._flushed_index > last_index:
            self._flushed_index = last_index
            log.flushed_position = position
        self._places.cut(position >> OFFSET_BITS, last_index)
        self._go_back(last_index)

    def _refuse_gathered(self) -> None:
        if self._gathered:
            raise LocalProtocolError("entries were gathered and not written")

    # --- snapshots ------------------------------------------------------------------------------------------------------

    def snapshot(self, chunk_bytes: int = CHUNK_BYTES) -> SnapshotSource:
        """All that is committed now, for a replica that lacks entries that are not there any more."""
        log = self.log
        index = self.committed_index
        return SnapshotSource(log.catalog, index, self.term_of(index), log.committed_time_us, log.marks, chunk_bytes)

    def install(self, configuration: tuple[int, bytes] | None) -> Installation:
        """Begin to take a snapshot in, with the configuration entry that holds there. Nothing is appended meanwhile.

        Readers go on reading what there is. Raises :class:`~nearcast.errors.StorageUnavailable`.
        """
        self._refuse_gathered()
        self.give_up_installation()
        begins = self.log.first_sequence
        self._installation = Installation(self._storage, begins, self._segment_bytes, configuration)
        return self._installation

    def complete_installation(self) -> None:
        """The snapshot is whole and on disk: it is the log now, and has all of its entries committed."""
        installation = self._installation
        if installation is None or not installation.is_whole or installation.working or self.log.working:
            raise LocalProtocolError("the snapshot is not whole, or a job is under way")
        installation.complete()
        self.recover(installation.index)

    def give_up_installation(self) -> None:
        """The log stays what it was. Raises :class:`~nearcast.errors.StorageUnavailable`."""
        if self._installation is not None:
            self._installation.give_up()
            self._installation = None
            active = self.log.catalog.segments[-1]
            self._storage.resume(active.name, active.size)

    @property
    def installing(self) -> bool:
        """Whether a snapshot comes in."""
        return self._installation is not None

    # --- retention ------------------------------------------------------------------------------------------------------

    def collect(self, now_us: int) -> Job | None:
        """A step of retention, between writes: see :meth:`TopicLog.collect`. Raises what a write raises. Entries may be gone:
        see ``base_index``."""
        self._refuse_gathered()
        if self._installation is not None:
            return None
        job = self.log.collect(now_us)
        self._find_base()
        self.log.write()  # names that would be forgotten are written again
        return job

    def finish(self, job: Job, failed: bool = False) -> None:
        """A job was run. Here, too, entries may be gone."""
        self.log.finish(job, failed)
        self._find_base()

    def hold(self, index: int) -> None:
        """Keep the entries from this one on, because a follower is about to need them. A later call takes back an earlier."""
        segment = self._places.segment_of(max(index, self.base_index + 1))
        self.log.held_from = segment.sequence if segment is not None else _NO_LIMIT

    def _find_base(self) -> None:
        base = max(self._oldest_index(), self._term_firsts[0], self._configured_from)
        self.base_index = max(self.base_index, min(base, self.committed_index))

    def _oldest_index(self) -> int:
        """The entry before the oldest segment that, like all behind it, is as it was written. Of entries in those before,
        retention may have taken something."""
        oldest: Segment | None = None
        for segment in reversed(self.log.catalog.segments):
            if segment.generation or (oldest is not None and segment.sequence + 1 != oldest.sequence):
                break
            if segment.size:
                oldest = segment
        return self.last_index if oldest is None else self._places.start_of(oldest)
