"""WANs as tests start them, and how they look for what one may have left behind.

A WAN is started in an environment with a mark; every process of it inherits the mark, whatever namespace it is in and whoever
its parent has become. When no process has the mark, nothing holds a namespace or a device, and the kernel has removed them.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from nearcast.cli.main import main
from nearcast.emulation import namespaces

PATIENCE_SECONDS = 30.0

_MARK = "NEARCAST_TEST_MARK"

#: Two sites 20 ms apart. A process with children of all kinds: in its group, in a session of its own, orphaned.
FAMILY = """
name = "family"
[[sites]]
name = "east"
[[sites]]
name = "west"
[[links]]
between = ["east", "west"]
latency_ms = 20
[[hosts]]
name = "one"
site = "east"
ports = [7000]
[[hosts]]
name = "two"
site = "west"
[[processes]]
name = "parent"
host = "one"
command = ["sh", "-c", "sleep 1001 & setsid sleep 1002 & (setsid sleep 1003 &) ; echo family complete; exec sleep 1004"]
ready = { log = "family complete" }
"""


def require_namespaces() -> None:
    """Skip the calling test where hosts cannot have network namespaces, and say why."""
    obstacle = namespaces.available()
    if obstacle is not None:
        pytest.skip(obstacle)


def modes() -> list[Any]:
    """Both modes, the one that needs root skipped without it."""
    obstacle = namespaces.available()
    skip = pytest.mark.skipif(obstacle is not None, reason=obstacle or "")
    return [pytest.param("namespaces", marks=skip), "loopback"]


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Until something holds; fails with its name when it does not for too long."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come to be within {PATIENCE_SECONDS:g} s"
        time.sleep(0.01)


def calm(measure: Callable[[], float], below: float) -> float:
    """Measure again until the result is below a bound: a machine that was busy for a moment gets there, a network that is
    too slow does not. Returns the last result."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        result = measure()
        if result < below or time.monotonic() > deadline:
            return result


class MarkedWan:
    """``nearcast wan up`` as a process of its own, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.base = directory / "wans"
        self.mark = uuid.uuid4().hex
        self.environment = {**os.environ, _MARK: self.mark, "NEARCAST_WAN_DIRECTORY": str(self.base)}
        self.process: subprocess.Popen[str] | None = None

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "nearcast", "wan", *arguments]

    def up(self, text: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """Start it in the foreground; returns while it may still be starting."""
        topology = self.directory / "topology.toml"
        topology.write_text(text)
        self.process = subprocess.Popen(
            [*prefix, *self.command("up", str(topology), *arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=self.directory,
            start_new_session=True,
        )
        return self.process

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another ``nearcast wan`` command, to its end; in this process, which saves its start."""
        output, complaints = io.StringIO(), io.StringIO()
        given = {"NEARCAST_WAN_DIRECTORY": str(self.base)}
        with (
            mock.patch.dict(os.environ, given),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(complaints),
            pytest.raises(SystemExit) as ended,
        ):
            main(["wan", *arguments])
        return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), output.getvalue(), complaints.getvalue())

    def execute(self, *arguments: str, input: str | None = None) -> subprocess.CompletedProcess[str]:  # noqa: A002
        """``nearcast wan exec``, which needs real standard streams."""
        return subprocess.run(
            self.command("exec", *arguments),
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.directory,
            timeout=60,
            check=False,
            input=input,
        )

    def wait_for_line(self, text: str) -> str:
        """Read the command's output up to a line with this text."""
        assert self.process is not None
        assert self.process.stdout is not None
        seen = ""
        for line in self.process.stdout:
            seen += line
            if text in line:
                return line
        complaint = self.process.stderr.read() if self.process.stderr else ""
        pytest.fail(f"{text!r} was not said, but: {seen}{complaint}")

    def launcher(self) -> psutil.Process:
        assert self.process is not None
        wait_until(lambda: psutil.Process(self.process.pid).children(), "a launcher")  # type: ignore[union-attr]
        return psutil.Process(self.process.pid).children()[0]

    def keeper(self) -> psutil.Process:
        launcher = self.launcher()
        wait_until(launcher.children, "a keeper")
        return launcher.children()[0]

    def survivors(self) -> list[str]:
        """Processes that have the mark, besides the command itself."""
        found = []
        wanted = f"{_MARK}={self.mark}".encode()
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found.append(f"{process.pid} {' '.join(process.cmdline())}")
        return found

    def programs(self) -> list[str]:
        """Programs of the WAN, not the commands that asked for them."""
        return [line for line in self.survivors() if "nearcast" not in line]

    def left_behind(self) -> list[str]:
        """Directories and sockets of WANs."""
        return [str(path) for path in self.base.rglob("*")] if self.base.exists() else []

    def end(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


@contextlib.contextmanager
def marked_wan(directory: Path) -> Iterator[MarkedWan]:
    """A WAN to start; whatever happens, nothing of it is left for the next test."""
    wan = MarkedWan(directory)
    try:
        yield wan
    finally:
        wan.end()
        for line in wan.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
