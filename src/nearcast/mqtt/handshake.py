"""CONNECT, AUTH and CONNACK: how a transport becomes a client (sections 3.1, 3.2, 3.15, 4.12)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, Protocol

from nearcast.config import EngineSettings, Limits
from nearcast.errors import LocalProtocolError, RemoteProtocolError
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Authenticator, Authorizer, Credentials, Verdict
from nearcast.mqtt.codec import encode
from nearcast.mqtt.connection import (
    AUTHENTICATING,
    CLOSED,
    CONNECTED,
    NO_PACKET_LIMIT,
    Connection,
    form_flags,
)
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.packets import MQTT_5, Auth, ConnAck, Connect, Properties, Will
from nearcast.mqtt.session import NEVER
from nearcast.mqtt.sessions import Sessions
from nearcast.mqtt.timers import Timers
from nearcast.mqtt.topics import OWN_FIGURES, OWN_WORD, topic_fault

Drop = Callable[[Connection, int, float, "Properties | None"], None]

_HEX: Final = "0123456789abcdef"

REDIRECT: Final = ("nearcast", "redirect")
"""The user property of a CONNECT whose client goes where a Server Reference says."""


class Claims(Protocol):
    """Who knows whether a client's session is somewhere else."""

    def claim(self, connection: Connection, verdict: Verdict, clean_start: bool, now: float) -> bool:
        """A client is let in. True when something has to be done elsewhere first: the same verdict, or another one, is then
        given again (``Engine.authenticated``)."""


