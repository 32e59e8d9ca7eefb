"""What ``nearcast topic`` shows is readable, and harmless whatever publishers sent."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from rich.console import Console, RenderableType

from nearcast.cli import topic_display as display
from nearcast.client.records import KeptRule, Record, TopicState, encoded_properties
from nearcast.config import Retention, TopicRule
from nearcast.mqtt.packets import Properties

NOW = datetime(2026, 11, 16, 9, 30, tzinfo=UTC)
NOW_US = int(NOW.timestamp() * 1_000_000)


def lines(shown: RenderableType, width: int = 80) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(shown)
    return [line.rstrip() for line in captured.get().splitlines() if line.strip()]


def record(payload: bytes = b"open", properties: Properties | None = None, topic: str = "a/b") -> Record:
    return Record(topic, 17, NOW_US - 2_000_000, "door-1", 1, encoded_properties(properties), payload)


def test_what_is_kept_in_words() -> None:
    assert display.retention_words(Retention()) == "everything"
    assert display.retention_words(Retention(max_records=1)) == "1 record"
    assert display.retention_words(Retention(max_records=5_000, max_bytes=10**10, max_age_seconds=604_800)) == (
        "5,000 records or 10 GB or 7 d"
    )


def test_rules_and_topics_fit_a_terminal() -> None:
    rules = [TopicRule(topic="sensors/#"), TopicRule(topic="p/+", mode="tap", retention=Retention(max_records=10))]
    shown = lines(display.rules_table(rules))
    assert [line.split() for line in shown[1:]] == [["sensors/#", "durable", "everything"], ["p/+", "tap", "10", "records"]]
    shadowed = lines(display.rules_table([TopicRule(topic="a/#"), TopicRule(topic="a/b")]))
    assert shadowed[2].split() == ["a/b", "durable", "nothing:", "a/#", "comes", "first"]
    kept = [KeptRule(topic="a/#", origin="config"), KeptRule(topic="b", origin="created")]
    assert [line.split()[2] for line in lines(display.rules_table(kept))[1:]] == ["configuration", "created"]
    assert [display.rule_fields(rule)["origin"] for rule in kept] == ["config", "created"]
    states = [TopicState("a", 1, 1, 0, 0, 0), TopicState("x" * 100, 5, 1_000_005, 123_456_789, NOW_US - 9_000_000, NOW_US)]
    shown = lines(display.topics_table(states, NOW))
    assert all(len(line) <= 80 for line in shown)
    assert shown[1].split() == ["a", "0", "-", "-", "0", "B", "-"]
    assert "1,000,000" in shown[2]
    assert "just now" in shown[2]
    assert sum(line.count("x") for line in shown) == 100, "a long name is folded, not cut"


def test_a_topic_in_detail() -> None:
    state = TopicState("a", 11, 111, 5_000, NOW_US - 100_000_000, NOW_US - 1_000_000)
    rule = TopicRule(topic="#", retention=Retention(max_records=100))
    shown = "\n".join(lines(display.topic_details(state, rule, 120, NOW)))
    for words in (
        "100: 11 to 110",
        "5 kB, 50 B a record",
        "1 min 40 s ago",
        "120 in the last minute, 1/s from the oldest to the newest",
        "# (durable)",
    ):
        assert words in shown
    shown = "\n".join(lines(display.topic_details(TopicState("a", 8, 8, 0, 0, 0), None, 0, NOW)))
    assert "none; the next gets index 8" in shown
    assert "none any more" in shown
    assert display.average_rate(TopicState("a", 1, 2, 9, NOW_US, NOW_US)) is None


def test_a_record_in_detail_and_as_json() -> None:
    properties = Properties(
        content_type="text/plain",
        payload_format_indicator=1,
        response_topic="answers",
        correlation_data=b"\x01\xff",
        user_properties=[("unit", "C"), ("unit", "K")],
    )
    shown = display.record_details(record(properties=properties), NOW).splitlines()
    assert shown == [
        "topic:          a/b",
        "index:          17",
        "time:           2026-11-16T09:29:58.000000Z (2 s ago)",
        "publisher:      door-1",
        "qos:            1",
        "content type:   text/plain",
        "payload format: UTF-8 text",
        "response topic: answers",
        "correlation:    01 ff",
        "property:       unit = C",
        "property:       unit = K",
        "payload:        4 bytes",
    ]
    fields = json.loads(json.dumps(display.record_fields(record(properties=properties))))
    assert fields["user_properties"] == [["unit", "C"], ["unit", "K"]]
    assert (fields["payload"], fields["correlation_data_base64"], fields["index"]) == ("open", "Af8=", 17)
    assert display.record_fields(record(b"\xff"))["payload_base64"] == "/w=="


def test_a_tail_is_one_line_a_record() -> None:
    line = display.tail_line(record(b"two\nlines"), NOW)
    assert line.endswith(".000  a/b 17  two\\nlines")
    assert display.tail_line(record(b"\x00\x01"), NOW).endswith("  0x0001")


@pytest.mark.parametrize("evil", ["\x1b[2J", "\x07", "\x9b31m", "\u202e", "\r"])
def test_what_publishers_send_cannot_drive_the_terminal(evil: str) -> None:
    properties = Properties(user_properties=[(evil, evil)])
    found = record(f"x{evil}".encode(), properties, topic=f"t{evil}")
    shown = display.tail_line(found, NOW) + display.record_details(found, NOW)
    assert evil not in shown.replace("\n", "")
    rendered = "\n".join(lines(display.topics_table([TopicState(f"t{evil}", 1, 1, 0, 0, 0)], NOW)))
    assert evil not in rendered


def test_text_is_told_from_bytes() -> None:
    assert display.as_text("Grüße\t\n".encode()) == "Grüße\t\n"
    for payload in (b"\xff", b"\x00", b"\x1b[0m"):
        assert display.as_text(payload) is None
    assert display.hex_dump(b"") == ""
    assert display.hex_dump(bytes(range(60, 80))).splitlines() == [
        "00000000  3c 3d 3e 3f 40 41 42 43 44 45 46 47 48 49 4a 4b  <=>?@ABCDEFGHIJK",
        "00000010  4c 4d 4e 4f                                      LMNO",
    ]
