"""What brokers with broadcast groups know of each other and say to each other, checked in a simulated run.

- *Groups end.* Once no broker died and nothing was cut for a while, groups change no more, and the termination conditions of
  the paper (section II-C) hold: no two leaders are near enough to merge, no member is too far from its leader. The brokers of
  a group agree about who is in it. (Brokers that came near each other only find out when they measure far ones again.)
- *Bounds of a group.* A message of class ``broadcast`` crosses from its origin only to a broker that was in the view it was
  flooded with, or to one that led its origin; and from anybody only if it led whoever gets it, or does not know any more whom
  it led. Everything else goes through the cloud.
- *Not in vain.* The cloud has no subscriptions of brokers to what nobody in their group wants, and all that somebody does.
- *Nothing waits.* In the end no broker has a message for another one or for the cloud, nor the cloud for a broker.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from nearcast.errors import InvariantViolated
from nearcast.fabric import errands
from nearcast.fabric.messages import Arrived
from nearcast.fabricconfig import Groups, TopicClass
from nearcast.groups.stability import disagreeing, unstable
from nearcast.mqtt.routing import VIA_SEPARATOR
from nearcast.mqtt.topics import SHARE_PREFIX, matches
from nearcast.scenario.expansion import Client
from nearcast.simulation import mqtt_facts as facts
from nearcast.simulation.broadcast_ledger import GroupBrokers, fellows, is_relaying
from nearcast.simulation.fabric_broker import FabricBroker
from nearcast.simulation.fabric_invariants import FabricTables, interest_of
from nearcast.simulation.hosts import Host
from nearcast.simulation.mqtt_invariants import takes
from nearcast.simulation.streams import Stream as ByteStream

CONVERGED_S: Final = 25.0
"""Groups are stable so long after the last thing that happened to a broker or its connections."""

MEASURED_S: Final = 100.0
"""The same after distances changed: a far broker is measured once in a minute or so (:mod:`nearcast.groups.latencies`)."""


class RuleClasses:
    """The classes of topics, as the rules say that every broker has."""

    def __init__(self, rules: tuple[TopicClass, ...]) -> None:
        self._rules = rules
        self._known: dict[str, str] = {}

    def class_of(self, topic: str) -> str:
        found = self._known.get(topic)
        if found is None:
            matching = (rule.topic_class for rule in self._rules if matches(rule.topic, topic))
            found = self._known[topic] = next(matching, "bridged")
        return found


class BroadcastTables(FabricTables):
    """See the module."""

    def __init__(
        self,
        clients: tuple[Client, ...],
        brokers: GroupBrokers,
        world_now: Callable[[], float],
        cut_off: Callable[[], bool],
        is_calm: Callable[[], bool],
        groups: Groups,
        latency_ms: Callable[[str, str], float],
        class_of: Callable[[str], str],
    ) -> None:
        """``latency_ms`` is how far two brokers are from each other, one way, as the network has it."""
        super().__init__(clients, brokers, world_now, cut_off, is_calm)
        self._groups = brokers
        self._settings = groups
        self._latency_ms = latency_ms
        self._class_of = class_of
        # Everything that ever was in a view: by broker and version; by broker, who led it; by leader, whom it led.
        self._views: dict[tuple[str, int], set[str]] = {}
        self._leaders: dict[str, set[str]] = {}
        self._led: dict[str, set[str]] = {}
        self._distances: list[float] = []
        self._thresholds: dict[str, float] = {}
        self._starts: dict[str, int] = {}
        self._disturbed_s = 0.0
        self._moved_s = -MEASURED_S
        self.flooded = 0
        self.pushed = 0
        self.carried = 0
        self.changes = 0

    def observed(self, host: Host, fact: object) -> None:
        if isinstance(fact, facts.GroupChanged):
            self._views.setdefault((fact.broker, fact.version), set()).update(fact.members)
            self._leaders.setdefault(fact.broker, set()).add(fact.leader)
            self._led.setdefault(fact.leader, set()).update(fact.members)
            self.changes += 1
        elif isinstance(fact, facts.BrokerStarted):
            self._disturbed_s = self._now()
            self._starts[fact.broker] = self._starts.get(fact.broker, 0) + 1

    # --- what crosses ---------------------------------------------------------------------------------------------------

    def _on_messages(self, broker: FabricBroker, stream: ByteStream, content: bytes) -> None:
        arrived = Arrived(content, broker.host.now)
        topic = "" if arrived.publication is None else arrived.publication.topic.decode()
        sender = stream.remote_host.name
        if not errands.is_errand(arrived.via):
            plain = "" in arrived.via.split(VIA_SEPARATOR)  # and not only for members of shared subscriptions
            if plain and self._class_of(topic).startswith("broadcast") and arrived.publication is not None:
                raise InvariantViolated(
                    f"a message to {topic} crossed from {sender} to {broker.name} as if it were bridged", [broker.host, sender]
                )
            super()._on_messages(broker, stream, content)
            return
        errand = errands.parse(arrived.via)
        # Who has just started does not know whom it led, and serves all it knows until they say that others do.
        led = broker.name in self._led.get(sender, ()) or self._starts[sender] > 1
        if errand.kind == errands.FLOODED:
            self.flooded += arrived.count
            fits = led or broker.name in self._views.get((sender, errand.view), ())
        elif errand.kind == errands.PUSHED:
            self.pushed += arrived.count
            fits = broker.name in self._leaders.get(sender, ())
        else:
            self.carried += arrived.count
            fits = led
        self.crossed += arrived.count
        if not fits:
            kind = {errands.FLOODED: "flooded", errands.PUSHED: "pushed"}.get(errand.kind, "carried")
            raise InvariantViolated(
                f"a message to {topic} was {kind} from {sender} to {broker.name}, which is not of its group",
                [broker.host, sender],
            )

    def figures(self) -> dict[str, Any]:
        """Of a run's groups, for people."""
        leaders = [broker for broker in self._fabric.open() if broker.fabric.broadcast.formation.leads]
        return {
            "groups": len(leaders),
            "largest_group": max((len(fellows(leader)) + 1 for leader in leaders), default=0),
            "group_changes": self.changes,
            "flooded": self.flooded,
            "pushed": self.pushed,
            "carried": self.carried,
            "relayed": sum(int(broker.fabric.broadcast.figures()["relayed_messages"]) for broker in self._fabric.open()),
        }

    # --- groups ---------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        self._look_at_network()
        if self._has_converged():
            self._check_groups(self._fabric.open())

    def _has_converged(self) -> bool:
        now_s = self._now()
        return now_s - self._disturbed_s > CONVERGED_S and now_s - self._moved_s > MEASURED_S

    def _look_at_network(self) -> None:
        names = list(self._groups.durable)
        distances = [self._latency_ms(one, other) for one in names for other in names]
        if any(
            before != after and math.inf not in (before, after)
            for before, after in zip(self._distances, distances, strict=False)
        ):
            self._moved_s = self._now()
        self._distances = distances
        brokers = self._fabric.open()
        away = not all(is_relaying(broker) for broker in brokers if broker.fabric.broadcast.leads)
        paused = any(broker.host.paused for broker in brokers)
        # Adaptive ones move, and then groups have to follow.
        thresholds = {broker.name: broker.fabric.broadcast.formation.view.join_ms for broker in brokers}
        moved, self._thresholds = thresholds != self._thresholds, thresholds
        if away or paused or moved or self._cut_off() or not self._groups.all_open():
            self._disturbed_s = self._now()

    def _check_groups(self, brokers: list[FabricBroker]) -> None:
        formations = [broker.fabric.broadcast.formation for broker in brokers]
        for wrong in (*unstable(formations, self._latency_ms), *disagreeing(formations)):
            raise InvariantViolated(f"groups do not end: {wrong}", [broker.host for broker in brokers])

    def finish(self) -> None:
        brokers = self._fabric.open()
        slow = any(link.connection.congested for broker in brokers for link in broker.fabric.links)
        if not self._groups.all_open() or self._cut_off() or slow:
            return
        self._look_at_network()
        if self._has_converged():
            self._check_groups(brokers)
        for broker in brokers:
            self._check_fellows(broker)
            self._check_queues(broker)
        self._check_cloud(brokers)

    def _check_fellows(self, broker: FabricBroker) -> None:
        for name in fellows(broker):
            other = self._fabric.find(name)
            if other is not None:
                self._check_pair(broker, other)

    def _check_queues(self, broker: FabricBroker) -> None:
        for session in broker.engine.sessions.by_number.values():
            if session.is_peer and session.queued_messages:
                waiting = f"{broker.name} still has {session.queued_messages} messages for {session.client_id!r}"
                raise InvariantViolated(f"{waiting}, and nothing is cut", [broker.host])

    def _check_cloud(self, brokers: list[FabricBroker]) -> None:
        cloud = self._groups.cloud()
        if cloud is None:
            return
        for name, session in cloud.sessions():
            if session.queued_messages:
                raise InvariantViolated(
                    f"the cloud still has {session.queued_messages} messages for {name}, and nothing is cut",
                    [cloud.host, name],
                )
            leader = self._fabric.find(name)
            if leader is not None:
                self._check_filters(leader, brokers, list(session.subscriptions))

    def _check_filters(self, leader: FabricBroker, brokers: list[FabricBroker], subscribed: list[str]) -> None:
        """What a broker asked the cloud for is wanted by somebody of those it leads, and nothing of that is missing."""
        leads = leader.fabric.broadcast.formation.leads
        group = [broker for broker in brokers if broker is leader or broker.name in fellows(leader)] if leads else []
        wanted = set().union(*(interest_of(broker) for broker in group))
        if self._settings.cloud_version != "5":  # it could not say whom a message has been to
            wanted = {each for each in wanted if not each.startswith(SHARE_PREFIX)}
        topics = [topic for topic in set(self._topics.values()) if self._class_of(topic).startswith("broadcast")]
        for topic in topics:
            asked = any(takes(each, topic) for each in subscribed)
            needed = any(takes(each, topic) for each in wanted)
            cloud = leader.fabric.broadcast.cloud
            if asked and cloud is not None and cloud.keeps_stale:
                continue  # an earlier process of this broker asked, and others may have counted on it
            if asked != needed:
                raise InvariantViolated(
                    f"{leader.name} {'takes' if asked else 'does not take'} {topic} from the cloud, and somebody of its group "
                    f"{'wants' if needed else 'does not want'} it",
                    [leader.host],
                )
