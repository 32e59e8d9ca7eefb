"""What a person reads when Spark fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import AnalysisException, PySparkException

from nearcast.errors import PipelineError, TopicUnknown
from nearcast.pipeline.failures import in_one_line, whole_story

WORKER = """[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: Job aborted due to stage failure: Task 0 in
stage 1.0 failed 1 times, most recent failure: Lost task: org.apache.spark.api.python.PythonException: Traceback (most recent
call last):
  File "/opt/pyspark/worker.py", line 1984, in main
    process()
  File "/home/me/jobs/mine.py", line 3, in broken
    return 1 / (x - 3)
           ~~^~~~~~~~~
{error}

	at org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:654)
""".replace("recent\ncall", "recent call")


def captured(text: str) -> PySparkException:
    error = PySparkException(text)
    error._desc = text  # type: ignore[attr-defined]
    return error


def test_our_own_errors_are_told_as_they_are() -> None:
    assert in_one_line(TopicUnknown("t", "no such topic: t")) == "no such topic: t"


def test_an_error_of_a_worker_is_told_by_its_innermost_line_in_the_users_file() -> None:
    error = captured(WORKER.format(error="ZeroDivisionError: division by zero"))
    assert in_one_line(error) == "ZeroDivisionError: division by zero"
    assert in_one_line(error, Path("jobs/mine.py")) == "jobs/mine.py:3: ZeroDivisionError: division by zero"
    assert in_one_line(error, Path("other.py")) == "ZeroDivisionError: division by zero"


def test_our_own_errors_are_told_as_they_are_out_of_a_worker_too() -> None:
    error = captured(WORKER.format(error="nearcast.errors.PipelineError: option url is missing"))
    assert in_one_line(error) == "option url is missing"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "[UNRESOLVED_COLUMN.WITH_SUGGESTION] No column `nope`. SQLSTATE: 42703; line 1 pos 0;\nPlan",
            "No column `nope`.",
        ),
        ("[PATH_NOT_FOUND] Path does not exist: file:/x. SQLSTATE: 42K03", "Path does not exist: file:/x."),
        ("org.apache.spark.SparkException: [X_Y] It broke.", "It broke."),
        ("\n\njava.lang.IllegalArgumentException: System memory 1 is too little", "System memory 1 is too little"),
        ("java.lang.OutOfMemoryError: Java heap", "Spark's Java ran out of memory: give it more with --driver-memory 4g"),
    ],
)  # fmt: skip
def test_sparks_own_errors_lose_their_brackets(text: str, line: str) -> None:
    assert in_one_line(captured(text)) == line


def test_a_lost_jvm() -> None:
    said = "Answer from Java side is empty"
    for error in (Py4JNetworkError(said), ConnectionRefusedError("refused"), Py4JError(said)):
        assert "ended unexpectedly" in in_one_line(error)
    assert "--driver-memory" in in_one_line(Py4JNetworkError("x"), log_text="java.lang.OutOfMemoryError: Java heap space")


def test_no_master() -> None:
    error = captured("SparkContext was shut down")
    assert (
        in_one_line(error, log_text="ERROR All masters are unresponsive! Giving up.")
        == "no Spark master answers at the URL of --master"
    )


def test_an_error_of_the_users_file_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def pipeline():\n    helper()\n\n\ndef helper():\n    raise KeyError('x')\n")
    namespace: dict[str, object] = {}
    exec(compile(file.read_text(), str(file), "exec"), namespace)  # noqa: S102
    with pytest.raises(KeyError) as raised:
        namespace["pipeline"]()  # type: ignore[operator]
    assert in_one_line(raised.value, file) == f"{file}:6: KeyError: 'x'"


def test_one_line_is_one_line_and_not_endless() -> None:
    line = in_one_line(RuntimeError("a\nb\n" + "c" * 10_000))
    assert "\n" not in line
    assert len(line) <= 400
    assert in_one_line(RuntimeError()) == "RuntimeError"


def test_the_whole_story_has_both_stacks() -> None:
    error = AnalysisException("broken")
    error._stackTrace = "at org.apache.spark.X"  # type: ignore[attr-defined]
    assert "at org.apache.spark.X" in whole_story(error)
    assert "PipelineError: x" in whole_story(PipelineError("x"))
