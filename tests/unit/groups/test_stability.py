"""The termination conditions, seen from outside."""

from __future__ import annotations

import math

from nearcast.groups.stability import disagreeing, unstable
from tests.group_harness import GroupNetwork

AT = {"a": 0.0, "b": 3.0, "c": 8.0}


def latency_ms(one: str, other: str) -> float:
    return abs(AT[one] - AT[other])


def formed(join_ms: float) -> GroupNetwork:
    network = GroupNetwork(latency_ms, join_ms)
    for lcm, name in enumerate(AT):
        network.add(name, lcm)
    network.settle(10.0)
    return network


def test_groups_that_are_formed_are_stable_and_agree() -> None:
    network = formed(5.0)
    assert network.groups() == {"b": {"a", "b"}, "c": {"c"}}
    assert unstable(network.brokers.values(), latency_ms) == []
    assert disagreeing(network.brokers.values()) == []


def test_two_leaders_below_the_threshold_are_not() -> None:
    network = GroupNetwork(latency_ms, 5.0)
    for name in AT:
        network.add(name)
    assert unstable(network.brokers.values(), latency_ms) == ["a and b both lead, 3 ms apart: below 5 ms"]


def test_two_leaders_at_the_threshold_are() -> None:
    network = formed(3.0)
    assert len(network.groups()) == 3
    assert unstable(network.brokers.values(), latency_ms) == []


def test_with_a_threshold_of_zero_all_is_stable_from_the_start() -> None:
    network = GroupNetwork(lambda one, other: 0.0, 0.0)
    for name in AT:
        network.add(name)
    assert unstable(network.brokers.values(), lambda one, other: 0.0) == []


def test_a_member_that_is_too_far_is_named() -> None:
    network = formed(5.0)
    found = unstable(network.brokers.values(), lambda one, other: 7.0)
    assert found == ["a follows b, 7 ms away: above 6.25 ms"]
    found = unstable(network.brokers.values(), lambda one, other: math.inf)
    assert found == ["a follows b, inf ms away: above 6.25 ms"]


def test_a_member_without_a_leader_is_named() -> None:
    network = formed(5.0)
    network.crash("b", noticed=False)
    assert unstable(network.brokers.values(), latency_ms) == ["a follows b, which is gone"]
    assert disagreeing(network.brokers.values()) == ["a follows b, which is gone"]


def test_a_view_that_is_not_the_leaders_is_named() -> None:
    network = formed(5.0)
    b = network.brokers["b"]
    b.lost("a", network.now)
    assert disagreeing(network.brokers.values()) == ["a follows b, which does not know"]
    network.settle(10.0)
    network.crash("a", noticed=False)
    assert disagreeing(network.brokers.values()) == ["b counts a in, which follows another or is gone"]


def test_findings_are_bounded() -> None:
    network = GroupNetwork(lambda one, other: 0.0, 1.0)
    for number in range(30):
        network.add(f"b{number}")
    assert len(unstable(network.brokers.values(), lambda one, other: 0.0)) == 100
