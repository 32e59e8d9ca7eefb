"""Every event of a schedule, applied to a world: what it does, what ends it, and what happens when two meet."""

from __future__ import annotations

from typing import get_args

import pytest

from nearcast.errors import ConfigError, LocalProtocolError
from nearcast.network.conditions import Conditions
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
from nearcast.simulation import World
from nearcast.simulation.disks import DEFAULT_SYNC_S
from nearcast.simulation.faults import describe
from nearcast.simulation.hosts import EPOCH_S
from tests.unit.simulation.worlds import make_world, recorder

SLOW = Conditions(latency_ms=100.0)
SLOWER = Conditions(latency_ms=300.0)


def reaches(world: World, source: int, target: int) -> bool:
    """Whether a datagram sent now arrives within a second."""
    before = len(recorder(world, target).told)
    world.hosts[source].send(target, "?", 1)
    world.run(world.now + 1.0)
    return len(recorder(world, target).told) > before


def running(world: World) -> bool:
    return world.hosts[1].running


def is_full(world: World) -> bool:
    return world.hosts[1].disk.full


class TestProcesses:
    @pytest.mark.parametrize("kind", [Kill, Crash])
    def test_end_and_restart(self, kind: type[Kill] | type[Crash]) -> None:
        world = make_world()
        world.apply(kind(at_s=0.0, host="h1", restart_after_s=2.0))
        assert not world.hosts[1].up
        assert world.hosts[1].powered is (kind is Kill)
        world.run(1.9)
        assert not world.hosts[1].up
        world.run(2.0)
        assert world.hosts[1].up

    def test_without_a_restart_it_stays_down_until_one(self) -> None:
        world = make_world()
        world.apply(Crash(at_s=0.0, host="h1"))
        world.run(100.0)
        assert not world.hosts[1].up
        world.apply(Restart(at_s=0.0, host="h1"))
        assert world.hosts[1].up

    def test_a_crash_of_what_was_killed_takes_its_disk_too(self) -> None:
        world = make_world(seed=3)
        world.hosts[1].disk.append("f", bytes(10_000))
        world.apply(Kill(at_s=0.0, host="h1", restart_after_s=5.0))
        world.apply(Crash(at_s=0.0, host="h1", restart_after_s=20.0))
        assert world.hosts[1].disk.used_bytes < 10_000
        world.run(10.0)
        assert not world.hosts[1].up, "the later event decides when it starts again"
        world.run(20.0)
        assert world.hosts[1].up

    def test_pause_ends_by_itself_or_is_resumed(self) -> None:
        world = make_world()
        world.apply(Pause(at_s=0.0, host="h1", for_s=2.0))
        assert not reaches(world, 0, 1)
        world.run(2.0)
        assert running(world)
        world.apply(Pause(at_s=0.0, host="h1"))
        world.run(50.0)
        assert not running(world)
        world.apply(Resume(at_s=0.0, host="h1"))
        assert running(world)

    def test_an_old_pause_does_not_end_a_new_one(self) -> None:
        world = make_world()
        world.apply(Pause(at_s=0.0, host="h1", for_s=5.0))
        world.run(1.0)
        world.apply(Kill(at_s=0.0, host="h1", restart_after_s=1.0))
        world.run(3.0)
        world.apply(Pause(at_s=0.0, host="h1", for_s=10.0))
        world.run(6.0)
        assert not running(world)
        world.run(13.0)
        assert running(world)


class TestNetwork:
    def test_cut_both_ways_and_heal(self) -> None:
        world = make_world(hosts=3)
        world.apply(Cut(at_s=0.0, source=("h0",), target=("h1",)))
        assert (reaches(world, 0, 1), reaches(world, 1, 0), reaches(world, 0, 2)) == (False, False, True)
        world.apply(Heal(at_s=0.0))
        assert reaches(world, 0, 1)

    def test_cut_one_way(self) -> None:
        world = make_world()
        world.apply(Cut(at_s=0.0, source=("h0",), target=("h1",), one_way=True, for_s=10.0))
        assert (reaches(world, 0, 1), reaches(world, 1, 0)) == (False, True)
        world.run(10.0)
        assert reaches(world, 0, 1)

    def test_cut_from_everything_else_by_site(self) -> None:
        world = make_world(hosts=3)
        world.apply(Cut(at_s=0.0, source=("s1",)))
        assert (reaches(world, 0, 1), reaches(world, 1, 2), reaches(world, 0, 2)) == (False, False, True)

    def test_a_healed_cut_does_not_heal_a_later_one(self) -> None:
        world = make_world()
        world.apply(Cut(at_s=0.0, source=("h0",), for_s=5.0))
        world.apply(Heal(at_s=0.0))
        world.apply(Cut(at_s=0.0, source=("h0",), for_s=50.0))
        world.run(6.0)
        assert not reaches(world, 0, 1)

    def test_link(self) -> None:
        world = make_world()
        world.apply(ChangeLink(at_s=0.0, between=("s0", "s1"), conditions=SLOW, one_way=True, for_s=5.0))
        assert world.network.one_way_ms(0, 1) == 100.0
        assert world.network.one_way_ms(1, 0) == 10.0
        world.run(5.0)
        assert world.network.one_way_ms(0, 1) == 10.0

    def test_a_link_that_was_not_there_goes_away_again(self) -> None:
        world = make_world(hosts=3)
        world.network.disconnect(0, 2)
        world.apply(ChangeLink(at_s=0.0, between=("s0", "s2"), conditions=Conditions(latency_ms=1.0), for_s=5.0))
        assert world.network.one_way_ms(0, 2) == 1.0
        world.run(5.0)
        assert world.network.link_conditions(0, 2) is None
        assert world.network.one_way_ms(0, 2) == 20.0

    def test_the_later_change_decides(self) -> None:
        world = make_world()
        world.apply(ChangeLink(at_s=0.0, between=("s0", "s1"), conditions=SLOW, for_s=5.0))
        world.run(1.0)
        world.apply(ChangeLink(at_s=0.0, between=("s0", "s1"), conditions=SLOWER, for_s=10.0))
        world.run(6.0)
        assert world.network.one_way_ms(0, 1) == 300.0
        world.run(11.0)
        assert world.network.one_way_ms(0, 1) == 10.0

    def test_what_comes_back_is_the_last_change_without_an_end(self) -> None:
        world = make_world()
        world.apply(ChangeLink(at_s=0.0, between=("s0", "s1"), conditions=SLOW))
        world.apply(ChangeLink(at_s=0.0, between=("s0", "s1"), conditions=SLOWER, for_s=5.0))
        world.apply(ChangeAccess(at_s=0.0, host="h1", conditions=SLOW))
        world.apply(ChangeAccess(at_s=0.0, host="h1", conditions=SLOWER, for_s=5.0))
        assert world.network.one_way_ms(0, 1) == 600.0
        world.run(5.0)
        assert world.network.one_way_ms(0, 1) == 200.0

    def test_access(self) -> None:
        world = make_world()
        world.apply(ChangeAccess(at_s=0.0, host="h1", conditions=SLOW, for_s=5.0))
        assert world.network.one_way_ms(0, 1) == 110.0
        world.run(5.0)
        assert world.network.one_way_ms(0, 1) == 10.0

    def test_move(self) -> None:
        world = make_world(hosts=3)
        world.apply(Move(at_s=0.0, host="h1", site="s0"))
        assert world.network.one_way_ms(0, 1) == 0.0


