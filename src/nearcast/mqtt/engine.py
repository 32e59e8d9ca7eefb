"""The broker as one pure machine: transports open, bytes arrive, time passes; bytes to send and records to keep come out.

Everything the broker decides is decided here and below; a driver only moves bytes. After every call into the engine it must

1. make durable what was kept in the topic log, if there is one, then ``take_records()``,
2. then, for each connection in ``ready()``, send ``take()`` at once and ``take_held()`` once step 1 is done, then say so
   (``committed()``), and close the transport of those that are ``closing``.

A driver whose transport cannot take more sets ``connection.congested``, leaves the output where it is, and calls
``writable()`` when the transport has drained. One that stops reading until then sets ``connection.reading`` to false, so that
silence is not taken for absence. It also calls ``writable()`` after taking the output of a connection that is
``starved``: more was waiting than the output bound admitted.

The states of a connection::

    AWAITING_CONNECT ──CONNECT──► AUTHENTICATING ──verdict──► CONNECTED ──► CLOSED
"""

from __future__ import annotations

import random

from mypy_extensions import i64

from nearcast.config import EngineSettings, Limits
from nearcast.errors import RemoteProtocolError
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Authenticator, Authorizer, Peer, Verdict
from nearcast.mqtt.codec import REASON_CODES, decode
from nearcast.mqtt.connection import AUTHENTICATING, AWAITING_CONNECT, CLOSED, CONNECTED, Connection, Resumption
from nearcast.mqtt.decoding import claimed_version
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.handshake import Handshake
from nearcast.mqtt.inbound import Inbound
from nearcast.mqtt.keeping import Keeper
from nearcast.mqtt.origins import Origins
from nearcast.mqtt.packets import (
    MQTT_5,
    Auth,
    ConnAck,
    Connect,
    Disconnect,
    Properties,
    PubAck,
    PubComp,
    PubRec,
    PubRel,
    Subscribe,
    Unsubscribe,
)
from nearcast.mqtt.publication import Publication, build, build_all
from nearcast.mqtt.requests import Requests
from nearcast.mqtt.retained import RetainedMessages
from nearcast.mqtt.routing import Router
from nearcast.mqtt.session import Session
from nearcast.mqtt.sessions import Sessions
from nearcast.mqtt.subscriptions import SubscriptionTree
from nearcast.mqtt.timers import Timers
from nearcast.mqtt.wire import CONNACK, DISCONNECT

_PINGRESP = b"\xd0\x00"
_CONNACK_WRONG_VERSION = b"\x20\x02\x00\x01"
SWEEP_SECONDS = 30.0


