"""What a fabric with broadcast groups promises its clients, checked against everything that happens in a simulated run.

It is what :mod:`nearcast.simulation.fabric_invariants` says of any fabric, clients that connect to the cloud itself included,
with these differences. A subscriber is owed a message from the moment that one of these holds:

- publisher and subscriber are at the same broker, or both at the cloud;
- the publisher's broker floods its messages to the subscriber's, from when the message is published until it is acknowledged;
- some broker that covers the subscriber's takes messages of the topic from the cloud. From then on there must always be one:
  nobody is let go before somebody else has taken over, whoever leads, joins, leaves, crashes or loses the cloud.

It is held, until it arrives, by a broker for its client or for another broker, by a broker for the cloud, or by the cloud for
a broker.

- *Exactly once.* At QoS 2 nothing comes twice, but after a broker died: what a broker has taken already it remembers in memory
  alone. Over MQTT 3.1.1, messages cannot carry their identity through the cloud, nor do messages of the cloud's own clients
  have one, nor does it mean anything to them. There, what went two ways (see *Order*) comes twice, and what is retained does
  as well when it comes anew with a subscription. Of a shared subscription, brokers of different groups may each serve a
  message that was given to the cloud twice, because its origin changed groups.
- *Order.* While groups change, and as long as two brokers pass on to a third what the cloud has (one of them may have died
  and not know yet that it need not), messages of a publisher may go different ways, and overtake each other.
- *QoS 0.* What is published at QoS 0 while groups change may be lost, never doubled. Once they have been the same for a while,
  it arrives.
- *Nothing waits.* In the end, whatever a connected client is owed has reached its broker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from nearcast.errors import InvariantViolated
from nearcast.fabric.coverage import DEPARTING
from nearcast.fabricconfig import Groups
from nearcast.mqtt.session import Session
from nearcast.mqtt.topics import SHARE_PREFIX
from nearcast.scenario.expansion import Client
from nearcast.simulation import mqtt_facts as facts
from nearcast.simulation.cloud_broker import CloudBroker
from nearcast.simulation.fabric_broker import FabricBroker
from nearcast.simulation.fabric_invariants import LATE_S, Brokers, FabricLedger, knows
from nearcast.simulation.hosts import Host
from nearcast.simulation.mqtt_broker import SimulatedBroker
from nearcast.simulation.mqtt_invariants import Key, Sent, Stream, Subscriber, held_for, takes

STEADY_S: Final = 3.0
"""For how long groups must have been the same before QoS 0 counts."""


class GroupBrokers(Brokers):
    """All brokers of a fabric with groups, and their cloud."""

    def __init__(
        self,
        durable: dict[str, bool],
        find: Callable[[str], FabricBroker | None],
        is_meant: Callable[[str], bool],
        find_cloud: Callable[[], SimulatedBroker | None],
        cloud: tuple[str, int],
        cloud_durable: bool,
    ) -> None:
        super().__init__(durable, find, is_meant)
        self._find_cloud = find_cloud
        self.cloud_address = cloud
        self.cloud_durable = cloud_durable

    def cloud(self) -> CloudBroker | None:
        """The cloud, if it lets clients in."""
        found = self._find_cloud()
        return found if isinstance(found, CloudBroker) and found.open else None

    def is_at_cloud(self, client: Client) -> bool:
        return (client.broker, client.port) == self.cloud_address

    def all_open(self) -> bool:
        return self.cloud() is not None and super().all_open()

    def sessions_of(self, client: str) -> list[tuple[FabricBroker | CloudBroker, Session]]:
        cloud = self.cloud()
        session = None if cloud is None else cloud.engine.sessions.by_client.get(client)
        if cloud is None or session is None:
            return super().sessions_of(client)
        return [*super().sessions_of(client), (cloud, session)]


def fellows(broker: FabricBroker) -> list[str]:
    """The other brokers of a broker's group, as far as it knows."""
    return [name for name in broker.fabric.broadcast.formation.view.members if name != broker.name]


