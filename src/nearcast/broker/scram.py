"""SCRAM-SHA-256 (RFC 5802, RFC 7677) as an enhanced authentication method: the password never crosses the wire.

The CONNECT carries the client's first message, AUTH packets the challenge and the proof, the CONNACK the server's own proof.
Users need a ``$scram-sha-256$`` line in the password file (``nearcast passwd --scram``). Channel binding is not offered, so a
TLS listener beneath it is still what keeps the session itself private.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Callable

from nearcast.broker.passwords import PasswordTable, ScramVerifier
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Credentials, Verdict

METHOD = "SCRAM-SHA-256"
MAX_MESSAGE_BYTES = 4_096


def _refused(reason: str) -> Verdict:
    return Verdict(False, reasons.NOT_AUTHORIZED, reason)


class ScramSha256:
    """An :class:`~nearcast.broker.authentication.ExtendedAuthenticator` over the users of a password file.

    ``table`` is asked at each exchange, so a reloaded password file holds from the next one on.
    """

    def __init__(self, table: Callable[[], PasswordTable | None]) -> None:
        self._table = table
        # Unknown users get a salt that stays the same for the name, as a known user's would.
        self._decoy_secret = secrets.token_bytes(32)

    def start(self, credentials: Credentials) -> ScramExchange:
        return ScramExchange(self._lookup)

    def _lookup(self, username: str) -> tuple[ScramVerifier, bool]:
        table = self._table()
        verifier = table.lookup(username) if table is not None else None
        if isinstance(verifier, ScramVerifier):
            return verifier, True
        salt = hmac.digest(self._decoy_secret, username.encode("utf-8", "surrogatepass"), "sha256")[:16]
        return ScramVerifier(100_000, salt, secrets.token_bytes(32), secrets.token_bytes(32)), False


class ScramExchange:
    """One authentication: client-first, then client-final."""

    __slots__ = ("_client_first_bare", "_gs2_header", "_known", "_lookup", "_nonce", "_server_first", "_username", "_verifier")

    def __init__(self, lookup: Callable[[str], tuple[ScramVerifier, bool]], nonce: str | None = None) -> None:
        self._lookup = lookup
        self._nonce = secrets.token_urlsafe(24) if nonce is None else nonce
        self._verifier: ScramVerifier | None = None
        self._known = False
        self._username = ""
        self._gs2_header = ""
        self._client_first_bare = ""
        self._server_first = ""

    def step(self, data: bytes) -> Verdict:
        try:
            message = data.decode("utf-8")
            if len(data) > MAX_MESSAGE_BYTES:
                raise ValueError
            return self._first(message) if self._verifier is None else self._final(message, self._verifier)
        except (ValueError, binascii.Error):
            return _refused("the SCRAM message cannot be read")

    def _first(self, message: str) -> Verdict:
        flag, authorization, bare = message.split(",", 2)
        if flag not in ("n", "y") or authorization not in ("", "a="):
            return _refused("channel binding and authorization identities are not offered")
        attributes = bare.split(",")
        if len(attributes) < 2 or not attributes[0].startswith("n=") or not attributes[1].startswith("r="):
            raise ValueError
        if len(attributes[1]) < 2 + 8:
            return _refused("the client's nonce is too short")
        self._username = attributes[0][2:].replace("=2C", ",").replace("=3D", "=")
        self._gs2_header = f"{flag},{authorization},"
        self._client_first_bare = bare
        self._nonce = attributes[1][2:] + self._nonce
        self._verifier, self._known = self._lookup(self._username)
        salt = base64.b64encode(self._verifier.salt).decode("ascii")
        self._server_first = f"r={self._nonce},s={salt},i={self._verifier.iterations}"
        challenge = self._server_first.encode("utf-8")
        return Verdict(False, reasons.CONTINUE_AUTHENTICATION, continue_data=challenge)

    def _final(self, message: str, verifier: ScramVerifier) -> Verdict:
        without_proof, mark, proof_text = message.rpartition(",p=")
        binding = base64.b64encode(self._gs2_header.encode("utf-8")).decode("ascii")
        if not mark or without_proof.split(",")[:2] != [f"c={binding}", f"r={self._nonce}"]:
            raise ValueError
        proof = base64.b64decode(proof_text, validate=True)
        signed = f"{self._client_first_bare},{self._server_first},{without_proof}".encode()
        signature = hmac.digest(verifier.stored_key, signed, "sha256")
        if len(proof) != len(signature):
            raise ValueError
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        matched = hmac.compare_digest(hashlib.sha256(client_key).digest(), verifier.stored_key)
        if not matched or not self._known:
            return _refused("user name or password is wrong")
        server_signature = hmac.digest(verifier.server_key, signed, "sha256")
        return Verdict(True, username=self._username, data=b"v=" + base64.b64encode(server_signature))
