"""Whether a new transport is accepted at all: the number of connections, and how fast one address opens them.

Asked before a byte is read (for TLS, before the handshake), so that refusing stays cheaper than connecting.
"""

from __future__ import annotations

import ipaddress
import logging
import resource

from nearcast.clock import Clock
from nearcast.config import Security
from nearcast.serving import logs

MAX_SOURCES = 65_536

#: Descriptors kept back for files, listeners and HTTP when the process's limit is lower than ``max_connections``.
SPARE_DESCRIPTORS = 64


def is_loopback(address: str) -> bool:
    """Whether an address is this machine's own. The empty string stands for a Unix socket's peer."""
    return not address or address.startswith(("127.", "::ffff:127.")) or address == "::1"


def source_of(address: str) -> str:
    """What one sender cannot change at will: an IPv4 address, or an IPv6 /64, which is what one host is usually given."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(parsed.ipv4_mapped) if parsed.ipv4_mapped else parsed.packed[:8].hex()


class ConnectRate:
    """One token bucket per source address, forgotten as soon as it would be full again."""

    def __init__(self, clock: Clock, per_second: float, burst: int, exempt_loopback: bool) -> None:
        self._clock = clock
        self._per_second = per_second
        self._burst = burst
        self._exempt_loopback = exempt_loopback
        # Source -> the time at which its bucket will be full again: one float says as much as a level and a time stamp.
        self._full_at: dict[str, float] = {}

    def admits(self, address: str) -> bool:
        """Whether a connection from ``address`` may come in now; counts it if so."""
        if not self._per_second or (self._exempt_loopback and is_loopback(address)):
            return True
        now = self._clock.monotonic()
        source = source_of(address)
        full_at = max(self._full_at.get(source, now), now)
        if full_at - now > (self._burst - 1) / self._per_second:
            return False
        if len(self._full_at) >= MAX_SOURCES and source not in self._full_at:
            self.sweep()
            if len(self._full_at) >= MAX_SOURCES:
                # More addresses at once than we keep: a flood. Those that are known still get their share.
                return False
        self._full_at[source] = full_at + 1 / self._per_second
        return True

    def sweep(self) -> None:
        """Forget the sources whose buckets are full."""
        now = self._clock.monotonic()
        self._full_at = {source: full_at for source, full_at in self._full_at.items() if full_at > now}

    def __len__(self) -> int:
        return len(self._full_at)


def connect_rate(security: Security, clock: Clock) -> ConnectRate:
    """The connect rate that the configuration asks for."""
    exempt = security.connect_rate_exempts_loopback
    return ConnectRate(clock, security.connect_rate_per_second, security.connect_burst, exempt)


def bounded_connections(wanted: int) -> int:
    """Raise the process's descriptor limit as far as it goes; the connections that fit below it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        except (ValueError, OSError):
            pass
    if soft != resource.RLIM_INFINITY and soft < needed:
        possible = max(1, soft - SPARE_DESCRIPTORS)
        logs.event(logging.DEBUG, "fewer descriptors than max_connections", descriptors=soft, max_connections=possible)
        return possible
    return wanted
