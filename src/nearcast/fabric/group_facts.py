"""A broker's broadcast group as records: what ``/healthz`` shows, and what a broker reports to its controller.

Nothing decides by these; whoever decides has :class:`~nearcast.groups.formation.Formation`.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Final, Literal, cast

import msgspec

if TYPE_CHECKING:
    from nearcast.fabric.broadcast import Broadcast

MAX_LEADERS_SHOWN: Final = 1_000

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
    cloud_problem: str = ""
    """Why there is no connection, in words."""
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


_CLOUD_STATES: Final[dict[str, CloudState]] = {
    "connected": "connected",
    "connecting": "connecting",
    "waiting": "connecting",
    "idle": "not needed",
}


def group_facts(broadcast: Broadcast, *, leaders: bool) -> GroupFacts | None:
    """One broker's group as it is now; none without a cloud."""
    cloud, relay = broadcast.cloud, broadcast.relay
    if cloud is None or relay is None:
        return None
    formation, settings = broadcast.formation, broadcast.settings
    view = formation.view
    return GroupFacts(
        name=formation.name,
        leader=view.leader,
        view=view.version,
        region=settings.region,
        lcm=formation.lcm,
        threshold_ms=view.join_ms,
        leave_threshold_ms=view.leave_ms,
        latency_ms=None if broadcast.leads else known(broadcast.latencies.measured_ms(view.leader)),
        cloud=settings.cloud or "",
        cloud_state=_CLOUD_STATES[cloud.state],
        cloud_problem=cloud.problem,
        cloud_filters=len(broadcast.coverage.filters.wanted()) if cloud.connected else 0,
        relay=cast(RelayState, relay.state()),
        waiting_messages=relay.session.queued_messages + relay.session.spilled_messages,
        fellows=[_fellow(broadcast, name) for name in sorted(broadcast.members())],
        leaders=_leaders(broadcast) if leaders else [],
        figures=broadcast.figures(),
    )


def known(latency_ms: float) -> float | None:
    """A latency that is one."""
    return round(latency_ms, 3) if math.isfinite(latency_ms) else None


def _relay_of(broadcast: Broadcast, name: str) -> RelayState:
    """How a member's messages get to the cloud, as its leader has it."""
    relay = broadcast.relay
    if relay is None or not broadcast.leads:
        return "-"
    source = relay.sources.get(name)
    if source is None or relay.state() != "live":
        return "held"
    return "live" if source.live_after >= 0 else "catching up"


def _fellow(broadcast: Broadcast, name: str) -> FellowFacts:
    peer = broadcast.fabric.peers.get(name)
    link = None if peer is None else peer.link
    latency_ms = known(broadcast.latencies.measured_ms(name))
    if latency_ms is None and link is not None and link.rtt_ms > 0.0:
        latency_ms = round(link.rtt_ms / 2.0, 3)  # members are measured by themselves, not by their leader
    return FellowFacts(
        name=name,
        address=broadcast.formation.view.members[name].address,
        up=peer is not None and peer.up,
        latency_ms=latency_ms,
        relay=_relay_of(broadcast, name),
    )


def _leaders(broadcast: Broadcast) -> list[LeaderFacts]:
    """The nearest ones: there may be thousands."""
    measured = broadcast.latencies.measured_ms
    nearest = heapq.nsmallest(
        MAX_LEADERS_SHOWN, broadcast.board.announced(), key=lambda leader: (measured(leader.name), leader.name)
    )
    return [
        LeaderFacts(
            name=leader.name,
            latency_ms=known(measured(leader.name)),
            lcm=leader.lcm,
            size=leader.size,
            threshold_ms=leader.threshold_ms,
        )
        for leader in nearest
    ]
