"""Leadership goes where it is wanted: to the replica with the highest priority (Canal §III-B), or to one that is named.

Each replica knows its own priority, which its driver sets and may change, and tells the leader with every answer; there is one
truth about each, and leaders cannot disagree about who is preferred. A leader hands over when a voter of higher priority has
been there and caught up for a while. If that fails, or leadership comes straight back, it waits twice as long the next time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nearcast.raft.messages import TimeoutNow
from nearcast.raft.progress import REPLICATING, Progress

if TYPE_CHECKING:
    from nearcast.raft.leading import Leading


class Patience:
    """How long a replica, whenever it leads, waits before it hands over; outlives its terms as leader."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self.delay_s = least_s
        self._least_s = least_s
        self._most_s = most_s
        self._handed_over_s = -math.inf

    def elected(self, now: float) -> None:
        """Leadership came, or came back."""
        if now - self._handed_over_s < self._most_s:
            self.failed()
        else:
            self.delay_s = self._least_s

    def handed_over(self, now: float) -> None:
        self._handed_over_s = now

    def failed(self) -> None:
        self.delay_s = min(2.0 * self.delay_s, self._most_s)


class Handover:
    """A leader's side of it."""

    def __init__(self, leading: Leading) -> None:
        self._leading = leading
        self._node = leading.node
        self.target = 0
        """Who is to lead; 0: nobody else."""
        self.deadline = math.inf
        self._asked = False
        self._by_priority = False

    def begin(self, target: int, by_priority: bool) -> None:
        """Take no proposals from now on, bring the target up to date, and tell it to stand (thesis §3.10)."""
        self.target = target
        self.deadline = self._node.now + self._node.timeout_s
        self._asked = False
        self._by_priority = by_priority

    def advance(self) -> None:
        """The target may have caught up."""
        if self.target and not self._asked:
            progress = self._leading.progress.get(self.target)
            if progress is None or self.target not in self._node.view.configuration.voters:
                self.target = 0
            elif progress.match == self._node.view.last_index:
                self._asked = True
                self._node.send(TimeoutNow(self._node.id, self.target, self._node.term))
                if self._by_priority:
                    self._node.patience.handed_over(self._node.now)

    def tick(self) -> None:
        """With each heartbeat: give up, or say it again, or begin."""
        node = self._node
        if self.target:
            if node.now >= self.deadline:
                self.target = 0
                self.deadline = math.inf
                if self._by_priority:
                    node.patience.failed()
                    for progress in self._leading.progress.values():
                        progress.preferred_since_s = math.inf
            else:
                self._asked = False
                self.advance()
            return
        best: Progress | None = None
        for replica in node.view.configuration.voters:
            candidate = self._leading.progress.get(replica)
            if candidate is None:
                continue
            if not self._could_lead(candidate):
                candidate.preferred_since_s = math.inf
                continue
            candidate.preferred_since_s = min(candidate.preferred_since_s, node.now)
            if best is None or candidate.priority > best.priority:
                best = candidate
        if best is not None and node.now - best.preferred_since_s >= node.patience.delay_s and self._leading.is_settled:
            self.begin(best.replica, True)
            self.advance()

    def _could_lead(self, progress: Progress) -> bool:
        node = self._node
        return (
            progress.heard
            and progress.priority > node.priority
            and node.now - progress.heard_s < node.timeout_s
            and progress.state == REPLICATING
            and node.view.bytes_behind(progress.match) <= node.settings.caught_up_bytes
        )
