"""Where things are: sites, the links between them, hosts at sites, and processes on hosts."""

from __future__ import annotations

from typing import Literal

import msgspec

from nearcast.network.conditions import Conditions, JitterKind
from nearcast.scenario.placeholders import placeholders
from nearcast.scenario.rules import require, require_name, require_range, require_seconds

Tier = Literal["cloud", "region", "edge", "device"]
Shape = Literal["star", "line", "ring", "euclidean", "cities", "internet"]

MAX_HOSTS = 100_000
"""Hosts of one topology. The emulated WAN has its own, lower bound."""


class Site(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place that hosts are at: a data centre, a cell tower, a campus."""

    name: str
    """Unique over sites and hosts; letters, digits, ``-`` and ``_``."""

    tier: Tier = "edge"
    """What kind of place it is. Placement prefers near tiers; the network does not care."""

    city: str | None = None
    """A city to take the coordinates from: ``"Vienna"``, or ``"Portland, US"`` where the name alone means a bigger one
    elsewhere, or ``"Portland, US, ME"`` with the region's code. The most populous one wins. Needs the ``lab`` extra."""

    latitude: float | None = None
    """Degrees north; with ``longitude``, instead of ``city``."""

    longitude: float | None = None
    """Degrees east."""

    local: Conditions = Conditions()
    """Between two hosts at this site, beside their access links."""

    def __post_init__(self) -> None:
        require_name(self.name)
        placed = self.latitude is not None or self.longitude is not None
        require(self.city is None or not placed, "city", "and coordinates say the same thing twice: keep one of them")
        if placed:
            require(self.latitude is not None, "latitude", "is missing beside `longitude`")
            require(self.longitude is not None, "longitude", "is missing beside `latitude`")
            require_range(self.latitude or 0.0, -90, 90, "latitude")
            require_range(self.longitude or 0.0, -180, 180, "longitude")

    @property
    def located(self) -> bool:
        """Whether the site says where it is."""
        return self.city is not None or self.latitude is not None


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One-way latency between sites that no ``[[links]]`` lead between, from where they are."""

    kind: Literal["fibre", "linear", "matrix", "generated"] = "fibre"
    """``fibre``: great-circle distance at the speed of light in fibre, times ``inflation``, plus ``base_ms``. ``linear``:
    great-circle distance times ``ms_per_km``, plus ``base_ms``. ``matrix``: the round-trip times of ``file``, halved, plus
    ``base_ms``. ``generated``: those of a made-up network of this ``shape``, halved, plus ``base_ms``; where the sites
    say they are means nothing to it."""

    inflation: float = 1.8
    """How much longer the way of a packet is than the great circle; 1 is a straight fibre, Internet paths are 1.5 to 2.5."""

    ms_per_km: float = 0.021048
    """One-way milliseconds per kilometre for ``linear`` (the default is the median of iPlane's 2016 measurements)."""

    base_ms: float = 0.0
    """Added to every pair, in milliseconds: routers, last miles."""

    file: str | None = None
    """For ``matrix``: an ``.npz`` with key ``rtt_ms``, or a ``.csv``; row and column order is the order of the sites, or, with
    a header, their names. Two directions that differ become their mean; an empty cell or ``nan`` is no way. At most 5,000
    sites. Relative to the file that names it."""

    shape: Shape = "internet"
    """For ``generated``, over the sites in their order. ``star``: the first is in the middle. ``line`` and ``ring``: each is
    next to its neighbours. ``euclidean``: points on a square. ``cities``: clusters of unlike size on a square. ``internet``:
    like measured Internet paths, some of which are shorter over a third site."""

    rtt_ms: float = 100.0
    """For ``generated``, the scale, in milliseconds of round trip: a leg of a star, a step of a line or ring, the side of the
    square, the median of an internet."""

    shape_seed: int = 0
    """For ``generated``: another number, another network of the same shape. The seed of a run does not change it."""

    jitter_ms: float = 0.0
    """As in :class:`Conditions`."""

    jitter: JitterKind = "normal"
    """As in :class:`Conditions`."""

    loss: float = 0.0
    """As in :class:`Conditions`."""

    bandwidth_mbps: float = 0.0
    """As in :class:`Conditions`."""

    queue_ms: float = 100.0
    """As in :class:`Conditions`."""

    reorder: float = 0.0
    """As in :class:`Conditions`."""

    duplicate: float = 0.0
    """As in :class:`Conditions`."""

    def __post_init__(self) -> None:
        require_range(self.inflation, 1, 100, "inflation")
        require_range(self.ms_per_km, 0, 1_000, "ms_per_km")
        require_range(self.base_ms, 0, 1_000_000, "base_ms")
        require_range(self.rtt_ms, 0, 1_000_000, "rtt_ms")
        require_range(self.shape_seed, 0, 2**63 - 1, "shape_seed")
        if self.kind == "matrix":
            require(bool(self.file), "file", "is needed by a matrix model")
        else:
            require(self.file is None, "file", f"means nothing to a {self.kind} model")
        self.conditions()

    def conditions(self) -> Conditions:
        """What every pair has beside its latency."""
        return Conditions(
            jitter_ms=self.jitter_ms,
            jitter=self.jitter,
            loss=self.loss,
            bandwidth_mbps=self.bandwidth_mbps,
            queue_ms=self.queue_ms,
            reorder=self.reorder,
            duplicate=self.duplicate,
        )


class SiteLink(Conditions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link between two sites. Traffic takes the path of links with the least latency."""

    between: tuple[str, str]
    """The two sites. With ``one_way``, from the first to the second."""

    one_way: bool = False
    """Only this direction is described; the other is another entry, or none."""

    def __post_init__(self) -> None:
        Conditions.__post_init__(self)
        require(self.between[0] != self.between[1], "between", "must be two sites; within one, its `local` says how it is")

    def conditions(self) -> Conditions:
        """The link without its ends."""
        return Conditions(**{field: getattr(self, field) for field in Conditions.__struct_fields__})


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine: on the emulated WAN a network namespace with an address, in the simulator a node."""

    name: str
    """Unique over sites and hosts; letters, digits, ``-`` and ``_``."""

    site: str
    """Where it is, at first."""

    count: int = 1
    """How many such hosts; more than one are named ``name-1``, ``name-2``, ..."""

    access: Conditions = Conditions()
    """Its own link to the site, each way: the last metre, radio cell or DSL line."""

    ports: tuple[int, ...] = ()
    """TCP ports that others connect to. Only loopback mode needs to be told; the ports of ready checks are added by
    themselves."""

    def __post_init__(self) -> None:
        require_name(self.name)
        require(
            self.name not in ("data", "host"), "name", "must not be `data` or `host`: in commands these mean something else"
        )
        require_range(self.count, 1, MAX_HOSTS, "count")
        for port in self.ports:
            require_range(port, 1, 65_535, "ports")

    def names(self) -> list[str]:
        """The names of the hosts that this entry stands for."""
        return [self.name] if self.count == 1 else [f"{self.name}-{number}" for number in range(1, self.count + 1)]


class ReadyCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a process counts as started. With neither ``port`` nor ``log``, as soon as it runs; with both, when both hold."""

    port: int | None = None
    """It accepts TCP connections on this port."""

    log: str | None = None
    """Its output contains this text."""

    timeout_s: float = 30.0
    """After so many seconds starting it has failed."""

    def __post_init__(self) -> None:
        if self.port is not None:
            require_range(self.port, 1, 65_535, "port")
        require(self.log != "", "log", "must not be empty")
        require_seconds(self.timeout_s, "timeout_s", zero=False)


class Process(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program on a host. In its command and environment ``{name}`` is the address of the host of that name as this one sees
    it, ``{host}`` the address of its own, ``{data}`` a directory of its own that survives restarts; ``{{`` and ``}}`` are
    braces."""

    name: str
    """Unique."""

    host: str
    """Where it runs; the process moves with its host. With a trailing ``*``, all that begin so: then each has such a process,
    called ``name-host``."""

    command: tuple[str, ...]
    """Program and arguments."""

    ready: ReadyCheck = ReadyCheck()
    """Processes start in the order of the file; each waits until the ones before it are ready."""

    manual: bool = False
    """Whether it waits to be told to start (a ``start`` event, or ``nearcast wan start``) instead of starting with the WAN."""

    together: bool = False
    """Whether it starts at the same time as the process before it, instead of when that one is ready."""

    environment: dict[str, str] = {}
    """Added to the environment."""

    stop_signal: Literal["TERM", "INT", "QUIT"] = "TERM"
    """How it is asked to end; after ``stop_timeout_s`` it is killed."""

    stop_timeout_s: float = 10.0
    """Seconds it may take to end before it is killed."""

    def __post_init__(self) -> None:
        require_name(self.name)
        require(len(self.command) > 0 and self.command[0] != "", "command", "must name a program")
        for field, parts in (("command", self.command), ("environment", self.environment.values())):
            for part in parts:
                require("\0" not in part, field, "must not contain a NUL character")
                try:
                    placeholders(part)
                except ValueError as error:
                    raise ValueError(f"`{field}`: {error}") from None
        for name in self.environment:
            require(name != "" and not set(name) & set("=\0"), "environment", "must have names without `=` and NUL")
        require_seconds(self.stop_timeout_s, "stop_timeout_s")


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sites, links, hosts and the processes on them."""

    name: str
    """What it is called in lists and reports; letters, digits, ``-`` and ``_``."""

    description: str = ""
    """What it shows, and what its numbers mean."""

    sites: tuple[Site, ...]
    """The places; at least one."""

    links: tuple[SiteLink, ...] = ()
    """What joins sites. Two sites that links lead between, over others or not, do not use the model."""

    model: LatencyModel | None = None
    """Latency between sites that no links lead between. Without it, links have to lead from every site to every other."""

    hosts: tuple[Host, ...] = ()
    """The machines; names are unique over hosts and sites together."""

    processes: tuple[Process, ...] = ()
    """The programs that the emulated WAN starts. The simulator runs no programs and takes no notice."""

    mtu_bytes: int = 1500
    """Largest IP packet on the emulated WAN, in bytes (576 to 65,535). Larger ones let bulk transfers cost the router less."""

    def __post_init__(self) -> None:
        require_name(self.name)
        require(len(self.sites) > 0, "sites", "must name at least one")
        require_range(self.mtu_bytes, 576, 65_535, "mtu_bytes")

    def host_names(self) -> list[str]:
        """The names of all hosts, counts expanded, in the order of their indexes in a network."""
        return [name for host in self.hosts for name in host.names()]
