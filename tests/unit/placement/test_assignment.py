"""Assignment of gateways to brokers beyond what the paper says: forced moves, unknowns, weights, borders, rest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nearcast.placement.assignment import (
    BrokerState,
    GatewayState,
    Migration,
    Network,
    Policy,
    group_of,
    ranking,
    reconfigure,
)


def decide(*gateways: GatewayState, brokers: tuple[BrokerState, ...]) -> list[Migration]:
    return reconfigure(Network(brokers, gateways))


A, B, C = BrokerState("a"), BrokerState("b"), BrokerState("c")


def test_a_gateway_without_a_broker_gets_the_nearest() -> None:
    (move,) = decide(GatewayState("g", "", 1, {"a": 50.0, "b": 1.0}), brokers=(A, B))
    assert (move.target, move.reason, move.explain()) == ("b", "first", "no broker yet")


def test_what_is_not_measured_is_no_candidate() -> None:
    assert decide(GatewayState("g", "a", 1, {"a": 50.0}), brokers=(A, B)) == []
    assert decide(GatewayState("g", "a", 1, {"b": 1.0}), brokers=(A, B)) == [], "the current one may be as near"


def test_without_any_measurement_whoever_must_move_goes_to_the_least_busy() -> None:
    busy = BrokerState("b", 100)
    (move,) = decide(GatewayState("g", "gone", 1), brokers=(busy, C))
    assert (move.target, move.reason, move.explain()) == ("c", "gone", "gone is gone")


def test_nobody_goes_to_a_broker_that_is_drained_and_everybody_leaves_it() -> None:
    drained = BrokerState("a", draining=True)
    assert decide(GatewayState("g", "b", 1, {"a": 1.0, "b": 60.0}), brokers=(drained, B)) == []
    (move,) = decide(GatewayState("g", "a", 1, {"a": 1.0, "b": 60.0}), brokers=(drained, B))
    assert (move.target, move.reason, move.explain()) == ("b", "draining", "a is being drained")


def test_where_there_is_nowhere_to_go_nobody_moves() -> None:
    drained = BrokerState("a", draining=True)
    assert decide(GatewayState("g", "a", 1, {"a": 1.0}), brokers=(drained,)) == []
    assert decide(GatewayState("g", "gone", 1, {}), brokers=()) == []


def test_the_current_broker_is_taken_to_be_a_little_nearer() -> None:
    assert decide(GatewayState("g", "a", 1, {"a": 2.1, "b": 1.9}), brokers=(A, B)) == []
    (move,) = decide(GatewayState("g", "a", 1, {"a": 2.5, "b": 1.9}), brokers=(A, B))
    assert move.explain() == "b is at 1.9 ms, a at 2.5 ms"


def test_gateways_count_with_their_clients() -> None:
    big = GatewayState("big", "a", 90, {"a": 1.0, "b": 1.0})
    small = [GatewayState(f"s{number}", "a", 5, {"a": 1.0, "b": 1.0}) for number in range(18)]
    found = decide(big, *small, brokers=(A, B))
    moved = sum(90 if move.gateway == "big" else 5 for move in found)
    assert abs(180 - 2 * moved) <= 20
    assert found[0].explain() == "b has 0 connections, a 180"


def test_a_gateway_that_would_only_exchange_places_stays() -> None:
    assert decide(GatewayState("g", "a", 100, {"a": 1.0, "b": 1.0}), brokers=(A, B)) == []


def test_clients_without_a_gateway_count_as_load() -> None:
    (move,) = decide(GatewayState("g", "", 1, {"a": 1.0, "b": 1.0}), brokers=(BrokerState("a", 10), B))
    assert move.target == "b"


def test_ranking_is_by_group_and_latency_with_the_unknown_behind() -> None:
    gateway = GatewayState("g", "a", 1, {"a": 30.0, "b": 1.0, "x": 1.5})
    brokers = (A, B, BrokerState("u", 5), BrokerState("v", 1), BrokerState("x", draining=True))
    assert ranking(gateway, brokers) == ("b", "a", "v", "u")


latencies = st.dictionaries(st.sampled_from("abcde"), st.floats(0.1, 500.0), max_size=5)
gateway_states = st.builds(
    lambda broker, weight, latency_ms: (broker, weight, latency_ms),
    st.sampled_from(["", *"abcde", "gone"]),
    st.integers(1, 50),
    latencies,
)


def apply(network: Network, moves: list[Migration]) -> Network:
    target = {move.gateway: move.target for move in moves}
    return Network(
        network.brokers,
        tuple(
            GatewayState(state.name, target.get(state.name, state.broker), state.weight, state.latency_ms)
            for state in network.gateways
        ),
    )


@given(st.lists(gateway_states, max_size=20), st.lists(st.booleans(), min_size=5, max_size=5), st.floats(0.0, 0.5))
def test_moves_make_sense_and_come_to_rest(
    drawn: list[tuple[str, int, dict[str, float]]], draining: list[bool], threshold: float
) -> None:
    """Against what must hold for every answer: known targets, none drained, never to a worse group than another open one; and
    with nothing changing, it ends."""
    brokers = tuple(BrokerState(name, 0, flag) for name, flag in zip("abcde", draining, strict=True))
    usable = {broker.name for broker in brokers if not broker.draining}
    states = tuple(GatewayState(f"g{number}", *state) for number, state in enumerate(drawn))
    network = Network(brokers, states)
    policy = Policy(threshold=threshold)
    for _ in range(40):
        moves = reconfigure(network, policy)
        by_name = {state.name: state for state in network.gateways}
        assert len({move.gateway for move in moves}) == len(moves)
        for move in moves:
            state = by_name[move.gateway]
            assert move.target in usable
            assert move.target != move.origin == state.broker
            known = [group_of(value) for name, value in state.latency_ms.items() if name in usable]
            if known:
                assert group_of(state.latency_ms[move.target]) == min(known)
        if not moves:
            break
        network = apply(network, moves)
    else:
        raise AssertionError("clients wander")
