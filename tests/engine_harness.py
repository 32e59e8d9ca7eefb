"""An in-memory driver for :class:`nearcast.mqtt.engine.Engine`: no I/O, no clock but the one the test moves.

A :class:`World` is an engine and its clients. After every call into the engine it does what a driver must, in the order the
engine's contract asks: take the records, send ``take()``, then ``take_held()``, then close. What a client was sent is kept as
bytes; :meth:`Client.packets` decodes it with the ordinary codec.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from nearcast.config import EngineSettings, Limits
from nearcast.mqtt.access import AllowAll, Authenticator, Authorizer, Peer
from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.engine import Engine
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
    SubAck,
    Subscribe,
    SubscriptionRequest,
    Will,
)
from nearcast.mqtt.publication import Terms
from nearcast.mqtt.recovery import Recovery
from nearcast.mqtt.session import RELEASED, Session
from nearcast.mqtt.wire import split_packets

#: Wall-clock minus monotonic time in a world, so that mixing the two up shows.
WALL_OFFSET = 1_000_000.0


class Client:
    """One transport. ``version`` is how its output is read; it is known once :meth:`connect` was called."""

    def __init__(self, world: World, connection: Connection, version: int) -> None:
        self.world = world
        self.connection = connection
        self.version = version
        #: Everything that was sent to this client and not yet taken, and whether the server closed the transport.
        self.output = bytearray()
        self.closed = False
        self.gone = False
        self._reader = PacketReader(version)

    # --- what the client does -------------------------------------------------------------------------------------------

    def send(self, *items: Packet | bytes) -> Client:
        """Bytes and packets, as one read of the server."""
        data = b"".join(item if isinstance(item, bytes) else encode(item, self.version) for item in items)
        self.world.engine.receive(self.connection, data, self.world.now)
        self.world.flush()
        return self

    def connect(self, packet: Connect) -> ConnAck:
        """CONNECT; returns the CONNACK that must come, alone or first."""
        self.version = packet.version
        self._reader = PacketReader(packet.version)
        self.send(packet)
        first, rest = self._take_first()
        assert isinstance(first, ConnAck)
        self.output[:0] = rest
        return first

    def _take_first(self) -> tuple[Packet, bytes]:
        chunk = bytes(self.output)
        self.output.clear()
        packets = split_packets(chunk)
        assert packets, "no answer"
        return self._reader.feed(packets[0])[0], b"".join(packets[1:])

    def subscribe(
        self, topic_filter: str, qos: int = 0, *, packet_id: int = 1, identifier: int | None = None, **options: bool | int
    ) -> int:
        """SUBSCRIBE to one filter; returns the reason code. Retained messages that follow stay in the output."""
        request = SubscriptionRequest(
            topic_filter,
            qos,
            bool(options.get("no_local", False)),
            bool(options.get("retain_as_published", False)),
            int(options.get("retain_handling", 0)),
        )
        properties = None if identifier is None else Properties(subscription_identifiers=[identifier])
        self.send(Subscribe(packet_id, [request], properties))
        answer: SubAck | None = None
        rest = []
        for raw in split_packets(self.take()):
            if raw[0] == 0x90:
                packet = self._reader.feed(raw)[0]
                assert isinstance(packet, SubAck)
                answer = packet
            else:
                rest.append(raw)
        self.output[:0] = b"".join(rest)
        assert answer is not None
        assert answer.packet_id == packet_id
        return answer.reason_codes[0]

    def publish(
        self,
        topic: str,
        payload: bytes = b"",
        qos: int = 0,
        *,
        retain: bool = False,
        packet_id: int = 1,
        dup: bool = False,
        properties: Properties | None = None,
    ) -> Client:
        return self.send(Publish(topic, payload, qos, retain, dup, packet_id if qos else 0, properties))

    def lose(self) -> None:
        """The transport breaks."""
        if not self.gone:
            self.gone = True
            self.world.engine.lose(self.connection, self.world.now)
            self.world.flush()

    # --- what the client got --------------------------------------------------------------------------------------------

    def take(self) -> bytes:
        """The bytes since the last call."""
        taken = bytes(self.output)
        self.output.clear()
        return taken

    def packets(self) -> list[Packet]:
        """The packets since the last call."""
        return self._reader.feed(self.take())

    def messages(self) -> list[Publish]:
        """The PUBLISH packets since the last call; anything else is forgotten."""
        return [packet for packet in self.packets() if isinstance(packet, Publish)]

    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages()]

    def acknowledge_all(self) -> list[Publish]:
        """Take what there is and answer it, until nothing more comes; returns the messages, in order."""
        found: list[Publish] = []
        while not self.closed:
            packets = self.packets()
            if not packets:
                return found
            answers: list[Packet] = []
            for packet in packets:
                if isinstance(packet, Publish):
                    found.append(packet)
                    if packet.qos == 1:
                        answers.append(PubAck(packet.packet_id))
                    elif packet.qos == 2:
                        answers.append(PubRec(packet.packet_id))
                elif isinstance(packet, PubRel):
                    answers.append(PubComp(packet.packet_id))
                elif isinstance(packet, PubRec):
                    answers.append(PubRel(packet.packet_id))
            if answers:
                self.send(*answers)
        return found


class World:
    """An engine, its clients, its clock and everything it wanted written."""

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        durable: bool = False,
        authenticator: Authenticator | None = None,
        authorizer: Authorizer | None = None,
        seed: int = 0,
        server_reference: str | None = None,
        response_information: str | None = None,
    ) -> None:
        self.settings = EngineSettings(
            limits=limits or Limits(),
            durable=durable,
            server_reference=server_reference,
            response_information=response_information,
        )
        self.now = 1_000.0
        self.engine = Engine(
            self.settings, authenticator or AllowAll(), authorizer, random.Random(seed), wall_offset=WALL_OFFSET - self.now
        )
        #: One frame per call into the engine, as a journal would write them.
        self.frames: list[list[bytes]] = []
        self.clients: list[Client] = []

    def open(self, version: int = MQTT_5, peer: Peer | None = None) -> Client:
        """A transport that has sent nothing yet."""
        handle: list[Client] = []
        connection = self.engine.open(peer or Peer("127.0.0.1:1"), handle, self.now)
        client = Client(self, connection, version)
        handle.append(client)
        self.clients.append(client)
        self.flush()
        return client

    def connect(
        self,
        client_id: str,
        version: int = MQTT_5,
        *,
        clean: bool = True,
        expiry: int | None = None,
        keep_alive: int = 0,
        will: Will | None = None,
        username: str | None = None,
        password: bytes | None = None,
        properties: Properties | None = None,
    ) -> Client:
        """A connected client; its CONNACK is taken and must be a success."""
        client = self.open(version)
        if expiry is not None:
            properties = properties or Properties()
            properties.session_expiry_interval = expiry
        answer = client.connect(Connect(client_id, version, clean, keep_alive, username, password, will, properties))
        assert answer.reason_code == 0, answer
        return client

    def persistent(
        self, client_id: str, version: int = MQTT_5, *, clean: bool = False, receive_maximum: int | None = None
    ) -> Client:
        """A client whose session outlives its connection."""
        if version != MQTT_5:
            return self.connect(client_id, version, clean=False)
        properties = None if receive_maximum is None else Properties(receive_maximum=receive_maximum)
        return self.connect(client_id, version, clean=clean, expiry=0xFFFFFFFF, properties=properties)

    def flush(self) -> None:
        """What a driver does after every call into the engine."""
        records = self.engine.take_records()
        if records:
            self.frames.append(records)
        for connection in self.engine.ready():
            client = _client_of(connection)
            if connection.congested and not connection.closing:
                continue
            for chunk in connection.take():
                client.output += chunk
            for chunk in connection.take_held() or []:
                client.output += chunk
            connection.committed()
            if connection.starved and not connection.closing:
                self.engine.writable(connection, self.now)
            if connection.closing and not client.closed:
                client.closed = True
                if not client.gone:
                    client.gone = True
                    self.engine.lose(connection, self.now)
        if self.engine.effects.records or self.engine.effects.dirty:
            self.flush()

    def advance(self, seconds: float) -> None:
        """Let time pass, stopping at every deadline on the way."""
        target = self.now + seconds
        while self.engine.next_deadline() <= target:
            self.now = max(self.now, self.engine.next_deadline())
            self.engine.tick(self.now)
            self.flush()
        self.now = target
        self.engine.tick(self.now)
        self.flush()

    def session(self, client_id: str) -> Session:
        return self.engine.sessions.by_client[client_id]

    def records(self) -> Iterator[bytes]:
        for frame in self.frames:
            yield from frame

    def recovered(self, frames: list[list[bytes]] | None = None) -> World:
        """A fresh world with what these frames (all, if not given) say; clients are gone, time stands still."""
        other = World(limits=self.settings.limits, durable=self.settings.durable)
        other.now = self.now
        other.engine.effects.wall_offset = self.engine.effects.wall_offset
        recovery = Recovery(other.engine)
        for frame in self.frames if frames is None else frames:
            for record in frame:
                recovery.apply(record)
        other.recovery = recovery
        return other

    recovery: Recovery | None = None

    def validate(self) -> None:
        """What must hold after every call: gauges equal the truth, windows are kept."""
        engine = self.engine
        stats = engine.stats
        sessions = list(engine.sessions.by_client.values())
        assert stats.sessions == len(sessions) == len(engine.sessions.by_number)
        assert stats.inflight_messages == sum(len(session.inflight) for session in sessions)
        assert stats.queued_messages == sum(session.queued_messages for session in sessions)
        assert stats.queued_bytes == sum(session.queued_bytes for session in sessions)
        assert stats.connected_clients == sum(session.connection is not None for session in sessions)
        assert stats.connections == sum(not client.gone for client in self.clients)
        assert stats.retained_messages == engine.retained.count == len(engine.retained.all())
        assert stats.retained_bytes == sum(len(message.packets) for message in engine.retained.all())
        assert engine.tree.count == sum(len(session.subscriptions) for session in sessions)
        for session in sessions:
            queue = list(session.queue or [])
            assert session.queued_messages == sum(pending.count for pending in queue)
            assert session.queued_bytes == sum(pending.count * pending.publication.stride for pending in queue)
            assert all(pending.count > 0 for pending in queue)
            assert session.inflight_bytes == sum(sent.size for sent in session.inflight.values())
            assert session.queued_messages <= session.max_queued_messages
            assert session.queued_bytes <= session.max_queued_bytes
            assert engine.sessions.by_number[session.number] is session
            assert all(1 <= packet_id <= 65_535 for packet_id in session.inflight)


def _client_of(connection: Connection) -> Client:
    handle = connection.handle
    assert isinstance(handle, list)
    client = handle[0]
    assert isinstance(client, Client)
    return client


def durable_state(world: World) -> dict[str, object]:
    """Everything a crash must not change, in comparable form: queues and in-flight as the messages in them."""
    engine = world.engine
    found: dict[str, object] = {}
    for session in engine.sessions.by_client.values():
        if not session.durable:
            continue
        inflight: list[object] = []
        for packet_id, sent in session.inflight.items():
            if sent is RELEASED:
                inflight.append((packet_id, "released"))
            else:
                index = sent.start + packet_id - sent.first_id
                message = _message(sent.publication.topic, sent.publication.payloads()[index], sent.publication.properties)
                inflight.append((packet_id, message, _terms(sent.terms)))
        queue: list[object] = []
        for pending in session.queue or []:
            payloads = pending.publication.payloads()
            for index in range(pending.start, pending.start + pending.count):
                message = _message(pending.publication.topic, payloads[index], pending.publication.properties)
                expires = round(pending.publication.expires_at, 3)
                queue.append((message, _terms(pending.terms), expires))
        found[session.client_id] = {
            "number": session.number,
            "expiry": session.expiry_seconds,
            "username": session.username,
            "subscriptions": {
                key: (item.qos, item.no_local, item.retain_as_published, item.retain_handling, item.identifier)
                for key, item in session.subscriptions.items()
            },
            "next_id": session.next_id,
            "inflight": inflight,
            "queue": queue,
            "received": sorted(session.received_ids or ()),
            "will": session.will,
        }
    found["$retained"] = {
        message.topic: (message.payloads()[0], message.qos, message.properties, round(message.expires_at, 3))
        for message in engine.retained.all()
    }
    return found


def _terms(terms: Terms) -> tuple[int, bool, bytes, str]:
    return terms.qos, terms.retain, terms.identifiers, terms.via


def _message(topic: bytes, payload: bytes, properties: bytes) -> tuple[bytes, bytes, bytes]:
    return topic, payload, properties
