"""Faults, repairs and movement, applied to a simulated world: what each event of a schedule does, and what ends it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

from nearcast.errors import ConfigError
from nearcast.network.conditions import Conditions
from nearcast.scenario.changes import Changes
from nearcast.scenario.events import (
    ChangeAccess,
    ChangeLink,
    Crash,
    Cut,
    Event,
    FailDisk,
    Heal,
    Kill,
    Move,
    Pause,
    Restart,
    Resume,
    SkewClock,
    Start,
    Stop,
)
from nearcast.simulation.disks import DEFAULT_SYNC_S

if TYPE_CHECKING:
    from nearcast.simulation.hosts import Host
    from nearcast.simulation.world import World


class Faults:
    """What is broken in a world right now, and how to mend it.

    An event that ends by itself (``for_s``) gives back what it took unless a later event has changed the same thing since:
    then the later one decides.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._cuts: dict[int, tuple[frozenset[int], frozenset[int], bool, str]] = {}
        self._changes = Changes()

    def apply(self, event: Event) -> None:
        self._trace(describe(event))
        match event:
            case Kill() | Crash():
                self._end(event)
            case Restart(host=name):
                self._host(name).boot()
            case Pause(host=name, for_s=for_s):
                host = self._host(name)
                host.pause()
                self._later(("pause", host.index), for_s, host.resume, f"{name} goes on")
            case Resume(host=name):
                self._changes.claim(("pause", self._host(name).index))
                self._host(name).resume()
            case Cut():
                self._cut(event)
            case Heal():
                self._cuts.clear()
                self._world.network.heal_all()
            case ChangeLink():
                self._change_link(event)
            case ChangeAccess():
                self._change_access(event)
            case Move(host=name, site=site):
                self._world.network.move(self._host(name).index, self._site(site))
            case SkewClock(host=name, offset_s=offset_s, rate=rate):
                self._host(name).skew(offset_s, rate)
            case FailDisk():
                self._fail_disk(event)
            case Start() | Stop():
                pass  # of programs, and none run here

    @property
    def is_cut(self) -> bool:
        """Whether any cut is not healed."""
        return bool(self._cuts)

    def why_unreachable(self, source: Host, target: Host) -> str:
        """Which cut stops packets from one host to another, in words."""
        for sources, targets, one_way, text in self._cuts.values():
            if source.index in sources and target.index in targets:
                return text
            if not one_way and source.index in targets and target.index in sources:
                return text
        return "no path leads there"

    # --- one kind each ---

    def _end(self, event: Kill | Crash) -> None:
        host = self._host(event.host)
        if isinstance(event, Kill):
            host.kill()
        else:
            lost = host.crash()
            if lost:
                self._trace(f"the disk of {host.name} lost {lost} bytes that were not flushed")
        self._changes.claim(("pause", host.index))
        self._later(("restart", host.index), event.restart_after_s, host.boot, f"{host.name} starts again")

    def _cut(self, event: Cut) -> None:
        world = self._world
        sources = self._endpoints(event.source)
        targets = self._endpoints(event.target) if event.target else frozenset(range(len(world.hosts))) - sources
        handle = world.network.cut(sorted(sources), sorted(targets), event.one_way)
        self._cuts[handle] = (sources, targets, event.one_way, f"{describe(event)} at {world.now:.6f} s")

        def heal() -> None:
            if self._cuts.pop(handle, None) is not None:
                world.network.heal(handle)
                self._trace(f"heals: {describe(event)}")

        if event.for_s is not None:
            world.at(world.now + event.for_s, heal)

    def _change_link(self, event: ChangeLink) -> None:
        a, b = (self._site(name) for name in event.between)
        pairs = [(a, b)] if event.one_way else [(a, b), (b, a)]
        network = self._world.network
        for pair in pairs:
            link = ("link", pair)
            self._changes.note(link, network.link_conditions(*pair), event.conditions, lasting=event.for_s is None)
            network.connect(*pair, event.conditions, one_way=True)

            def restore(pair: tuple[int, int] = pair) -> None:
                before: Conditions | None = self._changes.usual(("link", pair))
                if before is None:
                    network.disconnect(*pair, one_way=True)
                else:
                    network.connect(*pair, before, one_way=True)

            self._later(link, event.for_s, restore, f"the link {' - '.join(event.between)} is as before")

    def _change_access(self, event: ChangeAccess) -> None:
        host = self._host(event.host)
        network = self._world.network
        access = ("access", host.index)
        self._changes.note(access, network.access_conditions(host.index), event.conditions, lasting=event.for_s is None)
        network.set_access(host.index, event.conditions)

        def restore() -> None:
            network.set_access(host.index, self._changes.usual(access))

        self._later(access, event.for_s, restore, f"the access link of {host.name} is as before")

    def _fail_disk(self, event: FailDisk) -> None:
        host = self._host(event.host)
        disk = host.disk
        before = (disk.full, disk.sync_s)
        disk.full = event.full
        disk.sync_s = DEFAULT_SYNC_S if event.sync_s is None else event.sync_s
        subject = ("disk", host.index)
        self._changes.note(subject, before, (disk.full, disk.sync_s), lasting=event.for_s is None)

        def restore() -> None:
            disk.full, disk.sync_s = self._changes.usual(subject)

        self._later(subject, event.for_s, restore, f"the disk of {event.host} is well again")

    # --- tools ---

    def _later(self, what: Hashable, after_s: float | None, action: Callable[[], None], text: str) -> None:
        """Undo a change after a while, unless another one has taken its place by then."""
        change = self._changes.claim(what)
        if after_s is None:
            return

        def undo() -> None:
            if self._changes.is_last(what, change):
                self._trace(text)
                action()

        self._world.at(self._world.now + after_s, undo)

    def _trace(self, text: str) -> None:
        if self._world.tracer is not None:
            self._world.tracer.fault(text)

    def _host(self, name: str) -> Host:
        if not self._world.has_host(name):
            raise ConfigError(f"an event names the host {name}, which the protocol did not add")
        return self._world.host(name)

    def _site(self, name: str) -> int:
        return self._world.site_number(name)

    def _endpoints(self, names: Iterable[str]) -> frozenset[int]:
        """Indices of hosts: those named, and those at sites named."""
        world = self._world
        found: set[int] = set()
        for name in names:
            if world.has_host(name):
                found.add(world.host(name).index)
            else:
                site = self._site(name)
                found.update(host.index for host in world.hosts if world.network.site_of(host.index) == site)
        return frozenset(found)


