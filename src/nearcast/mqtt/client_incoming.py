"""The client's incoming messages: QoS 2 identifiers, what waits for the application, receive maximum, topic aliases.

The identifier of a QoS 2 message is kept from its PUBLISH to its PUBREL, over any number of connections: a further PUBLISH
with it is a repetition [MQTT-4.3.3-10]. Where ``acknowledge_on_receipt`` is off, a message is held until the application took
it: its PUBACK or PUBREC has not left, and belongs to the present connection only. Nothing here encodes or sends: methods
return what the machine is to send.
"""

from __future__ import annotations

from nearcast.errors import RemoteProtocolError
from nearcast.mqtt import reasons
from nearcast.mqtt.client_events import ClientSettings
from nearcast.mqtt.packets import MQTT_5, PubAck, PubComp, Publish, PubRec, PubRel


class IncomingMessages:
    """See the module's essay."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._received: set[int] = set()
        self._held: dict[int, Publish] = {}
        self._held_qos_1 = 0
        self._aliases: dict[int, str] = {}

    def opened(self) -> None:
        """A new connection begins."""
        self._aliases.clear()
        # The server sends again what it heard nothing about, so answers to the old connection have no meaning on this one.
        self._held.clear()
        self._held_qos_1 = 0

    def restart(self) -> None:
        """The server kept nothing: the identifiers it uses from now on are new ones."""
        self._received.clear()

    def receive(self, packet: Publish) -> bool:
        """Take in a PUBLISH and complete its topic; returns whether the application is to see it. Then ask :meth:`answer`."""
        if packet.properties is not None and packet.properties.topic_alias is not None:
            self._resolve_alias(packet, packet.properties.topic_alias)
        elif not packet.topic:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "PUBLISH with neither topic nor topic alias")
        if packet.qos == 0:
            return True
        if packet.qos == 1:
            self._check_receive_maximum()
            if not self._settings.acknowledge_on_receipt and packet.packet_id not in self._held:
                self._held[packet.packet_id] = packet
                self._held_qos_1 += 1
            return True
        if packet.packet_id in self._received:
            return False
        self._check_receive_maximum()
        self._received.add(packet.packet_id)
        if not self._settings.acknowledge_on_receipt:
            self._held[packet.packet_id] = packet
        return True

    def answer(self, packet: Publish) -> PubAck | PubRec | None:
        """What the server is to hear about a received PUBLISH now; nothing as long as it is held."""
        if packet.qos == 0 or packet.packet_id in self._held:
            return None
        return PubAck(packet.packet_id) if packet.qos == 1 else PubRec(packet.packet_id)

    def acknowledge(self, message: Publish) -> PubAck | PubRec | None:
        """The application took a message; returns its answer, if it was held on this connection."""
        if message.qos == 0 or self._held.get(message.packet_id) is not message:
            return None
        del self._held[message.packet_id]
        if message.qos == 1:
            self._held_qos_1 -= 1
        return self.answer(message)

    def release(self, packet: PubRel) -> PubComp:
        """The end of a QoS 2 message."""
        # A PUBREL for an identifier we do not know gets its PUBCOMP too, or the server would repeat it for ever.
        known = packet.packet_id in self._received
        self._received.discard(packet.packet_id)
        return PubComp(packet.packet_id, reasons.SUCCESS if known else reasons.PACKET_IDENTIFIER_NOT_FOUND)

    def _check_receive_maximum(self) -> None:
        # A 3.1.1 server was not told: its own window is what bounds it.
        if self._settings.version != MQTT_5 or not self._settings.enforce_receive_maximum:
            return
        if len(self._received) + self._held_qos_1 >= self._settings.receive_maximum:
            raise RemoteProtocolError(reasons.RECEIVE_MAXIMUM_EXCEEDED, "more unacknowledged messages than we allow")

    def _resolve_alias(self, packet: Publish, alias: int) -> None:
        if alias == 0 or alias > self._settings.topic_alias_maximum:
            raise RemoteProtocolError(reasons.TOPIC_ALIAS_INVALID, f"topic alias {alias} was not offered")
        if packet.topic:
            self._aliases[alias] = packet.topic
            return
        known = self._aliases.get(alias)
        if known is None:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"topic alias {alias} was never defined")
        packet.topic = known
