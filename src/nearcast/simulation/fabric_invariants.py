"""What a fabric of brokers promises, checked against everything that happens in a simulated run.

For its clients a fabric is one broker, and what :mod:`nearcast.simulation.mqtt_invariants` says holds for it, with these
differences:

- A message is owed to a subscriber anywhere, from the moment all brokers that run know that it is wanted where the
  subscriber's session is. It is held by a broker that has the session, or by one that keeps it for another broker.
- When a broker's process ends that is not ``durable``, what it alone held is gone: sessions, what waited for other brokers.
- Order is that of the brokers a message went through: what a client published before it was moved may come, at a third
  broker, after what it published at its new one.
- Behind a gateway, a broker that dies takes nothing down but itself: the gateway goes on with another one. What was not
  acknowledged then is sent again there, so it may come twice at any QoS but 0, and later than what was sent after it. What
  waited for the client at the dead broker comes when that is back, and later, too, than what was sent after it; without a
  journal it is lost.

And for the brokers among themselves:

- *Identity.* Two messages never have the same origin, epoch and sequence.
- *No loops.* While no link is lost, no message crosses to a broker from two others.
- *Not in vain.* No message crosses to a broker where nobody has wanted it for seconds.
- *Told in time.* A subscription is confirmed once all brokers that can be reached know of it.
- *Convergence.* In the end, every broker knows exactly what is wanted at every other one, and all have the same retained
  messages.
- *Calm.* In a run without a fault, everything arrives once, also at QoS 0, however often clients are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from nearcast.errors import InvariantViolated, StorageUnavailable
from nearcast.fabric import frames
from nearcast.fabric.spool import stretches_of
from nearcast.mqtt.session import RELEASED, Session
from nearcast.scenario.expansion import Client
from nearcast.scenario.identity import IDENTITY_BYTES, decode_identity
from nearcast.simulation import mqtt_facts as facts
from nearcast.simulation.cloud_broker import CloudBroker
from nearcast.simulation.fabric_broker import FabricBroker
from nearcast.simulation.hosts import Host
from nearcast.simulation.invariants import Invariant
from nearcast.simulation.mqtt_invariants import Key, Ledger, Sent, Stream, Subscriber, held_for, takes
from nearcast.simulation.streams import Stream as ByteStream

LATE_S: Final = 5.0
"""For how long after nobody wants a topic at a broker its messages may still come there."""

_MARK: Final = b"NCID"


class Brokers:
    """All brokers of a fabric, wherever they are in their lives."""

    def __init__(
        self, durable: dict[str, bool], find: Callable[[str], FabricBroker | None], is_meant: Callable[[str], bool]
    ) -> None:
        """``durable`` has every broker by its name; ``find`` gives one that runs; ``is_meant`` tells whether one is meant to
        run now: some come later, or leave."""
        self.durable = durable
        self._find = find
        self._is_meant = is_meant

    def open(self) -> list[FabricBroker]:
        """Those that let clients in."""
        found = [self._find(name) for name in self.durable]
        return [broker for broker in found if broker is not None and broker.open]

    def all_open(self) -> bool:
        """Whether all that are meant to run do, and let clients in."""
        return all(self.find(name) is not None for name in self.durable if self._is_meant(name))

    def find(self, name: str) -> FabricBroker | None:
        broker = self._find(name) if name in self.durable else None
        return broker if broker is not None and broker.open else None

    def sessions_of(self, client: str) -> list[tuple[FabricBroker | CloudBroker, Session]]:
        """Where a client has a session: at one broker, or while it moves at two."""
        found: list[tuple[FabricBroker | CloudBroker, Session]] = []
        for broker in self.open():
            session = broker.engine.sessions.by_client.get(client)
            if session is not None and not is_shadow(session):
                found.append((broker, session))
        return found


def is_shadow(session: Session) -> bool:
    """Whether a session is only being prepared for a client that may come."""
    return type(session).__name__ == "ShadowSession"


def knows(broker: FabricBroker, other: str, filters: list[str]) -> bool:
    """Whether a broker sends what these filters want to another one."""
    if broker.name == other:
        return True
    peer = broker.fabric.peers.get(other)
    return peer is not None and all(wanted in peer.session.subscriptions for wanted in filters)


class FabricLedger(Ledger):
    """Keeps account of every message of a run; see the module."""

    def __init__(
        self,
        clients: tuple[Client, ...],
        brokers: Brokers,
        gateways: set[tuple[str, int]],
        world_now: Callable[[], float],
    ) -> None:
        self._fabric = brokers
        self._gateways = gateways
        self._everything_durable = all(brokers.durable.values())
        # Where each subscriber's session was last, and when it was last without one.
        self._places: dict[str, str] = {}
        self._began_anew_s: dict[str, float] = {}
        # Where clients that publish were seen last, and when that changed.
        self._homes: dict[str, str] = {}
        self._moved_s: dict[str, float] = {}
        # What a broker may have taken with it that kept no journal.
        self._excusable: set[tuple[str, Key]] = set()
        super().__init__(clients, {}, lambda host, port: None, world_now)
        self.disturbances = 0
        self.excused = 0
        """Messages that came twice as they may also when nothing is disturbed."""
        self._started: set[str] = set()

    # --- as told to the ledger ------------------------------------------------------------------------------------------

    def _reach(self, client: Client) -> str:
        return ""

    def _is_durable(self, client: Client) -> bool:
        return self._everything_durable

    def _is_behind_gateway(self, client: Client) -> bool:
        return (client.broker, client.port) in self._gateways

    def _broker_died_since(self, when_s: float) -> bool:
        return not self._fabric.all_open() or max(self._broker_died_s.values(), default=-1.0) >= when_s

    def _may_overtake(self, known: Subscriber, message: facts.Message) -> bool:
        if self._began_anew_s.get(known.client.name, -1.0) >= message.sent_s:
            return True
        publisher = self._streams[message.publisher].client
        if self._when_moved_s(publisher.name) >= message.sent_s - LATE_S:
            return True
        if self._is_behind_gateway(known.client) and self._broker_died_since(message.sent_s - LATE_S):
            return True  # what its lost broker brings back comes late
        gateway = self._is_behind_gateway(publisher)
        return (gateway or not self._everything_durable) and self._broker_died_since(message.sent_s)

    def _when_moved_s(self, client: str) -> float:
        """When a client was last seen at another broker than before."""
        for broker, _ in self._fabric.sessions_of(client):
            if self._homes.setdefault(client, broker.name) != broker.name:
                self._homes[client] = broker.name
                self._moved_s[client] = self._now()
        return self._moved_s.get(client, -LATE_S - 1.0)

    def _on_published(self, message: facts.Message) -> None:
        self._when_moved_s(message.client)
        super()._on_published(message)

    def _may_repeat(self, known: Subscriber, sent: Sent) -> bool:
        if sent.may_repeat or self._began_anew_s.get(known.client.name, -1.0) >= sent.message.sent_s:
            return True
        # What a publisher's gateway had no answer to is published again elsewhere.
        gateway = self._is_behind_gateway(self._streams[sent.message.publisher].client)
        # A subscriber's session that ends with its broker begins anew elsewhere, and so does one that two brokers lost.
        lost = self._is_behind_gateway(known.client) and (not known.promised or len(self._broker_died_s) > 1)
        return (gateway or lost or not self._everything_durable) and self._broker_died_since(sent.message.sent_s)

    def _disturbed_s(self, client: str, stream: Stream) -> float:
        died_s = self._now() if not self._fabric.all_open() else max(self._broker_died_s.values(), default=-1.0)
        return max(super()._disturbed_s(client, stream), died_s)

    def observed(self, host: Host, fact: object) -> None:
        again = isinstance(fact, facts.ClientStarted) and fact.client in self._started
        if again or isinstance(fact, facts.ClientDisconnected):
            self.disturbances += 1
        if isinstance(fact, facts.ClientStarted):
            self._started.add(fact.client)
            if fact.fresh:
                self._began_anew_s[fact.client] = self._now()
        elif isinstance(fact, facts.ClientConnected) and not fact.session_present:
            self._began_anew_s[fact.client] = self._now()
        super().observed(host, fact)
        if isinstance(fact, facts.BrokerOpened):
            self._on_broker_opened()

    def _on_broker_started(self, broker: str) -> None:
        if broker not in self._started:
            self._started.add(broker)
            return
        self._broker_died_s[broker] = self._now()
        self.disturbances += 1
        for known in self._subscribers.values():
            if known.promised:
                continue
            # Of a session that ends with its connection no journal knows, and what others keep for its broker is nobody's.
            ends = known.client.clean_start and known.client.protocol != "5.0"
            held = self._held(known, not ends)
            self._excusable.update((known.client.name, key) for key in known.owed if key not in held)

    def _on_broker_opened(self) -> None:
        """A broker that was away may not know yet what was asked for since."""
        for known in self._subscribers.values():
            place = self._place(known)
            wanted = [each.filter for each in known.client.subscribe]
            if place and all(knows(broker, place, wanted) for broker in self._fabric.open()):
                continue
            unknown = [key for key, sent in known.owed.items() if not sent.acknowledged]
            self._excusable.update((known.client.name, key) for key in unknown)

    def _on_subscribed(self, client: str) -> None:
        known = self._subscribers[client]
        known.confirmed = True
        self._assure(known.client)
        place = self._fabric.find(self._place(known))
        if place is None or self.disturbances:
            return
        wanted = [each.filter for each in known.client.subscribe]
        for broker in self._fabric.open():
            peer = place.fabric.peers.get(broker.name)
            link = None if peer is None else peer.link
            settled = link is not None and link.is_up and place.host.now - link.opened_at > LATE_S
            if settled and not knows(broker, place.name, wanted):
                raise InvariantViolated(
                    f"{client} was told that it is subscribed, and {broker.name} does not know of it",
                    [place.host, broker.host],
                )

    # --- what must hold -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self._check_all()
        self._check_retained()

    def _check_broker(self, broker: str) -> None:
        self._check_all()

    def _check_all(self) -> None:
        if self._fabric.all_open():
            for known in self._subscribers.values():
                self._check_subscriber(known)

    def _check_subscriber(self, known: Subscriber) -> None:
        name = known.client.name
        sessions = self._fabric.sessions_of(name)
        resumed = self._is_behind_gateway(known.client) and bool(self._broker_died_s) and not self._everything_durable
        if not sessions:
            if known.kept and known.confirmed and not resumed:
                raise InvariantViolated(f"the session of {name} is gone", [known.client.host])
            self._excuse(known)
            return
        if known.client.clean_start and not known.confirmed and not any(each.subscriptions for _, each in sessions):
            self._excuse(known)  # it begins anew at this moment: what it was owed was for the session before
            return
        self._place(known)
        for wanted in known.client.subscribe if known.kept and known.confirmed and not resumed else ():
            if all(wanted.filter not in session.subscriptions for _, session in sessions):
                hosts: list[Host | str] = [broker.host for broker, _ in sessions]
                raise InvariantViolated(f"the subscription of {name} to {wanted.filter} is gone", hosts)
        missing = [sent.message for sent in known.owed.values() if sent.acknowledged]
        if not missing:
            return
        held = self._held(known)
        for message in missing:
            if (message.publisher, message.sequence) not in held:
                self._on_absent(known, message)

    def _on_absent(self, known: Subscriber, message: facts.Message) -> None:
        key = (message.publisher, message.sequence)
        brokers = self._fabric.open()
        by_policy = any(broker.engine.stats.dropped_queue_full for broker in brokers)
        if by_policy or (known.client.name, key) in self._excusable:
            self.dropped_by_policy += by_policy
            known.owed.pop(key)
            return
        publisher = self._streams[message.publisher].client
        raise InvariantViolated(
            f"message {message.sequence} of {message.client} to {message.topic} was acknowledged at QoS {message.qos} and is "
            f"lost: {known.client.name} did not get it, and no broker holds it",
            [known.client.host, publisher.host, *(broker.host for broker in brokers)],
        )

    def _check_retained(self) -> None:
        """Anything that a broker has is somebody's; whether they agree is looked at in the end."""
        for _, _, topic in self._retained:
            for broker in self._fabric.open():
                kept = broker.engine.retained.get(topic.encode())
                identity = None if kept is None else decode_identity(kept.payloads()[0])
                if kept is not None and (identity is None or identity.publisher not in self._streams):
                    raise InvariantViolated(f"the retained message of {topic} is nobody's", [broker.host])

    def finish(self) -> None:
        self.check()
        stats = [broker.engine.stats for broker in self._fabric.open()]
        if not self.disturbances and not any(each.dropped_slow_consumer or each.dropped_queue_full for each in stats):
            self._check_calm()
        if self._fabric.all_open() and self._everything_durable:
            self._check_last_retained()

    def _check_calm(self) -> None:
        if self.duplicated > self.excused:
            raise InvariantViolated(f"{self.duplicated - self.excused} messages came twice, and nothing was disturbed", [])
        self._check_complete()

    def _check_complete(self) -> None:
        for known in self._subscribers.values():
            for publisher, sequence in sorted({*known.expected, *known.given_up}):
                stream = self._streams[publisher]
                raise InvariantViolated(
                    f"{known.client.name} did not get message {sequence} of {stream.client.name} to "
                    f"{stream.publishing.topic} (QoS {stream.publishing.qos}), and nothing was disturbed",
                    [known.client.host, stream.client.host, *(broker.host for broker in self._fabric.open())],
                )

    def _may_be_older(self, topic: str, stream: Stream) -> bool:
        """Whether the message that is retained in the end may be one before the last that was acknowledged."""
        return False

    def _check_last_retained(self) -> None:
        by_topic: dict[str, list[Stream]] = {}
        for (_, _, topic), streams in self._retained.items():  # of clients at any broker
            by_topic.setdefault(topic, []).extend(streams)
        for topic, streams in by_topic.items():
            if len(streams) > 1 or self._may_be_older(topic, streams[0]):
                continue
            promised = streams[0].acknowledged_retained
            for broker in self._fabric.open():
                kept = broker.engine.retained.get(topic.encode())
                identity = None if kept is None else decode_identity(kept.payloads()[0])
                sequence = -1 if identity is None else identity.sequence
                if sequence < promised:
                    raise InvariantViolated(
                        f"the retained message of {topic} is number {sequence} at {broker.name}, and number {promised} was "
                        "acknowledged",
                        [broker.host, streams[0].client.host],
                    )

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _place(self, known: Subscriber) -> str:
        """The broker that has a subscriber's session, or had it last."""
        for broker, _ in self._fabric.sessions_of(known.client.name):
            self._places[known.client.name] = broker.name
        return self._places.get(known.client.name, "")

    def _is_covered(self, known: Subscriber) -> bool:
        place = self._place(known)
        if not place or (known.promised and not known.confirmed):
            return False
        wanted = [each.filter for each in known.client.subscribe]
        home = self._fabric.find(place)
        if home is None and not self._fabric.durable[place]:
            return False
        if home is not None:
            session = home.engine.sessions.by_client.get(known.client.name)
            if session is None or any(each not in session.subscriptions for each in wanted):
                return False
        brokers = self._fabric.open()
        return bool(brokers) and all(knows(broker, place, wanted) for broker in brokers)

    def _held(self, known: Subscriber, for_others: bool = True) -> set[Key]:
        """What brokers have for a client, or (``for_others``) for a broker that may have the client."""
        found: set[Key] = set()
        for broker in self._fabric.open():
            for session in broker.engine.sessions.by_number.values():
                if (session.is_peer and for_others) or session.client_id == known.client.name:
                    found.update(held_for(session))
                    found.update(spilled_for(broker, session))
        return found


