"""The password file: users with scrypt hashes, one per line, and the checking of a password against it.

A line is ``user:$scrypt$ln=15,r=8,p=1$SALT$HASH`` (scrypt with N = 2^ln, RFC 7914; salt and hash in base64 without padding) or
``user:$scram-sha-256$i=...$SALT$STORED$SERVER`` (RFC 5802 keys, see :mod:`nearcast.broker.scram`). The parameters stand in
each line, so that they can be raised without invalidating what is there. Nothing here is asynchronous: a check takes tens of
milliseconds on purpose, and :mod:`nearcast.broker.authentication` keeps it off the event loop.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import re
import secrets
import tempfile
from pathlib import Path
from typing import Final

from nearcast.errors import ConfigError

DEFAULT_LOG2_N: Final = 15
DEFAULT_R: Final = 8
DEFAULT_P: Final = 1
HASH_BYTES: Final = 32
SALT_BYTES: Final = 16
MAX_PASSWORD_BYTES: Final = 65_535

_SCRYPT = re.compile(r"\$scrypt\$ln=(\d{1,2}),r=(\d{1,3}),p=(\d{1,3})\$([A-Za-z0-9+/]+)\$([A-Za-z0-9+/]+)")
_SCRAM = re.compile(r"\$scram-sha-256\$i=(\d{4,8})\$([A-Za-z0-9+/]+)\$([A-Za-z0-9+/]+)\$([A-Za-z0-9+/]+)")


class ScryptVerifier:
    """A password's scrypt hash with what is needed to compute it again."""

    __slots__ = ("_hash", "_log2_n", "_p", "_r", "_salt")

    def __init__(self, log2_n: int, r: int, p: int, salt: bytes, digest: bytes) -> None:
        # Both ends matter: too little protects nothing, too much lets a line in a file take the machine down.
        if not 10 <= log2_n <= 20 or not 1 <= r <= 32 or not 1 <= p <= 16 or 128 * r * p << log2_n > 512 * 1024 * 1024:
            raise ValueError("scrypt parameters out of range (ln 10 to 20, r 1 to 32, p 1 to 16, at most 512 MiB)")
        if len(salt) < 8 or len(digest) < 16:
            raise ValueError("the salt has at least 8 bytes and the hash at least 16")
        self._log2_n = log2_n
        self._r = r
        self._p = p
        self._salt = salt
        self._hash = digest

    @classmethod
    def create(cls, password: bytes, log2_n: int = DEFAULT_LOG2_N) -> ScryptVerifier:
        salt = secrets.token_bytes(SALT_BYTES)
        return cls(log2_n, DEFAULT_R, DEFAULT_P, salt, _scrypt(password, salt, log2_n, DEFAULT_R, DEFAULT_P, HASH_BYTES))

    def verify(self, password: bytes) -> bool:
        computed = _scrypt(password, self._salt, self._log2_n, self._r, self._p, len(self._hash))
        return hmac.compare_digest(computed, self._hash)

    def decoy(self) -> ScryptVerifier:
        """A verifier that costs the same and accepts nothing that anyone can know."""
        return ScryptVerifier(
            self._log2_n, self._r, self._p, secrets.token_bytes(SALT_BYTES), secrets.token_bytes(len(self._hash))
        )

    def __str__(self) -> str:
        return f"$scrypt$ln={self._log2_n},r={self._r},p={self._p}${_encode(self._salt)}${_encode(self._hash)}"


class ScramVerifier:
    """The keys a SCRAM-SHA-256 server keeps of a password (RFC 5802 section 3). Serves plain passwords too."""

    __slots__ = ("iterations", "salt", "server_key", "stored_key")

    def __init__(self, iterations: int, salt: bytes, stored_key: bytes, server_key: bytes) -> None:
        if not 4_096 <= iterations <= 10_000_000:
            raise ValueError("SCRAM iterations out of range (4,096 to 10,000,000)")
        if len(salt) < 8 or len(stored_key) != 32 or len(server_key) != 32:
            raise ValueError("the salt has at least 8 bytes, each key 32")
        self.iterations = iterations
        self.salt = salt
        self.stored_key = stored_key
        self.server_key = server_key

    @classmethod
    def create(cls, password: bytes, iterations: int = 100_000, salt: bytes | None = None) -> ScramVerifier:
        salt = secrets.token_bytes(SALT_BYTES) if salt is None else salt
        salted = hashlib.pbkdf2_hmac("sha256", password, salt, iterations)
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        stored_key = hashlib.sha256(client_key).digest()
        return cls(iterations, salt, stored_key, hmac.digest(salted, b"Server Key", "sha256"))

    def verify(self, password: bytes) -> bool:
        other = ScramVerifier.create(password, self.iterations, self.salt)
        return hmac.compare_digest(other.stored_key, self.stored_key)

    def decoy(self) -> ScramVerifier:
        """A verifier that costs the same and accepts nothing that anyone can know."""
        keys = secrets.token_bytes(32), secrets.token_bytes(32)
        return ScramVerifier(self.iterations, secrets.token_bytes(SALT_BYTES), *keys)

    def __str__(self) -> str:
        keys = f"{_encode(self.salt)}${_encode(self.stored_key)}${_encode(self.server_key)}"
        return f"$scram-sha-256$i={self.iterations}${keys}"


