"""A gateway and its clients for tests of the broker's side: it speaks the trunk's frames, and moves clients as a test says.

It is as simple as the contract allows, and parses nothing of what clients say. :class:`Client` is bytes; :class:`MqttClient`
speaks MQTT well enough to notice a message that is missing, comes twice, or out of order. :class:`Shuffle` lets everything
that is under way between brokers, gateways and clients arrive in a random order that every stream's own order allows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from nearcast.fabric import frames, links
from nearcast.fabric.frames import frame
from nearcast.fabric.links import Greeting, Link
from nearcast.fabric.trunks import peer_fields
from nearcast.mqtt.access import Peer
from nearcast.mqtt.codec import decode, encode
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.packets import (
    MQTT_5,
    ConnAck,
    Connect,
    Properties,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    SubscriptionRequest,
    Will,
)
from nearcast.mqtt.records import Fields, blob, number
from nearcast.mqtt.wire import split_packets
from tests.fabric_harness import SECRET, End, Mesh

MAX_STEPS = 100_000


class Trunk:
    """The gateway's end of a link to one broker."""

    def __init__(self, gateway: Gateway, broker: str) -> None:
        self.gateway = gateway
        self.broker = broker
        self.channels: dict[int, Client] = {}
        self.up = True
        self.leaving = False
        mesh = gateway.mesh
        node = mesh.nodes[broker]
        self.theirs = End(node)
        self.ours = End(node, other=self.theirs)
        self.theirs.other = self.ours
        connection = Connection(Effects(False), Peer(broker), self.ours, mesh.now, mesh.limits)
        self.link = Link(Greeting(links.GATEWAY, gateway.name, 1), SECRET, connection, broker, gateway.rng, mesh.now)
        self.theirs.link = node.fabric.accepted(self.theirs, Peer(gateway.name), mesh.now)
        self.theirs.connection = self.theirs.link.connection
        self.to_broker: deque[bytes] = deque()
        node.flush()
        self.run()
        self.link.max_frame_bytes = 1 << 30

    def send(self, data: bytes) -> None:
        self.link.send(data)
        self.to_broker.extend(self.link.connection.take())
        if not self.gateway.stepwise:
            self.gateway.run()

    def step_to_broker(self) -> None:
        """The broker gets the next piece."""
        node = self.theirs.node
        assert self.theirs.link is not None
        node.fabric.receive(self.theirs.link, self.to_broker.popleft(), self.gateway.mesh.now)
        node.flush()
        self._check_up()

    def step_to_gateway(self) -> None:
        """The gateway gets the next piece."""
        for content in self.link.feed(self.ours.inbox.popleft(), self.gateway.mesh.now):
            self._frame(content)
        self.to_broker.extend(self.link.connection.take())
        self._check_up()

    def _check_up(self) -> None:
        if self.theirs.closed or self.link.state == links.CLOSED:
            self.up = False

    def run(self) -> bool:
        """Pass on what is on its way in both directions; returns whether there was something."""
        self.to_broker.extend(self.link.connection.take())
        moved = False
        while self.up and (self.to_broker or self.ours.inbox):
            moved = True
            if self.to_broker:
                self.step_to_broker()
            if self.ours.inbox:
                self.step_to_gateway()
        return moved

    def _frame(self, content: bytes) -> None:
        kind = content[0]
        if kind == frames.LEAVING:
            self.leaving = True
            return
        fields = Fields(content)
        channel = fields.number()
        client = self.channels.get(channel)
        if client is None:
            return
        if kind == frames.CLIENT_DATA:
            client.arrived(self, channel, content[fields.position :])
        elif kind == frames.CLIENT_WINDOW:
            client.granted_bytes += fields.number()
        elif kind == frames.CLIENT_CLOSE:
            client.was_closed(self, channel, fields.blob().decode())
        elif kind != frames.FOUND:
            client.moving(self, channel, kind, fields)


