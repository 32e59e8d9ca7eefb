"""What the machines of the ring ask their driver to do."""

from __future__ import annotations

import msgspec

from nearcast.chord.messages import Message


class Send(msgspec.Struct, frozen=True):
    """To a broker, by name. It may be the own one, and may get lost."""

    broker: str
    message: Message


class Propose(msgspec.Struct, frozen=True):
    """Append this entry to the set's log. Once committed it is given to ``committed`` on every replica; if it certainly never
    will be, ``dropped(number)`` may say so."""

    number: int
    entry: bytes


class Confirm(msgspec.Struct, frozen=True):
    """Call ``confirmed(number)`` once it is certain that this replica still led after now, has committed an entry of its own
    term, and has applied everything that was committed by now: Raft's read index (§6.4). Never, if it leads no more."""

    number: int


class Finished(msgspec.Struct, frozen=True):
    """What was asked for under this number is answered, or could not be."""

    number: int
    answer: object


Effect = Send | Propose | Confirm | Finished
FOREVER = float("inf")
