"""The formation study: its places and workload, single runs, and what is made of the rows of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nearcast.errors import ConfigError, InvalidValue
from nearcast.experiments import groups_results, groups_runs, groups_workload
from nearcast.experiments.experiment import effective_parameters
from nearcast.experiments.groups import Groups, GroupsParameters
from nearcast.experiments.groups_changes import changes
from nearcast.experiments.groups_reference import REFERENCE
from nearcast.experiments.groups_results import Row, exponent, straight_line
from nearcast.experiments.groups_runs import Form, Place, chosen, city_pool, form, formation_scenario, latency_model
from nearcast.experiments.groups_workload import carried
from nearcast.experiments.run import Outcome, Run, perform
from nearcast.scenario.expansion import topology_of

MS_PER_KM = 0.01
EQUATOR_KM_PER_DEGREE = 111.195


# -- places --


@pytest.fixture(scope="module")
def pool() -> list[Place]:
    return city_pool()


def test_places_are_real_and_apart(pool: list[Place]) -> None:
    assert len(pool) >= 14_000
    assert len({(place.latitude, place.longitude) for place in pool}) == len(pool)
    assert len({place.name for place in pool}) == len(pool)
    populations = [place.population for place in pool]
    assert populations == sorted(populations, reverse=True)
    assert pool[0].population > 10_000_000


def test_fewer_are_a_part_of_more_and_seeds_differ(pool: list[Place]) -> None:
    assert chosen(pool, 200, 1)[:100] == chosen(pool, 100, 1)
    assert chosen(pool, 100, 2) != chosen(pool, 100, 1)
    with pytest.raises(ConfigError, match="`brokers` is 15,001: there are places for 1 to"):
        chosen(pool, 15_001, 1)


def test_the_scenario(pool: list[Place]) -> None:
    places = chosen(pool, 5, 1)
    scenario = formation_scenario(places, 30.0, latency_model(fibre=False))
    assert scenario.settings["lcm"] == [float(place.population) for place in places]
    assert scenario.settings["threshold_ms"] == 30.0
    topology = topology_of(scenario)
    assert topology.host_names() == [*(f"broker-{place.name}" for place in places), "cloud"]
    assert topology.model is not None
    assert (topology.model.kind, topology.model.base_ms, topology.model.jitter_ms) == ("linear", 0.0, 0.0)
    assert groups_runs.ms_per_km(topology.model) == pytest.approx(0.021048, rel=1e-4)
    assert groups_runs.ms_per_km(latency_model(fibre=True)) == pytest.approx(0.0088, rel=0.01)


# -- the workload --


def ways_ms(*degrees: float) -> float:
    return sum(degrees) * EQUATOR_KM_PER_DEGREE * MS_PER_KM


def test_the_workload_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four brokers on the equator, the cloud at 90°: 0 and 1 are near each other, and so are 2 and 3."""
    monkeypatch.setattr(groups_workload, "FAR", 0)
    places = [(0.0, 0.0), (0.0, 1.0), (0.0, 20.0), (0.0, 21.0)]
    apart = carried(places, [0, 1, 2, 3], (0.0, 90.0), MS_PER_KM, 1)
    # Each message: where it is published, the cloud, the one that wants it.
    assert (apart.correct, apart.redundant) == (8, 4)
    assert apart.excess_share == pytest.approx(1 / 3)
    assert apart.in_group_share == 0.0
    assert apart.delivery_mean_ms == pytest.approx(ways_ms(90 + 89, 70 + 69) / 2, rel=1e-3)
    pairs = carried(places, [0, 0, 3, 3], (0.0, 90.0), MS_PER_KM, 1)
    assert (pairs.correct, pairs.redundant, pairs.in_group_share) == (8, 4, 1.0)
    assert pairs.delivery_median_ms == pytest.approx(ways_ms(1.0), rel=1e-3)
    together = carried(places, [1, 1, 1, 1], (0.0, 90.0), MS_PER_KM, 1)
    assert (together.correct, together.redundant) == (8, 12)
    assert together.delivery_p99_ms == pytest.approx(ways_ms(1.0), rel=1e-3)
    # 1 alone, the others led by 3: what 0 wants of 1 also reaches 2 and 3, and goes by way of 3.
    mixed = carried(places, [3, 1, 3, 3], (0.0, 90.0), MS_PER_KM, 1)
    assert (mixed.correct, mixed.redundant) == (8, 4 + 2 + 2 + 1 + 1)
    assert mixed.in_group_share == 0.5
    relayed = [ways_ms(21 + 69 + 89), ways_ms(89 + 69 + 21), ways_ms(1), ways_ms(1)]
    assert mixed.delivery_mean_ms == pytest.approx(sum(relayed) / 4, rel=1e-3)


def test_a_broker_alone_has_nothing_to_send_to() -> None:
    alone = carried([(0.0, 0.0)], [0], (0.0, 90.0), MS_PER_KM, 1)
    assert (alone.correct, alone.redundant, alone.delivery_mean_ms) == (1, 1, 0.0)


