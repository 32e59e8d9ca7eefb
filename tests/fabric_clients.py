"""MQTT clients for :mod:`tests.fabric_harness`: they speak the protocol, acknowledge what they get, and remember it."""

from __future__ import annotations

from nearcast.mqtt.codec import decode, encode
from nearcast.mqtt.packets import (
    MQTT_5,
    ConnAck,
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
    Unsubscribe,
    Will,
)
from nearcast.mqtt.wire import split_packets
from tests.fabric_harness import Node


class Client:
    """A client at one broker. ``acknowledges`` answers QoS 1 and 2 as it should; without, messages stay in flight."""

    def __init__(
        self,
        node: Node,
        client_id: str,
        *,
        version: int = MQTT_5,
        clean_start: bool = True,
        expiry: int = 0,
        username: str | None = None,
        will: Will | None = None,
        acknowledges: bool = True,
    ) -> None:
        self.node = node
        self.client_id = client_id
        self.version = version
        self.acknowledges = acknowledges
        self.packets: list[Packet] = []
        self._next_id = 1
        self._end = node.client()
        self._partial = b""
        properties = Properties(session_expiry_interval=expiry) if version == MQTT_5 and expiry else None
        self.send(
            Connect(
                version=version,
                client_id=client_id,
                clean_start=clean_start,
                keep_alive=0,
                username=username,
                will=will,
                properties=properties,
            )
        )

    def send(self, packet: Packet) -> None:
        self.node.feed(self._end, encode(packet, self.version))
        self.read()

    def subscribe(self, topic_filter: str, qos: int = 2, **options: int) -> None:
        self.send(Subscribe(self._id(), [SubscriptionRequest(topic_filter, qos, **options)]))  # type: ignore[arg-type]

    def unsubscribe(self, topic_filter: str) -> None:
        self.send(Unsubscribe(self._id(), [topic_filter]))

    def publish(
        self, topic: str, payload: bytes, qos: int = 1, retain: bool = False, properties: Properties | None = None
    ) -> int:
        """Returns the packet identifier."""
        packet_id = self._id() if qos else 0
        self.send(Publish(topic, payload, qos, retain, packet_id=packet_id, properties=properties))
        if qos == 2:
            self.send(PubRel(packet_id))
        return packet_id

    def disconnect(self) -> None:
        self.send(Disconnect())

    def vanish(self) -> None:
        """The transport breaks."""
        ours = self._end.other
        assert ours is not None
        assert ours.connection is not None
        self.node.engine.lose(ours.connection, self.node.mesh.now)
        self.node.flush()

    @property
    def closed(self) -> bool:
        ours = self._end.other
        return ours is not None and ours.closed

    def read(self) -> None:
        """Take in what arrived, and answer it."""
        end = self._end
        while end.inbox:
            end.received += end.inbox.popleft()
        data = bytes(end.received)
        end.received.clear()
        answers: list[Packet] = []
        for raw in split_packets(data) if data else []:
            body_at = 2
            while raw[body_at - 1] >= 0x80:
                body_at += 1
            packet = decode(raw[0], raw[body_at:], self.version)
            self.packets.append(packet)
            if self.acknowledges:
                if isinstance(packet, Publish) and packet.qos == 1:
                    answers.append(PubAck(packet.packet_id))
                elif isinstance(packet, Publish) and packet.qos == 2:
                    answers.append(PubRec(packet.packet_id))
                elif isinstance(packet, PubRel):
                    answers.append(PubComp(packet.packet_id))
        for answer in answers:
            self.send(answer)

    @property
    def messages(self) -> list[Publish]:
        self.read()
        return [packet for packet in self.packets if isinstance(packet, Publish)]

    @property
    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages]

    @property
    def connack(self) -> ConnAck | None:
        self.read()
        return next((packet for packet in self.packets if isinstance(packet, ConnAck)), None)

    @property
    def subacks(self) -> list[SubAck]:
        self.read()
        return [packet for packet in self.packets if isinstance(packet, SubAck)]

    @property
    def goodbye(self) -> Disconnect | None:
        """The broker's DISCONNECT."""
        self.read()
        return next((packet for packet in self.packets if isinstance(packet, Disconnect)), None)

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id - 1
