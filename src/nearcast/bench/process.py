"""What the kernel says about a process under test, and where it runs.

Reads ``/proc``; a process and its descendants count together, so that a broker of several processes is charged for all.
"""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """The process and its living descendants."""
    members = [pid]
    for member in members:
        for children in Path(f"/proc/{member}/task").glob("*/children"):
            try:
                members += [int(child) for child in children.read_text().split()]
            except OSError:
                continue  # the thread ended while we looked
    return members


def cpu_seconds(pid: int) -> float:
    """User and system time that the process and its descendants have used."""
    ticks = 0
    for member in family(pid):
        try:
            stat = Path(f"/proc/{member}/stat").read_text()
        except OSError:
            continue
        fields = stat[stat.rindex(")") + 2 :].split()  # the name before may hold anything
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_SECOND


def waited_seconds(pid: int) -> float:
    """Time that threads of the process and its descendants were ready to run and had no core: others' doing, not theirs."""
    nanoseconds = 0
    for member in family(pid):
        for schedule in Path(f"/proc/{member}/task").glob("*/schedstat"):
            try:
                nanoseconds += int(schedule.read_text().split()[1])
            except OSError:
                continue
    return nanoseconds / 1e9


def stolen_seconds() -> float:
    """Core time that this machine wanted and its hypervisor gave to others, since the start; 0 where nobody says."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()
        return int(fields[8]) / _TICKS_PER_SECOND
    except (OSError, IndexError, ValueError):
        return 0.0


def resident_bytes(pid: int) -> int:
    """Resident memory of the process and its descendants."""
    total = 0
    for member in family(pid):
        try:
            rollup = Path(f"/proc/{member}/smaps_rollup").read_text()
        except OSError:
            continue
        for line in rollup.splitlines():
            if line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


def raise_file_limit() -> int:
    """Take all the file descriptors we may have; processes started later inherit them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


@contextmanager
def on_cores(cores: set[int] | None) -> Iterator[None]:
    """Run, and start processes, on these cores only; None leaves the choice to the kernel."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def core_split() -> tuple[set[int] | None, set[int] | None]:
    """A core for the broker and another for the generator, when there are two."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return None, None
    return {cores[0]}, {cores[1]}


def machine() -> dict[str, str | int]:
    """What the figures were measured on."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cores": os.cpu_count() or 1,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
