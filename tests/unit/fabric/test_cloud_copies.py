"""Echoes and copies: what came before is known by its content, and nothing else is taken for it."""

from __future__ import annotations

import itertools
import random

from nearcast.fabric.cloud_copies import EXPECTED_S, MAX_EXPECTED, MAX_REMEMBERED, REMEMBERED_S, Copies, Echoes

LARGE = b"x" * 1_000


def test_an_echo_is_expected_once() -> None:
    echoes = Echoes()
    for payload in (b"on", LARGE):
        echoes.expect("x", 1, payload, 0.0)
        assert not echoes.is_echo("y", 1, payload, 0.0)
        assert echoes.is_echo("x", 1, payload, 0.0)
        assert not echoes.is_echo("x", 1, payload, 0.0)


def test_equal_messages_are_counted() -> None:
    echoes = Echoes()
    for _ in range(3):
        echoes.expect("x", 1, b"on", 0.0)
    assert [echoes.is_echo("x", 1, b"on", 0.0) for _ in range(4)] == [True, True, True, False]


def test_an_echo_ends_the_wait_for_those_before_it() -> None:
    echoes = Echoes()
    for payload in (b"1", b"2", b"3"):
        echoes.expect("x", 1, payload, 0.0)
    assert echoes.is_echo("x", 1, b"2", 0.0)
    assert not echoes.is_echo("x", 1, b"1", 0.0)
    assert echoes.is_echo("x", 1, b"3", 0.0)


def test_what_does_not_come_back_is_forgotten() -> None:
    echoes = Echoes()
    echoes.expect("x", 1, b"1", 0.0)
    assert not echoes.is_echo("x", 1, b"1", EXPECTED_S)
    echoes.expect("x", 1, b"2", EXPECTED_S)
    assert echoes._count == 1
    echoes.clear()
    assert not echoes.is_echo("x", 1, b"2", EXPECTED_S)


def test_order_is_of_one_qos() -> None:
    echoes = Echoes()
    echoes.expect("x", 2, b"1", 0.0)
    echoes.expect("x", 1, b"2", 0.0)
    assert echoes.is_echo("x", 1, b"2", 0.0)
    assert echoes.is_echo("x", 2, b"1", 0.0)


def test_an_echo_may_come_at_a_lower_qos() -> None:
    echoes = Echoes()
    echoes.expect("x", 2, b"1", 0.0)
    assert echoes.is_echo("x", 0, b"1", 0.0)


def test_expectations_are_bounded() -> None:
    echoes = Echoes()
    for number in range(MAX_EXPECTED + 10):
        echoes.expect(f"x/{number}", 1, b"1", 0.0)
    assert echoes._count == MAX_EXPECTED
    assert not echoes.is_echo("x/9", 1, b"1", 0.0)
    assert echoes.is_echo("x/10", 1, b"1", 0.0)


def taken(copies: Copies, arrivals: list[tuple[bytes, list[int]]], now: float = 0.0) -> list[bytes]:
    return [payload for payload, identifiers in arrivals if not copies.is_copy("x", payload, identifiers, now)]


def test_a_copy_by_another_subscription_is_one() -> None:
    assert taken(Copies(), [(b"1", [1]), (b"1", [2]), (b"2", [2]), (b"2", [1])]) == [b"1", b"2"]


def test_the_same_message_twice_by_one_subscription_is_two() -> None:
    assert taken(Copies(), [(b"1", [1]), (b"1", [1])]) == [b"1", b"1"]


def test_one_copy_that_names_both_subscriptions() -> None:
    assert taken(Copies(), [(b"1", [1, 2]), (b"1", [1, 2]), (b"1", [1]), (b"1", [2])]) == [b"1", b"1", b"1"]


def test_in_whatever_order_copies_come_each_message_is_taken_once() -> None:
    rng = random.Random(6)
    for _ in range(200):
        published = [bytes([rng.randrange(3)]) for _ in range(rng.randrange(1, 8))]
        # Each subscription brings all messages in order; the two streams mix in any way.
        streams = [[(payload, [identifier]) for payload in published] for identifier in (1, 2)]
        places = [0, 0]
        arrivals: list[tuple[bytes, list[int]]] = []
        while places != [len(published)] * 2:
            which = rng.choice([side for side in (0, 1) if places[side] < len(published)])
            arrivals.append(streams[which][places[which]])
            places[which] += 1
        assert sorted(taken(Copies(), arrivals)) == sorted(published), arrivals


def test_counting_begins_anew_after_a_while_and_after_a_change() -> None:
    copies = Copies()
    assert not copies.is_copy("x", b"1", [1], 0.0)
    # Its copy was lost; much later the same content comes by the other one.
    assert not copies.is_copy("x", b"1", [2], 2 * REMEMBERED_S + 1)
    copies.clear()
    assert not copies.is_copy("x", b"1", [1], 2 * REMEMBERED_S + 1)


def test_what_is_remembered_is_bounded() -> None:
    copies = Copies()
    for number, identifier in itertools.product(range(MAX_REMEMBERED + 10), (1, 2)):
        assert copies.is_copy(f"x/{number}", b"1", [identifier], 0.0) == (identifier == 2)
    assert len(copies._seen) == MAX_REMEMBERED
