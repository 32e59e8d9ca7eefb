"""What replica sets promise, checked against everything that happens in a simulated run.

It is what :mod:`nearcast.simulation.fabric_invariants` says of any fabric, with these differences for replicated topics:

- *One log.* An entry that one replica has committed, all others have the same, whenever they have it; so a topic's records
  have the same indexes everywhere, without gaps.
- *Kept.* What was acknowledged at QoS 1 or 2 is in the log for ever. It is there once if it was published at QoS 0 or 2, and
  at QoS 1 more often only if a connection or a broker was lost since. At QoS 0 a change of leader loses what is on its way.
- *Owed.* A message is owed to a subscriber as any is. What is in the log behind the cursor of the subscriber's broker is held.
- *One order.* All subscribers get a topic's messages in the log's order, whoever published them, and however often its leader
  changed or the subscribers moved. What a lost broker brings back comes late, as in any fabric.
- *Repeated.* Behind a gateway whose broker died, a client goes on at one whose cursor may be behind: what was published at
  QoS 0 may come to it twice.
- *In the end* no broker has messages for a set that it has not brought there, and everybody's cursor is where the log ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nearcast.errors import InvariantViolated
from nearcast.fabricconfig import TopicClass
from nearcast.mqtt.topics import matches
from nearcast.scenario.expansion import Client
from nearcast.scenario.identity import decode_identity
from nearcast.simulation import mqtt_facts as facts
from nearcast.simulation.fabric_broker import FabricBroker
from nearcast.simulation.fabric_invariants import LATE_S, Brokers, FabricLedger, FabricTables
from nearcast.simulation.hosts import Host
from nearcast.simulation.mqtt_invariants import Key, Sent, Stream, Subscriber
from nearcast.topiclog.entries import Run

Place = tuple[int, int]
"""Where a message is in a set's log: its entry, and how many messages precede it there."""


class SetRules:
    """Which set keeps which topic, as the rules say that every broker has."""

    def __init__(self, rules: tuple[TopicClass, ...]) -> None:
        self._rules = rules
        self._known: dict[str, str] = {}

    def set_of(self, topic: str) -> str:
        """The set that keeps a topic; empty if none does."""
        found = self._known.get(topic)
        if found is None:
            rule = next((rule for rule in self._rules if matches(rule.topic, topic)), None)
            found = self._known[topic] = "" if rule is None else rule.replica_set
        return found


class Account:
    """A set's log, as far as any replica has ever shown it."""

    def __init__(self) -> None:
        self.entries: list[tuple[tuple[bytes, Key | None], ...]] = []
        self.places: dict[Key, list[Place]] = {}
        self.next_index: dict[bytes, int] = {}
        # By process of a broker: up to which entry it was compared.
        self.compared: dict[tuple[str, int], int] = {}