def covered_by(broker: FabricBroker) -> dict[str, frozenset[str]]:
    """The brokers that a broker is to pass messages of the cloud on to, itself included, each with its filters."""
    return {
        covered.name: frozenset(covered.filters)
        for covered in broker.fabric.broadcast.coverage.covered.values()
        if covered.state != DEPARTING
    }


def passed_on_to(broker: FabricBroker) -> list[str]:
    """Those, and the ones that are covered elsewhere by now and get what the cloud had for them before."""
    return list(broker.fabric.broadcast.coverage.covered)


def is_shared(client: Client, topic: str) -> bool:
    """Whether a client takes messages to a topic as a member of a shared subscription."""
    return any(each.filter.startswith(SHARE_PREFIX) and takes(each.filter, topic) for each in client.subscribe)


def is_relaying(broker: FabricBroker) -> bool:
    """Whether what is published at a broker gets to the cloud at once."""
    relay = broker.fabric.broadcast.relay
    return relay is not None and relay.state() == "live"


class Coverage:
    """Who takes what from the cloud, and for whom. Of one that is down, what was so when it was seen last: that holds again
    when it is back, if it keeps a journal."""

    def __init__(self, brokers: GroupBrokers, world_now: Callable[[], float]) -> None:
        self._brokers = brokers
        self._now = world_now
        self.two_ways_s: dict[str, float] = {}
        """When messages of the cloud last had two ways to a broker."""
        self._wanted: dict[str, frozenset[str]] = {}
        self._covered: dict[str, dict[str, frozenset[str]]] = {}
        self._passed_on: dict[str, list[str]] = {}

    def look(self) -> None:
        """See who covers whom now."""
        cloud = self._brokers.cloud()
        if cloud is not None:
            # What a broker takes for members of shared subscriptions is for nobody else.
            self._wanted = {
                name: frozenset(each for each in session.subscriptions if not each.startswith(SHARE_PREFIX))
                for name, session in cloud.sessions()
            }
        elif not self._brokers.cloud_durable:
            self._wanted = {}
        for name, durable in self._brokers.durable.items():
            broker = self._brokers.find(name)
            if broker is not None:
                self._covered[name] = covered_by(broker)
                self._passed_on[name] = passed_on_to(broker)
            elif not durable:
                self._covered.pop(name, None)
                self._passed_on.pop(name, None)

        ways = Counter(place for places in self._passed_on.values() for place in places)
        self.two_ways_s.update({place: self._now() for place, count in ways.items() if count > 1})

    def reaches(self, place: str, topic: str, filters: list[str]) -> bool:
        """Whether messages to a topic that are at the cloud get to a broker, for clients with these filters."""
        matching = [each for each in filters if takes(each, topic)]
        for taker, covered in self._covered.items():
            known = covered.get(place)
            if known is None or not known.issuperset(matching):
                continue
            if any(takes(each, topic) for each in self._wanted.get(taker, ())):
                return True
        return False


