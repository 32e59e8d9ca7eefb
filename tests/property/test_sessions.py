"""QoS 1 and 2 flows, reconnects, crashes: an engine and several clients against a model that is a few lists.

Clients publish runs of messages, read or do not read, acknowledge some of what they read, vanish, come back with another
window, take themselves over; the broker crashes and is recovered from its records, with a snapshot in any state of completion.
Whatever happens: every message reaches every persistent session that wanted it, once at QoS 2 (and at QoS 1 once but for
resends marked as such), in order per topic; no window is exceeded; the gauges are true.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nearcast.config import Limits
from nearcast.mqtt.packets import (
    Connect,
    Disconnect,
    Packet,
    Properties,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    SubscriptionRequest,
    UnsubAck,
    Unsubscribe,
)
from nearcast.mqtt.recovery import Recovery, Snapshot
from nearcast.mqtt.topics import matches
from tests.engine_harness import Client, World, durable_state

MAX_INFLIGHT = 4
NAMES = ("ann", "bob", "cyd")
TOPICS = ("t/0", "t/1", "u")
FILTERS = ("t/0", "t/1", "t/+", "u", "#", "t/#")

names = st.sampled_from(NAMES)
topics = st.sampled_from(TOPICS)
filters = st.sampled_from(FILTERS)
qualities = st.integers(0, 2)


class Actor:
    """One client: the state it keeps across connections, and what the model says it must get."""

    def __init__(self, name: str, version: int) -> None:
        self.name = name
        self.version = version
        self.client: Client | None = None
        self.window = MAX_INFLIGHT
        self.forget()

    def forget(self) -> None:
        """A new session begins."""
        self.subscriptions: dict[str, int] = {}
        #: Per QoS and topic, in order.
        self.expected: dict[tuple[int, str], list[bytes]] = {}
        self.got: dict[tuple[int, str], list[bytes]] = {}
        #: Inbound: QoS 1 seen and not acknowledged; QoS 2 seen and not released; answers that are owed.
        self.unacknowledged: set[int] = set()
        self.unreleased: set[int] = set()
        self.answers: list[Packet] = []
        self.outstanding: set[int] = set()
        #: Outbound: what was published and not acknowledged, by identifier: a PUBLISH or (released) its PUBREL.
        self.published: dict[int, Publish | PubRel] = {}
        self.next_id = 1
        self.sent = 0

    def free_id(self) -> int:
        while self.next_id in self.published:
            self.next_id = self.next_id % 65_535 + 1
        found = self.next_id
        self.next_id = found % 65_535 + 1
        return found


class Sessions(RuleBasedStateMachine):
    @initialize(
        versions=st.tuples(*[st.sampled_from((4, 5))] * len(NAMES)),
        interests=st.tuples(*[st.sampled_from((0, 1, 2, 2))] * len(NAMES)),
    )
    def begin(self, versions: tuple[int, ...], interests: tuple[int, ...]) -> None:
        self.world = World(limits=Limits(max_inflight=MAX_INFLIGHT), durable=True)
        self.actors = {name: Actor(name, version) for name, version in zip(NAMES, versions, strict=True)}
        #: Generations of the journal: frames, in order.
        self.generations: list[list[list[bytes]]] = [[]]
        self.snapshot: Snapshot | None = None
        self.retained: dict[str, tuple[bytes, int]] = {}
        for actor, qos in zip(self.actors.values(), interests, strict=True):
            self.join(actor, MAX_INFLIGHT, False)
            self.subscribe(actor.name, "#", qos)

    # --- clients --------------------------------------------------------------------------------------------------------

    def join(self, actor: Actor, window: int, clean: bool) -> None:
        self.part(actor)
        client = self.world.open(actor.version)
        properties = None
        if actor.version == 5:
            properties = Properties(session_expiry_interval=0xFFFFFFFF, receive_maximum=window)
        else:
            window = MAX_INFLIGHT
        known = actor.name in self.world.engine.sessions.by_client
        if clean and actor.version == 4:
            # In 3.1.1 a clean session does not outlive its connection: clean up, then come back.
            client.connect(Connect(actor.name, 4, True))
            client.send(Disconnect())
            client = self.world.open(4)
            known = False
        answer = client.connect(Connect(actor.name, actor.version, clean and actor.version == 5, properties=properties))
        assert answer.reason_code == 0
        assert answer.session_present == (known and not clean)
        if not answer.session_present:
            actor.forget()
        actor.client = client
        actor.window = min(window, MAX_INFLIGHT)
        actor.outstanding = set()
        actor.answers = []
        again: list[Packet] = []
        for packet in actor.published.values():
            if isinstance(packet, Publish):
                packet.dup = True
                if packet.qos == 1:  # at least once: the broker has it already and passes it on again
                    if packet.retain:
                        self.retained[packet.topic] = (packet.payload, 1)
                    self.expect(packet.topic, packet.payload, 1)
            again.append(packet)
        if again:
            client.send(*again)

    def part(self, actor: Actor) -> None:
        """Whatever was not read is lost with the connection; QoS 0 with it."""
        if actor.client is not None:
            actor.client.lose()
            actor.client = None
        for key in list(actor.expected):
            if key[0] == 0:
                actor.expected[key] = []
                actor.got[key] = []

    def read(self, actor: Actor) -> None:
        assert actor.client is not None
        for packet in actor.client.packets():
            if isinstance(packet, Publish):
                self.take(actor, packet)
            elif isinstance(packet, PubRel):
                actor.unreleased.discard(packet.packet_id)
                actor.answers.append(PubComp(packet.packet_id))
            elif isinstance(packet, PubAck):
                del actor.published[packet.packet_id]
            elif isinstance(packet, PubRec):
                assert packet.reason_code < 0x80
                actor.published[packet.packet_id] = PubRel(packet.packet_id)
                actor.answers.append(PubRel(packet.packet_id))
            elif isinstance(packet, PubComp):
                actor.published.pop(packet.packet_id, None)
            else:
                assert isinstance(packet, SubAck | UnsubAck), packet

    def take(self, actor: Actor, packet: Publish) -> None:
        got = actor.got.setdefault((packet.qos, packet.topic), [])
        if packet.qos == 0:
            got.append(packet.payload)
            return
        assert packet.packet_id not in actor.outstanding
        actor.outstanding.add(packet.packet_id)
        assert len(actor.outstanding) <= actor.window, "the window is exceeded"
        if packet.qos == 1:
            if not (packet.dup and packet.packet_id in actor.unacknowledged):
                got.append(packet.payload)
            actor.unacknowledged.add(packet.packet_id)
            actor.answers.append(PubAck(packet.packet_id))
        else:
            if packet.packet_id not in actor.unreleased:
                got.append(packet.payload)
            else:
                assert packet.dup
            actor.unreleased.add(packet.packet_id)
            actor.answers.append(PubRec(packet.packet_id))

    def answer(self, actor: Actor, count: int) -> None:
        client = actor.client
        assert client is not None
        answers, actor.answers = actor.answers[:count], actor.answers[count:]
        for packet in answers:
            if isinstance(packet, PubAck):
                actor.unacknowledged.discard(packet.packet_id)
                actor.outstanding.discard(packet.packet_id)
            elif isinstance(packet, PubComp):
                actor.outstanding.discard(packet.packet_id)
        if answers:
            client.send(*answers)

    # --- rules ----------------------------------------------------------------------------------------------------------

    @rule(name=names, window=st.integers(1, MAX_INFLIGHT), clean=st.sampled_from((False, False, False, True)))
    def reconnect(self, name: str, window: int, clean: bool) -> None:
        self.join(self.actors[name], window, clean)

    @rule(name=names)
    def vanish(self, name: str) -> None:
        self.part(self.actors[name])

    @rule(name=names)
    def leave(self, name: str) -> None:
        actor = self.actors[name]
        if actor.client is not None:
            actor.client.send(Disconnect())
        self.part(actor)

    @rule(name=names, window=st.integers(1, MAX_INFLIGHT))
    def take_over(self, name: str, window: int) -> None:
        actor = self.actors[name]
        before, actor.client = actor.client, None
        self.part(actor)
        self.join(actor, window, False)
        if before is not None:
            assert before.closed

    @rule(name=names, topic_filter=filters, qos=qualities)
    def subscribe(self, name: str, topic_filter: str, qos: int) -> None:
        actor = self.actors[name]
        if actor.client is None:
            return
        actor.subscriptions[topic_filter] = qos
        for topic, (payload, retained_qos) in self.retained.items():
            if matches(topic_filter, topic):
                actor.expected.setdefault((min(qos, retained_qos), topic), []).append(payload)
        actor.client.send(Subscribe(actor.free_id(), [SubscriptionRequest(topic_filter, qos)]))

    @rule(name=names, topic_filter=filters)
    def unsubscribe(self, name: str, topic_filter: str) -> None:
        actor = self.actors[name]
        if actor.client is not None:
            actor.subscriptions.pop(topic_filter, None)
            actor.client.send(Unsubscribe(actor.free_id(), [topic_filter]))

    @rule(
        name=names,
        runs=st.lists(st.tuples(topics, qualities, st.integers(1, 6), st.booleans()), min_size=1, max_size=3),
    )
    def publish(self, name: str, runs: list[tuple[str, int, int, bool]]) -> None:
        actor = self.actors[name]
        if actor.client is None:
            return
        packets: list[Packet] = []
        for topic, qos, count, retain in runs:
            for _ in range(count):
                actor.sent += 1
                payload = f"{name}{actor.sent:05d}".encode()
                packet = Publish(topic, payload, qos, retain, packet_id=actor.free_id() if qos else 0)
                packets.append(packet)
                if qos:
                    actor.published[packet.packet_id] = packet
                if retain:
                    self.retained[topic] = (payload, qos)
                self.expect(topic, payload, qos)
        actor.client.send(*packets)

    def expect(self, topic: str, payload: bytes, qos: int) -> None:
        for actor in self.actors.values():
            wanted = [granted for topic_filter, granted in actor.subscriptions.items() if matches(topic_filter, topic)]
            if wanted:
                effective = min(qos, max(wanted))
                if effective or actor.client is not None:
                    actor.expected.setdefault((effective, topic), []).append(payload)

    @rule(name=names, topic=topics)
    def clear_retained(self, name: str, topic: str) -> None:
        actor = self.actors[name]
        if actor.client is not None:
            self.retained.pop(topic, None)
            self.expect(topic, b"", 0)
            actor.client.send(Publish(topic, b"", retain=True))

    @rule(name=names, count=st.integers(0, 8))
    def read_and_answer(self, name: str, count: int) -> None:
        actor = self.actors[name]
        if actor.client is not None:
            self.read(actor)
            self.answer(actor, count)

    @rule(name=names)
    def nonsense_acknowledgements(self, name: str) -> None:
        """Identifiers that were never used: harmless."""
        actor = self.actors[name]
        if actor.client is not None:
            actor.client.send(PubAck(60_000), PubComp(60_001))

    # --- the broker's disk ----------------------------------------------------------------------------------------------

    def collect(self) -> None:
        self.generations[-1].extend(self.world.frames)
        self.world.frames.clear()

    @precondition(lambda self: self.snapshot is None)
    @rule()
    def begin_snapshot(self) -> None:
        self.collect()
        self.snapshot = Snapshot(self.world.engine)
        self.generations.append([])

    @precondition(lambda self: self.snapshot is not None)
    @rule(max_bytes=st.integers(1, 400))
    def go_on_with_snapshot(self, max_bytes: int) -> None:
        self.collect()
        assert self.snapshot is not None
        records = self.snapshot.step(max_bytes)
        if records:
            self.generations[-1].append(records)
        else:
            self.snapshot = None
            del self.generations[:-1]

    def replayed(self) -> tuple[World, Recovery]:
        self.collect()
        other = World(limits=self.world.settings.limits, durable=True)
        other.now = self.world.now
        recovery = Recovery(other.engine)
        for generation in self.generations:
            for frame in generation:
                for record in frame:
                    recovery.apply(record)
        return other, recovery

    @invariant()
    def replay_gives_the_same_state(self) -> None:
        other, _ = self.replayed()
        assert durable_state(other) == durable_state(self.world)

    @rule()
    def crash(self) -> None:
        other, recovery = self.replayed()
        expected = durable_state(self.world)
        other.engine.effects.generation = self.world.engine.effects.generation
        for actor in self.actors.values():
            actor.client = None
            self.part(actor)
        self.world = other
        self.snapshot = None
        self.write_anew()
        recovery.finish(other.now)
        other.flush()
        assert durable_state(other) == expected

    def write_anew(self) -> None:
        """As the journal does before the first client comes."""
        self.begin_snapshot()
        while self.snapshot is not None:
            self.go_on_with_snapshot(1_000)

    # --- what must hold -------------------------------------------------------------------------------------------------

    @invariant()
    def is_consistent(self) -> None:
        self.world.validate()

    @invariant()
    def nothing_arrives_that_was_not_sent(self) -> None:
        for actor in self.actors.values():
            for key, got in actor.got.items():
                assert got == actor.expected.get(key, [])[: len(got)], (actor.name, key)

    def teardown(self) -> None:
        for actor in self.actors.values():
            if actor.client is None:
                self.join(actor, 2, False)
        self.settle(lambda actor: bool(actor.client is not None and actor.client.output) or bool(actor.answers))
        for actor in self.actors.values():
            assert not actor.published
            for key, expected in actor.expected.items():
                assert actor.got.get(key, []) == expected, (actor.name, key)
            session = self.world.session(actor.name)
            assert not session.inflight
            assert not session.queued_messages
            assert not session.received_ids
        self.world.validate()
        self.replay_gives_the_same_state()

    def settle(self, busy: Callable[[Actor], bool]) -> None:
        while any(busy(actor) for actor in self.actors.values()):
            for actor in self.actors.values():
                self.read(actor)
                self.answer(actor, 1_000)


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=150, stateful_step_count=40)
