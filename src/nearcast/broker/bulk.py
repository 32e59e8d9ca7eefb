"""The bulk port: connections that read topic logs by index, and hand in batches. The protocol is
:mod:`nearcast.topiclog.wire`'s.

:class:`BulkPort` is what all of a broker's bulk connections share; :class:`BulkTransport` is one connection: it lets its
client in through the broker's own authenticator, answers requests (:mod:`.bulk_requests`), and keeps its streams going.

Streams are served in turn, one batch each, and only while their client gives credit and its socket takes bytes. So one stream
makes the broker hold about one batch, however slow its reader, and a turn of the event loop does a bounded amount of work,
however fast it is. What is not in memory is read from disk in threads, a few reads at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, ClassVar, cast

import msgspec

from nearcast import __version__
from nearcast.broker.bulk_requests import BulkRequests, refusal, refused
from nearcast.broker.relayed import Relayed
from nearcast.broker.sources import Kept
from nearcast.errors import NearcastError, RemoteProtocolError, StorageUnavailable
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Credentials, Peer, Verdict
from nearcast.topiclog import wire
from nearcast.topiclog.streams import Batch, ReadStream
from nearcast.topiclog.topics import Extents

if TYPE_CHECKING:
    from nearcast.broker.listeners import BoundListener
    from nearcast.broker.process import Broker

MQTT_VERSION = 5
"""The authenticator is told that bulk clients speak this version."""

IDLE_SECONDS = 120.0
"""A client that has nothing open and says nothing for this long is sent away. Clients come back by themselves."""

MAX_STREAMS = 64
"""Streams of one connection. How many there are in all is ``topic_log.max_readers``."""

MAX_REQUESTS = 1_024
"""Requests of one connection that wait for their answer. Reading from the connection stops there."""

READS_AT_ONCE = 8
"""Batches that are being read from disk, or were read and not yet sent, over all connections."""

OPENING_TOPICS = 1_000
"""Topics that one turn of the event loop looks at for a stream that is being opened."""

MAX_UPLOAD_BYTES = 8_388_608
"""Bytes of one connection's uploads that wait to be written. Reading from the connection stops there."""

MAX_ANSWER_BYTES = 4_194_304
"""Bytes of answers that a client has not taken. Reading from the connection stops there."""

MAX_LISTED = 1_000_000
"""Indexes by topic that open streams were given, over all connections: they are held as long as the stream is open."""

TURN_SECONDS = 0.005
"""After this long, further requests of a connection wait for the next turn of the event loop."""

IDLE = 0
BUSY = 1
MORE = 2

AWAITING_HELLO = 0
AUTHENTICATING = 1
READY = 2
CLOSED = 3


