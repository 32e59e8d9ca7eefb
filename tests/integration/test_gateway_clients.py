"""Every client library of the tests, through a gateway: what they can do at a broker they can do here.

The tests are those of the brokers (imported, with the gateway in the broker's place).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.gateways import NearcastGateway, fronted
from tests.integration.test_aiomqtt import test_a_session_is_resumed as test_aiomqtt_session
from tests.integration.test_aiomqtt import test_every_qos as test_aiomqtt_every_qos
from tests.integration.test_aiomqtt import test_retained_and_will as test_aiomqtt_retained_and_will
from tests.integration.test_mosquitto_clients import test_a_file_larger_than_one_read as test_mosquitto_large_file
from tests.integration.test_mosquitto_clients import test_lines_in_order as test_mosquitto_lines
from tests.integration.test_mosquitto_clients import test_properties as test_mosquitto_properties
from tests.integration.test_mosquitto_clients import test_will as test_mosquitto_will
from tests.integration.test_mqttjs import exercise
from tests.integration.test_paho import (
    connect,
    test_a_session_keeps_what_came_meanwhile,
    test_assigned_identifier_and_takeover,
    test_every_qos_to_every_qos,
    test_order_of_many,
    test_properties_pass_through,
    test_request_and_response,
    test_retained,
    test_shared_subscriptions,
    test_subscribe_options,
    test_topic_aliases_of_the_broker,
    test_topic_aliases_of_the_client,
    test_will,
)
from tests.integration.tools import require

__all__ = [
    "connect",
    "test_a_session_keeps_what_came_meanwhile",
    "test_aiomqtt_every_qos",
    "test_aiomqtt_retained_and_will",
    "test_aiomqtt_session",
    "test_assigned_identifier_and_takeover",
    "test_every_qos_to_every_qos",
    "test_mosquitto_large_file",
    "test_mosquitto_lines",
    "test_mosquitto_properties",
    "test_mosquitto_will",
    "test_order_of_many",
    "test_properties_pass_through",
    "test_request_and_response",
    "test_retained",
    "test_shared_subscriptions",
    "test_subscribe_options",
    "test_topic_aliases_of_the_broker",
    "test_topic_aliases_of_the_client",
    "test_will",
]

pytestmark = pytest.mark.integration

LIMITS = "[limits]\nmax_packet_bytes = 8388608\n"
LISTENERS = '[[listeners]]\nkind = "tcp"\nport = 0\n[[listeners]]\nkind = "ws"\nport = 0\npath = "/mqtt"\n'


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NearcastGateway]:
    require("mqtt.js")
    require("mosquitto_sub")
    directory = tmp_path_factory.mktemp("gateway")
    with fronted(directory, LIMITS + LISTENERS, brokers=1, broker_config=LIMITS) as gateway:
        yield gateway


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("scenario", ["everyQos", "largePayload", "session"])
def test_mqttjs_over_websocket(broker: NearcastGateway, version: int, scenario: str) -> None:
    exercise(broker, "ws", version, scenario)
