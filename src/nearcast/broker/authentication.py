"""Who is let in: anonymous clients, certificates, passwords and enhanced methods, in one :class:`Authenticator`.

In this order: an authentication method is served by whoever registered it; a certificate whose listener turns names into users
is enough; a client without credentials is let in where anonymous clients are; a password is checked against the password file.
Where there is no password file a name proves nothing, so a client that gives one is treated as anonymous.

Checking a password takes tens of milliseconds, so it happens in a small pool of threads and the verdict comes later. The
number of checks under way is bounded, and recent successes are remembered, because after a broker restart every client comes
at once.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

from nearcast.broker.passwords import MAX_PASSWORD_BYTES, PasswordTable
from nearcast.clock import Clock
from nearcast.config import Listener, Security
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Credentials, Verdict

REMEMBERED_SECONDS = 600.0

_log = logging.getLogger("nearcast.broker")


class Exchange(Protocol):
    """One client's run through an enhanced authentication method (section 4.12)."""

    def step(self, data: bytes) -> Verdict:
        """Answer the client's authentication data: a verdict, or a challenge in ``continue_data`` with reason code 0x18."""


class ExtendedAuthenticator(Protocol):
    """An enhanced authentication method. Steps run on the event loop: they must not block."""

    def start(self, credentials: Credentials) -> Exchange:
        """A client began (or, later, began again) to authenticate with this method."""


class RememberedChecks:
    """Recent successful password checks, as digests keyed with a secret of this process.

    The user's line in the password file is part of the digest, so a changed password is forgotten by itself.
    """

    def __init__(self, size: int, clock: Clock) -> None:
        self._size = size
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._seen: OrderedDict[bytes, float] = OrderedDict()

    def _digest(self, table: PasswordTable, username: str, password: bytes) -> bytes:
        name = username.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(key=self._secret, digest_size=32)
        digest.update(len(name).to_bytes(4, "big") + name + len(password).to_bytes(4, "big") + password)
        digest.update(table.fingerprint(username))
        return digest.digest()

    def add(self, table: PasswordTable, username: str, password: bytes) -> None:
        if self._size:
            digest = self._digest(table, username, password)
            self._seen[digest] = self._clock.monotonic() + REMEMBERED_SECONDS
            self._seen.move_to_end(digest)
            if len(self._seen) > self._size:
                self._seen.popitem(last=False)

    def holds(self, table: PasswordTable, username: str, password: bytes) -> bool:
        if not self._seen:
            return False
        digest = self._digest(table, username, password)
        expires = self._seen.get(digest)
        if expires is None:
            return False
        if expires < self._clock.monotonic():
            del self._seen[digest]
            return False
        return True


