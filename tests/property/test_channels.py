"""Whatever happens to links, processes and disks: what was published at one broker arrives at another's subscribers, once.

Clients behave as MQTT asks of them: sessions that outlive connections, publishes sent again with the same identifier until
they are acknowledged, QoS 2 in both directions.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from nearcast.config import Limits
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.mqtt.codec import decode, encode
from nearcast.mqtt.packets import (
    MQTT_5,
    ConnAck,
    Connect,
    Packet,
    Properties,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    Subscribe,
    SubscriptionRequest,
)
from nearcast.mqtt.wire import split_packets
from tests.fabric_harness import End, Mesh


class Device:
    """A client with a session, which publishes and subscribes at QoS 2 (and publishes at QoS 1)."""

    def __init__(self, mesh: Mesh, broker: str) -> None:
        self.mesh = mesh
        self.broker = broker
        self.got: list[bytes] = []
        self.unacknowledged: dict[int, Publish | PubRel] = {}
        self.unreleased: set[int] = set()
        self.next_id = 1
        self.end: End | None = None
        self.connect(first=True)

    def connect(self, *, first: bool = False) -> None:
        node = self.mesh.nodes[self.broker]
        self.end = node.client()
        properties = Properties(session_expiry_interval=100_000)
        packet = Connect(version=MQTT_5, client_id=f"d-{self.broker}", clean_start=first, keep_alive=0, properties=properties)
        answers = self._exchange(packet)
        present = [answer.session_present for answer in answers if isinstance(answer, ConnAck)]
        assert present == [not first]
        if first:
            self._exchange(Subscribe(self._id(), [SubscriptionRequest("t/#", 2)]))
        for waiting in list(self.unacknowledged.values()):
            if isinstance(waiting, Publish):
                waiting.dup = True
            self._exchange(waiting)

    def _id(self) -> int:
        self.next_id = self.next_id % 65_000 + 1
        return self.next_id

    def publish(self, payload: bytes, qos: int) -> None:
        packet = Publish("t/x", payload, qos, packet_id=self._id() if qos else 0)
        if qos:
            self.unacknowledged[packet.packet_id] = packet
        self._exchange(packet)

    def _exchange(self, packet: Packet) -> list[Packet]:
        assert self.end is not None
        self.mesh.nodes[self.broker].feed(self.end, encode(packet, MQTT_5))
        return self.read()

    def read(self) -> list[Packet]:
        end = self.end
        assert end is not None
        while end.inbox:
            end.received += end.inbox.popleft()
        data = bytes(end.received)
        end.received.clear()
        found: list[Packet] = []
        for raw in split_packets(data):
            size = 2 if raw[1] < 0x80 else 3
            packet = decode(raw[0], raw[size:], MQTT_5)
            found.append(packet)
            self._handle(packet)
        return found

    def _handle(self, packet: Packet) -> None:
        if isinstance(packet, Publish):
            if packet.qos == 2:
                if packet.packet_id not in self.unreleased:
                    self.got.append(packet.payload)
                self.unreleased.add(packet.packet_id)
                self._exchange(PubRec(packet.packet_id))
            else:
                self.got.append(packet.payload)
                if packet.qos:
                    self._exchange(PubAck(packet.packet_id))
        elif isinstance(packet, PubRel):
            self.unreleased.discard(packet.packet_id)
            self._exchange(PubComp(packet.packet_id))
        elif isinstance(packet, PubAck):
            self.unacknowledged.pop(packet.packet_id, None)
        elif isinstance(packet, PubRec):
            self.unacknowledged.pop(packet.packet_id, None)
            self.unacknowledged[packet.packet_id] = PubRel(packet.packet_id)
            self._exchange(self.unacknowledged[packet.packet_id])
        elif isinstance(packet, PubComp):
            self.unacknowledged.pop(packet.packet_id, None)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from("ab"), st.integers(1, 12)),
        st.tuples(st.just("cut"), st.just(""), st.just(0)),
        st.tuples(st.just("link"), st.sampled_from("ab"), st.just(0)),
        st.tuples(st.just("some"), st.just(""), st.integers(1, 8)),
        st.tuples(st.just("sync"), st.sampled_from("ab"), st.just(0)),
        st.tuples(st.just("run"), st.just(""), st.just(0)),
        st.tuples(st.just("crash"), st.sampled_from("ab"), st.integers(0, 1)),
        st.tuples(st.just("wait"), st.just(""), st.integers(1, 9)),
    ),
    max_size=40,
)


class Story:
    """Two brokers, a device at each, and what was published."""

    def __init__(self, seed: int, spilling: bool) -> None:
        self.rng = random.Random(seed)
        fabric = FabricSettings(keep_for_seconds=1e6, max_queued_bytes=3_000 if spilling else 1_000_000)
        self.mesh = Mesh(seed, fabric, Limits(connect_timeout_seconds=1e6))
        for name in "ab":
            self.mesh.add(name, durable=True)
        self.streams: list[tuple[End, End]] = []
        self.link("a")
        self.mesh.run()
        self.devices = {name: Device(self.mesh, name) for name in "ab"}
        self.mesh.run()
        self.published: dict[bytes, int] = {}

    def link(self, first: str) -> None:
        if not self.mesh.streams:
            self.mesh.link(first, "b" if first == "a" else "a")

    def read(self) -> None:
        for device in self.devices.values():
            device.read()

    def some(self, chunks: int) -> None:
        """Let a few of the things happen that are on their way."""
        for _ in range(chunks):
            waiting = [end for stream in self.mesh.streams for end in stream if end.inbox]
            if not waiting:
                return
            end = self.rng.choice(waiting)
            data = end.inbox.popleft()
            assert end.link is not None
            at = self.rng.randrange(len(data) + 1)
            end.node.fabric.receive(end.link, data[:at], self.mesh.now)
            end.node.flush()
            if not end.closed:
                end.node.fabric.receive(end.link, data[at:], self.mesh.now)
                end.node.flush()

    def act(self, action: str, name: str, number: int) -> None:
        mesh = self.mesh
        if action == "publish":
            for _ in range(number):
                qos = self.rng.choice((1, 2))
                payload = b"%d-%s-%d" % (len(self.published), name.encode(), qos) + b"." * self.rng.randrange(300)
                self.published[payload] = qos
                self.devices[name].publish(payload, qos)
                mesh.nodes[name].write_spool()  # no message is dropped because its file takes time
        elif action == "cut" and mesh.streams:
            mesh.cut(mesh.streams[0])
        elif action == "link":
            self.link(name)
        elif action == "some":
            self.some(number)
        elif action == "sync":
            mesh.nodes[name].sync()
        elif action == "run":
            mesh.run()
        elif action == "wait":
            mesh.advance(float(number))
        elif action == "crash":
            mesh.nodes[name].crash(power_cut=bool(number))
            self.devices[name].connect()
        self.read()

    def finish(self) -> None:
        for _ in range(30):
            self.link("a")
            self.mesh.advance(1.0)
            self.read()
            self.mesh.run()
            self.read()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.booleans(), ACTIONS)
def test_nothing_is_lost_and_qos_2_comes_once(seed: int, spilling: bool, actions: list[tuple[str, str, int]]) -> None:
    story = Story(seed, spilling)
    for action, name, number in actions:
        story.act(action, name, number)
    story.finish()
    crashed = any(action == "crash" for action, _, _ in actions)
    for name, device in story.devices.items():
        assert not device.unacknowledged, f"seed {seed}: {name} waits for an acknowledgement"
        for payload, qos in story.published.items():
            times = device.got.count(payload)
            assert times >= 1, f"seed {seed}: {payload[:12]!r} did not arrive at {name}"
            if qos == 2 or not crashed:
                assert times == 1, f"seed {seed}: {payload[:12]!r} came {times} times to {name}"
        assert len(device.got) >= len(story.published)
    for node in story.mesh.nodes.values():
        for peer in node.fabric.peers.values():
            assert not peer.session.queued_messages
            assert not peer.session.spilled
            assert not peer.session.unconfirmed_bytes
        assert not node.spool.kept
    if not crashed:
        for name, device in story.devices.items():
            for origin in "ab":
                ours = [payload for payload in device.got if payload.split(b".")[0].split(b"-")[1] == origin.encode()]
                assert ours == [payload for payload in story.published if payload in set(ours)], (
                    f"seed {seed}: order at {name}"
                )