class Client:
    """One client of the gateway, at one broker at a time: ``trunk`` is where its bytes go."""

    def __init__(self, gateway: Gateway, trunk: Trunk, peer: Peer) -> None:
        self.gateway = gateway
        self.trunk = trunk
        self.number = gateway.next_number()
        trunk.channels[self.number] = self
        self.received = bytearray()
        self.reads = True
        self.unread = 0
        self.closed: str | None = None
        self.sent_bytes = 0
        self.granted_bytes = 0
        # A move that is under way: its number, where from, what was sent to the new broker, what came from there.
        self.move_number = 0
        self.origin: tuple[Trunk, int] | None = None
        self.switching = False
        self.frozen = False
        self.adopted = False
        self.copies: list[bytes] = []
        self.held: list[bytes] = []
        self.moves = 0
        self.failures: list[str] = []
        self.taken_back = 0
        self.target = ""
        self.open(peer)

    def open(self, peer: Peer) -> None:
        """Tell the broker of the client."""
        self.trunk.send(frame(frames.CLIENT_OPEN, number(self.number), peer_fields(peer)))

    def write(self, data: bytes) -> None:
        """The client sends something."""
        self.sent_bytes += len(data)
        if self.switching:
            self.copies.append(data)
        self.trunk.send(frame(frames.CLIENT_DATA, number(self.number), data))

    def arrived(self, trunk: Trunk, channel: int, data: bytes) -> None:
        if self.switching and channel == self.number:
            self.held.append(data)
            return
        self.deliver(data)
        self.unread += len(data)
        if self.reads and self.unread and trunk.up:
            unread, self.unread = self.unread, 0
            trunk.send(frame(frames.CLIENT_WINDOW, number(channel), number(unread)))

    def deliver(self, data: bytes) -> None:
        """Bytes for the client."""
        self.received += data

    def pass_on(self) -> None:
        """The client reads what is there."""
        if self.reads and self.unread:
            unread, self.unread = self.unread, 0
            self.trunk.send(frame(frames.CLIENT_WINDOW, number(self.number), number(unread)))

    def close(self) -> None:
        """The client's transport is gone."""
        self.trunk.send(frame(frames.CLIENT_CLOSE, number(self.number), blob(b"connection lost")))

    def was_closed(self, trunk: Trunk, channel: int, reason: str) -> None:
        self.closed = reason

    # --- moves ----------------------------------------------------------------------------------------------------------

    @property
    def is_moving(self) -> bool:
        return self.move_number != 0

    def move(self, target: str) -> None:
        """Ask for a move."""
        assert not self.is_moving
        self.move_number = self.gateway.rng.getrandbits(60) | 1
        self.target = target
        self.gateway.trunk(target)
        self.trunk.send(frame(frames.MOVE, number(self.number), number(self.move_number), blob(target.encode())))

    def moving(self, trunk: Trunk, channel: int, kind: int, fields: Fields) -> None:
        if fields.number() != self.move_number:
            return
        if kind == frames.MOVE_READY:
            self.ready()
        elif kind == frames.FROZEN:
            self.frozen = True
            self._check()
        elif kind == frames.ADOPTED:
            assert channel == self.number
            self.adopted = True
            self._check()
        elif kind == frames.MOVE_FAILED:
            reason = fields.blob().decode()
            self.failures.append(reason)
            if not self.switching:
                self.move_number = 0
            elif channel != self.number:
                pass  # the new broker says it, too
            elif self.origin is not None and self.trunk is self.origin[0]:
                self.closed = reason  # nobody has the session as it was
            else:
                self.take_back()
        else:
            raise AssertionError(f"frame {kind}")

    def ready(self) -> None:
        """Everything is prepared: go."""
        self.origin = (self.trunk, self.number)
        self.switching = True
        self.frozen = self.adopted = False
        self.copies = []
        self.held = []
        self.trunk.send(frame(frames.FREEZE, number(self.number), number(self.move_number)))
        self._adopt(self.gateway.trunk(self.target))

    def take_back(self) -> None:
        """The new broker does not take the client: its old one is to have it again."""
        assert self.origin is not None
        self.taken_back += 1
        self.trunk.channels.pop(self.number, None)
        self.held = []
        self._adopt(self.origin[0])
        for data in self.copies:
            self.trunk.send(frame(frames.CLIENT_DATA, number(self.number), data))

    def _adopt(self, trunk: Trunk) -> None:
        self.trunk = trunk
        self.number = self.gateway.next_number()
        trunk.channels[self.number] = self
        trunk.send(frame(frames.ADOPT, number(self.number), number(self.move_number), blob(b"")))

    def _check(self) -> None:
        if not (self.frozen and self.adopted):
            return
        self.switching = False
        self.move_number = 0
        self.moves += 1
        held, self.held = self.held, []
        for data in held:
            self.arrived(self.trunk, self.number, data)


