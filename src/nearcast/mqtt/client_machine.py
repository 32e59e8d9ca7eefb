"""The client side of MQTT 3.1.1 and 5.0 as one pure machine: events and ``now`` in; bytes and client events out.

It owns one client over any number of successive connections: CONNECT and what CONNACK granted, enhanced authentication,
which packet goes where. Its parts have their own homes: ``client_handshake`` (CONNECT and the limits in CONNACK),
``client_keepalive``, ``client_outgoing`` (QoS flows of our publishes), ``client_publishing`` (their bytes),
``client_incoming`` (QoS flows towards us), ``client_requests`` (subscriptions). It refuses to know transports, tasks, clocks,
URLs and when to reconnect: a driver does that.

States and what moves them::

    closed ──connect()──► connecting ──CONNACK 0──► connected ──disconnect(), DISCONNECT, error, lose()──► closed
                              └──CONNACK refusal, error, timeout, lose()──► closed

Contract for the driver, after every call: write :meth:`take`, act on :meth:`take_events`, and call :meth:`tick` at
:meth:`next_deadline`. After ``Refused`` or ``Disconnected``, write what remains and close the transport. When the transport
ends by itself, call :meth:`lose`. ``connect`` starts the next connection on a fresh transport; the session carries over as far
as the server kept it (``Connected.session_present``).
"""

from __future__ import annotations

from typing import Final

from nearcast.errors import LocalProtocolError, NearcastError, RemoteProtocolError, RequestRefused
from nearcast.mqtt import reasons
from nearcast.mqtt.client_events import (
    Authentication,
    ClientEvent,
    ClientSettings,
    Connected,
    Disconnected,
    MessageReceived,
    PublishCompleted,
    ReAuthenticated,
    Refused,
    ServerLimits,
    SubscribeCompleted,
    UnsubscribeCompleted,
    reason_string,
)
from nearcast.mqtt.client_handshake import connect_packet, granted
from nearcast.mqtt.client_incoming import IncomingMessages
from nearcast.mqtt.client_keepalive import NEVER as NEVER
from nearcast.mqtt.client_keepalive import KeepAlive
from nearcast.mqtt.client_outgoing import Outgoing, OutgoingMessages, PacketIdentifiers
from nearcast.mqtt.client_publishing import PublishEncoder
from nearcast.mqtt.client_requests import Requests, check_subscription
from nearcast.mqtt.codec import REASON_CODES, PacketReader, encode
from nearcast.mqtt.packets import (
    MQTT_5,
    Auth,
    ConnAck,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    Properties,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    SubscriptionRequest,
    UnsubAck,
    Unsubscribe,
)
from nearcast.mqtt.properties import is_topic_name
from nearcast.mqtt.wire import DISCONNECT

CLOSED: Final = 0
CONNECTING: Final = 1
CONNECTED: Final = 2


