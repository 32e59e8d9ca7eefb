"""Where things are: sites, the links between them, hosts at sites, and processes on hosts."""

from __future__ import annotations

from typing import Literal

import msgspec

from nearcast.network.conditions import Conditions, JitterKind

Tier = Literal["cloud", "region", "edge", "device"]


class Site(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place that hosts are at: a data centre, a cell tower, a campus."""

    name: str
    """Unique; letters, digits, ``-`` and ``_``."""

    tier: Tier = "edge"
    """What kind of place it is. Placement prefers near tiers; the network does not care."""

    city: str | None = None
    """A city to take the coordinates from: ``"Vienna"``, or ``"Portland, US"`` where the name alone means a bigger one
    elsewhere. Needs the ``lab`` extra."""

    latitude: float | None = None
    """Degrees north; with ``longitude``, instead of ``city``."""

    longitude: float | None = None
    """Degrees east."""

    local: Conditions = Conditions()
    """Between two hosts at this site, beside their access links."""


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One-way latency between sites that no ``[[links]]`` join, from where they are. Fields of :class:`Conditions` other than
    latency apply to every such pair."""

    kind: Literal["fibre", "linear", "matrix"] = "fibre"
    """``fibre``: great-circle distance at the speed of light in fibre, times ``inflation``, plus ``base_ms``. ``linear``:
    great-circle distance times ``ms_per_km``, plus ``base_ms``. ``matrix``: the round-trip times of ``file``, halved."""

    inflation: float = 1.8
    """How much longer the way of a packet is than the great circle; 1 is a straight fibre, Internet paths are 1.5 to 2.5."""

    ms_per_km: float = 0.021048
    """One-way milliseconds per kilometre for ``linear`` (the default is the median of iPlane's 2016 measurements)."""

    base_ms: float = 0.0
    """Added to every pair, in milliseconds: routers, last miles."""

    file: str | None = None
    """For ``matrix``: an ``.npz`` with key ``rtt_ms``, or a ``.csv``; row and column order is the order of the sites, or, with
    a header, their names. Relative to the file that names it."""

    jitter_ms: float = 0.0
    jitter: JitterKind = "normal"
    loss: float = 0.0
    bandwidth_mbps: float = 0.0
    queue_ms: float = 100.0
    reorder: float = 0.0


class SiteLink(Conditions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link between two sites. Traffic takes the path of links with the least latency."""

    between: tuple[str, str]
    """The two sites. With ``one_way``, from the first to the second."""

    one_way: bool = False
    """Only this direction is described; the other is another entry, or none."""


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine: on the emulated WAN a network namespace with an address, in the simulator a node."""

    name: str
    """Unique; letters, digits, ``-`` and ``_``."""

    site: str
    """Where it is, at first."""

    count: int = 1
    """How many such hosts; more than one are named ``name-1``, ``name-2``, ..."""

    access: Conditions = Conditions()
    """Its own link to the site, each way: the last metre, radio cell or DSL line."""

    ports: tuple[int, ...] = ()
    """TCP ports that others connect to. Only loopback mode needs to be told; the ports of ready checks are added by
    themselves."""


class ReadyCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a process counts as started. With neither, as soon as it runs."""

    port: int | None = None
    """It accepts TCP connections on this port."""

    log: str | None = None
    """Its output contains this text."""

    timeout_s: float = 30.0
    """After so many seconds starting it has failed."""


class Process(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program on a host. ``{name}`` in a command is the address of that host as this one sees it; ``{data}`` a directory of
    its own that survives restarts; ``{{`` and ``}}`` are braces."""

    name: str
    """Unique."""

    host: str
    """Where it runs; the process moves with its host."""

    command: tuple[str, ...]
    """Program and arguments."""

    ready: ReadyCheck = ReadyCheck()
    """Processes start in the order of the file; each waits until the ones before it are ready."""

    environment: dict[str, str] = {}
    """Added to the environment."""

    stop_signal: Literal["TERM", "INT", "QUIT"] = "TERM"
    """How it is asked to end; after ``stop_timeout_s`` it is killed."""

    stop_timeout_s: float = 10.0


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sites, links, hosts and the processes on them."""

    name: str
    description: str = ""
    sites: tuple[Site, ...]
    links: tuple[SiteLink, ...] = ()
    model: LatencyModel | None = None
    hosts: tuple[Host, ...] = ()
    processes: tuple[Process, ...] = ()
    mtu_bytes: int = 1500
    """Largest IP packet on the emulated WAN, in bytes (576 to 65,535). Larger ones let bulk transfers cost the router less."""
