"""The client machine against a model of a server, over connections that break anywhere.

Whatever breaks when: what the machine reports as completed reached the server, QoS 2 exactly once while the session is kept,
in the order of publishing; and what the server sends at QoS 2 reaches the application exactly once.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nearcast.mqtt.client_events import ClientSettings, Connected, Disconnected, MessageReceived, PublishCompleted
from nearcast.mqtt.client_machine import CLOSED, CONNECTED, ClientMachine
from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.packets import (
    ConnAck,
    Connect,
    Packet,
    Properties,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
)


class ModelServer:
    """Keeps one session. Simple on purpose: one outgoing message at a time, answers at once."""

    def __init__(self, version: int, receive_maximum: int) -> None:
        self.version = version
        self.receive_maximum = receive_maximum
        self.delivered: list[bytes] = []
        self.to_send: list[bytes] = []
        self._has_session = False
        self._unreleased: set[int] = set()
        self._sending = b""
        self._releasing = False
        self._reader = PacketReader(version)

    def open(self) -> None:
        self._reader = PacketReader(self.version)

    def forget(self) -> None:
        self._has_session = False
        self._unreleased.clear()

    def receive(self, data: bytes) -> bytes:
        answers: list[Packet] = []
        for packet in self._reader.feed(data):
            if isinstance(packet, Connect):
                answers += self._on_connect()
            elif isinstance(packet, Publish):
                answers += self._on_publish(packet)
            elif isinstance(packet, PubRel):
                self._unreleased.discard(packet.packet_id)
                answers.append(PubComp(packet.packet_id))
            elif isinstance(packet, PubRec):
                self._releasing = True
                answers.append(PubRel(packet.packet_id))
            elif isinstance(packet, PubComp):
                self._releasing = False
                self._sending = b""
                answers += self._next()
        return b"".join(encode(answer, self.version) for answer in answers)

    def _on_connect(self) -> list[Packet]:
        present = self._has_session
        self._has_session = True
        properties = Properties(receive_maximum=self.receive_maximum) if self.version == 5 else None
        answers: list[Packet] = [ConnAck(0, present, properties)]
        if present and self._releasing:
            return [*answers, PubRel(1)]
        if present and self._sending:
            return [*answers, Publish("down", self._sending, 2, dup=True, packet_id=1)]
        # A server that lost the session forgets what was under way, and begins the message anew.
        self._releasing = False
        if self._sending:
            self.to_send.insert(0, self._sending)
            self._sending = b""
        return answers + self._next()

    def _on_publish(self, packet: Publish) -> list[Packet]:
        if packet.qos == 1:
            self.delivered.append(packet.payload)
            return [PubAck(packet.packet_id)]
        if packet.packet_id not in self._unreleased:
            assert len(self._unreleased) < self.receive_maximum, "the client went over the window"
            self._unreleased.add(packet.packet_id)
            self.delivered.append(packet.payload)
        return [PubRec(packet.packet_id)]

    def _next(self) -> list[Packet]:
        if self._sending or not self.to_send:
            return []
        self._sending = self.to_send.pop(0)
        return [Publish("down", self._sending, 2, packet_id=1)]


class World:
    def __init__(self, version: int, window: int, kept: bool) -> None:
        settings = ClientSettings("c", version=version, clean_start=not kept, session_expiry_seconds=300, keep_alive_seconds=0)
        settings.max_inflight = window
        self.machine = ClientMachine(settings)
        self.server = ModelServer(version, window)
        self.completed: list[int] = []
        self.received: list[bytes] = []
        self._uplink = b""
        self._downlink = b""

    def connect(self) -> None:
        self._uplink = self._downlink = b""
        self.server.open()
        self.machine.connect(0.0)

    def lose(self) -> None:
        self.machine.lose(0.0)
        self._look()

    def move(self, up: int, down: int) -> None:
        """Let some bytes through in both directions."""
        self._uplink += b"".join(self.machine.take())
        self._downlink += self.server.receive(self._uplink[:up])
        self._uplink = self._uplink[up:]
        self.machine.receive(self._downlink[:down], 0.0)
        self._downlink = self._downlink[down:]
        self._look()

    def settle(self) -> None:
        if self.machine.state == CLOSED:
            self.connect()
        for _ in range(500):
            self.move(100_000, 100_000)
        assert self.machine.state == CONNECTED

    def _look(self) -> None:
        for event in self.machine.take_events():
            if isinstance(event, PublishCompleted):
                assert event.reason_code == 0
                self.completed.append(event.token)
            elif isinstance(event, MessageReceived):
                self.received.append(event.message.payload)
            else:
                assert isinstance(event, Connected | Disconnected)
                assert not isinstance(event, Disconnected) or event.message == "the connection was lost"


steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 2), st.just(0)),
        st.tuples(st.just("send"), st.just(0), st.just(0)),
        st.tuples(st.just("break"), st.just(0), st.just(0)),
        st.tuples(st.just("move"), st.integers(0, 60), st.integers(0, 60)),
    ),
    max_size=60,
)


def play(world: World, script: list[tuple[str, int, int]], forget: bool) -> tuple[dict[int, bytes], set[bytes], list[bytes]]:
    """Run the script to its end; returns the publishes by token, those at QoS 2, and what the server sent."""
    published: dict[int, bytes] = {}
    exact: set[bytes] = set()
    down: list[bytes] = []
    world.connect()
    for action, first, second in script:
        if action == "publish":
            payload = b"up %d" % len(published)
            published[world.machine.publish(Publish("up", payload, first), 0.0)] = payload
            if first == 2:
                exact.add(payload)
        elif action == "send":
            down.append(b"down %d" % len(down))
            world.server.to_send.append(down[-1])
        elif action == "break":
            world.lose()
            if forget:
                world.server.forget()
            world.connect()
        else:
            world.move(first, second)
    world.lose()
    if forget:
        world.server.forget()
    world.settle()
    return published, exact, down


@given(st.sampled_from([4, 5]), st.integers(1, 4), steps)
def test_with_a_session_nothing_is_lost_and_qos_2_is_exact(
    version: int, window: int, script: list[tuple[str, int, int]]
) -> None:
    world = World(version, window, kept=True)
    published, exact, down = play(world, script, forget=False)
    assert sorted(world.completed) == sorted(published)
    delivered = world.server.delivered
    assert set(delivered) == set(published.values())
    at_qos_2 = [payload for payload in delivered if payload in exact]
    assert at_qos_2 == [payload for payload in published.values() if payload in exact], "once each, in order"
    first_seen = list(dict.fromkeys(payload for payload in delivered if payload not in exact))
    assert first_seen == [payload for payload in published.values() if payload not in exact]
    assert world.received == down


@given(st.sampled_from([4, 5]), st.integers(1, 4), steps)
def test_without_a_session_nothing_is_lost(version: int, window: int, script: list[tuple[str, int, int]]) -> None:
    world = World(version, window, kept=True)
    published, _, down = play(world, script, forget=True)
    assert sorted(world.completed) == sorted(published)
    assert list(dict.fromkeys(world.server.delivered)) == list(published.values()), "repetitions, but in order"
    assert list(dict.fromkeys(world.received)) == down


@given(st.binary(max_size=200), st.sampled_from([4, 5]), st.booleans())
def test_arbitrary_bytes_end_the_connection_at_worst(data: bytes, version: int, connected: bool) -> None:
    machine = ClientMachine(ClientSettings("c", version=version))
    machine.connect(0.0)
    if connected:
        machine.receive(encode(ConnAck(), version), 0.0)
    machine.receive(data, 0.0)
    assert len([event for event in machine.take_events() if isinstance(event, Disconnected)]) <= 1
