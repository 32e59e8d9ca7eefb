"""How near brokers must be to share a group: one threshold to join, a higher one to leave (section II-C), and the rule by
which each group finds its own (the paper's future work, section VI).

Latencies here and everywhere in groups are one way, in milliseconds: half the measured round trip. A threshold belongs to a
group: its leader has it, announces it, and tells its members with every view. Leaders merge only if they are nearer than
*both* want, so a group that can bear no more is not drawn into a larger one by a generous neighbour.

The adaptive rule. *Excess* is the share of messages that reached brokers of the group where nobody wanted them. While it is
below its budget the threshold rises, so that latency gets better; above, it falls, so that the farthest leave, until it is
not. A rule like that swings for ever if nothing stops it: a broker comes, there is too much, it leaves, there is room, it
comes again. Four things stop it:

- Evidence. A step needs so many messages over so long a time, twice in a row for less and three times for more, and starts
  anew whenever the group changes: what was seen of another group says nothing.
- A gap. Between :data:`ROOM` of the budget and the whole of it nothing happens.
- A ceiling. Whoever left did so because it was farther than the leave threshold at that time. Below that threshold nobody of
  them can come back; so that is how far the join threshold rises again, for :attr:`AdaptiveThresholds.ceiling_until`.
- Patience. When the ceiling has gone, and the threshold gone up, and it was too much once more, the next ceiling stays twice
  as long. A group whose neighbours stay as they are thus changes ever more rarely: a few times a day.
"""

from __future__ import annotations

import math
from typing import Final

FOREVER: Final = math.inf

PERIOD_S: Final = 10.0
"""Time over which messages are counted before anything is concluded from them."""

LEAST_MESSAGES: Final = 100
"""Messages that must have been counted as well."""

SETTLE_S: Final = 5.0
"""How long after a change of the group counts are ignored: reports about the former one are still on their way."""

ROOM: Final = 0.8
"""Below this share of the budget there is room for more."""

RAISE: Final = 1.1
LOWER: Final = 0.8
PERIODS_TO_RAISE: Final = 3
PERIODS_TO_LOWER: Final = 2

FIRST_CEILING_S: Final = 1_800.0
LONGEST_CEILING_S: Final = 86_400.0


class Thresholds:
    """The paper's rule: two fixed thresholds, the second above the first, so that a latency that moves a little moves
    nobody."""

    def __init__(self, join_ms: float, leave_ms: float) -> None:
        self._join_ms = join_ms
        self._leave_ms = leave_ms

    @property
    def join_ms(self) -> float:
        """Leaders nearer than this merge; a member follows its leader to another that is nearer than this."""
        return self._join_ms

    @property
    def leave_ms(self) -> float:
        """A member farther than this from its leader leaves."""
        return self._leave_ms

    @property
    def largest_ms(self) -> float:
        """More than this the first never becomes: brokers farther away need no measuring."""
        return self._join_ms

    def observed(self, correct: int, redundant: int, now: float) -> None:
        """So many messages were wanted where they came to, and so many not, at brokers of the group that this one leads. The
        fixed rule does not care."""

    def regrouped(self, now: float) -> None:
        """The group that this broker leads is not the one that was observed: somebody came or went."""

    def followed(self, join_ms: float, now: float) -> None:
        """This broker is a member of a group with this threshold. The fixed rule does not care."""


class AdaptiveThresholds(Thresholds):
    """See the module. ``budget``: the share of messages that may come for nobody."""

    def __init__(self, join_ms: float, leave_ms: float, budget: float, least_ms: float, largest_ms: float, now: float) -> None:
        super().__init__(min(max(join_ms, least_ms), largest_ms), leave_ms)
        # How much farther than the one the other is. Where joining is for nobody at all there is nothing to multiply.
        self._gap = max(1.0, leave_ms / join_ms) if 0.0 < join_ms < FOREVER else 1.25
        self._leave_ms = self._gap * self._join_ms
        self.budget = budget
        self.excess = math.nan
        """Of the last period; not a number before there was one."""
        self.raised = 0
        self.lowered = 0
        self.ceiling_ms = FOREVER
        """The threshold does not rise above this, because it was too much,"""
        self.ceiling_until = -FOREVER
        """until then."""
        self._least_ms = least_ms
        self._largest_ms = largest_ms
        self._ceiling_s = FIRST_CEILING_S
        self._last_ceiling_ms = FOREVER
        self._lowering = False
        self._over = 0
        self._under = 0
        self._correct = 0
        self._redundant = 0
        self._since = now

    @property
    def largest_ms(self) -> float:
        return self._largest_ms

    def regrouped(self, now: float) -> None:
        self._begin(now + SETTLE_S)
        self._over = 0
        self._under = 0

    def followed(self, join_ms: float, now: float) -> None:
        # Whoever leaves a group, or loses its leader, begins with what that group had found out. What it found out itself
        # while it led still holds: else two that take turns in leading would try the same thing for ever.
        self._set(join_ms)
        self._lowering = False
        self.regrouped(now)

    def observed(self, correct: int, redundant: int, now: float) -> None:
        if now < self._since:
            return
        self._correct += correct
        self._redundant += redundant
        messages = self._correct + self._redundant
        if now - self._since < PERIOD_S or messages < LEAST_MESSAGES:
            return
        self.excess = self._redundant / messages
        self._begin(now)
        if self.excess > self.budget:
            self._under = 0
            self._over += 1
            if self._over >= PERIODS_TO_LOWER:
                self._lower(now)
        elif self.excess < ROOM * self.budget:
            self._over = 0
            self._under += 1
            if self._under >= PERIODS_TO_RAISE:
                self._under = 0
                self._raise(now)
        else:
            self._over = 0
            self._under = 0
            self._lowering = False

    def _begin(self, now: float) -> None:
        self._since = now
        self._correct = 0
        self._redundant = 0

    def _set(self, join_ms: float) -> None:
        self._join_ms = min(max(join_ms, self._least_ms), self._largest_ms)
        self._leave_ms = self._gap * self._join_ms

    def _lower(self, now: float) -> None:
        if self._join_ms <= self._least_ms:
            return
        if not self._lowering:
            self._lowering = True
            # Too much again where it was too much before: do not try so soon next time.
            again = self._join_ms > self._last_ceiling_ms
            self._ceiling_s = min(2.0 * self._ceiling_s, LONGEST_CEILING_S) if again else FIRST_CEILING_S
        self._set(LOWER * self._join_ms)
        self.lowered += 1
        self.ceiling_ms = self._last_ceiling_ms = self._leave_ms
        self.ceiling_until = now + self._ceiling_s

    def _raise(self, now: float) -> None:
        self._lowering = False
        if now >= self.ceiling_until:
            self.ceiling_ms = FOREVER
        before_ms = self._join_ms
        if before_ms > self._gap * self._last_ceiling_ms:
            # Who left then is back by now, and it is not too much any more.
            self._last_ceiling_ms = FOREVER
        self._set(min(RAISE * before_ms, max(before_ms, self.ceiling_ms)))
        if self._join_ms > before_ms:
            self.raised += 1
