"""Messages as the application sees them, and the bounded stream it reads them from."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from nearcast.mqtt.packets import Properties, Publish


class Message:
    """A received message. ``properties`` is ``None`` when there are none, as always in MQTT 3.1.1."""

    __slots__ = ("packet", "payload", "properties", "qos", "retain", "topic")

    def __init__(self, packet: Publish) -> None:
        self.packet = packet
        self.topic = packet.topic
        self.payload = packet.payload
        self.qos = packet.qos
        self.retain = packet.retain
        self.properties = packet.properties

    @property
    def text(self) -> str:
        """The payload as UTF-8 text; bytes that are none show as U+FFFD."""
        return self.payload.decode("utf-8", "replace")

    @property
    def response_topic(self) -> str | None:
        """Where the sender of a request wants the answer (see :meth:`Client.respond`)."""
        return None if self.properties is None else self.properties.response_topic

    @property
    def correlation_data(self) -> bytes | None:
        """What the answer to a request must carry."""
        return None if self.properties is None else self.properties.correlation_data

    @property
    def user_properties(self) -> list[tuple[str, str]]:
        """Name and value pairs, in the order the publisher gave."""
        found: Properties | None = self.properties
        return [] if found is None or found.user_properties is None else found.user_properties

    def __repr__(self) -> str:
        return f"Message({self.topic!r}, {self.payload!r}, qos={self.qos}, retain={self.retain})"


class MessageStream:
    """Received messages in order: ``async for message in client.messages``.

    It ends when the client is closed, and raises what ended the connection for good when that was not our doing. Several
    tasks may read; each message goes to one of them. ``dropped`` counts QoS 0 messages lost to a full stream (see
    :class:`~nearcast.client.Client`).
    """

    def __init__(self, taken: Callable[[Message], None]) -> None:
        self.dropped = 0
        self._taken = taken
        self._messages: deque[Message] = deque()
        self._readers: deque[asyncio.Future[None]] = deque()
        self._ended = False
        self._failure: Exception | None = None

    def __len__(self) -> int:
        """Messages that wait to be read."""
        return len(self._messages)

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        while not self._messages:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                raise StopAsyncIteration
            reader = asyncio.get_running_loop().create_future()
            self._readers.append(reader)
            try:
                await reader
            except asyncio.CancelledError:
                # It may have been woken for a message before it was cancelled: the next reader must not sleep through it.
                if reader.done() and not reader.cancelled():
                    self._wake_one()
                raise
        message = self._messages.popleft()
        self._taken(message)
        return message

    async def get(self, timeout: float | None = None) -> Message | None:
        """The next message; ``None`` when the stream has ended or ``timeout`` seconds have passed."""
        try:
            async with asyncio.timeout(timeout):
                return await self.__anext__()
        except (TimeoutError, StopAsyncIteration):
            return None

    def put(self, message: Message) -> None:
        """For the client: a message arrived."""
        self._messages.append(message)
        if self._readers:
            self._wake_one()

    def end(self, failure: Exception | None) -> None:
        """For the client: nothing more will arrive."""
        self._ended = True
        self._failure = failure
        while self._readers:
            self._wake_one()

    def _wake_one(self) -> None:
        while self._readers:
            reader = self._readers.popleft()
            if not reader.done():
                reader.set_result(None)
                return