# -- single runs --


def test_a_run(pool: list[Place]) -> None:
    function = Form(pool)
    figures = {each: function({"brokers": 150, "threshold_ms": each}, 3) for each in (0.0, 20.0, 1e6)}
    assert [found["groups"] for found in figures.values()] == [150, figures[20.0]["groups"], 1]
    assert 20 < figures[20.0]["groups"] < 100
    assert figures[0.0]["messages"] == 0
    assert figures[0.0]["excess_share"] < figures[20.0]["excess_share"] < figures[1e6]["excess_share"]
    assert figures[0.0]["delivery_mean_ms"] > figures[20.0]["delivery_mean_ms"] > figures[1e6]["delivery_mean_ms"]
    again = function({"brokers": 150, "threshold_ms": 20.0}, 3)
    assert {**again, "cpu_s": 0} == {**figures[20.0], "cpu_s": 0}
    fibre = function({"brokers": 150, "threshold_ms": 20.0, "fibre": True}, 3)
    assert fibre["groups"] < figures[20.0]["groups"], "the same threshold reaches 2.4 times as far"


def test_what_a_change_costs(pool: list[Place]) -> None:
    first, deaths, returns = changes(chosen(pool, 100, 2), 60.0, latency_model(fibre=False), 2)
    assert (first.brokers, first.joins > 50) == (100, True)
    assert deaths.brokers == returns.brokers == 2
    assert 0 < deaths.joins < first.joins
    assert 0 < returns.joins < first.joins
    assert 0.0 < deaths.stable_after_s < 30.0, "of virtual time"


def test_formation_that_does_not_end_in_time_is_a_failure(pool: list[Place]) -> None:
    with pytest.raises(Exception, match="group formation has not ended: broker-"):
        Form(pool)({"brokers": 60, "threshold_ms": 100.0, "duration_s": 1.5}, 1)


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({"threshold_ms": 1.0}, "missing required field `brokers`"),
        ({"brokers": 10}, "missing required field `threshold_ms`"),
        ({"brokers": 0, "threshold_ms": 1.0}, "`int` >= 1 - at `$.brokers`"),
        ({"brokers": 10, "threshold_ms": -1.0}, "`float` >= 0.0 - at `$.threshold_ms`"),
        ({"brokers": 10, "threshold_ms": 1.0, "lcm": 1}, "forming groups has no parameter lcm; it has brokers, threshold_ms"),
    ],
)
def test_refusals(parameters: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        form.prepare([parameters])
    assert complaint in str(caught.value)


# -- what is made of the rows --


def test_the_published_study() -> None:
    parameters = GroupsParameters()
    assert parameters.runs == 190
    assert parameters.counts == tuple(range(1_200, 12_001, 1_200))
    grid = {(count, each) for count in parameters.counts for each in parameters.thresholds_ms}
    assert all((each.brokers, each.threshold_ms) in grid for each in REFERENCE)
    assert GroupsParameters(scale=0.01).counts[0] == 12


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"brokers": ()}, "`brokers` must be numbers, each once"),
        ({"brokers": (100, 100)}, "`brokers` must be numbers, each once"),
        ({"brokers": (20_000,)}, "`brokers` must be between 1 and 14,000"),
        ({"thresholds_ms": ()}, "`thresholds_ms` must be numbers, each once"),
        ({"thresholds_ms": (-1.0,)}, "`thresholds_ms` must be between 0 and a million"),
        ({"seeds": 0}, "`seeds` must be between 1 and 1,000"),
        ({"timed_brokers": 0}, "`timed_brokers` must be between 1 and 14,000"),
        ({"timed_threshold_ms": -1.0}, "`timed_threshold_ms` must be between"),
        ({"changed_brokers": 0}, "`changed_brokers` must be between 1 and 14,000"),
    ],
)
def test_parameters_that_make_no_sense(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        GroupsParameters(**wrong)
    assert str(caught.value).startswith(message)


def test_straight_lines() -> None:
    assert list(straight_line([1, 2, 3], [5, 7, 9])) == pytest.approx([2.0, 3.0, 1.0])
    assert straight_line([1, 2, 3], [4, 4, 4])[2] == 1.0
    assert straight_line([1, 2, 3, 4], [0, 5, 0, 5])[2] < 0.5
    assert exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2.0)
    assert exponent([1, 2, 4], [0, 0, 0]) is None


def made(brokers: int, threshold_ms: float, seed: int = 1, **changes: Any) -> Row:
    """As if groups fell like a power of the threshold and everything else were linear."""
    groups = max(1, round(300 * (threshold_ms / 10.0) ** -1.4)) if threshold_ms else brokers
    row = Row(
        brokers=brokers,
        threshold_ms=threshold_ms,
        seed=seed,
        seconds=0.5,
        groups=groups,
        largest_group=brokers / groups,
        stable_s=5.0,
        leader_joins=brokers,
        member_joins=2 * brokers,
        notifications=2.08 * brokers,
        paper_messages=7.08 * brokers,
        messages=20 * brokers,
        megabytes=0.01 * brokers,
        excess_share=0.5,
        delivery_mean_ms=30.0,
        delivery_median_ms=5.0,
        delivered_in_group=0.8,
    )
    return msgspec.structs.replace(row, **changes)


