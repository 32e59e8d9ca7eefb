"""What of owned topics is under way from a gateway to one broker, until the broker has it: the gateway's end of
:mod:`nearcast.fabric.branches`.

Every OWNED_PUBLISH has a number; OWNED_ACK answers all up to one, and names those that were refused. What is not answered when
the link breaks is sent again another way, as MQTT allows at QoS 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from nearcast.fabric import frames
from nearcast.fabric.direct_clients import Use
from nearcast.fabric.frames import frame
from nearcast.fabric.links import Link
from nearcast.fabric.mirrors import DUPLICATE, packet_end
from nearcast.mqtt.records import Fields, blob, number, text

if TYPE_CHECKING:
    from nearcast.fabric.tunnels import Tunnel

WINDOW_BYTES: Final = 4_194_304
"""Bytes under way to one broker without an answer, of all clients together. Too low makes throughput follow the distance."""

PIECE: Final = 0
"""The number of a frame that only has a piece of what the next one is about."""

PIECE_BYTES: Final = 262_144

BY_HOME: Final = 0
"""The code of messages that the broker leaves to the client's home broker, which says what is wrong with them."""

NOT_OWNED: Final = 1
"""The same, because nobody owns their topic as far as that broker knows: it is of another class now."""


class Sent:
    """One OWNED_PUBLISH without an answer: the PUBLISHes at QoS 1 in it, and their identifiers."""

    def __init__(self, tunnel: Tunnel, topic: bytes, packets: bytes, packet_ids: list[int]) -> None:
        self.tunnel = tunnel
        self.topic = topic
        self.packets = packets
        self.packet_ids = packet_ids
        self.size = len(packets)

    def again(self) -> bytes:
        """The PUBLISHes that are to be answered, marked as sent again."""
        parts: list[bytes] = []
        position: i64 = 0
        end: i64 = len(self.packets)
        while position < end:
            stop = packet_end(self.packets, position, end)
            first = self.packets[position]
            if first & 6:
                parts.append(bytes((first | DUPLICATE,)) + self.packets[position + 1 : stop])
            position = stop
        return b"".join(parts)


class DirectLine:
    """See the module. ``waiting`` are clients with more to send than there is room for."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._number = 0
        self._outstanding_bytes = 0
        self.unanswered: dict[int, Sent] = {}
        self.waiting: dict[Tunnel, None] = {}

    def has_room(self) -> bool:
        return self._outstanding_bytes < WINDOW_BYTES and not self._link.connection.congested

    def awaits(self, tunnel: Tunnel, topic: bytes) -> bool:
        """Whether messages of a client to a topic are under way here that will be answered."""
        asked = [sent for sent in self.unanswered.values() if sent.tunnel is tunnel and sent.packet_ids]
        return topic in [sent.topic for sent in asked]

    def publish(self, sent: Sent, epoch: int, username: str | None, version: int, latency_ms: float, mark: Use) -> None:
        """Send one client's packets of one topic, which the broker owns since ``epoch``."""
        packets = sent.packets
        while len(packets) > PIECE_BYTES:
            self._link.send(frame(frames.OWNED_PUBLISH, number(PIECE), packets[:PIECE_BYTES]))
            packets = packets[PIECE_BYTES:]
        self._number += 1
        self.unanswered[self._number] = sent
        self._outstanding_bytes += sent.size
        self._link.send(
            frame(
                frames.OWNED_PUBLISH,
                number(self._number),
                blob(sent.tunnel.client_id.encode("utf-8")),
                text(username),
                number(version),
                number(max(0, int(latency_ms * 1e3))),
                number(epoch),
                blob(mark.behind.encode("utf-8")),
                number(mark.closing),
                packets,
            )
        )
        if not sent.packet_ids:
            sent.packets = b""  # only its size counts from here on

    def close_source(self, topic: bytes, epoch: int, owner: str, closing: int, channel: int = 0) -> None:
        """Nothing more of a topic comes this way from those who will name ``closing`` to its owner of ``epoch``; ``channel``
        is the client's, if it is a single one."""
        fields = (blob(topic), number(epoch), blob(owner.encode("utf-8")), number(closing), number(channel))
        self._link.send(frame(frames.SOURCE_CLOSED, *fields))

    def answered(self, fields: Fields) -> list[tuple[Sent, int]]:
        """OWNED_ACK: what is answered now, in order, each with a reason code; -1: it was taken."""
        through = fields.number()
        refused: dict[int, int] = {}
        for _ in range(fields.number()):
            refused_number = fields.number()
            refused[refused_number] = fields.number()
        if through > self._number:
            raise ValueError("an answer to messages that were never sent")
        done: list[tuple[Sent, int]] = []
        while self.unanswered:
            first = next(iter(self.unanswered))
            if first > through:
                break
            sent = self.unanswered.pop(first)
            self._outstanding_bytes -= sent.size
            done.append((sent, refused.get(first, -1)))
        return done

    def take_waiting(self) -> list[Tunnel]:
        """Those that waited for room, if there is some."""
        if not self.waiting or not self.has_room():
            return []
        waiting = list(self.waiting)
        self.waiting.clear()
        return waiting
