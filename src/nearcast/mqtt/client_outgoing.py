"""The client's outgoing messages: identifiers, window, waiting queue, what a new connection must resend.

A message is in exactly one of four places, and moves only downwards:

    waiting ──► in flight (PUBLISH sent) ──► releasing (QoS 2: PUBREC came, PUBREL sent) ──► completed
                     ▲
       unsent ───────┘   (in flight before a reconnect, not yet sent again on this connection)

``quota`` is the send quota of MQTT 5.0 section 4.9: it starts at the server's Receive Maximum for each connection, each
PUBLISH takes one, each PUBACK, PUBCOMP and failing PUBREC gives one back. Nothing here encodes or sends: the machine asks
:meth:`OutgoingMessages.next_to_send` until it gives nothing, and hands in what the server answers.
"""

from __future__ import annotations

from collections import deque

from nearcast.errors import LocalProtocolError, RemoteProtocolError
from nearcast.mqtt import reasons
from nearcast.mqtt.client_events import PublishCompleted, reason_string
from nearcast.mqtt.packets import PubAck, PubComp, Publish, PubRec, PubRel


class Outgoing:
    """One QoS 1 or 2 message on its way, and the token by which its publisher knows it."""

    def __init__(self, token: int, publish: Publish) -> None:
        self.token = token
        self.publish = publish


class PacketIdentifiers:
    """Packet identifiers from 1 on in use by this side: shared by PUBLISH, SUBSCRIBE and UNSUBSCRIBE (section 2.2.1)."""

    def __init__(self, highest: int = 65_535) -> None:
        self._in_use: set[int] = set()
        self._highest = highest
        self._last = 0

    def take(self) -> int:
        highest = self._highest
        if len(self._in_use) >= highest:
            raise LocalProtocolError(f"all {highest:,} packet identifiers are in use: wait for acknowledgements")
        candidate = self._last
        while True:
            candidate = candidate + 1 if candidate < highest else 1
            if candidate not in self._in_use:
                break
        self._last = candidate
        self._in_use.add(candidate)
        return candidate

    def give_back(self, packet_id: int) -> None:
        self._in_use.discard(packet_id)


class OutgoingMessages:
    """See the module's essay."""

    def __init__(self, identifiers: PacketIdentifiers, max_waiting: int) -> None:
        self._identifiers = identifiers
        self._max_waiting = max_waiting
        self._waiting: deque[Outgoing] = deque()
        self._unsent: deque[int] = deque()
        # Both keep the order in which their packets were first sent: section 4.6 asks for it when resending.
        self._in_flight: dict[int, Outgoing] = {}
        self._releasing: dict[int, Outgoing] = {}
        self._window = 0
        self._quota = 0

    def __len__(self) -> int:
        """Messages not yet completed."""
        return len(self._waiting) + len(self._in_flight) + len(self._releasing)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._max_waiting

    def add(self, outgoing: Outgoing) -> None:
        if len(self._waiting) >= self._max_waiting:
            raise LocalProtocolError(
                f"{self._max_waiting} publishes already wait for acknowledgements: wait for some to complete"
            )
        self._waiting.append(outgoing)

    def next_to_send(self) -> Outgoing | None:
        """The next PUBLISH the quota allows, moved to in flight and with its identifier set."""
        if self._quota <= 0:
            return None
        while self._unsent:
            packet_id = self._unsent.popleft()
            resent = self._in_flight.get(packet_id)
            if resent is not None:
                self._quota -= 1
                return resent
        if not self._waiting:
            return None
        outgoing = self._waiting.popleft()
        outgoing.publish.packet_id = self._identifiers.take()
        self._in_flight[outgoing.publish.packet_id] = outgoing
        self._quota -= 1
        return outgoing

    def opened(self, window: int) -> None:
        """A connection can carry publishes now; ``window`` is what may be unacknowledged on it."""
        self._window = window
        self._quota = window

    def closed(self) -> None:
        """The connection is gone: nothing may be sent until the next."""
        self._quota = 0

    def resume(self) -> list[PubRel]:
        """The server kept the session: in-flight messages go out again as duplicates, through the quota.

        Returns the PUBRELs that must be sent again, in the order their PUBRECs came [MQTT-4.6.0-4]."""
        # What is releasing still occupies the server's window until its PUBCOMP gives the place back.
        self._quota = max(0, self._window - len(self._releasing))
        self._unsent.clear()
        for packet_id, outgoing in self._in_flight.items():
            outgoing.publish.dup = True
            self._unsent.append(packet_id)
        return [PubRel(packet_id) for packet_id in self._releasing]

    def restart(self) -> list[PublishCompleted]:
        """The server kept nothing: in-flight messages become new ones, ahead of those that wait.

        Returns the ends of those that were releasing. The server took them over before it lost the session, so they count as
        delivered: sending them again would deliver them twice."""
        finished = [PublishCompleted(outgoing.token, reasons.SUCCESS, None) for outgoing in self._releasing.values()]
        for packet_id in self._releasing:
            self._identifiers.give_back(packet_id)
        self._releasing.clear()
        for packet_id, outgoing in reversed(self._in_flight.items()):
            self._identifiers.give_back(packet_id)
            outgoing.publish.dup = False
            outgoing.publish.packet_id = 0
            self._waiting.appendleft(outgoing)
        self._in_flight.clear()
        self._unsent.clear()
        return finished

    def acknowledged(self, packet: PubAck) -> PublishCompleted | None:
        """PUBACK: the end of a QoS 1 message. ``None`` when it answers what an earlier connection sent."""
        outgoing = self._in_flight.get(packet.packet_id)
        if outgoing is None:
            return None
        if outgoing.publish.qos != 1:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "PUBACK for a QoS 2 message")
        self.withdraw(packet.packet_id)
        return PublishCompleted(outgoing.token, packet.reason_code, reason_string(packet.properties))

    def received(self, packet: PubRec) -> PubRel | PublishCompleted | None:
        """PUBREC: the server has the message and only the identifier is still to be released, or it refuses the message."""
        packet_id = packet.packet_id
        outgoing = self._in_flight.get(packet_id)
        if outgoing is None:
            if packet.reason_code >= 0x80:
                return None
            known = packet_id in self._releasing
            return PubRel(packet_id, reasons.SUCCESS if known else reasons.PACKET_IDENTIFIER_NOT_FOUND)
        if outgoing.publish.qos != 2:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "PUBREC for a QoS 1 message")
        if packet.reason_code >= 0x80:
            self.withdraw(packet_id)
            return PublishCompleted(outgoing.token, packet.reason_code, reason_string(packet.properties))
        self._releasing[packet_id] = self._in_flight.pop(packet_id)
        return PubRel(packet_id)

    def completed(self, packet: PubComp) -> PublishCompleted | None:
        """PUBCOMP: the end of a QoS 2 message. ``None`` when no such message was releasing."""
        outgoing = self._releasing.pop(packet.packet_id, None)
        if outgoing is None:
            return None
        self._free(packet.packet_id)
        # By PUBREC the server had the message: an error here is about the identifier only.
        return PublishCompleted(outgoing.token, reasons.SUCCESS, None)

    def withdraw(self, packet_id: int) -> None:
        """A message in flight ends here: answered, refused, or not sendable on this connection. Its place is free again."""
        del self._in_flight[packet_id]
        self._free(packet_id)

    def _free(self, packet_id: int) -> None:
        self._identifiers.give_back(packet_id)
        if self._quota < self._window:
            self._quota += 1
