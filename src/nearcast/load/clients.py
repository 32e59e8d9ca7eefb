"""One client of a workload: connects, subscribes, publishes when its schedule says so, and tells what happened.

Owns the behaviour of a client when things go wrong. A first connection that fails is tried again. At QoS 0 a message that is
due without a connection is skipped, as a sensor would; at QoS 1 and 2 it waits for the connection, until ``MAX_WAITING`` of a
client do (its ``sent_ns`` is when it was handed over, so the wait is part of its latency). Nothing is left out because time is
short: a message that is sent late is sent all the same, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from nearcast.client import Backoff, Client, Message, SubscriptionRequest
from nearcast.errors import ConnectionClosed, ConnectionRefused, NearcastError, RequestRefused
from nearcast.load.spec import SharedClock
from nearcast.mqtt.packets import MQTT_3_1_1, MQTT_5
from nearcast.scenario import expansion
from nearcast.scenario.identity import Identity, encode_identity
from nearcast.scenario.workload import Subscribing

MAX_WAITING = 1_000
"""Unacknowledged messages of a client beyond which messages that are due are skipped."""

TIMER_S = 0.0005
"""Timers have a resolution of a millisecond: what is due within half of it is due."""

LEAVE_S = 5.0
"""A client that leaves waits so long for answers to what it sent."""

SESSION_SECONDS = 86_400
_BACKOFF = Backoff(initial_seconds=0.25, max_seconds=5.0)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message about to be sent, or skipped."""

    client: expansion.Client
    stream: int
    number: int
    """The stream's number, see :func:`~nearcast.scenario.identity.publisher_number`."""

    sequence: int
    due_ns: int
    sent_ns: int


class Observer(Protocol):
    """Who is told what happens to the clients of a process."""

    def published(self, message: Outgoing) -> None: ...

    def acknowledged(self, message: Outgoing) -> None: ...

    def refused(self, message: Outgoing, reason: str) -> None: ...

    def skipped(self, message: Outgoing, reason: str) -> None: ...

    def delivered(self, client: expansion.Client, message: Message) -> None: ...

    def connected(self, client: expansion.Client) -> None: ...

    def disconnected(self, client: expansion.Client, reason: str) -> None: ...

    def subscribed(self, client: expansion.Client, wanted: Sequence[Subscribing]) -> None: ...

    def unsubscribed(self, client: expansion.Client, filters: Sequence[str]) -> None: ...

    def moved(self, client: expansion.Client, broker: str) -> None: ...

    def left(self, client: expansion.Client) -> None: ...

    def failed_to_connect(self, client: expansion.Client, reason: str) -> None: ...


