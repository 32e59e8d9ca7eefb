"""A cloud and the machine that uses it, without sockets: what the tests of :mod:`nearcast.fabric.cloud` share.

The server is either our own engine (:class:`EngineCloud`) or a script of packets (:class:`ScriptedCloud`). Bytes go to and fro
until nobody says anything.
"""

from __future__ import annotations

import random
from typing import Any, cast

from nearcast.config import EngineSettings, Limits
from nearcast.fabric.cloud import Cloud
from nearcast.fabric.identities import Identity
from nearcast.fabricconfig import Groups
from nearcast.mqtt.access import AllowAll, Peer
from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.engine import Engine
from nearcast.mqtt.packets import MQTT_3_1_1, MQTT_5, ConnAck, Packet, Publish, SubAck, Subscribe, UnsubAck, Unsubscribe
from nearcast.mqtt.publication import Publication, build

SECRET = b"what these brokers share"


class Owner:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.connections: list[bool] = []
        self.losses = 0
        self.messages: list[tuple[str, bytes, Identity | None]] = []
        self.publications: list[Publication] = []
        self.said: list[tuple[str, bytes]] = []
        self.versions: list[int] = []
        self.confirmed: list[tuple[int, bool]] = []
        self.marks: list[int] = []

    def connected(self, session_kept: bool, now: float) -> None:
        self.connections.append(session_kept)

    def lost(self, now: float) -> None:
        self.losses += 1

    def arrived(self, publication: Publication, identity: Identity | None, now: float) -> None:
        self.publications.append(publication)
        self.messages.append((publication.topic.decode(), publication.payloads()[0], identity))

    def control(self, topic: str, payload: bytes, now: float) -> None:
        self.said.append((topic, payload))

    def subscribed(self, version: int, now: float) -> None:
        self.versions.append(version)

    def relayed(self, token: int, accepted: bool, now: float) -> None:
        self.confirmed.append((token, accepted))

    def marked(self, token: int, now: float) -> None:
        self.marks.append(token)


class Leader:
    """A broker as far as its cloud is concerned."""

    def __init__(self, name: str, gated: bool = False, **settings: Any) -> None:
        self.owner = Owner()
        self.effects = Effects(gated)
        self.groups = Groups(cloud="mqtt://cloud:1883", **settings)
        self.name = name
        self.sequence = 0
        self.cloud = Cloud(self.owner, self.groups, name, Limits(), self.effects, SECRET, random.Random(name), 0.0)
        self.filters: dict[str, int] = {}

    def set_filters(self, filters: dict[str, int] | set[str], version: int, now: float) -> None:
        """Want these, and no others."""
        former, self.filters = self.filters, filters if isinstance(filters, dict) else dict.fromkeys(filters, 2)
        self.cloud.change_filters({**dict.fromkeys(former, -1), **self.filters}, version, now)

    def relay(self, topic: str, payload: bytes, qos: int = 1, retain: bool = False, expires_at: float = 0.0) -> int:
        """Relay a message of this broker's own; returns its token."""
        self.sequence += 1
        publication = build(topic.encode(), payload, qos, retain, b"", expires_at)
        identity = Identity(self.name, 7, self.sequence, leader=self.name)
        self.cloud.relay(publication, 0, identity, self.sequence, 0.0)
        return self.sequence

    def take(self) -> bytes:
        """What the cloud's connection has to say now, held output included: the disk is quick here."""
        connection = self.cloud.connection
        self.effects.dirty.clear()
        if connection is None:
            return b""
        connection.dirty = False
        return b"".join(connection.take()) + b"".join(connection.take_held() or [])


