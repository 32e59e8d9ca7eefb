"""The guide's example is an experiment that runs, and its tables name what there is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest

from nearcast.experiments import Bar, Parameters, effective_parameters, perform
from nearcast.experiments.registry import everything, find
from nearcast.load import LoadSpec

GUIDE = Path(__file__).resolve().parents[3] / "docs/guides/experiments.md"


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [example] = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "guide_example.py").write_text(example)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        experiment = find("guide_example:RoundTrips")
        outcome = perform(experiment, effective_parameters(experiment, {}, quick=True), tmp_path / "out", quick=True)
    finally:
        sys.modules.pop("guide_example", None)
    assert outcome.ok, outcome
    assert outcome.plots == ["plots/round-trips.png"]


def test_the_json_examples_are_what_they_say() -> None:
    bar, spec = re.findall(r"^```json\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    found = msgspec.json.decode(bar, type=Bar)
    assert found.bound.holds(found.value) == found.ok
    assert msgspec.json.decode(spec, type=LoadSpec).addresses == {"broker-1": "127.0.0.1:1883"}


def test_the_table_has_every_experiment_with_its_parameters() -> None:
    [table] = re.findall(r"^\| name \| what it runs .*?\n\n", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    common = set(Parameters.__struct_fields__)
    for experiment in everything():
        [row] = re.findall(rf"^\| `{experiment.name}` \|.*$", table, re.MULTILINE)
        for parameter in set(experiment.parameters.__struct_fields__) - common:
            assert f"`{parameter}`" in row, f"{experiment.name}: {parameter} is not in the guide"
