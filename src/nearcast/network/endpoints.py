"""Endpoints of a network, and cuts between them.

Owns what a host is to the network (where it is, its access link) and which hosts are cut off from which. A cut between halves
of 10,000 hosts is 25 million pairs, so pairs are never written down: each cut has a bit, set in every endpoint it concerns,
and a packet is stopped if a bit of its source's way out is also one of its target's way in. Healing gives bits back. While
more than 60 are in use the check is still one operation, on longer integers.
"""

from __future__ import annotations

from mypy_extensions import i64

from nearcast.network.conditions import Conditions
from nearcast.network.links import Link


class Endpoint:
    """A host as the network sees it."""

    def __init__(self, site: i64, access: Conditions) -> None:
        self.site: i64 = site
        self.up = Link(access, access.latency_ms)
        self.down = Link(access, access.latency_ms)
        self.no_out = 0
        """A bit for each cut that stops what this endpoint sends to some others."""
        self.no_in = 0
        """A bit for each cut that stops what some others send to this endpoint."""


class _Cut:
    """An active cut: which bits it has, and who carries them."""

    def __init__(self, endpoints: list[Endpoint], bits: int) -> None:
        self.endpoints = endpoints
        self.bits = bits


class Cuts:
    """The cuts that are active."""

    def __init__(self) -> None:
        self.bits = 0
        """Those in use; 0 while nothing is cut."""
        self._active: dict[int, _Cut] = {}
        self._last_handle = 0

    def make(self, sources: list[Endpoint], targets: list[Endpoint], one_way: bool) -> int:
        """Stops what ``sources`` send to ``targets``, and what comes back unless ``one_way``; returns a handle."""
        there = self._take_bit()
        back = 0 if one_way else self._take_bit()
        for endpoint in sources:
            endpoint.no_out |= there
            endpoint.no_in |= back
        for endpoint in targets:
            endpoint.no_in |= there
            endpoint.no_out |= back
        self._last_handle += 1
        self._active[self._last_handle] = _Cut([*sources, *targets], there | back)
        return self._last_handle

    def heal(self, handle: int) -> None:
        """Undoes one cut; nothing happens if that is done already."""
        healed = self._active.pop(handle, None)
        if healed is None:
            return
        self.bits &= ~healed.bits
        for endpoint in healed.endpoints:
            endpoint.no_out &= ~healed.bits
            endpoint.no_in &= ~healed.bits

    def heal_all(self) -> None:
        """Undoes every cut."""
        for handle in list(self._active):
            self.heal(handle)

    def _take_bit(self) -> int:
        """The lowest bit that is free."""
        bit = ~self.bits & (self.bits + 1)
        self.bits |= bit
        return bit
