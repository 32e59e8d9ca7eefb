"""Who owns which topic, as brokers and the controller believe, checked in a simulated run.

- *One owner an epoch.* No two brokers ever are the owner of a topic in the same epoch.
- *Epochs rise.* What a broker's process believes of a topic's owner never gets older.
- *Not in vain.* While no link is lost, what an owner has ordered crosses only to brokers where it is wanted.
- *Agreement.* In the end all brokers that sent to a topic's owner, or got messages of it, know the same one. It runs, it is in
  charge, no message waits, and the controller's directory says the same.

Everything else is as in any fabric (:class:`~nearcast.simulation.fabric_invariants.FabricTables`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nearcast.errors import InvariantViolated
from nearcast.fabric import owner_errands
from nearcast.fabric.errands import is_owned_errand
from nearcast.fabric.messages import Arrived
from nearcast.fabric.owned_topics import OWNER, OwnedTopic
from nearcast.fabricconfig import TopicClass
from nearcast.mqtt.topics import matches
from nearcast.scenario.expansion import Client
from nearcast.simulation import mqtt_facts as facts
from nearcast.simulation.fabric_broker import FabricBroker
from nearcast.simulation.fabric_invariants import Brokers, FabricTables
from nearcast.simulation.hosts import Host
from nearcast.simulation.streams import Stream as ByteStream

FindOwner = Callable[[str], tuple[str, int] | None]
"""The owner of a topic in the controller's directory and its epoch; nothing and 0 if it knows none; ``None`` without a
controller that runs."""


class OwnedRules:
    """Which topics are owned and what their bounds are, as the rules say that every broker has."""

    def __init__(self, rules: tuple[TopicClass, ...]) -> None:
        self._rules = rules
        self._known: dict[str, TopicClass | None] = {}

    def rule_of(self, topic: str) -> TopicClass | None:
        if topic not in self._known:
            self._known[topic] = next((rule for rule in self._rules if matches(rule.topic, topic)), None)
        return self._known[topic]

    def is_owned(self, topic: str) -> bool:
        rule = self.rule_of(topic)
        return rule is not None and rule.topic_class == "owned"

    def bound_ms(self, topic: str) -> float:
        rule = self.rule_of(topic)
        return 0.0 if rule is None else rule.max_latency_ms


class OwnedTables(FabricTables):
    """See the module."""

    def __init__(
        self,
        clients: tuple[Client, ...],
        brokers: Brokers,
        world_now: Callable[[], float],
        cut_off: Callable[[], bool],
        is_calm: Callable[[], bool],
        find_owner: FindOwner,
    ) -> None:
        super().__init__(clients, brokers, world_now, cut_off, is_calm)
        self._find_owner = find_owner
        self._owners: dict[tuple[bytes, int], str] = {}
        # By broker and topic, the highest epoch that this process of the broker knew.
        self._epochs: dict[tuple[str, bytes], int] = {}
        self.to_owner = 0
        self.ordered = 0
        self.words = 0

    def figures(self) -> dict[str, Any]:
        """What crossed between brokers for owned topics, and how often those changed hands."""
        topics = {name for name, _ in self._owners}
        return {
            "owned_topics": len(topics),
            "changes_of_owner": len(self._owners) - len(topics),
            "to_owners": self.to_owner,
            "ordered": self.ordered,
            "words": self.words,
        }

    def observed(self, host: Host, fact: object) -> None:
        if isinstance(fact, facts.BrokerStarted):
            self._epochs = {key: epoch for key, epoch in self._epochs.items() if key[0] != fact.broker}

    # --- what crosses ---------------------------------------------------------------------------------------------------

    def _on_messages(self, broker: FabricBroker, stream: ByteStream, content: bytes) -> None:
        arrived = Arrived(content, broker.host.now)
        if not is_owned_errand(arrived.via):
            super()._on_messages(broker, stream, content)
            return
        errand = owner_errands.parse(arrived.via)
        if errand.kind == owner_errands.WORD:
            self.words += 1
        elif errand.kind == owner_errands.ORDERED:
            self.ordered += arrived.count
            super()._on_messages(broker, stream, content)
        else:
            self.to_owner += arrived.count

    # --- who owns what --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        for broker in self._fabric.open():
            for topic in broker.fabric.ownership.topics.values():
                self._check_topic(broker, topic)

    def _check_topic(self, broker: FabricBroker, topic: OwnedTopic) -> None:
        highest = self._epochs.get((broker.name, topic.name), 0)
        if topic.epoch < highest:
            raise InvariantViolated(
                f"{broker.name} knew the owner of {topic.name.decode()} as of epoch {highest}, and now as of {topic.epoch}",
                [broker.host],
            )
        self._epochs[broker.name, topic.name] = topic.epoch
        if topic.state != OWNER:
            return
        owner = self._owners.setdefault((topic.name, topic.epoch), broker.name)
        if owner != broker.name:
            raise InvariantViolated(
                f"{owner} and {broker.name} both own {topic.name.decode()} in epoch {topic.epoch}", [broker.host]
            )

    # --- in the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        super().finish()
        brokers = self._fabric.open()
        if not self._fabric.all_open() or self._cut_off():
            return
        names = {name for broker in brokers for name in broker.fabric.ownership.topics}
        for name in sorted(names):
            self._check_agreement(name, brokers)

    def _check_agreement(self, name: bytes, brokers: list[FabricBroker]) -> None:
        topic = name.decode()
        hosts: list[Host | str] = [broker.host for broker in brokers]
        known = {broker.name: broker.fabric.ownership.topics.get(name) for broker in brokers}
        # Who sent nothing to an owner, and got nothing from a later one, need not have heard that there is one.
        newest = max((each.epoch for each in known.values() if each is not None), default=0)
        believed = {
            (each.epoch, each.owner)
            for each in known.values()
            if each is not None and (each.owner or each.parked) and (each.sent or each.parked or each.epoch == newest)
        }
        if len(believed) > 1:
            raise InvariantViolated(f"brokers disagree about the owner of {topic}: {sorted(believed)}", hosts)
        for broker, each in known.items():
            waiting = {} if each is None else {source: parked.queued_messages for source, parked in each.parked.items()}
            if waiting:
                raise InvariantViolated(f"{broker} still has messages to {topic} parked: {waiting}", hosts)
        if not believed:
            return
        ((epoch, owner),) = believed
        in_charge = known.get(owner)
        if in_charge is None or in_charge.state != OWNER:
            raise InvariantViolated(f"{owner or 'nobody'} is said to own {topic} in epoch {epoch}, and does not", hosts)
        found = self._find_owner(topic)
        if found is not None and found != (owner, epoch):
            raise InvariantViolated(
                f"the directory says that {topic} belongs to {found[0] or 'nobody'} since {found[1]}, and brokers say "
                f"{owner} since {epoch}",
                hosts,
            )
