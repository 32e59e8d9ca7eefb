"""The simulator on a toy protocol with a planted bug: some seeds find it; each that does can be replayed and shrunk."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nearcast.scenario.files import load_scenario
from nearcast.scenario.scenario import Scenario
from nearcast.simulation.runs import Options, Outcome, difference, replay, simulate
from nearcast.simulation.shrinking import shrink

HERE = Path(__file__).parent
SEEDS = range(1, 41)
OPTIONS = Options(directory=str(HERE))


@pytest.fixture(scope="module")
def buggy() -> Scenario:
    return load_scenario(HERE / "register.toml")


@pytest.fixture(scope="module")
def found(buggy: Scenario) -> list[Outcome]:
    return [outcome for outcome in (simulate(buggy, seed, OPTIONS) for seed in SEEDS) if not outcome.ok]


def test_some_seeds_find_the_bug_and_not_all(found: list[Outcome]) -> None:
    assert 2 <= len(found) <= len(SEEDS) // 2
    for outcome in found:
        assert outcome.violation is not None
        assert "was written" in outcome.violation.message


def test_without_the_bug_all_seeds_hold(buggy: Scenario) -> None:
    fixed = msgspec.structs.replace(buggy, settings={"flush_first": True})
    for seed in SEEDS:
        outcome = simulate(fixed, seed, OPTIONS)
        assert outcome.ok, f"seed {seed}: {outcome.violation}"
        assert outcome.figures["written"] >= 3, f"seed {seed} hardly wrote anything"
        assert outcome.figures["reads"] > 20


def test_every_found_seed_replays_exactly(buggy: Scenario, found: list[Outcome]) -> None:
    for first in found:
        again = replay(buggy, first, OPTIONS)
        assert difference(first, again) is None, f"seed {first.seed}"
        assert again.story is not None
        assert again.story == replay(buggy, first, OPTIONS).story


def test_the_story_tells_what_happened(buggy: Scenario, found: list[Outcome]) -> None:
    story = replay(buggy, found[0], OPTIONS).story
    assert story is not None
    text = story.text()
    # The chain ends with the question whose answer was wrong; the rest names the power cut and what the disk lost.
    assert "('read'," in story.chain[-2]
    assert "('is'," in story.chain[-1]
    assert "power cut at replica" in text
    assert "that were not flushed" in text
    assert "lost: the machine is off" in text


def test_a_shrunk_schedule_still_fails_and_is_minimal(buggy: Scenario, found: list[Outcome]) -> None:
    first = found[0]
    shrunk = shrink(buggy, first, OPTIONS)
    assert shrunk.violation is not None
    assert len(shrunk.applied) < len(first.applied)
    assert any("power cut" in shrunk.faults[number] for number in shrunk.applied)
    for left_out in shrunk.applied:
        fewer = tuple(number for number in shrunk.applied if number != left_out)
        assert simulate(buggy, first.seed, msgspec.structs.replace(OPTIONS, only=fewer)).ok