class FabricTables(Invariant):
    """What brokers know of each other and say to each other. See the module."""

    def __init__(
        self,
        clients: tuple[Client, ...],
        brokers: Brokers,
        world_now: Callable[[], float],
        cut_off: Callable[[], bool],
        is_calm: Callable[[], bool],
    ) -> None:
        """``cut_off`` tells whether the network is cut anywhere now, ``is_calm`` that no client was disturbed so far."""
        self._fabric = brokers
        self._now = world_now
        self._cut_off = cut_off
        self._is_calm = is_calm
        self._filters = sorted({wanted.filter for client in clients for wanted in client.subscribe})
        self._topics = {
            number: publishing.topic
            for client in clients
            for number, publishing in zip(client.numbers, client.publish, strict=True)
        }
        self._wanted_s: dict[tuple[str, str], float] = {}
        self._identities: dict[tuple[str, int, int], Key] = {}
        self._crossed: dict[tuple[str, Key], str] = {}
        self._partial: dict[ByteStream, bytes] = {}
        self.crossed = 0
        self.crossed_again = 0

    # --- what crosses ---------------------------------------------------------------------------------------------------

    def arrived(self, broker: FabricBroker, stream: ByteStream, data: bytes) -> None:
        """Bytes of a link have come to a broker."""
        data = self._partial.pop(stream, b"") + data
        position = 0
        while len(data) - position >= frames.LENGTH_BYTES:
            end = position + frames.LENGTH_BYTES + int.from_bytes(data[position : position + frames.LENGTH_BYTES], "big")
            if end > len(data):
                break
            if data[position + frames.LENGTH_BYTES] == frames.MESSAGES:
                self._on_messages(broker, stream, data[position + frames.LENGTH_BYTES : end])
            position = end
        if position < len(data):
            self._partial[stream] = data[position:]

    def _on_messages(self, broker: FabricBroker, stream: ByteStream, content: bytes) -> None:
        for key, sent_s in _identities(content):
            self.crossed += 1
            where = (broker.name, key)
            if where in self._crossed:
                self.crossed_again += 1  # the same broker may send again what was confirmed late, and it counts once
                if self._crossed[where] != stream.remote_host.name and not self._disturbed():
                    raise InvariantViolated(
                        f"a message crossed to {broker.name} twice, from {self._crossed[where]} and from "
                        f"{stream.remote_host.name}, and no link was lost",
                        [broker.host, stream.remote_host],
                    )
            self._crossed[where] = stream.remote_host.name
            self._check_wanted(broker, stream, self._topics[key[0]], sent_s)

    def _check_wanted(self, broker: FabricBroker, stream: ByteStream, topic: str, sent_s: float) -> None:
        if self._disturbed():
            return
        self._look(broker)
        for topic_filter in self._filters:
            # What it wanted before it was looked at first, nobody knows.
            if takes(topic_filter, topic) and self._wanted_s.get((broker.name, topic_filter), 0.0) + LATE_S >= sent_s:
                return
        raise InvariantViolated(
            f"a message to {topic} crossed from {stream.remote_host.name} to {broker.name}, where nobody wants it",
            [broker.host, stream.remote_host],
        )

    def _disturbed(self) -> bool:
        """Whether any link or connection was lost, ever: then what crosses again, or late, is no news."""
        if not self._is_calm() or not self._fabric.all_open():
            return True
        return any(broker.links.lost_links for broker in self._fabric.open())

    # --- what is known --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        for broker in self._fabric.open():
            self._look(broker)
            self._check_identities(broker)

    def _look(self, broker: FabricBroker) -> None:
        for name in interest_of(broker) | arriving_at(broker):
            self._wanted_s[broker.name, name] = self._now()

    def _check_identities(self, broker: FabricBroker) -> None:
        by_number = broker.fabric.by_number
        for session in broker.engine.sessions.by_number.values():
            publications = [sent.publication for sent in session.inflight.values() if sent is not RELEASED]
            publications += [pending.publication for pending in session.queue or ()]
            for publication in publications:
                origin = by_number[publication.origin] if publication.origin < len(by_number) else None
                if not publication.sequence or (publication.origin and origin is None):
                    continue
                name = broker.name if origin is None else origin.name
                epoch = broker.fabric.epoch if origin is None else origin.epoch
                for index, payload in enumerate(publication.payloads()):
                    identity = decode_identity(payload)
                    if identity is None:
                        continue
                    found = (identity.publisher, identity.sequence)
                    before = self._identities.setdefault((name, epoch, publication.sequence + index), found)
                    if before != found:
                        raise InvariantViolated(
                            f"two messages have the identity {name} {publication.sequence + index}", [broker.host]
                        )

    def finish(self) -> None:
        brokers = self._fabric.open()
        slow = any(link.connection.congested for broker in brokers for link in broker.fabric.links)
        if not self._fabric.all_open() or self._cut_off() or slow:  # what a slow network has not brought by now is on its way
            return
        for broker in brokers:
            for other in brokers:
                if broker is not other:
                    self._check_pair(broker, other)
        self._check_retained(brokers)

    def _check_pair(self, broker: FabricBroker, other: FabricBroker) -> None:
        peer = broker.fabric.peers.get(other.name)
        wanted = interest_of(other)
        if peer is None or not peer.up:
            raise InvariantViolated(f"{broker.name} has no way to {other.name}, and nothing is cut", [broker.host, other.host])
        known = set(peer.session.subscriptions)
        if not wanted <= known <= wanted | arriving_at(other):
            raise InvariantViolated(
                f"{broker.name} believes that {other.name} wants {sorted(known)}, and it wants {sorted(wanted)}",
                [broker.host, other.host],
            )
        if peer.session.queued_messages and self._now() - peer.session.progress_at > LATE_S:  # else clients are still at it
            raise InvariantViolated(
                f"{broker.name} still has {peer.session.queued_messages} messages for {other.name}, and nothing is cut",
                [broker.host, other.host],
            )

    def _check_retained(self, brokers: list[FabricBroker]) -> None:
        first = brokers[0]
        topics = {topic for broker in brokers for topic in retained_topics(broker)}
        for topic in sorted(topics):
            kept = first.engine.retained.get(topic)
            for broker in brokers[1:]:
                other = broker.engine.retained.get(topic)
                if (kept is None) != (other is None) or (kept and other and kept.payloads() != other.payloads()):
                    raise InvariantViolated(
                        f"the retained message of {topic.decode()} is not the same at {first.name} and {broker.name}",
                        [first.host, broker.host],
                    )


