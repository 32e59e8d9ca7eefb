"""The terms of a log's entries, as runs: a term lasts for many entries, so a log of millions needs a handful of numbers."""

from __future__ import annotations

from bisect import bisect_right

UNKNOWN = -1


class TermRuns:
    """Terms from the entry before the first one kept (the base) to the last one. An empty log that never had an entry has the
    base 0 of term 0."""

    def __init__(self, base_index: int = 0, base_term: int = 0) -> None:
        self.last_index = base_index
        self._firsts = [base_index]
        self._terms = [base_term]

    @property
    def base_index(self) -> int:
        """The entry before the first one kept: its term is known, its content may be gone."""
        return self._firsts[0]

    @property
    def last_term(self) -> int:
        return self._terms[-1]

    def runs(self) -> list[tuple[int, int]]:
        """First index and term of each run; the first one begins at the base."""
        return list(zip(self._firsts, self._terms, strict=True))

    def copy(self) -> TermRuns:
        """The same terms, apart from these."""
        made = TermRuns(self._firsts[0], self._terms[0])
        made._firsts = self._firsts.copy()
        made._terms = self._terms.copy()
        made.last_index = self.last_index
        return made

    def term_of(self, index: int) -> int:
        """Of an entry; UNKNOWN if it is before the base or behind the end."""
        if index > self.last_index or index < self._firsts[0]:
            return UNKNOWN
        if index >= self._firsts[-1]:
            return self._terms[-1]
        return self._terms[bisect_right(self._firsts, index) - 1]

    def append(self, term: int) -> None:
        """One more entry."""
        self.last_index += 1
        if term != self._terms[-1]:
            self._firsts.append(self.last_index)
            self._terms.append(term)

    def cut(self, last_index: int) -> None:
        """Entries behind ``last_index`` are gone. It is not before the base."""
        while len(self._firsts) > 1 and self._firsts[-1] > last_index:
            self._firsts.pop()
            self._terms.pop()
        self.last_index = min(self.last_index, last_index)

    def compact(self, base_index: int) -> None:
        """Entries up to ``base_index``, which is one of them, are gone."""
        run = bisect_right(self._firsts, base_index) - 1
        if run < 0:
            return
        del self._firsts[:run]
        del self._terms[:run]
        self._firsts[0] = base_index

    def last_at_most(self, index: int, term: int) -> int:
        """The last entry, not behind ``index``, whose term is not above ``term``; the base if there is none."""
        index = min(index, self.last_index)
        run = bisect_right(self._firsts, index) - 1
        if run < 0:
            return self._firsts[0]
        if self._terms[run] <= term:
            return index
        run = bisect_right(self._terms, term) - 1
        return self._firsts[run + 1] - 1 if run >= 0 else self._firsts[0]
