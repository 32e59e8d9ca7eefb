"""Whether what clients saw of the directory could have been one register per topic, changed by compare-and-set.

Versions never come again, so a history needs no search: in the one order that there can be, writes come by version, each with
the version that it expected just below it, and every read stands behind the write it saw. That order is a valid one if it
agrees with time: nobody sees an older version than something that ended before it began.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import msgspec

from nearcast.errors import InvariantViolated


class Began(msgspec.Struct, frozen=True):
    """A client asks. ``number`` is the request's, and a writer's name."""

    number: int
    topic: str
    expected: int | None
    """The version that the write depends on; none: a read."""


class Ended(msgspec.Struct, frozen=True):
    """It is answered: with this version there (0: no record), by this writer; ``done``: the write was."""

    number: int
    version: int
    writer: str
    done: bool


class History:
    """All topics'. Told of everything in the order of time; raises as soon as something cannot be."""

    def __init__(self) -> None:
        self.reads = 0
        self.writes = 0
        self.conflicts = 0
        self._open: dict[int, tuple[Began, int]] = {}
        self._newest: dict[str, int] = {}
        """By topic, the highest version that anybody has seen."""
        self._writers: dict[tuple[str, int], str] = {}
        self._expected: dict[tuple[str, int], int] = {}
        """By topic and expected version, the version that was written."""
        self._versions: dict[str, list[int]] = {}

    def began(self, began: Began) -> None:
        self._open[began.number] = (began, self._newest.get(began.topic, 0))

    def ended(self, ended: Ended, who: Any) -> None:
        began, floor = self._open.pop(ended.number)
        topic, version = began.topic, ended.version
        if version < floor:
            raise InvariantViolated(f"{topic}: version {version} was seen after {floor}", [who])
        self._newest[topic] = max(self._newest.get(topic, 0), version)
        if version and self._writers.setdefault((topic, version), ended.writer) != ended.writer:
            raise InvariantViolated(f"{topic}: two writers have version {version}", [who])
        if began.expected is None:
            self.reads += 1
        elif not ended.done:
            self.conflicts += 1
        else:
            self.writes += 1
            self._wrote(topic, began.expected, version, who)

    def abandoned(self, number: int) -> None:
        """Whoever asked will never know."""
        self._open.pop(number, None)

    def _wrote(self, topic: str, expected: int, version: int, who: Any) -> None:
        written = self._expected.setdefault((topic, expected), version)
        if written != version:
            raise InvariantViolated(f"{topic}: two writes expected version {expected}: {written} and {version}", [who])
        versions = self._versions.setdefault(topic, [])
        place = bisect_left(versions, version)
        # Of what is known to have been written, nothing is between a write and what it expected.
        if place and versions[place - 1] > expected:
            raise InvariantViolated(f"{topic}: {versions[place - 1]} was between {version} and {expected}", [who])
        insort(versions, version)
