"""What a run was made on and with: the machine, the versions, and how much of the machine others took meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from nearcast import __version__, compiled
from nearcast.bench.process import machine, stolen_seconds

STOLEN_WORTH_SAYING = 0.02
"""Share of the machine that its hypervisor gave to others from which on the figures deserve a note."""

BUSY_PER_CORE = 0.5
"""Load average per core, before the run, from which on somebody else is at work."""

_PACKAGES = ("numpy", "pyarrow", "matplotlib", "msgspec", "uvloop", "pyspark")


def versions() -> dict[str, str]:
    """Of Nearcast and of what it computes with; a package that is not installed is not there."""
    found = {"nearcast": __version__, "hot modules": "compiled" if compiled.is_compiled() else "plain Python"}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def facts() -> dict[str, Any]:
    """Processor, cores, kernel, memory, and how busy it was before."""
    found: dict[str, Any] = dict(machine())
    found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found["load_average"] = round(os.getloadavg()[0], 2)
    return found


class Usage:
    """How much of the machine the hypervisor, and other processes, took since it was made."""

    def __init__(self) -> None:
        self._stolen = stolen_seconds()
        self._waited = _pressure_seconds()
        self._began = time.monotonic()
        self._load = os.getloadavg()[0]

    def since(self) -> dict[str, float]:
        elapsed = max(1e-9, time.monotonic() - self._began)
        return {
            "stolen_share": round((stolen_seconds() - self._stolen) / elapsed / (os.cpu_count() or 1), 4),
            "cpu_pressure": round((_pressure_seconds() - self._waited) / elapsed, 4),
        }

    def notes(self) -> Iterator[str]:
        share = self.since()["stolen_share"]
        if share >= STOLEN_WORTH_SAYING:
            yield f"the hypervisor gave {share:.0%} of this machine's processor time to others meanwhile"
        if self._load >= BUSY_PER_CORE * (os.cpu_count() or 1):
            yield f"this machine was busy before it began (load average {self._load:.1f}): times are longer than they need be"
        if not compiled.is_compiled():
            yield "the hot modules ran as plain Python: rates are several times lower than compiled"
        stale = compiled.stale_sources()
        if stale:
            yield f"compiled modules are older than their sources: {', '.join(stale)}"


def _pressure_seconds() -> float:
    """Time in which some process wanted a core and had none; 0 where the kernel does not say."""
    try:
        line = Path("/proc/pressure/cpu").read_text().splitlines()[0]
        return int(line.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return 0.0
