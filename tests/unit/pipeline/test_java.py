"""The search for Java, with programs that only say what a Java would."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nearcast.errors import PipelineError
from nearcast.pipeline.java import Rejected, ensure_java, find_java

ANSWER = """#!/bin/sh
for argument in "$@"; do
    case "$argument" in
    --add-modules=*) [ -n "{vector}" ] || {{ echo "Error occurred during initialization of boot layer" >&2; exit 1; }};;
    -version) wanted=1;;
    esac
done
if [ -z "$wanted" ]; then printf '%s\\n' "$@"; exit; fi
echo 'Property settings:' >&2
echo '    java.home = {home}' >&2
echo '    java.version = {version}' >&2
"""


def fake_java(home: Path, version: str, *, vector: bool = True) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(ANSWER.format(vector="yes" if vector else "", home=home, version=version))
    program.chmod(0o755)
    return program


@pytest.fixture(autouse=True)
def _no_java_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}/path/bin:/usr/bin:/bin")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: _which(tmp_path))


def _which(tmp_path: Path) -> str | None:
    program = tmp_path / "path" / "bin" / "java"
    return str(program) if program.exists() else None


def test_a_given_home_comes_before_the_path(tmp_path: Path) -> None:
    fake_java(tmp_path / "home", "21.0.1")
    fake_java(tmp_path / "path", "17.0.2")
    found = ensure_java(str(tmp_path / "home"))
    assert (found.home, found.version) == (tmp_path / "home", "21.0.1")
    assert ensure_java().version == "17.0.2"


@pytest.mark.parametrize("version", ["1.8.0_392", "11.0.2", "16"])
def test_one_that_is_too_old_is_passed_over(tmp_path: Path, version: str) -> None:
    fake_java(tmp_path / "home", version)
    fake_java(tmp_path / "path", "17.0.2")
    found, rejected = find_java(str(tmp_path / "home"))
    assert found is not None
    assert found.version == "17.0.2"
    assert rejected == [Rejected(f"JAVA_HOME={tmp_path / 'home'}", f"is Java {version}, too old")]


def test_without_any_the_message_says_what_to_install_and_what_was_wrong(tmp_path: Path) -> None:
    fake_java(tmp_path / "path", "11")
    with pytest.raises(PipelineError, match=r"is Java 11, too old.*pip install 'nearcast\[java\]'") as raised:
        ensure_java(str(tmp_path / "nowhere"))
    assert f"has no {tmp_path}/nowhere/bin/java" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_one_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    program = tmp_path / "path" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho 'The operation could not be completed. Unable to locate a Java Runtime.'\nexit 1\n")
    program.chmod(0o755)
    found, rejected = find_java()
    assert found is None
    assert "Unable to locate a Java Runtime" in rejected[0].reason
    program.chmod(0o644)
    assert "does not run" in find_java()[1][0].reason


def test_one_that_says_nothing_is_passed_over(tmp_path: Path) -> None:
    program = tmp_path / "path" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_java() == (None, [Rejected(str(program), "does not say its version")])


def test_a_small_runtime_gets_a_wrapper_that_drops_the_module(tmp_path: Path) -> None:
    real = fake_java(tmp_path / "a home", "21.0.8", vector=False)
    found = ensure_java(str(tmp_path / "a home"), cache_directory=tmp_path / "cache")
    assert found.home != real.parent.parent
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-cp", "a b/*", "", "$HOME", "--add-modules=other.module"]
    said = subprocess.run([found.home / "bin" / "java", *arguments], capture_output=True, text=True, check=False)
    # The fake one refuses every module, and would say so; another module is not ours to drop.
    assert said.returncode == 1
    said = subprocess.run([found.home / "bin" / "java", *arguments[:-1]], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == ["-Xmx1g", "-cp", "a b/*", "", "$HOME"]


def test_the_wrapper_is_kept_and_mended(tmp_path: Path) -> None:
    fake_java(tmp_path / "home", "21.0.8", vector=False)
    found = ensure_java(str(tmp_path / "home"), cache_directory=tmp_path / "cache")
    program = found.home / "bin" / "java"
    made = program.stat().st_ino
    assert ensure_java(str(tmp_path / "home"), cache_directory=tmp_path / "cache") == found
    assert program.stat().st_ino == made
    program.write_text("half")
    ensure_java(str(tmp_path / "home"), cache_directory=tmp_path / "cache")
    assert program.read_text().startswith("#!/bin/sh")
    assert [path.name for path in program.parent.iterdir()] == ["java"]


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    fake_java(tmp_path / "home", "21.0.8", vector=False)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(PipelineError, match="cannot write"):
        ensure_java(str(tmp_path / "home"), cache_directory=tmp_path / "cache")
