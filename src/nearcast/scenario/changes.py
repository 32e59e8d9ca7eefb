"""What a link, an access link or a disk goes back to when a change of limited time is over. One rule for both runtimes.

The latest change decides, whatever was there before it. When its time is over, things are as the last change without an end
left them, or as they were at first: an earlier change of limited time does not come back, even if its own time is not over.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


class Changes:
    """Who changed what last, and what comes back."""

    def __init__(self) -> None:
        self._number = 0
        self._last: dict[Hashable, int] = {}
        self._usual: dict[Hashable, Any] = {}

    def claim(self, *subjects: Hashable) -> int:
        """These are changed now: a number to ask :meth:`is_last` with when the time is over."""
        self._number += 1
        for subject in subjects:
            self._last[subject] = self._number
        return self._number

    def is_last(self, subject: Hashable, number: int) -> bool:
        """Whether nobody changed it since."""
        return self._last.get(subject) == number

    def note(self, subject: Hashable, before: Any, after: Any, *, lasting: bool) -> None:
        """Remember what comes back: ``before``, if this is the first change, or ``after``, if this one has no end."""
        if lasting:
            self._usual[subject] = after
        else:
            self._usual.setdefault(subject, before)

    def usual(self, subject: Hashable) -> Any:
        """What comes back."""
        return self._usual[subject]
