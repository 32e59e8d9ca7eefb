"""System calls of Linux that Python 3.11 has no functions for: namespaces, mounts, and what ties processes' lives together.

Errors are ``OSError`` with the kernel's number. Knows nothing about WANs.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000

MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 1 << 18

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave namespaces that the parent is in for new ones."""
    _check(_libc.unshare(flags), "unshare")


def make_mounts_private() -> None:
    """From now on nothing that is mounted here is seen outside, nor the other way round."""
    _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None), "mount /")


def mount_proc() -> None:
    """A /proc of this process's own PID namespace, over the one that is there."""
    flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _check(_libc.mount(b"proc", b"/proc", b"proc", flags, None), "mount /proc")


def signal_when_parent_dies(number: signal.Signals) -> None:
    """Get this signal when the thread that started this process ends. The caller checks whether that has happened already."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Processes below this one whose parent ends become its children."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