class BulkPort:
    """What the bulk connections of one broker share."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.requests = BulkRequests(broker, self)
        self.transports: set[BulkTransport] = set()
        self.stream_count = 0
        self.listed_count = 0
        """Indexes by topic that their clients gave them."""
        self.bytes_sent = 0
        self._reads = 0
        self._waiting: deque[BulkTransport] = deque()
        self._closed = False
        self._empty = asyncio.Event()
        broker.topics.on_commit.append(self.committed)

    @property
    def max_batch_bytes(self) -> int:
        return self.broker.config.topic_log.max_batch_bytes

    @property
    def max_publish_bytes(self) -> int:
        """Most that a client's frame may have: a message as large as MQTT allows, or a piece of an upload."""
        return max(wire.MAX_MESSAGE_BYTES, self.broker.config.limits.max_packet_bytes + 65_536)

    def gauges(self) -> dict[str, tuple[float, str]]:
        """Figures for /metrics."""
        return {
            "bulk_connections": (len(self.transports), "Connections of the bulk port."),
            "bulk_streams": (self.stream_count, "Streams that read topics."),
            "bulk_bytes_sent": (self.bytes_sent, "Bytes of records that streams sent since the start."),
            "staged_bytes": (
                self.requests.staging.staged_bytes,
                "Bytes of batches that were handed in and not yet published.",
            ),
        }

    # --- connections --------------------------------------------------------------------------------------------------------

    def opened(self, transport: BulkTransport) -> None:
        self.transports.add(transport)
        if self._closed:
            transport.abort()

    def lost(self, transport: BulkTransport) -> None:
        self.transports.discard(transport)
        if not self.transports:
            self._empty.set()

    def tick(self, now: float) -> None:
        """Time passed: send away whoever says nothing."""
        for transport in list(self.transports):
            transport.tick(now)
        self.requests.staging.tick(now)

    def start(self) -> None:
        """The log is open: go on with batches that were decided on."""
        self.requests.staging.start()

    def committed(self) -> None:
        """Readers may see more."""
        for transport in self.transports:
            transport.pump_soon()

    def disconnect_all(self, message: str) -> None:
        """The broker stops: say so, and close."""
        self._closed = True
        for transport in list(self.transports):
            transport.send_away(reasons.SERVER_SHUTTING_DOWN, message)

    def abort_all(self) -> None:
        self._closed = True
        for transport in list(self.transports):
            transport.abort()

    async def emptied(self) -> None:
        while self.transports:
            self._empty.clear()
            await self._empty.wait()

    async def close(self) -> None:
        """After the last connection: wait for what is under way."""
        self._closed = True
        await self.requests.close()

    async def load(self, source: str, extents: Extents) -> memoryview:
        """The bytes of a read, from memory or, in a thread, from disk. ``source``: whose log it is."""
        files = self.requests.sources.kept(source).files
        if files is None:
            raise StorageUnavailable("topics", "the broker is stopping")
        return await files.load(extents)

    # --- reading from disk --------------------------------------------------------------------------------------------------

    def may_read(self, transport: BulkTransport) -> bool:
        """Whether one more read may begin; if not, the transport is told when it may."""
        if self._reads < READS_AT_ONCE:
            return True
        if not transport.waits_for_read:
            transport.waits_for_read = True
            self._waiting.append(transport)
        return False

    def read_begun(self) -> None:
        self._reads += 1

    def read_done(self) -> None:
        self._reads -= 1
        self.wake_reader()

    def wake_reader(self) -> None:
        """If one more read may begin, tell whoever waits longest and can use it."""
        while self._waiting and self._reads < READS_AT_ONCE:
            transport = self._waiting.popleft()
            transport.waits_for_read = False
            if transport.pump_soon():
                return


