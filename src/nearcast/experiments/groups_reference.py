"""What the paper's own simulation gave (MoeweX/broadcast-group-simulation, output stored in its notebook): to compare with.

The same rule in rounds instead of messages, on other cities (worldcities of simplemaps), a random part of them each time.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Reference(NamedTuple):
    """One run of theirs."""

    brokers: int
    threshold_ms: float
    groups: int
    leader_joins: int | None = None
    member_joins: int | None = None
    notifications: int | None = None


REFERENCE: Final = (
    Reference(1_200, 10.0, 260, 1_070, 868, 998),
    Reference(2_400, 10.0, 337, 2_493, 2_555, 2_985),
    Reference(3_600, 10.0, 369, 3_763, 4_565, 5_097),
    Reference(4_800, 10.0, 399, 5_716, 7_682, 8_997),
    Reference(6_000, 10.0, 403, 6_823, 9_311, 10_537),
    Reference(9_600, 70.0, 22, 11_325, 37_612, 39_359),
    Reference(2_400, 50.0, 35, 2_837, 6_218),
    Reference(12_000, 30.0, 89),
)

NOTIFICATIONS_PER_MEMBER_JOIN: Final = 1.0407
"""The median over their 160 runs."""