class Handshake:
    """Lets clients in. ``drop`` is the engine's way of closing another connection (takeover)."""

    def __init__(
        self,
        settings: EngineSettings,
        effects: Effects,
        sessions: Sessions,
        timers: Timers,
        authenticator: Authenticator,
        authorizer: Authorizer | None,
        rng: random.Random,
        drop: Drop,
    ) -> None:
        self._server_reference = settings.server_reference
        self._response_information = settings.response_information
        self._effects = effects
        self._sessions = sessions
        self._timers = timers
        self.authenticator = authenticator
        self.authorizer = authorizer
        self._rng = rng
        self._drop = drop
        self.claims: Claims | None = None
        self.apply(settings.limits)

    def apply(self, limits: Limits) -> None:
        """Use these limits for clients that connect from now on."""
        self._max_inflight: int = limits.max_inflight
        self._max_topic_levels: int = limits.max_topic_levels
        self._max_expiry: int = limits.max_session_expiry_seconds
        self._keep_alive: int = limits.keep_alive_seconds

    def bounded_expiry(self, asked_seconds: int) -> int:
        """The session expiry a client gets for the one it asks for."""
        return min(asked_seconds, self._max_expiry)

    def connect(self, connection: Connection, packet: Connect, now: float) -> None:
        """A CONNECT arrived as the first packet."""
        connection.version = packet.version
        connection.form_flags = form_flags(packet.version)
        connection.client_id = packet.client_id
        properties = packet.properties
        method: str | None = None
        data: bytes | None = None
        if properties is not None:
            connection.wants_problem_information = properties.request_problem_information != 0
            if properties.maximum_packet_size is not None:
                connection.max_packet_bytes = min(NO_PACKET_LIMIT, properties.maximum_packet_size)
            connection.wants_redirect = REDIRECT in (properties.user_properties or [])
            method = properties.authentication_method
            data = properties.authentication_data
        connection.auth_method = method
        if self._server_reference is not None:
            self._refuse(connection, reasons.USE_ANOTHER_SERVER, "this broker is being emptied", self._server_reference, now)
            return
        if not packet.client_id:
            if packet.version != MQTT_5 and not packet.clean_start:  # [MQTT-3.1.3-8] of 3.1.1
                self._refuse(connection, reasons.CLIENT_ID_NOT_VALID, "a session needs a client identifier", None, now)
                return
            connection.client_id = self._assigned_id()
        fault, reason_code = self._will_fault(connection, packet.will)
        if fault:
            self._refuse(connection, reason_code, fault, None, now)
            return
        connection.state = AUTHENTICATING
        connection.pending_connect = packet
        self._ask(connection, packet.username, packet.password, method, data, now)

    def auth(self, connection: Connection, packet: Auth, now: float) -> None:
        """An AUTH arrived: the next step of an enhanced authentication, or the first of another round."""
        method = None if packet.properties is None else packet.properties.authentication_method
        if connection.auth_method is None or method != connection.auth_method:  # [MQTT-4.12.0-5]
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "AUTH with another method than CONNECT's, or none")
        begins = connection.state == CONNECTED and not connection.authenticating_again
        if packet.reason_code != (reasons.RE_AUTHENTICATE if begins else reasons.CONTINUE_AUTHENTICATION):
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "AUTH with a reason code that does not fit")
        connection.authenticating_again = connection.state == CONNECTED
        data = None if packet.properties is None else packet.properties.authentication_data
        username = connection.username
        if connection.pending_connect is not None:
            username = connection.pending_connect.username
        self._ask(connection, username, None, method, data, now)

    def _ask(
        self,
        connection: Connection,
        username: str | None,
        password: bytes | None,
        method: str | None,
        data: bytes | None,
        now: float,
    ) -> None:
        credentials = Credentials(connection.peer, connection.client_id, connection.version, username, password, method, data)
        verdict = self.authenticator.authenticate(credentials, connection)
        if verdict is None:
            connection.pending_verdict = True
        else:
            self.decide(connection, verdict, now)

    def decide(self, connection: Connection, verdict: Verdict, now: float) -> None:
        """The authenticator has spoken."""
        if verdict.continue_data is not None:
            self._send_auth(connection, reasons.CONTINUE_AUTHENTICATION, verdict.continue_data)
        elif connection.state == CONNECTED:
            connection.authenticating_again = False
            if not verdict.accepted:
                self._drop(connection, verdict.reason_code, now, None)
            elif verdict.username != connection.username:  # the session and what it may do are another user's
                self._drop(connection, reasons.NOT_AUTHORIZED, now, None)
            else:
                self._send_auth(connection, reasons.SUCCESS, verdict.data)
        elif verdict.accepted:
            self._accept(connection, verdict, now)
        else:
            self._refuse(connection, verdict.reason_code, verdict.reason, verdict.server_reference, now)

    def _send_auth(self, connection: Connection, reason_code: int, data: bytes | None) -> None:
        properties = Properties(authentication_method=connection.auth_method, authentication_data=data)
        connection.push(encode(Auth(reason_code, properties), MQTT_5))

    def _will_fault(self, connection: Connection, will: Will | None) -> tuple[str, int]:
        if will is None:
            return "", reasons.SUCCESS
        fault = topic_fault(will.topic.encode("utf-8", "surrogatepass"), self._max_topic_levels)
        if fault:
            return "will: " + fault, reasons.TOPIC_NAME_INVALID
        if will.qos > connection.max_qos:  # [MQTT-3.2.2-12]
            return "will: this QoS is not served here", reasons.QOS_NOT_SUPPORTED
        if will.retain and not connection.retain_available:  # [MQTT-3.2.2-13]
            return "will: messages are not retained here", reasons.RETAIN_NOT_SUPPORTED
        return "", reasons.SUCCESS

    def _assigned_id(self) -> str:
        while True:
            client_id = "nc-" + "".join([_HEX[self._rng.getrandbits(4)] for _ in range(20)])
            if client_id not in self._sessions.by_client:
                return client_id

    def _accept(self, connection: Connection, verdict: Verdict, now: float) -> None:
        packet = connection.pending_connect
        if packet is None:
            raise LocalProtocolError("a verdict came for a connection that sent no CONNECT")
        connection.username = verdict.username
        client_id = connection.client_id
        will = packet.will
        if will is not None and not self._may_publish_will(connection, will):
            self._refuse(connection, reasons.NOT_AUTHORIZED, "not allowed to publish the will", None, now)
            return
        claims = self.claims
        resumption = connection.resumption
        clean_start = packet.clean_start and resumption is None
        if claims is not None and claims.claim(connection, verdict, clean_start, now):
            connection.pending_verdict = True
            return
        connection.pending_connect = None
        sessions = self._sessions
        session = sessions.by_client.get(client_id)
        if session is not None and (0.0 < session.expires_at <= now or 0.0 < session.will_due_at <= now):
            sessions.wake(session, now)  # what is due counts, also when time-outs were not looked at since
            session = sessions.by_client.get(client_id)
        if session is not None and session.username != verdict.username:
            # A client identifier is no secret. Without this anyone who is let in could take anyone's messages.
            self._refuse(connection, reasons.NOT_AUTHORIZED, "this client identifier is in use by another user", None, now)
            return
        if session is not None and session.connection is not None:  # [MQTT-3.1.4-3]
            self._effects.stats.takeovers += 1
            before = session.connection
            if resumption is not None:
                sessions.suspend(session, now)  # the client is not gone
            self._drop(before, reasons.SESSION_TAKEN_OVER, now, None)
            session = sessions.by_client.get(client_id)
        was_durable = session is not None and session.durable
        # One without expiry is only there for its gateway to go on with: to a client that connects it is over.
        over = session is not None and session.expiry_seconds == 0 and resumption is None
        if session is not None and (clean_start or over):  # [MQTT-3.1.2-4]
            sessions.end(session, now)
            session = None
        present = session is not None
        if session is None:
            if sessions.is_full():
                self._refuse(connection, reasons.QUOTA_EXCEEDED, "no room for another session", None, now)
                return
            session = sessions.begin(client_id)
        expiry = self._expiry_of(packet)
        connection.state = CONNECTED
        sessions.attach(session, connection, expiry, will, verdict.username)
        answer = self._agree(connection, packet, expiry)
        if answer is not None and verdict.data is not None:
            answer.authentication_data = verdict.data
        # The client is told that a session is gone, and reuses its packet identifiers. A power cut must not bring it back.
        connection.awaits_disk = was_durable and not (present and session.durable)
        self._effects.stats.connects_accepted += 1
        self._effects.stats.connected_clients += 1
        if resumption is None:
            connection.push(encode(ConnAck(reasons.SUCCESS, present, answer), connection.version))
        else:
            resumption.accepted(connection, session, present, now)
        self._start_keep_alive(connection, now)
        if present or resumption is not None:
            session.resume(now)

    def _may_publish_will(self, connection: Connection, will: Will) -> bool:
        if will.topic.startswith(OWN_FIGURES):
            return False
        authorizer = self.authorizer
        if authorizer is None:
            return not will.topic.startswith(OWN_WORD)
        return authorizer.may_publish(connection.client_id, connection.username, will.topic)

    def _expiry_of(self, packet: Connect) -> int:
        if packet.version != MQTT_5:  # 3.1.1 knows only "with the connection" and "for ever"
            return 0 if packet.clean_start else self.bounded_expiry(NEVER)
        asked = None if packet.properties is None else packet.properties.session_expiry_interval
        return 0 if asked is None else self.bounded_expiry(asked)

    def _agree(self, connection: Connection, packet: Connect, expiry: int) -> Properties | None:
        """Settle the connection's limits from both sides' wishes; returns what CONNACK tells an MQTT 5 client."""
        keep_alive = packet.keep_alive
        imposed = self._keep_alive > 0 and (keep_alive == 0 or keep_alive > self._keep_alive)
        if imposed and packet.version == MQTT_5:  # 3.1.1 clients cannot be told
            keep_alive = self._keep_alive
        connection.keep_alive_seconds = keep_alive
        connection.send_maximum = self._max_inflight
        if packet.version != MQTT_5:
            return None
        asked = packet.properties
        wants_information = False
        if asked is not None:
            if asked.receive_maximum is not None:
                connection.send_maximum = min(self._max_inflight, asked.receive_maximum)
            if asked.topic_alias_maximum is not None:
                connection.alias_out_maximum = min(connection.alias_in_maximum, asked.topic_alias_maximum)
            wants_information = asked.request_response_information == 1
        asked_expiry = 0 if asked is None else asked.session_expiry_interval or 0
        return Properties(
            session_expiry_interval=expiry if expiry != asked_expiry else None,
            receive_maximum=connection.receive_maximum if connection.receive_maximum != 65_535 else None,
            maximum_qos=connection.max_qos if connection.max_qos < 2 else None,
            retain_available=None if connection.retain_available else 0,
            maximum_packet_size=connection.packet_limit_bytes if connection.packet_limit_bytes < NO_PACKET_LIMIT else None,
            assigned_client_identifier=None if packet.client_id else connection.client_id,
            topic_alias_maximum=connection.alias_in_maximum if connection.alias_in_maximum else None,
            server_keep_alive=keep_alive if imposed else None,
            response_information=self._response_information if wants_information else None,
            authentication_method=connection.auth_method,
        )

    def _start_keep_alive(self, connection: Connection, now: float) -> None:
        if connection.keep_alive_seconds:
            self._timers.schedule(connection, now + 1.5 * connection.keep_alive_seconds, now)

    def _refuse(
        self, connection: Connection, reason_code: int, reason: str | None, server_reference: str | None, now: float
    ) -> None:
        """CONNACK with an error, then close [MQTT-3.2.2-7]."""
        self._effects.stats.connects_refused += 1
        connection.close_reason = reason or reasons.name(reason_code)
        properties: Properties | None = None
        if connection.version == MQTT_5:
            properties = Properties(
                reason_string=reason if connection.wants_problem_information else None, server_reference=server_reference
            )
        if connection.resumption is None:
            connection.push(connection.fitting(ConnAck(reason_code, False, properties)))
        connection.state = CLOSED
        connection.forget()
        connection.closing = True
        connection.touch()
