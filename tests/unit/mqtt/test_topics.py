"""Topic names, topic filters and what matches what (sections 4.7 and 4.8.2)."""

from __future__ import annotations

import pytest

from nearcast.mqtt.topics import filter_fault, is_string, matches, parse_shared, topic_fault


@pytest.mark.parametrize("topic", ["a", "/", "a/b", "a//b", " ", "$SYS/x", "é", "x" * 65_535, "/".join("a" * 128)])
def test_topic_names(topic: str) -> None:
    assert topic_fault(topic.encode(), 128) == ""


@pytest.mark.parametrize("topic", ["", "a/#", "+", "a+b", "a\0b", "x" * 65_536, "/".join("a" * 129), "\ud800"])
def test_what_is_no_topic_name(topic: str) -> None:
    assert topic_fault(topic.encode("utf-8", "surrogatepass"), 128)


@pytest.mark.parametrize(
    "topic_filter", ["a", "#", "+", "a/#", "+/+", "+/a/#", "/", "/#", "$share/g/a", "$share/g/#", "$share"]
)
def test_topic_filters(topic_filter: str) -> None:
    _, inner = parse_shared(topic_filter)
    assert filter_fault(inner, 128) == ""


@pytest.mark.parametrize(
    "topic_filter",
    ["", "a#", "#/a", "a/#/b", "a+", "+a", "a/+b", "a\0", "x" * 65_536, "$share/g", "$share//a", "$share/+/a", "$share/g/"],
)
def test_what_is_no_topic_filter(topic_filter: str) -> None:
    try:
        _, inner = parse_shared(topic_filter)
    except ValueError:
        return
    assert filter_fault(inner, 128)


def test_levels_of_filters_are_bounded() -> None:
    assert filter_fault("a/b/c", 3) == ""
    assert "3 levels" in filter_fault("a/b/c/d", 3)


@pytest.mark.parametrize(
    ("raw", "good"),
    [(b"a", True), (b"", True), (b"\xff", False), (b"\xc0\xaf", False), (b"\xed\xa0\x80", False), (b"a\x00", False)],
)
def test_strings(raw: bytes, good: bool) -> None:
    assert is_string(raw) == good


@pytest.mark.parametrize(
    ("topic_filter", "split"),
    [
        ("a/b", ("", "a/b")),
        ("$share/g/a/b", ("g", "a/b")),
        ("$share/g//a", ("g", "/a")),
        ("$shared/g/a", ("", "$shared/g/a")),
        ("$share", ("", "$share")),
    ],
)
def test_shared_filters(topic_filter: str, split: tuple[str, str]) -> None:
    assert parse_shared(topic_filter) == split


# The specification's own examples (4.7.1.2, 4.7.1.3, 4.7.2).
@pytest.mark.parametrize(
    ("topic_filter", "topic", "expected"),
    [
        ("sport/tennis/player1/#", "sport/tennis/player1", True),
        ("sport/tennis/player1/#", "sport/tennis/player1/ranking", True),
        ("sport/tennis/player1/#", "sport/tennis/player1/score/wimbledon", True),
        ("sport/#", "sport", True),
        ("#", "anything/at/all", True),
        ("sport/tennis/+", "sport/tennis/player1", True),
        ("sport/tennis/+", "sport/tennis/player1/ranking", False),
        ("sport/+", "sport", False),
        ("sport/+", "sport/", True),
        ("+/+", "/finance", True),
        ("/+", "/finance", True),
        ("+", "/finance", False),
        ("#", "$SYS/x", False),
        ("+/monitor/Clients", "$SYS/monitor/Clients", False),
        ("$SYS/#", "$SYS/x", True),
        ("$SYS/monitor/+", "$SYS/monitor/Clients", True),
        ("a/b", "a/b", True),
        ("a/b", "a/B", False),
        ("a/b", "a", False),
        ("a", "a/b", False),
        ("a/+/c", "a//c", True),
        ("a/$x/+", "a/$x/y", True),
        ("a/+", "a/$x", True),
    ],
)
def test_matching(topic_filter: str, topic: str, expected: bool) -> None:
    assert matches(topic_filter, topic) == expected
