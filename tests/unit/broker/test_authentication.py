"""Who is let in, by peer, credentials and configuration; late verdicts, their bound and their memory."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from nearcast.broker.authentication import REMEMBERED_SECONDS, BrokerAuthenticator
from nearcast.broker.passwords import PasswordTable, ScryptVerifier
from nearcast.clock import ManualClock
from nearcast.config import Listener, Security
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Credentials, Peer, Verdict

LOCAL = Peer("127.0.0.1", "tcp:0.0.0.0:1883")
REMOTE = Peer("10.0.0.9", "tcp:0.0.0.0:1883", loopback=False)
LISTENER = Listener(host="0.0.0.0")


class Harness:
    """An authenticator whose event loop is this thread: late verdicts are taken with :meth:`wait`."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.verdicts: list[tuple[object, Verdict]] = []
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self.authenticator = BrokerAuthenticator(
            self.clock, lambda connection, verdict: self.verdicts.append((connection, verdict)), self._calls.put
        )

    def configure(self, table: PasswordTable | None = None, listener: Listener = LISTENER, **security: object) -> None:
        configured = Security(**security)  # type: ignore[arg-type]
        self.authenticator.configure(configured, (listener,), table)

    def ask(self, peer: Peer, username: str | None = None, password: bytes | None = None, **more: object) -> Verdict | None:
        credentials = Credentials(peer, "c", 5, username, password, **more)  # type: ignore[arg-type]
        return self.authenticator.authenticate(credentials, connection=more.get("data", "connection"))

    def settled(self, peer: Peer, username: str | None = None, password: bytes | None = None) -> Verdict:
        """The verdict, now or later."""
        verdict = self.ask(peer, username, password)
        return verdict if verdict is not None else self.wait()

    def wait(self) -> Verdict:
        self._calls.get(timeout=30)()
        return self.verdicts.pop()[1]


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.authenticator.close()


@pytest.fixture(scope="module")
def table() -> PasswordTable:
    return PasswordTable({"ann": ScryptVerifier.create(b"secret", 10)})


def test_by_default_only_this_machine_is_anonymous(harness: Harness) -> None:
    harness.configure()
    assert harness.settled(LOCAL).accepted
    refused = harness.settled(REMOTE)
    assert not refused.accepted
    assert refused.reason_code == reasons.NOT_AUTHORIZED


def test_with_a_password_file_nobody_is_anonymous_by_default(harness: Harness, table: PasswordTable) -> None:
    harness.configure(table)
    assert harness.settled(LOCAL).reason_code == reasons.NOT_AUTHORIZED
    harness.configure(table, allow_anonymous=True)
    assert harness.settled(LOCAL).accepted
    assert harness.settled(REMOTE).accepted


def test_a_listener_overrides(harness: Harness) -> None:
    harness.configure(listener=Listener(host="0.0.0.0", allow_anonymous=False), allow_anonymous=True)
    assert not harness.settled(LOCAL).accepted
    harness.configure(listener=Listener(host="0.0.0.0", allow_anonymous=True), allow_anonymous=False)
    assert harness.settled(REMOTE).accepted


def test_without_a_password_file_a_name_proves_nothing(harness: Harness) -> None:
    harness.configure()
    verdict = harness.settled(LOCAL, "admin", b"guess")
    assert verdict.accepted
    assert verdict.username is None
    assert not harness.settled(REMOTE, "admin", b"guess").accepted


def test_passwords(harness: Harness, table: PasswordTable) -> None:
    harness.configure(table)
    good = harness.settled(REMOTE, "ann", b"secret")
    assert good.accepted
    assert good.username == "ann"
    for username, password in (("ann", b"wrong"), ("bob", b"secret"), ("ann", None)):
        verdict = harness.settled(REMOTE, username, password)
        assert not verdict.accepted
        assert verdict.reason_code == reasons.BAD_USER_NAME_OR_PASSWORD
    assert harness.settled(LOCAL, None, b"secret").reason_code == reasons.BAD_USER_NAME_OR_PASSWORD


def test_a_checked_password_is_remembered_for_a_while(harness: Harness, table: PasswordTable) -> None:
    harness.configure(table)
    assert harness.ask(REMOTE, "ann", b"secret") is None
    assert harness.wait().accepted
    at_once = harness.ask(REMOTE, "ann", b"secret")
    assert at_once is not None
    assert at_once.accepted
    assert harness.ask(REMOTE, "ann", b"wrong") is None, "a wrong one is checked"
    assert not harness.wait().accepted
    assert harness.ask(REMOTE, "ann", b"wrong") is None, "and is not remembered"
    harness.wait()
    harness.clock.advance(REMEMBERED_SECONDS + 1)
    assert harness.ask(REMOTE, "ann", b"secret") is None
    harness.wait()