def study(parameters: GroupsParameters, row: Callable[..., Row], folder: Path) -> Outcome:
    """The experiment with made-up rows."""

    class Made(Groups):
        def check(self, parameters: GroupsParameters) -> None: ...

        def run(self, run: Run[GroupsParameters]) -> None:
            run.measured("timed_run_s", 12.0)
            run.measured("change_joins_share", 0.1)
            rows = [
                row(count, each, seed)
                for count in parameters.counts
                for each in parameters.thresholds_ms
                for seed in range(1, parameters.seeds + 1)
            ]
            groups_results.evaluate(run, rows, {bar.name for bar in self.bars(parameters)})

    return perform(Made(), parameters, folder)


PARAMETERS = GroupsParameters(brokers=(1_200, 2_400, 3_600), thresholds_ms=(0.0, 10.0, 20.0, 50.0, 100.0), seeds=2)


def test_a_good_study(tmp_path: Path) -> None:
    outcome = study(PARAMETERS, made, tmp_path / "out")
    values = {bar.name: bar.value for bar in outcome.bars}
    assert outcome.ok, values
    assert values["runs"] == 30
    assert values["operations_linear_r2"] == 1.0
    assert values["notifications_per_member_join"] == 1.04
    assert values["groups_exponent"] == pytest.approx(-1.4, abs=0.05)
    assert values["reference_factor"] == pytest.approx(369 / 300, abs=0.001)
    assert len(outcome.plots) == 6
    costs, beside, thresholds = outcome.tables
    assert costs.rows[0] == [0.0, 3.0, 1.0, 1.0, 7.08, 1.0]
    assert costs.rows[1] == [10.0, 3.0, 1.0, 1.0, 7.08, 1.0]
    assert [line[:4] for line in beside.rows] == [
        [1_200, 10.0, 300.0, 260],
        [2_400, 10.0, 300.0, 337],
        [3_600, 10.0, 300.0, 369],
        [2_400, 50.0, 32.0, 35],
    ]
    assert thresholds.rows[1] == [10.0, 300, 12, 5.0, 7.1, 20.0, 10.0, 1.04, 50.0, 5.0, 30.0]


def test_what_goes_wrong_is_found(tmp_path: Path) -> None:
    def bad(brokers: int, threshold_ms: float, seed: int) -> Row:
        if (brokers, threshold_ms, seed) == (2_400, 10.0, 2):
            failed = Row(brokers=brokers, threshold_ms=threshold_ms, seed=seed, seconds=0.1)
            return msgspec.structs.replace(failed, error_type="InvariantViolated", error_message="a and b both lead")
        odd = 10 if brokers == 2_400 else 1
        return made(brokers, threshold_ms, seed, leader_joins=odd * brokers, notifications=3 * brokers, groups=100)

    outcome = study(PARAMETERS, bad, tmp_path / "out")
    assert not outcome.ok
    missed = {bar.name for bar in outcome.bars if not bar.ok}
    assert missed == {
        "runs", "operations_linear_r2", "notifications_per_member_join", "groups_exponent", "reference_factor",
    }  # fmt: skip
    assert "2,400 brokers at 10 ms, seed 2, failed: InvariantViolated: a and b both lead" in outcome.notes


def test_a_square_is_not_taken_for_a_line(tmp_path: Path) -> None:
    def square(brokers: int, threshold_ms: float, seed: int) -> Row:
        return made(brokers, threshold_ms, seed, leader_joins=brokers**2 / 1_200, member_joins=2 * brokers**2 / 1_200)

    outcome = study(PARAMETERS, square, tmp_path / "out")
    assert [bar.name for bar in outcome.bars if not bar.ok] == ["operations_exponent"], "a line explains 98 % of it"


def test_nothing_but_failures(tmp_path: Path) -> None:
    def dead(brokers: int, threshold_ms: float, seed: int) -> Row:
        return Row(brokers=brokers, threshold_ms=threshold_ms, seed=seed, seconds=0.1, error_type="E", error_message="m")

    outcome = study(PARAMETERS, dead, tmp_path / "out")
    assert outcome.complete
    assert not outcome.ok
    assert len(outcome.notes) >= 5


def test_a_grid_of_one(tmp_path: Path) -> None:
    parameters = effective_parameters(Groups(), {"brokers": "50", "thresholds_ms": "0"}, quick=True)
    assert [bar.name for bar in Groups().bars(parameters)] == ["runs", "timed_run_s", "change_joins_share"]
    assert study(parameters, made, tmp_path / "out").ok
