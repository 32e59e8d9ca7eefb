"""Log lines: both formats, escaping of what clients write, and the limit on floods."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from nearcast.clock import ManualClock
from nearcast.serving import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    kept = list(logs.logger.handlers), logs.logger.level, logs.logger.propagate
    made = io.StringIO()
    logs.configure("info", "text", made)
    yield made
    logs.logger.handlers[:], logs.logger.level, logs.logger.propagate = kept


def test_text_lines_hold_facts(stream: io.StringIO) -> None:
    logs.event(logging.INFO, "client connected", client="c1", version=5, user=None, reason="two words")
    line = stream.getvalue()
    assert line.endswith(' info client connected client=c1 version=5 reason="two words"\n')
    assert line[10] == "T"


def test_what_clients_write_cannot_forge_a_line(stream: io.StringIO) -> None:
    logs.event(logging.INFO, "x", client='a"\n2024 error forged \x1b[31m\u2028=')
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()
    assert '\\"\\n2024' in stream.getvalue()


def test_long_values_are_cut(stream: io.StringIO) -> None:
    logs.event(logging.INFO, "x", client="y" * 65_535)
    assert len(stream.getvalue()) < 300


def test_json_lines(stream: io.StringIO) -> None:
    logs.set_format("json")
    logs.event(logging.WARNING, "client connected", client="a\nb", error=ValueError("odd"))
    found = json.loads(stream.getvalue())
    assert found["level"] == "warning"
    assert found["event"] == "client connected"
    assert found["client"] == "a\nb"
    assert found["error"] == "odd"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_is_kept(stream: io.StringIO, log_format: str) -> None:
    logs.set_format(log_format)
    try:
        raise ValueError("broken")
    except ValueError:
        logs.logger.exception("unexpected")
    assert "ValueError: broken" in stream.getvalue()


def test_levels(stream: io.StringIO) -> None:
    logs.event(logging.DEBUG, "quiet")
    assert stream.getvalue() == ""


def test_floods_are_summed_up(stream: io.StringIO) -> None:
    clock = ManualClock()
    events = logs.LimitedEvents(clock, 2)
    for number in range(10):
        events.event(logging.INFO, "client connected", client=number)
    events.event(logging.INFO, "other")
    events.event(logging.DEBUG, "not even counted")
    assert stream.getvalue().count("client connected") == 2
    assert stream.getvalue().count("other") == 1
    clock.advance(1)
    events.event(logging.INFO, "client connected", client=11)
    lines = stream.getvalue().splitlines()
    assert lines[-2].endswith("client connected suppressed=8")
    assert lines[-1].endswith("client connected client=11")


def test_a_limit_of_zero_logs_all(stream: io.StringIO) -> None:
    events = logs.LimitedEvents(ManualClock(), 0)
    for _ in range(500):
        events.event(logging.INFO, "x")
    events.summarize()
    assert len(stream.getvalue().splitlines()) == 500
