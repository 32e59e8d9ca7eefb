"""Groups form on any network, whatever happens to messages, links and brokers on the way there.

The harness checks at every moment that versions rise, that a view has its leader, and that nobody follows in circles. Here:
once the world is quiet, both termination conditions hold in bounded time, all brokers of a group have its leader's view, and
then nothing happens any more.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nearcast.groups.messages import Ask
from tests.group_harness import GroupNetwork, Weather

CALM_S = 90.0
"""Long enough for what was avoided longest to be asked again."""

weathers = st.builds(
    Weather,
    loss=st.sampled_from([0.0, 0.05, 0.3]),
    duplicates=st.sampled_from([0.0, 0.3]),
    jitter_s=st.sampled_from([0.0, 0.02, 0.5, 3.0]),
)
places = st.tuples(st.integers(0, 12), st.integers(0, 12))


class World:
    """Brokers on a plane; latency is distance. Some things that can happen to them."""

    def __init__(self, seed: int, positions: list[tuple[int, int]], lcms: list[int], join_ms: float, weather: Weather) -> None:
        self.positions = {f"b{index}": position for index, position in enumerate(positions)}
        self.lcms = {f"b{index}": lcms[index % len(lcms)] for index in range(len(positions))}
        self.rng = random.Random(seed)
        self.network = GroupNetwork(self.latency_ms, join_ms, seed=seed)
        self.network.weather = weather
        self.network.codec = True
        for name, lcm in self.lcms.items():
            self.network.add(name, lcm)

    def latency_ms(self, one: str, other: str) -> float:
        return 0.1 + math.dist(self.positions[one], self.positions[other])

    def happen(self, what: str) -> None:
        name, other = self.rng.choice(list(self.positions)), self.rng.choice(list(self.positions))
        network = self.network
        leaders = [broker.name for broker in network.brokers.values() if broker.leads]
        if what == "crash leader" and leaders:
            network.crash(self.rng.choice(leaders), noticed=self.rng.random() < 0.5)
        elif what == "crash" and name in network.brokers:
            network.crash(name, noticed=self.rng.random() < 0.5)
        elif what == "start" and name not in network.brokers:
            network.add(name, self.lcms[name])
        elif what == "restart" and name in network.brokers:
            network.crash(name, noticed=False)
            network.add(name, self.lcms[name])
        elif what == "move":
            self.positions[name] = (self.rng.randrange(13), self.rng.randrange(13))
        elif what == "separate" and name != other:
            network.separate(name, other)
        elif what == "split":
            half = {name for name in self.positions if self.rng.random() < 0.5}
            for name in half:
                for other in self.positions.keys() - half:
                    network.separate(name, other)
        elif what == "heal":
            network.separated.clear()
        elif what == "lose link":
            network.lose_link(name, other)
        elif what == "link" and name in network.brokers:
            network.brokers[name].linked(other, network.now)
        elif what == "change lcm" and name in network.brokers:
            network.brokers[name].lcm = self.rng.choice([0.0, 1.0, 2.0, 1e9])
        elif what == "go over" and name in network.brokers and leaders:
            network.brokers[name].join(self.rng.choice(leaders), network.now)


EVENTS = [
    "crash leader",
    "crash",
    "start",
    "restart",
    "move",
    "separate",
    "split",
    "heal",
    "lose link",
    "link",
    "change lcm",
    "go over",
]
happenings = st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from(EVENTS)), max_size=25)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    positions=st.lists(places, min_size=1, max_size=12),
    lcms=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    join_ms=st.sampled_from([0.0, 1.0, 3.0, 6.0, 1e6]),
    weather=weathers,
    board_delay_s=st.sampled_from([0.01, 0.5, 5.0]),
    measuring_s=st.sampled_from([0.0, 0.3, 3.0]),
    events=happenings,
)
@example(
    seed=1,
    positions=[(0, 0), (0, 0), (0, 0)],
    lcms=[1],
    join_ms=1.0,
    weather=Weather(jitter_s=3.0),
    board_delay_s=0.5,
    measuring_s=0.0,
    events=[],
)
def test_groups_form_whatever_happens(
    seed: int,
    positions: list[tuple[int, int]],
    lcms: list[int],
    join_ms: float,
    weather: Weather,
    board_delay_s: float,
    measuring_s: float,
    events: list[tuple[float, str]],
) -> None:
    world = World(seed, positions, lcms, join_ms, weather)
    network = world.network
    network.board_delay_s = board_delay_s
    network.measuring_s = measuring_s
    for after_s, what in events:
        network.run(after_s)
        world.happen(what)
    network.weather = Weather()
    network.run(4.0)  # what was sent before is through
    network.settle(CALM_S)
    changes = network.leader_changes
    network.run(20.0)
    assert network.leader_changes == changes
    assert not network.problems()


@pytest.mark.parametrize("seed", range(3))
def test_many_brokers_with_few_capabilities(seed: int) -> None:
    rng = random.Random(seed)
    positions = [(rng.randrange(40), rng.randrange(40)) for _ in range(80)]
    world = World(seed, positions, [1, 1, 2], 8.0, Weather(loss=0.1, jitter_s=0.1))
    world.network.run(5.0)
    world.network.weather = Weather()
    world.network.settle(CALM_S)


def _two_groups_about_to_merge() -> GroupNetwork:
    """Groups of three whose leaders come near each other; of the loser's members one can follow."""
    places = {"a": 0.0, "b": 3.0, "c": 3.5, "x": 20.0, "y": 21.0, "z": 19.5}
    network = GroupNetwork(lambda one, other: abs(places[one] - places[other]), 5.0, seed=5)
    for lcm, name in enumerate(places):
        network.add(name, lcm)
    network.settle(10.0)
    assert network.groups() == {"c": {"a", "b", "c"}, "z": {"x", "y", "z"}}
    for name in "xyz":
        places[name] -= 13.5
    network.delivered = 0
    return network


