"""Deadlines of an engine, soonest first. Entries are never removed early: whoever is woken checks whether it still matters."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nearcast.mqtt.connection import Connection
    from nearcast.mqtt.session import Session


class Timers:
    """A heap of (deadline, order, subject)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Connection | Session]] = []
        self._order = 0

    def add(self, deadline: float, subject: Connection | Session) -> None:
        self._order += 1
        heapq.heappush(self._heap, (deadline, self._order, subject))

    def next_deadline(self) -> float:
        """When :meth:`due` will next have something; infinity when never."""
        return self._heap[0][0] if self._heap else float("inf")

    def due(self, now: float) -> list[Connection | Session]:
        """Everyone whose deadline has come, in order of deadlines."""
        woken: list[Connection | Session] = []
        while self._heap and self._heap[0][0] <= now:
            woken.append(heapq.heappop(self._heap)[2])
        return woken
