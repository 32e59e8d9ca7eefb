"""What a replica needs of whatever keeps its log, and a keeper in memory for tests."""

from __future__ import annotations

from typing import Protocol

from nearcast.errors import LocalProtocolError
from nearcast.raft.configuration import NOBODY, Configuration
from nearcast.raft.entries import CONFIGURATION, Entry, HardState, Snapshot
from nearcast.raft.terms import TermRuns


class Recovered:
    """What is known of a log without reading its payloads."""

    def __init__(self, terms: TermRuns, configurations: list[tuple[int, Configuration]], hard_state: HardState) -> None:
        self.terms = terms
        """Of the entries that are kept, and of the one before them."""
        self.configurations = configurations
        """Index and content of the configuration entries that are kept, oldest first. In front stands the configuration that
        holds before the first entry, with the index of the base."""
        self.hard_state = hard_state


class Log(Protocol):
    """A log as its replica sees it. Writing comes through :class:`~nearcast.raft.ready.Ready`; this is for reading."""

    def recovered(self) -> Recovered:
        """What a restart found; asked once. A log that was cut short by a crash simply ends earlier."""

    def entries(self, first: int, last: int, max_bytes: int) -> list[Entry]:
        """Entries from ``first`` to ``last``, all of them in the log: about ``max_bytes`` of payload, at least one entry.

        Fewer is fine. None at all says that they have to be fetched from the disk first; whoever keeps the log calls
        :meth:`~nearcast.raft.node.RaftNode.entries_fetched` when they are there.
        """

    def snapshot(self) -> Snapshot | None:
        """What stands in for everything before the first entry (or for more). None: not now, ask again."""


class MemoryLog:
    """A log in memory, that keeps all it is given, and nothing of what a disk could do to it."""

    def __init__(self, configuration: Configuration = NOBODY) -> None:
        self.hard_state = HardState()
        self.terms = TermRuns()
        self.kept: list[Entry] = []
        self.configurations: list[tuple[int, Configuration]] = [(0, configuration)]
        self.latest_snapshot: Snapshot | None = None

    @property
    def first_index(self) -> int:
        return self.terms.base_index + 1

    @property
    def last_index(self) -> int:
        return self.terms.last_index

    def recovered(self) -> Recovered:
        return Recovered(self.terms.copy(), self.configurations.copy(), self.hard_state)

    def entry(self, index: int) -> Entry:
        """One that is kept."""
        return self.kept[index - self.first_index]

    def entries(self, first: int, last: int, max_bytes: int) -> list[Entry]:
        found: list[Entry] = []
        size = 0
        for entry in self.kept[first - self.first_index : last - self.first_index + 1]:
            size += entry.size
            if found and size > max_bytes:
                break
            found.append(entry)
        return found

    def snapshot(self) -> Snapshot | None:
        return self.latest_snapshot

    def append(self, entries: list[Entry]) -> None:
        """Write entries; what has their indexes, or comes behind, is replaced."""
        if not entries:
            return
        self.cut(entries[0].index - 1)
        for entry in entries:
            if entry.index != self.last_index + 1:
                raise LocalProtocolError(f"entry {entry.index} cannot follow {self.last_index}")
            self.terms.append(entry.term)
            self.kept.append(entry)
            if entry.kind == CONFIGURATION:
                self.configurations.append((entry.index, Configuration.decode(entry.payload())))

    def cut(self, last_index: int) -> None:
        """Drop the entries behind ``last_index``."""
        if last_index < self.terms.base_index:
            raise LocalProtocolError(f"the log begins behind {last_index}")
        del self.kept[last_index - self.terms.base_index :]
        self.terms.cut(last_index)
        while self.configurations[-1][0] > last_index:
            self.configurations.pop()

    def compact(self, snapshot: Snapshot) -> None:
        """Drop the entries that a snapshot stands in for."""
        del self.kept[: snapshot.index - self.terms.base_index]
        self.terms.compact(snapshot.index)
        following = [item for item in self.configurations if item[0] > snapshot.index]
        self.configurations = [(snapshot.index, snapshot.configuration), *following]
        self.latest_snapshot = snapshot

    def install(self, snapshot: Snapshot) -> None:
        """Become what a snapshot says."""
        self.kept = []
        self.terms = TermRuns(snapshot.index, snapshot.term)
        self.configurations = [(snapshot.index, snapshot.configuration)]
        self.latest_snapshot = snapshot
