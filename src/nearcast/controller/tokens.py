"""Who may use the HTTP API: bearer tokens, compared in constant time.

Whoever has the fabric's secret can derive a token from it and need not be told another secret (``nearcast status`` does so).
Others get tokens of their own in a file: one per line, at least 16 characters; a line that begins with ``read`` and a space
allows looking only. Empty lines and those that begin with ``#`` do not count.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

from nearcast.errors import ConfigError

Right = Literal["read", "write"]

LEAST_CHARACTERS = 16


def derived_token(secret: bytes) -> str:
    """The token that follows from a fabric's secret."""
    return hmac.new(secret, b"nearcast controller API", hashlib.sha256).hexdigest()


class Tokens:
    """All that count."""

    def __init__(self, tokens: dict[str, Right]) -> None:
        # Kept and compared as digests, so that comparing takes the same time whatever is compared.
        self._rights: dict[bytes, Right] = {_digest(token): right for token, right in tokens.items()}

    def right_of(self, token: str) -> Right | None:
        """What this token allows; ``None`` for a wrong one."""
        given = _digest(token)
        found: Right | None = None
        for known, right in self._rights.items():
            if hmac.compare_digest(known, given):
                found = right
        return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def read_tokens(path: str | None, secret: bytes) -> Tokens:
    """The derived token and those of the file."""
    tokens: dict[str, Right] = {derived_token(secret): "write"}
    if path is None:
        return Tokens(tokens)
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"cannot read the tokens: {reason}", path=path) from error
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        right: Right = "read" if words[0] == "read" and len(words) == 2 else "write"
        if len(words) > 2 or (len(words) == 2 and right != "read"):
            raise ConfigError("write one token per line, or `read` and a token", path=path, line=number)
        if len(words[-1]) < LEAST_CHARACTERS:
            raise ConfigError(f"a token has at least {LEAST_CHARACTERS} characters", path=path, line=number)
        tokens[words[-1]] = right
    return Tokens(tokens)
