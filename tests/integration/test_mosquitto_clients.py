"""Mosquitto's command-line clients, both protocol versions."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.broker.running import PATIENCE_SECONDS, wait_for
from tests.integration.brokers import NearcastBroker, nearcast_broker
from tests.integration.tools import require

pytestmark = pytest.mark.integration

both_versions = pytest.mark.parametrize("version", ["311", "5"])


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NearcastBroker]:
    for tool in ("mosquitto_pub", "mosquitto_sub", "mosquitto_rr"):
        require(tool)
    with nearcast_broker(tmp_path_factory) as running:
        yield running


def words(broker: NearcastBroker, tool: str, version: str, *arguments: str) -> list[str]:
    return [str(require(tool)), "-h", "127.0.0.1", "-p", str(broker.port()), "-V", version, *arguments]


def run(broker: NearcastBroker, tool: str, version: str, *arguments: str, stdin: bytes = b"") -> bytes:
    result = subprocess.run(
        words(broker, tool, version, *arguments), input=stdin, capture_output=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert result.returncode == 0, f"{tool} {arguments}: {result.stderr.decode()}"
    return result.stdout


def subscriptions(broker: NearcastBroker) -> float:
    """Subscriptions there are, once every client of earlier tests has left."""
    wait_for("the end of earlier clients", lambda: broker.metric("connected_clients") == 0)
    return broker.metric("subscriptions")


@contextmanager
def subscribed(broker: NearcastBroker, version: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A ``mosquitto_sub`` whose subscriptions are in place; it must end by itself (``-C``) and well."""
    before = subscriptions(broker)
    wanted = arguments.count("-t")
    limit = ["-W", str(int(PATIENCE_SECONDS))]
    process = subprocess.Popen(words(broker, "mosquitto_sub", version, *arguments, *limit), stdout=subprocess.PIPE)
    try:
        wait_for("subscribing", lambda: broker.metric("subscriptions") == before + wanted)
        yield process
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        process.kill()
        process.communicate()


def output(process: subprocess.Popen[bytes]) -> list[bytes]:
    assert process.stdout is not None
    return process.stdout.read().splitlines()


@both_versions
@pytest.mark.parametrize("qos", ["0", "1", "2"])
def test_lines_in_order(broker: NearcastBroker, version: str, qos: str) -> None:
    lines = [b"line %d" % number for number in range(200)]
    with subscribed(broker, version, "-t", "lines/#", "-q", qos, "-C", "200", "-F", "%q %r %t %p") as subscriber:
        # What counts is what arrives: mosquitto_pub 2.0.11 may not end, when its last line is out before it has seen the end
        # of its input.
        command = words(broker, "mosquitto_pub", version, "-t", "lines/x", "-q", qos, "-l")
        with subprocess.Popen(command, stdin=subprocess.PIPE) as publisher:
            try:
                assert publisher.stdin is not None
                publisher.stdin.write(b"\n".join(lines))
                publisher.stdin.close()
                assert output(subscriber) == [b"%s 0 lines/x %s" % (qos.encode(), line) for line in lines]
            finally:
                publisher.kill()


@both_versions
def test_a_file_larger_than_one_read(broker: NearcastBroker, version: str, tmp_path: Path) -> None:
    content = os.urandom(900_000)
    (tmp_path / "content").write_bytes(content)
    with subscribed(broker, version, "-t", "file", "-q", "2", "-C", "1", "-N") as subscriber:
        run(broker, "mosquitto_pub", version, "-t", "file", "-q", "2", "-f", str(tmp_path / "content"))
        assert subscriber.stdout is not None
        assert subscriber.stdout.read() == content


@both_versions
def test_retained(broker: NearcastBroker, version: str) -> None:
    run(broker, "mosquitto_pub", version, "-t", "kept/a", "-m", "old", "-r")
    run(broker, "mosquitto_pub", version, "-t", "kept/a", "-m", "new", "-r", "-q", "1")
    run(broker, "mosquitto_pub", version, "-t", "kept/b", "-m", "other", "-r", "-q", "2")
    shown = run(broker, "mosquitto_sub", version, "-t", "kept/#", "-C", "2", "-F", "%r %t %p", "-W", "10")
    assert sorted(shown.splitlines()) == [b"1 kept/a new", b"1 kept/b other"]
    run(broker, "mosquitto_pub", version, "-t", "kept/a", "-n", "-r")
    assert run(broker, "mosquitto_sub", version, "-t", "kept/#", "-C", "1", "-F", "%p", "-W", "10") == b"other\n"
    run(broker, "mosquitto_pub", version, "-t", "kept/b", "-n", "-r", "-q", "2")
    # --retained-only ends at the first message that is not retained, and shows none of those.
    with subscribed(broker, version, "-t", "kept/#", "--retained-only") as empty_handed:
        run(broker, "mosquitto_pub", version, "-t", "kept/a", "-m", "live")
        assert output(empty_handed) == []


@both_versions
def test_will(broker: NearcastBroker, version: str) -> None:
    with subscribed(broker, version, "-t", "wills/#", "-q", "1", "-C", "1", "-F", "%q %t %p") as witness:
        will = ["--will-topic", "wills/x", "--will-payload", "died", "--will-qos", "1"]
        before = broker.metric("connected_clients")
        with subprocess.Popen(words(broker, "mosquitto_sub", version, "-t", "unused", *will)) as dying:
            wait_for("its connection", lambda: broker.metric("connected_clients") > before)
            dying.kill()
        assert output(witness) == [b"1 wills/x died"]


@both_versions
def test_a_session_keeps_what_came_meanwhile(broker: NearcastBroker, version: str) -> None:
    session = ["-i", f"mosquitto-sleeper-{version}", "-c"]
    subscription = ["-t", "meanwhile", "-q", "2"]
    run(broker, "mosquitto_sub", version, *session, *subscription, "-E")
    for qos in ("1", "2"):
        lines = b"\n".join(b"%d" % number for number in range(50))
        run(broker, "mosquitto_pub", version, "-t", "meanwhile", "-q", qos, "-l", stdin=lines)
    shown = run(broker, "mosquitto_sub", version, *session, *subscription, "-C", "100", "-F", "%q %p", "-W", "10")
    for shown_qos in (1, 2):
        mine = [line for line in shown.splitlines() if line.startswith(b"%d" % shown_qos)]
        assert mine == [b"%d %d" % (shown_qos, number) for number in range(50)]


def test_shared_subscription(broker: NearcastBroker, tmp_path: Path) -> None:
    files = [tmp_path / "first", tmp_path / "second"]
    before = subscriptions(broker)
    members: list[subprocess.Popen[bytes]] = []
    try:
        for file, version in zip(files, ("311", "5"), strict=True):
            with file.open("wb") as shown:
                command = words(broker, "mosquitto_sub", version, "-t", "$share/crew/work", "-q", "1")
                members.append(subprocess.Popen(command, stdout=shown))
        wait_for("subscribing", lambda: broker.metric("subscriptions") == before + len(members))
        for number in range(4):
            run(broker, "mosquitto_pub", "5", "-t", "work", "-q", "1", "-m", str(number))
        rest = b"\n".join(b"%d" % number for number in range(4, 100))
        run(broker, "mosquitto_pub", "5", "-t", "work", "-q", "1", "-l", stdin=rest)
        wait_for("all work", lambda: sum(file.read_bytes().count(b"\n") for file in files) == 100)
    finally:
        for member in members:
            member.kill()
            member.wait()
    shares = [[int(line) for line in file.read_bytes().splitlines()] for file in files]
    assert all(shares), "somebody got nothing"
    assert sorted(shares[0] + shares[1]) == list(range(100))


def test_properties(broker: NearcastBroker) -> None:
    show = ["-F", "%C|%D|%E|%R|%A|%P|%p", "-C", "1"]
    with subscribed(broker, "5", "-t", "marked", *show) as subscriber:
        marks = [
            ["content-type", "text/plain"],
            ["correlation-data", "call"],
            ["message-expiry-interval", "500"],
            ["response-topic", "answers"],
            ["user-property", "key", "value"],
            ["topic-alias", "3"],
        ]
        arguments = [word for mark in marks for word in ("-D", "PUBLISH", *mark)]
        run(broker, "mosquitto_pub", "5", "-t", "marked", "-m", "body", *arguments)
        (line,) = output(subscriber)
        content_type, correlation, expiry, response, alias, user, body = line.split(b"|")
        assert (content_type, correlation, response, user, body) == (b"text/plain", b"call", b"answers", b"key:value", b"body")
        assert 495 <= int(expiry) <= 500
        assert alias == b"", "an alias is between a client and its broker"


def test_request_and_response(broker: NearcastBroker) -> None:
    with subscribed(broker, "5", "-t", "service", "-q", "1", "-C", "1", "-F", "%R") as responder:
        arguments = ["-t", "service", "-e", "answers", "-m", "question", "-q", "1", "-W", "10"]
        with subprocess.Popen(words(broker, "mosquitto_rr", "5", *arguments), stdout=subprocess.PIPE) as requester:
            (topic,) = output(responder)
            assert topic == b"answers"
            run(broker, "mosquitto_pub", "5", "-t", "answers", "-m", "answer", "-q", "1")
            assert output(requester) == [b"answer"]
