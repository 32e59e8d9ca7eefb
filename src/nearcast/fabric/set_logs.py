"""A replica's log as consensus and the broker use it together: entries on disk, and what is in the newest of them in memory.

Joins :class:`~nearcast.topiclog.replica.ReplicaLog` (where entries are blocks of the topic log), the file with term and vote,
and the core's view of both (:class:`nearcast.raft.storage.Log`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from nearcast.raft.configuration import Configuration
from nearcast.raft.entries import DATA, Entry, HardState, Snapshot
from nearcast.raft.storage import Recovered
from nearcast.raft.terms import TermRuns
from nearcast.topiclog.entries import Item, Run, decode
from nearcast.topiclog.log import TopicLog
from nearcast.topiclog.marks import Mark
from nearcast.topiclog.replica import ReplicaLog

if TYPE_CHECKING:
    from nearcast.raft.ready import Ready

RECENT_BYTES: Final = 33_554_432
"""Of the newest entries, kept as they are for readers that keep up."""


class StateFile(Protocol):
    """Where term and vote are kept."""

    def load(self) -> HardState:
        """What was stored last, as far as it was flushed."""

    def store(self, state: HardState) -> None:
        """Write it. The flush that covers entries covers this as well."""


class _Recent:
    """What an entry has. ``firsts``: by run, the index of its first message."""

    def __init__(self, index: int, runs: list[Run], firsts: list[int], size: int) -> None:
        self.index = index
        self.runs = runs
        self.firsts = firsts
        self.size = size


class ReplicaSetLog:
    """See the module. ``initial`` is the configuration that a set begins with."""

    def __init__(self, log: ReplicaLog, state: StateFile, initial: Configuration) -> None:
        self.log = log
        self._state = state
        self._initial = initial
        self._recent: deque[_Recent] = deque()
        self._recent_bytes = 0
        self._known: dict[int, tuple[list[bytes], list[Item]]] = {}
        self._written: deque[tuple[int, int]] = deque()

    @property
    def readable(self) -> TopicLog:
        """The log as readers see it: what is committed."""
        return self.log.log

    # --- what the core asks ---------------------------------------------------------------------------------------------

    def recovered(self) -> Recovered:
        state = self._state.load()
        log = self.log
        log.recover(state.commit)
        found = log.terms()
        base_index, base_term = found[0]
        terms = TermRuns(base_index, base_term)
        begins = dict(found[1:])
        term = base_term
        for index in range(base_index + 1, log.last_index + 1):
            term = begins.get(index, term)
            terms.append(term)
        configurations = [(index, Configuration.decode(data)) for index, data in log.configurations()]
        if not configurations or configurations[0][0] > log.base_index:
            configurations.insert(0, (log.base_index, self._initial))
        return Recovered(terms, configurations, HardState(state.term, state.vote, max(state.commit, log.committed_index)))

    def entries(self, first: int, last: int, max_bytes: int) -> list[Entry]:
        found = self.log.entries(first, min(last, self.log.written_index), max_bytes)
        return [Entry(entry.index, entry.term, entry.kind, entry.pieces) for entry in found]

    def snapshot(self) -> Snapshot | None:
        return None

    # --- writing --------------------------------------------------------------------------------------------------------

    def knows(self, index: int, pieces: list[bytes], items: list[Item]) -> None:
        """What is in an entry that was just proposed: it need not be decoded."""
        self._known[index] = (pieces, items)

    def write(self, ready: Ready) -> None:
        if ready.hard_state is not None:
            self._state.store(ready.hard_state)
        self._write(ready.entries)
        self._written.append((ready.number, self.log.last_index))

    def flushed(self, number: int) -> None:
        """The disk has what was written up to a Ready."""
        written = self._written
        last_index = 0
        while written and written[0][0] <= number:
            last_index = written.popleft()[1]
        if last_index:
            self.log.flushed(min(last_index, self.log.last_index))

    def _write(self, entries: list[Entry]) -> None:
        if not entries:
            return
        log = self.log
        if entries[0].index <= log.last_index:
            self._cut(entries[0].index - 1)
        for entry in entries:
            items: list[Item] | None = None
            if entry.kind == DATA:
                known = self._known.pop(entry.index, None)
                items = known[1] if known is not None and known[0] is entry.pieces else decode(entry.payload())
                self._remember(entry, items)
            log.append(entry.index, entry.term, entry.kind, entry.pieces, items)
        log.write()

    def _cut(self, last_index: int) -> None:
        self.log.cut(last_index)
        while self._recent and self._recent[-1].index > last_index:
            self._recent_bytes -= self._recent.pop().size

    def _remember(self, entry: Entry, items: list[Item]) -> None:
        runs: list[Run] = []
        firsts: list[int] = []
        topics = self.log.log.topics
        following: dict[bytes, int] = {}
        for item in items:
            if isinstance(item, Run):
                first = following.get(item.topic, 0)
                if not first:
                    topic = topics.get(item.topic)
                    first = 1 if topic is None else topic.next_index
                following[item.topic] = first + item.count
                runs.append(item)
                firsts.append(first)
        self._recent.append(_Recent(entry.index, runs, firsts, entry.size))
        self._recent_bytes += entry.size
        while self._recent_bytes > RECENT_BYTES and len(self._recent) > 1:
            self._recent_bytes -= self._recent.popleft().size

    def commit(self, index: int) -> None:
        """Readers see everything up to an entry."""
        self.log.commit(index)

    # --- what the broker asks -------------------------------------------------------------------------------------------

    def _find(self, index: int) -> _Recent | None:
        recent = self._recent
        if not recent or index < recent[0].index or index > recent[-1].index:
            return None
        # Entries without messages are left out: a look from the end, where it mostly is, is short.
        for found in reversed(recent):
            if found.index <= index:
                return found if found.index == index else None
        return None

    def runs(self, index: int) -> list[Run] | None:
        """The messages of an entry, oldest first; None if it is not kept any more."""
        recent = self._recent
        found = self._find(index)
        if found is not None:
            return found.runs
        if recent and recent[0].index < index <= self.log.last_index:
            return []
        if index <= self.log.base_index:
            return None
        entry = self.log.entries(index, index, 1)[0]
        if entry.kind != DATA:
            return []
        data = entry.pieces[0] if len(entry.pieces) == 1 else b"".join(entry.pieces)
        return [item for item in decode(data) if isinstance(item, Run)]

    def first_indexes(self, index: int) -> list[int]:
        found = self._find(index)
        return [] if found is None else found.firsts

    def latest_mark(self, producer: str) -> Mark | None:
        return self.log.marks.get(producer)

    def committed_mark(self, producer: str) -> Mark | None:
        return self.log.log.marks.get(producer)
