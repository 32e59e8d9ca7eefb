"""The rules past the paper, in small: the shipped machines with messages that are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nearcast.errors import NearcastError
from nearcast.experiments import effective_parameters, perform
from nearcast.experiments.group_rules import CENTRES, GroupRules, nearest_demand, paired_demand, place_of
from nearcast.experiments.group_rules_model import Demand, Place, Rule, Study, distances_ms


def line(*positions_ms: float, cloud_ms: float = 30.0) -> Place:
    """Brokers on a line, so far from its beginning; the first has the most capability."""
    at = np.asarray(positions_ms)
    names = [f"b{number}" for number in range(len(at))]
    return Place(
        names, np.abs(at[:, None] - at[None, :]), np.full(len(at), cloud_ms), [100.0 - index for index in range(len(at))]
    )


def everybody(brokers: int, rate: float = 10.0) -> Demand:
    return Demand([rate] * brokers, [[other for other in range(brokers) if other != origin] for origin in range(brokers)])


def nobody(brokers: int, rate: float = 10.0) -> Demand:
    return Demand([rate] * brokers, [[] for _ in range(brokers)])


def groups_of(study: Study) -> list[list[str]]:
    return sorted(sorted(broker.formation.view.members) for broker in study.brokers if broker.formation.leads)


def test_latency_and_excess_are_those_of_the_paper() -> None:
    place = line(0.0, 3.0, 20.0)
    demand = Demand([10.0, 10.0, 10.0], [[1], [0, 2], []])
    study = Study(Rule(name="groups", threshold_ms=5.0), place, demand, 1)
    result = study.run(60.0, 60.0)
    assert groups_of(study) == [["b0", "b1"], ["b2"]]
    # b0 → both of the group; b1 → both, and b2 by the cloud; b2 → itself: 6 processed, all of them wanted.
    assert result.last.excess == pytest.approx(0.0)
    assert result.last.by_cloud == pytest.approx(1 / 3)
    # 3 and 3 ms directly; b1, its leader b0, the cloud, b2: 3 + 30 + 30 + 0.
    assert result.last.latency_ms == pytest.approx((3.0 + 3.0 + 63.0) / 3)
    assert result.last.median_ms == pytest.approx(3.0)
    assert result.unstable == []


def test_a_group_where_everybody_wants_everything_grows_to_the_largest_threshold() -> None:
    study = Study(Rule(name="adaptive", threshold_ms=2.0, budget=0.3), line(0, 5, 15, 30), everybody(4), 1)
    result = study.run(3_600.0, 600.0)
    assert groups_of(study) == [["b0", "b1", "b2", "b3"]]
    assert result.last.by_cloud == 0.0
    assert result.thresholds_ms == [50.0]


def test_a_group_where_nobody_wants_anything_breaks_up() -> None:
    study = Study(Rule(name="adaptive", threshold_ms=40.0, budget=0.3), line(0, 5, 15, 30), nobody(4), 1)
    result = study.run(7_200.0, 600.0)
    assert len(groups_of(study)) == 4
    assert result.last.excess == 0.0
    assert result.over_budget == []


def test_changes_become_rare() -> None:
    study = Study(Rule(name="adaptive", threshold_ms=40.0, budget=0.3), line(0, 5, 15, 30), nobody(4), 1)
    result = study.run(10 * 3_600.0, 3_600.0)
    assert result.changes_between(7 * 3_600.0, 10 * 3_600.0) <= result.changes_between(0.0, 3 * 3_600.0) / 2


def test_groups_with_different_thresholds_are_stable() -> None:
    # Three that want everything of each other beside three that want nothing of anybody.
    wanted_by = [[1, 2], [0, 2], [0, 1], [], [], []]
    place = line(0, 4, 8, 200, 204, 208)
    study = Study(Rule(name="adaptive", threshold_ms=10.0, budget=0.2), place, Demand([10.0] * 6, wanted_by), 1)
    result = study.run(7_200.0, 600.0)
    assert groups_of(study) == [["b0", "b1", "b2"], ["b3"], ["b4"], ["b5"]]
    assert result.unstable == []


def test_partners_in_two_groups_end_up_in_one() -> None:
    # b2 is as near to b1 as to b0, and follows b0, which leads. Its partner b3 is of b1's group.
    place = line(6.0, 0.0, 3.0, -3.0)
    place.apart_ms[0, 1] = place.apart_ms[1, 0] = 8.0
    demand = Demand([20.0] * 4, [[], [], [3], [2]])
    fixed = Study(Rule(name="fixed", threshold_ms=7.0), place, demand, 1)
    fixed.run(600.0, 600.0)
    assert groups_of(fixed) == [["b0", "b2"], ["b1", "b3"]]
    aware = Study(Rule(name="flow-aware", threshold_ms=7.0, flow_aware=True), place, demand, 1)
    result = aware.run(1_200.0, 600.0)
    assert groups_of(aware) == [["b0"], ["b1", "b2", "b3"]]
    assert result.last.by_cloud == 0.0
    assert result.unstable == []


def test_places_and_demands_are_what_they_say() -> None:
    place = place_of(12, CENTRES, 1_000.0, 3)
    assert len(place.names) == 12
    assert place.apart_ms[0, 6] > 100.0  # an ocean between
    assert np.allclose(place.apart_ms, place.apart_ms.T)
    near = nearest_demand(place, 4, 2)
    assert [len(wanting) for wanting in near.wanted_by] == [4] * 6 + [2] * 6
    pairs = paired_demand(place, 1e6, 3)
    assert all(pairs.wanted_by[other] == [one] for one, (other,) in enumerate(pairs.wanted_by))
    assert paired_demand(place, 0.0, 3).wanted_by == [[]] * 12


def test_distances_are_great_circles() -> None:
    found = distances_ms([(0.0, 0.0)], [(0.0, 90.0), (0.0, 0.0)], 0.01)
    assert found[0, 0] == pytest.approx(100.07, abs=0.1)
    assert found[0, 1] == 0.0


def test_the_experiment_runs_in_small(tmp_path: Path) -> None:
    experiment = GroupRules()
    given = {"scale": 0.2, "duration_s": 7_200.0, "repetitions": 1, "budgets": "0.5", "thresholds_ms": "0,10,50"}
    parameters = effective_parameters(experiment, {**given, "flow_thresholds_ms": "8"}, quick=True)
    outcome = perform(experiment, parameters, tmp_path / "out", quick=True)
    assert outcome.error is None
    assert all(bar.value is not None for bar in outcome.bars)
    assert [table.title for table in outcome.tables] == ["Budgets", "Flows"]
    assert next(bar for bar in outcome.bars if bar.name == "unstable_ends").ok


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("duration_s", 60.0),
        ("scale", 0.01),
        ("repetitions", 0),
        ("budgets", "2"),
        ("thresholds_ms", "5"),
        ("flow_thresholds_ms", "0"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(key: str, value: object) -> None:
    with pytest.raises(NearcastError, match=key):
        effective_parameters(GroupRules(), {key: value}, quick=False)
