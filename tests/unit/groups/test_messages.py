"""Messages about groups as bytes."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearcast.groups import messages
from nearcast.groups.messages import (
    Answer,
    Ask,
    Found,
    Join,
    Leave,
    Message,
    Notice,
    Refuse,
    Report,
    Seek,
    Update,
    Welcome,
    decode,
)
from nearcast.groups.views import Member, View

MEMBERS = {
    "berlin": Member("berlin", "berlin.example:1884", 1),
    "köln": Member("köln", "[2001:db8::1]:1884", 70_000, "[2001:db8::1]:1885"),
}
VIEW = View("berlin", 70_000, 5.0, 6.25, MEMBERS, 2**47)
UPDATE = Update(2**47, 3, 70_000, 5.0, 6.25, [MEMBERS["köln"]], ["bonn"])

EVERY_KIND: list[Message] = [
    Ask(1, 1_000.5, 3, 5.0, 2.25, "köln:1884", "köln:1885"),
    Answer(2**40, messages.FOLLOWS),
    Join(3, 0.0, "köln:1884", "köln:1885", 17, 2**47),
    Welcome(4, VIEW),
    Refuse(5, "berlin", "berlin.example:1884", "", math.inf),
    UPDATE,
    Notice("berlin", "berlin.example:1884", "berlin.example:1885", 5.0),
    Leave(6),
    Report(7, 8),
    Seek("berlin"),
    Found("berlin", "berlin.example:1884", "berlin.example:1885", 5.0),
]


def _facts(of: Message) -> dict[str, object]:
    names = [name for name in dir(of) if not name.startswith("_") and name not in ("encode", "decode", "applied")]
    return {name: getattr(of, name) for name in names}


@pytest.mark.parametrize("message", EVERY_KIND, ids=lambda message: type(message).__name__)
def test_each_message_comes_back_from_its_bytes(message: Message) -> None:
    again = Message.decode(message.encode())
    assert type(again) is type(message)
    assert _facts(again) == _facts(message)


@pytest.mark.parametrize("message", EVERY_KIND, ids=lambda message: type(message).__name__)
def test_a_message_that_is_cut_short_or_has_more_is_none(message: Message) -> None:
    content = message.encode()
    for size in range(len(content)):
        with pytest.raises(ValueError, match="no message about groups"):
            decode(content[:size])
    with pytest.raises(ValueError, match="no message about groups"):
        decode(content + b"\x00")


@pytest.mark.parametrize(
    "message",
    [
        Ask(1, math.nan, 3, 5.0, 2.25),
        Ask(1, 1.0, 3, -5.0, 2.25),
        Join(3, 0.0, "a:1", "", 2**64 - 1, 1),
        Join(3, 0.0, "a:1", "", -1, 1),
        Join(3, 0.0, "a" * 301, "", 1, 1),
        Welcome(4, View("a", 1, 5.0, math.nan, {"a": Member("a", "", 1)}, 1)),
        Welcome(4, View("a", 1, 5.0, 6.0, {"\0\0": Member("\0\0", "", 1)}, 1)),
        Welcome(4, View("a", 1, 5.0, 6.0, {"": Member("", "", 1)}, 1)),
        Welcome(4, View("a", 1, 5.0, 6.0, {"a": Member("a" * 129, "", 1)}, 1)),
        Welcome(4, View("a", 1, 5.0, 6.0, {f"{number}": Member(f"{number}", "", 1) for number in range(16_385)}, 1)),
        Update(1, 3, 2**63, 5.0, 6.25, [], []),
        Update(1, 3, 4, 5.0, 6.25, [Member("\n", "", 1)], []),
        Update(1, 3, 4, 5.0, 6.25, [], ["gone"] * 16_385),
        Notice("a\x1b[2J", "a:1", "", 5.0),
        Refuse(5, "a", "a:1", "", math.nan),
        Report(-1, 8),
    ],
)
def test_what_no_broker_can_say_in_earnest_is_no_message(message: Message) -> None:
    with pytest.raises(ValueError, match="no message about groups"):
        decode(message.encode())


@given(st.binary(max_size=40))
def test_garbage_is_no_message(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(decode(content), Message)


def test_an_update_takes_every_view_in_its_range_to_the_same_one() -> None:
    base = View("a", 3, 5.0, 6.25, {"a": Member("a", "", 1), "b": Member("b", "", 2), "c": Member("c", "", 3)}, 9)
    between = base.with_member(Member("d", "", 4)).without("b", 5)
    last = between.with_member(Member("b", "", 6)).without("c", 7)
    update = Update(9, 3, 7, 5.0, 6.25, [Member("d", "", 4), Member("b", "", 6)], ["c"])
    for view in (base, between):
        assert Message.decode(update.encode()).applied(view) == last  # type: ignore[attr-defined]
    assert update.applied(base) is update.applied(between), "whoever shares the message shares the view"


def test_an_update_does_not_fit_views_that_are_older_newer_or_of_another_reign() -> None:
    members = {"a": Member("a", "", 1)}
    update = Update(9, 3, 7, 5.0, 6.25, [], [])
    assert update.applied(View("a", 2, 5.0, 6.25, members, 9)) is None
    assert update.applied(View("a", 7, 5.0, 6.25, members, 9)) is None
    assert update.applied(View("a", 5, 5.0, 6.25, members, 8)) is None
    assert update.applied(View("a", 6, 5.0, 6.25, members, 9)) is not None