class LoadClient:
    """Runs one client until it is cancelled, or leaves; :meth:`stop_publishing` before that lets it receive only."""

    def __init__(
        self,
        description: expansion.Client,
        url: str,
        dues_s: list[Iterator[float]],
        start_ns: int,
        clock: SharedClock,
        observer: Observer,
        rng: random.Random,
        connecting: asyncio.Semaphore,
        stops: Sequence[tuple[float, str, str]] = (),
    ) -> None:
        """``stops`` are where it goes on to: seconds after the start, a host, its URL."""
        self._description = description
        self._stops = stops
        self._url = url
        self._dues_s = dues_s
        self._start_ns = start_ns
        self._clock = clock
        self._observer = observer
        self._rng = rng
        self._connecting = connecting
        self._wanted = {wanted.filter: wanted.qos for wanted in description.subscribe}
        """What it subscribes to at present."""
        self._sequences = [0] * len(dues_s)
        self._numbers = description.numbers
        self._pending: list[tuple[int, int]] = []
        """When each stream is due next: nanoseconds and the stream."""
        self._sending: set[asyncio.Task[None]] = set()
        self._client: Client | None = None
        self._open = asyncio.Event()
        """There is a client whose subscriptions are in place; it may be reconnecting."""
        self._stopped = False
        self.dropped = 0

    @property
    def waiting(self) -> int:
        """Messages of QoS 1 and 2 without an answer."""
        return len(self._sending)

    def stop_publishing(self) -> None:
        self._stopped = True

    async def run(self) -> None:
        """Ends by being cancelled, or when it is time to leave; raises only what nobody foresaw."""
        await self._until(self._start_ns + int(self._description.start_s * 1e9))
        for stream in range(len(self._dues_s)):
            self._schedule(stream)
        try:
            async with asyncio.TaskGroup() as group:
                connecting = group.create_task(self._stay_connected(), name=f"{self._description.name} connects")
                publishing = group.create_task(self._publish(), name=f"{self._description.name} publishes")
                living = [connecting]
                if self._stops:
                    living.append(group.create_task(self._roam(), name=f"{self._description.name} roams"))
                if self._description.changes:
                    living.append(group.create_task(self._change(), name=f"{self._description.name} changes"))
                if self._description.leave_s is not None:
                    await self._leave(self._description.leave_s, living, publishing)
        finally:
            for task in self._sending:
                task.cancel()

    async def _leave(self, leave_s: float, living: list[asyncio.Task[None]], publishing: asyncio.Task[None]) -> None:
        """Go for good, once all that was sent is answered."""
        await self._until(self._start_ns + int(leave_s * 1e9))
        self._stopped = True
        publishing.cancel()
        if self._sending:
            await asyncio.wait(self._sending, timeout=LEAVE_S)
        self._observer.left(self._description)
        for task in living:
            task.cancel()

    async def _roam(self) -> None:
        """Go on to the next broker or gateway whenever the host comes to its site."""
        for at_s, host, url in self._stops:
            await self._until(self._start_ns + int(at_s * 1e9))
            self._url = url
            self._observer.moved(self._description, host)
            if self._client is not None:
                with contextlib.suppress(NearcastError):  # then a new life begins there
                    await self._client.move(url)

    async def _change(self) -> None:
        """Subscribe to other topics when it is time."""
        for change in self._description.changes:
            await self._until(self._start_ns + int(change.at_s * 1e9))
            self._wanted = {filter_: qos for filter_, qos in self._wanted.items() if filter_ not in change.unsubscribe}
            self._wanted |= {wanted.filter: wanted.qos for wanted in change.subscribe}
            while self._client is None:
                await self._open.wait()
            try:
                # Told before it is asked for: what arrives from now on was not expected any more.
                if change.unsubscribe:
                    self._observer.unsubscribed(self._description, change.unsubscribe)
                    await self._client.unsubscribe(*change.unsubscribe)
                if change.subscribe:
                    await self._client.subscribe(*(SubscriptionRequest(each.filter, each.qos) for each in change.subscribe))
                    self._observer.subscribed(self._description, change.subscribe)
            except (ConnectionClosed, RequestRefused) as error:
                self._observer.failed_to_connect(self._description, str(error))

    async def _stay_connected(self) -> None:
        attempt = 0
        while True:
            try:
                await self._connected_life()
            except (ConnectionClosed, ConnectionRefused, RequestRefused) as error:
                self._observer.failed_to_connect(self._description, str(error))
            await asyncio.sleep(_BACKOFF.delay_seconds(attempt, self._rng))
            attempt += 1

    async def _connected_life(self) -> None:
        description = self._description
        client = Client(
            self._url,
            client_id=description.name,
            version=MQTT_5 if description.protocol == "5.0" else MQTT_3_1_1,
            clean_start=description.clean_start,
            session_expiry_seconds=None if description.clean_start else SESSION_SECONDS,
            keep_alive_seconds=description.keepalive_s,
            reconnect=_BACKOFF,
            rng=self._rng,
            on_connection=self._on_connection,
        )
        async with self._connecting:
            await client.__aenter__()
        try:
            if self._wanted:
                wanted = [Subscribing(filter=filter_, qos=qos) for filter_, qos in self._wanted.items()]
                await client.subscribe(*(SubscriptionRequest(each.filter, each.qos) for each in wanted))
                self._observer.subscribed(description, wanted)
            self._client = client
            self._open.set()
            async for message in client.messages:
                self._observer.delivered(description, message)
        finally:
            self._open.clear()
            self._client = None
            self.dropped += client.messages.dropped
            await client.__aexit__(None, None, None)

    def _on_connection(self, reason: str | None) -> None:
        if reason is None:
            self._observer.connected(self._description)
        else:
            self._observer.disconnected(self._description, reason)

    # -- publishing --------------------------------------------------------------------------------------------------------

    def _schedule(self, stream: int) -> None:
        due_s = next(self._dues_s[stream], None)
        if due_s is not None:
            heapq.heappush(self._pending, (self._start_ns + int(due_s * 1e9), stream))

    async def _until(self, moment_ns: int) -> None:
        # Again, because a timer may come early, and because this clock is not the loop's.
        while (remaining_s := (moment_ns - self._clock.now_ns()) / 1e9) > TIMER_S:  # noqa: ASYNC110
            await asyncio.sleep(remaining_s)

    async def _publish(self) -> None:
        while self._pending:
            due_ns, stream = self._pending[0]
            await self._until(due_ns)
            if self._stopped:
                return
            heapq.heappop(self._pending)
            await self._send(stream, due_ns)
            self._schedule(stream)

    async def _send(self, stream: int, due_ns: int) -> None:
        description = self._description
        publishing = description.publish[stream]
        sequence = self._sequences[stream]
        self._sequences[stream] += 1
        number = self._numbers[stream]
        message = Outgoing(description, stream, number, sequence, due_ns, self._clock.now_ns())
        client = self._client
        if publishing.qos == 0 and (client is None or not client.connected):
            self._observer.skipped(message, "no connection")
            return
        if len(self._sending) >= MAX_WAITING:
            self._observer.skipped(message, f"{MAX_WAITING} messages of this client wait already")
            return
        payload = encode_identity(Identity(number, sequence, message.sent_ns), publishing.payload_bytes)
        self._observer.published(message)
        if publishing.qos == 0 and client is not None:
            try:
                await client.publish(publishing.topic, payload, 0, publishing.retain)
            except NearcastError:
                pass  # lost with its connection, as QoS 0 allows
        else:
            task = asyncio.create_task(self._acknowledged(message, payload), name=f"{description.name} {sequence}")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _acknowledged(self, message: Outgoing, payload: bytes) -> None:
        publishing = message.client.publish[message.stream]
        try:
            while self._client is None:
                await self._open.wait()
            await self._client.publish(publishing.topic, payload, publishing.qos, publishing.retain)
        except RequestRefused as error:
            self._observer.refused(message, str(error))
        except NearcastError:
            pass  # the client is given up: the message stays unacknowledged, and is missed where somebody expects it
        else:
            self._observer.acknowledged(message)
