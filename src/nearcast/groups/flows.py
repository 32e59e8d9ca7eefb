"""Flow-aware membership: a member goes over to the group that most of what its clients want comes from (section VI).

Formation looks at latency only: "two very well-connected brokers that exchange large amounts of data might end up in separate
broadcast groups, and therefore have to communicate via the cloud". Every broadcast message says which leader relayed it to
the cloud, so a broker sees where the messages come from that its clients wanted: its own group, or which other. This counts
them and says when it is time to go; whether the other leader is near enough, and how to go over, is
:class:`~nearcast.groups.formation.Formation`'s business.

It takes a clear majority (:data:`MAJORITY` of all that came from other brokers), for :data:`PERIODS` periods in a row. Two
things keep brokers from dancing around each other. Two members that want each other's messages could change places for ever:
so whoever would go to the leader with the smaller name waits twice as long, and by then has the other one in its group. And
after a change a broker stays for :data:`FIRST_STAY_S`, twice as long each time it returns to a leader that it left.
"""

from __future__ import annotations

import math
from typing import Final

FOREVER: Final = math.inf

PERIOD_S: Final = 10.0
"""Time over which messages are counted."""

LEAST_MESSAGES: Final = 50
"""A period with fewer says nothing."""

MAJORITY: Final = 0.6
"""Share of the messages from other brokers that another group must have."""

PERIODS: Final = 3
"""So many periods in a row it must have it."""

FIRST_STAY_S: Final = 300.0
LONGEST_STAY_S: Final = 86_400.0

MAX_LEADERS: Final = 1_000
"""Leaders that are counted in a period at most. Somebody with a majority is among them anyhow: it comes again."""

MAX_FORMER: Final = 100
"""Leaders that this broker left and remembers."""


class Flows:
    """One broker's counts. See the module."""

    def __init__(self, now: float) -> None:
        self.changes = 0
        """How often this broker has gone over to another leader because of its flows."""
        self._leader = ""
        self._counts: dict[str, int] = {}
        self._own = 0
        self._since = now
        self._favourite = ""
        self._lasting = 0
        self._stays_until = -FOREVER
        self._stay_s = FIRST_STAY_S
        self._going_to = ""
        self._former: dict[str, None] = {}

    def relevant(self, relayed_by: str, messages: int = 1) -> None:
        """Messages that clients here wanted came from another broker, relayed to the cloud by that leader; empty: flooded in
        our own group."""
        if not relayed_by or relayed_by == self._leader:
            self._own += messages
        elif relayed_by in self._counts or len(self._counts) < MAX_LEADERS:
            self._counts[relayed_by] = self._counts.get(relayed_by, 0) + messages

    def belongs_to(self, leader: str, now: float) -> None:
        """This broker follows another leader from now on, for whatever reason, or leads."""
        former, self._leader = self._leader, leader
        if former == leader:
            return
        self._begin(now)
        self._favourite = ""
        self._lasting = 0
        if leader != self._going_to:
            return
        self._going_to = ""
        self.changes += 1
        self._stay_s = min(2.0 * self._stay_s, LONGEST_STAY_S) if leader in self._former else FIRST_STAY_S
        self._stays_until = now + self._stay_s
        self._former.pop(former, None)
        self._former[former] = None
        if len(self._former) > MAX_FORMER:
            del self._former[next(iter(self._former))]

    def preferred(self, now: float) -> str:
        """The leader to go over to; empty while there is no reason to. To be asked now and then: it ends a period when it is
        over."""
        if now - self._since >= PERIOD_S:
            self._conclude(now)
        needed = PERIODS if self._favourite > self._leader else 2 * PERIODS
        if not self._favourite or self._lasting < needed or now < self._stays_until:
            return ""
        self._going_to = self._favourite
        return self._favourite

    def _conclude(self, now: float) -> None:
        messages = self._own + sum(self._counts.values())
        favourite = ""
        if messages >= LEAST_MESSAGES and self._counts:
            most = max(self._counts, key=self._counts.__getitem__)
            if self._counts[most] >= MAJORITY * messages:
                favourite = most
        if favourite != self._favourite:
            self._favourite = favourite
            self._lasting = 0
            self._going_to = ""
        if favourite:
            self._lasting += 1
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._since = now
        self._own = 0
        self._counts.clear()
