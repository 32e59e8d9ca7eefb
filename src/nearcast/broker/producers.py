"""Which producers of batches are remembered, and who is forgotten when there are too many.

What is remembered of a producer is its last batch: without that, a batch that is handed in once more is published once more.
So whoever goes on for years (a streaming query) must not be forgotten because of others: producers that never come back have
room of their own, and a user who makes many pays with their own.

This module knows names. Where it is written down what a producer's last batch was is the log's business.
"""

from __future__ import annotations

from collections import OrderedDict

from nearcast.topiclog import wire

PREFIX = "batch/"
"""Of the names under which the log remembers producers."""


def producer_of(username: str | None, name: str) -> str:
    """Under which name the log remembers a user's producer. Another user's of the same name is another one."""
    user = username or ""
    return f"{PREFIX}{len(user)}:{user}/{name}"


def _parse(producer: str) -> tuple[str, str]:
    """User and name."""
    length, _, rest = producer.removeprefix(PREFIX).partition(":")
    return rest[: int(length)], rest[int(length) + 1 :]


class Remembered:
    """Producers by user, those that committed last at the end: ``most_lasting``, and ``most_passing`` with a single batch."""

    def __init__(self, most_lasting: int, most_passing: int) -> None:
        self._lasting = _Kind(most_lasting)
        self._passing = _Kind(most_passing)

    def add(self, producer: str) -> str | None:
        """It has committed something; the producer to forget for it, if there are too many."""
        user, name = _parse(producer)
        kind = self._passing if name.startswith(wire.ONCE_PREFIX) else self._lasting
        return kind.add(user, producer)


class _Kind:
    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._by_user: dict[str, OrderedDict[str, None]] = {}

    def add(self, user: str, producer: str) -> str | None:
        own = self._by_user.setdefault(user, OrderedDict())
        self._count += producer not in own
        own[producer] = None
        own.move_to_end(producer)
        if self._count <= self._most:
            return None
        greediest = max(self._by_user, key=lambda each: len(self._by_user[each]))
        oldest, _ = self._by_user[greediest].popitem(last=False)
        self._count -= 1
        if not self._by_user[greediest]:
            del self._by_user[greediest]
        return oldest
