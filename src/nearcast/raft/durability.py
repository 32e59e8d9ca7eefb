"""What is on disk, and what must not be said before it is.

Each Ready that writes has a number; :meth:`persisted` says that all up to one is flushed. Replies wait here for the number
that has what they rest on. A cut of the log takes it back for what was cut: a flush that was begun before says nothing about
entries that were written again after.
"""

from __future__ import annotations

from collections import deque

from nearcast.raft.entries import HardState
from nearcast.raft.messages import Message


class _Flight:
    """A Ready that is being flushed."""

    def __init__(self, number: int, last_index: int, term: int, vote: int) -> None:
        self.number = number
        self.last_index = last_index
        self.term = term
        self.vote = vote


class _Held:
    def __init__(self, number: int, message: Message) -> None:
        self.number = number
        self.message = message


class Durability:
    """See the module."""

    def __init__(self, hard_state: HardState, last_index: int) -> None:
        self.number = 0
        """Of the last Ready that wrote something."""
        self.persisted_index = last_index
        self.handed_term = hard_state.term
        self.handed_vote = hard_state.vote
        self.handed_commit = hard_state.commit
        self._persisted_term = hard_state.term
        self._persisted_vote = hard_state.vote
        self._flights: deque[_Flight] = deque()
        self._held: deque[_Held] = deque()

    @property
    def flushing(self) -> int:
        """Readys that were handed out and are not known to be on disk."""
        return len(self._flights)

    def is_promised(self, term: int, vote: int) -> bool:
        """Whether term and vote are on disk: then it may be told."""
        return term == self._persisted_term and vote == self._persisted_vote

    def hold(self, message: Message, term: int, vote: int) -> None:
        """Keep a message until term, vote, and all that is in the log now, are on disk."""
        handed = term == self.handed_term and vote == self.handed_vote
        self._held.append(_Held(self.number if handed else self.number + 1, message))

    def forget_held(self) -> None:
        """What waited was about a term that is over."""
        self._held.clear()

    def handed(self, last_index: int, term: int, vote: int) -> None:
        """A Ready that writes goes out."""
        self.number += 1
        self.handed_term = term
        self.handed_vote = vote
        self._flights.append(_Flight(self.number, last_index, term, vote))

    def cut(self, last_index: int) -> None:
        """What is behind an entry was dropped."""
        self.persisted_index = min(self.persisted_index, last_index)
        for flight in self._flights:
            flight.last_index = min(flight.last_index, last_index)

    def install(self) -> None:
        """The whole log is replaced: nothing of the new one is on disk."""
        self.cut(0)

    def persisted(self, number: int) -> list[Message]:
        """All Readys up to one are on disk; returns what may be said now."""
        while self._flights and self._flights[0].number <= number:
            flight = self._flights.popleft()
            self.persisted_index = max(self.persisted_index, flight.last_index)
            self._persisted_term = flight.term
            self._persisted_vote = flight.vote
        released: list[Message] = []
        while self._held and self._held[0].number <= number:
            released.append(self._held.popleft().message)
        return released
