"""A broker in its broadcast group, as a process: the cloud's socket, the measured capability, what is logged and counted.

The machines are :class:`~nearcast.fabric.broadcast.Broadcast`'s; the probes that measure distances are
:mod:`nearcast.broker.probing`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from nearcast.broker.capability import CapabilityMeter
from nearcast.broker.cloud import CloudSocket
from nearcast.errors import ConfigError
from nearcast.fabric.broadcast import Broadcast
from nearcast.fabric.cloud import Cloud
from nearcast.fabric.group_facts import GroupFacts, group_facts, known

if TYPE_CHECKING:
    from nearcast.broker.probing import Probing
    from nearcast.broker.process import Broker

REFUSED_SHOWN = 10

REFUSED_SECONDS = 10.0
"""How often it is said that the cloud does not take messages."""


class Grouping:
    """One broker's group. Without a cloud there is none of this."""

    def __init__(self, broker: Broker, broadcast: Broadcast, probing: Probing, flush: Callable[[], None]) -> None:
        if broadcast.cloud is None:
            raise ConfigError("groups need a cloud: --cloud mqtt://HOST:PORT", key="fabric.groups.cloud")
        self._broker = broker
        self._broadcast = broadcast
        self._probing = probing
        self._cloud: Cloud = broadcast.cloud
        self.socket = CloudSocket(self._cloud, broadcast.settings, broker.monotonic, flush)
        self._meter: CapabilityMeter | None = None
        self._leader = broadcast.fabric.name
        self._members = 1
        self._refused: list[str] = []
        self._markers_problem = ""
        self._refused_messages = 0
        self._refused_at = -REFUSED_SECONDS

    def start(self, link_address: str, now: float) -> None:
        """Links and probes are listened for by now."""
        lcm = self._broadcast.settings.lcm or 0.0
        if self._broadcast.settings.lcm is None:
            self._meter = CapabilityMeter(self._broker.monotonic)
            lcm = self._measured(self._meter) or 0.0
        self._broadcast.start(self._probing.monitor, link_address, self._probing.address(link_address), lcm, now)
        self._introduce()

    def _introduce(self) -> None:
        broadcast, settings = self._broadcast, self._broadcast.settings
        # Whoever comes from a fabric with peers would look for other topics, and sessions, beyond the group in vain.
        others = "are shared by all brokers" if broadcast.links_all else "end at the group"
        self._broker.events.event(
            logging.INFO,
            "forms groups",
            cloud=self.socket.address,
            region=settings.region,
            threshold_ms=settings.threshold_ms,
            other_topics_and_sessions=others,
        )
        if not broadcast.fabric.classes.broadcast_filters() and broadcast.fabric.settings.controller is None:
            self._broker.events.event(
                logging.WARNING, "no topic is broadcast, so nothing leaves a group: use --broadcast FILTER"
            )

    def _measured(self, meter: CapabilityMeter) -> float | None:
        stats = self._broker.engine.stats
        transport = self.socket.transport
        stream = None if transport is None else transport.transport
        raw = None if stream is None else stream.get_extra_info("socket")
        return meter.refresh(raw, sum(stats.publishes_received), stats.publish_bytes_received)

    def flush(self) -> None:
        """Called after every flush of the engine."""
        self.socket.dial()
        formation = self._broadcast.formation
        view = formation.view
        if view.leader != self._leader or len(view.members) != self._members:
            self._log(view.leader, len(view.members))

    def _log(self, leader: str, members: int) -> None:
        if leader != self._leader:
            what = "leads its own group" if leader == self._broadcast.fabric.name else "joined a group"
        else:
            what = "the group changed"
        latency_ms = known(self._broadcast.latencies.measured_ms(leader)) if leader != self._broadcast.fabric.name else None
        self._leader, self._members = leader, members
        self._broker.events.event(logging.INFO, what, leader=leader, brokers=members, latency_ms=latency_ms)

    def tick(self) -> None:
        """Time passed."""
        if self._meter is not None:
            lcm = self._measured(self._meter)
            if lcm is not None:
                self._broadcast.formation.lcm = lcm
        refused = self._cloud.refused_filters
        if refused != self._refused:
            self._refused = refused
            if refused:
                shown = ", ".join(sorted(refused)[:REFUSED_SHOWN])
                self._broker.events.event(
                    logging.WARNING, "the cloud refuses subscriptions", count=len(refused), filters=shown
                )
        problem = self._cloud.markers_problem
        if problem != self._markers_problem:
            self._markers_problem = problem
            if problem:
                self._broker.events.event(logging.WARNING, "the cloud is not set up for groups", reason=problem)
        self._tell_refused_messages()

    def _tell_refused_messages(self) -> None:
        relay = self._broadcast.relay
        now = self._broker.monotonic()
        if relay is None or relay.refused_messages == self._refused_messages or now - self._refused_at < REFUSED_SECONDS:
            return
        count = relay.refused_messages - self._refused_messages
        self._refused_messages, self._refused_at = relay.refused_messages, now
        self._broker.events.event(logging.WARNING, "the cloud does not take messages, other groups miss them", count=count)

    # --- figures --------------------------------------------------------------------------------------------------------

    def facts(self) -> GroupFacts | None:
        """What /healthz shows."""
        return group_facts(self._broadcast, leaders=True)

    def gauges(self) -> dict[str, tuple[float, str]]:
        """Figures for /metrics."""
        broadcast, cloud, relay = self._broadcast, self._cloud, self._broadcast.relay
        view = broadcast.formation.view
        found = {
            "group_size": (len(view.members), "Brokers of this one's broadcast group, itself included."),
            "group_leads": (float(broadcast.leads), "Whether this broker leads its group."),
            "group_view": (view.version, "Version of the group; it rises when a broker comes or goes."),
            "group_join_threshold_ms": (view.join_ms, "Brokers nearer than this join, one way."),
            "group_leave_threshold_ms": (view.leave_ms, "Brokers farther than this leave, one way."),
            "group_lcm": (broadcast.formation.lcm, "Leadership capability measure of this broker."),
            "group_leaders_known": (len(broadcast.board), "Leaders of other groups that announce themselves."),
            "cloud_connected": (float(cloud.connected), "Whether this broker is connected to the cloud."),
            "cloud_confirm_ms": (cloud.relaying.confirm_ms, "How long the cloud takes to acknowledge a message."),
        }
        latency_ms = None if broadcast.leads else known(broadcast.latencies.measured_ms(view.leader))
        if latency_ms is not None:
            found["group_leader_latency_ms"] = (latency_ms, "Latency to the leader, one way.")
        if relay is not None:
            waiting = relay.session.queued_messages + relay.session.spilled_messages
            found["cloud_waiting_messages"] = (waiting, "Messages of clients here that the cloud has not confirmed.")
        return found

    def counters(self) -> dict[str, tuple[float, str]]:
        """Figures for /metrics."""
        cloud, figures = self._cloud, self._broadcast.figures()
        there = cloud.relaying
        return {
            "cloud_connects": (cloud.connects, "Connections to the cloud."),
            "cloud_relayed_messages": (there.relayed_messages, "Messages given to the cloud, those of members included."),
            "cloud_relayed_bytes": (there.relayed_bytes, "Bytes of those: topics and payloads."),
            "cloud_arrived_messages": (cloud.arrived_messages, "Messages that came out of the cloud."),
            "cloud_refused_messages": (there.refused_messages, "Messages that the cloud did not take."),
            "cloud_expired_messages": (there.expired_messages, "Messages that expired before the cloud had them."),
            "cloud_dropped_messages": (there.dropped_messages, "QoS 0 messages that found no cloud."),
            **{f"group_{name}": (figures[key], text) for name, (key, text) in _COUNTERS.items()},
        }

    def figures(self) -> dict[str, int]:
        """Figures for ``$SYS``."""
        relay = self._broadcast.relay
        waiting = 0 if relay is None else relay.session.queued_messages + relay.session.spilled_messages
        return {
            "fabric/group/size": len(self._broadcast.formation.view.members),
            "fabric/group/leads": int(self._broadcast.leads),
            "fabric/group/waiting": waiting,
        }


#: What of :meth:`Broadcast.figures` is in /metrics: its name there, and what it means.
_COUNTERS = {
    "asks": ("asks", "Leaders that this one asked to merge."),
    "leader_joins": ("leader_joins", "Times that this broker joined another leader with its group."),
    "member_joins": ("member_joins", "Times that this broker followed its leader, or moved, to another one."),
    "notifications": ("notifications", "Members that were told of another leader."),
    "leaves": ("leaves", "Times that this broker left its leader because of the distance."),
    "splits": ("splits", "Times that this broker did not follow, or lost, its leader and led itself."),
    "formation_messages": ("messages_sent", "Messages sent to form groups."),
    "carried_messages": ("carried_messages", "Messages passed on to members, out of the cloud or for others."),
    "foreign_messages": ("foreign_messages", "Messages of clients of the cloud."),
    "repeated_messages": ("repeated_messages", "Messages that came again and were known."),
    "correct_messages": ("correct_messages", "Broadcast messages that somebody here wanted or published."),
    "redundant_messages": ("redundant_messages", "Broadcast messages of other brokers that nobody here wanted."),
    "relay_stops": ("relay_stops", "Times that a member was told to keep its messages, for want of room."),
}
