"""A controller through random weather: nodes that come, die, hang and travel, paths that break, controllers that are replaced.
Whatever happened, once it is quiet everybody is where the algorithm wants them, and stays."""

from __future__ import annotations

import random

import pytest

from nearcast.placement.assignment import group_of
from tests.control_harness import Net

BROKERS = ("a", "b", "c", "d")
GATEWAYS = tuple(f"g{number}" for number in range(4))
DISTANCES_MS = (0.5, 1.0, 3.0, 8.0, 15.0, 40.0, 80.0)


class Weather:
    """Random events, one after the other."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.net = Net(seed=seed)
        self.dead: set[str] = set()
        self.hanging: set[str] = set()
        for name in BROKERS:
            self.net.add_broker(name)
        for name in GATEWAYS:
            distances = {broker: self.rng.choice(DISTANCES_MS) for broker in BROKERS}
            self.net.add_gateway(name, self.rng.randint(1, 4), self.rng.choice(BROKERS), **distances)

    def happen(self) -> None:
        net, rng = self.net, self.rng
        broker = rng.choice(BROKERS)
        gateway = rng.choice(GATEWAYS)
        event = rng.randrange(9)
        if event == 0 and len(self.dead) < len(BROKERS) - 1 and broker not in self.dead | self.hanging:
            net.kill(broker)
            self.dead.add(broker)
        elif event == 1 and self.dead:
            self.revive()
        elif event == 2 and broker not in self.dead | self.hanging:
            net.hang(broker)
            self.hanging.add(broker)
        elif event == 3 and self.hanging:
            net.resume(self.hanging.pop())
        elif event == 4:
            net.set_rtt(gateway, broker, rng.choice(DISTANCES_MS))
        elif event == 5:
            net.part(*rng.sample([*BROKERS, *GATEWAYS, "controller"], 2))
        elif event == 6:
            net.heal()
        elif event == 7 and rng.random() < 0.3:
            net.restart_controller()
        elif event == 8:
            net.gateway(gateway).unable = rng.choice(("", "", "no such luck"))

    def revive(self) -> None:
        name = self.dead.pop()
        self.net.add_broker(name)

    def calm_down(self) -> None:
        self.net.heal()
        while self.dead:
            self.revive()
        while self.hanging:
            self.net.resume(self.hanging.pop())
        for name in GATEWAYS:
            self.net.gateway(name).unable = ""

    def well_placed(self, name: str) -> bool:
        """Whether a gateway is in its lowest latency group, or as near to it as where it is counts."""
        home = self.net.gateway(name).home
        distance_ms = {broker: self.net.rtt_ms[frozenset((name, broker))] for broker in BROKERS}
        lowest = min(group_of(value) for value in distance_ms.values())
        return home in distance_ms and group_of(distance_ms[home] * 0.9) <= lowest


@pytest.mark.parametrize("seed", range(4))
def test_after_any_weather_everybody_is_well_placed_and_stays(seed: int) -> None:
    weather = Weather(seed)
    net = weather.net
    net.run(5.0)
    for _ in range(40):
        weather.happen()
        net.run(weather.rng.uniform(0.1, 6.0))
        usable = {entry.name for entry in net.controller.brokers()}
        for move in net.controller.moves.pending.values():
            assert move.target in usable or move.target not in net.controller.entries, f"seed {seed}: {move}"
    weather.calm_down()
    everybody = {*BROKERS, *GATEWAYS}

    def at_rest() -> bool:
        up = {entry.name for entry in net.controller.entries.values() if entry.state == "up"}
        return up == everybody and not net.controller.moves.pending and all(map(weather.well_placed, GATEWAYS))

    net.run_until(at_rest, f"rest (seed {seed})", 240.0)
    net.run(75.0)  # balance among equals may still want something: what failed is tried again after a minute
    moved = sum(net.controller.moves.counts.values())
    net.run(90.0)
    assert at_rest(), f"seed {seed}"
    assert sum(net.controller.moves.counts.values()) == moved, f"seed {seed}: somebody wanders"
    for name in BROKERS:
        assert set(net.registrants[name].known) == set(BROKERS) - {name}, f"seed {seed}"
