"""A simulated disk: what was flushed survives a power cut, what was not survives in part or not at all.

The model, and nothing of how a real one works inside. A file is a name that leads to its data. Two things can be lost
independently of each other, as on a real file system:

* **Data.** Writes to one file that were not flushed survive up to a random point, which may be inside a write (a torn tail).
* **Names.** Creations, renames and removals that were not flushed survive up to a random point in their common order.

So a file renamed into place without a flush before may be there under its new name with half of its data. ``sync`` flushes
everything written before it. Not modelled: a flush of one file that takes time, bit rot, disks that lie about a flush.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from nearcast.errors import StorageUnavailable

if TYPE_CHECKING:
    from nearcast.simulation.hosts import Host

DEFAULT_SYNC_S: Final = 0.002
DEFAULT_CAPACITY_BYTES: Final = 1 << 30

_APPEND: Final = 0
_TRUNCATE: Final = 1


class _Data:
    """The bytes of a file: as a process sees them, and as they are on the platter, with what lies between."""

    def __init__(self) -> None:
        self.visible = bytearray()
        self.durable = bytearray()
        # (number of the operation, what it does, bytes appended, length truncated to)
        self.pending: list[tuple[int, int, bytes, int]] = []


def _apply(content: bytearray, kind: int, data: bytes, length: int) -> None:
    if kind == _APPEND:
        content += data
    else:
        del content[length:]


class Disk:
    """The files of one host. Names are plain strings; a slash in them means nothing."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.full = False
        self.sync_s = DEFAULT_SYNC_S
        """How long a flush takes, in virtual seconds."""
        self.capacity_bytes: i64 = DEFAULT_CAPACITY_BYTES
        self.used_bytes: i64 = 0
        self.syncs: i64 = 0
        self._operations: i64 = 0
        self._names: dict[str, _Data] = {}
        self._durable_names: dict[str, _Data] = {}
        # (number of the operation, the name, what it leads to from then on or None for nothing)
        self._pending_names: list[tuple[int, str, _Data | None]] = []
        # Data with pending writes, also of files whose name is gone: a power cut may bring the name back.
        self._dirty: dict[_Data, None] = {}
        self._busy_until = 0.0

    # --- what a process does ---

    def append(self, name: str, data: bytes) -> None:
        """Add to the end of a file; it is created if it is not there."""
        self._check_room(name, len(data))
        file = self._names.get(name)
        if file is None:
            file = self._create(name)
        if data:
            self._operations += 1
            file.visible += data
            self.used_bytes += len(data)
            file.pending.append((self._operations, _APPEND, data, 0))
            self._dirty[file] = None

    def write(self, name: str, data: bytes) -> None:
        """Replace a file's content in place: not atomic, so a power cut may leave it empty or half. See ``rename``."""
        if name in self._names:
            self._check_room(name, len(data) - len(self._names[name].visible))
            self.truncate(name, 0)
        self.append(name, data)

    def truncate(self, name: str, length: int) -> None:
        """Keep only the first ``length`` bytes of a file."""
        file = self._find(name)
        if length < 0 or length > len(file.visible):
            raise ValueError(f"{name} has {len(file.visible)} bytes and cannot be cut to {length}")
        if length < len(file.visible):
            self._operations += 1
            self.used_bytes -= len(file.visible) - length
            del file.visible[length:]
            file.pending.append((self._operations, _TRUNCATE, b"", length))
            self._dirty[file] = None

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, at once taking the place of what was there before."""
        file = self._find(old)
        if old == new:
            return
        replaced = self._names.get(new)
        if replaced is not None:
            self.used_bytes -= len(replaced.visible)
        del self._names[old]
        self._names[new] = file
        # One operation with two halves: a power cut loses both or none.
        self._operations += 1
        self._pending_names.append((self._operations, new, file))
        self._pending_names.append((self._operations, old, None))

    def remove(self, name: str) -> None:
        file = self._find(name)
        self.used_bytes -= len(file.visible)
        del self._names[name]
        self._operations += 1
        self._pending_names.append((self._operations, name, None))

    def read(self, name: str) -> bytes:
        return bytes(self._find(name).visible)

    def length(self, name: str) -> int:
        return len(self._find(name).visible)

    def exists(self, name: str) -> bool:
        return name in self._names

    def list(self, prefix: str = "") -> list[str]:
        """The names of all files that begin with ``prefix``, sorted."""
        return sorted(name for name in self._names if name.startswith(prefix))

    def sync(self, token: int = 0) -> None:
        """Flush everything written so far; ``Node.synced(token)`` is called when it is safe. Flushes are done one by one."""
        now = self._host.world.now
        start = now if self._busy_until < now else self._busy_until
        self._busy_until = start + self.sync_s
        self._host.plan_sync(self._busy_until, self._operations, token)

    def flush_file(self, name: str) -> None:
        """Flush the data of one file, not its name, and wait for that: for what a process does in another thread."""
        file = self._find(name)
        for _, kind, data, length in file.pending:
            _apply(file.durable, kind, data, length)
        file.pending.clear()
        self._dirty.pop(file, None)

    # --- what the simulator does ---

    def flushed(self, operation: int) -> None:
        """Everything up to this operation is on the platter now."""
        self.syncs += 1
        names = self._pending_names
        done = 0
        while done < len(names) and names[done][0] <= operation:
            self._apply_name(names[done])
            done += 1
        del names[:done]
        for file in list(self._dirty):
            pending = file.pending
            done = 0
            while done < len(pending) and pending[done][0] <= operation:
                _, kind, data, length = pending[done]
                _apply(file.durable, kind, data, length)
                done += 1
            del pending[:done]
            if not pending:
                del self._dirty[file]

    def lose_power(self) -> int:
        """Lose a random part of what was not flushed; returns how many bytes of writes were lost."""
        rng = random.Random(f"{self._host.world.seed}/disk/{self._host.name}/{self._host.boots}")
        lost = 0
        for file in self._dirty:
            pending = file.pending
            survivors = rng.randrange(len(pending) + 1)
            for _, kind, data, length in pending[:survivors]:
                _apply(file.durable, kind, data, length)
            if survivors < len(pending) and pending[survivors][1] == _APPEND:
                torn = pending[survivors][2]
                file.durable += torn[: rng.randrange(len(torn))]
            lost += max(0, len(file.visible) - len(file.durable))
            pending.clear()
        self._dirty.clear()
        names = self._pending_names
        if names:
            operations = sorted({operation for operation, _, _ in names})
            kept = rng.randrange(len(operations) + 1)
            for change in names:
                if kept and change[0] <= operations[kept - 1]:
                    self._apply_name(change)
            names.clear()
        self._names = dict(self._durable_names)
        self.used_bytes = 0
        for file in self._names.values():
            file.visible = bytearray(file.durable)
            self.used_bytes += len(file.visible)
        self._busy_until = 0.0
        return lost

    def _apply_name(self, change: tuple[int, str, _Data | None]) -> None:
        _, name, file = change
        if file is None:
            self._durable_names.pop(name, None)
        else:
            self._durable_names[name] = file

    def _create(self, name: str) -> _Data:
        file = _Data()
        self._names[name] = file
        self._operations += 1
        self._pending_names.append((self._operations, name, file))
        return file

    def _find(self, name: str) -> _Data:
        file = self._names.get(name)
        if file is None:
            raise StorageUnavailable(name, "no such file")
        return file

    def _check_room(self, name: str, more_bytes: int) -> None:
        if self.full:
            raise StorageUnavailable(name, "no space left on the simulated disk")
        if self.used_bytes + more_bytes > self.capacity_bytes:
            raise StorageUnavailable(name, f"no space left: the simulated disk holds {self.capacity_bytes:,} bytes")
