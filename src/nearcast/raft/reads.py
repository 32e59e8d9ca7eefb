"""Linearizable reads without writing anything (thesis §6.4): the commit index, once a majority confirmed who leads.

Reads that come while one batch is under way wait and become the next: however many there are, a round of heartbeats serves
them all. No lease is kept: a lease trusts clocks.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_MAX_ROUNDS: Final = 4
"""Batches under way at a time."""


class Read:
    """Of a replica (``token`` is then its number of a request) or of the leader itself."""

    def __init__(self, source: int, token: int) -> None:
        self.source = source
        self.token = token


class Batch:
    """Reads that one round of heartbeats confirms."""

    def __init__(self, round_: int, index: int, reads: list[Read]) -> None:
        self.round = round_
        self.index = index
        self.reads = reads


class ReadQueue:
    """The leader's side."""

    def __init__(self) -> None:
        self._waiting: list[Read] = []
        self._batches: deque[Batch] = deque()
        self.count = 0

    @property
    def wants_round(self) -> bool:
        """Whether reads wait for a round that has not begun."""
        return bool(self._waiting) and len(self._batches) < _MAX_ROUNDS

    def add(self, read: Read) -> None:
        self._waiting.append(read)
        self.count += 1

    def begin(self, round_: int, commit: int) -> None:
        """All that wait share this round, which is sent now, and what is committed now."""
        self._batches.append(Batch(round_, commit, self._waiting))
        self._waiting = []

    def oldest_round(self) -> int:
        """The first one that is not confirmed; 0 if all are."""
        return self._batches[0].round if self._batches else 0

    def confirmed(self, round_: int) -> list[Batch]:
        """A majority answered a round (or a later one)."""
        done: list[Batch] = []
        while self._batches and self._batches[0].round <= round_:
            batch = self._batches.popleft()
            self.count -= len(batch.reads)
            done.append(batch)
        return done

    def abandoned(self) -> list[Read]:
        """All of them: there is another leader."""
        reads: list[Read] = []
        for batch in self._batches:
            reads.extend(batch.reads)
        reads.extend(self._waiting)
        self._batches.clear()
        self._waiting = []
        self.count = 0
        return reads


class AskedReads:
    """The follower's side: reads that wait for the leader's word."""

    def __init__(self, first_number: int) -> None:
        """``first_number`` is drawn anew for each process: an answer to its predecessor, which comes late, must not be taken
        for one to it."""
        self._tokens: list[list[int]] = []
        self._numbers: list[int] = []
        self._new: list[int] = []
        self._number = first_number
        self.asked_s = 0.0

    @property
    def count(self) -> int:
        return len(self._new) + sum([len(tokens) for tokens in self._tokens])

    @property
    def unanswered(self) -> bool:
        return bool(self._numbers)

    @property
    def has_new(self) -> bool:
        return bool(self._new)

    def add(self, token: int) -> None:
        self._new.append(token)

    def ask(self, now: float) -> int:
        """A number for all that came since the last request."""
        self._number += 1
        self._numbers.append(self._number)
        self._tokens.append(self._new)
        self._new = []
        self.asked_s = now
        return self._number

    def ask_again(self) -> None:
        """The answer was lost, perhaps: everything becomes new."""
        self._new = self.abandoned()

    def answered(self, number: int) -> list[int]:
        """Tokens that an answer is for: those of an earlier request too, since an index for later is one for earlier."""
        answered: list[int] = []
        if number not in self._numbers:
            return answered
        count = self._numbers.index(number) + 1
        for tokens in self._tokens[:count]:
            answered.extend(tokens)
        del self._numbers[:count]
        del self._tokens[:count]
        return answered

    def abandoned(self) -> list[int]:
        """All of them."""
        tokens: list[int] = []
        for asked in self._tokens:
            tokens.extend(asked)
        tokens.extend(self._new)
        self._tokens = []
        self._numbers = []
        self._new = []
        return tokens
