"""Runs the client machine on a wire: bytes in and out, its timer, its events, and back-pressure in both directions.

One driver serves one client over all its connections; each connection is a :class:`Link`, so that late news from an old
transport reach nobody. Output of one loop iteration leaves in one write. It refuses to know URLs, backoff and the public API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nearcast.client.endpoints import Endpoint
from nearcast.client.messages import Message, MessageStream
from nearcast.client.transports import Tls, Wire, open_wire
from nearcast.errors import ConnectionClosed, ConnectionRefused
from nearcast.mqtt.client_events import (
    Connected,
    Disconnected,
    MessageReceived,
    PublishCompleted,
    ReAuthenticated,
    Refused,
    SubscribeCompleted,
    UnsubscribeCompleted,
)
from nearcast.mqtt.client_machine import CLOSED, CONNECTED, NEVER, ClientMachine

Answer = PublishCompleted | SubscribeCompleted | UnsubscribeCompleted

#: Output is written at once when it reaches this, not only at the end of the loop iteration: a publisher that never waits
#: would otherwise collect without bound.
FLUSH_BYTES = 65_536

#: While the application awaits an answer, reading goes on although the stream is full (the answer may be behind messages).
#: QoS 0 messages beyond this many times the bound are then dropped; QoS 1 and 2 are bounded by Receive Maximum.
DROP_FACTOR = 10
DROP_FLOOR = 10_000

CLOSE_TIMEOUT_SECONDS = 2.0


class Link:
    """One connection. ``outcome`` is settled by CONNACK (or raises), ``ended`` when it is over, ``closed`` when the transport
    is gone."""

    def __init__(self, driver: Driver, loop: asyncio.AbstractEventLoop) -> None:
        self._driver = driver
        self.wire: Wire | None = None
        self.outcome: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Disconnected] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()

    def opened(self, wire: Wire) -> None:
        self.wire = wire
        if self._driver.link is self:
            self._driver.opened()
        else:
            wire.abort()

    def received(self, data: bytes) -> None:
        if self._driver.link is self:
            self._driver.received(data)

    def lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        self.wire = None
        if self._driver.link is self:
            self._driver.lost(error)

    def paused_writing(self) -> None:
        if self._driver.link is self:
            self._driver.writable = False

    def resumed_writing(self) -> None:
        if self._driver.link is self:
            self._driver.writable = True
            self._driver.wake()


class Driver:
    """See the module's essay. ``failure`` is set once nothing will work any more."""

    def __init__(self, machine: ClientMachine, max_queued_messages: int) -> None:
        self.machine = machine
        self.messages = MessageStream(self._taken)
        self.link: Link | None = None
        self.writable = True
        self.failure: Exception | None = None
        self.answers: dict[int, asyncio.Future[Answer]] = {}
        self.response_topic: str | None = None
        self.on_response: Callable[[Message], None] | None = None
        self.on_connection: Callable[[str | None], None] | None = None
        self._max_queued_messages = max_queued_messages
        self._drop_at = max(DROP_FLOOR, DROP_FACTOR * max_queued_messages)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._flush_handle: asyncio.Handle | None = None
        self._pending_bytes = 0
        self._reading = True
        self._waiters: list[asyncio.Future[None]] = []

    # -- for the client ----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self._loop.time()

    @property
    def connected(self) -> bool:
        return self.machine.state == CONNECTED

    async def connect(self, endpoint: Endpoint, tls: Tls) -> Link:
        """Open a connection and have it accepted, or raise; afterwards ``link.ended`` says when it is over."""
        link = Link(self, self._loop)
        self.link = link
        self.writable = True
        try:
            await open_wire(endpoint, link, tls, self.machine.settings.connect_timeout_seconds)
            await link.outcome
        except BaseException:
            self.abandon(link)
            raise
        return link

    def abandon(self, link: Link) -> None:
        """Give a connection up without a word."""
        if self.link is link:
            self.link = None
            self.machine.lose(self.now)
            self.machine.take_events()
            self._cancel_timers()
        link.outcome.cancel()
        if link.wire is not None:
            link.wire.abort()

    async def close(self) -> None:
        """Say goodbye and wait until the transport is gone, though not for long."""
        link = self.link
        if link is None:
            return
        try:
            self.machine.disconnect(self.now)
            self._act()
            await asyncio.wait([link.closed], timeout=CLOSE_TIMEOUT_SECONDS)
        finally:
            self.abandon(link)

    def leave(self) -> None:
        """End the present connection, if there is one, and keep the session: another one follows."""
        self.machine.disconnect(self.now, keep_session=True)
        self._act()

    def fail(self, failure: Exception, *, told: bool = True) -> None:
        """Nothing will work any more: everyone who waits is told so. The stream of a client closed on purpose just ends."""
        if self.failure is not None:
            return
        self.failure = failure
        self._cancel_timers()
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(failure)
        self.messages.end(failure if told else None)
        self.wake()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that :meth:`wake` announces; raises what made it impossible."""
        while True:
            if self.failure is not None:
                raise self.failure
            if condition():
                return
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def wake(self) -> None:
        waiters = self._waiters
        self._waiters = []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def answer(self, token: int) -> Answer:
        """Wait for the completion with this token."""
        future: asyncio.Future[Answer] = self._loop.create_future()
        self.answers[token] = future
        self._act()
        try:
            return await future
        finally:
            self.answers.pop(token, None)
            self._regulate()

    def produced(self, size: int) -> bool:
        """The machine has output of about this size. Returns whether the caller should let the loop run now."""
        self._pending_bytes += size
        if self._pending_bytes >= FLUSH_BYTES:
            self.flush()
            return True
        if self._flush_handle is None:
            self._flush_handle = self._loop.call_soon(self.flush)
        return False

    def flush(self) -> None:
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        self._pending_bytes = 0
        link = self.link
        output = self.machine.take()
        if output and link is not None and link.wire is not None:
            link.wire.write(output[0] if len(output) == 1 else b"".join(output))

    # -- from the link -----------------------------------------------------------------------------------------------------

    def opened(self) -> None:
        self._reading = True
        self.machine.connect(self.now)
        self._act()
        self._arm()

    def received(self, data: bytes) -> None:
        self.machine.receive(data, self.now)
        self._act()

    def lost(self, error: Exception | None) -> None:
        link = self.link
        if self.machine.state != CLOSED:
            if error is None or isinstance(error, ConnectionError):
                said = "the broker closed the connection; is it a TLS port (mqtts://), or is a message larger than it takes?"
            else:
                said = f"the connection was lost: {error}"
            self.machine.lose(self.now, said)
            self._act()
        elif link is not None and not link.outcome.done():
            if isinstance(error, ConnectionClosed):
                failure = error
            else:
                reason = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
                failure = ConnectionClosed(f"the other side ended the connection at once{reason}; is the port right?")
            link.outcome.set_exception(failure)

    # -- the machine's events ----------------------------------------------------------------------------------------------

    def _act(self) -> None:
        """What follows every call into the machine: its events, its output, whether to go on reading."""
        for event in self.machine.take_events():
            if isinstance(event, MessageReceived):
                self._on_message(event)
            elif isinstance(event, PublishCompleted | SubscribeCompleted | UnsubscribeCompleted):
                answer = self.answers.get(event.token)
                if answer is not None and not answer.done():
                    answer.set_result(event)
            elif isinstance(event, Connected):
                if self.link is not None and not self.link.outcome.done():
                    self.link.outcome.set_result(None)
                self._arm()
                self.wake()
                if self.on_connection is not None:
                    self.on_connection(None)
            elif isinstance(event, Refused):
                self._over(ConnectionRefused(event.reason_code, event.message, event.server_reference), None)
            elif isinstance(event, Disconnected):
                self._over(ConnectionClosed(event.message, event.reason_code), event)
            elif isinstance(event, ReAuthenticated):
                self.wake()
        if self._waiters and self.machine.waiting <= self.machine.settings.max_waiting // 2:
            self.wake()  # at half, not at each place: with many waiting publishers that would cost their square
        if self._flush_handle is None:
            self._flush_handle = self._loop.call_soon(self.flush)
        self._regulate()

    def _on_message(self, event: MessageReceived) -> None:
        message = Message(event.message)
        if self.response_topic is not None and message.topic == self.response_topic and self.on_response is not None:
            self.machine.acknowledge(message.packet, self.now)
            self.on_response(message)
        elif message.qos == 0 and self.answers and len(self.messages) >= self._drop_at:
            self.messages.dropped += 1
        else:
            self.messages.put(message)

    def _over(self, failure: Exception, event: Disconnected | None) -> None:
        """The connection is over: its last output leaves, its transport closes, its link says so."""
        self.flush()
        self._cancel_timers()
        link = self.link
        if link is None:
            return
        if link.wire is not None:
            link.wire.close()
        if not link.outcome.done():
            link.outcome.set_exception(failure)
        elif event is not None and not link.ended.done():
            link.ended.set_result(event)
            if self.on_connection is not None:
                self.on_connection(event.message)

    def _taken(self, message: Message) -> None:
        """The application took a message from the stream."""
        if message.qos and self.failure is None:
            self.machine.acknowledge(message.packet, self.now)
            self.produced(4)
        if not self._reading:
            self._regulate()

    def _regulate(self) -> None:
        """Stop reading when the stream is full; go on when it is half empty, or when somebody awaits an answer."""
        link = self.link
        if link is None or link.wire is None or self.machine.state == CLOSED:
            return
        if self._reading:
            if len(self.messages) >= self._max_queued_messages and not self.answers:
                self._reading = False
                link.wire.pause_reading()
                self.machine.set_reading(False, self.now)
        elif self.answers or len(self.messages) <= self._max_queued_messages // 2:
            self._reading = True
            link.wire.resume_reading()
            self.machine.set_reading(True, self.now)
            self._arm()

    # -- time --------------------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Have the machine ticked at its deadline. A deadline that moved back in the meantime costs one early tick."""
        deadline = self.machine.next_deadline()
        if deadline == NEVER:
            return
        if self._timer is not None:
            if self._timer.when() <= deadline:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.machine.tick(self.now)
        self._act()
        self._arm()

    def _cancel_timers(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
