"""Which broker a gateway uses: what it knows of them, in which order it would take them, and which links it keeps.

The controller's word comes first (``home``, then ``ranking``); without one, or where those are not there, the nearest broker
by measured round-trip time. A home once chosen without a controller is left only for one that is clearly nearer, so that two
equal ones do not take turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from nearcast.fabric.trunk_lines import TrunkLine

MAX_TRIED: Final = 8
"""Brokers that links are kept to while nothing says which one is best."""

CLEARLY_NEARER: Final = 0.8
"""A broker is moved to without a controller's word when its round-trip time is below this share of the current one's..."""
CLEARLY_NEARER_MS: Final = 1.0
"""...and so many milliseconds shorter."""

UNKNOWN_MS: Final = 1e9


class Known:
    """A broker that a gateway may use. ``configured`` ones are linked from the start. ``name`` is empty until it says it."""

    def __init__(self, address: str, name: str = "", configured: bool = False) -> None:
        self.address = address
        self.name = name
        self.configured = configured
        self.latency_ms = UNKNOWN_MS
        self.draining = False


class Choice:
    """See the module. ``lines`` are the brokers that are there, by name."""

    def __init__(self, lines: dict[str, TrunkLine]) -> None:
        self._lines = lines
        self.known: dict[str, Known] = {}
        self.home = ""
        self.ranking: list[str] = []
        self.governed = False
        """Whether ``home`` is a controller's word."""

    # --- what is known --------------------------------------------------------------------------------------------------

    def add(self, address: str, name: str = "", configured: bool = False) -> Known:
        """A broker there is, or what is new about it."""
        found = self.known.get(address)
        if found is None:
            found = Known(address, name, configured)
            self.known[address] = found
        found.name = name or found.name
        found.configured = found.configured or configured
        return found

    def named(self, name: str) -> Known | None:
        for known in self.known.values():
            if known.name == name:
                return known
        return None

    def remove(self, name: str) -> str:
        """A broker left for good; returns its address if it was known."""
        known = self.named(name)
        if known is None or known.configured:
            return ""
        del self.known[known.address]
        return known.address

    def latency_ms(self, name: str) -> float:
        """The round-trip time to a broker, measured on its link or told by monitoring."""
        line = self._lines.get(name)
        if line is not None and line.link.rtt_ms > 0:
            return line.link.rtt_ms
        known = self.named(name)
        return UNKNOWN_MS if known is None else known.latency_ms

    # --- what is best ---------------------------------------------------------------------------------------------------

    def best(self, but: str = "") -> TrunkLine | None:
        """The broker to use now among those that are there."""
        for name in [self.home, *self.ranking]:
            line = self._lines.get(name)
            if line is not None and name != but and not self.avoids(line):
                return line
        nearest: TrunkLine | None = None
        avoided: TrunkLine | None = None
        for name, line in self._lines.items():
            if name == but:
                continue
            if self.avoids(line):
                avoided = line
            elif nearest is None or self.latency_ms(name) < self.latency_ms(nearest.name):
                nearest = line
        return nearest if nearest is not None else avoided

    def avoids(self, line: TrunkLine) -> bool:
        """Whether a broker should get no more clients."""
        known = self.named(line.name)
        return line.leaving or (known is not None and known.draining)

    def reconsider(self) -> str:
        """Without a controller: the broker that clients should be moved to, or nothing."""
        if self.governed:
            return ""
        nearest = ""
        for name, line in self._lines.items():
            if self.avoids(line) or line.link.rtt_ms <= 0:
                continue
            if not nearest or self.latency_ms(name) < self.latency_ms(nearest):
                nearest = name
        if not nearest or nearest == self.home:
            return ""
        current = self._lines.get(self.home)
        if current is not None and not self.avoids(current):
            current_ms = self.latency_ms(self.home)
            nearest_ms = self.latency_ms(nearest)
            if nearest_ms > current_ms * CLEARLY_NEARER or current_ms - nearest_ms < CLEARLY_NEARER_MS:
                return ""
        self.home = nearest
        return nearest

    def wanted(self) -> list[str]:
        """Addresses to keep links to, besides those of brokers that serve clients: those configured, the home, and the next
        best one, which makes the loss of the home cost no time."""
        addresses = [known.address for known in self.known.values() if known.configured]
        standby = False
        for name in [self.home, *self.ranking]:
            known = self.named(name)
            if known is None or (name != self.home and (standby or known.draining)):
                continue
            if name != self.home:
                standby = True
            addresses.append(known.address)
        if not standby:
            others = [known for known in self.known.values() if known.address not in addresses and not known.draining]
            others.sort(key=distance)
            addresses.extend([known.address for known in others[: 1 if self.home else MAX_TRIED]])
        return addresses


def distance(known: Known) -> float:
    return known.latency_ms
