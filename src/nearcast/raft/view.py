"""A replica's log as its core sees it: terms and configurations of all entries, the payload of the newest ones.

Entries are here from the moment they are proposed or received. They go to the driver with the next Ready (*handed*), are in
the log when it says so (*written*), and leave memory from the oldest on once there are too many of them. What is needed of
older ones comes from the :class:`~nearcast.raft.storage.Log`.
"""

from __future__ import annotations

from nearcast.errors import LocalProtocolError
from nearcast.raft.configuration import Configuration
from nearcast.raft.entries import CONFIGURATION, Entry, Snapshot
from nearcast.raft.storage import Log, Recovered
from nearcast.raft.terms import TermRuns


class LogView:
    """See the module."""

    def __init__(self, log: Log, recovered: Recovered, tail_bytes: int) -> None:
        self.terms = recovered.terms
        self.handed_index = self.terms.last_index
        self.written_index = self.terms.last_index
        self._log = log
        self._configurations = list(recovered.configurations)
        self._tail: list[Entry] = []
        """Ends at the last index, and has at least all that is not written."""
        self._tail_bytes = 0
        self._max_tail_bytes = tail_bytes

    @property
    def first_index(self) -> int:
        """The oldest entry whose content there is."""
        return self.terms.base_index + 1

    @property
    def last_index(self) -> int:
        return self.terms.last_index

    @property
    def last_term(self) -> int:
        return self.terms.last_term

    @property
    def configuration(self) -> Configuration:
        """The newest one: it holds whether committed or not (thesis §4.1)."""
        return self._configurations[-1][1]

    @property
    def configuration_index(self) -> int:
        """Where it stands."""
        return self._configurations[-1][0]

    def configuration_at(self, index: int) -> Configuration:
        """What held behind an entry."""
        found = self._configurations[0][1]
        for at, configuration in self._configurations:
            if at > index:
                break
            found = configuration
        return found

    def term_of(self, index: int) -> int:
        return self.terms.term_of(index)

    def is_behind(self, last_term: int, last_index: int) -> bool:
        """Whether a log that ends so is at least as up to date as this one (Raft §5.4.1)."""
        mine = self.terms.last_term
        return last_term > mine or (last_term == mine and last_index >= self.terms.last_index)

    def append(self, entry: Entry) -> None:
        """One more."""
        if entry.index != self.terms.last_index + 1:
            raise LocalProtocolError(f"entry {entry.index} cannot follow {self.terms.last_index}")
        if entry.kind == CONFIGURATION:
            self._configurations.append((entry.index, Configuration.decode(entry.payload())))
        self.terms.append(entry.term)
        self._tail.append(entry)
        self._tail_bytes += entry.size

    def cut(self, last_index: int) -> None:
        """Another log won: what is behind ``last_index`` never was."""
        while self._tail and self._tail[-1].index > last_index:
            self._tail_bytes -= self._tail.pop().size
        while len(self._configurations) > 1 and self._configurations[-1][0] > last_index:
            self._configurations.pop()
        self.terms.cut(last_index)
        self.handed_index = min(self.handed_index, last_index)
        self.written_index = min(self.written_index, last_index)

    def install(self, snapshot: Snapshot) -> None:
        """A snapshot stands in for everything."""
        self._tail = []
        self._tail_bytes = 0
        self._configurations = [(snapshot.index, snapshot.configuration)]
        self.terms = TermRuns(snapshot.index, snapshot.term)
        self.handed_index = self.written_index = snapshot.index

    def compact(self, base_index: int) -> None:
        """Entries up to ``base_index`` are not kept any more."""
        holds = self.configuration_at(base_index)
        self._configurations = [(base_index, holds), *[item for item in self._configurations if item[0] > base_index]]
        self.terms.compact(base_index)
        self._drop_up_to(base_index)

    def unhanded(self) -> list[Entry]:
        """What the driver has not got yet."""
        missing = self.terms.last_index - self.handed_index
        return self._tail[len(self._tail) - missing :] if missing else []

    def written(self, index: int) -> None:
        """The driver wrote all up to an entry."""
        self.written_index = max(self.written_index, min(index, self.terms.last_index))
        if self._tail_bytes > self._max_tail_bytes:
            excess = self._tail_bytes - self._max_tail_bytes
            last = self._tail[0].index - 1
            for entry in self._tail:
                if excess <= 0 or entry.index > self.written_index:
                    break
                excess -= entry.size
                last = entry.index
            self._drop_up_to(last)

    def entries(self, first: int, max_bytes: int, max_entries: int) -> list[Entry]:
        """Entries from ``first`` on, at least one if the log has it at hand."""
        tail = self._tail
        last = min(self.terms.last_index, first + max_entries - 1)
        if not tail or first < tail[0].index:
            if last < first:
                return []
            return self._log.entries(first, min(last, tail[0].index - 1) if tail else last, max_bytes)
        start = first - tail[0].index
        size = 0
        end = start
        limit = last - tail[0].index + 1
        while end < limit:
            size += tail[end].size
            if size > max_bytes and end > start:
                break
            end += 1
        return tail[start:end]

    def bytes_behind(self, index: int) -> int:
        """Payload behind an entry, as far as it is in memory; of what is not, more than anybody would call little."""
        tail = self._tail
        if index >= self.terms.last_index:
            return 0
        if not tail or index + 1 < tail[0].index:
            return 1 << 60
        size = 0
        for position in range(index + 1 - tail[0].index, len(tail)):
            size += tail[position].size
        return size

    def snapshot(self) -> Snapshot | None:
        return self._log.snapshot()

    def _drop_up_to(self, index: int) -> None:
        tail = self._tail
        count = 0
        for entry in tail:
            if entry.index > index:
                break
            self._tail_bytes -= entry.size
            count += 1
        del tail[:count]
