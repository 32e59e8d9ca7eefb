"""The broker's side of a gateway's link: many clients over one stream, each a channel.

A gateway opens a channel for every client (CLIENT_OPEN) and both sides pass on the bytes of its MQTT stream (CLIENT_DATA). To
the engine a channel is a transport like any socket. Neither side has more than :data:`WINDOW_BYTES` of a channel under way:
CLIENT_WINDOW says how many bytes were passed on. A client that does not read is therefore held up alone, and a gateway that
does not read holds up all of its own.

What closes a channel is said once (CLIENT_CLOSE) and not answered: frames of a channel that is closed may still arrive, and
are passed over. A client that takes up a session gets its CONNACK behind FOUND, which tells the gateway what the session has
from before: should this broker be lost, the gateway is to know all of it (:mod:`nearcast.fabric.resumption`). How a client
is taken from one broker to another is :mod:`nearcast.fabric.handover`'s business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.errors import RemoteProtocolError
from nearcast.fabric import frames
from nearcast.fabric.branches import Branch
from nearcast.fabric.frames import frame
from nearcast.fabric.links import Link
from nearcast.fabric.parts import LinkUser
from nearcast.fabric.places import Whereabouts
from nearcast.fabric.resumption import Resumed
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Peer
from nearcast.mqtt.connection import CLOSED, Connection
from nearcast.mqtt.records import Fields, blob, number, subscription_fields, text
from nearcast.mqtt.session import Session

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric

WINDOW_BYTES: Final = 262_144
"""Bytes of one channel that may be under way in one direction. Below this, throughput follows the distance to the gateway."""

GRANT_BYTES: Final = 65_536
"""Bytes passed on before the other side is told: a frame for each read would be one for each message."""

PIECE_BYTES: Final = 65_536
"""Output is cut into frames of this size, so that one client's bulk does not stand before everybody's messages."""

SUSPENDED_TIMES: Final = 2.0
"""So many times ``fail_after_seconds`` sessions are kept after the link to their gateway was cut. Too low ends sessions of
clients that are still there; too high delays the wills of clients whose gateway is gone."""

SECURE: Final = 1
LOOPBACK: Final = 2


class Channel:
    """One client of a gateway, as the transport of its connection.

    ``outstanding_bytes`` were sent and not passed on to the client yet; ``taken_bytes`` came from it, were processed, and
    the gateway has not been told.
    """

    def __init__(self, trunk: Trunk, channel_number: int, peer: Peer) -> None:
        self.trunk = trunk
        self.number = channel_number
        self.peer = peer
        self.connection: Connection | None = None
        self.held_bytes = 0
        self.waits_to_close = False
        self.closed = False
        self.announced = True  # logging every client of a gateway is the gateway's to do
        self.outstanding_bytes = 0
        self.taken_bytes = 0
        #: Round-trip time between the client and its gateway, as that said last.
        self.latency_ms = 0.0
        #: The move with which the client leaves: its last bytes are on their way, then FROZEN is said. 0: none.
        self.freezing = 0
        #: The move with which it comes; its bytes are kept until its session is here. 0: none.
        self.adopting = 0
        self.kept: list[bytes] = []
        #: The broker that the gateway was told to follow for this client (:mod:`nearcast.fabric.owner_hints`); None: a client
        #: that was moved here, whose gateway waits for a word.
        self.advised: str | None = ""

    def send(self, chunks: list[bytes]) -> None:
        """Send bytes of the MQTT stream."""
        if self.closed:
            return
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        link = self.trunk.link
        head = number(self.number)
        size = len(data)
        if size <= PIECE_BYTES:
            link.send(frame(frames.CLIENT_DATA, head, data))
        else:
            for start in range(0, size, PIECE_BYTES):
                link.send(frame(frames.CLIENT_DATA, head, data[start : start + PIECE_BYTES]))
        self.outstanding_bytes += size
        self.trunk.trunks.bytes_out += size
        connection = self.connection
        if connection is not None and (self.outstanding_bytes >= WINDOW_BYTES or link.connection.congested):
            connection.congested = True
            self.trunk.blocked[self.number] = self

    def close(self) -> None:
        """What was sent is on its way, and was the last: the gateway closes the client behind it."""
        if self.closed:
            return
        if self.freezing:
            self.say(frames.FROZEN, self.freezing)
            self.trunk.end(self)
            return
        connection = self.connection
        reason = b"" if connection is None else connection.close_reason.encode("utf-8")
        self.trunk.link.send(frame(frames.CLIENT_CLOSE, number(self.number), blob(reason)))
        self.trunk.end(self)

    def say(self, kind: int, move: int) -> None:
        """Tell the gateway how a move goes."""
        self.trunk.link.send(frame(kind, number(self.number), number(move)))

    def fail(self, move: int, reason: str) -> None:
        """A move does not take place. The channel stays as it is."""
        self.trunk.link.send(
            frame(frames.MOVE_FAILED, number(self.number), number(move), blob(reason.encode("utf-8", "replace")))
        )

    def found(self, subscriptions: list[bytes], received_ids: bytes) -> None:
        """Tell the gateway what the client's session has: subscriptions, and QoS 2 messages that it has yet to release."""
        self.trunk.link.send(
            frame(frames.FOUND, number(self.number), number(len(subscriptions)), *subscriptions, blob(received_ids))
        )

    def refuse(self, move: int, reason: str) -> None:
        """A client that was to come does not: the channel is over."""
        if not self.closed:
            self.fail(move, reason)
            self.closed = True
            self.trunk.channels.pop(self.number, None)


