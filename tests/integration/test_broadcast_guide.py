"""docs/guides/broadcast-groups.md: its commands work, in their order, and show what it says."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.broker.running import PATIENCE_SECONDS, wait_for
from tests.integration.tools import require

pytestmark = pytest.mark.integration

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "broadcast-groups.md"


def commands() -> list[str]:
    """The commands of all console blocks."""
    blocks = re.findall(r"^```console\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in re.findall(r"^\$ (.*)$", block, re.MULTILINE)]


def free_pair() -> int:
    """A free port with a free one right above, where a broker has its links."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


class Tutorial:
    """Runs the guide's commands with ports that are free on this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ports: dict[str, str] = {}
        self.running: list[subprocess.Popen[str]] = []

    def adapted(self, text: str) -> str:
        def other(found: re.Match[str]) -> str:
            return self._ports.setdefault(found.group(), str(free_pair()))

        return re.sub(r"\b(?:1883|[234][01]01)\b", other, text)

    def _command(self, line: str) -> list[str]:
        program, *words = shlex.split(self.adapted(line))
        if words[0] == "broker":
            words += ["--group-threshold", "1000"]  # a busy machine may be slow to answer
        return [sys.executable, "-m", "nearcast", *words] if program == "nearcast" else [str(require(program)), *words]

    def begin(self, line: str) -> subprocess.Popen[str]:
        """A command that goes on."""
        log = (self._directory / f"{len(self.running)}.log").open("w")
        with log:
            process = subprocess.Popen(
                self._command(line),
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.running.append(process)
        return process

    def run(self, line: str) -> str:
        """A command that ends."""
        done = self._run(line)
        assert done.returncode == 0, (line, done.stderr)
        return done.stdout

    def shows(self, line: str, pattern: str) -> bool:
        """Whether a command says this by now."""
        return re.search(pattern, self._run(line).stdout, re.MULTILINE) is not None

    def _run(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._command(line), cwd=self._directory, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )

    def end(self) -> None:
        for process in reversed(self.running):
            process.terminate()
        for process in self.running:
            process.communicate(timeout=PATIENCE_SECONDS)


@pytest.fixture
def tutorial(tmp_path: Path) -> Iterator[Tutorial]:
    made = Tutorial(tmp_path)
    (block,) = re.findall(r"^```conf\n# mosquitto.conf\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    root = "user root\n" if os.geteuid() == 0 else ""
    (tmp_path / "mosquitto.conf").write_text(made.adapted(block) + root)
    yield made
    made.end()


def test_the_guide(tutorial: Tutorial) -> None:
    given = iter(commands())
    tutorial.begin(next(given))
    assert "made fabric.secret" in tutorial.run(next(given))
    for _ in range(3):
        tutorial.begin(next(given))
    groups = next(given)
    member = r"^  (berlin|potsdam) +member +[\d.]+ ms .* not needed +live +0 *$"
    wait_for("two groups", lambda: tutorial.shows(groups, "2 groups of 3 brokers") and tutorial.shows(groups, member))
    shown = tutorial.run(groups)
    assert re.search(r"^(berlin|potsdam) +leads .* connected +live +0 *$", shown, re.MULTILINE), shown
    assert re.search(r"^tokyo +leads ", shown, re.MULTILINE), shown
    _subscribed_and_published(tutorial, [next(given), next(given)], next(given), "cars/7 ice ahead\n")
    _subscribed_and_published(tutorial, [next(given)], next(given), "cars/8 from the office\n")
    assert list(given) == []


def _subscribed_and_published(tutorial: Tutorial, subscribing: list[str], publishing: str, expected: str) -> None:
    """Publishes until every subscriber has shown the message: nothing says when they have subscribed."""
    subscribers = [tutorial.begin(line) for line in subscribing]

    def shown() -> bool:
        tutorial.run(publishing)
        return all(process.poll() is not None for process in subscribers)

    wait_for("the message", shown)
    assert [process.communicate()[0] for process in subscribers] == [expected] * len(subscribers)