class TestHostsThemselves:
    def test_clock(self) -> None:
        world = make_world()
        world.apply(SkewClock(at_s=0.0, host="h1", offset_s=-3.0, rate=1.5))
        world.run(10.0)
        assert world.hosts[1].wall == pytest.approx(EPOCH_S - 3.0 + 15.0)

    def test_disk(self) -> None:
        world = make_world()
        disk = world.hosts[1].disk
        world.apply(FailDisk(at_s=0.0, host="h1", full=True, for_s=5.0))
        assert is_full(world)
        world.run(5.0)
        assert not is_full(world)
        world.apply(FailDisk(at_s=0.0, host="h1", sync_s=0.7))
        assert (disk.full, disk.sync_s) == (False, 0.7)
        world.apply(FailDisk(at_s=0.0, host="h1", full=True, for_s=1.0))
        world.run(10.0)
        assert (disk.full, disk.sync_s) == (False, 0.7)
        world.apply(FailDisk(at_s=0.0, host="h1"))
        assert disk.sync_s == DEFAULT_SYNC_S


class TestSchedules:
    def test_events_happen_at_their_time(self) -> None:
        world = make_world()
        world.schedule(Kill(at_s=3.0, host="h1"))
        world.schedule(Restart(at_s=4.0, host="h1"))
        world.run(3.5)
        assert not world.hosts[1].up
        world.run(4.0)
        assert world.hosts[1].up

    def test_nobody_of_that_name(self) -> None:
        world = make_world()
        with pytest.raises(ConfigError, match="an event names the host nobody"):
            world.apply(Kill(at_s=0.0, host="nobody"))
        with pytest.raises(LocalProtocolError, match="there is no site nowhere"):
            world.apply(Cut(at_s=0.0, source=("nowhere",)))


EXAMPLES: dict[type, tuple[Event, str]] = {
    Kill: (Kill(at_s=1, host="a"), "kill a"),
    Crash: (Crash(at_s=1, host="a"), "power cut at a"),
    Restart: (Restart(at_s=1, host="a"), "restart a"),
    Start: (Start(at_s=1, process="p"), "start p"),
    Stop: (Stop(at_s=1, process="p"), "stop p"),
    Pause: (Pause(at_s=1, host="a"), "pause a"),
    Resume: (Resume(at_s=1, host="a"), "resume a"),
    Cut: (Cut(at_s=1, source=("a", "b"), one_way=True), "cut a b -> everything else"),
    Heal: (Heal(at_s=1), "heal all cuts"),
    ChangeLink: (
        ChangeLink(at_s=1, between=("a", "b"), conditions=Conditions(latency_ms=5, loss=0.1)),
        "link a - b: 5 ms, 10 % loss",
    ),
    ChangeAccess: (
        ChangeAccess(at_s=1, host="a", conditions=Conditions(jitter_ms=2, bandwidth_mbps=3)),
        "access of a: 0 ms, ± 2 ms normal, 3 Mb/s",
    ),
    Move: (Move(at_s=1, host="a", site="s"), "move a to s"),
    SkewClock: (SkewClock(at_s=1, host="a", offset_s=-1, rate=1.1), "clock of a jumps by -1.000 s and runs at 1.1"),
    FailDisk: (FailDisk(at_s=1, host="a", full=True, sync_s=2), "disk of a: full flushes take 2 s"),
}


@pytest.mark.parametrize("kind", get_args(Event))
def test_every_event_has_words(kind: type) -> None:
    event, words = EXAMPLES[kind]
    assert describe(event) == words
