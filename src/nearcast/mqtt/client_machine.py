"""The client side of MQTT 3.1.1 and 5.0 as one pure machine: events and ``now`` in; bytes and client events out.

It owns the session of one client over any number of successive connections: CONNECT and what CONNACK granted, keep-alive,
the QoS flows in both directions, subscriptions, topic aliases, enhanced authentication. It refuses to know transports, tasks,
clocks, URLs and when to reconnect: a driver does that.

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
    granted,
)
from nearcast.mqtt.client_outgoing import Outgoing, OutgoingMessages, PacketIdentifiers, TopicAliases
from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.packets import (
    MQTT_5,
    Auth,
    ConnAck,
    Connect,
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

CLOSED: Final = 0
CONNECTING: Final = 1
CONNECTED: Final = 2

NEVER: Final = float("inf")

#: A PINGREQ leaves before the keep-alive is over, so that its way to the server fits in.
PING_AT_FRACTION: Final = 0.8


class _Request:
    """A SUBSCRIBE or UNSUBSCRIBE that waits for its answer; it is repeated on the next connection."""

    def __init__(self, token: int, packet: Subscribe | Unsubscribe) -> None:
        self.token = token
        self.packet = packet


class _Subscription:
    """A subscription the server granted, so that it can be made again."""

    def __init__(self, request: SubscriptionRequest, properties: Properties | None) -> None:
        self.request = request
        self.properties = properties


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
        self._identifiers = PacketIdentifiers()
        self._outgoing = OutgoingMessages(self._identifiers, settings.max_waiting)
        self._requests: dict[int, _Request] = {}
        self._subscriptions: dict[str, _Subscription] = {}
        self._received: set[int] = set()
        self._held: dict[int, Publish] = {}
        self._held_qos_1 = 0
        self._reader = PacketReader(settings.version, settings.max_packet_bytes)
        self._output: list[bytes] = []
        self._events: list[ClientEvent] = []
        self._aliases_in: dict[int, str] = {}
        self._aliases_out = TopicAliases()
        self._last_token = 0
        self._connected_before = False
        self._asked_clean_start = settings.clean_start
        self._re_authenticating = False
        self._reading = True
        self._connect_deadline = NEVER
        self._ping_deadline = NEVER
        self._last_sent = 0.0
        self._last_received = 0.0

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
        properties = self._connect_properties() if self._version == MQTT_5 else None
        self.state = CONNECTING
        self._reader = PacketReader(self._version, settings.max_packet_bytes)
        self._output.clear()
        self._aliases_in.clear()
        self._aliases_out.clear()
        # The server sends again what it heard nothing about, so answers to the old connection have no meaning on this one.
        self._held.clear()
        self._held_qos_1 = 0
        self._reading = True
        self._last_received = now
        self._connect_deadline = now + settings.connect_timeout_seconds
        self._asked_clean_start = settings.clean_start and not (self._connected_before and self.resumable)
        self._send(
            Connect(
                client_id=self.client_id,
                version=self._version,
                clean_start=self._asked_clean_start,
                keep_alive=settings.keep_alive_seconds,
                username=settings.username,
                password=settings.password,
                will=settings.will,
                properties=properties,
            ),
            now,
        )

    def publish(self, message: Publish, now: float) -> int:
        """Send a message, or let it wait for the window or the next connection.

        Returns the token of the later ``PublishCompleted``; 0 at QoS 0, which has no completion and needs a connection."""
        if message.qos == 0:
            if self.state != CONNECTED:
                raise LocalProtocolError("a QoS 0 publish needs a connection: wait until connected")
            reason_code = self._send_publish(message, now)
            if reason_code:
                raise RequestRefused(reason_code, _unsendable(message, reason_code, self.limits))
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
                self._check_subscription(subscription, properties)
        return self._request(Subscribe(self._identifiers.take(), subscriptions, properties), now)

    def unsubscribe(self, topic_filters: list[str], properties: Properties | None, now: float) -> int:
        """Give up subscriptions; ``UnsubscribeCompleted`` with the returned token brings the answers."""
        if not topic_filters:
            raise LocalProtocolError("an UNSUBSCRIBE needs at least one topic filter")
        return self._request(Unsubscribe(self._identifiers.take(), topic_filters, properties), now)

    def acknowledge(self, message: Publish, now: float) -> None:
        """The application took a message, where ``acknowledge_on_receipt`` is off. Call it in the order of reception
        [MQTT-4.6.0-2, -3]; for QoS 0 and for messages of an earlier connection it does nothing."""
        if message.qos == 0 or self.state != CONNECTED or self._held.get(message.packet_id) is not message:
            return
        del self._held[message.packet_id]
        if message.qos == 1:
            self._held_qos_1 -= 1
            self._send(PubAck(message.packet_id), now)
        else:
            self._send(PubRec(message.packet_id), now)

    def re_authenticate(self, now: float) -> None:
        """Begin a new authentication exchange on the open connection (section 4.12.1)."""
        if self._authentication is None:
            raise LocalProtocolError("re-authentication needs an authentication object")
        if self.state != CONNECTED or self._re_authenticating:
            raise LocalProtocolError("re-authentication needs an open connection and no other re-authentication under way")
        self._send_auth(self._authentication.method, reasons.RE_AUTHENTICATE, self._authentication.start(), now)
        self._re_authenticating = True

    def disconnect(self, now: float, reason_code: int = reasons.SUCCESS, reason_string: str | None = None) -> None:
        """End the connection on purpose. The driver closes the transport after the remaining output."""
        if self.state == CLOSED:
            return
        if self.state == CONNECTED:
            properties = None
            if self._version == MQTT_5:
                ends = self.settings.end_session_on_disconnect and self.settings.session_expiry_seconds > 0
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
        self._reading = reading
        if reading:
            self._last_received = now
            if self._ping_deadline != NEVER:
                self._ping_deadline = now + self.settings.ping_timeout_seconds

    def receive(self, data: bytes, now: float) -> None:
        """Bytes arrived; any chunking gives the same events."""
        if self.state == CLOSED:
            return
        self._last_received = now
        if self._ping_deadline != NEVER:
            # Any byte proves that the peer lives; a long message in front of the PINGRESP must not end the connection.
            self._ping_deadline = now + self.settings.ping_timeout_seconds
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
            if self._ping_deadline != NEVER:
                if self._reading and now >= self._ping_deadline:
                    self._fail(reasons.KEEP_ALIVE_TIMEOUT, "the server did not answer a ping", now)
            elif now >= self._ping_due():
                self._ping_deadline = now + self.settings.ping_timeout_seconds
                self._send(PingReq(), now)

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next, on the clock of ``now``; infinity for never."""
        if self.state == CONNECTING:
            return self._connect_deadline
        if self.state == CONNECTED:
            if self._ping_deadline == NEVER:
                return self._ping_due()
            return self._ping_deadline if self._reading else NEVER
        return NEVER

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
            self._on_publish(packet, now)
        elif isinstance(packet, PubAck):
            self._on_puback(packet, now)
        elif isinstance(packet, PubRec):
            self._on_pubrec(packet, now)
        elif isinstance(packet, PubRel):
            # A PUBREL for an identifier we do not know gets its PUBCOMP too, or the server would repeat it for ever.
            known = packet.packet_id in self._received
            self._received.discard(packet.packet_id)
            self._send(PubComp(packet.packet_id, reasons.SUCCESS if known else reasons.PACKET_IDENTIFIER_NOT_FOUND), now)
        elif isinstance(packet, PubComp):
            done = self._outgoing.complete(packet.packet_id)
            if done is not None:
                # By PUBREC the server had the message: an error here is about the identifier only.
                self._events.append(PublishCompleted(done.token, reasons.SUCCESS, None))
                self._pump(now)
        elif isinstance(packet, PingResp):
            self._ping_deadline = NEVER
        elif isinstance(packet, SubAck):
            self._on_suback(packet)
        elif isinstance(packet, UnsubAck):
            self._on_unsuback(packet)
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
            said = properties.reason_string if properties is not None else None
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
        self._ping_deadline = NEVER
        self._events.append(Connected(self.client_id, packet.session_present, self.limits, properties))
        self._continue_session(packet.session_present, now)
        self._connected_before = True

    def _continue_session(self, session_present: bool, now: float) -> None:
        """Bring the session onto the new connection (section 4.4)."""
        self._outgoing.opened(min(self.limits.receive_maximum, self.settings.max_inflight))
        if session_present:
            for packet_id in self._outgoing.resume():
                self._send(PubRel(packet_id), now)
        else:
            self._received.clear()
            for outgoing in self._outgoing.restart():
                self._events.append(PublishCompleted(outgoing.token, reasons.SUCCESS, None))
            if self.settings.resubscribe:
                self._resubscribe()
            else:
                self._subscriptions.clear()
        for request in self._requests.values():
            self._send(request.packet, now)
        self._pump(now)

    def _resubscribe(self) -> None:
        """Ask again for what the server forgot; token 0 marks requests that no caller waits for."""
        unfinished = [packet_id for packet_id, request in self._requests.items() if request.token == 0]
        for packet_id in unfinished:
            del self._requests[packet_id]
            self._identifiers.give_back(packet_id)
        for subscription in self._subscriptions.values():
            packet = Subscribe(self._identifiers.take(), [subscription.request], subscription.properties)
            self._requests[packet.packet_id] = _Request(0, packet)

    def _on_publish(self, packet: Publish, now: float) -> None:
        if packet.properties is not None and packet.properties.topic_alias is not None:
            self._resolve_alias(packet, packet.properties.topic_alias)
        elif not packet.topic:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "PUBLISH with neither topic nor topic alias")
        if packet.qos == 0:
            self._events.append(MessageReceived(packet))
        elif packet.qos == 1:
            self._check_receive_maximum()
            self._events.append(MessageReceived(packet))
            if self.settings.acknowledge_on_receipt:
                self._send(PubAck(packet.packet_id), now)
            elif packet.packet_id not in self._held:
                self._held[packet.packet_id] = packet
                self._held_qos_1 += 1
        elif packet.packet_id not in self._received:
            self._check_receive_maximum()
            self._received.add(packet.packet_id)
            self._events.append(MessageReceived(packet))
            if self.settings.acknowledge_on_receipt:
                self._send(PubRec(packet.packet_id), now)
            else:
                self._held[packet.packet_id] = packet
        elif packet.packet_id not in self._held:
            self._send(PubRec(packet.packet_id), now)

    def _check_receive_maximum(self) -> None:
        # A 3.1.1 server was not told: its own window is what bounds it.
        if self._version != MQTT_5 or not self.settings.enforce_receive_maximum:
            return
        if len(self._received) + self._held_qos_1 >= self.settings.receive_maximum:
            raise RemoteProtocolError(reasons.RECEIVE_MAXIMUM_EXCEEDED, "more unacknowledged messages than we allow")

    def _resolve_alias(self, packet: Publish, alias: int) -> None:
        if alias == 0 or alias > self.settings.topic_alias_maximum:
            raise RemoteProtocolError(reasons.TOPIC_ALIAS_INVALID, f"topic alias {alias} was not offered")
        if packet.topic:
            self._aliases_in[alias] = packet.topic
            return
        known = self._aliases_in.get(alias)
        if known is None:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"topic alias {alias} was never defined")
        packet.topic = known

    def _on_puback(self, packet: PubAck, now: float) -> None:
        outgoing = self._outgoing.in_flight(packet.packet_id)
        if outgoing is None:
            return  # an answer to what an earlier connection sent
        if outgoing.publish.qos != 1:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "PUBACK for a QoS 2 message")
        self._outgoing.acknowledge(packet.packet_id)
        self._events.append(PublishCompleted(outgoing.token, packet.reason_code, _reason_string(packet.properties)))
        self._pump(now)

    def _on_pubrec(self, packet: PubRec, now: float) -> None:
        outgoing = self._outgoing.in_flight(packet.packet_id)
        if outgoing is None:
            known = self._outgoing.is_releasing(packet.packet_id)
            if packet.reason_code < 0x80:
                self._send(PubRel(packet.packet_id, reasons.SUCCESS if known else reasons.PACKET_IDENTIFIER_NOT_FOUND), now)
            return
        if outgoing.publish.qos != 2:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "PUBREC for a QoS 1 message")
        if packet.reason_code >= 0x80:
            self._outgoing.acknowledge(packet.packet_id)
            self._events.append(PublishCompleted(outgoing.token, packet.reason_code, _reason_string(packet.properties)))
            self._pump(now)
        else:
            self._outgoing.release(packet.packet_id)
            self._send(PubRel(packet.packet_id), now)

    def _on_suback(self, packet: SubAck) -> None:
        request = self._requests.get(packet.packet_id)
        if request is None:
            return
        asked = request.packet
        if not isinstance(asked, Subscribe) or len(packet.reason_codes) != len(asked.subscriptions):
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "SUBACK does not fit the SUBSCRIBE it answers")
        del self._requests[packet.packet_id]
        self._identifiers.give_back(packet.packet_id)
        for subscription, reason_code in zip(asked.subscriptions, packet.reason_codes, strict=True):
            if reason_code < 0x80:
                self._subscriptions[subscription.topic_filter] = _Subscription(subscription, asked.properties)
        if request.token:
            self._events.append(SubscribeCompleted(request.token, packet.reason_codes, _reason_string(packet.properties)))

    def _on_unsuback(self, packet: UnsubAck) -> None:
        request = self._requests.get(packet.packet_id)
        if request is None:
            return
        asked = request.packet
        if not isinstance(asked, Unsubscribe):
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "UNSUBACK for a SUBSCRIBE")
        codes = packet.reason_codes or [reasons.SUCCESS] * len(asked.topic_filters)
        if len(codes) != len(asked.topic_filters):
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "UNSUBACK does not fit the UNSUBSCRIBE it answers")
        del self._requests[packet.packet_id]
        self._identifiers.give_back(packet.packet_id)
        for topic_filter, reason_code in zip(asked.topic_filters, codes, strict=True):
            if reason_code < 0x80:
                self._subscriptions.pop(topic_filter, None)
        self._events.append(UnsubscribeCompleted(request.token, codes, _reason_string(packet.properties)))

    def _on_disconnect(self, packet: Disconnect) -> None:
        reference = packet.properties.server_reference if packet.properties is not None else None
        said = _reason_string(packet.properties) or reasons.name(packet.reason_code)
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
        self._output.append(encode(packet, self._version))
        self._last_sent = now

    def _pump(self, now: float) -> None:
        """Send what the window allows."""
        while True:
            outgoing = self._outgoing.next_to_send()
            if outgoing is None:
                return
            try:
                reason_code = self._send_publish(outgoing.publish, now)
                message = _unsendable(outgoing.publish, reason_code, self.limits) if reason_code else ""
            except LocalProtocolError as error:
                # Its publisher has left long ago: the fault (in its properties) can only be told as a refusal.
                reason_code = reasons.IMPLEMENTATION_SPECIFIC
                message = str(error)
            if reason_code:
                self._outgoing.withdraw(outgoing.publish.packet_id)
                self._events.append(PublishCompleted(outgoing.token, reason_code, message))

    def _send_publish(self, message: Publish, now: float) -> int:
        """Encode and send; returns 0, or the reason code why this server cannot be sent such a message."""
        limits = self.limits
        if message.qos > limits.maximum_qos:
            return reasons.QOS_NOT_SUPPORTED
        if message.retain and not limits.retain_available:
            return reasons.RETAIN_NOT_SUPPORTED
        packet = message
        if self.settings.use_topic_aliases and limits.topic_alias_maximum > 0 and not message.dup:
            packet = self._aliases_out.apply(message, limits.topic_alias_maximum)
        sent = False
        try:
            data = encode(packet, self._version)
            sent = len(data) <= limits.maximum_packet_bytes
        finally:
            if not sent and packet is not message and packet.topic:
                self._aliases_out.forget(message.topic)  # the packet that would have defined it
        if not sent:
            return reasons.PACKET_TOO_LARGE
        self._output.append(data)
        self._last_sent = now
        return 0

    def _send_auth(self, method: str, reason_code: int, data: bytes | None, now: float) -> None:
        self._send(Auth(reason_code, Properties(authentication_method=method, authentication_data=data)), now)

    def _request(self, packet: Subscribe | Unsubscribe, now: float) -> int:
        try:
            data = encode(packet, self._version)
        except LocalProtocolError:
            self._identifiers.give_back(packet.packet_id)
            raise
        self._last_token += 1
        self._requests[packet.packet_id] = _Request(self._last_token, packet)
        if self.state == CONNECTED:
            self._output.append(data)
            self._last_sent = now
        return self._last_token

    def _check_subscription(self, subscription: SubscriptionRequest, properties: Properties | None) -> None:
        """Refuse here what the server said it does not offer: sending it would end the connection."""
        topic_filter = subscription.topic_filter
        limits = self.limits
        code = 0
        if topic_filter.startswith("$share/") and not limits.shared_subscription_available:
            code = reasons.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED
        elif not limits.wildcard_subscription_available and ("+" in topic_filter or "#" in topic_filter):
            code = reasons.WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED
        elif properties is not None and properties.subscription_identifiers and not limits.subscription_identifier_available:
            code = reasons.SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED
        if code:
            raise RequestRefused(code, f"cannot subscribe to {topic_filter!r} on this broker: {reasons.name(code)}")

    def _connect_properties(self) -> Properties:
        settings = self.settings
        authentication = self._authentication
        return Properties(
            session_expiry_interval=settings.session_expiry_seconds or None,
            receive_maximum=settings.receive_maximum,
            maximum_packet_size=settings.max_packet_bytes,
            topic_alias_maximum=settings.topic_alias_maximum or None,
            request_response_information=1 if settings.request_response_information else None,
            user_properties=settings.user_properties,
            authentication_method=None if authentication is None else authentication.method,
            authentication_data=None if authentication is None else authentication.start(),
        )

    # -- time and the end --------------------------------------------------------------------------------------------------

    def _ping_due(self) -> float:
        """Silence in either direction is worth a ping: a publisher at QoS 0 hears nothing unless it asks."""
        if self.limits.keep_alive_seconds == 0:
            return NEVER
        return min(self._last_sent, self._last_received) + self.limits.keep_alive_seconds * PING_AT_FRACTION

    def _fail(self, reason_code: int, message: str, now: float) -> None:
        """End the connection because of an error; MQTT 5 tells the server why."""
        if self.state == CONNECTED and self._version == MQTT_5:
            self._send(Disconnect(reason_code), now)
        self._close(reason_code, message, False, None)

    def _close(self, reason_code: int | None, message: str, by_server: bool, server_reference: str | None) -> None:
        self._quiet()
        self._events.append(Disconnected(reason_code, message, by_server, server_reference))

    def _quiet(self) -> None:
        self.state = CLOSED
        self._re_authenticating = False
        self._connect_deadline = NEVER
        self._ping_deadline = NEVER
        self._outgoing.closed()


def _reason_string(properties: Properties | None) -> str | None:
    return None if properties is None else properties.reason_string


def _unsendable(message: Publish, reason_code: int, limits: ServerLimits) -> str:
    """Why a message cannot go to this server, and what would."""
    if reason_code == reasons.PACKET_TOO_LARGE:
        return f"the message to {message.topic!r} is larger than the {limits.maximum_packet_bytes} bytes this broker accepts"
    if reason_code == reasons.QOS_NOT_SUPPORTED:
        return f"this broker serves QoS {limits.maximum_qos} at most: publish to {message.topic!r} with a lower one"
    return f"this broker keeps no retained messages: publish to {message.topic!r} without retain"
