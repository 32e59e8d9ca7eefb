"""The client's side of the bulk port as a pure machine: what to send, and what the broker's frames mean.

Two kinds of exchange share a connection. A :class:`Request` gets one answer. A :class:`Reading` is a stream: it takes
batches in, gives credit back as they are used, and knows at any time how to go on after the connection is lost
(:meth:`Reading.opening`): from the very next record, up to the same end.

A driver moves frames: it sends what :attr:`Conversation.output` gathers and hands in each frame it reads. It is told through
``wake`` that an exchange has something new. No sockets, no clock, no threads here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from nearcast.errors import (
    BatchRefused,
    ConnectionClosed,
    ConnectionRefused,
    NearcastError,
    RecordUnavailable,
    RemoteProtocolError,
    RequestRefused,
    StorageUnavailable,
    TopicUnknown,
)
from nearcast.topiclog import wire

DEFAULT_WINDOW_BYTES = 8 * 1_048_576
"""Credit of a stream: bytes that may be on their way or wait to be used."""

PROTOCOL_ERROR = 0x82
TOO_LARGE = 0x95
SERVER_BUSY = 0x89

FINAL_REASONS = frozenset({0x81, PROTOCOL_ERROR, TOO_LARGE})
"""Reason codes of a connection's end that say that asking the same again will end the next one too."""


class Batch:
    """Records that came together: whole blocks in ``data``, and the names of the topic numbers in them.

    ``next_indexes`` says, by topic number, where reading goes on behind this batch. A batch without data tells of ``gaps``.
    """

    __slots__ = ("data", "gaps", "next_indexes", "topics")

    def __init__(
        self, data: memoryview, topics: dict[int, str], next_indexes: list[tuple[int, int]], gaps: list[MissingRecords]
    ) -> None:
        self.data = data
        self.topics = topics
        self.next_indexes = next_indexes
        self.gaps = gaps


class MissingRecords:
    """Records from ``first_index`` to before ``next_index`` were removed by retention before they could be read."""

    __slots__ = ("first_index", "next_index", "topic")

    def __init__(self, topic: str, first_index: int, next_index: int) -> None:
        self.topic = topic
        self.first_index = first_index
        self.next_index = next_index

    def __repr__(self) -> str:
        return f"MissingRecords({self.topic!r}, {self.first_index}, {self.next_index})"

    def error(self) -> RecordUnavailable:
        """For a reader that cannot do without."""
        return RecordUnavailable(self.topic, self.first_index, self.next_index, self.next_index + 1)


class Request:
    """One question and its answer: a message, the bytes of a record (:class:`wire.Get`), or an error."""

    def __init__(self, content: wire.Message) -> None:
        self.content = content
        self.number = 0
        self.answer: wire.FromBroker | None = None
        self.data: memoryview | None = None
        self.error: NearcastError | None = None
        self.wake: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        return self.answer is not None or self.data is not None or self.error is not None

    def settle(
        self,
        answer: wire.FromBroker | None = None,
        data: memoryview | None = None,
        error: NearcastError | None = None,
    ) -> None:
        self.answer, self.data, self.error = answer, data, error
        if self.wake is not None:
            self.wake()


