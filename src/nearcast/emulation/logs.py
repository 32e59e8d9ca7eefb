"""What a process writes: kept in a file of bounded size, searched for words of readiness, followed by whoever wants to.

The file is ``NAME.log``; at half the bound it becomes ``NAME.log.1`` in place of the one before, so the newest output is
always there and the disk never holds more than the bound. Text is bytes here: what a program writes need not be UTF-8.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

#: Lines a follower may lag behind; then the oldest are left out, and it is told how many.
MAX_FOLLOWED_LINES = 2_000

#: A longer line is followed in pieces.
MAX_LINE_BYTES = 16 * 1024

_CHUNK_BYTES = 64 * 1024


class Follower:
    """Lines as they are written, for one reader that may be slow."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._news = asyncio.Event()
        self.missed = 0

    def put(self, line: str) -> None:
        if len(self._lines) >= MAX_FOLLOWED_LINES:
            self._lines.popleft()
            self.missed += 1
        self._lines.append(line)
        self._news.set()

    async def take(self) -> list[str]:
        """All lines since the last time; waits for at least one."""
        while not self._lines:
            self._news.clear()
            await self._news.wait()
        lines = list(self._lines)
        self._lines.clear()
        if self.missed:
            lines.insert(0, f"[{self.missed} lines left out: they came faster than they were read]")
            self.missed = 0
        return lines


class ProcessLog:
    """The output of one process over all its starts. ``tell`` hears, once, why output cannot be kept (a full disk); the
    process goes on."""

    def __init__(self, path: Path, max_bytes: int, tell: Callable[[str], None] | None = None) -> None:
        self.path = path
        self._tell = tell
        self._half_bytes = max(4096, max_bytes // 2)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size
        self._rest = b""
        self._sought: list[tuple[bytes, asyncio.Event]] = []
        self._sought_in = b""
        self._followers: list[Follower] = []
        self._failed = False

    def write(self, data: bytes) -> None:
        """Take what the process wrote."""
        if self._sought:
            self._search(data)
        if self._followers:
            self._pass_on(data)
        try:
            if self._size + len(data) > self._half_bytes:
                self._rotate()
            kept = data[-self._half_bytes :]
            self._size += os.write(self._file, kept)
        except OSError as error:
            if not self._failed and self._tell is not None:
                self._tell(f"cannot keep output in {self.path}: {error.strerror}")
            self._failed = True

    def say(self, text: str) -> None:
        """A line of the keeper's own."""
        self.write(f"--- {text}\n".encode())

    def expect(self, text: str) -> asyncio.Event:
        """An event that is set once ``text`` has been written from now on."""
        found = asyncio.Event()
        self._sought.append((text.encode(), found))
        self._sought_in = b""
        return found

    def forget(self, event: asyncio.Event) -> None:
        self._sought = [entry for entry in self._sought if entry[1] is not event]

    def follow(self) -> Follower:
        follower = Follower()
        self._followers.append(follower)
        return follower

    def unfollow(self, follower: Follower) -> None:
        self._followers.remove(follower)
        if not self._followers:
            self._rest = b""

    def tail(self, lines: int) -> list[str]:
        """The last lines, oldest first."""
        found: list[bytes] = []
        for path in (self.path, self.path.with_name(self.path.name + ".1")):
            wanted = lines - len(found)
            if wanted <= 0:
                break
            found = _last_lines(path, wanted) + found
        return [line.decode("utf-8", "replace") for line in found[-lines:]] if lines > 0 else []

    def close(self) -> None:
        os.close(self._file)

    def _rotate(self) -> None:
        """Go on in a new file; where none can be made (its directory is gone), in the old one from its beginning."""
        self._size = 0
        try:
            os.replace(self.path, self.path.with_name(self.path.name + ".1"))
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError:
            os.ftruncate(self._file, 0)
            raise
        os.close(self._file)
        self._file = file

    def _search(self, data: bytes) -> None:
        """Words may be written in pieces: as much as could be the beginning of one is kept."""
        self._sought_in += data
        for text, event in self._sought:
            if text in self._sought_in:
                event.set()
        longest = max(len(text) for text, _ in self._sought)
        self._sought_in = self._sought_in[-longest:]

    def _pass_on(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        for line in lines:
            for start in range(0, max(1, len(line)), MAX_LINE_BYTES):
                text = line[start : start + MAX_LINE_BYTES].decode("utf-8", "replace")
                for follower in self._followers:
                    follower.put(text)


def _last_lines(path: Path, count: int) -> list[bytes]:
    """The last lines of a file, read from its end; none if it is not there."""
    try:
        with path.open("rb") as file:
            position = file.seek(0, os.SEEK_END)
            data = b""
            while position > 0 and data.count(b"\n") <= count:
                step = min(_CHUNK_BYTES, position)
                position -= step
                file.seek(position)
                data = file.read(step) + data
    except FileNotFoundError:
        return []
    return data.splitlines()[-count:]
