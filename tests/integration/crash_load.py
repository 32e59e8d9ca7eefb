"""Publishers and subscribers with sessions of their own, for a broker that is killed under them.

They keep the protocol strictly and independently of our client library: state per packet identifier survives a lost
connection, and what was not acknowledged is sent again with DUP and the same identifier, in order [MQTT-4.4.0-1]. Every
message carries its publisher and number, so that a subscriber can tell loss, duplicates and disorder. One thread drives all.
"""

from __future__ import annotations

import dataclasses
import random
import selectors
import socket
import time
from collections.abc import Callable, Sequence

from nearcast.mqtt.codec import PacketReader, encode
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
)

PATIENCE_SECONDS = 60.0
FOR_EVER = 0xFFFF_FFFF


class Party:
    """A client with a session that outlives its connections. ``wanted`` says whether it should be connected."""

    def __init__(self, name: str, version: int, rng: random.Random) -> None:
        self.name = name
        self.version = version
        self.rng = rng
        self.wanted = True
        self.established = False
        self.connected = False
        self.socket: socket.socket | None = None
        self._reader = PacketReader(version, 1 << 20)
        self._unsent = b""

    def open(self, port: int) -> None:
        sock = socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)
        sock.setblocking(False)
        self.socket = sock
        self._reader = PacketReader(self.version, 1 << 20)
        self._unsent = b""
        properties = self.connect_properties() if self.version == MQTT_5 else None
        self.send(Connect(self.name, self.version, clean_start=False, properties=properties))

    def connect_properties(self) -> Properties:
        return Properties(session_expiry_interval=FOR_EVER)

    def lose(self) -> None:
        """The connection is gone; the session's state stays."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        self.connected = False

    def send(self, *packets: Packet) -> None:
        self._unsent += b"".join(encode(packet, self.version) for packet in packets)

    def transmit(self) -> None:
        """Give the kernel what it takes."""
        if self.socket is not None and self._unsent:
            try:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            except BlockingIOError:
                pass
            except OSError:
                self.lose()

    def read(self) -> None:
        """Handle whatever has arrived."""
        while self.socket is not None:
            try:
                data = self.socket.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.lose()
                return
            for packet in self._reader.feed(data):
                if isinstance(packet, ConnAck):
                    assert packet.reason_code == 0, packet
                    assert packet.session_present == self.established, f"the session of {self.name} is lost: {packet}"
                    self.established = True
                    self.connected = True
                    self.resume()
                else:
                    self.handle(packet)
            assert self._reader.failure is None, self._reader.failure

    def resume(self) -> None:
        """CONNACK came."""

    def handle(self, packet: Packet) -> None:
        raise NotImplementedError

    def act(self) -> None:
        """Do something of one's own."""


class Publisher(Party):
    """Publishes ``total`` numbered messages at QoS 1 and as many at QoS 2, and now and then a retained one.

    Half of the publishers send packets of one size, which the broker handles many at a time; the others vary.
    """

    WINDOW = 40

    def __init__(self, name: str, version: int, rng: random.Random, total: int, same_size: bool) -> None:
        super().__init__(name, version, rng)
        self.total = total
        self.same_size = same_size
        self.sent = {1: 0, 2: 0}
        self.retained_sent = 0
        self.retained_acknowledged = 0
        self.acknowledged = 0
        self.sent_again = 0
        # What the broker has not finished, by identifier, in the order of sending: a Publish, or a PubRel once PUBREC came.
        self.unfinished: dict[int, Publish | PubRel] = {}
        self._next_id = 1

    @property
    def done(self) -> bool:
        return not self.unfinished and self.sent[1] == self.sent[2] == self.total

    def resume(self) -> None:
        for packet in self.unfinished.values():
            self.sent_again += 1
            self.send(dataclasses.replace(packet, dup=True) if isinstance(packet, Publish) else packet)

    def act(self) -> None:
        if not self.connected or len(self.unfinished) > self.rng.randrange(self.WINDOW):
            return
        qos = self.rng.choice((1, 2))
        for _ in range(self.rng.randrange(1, self.WINDOW - len(self.unfinished) + 1)):
            if self.sent[qos] == self.total:
                qos = 3 - qos
            if self.sent[qos] < self.total:
                self._publish(f"load/{self.name}/{qos}", self._payload(self.sent[qos]), qos, False)
                self.sent[qos] += 1
        if self.rng.random() < 0.5 and len(self.unfinished) < self.WINDOW and not self.done:
            # Large: they fill the journal without adding to the state, so that generations roll.
            self.retained_sent += 1
            self._publish(f"kept/{self.name}", b"%-8000d" % self.retained_sent, 1, True)

    def _payload(self, number: int) -> bytes:
        return b"%06d" % number + b"." * (100 if self.same_size else self.rng.randrange(800))

    def _publish(self, topic: str, payload: bytes, qos: int, retain: bool) -> None:
        while self._next_id in self.unfinished:
            self._next_id = self._next_id % 65_535 + 1
        packet = Publish(topic, payload, qos, retain, False, self._next_id)
        self._next_id = self._next_id % 65_535 + 1
        self.unfinished[packet.packet_id] = packet
        self.send(packet)

    def handle(self, packet: Packet) -> None:
        if isinstance(packet, PubAck):
            assert packet.reason_code < 0x80, packet
            message = self.unfinished.pop(packet.packet_id)
            assert isinstance(message, Publish)
            assert message.qos == 1
            if message.retain:
                self.retained_acknowledged = int(message.payload)
            self.acknowledged += 1
        elif isinstance(packet, PubRec):
            assert packet.reason_code < 0x80, packet
            # At the end: PUBRELs go in the order of PUBRECs [MQTT-4.6.0-4].
            known = self.unfinished.pop(packet.packet_id)
            assert isinstance(known, PubRel) or known.qos == 2
            self.unfinished[packet.packet_id] = PubRel(packet.packet_id)
            self.send(PubRel(packet.packet_id))
        elif isinstance(packet, PubComp):
            assert isinstance(self.unfinished.pop(packet.packet_id), PubRel)
            self.acknowledged += 1
        else:
            raise AssertionError(packet)


