"""docs/guides/owned-topics.md: its commands work, in their order, and show what it says."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.broker.running import PATIENCE_SECONDS, wait_for

pytestmark = pytest.mark.integration

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "owned-topics.md"
TOPIC = "swarm/7/position"


def commands() -> list[str]:
    """The commands of all console blocks."""
    blocks = re.findall(r"^```console\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in re.findall(r"^\$ (.*)$", block, re.MULTILINE)]


def free_ports(kind: int, count: int) -> int:
    """A free port, and so many in a row: a broker has its links right above."""
    while True:
        held = [socket.socket(socket.AF_INET, kind) for _ in range(count)]
        try:
            held[0].bind(("127.0.0.1", 0))
            port = int(held[0].getsockname()[1])
            for number, one in enumerate(held[1:], 1):
                one.bind(("127.0.0.1", port + number))
        except OSError:
            continue
        finally:
            for one in held:
                one.close()
        return port


class Tutorial:
    """Runs the guide's commands in a shell, with ports that are free on this machine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ports: dict[str, str] = {}
        self._api = str(free_ports(socket.SOCK_STREAM, 1))
        self._environment = {**os.environ, "NEARCAST_API": f"http://127.0.0.1:{self._api}", "COLUMNS": "160"}
        self._running: list[subprocess.Popen[str]] = []

    def _adapted(self, line: str) -> str:
        def other(found: re.Match[str]) -> str:
            return self._ports.setdefault(found.group(), str(free_ports(socket.SOCK_STREAM, 2)))

        if line.startswith("nearcast controller"):
            line = line.replace("nearcast controller", f"nearcast controller --port 1885 --http-port {self._api}")
        shell = f'nearcast() {{ {shlex.quote(sys.executable)} -m nearcast "$@"; }}\n'
        return shell + re.sub(r"\b(?:188[35]|[234]001)\b", other, line)

    def export(self, line: str) -> None:
        name, _, value = line.removeprefix("export ").partition("=")
        self._environment[name] = value

    def begin(self, line: str) -> Path:
        """A command that goes on; returns the file with what it prints."""
        shown = self.directory / f"{len(self._running)}.out"
        with shown.open("w") as out, shown.with_suffix(".log").open("w") as log:
            self._running.append(
                subprocess.Popen(
                    ["bash", "-c", self._adapted(line)],
                    cwd=self.directory,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
            )
        return shown

    def interrupt(self, place: int) -> None:
        """Ctrl-C."""
        process = self._running[place]
        os.killpg(process.pid, signal.SIGINT)
        process.wait(PATIENCE_SECONDS)

    def run(self, line: str) -> str:
        """A command that ends."""
        done = self._run(line)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout

    def shows(self, line: str, *patterns: str) -> bool:
        """Whether a command says all of this by now."""
        shown = self._run(line).stdout
        return all(re.search(pattern, shown, re.MULTILINE) for pattern in patterns)

    def _run(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", self._adapted(line)],
            cwd=self.directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_SECONDS,
            check=False,
        )

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in reversed(self._running):
                if process.poll() is None:
                    os.killpg(process.pid, number)
            for process in self._running:
                try:
                    process.wait(PATIENCE_SECONDS)
                except subprocess.TimeoutExpired:
                    continue


@pytest.fixture
def tutorial(tmp_path: Path) -> Iterator[Tutorial]:
    made = Tutorial(tmp_path)
    for text in re.findall(r"^```toml\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE):
        (tmp_path / text.split("\n")[0].removeprefix("# ")).write_text(text)
    yield made
    made.end()


def test_the_guide(tutorial: Tutorial) -> None:
    given = iter(commands())
    assert "made fabric.secret" in tutorial.run(next(given))
    tutorial.export(next(given))
    for _ in range(4):
        tutorial.begin(next(given))
    ready = r"^berlin +broker +up ", r"^vienna +broker +up ", r"^street +gateway +up .* (berlin|vienna) *$"
    wait_for("all to be there", lambda: tutorial.shows("nearcast nodes", *ready))
    assert tutorial.run(next(given)) == "swarm/# is owned now, at most 40 ms from publisher to subscriber\n"
    subscriber = tutorial.begin(next(given))
    wait_for("the subscriber", lambda: tutorial.shows("nearcast nodes", r"^street +gateway +up +- +1 "))
    tutorial.begin(next(given))
    _looked_at(tutorial, given)
    _moved(tutorial, given)
    _rules(tutorial, given)
    telemetry = tutorial.begin(next(given))
    wait_for("telemetry", lambda: len(telemetry.read_text().splitlines()) == 2)
    assert telemetry.read_text().startswith("$nearcast/telemetry/")
    _planned(tutorial, given)
    assert list(given) == []
    numbers = [int(line.removeprefix(f"{TOPIC} ")) for line in subscriber.read_text().splitlines()]
    assert len(numbers) > 10
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def _looked_at(tutorial: Tutorial, given: Iterator[str]) -> None:
    show = next(given)
    wait_for("telemetry", lambda: tutorial.shows(show, "^clients +1 producer, 1 consumer", r"^latency +[\d.]+ ms \(worst"))
    shown = tutorial.run(show)
    assert re.search(r"^owner +berlin, since", shown, re.MULTILINE), shown
    assert re.search(r"^rule +swarm/#", shown, re.MULTILINE), shown
    listed = tutorial.run(next(given))
    assert re.search(r"^swarm/# +owned +40 ms", listed, re.MULTILINE), listed
    assert re.search(rf"^{TOPIC} +berlin +[\d.]+ ms +40 ms +1 +1 +\d+ +(ok|violated)", listed, re.MULTILINE), listed


def _moved(tutorial: Tutorial, given: Iterator[str]) -> None:
    assert re.match(rf"vienna owns {TOPIC} now; berlin handed it over in \d+ ms", tutorial.run(next(given)))
    why = tutorial.run(next(given))
    assert why.startswith(f"{TOPIC}: vienna owns it"), why
    assert re.search(r"^vienna +[\d.]+ ms +present owner", why, re.MULTILINE), why
    assert re.search(r"ago +berlin +vienna +done +asked for by hand", why), why
    assert tutorial.run(next(given)) == "swarm/# is owned now, at most 60 ms from publisher to subscriber\n"
    tutorial.run(next(given))
    assert re.search(r"^owner +berlin", tutorial.run(next(given)), re.MULTILINE)
    tutorial.run(next(given))


def _rules(tutorial: Tutorial, given: Iterator[str]) -> None:
    tutorial.run(next(given))
    rules = tutorial.run(next(given))
    assert rules.index("swarm/+/video") < rules.index("swarm/#")
    assert "no rule gives swarm/+/video a class any more" in tutorial.run(next(given))


def _planned(tutorial: Tutorial, given: Iterator[str]) -> None:
    tutorial.interrupt(0)
    tutorial.begin(next(given))
    tutorial.begin(next(given))
    up = tuple(rf"^{name} +broker +up " for name in ("berlin", "vienna", "oslo"))
    wait_for("all to be there", lambda: tutorial.shows("nearcast nodes", *up))
    publish, why = next(given), next(given)
    wait_for("the owner's word", lambda: tutorial.shows(f"nearcast topic show {TOPIC}", "^owner +berlin"))
    tutorial.run(publish)
    wait_for("the plan", lambda: tutorial.shows(why, r"berlin +oslo +done +me: it likes the north"))
    assert tutorial.shows(f"nearcast topic show {TOPIC}", "^owner +oslo")
