"""``nearcast simulate`` as a user sees it: summary, story, exit code, the command that replays it, JSON, refusals."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from nearcast.cli.main import main

SCENARIO = str(Path(__file__).parents[2] / "simulation" / "register.toml")
CHEAT = """
import itertools
from nearcast.simulation import Node, Protocol
runs = itertools.count()

class Broken(Node):
    def woken(self):
        {}["missing"]
    def start(self):
        self.host.wake_at(1.0)

class Breaks(Protocol):
    def build(self, world, scenario):
        world.place("a", Broken)
        return []

class Unbuilt(Protocol):
    def build(self, world, scenario):
        return scenario.settings["missing"]

class Acts(Protocol):
    def build(self, world, scenario):
        world.at(1.0, lambda: 1 / 0)
        return []

class Endless(Protocol):
    def build(self, world, scenario):
        return []
    def report(self):
        return {"mean": float("nan")}

class Cheats(Protocol):
    def build(self, world, scenario):
        world.place("a", Node)
        world.at(0.1 + next(runs) / 100, lambda: world.hosts[0].send(0, b"", 1))
        return []
"""
OWN = """
name = "own"
protocol = "own.py:%s"
duration_s = 5
topology = { name = "one", sites = [{ name = "s" }], hosts = [{ name = "a", site = "s" }] }
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *arguments])
    captured = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 1), captured.out, captured.err


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(CHEAT)
    for name in ("Breaks", "Cheats", "Unbuilt", "Acts", "Endless"):
        (tmp_path / f"{name.lower()}.toml").write_text(OWN % name)
    return tmp_path


def failing_seed(capsys: pytest.CaptureFixture[str]) -> int:
    code, out, _ = run(capsys, SCENARIO, "--seeds", "25", "--jobs", "1", "--json")
    assert code == 1
    return int(json.loads(out)["failed"][0])


def test_a_run_that_holds(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, SCENARIO, "--seed", "1")
    assert (code, err) == (0, "")
    assert re.match(r"ok  register, seed 1: 45\.0 virtual seconds in .* events \(.* a second\)\n", out)
    assert re.search(r"written: \d+\n", out)
    assert re.search(r"faults: \d+; digest [0-9a-f]{11}\n", out)


def test_a_failure_tells_its_story_and_the_command_that_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    seed = failing_seed(capsys)
    code, out, _ = run(capsys, SCENARIO, "--seed", str(seed), "--shrink")
    assert code == 1
    assert out.startswith("failed  register")
    assert re.search(rf"seed {seed}, [\d.]+ s: \d+ was written, and \d+ was read", out)
    assert "How it came about:" in out
    assert "What those involved did last:" in out
    assert re.search(r"Faults: the \d of \d+ that it takes", out)
    command = out.rpartition("Replay: ")[2]
    words = shlex.split(command)
    assert words[:3] == ["nearcast", "simulate", SCENARIO]
    assert "--only" in words
    again_code, again, _ = run(capsys, *words[2:])
    assert again_code == 1
    story = out[out.index("How it came about:") : out.index("\nFaults:")]
    assert story in again


def test_many_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, SCENARIO, "--seeds", "25", "--jobs", "1")
    assert code == 1
    assert re.search(r"\d+ of 25 seeds keep every invariant", out)
    assert re.search(r"Replay: nearcast simulate \S+ --seed \d+\n", out)
    assert "--shrink" in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, SCENARIO, "--seeds", "25", "--jobs", "1", "--json", "--duration", "30")
    found = json.loads(out)
    assert (code, found["ok"]) == (1, False)
    assert len(found["runs"]) == 25
    failed = [each for each in found["runs"] if not each["ok"]]
    assert [each["seed"] for each in failed] == found["failed"]
    assert failed[0]["story"]["last"]
    assert failed[0]["violation"]["message"]
    assert found["replay"] == f"nearcast simulate {SCENARIO} --seed {found['failed'][0]} --duration 30"


def test_the_replay_has_the_duration_to_the_last_digit(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    _, out, _ = run(capsys, str(own / "breaks.toml"), "--duration", "1234567.8125")
    assert out.endswith("--seed 1 --duration 1234567.8125\n")


def test_figures_that_are_no_numbers_are_still_json(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    _, out, _ = run(capsys, str(own / "endless.toml"), "--json")
    assert "NaN" not in out
    assert json.loads(out)["runs"][0]["figures"] == {"mean": None}


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--list")
    assert code == 0
    assert "probes" in out
    code, out, _ = run(capsys, "--list", "--json")
    assert {"name", "protocol", "description"} == set(json.loads(out)[0])


def test_trace(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, SCENARIO, "--seed", "1", "--trace", "--duration", "1", "--only", "none")
    assert code == 0
    assert re.search(r"0\.000000 s  writer +sends #\d+ to replica-1: \('write', 1\)", out)
    assert re.search(r"replica-1 +receives #\d+ from writer, sent 0\.000000 s: \('write', 1\)", out)


def test_verify(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    assert run(capsys, SCENARIO, "--verify")[0] == 0
    code, _, err = run(capsys, str(own / "cheats.toml"), "--verify")
    assert code == 1
    assert "seed 1 does not determine the run" in err
    code, _, err = run(capsys, str(own / "cheats.toml"), "--verify", "--seeds", "2", "--jobs", "1")
    assert "does not determine the run" in err


def test_a_node_that_raises(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    code, out, _ = run(capsys, str(own / "breaks.toml"))
    assert code == 1
    assert "seed 1, 1.000000 s: a raised KeyError: 'missing' (own.py:8)" in out
    assert "What the node raised:" in out
    assert '{}["missing"]' in out


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("unbuilt", r"raised KeyError: 'missing' \(own.py:\d+\)"), ("acts", r"raised ZeroDivisionError: .* \(own.py:\d+\)")],
)
def test_a_protocol_that_raises_is_one_line(capsys: pytest.CaptureFixture[str], own: Path, name: str, complaint: str) -> None:
    code, _, err = run(capsys, str(own / f"{name}.toml"))
    assert code == 1
    assert re.search(complaint, err)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nowhere",), "no scenario 'nowhere'"),
        (("nowhere.toml",), "nowhere.toml"),
        ((SCENARIO, "--only", "99"), "there is no fault 99"),
        ((SCENARIO, "--max-events", "10"), "more than 10 events"),
        ((SCENARIO, "--max-events", "10", "--seeds", "3", "--jobs", "1"), "seed 1: more than 10 events"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 1
    assert complaint in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        (SCENARIO, "--only", "first"),
        (SCENARIO, "--trace", "--json"),
        (SCENARIO, "--trace", "--verify"),
        (SCENARIO, "--seeds", "0"),
        ("--json",),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    assert run(capsys, *arguments)[0] == 2
