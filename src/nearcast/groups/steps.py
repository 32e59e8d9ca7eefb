"""What a broker that forms groups is in the middle of."""

from __future__ import annotations

import math
from typing import Final

from nearcast.groups.views import Member

FOREVER: Final = math.inf

IDLE: Final = 0
ASKING: Final = 1
"""A leader asked another to merge, and waits for the answer."""
MEASURING: Final = 2
"""A member was told of another leader, and waits until it knows how far that is."""
JOINING: Final = 3
"""A leader or a member asked another leader to take it in."""

NOBODY: Final = Member("", "", 0)


class Step:
    """One at a time, with one other broker, until a deadline."""

    def __init__(self) -> None:
        self.kind = IDLE
        self.target = NOBODY
        self.threshold_ms = 0.0
        """The target is joined if it is nearer than this."""
        self.deadline = FOREVER
        self.begun_at = 0.0
        self.first_number = 0
        """Numbers from this one on belong to the step."""
        self.tries = 0
        """How often its question was sent."""
        self.hops = 0
        """How many brokers in a row have sent us on."""
        self.voluntary = False
        """Whether we have a leader that still leads, and go back to it if nothing comes of this."""
        self.lcm = 0.0
        self.size = 0
        """What the question said."""

    def is_with(self, name: str) -> bool:
        return self.kind != IDLE and self.target.name == name

    def begin(self, kind: int, target: Member, now: float) -> None:
        self.kind = kind
        self.target = target
        self.begun_at = now
        self.deadline = FOREVER
        self.tries = 0
        self.voluntary = False

    def end(self) -> None:
        self.kind = IDLE
        self.target = NOBODY
        self.deadline = FOREVER
        self.voluntary = False
