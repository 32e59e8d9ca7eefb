"""Latencies on virtual time: a network of one-way delays that may lose, and a board of announced leaders."""

from __future__ import annotations

import math
import random

import pytest

from nearcast.groups import latencies
from nearcast.groups.latencies import Announced, Latencies, LatencySettings, least_latency_ms
from nearcast.groups.thresholds import Thresholds

TICK_S = 0.05


class Leader:
    """An announcement."""

    def __init__(
        self, name: str, probe_address: str = "", threshold_ms: float = math.inf, position: tuple[float, float] | None = None
    ) -> None:
        self.name = name
        self.address = f"{name}:1884"
        self.probe_address = probe_address or self.address
        self.threshold_ms = threshold_ms
        self.position = position


class World:
    """A broker ``me`` that measures, whom it hears announced, and how far they are."""

    def __init__(
        self, threshold_ms: float = 5.0, position: tuple[float, float] | None = None, max_brokers: int = 10_000, seed: int = 1
    ) -> None:
        self.now = 100.0
        self.one_way_ms: dict[str, float] = {}
        self.version = 0
        self.leaders: dict[str, Leader] = {}
        self.sent: list[tuple[float, str]] = []
        self.on_the_way: list[tuple[float, str, float]] = []
        settings = LatencySettings(position=position, max_brokers=max_brokers)
        thresholds = Thresholds(threshold_ms, 1.25 * threshold_ms)
        self.me = Latencies("me", self, thresholds, settings, random.Random(seed), self.now)
        self.me.pinger = self

    # the board

    def announced(self) -> list[Announced]:
        return list(self.leaders.values())

    def announce(self, name: str, one_way_ms: float, **said: object) -> Leader:
        leader = Leader(name, **said)  # type: ignore[arg-type]
        self.leaders[name] = leader
        self.one_way_ms[leader.probe_address] = one_way_ms
        self.version += 1
        return leader

    def end(self, name: str) -> None:
        del self.leaders[name]
        self.version += 1

    # the pinger

    def listen(self, answers: object) -> None:
        assert answers is self.me

    def ping(self, name: str, address: str, now: float) -> None:
        self.sent.append((now, name))
        one_way_ms = self.one_way_ms.get(address, math.inf)
        if one_way_ms < math.inf:
            self.on_the_way.append((now + 2 * one_way_ms / 1e3, name, now))

    def tick(self, now: float) -> None:
        pass

    def next_deadline(self) -> float:
        return math.inf

    # time

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            arrived = sorted(entry for entry in self.on_the_way if entry[0] <= self.now)
            self.on_the_way = [entry for entry in self.on_the_way if entry[0] > self.now]
            for at, name, sent_at in arrived:
                self.me.ponged(name, (at - sent_at) * 1e3, at)
            if self.me.next_deadline() <= self.now or self.version != self.me._board_version:
                self.me.tick(self.now)

    def pings_of(self, name: str, since: float = 0.0) -> int:
        return sum(1 for at, whom in self.sent if whom == name and at >= since)


def test_the_nearest_leader_is_the_one_with_the_least_measured_latency() -> None:
    world = World()
    world.announce("near", 3.0)
    world.announce("nearer", 2.0)
    world.announce("far", 30.0)
    assert world.me.nearest_leader(5.0, world.now) == ""
    world.run(2.0)
    assert world.me.nearest_leader(5.0, world.now) == "nearer"
    assert world.me.nearest_leader(5.0, world.now, ["nearer"]) == "near"
    assert world.me.nearest_leader(5.0, world.now, {"nearer", "near"}) == ""
    assert world.me.latency_ms("nearer") == pytest.approx(2.0)
    assert world.me.latency_ms("near") == pytest.approx(3.0)
    assert world.me.address("near") == "near:1884"


def test_the_threshold_is_strict() -> None:
    world = World()
    world.announce("other", 5.0)
    world.run(2.0)
    assert world.me.latency_ms("other") == pytest.approx(5.0)
    assert world.me.nearest_leader(world.me.latency_ms("other"), world.now) == ""
    assert world.me.nearest_leader(math.inf, world.now) == "other"


def test_nothing_counts_before_a_few_answers() -> None:
    world = World()
    world.announce("other", 2.0)
    world.me.tick(world.now)
    for answers in range(latencies.LEAST_PINGS):
        assert world.me.latency_ms("other") == math.inf, answers
        world.me.ponged("other", 4.0, world.now + 0.01)
    assert world.me.latency_ms("other") == pytest.approx(2.0)


