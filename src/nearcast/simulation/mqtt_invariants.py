"""What MQTT brokers promise, checked against everything that happens in a simulated run.

Always, whatever fails:

- *Nothing is invented.* What a client gets was published, byte for byte, to a topic it subscribed to.
- *Order.* Of one publisher's messages to one topic at one QoS, a client gets each for the first time in the order they were
  published [MQTT-4.6.0-5, -6]. Retained messages that answer a subscription are no part of it, nor is what is repeated that
  was published before the client subscribed, or that the client takes at QoS 0.
- *Exactly once.* At QoS 2 a client gets no message twice, unless the publisher was told in between that its session is gone:
  then it cannot know what became of the message.
- *No gratuitous repetition.* What was published at QoS 0 comes at most once. Otherwise a client that subscribed at QoS 0 or 1
  gets a message twice only if a connection was lost since it was published.

For a message that was published at QoS 1 or 2 when a client's subscription at QoS 1 or 2 was in place, and was acknowledged:

- *Nothing acknowledged is lost.* The client has it, or the broker still holds it for the client's session. This is looked at
  whenever the broker runs, and not only in the end.

Which failures that survives depends on where the session is:

- with a ``durable`` broker and a client that keeps its session: kills, power cuts, pauses and partitions of either. Such a
  session is never forgotten once anything was promised in it, neither is a subscription;
- with a ``durable`` broker and a ``clean_start`` client: everything but the end of the client's process (MQTT 5), or of its
  connection (3.1.1);
- without ``durable``: everything that the broker's process survives. When it ends, its sessions do.

The *retained* message of a topic that one stream publishes to is one of that stream, and none older than the last that was
acknowledged; without ``durable``, than the last acknowledged since the broker's process began.

Messages that a session's full queue does not take are lost by policy. They are counted, and excuse the broker for the run.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

from nearcast.errors import InvariantViolated
from nearcast.mqtt.publication import Publication
from nearcast.mqtt.session import RELEASED, Session
from nearcast.mqtt.topics import SHARE_PREFIX, matches, parse_shared
from nearcast.scenario.expansion import Client
from nearcast.scenario.identity import decode_identity
from nearcast.simulation import mqtt_facts as facts
from nearcast.simulation.hosts import Host
from nearcast.simulation.invariants import Invariant
from nearcast.simulation.mqtt_broker import SimulatedBroker

Key = tuple[int, int]
"""A message: number of its stream, and its sequence there."""


class Subscriber:
    """What is known about one client as a receiver."""

    def __init__(self, client: Client, promised: bool) -> None:
        self.client = client
        self.promised = promised
        """Whether its session is the broker's to keep over the end of the broker's process."""
        self.kept = promised and not client.clean_start
        """Whether its session may never be forgotten."""
        self.confirmed = False
        """Whether the broker granted its subscriptions since its process knows anything."""
        self.session_number = 0
        self.expected: set[Key] = set()
        """Messages that it should get, as far as it could be known when they were published, and has not."""
        self.owed: dict[Key, Sent] = {}
        """Those of them that it must get."""
        self.given_up: set[Key] = set()
        """What was expected by a session that is gone."""
        self.seen: dict[int, set[int]] = {}
        """Sequences it got, of each stream."""
        self.highest: dict[int, int] = {}


class Sent:
    """A message that some client should get."""

    def __init__(self, message: facts.Message) -> None:
        self.message = message
        self.acknowledged = False
        self.abandoned = False
        """Its publisher's process ended, and with it whoever would send it again."""
        self.may_repeat = False
        """Its publisher's session was lost before it was acknowledged."""


class Stream:
    """The messages of one publisher to one topic."""

    def __init__(self, client: Client, position: int, receivers: list[tuple[Subscriber, int]]) -> None:
        self.client = client
        self.publishing = client.publish[position]
        self.receivers = receivers
        self.messages: dict[int, Sent] = {}
        self.acknowledged_retained = -1


