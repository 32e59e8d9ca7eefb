"""PLACE: what brokers know of where a gateway and its clients are."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearcast.coordinates.coordinate import Coordinate, origin
from nearcast.fabric import frames
from nearcast.fabric.frames import LENGTH_BYTES, frame
from nearcast.fabric.places import (
    AROUND_S,
    FARTHEST_MS,
    MAX_GONE,
    TELL_S,
    Whereabouts,
    pack_coordinate,
    unpack_coordinate,
)
from nearcast.fabric.trunks import Trunk
from nearcast.mqtt.packets import Connect, Subscribe, SubscriptionRequest
from nearcast.mqtt.records import Fields, blob, number
from tests.fabric_harness import Mesh
from tests.gateway_hosts import GatewayHost


class Agent:
    def __init__(self, coordinate: Coordinate) -> None:
        self.coordinate = coordinate

    def coordinate_of(self, name: str) -> Coordinate | None:
        raise NotImplementedError


def make(*brokers: str) -> GatewayHost:
    mesh = Mesh()
    for name in brokers:
        mesh.add(name)
    host = GatewayHost(mesh)
    for name in brokers:
        host.link(name)
    return host


def trunk(host: GatewayHost, broker: str) -> Trunk:
    (found,) = host.mesh.nodes[broker].fabric.trunks.by_link.values()
    return found


def latencies(host: GatewayHost, broker: str) -> list[float]:
    return sorted(channel.latency_ms for channel in trunk(host, broker).channels.values())


def tell(host: GatewayHost, seconds: float = TELL_S) -> None:
    """Let time pass in the steps of a driver."""
    for _ in range(math.ceil(seconds / TELL_S)):
        host.advance(TELL_S)


def test_the_latency_of_a_client_that_comes_is_told_within_a_second() -> None:
    host = make("a")
    client = host.accept()
    client.round_trip_ms = 12.5
    host.connect("other")
    client.say(Connect("c"))
    tell(host)
    assert latencies(host, "a") == [0.0, 12.5]


def test_a_latency_that_changes_is_told_when_its_turn_comes() -> None:
    host = make("a")
    clients = [host.connect(f"c{index}") for index in range(7)]
    for client in clients:
        client.round_trip_ms = 10.0
    tell(host, AROUND_S + TELL_S)
    assert latencies(host, "a") == [10.0] * 7
    clients[3].round_trip_ms = 30.0
    clients[4].round_trip_ms = 10.5
    tell(host, AROUND_S + TELL_S)
    assert latencies(host, "a") == [10.0] * 6 + [30.0], "half a millisecond is not worth a word"


def test_a_latency_that_cannot_be_measured_now_stays() -> None:
    host = make("a")
    client = host.connect("c")
    client.round_trip_ms = 10.0
    tell(host, AROUND_S)
    client.round_trip_ms = 0.0
    tell(host, 2 * AROUND_S)
    assert latencies(host, "a") == [10.0]


def test_the_coordinate_is_told_to_every_broker_and_again_when_it_moved() -> None:
    host = make("a", "b")
    agent = Agent(Coordinate([1.0, -2.0, 3.0], 0.5, -0.25, 0.125))
    host.machine.places.agent = agent
    tell(host)
    for broker in ("a", "b"):
        known = trunk(host, broker).whereabouts.coordinate
        assert known is not None
        assert (known.vector, known.height, known.adjustment, known.error) == ([1.0, -2.0, 3.0], 0.5, -0.25, 0.125)
    agent.coordinate = Coordinate([9.0, -2.0, 3.0], 0.5, -0.25, 0.125)
    tell(host)
    known = trunk(host, "a").whereabouts.coordinate
    assert known is not None
    assert known.vector == [9.0, -2.0, 3.0]


def test_a_gateway_that_has_heard_nobody_does_not_know_where_it_is() -> None:
    host = make("a")
    host.machine.places.agent = Agent(origin())
    tell(host)
    assert trunk(host, "a").whereabouts.coordinate is None


def test_a_coordinate_that_trembles_is_told_rarely() -> None:
    host = make("a")
    rng = random.Random(1)
    agent = Agent(Coordinate([0.0], 1.0))
    host.machine.places.agent = agent
    known: list[Coordinate | None] = []
    for _ in range(11):
        agent.coordinate = Coordinate([rng.uniform(0, 0.1)], 1.0)
        tell(host)
        place = trunk(host, "a").whereabouts.coordinate
        if not known or known[-1] is not place:
            known.append(place)
    assert len(known) == 3, "at the beginning, and every five seconds"


def test_a_broker_that_a_client_is_moved_to_hears_its_latency() -> None:
    host = make("a", "b")
    host.mesh.link("a", "b")
    host.mesh.run()
    client = host.connect("c")
    client.round_trip_ms = 8.0
    client.say(Subscribe(1, [SubscriptionRequest("t", 1)]))
    tell(host)
    host.machine.move("b", host.mesh.now)
    host.flush()
    host.mesh.run()
    assert host.broker_of(client) == "b"
    tell(host)
    assert latencies(host, "b") == [8.0]


def test_brokers_that_got_messages_straight_from_a_client_hear_that_it_left() -> None:
    host = make("a", "b")
    host.machine.places.left("c", ["b", "nobody"])
    tell(host)
    assert "c" in trunk(host, "b").whereabouts.gone
    assert "c" not in trunk(host, "a").whereabouts.gone


def test_whoever_left_is_not_remembered_without_bound() -> None:
    known = Whereabouts()
    names = [blob(str(index).encode()) for index in range(MAX_GONE + 10)]
    content = frame(frames.PLACE, blob(b""), number(0), number(len(names)), *names)[LENGTH_BYTES:]
    known.read(Fields(content), 1.0)
    assert len(known.gone) == MAX_GONE
    assert "0" not in known.gone


def test_a_place_without_a_coordinate_leaves_it_as_it_was() -> None:
    known = Whereabouts()
    known.read(Fields(frame(frames.PLACE, blob(pack_coordinate(Coordinate([1.0], 2.0))), number(0), number(0))[4:]), 1.0)
    content = frame(frames.PLACE, blob(b""), number(1), number(7), number(1_500), number(0))[4:]
    assert known.read(Fields(content), 2.0) == [(7, 1.5)]
    assert known.coordinate is not None
    assert known.coordinate.height == 2.0


@pytest.mark.parametrize(
    "values",
    [(math.nan, 1.0, 0.0, 1.0), (1.0, math.inf, 0.0, 1.0), (2 * FARTHEST_MS, 1.0, 0.0, 1.0), (1.0, -1.0, 0.0, 1.0)],
)
def test_a_coordinate_that_no_node_can_have_is_not_believed(values: tuple[float, ...]) -> None:
    vector, height, adjustment, error = values
    packed = pack_coordinate(Coordinate([vector], height, adjustment, error))
    assert unpack_coordinate(packed) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_place_or_refused(data: bytes) -> None:
    known = Whereabouts()
    try:
        found = known.read(Fields(bytes([frames.PLACE]) + data), 1.0)
    except ValueError:
        return
    assert all(0 <= latency_ms <= FARTHEST_MS for _, latency_ms in found)
    assert known.coordinate is None or all(math.isfinite(value) for value in known.coordinate.vector)


def test_a_place_of_channels_that_are_closed_is_passed_over() -> None:
    host = make("a")
    link = host.machine.lines["a"].link
    link.send(frame(frames.PLACE, blob(b""), number(1), number(99), number(1_000), number(0)))
    host.flush()
    host.mesh.run()
    assert trunk(host, "a").link.is_up
    assert not trunk(host, "a").channels