def test_far_leaders_cost_one_ping_a_minute() -> None:
    world = World()
    for number in range(20):
        world.announce(f"far{number}", 80.0 + number)
    world.run(60.0)
    assert len(world.sent) <= 2 * 20
    world.run(600.0)
    assert len(world.sent) <= 20 * 16


def test_near_leaders_are_measured_every_interval() -> None:
    world = World()
    world.announce("near", 3.0)
    world.run(60.0)
    assert 58 <= world.pings_of("near") <= 75


def test_the_average_is_over_the_window() -> None:
    world = World()
    world.announce("near", 3.0)
    world.run(30.0)
    world.one_way_ms["near:1884"] = 4.0
    world.run(9.5)
    assert 3.3 < world.me.latency_ms("near") < 3.7
    world.run(25.0)
    assert world.me.latency_ms("near") == pytest.approx(4.0)


def test_a_leader_that_answers_no_more_is_infinitely_far_and_comes_back() -> None:
    world = World()
    world.announce("near", 3.0)
    world.run(10.0)
    world.one_way_ms["near:1884"] = math.inf
    world.run(4.0)
    assert world.me.latency_ms("near") < math.inf
    world.run(4.0)
    assert world.me.latency_ms("near") == math.inf
    assert world.me.nearest_leader(math.inf, world.now) == ""
    world.one_way_ms["near:1884"] = 2.0
    world.run(60.0)
    assert world.me.latency_ms("near") == pytest.approx(2.0)
    assert world.me.nearest_leader(5.0, world.now) == "near"


def test_a_silent_leader_is_pinged_less_and_less() -> None:
    world = World()
    world.announce("dead", math.inf)
    world.run(3600.0)
    assert world.pings_of("dead", since=world.now - 600.0) <= 14


def test_a_few_lost_pings_change_nothing() -> None:
    world = World()
    world.announce("near", 3.0)
    world.run(10.0)
    world.one_way_ms["near:1884"] = math.inf
    world.run(3.0)
    world.one_way_ms["near:1884"] = 3.0
    world.run(3.0)
    assert world.me.latency_ms("near") == pytest.approx(3.0)
    assert len(world.me._targets["near"].answers_ms) > 5


def test_a_far_leader_that_comes_near_is_found() -> None:
    world = World()
    world.announce("traveller", 40.0)
    world.run(100.0)
    world.one_way_ms["traveller:1884"] = 3.0
    world.run(80.0)
    assert world.me.nearest_leader(5.0, world.now) == "traveller"
    assert world.me.latency_ms("traveller") == pytest.approx(3.0)


def test_a_leader_that_moved_is_measured_anew() -> None:
    world = World()
    world.announce("other", 3.0)
    world.run(5.0)
    world.announce("other", 40.0, probe_address="elsewhere:1884")
    world.me.tick(world.now)
    assert world.me.nearest_leader(5.0, world.now) == ""
    world.run(3.0)
    assert world.me.measured_ms("other") == pytest.approx(40.0)


def test_a_far_leader_that_the_formation_asks_about_is_measured_at_once() -> None:
    world = World()
    world.announce("far", 40.0)
    world.run(3.0)
    assert world.me.latency_ms("far") == math.inf
    world.run(1.5)
    assert world.me.latency_ms("far") == pytest.approx(40.0)


def test_answers_of_the_former_address_do_not_count() -> None:
    world = World()
    world.announce("other", 400.0)
    world.run(0.1)
    assert len(world.on_the_way) == 1
    world.announce("other", math.inf, probe_address="elsewhere:1884")
    world.run(2.0)
    assert world.me._targets["other"].answers_ms == []


def test_a_leader_that_ended_is_not_the_nearest_but_still_known() -> None:
    world = World()
    world.announce("near", 3.0)
    world.run(5.0)
    world.end("near")
    assert world.me.nearest_leader(5.0, world.now) == ""
    assert world.me.latency_ms("near") == pytest.approx(3.0)
    assert world.me.address("near") == "near:1884"


def test_a_member_measures_its_leader_only() -> None:
    world = World()
    world.announce("leader", 3.0)
    world.announce("other", 4.0)
    world.run(5.0)
    world.me.belongs_to("leader", world.now)
    world.end("leader")
    world.run(2.0)
    since = world.now
    world.run(30.0)
    assert world.pings_of("other", since) == 0
    assert world.pings_of("leader", since) >= 29
    world.me.belongs_to("me", world.now)
    world.run(2.0)
    assert world.me.nearest_leader(5.0, world.now) == "other"


