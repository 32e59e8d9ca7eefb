"""Which messages were here already: each is taken once, whatever ways it comes; what is remembered is bounded."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nearcast.fabric.identities import Identity, Seen


def test_a_message_is_taken_once() -> None:
    seen = Seen()
    assert seen.take("a", 1, 10, 5) == [(10, 5)]
    assert seen.take("a", 1, 10, 5) == []
    assert seen.take("a", 1, 12, 1) == []
    assert seen.repeated == 6


def test_origins_and_their_epochs_have_numbers_of_their_own() -> None:
    seen = Seen()
    assert seen.take("a", 1, 10, 1)
    assert seen.take("a", 2, 10, 1)
    assert seen.take("b", 1, 10, 1)
    assert seen.repeated == 0


def test_of_messages_that_came_in_part_the_rest_is_taken() -> None:
    seen = Seen()
    seen.take("a", 1, 3, 2)
    seen.take("a", 1, 8, 1)
    assert seen.take("a", 1, 1, 10) == [(1, 2), (5, 3), (9, 2)]
    assert seen.take("a", 1, 1, 10) == []


def test_what_is_older_than_everything_remembered_counts_as_new() -> None:
    seen = Seen(max_stretches=4)
    for number in range(10, 20, 2):
        seen.take("a", 1, number, 1)
    assert seen.take("a", 1, 18, 1) == [], "the newer half is remembered"
    assert seen.take("a", 1, 10, 1) == [(10, 1)], "rather twice than not at all"


def test_all_origins_together_are_bounded() -> None:
    seen = Seen(max_all_stretches=100, max_origins=8)
    for number in range(1, 400, 2):
        for origin in range(12):
            seen.take(f"{origin}", 1, number, 1)
    remembered = sum(sum(seen.has(f"{origin}", 1, number) for number in range(1, 400)) for origin in range(12))
    assert 0 < remembered <= 100
    assert seen.take("11", 1, 399, 1) == []


Taken = st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 60), st.integers(1, 12))


@given(st.lists(Taken, max_size=60))
def test_as_a_set_would(taken: list[tuple[str, int, int]]) -> None:
    seen = Seen()
    model: set[tuple[str, int]] = set()
    repeated = 0
    for origin, first, count in taken:
        numbers = [number for number in range(first, first + count) if (origin, number) not in model]
        found = seen.take(origin, 7, first, count)
        assert [number for begin, length in found for number in range(begin, begin + length)] == numbers
        for (begin, length), (then, _) in pairwise(found):
            assert begin + length < then, "stretches are whole, and in order"
        model.update((origin, number) for number in numbers)
        repeated += count - len(numbers)
    assert seen.repeated == repeated
    for origin in ("a", "b"):
        for number in range(80):
            assert seen.has(origin, 7, number) == ((origin, number) in model)


def test_an_identity_says_who_it_is() -> None:
    assert repr(Identity("edge-1", 255, 7)) == "edge-1/ff/7"
    assert Identity("edge-1", 255, 7).served == []
