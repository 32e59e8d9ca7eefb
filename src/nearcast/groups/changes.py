"""What a formation tells its driver: that something changed. The driver then reads what holds now."""

from __future__ import annotations


class Change:
    """One of the below."""


class LeaderChanged(Change):
    """The broker follows another leader than before; its own name means that it leads."""

    def __init__(self, former: str, present: str) -> None:
        self.former = former
        self.present = present

    def __repr__(self) -> str:
        return f"LeaderChanged({self.former!r}, {self.present!r})"


class ViewChanged(Change):
    """The group has other members than before, or other thresholds."""

    def __repr__(self) -> str:
        return "ViewChanged()"
