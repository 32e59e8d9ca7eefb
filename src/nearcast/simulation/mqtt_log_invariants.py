"""What a broker promises about the topics it keeps, checked against everything that happens in a simulated run.

A reader is imagined who reads every record as soon as it is committed, and never forgets one. Always, whatever fails:

- *An index is one message.* What the reader read under an index is read there again by whoever looks later, after any crash,
  unless retention removed it. Indexes count up by one, and arrival times do not fall.
- *Nothing is invented.* A record was published to its topic, byte for byte, by the client it names.
- *Order.* One publisher's messages to one topic at one QoS stand in the log, each for the first time, in the order they were
  published.
- *Exactly once.* A message published at QoS 2 to a durable topic is in the log once, unless its publisher was told in between
  that its session is gone. One published at QoS 0 is there once at most.

And for a message that was published at QoS 1 or 2 to a durable topic of a durable broker, and was acknowledged:

- *Nothing acknowledged is lost.* It was in the log when the acknowledgement came, and (first rule) stays there.

Taps promise only the first three.
"""

from __future__ import annotations

from collections.abc import Callable

from nearcast.config import TopicRule
from nearcast.errors import InvariantViolated, RecordUnavailable
from nearcast.scenario.expansion import Client
from nearcast.scenario.identity import decode_identity
from nearcast.simulation import mqtt_facts as facts
from nearcast.simulation.hosts import Host
from nearcast.simulation.invariants import Invariant
from nearcast.simulation.mqtt_broker import SimulatedBroker
from nearcast.topiclog.batches import Record
from nearcast.topiclog.log import Topic, TopicLog
from nearcast.topiclog.rules import RuleTable

Key = tuple[int, int]
"""A message: number of its stream, and its sequence there."""

Place = tuple[str, int]
"""A broker: its host and port."""


class _Read:
    """What the reader has of one topic."""

    def __init__(self) -> None:
        self.records: list[tuple[Key, int]] = []
        """Of each record from index 1 on, the message and the arrival time."""
        self.first_index = 1


class _Sent:
    """A message of a stream whose topic is kept."""

    def __init__(self, message: facts.Message, client: Client) -> None:
        self.message = message
        self.client = client
        self.times = 0
        """How often it is in the log."""
        self.acknowledged = False
        self.may_repeat = False
        """Its publisher's session was lost before it was acknowledged."""


