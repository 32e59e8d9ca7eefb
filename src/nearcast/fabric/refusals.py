"""How a controller says no."""

from __future__ import annotations

from nearcast.errors import NearcastError


class Refused(NearcastError):
    """The controller was asked for something it cannot do. ``missing``: what was named does not exist."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing
