"""The ``nearcast`` command as users run it: real processes against Mosquitto."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.brokers import Mosquitto, free_port, nearcast_available

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    running = Mosquitto(tmp_path_factory.mktemp("mosquitto"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


def nearcast(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nearcast", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NO_COLOR": "1", "TERM": "dumb", **environment},
        check=False,
    )


def test_help_names_every_command_and_teaches() -> None:
    result = nearcast("--help")
    assert result.returncode == 0
    for word in ("demo", "broker", "passwd", "pub", "sub", "bench", "nearcast pub -t sensors/door -m open"):
        assert word in result.stdout


def test_help_does_not_import_what_it_only_names() -> None:
    code = (
        "import sys; sys.argv = ['nearcast', '--help']\n"
        "from nearcast.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'uvloop', 'websockets', 'nearcast.broker', 'nearcast.client', 'nearcast.bench'}\n"
        "print('loaded', sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "loaded []"


def test_version() -> None:
    result = nearcast("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("nearcast ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("pub", "-t", "x"),
        ("pub", "-t", "x", "-m", "a", "--empty"),
        ("pub", "-t", "x", "-m", "a", "-p", "novalue"),
        ("pub", "-t", "x", "-m", "a", "-q", "3"),
        ("sub",),
        ("nonsense",),
    ],
)
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    result = nearcast(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("pub", "-t", "x", "-m", "a", "-u", "mqtt://127.0.0.1:PORT"), "nothing listens there; is the broker running?"),
        (("sub", "x", "-u", "gopher://host"), "unknown scheme 'gopher'"),
        (("pub", "-t", "x", "--file", "/nonexistent"), "cannot read /nonexistent"),
        (("sub", "x", "--password-file", "/nonexistent"), "cannot read the password file"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], expected: str) -> None:
    result = nearcast(*(argument.replace("PORT", str(free_port())) for argument in arguments))
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert expected in result.stderr


@pytest.mark.parametrize(("scheme", "expected"), [("mqtts", "is it a TLS port?"), ("ws", "is the port right?")])
def test_the_wrong_scheme_for_a_port_says_so(broker: Mosquitto, scheme: str, expected: str) -> None:
    result = nearcast("pub", "-t", "x", "-m", "a", "-u", broker.url.replace("mqtt://", f"{scheme}://"))
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert expected in result.stderr


class Listener:
    """A running ``nearcast sub`` that has subscribed: the broker's log says so."""

    def __init__(self, broker: Mosquitto, *arguments: str) -> None:
        # A retained message tells that the subscription stands, without looking at the clock.
        ready = nearcast("pub", "-t", "ready", "-m", "ready", "--retain", "-q", "1", "-u", broker.url)
        assert ready.returncode == 0, ready.stderr
        command = [sys.executable, "-m", "nearcast", "sub", "ready", *arguments, "-u", broker.url]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.first = self._process.stdout.readline()

    def finish(self) -> tuple[int, list[str], str]:
        try:
            output, errors = self._process.communicate(timeout=60)
        finally:
            self._process.kill()
        return self._process.returncode, output.splitlines(), errors


def test_publish_and_subscribe(broker: Mosquitto, tmp_path: Path) -> None:
    listener = Listener(broker, "cli/#", "-q", "2", "-v", "--count", "6", "--timeout", "50")
    assert listener.first == "ready ready\n"
    content = tmp_path / "content"
    content.write_text("from a file")
    assert nearcast("pub", "-t", "cli/a", "-m", "hello", "-q", "2", NEARCAST_URL=broker.url).returncode == 0
    assert nearcast("pub", "-t", "cli/b", "--file", str(content), "-u", broker.url, "--version", "4").returncode == 0
    result = nearcast("pub", "-t", "cli/c", "--stdin-lines", "-q", "1", "--json", "-u", broker.url, stdin="one\ntwo\nthree\n")
    assert json.loads(result.stdout)["published"] == 3
    assert listener.finish() == (0, ["cli/a hello", "cli/b from a file", "cli/c one", "cli/c two", "cli/c three"], "")


def test_lines_from_a_redirected_file(broker: Mosquitto, tmp_path: Path) -> None:
    listener = Listener(broker, "lines", "-q", "1", "--count", "3", "--timeout", "50")
    source = tmp_path / "lines"
    source.write_text("a\nb\n")
    with source.open() as stdin:
        command = [sys.executable, "-m", "nearcast", "pub", "-t", "lines", "-l", "-q", "1", "-u", broker.url]
        subprocess.run(command, stdin=stdin, check=True, timeout=60)
    assert listener.finish()[1] == ["a", "b"]


def test_json_and_properties(broker: Mosquitto) -> None:
    listener = Listener(broker, "json", "--json", "--count", "2", "--timeout", "50")
    arguments = ("-p", "k=v=w", "--content-type", "text/plain", "--retain", "-q", "1")
    assert nearcast("pub", "-t", "json", "-m", "grüße", *arguments, "-u", broker.url).returncode == 0
    code, lines, _ = listener.finish()
    assert code == 0
    assert json.loads(lines[0]) == {
        "topic": "json",
        "payload": "grüße",
        "qos": 0,
        "retain": False,
        "properties": {"content_type": "text/plain", "user_properties": [["k", "v=w"]]},
    }


def test_count_and_rate(broker: Mosquitto) -> None:
    result = nearcast("pub", "-t", "rate", "-m", "x", "--count", "10", "--rate", "100", "--json", "-u", broker.url)
    summary = json.loads(result.stdout)
    assert summary["published"] == 10
    assert summary["seconds"] >= 0.09


def test_a_timeout_before_the_count_is_an_error(broker: Mosquitto) -> None:
    result = nearcast("sub", "silence", "--count", "1", "--timeout", "0.2", "-u", broker.url)
    assert result.returncode == 1
    assert "only 0 of 1 messages came within 0.2 s" in result.stderr
    assert nearcast("sub", "silence", "--timeout", "0.2", "-u", broker.url).returncode == 0


def test_demo_with_a_broker_that_runs(broker: Mosquitto) -> None:
    result = nearcast("demo", "--seconds", "1", "--rate", "200", "--json", "--url", broker.url)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["lost"] == summary["duplicated"] == 0
    assert summary["received"] == summary["sent"] > 0


@pytest.mark.skipif(not nearcast_available(), reason="nearcast.broker is not there")
def test_demo_starts_and_ends_its_own_broker() -> None:
    result = nearcast("demo", "--seconds", "2", "--rate", "200")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "200 messages a second for 2 s" in lines[0]
    assert "0 lost, 0 duplicated" in lines[-3]
    assert lines[-1].startswith("next: nearcast broker")
