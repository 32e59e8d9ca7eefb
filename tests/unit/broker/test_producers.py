"""Which producers are forgotten when there are too many."""

from __future__ import annotations

from nearcast.broker.producers import Remembered, producer_of


def test_producers_that_never_come_back_take_no_room_from_those_that_do() -> None:
    remembered = Remembered(2, 3)
    query = producer_of(None, "query")
    assert remembered.add(query) is None
    passing = [producer_of(None, f"once/{number}") for number in range(5)]
    assert [remembered.add(each) for each in passing] == [None, None, None, passing[0], passing[1]]
    assert remembered.add(producer_of(None, "another")) is None
    assert remembered.add(producer_of(None, "third")) == query


def test_who_commits_stays_and_the_oldest_goes() -> None:
    remembered = Remembered(2, 1)
    one, two, three = (producer_of("ann", name) for name in ("one", "two", "three"))
    for each in (one, two, one):
        assert remembered.add(each) is None
    assert remembered.add(three) == two


def test_a_user_with_many_producers_pays_with_their_own() -> None:
    remembered = Remembered(4, 1)
    quiet = [producer_of("7:x/", name) for name in ("a:b", "c/d")]
    for each in quiet:
        assert remembered.add(each) is None
    flood = [producer_of("mallory", str(number)) for number in range(50)]
    forgotten = {remembered.add(each) for each in flood} - {None}
    assert forgotten == set(flood[:-2])
    assert remembered.add(quiet[0]) is None


def test_names_cannot_be_made_to_look_like_another_users() -> None:
    assert producer_of("a", "b/c") != producer_of("a/b", "c")
    assert producer_of(None, "0:/x") != producer_of("0:", "x")
