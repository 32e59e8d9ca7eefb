"""Ready-made scenarios show what their description says."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from nearcast.scenario.events import Move
from nearcast.scenario.files import load_scenario
from nearcast.scenario.timeline import timeline
from nearcast.simulation.runs import simulate


def test_swarms_are_late_outside_of_zone_1() -> None:
    """ePulsar's bound is 40 ms: kept by those that are where their broker is, broken by those that are not."""
    swarms = load_scenario("swarms")
    leaders, followers = swarms.clients
    one_drone = msgspec.structs.replace(followers, count=1)
    gathering = tuple(Move(at_s=15.0, host=f"swarm-{number}", site="zone-1") for number in range(1, 9))
    short = msgspec.structs.replace(swarms, duration_s=60.0, clients=(leaders, one_drone), mobility=(), events=gathering)
    outcome = simulate(short, seed=1)
    assert outcome.violation is None
    assert outcome.figures["lost"] == 0
    assert outcome.figures["latency_max_ms"] == pytest.approx(50, abs=0.1)
    assert outcome.figures["latency_p50_ms"] == pytest.approx(20, abs=0.1), "all in zone 1 for most of the time"


def test_the_timeline_is_the_same_in_every_process() -> None:
    program = (
        "from nearcast.scenario.files import load_scenario; from nearcast.scenario.timeline import timeline;"
        "print([*timeline(load_scenario('mqtt'), 5), *timeline(load_scenario('swarms'), 5)])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(said) == 1
    assert len(timeline(load_scenario("swarms"), 5)) >= 8
