"""What comes back when a change of limited time is over."""

from __future__ import annotations

from nearcast.scenario.changes import Changes


def test_the_latest_change_decides_when_to_undo() -> None:
    changes = Changes()
    first = changes.claim("a", "b")
    second = changes.claim("b")
    assert changes.is_last("a", first)
    assert not changes.is_last("b", first)
    assert changes.is_last("b", second)
    assert not changes.is_last("c", second)


def test_what_was_there_at_first_comes_back() -> None:
    changes = Changes()
    changes.note("link", "good", "bad", lasting=False)
    changes.note("link", "bad", "worse", lasting=False)
    assert changes.usual("link") == "good"


def test_what_a_change_without_an_end_left_comes_back() -> None:
    changes = Changes()
    changes.note("link", "good", "bad", lasting=False)
    changes.note("link", "bad", "fair", lasting=True)
    changes.note("link", "fair", "worse", lasting=False)
    assert changes.usual("link") == "fair"