class MqttClient(Client):
    """A client that subscribes, acknowledges what it gets, and knows what it got: ``messages`` are (topic, payload) in order.

    A PUBLISH that comes again with DUP is known by its identifier, as a client must know it."""

    def __init__(self, gateway: Gateway, trunk: Trunk, client_id: str, version: int = MQTT_5, **connect: object) -> None:
        self.client_id = client_id
        self.version = version
        self.messages: list[tuple[str, bytes]] = []
        self.deliveries = 0
        self.acknowledged: set[int] = set()
        self.connacks: list[ConnAck] = []
        self.subacks = 0
        self.acknowledges = True
        self.unanswered: list[Publish | PubRel] = []
        self._pending = b""
        self._aliases: dict[int, str] = {}
        self._unreleased: set[int] = set()
        self._next_id = 0
        super().__init__(gateway, trunk, Peer("test"))
        self.connect(**connect)

    def connect(self, **connect: object) -> None:
        """Send CONNECT."""
        version = self.version
        will = connect.get("will")
        alias_maximum = connect.get("alias_maximum", 0)
        assert isinstance(alias_maximum, int)
        properties = None
        if version == MQTT_5:
            expiry = connect.get("expiry")
            properties = Properties(
                session_expiry_interval=expiry if isinstance(expiry, int) else None,
                topic_alias_maximum=alias_maximum or None,
                receive_maximum=20,
            )
        self.write(
            encode(
                Connect(
                    version=version,
                    client_id=self.client_id,
                    clean_start=bool(connect.get("clean_start", True)),
                    keep_alive=0,
                    will=will if isinstance(will, Will) else None,
                    properties=properties,
                ),
                version,
            )
        )

    def subscribe(self, topic_filter: str, qos: int, **options: bool) -> None:
        self._next_id += 1
        request = SubscriptionRequest(topic_filter, qos, **options)
        self.write(encode(Subscribe(self._next_id, [request]), self.version))

    def publish(self, topic: str, payload: bytes, qos: int) -> None:
        self._next_id += 1
        self.write(encode(Publish(topic, payload, qos, packet_id=self._next_id if qos else 0), self.version))

    def deliver(self, data: bytes) -> None:
        super().deliver(data)
        data = self._pending + data
        whole = _whole(data)
        self._pending = data[whole:]
        for raw in split_packets(data[:whole]) if whole else []:
            self._packet(raw)

    def _packet(self, raw: bytes) -> None:
        size = 1
        while raw[size] & 0x80:
            size += 1
        packet = decode(raw[0], raw[size + 1 :], self.version)
        if isinstance(packet, Publish):
            self._message(packet)
        elif isinstance(packet, PubRel):
            self._unreleased.discard(packet.packet_id)
            self._answer(packet)
        elif isinstance(packet, PubRec):
            self.write(encode(PubRel(packet.packet_id), self.version))
        elif isinstance(packet, PubAck | PubComp):
            assert packet.packet_id not in self.acknowledged, "acknowledged twice"
            self.acknowledged.add(packet.packet_id)
        elif isinstance(packet, ConnAck):
            self.connacks.append(packet)
        elif isinstance(packet, SubAck):
            self.subacks += 1

    def _message(self, packet: Publish) -> None:
        self.deliveries += 1
        topic = packet.topic
        alias = None if packet.properties is None else packet.properties.topic_alias
        if alias is not None:
            if topic:
                self._aliases[alias] = topic
            else:
                topic = self._aliases[alias]
        if packet.qos == 2:
            if packet.packet_id in self._unreleased:
                assert packet.dup
                self._answer(packet)
                return
            self._unreleased.add(packet.packet_id)
        self.messages.append((topic, packet.payload))
        if packet.qos:
            self._answer(packet)

    def _answer(self, packet: Publish | PubRel) -> None:
        if not self.acknowledges:
            self.unanswered.append(packet)
        elif isinstance(packet, PubRel):
            self.write(encode(PubComp(packet.packet_id), self.version))
        elif packet.qos == 1:
            self.write(encode(PubAck(packet.packet_id), self.version))
        else:
            self.write(encode(PubRec(packet.packet_id), self.version))

    def answer(self) -> None:
        """Acknowledge what was not."""
        self.acknowledges = True
        unanswered, self.unanswered = self.unanswered, []
        for packet in unanswered:
            self._answer(packet)