def test_a_changed_password_is_forgotten(harness: Harness, table: PasswordTable) -> None:
    harness.configure(table)
    assert harness.settled(REMOTE, "ann", b"secret").accepted
    harness.configure(PasswordTable({"ann": ScryptVerifier.create(b"new", 10)}))
    assert not harness.settled(REMOTE, "ann", b"secret").accepted


def test_memory_can_be_turned_off_and_is_bounded(harness: Harness, table: PasswordTable) -> None:
    harness.configure(table, verification_cache_size=0)
    assert harness.settled(REMOTE, "ann", b"secret").accepted
    assert harness.ask(REMOTE, "ann", b"secret") is None
    harness.wait()
    two = PasswordTable({"ann": ScryptVerifier.create(b"1", 10), "bob": ScryptVerifier.create(b"2", 10)})
    harness.configure(two, verification_cache_size=1)
    assert harness.settled(REMOTE, "ann", b"1").accepted
    assert harness.settled(REMOTE, "bob", b"2").accepted
    assert harness.ask(REMOTE, "ann", b"1") is None, "the older success made room for the newer"
    harness.wait()


def test_checks_under_way_are_bounded(harness: Harness, table: PasswordTable) -> None:
    harness.configure(table, max_pending_verifications=2)
    assert harness.ask(REMOTE, "ann", b"1") is None
    assert harness.ask(REMOTE, "ann", b"2") is None
    assert harness.authenticator.pending == 2
    busy = harness.ask(REMOTE, "ann", b"3")
    assert busy is not None
    assert busy.reason_code == reasons.SERVER_BUSY
    harness.wait()
    assert harness.ask(REMOTE, "ann", b"secret") is None, "there is room again"
    harness.wait()
    harness.wait()
    assert harness.authenticator.pending == 0


def test_a_certificate_name_is_enough(harness: Harness, table: PasswordTable) -> None:
    harness.configure(table)
    verdict = harness.ask(Peer("10.0.0.9", "tls", True, "device-7", False), "someone-else", b"x")
    assert verdict is not None
    assert verdict.accepted
    assert verdict.username == "device-7"


class Parrot:
    """A challenge and response: the client must say the challenge backwards, twice."""

    def start(self, credentials: Credentials) -> ParrotExchange:
        return ParrotExchange(credentials.client_id)


class ParrotExchange:
    def __init__(self, name: str) -> None:
        self._name = name
        self._round = 0

    def step(self, data: bytes) -> Verdict:
        self._round += 1
        if data == b"explode":
            raise RuntimeError("a defect of the plug-in")
        if self._round > 1 and data != f"{self._round - 1}-olleh".encode():
            return Verdict(False, reasons.NOT_AUTHORIZED, "wrong")
        if self._round == 3:
            return Verdict(True, username=self._name, data=b"welcome")
        return Verdict(False, reasons.CONTINUE_AUTHENTICATION, continue_data=f"hello-{self._round}".encode())


def step(harness: Harness, connection: object, data: bytes, method: str = "parrot") -> Verdict:
    credentials = Credentials(REMOTE, "c", 5, method=method, data=data)
    verdict = harness.authenticator.authenticate(credentials, connection)
    assert verdict is not None
    return verdict


def test_enhanced_authentication_runs_step_by_step(harness: Harness) -> None:
    harness.configure()
    harness.authenticator.register("parrot", Parrot())
    go = partial(step, harness)
    assert go("one", b"").continue_data == b"hello-1"
    assert go("two", b"").continue_data == b"hello-1"
    assert go("one", b"1-olleh").continue_data == b"hello-2"
    done = go("one", b"2-olleh")
    assert done.accepted
    assert (done.username, done.data) == ("c", b"welcome")
    assert go("two", b"2-olleh").reason_code == reasons.NOT_AUTHORIZED
    assert go("one", b"").continue_data == b"hello-1", "a finished exchange is followed by a new one"
    harness.authenticator.forget("one")
    assert go("one", b"").continue_data == b"hello-1", "a lost connection's exchange is forgotten"


def test_enhanced_authentication_refusals(harness: Harness) -> None:
    harness.configure()
    harness.authenticator.register("parrot", Parrot())
    assert step(harness, "x", b"", "other").reason_code == reasons.BAD_AUTHENTICATION_METHOD
    step(harness, "x", b"")
    assert step(harness, "x", b"", "other").reason_code == reasons.PROTOCOL_ERROR


def test_a_failing_plug_in_refuses_one_client(harness: Harness) -> None:
    harness.configure()
    harness.authenticator.register("parrot", Parrot())
    verdict = step(harness, "x", b"explode")
    assert not verdict.accepted
    assert verdict.reason_code == reasons.UNSPECIFIED_ERROR


def test_nothing_is_settled_after_the_end(table: PasswordTable) -> None:
    harness = Harness()
    harness.configure(table)
    harness.authenticator.close()
    verdict = harness.ask(REMOTE, "ann", b"secret")
    assert verdict is not None
    assert verdict.reason_code == reasons.SERVER_BUSY
