"""Access rules: what covers what, what overlaps what, and that names cannot widen a rule."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearcast.broker.access_rules import AccessList, NamePattern, fill, load_access_list, parse_rules
from nearcast.config import AccessRule
from nearcast.errors import ConfigError
from nearcast.mqtt.topics import covers, matches, overlaps

# Filters over two literals reach no further than these topics: a literal that no filter names ("z"), one level more than the
# longest filter has, and a `$` level at the front are enough to tell any two of them apart.
TOPICS = [
    "/".join((first, *rest))
    for count in range(4)
    for first in ("a", "b", "z", "", "$S")
    for rest in itertools.product(("a", "b", "z", ""), repeat=count)
]

levels = st.sampled_from(["a", "b", "+", ""])


@st.composite
def filters(draw: st.DrawFn) -> str:
    first = draw(st.sampled_from(["a", "b", "+", "", "$S"]))
    rest = draw(st.lists(levels, max_size=2))
    tail = draw(st.sampled_from([[], ["#"]]))
    whole = [first, *rest, *tail]
    return draw(st.sampled_from(["/".join(whole), "/".join(whole), "#"])) or "a"


@given(filters(), filters())
def test_covers_is_inclusion_of_matched_topics(wide: str, narrow: str) -> None:
    expected = all(matches(wide, topic) for topic in TOPICS if matches(narrow, topic))
    assert covers(wide, narrow) == expected


@given(filters(), filters())
def test_overlaps_is_a_common_topic(one: str, other: str) -> None:
    expected = any(matches(one, topic) and matches(other, topic) for topic in TOPICS)
    assert overlaps(one, other) == overlaps(other, one) == expected


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        ("#", "+/#", True),
        ("+/#", "#", True),
        ("a/#", "a", True),
        ("a/+/#", "a/#", False),
        ("#", "$SYS/#", False),
        ("+/broker", "$SYS/broker", False),
        ("$SYS/#", "$SYS/+", True),
        ("a/+", "a/b", True),
        ("a/b", "a/+", False),
    ],
)
def test_covers_by_example(wide: str, narrow: str, expected: bool) -> None:
    assert covers(wide, narrow) is expected


def allow(topic: str, access: Literal["publish", "subscribe", "all"] = "all", **names: str) -> AccessRule:
    return AccessRule(action="allow", access=access, topic=topic, **names)


def deny(topic: str, access: Literal["publish", "subscribe", "all"] = "all", **names: str) -> AccessRule:
    return AccessRule(action="deny", access=access, topic=topic, **names)


def test_without_rules_everything_but_writing_sys_is_allowed() -> None:
    rules = AccessList()
    assert rules.may_publish("c", None, "any/topic")
    assert rules.may_subscribe("c", None, "#")
    assert rules.may_subscribe("c", None, "$SYS/#")
    assert not rules.may_publish("c", None, "$SYS/broker/uptime")
    assert not rules.may_publish("c", None, "$SYS")


def test_one_rule_makes_the_rest_denied() -> None:
    rules = AccessList([allow("a/#")])
    assert rules.may_publish("c", None, "a/b")
    assert not rules.may_publish("c", None, "b")
    assert not rules.may_subscribe("c", None, "b")
    assert not rules.may_subscribe("c", None, "$SYS/#")


def test_no_rule_allows_writing_sys() -> None:
    assert not AccessList([allow("$SYS/#")]).may_publish("c", None, "$SYS/broker/uptime")


def test_what_brokers_say_of_the_fabric_is_published_by_clients_only_where_a_rule_says_so() -> None:
    assert not AccessList().may_publish("c", None, "$nearcast/plan")
    assert AccessList().may_subscribe("c", None, "$nearcast/telemetry/#")
    assert not AccessList([allow("#")]).may_publish("c", None, "$nearcast/plan")
    assert not AccessList([allow("+/plan")]).may_publish("c", None, "$nearcast/plan")
    assert not AccessList([allow("%c/plan")]).may_publish("$nearcast", None, "$nearcast/plan")
    assert AccessList([allow("$nearcast/plan")]).may_publish("c", None, "$nearcast/plan")
    assert not AccessList([allow("$nearcast/plan")]).may_publish("c", None, "$nearcast/telemetry/broker/b")


def test_first_match_wins() -> None:
    rules = AccessList([allow("a/secret", user="boss"), deny("a/secret"), allow("a/#")])
    assert rules.may_publish("c", "boss", "a/secret")
    assert not rules.may_publish("c", "other", "a/secret")
    assert rules.may_publish("c", "other", "a/public")


def test_subscribing_needs_cover_and_no_overlap_with_a_denial() -> None:
    rules = AccessList([deny("a/secret"), allow("a/#")])
    assert rules.may_subscribe("c", None, "a/public")
    assert not rules.may_subscribe("c", None, "a/secret")
    assert not rules.may_subscribe("c", None, "a/+")
    assert not rules.may_subscribe("c", None, "a/#")
    assert not rules.may_subscribe("c", None, "#")
    assert rules.may_subscribe("c", None, "a/+/x")


def test_shared_subscriptions_are_judged_by_their_inner_filter() -> None:
    rules = AccessList([allow("a/#", "subscribe")])
    assert rules.may_subscribe("c", None, "$share/group/a/b")
    assert not rules.may_subscribe("c", None, "$share/group/b")
    assert not rules.may_subscribe("c", None, "$share/a")


def test_access_kinds_are_separate() -> None:
    rules = AccessList([allow("in", "publish"), allow("out", "subscribe")])
    assert rules.may_publish("c", None, "in")
    assert not rules.may_publish("c", None, "out")
    assert rules.may_subscribe("c", None, "out")
    assert not rules.may_subscribe("c", None, "in")


def test_users_and_clients_by_pattern() -> None:
    rules = AccessList([allow("u", user="dev-*"), allow("c", client="*-7"), allow("named", user="*"), allow("none", user="")])
    assert rules.may_publish("x", "dev-1", "u")
    assert not rules.may_publish("x", "xdev-1", "u")
    assert not rules.may_publish("x", None, "u")
    assert rules.may_publish("pump-7", None, "c")
    assert not rules.may_publish("pump-77", None, "c")
    assert rules.may_publish("x", "anyone", "named")
    assert not rules.may_publish("x", None, "named")
    assert rules.may_publish("x", None, "none")
    assert not rules.may_publish("x", "anyone", "none")


@given(st.text("ab*", max_size=6), st.text("ab\n", max_size=10))
def test_patterns_match_as_a_regular_expression_would(pattern: str, name: str) -> None:
    expected = re.fullmatch(pattern.replace("*", ".*"), name, re.DOTALL) is not None and (pattern != "*" or name != "")
    assert NamePattern(pattern).matches(name) is expected


def test_a_long_name_is_matched_in_linear_time() -> None:
    """A backtracking matcher would look at each of these some 10 ** 12 times."""
    pattern = NamePattern("*sensor*-*sensor*-*x")
    assert not pattern.matches("sensor" * 10_900 + "x")
    assert not NamePattern("*a" * 30 + "*b").matches("a" * 65_000)
    assert pattern.matches("sensor-" * 9_000 + "x")


def test_a_pattern_is_no_regular_expression() -> None:
    rules = AccessList([allow("t", user="a.c")])
    assert rules.may_publish("x", "a.c", "t")
    assert not rules.may_publish("x", "abc", "t")


def test_names_are_filled_in() -> None:
    rules = AccessList([allow("devices/%c/up", "publish"), allow("users/%u/#", "subscribe")])
    assert rules.may_publish("d1", None, "devices/d1/up")
    assert not rules.may_publish("d1", None, "devices/d2/up")
    assert rules.may_subscribe("d1", "ann", "users/ann/+")
    assert not rules.may_subscribe("d1", "ann", "users/bob/+")
    assert not rules.may_subscribe("d1", "ann", "users/+/x")


@pytest.mark.parametrize("name", ["+", "#", "a/b", "a+", "", "a/#"])
def test_a_name_cannot_widen_an_allowance(name: str) -> None:
    rules = AccessList([allow("users/%u/#"), allow("devices/%c/#")])
    for topic in ("users/bob/x", "users/a/b/x", "devices/d2/x", "users//x"):
        assert not rules.may_publish(name, name, topic)
    for topic_filter in ("users/+/x", "users/#", "devices/#", "users/a/b"):
        assert not rules.may_subscribe(name, name, topic_filter)


def test_a_name_cannot_reach_dollar_topics() -> None:
    rules = AccessList([allow("%u/#")])
    assert not rules.may_subscribe("c", "$SYS", "$SYS/#")
    assert not rules.may_subscribe("c", "$SYS", "$SYS/broker/uptime")
    assert rules.may_subscribe("c", "ann", "ann/#")


@pytest.mark.parametrize("name", ["a/b", "+", ""])
def test_a_name_cannot_slip_out_of_a_denial(name: str) -> None:
    rules = AccessList([deny("vault/%c/key"), allow("#")])
    assert not rules.may_publish(name, None, "vault/a/b/key")
    assert not rules.may_subscribe(name, None, "vault/#")
    assert rules.may_publish(name, None, "elsewhere")
    assert rules.may_publish("plain", None, "vault/other/key")
    assert not rules.may_publish("plain", None, "vault/plain/key")


def test_filling_happens_once() -> None:
    assert fill("a/%c/%u", "%u", "bob") == "a/%u/bob"
    assert fill("a/%c-x/%u", "one", "two") == "a/one-x/two"
    assert fill("a/%u", "c", None) is None
    assert fill("plain", "a/b", None) == "plain"


def test_rules_from_a_file() -> None:
    text = """
    # comment
    allow publish user=ann topic sensors/%u/#
    deny all topic with space/#
    allow subscribe client=d-* user=bob topic +/x
    """
    first, second, third = parse_rules(text, "acl")
    assert (first.action, first.access, first.user, first.client, first.topic) == (
        "allow",
        "publish",
        "ann",
        None,
        "sensors/%u/#",
    )
    assert second.topic == "with space/#"
    assert (third.user, third.client, third.topic) == ("bob", "d-*", "+/x")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("allow publish", "a rule is written"),
        ("permit publish topic a", '"allow" or "deny"'),
        ("allow read topic a", '"publish", "subscribe", "manage" or "all"'),
        ("allow all topic a/#/b", "# must be the whole last level"),
        ("allow all topic $share/g/a", "without $share"),
        ("allow all group=x topic a", "a rule is written"),
    ],
)
def test_a_bad_rule_is_refused_with_its_line(line: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rules(f"# first\n{line}\n", "acl.txt")
    assert str(caught.value).startswith("acl.txt:2: ")
    assert says in str(caught.value)


def test_inline_rules_come_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "acl"
    path.write_text("allow all topic #\n", encoding="utf-8")
    rules = load_access_list([deny("a")], str(path))
    assert rules.rule_count == 2
    assert not rules.may_publish("c", None, "a")
    assert rules.may_publish("c", None, "b")


def test_a_missing_rule_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the access rules"):
        load_access_list([], str(tmp_path / "none"))


def test_an_inline_rule_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="whole level"):
        load_access_list([allow("a+/b")], None)


def test_managing_topics_must_be_granted_by_name() -> None:
    nobody_asked = AccessList()
    assert nobody_asked.may_manage("c", None, "a/#")
    rules = AccessList([allow("#"), AccessRule(action="allow", access="manage", topic="sensors/#", user="operator")])
    assert rules.may_publish("c", "operator", "a")
    assert not rules.may_manage("c", "operator", "a")
    assert not rules.may_manage("c", None, "sensors/a")
    assert rules.may_manage("c", "operator", "sensors/a")
    assert rules.may_manage("c", "operator", "sensors/#")
    assert not rules.may_manage("c", "operator", "#"), "only what a rule covers whole"


def test_denying_all_denies_managing() -> None:
    manage = AccessRule(action="allow", access="manage", topic="#")
    rules = AccessList([AccessRule(action="deny", topic="secret/#", user="eve"), manage])
    assert not rules.may_manage("c", "eve", "secret/a")
    assert not rules.may_manage("c", "eve", "#")
    assert rules.may_manage("c", "eve", "open/a")
    assert rules.may_manage("c", "ann", "#")
    assert not AccessList([manage]).may_publish("c", "ann", "a")
    assert not AccessList([manage]).may_subscribe("c", "ann", "a")
    (line,) = parse_rules("allow manage user=ann topic a/#\n", "acl")
    assert (line.access, line.user, line.topic) == ("manage", "ann", "a/#")
