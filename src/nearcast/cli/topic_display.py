"""How topics, rules and records look in a terminal, and as JSON for programs. Knows nothing of where they come from."""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from nearcast.cli.quantities import show_ago, show_duration, show_rate, show_size, show_time
from nearcast.client.records import KeptRule, Record, TopicState
from nearcast.config import Retention, TopicRule
from nearcast.mqtt.topics import covers

HEX_BYTES_PER_LINE = 16


def retention_words(retention: Retention) -> str:
    """``10,000 records or 7 d``; ``everything`` where there is no bound."""
    words = []
    if retention.max_records:
        words.append(f"{retention.max_records:,} record{'s' if retention.max_records != 1 else ''}")
    if retention.max_bytes:
        words.append(show_size(retention.max_bytes))
    if retention.max_age_seconds:
        words.append(show_duration(retention.max_age_seconds))
    return " or ".join(words) or "everything"


_ORIGINS = {"config": "configuration"}


def rules_table(rules: Sequence[TopicRule]) -> Table:
    """The rules in the order in which they decide."""
    table = _table("Rule", "Mode", "From", "Keeps of each topic")
    for place, rule in enumerate(rules):
        wider = next((other.topic for other in rules[:place] if covers(other.topic, rule.topic)), None)
        # A rule of the configuration may have come before one that was made at run time.
        keeps = retention_words(rule.retention) if wider is None else f"nothing: {printable(wider)} comes first"
        origin = _ORIGINS.get(rule.origin, rule.origin) if isinstance(rule, KeptRule) else ""
        table.add_row(Text(printable(rule.topic)), rule.mode, origin, Text(keeps), style="" if wider is None else "dim")
    return table


def topics_table(states: Sequence[TopicState], now: datetime) -> Table:
    """What the log has of each topic."""
    replicated = any(state.replica_set for state in states)
    table = _table("Topic", "Records", "First", "Last", "Size", "Newest", *(["Set", "Leader"] if replicated else []))
    for column in table.columns[1:5]:
        column.justify = "right"
    for state in states:
        empty = state.count == 0
        table.add_row(
            Text(printable(state.topic)),
            f"{state.count:,}",
            "-" if empty else str(state.first_index),
            "-" if empty else str(state.latest_index),
            show_size(state.bytes),
            "-" if empty else show_ago(state.last_time_us, now),
            *([Text(printable(state.replica_set)), Text(printable(state.leader))] if replicated else []),
        )
    return table


def topic_details(state: TopicState, rule: TopicRule | None, last_minute: int, now: datetime) -> Table:
    """Everything about one topic, a line each."""
    lines = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column()
    lines.add_row("topic", Text(printable(state.topic), style="bold"))
    if state.count:
        lines.add_row("records", f"{state.count:,}: {state.first_index} to {state.latest_index}")
    else:
        lines.add_row("records", f"none; the next gets index {state.next_index}")
    size = f"{show_size(state.bytes)}" + (f", {show_size(state.bytes / state.count)} a record" if state.count else "")
    lines.add_row("size", size)
    if state.count:
        for name, time_us in (("oldest", state.first_time_us), ("newest", state.last_time_us)):
            lines.add_row(name, f"{show_time(time_us, now)} ({show_ago(time_us, now)})")
        lines.add_row("rate", f"{last_minute:,} in the last minute{_average(state)}")
    if state.replica_set:
        lines.add_row("replica set", Text(printable(state.replica_set)))
        lines.add_row("leader", Text(printable(state.leader) if state.leader else "none that is known now"))
    elif rule is None:
        lines.add_row("rule", "none any more: what is here stays, new messages are not kept")
    else:
        lines.add_row("rule", Text(f"{printable(rule.topic)} ({rule.mode})"))
        lines.add_row("keeps", retention_words(rule.retention))
    return lines


def _average(state: TopicState) -> str:
    rate = average_rate(state)
    return "" if rate is None else f", {show_rate(rate)} from the oldest to the newest"


def average_rate(state: TopicState) -> float | None:
    """Records per second from the oldest to the newest; ``None`` when that is no time."""
    seconds = (state.last_time_us - state.first_time_us) / 1_000_000
    return (state.count - 1) / seconds if seconds > 0 else None


