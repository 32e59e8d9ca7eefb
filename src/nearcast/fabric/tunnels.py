"""One client's way through a gateway: its transport on one side, a broker (or, while it is moved, two) on the other.

Only whole packets are passed on, in either direction, so that a broker can be replaced between any two of them. Towards the
broker they leave at once, or wait (``pending``) while there is no broker, or while one has as much of this client under way
as it takes; the client is then not read from. Every packet is shown to the :class:`~nearcast.fabric.mirrors.Mirror` at the
moment it leaves.

Towards the client, what a broker sends is passed on in the order it came, except that of a broker which has not taken over
yet: that is held until the one before it has said its last word.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from mypy_extensions import i64

from nearcast.errors import RemoteProtocolError
from nearcast.fabric import frames
from nearcast.fabric.direct_clients import DirectClient
from nearcast.fabric.frames import frame
from nearcast.fabric.mirrors import Cutter, Mirror, body_start, packet_end
from nearcast.mqtt.access import Peer
from nearcast.mqtt.codec import claimed_version, decode, encode
from nearcast.mqtt.packets import MQTT_3_1_1, MQTT_5, ConnAck, Connect, Disconnect
from nearcast.mqtt.records import blob, number
from nearcast.mqtt.wire import CONNECT, PUBACK, PUBCOMP

if TYPE_CHECKING:
    from nearcast.fabric.gateway import Gateway
    from nearcast.fabric.moving import Move
    from nearcast.fabric.trunk_lines import TrunkLine

WINDOW_BYTES: Final = 262_144
"""Bytes of one client that may be under way to a broker, or back, without being confirmed."""

GRANT_BYTES: Final = 65_536
"""Bytes passed on before the broker is told."""

PAUSE_BYTES: Final = 16_384
"""A client that has so much waiting for its broker is not read from."""

NO_LIMIT: Final = 1 << 40

# States of a tunnel.
GREETING: Final = 0
WAITING: Final = 1
"""There is a CONNECT and no broker to give it to."""
OPEN: Final = 2
RESUMING: Final = 3
"""A broker was asked to go on where another one was lost, and has not said yet that it does."""
CLOSED: Final = 4


def named(connect: bytes, rng: random.Random) -> bytes:
    """A CONNECT of MQTT 3 that leaves the client identifier to the server gets one here: the server would not say which it
    chose, and whoever goes on with the session has to know."""
    body = connect[body_start(connect, 0) :]
    if claimed_version(body) != MQTT_3_1_1:
        return connect
    try:
        packet = decode(connect[0], body, MQTT_3_1_1)
    except RemoteProtocolError:
        return connect  # the broker says what is wrong with it
    if isinstance(packet, Connect) and not packet.client_id and packet.clean_start:
        packet.client_id = f"nc-{rng.getrandbits(80):020x}"
        return encode(packet, packet.version)
    return connect


class ClientHandle(Protocol):
    """The transport of a client, as the driver gives it."""

    def send(self, chunks: list[bytes]) -> None:
        """Send bytes after those sent before."""

    def close(self) -> None:
        """Close once what was sent is out."""

    def pause_reading(self) -> None:
        """Read nothing more for now."""

    def resume_reading(self) -> None:
        """Go on reading."""

    def rtt_ms(self) -> float:
        """Round-trip time to the client; 0 while that is not known."""


class Upstream:
    """One broker's end of a tunnel. While it is ``holding``, what it sends is kept and not confirmed."""

    def __init__(self, tunnel: Tunnel, max_packet_bytes: int) -> None:
        self.tunnel = tunnel
        self.cutter = Cutter(max_packet_bytes)
        self.closed = False
        self.holding = False
        self.held: list[bytes] = []
        #: A copy of what was sent, while it may have to be sent to another broker instead.
        self.copies: list[bytes] | None = None

    @property
    def broker(self) -> str:
        """The name or address of the broker."""
        raise NotImplementedError

    def room(self) -> int:
        """How many bytes may be sent now."""
        raise NotImplementedError

    def send(self, data: bytes) -> None:
        """Send whole packets, or a piece of one where there is no room for all of it."""
        raise NotImplementedError

    def passed_on(self) -> None:
        """The client's transport has room: the broker may send more."""

    def close(self, reason: str) -> None:
        """The client is gone."""
        raise NotImplementedError


