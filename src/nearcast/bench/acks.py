"""PUBACK, PUBREC, PUBREL and PUBCOMP in runs, and the line of messages that wait for them.

Owns acknowledgement bookkeeping for one publisher. An acknowledgement without reason code is four bytes, so a run of them is
a two-column array. Knows nothing of sockets.
"""

from __future__ import annotations

import struct

import numpy as np

from nearcast.bench.traffic import PACKET_IDS, PacketIds, packet_end, true_prefix

PUBACK = 0x40
PUBREC = 0x50
PUBREL = 0x62
PUBCOMP = 0x70

ACK_BYTES = 4
_STEPS = np.arange(PACKET_IDS + 1, dtype=np.int64)
# A run shorter than this is cheaper to take packet by packet than through NumPy.
MIN_RUN = 4


def ack_run(first_byte: int, ids: PacketIds) -> bytes:
    """Acknowledgements of one kind for all of ``ids``."""
    words = np.empty((len(ids), 2), dtype=">u2")
    words[:, 0] = first_byte << 8 | 2
    words[:, 1] = ids
    return words.tobytes()


def regular_run(first_byte: int, place: int, count: int) -> bytes:
    """Acknowledgements for ``count`` consecutive identifiers from ``place`` + 1 on."""
    return _REGULAR[first_byte][place * ACK_BYTES : (place + count) * ACK_BYTES]


def one_ack(first_byte: int, packet_id: int) -> bytes:
    return struct.pack(">BBH", first_byte, 2, packet_id)


def find_run(buffer: bytearray, position: int, end: int) -> PacketIds | None:
    """Identifiers of the equal four-byte acknowledgements that begin at ``position``; None when they are not worth a run."""
    last = position + (MIN_RUN - 1) * ACK_BYTES
    if last + ACK_BYTES > end or buffer[last] != buffer[position] or buffer[position + 1] != 2:
        return None
    words = np.frombuffer(buffer, ">u2", (end - position) // ACK_BYTES * 2, position).reshape(-1, 2)
    count = true_prefix(words[:, 0] == words[0, 0])
    ids: PacketIds = words[:count, 1].astype(np.uint16)
    return ids


#: Acknowledgements of every kind for all identifiers in order: what a regular run looks like, and how one is answered.
_ALL_IDS = np.arange(1, PACKET_IDS + 1).astype(np.uint16)
_REGULAR = {kind: ack_run(kind, _ALL_IDS) for kind in (PUBACK, PUBREC, PUBREL, PUBCOMP)}


class AckLine:
    """Messages in the order sent, and how far one kind of acknowledgement has come.

    The protocol asks for acknowledgements in order [MQTT-4.6.0-2]; one out of order is counted in ``disorder`` but taken.
    """

    def __init__(self) -> None:
        self.done = 0
        self.unexpected = 0
        self.disorder = 0
        self._early: set[int] = set()

    @property
    def acknowledged(self) -> int:
        return self.done + len(self._early)

    def take_regular(self, buffer: bytearray, position: int, end: int, sent: int) -> int:
        """Take acknowledgements of one kind that come exactly in order, by comparing bytes; returns how many."""
        place = self.done % PACKET_IDS
        count = min((end - position) // ACK_BYTES, sent - self.done, PACKET_IDS - place)
        if count < MIN_RUN or self._early:
            return 0
        kind = buffer[position]
        kinds = buffer[position : position + count * ACK_BYTES : ACK_BYTES]
        count -= len(kinds.lstrip(bytes((kind,))))
        if buffer[position : position + count * ACK_BYTES] != regular_run(kind, place, count):
            return 0
        self.done += count
        return count

    def take_run(self, ids: PacketIds, sent: int) -> None:
        """Acknowledgements for ``ids`` arrived, when ``sent`` messages have been sent."""
        count = len(ids)
        if not self._early and self.done + count <= sent:
            expected = (_STEPS[:count] + self.done) % PACKET_IDS + 1
            if true_prefix(ids == expected) == count:
                self.done += count
                return
        for packet_id in ids.tolist():
            self.take(packet_id, sent)

    def take(self, packet_id: int, sent: int) -> None:
        sequence = self.done + (packet_id - 1 - self.done) % PACKET_IDS
        if sequence >= sent or sequence in self._early:
            self.unexpected += 1
        elif sequence != self.done:
            self.disorder += 1
            self._early.add(sequence)
        else:
            self.done += 1
            while self.done in self._early:
                self._early.remove(self.done)
                self.done += 1


class PublisherAcks:
    """What a broker answers one publisher: parsed here, and answered in ``output`` (PUBREL for PUBREC)."""

    def __init__(self, qos: int) -> None:
        self._qos = qos
        self._received = AckLine()
        self._completed = AckLine()
        self.output = bytearray()
        self.sent = 0
        self.refused = 0
        self.unexpected_packets = 0

    @property
    def in_flight(self) -> int:
        return self.sent - self._completed.acknowledged

    @property
    def unexpected(self) -> int:
        return self.unexpected_packets + self._received.unexpected + self._completed.unexpected

    @property
    def disorder(self) -> int:
        return self._received.disorder + self._completed.disorder

    def feed(self, buffer: bytearray, position: int, end: int) -> int:
        """Parse what is complete; returns where the incomplete rest begins."""
        while position < end:
            first_byte = buffer[position]
            count = self._take_regular(first_byte, buffer, position, end)
            if count:
                position += count * ACK_BYTES
                continue
            ids = find_run(buffer, position, end)
            if ids is not None and first_byte in (PUBACK, PUBREC, PUBCOMP):
                self._take_run(first_byte, ids)
                position += len(ids) * ACK_BYTES
                continue
            body, next_position = packet_end(buffer, position, end)
            if not next_position:
                break
            self._take_one(first_byte, bytes(buffer[body:next_position]))
            position = next_position
        return position

    def _take_regular(self, first_byte: int, buffer: bytearray, position: int, end: int) -> int:
        if first_byte == PUBREC and self._qos == 2:
            place = self._received.done % PACKET_IDS
            count = self._received.take_regular(buffer, position, end, self.sent)
            self.output += regular_run(PUBREL, place, count)
            return count
        if first_byte == (PUBACK if self._qos == 1 else PUBCOMP) and self._qos:
            return self._completed.take_regular(buffer, position, end, self.sent)
        return 0

    def _take_run(self, first_byte: int, ids: PacketIds) -> None:
        if first_byte == PUBREC and self._qos == 2:
            self._received.take_run(ids, self.sent)
            self.output += ack_run(PUBREL, ids)
        elif first_byte == (PUBACK if self._qos == 1 else PUBCOMP) and self._qos:
            self._completed.take_run(ids, self.sent)
        else:
            self.unexpected_packets += len(ids)

    def _take_one(self, first_byte: int, body: bytes) -> None:
        if first_byte not in (PUBACK, PUBREC, PUBCOMP) or not self._qos:
            self.unexpected_packets += 1
            return
        packet_id = int.from_bytes(body[:2], "big")
        refused = len(body) > 2 and body[2] >= 0x80
        self.refused += refused
        if first_byte == PUBREC and self._qos == 2:
            self._received.take(packet_id, self.sent)
            if refused:  # an error in PUBREC ends the exchange [MQTT-4.3.3-4]
                self._completed.take(packet_id, self.sent)
            else:
                self.output += one_ack(PUBREL, packet_id)
        elif first_byte == (PUBACK if self._qos == 1 else PUBCOMP):
            self._completed.take(packet_id, self.sent)
        else:
            self.unexpected_packets += 1
