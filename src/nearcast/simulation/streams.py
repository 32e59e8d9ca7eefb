"""Connections between simulated hosts that behave like TCP: ordered, reliable, bounded, and slow or silent when the network
is.

Segments and acknowledgements are packets through the same network as everything else. What is modelled: the three-way
handshake; segments of the path's size; cumulative acknowledgements that ride on data going the other way; a receive window
that closes when nobody reads; retransmission after a measured timeout that doubles, and after three duplicate
acknowledgements; slow start and halving on loss; refusal, reset, orderly end, giving up. What is not: delayed and selective
acknowledgements, Nagle's algorithm (off in everything of ours), one side closed while the other goes on sending, keep-alive
packets, the limit of a listener's backlog.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from nearcast.errors import LocalProtocolError
from nearcast.simulation.callbacks import ACCEPTED, CLOSED, OPENED, STREAM_RECEIVED, WRITABLE
from nearcast.simulation.pacing import Pace
from nearcast.simulation.segments import FIN, NOTHING, PROBE, RST, SYN, Packet, Reassembly
from nearcast.simulation.tracing import shortened

if TYPE_CHECKING:
    from nearcast.simulation.hosts import Host
    from nearcast.simulation.world import World

RECEIVE_BUFFER_BYTES: Final = 262_144
"""What a host takes in for a process that does not read; the window it grants."""

HIGH_WATER_BYTES: Final = 65_536
LOW_WATER_BYTES: Final = 16_384
"""Unsent and unacknowledged bytes above which a stream is congested, and below which it no longer is; asyncio's."""

MAX_BUFFER_BYTES: Final = 67_108_864
"""Written and not acknowledged, at most: a process that never looks at ``congested`` ends here, and not the real machine."""

# Linux's defaults, in effect: six further SYNs, and a quarter of an hour of silence.
CONNECT_TIMEOUT_S: Final = 127.0
SILENCE_TIMEOUT_S: Final = 924.0

# States
CONNECTING: Final = 0  # SYN sent
ANSWERED: Final = 1  # SYN received, answer sent
OPEN: Final = 2
CLOSING: Final = 3  # closed here, what was written is still on its way
DEAD: Final = 4


