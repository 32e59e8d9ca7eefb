"""What a job says about its progress, and what stands for nobody listening."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Progress(Protocol):
    """Where a job reports. Stages, tasks and streaming queries are watched from outside; a job only says what it is at."""

    def step(self, text: str) -> None:
        """A new step begins."""

    def advance(self, share: float) -> None:
        """How much of the step is done, from 0 to 1."""

    def note(self, text: str) -> None:
        """Something that stays on the screen."""

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A result, shown at the end."""


class Silent:
    """Nobody listens."""

    def step(self, text: str) -> None: ...

    def advance(self, share: float) -> None: ...

    def note(self, text: str) -> None: ...

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None: ...
