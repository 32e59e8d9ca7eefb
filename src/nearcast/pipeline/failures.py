"""Failures of Spark in one line.

Spark wraps what went wrong in layers: a stage that failed because a task failed because a Python worker raised. What a person
needs is the innermost, with the line of their own file; the rest belongs into the log.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from nearcast.errors import NearcastError, PipelineError

_MAX_LINE = 400
_PYTHON_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)', re.MULTILINE)
_PYTHON_ERROR = re.compile(r"^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|[A-Z]\w*)): (?P<text>.*)$")
_CONDITION = re.compile(r"^\[(?P<condition>[A-Z0-9_.]+)\] ?")
_SPARK_PATHS = ("/pyspark/", "/py4j/", "/pyspark.zip/", "<frozen", "/lib/python3")


def in_one_line(error: BaseException, user_file: Path | None = None, log_text: str = "") -> str:
    """What went wrong; ``user_file`` is whose lines are worth naming, ``log_text`` the end of Spark's log."""
    if isinstance(error, NearcastError) and user_file is None:
        return str(error)
    text = _spark_text(error)
    if text is None:
        return _shorten(_place(error, user_file) + _describe(error))
    if _is_lost_jvm(error):
        if "OutOfMemoryError" in log_text:
            return "Spark's Java ran out of memory: give it more with --driver-memory 4g"
        return "Spark's Java ended unexpectedly (killed, or out of memory: the log may say why)"
    if "java.lang.OutOfMemoryError" in text:
        return "Spark's Java ran out of memory: give it more with --driver-memory 4g"
    if "All masters are unresponsive" in text or "All masters are unresponsive" in log_text:
        return "no Spark master answers at the URL of --master"
    remote = _remote_python(text, user_file)
    if remote is not None:
        return _shorten(remote)
    return _shorten(_place(error, user_file) + _first_sentence(text))


def whole_story(error: BaseException) -> str:
    """Everything, for the log: our stack, and Spark's."""
    story = "".join(traceback.format_exception(error))
    java = _java_stack(error)
    return story if java is None else f"{story}\nin Java:\n{java}\n"


def user_error(error: BaseException, file: Path) -> PipelineError:
    """What a user's file raised, with the line."""
    return PipelineError(in_one_line(error, file))


def _describe(error: BaseException) -> str:
    if isinstance(error, NearcastError):
        return str(error)
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place(error: BaseException, user_file: Path | None) -> str:
    """``file.py:12: `` of the innermost frame in the user's file."""
    if user_file is None:
        return ""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).name == user_file.name:
        return f"{user_file}:{error.lineno}: "
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename) == user_file.absolute() or frame.filename == str(user_file):
            return f"{user_file}:{frame.lineno}: "
    return ""


def _spark_text(error: BaseException) -> str | None:
    """The message of an error that came out of Spark; None for others."""
    try:
        from py4j.protocol import Py4JError, Py4JJavaError
        from pyspark.errors import PySparkException
    except ImportError:
        return None
    if isinstance(error, PySparkException):
        # str() of an error that Java raised asks Java again, and appends its stack.
        said = getattr(error, "_desc", None)
        return said if isinstance(said, str) and said else str(error) or type(error).__name__
    if isinstance(error, Py4JJavaError):
        return _root_cause(error.java_exception)
    if isinstance(error, (Py4JError, ConnectionError)):
        return str(error) or type(error).__name__
    return None


def _is_lost_jvm(error: BaseException) -> bool:
    from py4j.protocol import Py4JJavaError, Py4JNetworkError

    if isinstance(error, Py4JJavaError):
        return False
    return isinstance(error, (Py4JNetworkError, ConnectionError)) or "Answer from Java side is empty" in str(error)


def _root_cause(exception: object) -> str:
    """The messages of a Java exception and what caused it, outermost first."""
    parts: list[str] = []
    try:
        while exception is not None and len(parts) < 20:
            parts.append(str(exception.toString()))  # type: ignore[attr-defined]
            exception = exception.getCause()  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001  # a JVM that is gone cannot be asked; what it said so far has to do
        parts.append("(Spark's Java ended)")
    return "\n".join(parts)


def _java_stack(error: BaseException) -> str | None:
    for each in (error, error.__cause__, error.__context__):
        for name in ("_stackTrace", "_stacktrace"):
            stack = getattr(each, name, None)
            if isinstance(stack, str) and stack:
                return stack
    return None


def _remote_python(text: str, user_file: Path | None) -> str | None:
    """The innermost error of a Python worker's traceback inside a message of Spark, with the line it came from."""
    if "Traceback (most recent call last)" not in text:
        return None
    last = text[text.rindex("Traceback (most recent call last)") :]
    lines = last.splitlines()
    frames = list(_PYTHON_FRAME.finditer(last))
    errors = [match for line in lines if (match := _PYTHON_ERROR.match(line.strip())) and not line.startswith("  ")]
    if not errors:
        return None
    said = f"{errors[0]['type'].rpartition('.')[2]}: {errors[0]['text'].strip()}"
    if errors[0]["type"].startswith("nearcast.errors."):
        said = errors[0]["text"].strip()
    for frame in reversed(frames):
        path = Path(frame["file"])
        if user_file is not None and path.name == user_file.name:
            return f"{user_file}:{frame['line']}: {said}"
    return said


def _first_sentence(text: str) -> str:
    """The first line that says something, without Spark's condition in brackets and the names of Java's classes."""
    for line in text.splitlines():
        line = _CONDITION.sub("", line.strip())
        line = re.sub(r"^(?:[a-z]\w*\.)+[A-Z]\w*: ", "", line)
        line = _CONDITION.sub("", line)
        line = re.sub(r" ?SQLSTATE: \w+(; line \d+ pos \d+)?;?$", "", line)
        if line:
            return line
    return text.strip() or "Spark failed"


def _shorten(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 1] + "…"
