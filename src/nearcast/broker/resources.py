"""How much this broker uses of what it may use: processor, memory, network.

Shares of 0 to 1, which a placement compares with its high watermark (ePulsar §3.4.2), so they say what *this broker* could be
relieved of by taking topics away. What other programs use is left out: no topic that moves would change it.

==========  ==============================================================================================================
processor   time of the thread that serves clients over the time it could have had (one core, or what a control group grants
            if that is less), or time of all threads over what the control group grants, whichever is more
memory      resident memory over the least of the machine's and what control groups grant
network     bytes a second of the busier direction over ``fabric.telemetry.network_bytes_per_second``
            (:mod:`nearcast.fabric.telemetry`, which counts them)
==========  ==============================================================================================================

Control groups are those of Linux, version 2 and 1, with all their ancestors. Where a figure cannot be had, it is 0.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_UNLIMITED_V1: Final = 1 << 60
"""Version 1 writes "no limit" as the largest number of pages; no machine has this much memory."""


class Limits:
    """What a process is granted: cores (may be a fraction) and bytes of memory."""

    def __init__(self, cores: float, memory_bytes: float) -> None:
        self.cores = cores
        self.memory_bytes = memory_bytes


class Resources:
    """The figures of this process. :meth:`sample` is called by the thread that serves clients."""

    def __init__(
        self,
        monotonic: Callable[[], float],
        thread_seconds: Callable[[], float] = time.thread_time,
        process_seconds: Callable[[], float] = time.process_time,
        root: Path = Path("/"),
    ) -> None:
        self.cpu = 0.0
        self.memory = 0.0
        self._monotonic = monotonic
        self._thread_seconds = thread_seconds
        self._process_seconds = process_seconds
        self._root = root
        self.limits = granted(root)
        self.restart()

    def restart(self) -> None:
        """Count from now on, in the thread that calls this."""
        self._sampled_at = self._monotonic()
        self._thread_before = self._thread_seconds()
        self._process_before = self._process_seconds()

    def sample(self) -> None:
        """Bring ``cpu`` (since the last call) and ``memory`` up to date."""
        now = self._monotonic()
        elapsed = now - self._sampled_at
        if elapsed > 0:
            thread, process = self._thread_seconds(), self._process_seconds()
            cores = self.limits.cores
            serving = (thread - self._thread_before) / (elapsed * min(1.0, cores))
            everything = (process - self._process_before) / (elapsed * cores)
            self.cpu = _share(max(serving, everything))
            self._sampled_at, self._thread_before, self._process_before = now, thread, process
        self.memory = _share(resident_bytes(self._root) / self.limits.memory_bytes)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0


def resident_bytes(root: Path = Path("/")) -> int:
    """Memory of this process that is in use; 0 where the system does not say."""
    try:
        return int((root / "proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def granted(root: Path = Path("/")) -> Limits:
    """What the machine has, or the control groups of this process leave of it. A limit that is changed while the broker runs
    is not noticed."""
    cores = float(_usable_cores())
    memory = _machine_bytes()
    for directory in _control_groups(root, "cpu"):
        cores = min(cores, _cores(directory))
    for directory in _control_groups(root, "memory"):
        memory = min(memory, _memory_bytes(directory))
    return Limits(max(cores, 0.01), max(memory, 1.0))


def _usable_cores() -> int:
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def _machine_bytes() -> float:
    try:
        return float(os.sysconf("SC_PHYS_PAGES")) * _PAGE_BYTES
    except (OSError, ValueError):
        return math.inf


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of this process's control groups for a controller, up to the root of each hierarchy."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if not names:
            top = mounted
        elif controller in names.split(","):
            top = mounted / controller
        else:
            continue
        directory = top / path.strip("/")
        while directory != top and top in directory.parents:
            yield directory
            directory = directory.parent
        yield top


def _cores(directory: Path) -> float:
    version_2 = _words(directory / "cpu.max")
    if len(version_2) == 2:
        return _quotient(version_2[0], version_2[1])
    quota, period = _words(directory / "cpu.cfs_quota_us"), _words(directory / "cpu.cfs_period_us")
    return _quotient(quota[0], period[0]) if quota and period else math.inf


def _quotient(quota: str, period: str) -> float:
    """Version 2 says "max" for no limit, version 1 says -1."""
    try:
        share = float(quota) / float(period)
    except (ValueError, ZeroDivisionError):
        return math.inf
    return share if share > 0 else math.inf


def _memory_bytes(directory: Path) -> float:
    for name in ("memory.max", "memory.limit_in_bytes"):
        words = _words(directory / name)
        if words and words[0].isdigit():
            limit = int(words[0])
            return math.inf if limit >= _UNLIMITED_V1 else float(limit)
    return math.inf


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
