"""What a leader knows of another replica, and how much it sends there without an answer.

=========== ====================================================================== =========================================
state       what is sent                                                           ends
=========== ====================================================================== =========================================
PROBING     one Append at a time: where do the logs part?                          accepted: REPLICATING
REPLICATING Appends one behind the other, up to the window, before any is answered rejected: PROBING
INSTALLING  nothing: the driver brings a snapshot                                  acknowledged, or the driver gave up
=========== ====================================================================== =========================================
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from nearcast.raft.timing import RoundTrips

PROBING: Final = 0
REPLICATING: Final = 1
INSTALLING: Final = 2


class _Sent:
    """An Append on its way."""

    def __init__(self, last_index: int, size: int, round_: int) -> None:
        self.last_index = last_index
        self.size = size
        self.round = round_
        """The heartbeat that was the last one then."""


class Progress:
    """See the module."""

    def __init__(self, replica: int, next_index: int, now: float) -> None:
        self.replica = replica
        self.state = PROBING
        self.match = 0
        """Up to here the replica's disk has what the leader has."""
        self.next = next_index
        """What is sent next."""
        self.waiting = False
        """PROBING: for the answer to the one Append. A heartbeat's answer ends it as well, should that one be lost."""
        self.snapshot_index = 0
        """INSTALLING: of which snapshot."""
        self.heard_s = now
        """When it last answered anything; at first, when the leader began."""
        self.heard = False
        self.round = 0
        """The newest heartbeat that it answered."""
        self.priority = 0
        self.told_commit = 0
        """The newest commit index that was sent."""
        self.preferred_since_s = math.inf
        """Since when it should lead instead of the leader, and could."""
        self.round_trips = RoundTrips()
        self._sent: deque[_Sent] = deque()
        self._inflight_bytes = 0

    @property
    def inflight_bytes(self) -> int:
        return self._inflight_bytes

    @property
    def inflight_messages(self) -> int:
        return len(self._sent)

    def is_open(self, max_bytes: int, max_messages: int) -> bool:
        """Whether something may be sent now."""
        if self.state == REPLICATING:
            return self._inflight_bytes < max_bytes and len(self._sent) < max_messages
        return self.state == PROBING and not self.waiting

    def sent(self, last_index: int, size: int, round_: int) -> None:
        """Entries up to one are on their way."""
        if self.state == REPLICATING:
            self.next = last_index + 1
            self._sent.append(_Sent(last_index, size, round_))
            self._inflight_bytes += size
        else:
            self.waiting = True

    def acknowledged(self, index: int) -> bool:
        """It has everything up to ``index`` on disk; says whether that is news."""
        while self._sent and self._sent[0].last_index <= index:
            self._inflight_bytes -= self._sent.popleft().size
        news = index > self.match
        if news:
            self.match = index
            self.next = max(self.next, index + 1)
        return news

    def probe(self, next_index: int) -> None:
        """Find out where the logs part, from here on backwards."""
        self.state = PROBING
        self.waiting = False
        self.next = max(next_index, self.match + 1)
        self._clear()

    def replicate(self, received: int = 0) -> None:
        """The logs agree up to ``match``, or (in memory) even up to ``received``: stream what is behind."""
        self.state = REPLICATING
        self.waiting = False
        self.next = max(self.match, received) + 1
        self._clear()

    def install(self, index: int) -> None:
        """Wait for a snapshot to arrive."""
        self.state = INSTALLING
        self.waiting = False
        self.snapshot_index = index
        self._clear()

    def lost(self, received: int, round_: int) -> bool:
        """Whether something that was sent before a heartbeat of this round is missing behind it: then it is sent again."""
        if self.state != REPLICATING or not self._sent or self._sent[-1].last_index <= received:
            return False
        missing = False
        for sent in self._sent:
            if sent.last_index > received:
                missing = sent.round < round_
                break
        if missing:
            self.next = max(self.match, received) + 1
            while self._sent and self._sent[-1].last_index >= self.next:
                self._inflight_bytes -= self._sent.pop().size
        return missing

    def _clear(self) -> None:
        self._sent.clear()
        self._inflight_bytes = 0
