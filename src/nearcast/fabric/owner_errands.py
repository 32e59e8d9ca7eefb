"""What messages of owned topics are sent to another broker for, as the errand in their ``via`` says (:mod:`.errands`).

::

    TO_OWNER  epoch flags behind identity   from a source to the owner, to be ordered
    ORDERED   epoch identity                from the owner to a broker with subscribers
    PARKED    epoch flags behind identity   in the queue of one that waits at this broker (:mod:`.parking`)
    WORD      what epoch name other names   no message: something said about the topic, in order with its messages

``identity`` is origin, its epoch and the number there, where that is not the sender and its number on this channel: what a
former owner passes on keeps the identity it had. ``behind`` is the broker that the source sent this topic's messages to
before: its word CLOSED comes first. ``AGAIN`` marks what was sent to an owner that died, and may have been delivered.
"""

from __future__ import annotations

from typing import Final

from nearcast.fabric.errands import END
from nearcast.fabric.owner_records import MAX_EPOCH

TO_OWNER: Final = "\x0e"
ORDERED: Final = "\x0f"
PARKED: Final = "\x10"
WORD: Final = "\x11"
_BETWEEN: Final = "\7"

AGAIN: Final = 1

_TOO_LARGE: Final = 1 << 63

# Words.
OWNED_BY: Final = "owner"
"""``name`` owns the topic since ``epoch``."""
END_OF: Final = "end"
"""The same, from the owner before: nothing of its own comes behind this. The new owner waits for READY."""
ACQUIRE: Final = "acquire"
"""To the new owner: the topic is yours; the brokers in ``names`` will say READY. ``other``: the highest stamp of retained
messages that the one before made or saw."""
READY: Final = "ready"
"""To the new owner: all that the one before it ordered is here."""
IN_CHARGE: Final = "in charge"
"""From the new owner to the one before."""
CLOSING: Final = "closing"
"""From a source to the owner it used so far: ``other`` sends no more of it here; ``name`` owns it now."""
CLOSED: Final = "closed"
"""From a former owner to the next: all that came from the source ``other`` was passed on."""


COME_THROUGH: Final = "come through"
"""From the owner to a former one: CLOSED, which came there only now, because what it stands behind went another way."""


class OwnerErrand:
    """An errand that was read. ``rest`` is the remaining ``via``. ``origin`` is empty where the sender is the origin."""

    def __init__(self, kind: str, epoch: int, rest: str, flags: int = 0) -> None:
        self.kind = kind
        self.epoch = epoch
        self.rest = rest
        self.flags = flags
        self.behind = ""
        self.origin = ""
        self.origin_epoch = 0
        self.sequence = 0
        self.word = ""
        self.name = ""
        self.other = ""
        self.names: list[str] = []


def identity(origin: str, epoch: int, sequence: int) -> str:
    return f"{epoch:x}{_BETWEEN}{sequence:x}{_BETWEEN}{origin}"


NO_IDENTITY: Final = _BETWEEN + _BETWEEN


def to_owner(epoch: int, behind: str, flags: int, who: str) -> str:
    return f"{TO_OWNER}{epoch:x}{_BETWEEN}{flags}{_BETWEEN}{behind}{_BETWEEN}{who}{END}"


def parked(epoch: int, behind: str, flags: int, who: str) -> str:
    return f"{PARKED}{epoch:x}{_BETWEEN}{flags}{_BETWEEN}{behind}{_BETWEEN}{who}{END}"


def ordered(epoch: int, who: str) -> str:
    return f"{ORDERED}{epoch:x}{_BETWEEN}{who}{END}"


def word(what: str, epoch: int, name: str = "", other: str = "", names: list[str] | None = None) -> str:
    fields = [f"{WORD}{what}", f"{epoch:x}", name, other]
    if names:
        fields += names
    return _BETWEEN.join(fields) + END


def parse(via: str) -> OwnerErrand:
    """Read the errand in front of a ``via``; raises ``ValueError``."""
    kind = via[:1]
    said, end, rest = via[1:].partition(END)
    if not end:
        raise ValueError("messages whose errand has no end")
    fields = said.split(_BETWEEN)
    if kind == WORD:
        if len(fields) < 4:
            raise ValueError("a word about an owned topic that is too short")
        found = OwnerErrand(kind, _epoch(fields[1]), rest)
        found.word = fields[0]
        found.name = fields[2]
        found.other = fields[3]
        found.names = fields[4:]
        return found
    if len(fields) != (4 if kind == ORDERED else 6):
        raise ValueError("messages of an owned topic with an errand of the wrong size")
    found = OwnerErrand(kind, _epoch(fields[0]), rest)
    if kind != ORDERED:
        found.flags = int(fields[1])
        found.behind = fields[2]
    found.origin = fields[-1]
    if found.origin:
        found.origin_epoch = int(fields[-3], 16)
        found.sequence = int(fields[-2], 16)
        if not (0 <= found.origin_epoch < _TOO_LARGE and 0 <= found.sequence < _TOO_LARGE):
            raise ValueError("messages of an owned topic that nobody can have numbered so")
    return found


def _epoch(said: str) -> int:
    epoch = int(said, 16)
    if not 0 <= epoch <= MAX_EPOCH:
        raise ValueError("an epoch that there cannot be")
    return epoch
