"""A client's own messages on overlapping subscriptions of which only some are no-local [MQTT-3.8.3-3]."""

from __future__ import annotations

import pytest

from tests.engine_harness import World


@pytest.mark.parametrize("qos", [0, 1])
def test_own_messages_come_by_the_other_subscriptions_alone(qos: int) -> None:
    world = World()
    client, other = world.connect("client"), world.connect("other")
    client.subscribe("a/#", 2, no_local=True, identifier=1)
    client.subscribe("a/b", 0, identifier=2)
    client.publish("a/b", b"mine", qos)
    (message,) = client.messages()
    assert message.qos == 0
    assert message.properties is not None
    assert message.properties.subscription_identifiers == [2]
    other.publish("a/b", b"theirs", qos)
    (message,) = client.messages()
    assert message.qos == qos
    assert message.properties is not None
    assert sorted(message.properties.subscription_identifiers or []) == [1, 2]


def test_own_messages_do_not_come_by_a_no_local_subscription() -> None:
    world = World()
    client = world.connect("client")
    client.subscribe("a/#", 1, no_local=True)
    client.publish("a/b", b"mine", 1)
    assert client.messages() == []
