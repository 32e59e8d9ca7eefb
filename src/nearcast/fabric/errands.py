"""What messages of class ``broadcast`` are sent to another broker for, as their ``via`` says.

The ``via`` of messages between brokers names whom they are for there (:data:`nearcast.mqtt.routing.VIA_SEPARATOR`); it is
kept in queues, journals and files and travels with them. An errand stands in front of that, closed by :data:`END`::

    FLOODED  view                          from its origin to every broker of the group, as of this version of the view
    PUSHED   turn view                     from its origin to its leader, to be relayed to the cloud; flooded then, as of view
    CARRIED  epoch sequence origin leader  passed on by a leader: the identity that the message has from its origin, and who
                                           relayed it to the cloud, if it came from there
"""

from __future__ import annotations

from typing import Final

FLOODED: Final = "\2"
PUSHED: Final = "\3"
CARRIED: Final = "\4"
END: Final = "\5"
_BETWEEN_NAMES: Final = "\7"

_MARKS: Final = FLOODED + PUSHED + CARRIED
_OWNED_MARKS: Final = "\x0e\x0f\x10\x11"
"""Those of :mod:`nearcast.fabric.owner_errands`, which end in :data:`END`, too."""


class Errand:
    """An errand that was read. ``rest`` is the remaining ``via``."""

    def __init__(
        self,
        kind: str,
        rest: str,
        view: int = 0,
        turn: int = 0,
        origin: str = "",
        epoch: int = 0,
        sequence: int = 0,
        relayed_by: str = "",
    ) -> None:
        self.kind = kind
        self.rest = rest
        self.view = view
        self.turn = turn
        self.origin = origin
        self.epoch = epoch
        self.sequence = sequence
        self.relayed_by = relayed_by


def is_errand(via: str) -> bool:
    """Whether messages are of class ``broadcast``."""
    return via != "" and via[0] in _MARKS


def is_owned_errand(via: str) -> bool:
    """Whether messages are of class ``owned``."""
    return via != "" and via[0] in _OWNED_MARKS


def is_word(via: str) -> bool:
    """Whether it is no message, but something said about an owned topic."""
    return via != "" and via[0] == _OWNED_MARKS[3]


def flooded(view: int) -> str:
    return f"{FLOODED}{view}{END}"


def pushed(turn: int, view: int) -> str:
    return f"{PUSHED}{turn} {view}{END}"


def carried(origin: str, epoch: int, sequence: int, relayed_by: str) -> str:
    return f"{CARRIED}{epoch:x} {sequence:x} {origin}{_BETWEEN_NAMES}{relayed_by}{END}"


def without_errand(via: str) -> str:
    """Whom messages are for, whatever the errand."""
    return via.partition(END)[2] if is_errand(via) or is_owned_errand(via) else via


def parse(via: str) -> Errand:
    """Read the errand in front of a ``via``; raises ``ValueError``."""
    kind = via[:1]
    said, end, rest = via[1:].partition(END)
    if not end:
        raise ValueError("messages whose errand has no end")
    if kind == FLOODED:
        return Errand(kind, rest, int(said))
    if kind == PUSHED:
        turn, _, view = said.partition(" ")
        return Errand(kind, rest, int(view), int(turn))
    if kind != CARRIED:
        raise ValueError("messages with an unknown errand")
    epoch, _, tail = said.partition(" ")
    sequence, _, names = tail.partition(" ")
    origin, _, relayed_by = names.partition(_BETWEEN_NAMES)
    if not origin:
        raise ValueError("messages that were carried without an origin")
    return Errand(kind, rest, 0, 0, origin, int(epoch, 16), int(sequence, 16), relayed_by)