class BrokerAuthenticator:
    """The broker's :class:`~nearcast.mqtt.access.Authenticator`.

    ``settle`` takes a late verdict for a connection. ``call_on_loop`` (``loop.call_soon_threadsafe``) is how the pool threads
    get there: everything but the hashing itself happens on the event loop.
    """

    def __init__(
        self,
        clock: Clock,
        settle: Callable[[object, Verdict], None],
        call_on_loop: Callable[[Callable[[], None]], object],
    ) -> None:
        self._clock = clock
        self._settle = settle
        self._call_on_loop = call_on_loop
        self._security = Security()
        self._anonymous: dict[str, bool | None] = {}
        self.passwords: PasswordTable | None = None
        self._methods: dict[str, ExtendedAuthenticator] = {}
        self._exchanges: dict[object, tuple[str, Exchange]] = {}
        self._remembered = RememberedChecks(self._security.verification_cache_size, clock)
        self._pool: ThreadPoolExecutor | None = None
        self._pending = 0
        self._closed = False

    def configure(self, security: Security, listeners: tuple[Listener, ...], passwords: PasswordTable | None) -> None:
        """Take over a (new) configuration. Clients that are in stay in."""
        self._anonymous = {listener.name: listener.allow_anonymous for listener in listeners}
        self.passwords = passwords
        if security.verification_cache_size != self._security.verification_cache_size:
            self._remembered = RememberedChecks(security.verification_cache_size, self._clock)
        self._security = security

    def register(self, method: str, extended: ExtendedAuthenticator) -> None:
        """Serve an enhanced authentication method by this name."""
        self._methods[method] = extended

    @property
    def pending(self) -> int:
        """Password checks waiting or running."""
        return self._pending

    def authenticate(self, credentials: Credentials, connection: object) -> Verdict | None:
        if credentials.method is not None:
            return self._extended(credentials.method, credentials, connection)
        if credentials.peer.certificate_name is not None:
            return Verdict(True, username=credentials.peer.certificate_name)
        if credentials.username is None or self.passwords is None:
            if credentials.username is None and credentials.password is not None:
                return Verdict(False, reasons.BAD_USER_NAME_OR_PASSWORD, "a password needs a user name here")
            if self.admits_anonymous(credentials):
                return Verdict(True)
            if self.passwords is None:
                return Verdict(False, reasons.NOT_AUTHORIZED, "this broker knows no users, and lets none in without")
            return Verdict(False, reasons.NOT_AUTHORIZED, "user name and password are needed here")
        return self._password(self.passwords, credentials.username, credentials.password, connection)

    def admits_anonymous(self, credentials: Credentials) -> bool:
        """Whether this peer may come in without credentials."""
        allowed = self._anonymous.get(credentials.peer.listener)
        if allowed is None:
            allowed = self._security.allow_anonymous
        if allowed is None:
            allowed = credentials.peer.loopback and self.passwords is None
        return allowed

    def _password(self, table: PasswordTable, username: str, password: bytes | None, connection: object) -> Verdict | None:
        if password is None or len(password) > MAX_PASSWORD_BYTES:
            return Verdict(False, reasons.BAD_USER_NAME_OR_PASSWORD, "user name or password is wrong")
        if self._remembered.holds(table, username, password):
            return Verdict(True, username=username)
        if self._pending >= self._security.max_pending_verifications or self._closed:
            return Verdict(False, reasons.SERVER_BUSY, "too many clients are authenticating, try again later")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._security.verification_threads, thread_name_prefix="nearcast-password")
        self._pending += 1

        def decided(check: Future[bool]) -> None:
            self._pending -= 1
            if check.exception() is not None:
                verdict = Verdict(False, reasons.UNSPECIFIED_ERROR, "the password could not be checked")
            elif check.result():
                self._remembered.add(table, username, password)
                verdict = Verdict(True, username=username)
            else:
                verdict = Verdict(False, reasons.BAD_USER_NAME_OR_PASSWORD, "user name or password is wrong")
            self._settle(connection, verdict)

        def done(check: Future[bool]) -> None:
            if not check.cancelled() and not self._closed:
                self._call_on_loop(partial(decided, check))

        self._pool.submit(table.verify, username, password).add_done_callback(done)
        return None

    def _extended(self, method: str, credentials: Credentials, connection: object) -> Verdict:
        running = self._exchanges.get(connection)
        if running is None:
            extended = self._methods.get(method)
            if extended is None:
                return Verdict(False, reasons.BAD_AUTHENTICATION_METHOD, "this authentication method is not served here")
            running = (method, extended.start(credentials))
        elif running[0] != method:
            return Verdict(False, reasons.PROTOCOL_ERROR, "the authentication method must not change")
        try:
            verdict = running[1].step(credentials.data or b"")
        except Exception:  # noqa: BLE001  someone else's code: its defect refuses one client and is logged, no more
            _log.exception("the authentication method %s failed", method)
            verdict = Verdict(False, reasons.UNSPECIFIED_ERROR, "the authentication method failed")
        if verdict.reason_code == reasons.CONTINUE_AUTHENTICATION and not verdict.accepted:
            self._exchanges[connection] = running
        else:
            self._exchanges.pop(connection, None)
        return verdict

    def forget(self, connection: object) -> None:
        """The connection is gone; so is its unfinished exchange."""
        if self._exchanges:
            self._exchanges.pop(connection, None)

    def close(self) -> None:
        self._closed = True
        self._exchanges.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
