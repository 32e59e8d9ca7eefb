"""How patient the ring is. All times in seconds."""

from __future__ import annotations

import msgspec

from nearcast.errors import ConfigError


class RingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """See each field. The defaults suit brokers whose round trips are below 200 ms and whose sets elect within a second."""

    successors: int = 3
    """Entries of the successor list (Canal's three). Lookups survive that many sets in a row failing together, less one."""

    beat_s: float = 1.0
    """Between two heartbeats to the successor, which also renew the lease. Shorter notices joins and failures sooner; each set
    sends and answers one per period."""

    lease_s: float = 6.0
    """How long a set may answer for its range after its successor vouched for it, by its own clock. Shorter gives the range of
    a lost set to its successor sooner; too short, and an election somewhere (a second or so) stops a set that is well."""

    lease_margin: float = 0.1
    """How much longer the successor waits before it takes over, as a share of the lease: more than clocks differ in rate."""

    try_s: float = 0.4
    """How long one replica may take to answer, before another one of the set is asked: a round trip and a commit. A replica
    whose link is down is not waited for."""

    failed_s: float = 3.0
    """A set none of whose replicas answers as its leader for so long is taken as failed, for routing. Shorter than elections
    take, and each of them looks like a death."""

    suspect_s: float = 10.0
    """How long a failed set is left out of routes before it is tried again."""

    finger_s: float = 1.0
    """Between two looks at a finger. All of them (log2 of the number of sets) are looked at in turn."""

    probe_s: float = 10.0
    """Between two looks at a set that was once heard of: how two parts of a ring that were cut off find each other."""

    hints_s: float = 5.0
    """How often a leader tells its followers its fingers, so that the next leader routes as well from the start."""

    lookup_s: float = 10.0
    """How long a lookup or a request may take in all."""

    abandon_s: float = 0.0
    """How long a set that got no lease waits before it takes over a predecessor that is silent as long, though nobody vouches
    for itself; 0: for ever. Without it, a set whose successor is gone for good, while so many others are that nobody can take
    that one over, waits for them. With it they go on, and so would both sides of a partition that lasts longer."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0.0 <= value < 1e6 or (value == 0.0 and name != "abandon_s"):
                raise ConfigError(f"`{name}` of the ring must be above 0", key=name)
        if not 1 <= self.successors <= 16:
            raise ConfigError("`successors` of the ring must be from 1 to 16", key="successors")
        if self.lease_s < 2.0 * self.beat_s:
            raise ConfigError("`lease_s` of the ring must be at least two heartbeats, `beat_s`", key="lease_s")

    @property
    def takeover_s(self) -> float:
        """After its last grant, a set may take over its predecessor's range."""
        return self.lease_s * (1.0 + self.lease_margin)