class ClientMachine:
    """See the module's essay. ``state`` is ``CLOSED``, ``CONNECTING`` or ``CONNECTED``."""

    def __init__(self, settings: ClientSettings, authentication: Authentication | None = None) -> None:
        if authentication is not None and settings.version != MQTT_5:
            raise LocalProtocolError("enhanced authentication needs MQTT 5: use version=5")
        self.settings = settings
        self.state = CLOSED
        self.client_id = settings.client_id
        self.limits = ServerLimits()
        self.response_information: str | None = None
        self._authentication = authentication
        self._version = settings.version
        self._identifiers = PacketIdentifiers(settings.max_packet_identifier)
        self._outgoing = OutgoingMessages(self._identifiers, settings.max_waiting)
        self._publishes = PublishEncoder(settings)
        self._incoming = IncomingMessages(settings)
        self._requests = Requests(self._identifiers)
        self._reader = PacketReader(settings.version, settings.max_packet_bytes, by_server=True)
        self._output: list[bytes] = []
        self._events: list[ClientEvent] = []
        self._last_token = 0
        self._connected_before = False
        self._is_released = not settings.releases_forgotten
        self._asked_clean_start = settings.clean_start
        self._re_authenticating = False
        self._connect_deadline = NEVER
        self._keep_alive = KeepAlive(settings)

    # -- what the driver asks for ------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether a QoS 1 or 2 publish would be refused now because too many wait."""
        return self._outgoing.full

    @property
    def waiting(self) -> int:
        """QoS 1 and 2 publishes that wait for a place in the window or for a connection."""
        return self._outgoing.waiting

    @property
    def unacknowledged(self) -> int:
        """QoS 1 and 2 publishes that are not completed."""
        return len(self._outgoing)

    @property
    def resumable(self) -> bool:
        """Whether a later connection may find this session at the server."""
        if self._version == MQTT_5:
            return self.settings.session_expiry_seconds > 0
        return not self.settings.clean_start

    def connect(self, now: float) -> None:
        """A transport is up: begin a connection on it."""
        if self.state != CLOSED:
            raise LocalProtocolError("connect() on a connection that is already open")
        settings = self.settings
        clean_start = settings.clean_start and not (self._connected_before and self.resumable)
        packet = connect_packet(settings, self.client_id, clean_start, self._authentication)
        self.state = CONNECTING
        self._asked_clean_start = clean_start
        self._reader = PacketReader(self._version, settings.max_packet_bytes, by_server=True)
        self._output.clear()
        self._publishes.opened()
        self._incoming.opened()
        self._keep_alive.opened(now)
        self._connect_deadline = now + settings.connect_timeout_seconds
        self._send(packet, now)

    def publish(self, message: Publish, now: float) -> int:
        """Send a message, or let it wait for the window or the next connection.

        Returns the token of the later ``PublishCompleted``; 0 at QoS 0, which has no completion and needs a connection."""
        if message.qos == 0:
            if self.state != CONNECTED:
                raise LocalProtocolError("a QoS 0 publish needs a connection: wait until connected")
            self._write(self._publishes.encode(message, self.limits), now)
            return 0
        if message.qos < 0 or message.qos > 2:
            raise LocalProtocolError(f"QoS {message.qos} is not 0, 1 or 2")
        if not is_topic_name(message.topic):
            raise LocalProtocolError(f"{message.topic!r} is not a topic name: it must not be empty nor contain + or #")
        self._last_token += 1
        self._outgoing.add(Outgoing(self._last_token, message))
        if self.state == CONNECTED:
            self._pump(now)
        return self._last_token

    def subscribe(self, subscriptions: list[SubscriptionRequest], properties: Properties | None, now: float) -> int:
        """Ask for subscriptions; ``SubscribeCompleted`` with the returned token brings one reason code for each."""
        if not subscriptions:
            raise LocalProtocolError("a SUBSCRIBE needs at least one topic filter")
        if self.state == CONNECTED:
            for subscription in subscriptions:
                check_subscription(subscription, properties, self.limits)
        return self._request(Subscribe(self._identifiers.take(), subscriptions, properties), now)

    def unsubscribe(self, topic_filters: list[str], properties: Properties | None, now: float) -> int:
        """Give up subscriptions; ``UnsubscribeCompleted`` with the returned token brings the answers."""
        if not topic_filters:
            raise LocalProtocolError("an UNSUBSCRIBE needs at least one topic filter")
        return self._request(Unsubscribe(self._identifiers.take(), topic_filters, properties), now)

    def acknowledge(self, message: Publish, now: float) -> None:
        """The application took a message, where ``acknowledge_on_receipt`` is off. Call it in the order of reception
        [MQTT-4.6.0-2, -3]; for QoS 0 and for messages of an earlier connection it does nothing."""
        if self.state == CONNECTED:
            answer = self._incoming.acknowledge(message)
            if answer is not None:
                self._send(answer, now)

    def re_authenticate(self, now: float) -> None:
        """Begin a new authentication exchange on the open connection (section 4.12.1)."""
        if self._authentication is None:
            raise LocalProtocolError("re-authentication needs an authentication object")
        if self.state != CONNECTED or self._re_authenticating:
            raise LocalProtocolError("re-authentication needs an open connection and no other re-authentication under way")
        self._send_auth(self._authentication.method, reasons.RE_AUTHENTICATE, self._authentication.start(), now)
        self._re_authenticating = True

    def disconnect(
        self, now: float, reason_code: int = reasons.SUCCESS, reason_string: str | None = None, keep_session: bool = False
    ) -> None:
        """End the connection on purpose. The driver closes the transport after the remaining output. With ``keep_session`` the
        session goes on whatever the settings say: the client is about to connect elsewhere."""
        if self.state == CLOSED:
            return
        if self.state == CONNECTED:
            properties = None
            if self._version == MQTT_5:
                ends = self.settings.end_session_on_disconnect and self.settings.session_expiry_seconds > 0
                ends = ends and not keep_session
                if ends or reason_string is not None:
                    properties = Properties(session_expiry_interval=0 if ends else None, reason_string=reason_string)
            self._send(Disconnect(reason_code, properties), now)
        self._close(reason_code, "disconnected by this client", False, None)

    def lose(self, now: float, message: str = "the connection was lost") -> None:
        """The transport ended without our asking."""
        if self.state != CLOSED:
            self._output.clear()
            self._close(None, message, False, None)

    def set_reading(self, reading: bool, now: float) -> None:
        """The driver stopped or resumed reading. While it does not read, a missing PINGRESP proves nothing."""
        self._keep_alive.set_reading(reading, now)

    def receive(self, data: bytes, now: float) -> None:
        """Bytes arrived; any chunking gives the same events."""
        if self.state == CLOSED:
            return
        self._keep_alive.received(now)
        try:
            for packet in self._reader.feed(data):
                self._handle(packet, now)
                if self.state == CLOSED:
                    return
            if self._reader.failure is not None:
                raise self._reader.failure
        except RemoteProtocolError as error:
            self._fail(error.reason_code, f"the server broke the protocol: {error.message}", now)

    def tick(self, now: float) -> None:
        """Time passed: send a ping that is due, end a connection whose answer is overdue."""
        if self.state == CONNECTING and now >= self._connect_deadline:
            self._fail(
                reasons.UNSPECIFIED_ERROR,
                f"no CONNACK within {self.settings.connect_timeout_seconds:g} s: is there an MQTT broker at this address?",
                now,
            )
        elif self.state == CONNECTED:
            if self._keep_alive.answer_overdue(now):
                self._fail(reasons.KEEP_ALIVE_TIMEOUT, "the server did not answer a ping", now)
            elif self._keep_alive.ping_due(now):
                self._keep_alive.pinged(now)
                self._send(PingReq(), now)

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next, on the clock of ``now``; infinity for never."""
        if self.state == CONNECTING:
            return self._connect_deadline
        return self._keep_alive.next_deadline() if self.state == CONNECTED else NEVER

    def take(self) -> list[bytes]:
        """Output to write now, in order."""
        output = self._output
        self._output = []
        return output

    def take_events(self) -> list[ClientEvent]:
        """What happened since the last call, in order."""
        events = self._events
        self._events = []
        return events

    # -- what the server sent ----------------------------------------------------------------------------------------------

    def _handle(self, packet: Packet, now: float) -> None:
        if self.state == CONNECTING:
            if isinstance(packet, ConnAck):
                self._on_connack(packet, now)
            elif isinstance(packet, Auth):
                self._on_auth(packet, now)
            elif isinstance(packet, Disconnect):
                self._on_disconnect(packet)
            else:
                raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"{type(packet).__name__} before CONNACK")
        elif isinstance(packet, Publish):
            if self._incoming.receive(packet):
                self._events.append(MessageReceived(packet))
            answer = self._incoming.answer(packet)
            if answer is not None:
                self._send(answer, now)
        elif isinstance(packet, PubAck):
            self._completed(self._outgoing.acknowledged(packet), now)
        elif isinstance(packet, PubRec):
            outcome = self._outgoing.received(packet)
            if isinstance(outcome, PubRel):
                self._send(outcome, now)
            else:
                self._completed(outcome, now)
        elif isinstance(packet, PubRel):
            self._send(self._incoming.release(packet), now)
        elif isinstance(packet, PubComp):
            if not self._is_released and packet.packet_id == self.settings.max_packet_identifier:
                self._is_released = True
                self._pump(now)
            self._completed(self._outgoing.completed(packet), now)
        elif isinstance(packet, PingResp):
            self._keep_alive.answered()
        elif isinstance(packet, SubAck):
            self._tell(self._requests.subscribed(packet))
        elif isinstance(packet, UnsubAck):
            self._tell(self._requests.unsubscribed(packet))
        elif isinstance(packet, Disconnect):
            self._on_disconnect(packet)
        elif isinstance(packet, Auth):
            self._on_auth(packet, now)
        else:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"a server must not send {type(packet).__name__}")

    def _on_connack(self, packet: ConnAck, now: float) -> None:
        properties = packet.properties
        if packet.reason_code != reasons.SUCCESS:
            code = packet.reason_code
            said = reason_string(properties)
            reference = properties.server_reference if properties is not None else None
            self._quiet()
            self._events.append(Refused(code, f"the broker refused the connection: {said or reasons.name(code)}", reference))
            return
        if packet.session_present and self._asked_clean_start:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "session present although a clean start was asked for")
        self.limits = granted(self.settings, properties)
        if properties is not None:
            if properties.assigned_client_identifier is not None:
                self.client_id = properties.assigned_client_identifier
            self.response_information = properties.response_information
        self._authentication_step(None if properties is None else properties.authentication_data, True, now)
        if self.state == CLOSED:
            return
        self.state = CONNECTED
        self._connect_deadline = NEVER
        self._keep_alive.start(self.limits.keep_alive_seconds)
        self._events.append(Connected(self.client_id, packet.session_present, self.limits, properties))
        self._continue_session(packet.session_present, now)
        self._connected_before = True

    def _continue_session(self, session_present: bool, now: float) -> None:
        """Bring the session onto the new connection (section 4.4)."""
        self._outgoing.opened(min(self.limits.receive_maximum, self.settings.max_inflight))
        if self.limits.maximum_qos < 2:
            self._is_released = True  # such a server holds none, and may take a PUBREL for an error
        if session_present:
            if not self._is_released:
                # Nothing is published before the last of them is answered: an identifier that is in use cannot be released.
                for packet_id in range(1, self.settings.max_packet_identifier + 1):
                    self._send(PubRel(packet_id), now)
            for release in self._outgoing.resume():
                self._send(release, now)
        else:
            self._is_released = True
            self._incoming.restart()
            self._events.extend(self._outgoing.restart())
            if self.settings.resubscribe:
                self._requests.restore()
            else:
                self._requests.forget()
        for request in self._requests.unanswered():
            self._send(request, now)
        self._pump(now)

    def _on_disconnect(self, packet: Disconnect) -> None:
        reference = packet.properties.server_reference if packet.properties is not None else None
        said = reason_string(packet.properties) or reasons.name(packet.reason_code)
        self._close(packet.reason_code, f"the broker ended the connection: {said}", True, reference)

    def _on_auth(self, packet: Auth, now: float) -> None:
        properties = packet.properties
        authentication = self._authentication
        method = properties.authentication_method if properties is not None else None
        if authentication is None or method != authentication.method:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "AUTH with a method that was not asked for")
        data = properties.authentication_data if properties is not None else None
        if packet.reason_code == reasons.CONTINUE_AUTHENTICATION:
            self._authentication_step(data, False, now)
        elif packet.reason_code == reasons.SUCCESS and self._re_authenticating:
            self._re_authenticating = False
            self._authentication_step(data, True, now)
            if self.state == CONNECTED:
                self._events.append(ReAuthenticated())
        else:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"unexpected AUTH with {reasons.name(packet.reason_code)}")

    def _authentication_step(self, data: bytes | None, last: bool, now: float) -> None:
        """Let the application answer; its refusal of the server ends the connection."""
        authentication = self._authentication
        if authentication is None:
            return
        try:
            if last:
                authentication.finish(data)
            else:
                answer = authentication.respond(data)
                self._send_auth(authentication.method, reasons.CONTINUE_AUTHENTICATION, answer, now)
        except NearcastError as error:
            self._fail(reasons.NOT_AUTHORIZED, f"authentication failed: {error}", now)

    # -- sending -----------------------------------------------------------------------------------------------------------

    def _send(self, packet: Packet, now: float) -> None:
        self._write(encode(packet, self._version), now)

    def _write(self, data: bytes, now: float) -> None:
        self._output.append(data)
        self._keep_alive.sent(now)

    def _tell(self, event: SubscribeCompleted | UnsubscribeCompleted | None) -> None:
        if event is not None:
            self._events.append(event)

    def _completed(self, event: PublishCompleted | None, now: float) -> None:
        """An answer of the server ended a publish: tell it, and use its place in the window."""
        if event is not None:
            self._events.append(event)
            self._pump(now)

    def _pump(self, now: float) -> None:
        """Send what the window allows."""
        while self._is_released:
            outgoing = self._outgoing.next_to_send()
            if outgoing is None:
                return
            if self.settings.lowers_publishes:
                self._lower(outgoing)
            try:
                self._write(self._publishes.encode(outgoing.publish, self.limits), now)
                if outgoing.publish.qos == 0:
                    self._withdraw(outgoing, reasons.SUCCESS, None)
            except RequestRefused as error:
                self._withdraw(outgoing, error.reason_code, str(error))
            except LocalProtocolError as error:
                # Its publisher has left long ago: the fault (in its properties) can only be told as a refusal.
                self._withdraw(outgoing, reasons.IMPLEMENTATION_SPECIFIC, str(error))

    def _lower(self, outgoing: Outgoing) -> None:
        message, limits = outgoing.publish, self.limits
        message.retain = message.retain and limits.retain_available
        if message.qos > limits.maximum_qos:
            message.qos = limits.maximum_qos
            message.dup = message.dup and message.qos > 0  # [MQTT-3.3.1-2]

    def _withdraw(self, outgoing: Outgoing, reason_code: int, message: str | None) -> None:
        self._outgoing.withdraw(outgoing.publish.packet_id)
        self._events.append(PublishCompleted(outgoing.token, reason_code, message))

    def _send_auth(self, method: str, reason_code: int, data: bytes | None, now: float) -> None:
        self._send(Auth(reason_code, Properties(authentication_method=method, authentication_data=data)), now)

    def _request(self, packet: Subscribe | Unsubscribe, now: float) -> int:
        try:
            data = encode(packet, self._version)
        except LocalProtocolError:
            self._identifiers.give_back(packet.packet_id)
            raise
        self._last_token += 1
        self._requests.add(self._last_token, packet)
        if self.state == CONNECTED:
            self._write(data, now)
        return self._last_token

    # -- the end -----------------------------------------------------------------------------------------------------------

    def _fail(self, reason_code: int, message: str, now: float) -> None:
        """End the connection because of an error; MQTT 5 tells the server why."""
        if self.state == CONNECTED and self._version == MQTT_5:
            # A packet that no server sends may have a fault that only a CONNACK has a code for.
            said = reason_code if reason_code in REASON_CODES[DISCONNECT] else reasons.PROTOCOL_ERROR
            self._send(Disconnect(said), now)
        self._close(reason_code, message, False, None)

    def _close(self, reason_code: int | None, message: str, by_server: bool, server_reference: str | None) -> None:
        self._quiet()
        self._events.append(Disconnected(reason_code, message, by_server, server_reference))

    def _quiet(self) -> None:
        self.state = CLOSED
        self._re_authenticating = False
        self._connect_deadline = NEVER
        self._keep_alive.stop()
        self._outgoing.closed()