def spilled_for(broker: FabricBroker, session: Session) -> Iterator[Key]:
    """The messages that a broker has for another one in files."""
    for file in session.spilled or ():
        if broker.spool is not None:
            try:
                data = broker.spool.read(session.number, file.number)
            except StorageUnavailable:
                continue  # removed, and the record of it lost with the power: the other broker has what was in it
            for pending in stretches_of(data, broker.engine.effects.wall_offset, 0):
                for payload in pending.publication.payloads()[pending.start : pending.start + pending.count]:
                    identity = decode_identity(payload)
                    if identity is not None:
                        yield identity.publisher, identity.sequence


def arriving_at(broker: FabricBroker) -> set[str]:
    """The filters of clients that are being moved to a broker: the others know them before it has the sessions."""
    return set().union(*(arrival.shadow.subscriptions for arrival in broker.fabric.handover.arrivals.by_move.values()))


def interest_of(broker: FabricBroker) -> set[str]:
    """What is wanted at a broker."""
    sessions = broker.engine.sessions.by_client.values()
    return {name for session in sessions if not session.is_peer for name in session.subscriptions}


def retained_topics(broker: FabricBroker) -> Iterator[bytes]:
    """The topics of workloads that a broker has a retained message of."""
    for kept in broker.engine.retained.all():
        if kept.topic[:1] != b"$":
            yield kept.topic


def _identities(content: bytes) -> Iterator[tuple[Key, float]]:
    """The workload's messages in a frame, whatever it looks like around them: their keys, and when they were sent."""
    position = content.find(_MARK)
    while position >= 0:
        identity = decode_identity(content[position : position + IDENTITY_BYTES])
        if identity is not None:
            yield (identity.publisher, identity.sequence), identity.sent_ns / 1e9
        position = content.find(_MARK, position + 1)