Verifier = ScryptVerifier | ScramVerifier


def _scrypt(password: bytes, salt: bytes, log2_n: int, r: int, p: int, length: int) -> bytes:
    n = 1 << log2_n
    # OpenSSL wants the working memory allowed explicitly: 128 * r * (N + p + 2) bytes, with some room.
    return hashlib.scrypt(password, salt=salt, n=n, r=r, p=p, dklen=length, maxmem=128 * r * (n + p + 2) + 1_048_576)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii").rstrip("=")


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


def parse_verifier(text: str) -> Verifier:
    """The part of a line after ``user:``; ``ValueError`` says what is wrong with it."""
    try:
        if found := _SCRYPT.fullmatch(text):
            log2_n, r, p = (int(number) for number in found.groups()[:3])
            return ScryptVerifier(log2_n, r, p, _decode(found[4]), _decode(found[5]))
        if found := _SCRAM.fullmatch(text):
            return ScramVerifier(int(found[1]), _decode(found[2]), _decode(found[3]), _decode(found[4]))
    except binascii.Error:
        raise ValueError("salt and hash are base64") from None
    raise ValueError("the hash is none that `nearcast passwd` writes")


def username_fault(username: str) -> str:
    """What is wrong with a user name, in words; empty when nothing is."""
    if not username:
        return "a user name must not be empty"
    if ":" in username or username.startswith("#"):
        return 'a user name must not contain ":" or start with "#"'
    if not username.isprintable() or username != username.strip():
        return "a user name must be printable and not begin or end with a space"
    return ""


class PasswordTable:
    """The users of one password file. Replaced as a whole when the file is read again."""

    def __init__(self, verifiers: dict[str, Verifier]) -> None:
        self._verifiers = verifiers
        # Unknown users cost what known ones cost, or the time of an answer would tell who exists.
        default = ScryptVerifier(DEFAULT_LOG2_N, DEFAULT_R, DEFAULT_P, bytes(16), bytes(32))
        self._decoy: Verifier = next(iter(verifiers.values()), default).decoy()

    def __len__(self) -> int:
        return len(self._verifiers)

    def lookup(self, username: str) -> Verifier | None:
        return self._verifiers.get(username)

    def verify(self, username: str, password: bytes) -> bool:
        """Whether this is the user's password. Blocks for tens of milliseconds; other threads run meanwhile."""
        verifier = self._verifiers.get(username)
        matched = (verifier or self._decoy).verify(password)
        return matched and verifier is not None

    def fingerprint(self, username: str) -> bytes:
        """Changes whenever the user's line does; empty for an unknown user."""
        verifier = self._verifiers.get(username)
        return b"" if verifier is None else str(verifier).encode("ascii")


def load_passwords(path: str) -> PasswordTable:
    """Read a password file; :class:`ConfigError` names the line that cannot be used."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        if isinstance(error, FileNotFoundError):
            reason = f"{error.strerror}; `nearcast passwd {path} USER` makes it"
        raise ConfigError(f"cannot read the password file: {reason}", path=path, key="security.password_file") from error
    verifiers: dict[str, Verifier] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip("\r")
        if not line.strip() or line.startswith("#"):
            continue
        username, _, encoded = line.partition(":")
        fault = username_fault(username)
        if not fault and username in verifiers:
            fault = f"user {username} is there twice"
        try:
            verifiers[username] = parse_verifier(encoded)
        except ValueError as error:
            fault = fault or str(error)
        if fault:
            raise ConfigError(fault, path=path, key="security.password_file", line=number)
    return PasswordTable(verifiers)


def store_user(path: str, username: str, verifier: Verifier | None) -> bool:
    """Write a user's line, or with ``None`` remove it, keeping every other line. Returns whether the user was there before.

    The file is replaced in one step and readable by its owner only: whoever reads it sees all of the old or all of the new.
    """
    target = Path(path).resolve()
    try:
        lines = target.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    kept = [line for line in lines if line.startswith("#") or line.partition(":")[0] != username]
    existed = len(kept) != len(lines)
    if verifier is not None:
        replacement = f"{username}:{verifier}"
        if existed:
            kept.insert(next(i for i, line in enumerate(lines) if line.partition(":")[0] == username), replacement)
        else:
            kept.append(replacement)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # mkstemp makes mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in kept))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return existed
