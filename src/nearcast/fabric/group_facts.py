"""A broker's broadcast group as records: what ``/healthz`` shows, and what a broker reports to its controller.

Nothing decides by these; whoever decides has :class:`~nearcast.groups.formation.Formation`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

CloudState = Literal["connected", "connecting", "not needed"]
"""The way to the cloud of this broker itself. A member of a group needs none."""

RelayState = Literal["live", "catching up", "held", "no cloud", "-"]
"""How a broker's messages get to the cloud. "live": each at once. "catching up": what waited goes first. "held": its leader
has no room for it, or no cloud, now. "no cloud": it leads, and the cloud cannot be reached. "-": unknown."""


class FellowFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Another broker of the group, as this one knows it."""

    name: str
    address: str = ""
    up: bool = True
    latency_ms: float | None = None
    """One way, as measured by this broker; unset while it is not."""
    relay: RelayState = "-"
    """Known to the leader."""


class LeaderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The leader of another group, by its own announcement."""

    name: str
    latency_ms: float | None = None
    lcm: float = 0.0
    size: int = 1
    threshold_ms: float = 0.0


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One broker and its group."""

    name: str
    leader: str
    """The broker that leads; ``name`` itself when it does."""
    view: int = 0
    """The group's version: it rises whenever a broker comes or goes."""
    region: str = ""
    lcm: float = 0.0
    threshold_ms: float = 0.0
    leave_threshold_ms: float = 0.0
    latency_ms: float | None = None
    """To the leader, one way."""
    cloud: str = ""
    cloud_state: CloudState = "not needed"
    cloud_filters: int = 0
    """Subscriptions that this broker has at the cloud."""
    relay: RelayState = "-"
    waiting_messages: int = 0
    """QoS 1 and 2 messages of this broker's clients that the cloud has not confirmed."""
    fellows: list[FellowFacts] = []
    leaders: list[LeaderFacts] = []
    """Other groups' leaders, the nearest first. Not reported to a controller, which hears it from them."""
    figures: dict[str, float] = {}
    """Counters since the start, by name."""
