"""Plays every case of every transcript: on the engine in memory, fed in three ways, and over TCP against a broker process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearcast.mqtt import reasons
from nearcast.mqtt.access import AllowAll, Authenticator, Credentials, Verdict
from tests.conformance.transcripts import FEEDS, Case, MemoryTransport, TcpTransport, limits_of, load, play
from tests.engine_harness import World, durable_state

CASES = [case for path in sorted(Path(__file__).parent.glob("*.txt")) for case in load(path)]


class OnlyBob:
    """Lets in bob with the password "pw", at once."""

    def authenticate(self, credentials: Credentials, connection: object) -> Verdict | None:
        if credentials.method is not None:
            return Verdict(False, reasons.BAD_AUTHENTICATION_METHOD)
        if credentials.username == "bob" and credentials.password == b"pw":
            return Verdict(True, username="bob")
        return Verdict(False, reasons.BAD_USER_NAME_OR_PASSWORD)


class Challenge:
    """Enhanced authentication with the method "X": "1" is challenged with "2", "3" is the right answer and gets "4"."""

    def authenticate(self, credentials: Credentials, connection: object) -> Verdict | None:
        if credentials.method is None:
            return Verdict(True)
        if credentials.method != "X":
            return Verdict(False, reasons.BAD_AUTHENTICATION_METHOD)
        if credentials.data == b"1":
            return Verdict(False, reasons.CONTINUE_AUTHENTICATION, continue_data=b"2")
        if credentials.data == b"3":
            return Verdict(True, data=b"4")
        return Verdict(False, reasons.NOT_AUTHORIZED)


class Rules:
    """Everything below "secret" is forbidden."""

    def may_publish(self, client_id: str, username: str | None, topic: str) -> bool:
        return not topic.startswith("secret")

    def may_subscribe(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        return not topic_filter.startswith("secret")


AUTHENTICATORS: dict[str, Authenticator] = {"": AllowAll(), "only-bob": OnlyBob(), "challenge": Challenge()}


def world_of(case: Case, durable: bool = False) -> World:
    return World(
        durable=durable,
        limits=limits_of(case),
        authenticator=AUTHENTICATORS[case.stage.get("authenticator", "")],
        authorizer=Rules() if "rules" in case.stage else None,
        server_reference=case.stage.get("server_reference"),
        response_information=case.stage.get("response_information"),
    )


def test_there_are_cases_for_both_versions() -> None:
    assert len(CASES) > 150
    assert len({case.name for case in CASES}) == len(CASES)
    for version in ("4", "5"):
        assert sum(case.title.split(":")[0].endswith(version) for case in CASES) > 50


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_memory(case: Case, feed: str) -> None:
    world = world_of(case)
    play(case, MemoryTransport(world), feed)
    world.validate()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_memory_with_a_journal(case: Case) -> None:
    """The same packets, if not always in the same order; and what is journalled is the truth."""
    world = world_of(case, durable=True)
    play(case, MemoryTransport(world), FEEDS[0])
    world.validate()
    assert durable_state(world.recovered()) == durable_state(world)


@pytest.fixture(scope="module")
def broker_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    directory = tmp_path_factory.mktemp("conformance")
    ready = directory / "ready.json"
    command = [sys.executable, "-m", "nearcast", "broker", "--port", "0", "--ready-file", str(ready)]
    with (directory / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            deadline = time.monotonic() + 20
            while not ready.exists():
                assert process.poll() is None, (directory / "log").read_text()
                assert time.monotonic() < deadline, "the broker did not become ready"
                time.sleep(0.01)
            yield json.loads(ready.read_text())["listeners"][0]["port"]
        finally:
            process.terminate()
            process.wait(20)
    assert "Traceback" not in (directory / "log").read_text()


@pytest.mark.integration
@pytest.mark.parametrize("case", [case for case in CASES if not case.needs_memory], ids=lambda case: case.name)
def test_over_tcp(case: Case, broker_port: int) -> None:
    transport = TcpTransport(broker_port)
    try:
        play(case, transport, FEEDS[0])
    finally:
        transport.clean(sorted({step.client for step in case.steps if step.client}))