class Reading:
    """One stream. ``batches`` wait to be used; :meth:`take` gives the next and grants credit for it."""

    def __init__(self, asked: wire.Open, window_bytes: int = DEFAULT_WINDOW_BYTES) -> None:
        self.number = 0
        self.topics: dict[int, str] = {}
        self.ended = False
        self.error: NearcastError | None = None
        self.wake: Callable[[], None] | None = None
        self._asked = asked
        self._window_bytes = window_bytes
        self._batches: deque[Batch] = deque()
        self._unpaired: memoryview | None = None
        self._owed_bytes = 0
        # Where each topic stands, also for batches that wait here: nothing that arrived is asked for again.
        self._next: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._all_named = False

    @property
    def opened(self) -> bool:
        """Whether all topics that were there in the beginning are named."""
        return self._all_named

    @property
    def over(self) -> bool:
        """Whether it ended and all of it was taken."""
        return self.ended and not self._batches

    @property
    def ready(self) -> bool:
        """Whether :meth:`take` has something to say."""
        return bool(self._batches) or self.ended or self.error is not None

    def opening(self) -> wire.Open:
        """The message that opens the stream, or opens it again where it was."""
        asked = self._asked
        room = max(1, self._window_bytes - sum(len(batch.data) for batch in self._batches))
        if not self._all_named:
            # Not one record arrived: what has been named is named again.
            self._next.clear()
            self._ends.clear()
            return _with(asked, credit=room)
        return _with(
            asked,
            start="earliest",
            start_indexes=dict(self._next),
            listed_only=not asked.follow,
            end_indexes={**asked.end_indexes, **self._ends},
            credit=room,
        )

    def lost(self) -> None:
        """The connection is gone. Half a batch is forgotten; whole ones stay."""
        self.number = 0
        self.topics = {}
        self._unpaired = None
        self._owed_bytes = 0

    @property
    def resumable(self) -> bool:
        return not self.ended and self.error is None

    def take(self) -> Batch | None:
        """The next batch; ``None`` when none waits. Raises the error that ended the stream, once all before it was taken."""
        if self._batches:
            batch = self._batches.popleft()
            self._owed_bytes += len(batch.data)
            return batch
        if self.error is not None:
            raise self.error
        return None

    def grant(self) -> int:
        """Credit to send now, in bytes: what was used since the last time, once it is worth a message."""
        if self._owed_bytes * 4 < self._window_bytes or self.ended or self.number == 0:
            return 0
        owed, self._owed_bytes = self._owed_bytes, 0
        return owed

    def heard(self, content: wire.FromBroker) -> None:
        """A message of this stream."""
        if isinstance(content, wire.Progress):
            self._batch(content)
        elif isinstance(content, wire.Names):
            # Batches that are there already keep their table if a number means something else from here on.
            known = self.topics
            renumbered = any(known.get(name.number, name.topic) != name.topic for name in content.names)
            topics = dict(known) if renumbered or self._batches else known
            for name in content.names:
                topics[name.number] = name.topic
                self._next.setdefault(name.topic, name.start)
                if name.end is not None:
                    self._ends.setdefault(name.topic, name.end)
            self.topics = topics
        elif isinstance(content, wire.Gap):
            topic = self.topics.get(content.number)
            if topic is None:
                raise RemoteProtocolError(PROTOCOL_ERROR, "a gap in a topic that was not named")
            self._next[topic] = content.next_index
            missing = MissingRecords(topic, content.first_index, content.next_index)
            self._batches.append(Batch(memoryview(b""), self.topics, [], [missing]))
            self._woken()
        elif isinstance(content, wire.Opened):
            self._all_named = True
        elif isinstance(content, wire.End):
            self.ended = True
            self._woken()
        elif isinstance(content, wire.Refused):
            self.fail(refusal(content))
        else:
            raise RemoteProtocolError(PROTOCOL_ERROR, "an answer to a stream that is none")

    def fail(self, error: NearcastError) -> None:
        """It ends here, and why."""
        if self.resumable:
            self.error = error
            self._woken()

    def data(self, body: memoryview) -> None:
        """Blocks of this stream."""
        if self._unpaired is not None:
            raise RemoteProtocolError(PROTOCOL_ERROR, "data without its progress")
        self._unpaired = body

    def _batch(self, progress: wire.Progress) -> None:
        data, self._unpaired = self._unpaired, None
        if data is None:
            raise RemoteProtocolError(PROTOCOL_ERROR, "progress without data")
        for number, index in progress.next_indexes:
            topic = self.topics.get(number)
            if topic is None:
                raise RemoteProtocolError(PROTOCOL_ERROR, "data of a topic that was not named")
            self._next[topic] = index
        self._batches.append(Batch(data, self.topics, progress.next_indexes, []))
        self._woken()

    def _woken(self) -> None:
        if self.wake is not None:
            self.wake()


