"""A topology while it runs: where hosts are, what links are like, what is cut and crashed; and what events do to all that.

Turns names into numbers, keeps a copy of the network model to answer what latency is expected now, and remembers what has to
be undone later. The underlay changes the real network; the supervisor starts and ends processes.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from nearcast.emulation.control import MAX_MATRIX_ENTRIES, HostStatus, Matrix
from nearcast.emulation.supervision import Note, Supervisor
from nearcast.emulation.underlay import Underlay
from nearcast.errors import EmulationError, NearcastError
from nearcast.network.conditions import Conditions, JitterKind
from nearcast.scenario.assembly import build_network
from nearcast.scenario.changes import Changes
from nearcast.scenario.checks import event_problems
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
from nearcast.scenario.rules import unknown
from nearcast.scenario.topology import Topology


@dataclass
class _Cut:
    """A cut that holds."""

    text: str
    handle: int
    """The underlay's."""
    copy: int
    """The model's."""


def check_events(events: tuple[Event, ...], topology: Topology) -> None:
    """Raise :class:`EmulationError` for the first event that cannot happen on an emulated WAN of this topology."""
    for position, event in enumerate(events):
        try:
            check_event(event, topology)
        except EmulationError as error:
            raise EmulationError(f"event {position + 1} ({_kind(event)} at {event.at_s:g} s): {error}") from error


def check_event(event: Event, topology: Topology) -> None:
    """Raise :class:`EmulationError` if an event cannot happen on an emulated WAN of this topology."""
    for problem in event_problems(event, topology):
        raise EmulationError(problem.message.partition("`: ")[2] or problem.message)
    if isinstance(event, SkewClock | FailDisk):
        raise EmulationError(f"{_kind(event)} exists in the simulator only: leave it out")


