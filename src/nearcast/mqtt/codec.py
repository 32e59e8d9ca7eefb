"""Packets to bytes and back, for MQTT 3.1, 3.1.1 and 5.0 (chapters 2 and 3 of each).

Owns every rule that one packet alone can break: reserved bits, lengths, identifiers, ranges, reason codes that a packet type
does not have. Refuses to know what needs the connection or the session: order of packets, direction, agreed maxima, whether a
topic filter is one that can be subscribed to (the answer to that may be a SUBACK, so the engine decides), whether an empty
client identifier is acceptable, and whether an AUTH names the method of its CONNECT.

``decode`` raises ``RemoteProtocolError`` and nothing else, with 0x81 for what cannot be parsed and 0x82 for what the protocol
forbids, unless the specification names a code of its own. ``encode`` raises ``LocalProtocolError`` for what ``decode`` would
refuse, so whatever it returns can be read back.

Reason codes are those of MQTT 5 in every version: a 3.x CONNACK's return code is translated on both ways, a 3.x SUBACK knows
only failure (0x80), and what 3.x has no byte for is not sent.
"""

from __future__ import annotations

from nearcast.errors import RemoteProtocolError
from nearcast.mqtt.decoding import REASON_CODES, claimed_version, decode
from nearcast.mqtt.encoding import encode
from nearcast.mqtt.packets import Connect, Packet
from nearcast.mqtt.wire import MAX_PACKET_BYTES, FrameReader, encode_varint

__all__ = ["REASON_CODES", "FrameReader", "PacketReader", "claimed_version", "decode", "encode", "encode_varint"]


class PacketReader:
    """Bytes in, packets out: a :class:`FrameReader` and ``decode``, with the same promises about chunks and faults.

    ``version`` becomes that of a CONNECT as soon as one is read, so that a server's side can start with any. ``by_server``
    says that a client reads what its server sent.
    """

    def __init__(self, version: int, max_packet_bytes: int = MAX_PACKET_BYTES, by_server: bool = False) -> None:
        self.version = version
        self._by_server = by_server
        self.failure: RemoteProtocolError | None = None
        self._frames = FrameReader(max_packet_bytes)

    def feed(self, data: bytes) -> list[Packet]:
        """The packets that are complete now. What precedes a fault is returned first; the next call raises."""
        if self.failure is not None:
            raise self.failure
        packets: list[Packet] = []
        try:
            for first_byte, body in self._frames.feed(data):
                packet = decode(first_byte, body, self.version, self._by_server)
                if isinstance(packet, Connect):
                    self.version = packet.version
                packets.append(packet)
            self.failure = self._frames.failure
        except RemoteProtocolError as failure:
            self.failure = failure
            if not packets:
                raise
        return packets
