"""Topic logs for asyncio: create and list topics, publish, read by index, follow what is committed.

    async with Topics("nearcast://localhost:7883") as topics:
        await topics.create_topic("sensors/#", retention=Retention(max_age_seconds=3600))
        index = await topics.publish("sensors/door", b"open")
        record = await topics.get("sensors/door", index)
        async for batch in topics.read("sensors/#"):
            for record in batch.records():
                print(record.topic, record.index, record.payload)
        async for record in topics.tail("sensors/#"):
            print(record.time, record.text)

What is said and what it means is :mod:`nearcast.topiclog.conversation`'s; here are the connection, its making again, and the
futures that callers wait on. :mod:`.blocking_topics` has the same calls without asyncio.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterable
from datetime import datetime
from types import TracebackType
from typing import TypeVar, cast

from nearcast.client import records
from nearcast.client.bulk_errors import as_closed, cannot_reach, ended_by_broker
from nearcast.client.endpoints import Endpoint, TlsOptions, parse_bulk_url
from nearcast.client.patience import Patience
from nearcast.client.records import Batch, KeptRule, OnGap, Place, Record, TopicState
from nearcast.config import Retention
from nearcast.errors import (
    ConnectionClosed,
    ConnectionRefused,
    LocalProtocolError,
    NearcastError,
    RemoteProtocolError,
    RequestRefused,
    TopicUnknown,
)
from nearcast.mqtt.packets import Properties
from nearcast.topiclog import blocks, wire
from nearcast.topiclog.conversation import DEFAULT_WINDOW_BYTES, Conversation, Reading, Request, welcomed

Answer = TypeVar("Answer")


class Topics:
    """A connection to a broker's bulk port; use it with ``async with``. Any number of tasks may share it.

    A connection that is lost is made again, for up to ``reconnect_seconds``: questions are asked again, reading and following
    go on with the very next record. A publish that no answer came for is sent again, so it may be there twice (at least
    once). ``timeout_seconds`` bounds connecting, and how long the broker may be silent while something is expected of it.
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
        self._link: _Link | None = None
        self._connecting: asyncio.Task[_Link] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"Topics({str(self._endpoint)!r})"

    # --- life ---------------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Topics:
        if self._closed:
            raise LocalProtocolError("these topics are closed: make new ones")
        self._link = await self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Give the connection up. Whoever still waits for something gets :class:`ConnectionClosed`."""
        self._closed = True
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait([connecting])
        link, self._link = self._link, None
        if link is not None:
            link.close(ConnectionClosed("these topics were closed"))

    # --- topics and rules ---------------------------------------------------------------------------------------------------

    async def create_topic(self, topic_filter: str, retention: Retention | None = None) -> bool:
        """Keep these topics from now on, durably: a name, or a filter. Whether that changed something."""
        return bool(await self._done(records.rule_message(topic_filter, retention, "durable")))

    async def tap(self, topic_filter: str, retention: Retention | None = None) -> bool:
        """Copy what passes on these topics into the log from now on; nothing waits for it. Whether that changed something."""
        return bool(await self._done(records.rule_message(topic_filter, retention, "tap")))

    async def delete_topic(self, topic_filter: str, *, keep_records: bool = False) -> None:
        """Keep them no more: the rule of exactly this filter goes, and with it the records that no other rule keeps."""
        await self._done(wire.DeleteRule(topic_filter, not keep_records))

    async def rules(self) -> list[KeptRule]:
        """Which topics are kept, in the order in which the rules decide; those that concern topics this client may use."""
        return records.rules_of(await self._answer(wire.ListRules(), wire.Rules))

    async def topics(self, *filters: str, newest: bool = False) -> list[TopicState]:
        """The topics that the log has; without a filter, all that may be read. With ``newest``, never less of a replicated
        topic than was told anybody before; that takes a majority of its replica set."""
        found: list[TopicState] = []
        after = -1
        asked = records.checked_filters(filters) if filters else []
        while True:
            answer = await self._answer(wire.ListTopics(asked, after, newest=newest), wire.States)
            found += records.states_of(answer)
            after = answer.after
            if after < 0:
                return found

    async def indexes_at(self, filters: str | list[str], time: datetime | int) -> dict[str, int]:
        """For each topic, the index of the first record not before ``time`` (a datetime, or microseconds since 1970); the
        index that its next record will get, if none is."""
        found: dict[str, int] = {}
        after = -1
        asked = records.checked_filters(filters)
        time_us = time if isinstance(time, int) else records.time_us_of(time)
        while True:
            answer = await self._answer(wire.FindIndexes(asked, time_us, after), wire.Indexes)
            found.update(answer.indexes)
            after = answer.after
            if after < 0:
                return found

    async def latest_index(self, topic: str) -> int:
        """The index of the newest record, at whatever broker it was published: whoever was given a later one before does not
        get an earlier one here. Raises :class:`TopicUnknown` when the log has no such topic."""
        answer = await self._answer(wire.ListTopics(records.checked_filters(topic), newest=True), wire.States)
        for state in records.states_of(answer):
            if state.topic == topic:
                return state.latest_index
        raise TopicUnknown(topic, f"the log has no topic {topic!r}: nothing was published to it since it is kept")

    # --- records ------------------------------------------------------------------------------------------------------------

    async def publish(
        self,
        topic: str,
        payload: bytes | str,
        *,
        properties: Properties | bytes | None = None,
        qos: int = 1,
        retain: bool = False,
    ) -> int:
        """Append a message and deliver it to subscribers; its index, once it is committed."""
        return await self.publish_many(topic, [payload], properties=properties, qos=qos, retain=retain)

    async def publish_many(
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
        return await self._done(records.publishing(topic, encoded, properties, qos, retain))

    async def get(self, topic: str, index: int) -> Record:
        """One record; raises :class:`TopicUnknown` or :class:`RecordUnavailable`."""
        request = await self._ask(wire.Get(topic, index))
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
    ) -> AsyncIterator[Batch]:
        """Batches of records from ``start`` to before ``end``, by default all that is committed when this begins.

        ``start`` is "earliest", "latest", an index, a dict of indexes by topic (others from their earliest), or a datetime;
        ``end`` an index, a dict, or a datetime, and nothing beyond what is committed. Several topics come in the order in
        which the broker took them. Records that retention removed before they could be read raise
        :class:`RecordUnavailable`; with ``on_gap`` that is called instead, and reading goes on behind them."""
        return self._batches(records.opening(filters, start, end, follow=False), on_gap)

    def follow(
        self, filters: str | list[str], start: Place = "latest", end: Place | None = None, *, on_gap: OnGap | None = None
    ) -> AsyncIterator[Batch]:
        """Batches from ``start`` on, without end, as they are committed; topics that appear later too, from their first
        record. With ``end``, until all topics have reached it."""
        return self._batches(records.opening(filters, start, end, follow=True), on_gap)

    async def tail(
        self, filters: str | list[str], start: Place = "latest", *, on_gap: OnGap | None = None
    ) -> AsyncIterator[Record]:
        """Records from ``start`` on, without end, as they are committed."""
        async for batch in self.follow(filters, start, on_gap=on_gap):
            for record in batch.records():
                yield record

    # --- inside -------------------------------------------------------------------------------------------------------------

    async def _batches(self, asked: wire.Open, on_gap: OnGap | None) -> AsyncIterator[Batch]:
        reading = Reading(asked, self._window_bytes)
        link: _Link | None = None
        try:
            while True:
                batch = reading.take()
                if batch is None:
                    if reading.ended:
                        return
                    link = await self._reading(reading)
                    continue
                if link is not None:
                    link.use(reading)
                yield records.batch_of(batch, on_gap)
        finally:
            if link is not None:
                link.abandon(reading)

    async def _reading(self, reading: Reading) -> _Link:
        """Wait until a stream has something, over as many connections as it takes."""
        while True:
            link = await self._connected()
            try:
                await link.until(reading)
            except ConnectionClosed as error:
                await self._await_next_attempt(error)
                continue
            self._patience.rewarded()
            return link

    async def _done(self, content: wire.Message) -> int:
        return (await self._answer(content, wire.Done)).value

    async def _answer(self, content: wire.Message, kind: type[Answer]) -> Answer:
        answer = (await self._ask(content)).answer
        if not isinstance(answer, kind):
            raise RemoteProtocolError(0x82, "the broker answered something else than it was asked")
        return answer

    async def _ask(self, content: wire.Message) -> Request:
        while True:
            link = await self._connected()
            try:
                request = await link.ask(content)
            except ConnectionClosed as error:
                await self._await_next_attempt(error)
                continue
            self._patience.rewarded()
            return request

    async def _connected(self) -> _Link:
        """The connection, made again if it was lost."""
        if self._closed:
            raise ConnectionClosed("these topics are closed: make new ones")
        link = self._link
        if link is not None and link.alive:
            return link
        if link is None:
            raise LocalProtocolError("the topics are not open: use `async with Topics(...) as topics`")
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._reconnect(), name="nearcast topics reconnect")
        connecting = self._connecting
        try:
            # One attempt serves all who wait; one of them being cancelled is none of its business.
            self._link = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            if connecting.cancelled():
                raise ConnectionClosed("these topics were closed") from None
            raise
        finally:
            if connecting.done() and self._connecting is connecting:
                self._connecting = None
        return self._link

    async def _reconnect(self) -> _Link:
        while True:
            try:
                return await self._connect()
            except ConnectionClosed as error:
                await self._await_next_attempt(error)

    async def _await_next_attempt(self, error: ConnectionClosed) -> None:
        """Pause before trying again; raises ``error`` when there was enough of that."""
        wait_seconds = self._patience.wait_seconds(asyncio.get_running_loop().time())
        if wait_seconds is None or self._closed:
            raise error
        await asyncio.sleep(wait_seconds)

    async def _connect(self) -> _Link:
        endpoint = self._endpoint
        context = self._tls.context() if isinstance(self._tls, TlsOptions) else self._tls
        if context is None and endpoint.secure:
            context = TlsOptions().context()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                _, protocol = await loop.create_connection(
                    lambda: _Link(endpoint, self._timeout_seconds), endpoint.host, endpoint.port, ssl=context
                )
        except OSError as error:  # TimeoutError and ssl.SSLError among them
            raise cannot_reach(endpoint, error, self._timeout_seconds) from error
        link = protocol
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await link.greet(self._hello)
        except TimeoutError as error:
            link.close(ConnectionClosed("no welcome"))
            raise ConnectionClosed(f"{endpoint} says nothing: is it a bulk port?") from error
        except BaseException:
            link.close(ConnectionClosed("given up"))
            raise
        return link


class _Link(asyncio.Protocol):
    """One connection: bytes to frames to the conversation, and back."""

    def __init__(self, endpoint: Endpoint, timeout_seconds: float) -> None:
        self._endpoint = endpoint
        self._timeout_seconds = timeout_seconds
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frames = wire.FrameReader(wire.MAX_MESSAGE_BYTES, blocks.MAX_BLOCK_BYTES)
        self._conversation = Conversation()
        self._welcome: asyncio.Future[wire.Welcome] = self._loop.create_future()
        self._readings: set[Reading] = set()
        self._error: NearcastError | None = None
        self._heard_at = self._loop.time()
        self._waiting = 0
        self._pinged = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def alive(self) -> bool:
        return self._error is None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        self._pinged = False
        try:
            for kind, number, body in self._frames.feed(data):
                if not self._welcome.done():
                    self._welcome.set_result(welcomed(kind, number, body))
                else:
                    self._conversation.frame(kind, number, body)
        except (ConnectionClosed, ConnectionRefused, RemoteProtocolError) as error:
            self.close(error)
            return
        failure = self._conversation.failure
        if failure is not None:
            self.close(ended_by_broker(self._endpoint, failure))
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        reason = as_closed(self._endpoint, exc) if exc is not None else None
        self.close(reason or ConnectionClosed(f"{self._endpoint} closed the connection"))

    # What topics call.

    async def greet(self, hello: wire.Hello) -> None:
        if self._transport is not None:
            self._transport.write(wire.message(0, hello))
        self._conversation.max_frame_bytes = (await self._welcome).max_frame_bytes

    async def ask(self, content: wire.Message) -> Request:
        """Send a request and wait for its answer; raises :class:`ConnectionClosed` when the connection goes before."""
        self._check()
        request = self._conversation.ask(content)
        answered: asyncio.Future[None] = self._loop.create_future()
        request.wake = lambda: _resolve(answered)
        self._flush()
        self._expect()
        try:
            await answered
        finally:
            self._waiting -= 1
            if not request.done:
                self._conversation.forget(request)
        if request.error is not None:
            raise request.error
        return request

    async def until(self, reading: Reading) -> None:
        """Wait until a stream has something to take; open it here if it is not."""
        self._check()
        if reading not in self._readings:
            self._readings.add(reading)
            self._conversation.open(reading)
            self._flush()
        if reading.ready:
            return
        woken: asyncio.Future[None] = self._loop.create_future()
        reading.wake = lambda: _resolve(woken)
        self._expect()
        try:
            await woken
        finally:
            self._waiting -= 1
            reading.wake = None
        if not reading.ready:
            self._check()

    def use(self, reading: Reading) -> None:
        """A batch was taken."""
        if reading in self._readings and self.alive:
            self._conversation.use(reading)
            self._flush()

    def abandon(self, reading: Reading) -> None:
        """Nobody reads it any more."""
        if reading in self._readings:
            self._readings.discard(reading)
            if self.alive and reading.resumable:
                self._conversation.close(reading)
                self._flush()

    def close(self, error: NearcastError) -> None:
        """The connection is over, and why. Streams stay, to go on over the next one."""
        if self._error is not None:
            return
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        if not self._welcome.done():
            self._welcome.set_exception(error)
            self._welcome.exception()  # whoever greets gets it; if nobody does, that is no news
        final = isinstance(error, RemoteProtocolError | RequestRefused)
        self._conversation.lost(error if final or isinstance(error, ConnectionClosed) else as_closed(self._endpoint, error))
        readings, self._readings = self._readings, set()
        for reading in readings:
            reading.lost()
            if final:
                reading.fail(error)
            elif reading.wake is not None:
                reading.wake()

    def _check(self) -> None:
        error = self._error
        if error is not None:
            raise error if isinstance(error, ConnectionClosed) else as_closed(self._endpoint, error)

    def _flush(self) -> None:
        output = self._conversation.output
        if output and self._transport is not None:
            self._conversation.output = []
            self._transport.write(b"".join(output))

    # A broker that is silent while something is expected of it is asked whether it is there.

    def _expect(self) -> None:
        self._waiting += 1
        if self._timer is None:
            self._heard_at = self._loop.time()
            self._timer = self._loop.call_later(self._timeout_seconds, self._check_silence)

    def _check_silence(self) -> None:
        self._timer = None
        if not self._waiting or self._error is not None:
            return
        due = self._heard_at + self._timeout_seconds - self._loop.time()
        if due <= 0:
            if self._pinged:
                self.close(ConnectionClosed(f"{self._endpoint} is silent for {2 * self._timeout_seconds:g} s"))
                return
            self._pinged = True
            self._heard_at = self._loop.time()
            self._conversation.ping()
            self._flush()
            due = self._timeout_seconds
        self._timer = self._loop.call_later(due, self._check_silence)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
