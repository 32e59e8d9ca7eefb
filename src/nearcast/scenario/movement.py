"""How hosts move between sites, as data. :mod:`nearcast.scenario.mobility` makes ``move`` events of it."""

from __future__ import annotations

from typing import Union

import msgspec

from nearcast.scenario.rules import require, require_range, require_seconds


class _Mobility(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    sites: tuple[str, ...] = ()
    """Sites a host can be at; empty is all that say where they are. Each needs a city or coordinates, except for a trace that
    names sites itself."""

    hysteresis: float = 0.1
    """A host changes to another site once that one is nearer than its own by this share of the distance, 0 to 0.9. 0 lets a
    host on a border flap."""

    def __post_init__(self) -> None:
        require_range(self.hysteresis, 0, 0.9, "hysteresis")


class Waypoints(_Mobility, tag="waypoints", frozen=True, kw_only=True):
    """Random waypoint: each host goes from where its site is in a straight line to a random point in the area of the sites,
    pauses, and goes on to the next."""

    hosts: tuple[str, ...]
    """Who moves. A name with a trailing ``*`` stands for all that begin like it."""

    min_speed_mps: float = 5.0
    """Slowest speed in metres per second; a speed is drawn for each way. Near 0 hosts end up standing still for ever."""

    max_speed_mps: float = 15.0
    """Fastest speed in metres per second."""

    max_pause_s: float = 0.0
    """Longest pause at a point, in seconds."""

    margin: float = 0.1
    """How far the area reaches beyond the outermost sites, as a share of its width and height."""

    step_s: float = 1.0
    """How often a host looks for a nearer site, in seconds. Shorter is more exact and takes longer to compute."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.hosts) > 0, "hosts", "must name at least one")
        require_range(self.min_speed_mps, 0.01, 100_000, "min_speed_mps")
        require_range(self.max_speed_mps, 0.01, 100_000, "max_speed_mps")
        require(self.max_speed_mps >= self.min_speed_mps, "max_speed_mps", "must not be below `min_speed_mps`")
        require_seconds(self.max_pause_s, "max_pause_s")
        require_range(self.margin, 0, 10, "margin")
        require_range(self.step_s, 0.01, 3_600, "step_s")


class Trace(_Mobility, tag="trace", frozen=True, kw_only=True):
    """Movement from a CSV file with the header ``time_s,host,site`` or ``time_s,host,latitude,longitude``."""

    file: str
    """The file. Relative to the one that names it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.file != "", "file", "must not be empty")


Mobility = Union[Waypoints, Trace]
