"""Events change the underlay and the model alike, and are undone when their time is over and nothing newer came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import pytest

from nearcast.emulation.control import Traffic
from nearcast.emulation.deployment import Deployment, check_events
from nearcast.emulation.supervision import Supervisor
from nearcast.emulation.underlay import Streams
from nearcast.errors import EmulationError
from nearcast.network.conditions import Conditions
from nearcast.scenario.events import ChangeAccess, ChangeLink, Crash, Cut, Event, Heal, Move, SkewClock, Start
from nearcast.scenario.topology import Host, Site, SiteLink, Topology

TOPOLOGY = Topology(
    name="three",
    sites=(Site(name="a"), Site(name="b"), Site(name="c")),
    links=(SiteLink(between=("a", "b"), latency_ms=10), SiteLink(between=("b", "c"), latency_ms=20)),
    hosts=(Host(name="x", site="a"), Host(name="y", site="b"), Host(name="z", site="c")),
)


class FakeUnderlay:
    """Writes down what it is told."""

    mode = "fake"
    limits = ()

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.cuts = 0

    async def open(self, failed: Callable[[str], None]) -> None: ...

    async def close(self) -> None: ...

    def address(self, host: int, seen_from: int) -> str:
        return f"10.0.{seen_from}.{host}"

    def spawn(self, host: int, command: Sequence[str], streams: Streams, directory: str) -> int:
        raise OSError

    async def accepts(self, host: int, port: int) -> bool:
        return False

    async def move(self, host: int, site: int) -> None:
        for _ in range(3):
            await asyncio.sleep(0)  # others have their turn, as while a router answers
        self.told.append(("move", host, site))

    async def connect(self, a: int, b: int, conditions: Conditions, one_way: bool) -> None:
        self.told.append(("connect", a, b, conditions.latency_ms, one_way))

    async def disconnect(self, a: int, b: int, one_way: bool) -> None:
        self.told.append(("disconnect", a, b, one_way))

    async def set_access(self, host: int, conditions: Conditions) -> None:
        self.told.append(("access", host, conditions.latency_ms))

    async def cut(self, sources: Sequence[int], targets: Sequence[int], one_way: bool) -> int:
        self.cuts += 1
        self.told.append(("cut", list(sources), list(targets), one_way))
        return self.cuts

    async def heal(self, handle: int) -> None:
        self.told.append(("heal", handle))

    async def traffic(self) -> Traffic:
        return Traffic()

    def reaped(self, process: int, code: int) -> bool:
        return False


NOBODY = cast(Supervisor, None)


class NoProcesses:
    """A supervisor without any."""

    def on_host(self, host: int) -> list[Any]:
        return []


class Notes:
    """What was noted, and a way to wait for it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._news = asyncio.Event()

    def __call__(self, kind: str, subject: str, text: str) -> None:
        self.texts.append(text)
        self._news.set()

    async def wait_for(self, text: str) -> None:
        async with asyncio.timeout(10):
            while text not in self.texts:
                self._news.clear()
                await self._news.wait()