class BroadcastLedger(FabricLedger):
    """Keeps account of every message of a run; see the module."""

    def __init__(
        self,
        clients: tuple[Client, ...],
        brokers: GroupBrokers,
        gateways: set[tuple[str, int]],
        world_now: Callable[[], float],
        groups: Groups,
        class_of: Callable[[str], str],
        cut_off: Callable[[], bool],
    ) -> None:
        """``class_of`` tells the class of a topic, which all brokers agree on, ``cut_off`` whether the network is cut now."""
        self._cut_off = cut_off
        self._groups = brokers
        self._prefix = groups.prefix + "/"
        self._numbered = groups.cloud_version == "5"
        self._class_of = class_of
        super().__init__(clients, brokers, gateways, world_now)
        self._everything_durable = self._everything_durable and brokers.cloud_durable
        for known in self._subscribers.values():
            known.promised = self._is_promised(known.client)
            known.kept = known.promised and not known.client.clean_start
        self.coverage = Coverage(brokers, world_now)
        # The message that is being looked at.
        self._message: facts.Message | None = None
        # Owed only because publisher and subscriber were of one group; looked at again when the message is acknowledged.
        self._by_flood: set[tuple[str, Key]] = set()
        self.changed_s = 0.0
        """When a group changed last."""
        self._cloud_died_s = -1.0

    def observed(self, host: Host, fact: object) -> None:
        if isinstance(fact, facts.GroupChanged):
            self.changed_s = self._now()
        if self._cut_off():
            self.disturbances += 1  # of brokers and the cloud, though no client may notice
        super().observed(host, fact)

    def _on_delivered(self, host: Host, fact: facts.Delivered) -> None:
        if not fact.topic.startswith(self._prefix):  # what brokers say to each other anybody at the cloud can hear
            super()._on_delivered(host, fact)

    def _on_broker_started(self, broker: str) -> None:
        again = broker in self._started
        super()._on_broker_started(broker)
        if again and broker == self._groups.cloud_address[0]:
            self._cloud_died_s = self._now()
            if self._groups.cloud_durable:
                del self._broker_died_s[broker]

    def _on_broker_opened(self) -> None:
        """What a broker must know to go on, it has kept; nothing to excuse."""

    def _is_steady(self) -> bool:
        return (
            self._groups.all_open()
            and self._now() - max(self.changed_s, self._cloud_died_s) > STEADY_S
            and all(is_relaying(broker) for broker in self._groups.open())
        )

    # --- what is owed ---------------------------------------------------------------------------------------------------

    def _on_published(self, message: facts.Message) -> None:
        self._message = message
        self.coverage.look()
        super()._on_published(message)
        key = (message.publisher, message.sequence)
        if message.qos == 0 and not self._is_steady():
            for known, _ in self._streams[message.publisher].receivers:
                self.expected -= key in known.expected
                known.expected.discard(key)

    def _on_acknowledged(self, message: facts.Message) -> None:
        super()._on_acknowledged(message)
        self._message = message
        self.coverage.look()
        key = (message.publisher, message.sequence)
        for known, _ in self._streams[message.publisher].receivers:
            where = (known.client.name, key)
            if where in self._by_flood:
                if key in known.owed and not self._is_covered(known):
                    known.owed.pop(key)
                    known.expected.discard(key)
                    known.given_up.add(key)
                self._by_flood.remove(where)

    def _is_covered(self, known: Subscriber) -> bool:
        place = self._place(known)
        message = self._message
        if not place or message is None or (known.promised and not known.confirmed):
            return False
        wanted = [each.filter for each in known.client.subscribe]
        sessions = self._groups.sessions_of(known.client.name)
        if not sessions and not (self._everything_durable and known.promised):
            return False
        if any(each not in session.subscriptions for each in wanted for _, session in sessions):
            return False
        publisher = self._streams[message.publisher].client
        if self._groups.is_at_cloud(known.client):
            return True
        if self._groups.is_at_cloud(publisher):
            return self.coverage.reaches(place, message.topic, wanted)
        home = self._home(publisher)
        if home == place or self.coverage.reaches(place, message.topic, wanted):
            return True
        origin = self._groups.find(home)
        if origin is not None and self._floods(origin, place, message.topic, wanted):
            self._by_flood.add((known.client.name, (message.publisher, message.sequence)))
            return True
        return False

    def _floods(self, origin: FabricBroker, place: str, topic: str, wanted: list[str]) -> bool:
        if place not in fellows(origin):
            return False
        return self._class_of(topic) == "broadcast" or knows(origin, place, wanted)

    def _home(self, client: Client) -> str:
        """The broker that a client's messages go to."""
        for broker, _ in self._groups.sessions_of(client.name):
            return broker.name
        return client.broker if client.port == 1883 else f"{client.broker}-{client.port}"

    # --- what is excused ------------------------------------------------------------------------------------------------

    def _may_overtake(self, known: Subscriber, message: facts.Message) -> bool:
        if super()._may_overtake(known, message) or self._broker_died_since(message.sent_s - LATE_S):
            return True
        return not self._numbered or self._had_two_ways(known, message)

    def _had_two_ways(self, known: Subscriber, message: facts.Message) -> bool:
        """Whether a message may have come to the subscriber's broker by two ways."""
        two_ways_s = self.coverage.two_ways_s.get(self._place(known), -LATE_S - 1.0)
        return max(self.changed_s, self._cloud_died_s, two_ways_s) >= message.sent_s - LATE_S

    def _may_repeat(self, known: Subscriber, sent: Sent) -> bool:
        return super()._may_repeat(known, sent) or self._broker_died_since(sent.message.sent_s - LATE_S)

    def _is_numbered(self, known: Subscriber, stream: Stream) -> bool:
        """Whether a publisher's messages have an identity that the subscriber's broker knows."""
        return self._numbered and not self._groups.is_at_cloud(stream.client) and not self._groups.is_at_cloud(known.client)

    def _broker_died_since(self, when_s: float) -> bool:
        """Of the fabric, or a cloud that forgets."""
        return not self._groups.all_open() or max(self._broker_died_s.values(), default=-1.0) >= when_s

    def _on_repeated(self, host: Host, fact: facts.Delivered, known: Subscriber, stream: Stream, sent: Sent) -> None:
        two_ways = self._had_two_ways(known, sent.message)
        unknown = not self._is_numbered(known, stream) and (two_ways or sent.message.retain)
        served = two_ways and is_shared(known.client, sent.message.topic)
        forgotten = sent.message.qos == 0 and self._broker_died_since(sent.message.sent_s - LATE_S)
        if unknown or served or forgotten:
            self.duplicated += 1
            self.excused += 1
            return
        super()._on_repeated(host, fact, known, stream, sent)

    def _on_absent(self, known: Subscriber, message: facts.Message) -> None:
        cloud = self._groups.cloud()
        by_policy = cloud is not None and cloud.engine.stats.dropped_queue_full > 0
        forgotten = not self._everything_durable and self._broker_died_since(message.sent_s - LATE_S)
        if by_policy or forgotten:
            self.dropped_by_policy += by_policy
            known.owed.pop((message.publisher, message.sequence))
            return
        super()._on_absent(known, message)

    # --- what must hold -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.coverage.look()
        super().check()

    def _held(self, known: Subscriber, for_others: bool = True) -> set[Key]:
        found = super()._held(known, for_others)
        cloud = self._groups.cloud()
        if cloud is None:
            return found
        own = cloud.engine.sessions.by_client.get(known.client.name)
        if own is not None:
            found.update(held_for(own))
        if for_others:
            for _, session in cloud.sessions():
                found.update(held_for(session))
        return found

    def _on_subscribed(self, client: str) -> None:
        known = self._subscribers[client]
        known.confirmed = True
        self._assure(known.client)
        self._place(known)

    def finish(self) -> None:
        super().finish()
        if self._groups.all_open():
            for known in self._subscribers.values():
                self._check_arrived(known)

    def _check_arrived(self, known: Subscriber) -> None:
        """Whatever a connected client is owed is with its own broker at least."""
        sessions = self._groups.sessions_of(known.client.name)
        if not any(session.connection is not None for _, session in sessions):
            return
        here = {key for _, session in sessions for key in held_for(session)}
        for key, sent in known.owed.items():
            if sent.acknowledged and key not in here:
                message = sent.message
                raise InvariantViolated(
                    f"message {message.sequence} of {message.client} to {message.topic} is still on its way to "
                    f"{known.client.name} in the end, and nothing is cut",
                    [known.client.host, *(broker.host for broker in self._groups.open())],
                )

    def _check_last_retained(self) -> None:
        """Retained messages are where they are wanted, and not everywhere."""