class LogLedger(Invariant):
    """See the module. ``brokers`` finds the broker of a host and port if it runs."""

    def __init__(
        self,
        clients: tuple[Client, ...],
        durable: dict[Place, bool],
        rules: tuple[TopicRule, ...],
        brokers: Callable[[str, int], SimulatedBroker | None],
    ) -> None:
        self._clients = {client.name: client for client in clients}
        self._durable = durable
        self._table = RuleTable(rules)
        self._brokers = brokers
        self._sent: dict[Key, _Sent] = {}
        self._open: dict[str, dict[Key, _Sent]] = {}
        self._topics: dict[Place, dict[bytes, _Read]] = {place: {} for place, keeps in durable.items() if keeps}
        self._highest: dict[tuple[Place, int], int] = {}
        self.kept = 0
        self.kept_acknowledged = 0
        self.kept_twice = 0

    def figures(self) -> dict[str, int]:
        """For the report of the run."""
        return {"kept": self.kept, "kept_acknowledged": self.kept_acknowledged, "kept_twice": self.kept_twice}

    # --- what happens ---------------------------------------------------------------------------------------------------

    def observed(self, host: Host, fact: object) -> None:
        if isinstance(fact, facts.TopicsCommitted):
            self._read((fact.broker, fact.port))
        elif isinstance(fact, facts.Published):
            self._on_published(fact.message)
        elif isinstance(fact, facts.Acknowledged):
            self._on_acknowledged(fact.message)
        elif isinstance(fact, facts.ClientConnected):
            if not fact.session_present:
                for sent in self._open.get(fact.client, {}).values():
                    sent.may_repeat = True
        elif isinstance(fact, facts.BrokerOpened):
            for place in self._topics:
                if place[0] == fact.broker:
                    self._read_again(place)

    def _on_published(self, message: facts.Message) -> None:
        client = self._clients[message.client]
        if (client.broker, client.port) in self._topics and self._table.match(message.topic.encode()) is not None:
            sent = _Sent(message, client)
            key = (message.publisher, message.sequence)
            self._sent[key] = sent
            self._open.setdefault(message.client, {})[key] = sent

    def _on_acknowledged(self, message: facts.Message) -> None:
        sent = self._sent.get((message.publisher, message.sequence))
        if sent is None:
            return
        sent.acknowledged = True
        self._open[message.client].pop((message.publisher, message.sequence), None)
        rule = self._table.match(message.topic.encode())
        if rule is not None and rule.mode == "durable":
            self.kept_acknowledged += 1
            if not sent.times:
                raise InvariantViolated(
                    f"{_named(message)} was acknowledged at QoS {message.qos} and is not in the log of {sent.client.broker}",
                    [sent.client.broker, sent.client.host],
                )

    # --- what is read ---------------------------------------------------------------------------------------------------

    def _log_of(self, place: Place) -> TopicLog | None:
        process = self._brokers(*place)
        return None if process is None or process.keeper is None else process.keeper.log

    def _read(self, place: Place) -> None:
        """What was committed since the last time."""
        log = self._log_of(place)
        if log is None:
            return
        known = self._topics[place]
        for topic in log.topics.values():
            read = known.get(topic.name)
            if read is None:
                read = known[topic.name] = _Read()
            seen = len(read.records) + 1
            if topic.committed_index < seen:
                raise InvariantViolated(
                    f"the log of {place[0]} has {topic.text()} up to {topic.committed_index - 1}, and had {seen - 1}",
                    [place[0]],
                )
            for index in range(seen, topic.committed_index):
                self._take(place, read, self._get(place, log, topic, index))

    def _take(self, place: Place, read: _Read, record: Record) -> None:
        key = self._message_of(place, record)
        if read.records and record.time_us < read.records[-1][1]:
            raise InvariantViolated(f"record {record.index} of {record.topic} arrived before the one ahead of it", [place[0]])
        read.records.append((key, record.time_us))
        self.kept += 1
        sent = self._sent[key]
        message = sent.message
        sent.times += 1
        rule = self._table.match(message.topic.encode())
        if sent.times > 1:
            self.kept_twice += 1
            if message.qos == 0 or (message.qos == 2 and not sent.may_repeat and rule is not None and rule.mode == "durable"):
                raise InvariantViolated(
                    f"{_named(message)}, published at QoS {message.qos}, is in the log of {place[0]} twice",
                    [place[0], sent.client.host],
                )
            return
        highest = self._highest.get((place, key[0]), -1)
        if key[1] < highest and not sent.may_repeat:
            raise InvariantViolated(
                f"{_named(message)} stands in the log of {place[0]} after number {highest}", [place[0], sent.client.host]
            )
        self._highest[place, key[0]] = max(highest, key[1])

    def _message_of(self, place: Place, record: Record) -> Key:
        identity = decode_identity(bytes(record.payload))
        sent = None if identity is None else self._sent.get((identity.publisher, identity.sequence))
        if identity is None or sent is None:
            raise InvariantViolated(f"record {record.index} of {record.topic} was never published", [place[0]])
        message = sent.message
        same = message.payload == record.payload and message.topic == record.topic and message.qos == record.qos
        if not same or record.publisher != message.client or record.retain != message.retain:
            raise InvariantViolated(f"record {record.index} of {record.topic} is {_named(message)}, changed", [place[0]])
        return identity.publisher, identity.sequence

    def _read_again(self, place: Place) -> None:
        """A broker has recovered: everything that was read must be there again."""
        log = self._log_of(place)
        if log is None:
            return
        for name, read in self._topics[place].items():
            topic = log.topics.get(name)
            if topic is None:
                if read.records:
                    raise InvariantViolated(f"the log of {place[0]} lost the topic {name.decode()}", [place[0]])
                continue
            if topic.committed_index < len(read.records) + 1:
                raise InvariantViolated(
                    f"the log of {place[0]} has {topic.text()} up to {topic.committed_index - 1} after its recovery, "
                    f"and a reader had {len(read.records)}",
                    [place[0]],
                )
            for index in range(topic.first_index, len(read.records) + 1):
                record = self._get(place, log, topic, index)
                identity = decode_identity(bytes(record.payload))
                key, time_us = read.records[index - 1]
                if identity is None or (identity.publisher, identity.sequence) != key or record.time_us != time_us:
                    raise InvariantViolated(f"record {index} of {topic.text()} is another one after recovery", [place[0]])
        self._read(place)

    def _get(self, place: Place, log: TopicLog, topic: Topic, index: int) -> Record:
        try:
            return log.get(topic, index)
        except RecordUnavailable as error:
            raise InvariantViolated(f"the log of {place[0]}: {error}", [place[0]]) from error

    def finish(self) -> None:
        for place in self._topics:
            process = self._brokers(*place)
            if process is not None and process.open:
                self._read_again(place)


def _named(message: facts.Message) -> str:
    return f"message {message.sequence} of {message.client} to {message.topic}"