class BulkTransport(asyncio.Protocol):
    """One client's connection."""

    trusted: ClassVar[bool] = False
    """Whether it is another broker, which looked at its client's rights itself."""

    def __init__(self, broker: Broker, listener: BoundListener | None) -> None:
        self.broker = broker
        self.listener = listener
        self.port = broker.bulk
        self.transport: asyncio.Transport | None = None
        self.peer = Peer("")
        self.client_id = ""
        self.username: str | None = None
        self.state = AWAITING_HELLO
        self.waits_for_read = False
        self.requests_under_way = 0
        self.upload_bytes = 0
        """Bytes of uploads that wait to be written."""
        self._reader = wire.FrameReader(wire.MAX_HELLO_BYTES, 0)
        self._frames: deque[tuple[int, int, bytes]] = deque()
        self.paused = False
        self._reading_paused = False
        self._going_on = False
        self._pumping = False
        self._read_under_way = False
        self._streams: dict[int, ReadStream | Relayed] = {}
        self._sources: dict[int, str] = {}
        """Of streams that replica sets have here, the set."""
        self._opening: dict[int, wire.Open] = {}
        """Streams that wait until the replica here has caught up."""
        self._turns: deque[int] = deque()
        self.uploads: dict[int, object] = {}
        self._last_heard = 0.0
        self._close_reason = ""

    # --- what asyncio calls -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        self.transport = stream
        listener = self.listener
        if listener is not None:
            self.peer = listener.peer_of(stream)
        if listener is None or not listener.admits(self.peer):
            self.state = CLOSED
            stream.abort()
            return
        high = self.port.max_batch_bytes
        stream.set_write_buffer_limits(high, high // 4)
        self._last_heard = self.broker.monotonic()
        self.port.opened(self)

    def data_received(self, data: bytes) -> None:
        if self.state == CLOSED:
            return
        if self.state == READY:
            # Before, time runs from the first byte on, however slowly others follow.
            self._last_heard = self.broker.monotonic()
        try:
            self._frames.extend(self._reader.feed(data))
            self._take_frames()
        except RemoteProtocolError as error:
            self.send_away(error.reason_code, error.message)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self.unblocked()
        self.pump_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        was_in = self.state == READY or bool(self.client_id)
        self.state = CLOSED
        for number in [*self._streams, *self._opening]:
            self._forget_stream(number)
        self._frames.clear()
        self.port.requests.staging.lost(self)
        self.port.lost(self)
        if was_in:
            self._log("bulk client disconnected", reason=self._close_reason or "connection closed")

    # --- coming in ----------------------------------------------------------------------------------------------------------

    def _take_frames(self) -> None:
        """Handle frames in order, as far as the state of things allows; the rest waits, and reading with it."""
        frames = self._frames
        until = self.broker.monotonic() + TURN_SECONDS
        while frames and self.state != CLOSED and self.state != AUTHENTICATING:
            if self.state == READY and self.blocked:
                break
            kind, number, body = frames.popleft()
            if self.state == AWAITING_HELLO:
                self._hello(kind, number, body)
            elif kind == wire.DATA:
                self.port.requests.staging.data(self, number, body)
            else:
                self._message(number, wire.decode_from_client(body))
            if frames and self.broker.monotonic() >= until:
                self._go_on_soon()
                break
        if self.state == AUTHENTICATING and frames:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "nothing may follow a hello before its welcome")
        self._regulate()

    def _go_on_soon(self) -> None:
        if not self._going_on:
            self._going_on = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._going_on = False
        self.unblocked()

    @property
    def blocked(self) -> bool:
        """Whether so much is under way that nothing more is taken in."""
        if self.requests_under_way >= MAX_REQUESTS or self.upload_bytes >= MAX_UPLOAD_BYTES:
            return True
        # Streams wait for the socket by themselves; whoever does not take answers gets no further ones.
        transport = self.transport
        if not self.paused or transport is None:
            return False
        return transport.get_write_buffer_size() > 2 * self.port.max_batch_bytes + MAX_ANSWER_BYTES

    def _regulate(self) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        should_pause = bool(self._frames) or (self.state == READY and self.blocked)
        if should_pause != self._reading_paused:
            self._reading_paused = should_pause
            if should_pause:
                transport.pause_reading()
            else:
                transport.resume_reading()

    def unblocked(self) -> None:
        """Something that was under way is done."""
        if self.state == READY and (self._frames or self._reading_paused):
            try:
                self._take_frames()
            except RemoteProtocolError as error:
                self.send_away(error.reason_code, error.message)

    def _hello(self, kind: int, number: int, body: bytes) -> None:
        content = wire.decode_from_client(body) if kind == wire.MESSAGE and number == 0 else None
        if not isinstance(content, wire.Hello):
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "the first message must be a hello")
        if content.version != wire.VERSION:
            raise RemoteProtocolError(
                reasons.UNSUPPORTED_PROTOCOL_VERSION,
                f"version {content.version} of the protocol; this broker speaks {wire.VERSION}",
            )
        if "\0" in content.client_id or len(content.client_id.encode("utf-8", "surrogatepass")) > 1_024:
            raise RemoteProtocolError(reasons.CLIENT_ID_NOT_VALID, "the client identifier is too long, or no MQTT string")
        self.client_id = content.client_id or self.port.requests.new_client_id()
        self.state = AUTHENTICATING
        credentials = Credentials(self.peer, self.client_id, MQTT_VERSION, content.username, content.password)
        verdict = self.broker.authenticate(credentials, self)
        if verdict is not None:
            self.decide(verdict)

    def decide(self, verdict: Verdict) -> None:
        """The authenticator's answer, at once or later."""
        if self.state != AUTHENTICATING:
            return
        if not verdict.accepted:
            self._log("bulk client refused", reason=verdict.reason or reasons.name(verdict.reason_code))
            self.client_id = ""
            self.send_away(verdict.reason_code, verdict.reason or reasons.name(verdict.reason_code))
            return
        self.username = verdict.username
        self.state = READY
        limit = self.port.max_publish_bytes
        self._reader.max_message_bytes = self._reader.max_data_bytes = limit
        welcome = wire.Welcome(wire.VERSION, self.client_id, IDLE_SECONDS, limit, f"nearcast {__version__}")
        self._last_heard = self.broker.monotonic()
        self.send(0, welcome)
        self._log("bulk client connected", user=self.username)

    def _message(self, number: int, content: wire.FromClient) -> None:
        if isinstance(content, wire.Ping):
            self.send(number, wire.Pong())
        elif isinstance(content, wire.Pong):
            pass
        elif number == 0 or isinstance(content, wire.Hello):
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "a message that has no place here")
        elif isinstance(content, wire.Credit):
            stream = self._streams.get(number)
            if stream is not None:
                stream.grant(content.bytes)
                self.pump_soon()
            elif number in self._opening:
                asked = self._opening[number]
                self._opening[number] = msgspec.structs.replace(asked, credit=asked.credit + max(0, content.bytes))
        elif isinstance(content, wire.Close):
            self._closed_by_client(number)
        elif (
            number in self._streams
            or number in self._opening
            or (number in self.uploads and not isinstance(content, wire.StageEnd))
        ):
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "a number that is in use")
        elif isinstance(content, wire.Open):
            self._open(number, content)
        else:
            self.port.requests.handle(self, number, content)

    def _in_use(self, number: int, content: wire.FromClient) -> bool:
        if number in self._streams or number in self._opening:
            return True
        return number in self.uploads and not isinstance(content, wire.StageEnd)

    # --- streams ------------------------------------------------------------------------------------------------------------

    def _open(self, number: int, content: wire.Open) -> None:
        most = self.broker.config.topic_log.max_readers
        try:
            requests = self.port.requests
            requests.check_read(self, content.filters)
            sources = requests.sources.of(content.filters, content.keeper, trusted=self.trusted)
            if len(self._streams) + len(self._opening) >= MAX_STREAMS or self.port.stream_count >= most:
                raise refused(
                    reasons.QUOTA_EXCEEDED,
                    f"{most} streams are open over all, or {MAX_STREAMS} on this connection: close some, or raise"
                    " topic_log.max_readers",
                )
            if self.port.listed_count + len(content.start_indexes) + len(content.end_indexes) > MAX_LISTED:
                raise refused(
                    reasons.QUOTA_EXCEEDED,
                    f"open streams hold {self.port.listed_count:,} indexes of topics, {MAX_LISTED:,} are allowed: close some",
                )
            if len(sources) > 1 or not requests.sources.serves(sources[0]):
                self._begin(requests.relay(self, number, content, sources))
            elif requests.sources.lags(sources[0], content):
                self._opening[number] = content
                requests.catch_up(self, number, sources[0], content)
            else:
                self._begin_here(number, content, requests.sources.kept(sources[0]))
        except NearcastError as error:
            self.send(number, refusal(error))

    def caught_up(self, number: int, source: str, error: NearcastError | None) -> None:
        """The replica here has what a stream is about, or cannot know."""
        content = self._opening.pop(number, None)
        if content is None or self.state != READY:
            return
        try:
            if error is not None:
                raise error
            self._begin_here(number, content, self.port.requests.sources.kept(source))
        except NearcastError as refused_for:
            self.send(number, refusal(refused_for))

    def _begin_here(self, number: int, content: wire.Open, kept: Kept) -> None:
        if kept.source:
            self._sources[number] = kept.source
        self._begin(ReadStream(number, content, kept.log, kept.hidden))

    def _begin(self, stream: ReadStream | Relayed) -> None:
        self._streams[stream.number] = stream
        self.port.stream_count += 1
        self.port.listed_count += stream.listed_count
        self._turns.append(stream.number)
        self.pump_soon()

    def _closed_by_client(self, number: int) -> None:
        if number in self._streams or number in self._opening:
            self._forget_stream(number)
            self.send(number, wire.End())
        elif number in self.uploads:
            self.port.requests.staging.closed(self, number)
            self.send(number, wire.End())

    def _forget_stream(self, number: int) -> None:
        self._opening.pop(number, None)
        self._sources.pop(number, None)
        stream = self._streams.pop(number, None)
        if stream is not None:
            self.port.stream_count -= 1
            self.port.listed_count -= stream.listed_count
            self._turns.remove(number)
            if not isinstance(stream, ReadStream):
                stream.close()

    def pump_soon(self) -> bool:
        """Go on with streams at the next turn of the event loop; whether there is something to go on with."""
        if not self._streams or self.state != READY:
            return False
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)
        return True

    def _pump(self) -> None:
        """Let the next stream in turn do one step."""
        self._pumping = False
        if not self.paused and not self._read_under_way and self.state == READY:
            self._take_turn()
        # It may have been told that it can read, and did not.
        self.port.wake_reader()

    def _take_turn(self) -> None:
        for _ in range(len(self._turns)):
            if not self._turns:
                return
            stream = self._streams[self._turns[0]]
            self._turns.rotate(-1)
            try:
                step = self._step(stream) if isinstance(stream, ReadStream) else self._relay(stream)
                if step == MORE:
                    self.pump_soon()
                if step != IDLE:
                    return
            except NearcastError as error:
                self._end_stream(stream, error)

    def _step(self, stream: ReadStream) -> int:
        """Do a bounded piece of work for a stream. MORE: there may be more at once. BUSY: a read has to end before."""
        number = stream.number
        opening = not stream.opened
        names = stream.look(OPENING_TOPICS)
        if names:
            self.send(number, wire.Names(names))
        if opening:
            if stream.opened:
                self.send(number, wire.Opened())
            return MORE
        for gap in stream.take_gaps():
            self.send(number, gap)
        if stream.finished:
            self._forget_stream(number)
            self.send(number, wire.End())
            return MORE
        if stream.credit <= 0:
            return IDLE
        if not self.port.may_read(self):
            return BUSY
        extents = stream.plan(self.port.max_batch_bytes)
        for gap in stream.take_gaps():
            self.send(number, gap)
        if extents is None:
            return IDLE if stream.waiting else MORE
        self._read_under_way = True
        self.port.read_begun()
        source = self._sources.get(number, "")
        reading = asyncio.get_running_loop().create_task(self.port.load(source, extents), name="bulk-read")
        reading.add_done_callback(partial(self._read_done, stream))
        return BUSY

    def _read_done(self, stream: ReadStream, reading: asyncio.Task[memoryview]) -> None:
        self._read_under_way = False
        self.port.read_done()
        if not reading.cancelled() and self.state == READY and self._streams.get(stream.number) is stream:
            try:
                batch = stream.take(reading.result())
            except NearcastError as error:
                self._end_stream(stream, error)
            else:
                for gap in stream.take_gaps():
                    self.send(stream.number, gap)
                if batch is not None:
                    self._send_batch(stream.number, batch)
        self.pump_soon()

    def _relay(self, stream: Relayed) -> int:
        """The same for a stream that others read: pass on what came of it."""
        for content in stream.news():
            self.send(stream.number, content)
        if stream.finished:
            self._forget_stream(stream.number)
            self.send(stream.number, wire.End())
            return MORE
        if stream.credit <= 0:
            return IDLE
        found = stream.take()
        if found is None:
            return IDLE
        before, data, progress = found
        for content in before:
            self.send(stream.number, content)
        if data:
            self._send_batch(stream.number, Batch([data], progress.next_indexes))
        return MORE

    def _end_stream(self, stream: ReadStream | Relayed, error: NearcastError) -> None:
        self._forget_stream(stream.number)
        self.send(stream.number, refusal(error))

    def _send_batch(self, number: int, batch: Batch) -> None:
        self.port.bytes_sent += batch.bytes
        progress = wire.message(number, batch.progress)
        self._write([wire.data_header(number, batch.bytes), *batch.chunks, progress])

    # --- going out ----------------------------------------------------------------------------------------------------------

    def send(self, number: int, content: wire.Message) -> None:
        """Send a message."""
        self._write([wire.message(number, content)])

    def send_data(self, number: int, data: bytes | memoryview) -> None:
        self._write([wire.data_header(number, len(data)), data])

    def _write(self, chunks: list[bytes | memoryview]) -> None:
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.writelines(chunks)

    def send_away(self, reason_code: int, message: str) -> None:
        """Say why, and close."""
        if self.state != CLOSED:
            self._close_reason = message
            self.send(0, wire.Refused("request", message, reason_code))
            self.state = CLOSED
            for number in list(self._streams):
                self._forget_stream(number)
            if self.transport is not None:
                self.transport.close()

    def abort(self) -> None:
        self.state = CLOSED
        if self.transport is not None:
            self.transport.abort()

    def tick(self, now: float) -> None:
        """Time passed."""
        silent_seconds = now - self._last_heard
        if self.state == CLOSED:
            # It was sent away and does not take its last bytes.
            if silent_seconds > IDLE_SECONDS and self.transport is not None:
                self.transport.abort()
        elif self.state != READY:
            if silent_seconds > self.broker.config.limits.connect_timeout_seconds:
                self.send_away(reasons.KEEP_ALIVE_TIMEOUT, "no hello came in time")
        elif not self._streams and not self.uploads and not self.requests_under_way and silent_seconds > IDLE_SECONDS:
            self.send_away(reasons.KEEP_ALIVE_TIMEOUT, f"nothing was heard for {IDLE_SECONDS:g} s")

    def _log(self, message: str, **facts: object) -> None:
        self.broker.events.event(
            logging.INFO,
            message,
            client=self.client_id,
            peer=self.peer.address,
            listener=self.peer.listener,
            **facts,
        )