class _Index:
    """Who subscribed to a topic: thousands of clients may each have one of their own. ``reach`` names what a client's messages
    can reach, and those that are reached have the same."""

    def __init__(self, reach: Callable[[Client], str]) -> None:
        self._reach = reach
        self._by_topic: dict[tuple[str, str], list[tuple[Subscriber, int]]] = {}
        self._by_wildcard: dict[str, list[tuple[Subscriber, str, int]]] = {}

    def add(self, known: Subscriber) -> None:
        reach = self._reach(known.client)
        for wanted in known.client.subscribe:
            # Of a shared subscription one member gets a message, and which one is the broker's choice: nothing to hold it to.
            if wanted.filter.startswith(SHARE_PREFIX):
                continue
            if "+" in wanted.filter or "#" in wanted.filter:
                self._by_wildcard.setdefault(reach, []).append((known, wanted.filter, wanted.qos))
            else:
                self._by_topic.setdefault((reach, wanted.filter), []).append((known, wanted.qos))

    def receivers(self, publisher: Client, topic: str) -> list[tuple[Subscriber, int]]:
        """The subscribers that the publisher reaches, each with the highest QoS of its matching subscriptions."""
        reach = self._reach(publisher)
        granted = list(self._by_topic.get((reach, topic), ()))
        for known, topic_filter, qos in self._by_wildcard.get(reach, ()):
            if matches(topic_filter, topic):
                granted.append((known, qos))
        highest: dict[Subscriber, int] = {}
        for known, qos in granted:
            highest[known] = max(qos, highest.get(known, qos))
        return list(highest.items())


