"""What happens to a deployment while it runs: faults, repairs and movement, as data. One vocabulary for both runtimes.

Names are of hosts unless said otherwise. ``at_s`` is seconds after the start. ``for_s``, where an event has it, undoes the
event after so many seconds; without it the effect stays until a ``heal``, ``restart`` or ``resume``.
"""

from __future__ import annotations

from typing import Union

import msgspec

from nearcast.network.conditions import Conditions


class _Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    at_s: float


class Kill(_Event, tag="kill", frozen=True, kw_only=True):
    """The processes of a host die at once (SIGKILL); the machine, its connections' kernel side and its disk cache live on."""

    host: str
    restart_after_s: float | None = None


class Crash(_Event, tag="crash", frozen=True, kw_only=True):
    """The machine loses power: no goodbye on any connection, and writes that were not flushed may be lost or torn. (The
    emulated WAN kills the processes and cuts the host off; disk loss it cannot show.)"""

    host: str
    restart_after_s: float | None = None


class Restart(_Event, tag="restart", frozen=True, kw_only=True):
    """Start again what was killed or crashed."""

    host: str


class Pause(_Event, tag="pause", frozen=True, kw_only=True):
    """The host's processes stand still (SIGSTOP): a long garbage collection, a suspended virtual machine."""

    host: str
    for_s: float | None = None


class Resume(_Event, tag="resume", frozen=True, kw_only=True):
    host: str


class Cut(_Event, tag="cut", frozen=True, kw_only=True):
    """Nothing passes from ``source`` to ``target``, nor back unless ``one_way``. Each is a list of hosts or sites; ``target``
    empty means everything else."""

    source: tuple[str, ...]
    target: tuple[str, ...] = ()
    one_way: bool = False
    for_s: float | None = None


class Heal(_Event, tag="heal", frozen=True, kw_only=True):
    """Undo every cut."""


class ChangeLink(_Event, tag="link", frozen=True, kw_only=True):
    """Give the link between two sites other conditions; with ``for_s`` the old ones come back."""

    between: tuple[str, str]
    conditions: Conditions
    one_way: bool = False
    for_s: float | None = None


class ChangeAccess(_Event, tag="access", frozen=True, kw_only=True):
    """Give a host's access link other conditions."""

    host: str
    conditions: Conditions
    for_s: float | None = None


class Move(_Event, tag="move", frozen=True, kw_only=True):
    """A host is at another site from now on: handover of a mobile client."""

    host: str
    site: str


class SkewClock(_Event, tag="skew", frozen=True, kw_only=True):
    """A host's clock jumps by ``offset_s`` and runs ``rate`` times as fast. Simulator only."""

    host: str
    offset_s: float = 0.0
    rate: float = 1.0


class FailDisk(_Event, tag="disk", frozen=True, kw_only=True):
    """Writes fail (``full``), or a flush takes ``sync_s`` seconds. Simulator only."""

    host: str
    full: bool = False
    sync_s: float | None = None
    for_s: float | None = None


Event = Union[Kill, Crash, Restart, Pause, Resume, Cut, Heal, ChangeLink, ChangeAccess, Move, SkewClock, FailDisk]


class RandomFaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults drawn from the seed: how many of each kind, on average, per simulated minute over all hosts.

    Every random fault ends: crashes restart, cuts heal, pauses resume, and all of it by ``quiet_s`` before the end, so that
    what must hold eventually can be checked at the end.
    """

    hosts: tuple[str, ...] = ()
    """Hosts that may be hit; empty is all. A name with a trailing ``*`` stands for all that begin like it."""

    kills_per_minute: float = 0.0
    crashes_per_minute: float = 0.0
    pauses_per_minute: float = 0.0
    cuts_per_minute: float = 0.0
    """Half of them one-way; half between one host and all others, half between two random halves of the hosts."""

    slow_links_per_minute: float = 0.0
    """A host's access link gets 10 to 100 times its latency (at least 50 ms) and 1 to 20 % loss."""

    skews_per_minute: float = 0.0
    max_fault_s: float = 10.0
    """Longest duration of one fault; durations are drawn between a hundredth of it and all of it, evenly on a log scale."""

    max_skew_s: float = 1.0
    quiet_s: float = 10.0
