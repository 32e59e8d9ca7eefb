"""The access control list: which client may publish to and subscribe to what, and who may change what the log keeps.

Rules are tried in order and the first that applies decides:

- A **publish** is decided by the first rule whose filter matches the topic.
- A **subscribe** asks for a whole set of topics. An *allow* applies only when its filter covers every topic the asked filter
  can match; a *deny* applies as soon as it could match one of them. So ``deny a/secret`` before ``allow a/#`` refuses ``a/#``
  and ``a/+``, and grants ``a/public``. A shared subscription is judged by its inner filter.
- To **manage** the rules of durable topics and taps is judged like a subscribe. It must be granted by its own name: *allow
  all* says publish and subscribe, while *deny all* denies everything.
- When no rule applies the answer is no. A broker without any rule allows everything but publishing below ``$SYS/``, which is
  the broker's own in any case, and below ``$nearcast/``, which takes a rule that says so: what is published there moves other
  people's topics. With rules, reading ``$SYS/#`` or ``$nearcast/#`` needs a rule that says so, too: ``#`` matches neither
  (section 4.7.2).

``%c`` and ``%u`` are filled in with the client identifier and the user name. A name that holds ``+``, ``#`` or ``/``, is empty
or missing, or would turn the filter into a ``$`` topic, could widen a rule. An *allow* is then no use to that client, and a
*deny* reaches everything from the level on that could not be filled in.

This module knows topics and names; it knows no sockets, and who a client is was settled before it is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, cast

from nearcast.config import AccessRule
from nearcast.errors import ConfigError
from nearcast.mqtt import topics
from nearcast.mqtt.topics import covers, overlaps


def fill(template: str, client_id: str, username: str | None) -> str | None:
    """The filter with ``%c`` and ``%u`` filled in, or ``None`` when one of the names must not be."""
    names = {"%c": client_id, "%u": username or ""}
    for placeholder, name in names.items():
        if placeholder in template and (not name or any(character in name for character in "+#/\0")):
            return None
    return re.sub("%[cu]", lambda found: names[found.group()], template)


class NamePattern:
    """A user name or client identifier in which ``*`` stands for any run of characters; alone, for any name but none.

    Names are the client's to choose and up to 64 KiB long, so the time is linear in their length: each piece between two
    stars is taken where it is found first, and never looked for again.
    """

    __slots__ = ("_anything", "_first", "_last", "_least", "_middle")

    def __init__(self, pattern: str) -> None:
        pieces = pattern.split("*")
        self._anything = pattern == "*"
        self._first = pieces[0]
        self._last = pieces[-1] if len(pieces) > 1 else None
        self._middle = [piece for piece in pieces[1:-1] if piece]
        self._least = sum(map(len, pieces))

    def matches(self, name: str) -> bool:
        if self._anything:
            return name != ""
        if self._last is None:
            return name == self._first
        if len(name) < self._least or not name.startswith(self._first) or not name.endswith(self._last):
            return False
        position, end = len(self._first), len(name) - len(self._last)
        for piece in self._middle:
            found = name.find(piece, position, end)
            if found < 0:
                return False
            position = found + len(piece)
        return True


class _Rule:
    """An :class:`AccessRule` made ready to be asked often."""

    __slots__ = ("access", "allow", "client", "fallback", "filled", "topic", "user")

    def __init__(self, rule: AccessRule) -> None:
        self.allow = rule.action == "allow"
        self.access = rule.access
        self.topic = rule.topic
        self.user = None if rule.user is None else NamePattern(rule.user)
        self.client = None if rule.client is None else NamePattern(rule.client)
        self.filled = "%c" in rule.topic or "%u" in rule.topic
        # What a deny reaches when it cannot be filled in: everything from the first level with a placeholder on.
        kept: list[str] = []
        for level in rule.topic.split("/"):
            if "%c" in level or "%u" in level:
                break
            kept.append(level)
        self.fallback = "/".join([*kept, "#"])

    def concerns(self, client_id: str, username: str | None) -> bool:
        if self.user is not None and not self.user.matches(username or ""):
            return False
        return self.client is None or self.client.matches(client_id)

    def filter_for(self, client_id: str, username: str | None) -> str | None:
        if not self.filled:
            return self.topic
        filled = fill(self.topic, client_id, username)
        if filled is None:
            return None if self.allow else self.fallback
        if self.allow and filled.startswith("$") and not self.topic.startswith("$"):
            return None
        return filled


class AccessList:
    """An :class:`~nearcast.mqtt.access.Authorizer` that goes by rules."""

    def __init__(self, rules: Iterable[AccessRule] = ()) -> None:
        prepared = [_Rule(rule) for rule in rules]
        self._publish = [rule for rule in prepared if rule.access in ("publish", "all")]
        self._subscribe = [rule for rule in prepared if rule.access in ("subscribe", "all")]
        self._manage = [rule for rule in prepared if rule.access == "manage" or (rule.access == "all" and not rule.allow)]
        self.rule_count = len(prepared)

    def may_publish(self, client_id: str, username: str | None, topic: str) -> bool:
        if topic.startswith("$SYS/") or topic == "$SYS":
            return False
        for rule in self._publish:
            if rule.concerns(client_id, username):
                topic_filter = rule.filter_for(client_id, username)
                if topic_filter is not None and topics.matches(topic_filter, topic):
                    return rule.allow
        return self.rule_count == 0 and not topic.startswith(topics.OWN_WORD)

    def may_subscribe(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        try:
            _, asked = topics.parse_shared(topic_filter)
        except ValueError:
            return False
        return self._may_all_of(self._subscribe, client_id, username, asked)

    def may_manage(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        """Whether a client may make, change and delete the rule by which the log keeps these topics."""
        return self._may_all_of(self._manage, client_id, username, topic_filter)

    def may_know(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        """Whether a client may read, publish to or manage some of these topics, so that what is said of them concerns it."""
        return any(
            self._may_some_of(rules, client_id, username, topic_filter)
            for rules in (self._subscribe, self._publish, self._manage)
        )

    def _may_some_of(self, rules: list[_Rule], client_id: str, username: str | None, asked: str) -> bool:
        for rule in rules:
            if rule.concerns(client_id, username):
                held = rule.filter_for(client_id, username)
                if held is not None and (overlaps(held, asked) if rule.allow else covers(held, asked)):
                    return rule.allow
        return self.rule_count == 0

    def _may_all_of(self, rules: list[_Rule], client_id: str, username: str | None, asked: str) -> bool:
        for rule in rules:
            if rule.concerns(client_id, username):
                held = rule.filter_for(client_id, username)
                if held is not None and (covers(held, asked) if rule.allow else overlaps(held, asked)):
                    return rule.allow
        return self.rule_count == 0


_LINE = re.compile(r"(?P<action>\S+)\s+(?P<access>\S+)\s+(?P<names>(?:(?:user|client)=\S*\s+)*)topic\s+(?P<topic>\S.*)")


def parse_rules(text: str, path: str) -> list[AccessRule]:
    """Rules from a file: ``allow|deny publish|subscribe|manage|all [user=NAME] [client=NAME] topic FILTER``, one per line;
    ``#`` at the start of a line begins a comment. Names may hold ``*``; one with spaces needs the TOML form."""
    rules = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            message = "a rule is written `allow|deny publish|subscribe|manage|all [user=NAME] [client=NAME] topic FILTER`"
            raise ConfigError(message, path=path, line=number)
        action, access = found["action"], found["access"]
        if action not in ("allow", "deny"):
            raise ConfigError(f'a rule begins with "allow" or "deny", not "{action}"', path=path, line=number)
        if access not in ("publish", "subscribe", "manage", "all"):
            raise ConfigError(f'access is "publish", "subscribe", "manage" or "all", not "{access}"', path=path, line=number)
        names = dict(name.split("=", 1) for name in found["names"].split())
        rule = AccessRule(
            action=cast(Literal["allow", "deny"], action),
            access=cast(Literal["publish", "subscribe", "manage", "all"], access),
            topic=found["topic"],
            user=names.get("user"),
            client=names.get("client"),
        )
        check_rule(rule, path, number)
        rules.append(rule)
    return rules


def check_rule(rule: AccessRule, path: str | None = None, line: int | None = None) -> None:
    """Refuse a rule whose filter could never match anything."""
    fault = topics.filter_fault(rule.topic, 65_535)
    if not fault and rule.topic.startswith(topics.SHARE_PREFIX):
        fault = "a rule names the filter inside a shared subscription, without $share/NAME/"
    if fault:
        raise ConfigError(f"access rule for topic `{rule.topic}`: {fault}", path=path, key="acl", line=line)


def load_access_list(inline: Iterable[AccessRule], path: str | None) -> AccessList:
    """The rules of the configuration followed by those of its ``acl_file``."""
    rules = list(inline)
    for rule in rules:
        check_rule(rule)
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
            raise ConfigError(f"cannot read the access rules: {reason}", path=path, key="security.acl_file") from error
        rules.extend(parse_rules(text, path))
    return AccessList(rules)