def run(scenario: Callable[[Deployment, FakeUnderlay, Notes], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        underlay, notes = FakeUnderlay(), Notes()
        deployment = Deployment(TOPOLOGY, underlay, notes)
        await scenario(deployment, underlay, notes)
        deployment.close()

    asyncio.run(main())


async def latency(deployment: Deployment, source: int, target: int) -> float | None:
    return (await deployment.matrix()).one_way_ms[source][target]


def test_move_and_matrix() -> None:
    async def scenario(deployment: Deployment, underlay: FakeUnderlay, notes: Notes) -> None:
        assert await latency(deployment, 0, 2) == 30.0
        await deployment.apply(Move(at_s=0, host="x", site="b"), NOBODY)
        assert await latency(deployment, 0, 2) == 20.0
        assert underlay.told == [("move", 0, 1)]
        assert deployment.host_statuses()[0].site == "b"

    run(scenario)


def test_a_site_stands_for_the_hosts_that_are_there_now() -> None:
    async def scenario(deployment: Deployment, underlay: FakeUnderlay, notes: Notes) -> None:
        await deployment.apply(Move(at_s=0, host="x", site="b"), NOBODY)
        await deployment.apply(Cut(at_s=0, source=("b",)), NOBODY)
        assert underlay.told.pop() == ("cut", [0, 1], [2], False)
        assert await latency(deployment, 0, 1) == 0.0
        assert await latency(deployment, 0, 2) is None
        await deployment.apply(Heal(at_s=0), NOBODY)
        assert underlay.told.pop() == ("heal", 1)
        assert await latency(deployment, 0, 2) == 20.0

    run(scenario)


def test_cuts_end_by_themselves_and_only_once() -> None:
    async def scenario(deployment: Deployment, underlay: FakeUnderlay, notes: Notes) -> None:
        await deployment.apply(Cut(at_s=0, source=("x",), target=("y",), for_s=0.01), NOBODY)
        await deployment.apply(Cut(at_s=0, source=("x",), target=("z",), one_way=True, for_s=0.02), NOBODY)
        assert deployment.cuts() == ("x ↔ y", "x → z")
        await notes.wait_for("healed x ↔ y")
        await notes.wait_for("healed x → z")
        assert deployment.cuts() == ()
        await deployment.apply(Cut(at_s=0, source=("x",), for_s=0.01), NOBODY)
        await deployment.heal()
        await deployment.apply(Cut(at_s=0, source=("y",), for_s=0.02), NOBODY)
        await notes.wait_for("healed y ↔ everything else")
        assert underlay.told.count(("heal", 3)) == 1

    run(scenario)


def test_a_link_comes_back_as_it_was_in_each_direction() -> None:
    async def scenario(deployment: Deployment, underlay: FakeUnderlay, notes: Notes) -> None:
        await deployment.change_link(("a", "b"), Conditions(latency_ms=15), True, None)
        await deployment.change_link(("a", "b"), Conditions(latency_ms=99), False, 0.01)
        await notes.wait_for("link a ↔ b is as before")
        assert (await latency(deployment, 0, 1), await latency(deployment, 1, 0)) == (15.0, 10.0)
        await deployment.change_link(("a", "c"), Conditions(latency_ms=1), False, 0.01)
        assert await latency(deployment, 0, 2) == 1.0
        await notes.wait_for("link a ↔ c is as before")
        assert ("disconnect", 0, 2, True) in underlay.told
        assert await latency(deployment, 0, 2) == 35.0

    run(scenario)


def test_what_was_changed_again_is_not_undone() -> None:
    async def scenario(deployment: Deployment, underlay: FakeUnderlay, notes: Notes) -> None:
        await deployment.apply(ChangeAccess(at_s=0, host="x", conditions=Conditions(latency_ms=7), for_s=0.01), NOBODY)
        await deployment.apply(ChangeAccess(at_s=0, host="x", conditions=Conditions(latency_ms=3)), NOBODY)
        link = ChangeLink(at_s=0, between=("a", "b"), conditions=Conditions(latency_ms=50), for_s=0.01)
        await deployment.apply(link, NOBODY)
        await deployment.change_link(("a", "b"), Conditions(latency_ms=60), False, None)
        deployment.schedule((Move(at_s=0.05, host="z", site="a"),), NOBODY)
        await notes.wait_for("z moved to a")
        assert await latency(deployment, 0, 1) == 63.0
        assert not any("as before" in text for text in notes.texts)

    run(scenario)


def test_of_changes_that_end_none_stays_for_ever() -> None:
    async def scenario(deployment: Deployment, underlay: FakeUnderlay, notes: Notes) -> None:
        await deployment.change_link(("a", "b"), Conditions(latency_ms=80), False, 60.0)
        await deployment.change_link(("a", "b"), Conditions(latency_ms=99), False, 0.01)
        await notes.wait_for("link a ↔ b is as before")
        assert await latency(deployment, 0, 1) == 10.0
        await deployment.change_access("x", Conditions(latency_ms=7), 60.0)
        await deployment.change_access("x", Conditions(latency_ms=8), 0.01)
        await notes.wait_for("access of x is as before")
        assert await latency(deployment, 0, 1) == 10.0

    run(scenario)


def test_adjusting_keeps_what_is_not_named() -> None:
    async def scenario(deployment: Deployment, underlay: FakeUnderlay, notes: Notes) -> None:
        assert deployment.adjusted_link(("a", "b"), {"loss": 0.1}) == Conditions(latency_ms=10, loss=0.1)
        assert deployment.adjusted_link(("a", "c"), {"loss": 0.1}) == Conditions(latency_ms=30, loss=0.1)
        assert deployment.adjusted_access("x", {"bandwidth_mbps": 5}) == Conditions(bandwidth_mbps=5)
        for changes, message in [
            ({"los": 0.1}, "no condition 'los'; did you mean 'loss'"),
            ({"loss": 2.0}, "`loss` must be between 0 and 1"),
            ({"jitter": "odd"}, "`jitter` must be one of uniform"),
        ]:
            with pytest.raises(EmulationError, match=message):
                deployment.adjusted_link(("a", "b"), cast(dict[str, float | str], changes))

    run(scenario)


def test_the_schedule_goes_on_after_an_event_that_cannot_happen() -> None:
    async def scenario(deployment: Deployment, underlay: FakeUnderlay, notes: Notes) -> None:
        deployment.schedule((Move(at_s=0.02, host="y", site="a"), Move(at_s=0.01, host="nobody", site="a")), NOBODY)
        assert deployment.pending == 2
        await notes.wait_for("y moved to a")
        assert deployment.pending == 0
        assert any("no host 'nobody'" in text for text in notes.texts)

    run(scenario)


def test_changes_happen_in_the_order_they_were_asked_for() -> None:
    """Also when the network takes its time: a cut of a site means who is there after the move before it."""

    async def scenario(deployment: Deployment, underlay: FakeUnderlay, notes: Notes) -> None:
        supervisor = cast(Supervisor, NoProcesses())
        events: list[Event] = [
            Move(at_s=0, host="x", site="b"),
            Cut(at_s=0, source=("b",)),
            Move(at_s=0, host="x", site="c"),
            Crash(at_s=0, host="x"),
            Crash(at_s=0, host="x"),
        ]
        await asyncio.gather(*(deployment.apply(event, supervisor) for event in events))
        assert underlay.told == [
            ("move", 0, 1),
            ("cut", [0, 1], [2], False),
            ("move", 0, 2),
            ("cut", [0], [1, 2], False),
        ]
        await deployment.revive("x")
        await deployment.heal()
        assert await latency(deployment, 0, 2) == 0.0

    run(scenario)


def test_a_hundred_thousand_events_cost_no_task_each() -> None:
    async def scenario(deployment: Deployment, underlay: FakeUnderlay, notes: Notes) -> None:
        deployment.schedule(tuple(Move(at_s=1_000 + number, host="x", site="b") for number in range(100_000)), NOBODY)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 2
        assert deployment.pending == 100_000

    run(scenario)


def test_a_matrix_of_the_first_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(deployment: Deployment, underlay: FakeUnderlay, notes: Notes) -> None:
        first = await deployment.matrix(1)
        assert (first.hosts, first.one_way_ms) == (("x", "y", "z"), ((0.0, 10.0, 30.0),))
        monkeypatch.setattr("nearcast.emulation.deployment.MAX_MATRIX_ENTRIES", 6)
        assert len((await deployment.matrix(2)).one_way_ms) == 2
        with pytest.raises(EmulationError, match="a matrix of 3 hosts is too large: ask for at most 2 rows"):
            await deployment.matrix()

    run(scenario)


def test_events_are_checked_before_the_start() -> None:
    with pytest.raises(EmulationError, match=r"event 2 \(skew at 3 s\): skew exists in the simulator only"):
        check_events((Heal(at_s=1), SkewClock(at_s=3, host="x")), TOPOLOGY)
    with pytest.raises(EmulationError, match=r"event 1 \(move at 1 s\): no site 'd'"):
        check_events((Move(at_s=1, host="x", site="d"),), TOPOLOGY)
    with pytest.raises(EmulationError, match=r"event 1 \(start at 1 s\): no process 'p'; there is none at all"):
        check_events((Start(at_s=1, process="p"),), TOPOLOGY)
