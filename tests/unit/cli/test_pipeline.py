"""``nearcast pipeline`` without a JVM: what it lists, what it refuses and how."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from nearcast.cli import pipeline
from nearcast.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["pipeline", *arguments])
    captured = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code, _, err = run(capsys, "run", *arguments)
    assert code == 1
    lines = err.strip().splitlines()
    assert len(lines) == 1, "one line, and nothing was started"
    return lines[0]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0
    for name in ("evaluate", "archive", "sweep", "FILE.py"):
        assert name in out
    code, out, _ = run(capsys, "list", "--json")
    assert {"evaluate", "archive", "sweep"} <= {job["name"] for job in json.loads(out)}


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["ok"]
    assert answer["java"]["version"]
    assert answer["packages"]["pyspark"].startswith("4.")
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert answer["java"]["version"] in out


def test_help_of_a_job_names_its_options_and_ours(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "run", "sweep", "--help")
    assert code == 0
    for option in ("--function", "--set", "--seeds", "--out", "--retry-failed", "--summary", "--master", "--conf", "--json"):
        assert option in out
    code, out, _ = run(capsys, "run", "mine.py", "--help")
    assert code == 0
    assert "--available-now" in out


def test_a_job_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no job 'nonsense': there are evaluate, archive, telemetry, sweep" in complaint(capsys, "nonsense")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "there is no file"),
        ("x = 1\n", "has no function pipeline"),
        ("def pipeline(spark):\n    pass\n", "must take two arguments"),
        ("import nothing_of_this_name\n", "mine.py:1: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("x = 1\n\nraise ValueError('broken')\n", "mine.py:3: ValueError: broken"),
        ("x = 1\ndef pipeline(:\n", "mine.py:2: SyntaxError"),
    ],
)
def test_files_that_are_no_pipelines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, expected: str
) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    assert expected in complaint(capsys, str(file))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--set", "a"], "--set a: write NAME=VALUE"),
        (["--seeds", "none"], "--seeds none"),
        (["--function", "nowhere:at_all"], "cannot import nowhere"),
        (["--function", "nonsense"], "names no function"),
        (["--function", "math:nonsense"], "math has no function nonsense"),
        (["--function", "gone.py:f"], "there is no file gone.py"),
        (["--function", "nearcast.experiments.sweeping:simulate"], "the parameter `scenario` is missing"),
        (["--points-per-task", "0"], "--points-per-task: Expected `int` >= 1"),
        (["--conf", "nonsense"], "--conf nonsense: write KEY=VALUE"),
    ],
)
def test_sweeps_that_are_none(capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], expected: str) -> None:
    given = options if "--function" in options else ["--function", "math:pow", *options]
    assert expected in complaint(capsys, "sweep", "--out", str(tmp_path / "out"), *given)
    assert not (tmp_path / "out").exists()


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "run", "sweep")[0] == 2
    assert run(capsys, "run", "sweep", "--nonsense")[0] == 2


def test_without_spark_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name == "pyspark" else real(name, package)

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    said = complaint(capsys, "sweep", "--function", "math:pow", "--out", str(tmp_path / "out"))
    assert "pip install 'nearcast[pipeline]'" in said


def test_without_java_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("nearcast.pipeline.java._candidates", lambda java_home: [])
    code, _, err = run(capsys, "run", "sweep", "--function", "math:pow", "--out", str(tmp_path / "out"))
    assert code == 1
    assert "pip install 'nearcast[java]'" in err
    assert "Traceback" not in err


def test_old_logs_go(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    logs = tmp_path / "cache" / "nearcast" / "logs"
    logs.mkdir(parents=True)
    for number in range(30):
        (logs / f"pipeline-{number:02}.log").touch()
    complaint(capsys, str(tmp_path / "gone.py"))
    left = sorted(path.name for path in logs.iterdir())
    assert len(left) == 19
    assert left[-1] == "pipeline-29.log"


def test_a_job_under_nohup_goes_on_when_its_terminal_is_closed() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pipeline._end_in_order()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is pipeline._interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
