"""Topic logs for code without an event loop: plain blocking sockets, one thread at a time. Spark's executors use this.

    with BlockingTopics("nearcast://localhost:7883") as topics:
        topics.create_topic("sensors/#")
        topics.publish("sensors/door", b"open")
        for batch in topics.read("sensors/#"):
            for record in batch.records():
                print(record.topic, record.index, record.payload)

The calls are those of :class:`nearcast.client.topics.Topics`, which says what each means; handing in batches that are
committed exactly once (:meth:`BlockingTopics.stage`) is only here.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import TypeVar

import msgspec

from nearcast.client import records
from nearcast.client.bulk_errors import as_closed, cannot_reach, ended_by_broker
from nearcast.client.endpoints import Endpoint, TlsOptions, parse_bulk_url
from nearcast.client.patience import Patience
from nearcast.client.records import Batch, KeptRule, OnGap, Place, Record, TopicState
from nearcast.config import Retention
from nearcast.errors import (
    BatchRefused,
    ConnectionClosed,
    LocalProtocolError,
    NearcastError,
    RemoteProtocolError,
    TopicUnknown,
)
from nearcast.mqtt.packets import Properties
from nearcast.topiclog import blocks, wire
from nearcast.topiclog.conversation import DEFAULT_WINDOW_BYTES, Conversation, Reading, Request, welcomed
from nearcast.topiclog.uploads import StagedRows

Answer = TypeVar("Answer")

SOCKET_BUFFER_BYTES = 4 * 1_048_576


class BlockingTopics:
    """A connection to a broker's bulk port; use it with ``with``. Not for several threads at once: give each its own.

    A connection that is lost is made again, for up to ``reconnect_seconds``: questions are asked again, reading goes on with
    the very next record. A publish that no answer came for is sent again, so it may be there twice (at least once). An upload
    is not repeated: its rows are gone, so it raises.

    ``timeout_seconds`` bounds how long the broker may be silent while something is expected of it.
    """

    def __init__(
        self,
        url: str,
        *,
        client_id: str = "",
        username: str | None = None,
        password: str | bytes | None = None,
        tls: TlsOptions | ssl.SSLContext | None = None,
        timeout_seconds: float = 30.0,
        reconnect_seconds: float = 30.0,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
    ) -> None:
        self._endpoint: Endpoint = parse_bulk_url(url)
        self._tls = tls
        username, password = self._endpoint.credentials(username, password)
        self._hello = wire.Hello(client_id=client_id, username=username, password=password)
        self._timeout_seconds = timeout_seconds
        self._patience = Patience(reconnect_seconds)
        self._window_bytes = window_bytes
        self._socket: socket.socket | None = None
        self._conversation = Conversation()
        self._welcome: wire.Welcome | None = None
        self._readings: list[Reading] = []
        self._closed = False
        self._header = bytearray(wire.HEADER_BYTES)

    def __repr__(self) -> str:
        return f"BlockingTopics({str(self._endpoint)!r})"

    # --- life ---------------------------------------------------------------------------------------------------------------

    def __enter__(self) -> BlockingTopics:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def open(self) -> None:
        """Connect; ``with`` does it."""
        if self._closed:
            raise LocalProtocolError("these topics are closed: make new ones")
        if self._socket is None:
            self._connect()

    def close(self) -> None:
        """Give the connection up. A second call does nothing."""
        self._closed = True
        self._drop(ConnectionClosed("this connection to topics is closed: open a new one"))

    # --- topics and rules ---------------------------------------------------------------------------------------------------

    def create_topic(self, topic_filter: str, retention: Retention | None = None) -> bool:
        """Keep these topics from now on, durably; whether that is new."""
        return bool(self._done(records.rule_message(topic_filter, retention, "durable")))

    def tap(self, topic_filter: str, retention: Retention | None = None) -> bool:
        """Copy what passes on these topics into the log from now on; whether that is new."""
        return bool(self._done(records.rule_message(topic_filter, retention, "tap")))

    def delete_topic(self, topic_filter: str, *, keep_records: bool = False) -> None:
        """Keep them no more: the rule of exactly this filter goes, and with it the records that no other rule keeps."""
        self._done(wire.DeleteRule(topic_filter, not keep_records))

    def rules(self) -> list[KeptRule]:
        """Which topics are kept, in the order in which the rules decide; those that concern topics this client may use."""
        return records.rules_of(self._answer(wire.ListRules(), wire.Rules))

    def topics(self, *filters: str, newest: bool = False) -> list[TopicState]:
        """The topics that the log has; without a filter, all that may be read. With ``newest``, never less of a replicated
        topic than was told anybody before; that takes a majority of its replica set."""
        found: list[TopicState] = []
        after = -1
        asked = records.checked_filters(filters) if filters else []
        while True:
            answer = self._answer(wire.ListTopics(asked, after, newest=newest), wire.States)
            found += records.states_of(answer)
            after = answer.after
            if after < 0:
                return found

    def indexes_at(self, filters: str | list[str], time: datetime | int) -> dict[str, int]:
        """For each topic, the index of the first record not before ``time`` (a datetime, or microseconds since 1970); the
        index that its next record will get, if none is."""
        found: dict[str, int] = {}
        after = -1
        asked = records.checked_filters(filters)
        time_us = time if isinstance(time, int) else records.time_us_of(time)
        while True:
            answer = self._answer(wire.FindIndexes(asked, time_us, after), wire.Indexes)
            found.update(answer.indexes)
            after = answer.after
            if after < 0:
                return found

    def latest_index(self, topic: str) -> int:
        """The index of the newest record, at whatever broker it was published: whoever was given a later one before does not
        get an earlier one here. Raises :class:`TopicUnknown` when the log has no such topic."""
        answer = self._answer(wire.ListTopics(records.checked_filters(topic), newest=True), wire.States)
        for state in records.states_of(answer):
            if state.topic == topic:
                return state.latest_index
        raise TopicUnknown(topic, f"the log has no topic {topic!r}: nothing was published to it since it is kept")

    # --- records ------------------------------------------------------------------------------------------------------------

    def publish(
        self,
        topic: str,
        payload: bytes | str,
        *,
        properties: Properties | bytes | None = None,
        qos: int = 1,
        retain: bool = False,
    ) -> int:
        """Append a message and deliver it to subscribers; its index, once it is committed."""
        return self.publish_many(topic, [payload], properties=properties, qos=qos, retain=retain)

    def publish_many(
        self,
        topic: str,
        payloads: Iterable[bytes | str],
        *,
        properties: Properties | bytes | None = None,
        qos: int = 1,
        retain: bool = False,
    ) -> int:
        """Append messages that share everything but the payload; the index of the first, once all are committed."""
        encoded = [payload.encode() if isinstance(payload, str) else payload for payload in payloads]
        return self._done(records.publishing(topic, encoded, properties, qos, retain))

    def get(self, topic: str, index: int) -> Record:
        """One record; raises :class:`TopicUnknown` or :class:`RecordUnavailable`."""
        request = self._ask(wire.Get(topic, index))
        if request.data is None:
            raise RemoteProtocolError(0x82, "a record was asked for, and something else was answered")
        return records.single_record(request.data, topic)

    def read(
        self,
        filters: str | list[str],
        start: Place = "earliest",
        end: Place | None = None,
        *,
        on_gap: OnGap | None = None,
    ) -> Iterator[Batch]:
        """Batches of records from ``start`` to before ``end``, by default all that is committed now."""
        return self._batches(records.opening(filters, start, end, follow=False), on_gap)

    def read_ranges(
        self, filters: str | list[str], ranges: Mapping[str, tuple[int, int]], *, on_gap: OnGap | None = None
    ) -> Iterator[Batch]:
        """Batches of these topics alone, of each from an index to before another; a filter has to match each of them."""
        asked = records.opening(
            filters,
            {topic: start for topic, (start, _) in ranges.items()},
            {topic: end for topic, (_, end) in ranges.items()},
            follow=False,
        )
        return self._batches(msgspec.structs.replace(asked, listed_only=True), on_gap)

    def follow(
        self, filters: str | list[str], start: Place = "latest", end: Place | None = None, *, on_gap: OnGap | None = None
    ) -> Iterator[Batch]:
        """Batches from ``start`` on, without end, as they are committed; with ``end``, until all topics have reached it."""
        return self._batches(records.opening(filters, start, end, follow=True), on_gap)

    def tail(self, filters: str | list[str], start: Place = "latest", *, on_gap: OnGap | None = None) -> Iterator[Record]:
        """Records from ``start`` on, without end, as they are committed."""
        for batch in self.follow(filters, start, on_gap=on_gap):
            yield from batch.records()

    # --- batches, exactly once ----------------------------------------------------------------------------------------------

    def stage(
        self,
        producer: str,
        batch: int,
        partition: int,
        attempt: int,
        rows: Iterable[tuple[str, bytes, Properties | bytes | None]],
    ) -> int:
        """Hand in rows (topic, payload, properties) of one attempt at one partition of a batch; returns how many.

        They lie on the broker's disk and nobody sees them before :meth:`commit_batch`. Raises :class:`BatchRefused`.
        """
        encoded = ((topic, payload, records.encoded_properties(properties), 1) for topic, payload, properties in rows)
        return self.stage_encoded(producer, batch, partition, attempt, encoded)

    def stage_encoded(
        self, producer: str, batch: int, partition: int, attempt: int, rows: Iterable[tuple[str, bytes, bytes, int]]
    ) -> int:
        """:meth:`stage` for rows (topic, payload, encoded properties, flags), the flags as in
        :mod:`nearcast.topiclog.blocks`."""
        begun = self._ask(wire.Stage(producer, batch, partition, attempt))
        try:
            upload = self._conversation.expect(begun.number)
            limit = self._welcome.max_frame_bytes if self._welcome is not None else wire.MAX_MESSAGE_BYTES
            for body in StagedRows(limit).encode(rows):
                self._send(wire.data_header(begun.number, len(body)), body)
                while not upload.done and self._readable():
                    self._receive()
                if upload.done:
                    break
            else:
                self._conversation.end_upload(upload)
                self._wait(upload)
        except OSError as error:
            raise self._drop(as_closed(self._endpoint, error)) from error
        except BaseException as error:
            # Half an upload is of no use, and the broker would take what follows here for more of it.
            self._drop(as_closed(self._endpoint, error))
            raise
        if upload.error is not None:
            if not isinstance(upload.error, BatchRefused):
                self._drop(as_closed(self._endpoint, upload.error))
            raise upload.error
        return upload.answer.value if isinstance(upload.answer, wire.Done) else 0

    def commit_batch(self, producer: str, batch: int, attempts: dict[int, int] | Iterable[tuple[int, int]]) -> bool:
        """Publish what these attempts (by partition) handed in: all or nothing, and once, whatever crashes.

        False: this batch, or a later one of the producer, had been committed before; nothing was published."""
        pairs = list(attempts.items()) if isinstance(attempts, dict) else list(attempts)
        return bool(self._done(wire.CommitBatch(producer, batch, pairs)))

    def abort_batch(self, producer: str, batch: int) -> None:
        """Forget what was handed in for a batch that is not committed."""
        self._done(wire.AbortBatch(producer, batch))

    def last_batch(self, producer: str) -> int | None:
        """The batch that was committed last; ``None`` when none was."""
        found = self._done(wire.LastBatch(producer))
        return None if found < 0 else found

    # --- streams ------------------------------------------------------------------------------------------------------------

    def _batches(self, asked: wire.Open, on_gap: OnGap | None) -> Iterator[Batch]:
        reading = Reading(asked, self._window_bytes)
        self._readings.append(reading)
        try:
            while True:
                self._until(reading)
                batch = reading.take()
                if batch is None:
                    return
                self._conversation.use(reading)
                yield records.batch_of(batch, on_gap)
        finally:
            self._readings.remove(reading)
            if self._socket is not None and reading.number:
                self._conversation.close(reading)

    def _until(self, reading: Reading) -> None:
        """Wait until a stream has something, over as many connections as it takes."""
        while not reading.ready:
            self._connected()
            try:
                if not reading.number:
                    self._conversation.open(reading)
                self._flush()
                while not reading.ready:
                    self._receive()
            except (OSError, ConnectionClosed) as error:
                self._await_next_attempt(self._drop(as_closed(self._endpoint, error)))
        self._patience.rewarded()
        self._flush_if_open()

    # --- requests -----------------------------------------------------------------------------------------------------------

    def _done(self, content: wire.Message) -> int:
        return self._answer(content, wire.Done).value

    def _answer(self, content: wire.Message, kind: type[Answer]) -> Answer:
        answer = self._ask(content).answer
        if not isinstance(answer, kind):
            raise RemoteProtocolError(0x82, "the broker answered something else than it was asked")
        return answer

    def _ask(self, content: wire.Message) -> Request:
        while True:
            self._connected()
            try:
                request = self._conversation.ask(content)
                self._wait(request)
            except (OSError, ConnectionClosed) as error:
                self._await_next_attempt(self._drop(as_closed(self._endpoint, error)))
                continue
            self._patience.rewarded()
            if request.error is not None:
                raise request.error
            return request

    def _wait(self, request: Request) -> None:
        self._flush()
        while not request.done:
            self._receive()

    # --- the connection -----------------------------------------------------------------------------------------------------

    def _connected(self) -> socket.socket:
        """The connection, made again if it was lost."""
        if self._socket is not None:
            return self._socket
        if self._closed:
            raise LocalProtocolError("these topics are closed: make new ones")
        while True:
            try:
                return self._connect()
            except ConnectionClosed as error:
                self._await_next_attempt(error)

    def _await_next_attempt(self, error: NearcastError) -> None:
        """Pause before trying again; raises ``error`` when there was enough of that."""
        wait_seconds = self._patience.wait_seconds(time.monotonic())
        if wait_seconds is None:
            raise error
        time.sleep(wait_seconds)

    def _connect(self) -> socket.socket:
        endpoint = self._endpoint
        opened = self._open_socket(endpoint)
        self._socket = opened
        self._welcome = None
        self._conversation = Conversation()
        try:
            opened.sendall(wire.message(0, self._hello))
            kind, number, body = self._frame()
            self._welcome = welcomed(kind, number, body)
            self._conversation.max_frame_bytes = self._welcome.max_frame_bytes
        except (OSError, NearcastError) as error:
            closed = self._drop(as_closed(endpoint, error))
            if isinstance(error, NearcastError):
                raise
            raise closed from error
        return opened

    def _open_socket(self, endpoint: Endpoint) -> socket.socket:
        context = self._tls.context() if isinstance(self._tls, TlsOptions) else self._tls
        if context is None and endpoint.secure:
            context = TlsOptions().context()
        opened: socket.socket | None = None
        try:
            opened = socket.create_connection((endpoint.host, endpoint.port), self._timeout_seconds)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            if context is not None:
                opened = context.wrap_socket(opened, server_hostname=endpoint.host)
        except OSError as error:
            if opened is not None:
                opened.close()
            raise cannot_reach(endpoint, error, self._timeout_seconds) from error
        return opened

    def _drop(self, error: NearcastError) -> NearcastError:
        """The connection is gone, or is given up. Streams stay, to go on over the next one."""
        opened, self._socket = self._socket, None
        if opened is not None:
            opened.close()
        self._conversation.lost(error)
        for reading in self._readings:
            reading.lost()
        return error

    def _send(self, *chunks: bytes) -> None:
        opened = self._socket
        if opened is None:
            raise ConnectionClosed(f"the connection to {self._endpoint} is gone")
        for chunk in chunks:
            opened.sendall(chunk)

    def _flush(self) -> None:
        output = self._conversation.output
        if output:
            self._conversation.output = []
            self._send(b"".join(output))

    def _flush_if_open(self) -> None:
        if self._socket is not None:
            try:
                self._flush()
            except OSError as error:
                self._drop(as_closed(self._endpoint, error))

    def _receive(self) -> None:
        """Read one frame. A broker that is silent for long is asked whether it is there, and given up when it does not say."""
        try:
            self._conversation.frame(*self._frame())
        except (OSError, ConnectionClosed):
            raise
        except BaseException as error:
            # Nonsense, or an interrupt in the middle of a frame: what follows on this connection means nothing any more.
            self._drop(as_closed(self._endpoint, error))
            raise
        failure = self._conversation.failure
        if failure is not None:
            ended = ended_by_broker(self._endpoint, failure)
            self._drop(as_closed(self._endpoint, ended))
            raise ended
        self._flush()

    def _frame(self) -> tuple[int, int, bytearray]:
        header = self._header
        self._read_into(memoryview(header), may_ping=self._welcome is not None)
        size, kind, number = wire.read_header(header, 0, wire.MAX_MESSAGE_BYTES, blocks.MAX_BLOCK_BYTES)
        body = bytearray(size)
        self._read_into(memoryview(body), may_ping=False)
        return kind, number, body

    def _readable(self) -> bool:
        """Whether the broker has said something."""
        opened = self._socket
        if opened is None:
            return False
        if isinstance(opened, ssl.SSLSocket) and opened.pending():
            return True
        return bool(select.select([opened], [], [], 0)[0])

    def _read_into(self, view: memoryview, may_ping: bool) -> None:
        opened = self._socket
        if opened is None:
            raise ConnectionClosed(f"the connection to {self._endpoint} is gone")
        received, size = 0, len(view)
        while received < size:
            try:
                count = opened.recv_into(view[received:])
            except TimeoutError as error:
                if not may_ping:
                    raise ConnectionClosed(f"{self._endpoint} is silent for {self._timeout_seconds:g} s") from error
                may_ping = False
                self._conversation.ping()
                self._flush()
                continue
            if not count:
                raise ConnectionClosed(f"{self._endpoint} closed the connection")
            received += count