MERGER_MESSAGES = 12


def test_the_merger_that_the_next_test_breaks() -> None:
    network = _two_groups_about_to_merge()
    network.settle(3.0)
    assert network.groups() == {"a": {"a"}, "z": {"b", "c", "x", "y", "z"}}
    assert network.delivered >= MERGER_MESSAGES


@pytest.mark.parametrize("victim", ["a", "b", "c", "x", "z"])
@pytest.mark.parametrize("how", ["dies", "dies unnoticed", "restarts", "is cut off"])
def test_any_broker_may_fail_after_any_message_of_a_merger(victim: str, how: str) -> None:
    for fails_after in range(MERGER_MESSAGES + 1):
        network = _two_groups_about_to_merge()

        def fail(delivered: int, network: GroupNetwork = network, fails_after: int = fails_after) -> None:
            if delivered != fails_after:
                return
            if how == "is cut off":
                for other in network.brokers:
                    if other != victim:
                        network.separate(victim, other)
                return
            lcm = network.brokers[victim].lcm
            network.crash(victim, noticed=how == "dies")
            if how == "restarts":
                network.add(victim, lcm)

        network.on_delivery = fail
        if fails_after == 0:
            fail(0)
        network.run(1.0)
        network.settle(30.0)
        if how == "is cut off":
            assert network.brokers[victim].leads
            network.separated.clear()
            network.settle(30.0)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_brokers_that_join_each_other_in_a_ring_do_not_end_up_without_a_leader(count: int) -> None:
    """Old questions, from when others had more capability, can make each of them join the next."""
    network = GroupNetwork(lambda one, other: 1.0, 5.0)
    names = [f"b{number}" for number in range(count)]
    for name in names:
        network.add(name, 1.0)
    for one, other in zip(names, names[1:] + names[:1], strict=True):
        network.brokers[one].handle(other, Ask(1, 99.0, 1, 5.0, 1.0), network.now)
    assert all(broker.candidate is not None for broker in network.brokers.values())
    network.settle(10.0)
    assert len(network.groups()) == 1
