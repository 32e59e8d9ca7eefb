"""How well a latency bound was kept over time: share of time within it, each violation and how long it lasted.

Owns the definitions, for figures 8 and 9 of ePulsar. Time is cut into slots; a topic *violates* its bound in a slot when any
message that was sent in it took longer to any subscriber, and slots in which nothing was delivered say nothing. Violating
slots that are less than ``MERGE_S`` apart are one violation. A *change* is a moment at which a topic's clients moved or became
others; what happens in the ``GRACE_S`` after one is expected, and is not counted where that is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

SLOT_S = 0.1
MERGE_S = 0.5
GRACE_S = 2.0
"""Nobody can do better than this right after clients are somewhere else: they reconnect, and are measured."""


class Slots(NamedTuple):
    """One topic over time, by the slot that messages were sent in."""

    begin_s: Floats
    """Of the slots in which anything was sent that was delivered."""

    worst_ms: Floats
    """The slowest delivery of each."""


class Violation(NamedTuple):
    """A time during which a topic did not keep its bound."""

    begin_s: float
    end_s: float
    worst_ms: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


class Kept(NamedTuple):
    """How one topic did."""

    slots: int
    """In which anything was measured."""

    late: int
    counted: int
    """Slots outside the grace after changes."""

    late_counted: int


def slots(sent_s: Floats, latency_ms: Floats, width_s: float = SLOT_S) -> Slots:
    """A topic's deliveries as slots."""
    if not len(sent_s):
        return Slots(np.zeros(0), np.zeros(0))
    number = np.floor(sent_s / width_s).astype(np.int64)
    found, place = np.unique(number, return_inverse=True)
    worst = np.full(len(found), -np.inf)
    np.maximum.at(worst, place, latency_ms)
    return Slots(np.asarray(found * width_s, dtype=np.float64), worst)


def violations(topic: Slots, bound_ms: float, width_s: float = SLOT_S, merge_s: float = MERGE_S) -> list[Violation]:
    """The times at which a topic was over its bound."""
    late = topic.worst_ms > bound_ms
    found: list[Violation] = []
    for begin_s, worst_ms in zip(topic.begin_s[late].tolist(), topic.worst_ms[late].tolist(), strict=True):
        if found and begin_s - found[-1].end_s < merge_s:
            found[-1] = Violation(found[-1].begin_s, begin_s + width_s, max(found[-1].worst_ms, worst_ms))
        else:
            found.append(Violation(begin_s, begin_s + width_s, worst_ms))
    return found


def after_changes(begin_s: Floats, changes_s: Sequence[float], grace_s: float, width_s: float = SLOT_S) -> Flags:
    """Which slots are, even in part, within the grace after a change."""
    if not len(changes_s):
        return np.zeros(len(begin_s), dtype=np.bool_)
    ordered = np.sort(np.asarray(changes_s, dtype=np.float64))
    # The last change before the slot's end; one that falls into the slot counts from its beginning.
    last = np.searchsorted(ordered, begin_s + width_s, side="left") - 1
    flags: Flags = (last >= 0) & (begin_s < ordered[np.maximum(last, 0)] + grace_s)
    return flags


def kept(topic: Slots, bound_ms: float, changes_s: Sequence[float], grace_s: float = GRACE_S, width_s: float = SLOT_S) -> Kept:
    """How much of the time a topic kept its bound, in all and outside the grace after changes."""
    late = topic.worst_ms > bound_ms
    counted = ~after_changes(topic.begin_s, changes_s, grace_s, width_s)
    return Kept(len(late), int(late.sum()), int(counted.sum()), int((late & counted).sum()))


class Recovery(NamedTuple):
    """A change, and how long the violation that it caused lasted."""

    at_s: float
    took_s: float
    """From the change to the end of the violation; 0 where there was none."""


def recoveries(
    found: Sequence[Violation], changes_s: Sequence[float], until_s: float, grace_s: float = GRACE_S
) -> list[Recovery]:
    """By change: a violation is its own when it begins, or goes on, within the grace after it. One that is still going on at
    the next change, or at ``until_s``, is counted up to there: what follows is the next one's."""
    ordered = sorted(changes_s)
    ends = [*ordered[1:], until_s][: len(ordered)]
    result = []
    for at_s, next_s in zip(ordered, ends, strict=True):
        own = [each for each in found if each.end_s > at_s and each.begin_s < min(at_s + grace_s, next_s)]
        took_s = max((min(each.end_s, next_s) - at_s for each in own), default=0.0)
        result.append(Recovery(at_s, max(0.0, took_s)))
    return result


def share_kept(parts: Sequence[Kept]) -> tuple[float | None, float | None]:
    """Over several topics, in percent: in all, and outside the grace after changes; None where nothing was measured."""
    slots_, counted = sum(part.slots for part in parts), sum(part.counted for part in parts)
    late, late_counted = sum(part.late for part in parts), sum(part.late_counted for part in parts)
    return (
        100.0 * (1 - late / slots_) if slots_ else None,
        100.0 * (1 - late_counted / counted) if counted else None,
    )
