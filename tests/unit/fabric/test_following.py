"""Clients follow the owner of what they subscribed to: when, where to, how often; and when not."""

from __future__ import annotations

import pytest

from nearcast.fabric.following import MAX_PAUSE_S, PAUSE_S, RESTED_S, Wish
from nearcast.fabric.gateway import GatewaySettings
from nearcast.mqtt.packets import Publish, SubAck, Subscribe, SubscriptionRequest
from tests.gateway_hosts import GatewayHost
from tests.ownership_harness import OwnedMesh

TOPIC = "owned/t"


class Story:
    """Brokers a (home) and b, a gateway with a subscriber, and a topic that b owns."""

    def __init__(self, home_ms: float, owner_ms: float) -> None:
        self.mesh = OwnedMesh("a", "b")
        self.host = GatewayHost(self.mesh, settings=GatewaySettings())
        for name in "ab":
            self.host.link(name)
        self.host.machine.assign("a", ["a", "b"], self.mesh.now)
        self.listener = self.host.connect("listener")
        self.own("b")
        self.listener.say(Subscribe(1, [SubscriptionRequest(TOPIC, 0)]))
        assert isinstance(self.listener.take()[-1], SubAck)
        self.away = {"a": home_ms, "b": owner_ms}
        self.epoch = 1

    def own(self, owner: str, epoch: int = 1) -> None:
        for node in self.mesh.nodes.values():
            node.fabric.ownership.told(TOPIC, epoch, owner, self.mesh.now, True)
        self.mesh.directory.owners[TOPIC] = (epoch, owner)
        self.mesh.run()

    def wait(self, seconds: float) -> str:
        """Let time pass; where the client is then."""
        for _ in range(round(seconds / 0.25)):
            for name, away_ms in self.away.items():
                self.host.machine.lines[name].link.rtt_ms = away_ms
            self.host.advance(0.25)
        return self.host.broker_of(self.listener)


@pytest.mark.parametrize(
    ("home_ms", "owner_ms", "broker"),
    [
        (10.0, 10.0, "b"),
        (10.0, 40.0, "b"),
        (30.0, 0.3, "b"),
        (0.3, 30.0, "a"),  # the home is on the way: nothing would be saved
    ],
)
def test_a_client_follows_where_that_saves_something(home_ms: float, owner_ms: float, broker: str) -> None:
    story = Story(home_ms, owner_ms)
    assert story.wait(3.0) == broker
    owner = story.mesh.nodes["b"]
    owner.fabric.engine.publish(TOPIC, b"here", 0, False, story.mesh.now)
    owner.flush()
    story.mesh.run()
    assert [packet.payload for packet in story.listener.take() if isinstance(packet, Publish)] == [b"here"]


def test_a_topic_that_comes_back_is_followed_soon() -> None:
    story = Story(10.0, 10.0)
    assert story.wait(2.0) == "b"
    story.own("a", 2)
    assert story.wait(1.0) == "b"
    assert story.wait(2 * PAUSE_S) == "a"


def test_each_further_move_waits_twice_as_long_until_the_client_has_rested() -> None:
    wish = Wish("b", 0.0)
    now, pauses = 100.0, []
    for _ in range(7):
        wish.followed(now)
        pauses.append(wish.not_before - now)
        now = wish.not_before
    assert pauses == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S, 8 * PAUSE_S, 16 * PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]
    now += RESTED_S
    wish.followed(now)
    assert wish.not_before - now == PAUSE_S
