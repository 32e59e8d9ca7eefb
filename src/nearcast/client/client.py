"""The public client: connect, publish, subscribe, receive, request and respond; reconnects by itself.

It composes endpoint, machine, driver and backoff; the protocol itself is :class:`~nearcast.mqtt.client_machine.ClientMachine`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from types import TracebackType

from nearcast.client.driver import Driver, Link
from nearcast.client.endpoints import Endpoint, parse_url
from nearcast.client.messages import Message, MessageStream
from nearcast.client.transports import Tls
from nearcast.errors import ConfigError, ConnectionClosed, ConnectionRefused, LocalProtocolError, NearcastError, RequestRefused
from nearcast.mqtt import reasons
from nearcast.mqtt.client_events import (
    Authentication,
    ClientSettings,
    Disconnected,
    PublishCompleted,
    ServerLimits,
    SubscribeCompleted,
    UnsubscribeCompleted,
)
from nearcast.mqtt.client_machine import ClientMachine
from nearcast.mqtt.client_reconnection import Backoff, Reconnection, is_final, is_temporary
from nearcast.mqtt.packets import MQTT_3_1_1, MQTT_5, Properties, Publish, SubscriptionRequest, Will

logger = logging.getLogger(__name__)

#: How long a session waits for its client when the client itself decides: long enough for a broker's restart.
RECONNECT_SESSION_SECONDS = 300

MAX_REFERENCES = 5

#: QoS 1 and 2 publishes in flight. A 3.1.1 broker cannot say how many it takes: Mosquitto 2.0.11 takes 20, completes the
#: handshake of further QoS 2 messages all the same, and loses them.
DEFAULT_WINDOW = 1_000
DEFAULT_WINDOW_3_1_1 = 20


class Client:
    """An MQTT client; use it with ``async with``.

    Messages of all subscriptions arrive in ``client.messages``. At most ``max_queued_messages`` wait there (and what one read
    of the socket brought): then reading stops until half are taken. QoS 1 and 2 messages are acknowledged when they are
    taken. While one of your tasks awaits an answer of the broker, reading goes on, or the answer could never come; only then,
    and only far above the bound, QoS 0 messages are dropped and counted in ``client.messages.dropped``.

    With ``reconnect`` (the default) a lost connection is opened again, with growing delays; subscriptions are restored, and
    unacknowledged publishes are sent again. The first connection is not retried: ``async with`` raises. ``on_connection`` is
    called with ``None`` whenever there is a connection (again), and with the reason whenever one is lost; it must not wait.
    """

    def __init__(
        self,
        url: str,
        *,
        client_id: str = "",
        version: int = MQTT_5,
        username: str | None = None,
        password: str | bytes | None = None,
        clean_start: bool = True,
        session_expiry_seconds: int | None = None,
        keep_alive_seconds: int = 60,
        connect_timeout_seconds: float = 10.0,
        will: Will | None = None,
        tls: Tls = None,
        reconnect: bool | Backoff = True,
        follow_server_reference: bool = True,
        max_queued_messages: int = 1_000,
        receive_maximum: int = 1_000,
        max_packet_bytes: int = 1_048_576,
        max_inflight: int | None = None,
        use_topic_aliases: bool = False,
        authentication: Authentication | None = None,
        user_properties: list[tuple[str, str]] | None = None,
        rng: random.Random | None = None,
        on_connection: Callable[[str | None], None] | None = None,
    ) -> None:
        if version not in (MQTT_3_1_1, MQTT_5):
            raise ConfigError(f"version={version}: use 4 for MQTT 3.1.1 or 5 for MQTT 5.0")
        if version == MQTT_3_1_1 and not clean_start and not client_id:
            raise ConfigError("a session of MQTT 3.1.1 needs a name: give a client_id, or leave clean_start on")
        self._endpoint = parse_url(url)
        self._tls = tls
        self._backoff: Backoff | None = Backoff() if reconnect is True else (reconnect or None)
        self._follow_server_reference = follow_server_reference
        self._max_queued_messages = max(1, max_queued_messages)
        self._rng = rng if rng is not None else random.Random()
        username, encoded_password = self._endpoint.credentials(username, password)
        own_session = session_expiry_seconds is None
        if session_expiry_seconds is None:
            session_expiry_seconds = RECONNECT_SESSION_SECONDS if self._backoff is not None else 0
        self._settings = ClientSettings(
            client_id=client_id,
            version=version,
            clean_start=clean_start,
            keep_alive_seconds=keep_alive_seconds,
            connect_timeout_seconds=connect_timeout_seconds,
            username=username,
            password=encoded_password,
            will=will,
            session_expiry_seconds=session_expiry_seconds,
            end_session_on_disconnect=own_session,
            receive_maximum=receive_maximum,
            # Mosquitto 2.0.11 exceeds it as soon as acknowledgements come in portions; back-pressure holds all the same.
            enforce_receive_maximum=False,
            acknowledge_on_receipt=False,
            max_packet_bytes=max_packet_bytes,
            max_inflight=max_inflight or (DEFAULT_WINDOW if version == MQTT_5 else DEFAULT_WINDOW_3_1_1),
            use_topic_aliases=use_topic_aliases,
            request_response_information=version == MQTT_5,
            user_properties=user_properties,
        )
        self._machine = ClientMachine(self._settings, authentication)
        self._driver_or_none: Driver | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._responses: dict[bytes, asyncio.Future[Message]] = {}
        self._response_lock = asyncio.Lock()
        self._on_connection = on_connection
        self._moving = False

    async def __aenter__(self) -> Client:
        if self._driver_or_none is not None:
            raise LocalProtocolError("a Client is used once: make a new one")
        driver = Driver(self._machine, self._max_queued_messages)
        driver.on_response = self._on_response
        driver.on_connection = self._on_connection
        self._driver_or_none = driver
        link = await self._establish(self._endpoint)
        self._supervisor = asyncio.create_task(self._supervise(link), name=f"nearcast client {self.client_id}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        driver = self._driver
        try:
            if self._supervisor is not None:
                self._supervisor.cancel()
                await asyncio.wait([self._supervisor])
            await driver.close()
        finally:
            driver.fail(ConnectionClosed("this client is closed: open a new one"), told=False)

    # -- what it is --------------------------------------------------------------------------------------------------------

    @property
    def client_id(self) -> str:
        """The client identifier, also when the broker assigned it."""
        return self._machine.client_id

    @property
    def connected(self) -> bool:
        """Whether there is a connection at this moment."""
        return self._driver_or_none is not None and self._driver_or_none.connected

    @property
    def limits(self) -> ServerLimits:
        """What the broker said it accepts."""
        return self._machine.limits

    @property
    def messages(self) -> MessageStream:
        """The messages of all subscriptions."""
        return self._driver.messages

    async def move(self, url: str) -> None:
        """Go on at another broker or gateway of the same fabric, as a device does that came somewhere else; returns when there
        is a connection.

        The session stays: subscriptions, and what waits to be delivered or acknowledged, go on where the new broker finds
        them. QoS 0 messages that are on their way meanwhile are lost. It needs ``reconnect``."""
        if self._backoff is None:
            raise LocalProtocolError("move() opens another connection: leave `reconnect` on")
        self._endpoint = parse_url(url)
        driver = self._driver
        self._moving = True
        driver.leave()
        await driver.until(lambda: driver.connected and not self._moving)

    async def wait_connected(self) -> None:
        """Wait until there is a connection; raises when there will be none."""
        driver = self._driver
        await driver.until(lambda: driver.connected)

    # -- what it does ------------------------------------------------------------------------------------------------------

    async def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        qos: int = 0,
        retain: bool = False,
        *,
        properties: Properties | None = None,
    ) -> None:
        """Publish a message.

        At QoS 0 this returns when the message is on its way out, at QoS 1 and 2 when the broker has acknowledged it;
        run several at once (a ``TaskGroup``) to fill the window. When the caller is cancelled, a QoS 1 or 2 message may
        still be delivered. Without a connection, it waits for the next."""
        message = Publish(topic, payload.encode() if isinstance(payload, str) else payload, qos, retain, properties=properties)
        driver = self._driver
        machine = self._machine
        if qos == 0:
            if not (driver.writable and driver.connected):
                await driver.until(lambda: driver.writable and driver.connected)
            machine.publish(message, driver.now)
            if driver.produced(len(topic) + len(message.payload)):
                await asyncio.sleep(0)
            return
        if machine.full or driver.failure is not None:
            await driver.until(lambda: not machine.full)
        answer = await driver.answer(machine.publish(message, driver.now))
        if isinstance(answer, PublishCompleted) and answer.reason_code >= 0x80:
            said = answer.reason_string or reasons.name(answer.reason_code)
            raise RequestRefused(answer.reason_code, f"the publish to {topic!r} was refused: {said}")

    async def subscribe(
        self,
        *topic_filters: str | SubscriptionRequest,
        qos: int = 0,
        no_local: bool = False,
        retain_as_published: bool = False,
        retain_handling: int = 0,
        properties: Properties | None = None,
    ) -> list[int]:
        """Subscribe to topic filters; returns the QoS granted for each. Raises when the broker refuses one.

        A filter may also be a :class:`SubscriptionRequest` with options of its own."""
        requests = [
            entry
            if isinstance(entry, SubscriptionRequest)
            else SubscriptionRequest(entry, qos, no_local, retain_as_published, retain_handling)
            for entry in topic_filters
        ]
        driver = self._driver
        await driver.until(lambda: True)
        answer = await driver.answer(self._machine.subscribe(requests, properties, driver.now))
        codes = answer.reason_codes if isinstance(answer, SubscribeCompleted) else []
        for request, code in zip(requests, codes, strict=True):
            if code >= 0x80:
                said = answer.reason_string or reasons.name(code)
                raise RequestRefused(code, f"the broker refused the subscription to {request.topic_filter!r}: {said}")
        return codes

    async def unsubscribe(self, *topic_filters: str) -> None:
        """Give up subscriptions. Raises when the broker refuses; one that did not exist is no error."""
        driver = self._driver
        await driver.until(lambda: True)
        answer = await driver.answer(self._machine.unsubscribe(list(topic_filters), None, driver.now))
        codes = answer.reason_codes if isinstance(answer, UnsubscribeCompleted) else []
        for topic_filter, code in zip(topic_filters, codes, strict=True):
            if code >= 0x80:
                raise RequestRefused(code, f"the broker refused to unsubscribe {topic_filter!r}: {reasons.name(code)}")

    async def request(self, topic: str, payload: bytes | str = b"", timeout: float = 10.0, *, qos: int = 1) -> Message:
        """Publish a request and wait for its answer (MQTT 5.0 section 4.10). ``TimeoutError`` when none comes in time."""
        if self._settings.version != MQTT_5:
            raise LocalProtocolError("request() needs MQTT 5: use version=5")
        correlation = secrets.token_bytes(12)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._responses[correlation] = future
        try:
            async with asyncio.timeout(timeout):
                response_topic = await self._response_topic()
                properties = Properties(response_topic=response_topic, correlation_data=correlation)
                await self.publish(topic, payload, qos, properties=properties)
                return await future
        except TimeoutError as error:
            message = f"no answer to {topic!r} within {timeout:g} s: does anyone subscribe to it and respond?"
            raise TimeoutError(message) from error
        finally:
            del self._responses[correlation]

    async def respond(self, request: Message, payload: bytes | str = b"", qos: int = 1) -> None:
        """Answer a request."""
        if request.response_topic is None:
            raise LocalProtocolError(f"the message to {request.topic!r} asks for no response: it has no response topic")
        await self.publish(
            request.response_topic, payload, qos, properties=Properties(correlation_data=request.correlation_data)
        )

    async def re_authenticate(self) -> None:
        """Begin a new authentication exchange on the open connection; a failed one ends the connection."""
        driver = self._driver
        await driver.until(lambda: driver.connected)
        self._machine.re_authenticate(driver.now)
        driver.produced(0)

    # -- inside ------------------------------------------------------------------------------------------------------------

    @property
    def _driver(self) -> Driver:
        if self._driver_or_none is None:
            raise LocalProtocolError("the client is not open: use `async with Client(...) as client`")
        return self._driver_or_none

    async def _response_topic(self) -> str:
        """The topic of our answers, subscribed to at the first request."""
        driver = self._driver
        async with self._response_lock:
            if driver.response_topic is None:
                prefix = self._machine.response_information or "nearcast/response/"
                topic = f"{prefix.rstrip('/')}/{secrets.token_hex(12)}"
                await self.subscribe(topic, qos=1)
                driver.response_topic = topic
            return driver.response_topic

    def _on_response(self, message: Message) -> None:
        waiting = self._responses.get(message.correlation_data or b"")
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def _establish(self, endpoint: Endpoint) -> Link:
        """Connect, following the broker's references to other brokers (section 4.11)."""
        for _ in range(MAX_REFERENCES):
            try:
                return await self._driver.connect(endpoint, self._tls)
            except ConnectionRefused as refusal:
                other = self._referred(endpoint, refusal.reason_code, refusal.server_reference)
                if other is None:
                    raise
                logger.info("%s refers to %s", endpoint, other)
                endpoint = other
        raise ConnectionRefused(
            reasons.USE_ANOTHER_SERVER,
            f"{self._endpoint} and the brokers it refers to only refer further: gave up at {endpoint}",
        )

    def _referred(self, endpoint: Endpoint, reason_code: int | None, reference: str | None) -> Endpoint | None:
        """Where a refusal or DISCONNECT sends us; a broker that moved for good is not asked again."""
        if reference is None or not self._follow_server_reference:
            return None
        if reason_code not in (reasons.USE_ANOTHER_SERVER, reasons.SERVER_MOVED):
            return None
        other = endpoint.referred(reference)
        if reason_code == reasons.SERVER_MOVED:
            self._endpoint = other
        return other

    async def _supervise(self, link: Link) -> None:
        """The client's only task: keep it connected, and tell everyone when that is not possible."""
        try:
            await self._keep_connected(link)
        except NearcastError as error:
            self._driver.fail(error)
        except Exception as error:  # the edge of the task: whoever waits must learn of it
            logger.exception("the client %s stopped", self.client_id)
            self._driver.fail(ConnectionClosed(f"the client stopped because of an internal error: {error!r}"))

    async def _keep_connected(self, link: Link) -> None:
        driver = self._driver
        attempts = None if self._backoff is None else Reconnection(self._backoff, self._rng)
        while True:
            if attempts is not None:
                attempts.connected(driver.now)
            if self._moving:
                driver.leave()  # move() was called while this connection was being opened
            end = await link.ended
            if attempts is None or is_final(end):
                raise ConnectionClosed(end.message, end.reason_code)
            attempts.lost(driver.now)
            if self._moving:
                attempts.begin_anew()
            link = await self._reconnect(end, attempts)

    async def _reconnect(self, end: Disconnected, attempts: Reconnection) -> Link:
        """The next connection after one that ended."""
        other = self._referred(self._endpoint, end.reason_code, end.server_reference) if end.by_server else None
        logger.info("%s: %s; reconnecting", self._endpoint, end.message)
        while True:
            delay = attempts.next_delay_seconds(elsewhere=self._moving or other is not None)
            if delay:
                await asyncio.sleep(delay)
            self._moving = False
            try:
                return await self._establish(other or self._endpoint)
            except ConnectionClosed as error:
                logger.info("attempt %d: %s", attempts.attempt, error)
            except ConnectionRefused as refusal:
                if not is_temporary(refusal.reason_code):
                    raise
                logger.info("attempt %d: %s", attempts.attempt, refusal)
            other = None
