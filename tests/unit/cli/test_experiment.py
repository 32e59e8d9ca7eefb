"""``nearcast experiment``: exit codes, and stdout that a machine can read."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearcast.cli.experiment import INTERRUPTED
from nearcast.cli.main import main

TOYS = "tests.unit.experiments.toys"


@pytest.fixture(autouse=True)
def restored_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["experiment", *arguments])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_json_is_one_object_with_parameters_figures_and_bars(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, f"{TOYS}:Toy", "--json", "--quick", "--seed", "9", "--out", str(tmp_path / "x"))
    assert code == 0
    found = json.loads(out)
    assert found["parameters"] == {"scale": 0.5, "duration_s": 1.0, "seed": 9, "clients": 4}
    assert found["figures"]["seen"]["clients"] == 4
    assert [set(bar) >= {"name", "value", "bound", "ok"} for bar in found["bars"]] == [True, True]
    assert found["quick"]
    assert found["ok"]
    assert found == json.loads((tmp_path / "x/figures.json").read_text())
    assert "playing" in err
    assert "plots/line.png" in err


def test_whatever_prints_meanwhile_stdout_is_one_object(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capfd, f"{TOYS}:Talkative", "--json", "--out", str(tmp_path / "x"))
    assert code == 1
    assert [(bar["value"], bar["ok"]) for bar in json.loads(out)["bars"]] == [(None, False), (None, False)]
    for line in ("said by a library", "said by a process", "missed: clients, rate_hz"):
        assert line in err
    code, out, err = run(capfd, f"{TOYS}:Talkative", "--out", str(tmp_path / "y"))
    assert "said by" not in out
    assert "nan" in out


def test_a_missed_bar_is_said_plainly_and_exit_code_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, f"{TOYS}:Toy", "--set", "clients=5", "--out", str(tmp_path / "x"))
    assert code == 1
    assert "missed: clients" in out
    assert "≤ 4" in out


def test_bars_that_hold_are_exit_code_0(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, f"{TOYS}:Toy", "--duration", "2", "--scale", "3", "--out", str(tmp_path / "x"))
    assert code == 0
    assert "every bar holds" in out
    assert "x/plots/line.png" in out


def test_tables_are_printed_and_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, out, _ = run(capsys, f"{TOYS}:Toy", "--out", str(tmp_path / "x"))
    assert "by client" in out
    assert [line.split() for line in out.splitlines() if "first [a]" in line] == [["first", "[a]", "12,345", "1.23"]]
    assert [line.split() for line in out.splitlines() if "second" in line] == [["second", "0", "-"]]
    (table,) = json.loads((tmp_path / "x/figures.json").read_text())["tables"]
    assert table["rows"] == [["first [a]", 12345, 1.2345], ["second", 0, None]]


@pytest.mark.parametrize("clients", [2, 15])
def test_interrupted_by_sigint_or_sigterm_keeps_what_is_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, clients: int
) -> None:
    code, out, _ = run(capsys, f"{TOYS}:Interrupted", "--json", "--set", f"clients={clients}", "--out", str(tmp_path / "x"))
    assert code == INTERRUPTED
    found = json.loads(out)
    assert found["complete"] is False
    assert found["bars"][0]["value"] == 1
    assert json.loads((tmp_path / "x/figures.json").read_text()) == found


def test_interrupted_says_incomplete(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, f"{TOYS}:Interrupted", "--out", str(tmp_path / "x"))
    assert code == INTERRUPTED
    assert "incomplete: interrupted" in out
    assert "not measured" in out


def test_what_cannot_run_here_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, f"{TOYS}:Impossible", "--json", "--out", str(tmp_path / "x"))
    assert code == 1
    assert json.loads(out)["error"] == "needs root: use sudo"
    assert "failed: needs root: use sudo" in err


def test_a_wrong_name_or_setting_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "agreemnt")
    assert (code, out) == (1, "")
    assert "did you mean agreement?" in err
    code, out, err = run(capsys, f"{TOYS}:Toy", "--set", "clients")
    assert (code, out) == (1, "")
    assert "write KEY=VALUE" in err


def test_list_shows_every_experiment_with_its_bars(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0
    for word in ("simulator-scale", "wan-accuracy", "agreement", "events_per_second", "≥ 200,000"):
        assert word in out
    code, out, _ = run(capsys, "list", "--json")
    listed = json.loads(out)
    assert [entry["name"] for entry in listed][:3] == ["simulator-scale", "wan-accuracy", "agreement"]
    assert all(entry["bars"] and entry["parameters"] for entry in listed)