def _whole(data: bytes) -> int:
    """How many of the bytes are complete packets."""
    position = 0
    while True:
        size = 0
        cursor = position + 1
        shift = 0
        while True:
            if cursor >= len(data):
                return position
            byte = data[cursor]
            cursor += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if cursor + size > len(data):
            return position
        position = cursor + size


class Gateway:
    """A gateway with a link to each broker it uses. ``stepwise``: nothing arrives unless :class:`Shuffle` says so."""

    def __init__(self, mesh: Mesh, name: str) -> None:
        self.mesh = mesh
        self.name = name
        self.rng = random.Random(f"{mesh.seed}-{name}")
        self.trunks: dict[str, Trunk] = {}
        self.stepwise = False
        self._numbers = 0
        self._running = False

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def trunk(self, broker: str) -> Trunk:
        if broker not in self.trunks:
            self.trunks[broker] = Trunk(self, broker)
            self.run()
        return self.trunks[broker]

    def client(self, broker: str, peer: Peer | None = None) -> Client:
        return Client(self, self.trunk(broker), peer or Peer("test"))

    def mqtt_client(self, broker: str, client_id: str, version: int = MQTT_5, **connect: object) -> MqttClient:
        return MqttClient(self, self.trunk(broker), client_id, version, **connect)

    def cut(self, broker: str) -> None:
        """The link to a broker breaks."""
        trunk = self.trunks.pop(broker)
        trunk.up = False
        node = trunk.theirs.node
        trunk.theirs.closed = trunk.ours.closed = True
        assert trunk.theirs.link is not None
        if trunk.theirs.link in node.fabric.links:
            node.fabric.lost(trunk.theirs.link, self.mesh.now)
            node.flush()

    def run(self) -> None:
        if self._running:
            return
        self._running = True
        try:
            while any([trunk.run() for trunk in list(self.trunks.values())]):  # noqa: C419 - all of them
                pass
        finally:
            self._running = False


def run_all(mesh: Mesh, *gateways: Gateway) -> None:
    """Let everything arrive, everywhere, until nothing is under way."""
    for _ in range(MAX_STEPS):
        mesh.run()
        for gateway in gateways:
            gateway.run()
        busy = any(end.inbox for stream in mesh.streams for end in stream)
        busy = busy or any(node.wants_sync for node in mesh.nodes.values())
        for gateway in gateways:
            busy = busy or any(trunk.ours.inbox or trunk.to_broker for trunk in gateway.trunks.values() if trunk.up)
        if not busy:
            return
    raise AssertionError("something is always under way")


class Shuffle:
    """Everything under way arrives piece by piece, from streams in random order."""

    def __init__(self, mesh: Mesh, rng: random.Random, *gateways: Gateway) -> None:
        self.mesh = mesh
        self.rng = rng
        self.gateways = gateways
        for gateway in gateways:
            gateway.stepwise = True

    def step(self) -> bool:
        """One piece arrives somewhere; false when nothing is under way."""
        choices: list[End | tuple[Trunk, bool]] = [end for stream in self.mesh.streams for end in stream if end.inbox]
        for gateway in self.gateways:
            for trunk in gateway.trunks.values():
                if trunk.up and trunk.to_broker:
                    choices.append((trunk, True))
                if trunk.up and trunk.ours.inbox:
                    choices.append((trunk, False))
        for node in self.mesh.nodes.values():
            if node.wants_sync and self.rng.random() < 0.3:
                node.sync()
                return True
        if not choices:
            moved = False
            for node in self.mesh.nodes.values():
                moved = node.sync() or moved
            return moved
        choice = self.rng.choice(choices)
        if isinstance(choice, End):
            assert choice.link is not None
            choice.node.fabric.receive(choice.link, choice.inbox.popleft(), self.mesh.now)
            choice.node.flush()
        elif choice[1]:
            choice[0].step_to_broker()
        else:
            choice[0].step_to_gateway()
        return True

    def steps(self, count: int) -> None:
        for _ in range(count):
            if not self.step():
                return

    def run(self) -> None:
        """Until nothing is under way."""
        for _ in range(MAX_STEPS):
            if not self.step():
                return
        raise AssertionError("something is always under way")

    def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Until this holds; time passes when nothing is under way."""
        end = self.mesh.now + seconds
        for _ in range(MAX_STEPS):
            if condition():
                return
            if not self.step():
                assert self.mesh.now < end, "it never came true"
                self.mesh.advance(0.1)
        raise AssertionError("it never came true")