class Channel(Upstream):
    """A channel of a trunk: one of many clients on a gateway's link to a broker."""

    def __init__(self, tunnel: Tunnel, line: TrunkLine, channel_number: int, max_packet_bytes: int) -> None:
        super().__init__(tunnel, max_packet_bytes)
        self.line = line
        self.number = channel_number
        self.outstanding_bytes = 0
        self.unconfirmed_bytes = 0
        #: The client's latency as the broker knows it (:mod:`nearcast.fabric.places`); below 0: not told yet.
        self.told_ms = -1.0

    @property
    def broker(self) -> str:
        return self.line.name

    def room(self) -> int:
        if self.closed or self.line.link.connection.congested:
            return 0
        return WINDOW_BYTES - self.outstanding_bytes

    def send(self, data: bytes) -> None:
        self.outstanding_bytes += len(data)
        if self.copies is not None:
            self.copies.append(data)
        self.line.link.send(frame(frames.CLIENT_DATA, number(self.number), data))

    def passed_on(self) -> None:
        if self.unconfirmed_bytes >= GRANT_BYTES and not self.holding and not self.closed:
            self.line.link.send(frame(frames.CLIENT_WINDOW, number(self.number), number(self.unconfirmed_bytes)))
            self.unconfirmed_bytes = 0

    def close(self, reason: str) -> None:
        if not self.closed:
            self.line.link.send(frame(frames.CLIENT_CLOSE, number(self.number), blob(reason.encode("utf-8"))))
            self.line.end(self)


