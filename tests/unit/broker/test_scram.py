"""SCRAM-SHA-256, by the example of RFC 7677 section 3 and by what must be refused."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest

from nearcast.broker.passwords import PasswordTable, ScramVerifier, ScryptVerifier
from nearcast.broker.scram import ScramExchange, ScramSha256
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Credentials, Peer, Verdict

RFC_VERIFIER = ScramVerifier.create(b"pencil", 4_096, base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ=="))
CLIENT_FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
CLIENT_FINAL = b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="


def rfc_exchange() -> ScramExchange:
    return ScramExchange(lambda _: (RFC_VERIFIER, True), nonce="%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0")


def test_the_example_of_rfc_7677() -> None:
    exchange = rfc_exchange()
    challenge = exchange.step(CLIENT_FIRST)
    assert challenge.reason_code == reasons.CONTINUE_AUTHENTICATION
    assert challenge.continue_data == (
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    )
    verdict = exchange.step(CLIENT_FINAL)
    assert verdict.accepted
    assert verdict.username == "user"
    assert verdict.data == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"n,,",
        b"n,,n=user",
        b"n,,r=abcdefgh,n=user",
        b"p=tls-unique,,n=user,r=abcdefghij",
        b"n,a=admin,n=user,r=abcdefghij",
        b"n,,n=user,r=short",
        b"\xff\xfe",
        b"n,,n=user,r=" + b"x" * 5_000,
    ],
)
def test_bad_first_messages_are_refused(first: bytes) -> None:
    verdict = rfc_exchange().step(first)
    assert not verdict.accepted
    assert verdict.reason_code == reasons.NOT_AUTHORIZED


@pytest.mark.parametrize(
    "final",
    [
        b"",
        CLIENT_FINAL.replace(b"c=biws", b"c=eSws"),
        CLIENT_FINAL.replace(b"hNlF", b"hNlG"),
        CLIENT_FINAL.replace(b"p=dHzb", b"p=eHzb"),
        CLIENT_FINAL.replace(b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=", b"p=AAAA"),
        CLIENT_FINAL.replace(b"p=dHzb", b"p=***"),
    ],
)
def test_bad_final_messages_are_refused(final: bytes) -> None:
    exchange = rfc_exchange()
    exchange.step(CLIENT_FIRST)
    verdict = exchange.step(final)
    assert not verdict.accepted
    assert verdict.reason_code == reasons.NOT_AUTHORIZED


def login(table: PasswordTable | None, username: str, password: bytes) -> Verdict:
    """A whole run as a client would do it."""
    method = ScramSha256(lambda: table)
    exchange = method.start(Credentials(Peer("127.0.0.1"), "c", 5, method="SCRAM-SHA-256"))
    bare = f"n={username},r=clientnonce"
    challenge = exchange.step(f"n,,{bare}".encode()).continue_data or b""
    fields = dict(part.split("=", 1) for part in challenge.decode().split(","))
    salted = hashlib.pbkdf2_hmac("sha256", password, base64.b64decode(fields["s"]), int(fields["i"]))
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    without_proof = f"c=biws,r={fields['r']}"
    signed = f"{bare},{challenge.decode()},{without_proof}".encode()
    signature = hmac.digest(hashlib.sha256(client_key).digest(), signed, "sha256")
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    return exchange.step(f"{without_proof},p={base64.b64encode(proof).decode()}".encode())


def test_users_of_a_password_file() -> None:
    table = PasswordTable({"ann": ScramVerifier.create(b"secret", 4_096), "old": ScryptVerifier.create(b"secret", 10)})
    assert login(table, "ann", b"secret").accepted
    assert not login(table, "ann", b"wrong").accepted
    assert not login(table, "nobody", b"secret").accepted
    assert not login(table, "old", b"secret").accepted, "an scrypt line holds no SCRAM keys"
    assert not login(None, "ann", b"secret").accepted


def test_an_unknown_user_gets_the_same_salt_each_time() -> None:
    method = ScramSha256(lambda: None)
    credentials = Credentials(Peer("127.0.0.1"), "c", 5, method="SCRAM-SHA-256")
    salts = {
        (method.start(credentials).step(b"n,,n=ghost,r=abcdefghij").continue_data or b"").split(b",")[1] for _ in range(3)
    }
    assert len(salts) == 1
