"""Topics that a simulated broker keeps: the shipped engine, journal and log on a disk that loses power in every way it can."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from nearcast.mqtt.keeping import MarkedLog
from nearcast.scenario.events import Crash, FailDisk, Kill
from nearcast.scenario.files import load_scenario
from nearcast.scenario.scenario import Scenario
from nearcast.simulation.mqtt import Mqtt
from nearcast.simulation.mqtt_broker import SimulatedBroker
from nearcast.simulation.runs import simulate
from nearcast.topiclog.keeper import TopicKeeper
from tests.simulation.test_mqtt import faults, run, scenario, slow_disk

#: How many seeds of each case the suite runs. By hand: hundreds.
SEEDS = 8

SETTINGS: dict[str, Any] = {
    "snapshot_bytes": 1_500,
    "snapshot_step_bytes": 300,
    "segment_bytes": 3_000,
    "topics": [
        {"topic": "+/1", "retention": {"max_records": 7}},
        {"topic": "+/2"},
        {"topic": "publisher@device-1/0", "mode": "tap"},
        {"topic": "+/0"},
    ],
}

HARD = scenario(faults=faults("broker", "phone", per_minute=40.0), events=(slow_disk(0.15),), settings=SETTINGS)

CASES = {
    "all fail": scenario(faults=faults(), settings=SETTINGS),
    "a slow disk": HARD,
    "3.1.1": scenario(version="3.1.1", faults=faults("broker", per_minute=40.0), events=(slow_disk(0.05),), settings=SETTINGS),
    "sessions that end": scenario(
        clean_start=True, faults=faults("broker", per_minute=40.0), events=(slow_disk(0.05),), settings=SETTINGS
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_promised_about_kept_topics_holds(name: str) -> None:
    kept = 0
    for seed in range(1, SEEDS + 1):
        kept += run(CASES[name], seed).figures["kept_acknowledged"]
    assert kept > 50 * SEEDS, "the faults left something to look at"


def test_without_faults_everything_is_kept_once() -> None:
    figures = run(scenario(settings=SETTINGS), 1).figures
    assert figures["kept"] == figures["published"]
    assert figures["kept_acknowledged"] == figures["acknowledged"]
    assert figures["kept_twice"] == 0


def test_the_ready_scenario() -> None:
    figures = run(load_scenario("topics"), 1).figures
    assert figures["kept"] > 800
    assert figures["pending"] == 0


def test_a_full_disk_ends_the_broker_and_nothing_promised_is_lost() -> None:
    described = scenario(
        events=(
            FailDisk(at_s=2.0, host="broker", full=True, for_s=1.0),
            Kill(at_s=3.5, host="broker", restart_after_s=0.1),
        ),
        settings=SETTINGS,
    )
    for seed in (1, 2):
        assert run(described, seed).figures["kept"] > 50


def test_a_power_cut_in_every_tenth_of_a_flush() -> None:
    for tenth in range(10):
        described = scenario(
            events=(
                slow_disk(0.1),
                *(Crash(at_s=1.0 + tenth * 0.011 + round_, host="broker", restart_after_s=0.05) for round_ in range(4)),
            ),
            settings=SETTINGS,
        )
        run(described, 1)


def test_topics_beyond_the_quota_are_refused_and_named_nowhere() -> None:
    described = scenario(settings={**SETTINGS, "max_topics": 2})
    figures = run(described, 1).figures
    assert figures["refused"] > 10
    assert 0 < figures["kept"] < figures["published"]


# --- planted faults: the invariants find them -----------------------------------------------------------------------------


class HastyBroker(SimulatedBroker):
    """Sends acknowledgements before the disk has what they acknowledge."""

    def request_sync(self) -> None:
        while self.commits.begin_sync():
            self.commits.synced()


class UncutLog:
    """Keeps what the log has and the journal has not."""

    def __init__(self, keeper: TopicKeeper) -> None:
        self.keeper = keeper

    def reconcile(self, journal_mark: int) -> int:
        found = self.keeper.reconcile(1 << 40)
        self.keeper.last_mark = self.keeper.covered_mark = max(found, journal_mark)
        return found


class UncutBroker(SimulatedBroker):
    def marked_log(self) -> MarkedLog | None:
        return None if self.keeper is None else UncutLog(self.keeper)


class TrustingLog:
    """Believes the journal about what the log has."""

    def __init__(self, keeper: TopicKeeper) -> None:
        self.keeper = keeper

    def reconcile(self, journal_mark: int) -> int:
        return max(journal_mark, self.keeper.reconcile(journal_mark))


class TrustingBroker(SimulatedBroker):
    def marked_log(self) -> MarkedLog | None:
        return None if self.keeper is None else TrustingLog(self.keeper)


class Hasty(Mqtt):
    broker_class = HastyBroker


class Uncut(Mqtt):
    broker_class = UncutBroker


class Trusting(Mqtt):
    broker_class = TrustingBroker


def mutated(mutant: type[Mqtt]) -> Scenario:
    sys.modules.setdefault(mutant.__module__, sys.modules[__name__])
    return scenario(
        protocol=f"{mutant.__module__}:{mutant.__name__}",
        faults=faults("broker", per_minute=60.0),
        events=(slow_disk(0.1),),
        rate_hz=8.0,
        settings=SETTINGS,
    )


@pytest.mark.parametrize(
    ("mutant", "said"),
    [
        (Hasty, "a reader had|is another one|not in the log|lost"),
        (Uncut, "twice"),
        (Trusting, "is not in the log"),
    ],
)
def test_a_planted_fault_is_found(mutant: type[Mqtt], said: str) -> None:
    described = mutated(mutant)
    for seed in range(1, 61):
        outcome = simulate(described, seed)
        if outcome.violation is not None:
            assert any(word in outcome.violation.message for word in said.split("|")), (seed, outcome.violation)
            return
    pytest.fail("no seed found it")
