"""Lines to the members of replica sets, and those of other brokers to here (:mod:`nearcast.fabric.reading_lines`).

A line's two ends are what the bulk port has for its clients: here a :class:`~nearcast.topiclog.conversation.Conversation`,
which knows how a stream goes on after it was cut off, and at the member a :class:`~nearcast.broker.bulk.BulkTransport`, whose
client is a broker. A line to this broker itself serves streams that take from several logs, its own among them.

A question goes to the member that is nearest, one that only the leader can answer to the leader; if a member is gone, or does
not host the set any more, to the next one, for as long as :data:`PATIENCE_S`. Streams go on elsewhere behind what they got.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from nearcast.broker.bulk import READY, BulkTransport
from nearcast.broker.relayed import SetReading
from nearcast.errors import ConnectionClosed, RemoteProtocolError, RequestRefused
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Peer
from nearcast.topiclog import blocks, wire
from nearcast.topiclog.conversation import Conversation, Request

if TYPE_CHECKING:
    from nearcast.broker.process import Broker
    from nearcast.fabric.fabric import Fabric

PATIENCE_S: Final = 10.0
"""How long a member is looked for that answers. An election takes a fraction of that."""

ANSWER_S: Final = 4.0
"""How long one member may take, before another one is asked."""

PAUSE_S: Final = 0.1
"""Between two rounds of asking."""


class ServedLine(BulkTransport):
    """Another broker's line to this one, which is let in already and looked at what its client may."""

    trusted = True

    def __init__(self, broker: Broker, name: str, write: Callable[[bytes], None], has_room: Callable[[], bool]) -> None:
        super().__init__(broker, None)
        self._stream = _Stream(self, write)
        self._has_room = has_room
        self.transport = cast(asyncio.Transport, self._stream)
        self.peer = Peer("", listener="fabric")
        self.client_id = name
        self.state = READY
        self._reader = wire.FrameReader(self.port.max_publish_bytes, self.port.max_publish_bytes)
        self.port.opened(self)

    def tick(self, now: float) -> None:
        """Its end is the link's."""

    def wrote(self) -> None:
        """Something was sent: there may be no room for more."""
        self.paused = self.paused or not self._has_room()

    def settle(self) -> None:
        """There may be room again."""
        if self.paused and self._has_room():
            self.resume_writing()


class _Stream:
    """What a served line has for a socket."""

    def __init__(self, owner: ServedLine, write: Callable[[bytes], None]) -> None:
        self._owner = owner
        self._write = write
        self._closing = False

    def writelines(self, chunks: list[bytes | memoryview]) -> None:
        self._write(b"".join(chunks))
        self._owner.wrote()

    def is_closing(self) -> bool:
        return self._closing

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """What a broker asks on a line is bounded."""

    def resume_reading(self) -> None:
        """See :meth:`pause_reading`."""

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._owner.connection_lost, None)

    abort = close


class Line:
    """This broker's line to a member; to itself if ``name`` is empty."""

    def __init__(self, name: str, number: int, write: Callable[[bytes], None]) -> None:
        self.name = name
        self.number = number
        self.conversation = Conversation()
        self.readings: set[SetReading] = set()
        self._frames = wire.FrameReader(wire.MAX_MESSAGE_BYTES, blocks.MAX_BLOCK_BYTES)
        self._write = write

    def flush(self) -> None:
        output = self.conversation.output
        if output:
            self.conversation.output = []
            self._write(b"".join(output))

    def feed(self, data: bytes) -> bool:
        """Bytes of the member; whether it may go on."""
        try:
            for kind, number, body in self._frames.feed(data):
                self.conversation.frame(kind, number, body)
        except RemoteProtocolError:
            return False
        self.flush()
        return self.conversation.failure is None