class Stream:
    """One end of a connection. Made by ``Host.connect`` and handed to ``Node.accepted``."""

    def __init__(self, host: Host, remote_host: Host, port: int) -> None:
        self.host = host
        self.remote_host = remote_host
        self.port = port
        self._world: World = host.world
        self.state: i64 = CONNECTING
        self.remote: Stream | None = None
        self.finished = False  # the process wants to hear no more of it
        self._ended_in_boot: i64 = -1  # if everything we had to say arrived, our end included
        self._opened_at: float = self._world.now
        # Sending. `_buffer` holds everything from `_acked` on; bytes below `_next` are on their way.
        self._buffer = bytearray()
        self._acked: i64 = 0
        self._next: i64 = 0
        self._highest: i64 = 0
        self._window_end: i64 = RECEIVE_BUFFER_BYTES
        self._pace = Pace(self._world.segment_bytes)
        self._duplicates: i64 = 0
        self._recover: i64 = -1
        self._was_congested = False
        # Receiving.
        self._arrived = Reassembly(2 * RECEIVE_BUFFER_BYTES // self._world.segment_bytes)
        self._unread: list[bytes] = []
        self._unread_bytes: i64 = 0
        self._reading = True
        self._ack_owed = False
        self._fin_received_at: i64 = -1
        self._peer_ended = False
        self._granted: i64 = RECEIVE_BUFFER_BYTES
        # Time.
        self._timed_end: i64 = -1
        self._timed_at = 0.0
        self._heard_at: float = self._world.now
        self._waiting_since: float = self._world.now
        self._deadline = math.inf
        self._timer_at = math.inf
        host.streams[self] = None

    def __repr__(self) -> str:
        return f"<Stream {self.host.name} - {self.remote_host.name}:{self.port}>"

    # --- what a node uses ---

    @property
    def peer(self) -> int:
        """Index of the host at the other end."""
        return self.remote_host.index

    @property
    def open(self) -> bool:
        """Whether bytes can be written that may still arrive."""
        return self.state < CLOSING

    @property
    def congested(self) -> bool:
        """Whether more is waiting than should be: stop writing until ``Node.writable``."""
        return len(self._buffer) > HIGH_WATER_BYTES

    def write(self, data: bytes) -> None:
        """Send bytes. On a stream that has ended they vanish, as they would have on the way."""
        if self.state >= CLOSING or not data:
            return
        if len(self._buffer) + len(data) > MAX_BUFFER_BYTES:
            raise LocalProtocolError(
                f"{self.host.name} has {len(self._buffer):,} bytes waiting for {self.remote_host.name}: "
                "stop writing while a stream is congested"
            )
        if self._world.tracer is not None:
            self._trace(f"writes {shortened(data)}")
        self._buffer += data
        if len(self._buffer) > HIGH_WATER_BYTES:
            self._was_congested = True
        if self.state == OPEN:
            self._flush()

    def close(self) -> None:
        """Send what was written, then end. Nothing is called back for this stream any more."""
        self.finished = True
        if self.state >= CLOSING:
            return
        if self.state != OPEN or self._unread_bytes:
            # Half open, or bytes are left that nobody will read: the kernel says so.
            self.reset()
            return
        if self._world.tracer is not None:
            self._trace("closes")
        self.state = CLOSING
        self._flush()

    def reset(self) -> None:
        """End at once; what is on its way is lost, and the peer is told."""
        self.finished = True
        if self.state == DEAD:
            return
        if self._world.tracer is not None:
            self._trace("resets")
        if self.state != CONNECTING:
            self._transmit(RST, self._next, b"")
        self._die()

    def pause(self) -> None:
        """Stop reading: bytes gather until the window is full, then the peer is congested."""
        self._reading = False

    def resume(self) -> None:
        """Read again, beginning with what has gathered."""
        if self._reading:
            return
        self._reading = True
        self._deliver()
        self._end_if_read()

    # --- what the host does ---

    def begin(self) -> None:
        if self._world.tracer is not None:
            self._trace(f"connects to port {self.port}")
        self._transmit(SYN, 0, b"")
        self._set_deadline()

    def answer(self, packet: Packet) -> None:
        """This is the other end of a stream whose first packet has just arrived."""
        self.state = ANSWERED
        self.remote = packet.sender
        packet.sender.remote = self
        self._transmit(SYN, 0, b"")
        self._set_deadline()

    def vanish(self) -> None:
        """The machine is gone, and says nothing."""
        self._die()

    def read(self) -> None:
        """The process takes what has gathered, now or (after a pause) at last: the window opens by as much."""
        if self.finished or not self._reading or not self._unread:
            return
        data = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
        self._unread = []
        self._unread_bytes = 0
        if self._world.tracer is not None:
            self._trace(f"reads {shortened(data)}")
        node = self.host.node
        if node is not None:
            node.stream_received(self, data)
        self._grant()
        self._end_if_read()

    # --- packets in ---

    def arrived(self, packet: Packet) -> None:
        """A packet is here, and the machine has power."""
        flags = packet.flags
        state = self.state
        if state == DEAD:
            if not flags & RST:
                self._after_the_end(packet)
            return
        self._heard_at = self._world.now
        if flags & RST:
            self._end("refused" if state == CONNECTING else "reset")
            return
        if state == CONNECTING:
            if flags & SYN:
                self._connected(packet)
            return
        if flags & SYN:
            # Our answer, or our acknowledgement of theirs, was lost.
            self._transmit(SYN if state == ANSWERED else NOTHING, self._acked, b"")
            return
        if state == ANSWERED:
            self._stop_timer()
            self.state = OPEN
            self._pace.backoff = 0
            if not self.host.up:
                self.reset()
                return
            self.host.tell(ACCEPTED, self, None)
            if self.state >= DEAD:
                return
        self._acknowledged(packet)
        if self.state == DEAD:
            return
        if len(packet.data) or flags & FIN:
            self._data(packet)
        elif flags & PROBE:
            self._transmit(NOTHING, self._next, b"")

    def _after_the_end(self, packet: Packet) -> None:
        """Old packets do not disturb an orderly end, as in TCP's TIME_WAIT: the peer may have bytes from us yet to read, and a
        reset would take them away. Whatever is new, or comes to a machine that forgot, finds nobody."""
        if self._ended_in_boot == self.host.boots and not packet.flags & SYN:
            fin = 1 if packet.flags & FIN else 0
            if not packet.data and not fin and not packet.flags & PROBE:
                return
            expected = self._arrived.expected
            if packet.sequence + len(packet.data) + fin <= expected:
                answer = Packet(self, NOTHING, self._next, b"", expected, self._granted)
                self._world.transmit(self.host, packet.sender, answer)
                return
        self._world.transmit(self.host, packet.sender, Packet(self, RST, 0, b"", 0, 0))

    def _connected(self, packet: Packet) -> None:
        self.remote = packet.sender
        self._window_end = packet.window_end
        if not self._pace.backoff:
            self._pace.measured(self._world.now - self._opened_at)
        self._pace.backoff = 0
        self._stop_timer()
        self.state = OPEN
        self._ack_owed = True
        self.host.tell(OPENED, self, None)
        if self.state == OPEN:
            self._flush()
        if self._ack_owed and self.state != DEAD:
            self._transmit(NOTHING, self._next, b"")

    def _acknowledged(self, packet: Packet) -> None:
        acked = packet.acknowledged
        if packet.window_end > self._window_end:
            self._window_end = packet.window_end
            window_moved = True
        else:
            window_moved = False
        if acked > self._acked:
            if 0 <= self._timed_end <= acked:
                self._pace.measured(self._world.now - self._timed_at)
                self._timed_end = -1
            count = acked - self._acked
            if count > len(self._buffer):
                # More than there were bytes: our FIN has arrived, and that was the last thing we had to say.
                self._ended_in_boot = self.host.boots
                self._die()
                return
            self._acked = acked
            del self._buffer[:count]
            if self._next < acked:
                self._next = acked
            self._pace.backoff = 0
            self._duplicates = 0
            if acked < self._recover:
                # More than one segment of the same window was lost: the next one goes at once (NewReno).
                self._resend_first()
            else:
                self._pace.grow(count)
            if self._next > self._acked:
                self._set_deadline()
            else:
                self._stop_timer()
            self._flush()
            if self._was_congested and len(self._buffer) <= LOW_WATER_BYTES:
                self._was_congested = False
                if self.state == OPEN:
                    self.host.tell(WRITABLE, self, None)
        elif window_moved:
            self._flush()
        elif acked == self._acked and self._next > acked and not packet.data and packet.flags == NOTHING:
            self._duplicates += 1
            if self._duplicates == 3 and acked >= self._recover:
                self._pace.lost_one(self._next - acked)
                self._recover = self._highest
                self._resend_first()

    def _data(self, packet: Packet) -> None:
        data = packet.data
        sequence = packet.sequence
        if packet.flags & FIN:
            self._fin_received_at = sequence + len(data)
        if self.state == CLOSING and sequence + len(data) > self._arrived.expected and len(data):
            # Nobody is there to read it.
            self.reset()
            return
        self._ack_owed = True
        fresh = self._arrived.add(sequence, data)
        if fresh:
            self._unread.append(fresh)
            self._unread_bytes += len(fresh)
            self._deliver()
        if self.state == DEAD:
            return
        if self._fin_received_at == self._arrived.expected:
            self._arrived.expected += 1
            self._transmit(NOTHING, self._next, b"")
            if self.state == CLOSING:
                self._die()
            else:
                self._peer_ended = True
                self._end_if_read()
            return
        if self._ack_owed:
            self._transmit(NOTHING, self._next, b"")

    def _deliver(self) -> None:
        """Let the process read, as soon as it can."""
        if self._unread and self._reading and self.state != DEAD:
            self.host.tell(STREAM_RECEIVED, self, None)

    def _end_if_read(self) -> None:
        """The process learns of the peer's end when it has read what came before, and still reads."""
        if self._peer_ended and self._reading and not self._unread_bytes and self.state == OPEN:
            self._end("end")

    def _grant(self) -> None:
        """Tell the peer that its window has opened, when that is worth a packet."""
        if self.state == OPEN and self._arrived.expected + RECEIVE_BUFFER_BYTES - self._unread_bytes >= self._granted + (
            RECEIVE_BUFFER_BYTES // 2
        ):
            self._transmit(NOTHING, self._next, b"")

    # --- packets out ---

    def _flush(self) -> None:
        """Send what the peer's window and ours allow."""
        if self.state != OPEN and self.state != CLOSING:
            return
        segment = self._world.segment_bytes
        end = self._acked + len(self._buffer)
        limit = self._acked + self._pace.window_bytes
        if self._window_end < limit:
            limit = self._window_end
        while self._next < end and self._next < limit:
            size = end - self._next
            if size > segment:
                size = segment
            if size > limit - self._next:
                if self._next > self._acked:
                    break  # No small segments while others are out: more will fit soon.
                size = limit - self._next
            start = self._next - self._acked
            data = bytes(self._buffer[start : start + size])
            self._next += size
            if self._timed_end < 0 and self._next > self._highest:
                self._timed_end = self._next
                self._timed_at = self._world.now
            flags: i64 = NOTHING
            if self.state == CLOSING and self._next == end:
                flags = FIN
                self._next += 1
            if self._next > self._highest:
                self._highest = self._next
            self._transmit(flags, self._next - size - (1 if flags == FIN else 0), data)
        if self.state == CLOSING and self._next == end:
            self._next += 1
            if self._next > self._highest:
                self._highest = self._next
            self._transmit(FIN, end, b"")
        if self._deadline == math.inf and (self._next > self._acked or end > self._acked):
            if not self._pace.backoff:
                self._waiting_since = self._world.now
            self._set_deadline()

    def _resend_first(self) -> None:
        self._timed_end = -1
        segment = self._world.segment_bytes
        data = bytes(self._buffer[:segment])
        if not data and self.state != CLOSING:
            return
        last = self.state == CLOSING and len(data) == len(self._buffer) and self._next > self._acked + len(data)
        self._transmit(FIN if last else NOTHING, self._acked, data)

    def _transmit(self, flags: i64, sequence: i64, data: bytes) -> None:
        self._ack_owed = False
        granted = self._arrived.expected + RECEIVE_BUFFER_BYTES - self._unread_bytes
        if granted > self._granted:
            self._granted = granted
        packet = Packet(self, flags, sequence, data, self._arrived.expected, self._granted)
        self._world.transmit_stream(self, packet)

    # --- time ---

    def _set_deadline(self) -> None:
        self._deadline = self._world.now + self._pace.wait_s()
        if self._timer_at > self._deadline:
            self._timer_at = self._deadline
            self._world.plan_stream_timer(self._deadline, self)

    def _stop_timer(self) -> None:
        self._deadline = math.inf

    def timer(self) -> None:
        """A planned look at the deadline, which may have moved since; one that an earlier look replaced does not count."""
        if self._world.now != self._timer_at:
            return
        self._timer_at = math.inf
        if self.state == DEAD or self._deadline == math.inf:
            return
        now = self._world.now
        if now < self._deadline:
            self._timer_at = self._deadline
            self._world.plan_stream_timer(self._deadline, self)
            return
        self._deadline = math.inf
        patience = CONNECT_TIMEOUT_S if self.state <= ANSWERED else self._world.silence_timeout_s
        if now - max(self._heard_at, self._waiting_since) >= patience:
            self._end("timeout")
            return
        self._pace.wait_longer()
        if self.state <= ANSWERED:
            self._transmit(SYN, 0, b"")
        elif self._next > self._acked:
            self._pace.heard_nothing(self._next - self._acked)
            self._recover = -1
            self._duplicates = 0
            self._timed_end = -1
            self._next = self._acked
            self._set_deadline()
            if self._world.tracer is not None:
                self._trace("no answer, sends again")
            self._flush()
            return
        else:
            self._transmit(PROBE, self._next, b"")
        self._set_deadline()

    # --- the end ---

    def _end(self, reason: str) -> None:
        """The stream ended by itself: tell the process, unless it had already said goodbye."""
        tell = not self.finished and self.state != ANSWERED and self.state != CLOSING
        self._die()
        if tell:
            self.host.tell(CLOSED, self, reason)

    def _trace(self, text: str) -> None:
        tracer = self._world.tracer
        if tracer is not None:
            tracer.line(self.host.index, f"stream with {self.remote_host.name}: {text}")

    def _die(self) -> None:
        self.state = DEAD
        self._deadline = math.inf
        self._buffer = bytearray()
        self._arrived.clear()
        self._unread = []
        self._unread_bytes = 0
        self.host.streams.pop(self, None)
