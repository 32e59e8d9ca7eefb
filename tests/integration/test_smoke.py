"""The shortest proof that a broker works: it starts, moves a message at every QoS for both versions, remembers, and stops.

Runs against the compiled and the plain hot modules; everything finer is elsewhere.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nearcast.client.sync
from nearcast.mqtt.packets import Publish
from tests.integration.brokers import NearcastBroker, nearcast_broker
from tests.integration.wire import Wire

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NearcastBroker]:
    with nearcast_broker(tmp_path_factory, data=True) as running:
        yield running


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_goes_around(broker: NearcastBroker, version: int, qos: int) -> None:
    with nearcast.client.sync.connect(broker.url, version=version) as client:
        client.subscribe("smoke/#", qos=qos)
        client.publish("smoke/signal", b"x" * 5_000, qos=qos)
        message = client.get(20)
        assert message is not None
        assert (message.topic, message.payload, message.qos) == ("smoke/signal", b"x" * 5_000, qos)


def test_bytes_on_the_wire(broker: NearcastBroker) -> None:
    exchanges = [
        ("100d 0004 4d515454 04 02 0000 0001 73", "2002 00 00"),
        ("8206 0001 0001 74 00", "9003 0001 00"),
        ("3004 0001 74 21", "3004 0001 74 21"),
        ("c000", "d000"),
        ("e000", ""),
    ]
    with Wire(broker.port(), 4) as wire:
        for sent, answer in exchanges:
            wire.socket.sendall(bytes.fromhex(sent))
            assert wire.socket.recv(100) == bytes.fromhex(answer)


def test_a_retained_message_survives_a_restart(broker: NearcastBroker) -> None:
    with nearcast.client.sync.connect(broker.url) as client:
        client.publish("smoke/kept", b"still here", qos=1, retain=True)
    broker.restart()
    with Wire(broker.port()) as wire:
        wire.connect()
        early = wire.subscribe("smoke/kept")
        kept = early[0] if early else wire.expect(Publish)
        assert (kept.payload, kept.retain) == (b"still here", True)


def test_a_message_that_is_too_large_for_the_broker_is_one_line(broker: NearcastBroker, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(2_000_000))
    arguments = ["pub", "-t", "t", "-q", "1", "-f", str(tmp_path / "large"), "--url", broker.url]
    for version in ("4", "5"):
        command = [sys.executable, "-m", "nearcast", *arguments, "--version", version]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 1
        assert len(result.stderr.strip().splitlines()) == 1
        assert "larger" in result.stderr