class SetLines:
    """See the module. The driver of the fabric's :class:`~nearcast.fabric.reading_lines.ReadingLines`."""

    def __init__(self, broker: Broker, fabric: Fabric, flush: Callable[[], None]) -> None:
        self._broker = broker
        self._fabric = fabric
        self._lines = fabric.lines
        self._flush = flush
        self._flush_soon = False
        self._asking: dict[str, Line] = {}
        self._served: dict[str, tuple[int, ServedLine]] = {}
        self._last_number = fabric.epoch
        self._unplaced: set[SetReading] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._lines.driver = self

    # --- what the fabric says -------------------------------------------------------------------------------------------

    def asked(self, name: str, line: int, data: bytes) -> None:
        """See :class:`~nearcast.fabric.reading_lines.LineDriver`."""
        if self._closed:
            return
        known = self._served.get(name)
        if known is None or known[0] != line:
            if known is not None:
                known[1].abort()
            known = self._served[name] = (
                line,
                ServedLine(
                    self._broker,
                    name,
                    lambda answer: self._answer(name, line, answer),
                    lambda: self._lines.has_room(name),
                ),
            )
        # Not inside of the machine that is being told of it.
        asyncio.get_running_loop().call_soon(known[1].data_received, data)

    def _answer(self, name: str, line: int, data: bytes) -> None:
        self._lines.answer(name, line, data)
        self._send_soon()

    def answered(self, name: str, line: int, data: bytes) -> None:
        """See :class:`~nearcast.fabric.reading_lines.LineDriver`."""
        known = self._asking.get(name)
        if known is not None and known.number == line:
            self._feed(known, data)

    def _feed(self, line: Line, data: bytes) -> None:
        if self._asking.get(line.name) is not line:
            return
        if not line.feed(data):
            self._drop(line)
            return
        for reading in [reading for reading in line.readings if reading.is_misplaced]:
            self._leave(reading)
            reading.lost()
            reading.avoided.add(line.name)
            self._place_soon(reading)

    def peer_up(self, name: str) -> None:
        """See :class:`~nearcast.fabric.reading_lines.LineDriver`."""

    def peer_down(self, name: str) -> None:
        """See :class:`~nearcast.fabric.reading_lines.LineDriver`."""
        line = self._asking.get(name)
        if line is not None:
            self._drop(line)
        served = self._served.pop(name, None)
        if served is not None:
            served[1].abort()

    def settle(self) -> None:
        """See :class:`~nearcast.fabric.reading_lines.LineDriver`."""
        for _, served in self._served.values():
            served.settle()

    def _send_soon(self) -> None:
        """What was sent leaves after whatever runs now."""
        if not self._flush_soon:
            self._flush_soon = True
            asyncio.get_running_loop().call_soon(self._send_now)

    def _send_now(self) -> None:
        self._flush_soon = False
        self._flush()

    def close(self) -> None:
        """The broker stops."""
        self._closed = True
        for line in list(self._asking.values()):
            self._drop(line)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- lines ----------------------------------------------------------------------------------------------------------

    def _line(self, name: str) -> Line:
        found = self._asking.get(name)
        if found is None:
            self._last_number += 1
            found = self._asking[name] = self._own_line() if not name else self._line_to(name, self._last_number)
        return found

    def _line_to(self, name: str, number: int) -> Line:
        def write(data: bytes) -> None:
            self._lines.ask(name, number, data)
            self._send_soon()

        return Line(name, number, write)

    def _own_line(self) -> Line:
        loop = asyncio.get_running_loop()

        def ask(data: bytes) -> None:
            loop.call_soon(served.data_received, data)

        def answer(data: bytes) -> None:
            loop.call_soon(self._feed, line, data)

        line = Line("", self._last_number, ask)
        served = ServedLine(self._broker, self._fabric.name, answer, lambda: True)
        self._served[""] = (line.number, served)
        return line

    def _drop(self, line: Line) -> None:
        """The line is gone: questions fail, streams go on elsewhere."""
        if self._asking.get(line.name) is line:
            del self._asking[line.name]
        line.conversation.lost(ConnectionClosed(f"{line.name} cannot be reached"))
        readings, line.readings = line.readings, set()
        for reading in readings:
            reading.line = None
            reading.avoided.add(line.name)
            self._place_soon(reading)

    def _choose(self, source: str, newest: bool, avoided: set[str]) -> str | None:
        """A broker that has a log: the nearest, or who leads; None if there is none that was not tried."""
        if not source:
            return ""
        definition = self._fabric.sets.definitions.get(source)
        if definition is None:
            return None
        if source in self._fabric.sets.hosted and "" not in avoided and not newest:
            return ""
        found: list[tuple[float, str]] = []
        leader = self._fabric.sets.leader_of(source)
        for name in definition.members:
            peer = self._fabric.peers.get(name)
            if peer is None or not peer.up or peer.link is None or name in avoided:
                continue
            if newest and name == leader:
                return name
            found.append((peer.link.rtt_ms, name))
        return min(found)[1] if found else None

    # --- questions ------------------------------------------------------------------------------------------------------

    async def ask(self, source: str, content: wire.Message, *, newest: bool = False) -> Request:
        """Have a member of a set answer. Raises what it refuses with, or :class:`RequestRefused` when nobody answers."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_S
        avoided: set[str] = set()
        while True:
            name = None if self._closed else self._choose(source, newest, avoided)
            if name is not None:
                request = await self._ask(name, content)
                if request is not None and not _goes_on(request):
                    if request.error is not None:
                        raise request.error
                    return request
                avoided.add(name)
                continue
            if loop.time() >= until or self._closed:
                raise unreachable(source)
            avoided.clear()
            await asyncio.sleep(PAUSE_S)

    async def _ask(self, name: str, content: wire.Message) -> Request | None:
        line = self._line(name)
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = line.conversation.ask(content)
        request.wake = lambda: None if answered.done() else answered.set_result(None)
        line.flush()
        try:
            async with asyncio.timeout(ANSWER_S):
                await answered
        except TimeoutError:
            return None
        finally:
            if not request.done:
                line.conversation.forget(request)
        return request

    # --- streams --------------------------------------------------------------------------------------------------------

    def attach(self, reading: SetReading) -> None:
        """Begin to read."""
        self._place_soon(reading)

    def detach(self, reading: SetReading) -> None:
        """Nobody reads it any more."""
        self._unplaced.discard(reading)
        line = reading.line
        if line is not None:
            self._leave(reading)
            if reading.resumable:
                line.conversation.close(reading)
                line.flush()
        reading.wake = None

    def used(self, reading: SetReading) -> None:
        """A batch was taken."""
        line = reading.line
        if line is not None:
            line.conversation.use(reading)
            line.flush()

    def _leave(self, reading: SetReading) -> None:
        if reading.line is not None:
            reading.line.readings.discard(reading)
            reading.line = None

    def _place_soon(self, reading: SetReading) -> None:
        if not reading.resumable:
            return
        reading.is_misplaced = False
        self._unplaced.add(reading)
        self._wake_in(0.0)

    def _wake_in(self, seconds: float) -> None:
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._place_all)

    def _place_all(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        unplaced, self._unplaced = self._unplaced, set()
        for reading in unplaced:
            name = self._choose(reading.source, False, reading.avoided)
            if not reading.deadline:
                reading.deadline = now + PATIENCE_S
            if name is not None:
                line = self._line(name)
                reading.line = line
                line.readings.add(reading)
                line.conversation.open(reading)
                line.flush()
            elif now >= reading.deadline:
                reading.fail(unreachable(reading.source))
            else:
                reading.avoided.clear()
                self._unplaced.add(reading)
        if self._unplaced:
            self._wake_in(PAUSE_S)


def _goes_on(request: Request) -> bool:
    """Whether another member is to be asked."""
    error = request.error
    if isinstance(error, RequestRefused):
        return error.reason_code == reasons.USE_ANOTHER_SERVER
    return isinstance(error, ConnectionClosed)


def unreachable(set_name: str) -> RequestRefused:
    """Nobody who has it answers."""
    return RequestRefused(
        reasons.SERVER_UNAVAILABLE,
        f"no member of replica set {set_name} can be reached from here: `nearcast set list` shows who they are",
    )