class Trunk:
    """One gateway's link, and the channels on it. ``blocked`` ones wait for the gateway to take more."""

    def __init__(self, trunks: Trunks, link: Link) -> None:
        self.trunks = trunks
        self.link = link
        self.name = "" if link.theirs is None else link.theirs.name
        self.channels: dict[int, Channel] = {}
        self.blocked: dict[int, Channel] = {}
        self.whereabouts = Whereabouts()
        self.branch = Branch()

    def end(self, channel: Channel, lost_gateway: bool = False) -> None:
        """The channel is over, and nothing is said about it any more."""
        channel.closed = True
        self.channels.pop(channel.number, None)
        self.blocked.pop(channel.number, None)
        connection = channel.connection
        if connection is not None:
            channel.connection = None
            session = connection.session
            if lost_gateway and session is not None and not self.link.left:
                # The gateway may live, and go on elsewhere or here with clients that noticed nothing.
                self.trunks.engine.sessions.suspend(session, self.trunks.now)
            self.trunks.engine.lose(connection, self.trunks.now)
        self.trunks.handover.channel_ended(channel, lost_gateway, self.trunks.now)


class Trunks(LinkUser):
    """All gateways of a broker."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.engine = fabric.engine
        self.by_link: dict[Link, Trunk] = {}
        self.now = 0.0
        self.refused = 0
        #: Bytes of clients' MQTT streams, which links carried.
        self.bytes_in = 0
        self.bytes_out = 0
        self.handover = fabric.handover
        # The two ends of a link may notice its loss at different times, so far apart at most.
        fabric.engine.sessions.watchers.append(self)
        fabric.engine.sessions.suspended_seconds = SUSPENDED_TIMES * fabric.settings.fail_after_seconds

    # --- links ----------------------------------------------------------------------------------------------------------

    def link_up(self, link: Link, now: float) -> None:
        self.now = now
        self.by_link[link] = Trunk(self, link)

    def link_down(self, link: Link, now: float) -> None:
        """The gateway is gone. If it said goodbye, its clients are with it; if not, they may come back with it."""
        self.now = now
        trunk = self.by_link.pop(link, None)
        if trunk is not None:
            for channel in list(trunk.channels.values()):
                trunk.end(channel, lost_gateway=True)

    def link_writable(self, link: Link, now: float) -> None:
        self.now = now
        trunk = self.by_link.get(link)
        if trunk is not None and trunk.blocked:
            for channel in list(trunk.blocked.values()):
                self._unblock(channel, now)

    def _unblock(self, channel: Channel, now: float) -> None:
        trunk = channel.trunk
        connection = channel.connection
        if connection is None or channel.outstanding_bytes >= WINDOW_BYTES // 2 or trunk.link.connection.congested:
            return
        trunk.blocked.pop(channel.number, None)
        self.engine.writable(connection, now)
        self.grant(channel, connection)

    def link_frame(self, link: Link, content: bytes, now: float) -> None:
        self.now = now
        trunk = self.by_link.get(link)
        if trunk is None:
            return
        fields = Fields(content)
        kind = content[0]
        if kind == frames.PLACE:
            self._place(trunk, fields, now)
            return
        if kind >= frames.OWNER:
            self._fabric.branches.handle(trunk, content, fields, now)
            return
        channel_number = fields.number()
        if kind == frames.CLIENT_OPEN:
            self._open(trunk, channel_number, fields, now)
            return
        if kind == frames.ADOPT:
            adopted = self.new_channel(trunk, channel_number, Peer("adopted"))
            adopted.advised = None
            self.handover.adopt(adopted, fields.number(), now)
            return
        if kind == frames.RESUME:
            self._resume(trunk, channel_number, fields, now)
            return
        channel = trunk.channels.get(channel_number)
        if channel is None:
            if kind > frames.CLIENT_WINDOW and kind != frames.MOVE and kind != frames.FREEZE:
                raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"frame {kind} is not for a broker")
            return  # it was closed here, and the gateway has yet to hear of it
        if kind == frames.CLIENT_DATA:
            self._data(channel, content[fields.position :], now)
        elif kind == frames.CLIENT_WINDOW:
            channel.outstanding_bytes = max(0, channel.outstanding_bytes - fields.number())
            if channel_number in trunk.blocked:
                self._unblock(channel, now)
        elif kind == frames.CLIENT_CLOSE:
            connection = channel.connection
            if connection is not None and connection.state != CLOSED and not connection.close_reason:
                connection.close_reason = fields.blob().decode("utf-8", "replace") or "connection lost"
            trunk.end(channel)
        elif kind == frames.MOVE:
            move = fields.number()
            self.handover.move(channel, move, fields.blob().decode("utf-8"), now)
        elif kind == frames.FREEZE:
            self.handover.freeze(channel, fields.number(), now)
        else:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"frame {kind} is not for a broker")

    # --- channels -------------------------------------------------------------------------------------------------------

    def _open(self, trunk: Trunk, channel_number: int, fields: Fields, now: float) -> None:
        channel = self.new_channel(trunk, channel_number, read_peer(fields))
        if self.engine.stats.connections >= self._fabric.limits.max_connections:
            self.refused += 1
            trunk.link.send(frame(frames.CLIENT_CLOSE, number(channel_number), blob(b"too many connections")))
            trunk.end(channel)
            return
        channel.connection = self.engine.open(channel.peer, channel, now)

    def _place(self, trunk: Trunk, fields: Fields, now: float) -> None:
        for channel_number, latency_ms in trunk.whereabouts.read(fields, now):
            channel = trunk.channels.get(channel_number)
            if channel is not None:
                channel.latency_ms = latency_ms

    def _resume(self, trunk: Trunk, channel_number: int, fields: Fields, now: float) -> None:
        channel = self.new_channel(trunk, channel_number, read_peer(fields))
        resumed = Resumed(self._fabric, channel, fields)
        connection = self.engine.open(channel.peer, channel, now)
        channel.connection = connection
        if resumed.connect is None:
            connection.close_reason = "a CONNECT that makes no sense"
            channel.close()
        else:
            self.engine.resume(connection, resumed.connect, resumed, now)

    def new_channel(self, trunk: Trunk, channel_number: int, peer: Peer) -> Channel:
        """A channel that has no connection yet."""
        if channel_number in trunk.channels:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"channel {channel_number} is open already")
        channel = Channel(trunk, channel_number, peer)
        trunk.channels[channel_number] = channel
        return channel

    def _data(self, channel: Channel, data: bytes, now: float) -> None:
        connection = channel.connection
        self.bytes_in += len(data)
        channel.taken_bytes += len(data)
        if channel.taken_bytes > 2 * WINDOW_BYTES:
            raise RemoteProtocolError(reasons.RECEIVE_MAXIMUM_EXCEEDED, "a gateway sends more of a client than was agreed")
        if connection is None:
            channel.kept.append(data)
            return
        self.engine.receive(connection, data, now)
        self.grant(channel, connection)

    def grant(self, channel: Channel, connection: Connection) -> None:
        """Have the gateway send more, unless the client does not take its answers: then it gets no further requests in."""
        if connection.congested and connection.out_bytes > connection.max_output_bytes:
            connection.reading = False
        elif channel.taken_bytes >= GRANT_BYTES and not channel.closed:
            channel.trunk.link.send(frame(frames.CLIENT_WINDOW, number(channel.number), number(channel.taken_bytes)))
            channel.taken_bytes = 0

    def attached(self, session: Session) -> None:
        if session.subscriptions:
            self._fabric.hints.changed(session.client_id)
        connection = session.connection
        channel = None if connection is None else connection.handle
        if not isinstance(channel, Channel) or channel.adopting or not (session.subscriptions or session.received_ids):
            return  # a gateway that moves a client knows its session
        received = b"".join([packet_id.to_bytes(2, "big") for packet_id in sorted(session.received_ids or set())])
        parts: list[bytes] = []
        size = 0
        for subscription in session.subscriptions.values():
            part = subscription_fields(subscription)
            parts.append(part)
            size += len(part)
            if size >= PIECE_BYTES:
                channel.found(parts, b"")
                parts = []
                size = 0
        channel.found(parts, received)

    def left(self, session: Session) -> None:
        """Not of interest here."""

    def ended(self, session: Session) -> None:
        """Not of interest here."""

    def shared(self, topic_filter: str) -> None:
        """Not of interest here."""

    def settle(self, now: float) -> None:
        self._fabric.branches.settle(now)

    def tick(self, now: float) -> None:
        self._fabric.hints.tick(now)

    def next_deadline(self) -> float:
        return self._fabric.hints.next_deadline()

    # --- the whole broker -----------------------------------------------------------------------------------------------

    def clients(self) -> int:
        """How many clients of gateways there are."""
        return sum([len(trunk.channels) for trunk in self.by_link.values()])

    def leave(self, now: float) -> None:
        """Tell all gateways that this broker stops soon: they move their clients away."""
        for link in self.by_link:
            link.send(frame(frames.LEAVING))

    def has_left(self) -> bool:
        return self.clients() == 0

    def disconnect_all(self, reason_code: int, now: float) -> None:
        """Send away whoever is still here."""
        for trunk in self.by_link.values():
            for channel in list(trunk.channels.values()):
                if channel.connection is not None:
                    self.engine.disconnect(channel.connection, reason_code, now)


def peer_fields(peer: Peer) -> bytes:
    """What a gateway knows of a client's transport."""
    flags = (SECURE if peer.secure else 0) | (LOOPBACK if peer.loopback else 0)
    return b"".join(
        (blob(peer.address.encode("utf-8")), blob(peer.listener.encode("utf-8")), number(flags), text(peer.certificate_name))
    )


def read_peer(fields: Fields) -> Peer:
    """The opposite of :func:`peer_fields`."""
    address = fields.blob().decode("utf-8")
    listener = fields.blob().decode("utf-8")
    flags = fields.number()
    return Peer(address, listener, (flags & SECURE) != 0, fields.text(), (flags & LOOPBACK) != 0)