class Ledger(Invariant):
    """Keeps account of every message of a run; see the module. ``brokers`` finds the broker of a host and port if it runs."""

    def __init__(
        self,
        clients: tuple[Client, ...],
        durable: dict[tuple[str, int], bool],
        brokers: Callable[[str, int], SimulatedBroker | None],
        world_now: Callable[[], float],
    ) -> None:
        self._brokers = brokers
        self._now = world_now
        self._durable = durable
        self._subscribers: dict[str, Subscriber] = {}
        self._streams: dict[int, Stream] = {}
        self._of_client: dict[str, list[Stream]] = {}
        self._by_broker: dict[str, list[Subscriber]] = {}
        self._retained: dict[tuple[str, int, str], list[Stream]] = {}
        self._broker_died_s: dict[str, float] = {}
        # When each client last lost its process or connection, or learned so.
        self._lost: dict[str, float] = {}
        # Clients that left on purpose, and do not come back.
        self._gone: set[str] = set()
        # Clients whose session a durable broker has promised something in.
        self._assured: set[str] = set()
        index = _Index(self._reach)
        for client in clients:
            if client.subscribe:
                known = Subscriber(client, self._is_promised(client))
                self._subscribers[client.name] = known
                self._by_broker.setdefault(client.broker, []).append(known)
                index.add(known)
        for client in clients:
            numbers = client.numbers
            for position, publishing in enumerate(client.publish):
                stream = Stream(client, position, index.receivers(client, publishing.topic))
                self._streams[numbers[position]] = stream
                self._of_client.setdefault(client.name, []).append(stream)
                if publishing.retain:
                    self._retained.setdefault((client.broker, client.port, publishing.topic), []).append(stream)
        self.published = 0
        self.skipped = 0
        self.refused = 0
        self.acknowledged = 0
        self.expected = 0
        self.delivered = 0
        self.retained = 0
        self.duplicated = 0
        self.dropped_by_policy = 0
        self.latencies_s = array("d")

    # --- what another kind of deployment answers otherwise --------------------------------------------------------------

    def _reach(self, client: Client) -> str:
        """What a client's messages can reach: those with the same answer."""
        return f"{client.broker}:{client.port}"

    def _is_durable(self, client: Client) -> bool:
        """Whether what this client is promised survives the end of a broker's process."""
        return self._durable[client.broker, client.port]

    def _may_overtake(self, known: Subscriber, message: facts.Message) -> bool:
        """Whether a message may come after later ones of its stream."""
        return False

    def _may_repeat(self, known: Subscriber, sent: Sent) -> bool:
        """Whether a client may get a message twice at QoS 2."""
        return sent.may_repeat

    def _disturbed_s(self, client: str, stream: Stream) -> float:
        """When something last happened that makes a message of a stream come to a client twice."""
        return max(
            self._lost.get(client, -1.0),
            self._lost.get(stream.client.name, -1.0),
            self._broker_died_s.get(stream.client.broker, -1.0),
        )

    def _is_promised(self, client: Client) -> bool:
        return self._is_durable(client) and (client.protocol == "5.0" or not client.clean_start)

    # --- what happens ---------------------------------------------------------------------------------------------------

    def observed(self, host: Host, fact: object) -> None:
        if isinstance(fact, facts.Delivered):
            self._on_delivered(host, fact)
        elif isinstance(fact, facts.Published):
            self._on_published(fact.message)
        elif isinstance(fact, facts.Acknowledged):
            self._on_acknowledged(fact.message)
        elif isinstance(fact, facts.Skipped):
            self.skipped += 1
        elif isinstance(fact, facts.Refused):
            self.refused += 1
            self._abandon(fact.message)
        elif isinstance(fact, facts.ClientConnected):
            self._on_connected(host, fact)
        elif isinstance(fact, facts.ClientDisconnected):
            self._lost[fact.client] = self._now()
        elif isinstance(fact, facts.ClientLeft):
            self._on_left(fact.client)
        elif isinstance(fact, facts.Subscribed):
            self._on_subscribed(fact.client)
        elif isinstance(fact, facts.ClientStarted):
            self._on_client_started(fact)
        elif isinstance(fact, facts.BrokerStarted):
            self._on_broker_started(fact.broker)
        elif isinstance(fact, facts.BrokerOpened):
            self._check_broker(fact.broker)

    def _on_published(self, message: facts.Message) -> None:
        self.published += 1
        stream = self._streams[message.publisher]
        sent = Sent(message)
        stream.messages[message.sequence] = sent
        for known, qos in stream.receivers:
            if known.client.name not in self._gone and self._is_covered(known):
                self.expected += 1
                known.expected.add((message.publisher, message.sequence))
                if min(qos, message.qos) > 0:
                    known.owed[message.publisher, message.sequence] = sent

    def _on_acknowledged(self, message: facts.Message) -> None:
        self.acknowledged += 1
        stream = self._streams[message.publisher]
        self._assure(stream.client)
        stream.messages[message.sequence].acknowledged = True
        # Without a journal an acknowledgement may come from a process that is gone, and its retained messages with it.
        if message.retain and (
            self._is_durable(stream.client) or message.sent_s >= self._broker_died_s.get(stream.client.broker, 0.0)
        ):
            stream.acknowledged_retained = message.sequence

    def _on_delivered(self, host: Host, fact: facts.Delivered) -> None:
        identity = decode_identity(fact.payload)
        stream = None if identity is None else self._streams.get(identity.publisher)
        sent = None if stream is None or identity is None else stream.messages.get(identity.sequence)
        if identity is None or sent is None or stream is None:
            raise InvariantViolated(f"{fact.client} got a message to {fact.topic} that nobody published", [host])
        message = sent.message
        if message.payload != fact.payload or message.topic != fact.topic:
            raise InvariantViolated(f"{fact.client} got {_named(message)} to {fact.topic}, changed on the way", [host])
        known = self._subscribers.get(fact.client)
        if known is None or not any(takes(wanted.filter, fact.topic) for wanted in known.client.subscribe):
            raise InvariantViolated(f"{fact.client} got {_named(message)}, which it did not subscribe to", [host])
        key = (identity.publisher, identity.sequence)
        was_expected = key in known.expected
        known.owed.pop(key, None)
        known.expected.discard(key)
        known.given_up.discard(key)
        if fact.retained:
            self.retained += 1
            return
        seen = known.seen.setdefault(identity.publisher, set())
        if identity.sequence in seen:
            self._on_repeated(host, fact, known, stream, sent)
            return
        seen.add(identity.sequence)
        self.delivered += 1
        self.latencies_s.append(self._now() - message.sent_s)
        highest = known.highest.get(identity.publisher, -1)
        if identity.sequence < highest:
            if fact.qos == 0 and message.qos > 0:
                return  # a repetition; the first time, it was lost at QoS 0
            if not was_expected and (fact.qos == 1 or sent.may_repeat):
                return  # a repetition; the first time, the client had no subscription yet
            if self._may_overtake(known, message):
                return
            raise InvariantViolated(
                f"{fact.client} got {_named(message)} for the first time after number {highest}",
                [host, stream.client.host, stream.client.broker],
            )
        known.highest[identity.publisher] = identity.sequence

    def _on_repeated(self, host: Host, fact: facts.Delivered, known: Subscriber, stream: Stream, sent: Sent) -> None:
        self.duplicated += 1
        message = sent.message
        involved = [host, stream.client.host, stream.client.broker]
        if fact.qos == 2 and not self._may_repeat(known, sent):
            raise InvariantViolated(f"{fact.client} got {_named(message)} twice at QoS 2", involved)
        if message.qos == 0:
            raise InvariantViolated(f"{fact.client} got {_named(message)} twice, which was published at QoS 0", involved)
        if self._disturbed_s(fact.client, stream) < message.sent_s:
            raise InvariantViolated(f"{fact.client} got {_named(message)} twice, and no connection was lost since", involved)

    def _on_connected(self, host: Host, fact: facts.ClientConnected) -> None:
        self._lost[fact.client] = self._now()
        if fact.session_present:
            return
        if fact.client in self._assured:
            raise InvariantViolated(
                f"{fact.client} was told that its session is gone, in which a durable broker had promised something", [host]
            )
        for stream in self._of_client.get(fact.client, ()):
            for sent in stream.messages.values():
                sent.may_repeat = sent.may_repeat or not sent.acknowledged
        known = self._subscribers.get(fact.client)
        if known is not None:
            self._excuse(known)

    def _on_subscribed(self, client: str) -> None:
        known = self._subscribers[client]
        known.confirmed = True
        self._assure(known.client)
        session = self._session_of(known)
        known.session_number = 0 if session is None else session.number

    def _on_left(self, client: str) -> None:
        """It is owed nothing any more; what it published still counts."""
        self._lost[client] = self._now()
        self._gone.add(client)
        known = self._subscribers.get(client)
        if known is not None:
            known.expected.clear()
            known.owed.clear()
            known.confirmed = False
            known.kept = False

    def _on_client_started(self, fact: facts.ClientStarted) -> None:
        self._lost[fact.client] = self._now()
        if not fact.fresh:
            return
        for stream in self._of_client.get(fact.client, ()):
            for sent in stream.messages.values():
                if not sent.acknowledged and not sent.abandoned:
                    sent.abandoned = True
                    self._abandon(sent.message)
        known = self._subscribers.get(fact.client)
        if known is not None:
            self._excuse(known)

    def _on_broker_started(self, broker: str) -> None:
        self._broker_died_s[broker] = self._now()
        for known in self._by_broker.get(broker, ()):
            if not known.promised:
                self._excuse(known)
        for (host, port, _), streams in self._retained.items():
            if host == broker and not self._durable[host, port]:
                for stream in streams:
                    stream.acknowledged_retained = -1

    # --- what must hold -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        for broker in self._by_broker:
            self._check_broker(broker)
        self._check_retained()

    def _check_broker(self, broker: str) -> None:
        for known in self._by_broker.get(broker, ()):
            self._check_subscriber(known)

    def _check_subscriber(self, known: Subscriber) -> None:
        process = self._brokers(known.client.broker, known.client.port)
        if process is None or not process.open:
            return
        session = process.engine.sessions.by_client.get(known.client.name)
        if known.kept and known.confirmed:
            if session is None:
                raise InvariantViolated(f"the session of {known.client.name} is gone", [known.client.broker])
            for wanted in known.client.subscribe:
                if wanted.filter not in session.subscriptions:
                    raise InvariantViolated(
                        f"the subscription of {known.client.name} to {wanted.filter} is gone", [known.client.broker]
                    )
        elif session is None or session.number != known.session_number:
            self._excuse(known)
            return
        missing = [sent.message for sent in known.owed.values() if sent.acknowledged]
        if not missing:
            return
        held = set(held_for(session))
        for message in missing:
            if (message.publisher, message.sequence) not in held:
                self._on_missing(known, message, process)

    def _on_missing(self, known: Subscriber, message: facts.Message, process: SimulatedBroker) -> None:
        if process.engine.stats.dropped_queue_full:
            self.dropped_by_policy += 1
            known.owed.pop((message.publisher, message.sequence))
            return
        raise InvariantViolated(
            f"{_named(message)} was acknowledged at QoS {message.qos} and is lost: "
            f"{known.client.name} did not get it, and the broker does not hold it",
            [known.client.broker, known.client.host, self._streams[message.publisher].client.host],
        )

    def _check_retained(self) -> None:
        for (broker, port, topic), streams in self._retained.items():
            process = self._brokers(broker, port)
            if process is None or not process.open:
                continue
            kept = process.engine.retained.get(topic.encode())
            identity = None if kept is None else decode_identity(kept.payloads()[0])
            if kept is not None and (identity is None or identity.publisher not in self._streams):
                raise InvariantViolated(f"the retained message of {topic} is nobody's", [broker])
            if len(streams) > 1:
                continue
            promised = streams[0].acknowledged_retained
            sequence = -1 if identity is None else identity.sequence
            if sequence < promised:
                raise InvariantViolated(
                    f"the retained message of {topic} is number {sequence}, and number {promised} was acknowledged",
                    [broker, streams[0].client.host],
                )

    def finish(self) -> None:
        self.check()

    @property
    def lost(self) -> int:
        """Messages that somebody should have got, did not get, and never will."""
        return sum(len(known.expected) - len(known.owed) + len(known.given_up) for known in self._subscribers.values())

    @property
    def pending(self) -> int:
        """Messages on their way to somebody: with their publisher, on a connection, or held by a broker."""
        return sum(len(known.owed) for known in self._subscribers.values())

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _abandon(self, message: facts.Message) -> None:
        """Nobody sends this message any more: it arrives if it is on its way already, or never."""
        key = (message.publisher, message.sequence)
        for known, _ in self._streams[message.publisher].receivers:
            if key in known.expected:
                known.expected.remove(key)
                known.owed.pop(key, None)
                known.given_up.add(key)

    def _assure(self, client: Client) -> None:
        if not client.clean_start and self._is_durable(client):
            self._assured.add(client.name)

    def _session_of(self, known: Subscriber) -> Session | None:
        process = self._brokers(known.client.broker, known.client.port)
        return None if process is None else process.engine.sessions.by_client.get(known.client.name)

    def _is_covered(self, known: Subscriber) -> bool:
        """Whether what is published now is for this client."""
        if known.promised:
            return known.confirmed
        session = self._session_of(known)
        if session is None:
            return False
        if session.number != known.session_number:
            self._excuse(known)
            known.session_number = session.number
        return all(wanted.filter in session.subscriptions for wanted in known.client.subscribe)

    def _excuse(self, known: Subscriber) -> None:
        """The session is gone, and with it what was owed to it."""
        known.owed.clear()
        known.given_up |= known.expected
        known.expected.clear()
        known.confirmed = False
        known.session_number = 0


def takes(topic_filter: str, topic: str) -> bool:
    """Whether a subscription may bring a topic."""
    _, inner = parse_shared(topic_filter)
    return matches(inner, topic)


def held_for(session: Session) -> Iterator[Key]:
    """The messages that a broker still has for a session, sent or not."""
    for packet_id, sent in session.inflight.items():
        if sent is not RELEASED:
            yield from _keys(sent.publication, sent.start + packet_id - sent.first_id, 1)
    for pending in session.queue or ():
        yield from _keys(pending.publication, pending.start, pending.count)


def _keys(publication: Publication, start: int, count: int) -> Iterator[Key]:
    for payload in publication.payloads()[start : start + count]:
        identity = decode_identity(payload)
        if identity is not None:
            yield identity.publisher, identity.sequence


def _named(message: facts.Message) -> str:
    return f"message {message.sequence} of {message.client} to {message.topic}"