class SetLedger(FabricLedger):
    """Keeps account of every message of a run; see the module."""

    def __init__(
        self,
        clients: tuple[Client, ...],
        brokers: Brokers,
        gateways: set[tuple[str, int]],
        world_now: Callable[[], float],
        rules: tuple[TopicClass, ...],
    ) -> None:
        super().__init__(clients, brokers, gateways, world_now)
        self._rules = SetRules(rules)
        self._accounts: dict[str, Account] = {}
        self._message: facts.Message | None = None
        self._last_place: dict[tuple[str, str], Place] = {}
        self._terms: dict[tuple[str, int], str] = {}

    def figures(self) -> dict[str, Any]:
        """How much the logs have, and how often their leaders changed."""
        return {
            "replicated": sum(len(account.places) for account in self._accounts.values()),
            "entries": sum(len(account.entries) for account in self._accounts.values()),
            "leaders": len(self._terms),
        }

    # --- the logs -------------------------------------------------------------------------------------------------------

    def _read_logs(self) -> None:
        """Compare what replicas have committed since the last time."""
        for broker in self._fabric.open():
            for set_name, hosted in broker.fabric.sets.hosted.items():
                account = self._accounts.setdefault(set_name, Account())
                process = (broker.name, broker.host.starts)
                at = account.compared.get(process, 0)
                while at < hosted.commit:
                    at += 1
                    runs = hosted.log.runs(at)
                    if runs is not None:
                        self._compare(account, broker, set_name, at, runs)
                account.compared[process] = at
                self._check_leader(broker, set_name)

    def _check_leader(self, broker: FabricBroker, set_name: str) -> None:
        hosted = broker.fabric.sets.hosted[set_name]
        if hosted.leads:
            before = self._terms.setdefault((set_name, hosted.term), broker.name)
            if before != broker.name:
                raise InvariantViolated(f"{before} and {broker.name} lead {set_name} in term {hosted.term}", [broker.host])

    def _compare(self, account: Account, broker: FabricBroker, set_name: str, index: int, runs: list[Run]) -> None:
        found = tuple(
            (run.topic, None if identity is None else (identity.publisher, identity.sequence))
            for run in runs
            for identity in map(decode_identity, run.payloads())
        )
        if index <= len(account.entries):
            if account.entries[index - 1] != found:
                raise InvariantViolated(f"entry {index} of {set_name} is another one at {broker.name}", [broker.host])
            return
        if index != len(account.entries) + 1:
            raise InvariantViolated(f"entries of {set_name} before {index} are not to be seen at {broker.name}", [broker.host])
        account.entries.append(found)
        for position, (topic, key) in enumerate(found):
            account.next_index[topic] = account.next_index.get(topic, 1) + 1
            if key is not None:
                self._note_place(account, broker, key, (index, position))

    def _note_place(self, account: Account, broker: FabricBroker, key: Key, place: Place) -> None:
        places = account.places.setdefault(key, [])
        places.append(place)
        if len(places) == 1:
            return
        stream = self._streams[key[0]]
        sent = stream.messages[key[1]]
        message = sent.message
        named = f"message {message.sequence} of {message.client} to {message.topic}"
        again = sent.may_repeat or self._began_anew_s.get(message.client, -1.0) >= message.sent_s
        gateway = self._is_behind_gateway(stream.client)
        again = again or ((gateway or not self._everything_durable) and self._broker_died_since(message.sent_s))
        if message.qos == 0 or (message.qos == 2 and not again):
            raise InvariantViolated(f"{named} is in the log twice, at QoS {message.qos}", [broker.host])
        if message.qos == 1 and self._disturbed_s(message.client, stream) < message.sent_s:
            raise InvariantViolated(f"{named} is in the log twice, and no connection was lost since", [broker.host])

    # --- what happens ---------------------------------------------------------------------------------------------------

    def _on_published(self, message: facts.Message) -> None:
        self._message = message if self._rules.set_of(message.topic) else None
        super()._on_published(message)
        self._message = None

    def _is_covered(self, known: Subscriber) -> bool:
        message = self._message
        if message is not None:
            if not self._fabric.all_open():
                return False
            place = self._place(known)
            home = self._fabric.find(place) if place else None
            if home is None or not home.fabric.sets.cursors.of(self._rules.set_of(message.topic)):
                return False
        return super()._is_covered(known)

    def _on_acknowledged(self, message: facts.Message) -> None:
        super()._on_acknowledged(message)
        if self._rules.set_of(message.topic) and self._fabric.all_open():
            self._read_logs()
            self._check_kept(message)

    def _on_delivered(self, host: Host, fact: facts.Delivered) -> None:
        delivered = self.delivered
        super()._on_delivered(host, fact)
        set_name = self._rules.set_of(fact.topic)
        identity = decode_identity(fact.payload)
        if fact.retained or not set_name or identity is None or self.delivered == delivered:
            return
        account = self._accounts.get(set_name)
        key = (identity.publisher, identity.sequence)
        if account is None or key not in account.places:
            self._read_logs()
        places = self._accounts[set_name].places.get(key) if set_name in self._accounts else None
        if not places:
            raise InvariantViolated(f"{fact.client} got a message to {fact.topic} that is not committed", [host])
        known = self._subscribers[fact.client]
        message = self._streams[key[0]].messages[key[1]].message
        line = (fact.client, fact.topic)
        last = self._last_place.get(line, (0, 0))
        late = max(places)
        named = f"message {message.sequence} of {message.client} to {message.topic}"
        # A session's queue may be passed by what goes at QoS 0, which is not kept back.
        if late < last and fact.qos and not self._may_overtake(known, message):
            raise InvariantViolated(f"{fact.client} got {named} behind later ones of the log", [host])
        if fact.qos:
            self._last_place[line] = max(last, min(places))

    def _on_repeated(self, host: Host, fact: facts.Delivered, known: Subscriber, stream: Stream, sent: Sent) -> None:
        resumed = self._is_behind_gateway(known.client) and self._broker_died_since(sent.message.sent_s - LATE_S)
        if resumed and not sent.message.qos and self._rules.set_of(sent.message.topic):
            self.duplicated += 1
            return
        super()._on_repeated(host, fact, known, stream, sent)

    # --- what must hold -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self._read_logs()
        super().check()

    def _held(self, known: Subscriber, for_others: bool = True) -> set[Key]:
        found = super()._held(known, for_others)
        for set_name, account in self._accounts.items():
            cursor = self._cursor_of(known, set_name)
            for keys in account.entries[cursor:]:
                found.update(key for _, key in keys if key is not None)
        return found

    def _cursor_of(self, known: Subscriber, set_name: str) -> int:
        """Up to which entry a subscriber's brokers have delivered everything."""
        places = [broker for broker, _ in self._fabric.sessions_of(known.client.name) if isinstance(broker, FabricBroker)]
        return min([broker.fabric.sets.cursors.of(set_name) for broker in places], default=0)

    def finish(self) -> None:
        super().finish()
        for set_name, account in self._accounts.items():
            for broker in self._fabric.open():
                self._check_indexes(account, broker, set_name)
        if self._fabric.all_open():
            self._check_all_kept()

    def _check_complete(self) -> None:
        if len(self._terms) <= len(self._accounts):  # else leaders changed by themselves, and QoS 0 was lost with them
            super()._check_complete()

    def _check_indexes(self, account: Account, broker: FabricBroker, set_name: str) -> None:
        hosted = broker.fabric.sets.hosted.get(set_name)
        if hosted is None or hosted.commit != len(account.entries):
            return
        for topic, following in account.next_index.items():
            if hosted.last_index(topic) != following - 1:
                raise InvariantViolated(
                    f"{broker.name} has {hosted.last_index(topic)} records of {topic.decode()}, and the log {following - 1}",
                    [broker.host],
                )

    def _check_all_kept(self) -> None:
        for stream in self._streams.values():
            if self._rules.set_of(stream.publishing.topic):
                for sent in stream.messages.values():
                    if sent.acknowledged and sent.message.qos:
                        self._check_kept(sent.message)

    def _check_kept(self, message: facts.Message) -> None:
        set_name = self._rules.set_of(message.topic)
        account = self._accounts.get(set_name)
        if account is None or (message.publisher, message.sequence) not in account.places:
            raise InvariantViolated(
                f"message {message.sequence} of {message.client} to {message.topic} was acknowledged and is not in {set_name}",
                [broker.host for broker in self._fabric.open()],
            )


class SetTables(FabricTables):
    """What brokers know of each other, and of replica sets."""

    def finish(self) -> None:
        super().finish()
        brokers = self._fabric.open()
        if not self._fabric.all_open() or self._cut_off() or any(broker.sets.is_busy for broker in brokers):
            return  # a disk that is slow has yet to take what is on its way
        for broker in brokers:
            for set_name, session in broker.fabric.sets.sessions.items():
                if not broker.fabric.sets.leader_of(set_name):
                    raise InvariantViolated(f"{broker.name} knows no leader of {set_name}, and nothing is cut", [broker.host])
                if session.queued_messages:
                    raise InvariantViolated(
                        f"{broker.name} still has {session.queued_messages} messages for {set_name}, and nothing is cut",
                        [broker.host],
                    )
            commits: dict[str, int] = {}
            for other in brokers:
                for set_name, hosted in other.fabric.sets.hosted.items():
                    commits[set_name] = max(hosted.commit, commits.get(set_name, 0))
            for set_name, commit in commits.items():
                cursor = broker.fabric.sets.cursors.of(set_name)
                if cursor < commit:
                    raise InvariantViolated(
                        f"{broker.name} has {set_name} up to entry {cursor} of {commit}, and nothing is cut", [broker.host]
                    )
