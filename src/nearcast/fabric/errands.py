"""What messages of class ``broadcast`` are sent to another broker for, as their ``via`` says.

The ``via`` of messages between brokers names whom they are for there (:data:`nearcast.mqtt.routing.VIA_SEPARATOR`); it is
kept in queues, journals and files and travels with them. An errand stands in front of that, closed by :data:`END`::

    FLOODED  view                          from its origin to every broker of the group, as of this version of the view
    PUSHED   turn                          from its origin to its leader, to be relayed to the cloud and for nothing else
    CARRIED  epoch sequence origin         passed on by a leader: the identity that the message has from its origin
"""

from __future__ import annotations

from typing import Final

FLOODED: Final = "\2"
PUSHED: Final = "\3"
CARRIED: Final = "\4"
END: Final = "\5"

_MARKS: Final = FLOODED + PUSHED + CARRIED


class Errand:
    """An errand that was read. ``rest`` is the remaining ``via``; ``number`` is the view or the turn."""

    def __init__(self, kind: str, rest: str, number: int = 0, origin: str = "", epoch: int = 0, sequence: int = 0) -> None:
        self.kind = kind
        self.rest = rest
        self.number = number
        self.origin = origin
        self.epoch = epoch
        self.sequence = sequence


def is_errand(via: str) -> bool:
    """Whether messages are of class ``broadcast``."""
    return via != "" and via[0] in _MARKS


def flooded(view: int) -> str:
    return f"{FLOODED}{view}{END}"


def pushed(turn: int) -> str:
    return f"{PUSHED}{turn}{END}"


def carried(origin: str, epoch: int, sequence: int) -> str:
    return f"{CARRIED}{epoch:x} {sequence:x} {origin}{END}"


def without_errand(via: str) -> str:
    """Whom messages are for, whatever the errand."""
    return via.partition(END)[2] if is_errand(via) else via


def parse(via: str) -> Errand:
    """Read the errand in front of a ``via``; raises ``ValueError``."""
    kind = via[:1]
    said, end, rest = via[1:].partition(END)
    if not end:
        raise ValueError("messages whose errand has no end")
    if kind in (FLOODED, PUSHED):
        return Errand(kind, rest, int(said))
    if kind != CARRIED:
        raise ValueError("messages with an unknown errand")
    epoch, _, tail = said.partition(" ")
    sequence, _, origin = tail.partition(" ")
    if not origin:
        raise ValueError("messages that were carried without an origin")
    return Errand(kind, rest, 0, origin, int(epoch, 16), int(sequence, 16))