class Subscriber(Party):
    """Takes every message of the load, or of the publishers it ``takes``.

    Acknowledges late, in order, and forgets to when the connection goes."""

    def __init__(
        self,
        name: str,
        version: int,
        rng: random.Random,
        *,
        window: int | None = None,
        restless: bool = False,
        takes: Sequence[str] = (),
    ) -> None:
        super().__init__(name, version, rng)
        self.window = window
        self.restless = restless
        self.takes = takes
        self.hurry = False
        self.subscribed = False
        self.ended = False
        self.received: dict[str, list[int]] = {}
        self.count = 0
        self.redelivered = 0
        # Identifiers of QoS 2 messages between our taking them and the broker's PUBREL, and what came under them.
        self.unreleased: dict[int, bytes] = {}
        self._answers: list[Packet] = []

    def connect_properties(self) -> Properties:
        return Properties(session_expiry_interval=FOR_EVER, receive_maximum=self.window)

    def resume(self) -> None:
        if not self.subscribed:
            filters = [*(f"load/{name}/#" for name in self.takes), "load/end"] if self.takes else ["load/#"]
            self.send(Subscribe(1, [SubscriptionRequest(topic_filter, 2) for topic_filter in filters]))

    def lose(self) -> None:
        super().lose()
        self._answers.clear()

    def handle(self, packet: Packet) -> None:
        if isinstance(packet, SubAck):
            assert set(packet.reason_codes) == {2}
            self.subscribed = True
        elif isinstance(packet, Publish) and packet.qos == 1:
            self._take(packet)
            self._answers.append(PubAck(packet.packet_id))
        elif isinstance(packet, Publish):
            assert packet.qos == 2
            known = self.unreleased.get(packet.packet_id)
            if known is None:
                self.unreleased[packet.packet_id] = packet.payload
                self._take(packet)
            else:
                assert packet.dup, "the same identifier again without DUP"
                assert packet.payload == known, "another message under an identifier that is in use"
                self.redelivered += 1
            self._answers.append(PubRec(packet.packet_id))
        elif isinstance(packet, PubRel):
            self.unreleased.pop(packet.packet_id, None)
            self._answers.append(PubComp(packet.packet_id))
        else:
            raise AssertionError(packet)

    def _take(self, packet: Publish) -> None:
        self.count += 1
        if packet.topic == "load/end":
            self.ended = True
        else:
            self.received.setdefault(packet.topic, []).append(int(packet.payload[:6]))

    def act(self) -> None:
        if not self.connected:
            return
        if self.restless and not self.hurry and self.rng.random() < 0.01:
            self.lose()
            return
        if self._answers and (self.hurry or self.rng.random() < 0.7):
            count = len(self._answers) if self.hurry else self.rng.randrange(1, len(self._answers) + 1)
            self.send(*self._answers[:count])
            del self._answers[:count]

    def leave(self) -> None:
        """Go away with the session kept."""
        self.send(Disconnect())
        self.transmit()
        self.lose()
        self.wanted = False


def drive(parties: Sequence[Party], port: int, until: Callable[[], bool], what: str) -> None:
    """Run the parties until a condition holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not until():
        assert time.monotonic() < deadline, f"{what} did not happen within {PATIENCE_SECONDS:g} s"
        with selectors.DefaultSelector() as selector:
            for party in parties:
                if party.wanted and party.socket is None:
                    party.open(port)
                party.act()
                party.transmit()
                if party.socket is not None:
                    selector.register(party.socket, selectors.EVENT_READ, party)
            for key, _ in selector.select(0.005):
                key.data.read()