class EngineCloud:
    """Our own broker as the cloud, and the leaders that are connected to it."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.engine = self._new_engine()
        self.ends: dict[Leader, Connection] = {}

    def _new_engine(self) -> Engine:
        return Engine(EngineSettings(limits=self.limits), AllowAll(), None, random.Random(0), 0.0)

    def connect(self, leader: Leader, now: float = 0.0) -> None:
        """Let a leader in that wants to."""
        assert leader.cloud.wants_dial(now)
        leader.cloud.opened(leader, now)
        self.ends[leader] = self.engine.open(Peer("leader"), leader, now)
        self.settle(now)

    def lose(self, leader: Leader, now: float = 0.0) -> None:
        """The connection breaks; what is on its way is gone."""
        self.engine.lose(self.ends.pop(leader), now)
        leader.take()
        leader.cloud.lost(now)
        leader.take()

    def restart_forgetting(self, now: float = 0.0) -> None:
        """The cloud ends and comes back without its memory."""
        for leader in list(self.ends):
            self.lose(leader, now)
        self.engine = self._new_engine()

    def settle(self, now: float = 0.0) -> None:
        """Carry bytes until there are none."""
        busy = True
        while busy:
            busy = False
            for leader in list(self.ends):
                connection = self.ends[leader]
                data = leader.take()
                if data:
                    busy = True
                    self.engine.receive(connection, data, now)
            self.engine.ready()
            for leader, connection in list(self.ends.items()):
                answer = b"".join(connection.take()) + b"".join(connection.take_held() or [])
                if answer:
                    busy = True
                    leader.cloud.receive(answer, now)
                if connection.closing or (leader.cloud.connection is not None and leader.cloud.connection.closing):
                    rest = leader.take()
                    if rest:
                        self.engine.receive(connection, rest, now)
                    self.lose(leader, now)
                    busy = True


class Bystander:
    """A client that is no broker's: publishes and subscribes at the cloud."""

    def __init__(self, cloud: EngineCloud, name: str = "bystander", version: int = MQTT_5) -> None:
        from nearcast.mqtt.packets import Connect

        self.cloud = cloud
        self.version = version
        self.connection = cloud.engine.open(Peer("bystander"), self, 0.0)
        self.reader = PacketReader(version, 1_000_000)
        self.received: list[Publish] = []
        self._send(Connect(name, version))

    def _send(self, packet: Packet) -> None:
        self.cloud.engine.receive(self.connection, encode(packet, self.version), 0.0)
        self.cloud.settle()
        self.look()

    def look(self) -> list[Publish]:
        for packet in self.reader.feed(b"".join(self.connection.take()) + b"".join(self.connection.take_held() or [])):
            if isinstance(packet, Publish):
                self.received.append(packet)
        return self.received

    def subscribe(self, topic_filter: str) -> None:
        from nearcast.mqtt.packets import SubscriptionRequest

        self._send(Subscribe(1, [SubscriptionRequest(topic_filter, 0)]))

    def publish(self, topic: str, payload: bytes, retain: bool = False) -> None:
        self._send(Publish(topic, payload, 0, retain))


class ScriptedCloud:
    """A server that says what a test tells it to, and shows what it was told."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader
        self.version = MQTT_5 if leader.groups.cloud_version == "5" else MQTT_3_1_1
        self.reader = PacketReader(self.version, 1_000_000)

    def accept(self, now: float = 0.0, session_present: bool = False, connack: ConnAck | None = None) -> list[Packet]:
        """Take the connection; returns what came with and after CONNECT."""
        assert self.leader.cloud.wants_dial(now)
        self.reader = PacketReader(self.version, 1_000_000)
        self.leader.cloud.opened(self, now)
        before = self.heard()
        self.say(connack or ConnAck(0, session_present), now=now)
        return before + self.heard()

    def heard(self) -> list[Packet]:
        return list(self.reader.feed(self.leader.take()))

    def say(self, *packets: Packet, now: float = 0.0) -> None:
        for packet in packets:
            self.leader.cloud.receive(encode(packet, self.version), now)

    def grant(self, packets: list[Packet], now: float = 0.0) -> None:
        """Answer subscriptions."""
        for packet in packets:
            if isinstance(packet, Subscribe):
                self.say(SubAck(packet.packet_id, [one.qos for one in packet.subscriptions]), now=now)
            elif isinstance(packet, Unsubscribe):
                self.say(UnsubAck(packet.packet_id, [0] * len(packet.topic_filters)), now=now)


def only(packets: list[Packet], kind: type[Packet]) -> list[Packet]:
    return cast("list[Packet]", [packet for packet in packets if isinstance(packet, kind)])
