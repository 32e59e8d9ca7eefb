"""The frame of experiments: parameters, bars, the folder, and what is left when one is interrupted or fails."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from nearcast.errors import ConfigError, LocalProtocolError, StorageUnavailable
from nearcast.experiments import Bound, Experiment, Parameters, at_least, at_most, effective_parameters, perform
from nearcast.experiments.registry import EXPERIMENTS, everything, find
from nearcast.experiments.run import default_folder
from nearcast.recording import EventWriter, MessageEvent, read_table
from tests.unit.experiments.toys import Failing, Forgetful, Impossible, Interrupted, Toy, ToyParameters


def kept(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return found


# -- parameters --


def test_quick_changes_defaults_and_what_was_asked_for_wins() -> None:
    toy = Toy()
    assert effective_parameters(toy, {}, quick=False) == ToyParameters(scale=1.0, duration_s=30.0, seed=1, clients=4)
    assert effective_parameters(toy, {}, quick=True) == ToyParameters(scale=0.5, duration_s=1.0)
    assert effective_parameters(toy, {"duration_s": 7, "clients": "9"}, quick=True) == ToyParameters(
        scale=0.5, duration_s=7.0, clients=9
    )


def test_a_list_is_given_with_commas() -> None:
    class SweepParameters(Parameters, frozen=True, kw_only=True):
        thresholds_ms: tuple[int, ...] = (10, 20)

    class Sweep(Experiment[SweepParameters]):
        name = "sweep"
        parameters = SweepParameters

    assert effective_parameters(Sweep(), {"thresholds_ms": "5, 50,"}, quick=False) == SweepParameters(thresholds_ms=(5, 50))
    with pytest.raises(ConfigError, match=r"`thresholds_ms\[1\]`: Expected `int`, got `str`"):
        effective_parameters(Sweep(), {"thresholds_ms": "5,x"}, quick=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"client": "4"}, "toy has no parameter `client`; it has scale, duration_s, seed, clients"),
        ({"clients": "many"}, "`clients`: Expected `int`"),
        ({"scale": 0}, "`scale` must be above 0"),
        ({"scale": "nan"}, "`scale` must be above 0"),
        ({"duration_s": -1}, "`duration_s` must be above 0"),
    ],
)
def test_parameters_that_make_no_sense_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        effective_parameters(Toy(), given, quick=False)


# -- bars --


def test_bounds_have_a_direction() -> None:
    assert at_least("rate", 10).measured(10).ok
    assert not at_least("rate", 10).measured(9.99).ok
    assert at_most("delay", 10).measured(10).ok
    assert not at_most("delay", 10).measured(10.01).ok
    between = Bound(at_least=1, at_most=2)
    assert [between.holds(value) for value in (0.9, 1, 2, 2.1)] == [False, True, True, False]
    assert str(between) == "≥ 1 and ≤ 2"


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_value_that_is_none_holds_no_bound(value: float | None) -> None:
    assert not at_least("rate", -math.inf).measured(value).ok


# -- a run --


def test_a_run_keeps_everything(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    outcome = perform(Toy(), ToyParameters(), folder, command="nearcast experiment toy")
    assert outcome.ok
    assert outcome.complete
    found = kept(folder)
    assert found["bars"] == [
        {"name": "clients", "bound": {"at_most": 4.0}, "meaning": "how many", "value": 4.0, "ok": True},
        {"name": "rate_hz", "bound": {"at_least": 10.0}, "meaning": "", "value": 10.0, "ok": True},
    ]
    assert found["parameters"] == {"scale": 1.0, "duration_s": 30.0, "seed": 1, "clients": 4}
    assert found["figures"] == {"seen": {"clients": 4, "broken": None}}, "JSON has no not-a-number"
    assert (folder / "command.txt").read_text() == "nearcast experiment toy\n"
    assert (folder / "scenario.json").exists()
    assert (folder / found["plots"][0]).read_bytes().startswith(b"\x89PNG")
    assert read_table(folder / found["events"][0]).num_rows == 1
    assert found["versions"]["nearcast"]
    assert {"cpu", "cores", "kernel", "stolen_share", "load_average"} <= found["machine"].keys()
    assert not list(folder.rglob(".*"))


def test_a_bar_that_is_missed_fails_the_run(tmp_path: Path) -> None:
    outcome = perform(Toy(), ToyParameters(clients=5), tmp_path / "out")
    assert outcome.complete
    assert not outcome.ok
    assert [bar.ok for bar in outcome.bars] == [False, True]


def test_a_bar_that_is_never_measured_is_missed(tmp_path: Path) -> None:
    outcome = perform(Forgetful(), ToyParameters(), tmp_path / "out")
    assert outcome.complete
    assert not outcome.ok
    assert [(bar.value, bar.ok) for bar in outcome.bars] == [(1, True), (None, False)]


def test_only_declared_bars_can_be_measured(tmp_path: Path) -> None:
    class Inventive(Toy):
        def run(self, run: Any) -> None:
            run.measured("invented", 1)

    outcome = perform(Inventive(), ToyParameters(), tmp_path / "out")
    assert outcome.error == "toy declared no bar 'invented'"


def test_a_figure_that_is_none_is_found_at_once_and_the_rest_is_kept(tmp_path: Path) -> None:
    class Confused(Toy):
        def run(self, run: Any) -> None:
            super().run(run)
            run.figure("object", object())

    with pytest.raises(NotImplementedError, match="object has no place in figures"):
        perform(Confused(), ToyParameters(), tmp_path / "out")
    found = kept(tmp_path / "out")
    assert found["error"].startswith("internal error")
    assert [bar["ok"] for bar in found["bars"]] == [True, True]


def test_parts_of_a_run_have_folders_and_events_of_their_own(tmp_path: Path) -> None:
    class Sweeping(Toy):
        def run(self, run: Any) -> None:
            for size in (1, 2):
                run.keep(f"sizes/{size}/scenario.json", {"size": size})
                with EventWriter(run.new_events(f"sizes/{size}"), f"size {size}") as events:
                    events.write(MessageEvent(kind="connected", at_ns=1, client="c"))
            run.new_events("sizes/1")

    outcome = perform(Sweeping(), ToyParameters(), tmp_path / "out")
    assert outcome.error == "events/sizes/1 holds events already: give each part of a run a name of its own"
    assert outcome.events == ["events/sizes/1", "events/sizes/2"]
    assert (tmp_path / "out/sizes/2/scenario.json").exists()


def test_an_interrupted_run_keeps_what_is_there_and_says_incomplete(tmp_path: Path) -> None:
    outcome = perform(Interrupted(), ToyParameters(), tmp_path / "out")
    assert (outcome.complete, outcome.ok, outcome.error) == (False, False, "interrupted")
    found = kept(tmp_path / "out")
    assert not found["complete"]
    assert found["bars"][0]["ok"]


def test_from_the_beginning_the_folder_says_incomplete(tmp_path: Path) -> None:
    class Curious(Toy):
        def run(self, run: Any) -> None:
            assert kept(tmp_path / "out")["complete"] is False
            super().run(run)

    assert perform(Curious(), ToyParameters(), tmp_path / "out").ok


def test_what_goes_wrong_is_one_line_in_the_outcome(tmp_path: Path) -> None:
    outcome = perform(Failing(), ToyParameters(), tmp_path / "out")
    assert (outcome.complete, outcome.error) == (False, "the disk is full")
    assert kept(tmp_path / "out")["error"] == "the disk is full"


def test_what_goes_wrong_in_a_task_group_is_one_line_too(tmp_path: Path) -> None:
    class Grouped(Toy):
        def run(self, run: Any) -> None:
            raise ExceptionGroup("tasks", [ValueError("x"), ExceptionGroup("inner", [ConfigError("no room")])])

    assert perform(Grouped(), ToyParameters(), tmp_path / "out").error == "no room"


def test_a_defect_is_raised_after_everything_was_kept(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        perform(Failing(), ToyParameters(clients=0), tmp_path / "out")
    assert kept(tmp_path / "out")["error"] == "internal error: ZeroDivisionError('a defect')"


def test_what_cannot_run_here_leaves_nothing(tmp_path: Path) -> None:
    outcome = perform(Impossible(), ToyParameters(), tmp_path / "out")
    assert (outcome.error, outcome.folder, outcome.ok) == ("needs root: use sudo", None, False)
    assert not (tmp_path / "out").exists()


def test_results_of_two_runs_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "figures.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not empty"):
        perform(Toy(), ToyParameters(), tmp_path)


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageUnavailable, match="name another folder with --out"):
        perform(Toy(), ToyParameters(), tmp_path / "file" / "out")


def test_default_folders_have_name_and_time_and_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 11, 16, 8, 30, 1, tzinfo=UTC)
    first = default_folder("toy", now)
    assert first == Path("experiments/toy-20261116T083001Z")
    first.mkdir(parents=True)
    assert default_folder("toy", now) == Path("experiments/toy-20261116T083001Z-2")


# -- the registry --


def test_every_registered_experiment_is_whole() -> None:
    for name, experiment in zip(EXPERIMENTS, everything(), strict=True):
        assert experiment.name == name
        assert experiment.summary.endswith((".", "?"))
        assert len(experiment.summary) < 120
        for quick in (False, True):
            parameters = effective_parameters(experiment, {}, quick=quick)
            bars = experiment.bars(parameters)
            assert bars
            assert len({bar.name for bar in bars}) == len(bars)
            assert all(bar.meaning and not bar.ok and bar.value is None for bar in bars)


def test_an_experiment_of_ones_own_is_found_by_its_place() -> None:
    assert isinstance(find("tests.unit.experiments.toys:Toy"), Toy)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("agreemnt", "did you mean agreement?"),
        ("zzz", "there are simulator-scale"),
        ("nowhere.at_all:Toy", "Python finds no module nowhere"),
        (":", "no experiment is called :"),
        ("..x:Toy", "no experiment is called ..x:Toy"),
        ("tests.unit.experiments.toys:Absent", "has no subclass of Experiment called Absent"),
        ("tests.unit.experiments.toys:ToyParameters", "has no subclass of Experiment"),
    ],
)
def test_a_name_that_is_none_gets_help(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find(name)


def test_base_methods_have_to_be_written() -> None:
    with pytest.raises(NotImplementedError):
        Experiment[ToyParameters]().bars(ToyParameters())
    assert issubclass(LocalProtocolError, Exception)
