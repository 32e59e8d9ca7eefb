"""The secret that the nodes of a fabric share: made once, in a file that only its owner can read."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from pathlib import Path

from nearcast.errors import ConfigError
from nearcast.serving import logs

SECRET_BYTES = 32
LEAST_CHARACTERS = 16
MOST_BYTES = 4_096


def make_secret(path: str | Path) -> None:
    """Write a new secret. A file that is there stays: other nodes may be using it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(SECRET_BYTES) + "\n")
    except FileExistsError as error:
        message = "there is such a file already; a fabric's nodes all need the same one: copy it, or remove it first"
        raise ConfigError(message, path=str(path)) from error
    except OSError as error:
        raise ConfigError(f"cannot write the secret: {error.strerror}", path=str(path)) from error


def read_secret(path: str | Path) -> bytes:
    """The secret in a file, without the white space around it."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        advice = "; `nearcast secret FILE` makes one" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read the fabric's secret: {error.strerror}{advice}", path=str(path)) from error
    secret = content.strip()
    if not LEAST_CHARACTERS <= len(secret) <= MOST_BYTES:
        message = f"a fabric's secret has {LEAST_CHARACTERS} to {MOST_BYTES:,} characters; `nearcast secret FILE` makes one"
        raise ConfigError(message, path=str(path))
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        logs.event(logging.WARNING, "every user of this machine can read the fabric's secret: chmod 600", path=str(path))
    return secret
