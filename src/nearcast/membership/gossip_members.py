"""What :mod:`nearcast.membership.gossip` remembers of one other node, and how it tells its packets from repeated ones."""

from __future__ import annotations

from typing import Final

from nearcast.coordinates.coordinate import Coordinate

FOREVER: Final = float("inf")

UNREACHABLE_S: Final = 300.0
"""How long nobody's word brings a member back that did not answer: it may be dead, or there may be no path from here."""

LOST_S: Final = 86_400.0
"""How long such a member is asked now and then whether it is back."""

REMEMBERED_PACKETS: Final = 64
"""By how many packets one may be overtaken and still be told from one that somebody repeats."""


class Member:
    """A node that is probed, whether or not it has answered yet."""

    def __init__(self, name: str, address: str, pinned: bool) -> None:
        self.name = name
        self.address = address
        self.pinned = pinned
        """Told by somebody who knows (the controller, a person): it stays, and at this address."""
        self.life = 0
        self.number = 0
        """Of the newest packet."""
        self.seen = 0
        """Which of the packets up to that one came, a bit for each, the newest first."""
        self.coordinate: Coordinate | None = None
        self.rtt_ms = -1.0
        self.heard_at = -FOREVER
        self.failures = 0

    def takes(self, life: int, number: int) -> bool:
        """Whether a packet is not one that came before, or may have."""
        if life != self.life:
            if life > self.life:
                self.life, self.number, self.seen = life, number, 1
                return True
            return False
        ahead = number - self.number
        if ahead > 0:
            self.seen = (self.seen << min(ahead, REMEMBERED_PACKETS) | 1) & ((1 << REMEMBERED_PACKETS) - 1)
            self.number = number
            return True
        if -ahead >= REMEMBERED_PACKETS or self.seen >> -ahead & 1:
            return False
        self.seen |= 1 << -ahead
        return True


class Lost:
    """A node that stopped to answer. What it said last stays known, so that nobody brings it back by repeating it."""

    def __init__(self, member: Member, now: float) -> None:
        self.member = member
        self.hearsay_from = now + UNREACHABLE_S
        self.ask_until = now + LOST_S