class Tunnel:
    """See the module. ``upstream`` gets what the client sends; ``previous`` is the broker before it during a move."""

    def __init__(self, gateway: Gateway, handle: ClientHandle, peer: Peer, now: float) -> None:
        self.gateway = gateway
        self.handle = handle
        self.peer = peer
        self.state = GREETING
        self.since = now
        self.opened_at = now
        self.mirror: Mirror | None = None
        self.upstream: Upstream | None = None
        self.previous: Upstream | None = None
        #: A broker that is being left and still gets acknowledgements, while the rest waits.
        self.settling: Upstream | None = None
        self.move: Move | None = None
        #: Set once the client has published an owned topic (:mod:`nearcast.fabric.direct`).
        self.direct: DirectClient | None = None
        #: Whether it was moved to the owner of what it subscribed to (:mod:`nearcast.fabric.following`).
        self.followed = False
        self.congested = False
        self.reading = True
        self.closing = False
        self.announced = False
        self.close_reason = ""
        self.bytes_in = 0
        self.bytes_out = 0
        #: Round-trip time to the client, as measured last (:mod:`nearcast.fabric.places`).
        self.latency_ms = 0.0
        self._cutter = Cutter(gateway.limits.max_packet_bytes)
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        # What is to leave before what is pending, and whether that is what the client waits for an answer to.
        self._head = b""
        self._head_is_again = False
        self._again_pings = 0
        # The rest of a packet that is too large to be sent at once and was begun.
        self._begun = b""
        self._out: list[bytes] = []
        self._dirty = False

    @property
    def client_id(self) -> str:
        return "" if self.mirror is None else self.mirror.client_id

    @property
    def ended(self) -> bool:
        """Whether nothing more is for the client."""
        return self.closing or self.state == CLOSED

    @property
    def pending_bytes(self) -> int:
        """Bytes of whole packets that wait for a broker."""
        return self._pending_bytes + len(self._head) + len(self._begun)

    # --- from the client ------------------------------------------------------------------------------------------------

    def receive(self, data: bytes, now: float) -> None:
        """Bytes of the client arrived."""
        if self.state == CLOSED or self.closing:
            return
        self.bytes_in += len(data)
        try:
            run = self._cutter.feed(data)
        except RemoteProtocolError as error:
            self.refuse(error.reason_code, error.message, now)
            return
        if not run:
            return
        if self.state == GREETING:
            self._greeted(run, now)
        elif self._pending or self.state != OPEN or self._begun or self._head:
            self._wait(run)
        else:
            self._head_is_again = False
            self._head = self._forward(run)
            if self._head:
                self.drain()
        self.gateway.touch(self)

    def _greeted(self, run: bytes, now: float) -> None:
        stop = packet_end(run, 0, len(run))
        connect = run[:stop]
        if connect[0] >> 4 != CONNECT:
            self.end("the first packet is no CONNECT", now)
            return
        self.mirror = Mirror(named(connect, self.gateway.rng))
        if stop < len(run):
            self._wait(run[stop:])
        self.gateway.place(self, now)

    def _wait(self, run: bytes) -> None:
        if self.settling is not None:
            run = self._settle_exchanges(run, self.settling)
        if run:
            self._pending.append(run)
            self._pending_bytes += len(run)

    def _settle_exchanges(self, run: bytes, upstream: Upstream) -> bytes:
        """Acknowledgements belong to exchanges with the broker that the client is leaving; the rest is for the next one."""
        theirs: list[bytes] = []
        rest: list[bytes] = []
        position: i64 = 0
        end: i64 = len(run)
        while position < end:
            stop = packet_end(run, position, end)
            acknowledges = PUBACK <= run[position] >> 4 <= PUBCOMP
            (theirs if acknowledges else rest).append(run[position:stop])
            position = stop
        mirror = self.mirror
        if theirs and mirror is not None:
            upstream.send(mirror.outgoing(b"".join(theirs)))
        return b"".join(rest)

    def _forward(self, run: bytes) -> bytes:
        """Pass on as much as the broker takes; returns the rest."""
        mirror = self.mirror
        upstream = self.upstream
        if mirror is None or upstream is None:
            return run
        rest = b""
        direct = self.direct
        if direct is not None and self.gateway.direct.topics:
            rest = self.gateway.direct.forward(self, direct, mirror, upstream, run)
            self._say(mirror)
            return rest
        room = upstream.room()
        if len(run) > room:
            fitting = self._fitting(run, room)
            run, rest = run[:fitting], run[fitting:]
        if run:
            if direct is not None:
                direct.pass_by(run)
            data = mirror.outgoing(run)
            if data:
                upstream.send(data)
            self._say(mirror)
        return rest

    def begin_direct(self, username: str | None, home: str, now: float) -> DirectClient:
        """The client has published an owned topic: its messages may go to the owner from here on."""
        direct = DirectClient(username, home, now)
        mirror = self.mirror
        if mirror is not None:
            for packet_id, raw in mirror.publishes.items():
                if raw[0] & 6 == 2:
                    direct.published(packet_id)
        self.direct = direct
        return direct

    def send_again(self, run: bytes) -> None:
        """Packets that went another way than by the home broker and got no answer: they go before what waits."""
        if self._head and self._head_is_again:
            self._pending.appendleft(run)
            self._pending_bytes += len(run)
        else:
            self._head = run + self._head
            self._head_is_again = False

    def _fitting(self, run: bytes, room: i64) -> int:
        """How many bytes of whole packets at the beginning of ``run`` there is room for."""
        position: i64 = 0
        end: i64 = len(run)
        while position < end:
            stop = packet_end(run, position, end)
            if stop > room:
                break
            position = stop
        return position

    def drain(self) -> None:
        """There may be room: pass on what waits."""
        while self.state == OPEN and self.upstream is not None:
            upstream = self.upstream
            if self._begun:
                room = upstream.room()
                if room <= 0:
                    break
                piece, self._begun = self._begun[:room], self._begun[room:]
                upstream.send(piece)
                continue
            move = self.move
            if move is not None and move.wants_to_freeze:
                # A packet boundary, and nothing under way that would have to be finished first.
                self.gateway.moves.freeze(move)
                continue
            head = self._head
            if not head:
                if not self._pending:
                    break
                head = self._pending.popleft()
                self._pending_bytes -= len(head)
                self._head_is_again = False
            self._head = self._forward(head)
            if len(self._head) == len(head) and not self._begin(upstream):
                break
        self.gateway.touch(self)

    def _begin(self, upstream: Upstream) -> bool:
        """A packet that is larger than what there is ever room for is sent in pieces. Others wait until they fit."""
        head = self._head
        size = packet_end(head, 0, len(head))
        mirror = self.mirror
        if mirror is None or size <= WINDOW_BYTES or upstream.room() < WINDOW_BYTES // 2:
            return False
        if self.direct is not None and self.direct.waits:
            return False
        self._head = head[size:]
        self._begun = mirror.outgoing(head[:size])
        return True

    # --- from a broker --------------------------------------------------------------------------------------------------

    def deliver(self, upstream: Upstream, data: bytes, now: float) -> None:
        """Bytes of a broker for the client arrived."""
        try:
            run = upstream.cutter.feed(data)
        except RemoteProtocolError as error:
            self.end(f"{upstream.broker}: {error.message}", now)
            return
        if run:
            self.pass_run(upstream, run)
        else:
            self.gateway.touch(self)  # what was taken in is confirmed: a packet may be larger than what is ever under way

    def pass_run(self, upstream: Upstream, run: bytes) -> None:
        """Whole packets of a broker are for the client."""
        if upstream.holding:
            upstream.held.append(run)
        else:
            self._pass(run)

    def _pass(self, run: bytes) -> None:
        mirror = self.mirror
        if mirror is not None:
            mirror.incoming(run)
        if self.direct is not None:
            run = self.direct.in_order(run)
        if run:
            self._out.append(run)
        self.gateway.touch(self)

    def release(self, upstream: Upstream) -> None:
        """A broker has taken over: what it sent meanwhile goes to the client now."""
        upstream.holding = False
        held, upstream.held = upstream.held, []
        for run in held:
            self._pass(run)
        self.gateway.touch(self)

    def _say(self, mirror: Mirror) -> None:
        self._out.extend(mirror.take_answers())

    def tell(self, data: bytes) -> None:
        """Something the gateway itself says to the client."""
        self._out.append(data)
        self.gateway.touch(self)

    def settle(self) -> None:
        """Give the client's transport what gathered, and let both sides send as much as the other takes."""
        self._dirty = False
        if self.state == CLOSED:
            return
        if self._out:
            chunks, self._out = self._out, []
            for chunk in chunks:
                self.bytes_out += len(chunk)
            self.handle.send(chunks)
        if self.closing:
            self.handle.close()
            return
        if not self.congested:
            if self.upstream is not None:
                self.upstream.passed_on()
            if self.previous is not None:
                self.previous.passed_on()
        self._steer()

    def _steer(self) -> None:
        """Read from the client, or not."""
        kept = 0 if self.mirror is None else self.mirror.kept_bytes
        limit = self.gateway.settings.max_kept_bytes
        if self.reading:
            if self.pending_bytes >= PAUSE_BYTES or kept >= limit:
                self.reading = False
                self.handle.pause_reading()
        elif self.pending_bytes < PAUSE_BYTES and kept < limit:
            self.reading = True
            self.handle.resume_reading()

    def mark(self) -> bool:
        """Ask for :meth:`settle`; false when it has been asked for already."""
        if self._dirty:
            return False
        self._dirty = True
        return True

    # --- brokers come and go --------------------------------------------------------------------------------------------

    def attach(self, upstream: Upstream) -> None:
        """A broker that has been told of this client: it gets the CONNECT, and whatever was sent behind it."""
        mirror = self.mirror
        if mirror is None:
            return
        self.upstream = upstream
        self.state = OPEN
        self._begun = b""
        upstream.send(mirror.connect)
        self._send_again(mirror)
        self.drain()

    def resumed(self) -> None:
        """A broker goes on where another one was lost: it gets again what was not answered, and then what waits."""
        mirror = self.mirror
        if mirror is None:
            return
        self.state = OPEN
        self._send_again(mirror)
        self.drain()

    def _send_again(self, mirror: Mirror) -> None:
        """Put what the client waits for before what has not been sent at all."""
        if self._head:
            self._pending.appendleft(self._head)
            self._pending_bytes += len(self._head)
        self._again_pings = mirror.pings
        self._head = b"".join(mirror.unanswered())
        self._head_is_again = True
        mirror.pings = 0  # counted again when they are sent

    def lost(self, complete_here: bool) -> None:
        """The broker is gone. Of what it was sent, what has an answer to come is sent again to the next one."""
        self.upstream = None
        self.settling = None
        self._begun = b""
        mirror = self.mirror
        if mirror is None:
            return
        if self._head_is_again and self._head:
            self._head = b""
            mirror.pings = max(mirror.pings, self._again_pings)
        mirror.lost(complete_here)
        self._say(mirror)
        self.gateway.touch(self)

    # --- the end --------------------------------------------------------------------------------------------------------

    def refuse(self, reason_code: int, reason: str, now: float) -> None:
        """The gateway itself turns the client away, and tells it why where the protocol has words for that."""
        mirror = self.mirror
        if mirror is not None and mirror.connected:
            if mirror.version >= MQTT_5:
                self.tell(encode(Disconnect(reason_code), mirror.version))
        elif mirror is not None:
            version = claimed_version(mirror.connect[body_start(mirror.connect, 0) :])
            if version:
                self.tell(encode(ConnAck(reason_code), version))
        self.end(reason, now)

    def end(self, reason: str, now: float) -> None:
        """Close the client's transport once it has what was sent; the broker hears that it is gone."""
        if self.closing or self.state == CLOSED:
            return
        self.closing = True
        self.close_reason = self.close_reason or reason
        self.gateway.leave_brokers(self, reason, now)
        self.gateway.touch(self)
