"""What one direction of a link does to packets, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

from nearcast.errors import InvalidValue

JitterKind = Literal["uniform", "normal", "lognormal", "pareto"]


class Conditions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One direction of a link: how long a packet takes, and what may happen to it on the way."""

    latency_ms: float = 0.0
    """One-way latency of a small packet on an idle link, in milliseconds."""

    jitter_ms: float = 0.0
    """Spread of the latency, in milliseconds; what it means exactly depends on ``jitter``. 0 turns jitter off."""

    jitter: JitterKind = "normal"
    """Shape of the jitter. ``uniform``: ± ``jitter_ms`` around the latency. ``normal``: standard deviation ``jitter_ms``
    around it. ``lognormal`` and ``pareto``: only ever added, with median ``jitter_ms``; the tail is long and longer. No packet
    is faster than a tenth of the latency. Packets much closer together than 40 times ``jitter_ms`` are delayed alike."""

    loss: float = 0.0
    """Share of packets lost, 0 to 1, each independent of the others."""

    bandwidth_mbps: float = 0.0
    """Megabits per second; packets wait for the ones before them. 0 is unlimited."""

    queue_ms: float = 100.0
    """How long a packet may wait for bandwidth, in milliseconds; one that would wait longer is dropped. Too low loses bursts;
    too high is bufferbloat. Means nothing without ``bandwidth_mbps``."""

    reorder: float = 0.0
    """Share of packets, 0 to 1, held back for up to twice the latency (at least 1 ms) and overtaken by later ones. All others
    keep their order, whatever the jitter."""

    duplicate: float = 0.0
    """Share of packets, 0 to 1, that arrive twice."""

    def __post_init__(self) -> None:
        for field in ("latency_ms", "jitter_ms", "bandwidth_mbps", "queue_ms"):
            value = getattr(self, field)
            if not 0.0 <= value < 1e9:
                raise InvalidValue(f"`{field}` must be 0 or more, and finite", key=field)
        for field in ("loss", "reorder", "duplicate"):
            if not 0.0 <= getattr(self, field) <= 1.0:
                raise InvalidValue(f"`{field}` must be between 0 and 1", key=field)

    def described(self) -> str:
        """``20 ms, 1 % loss, 100 Mb/s``: what differs from a perfect link."""
        words = [f"{self.latency_ms:g} ms"]
        if self.jitter_ms:
            words.append(f"± {self.jitter_ms:g} ms {self.jitter}")
        if self.loss:
            words.append(f"{self.loss * 100:.3g} % loss")
        if self.bandwidth_mbps:
            words.append(f"{self.bandwidth_mbps:g} Mb/s")
        if self.reorder:
            words.append(f"{self.reorder * 100:.3g} % reordered")
        if self.duplicate:
            words.append(f"{self.duplicate * 100:.3g} % doubled")
        return ", ".join(words)
