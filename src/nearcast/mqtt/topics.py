"""Topic names and topic filters: what is valid, what matches what (section 4.7), and shared subscription filters (4.8.2).

Topics travel as UTF-8 bytes inside the broker, because that is how they come and go; text appears only where people look.
"""

from __future__ import annotations

from typing import Final

MAX_TOPIC_BYTES: Final = 65_535
SHARE_PREFIX: Final = "$share/"

OWN_FIGURES: Final = "$SYS/"
"""Below this a broker tells of itself, and nobody else does."""

OWN_WORD: Final = "$nearcast/"
"""Below this brokers tell of the fabric and planners of what to do (docs/reference/telemetry.md). Clients publish here only
where an access rule says so by name."""


def is_string(raw: bytes) -> bool:
    """Whether bytes are an MQTT string: well-formed UTF-8 without U+0000 [MQTT-1.5.4-1, -2]."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\x00" not in raw


def topic_fault(topic: bytes, max_levels: int) -> str:
    """What is wrong with a topic name, in words; empty when nothing is."""
    if not topic:
        return "a topic name must not be empty"
    if len(topic) > MAX_TOPIC_BYTES:
        return "a topic name has at most 65,535 bytes"
    if b"+" in topic or b"#" in topic:
        return "a topic name must not contain + or #"
    if topic.count(b"/") >= max_levels:
        return f"a topic name has at most {max_levels} levels here"
    if not is_string(topic):
        return "a topic name must be well-formed UTF-8 without U+0000"
    return ""


def filter_fault(topic_filter: str, max_levels: int) -> str:
    """What is wrong with a topic filter (without any ``$share`` prefix), in words; empty when nothing is."""
    if not topic_filter:
        return "a topic filter must not be empty"
    if "\x00" in topic_filter:
        return "a topic filter must not contain U+0000"
    if len(topic_filter.encode("utf-8", "surrogatepass")) > MAX_TOPIC_BYTES:
        return "a topic filter has at most 65,535 bytes"
    levels = topic_filter.split("/")
    if len(levels) > max_levels:
        return f"a topic filter has at most {max_levels} levels here"
    last = len(levels) - 1
    for position, level in enumerate(levels):
        if "#" in level and (level != "#" or position != last):  # [MQTT-4.7.1-1]
            return "# must be the whole last level of a topic filter"
        if "+" in level and level != "+":  # [MQTT-4.7.1-2]
            return "+ must be a whole level of a topic filter"
    return ""


def parse_shared(topic_filter: str) -> tuple[str, str]:
    """Split ``$share/group/filter`` into group and filter; a plain filter comes back with an empty group.

    Raises ``ValueError`` when it starts like a shared subscription and is none [MQTT-4.8.2-1, -2].
    """
    if not topic_filter.startswith(SHARE_PREFIX):
        return "", topic_filter
    rest = topic_filter[len(SHARE_PREFIX) :]
    slash = rest.find("/")
    if slash <= 0:
        raise ValueError("a shared subscription is written $share/NAME/FILTER")
    group = rest[:slash]
    if "+" in group or "#" in group:
        raise ValueError("the name of a shared subscription must not contain + or #")
    return group, rest[slash + 1 :]


def matches(topic_filter: str, topic: str) -> bool:
    """Whether a (not shared) topic filter matches a topic name: the plain reading of section 4.7.

    The broker itself asks the subscription tree; this is for clients, rules and tests.
    """
    if topic.startswith("$") and topic_filter[:1] in ("+", "#"):  # [MQTT-4.7.2-1]
        return False
    filter_levels = topic_filter.split("/")
    topic_levels = topic.split("/")
    for position, level in enumerate(filter_levels):
        if level == "#":
            return True
        if position >= len(topic_levels):
            return False
        if level != "+" and level != topic_levels[position]:
            return False
    return len(filter_levels) == len(topic_levels)


def covers(wide: str, narrow: str) -> bool:
    """Whether every topic that the filter ``narrow`` matches is matched by the filter ``wide`` too."""
    wide_levels, narrow_levels = _levels(wide), _levels(narrow)
    for position, level in enumerate(wide_levels):
        if level == "#":
            return True
        if position == len(narrow_levels):
            return False
        other = narrow_levels[position]
        if other == "#":
            return False
        if level == "+":
            if position == 0 and other.startswith("$"):  # [MQTT-4.7.2-1]
                return False
        elif level != other:
            return False
    return len(wide_levels) == len(narrow_levels)


def overlaps(one: str, other: str) -> bool:
    """Whether some topic is matched by both filters."""
    one_levels, other_levels = _levels(one), _levels(other)
    for position in range(max(len(one_levels), len(other_levels))):
        here = one_levels[position] if position < len(one_levels) else None
        there = other_levels[position] if position < len(other_levels) else None
        if here == "#" or there == "#":
            return True
        if here is None or there is None:
            return False
        if "+" in (here, there):
            if position == 0 and (here.startswith("$") or there.startswith("$")):  # [MQTT-4.7.2-1]
                return False
        elif here != there:
            return False
    return True


def _levels(topic_filter: str) -> list[str]:
    # A topic has at least one level, so `#` and `+/#` match the same topics; with the longer form, `#` is never the first
    # level and always stands for "these levels, and any number more".
    return topic_filter.split("/") if topic_filter != "#" else ["+", "#"]