def describe(event: Event) -> str:
    """An event in words."""
    match event:
        case Kill(host=host):
            return f"kill {host}"
        case Crash(host=host):
            return f"power cut at {host}"
        case Restart(host=host):
            return f"restart {host}"
        case Start(process=process):
            return f"start {process}"
        case Stop(process=process):
            return f"stop {process}"
        case Pause(host=host):
            return f"pause {host}"
        case Resume(host=host):
            return f"resume {host}"
        case Cut(source=source, target=target, one_way=one_way):
            return f"cut {' '.join(source)} {'->' if one_way else '|'} {' '.join(target) or 'everything else'}"
        case Heal():
            return "heal all cuts"
        case ChangeLink(between=(a, b), conditions=conditions, one_way=one_way):
            return f"link {a} {'->' if one_way else '-'} {b}: {conditions.described()}"
        case ChangeAccess(host=host, conditions=conditions):
            return f"access of {host}: {conditions.described()}"
        case Move(host=host, site=site):
            return f"move {host} to {site}"
        case SkewClock(host=host, offset_s=offset_s, rate=rate):
            return f"clock of {host} jumps by {offset_s:+.3f} s and runs at {rate:g}"
        case FailDisk(host=host, full=full, sync_s=sync_s):
            slow = "" if sync_s is None else f" flushes take {sync_s:g} s"
            return f"disk of {host}:{' full' if full else ''}{slow}"
