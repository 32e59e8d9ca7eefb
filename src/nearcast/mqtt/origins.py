"""Where messages come from, as far as the journal must know it: this broker's own numbering, and how far other brokers' got.

The broker that receives a message from a client is its *origin* and numbers it; both together are the message's identity
(:mod:`nearcast.fabric`). Numbers belong to an *epoch* of their broker. One that recovered its journal goes on in the same
epoch, above every number it may have given before: the journal has them *reserved* in advance, so that even a clock that was
set back does not give one out twice. Of each other broker the journal keeps the last number that was taken on from it, in the
same frame as what its messages did here. So a message that comes again after a crash is known.
"""

from __future__ import annotations

from typing import Final

from nearcast.mqtt import records
from nearcast.mqtt.effects import Effects

#: Numbers reserved at a time: about a second's worth of a wall clock that counts sixteen per microsecond.
RESERVED_AT_ONCE: Final = 1 << 24


class Origin:
    """Another broker as a source of messages: ``received`` is the last number of ``epoch`` that was taken on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 0
        self.received = 0


class Origins:
    """All of them. ``epoch`` is this broker's own; 0: none was drawn yet, or it is not part of a fabric."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self.epoch = 0
        self.reserved = 0
        self.by_name: dict[str, Origin] = {}

    def begin(self, epoch: int) -> None:
        """Number in this epoch from now on."""
        self.epoch = epoch
        if self._effects.gated:
            self._effects.records.append(records.epoch(epoch, self.reserved))

    def reserve(self, next_number: int) -> None:
        """Numbers below this one were given out; called before anything that bears them leaves."""
        if next_number > self.reserved:
            self.reserved = next_number + RESERVED_AT_ONCE
            if self._effects.gated:
                self._effects.records.append(records.epoch(self.epoch, self.reserved))

    def of(self, name: str) -> Origin:
        """The broker of this name, known from now on."""
        found = self.by_name.get(name)
        if found is None:
            found = Origin(name)
            self.by_name[name] = found
        return found

    def advanced(self, origin: Origin) -> None:
        """More was taken on from a broker."""
        if self._effects.gated:
            self._effects.records.append(records.origin(origin.name, origin.epoch, origin.received))

    def forget(self, name: str) -> None:
        """A broker left for good."""
        if self.by_name.pop(name, None) is not None and self._effects.gated:
            self._effects.records.append(records.origin_forgotten(name))
