"""Answers to publishers that wait for others than this broker's disk: a replicated topic is acknowledged when its set has it.

Whoever takes such a publication on leaves a :class:`Pledge` with the effects, and settles it later. PUBACK and PUBREC wait for
it, and answers that come after them wait behind them, because a client gets them in the order of its messages [MQTT-4.6.0-2].
Nothing else of a connection waits: neither what it receives nor the answers to its other packets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nearcast.mqtt import reasons

if TYPE_CHECKING:
    from nearcast.mqtt.connection import Connection

_USER_PROPERTY = b"\x26\x00\x05index"


class Pledge:
    """That the messages of one publication will be kept, or refused, by ``keeper``, which settles its pledges in their order.
    ``first_index`` is the place of the first one in its topic's log, if that is known."""

    def __init__(self, keeper: str = "") -> None:
        self.keeper = keeper
        self.is_settled = False
        self.reason_code: int = reasons.SUCCESS
        self.first_index = 0
        #: Called once it is settled, for those that are no connection of a client.
        self.on_settled: Callable[[Pledge], None] | None = None
        self._waiting: list[Connection] = []

    def awaited_by(self, connection: Connection) -> None:
        """A connection has an answer that waits for this."""
        if connection not in self._waiting:
            self._waiting.append(connection)

    def settle(self, reason_code: int, first_index: int = 0) -> None:
        """The messages are kept, or they are not."""
        self.is_settled = True
        self.reason_code = reason_code
        self.first_index = first_index
        waiting, self._waiting = self._waiting, []
        for connection in waiting:
            connection.settle_answers()
        if self.on_settled is not None:
            self.on_settled(self)


class Answer:
    """PUBACKs or PUBRECs (``kind``: their first byte) for packets in their order. ``tells_index``: the pledge is theirs."""

    def __init__(
        self, kind: int, ids: list[bytes], reason_code: int, pledge: Pledge | None = None, *, tells_index: bool = True
    ) -> None:
        self.kind = kind
        self.ids = ids
        self.reason_code = reason_code
        self.pledge = pledge
        self.tells_index = tells_index

    def encode(self, is_v5: bool) -> bytes:
        """The packets, none if it only waits. 3.1.1 cannot say no: there the message is acknowledged and gone."""
        if not self.ids:
            return b""
        reason_code = self.reason_code
        pledge = self.pledge
        if pledge is not None and self.tells_index and reason_code == reasons.SUCCESS:
            reason_code = pledge.reason_code
        if not is_v5:
            lead = bytes([self.kind, 2])
            return lead + lead.join(self.ids)
        if pledge is not None and self.tells_index and pledge.first_index and reason_code == reasons.SUCCESS:
            return b"".join([self._indexed(packet_id, pledge.first_index + at) for at, packet_id in enumerate(self.ids)])
        if reason_code == reasons.SUCCESS:
            lead = bytes([self.kind, 2])
            return lead + lead.join(self.ids)
        lead = bytes([self.kind, 3])
        code = bytes([reason_code])
        return b"".join([lead + packet_id + code for packet_id in self.ids])

    def _indexed(self, packet_id: bytes, index: int) -> bytes:
        """With the index that the message has in its topic's log, as a user property."""
        digits = b"%d" % index
        user_property = _USER_PROPERTY + len(digits).to_bytes(2, "big") + digits
        body = packet_id + b"\x00" + bytes([len(user_property)]) + user_property
        return bytes([self.kind, len(body)]) + body