class Engine:
    """See the module. ``wall_offset`` is wall-clock minus monotonic time, for deadlines that must survive a restart."""

    def __init__(
        self,
        settings: EngineSettings,
        authenticator: Authenticator,
        authorizer: Authorizer | None,
        rng: random.Random,
        wall_offset: float = 0.0,
    ) -> None:
        limits = settings.limits
        self.effects = Effects(settings.durable)
        self.effects.wall_offset = wall_offset
        self.stats = self.effects.stats
        self.timers = Timers()
        self.tree = SubscriptionTree()
        self.retained = RetainedMessages()
        self.router = Router(self.effects, self.tree)
        self.inbound = Inbound(limits, self.effects, self.router, self.retained, authorizer)
        self.sessions = Sessions(limits, self.effects, self.tree, self.router, self.inbound, self.timers)
        self.handshake = Handshake(
            settings, self.effects, self.sessions, self.timers, authenticator, authorizer, rng, self.drop
        )
        self.requests = Requests(limits, self.effects, self.sessions, self.router, self.retained, authorizer)
        self.origins = Origins(self.effects)
        self._next_sweep = 0.0
        self.apply(limits)

    def apply(self, limits: Limits) -> None:
        """Use new limits from now on. What clients were told in their CONNACK stays as it was."""
        self._limits = limits
        self._connect_timeout: float = limits.connect_timeout_seconds
        self.inbound.apply(limits)
        self.sessions.apply(limits)
        self.handshake.apply(limits)
        self.requests.apply(limits)

    def set_authorizer(self, authorizer: Authorizer | None) -> None:
        """Use other rules from now on, also for clients that are connected. Subscriptions they have stay."""
        self.inbound.authorizer = authorizer
        self.requests.authorizer = authorizer
        self.handshake.authorizer = authorizer
        for session in self.sessions.by_client.values():
            if session.connection is not None:
                session.connection.allowed_topics = None

    # --- events ---------------------------------------------------------------------------------------------------------

    def open(self, peer: Peer, handle: object, now: float) -> Connection:
        """A transport was accepted."""
        connection = Connection(self.effects, peer, handle, now, self._limits)
        self.stats.connections_opened += 1
        self.stats.connections += 1
        self.timers.schedule(connection, now + self._connect_timeout, now)
        return connection

    def receive(self, connection: Connection, data: bytes, now: float) -> None:
        """Bytes arrived."""
        if connection.state == CLOSED:
            return
        connection.last_seen = now
        connection.bytes_in += len(data)
        self.stats.bytes_received += len(data)
        partial = connection.partial
        if partial is not None:
            partial += data
            if len(partial) < connection.needed_bytes:
                return
            if connection.pending_verdict:
                if len(partial) > connection.packet_limit_bytes:
                    self._fail(connection, RemoteProtocolError(reasons.QUOTA_EXCEEDED, "too much before CONNACK"), now)
                return
            data = bytes(partial)
            connection.partial = None
        self._process(connection, data, now)

    def resume(self, connection: Connection, packet: Connect, resumption: Resumption, now: float) -> None:
        """A client goes on here that was let in elsewhere with this CONNECT, under the client identifier in it."""
        connection.resumption = resumption
        try:
            if packet.properties is not None and packet.properties.authentication_method is not None:
                raise RemoteProtocolError(reasons.NOT_AUTHORIZED, "the client has to authenticate anew")
            self.handshake.connect(connection, packet, now)
        except RemoteProtocolError as error:
            self._fail(connection, error, now)

    def authenticated(self, connection: Connection, verdict: Verdict, now: float) -> None:
        """The authenticator's late answer; goes on with whatever arrived meanwhile."""
        if connection.state == CLOSED or not connection.pending_verdict:
            return
        connection.pending_verdict = False
        try:
            self.handshake.decide(connection, verdict, now)
        except RemoteProtocolError as error:
            self._fail(connection, error, now)
            return
        partial = connection.partial
        if partial is not None and connection.state != CLOSED:
            connection.partial = None
            self._process(connection, bytes(partial), now)

    def lose(self, connection: Connection, now: float) -> None:
        """The transport is gone."""
        self.stats.connections -= 1
        if connection.state != CLOSED:
            if not connection.close_reason:
                connection.close_reason = "connection lost"
            self._end(connection, False, now)
        connection.out = []
        connection.held = None
        connection.out_bytes = 0

    def writable(self, connection: Connection, now: float) -> None:
        """The transport drained: there is room again."""
        connection.congested = False
        connection.starved = False
        if not connection.reading:
            connection.reading = True
            connection.last_seen = now
        connection.touch()
        producer = connection.producer
        if producer is not None:
            producer.drain(now)
        session = connection.session
        if session is not None and connection.state == CONNECTED:
            session.drain(now)
            if connection.owed_retained is not None:
                self.requests.send_owed(connection, session, now)

    def disconnect(self, connection: Connection, reason_code: int, now: float, server_reference: str | None = None) -> None:
        """Send a client away."""
        properties = None if server_reference is None else Properties(server_reference=server_reference)
        self.drop(connection, reason_code, now, properties)

    def publish(self, topic: str, payload: bytes, qos: int, retain: bool, now: float) -> None:
        """The broker itself publishes, past every rule that holds for clients."""
        name = topic.encode("utf-8")
        message = build(name, payload, qos, retain)
        route = self.router.route_for(name)
        if route.kept is not None and not route.kept.keep([payload], qos, retain, b"", b"", 0):
            self.stats.not_kept += 1
            if route.kept.durable:
                return
        if retain and route.way is None:
            self.inbound.retain(message, now)
        self.router.publish(route, message, None, now)

    def deliver(self, topic: bytes, payloads: list[bytes], qos: int, retain: bool, properties: bytes, now: float) -> None:
        """Messages that came in another way than MQTT, and are kept already if they are to be: hand them to subscribers."""
        route = self.router.route_for(topic)
        for publication in build_all(topic, payloads, qos, retain, properties):
            if retain and route.way is None:
                self.inbound.retain(publication, now)
            self.router.publish(route, publication, None, now)

    def bridge(self, publication: Publication, via: str, now: float) -> None:
        """Messages that another broker received, with the identity it gave them; the topic's name has been checked.

        ``via`` says for whom (:meth:`nearcast.mqtt.routing.Router.publish_bridged`).
        """
        if publication.retain:
            self.inbound.retain(publication, now)
        self.router.publish_bridged(self.router.route_for(publication.topic), publication, via, now)

    def keep_with(self, keeper: Keeper | None) -> None:
        """Which topics are kept is this one's to say, from now on. Called again whenever its answers may have changed."""
        self.router.keep_with(keeper)

    def tick(self, now: float) -> None:
        """Time passed: time-outs, wills and expiries that are due."""
        for subject in self.timers.due(now):
            if isinstance(subject, Session):
                self.sessions.wake(subject, now)
            else:
                self._wake(subject, now)
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            self.router.sweep()
            self.inbound.expire_retained(now)

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next."""
        return min(self.timers.next_deadline(), self._next_sweep)

    # --- effects --------------------------------------------------------------------------------------------------------

    def ready(self) -> list[Connection]:
        """The connections that have output or are to be closed."""
        dirty = self.effects.dirty
        if dirty:
            self.effects.dirty = []
            for connection in dirty:
                connection.dirty = False
        return dirty

    def take_records(self) -> list[bytes]:
        """The records to make durable before any held output leaves."""
        taken = self.effects.records
        if taken:
            self.effects.records = []
        return taken

    def topic_counts(self) -> list[tuple[str, int, int]]:
        """(topic, messages, bytes) of the topics published lately."""
        return self.router.topic_counts()

    # --- reading packets ------------------------------------------------------------------------------------------------

    def _process(self, connection: Connection, data: bytes, now: float) -> None:
        try:
            consumed = self._packets(connection, data, now)
        except RemoteProtocolError as error:
            self._fail(connection, error, now)
            return
        if consumed < len(data) and connection.state != CLOSED:
            connection.partial = bytearray(data[consumed:])

    def _packets(self, connection: Connection, data: bytes, now: float) -> int:
        """Handle every complete packet; returns where the first incomplete one begins."""
        position: i64 = 0
        end: i64 = len(data)
        while position < end:
            if connection.state == CLOSED:
                return int(end)
            if connection.pending_verdict:
                connection.needed_bytes = 0
                return int(position)
            first = data[position]
            session = connection.session
            if connection.state == CONNECTED and session is not None:
                run_end = self._acknowledgements(session, data, int(position), first, now)
                if run_end != position:
                    position = run_end
                    continue
            # The fixed header: kind and flags, then the remaining length in one to four bytes.
            cursor: i64 = position + 1
            size: i64 = 0
            shift: i64 = 0
            complete = False
            while cursor < end:
                byte: i64 = data[cursor]
                cursor += 1
                size |= (byte & 0x7F) << shift
                if byte < 0x80:
                    if byte == 0 and shift > 0:  # [MQTT-1.5.5-1]
                        raise RemoteProtocolError(reasons.MALFORMED_PACKET, "remaining length is longer than needed")
                    complete = True
                    break
                shift += 7
                if shift > 21:
                    raise RemoteProtocolError(reasons.MALFORMED_PACKET, "remaining length has more than four bytes")
            if not complete:
                connection.needed_bytes = int(end - position) + 1
                return int(position)
            packet_end: i64 = cursor + size
            if packet_end - position > connection.packet_limit_bytes:
                raise RemoteProtocolError(
                    reasons.PACKET_TOO_LARGE,
                    f"packet of {packet_end - position} bytes, {connection.packet_limit_bytes} allowed",
                )
            if packet_end > end:
                connection.needed_bytes = int(packet_end - position)
                if connection.state == AWAITING_CONNECT and first & 0xF0 != 0x10:
                    raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "the first packet must be CONNECT")
                return int(position)
            if connection.state == CONNECTED and session is not None and first & 0xF0 == 0x30:
                position = self.inbound.take(connection, session, data, int(position), now)
                continue
            self.stats.packets_received += 1
            self._packet(connection, first, data[cursor:packet_end], now)
            position = packet_end
        return int(position)

    def _acknowledgements(self, session: Session, data: bytes, start: int, first: int, now: float) -> int:
        """Handle a run of PUBACK, PUBREC, PUBREL or PUBCOMP in their shortest form; returns where it ends."""
        if first != 0x40 and first != 0x50 and first != 0x62 and first != 0x70:
            return start
        position: i64 = start
        last: i64 = len(data) - 4
        ids: list[bytes] = []
        while position <= last and data[position] == first and data[position + 1] == 2:
            if data[position + 2] == 0 and data[position + 3] == 0:  # [MQTT-2.2.1-3]
                raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "an acknowledgement with packet identifier 0")
            ids.append(data[position + 2 : position + 4])
            position += 4
        if not ids:
            return start
        self.stats.packets_received += len(ids)
        packet_ids = b"".join(ids)
        if first == 0x40:
            session.acknowledge(packet_ids, now)
        elif first == 0x50:
            session.received(packet_ids)
        elif first == 0x62:
            session.release(packet_ids)
        else:
            session.complete(packet_ids, now)
        return int(position)

    def _packet(self, connection: Connection, first: int, body: bytes, now: float) -> None:
        """Handle one packet that is not a PUBLISH of a connected client."""
        if connection.state == AWAITING_CONNECT:
            if first & 0xF0 != 0x10:  # [MQTT-3.1.0-1]
                raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "the first packet must be CONNECT")
            connection.version = claimed_version(body)
        packet = decode(first, body, connection.version)
        if isinstance(packet, Connect):
            if connection.state != AWAITING_CONNECT:  # [MQTT-3.1.0-2]
                raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "a second CONNECT")
            self.handshake.connect(connection, packet, now)
            return
        if isinstance(packet, Auth):
            self.handshake.auth(connection, packet, now)
            return
        if isinstance(packet, Disconnect):
            self._on_disconnect(connection, packet, now)
            return
        session = connection.session
        if connection.state != CONNECTED or session is None:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "only AUTH and DISCONNECT may come before CONNACK")
        if first == 0xC0:
            connection.push(_PINGRESP)
        elif isinstance(packet, PubAck):
            if packet.reason_code >= 0x80:
                session.refused(packet.packet_id, now)
            else:
                session.acknowledge(packet.packet_id.to_bytes(2, "big"), now)
        elif isinstance(packet, PubRec):
            if packet.reason_code >= 0x80:
                session.refused(packet.packet_id, now)
            else:
                session.received(packet.packet_id.to_bytes(2, "big"))
        elif isinstance(packet, PubRel):
            session.release(packet.packet_id.to_bytes(2, "big"))
        elif isinstance(packet, PubComp):
            session.complete(packet.packet_id.to_bytes(2, "big"), now)
        elif isinstance(packet, Subscribe):
            self.requests.subscribe(connection, session, packet, now)
        elif isinstance(packet, Unsubscribe):
            self.requests.unsubscribe(connection, session, packet, now)
        else:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "a packet that only a server sends")

    # --- endings --------------------------------------------------------------------------------------------------------

    def _on_disconnect(self, connection: Connection, packet: Disconnect, now: float) -> None:
        session = connection.session
        if session is not None and packet.properties is not None:
            expiry = packet.properties.session_expiry_interval
            if expiry is not None:
                if session.expiry_seconds == 0 and expiry != 0:  # section 3.14.2.2.2
                    raise RemoteProtocolError(
                        reasons.PROTOCOL_ERROR, "DISCONNECT cannot give an expiry to a session that had none"
                    )
                self.sessions.set_expiry(session, self.handshake.bounded_expiry(expiry))
        connection.close_reason = "client disconnected"
        self._close(connection, packet.reason_code == reasons.SUCCESS, now)  # [MQTT-3.14.4-3]

    def _wake(self, connection: Connection, now: float) -> None:
        """It is time to look at a connection: CONNECT time-out or keep-alive, whichever its state has."""
        if connection.state == CLOSED:
            return
        if connection.state != CONNECTED:
            due = connection.opened_at + self._connect_timeout
            if now < due:
                self.timers.schedule(connection, due, now)
                return
            connection.close_reason = "no CONNECT in time"
            self.stats.connects_refused += 1
            self._close(connection, False, now)
            return
        if connection.keep_alive_seconds == 0:
            return
        if not connection.reading:
            # Its pings and acknowledgements wait until it has taken more of its output. Sent away, it would come back to all
            # of it again, for ever. Whether it takes anything at all is the driver's to watch.
            self.timers.schedule(connection, now + 1.5 * connection.keep_alive_seconds, now)
            return
        due = connection.last_seen + 1.5 * connection.keep_alive_seconds
        if now >= due:  # [MQTT-3.1.2-22]
            self.stats.keep_alive_timeouts += 1
            self.drop(connection, reasons.KEEP_ALIVE_TIMEOUT, now, None)
            return
        self.timers.schedule(connection, due, now)

    def _fail(self, connection: Connection, error: RemoteProtocolError, now: float) -> None:
        """The client broke the protocol: say so where its version can, then close [MQTT-4.13.1-1]."""
        self.stats.protocol_errors += 1
        properties = None
        if connection.version == MQTT_5 and connection.wants_problem_information:
            properties = Properties(reason_string=error.message)
        if connection.state in (AWAITING_CONNECT, AUTHENTICATING):
            self.stats.connects_refused += 1
            if connection.resumption is not None:
                pass  # it had its CONNACK
            elif error.reason_code == reasons.UNSUPPORTED_PROTOCOL_VERSION:
                connection.push(_CONNACK_WRONG_VERSION)
            elif connection.version == MQTT_5:
                sayable = error.reason_code if error.reason_code in REASON_CODES[CONNACK] else reasons.UNSPECIFIED_ERROR
                connection.push(connection.fitting(ConnAck(sayable, False, properties)))
            connection.close_reason = error.message
            self._close(connection, False, now)
            return
        connection.close_reason = error.message
        self.drop(connection, error.reason_code, now, properties)

    def drop(self, connection: Connection, reason_code: int, now: float, properties: Properties | None) -> None:
        """Close a connection from our side, with a DISCONNECT where the version has one."""
        if connection.state == CLOSED:
            return
        if connection.state == CONNECTED and connection.version == MQTT_5:
            sayable = reason_code if reason_code in REASON_CODES[DISCONNECT] else reasons.UNSPECIFIED_ERROR
            connection.push(connection.fitting(Disconnect(sayable, properties)))
        if not connection.close_reason:
            connection.close_reason = reasons.name(reason_code)
        self._close(connection, False, now)

    def _close(self, connection: Connection, clean: bool, now: float) -> None:
        """End the connection, and have the driver close its transport once what is pending was sent."""
        self._end(connection, clean, now)
        connection.closing = True
        connection.touch()

    def _end(self, connection: Connection, clean: bool, now: float) -> None:
        session = connection.session
        if connection.state == CONNECTED:
            self.stats.connected_clients -= 1
        connection.state = CLOSED
        connection.forget()
        if session is not None:
            self.sessions.leave(session, clean, now)