def state_fields(state: TopicState) -> dict[str, Any]:
    return {
        "topic": state.topic,
        "records": state.count,
        "first_index": state.first_index,
        "latest_index": state.latest_index,
        "bytes": state.bytes,
        "first_time": iso(state.first_time_us) if state.count else None,
        "last_time": iso(state.last_time_us) if state.count else None,
        **({"replica_set": state.replica_set, "leader": state.leader or None} if state.replica_set else {}),
    }


def rule_fields(rule: TopicRule) -> dict[str, Any]:
    return {
        "topic": rule.topic,
        "mode": rule.mode,
        "max_records": rule.retention.max_records,
        "max_bytes": rule.retention.max_bytes,
        "max_age_seconds": rule.retention.max_age_seconds,
        **({"origin": rule.origin} if isinstance(rule, KeptRule) else {}),
    }


def record_fields(record: Record) -> dict[str, Any]:
    """A record for JSON; a payload that is no UTF-8 goes as ``payload_base64``."""
    found: dict[str, Any] = {
        "topic": record.topic,
        "index": record.index,
        "time": iso(record.time_us),
        "publisher": record.publisher,
        "qos": record.qos,
        "retain": record.retain,
    }
    if record.content_type is not None:
        found["content_type"] = record.content_type
    if record.payload_format is not None:
        found["payload_format"] = record.payload_format
    if record.response_topic is not None:
        found["response_topic"] = record.response_topic
    if record.correlation_data is not None:
        found["correlation_data_base64"] = base64.b64encode(record.correlation_data).decode()
    if record.user_properties:
        # Pairs: a name may come more than once.
        found["user_properties"] = [list(pair) for pair in record.user_properties]
    try:
        found["payload"] = record.payload.decode("utf-8")
    except UnicodeDecodeError:
        found["payload_base64"] = base64.b64encode(record.payload).decode()
    return found


def record_details(record: Record, now: datetime) -> str:
    """Everything about a record but its payload, a line each."""
    lines = [
        ("topic", printable(record.topic)),
        ("index", str(record.index)),
        ("time", f"{iso(record.time_us)} ({show_ago(record.time_us, now)})"),
        ("publisher", printable(record.publisher) or "the broker itself"),
        ("qos", f"{record.qos}{', retained' if record.retain else ''}"),
    ]
    if record.content_type is not None:
        lines.append(("content type", printable(record.content_type)))
    if record.payload_format is not None:
        lines.append(("payload format", "UTF-8 text" if record.payload_format == 1 else "bytes"))
    if record.response_topic is not None:
        lines.append(("response topic", printable(record.response_topic)))
    if record.correlation_data is not None:
        lines.append(("correlation", record.correlation_data.hex(" ")))
    lines.extend(("property", printable(f"{name} = {value}")) for name, value in record.user_properties)
    lines.append(("payload", f"{len(record.payload):,} bytes"))
    return "\n".join(f"{name + ':':<16}{value}" for name, value in lines)


def tail_line(record: Record, now: datetime) -> str:
    """A record in one line: time, topic and index, payload."""
    return f"{show_time(record.time_us, now)}  {printable(record.topic)} {record.index}  {one_line(record.payload)}"


def one_line(payload: bytes) -> str:
    """A payload as text if it is some, else in hexadecimal; control characters are shown, not obeyed."""
    text = as_text(payload)
    if text is None:
        return f"0x{payload.hex()}"
    return printable(text)


def as_text(payload: bytes) -> str | None:
    """The payload as text, if people can read it as such."""
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text if all(unicodedata.category(letter) != "Cc" or letter in "\t\r\n" for letter in text) else None


def hex_dump(payload: bytes) -> str:
    """Offset, bytes, and what of them is ASCII; sixteen a line."""
    lines = []
    for offset in range(0, len(payload), HEX_BYTES_PER_LINE):
        part = payload[offset : offset + HEX_BYTES_PER_LINE]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{offset:08x}  {part.hex(' '):<{HEX_BYTES_PER_LINE * 3 - 1}}  {shown}")
    return "\n".join(lines)


def iso(time_us: int) -> str:
    """A moment of the log in ISO 8601, UTC, to the microsecond."""
    seconds, microseconds = divmod(time_us, 1_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{microseconds:06d}Z"


def printable(text: str) -> str:
    """What others chose must not be able to move the cursor or colour the terminal."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
