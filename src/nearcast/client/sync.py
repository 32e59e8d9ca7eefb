"""The client without asyncio: the same calls, blocking. A loop of its own runs in a background thread.

    with nearcast.client.sync.connect("mqtt://localhost") as client:
        client.subscribe("sensors/#")
        client.publish("sensors/door", "open", qos=1)
        for message in client.messages(timeout=5):
            print(message.topic, message.text)

All methods may be called from any thread. Options are those of :class:`nearcast.client.Client`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar

from nearcast.client.client import Client
from nearcast.client.messages import Message
from nearcast.errors import ConnectionClosed, LocalProtocolError
from nearcast.mqtt.packets import Properties, SubscriptionRequest

Result = TypeVar("Result")


def connect(url: str, **options: Any) -> SyncClient:
    """Connect, and return the open client; raises what ``async with Client(url, **options)`` raises."""
    client = SyncClient(lambda: Client(url, **options))
    client.open()
    return client


class SyncClient:
    """A blocking client; made by :func:`connect`."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        self._opened: concurrent.futures.Future[Client] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="nearcast client loop", daemon=True)

    def open(self) -> None:
        """Connect; :func:`connect` has done it already."""
        if self._thread.ident is not None:
            raise LocalProtocolError("this client is open already, or was: make a new one")
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect and end the thread. A second call does nothing."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and self._thread.is_alive():
            try:
                loop.call_soon_threadsafe(stop.set)
            except RuntimeError:
                pass  # the loop ended between the question and the call
        self._thread.join()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @property
    def client_id(self) -> str:
        return self._opened.result().client_id

    def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        qos: int = 0,
        retain: bool = False,
        *,
        properties: Properties | None = None,
    ) -> None:
        """Publish; returns when it is on its way (QoS 0) or acknowledged (QoS 1 and 2)."""
        self._call(self._opened.result().publish(topic, payload, qos, retain, properties=properties))

    def subscribe(self, *topic_filters: str | SubscriptionRequest, qos: int = 0) -> list[int]:
        """Subscribe; returns the QoS granted for each filter."""
        return self._call(self._opened.result().subscribe(*topic_filters, qos=qos))

    def unsubscribe(self, *topic_filters: str) -> None:
        self._call(self._opened.result().unsubscribe(*topic_filters))

    def request(self, topic: str, payload: bytes | str = b"", timeout: float = 10.0) -> Message:
        """Publish a request and wait for its answer."""
        return self._call(self._opened.result().request(topic, payload, timeout))

    def respond(self, request: Message, payload: bytes | str = b"") -> None:
        self._call(self._opened.result().respond(request, payload))

    def get(self, timeout: float | None = None) -> Message | None:
        """The next message; ``None`` when none came within ``timeout`` seconds or the client was closed."""
        return self._call(self._opened.result().messages.get(timeout))

    def messages(self, timeout: float | None = None) -> Iterator[Message]:
        """Messages as they come; ends when none came for ``timeout`` seconds."""
        while True:
            message = self.get(timeout)
            if message is None:
                return
            yield message

    def __iter__(self) -> Iterator[Message]:
        return self.messages()

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        loop = self._loop
        if loop is None or not self._thread.is_alive() or threading.current_thread() is self._thread:
            work.close()
            raise ConnectionClosed("this client is closed: open a new one")
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ConnectionClosed("this client was closed while the call was under way") from None
        except BaseException:
            future.cancel()  # Ctrl-C in the calling thread must not leave the call running
            raise

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001  # the edge of the thread: the caller of open() gets it
            if not self._opened.done():
                self._opened.set_exception(error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with self._make() as client:
            self._opened.set_result(client)
            await self._stop.wait()
