"""Who may come in and what they may do: the seam between the engine and whatever decides it.

The engine asks and obeys; it knows neither passwords nor rules. An :class:`Authenticator` may take its time (hashing a
password takes tens of milliseconds): it answers ``None`` and the driver brings the verdict later.
"""

from __future__ import annotations

from typing import Protocol

from nearcast.mqtt import reasons


class Peer:
    """What a driver knows of the other end of a transport."""

    def __init__(
        self,
        address: str,
        listener: str = "tcp",
        secure: bool = False,
        certificate_name: str | None = None,
        loopback: bool = True,
    ) -> None:
        self.address = address
        self.listener = listener
        self.secure = secure
        self.certificate_name = certificate_name
        self.loopback = loopback


class Credentials:
    """What a client offers to be let in: user name and password, or one step of an enhanced authentication (section 4.12)."""

    def __init__(
        self,
        peer: Peer,
        client_id: str,
        version: int,
        username: str | None = None,
        password: bytes | None = None,
        method: str | None = None,
        data: bytes | None = None,
    ) -> None:
        self.peer = peer
        self.client_id = client_id
        self.version = version
        self.username = username
        self.password = password
        self.method = method
        self.data = data


class Verdict:
    """The answer to :class:`Credentials`: accepted, refused with a reason code, or "go on" with a challenge."""

    def __init__(
        self,
        accepted: bool,
        reason_code: int = reasons.SUCCESS,
        reason: str | None = None,
        username: str | None = None,
        continue_data: bytes | None = None,
        data: bytes | None = None,
        server_reference: str | None = None,
    ) -> None:
        self.accepted = accepted
        self.reason_code = reason_code
        self.reason = reason
        self.username = username
        self.continue_data = continue_data
        self.data = data
        self.server_reference = server_reference


class Authenticator(Protocol):
    """Decides who is let in."""

    def authenticate(self, credentials: Credentials, connection: object) -> Verdict | None:
        """A verdict, or ``None`` when it comes later through ``Engine.authenticated(connection, verdict, now)``."""


class Authorizer(Protocol):
    """Decides what those who are in may do. Answers must not change while it is installed: the engine remembers them."""

    def may_publish(self, client_id: str, username: str | None, topic: str) -> bool: ...

    def may_subscribe(self, client_id: str, username: str | None, topic_filter: str) -> bool: ...


class AllowAll:
    """Lets everyone in under the name they give. For tests, simulations and brokers that only loopback can reach."""

    def authenticate(self, credentials: Credentials, connection: object) -> Verdict | None:
        if credentials.method is not None:
            return Verdict(False, reasons.BAD_AUTHENTICATION_METHOD, "no authentication method is configured here")
        return Verdict(True, username=credentials.username)
