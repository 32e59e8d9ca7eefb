"""Deadlines of an engine, soonest first.

Everyone has at most one look planned that counts (``timer_at``). Whoever is woken checks what is due and asks again. Nobody is
taken out early, so no look is planned further ahead than :data:`FURTHEST_SECONDS`: that is how long something that has ended
may stay in memory for the sake of a deadline it no longer has.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from nearcast.mqtt.connection import Connection
    from nearcast.mqtt.session import Session

FURTHEST_SECONDS: Final = 300.0


class Timers:
    """A heap of (time of the look, order, subject)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Connection | Session]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._heap)

    def schedule(self, subject: Connection | Session, deadline: float, now: float) -> None:
        """Wake ``subject`` at ``deadline`` or earlier."""
        look = min(deadline, now + FURTHEST_SECONDS)
        if 0.0 < subject.timer_at <= look:
            return
        subject.timer_at = look
        self._order += 1
        heapq.heappush(self._heap, (look, self._order, subject))

    def next_deadline(self) -> float:
        """When :meth:`due` may next have something; infinity when never."""
        return self._heap[0][0] if self._heap else float("inf")

    def due(self, now: float) -> list[Connection | Session]:
        """Everyone whose look has come, in order; they have none planned any more."""
        woken: list[Connection | Session] = []
        while self._heap and self._heap[0][0] <= now:
            look, _, subject = heapq.heappop(self._heap)
            if subject.timer_at == look:  # else an earlier look took its place
                subject.timer_at = 0.0
                woken.append(subject)
        return woken
