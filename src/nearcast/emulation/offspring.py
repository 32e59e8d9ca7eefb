"""Everything that a process started, wherever it went: found by an entry of the environment that all of it inherits.

A process group is left by ``setsid``, parentage is lost when a parent ends; the environment a program was given stays readable
in ``/proc``. Only a program that is started with an environment made anew is not found; it ends with the WAN.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final

MARK: Final = "NEARCAST_WAN_PROCESS"


def signal_offspring(mark: str, number: signal.Signals) -> int:
    """Send a signal to every process with this mark; returns to how many."""
    if os.readlink("/proc/self") != str(os.getpid()):
        return 0  # another PID namespace's /proc, in a container that allows no own: its numbers mean others here
    entry = f"{MARK}={mark}".encode()
    count = 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            # Opened before the look, so that the signal goes to the process that was looked at, or to nobody.
            process = os.pidfd_open(int(name))
        except OSError:
            continue
        try:
            if entry in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                signal.pidfd_send_signal(process, number)
                count += 1
        except OSError:
            continue  # it has ended, or is somebody else's
        finally:
            os.close(process)
    return count
