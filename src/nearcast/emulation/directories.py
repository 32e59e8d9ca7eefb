"""Where running WANs are found: one private directory per user, in it one per WAN, and what becomes of a dead one's.

``/tmp/nearcast-UID/NAME`` holds the control socket, the specification and, unless told otherwise, logs and data. Whether a WAN
is alive is asked of the kernel, not of a process number: launcher and keeper hold a lock on ``NAME/lock`` that ends with them.
A directory whose lock nobody holds is left over from something that was killed, and is removed by whoever meets it. What is
not a WAN's, by the words in its lock, is never touched: the base may be any private directory, somebody's home as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nearcast.errors import NearcastError

#: The names of hosts, processes and WANs become parts of paths.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")

SOCKET = "control.sock"
SPECIFICATION = "specification.json"
_LOCK = "lock"
_LOCK_TEXT = b"held while this nearcast WAN is alive\n"

_MAX_SOCKET_PATH_BYTES = 107

_ADVICE = "name another directory (NEARCAST_WAN_DIRECTORY, or `base` from Python)"


def default_base() -> Path:
    """The directory of this user's WANs."""
    return Path(f"/tmp/nearcast-{os.getuid()}")  # noqa: S108  # checked below: a directory of ours that nobody else can write


@dataclass(frozen=True)
class WanDirectory:
    """The directory of one WAN."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def socket(self) -> Path:
        return self.path / SOCKET

    @property
    def specification(self) -> Path:
        return self.path / SPECIFICATION

    def is_alive(self) -> bool:
        """Whether a launcher or keeper holds the lock."""
        try:
            descriptor = os.open(self.path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def is_ours(self) -> bool:
        """Whether this is the directory of a WAN, alive or dead, and nothing else that somebody keeps here."""
        try:
            return (self.path / _LOCK).read_bytes() == _LOCK_TEXT
        except OSError:
            return False

    def make_room(self) -> bool:
        """Remove an empty directory, as a WAN leaves it that is killed before it has its lock; whether the path is free."""
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Remove it and all in it; a file that cannot be removed is left. The lock goes last: it says whose the rest is."""
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(self.path)):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                elif entry.name != _LOCK:
                    os.unlink(entry.path)
        shutil.rmtree(self.path, ignore_errors=True)

    def release(self, lock: int) -> None:
        """Remove it if it is still the one that this lock is of: another WAN may have taken the name since."""
        with contextlib.suppress(NearcastError, OSError), _guarded(self.path.parent):
            if os.path.samestat(os.fstat(lock), os.stat(self.path / _LOCK)):
                self.remove()

    def remove_when_dead(self, patience_s: float) -> None:
        """Remove it once neither launcher nor keeper is alive; blocks for at most so long. A killed one may take a while
        to be gone, because the kernel first ends everything in its PID namespace."""
        deadline = time.monotonic() + patience_s
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        with contextlib.suppress(NearcastError, OSError), _guarded(self.path.parent):
            if self.is_ours() and not self.is_alive():
                self.remove()


def reserve(base: Path, name: str) -> tuple[WanDirectory, int]:
    """Make the directory of a new WAN; returns it with the descriptor of its lock, held exclusively.

    The lock lives as long as any copy of the descriptor.
    """
    if NAME.fullmatch(name) is None:
        raise NearcastError(f"{name!r} cannot name a WAN: use up to 40 letters, digits, - and _")
    with _guarded(base):
        directory = WanDirectory(base / name)
        if not directory.make_room():
            if directory.path.is_symlink() or not directory.is_ours():
                raise NearcastError(f"{directory.path} is in the way, and not a WAN's: use another --name, or {_ADVICE}")
            if directory.is_alive():
                raise NearcastError(
                    f"a WAN called {name} is running already: end it with `nearcast wan down {name}`, or use another --name"
                )
            directory.remove()
        directory.path.mkdir(mode=0o700)
        descriptor = os.open(directory.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.write(descriptor, _LOCK_TEXT)
        except OSError as error:
            os.close(descriptor)
            shutil.rmtree(directory.path, ignore_errors=True)
            raise NearcastError(f"cannot use {base} for running WANs: {error.strerror}; {_ADVICE}") from error
        return directory, descriptor


def running(base: Path) -> list[WanDirectory]:
    """The WANs that are alive, by name. What dead ones left is removed."""
    if not base.exists():
        return []
    alive = []
    with _guarded(base):
        for path in sorted(base.iterdir()):
            if not path.is_dir() or path.is_symlink():
                continue
            directory = WanDirectory(path)
            if not directory.is_ours():
                continue
            if directory.is_alive():
                alive.append(directory)
            else:
                directory.remove()
    return alive


def find(base: Path, name: str | None) -> WanDirectory:
    """The running WAN of that name; without a name, the only one there is."""
    alive = running(base)
    if name is None:
        if len(alive) == 1:
            return alive[0]
        if not alive:
            raise NearcastError("no WAN is running: start one with `nearcast wan up TOPOLOGY`")
        raise NearcastError(f"several WANs are running ({', '.join(wan.name for wan in alive)}): say which with --name")
    for directory in alive:
        if directory.name == name:
            return directory
    others = f"; running: {', '.join(wan.name for wan in alive)}" if alive else "; none is"
    raise NearcastError(f"no WAN called {name} is running{others}")


@contextlib.contextmanager
def socket_name(path: Path) -> Iterator[str]:
    """What to call the socket at ``path`` in ``bind`` and ``connect``, which take 107 bytes and no longer path."""
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH_BYTES:
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _guarded(base: Path) -> Iterator[None]:
    """Nobody else makes or removes directories of WANs meanwhile; the base is there and private."""
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Of the directory itself, not of what a link in its place leads to: /tmp is everybody's.
        found = base.lstat()
    except OSError as error:
        raise NearcastError(f"cannot use {base} for running WANs: {error.strerror}; {_ADVICE}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NearcastError(f"{base} is not a private directory of this user: remove it, or {_ADVICE}")
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
