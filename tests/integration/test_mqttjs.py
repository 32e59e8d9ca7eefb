"""MQTT.js, over TCP and over WebSocket, both protocol versions. The scenarios are in ``js/exercise.js``."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.integration.brokers import NearcastBroker, nearcast_broker
from tests.integration.tools import JS_DIRECTORY, require

pytestmark = pytest.mark.integration

CONFIG = """
[limits]
max_packet_bytes = 8388608
[[listeners]]
kind = "tcp"
port = 0
[[listeners]]
kind = "ws"
port = 0
path = "/mqtt"
"""

SCENARIOS = ["everyQos", "largePayload", "retained", "will", "session"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NearcastBroker]:
    require("mqtt.js")
    with nearcast_broker(tmp_path_factory, CONFIG) as running:
        yield running


def exercise(broker: NearcastBroker, transport: str, version: int, scenario: str) -> None:
    url = broker.url if transport == "tcp" else f"ws://127.0.0.1:{broker.port('ws')}/mqtt"
    command = [str(require("node")), str(JS_DIRECTORY / "exercise.js"), url, str(version), scenario]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("transport", ["tcp", "ws"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(broker: NearcastBroker, transport: str, version: int, scenario: str) -> None:
    exercise(broker, transport, version, scenario)


@pytest.mark.parametrize("transport", ["tcp", "ws"])
def test_properties_and_response(broker: NearcastBroker, transport: str) -> None:
    exercise(broker, transport, 5, "properties")