def test_where_a_leader_is_can_be_told_while_it_announces_itself() -> None:
    world = World()
    world.announce("other", 3.0, probe_address="other:7", threshold_ms=4.0)
    assert world.me.announced_place("other") == ("other:1884", "other:7", 4.0)
    world.end("other")
    assert world.me.announced_place("other") is None
    assert world.me.announced_place("unheard of") is None


def test_whom_a_notice_names_is_measured_as_soon_as_the_formation_asks() -> None:
    world = World()
    world.announce("leader", 3.0)
    world.run(3.0)
    world.me.belongs_to("leader", world.now)
    world.one_way_ms["new:1884"] = 2.0
    world.me.learn("new", "new:1884", "", world.now)
    assert world.me.address("new") == "new:1884"
    assert world.me.latency_ms("new") == math.inf
    world.run(1.0)
    assert world.me.latency_ms("new") == pytest.approx(2.0)
    since = world.now
    world.run(60.0)
    assert world.pings_of("new", since + latencies.ASKED_FOR_S + 1.0) == 0


def test_what_a_leader_announces_counts_more_than_what_a_view_says() -> None:
    world = World()
    world.announce("other", 3.0)
    world.run(3.0)
    world.me.learn("other", "somewhere:9", "", world.now)
    assert world.me.address("other") == "other:1884"


def test_a_leader_with_a_lower_threshold_is_not_asked() -> None:
    world = World(threshold_ms=20.0)
    world.announce("strict", 8.0, threshold_ms=4.0)
    world.announce("lenient", 12.0, threshold_ms=20.0)
    world.run(5.0)
    assert world.me.nearest_leader(20.0, world.now) == "lenient"


def test_a_leader_that_light_does_not_reach_in_time_is_never_measured() -> None:
    berlin, sydney, potsdam = (52.52, 13.40), (-33.87, 151.21), (52.39, 13.06)
    world = World(position=berlin)
    world.announce("sydney", 3.0, position=sydney)
    world.announce("potsdam", 3.0, position=potsdam)
    world.announce("nowhere", 3.0)
    world.run(10.0)
    assert world.pings_of("sydney") == 0
    assert world.pings_of("potsdam") > 0
    assert world.pings_of("nowhere") > 0


def test_with_a_threshold_of_nothing_nobody_is_measured() -> None:
    world = World(threshold_ms=0.0)
    world.announce("other", 0.1)
    world.run(10.0)
    assert world.sent == []


def test_least_latency_is_below_what_fibre_takes_on_the_great_circle() -> None:
    # 5,570 km between London and New York; the fastest cable takes about 29.5 ms one way.
    assert 26.0 < least_latency_ms((51.51, -0.13), (40.71, -74.01)) < 27.4
    assert least_latency_ms((0.0, 0.0), (0.0, 180.0)) == pytest.approx(math.pi * 6_335.4 / 204.19)
    assert least_latency_ms((10.0, 10.0), None) == 0.0
    assert least_latency_ms((10.0, 10.0), (10.0, 10.0)) == 0.0


def test_however_many_leaders_there_are_pings_stay_bounded() -> None:
    world = World(threshold_ms=50.0)
    for number in range(2_000):
        world.announce(f"leader{number}", 1.0 + number / 20.0)
    world.run(10.0)
    assert len(world.sent) <= latencies.PINGS_PER_S * 10.0 + latencies.PINGS_PER_S / 10.0
    assert world.me.nearest_leader(5.0, world.now) == "leader0"


def test_with_positions_the_nearest_are_measured_first() -> None:
    world = World(threshold_ms=50.0, position=(0.0, 0.0))
    for number in range(1_000):
        world.announce(f"leader{number}", 1.0, position=(0.0, 90.0 - number * 0.09))
    world.run(TICK_S)
    assert {name for _, name in world.sent} <= {f"leader{number}" for number in range(940, 1_000)}


def test_more_brokers_than_can_be_remembered_are_not() -> None:
    world = World(max_brokers=10)
    for number in range(30):
        world.me.learn(f"b{number}", f"b{number}:1", "", world.now)
        world.now += 1.0
    assert len(world.me._targets) <= 10
    assert world.me.latency_ms("unheard of") == math.inf
    for number in range(30):
        world.announce(f"leader{number}", 3.0)
    world.run(30.0)
    assert len(world.me._targets) <= 10