class Deployment:
    """The running topology."""

    def __init__(self, topology: Topology, underlay: Underlay, note: Note) -> None:
        self.topology = topology
        self._underlay = underlay
        self._note = note
        self._model, names = build_network(topology, random.Random(0))
        self.hosts: dict[str, int] = {name: number for number, name in enumerate(names)}
        self._names = names
        self._sites = [site.name for site in topology.sites]
        self._site_numbers = {name: number for number, name in enumerate(self._sites)}
        self._cuts: list[_Cut] = []
        self._crashed: dict[int, _Cut] = {}
        self._changes = Changes()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()
        """Held while the network is changed: changes happen in the order they were asked for, in the underlay and in the
        model alike."""
        self.pending = 0
        """Events of the schedule that have not happened yet."""

    def close(self) -> None:
        """Nothing of the schedule happens any more."""
        for task in self._tasks:
            task.cancel()

    # -- questions ---------------------------------------------------------------------------------------------------------

    def host(self, name: str) -> int:
        number = self.hosts.get(name)
        if number is None:
            raise EmulationError(unknown("host", name, self._names))
        return number

    def host_statuses(self) -> tuple[HostStatus, ...]:
        return tuple(
            HostStatus(
                name=name,
                site=self._sites[self._model.site_of(number)],
                address=self._underlay.address(number, number),
                up=number not in self._crashed,
                access=self._model.access_conditions(number),
            )
            for name, number in self.hosts.items()
        )

    def is_crashed(self, host: str) -> bool:
        return self.host(host) in self._crashed

    def cuts(self) -> tuple[str, ...]:
        return tuple(cut.text for cut in self._cuts)

    async def matrix(self, rows: int | None = None) -> Matrix:
        """Latencies from the first hosts, or all, to all. Others have their turn meanwhile: relays keep their delays here."""
        everyone = range(len(self._names))
        sources = everyone[: max(0, rows)] if rows is not None else everyone
        if len(sources) * len(everyone) > MAX_MATRIX_ENTRIES:
            raise EmulationError(
                f"a matrix of {len(everyone)} hosts is too large: ask for at most {MAX_MATRIX_ENTRIES // len(everyone)} rows"
            )
        found = []
        for source in sources:
            found.append(tuple(self._one_way_ms(source, target) for target in everyone))
            await asyncio.sleep(0)
        return Matrix(hosts=tuple(self._names), one_way_ms=tuple(found))

    def _one_way_ms(self, source: int, target: int) -> float | None:
        latency_ms = self._model.one_way_ms(source, target)
        return None if math.isinf(latency_ms) else round(latency_ms, 6)

    # -- the schedule ------------------------------------------------------------------------------------------------------

    def schedule(self, events: tuple[Event, ...], supervisor: Supervisor) -> None:
        """Let events happen at their time, counted from now."""
        self.pending = len(events)
        began = asyncio.get_running_loop().time()
        self._later(0.0, self._play(sorted(events, key=lambda event: event.at_s), began, supervisor), "the events")

    async def _play(self, events: list[Event], began: float, supervisor: Supervisor) -> None:
        """Start each event at its time; none waits for one before it, which may wait for a process to be ready."""
        clock = asyncio.get_running_loop().time
        for event in events:
            await asyncio.sleep(max(0.0, began + event.at_s - clock()))
            self.pending -= 1
            self._later(0.0, self.apply(event, supervisor), f"event {_kind(event)} at {event.at_s:g} s")

    def _later(self, delay_s: float, action: Coroutine[Any, Any, None], what: str) -> None:
        """Do something after a while; what goes wrong is noted, the rest goes on."""

        async def wait_and_do() -> None:
            try:
                await asyncio.sleep(delay_s)
                await action
            except NearcastError as error:
                self._note("problem", "", f"{what}: {error}")
            finally:
                action.close()

        task = asyncio.create_task(wait_and_do(), name=what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- events ------------------------------------------------------------------------------------------------------------

    async def apply(self, event: Event, supervisor: Supervisor) -> None:
        """Let an event happen now."""
        check_event(event, self.topology)
        match event:
            case Cut():
                await self._cut(event)
            case Heal():
                await self.heal()
            case ChangeLink():
                await self.change_link(event.between, event.conditions, event.one_way, event.for_s)
            case ChangeAccess():
                await self.change_access(event.host, event.conditions, event.for_s)
            case Move():
                await self.move(event.host, event.site)
            case Kill():
                await self._kill(event, supervisor)
            case Crash():
                await self._crash(event, supervisor)
            case Restart():
                await self.restart_host(event.host, supervisor)
            case Start():
                await supervisor.start(supervisor.processes[event.process])
            case Stop():
                await supervisor.stop(supervisor.processes[event.process])
            case Pause():
                self._pause(event, supervisor)
            case Resume():
                self._resume(event.host, supervisor)

    async def move(self, host: str, site: str) -> None:
        number, target = self.host(host), self._site(site)
        async with self._changing:
            await self._underlay.move(number, target)
            self._model.move(number, target)
        self._note("event", host, f"{host} moved to {site}")

    async def _cut(self, event: Cut) -> None:
        arrow = "→" if event.one_way else "↔"
        text = f"{', '.join(event.source)} {arrow} {', '.join(event.target) or 'everything else'}"
        async with self._changing:
            sources = self._members(event.source)
            if event.target:
                targets = self._members(event.target)
            else:
                targets = [number for number in range(len(self._names)) if number not in set(sources)]
            cut = await self._make_cut(sources, targets, event.one_way, text)
            self._cuts.append(cut)
        self._note("event", event.source[0], f"cut {text}")
        if event.for_s is not None:
            self._later(event.for_s, self._mend(cut), f"healing {text}")

    async def _make_cut(self, sources: list[int], targets: list[int], one_way: bool, text: str) -> _Cut:
        handle = await self._underlay.cut(sources, targets, one_way)
        return _Cut(text, handle, self._model.cut(sources, targets, one_way))

    async def _unmake_cut(self, cut: _Cut) -> None:
        async with self._changing:
            await self._underlay.heal(cut.handle)
            self._model.heal(cut.copy)

    async def _mend(self, cut: _Cut) -> None:
        if cut in self._cuts:
            self._cuts.remove(cut)
            await self._unmake_cut(cut)
            self._note("undone", "", f"healed {cut.text}")

    async def heal(self) -> None:
        """Undo every cut; crashed hosts stay crashed."""
        cuts, self._cuts = self._cuts, []
        for cut in cuts:
            await self._unmake_cut(cut)
        self._note("event", "", f"healed {len(cuts)} cuts" if len(cuts) != 1 else f"healed {cuts[0].text}")

    # -- links -------------------------------------------------------------------------------------------------------------

    def adjusted_link(self, between: tuple[str, str], changes: Mapping[str, float | str]) -> Conditions:
        """The conditions of the link between two sites with some changed. Where there is no link, of the path as it is."""
        a, b = self._site(between[0]), self._site(between[1])
        if a == b:
            raise EmulationError("a link joins two different sites")
        now = self._model.link_conditions(a, b)
        if now is None:
            latency_ms = self._model.between_sites_ms(a, b)
            now = Conditions(latency_ms=0.0 if math.isinf(latency_ms) else round(latency_ms, 6))
        return _changed(now, changes)

    def adjusted_access(self, host: str, changes: Mapping[str, float | str]) -> Conditions:
        return _changed(self._model.access_conditions(self.host(host)), changes)

    async def change_link(self, between: tuple[str, str], conditions: Conditions, one_way: bool, for_s: float | None) -> None:
        a, b = self._site(between[0]), self._site(between[1])
        directions = [(a, b)] if one_way else [(a, b), (b, a)]
        async with self._changing:
            for direction in directions:
                self._changes.note(direction, self._model.link_conditions(*direction), conditions, lasting=for_s is None)
            await self._underlay.connect(a, b, conditions, one_way)
            self._model.connect(a, b, conditions, one_way)
            change = self._changes.claim(*directions)
        text = f"{between[0]} {'→' if one_way else '↔'} {between[1]}"
        self._note("event", between[0], f"link {text}: {conditions.described()}")
        if for_s is not None:

            async def restore() -> None:
                async with self._changing:
                    mine = [direction for direction in directions if self._changes.is_last(direction, change)]
                    for direction in mine:
                        await self._restore_link(direction, self._changes.usual(direction))
                if mine:
                    self._note("undone", between[0], f"link {text} is as before")

            self._later(for_s, restore(), f"restoring link {text}")

    async def _restore_link(self, direction: tuple[int, int], old: Conditions | None) -> None:
        source, target = direction
        if old is None:
            await self._underlay.disconnect(source, target, True)
            self._model.disconnect(source, target, True)
        else:
            await self._underlay.connect(source, target, old, True)
            self._model.connect(source, target, old, True)

    async def change_access(self, host: str, conditions: Conditions, for_s: float | None) -> None:
        number = self.host(host)
        async with self._changing:
            self._changes.note(number, self._model.access_conditions(number), conditions, lasting=for_s is None)
            await self._set_access(number, conditions)
            change = self._changes.claim(number)
        self._note("event", host, f"access of {host}: {conditions.described()}")
        if for_s is not None:

            async def restore() -> None:
                async with self._changing:
                    if not self._changes.is_last(number, change):
                        return
                    await self._set_access(number, self._changes.usual(number))
                self._note("undone", host, f"access of {host} is as before")

            self._later(for_s, restore(), f"restoring access of {host}")

    async def _set_access(self, host: int, conditions: Conditions) -> None:
        await self._underlay.set_access(host, conditions)
        self._model.set_access(host, conditions)

    # -- processes of a host -----------------------------------------------------------------------------------------------

    async def _kill(self, event: Kill, supervisor: Supervisor) -> None:
        number = self.host(event.host)
        self._note("event", event.host, f"the processes of {event.host} are killed")
        await self._kill_processes(number, supervisor)
        if event.restart_after_s is not None:
            self._later(event.restart_after_s, self.restart_host(event.host, supervisor), f"restarting {event.host}")

    async def _crash(self, event: Crash, supervisor: Supervisor) -> None:
        number = self.host(event.host)
        async with self._changing:
            if number not in self._crashed:
                others = [other for other in range(len(self._names)) if other != number]
                # Off the network first: a machine without power says no goodbye.
                self._crashed[number] = await self._make_cut([number], others, False, event.host)
        self._note("event", event.host, f"{event.host} crashed")
        await self._kill_processes(number, supervisor)
        if event.restart_after_s is not None:
            self._later(event.restart_after_s, self.restart_host(event.host, supervisor), f"restarting {event.host}")

    async def _kill_processes(self, host: int, supervisor: Supervisor) -> None:
        await asyncio.gather(*(supervisor.kill(process) for process in supervisor.on_host(host)))

    async def restart_host(self, host: str, supervisor: Supervisor) -> None:
        """A crashed host is back, and every process of it that does not run is started, but for those still to be told to."""
        await self.revive(host)
        for process in supervisor.on_host(self.host(host)):
            if process.starts or not process.process.manual:
                await supervisor.start(process)

    async def revive(self, host: str) -> None:
        """A crashed host is back on the network; its processes are not started."""
        crashed = self._crashed.pop(self.host(host), None)
        if crashed is not None:
            await self._unmake_cut(crashed)
        self._note("event", host, f"{host} starts again")

    def _pause(self, event: Pause, supervisor: Supervisor) -> None:
        paused = [process for process in supervisor.on_host(self.host(event.host)) if process.state == "running"]
        for process in paused:
            supervisor.pause(process)
        self._note("event", event.host, f"{event.host} stands still ({len(paused)} processes)")
        if event.for_s is not None:

            async def resume() -> None:
                for process in paused:
                    if process.state == "paused":
                        supervisor.resume(process)
                self._note("undone", event.host, f"{event.host} goes on")

            self._later(event.for_s, resume(), f"resuming {event.host}")

    def _resume(self, host: str, supervisor: Supervisor) -> None:
        for process in supervisor.on_host(self.host(host)):
            if process.state == "paused":
                supervisor.resume(process)
        self._note("event", host, f"{host} goes on")

    # -- names -------------------------------------------------------------------------------------------------------------

    def _site(self, name: str) -> int:
        number = self._site_numbers.get(name)
        if number is None:
            raise EmulationError(unknown("site", name, self._sites))
        return number

    def _members(self, names: tuple[str, ...]) -> list[int]:
        """The hosts that names of hosts and sites stand for now."""
        found: set[int] = set()
        for name in names:
            if name in self.hosts:
                found.add(self.hosts[name])
            else:
                site = self._site(name)
                found.update(number for number in range(len(self._names)) if self._model.site_of(number) == site)
        return sorted(found)


def _changed(conditions: Conditions, changes: Mapping[str, float | str]) -> Conditions:
    known = Conditions.__struct_fields__
    for field in changes:
        if field not in known:
            raise EmulationError(unknown("condition", field, known))
    plain = {field: getattr(conditions, field) for field in known}
    try:
        return msgspec.convert(plain | dict(changes), Conditions)
    except msgspec.ValidationError as error:
        if "enum" in str(error):
            raise EmulationError(f"`jitter` must be one of {', '.join(get_args(JitterKind))}") from error
        raise EmulationError(str(error).partition(" - at")[0]) from error


def _kind(event: Event) -> str:
    return str(type(event).__struct_config__.tag)