class Conversation:
    """One connection, from :class:`wire.Welcome` on. ``output`` are bytes to send; the driver empties it."""

    def __init__(self) -> None:
        self.output: list[bytes] = []
        self.failure: RequestRefused | None = None
        """Why the broker ends the connection, if it said so."""
        self.max_frame_bytes = wire.MAX_MESSAGE_BYTES
        """What the broker takes, as its welcome says."""
        self._exchanges: dict[int, Request | Reading] = {}
        self._abandoned: set[int] = set()
        self._last = 0

    @property
    def idle(self) -> bool:
        return not self._exchanges

    def ask(self, content: wire.Message) -> Request:
        """Send a request."""
        request = Request(content)
        request.number = self._number()
        self._send(request.number, content)
        self._exchanges[request.number] = request
        return request

    def expect(self, number: int) -> Request:
        """Wait for one more answer under a number of ours that is free again: an upload's, which may come before its end."""
        request = Request(wire.StageEnd())
        request.number = number
        self._exchanges[number] = request
        return request

    def end_upload(self, request: Request) -> None:
        """All of an upload was sent."""
        self.output.append(wire.message(request.number, request.content))

    def open(self, reading: Reading) -> None:
        """Open a stream, or open it again."""
        number = self._number()
        self._send(number, reading.opening())
        reading.number = number
        self._exchanges[number] = reading

    def use(self, reading: Reading) -> None:
        """Batches were taken: grant credit, if it is time."""
        owed = reading.grant()
        if owed:
            self.output.append(wire.message(reading.number, wire.Credit(owed)))

    def close(self, reading: Reading) -> None:
        """Whoever read it wants no more. What still arrives is dropped."""
        if self._exchanges.pop(reading.number, None) is not None:
            self._abandoned.add(reading.number)
            self.output.append(wire.message(reading.number, wire.Close()))
        reading.ended = True

    def forget(self, request: Request) -> None:
        """Nobody waits for this answer any more."""
        if self._exchanges.pop(request.number, None) is not None and not request.done:
            self._abandoned.add(request.number)

    def ping(self) -> None:
        self.output.append(wire.message(0, wire.Ping()))

    def frame(self, kind: int, number: int, body: bytes | bytearray | memoryview) -> None:
        """A frame arrived; raises :class:`RemoteProtocolError` when the broker breaks the protocol."""
        exchange = self._exchanges.get(number)
        if kind == wire.DATA:
            if isinstance(exchange, Reading):
                exchange.data(memoryview(body))
            elif isinstance(exchange, Request):
                del self._exchanges[number]
                exchange.settle(data=memoryview(body))
            elif number not in self._abandoned:
                raise RemoteProtocolError(PROTOCOL_ERROR, "data that nobody asked for")
            return
        content = wire.decode_from_broker(body)
        if number == 0:
            self._of_connection(content)
        elif isinstance(exchange, Reading):
            exchange.heard(content)
            if not exchange.resumable:
                del self._exchanges[number]
        elif isinstance(exchange, Request):
            del self._exchanges[number]
            if isinstance(content, wire.Refused):
                exchange.settle(error=refusal(content))
            else:
                exchange.settle(answer=content)
        elif number in self._abandoned:
            if isinstance(content, wire.End | wire.Refused | wire.Done | wire.States | wire.Indexes | wire.Rules):
                self._abandoned.discard(number)
        else:
            raise RemoteProtocolError(PROTOCOL_ERROR, "an answer that nobody asked for")

    def lost(self, error: NearcastError) -> list[Reading]:
        """The connection is gone: requests fail with ``error``; the streams that can go on elsewhere are handed back."""
        exchanges, self._exchanges = self._exchanges, {}
        readings = []
        for exchange in exchanges.values():
            if isinstance(exchange, Reading):
                exchange.lost()
                readings.append(exchange)
            else:
                exchange.settle(error=error)
        return readings

    def _of_connection(self, content: wire.FromBroker) -> None:
        if isinstance(content, wire.Ping):
            self.output.append(wire.message(0, wire.Pong()))
        elif isinstance(content, wire.Refused):
            self.failure = RequestRefused(content.reason_code, content.message)
        elif not isinstance(content, wire.Pong):
            raise RemoteProtocolError(PROTOCOL_ERROR, "a message of number 0 that needs another")

    def _send(self, number: int, content: wire.Message) -> None:
        frame = wire.message(number, content)
        size = len(frame) - wire.HEADER_BYTES
        if size > self.max_frame_bytes:
            what = "this many topics with indexes" if isinstance(content, wire.Open) else "this much"
            raise RequestRefused(
                TOO_LARGE,
                f"{size:,} bytes in one request, the broker takes {self.max_frame_bytes:,}: do not ask {what} at once",
            )
        self.output.append(frame)

    def _number(self) -> int:
        while True:
            self._last = self._last % wire.MAX_NUMBER + 1
            if self._last not in self._exchanges and self._last not in self._abandoned:
                return self._last


def welcomed(kind: int, number: int, body: bytes | bytearray | memoryview) -> wire.Welcome:
    """The broker's answer to :class:`wire.Hello`; raises :class:`ConnectionRefused` or :class:`RemoteProtocolError`, and
    :class:`ConnectionClosed` when it is worth trying again: after a restart, all come at once."""
    content = wire.decode_from_broker(body) if kind == wire.MESSAGE and number == 0 else None
    if isinstance(content, wire.Refused):
        if content.reason_code == SERVER_BUSY:
            raise ConnectionClosed(content.message, content.reason_code)
        raise ConnectionRefused(content.reason_code, content.message)
    if not isinstance(content, wire.Welcome):
        raise RemoteProtocolError(PROTOCOL_ERROR, "the broker answered something other than a welcome")
    return content


def refusal(content: wire.Refused) -> NearcastError:
    """The error that a refusal means."""
    if content.kind == "topic-unknown":
        return TopicUnknown(content.topic, content.message)
    if content.kind == "record-unavailable":
        return RecordUnavailable(content.topic, content.index, content.first_index, content.next_index)
    if content.kind == "batch":
        return BatchRefused(content.message)
    if content.kind == "storage":
        return StorageUnavailable("the broker's disk", content.message)
    return RequestRefused(content.reason_code, content.message)


def _with(
    asked: wire.Open,
    *,
    credit: int,
    start: str | None = None,
    start_indexes: dict[str, int] | None = None,
    listed_only: bool | None = None,
    end_indexes: dict[str, int] | None = None,
) -> wire.Open:
    return wire.Open(
        filters=asked.filters,
        start=asked.start if start is None else start,  # type: ignore[arg-type]
        start_value=asked.start_value,
        start_indexes=asked.start_indexes if start_indexes is None else start_indexes,
        listed_only=asked.listed_only if listed_only is None else listed_only,
        end_index=asked.end_index,
        end_indexes=asked.end_indexes if end_indexes is None else end_indexes,
        end_time_us=asked.end_time_us,
        follow=asked.follow,
        credit=credit,
        keeper=asked.keeper,
    )
