"""What happens to a deployment while it runs: faults, repairs and movement, as data. One vocabulary for both runtimes.

Names are of hosts unless said otherwise. ``at_s`` is seconds after the start. ``for_s``, where an event has it, undoes the
event after so many seconds; without it the effect stays until a ``heal``, ``restart`` or ``resume``.
"""

from __future__ import annotations

from typing import Union

import msgspec

from nearcast.network.conditions import Conditions
from nearcast.scenario.rules import require, require_range, require_seconds


class _Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    at_s: float
    """When, in seconds after the start."""

    def __post_init__(self) -> None:
        require_seconds(self.at_s, "at_s")
        require_seconds(getattr(self, "for_s", None), "for_s", zero=False)
        require_seconds(getattr(self, "restart_after_s", None), "restart_after_s")


class Kill(_Event, tag="kill", frozen=True, kw_only=True):
    """The processes of a host die at once (SIGKILL); the machine, its connections' kernel side and its disk cache live on."""

    host: str
    """The host that is hit."""

    restart_after_s: float | None = None
    """They start again after so many seconds; unset, when a ``restart`` says so."""


class Crash(_Event, tag="crash", frozen=True, kw_only=True):
    """The machine loses power: no goodbye on any connection, and writes that were not flushed may be lost or torn. (The
    emulated WAN kills the processes and cuts the host off; disk loss it cannot show.)"""

    host: str
    """The host that is hit."""

    restart_after_s: float | None = None
    """It starts again after so many seconds; unset, when a ``restart`` says so."""


class Restart(_Event, tag="restart", frozen=True, kw_only=True):
    """Start again what was killed or crashed."""

    host: str
    """The host."""


class Start(_Event, tag="start", frozen=True, kw_only=True):
    """Start a process of the topology that does not run. Emulated WAN only: the simulator runs no programs."""

    process: str
    """The process; with a host in the scenario's wildcards, ``name-host``."""


class Stop(_Event, tag="stop", frozen=True, kw_only=True):
    """Ask a process of the topology to end, as a maintainer would. Emulated WAN only: the simulator runs no programs."""

    process: str
    """The process; it is killed if it does not end in its ``stop_timeout_s``."""


class Pause(_Event, tag="pause", frozen=True, kw_only=True):
    """The host's processes stand still (SIGSTOP): a long garbage collection, a suspended virtual machine."""

    host: str
    """The host that is hit."""

    for_s: float | None = None
    """For so many seconds; unset, until a ``resume``."""


class Resume(_Event, tag="resume", frozen=True, kw_only=True):
    """The paused processes of a host go on."""

    host: str
    """The host."""


class Cut(_Event, tag="cut", frozen=True, kw_only=True):
    """Nothing passes from ``source`` to ``target``, nor back unless ``one_way``."""

    source: tuple[str, ...]
    """Hosts or sites; a site stands for the hosts that are there at that moment."""

    target: tuple[str, ...] = ()
    """Hosts or sites; empty means everything else."""

    one_way: bool = False
    """Packets from ``target`` to ``source`` still pass."""

    for_s: float | None = None
    """For so many seconds; unset, until a ``heal``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.source) > 0, "source", "must name at least one host or site")


class Heal(_Event, tag="heal", frozen=True, kw_only=True):
    """Undo every cut."""


class ChangeLink(_Event, tag="link", frozen=True, kw_only=True):
    """Give the link between two sites other conditions; with ``for_s`` the old ones come back."""

    between: tuple[str, str]
    """The two sites. If no link joins them, there is one from now on."""

    conditions: Conditions
    """All of the new conditions: what is not said is 0, not as before."""

    one_way: bool = False
    """Only from the first to the second."""

    for_s: float | None = None
    """For so many seconds; unset, for good."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.between[0] != self.between[1], "between", "must be two sites")


class ChangeAccess(_Event, tag="access", frozen=True, kw_only=True):
    """Give a host's access link other conditions."""

    host: str
    """The host."""

    conditions: Conditions
    """All of the new conditions: what is not said is 0, not as before."""

    for_s: float | None = None
    """For so many seconds; unset, for good."""


class Move(_Event, tag="move", frozen=True, kw_only=True):
    """A host is at another site from now on: handover of a mobile client."""

    host: str
    """The host that moves; its processes, connections and access link move with it."""

    site: str
    """Where to."""


class SkewClock(_Event, tag="skew", frozen=True, kw_only=True):
    """A host's clock jumps by ``offset_s`` and runs ``rate`` times as fast. Simulator only."""

    host: str
    """The host."""

    offset_s: float = 0.0
    """How far it jumps, in seconds; negative is back."""

    rate: float = 1.0
    """How fast it runs from now on (0.01 to 100)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range(self.offset_s, -1_000_000_000, 1_000_000_000, "offset_s")
        require_range(self.rate, 0.01, 100, "rate")


class FailDisk(_Event, tag="disk", frozen=True, kw_only=True):
    """Writes fail (``full``), or a flush takes ``sync_s`` seconds. Simulator only."""

    host: str
    """The host."""

    full: bool = False
    """Every write fails as on a full disk."""

    sync_s: float | None = None
    """How long a flush takes, in seconds; unset, as long as before."""

    for_s: float | None = None
    """For so many seconds; unset, for good."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_seconds(self.sync_s, "sync_s")


Event = Union[Kill, Crash, Restart, Start, Stop, Pause, Resume, Cut, Heal, ChangeLink, ChangeAccess, Move, SkewClock, FailDisk]


class RandomFaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults drawn from the seed: how many of each kind, on average, per simulated minute over all hosts.

    Every random fault ends: crashes restart, cuts heal, pauses resume, and all of it by ``quiet_s`` before the end, so that
    what must hold eventually can be checked at the end.
    """

    hosts: tuple[str, ...] = ()
    """Hosts that may be hit; empty is all. A name with a trailing ``*`` stands for all that begin like it."""

    kills_per_minute: float = 0.0
    """Processes that die and start again."""

    crashes_per_minute: float = 0.0
    """Machines that lose power and start again."""

    pauses_per_minute: float = 0.0
    """Processes that stand still for a while."""

    cuts_per_minute: float = 0.0
    """Half of them one-way; half between one host and all others, half between two random halves of the hosts."""

    slow_links_per_minute: float = 0.0
    """A host's access link gets 10 to 100 times its latency (at least 50 ms) and 1 to 20 % loss."""

    skews_per_minute: float = 0.0
    """Clocks that jump by up to ``max_skew_s`` either way and run up to 1 % too fast or too slow, and are set right again."""

    max_fault_s: float = 10.0
    """Longest duration of one fault; durations are drawn between a hundredth of it and all of it, evenly on a log scale."""

    max_skew_s: float = 1.0
    """Largest jump of a clock, in seconds."""

    quiet_s: float = 10.0
    """How long before the scenario's ``duration_s`` the last fault is over, in seconds."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            if field.endswith("_per_minute"):
                require_range(getattr(self, field), 0, 100_000, field)
        require_seconds(self.max_fault_s, "max_fault_s", zero=False)
        require_seconds(self.max_skew_s, "max_skew_s")
        require_seconds(self.quiet_s, "quiet_s")
