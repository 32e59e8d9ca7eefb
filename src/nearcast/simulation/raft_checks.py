"""What must hold of a replica set at any time (Raft, figure 3), and what its clients may see: linearizability of its topics.

Whoever simulates replicas tells these checks what happens, in the order in which it happens; each raises
:class:`~nearcast.errors.InvariantViolated` as soon as something cannot be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from nearcast.errors import InvariantViolated
from nearcast.raft.entries import Entry


class Safety:
    """The properties of figure 3, over all replicas of one set, living and dead."""

    def __init__(self) -> None:
        self.leaders: dict[int, int] = {}
        """Of each term."""
        self.committed: list[Entry] = []
        """Entries 1, 2, ..., as the first replica committed them that did."""
        self._written: dict[tuple[int, int], tuple[list[bytes], int]] = {}

    @property
    def commit(self) -> int:
        return len(self.committed)

    def elected(self, replica: int, term: int, terms_of: dict[int, int], first_index: int) -> None:
        """A replica leads. ``terms_of``: of the entries of its log, from ``first_index`` on.

        Election Safety: one leader in a term. Leader Completeness: it has all that was committed in earlier terms.
        """
        before = self.leaders.setdefault(term, replica)
        if before != replica:
            raise InvariantViolated(f"election safety: replicas {before} and {replica} lead in term {term}")
        for entry in self.committed[first_index - 1 :]:
            if entry.term < term and terms_of.get(entry.index) != entry.term:
                raise InvariantViolated(
                    f"leader completeness: replica {replica} leads in term {term} without the committed entry {entry}"
                )

    def wrote(self, replica: int, entries: Iterable[Entry], previous_term: int) -> None:
        """A replica puts entries into its log, behind one of ``previous_term``.

        Log Matching: one content and one predecessor for each index and term. By induction, all before is the same too.
        """
        for entry in entries:
            known = self._written.setdefault((entry.index, entry.term), (entry.pieces, previous_term))
            is_same = known[0] is entry.pieces or b"".join(known[0]) == b"".join(entry.pieces)
            if not is_same or known[1] != previous_term:
                raise InvariantViolated(f"log matching: replica {replica} has another entry {entry}, or another one before it")
            previous_term = entry.term

    def commits(self, replica: int, entry: Entry) -> bool:
        """A replica takes an entry as committed; says whether it is the first one to. State Machine Safety: nobody ever takes
        another one at that index."""
        if entry.index <= len(self.committed):
            first = self.committed[entry.index - 1]
            if first.term != entry.term or (
                first.pieces is not entry.pieces and b"".join(first.pieces) != b"".join(entry.pieces)
            ):
                raise InvariantViolated(f"state machine safety: replica {replica} commits {entry}, another one {first}")
            return False
        if entry.index != len(self.committed) + 1:
            raise InvariantViolated(f"replica {replica} commits {entry} behind {len(self.committed)}")
        self.committed.append(entry)
        return True


class Operation:
    """A client's publication or read of one topic."""

    def __init__(self, topic: int, began_s: float, value: int = 0) -> None:
        self.topic = topic
        self.value = value
        """What is published; 0: this is a read."""
        self.began_s = began_s
        self.ended_s = math.inf
        """For ever: nobody knows what became of it."""
        self.position = -1
        """The index that a publication got, or the newest that a read found (0: none)."""

    @property
    def reads(self) -> bool:
        return self.value == 0

    def __repr__(self) -> str:
        what = "read" if self.reads else f"publication of {self.value}"
        return f"{what} ({self.began_s:.6f} to {self.ended_s:.6f} s, index {self.position})"


def check_linearizable(operations: Iterable[Operation], topics: dict[int, list[int]]) -> None:
    """Whether what clients saw can have happened one by one, each at some moment between its beginning and its end.

    ``topics``: what each topic holds in the end, in order; each value was published once. With that order known there is one
    place for everything: a publication of what stands at index i is at i, and a read that found n as the newest index is
    between n and n + 1. A history is linearizable exactly if whatever began after something had ended has a later place
    (reads may share one). Publications of which nobody knows count if the topic has them: they never ended.
    """
    by_topic: dict[int, list[Operation]] = {}
    for operation in operations:
        by_topic.setdefault(operation.topic, []).append(operation)
    for topic, theirs in by_topic.items():
        _check_topic(topic, theirs, topics.get(topic, []))


def _check_topic(topic: int, operations: list[Operation], content: list[int]) -> None:
    positions = {value: index for index, value in enumerate(content, 1)}
    if len(positions) != len(content):
        raise InvariantViolated(f"topic {topic} has a message twice")
    placed: list[tuple[float, float, float, Operation]] = []
    known: set[int] = set()
    for operation in operations:
        has_ended = operation.ended_s < math.inf
        if operation.reads:
            if not has_ended:
                continue
            if operation.position > len(content):
                raise InvariantViolated(f"topic {topic}: {operation} found what is not there")
            place = operation.position + 0.5
        else:
            position = positions.get(operation.value)
            if has_ended and position != operation.position:
                raise InvariantViolated(f"topic {topic}: {operation} was acknowledged, and is at {position}")
            if position is None:
                continue
            known.add(operation.value)
            place = float(position)
        placed.append((operation.began_s, operation.ended_s, place, operation))
    if len(known) != len(content):
        raise InvariantViolated(f"topic {topic} has messages that nobody published: {sorted(set(content) - known)}")
    # In the order of time: what has ended before something begins must not have a later place.
    beginnings = sorted(placed, key=lambda item: item[0])
    endings = sorted(placed, key=lambda item: item[1])
    latest: Operation | None = None
    latest_place = -1.0
    ended = 0
    for began_s, _, place, operation in beginnings:
        while ended < len(endings) and endings[ended][1] < began_s:
            if endings[ended][2] > latest_place:
                latest_place = endings[ended][2]
                latest = endings[ended][3]
            ended += 1
        if place < latest_place or (place == latest_place and not operation.reads):
            raise InvariantViolated(f"topic {topic} is not linearizable: {operation} began after {latest} had ended")
