"""What a replica keeps: entries of the log, the hard state beside it, and the description of what stands in for its beginning.

An entry's payload is opaque and comes in pieces, which nobody joins: from whoever proposed it to the disk and to the links.
"""

from __future__ import annotations

import struct
from typing import Final

from nearcast.errors import StorageCorrupt
from nearcast.raft.configuration import Configuration

DATA: Final = 1
CONFIGURATION: Final = 2
"""Who belongs to the replica set from this entry on (:class:`~nearcast.raft.configuration.Configuration`)."""
NOOP: Final = 3
"""A leader's first entry: what it has of earlier terms commits with it (Raft §5.4.2, §8)."""

_HARD_STATE: Final = struct.Struct("<QQQ")


class Entry:
    """One entry. Nobody changes it once it is made: the log, links and disk share it."""

    def __init__(self, index: int, term: int, kind: int, pieces: list[bytes]) -> None:
        self.index = index
        self.term = term
        self.kind = kind
        self.pieces = pieces
        size = 0
        for piece in pieces:
            size += len(piece)
        self.size = size
        """Of the payload, in bytes."""

    def payload(self) -> bytes:
        """The payload in one piece."""
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)

    def __repr__(self) -> str:
        name = {DATA: "", CONFIGURATION: " configuration", NOOP: " no-op"}[self.kind]
        return f"{self.index}/{self.term}{name}"


class HardState:
    """What must not be forgotten (Raft, figure 2): the term, who has this replica's vote in it, and, as a hint only, how far
    the log is committed. ``commit`` never exceeds what was on disk when the state was made."""

    def __init__(self, term: int = 0, vote: int = 0, commit: int = 0) -> None:
        self.term = term
        self.vote = vote
        """A replica, or 0."""
        self.commit = commit

    def encode(self) -> bytes:
        """24 bytes."""
        return _HARD_STATE.pack(self.term, self.vote, self.commit)

    @staticmethod
    def decode(data: bytes, path: str = "hard state") -> HardState:
        """The state in what :meth:`encode` made. Checksums are the keeper's business."""
        if len(data) != _HARD_STATE.size:
            raise StorageCorrupt(path, 0, f"{len(data)} bytes instead of {_HARD_STATE.size}")
        term, vote, commit = _HARD_STATE.unpack(data)
        return HardState(term, vote, commit)

    def __repr__(self) -> str:
        return f"term {self.term}, vote {self.vote}, commit {self.commit}"


class Snapshot:
    """What stands in for the entries up to ``index``, and how to get it.

    ``description`` means nothing here: whoever drives the replica puts into it what the other side needs to fetch, or to
    check, the content. That travels beside the messages, in chunks of the driver's making.
    """

    def __init__(self, index: int, term: int, configuration: Configuration, description: bytes = b"") -> None:
        self.index = index
        self.term = term
        self.configuration = configuration
        self.description = description

    def __repr__(self) -> str:
        return f"snapshot of {self.index}/{self.term}"
