"""Structured logs: one line per event, ``key=value`` text or JSON, without secrets or payloads.

Values come from clients (identifiers, user names, topics), so whatever could break a line or colour a terminal is escaped and
long ones are cut. Events that a client can cause at will are counted per second and kind: past a rate the rest are summed up
in one line instead of written, because a reconnect storm must not be slowed by its own log.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, TextIO

import msgspec

from nearcast.clock import Clock

logger = logging.getLogger("nearcast")

MAX_VALUE_CHARACTERS = 160
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def event(level: int, message: str, /, **fields: object) -> None:
    """Log one event with its facts. Never pass a password, a payload or authentication data."""
    if logger.isEnabledFor(level):
        known = {key: value for key, value in fields.items() if value is not None}
        logger.log(level, message, extra={"fields": known})


def _shortened(value: object) -> object:
    if isinstance(value, str) and len(value) > MAX_VALUE_CHARACTERS:
        return value[:MAX_VALUE_CHARACTERS] + "…"
    return value


def _timestamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


class TextFormatter(logging.Formatter):
    """``time level message key=value ...``; values with spaces or unprintable characters are quoted as in JSON."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_timestamp(record), record.levelname.lower(), record.getMessage()]
        fields: dict[str, object] = getattr(record, "fields", {})
        parts.extend(f"{key}={self._value(value)}" for key, value in fields.items())
        if record.exc_info:
            parts.append("\n" + self.formatException(record.exc_info))
        return " ".join(parts)

    def _value(self, value: object) -> str:
        text = str(_shortened(value))
        if text and text.isprintable() and not any(character in text for character in ' "='):
            return text
        # repr-like escapes for everything that is not printable, so that no client can forge a line or steer a terminal.
        escaped = "".join(c if c.isprintable() and c not in '"\\' else c.encode("unicode_escape").decode() for c in text)
        return '"' + escaped.replace('"', '\\"') + '"'


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``time``, ``level``, ``event`` and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": _timestamp(record), "level": record.levelname.lower(), "event": record.getMessage()}
        fields: dict[str, object] = getattr(record, "fields", {})
        line.update((key, _shortened(value)) for key, value in fields.items())
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode("utf-8", "replace")


def configure(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """(Re)install the log handler. Only the package's logger is touched, and its events go nowhere else."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.addHandler(logging.StreamHandler(stream if stream is not None else sys.stderr))
    set_format(log_format)
    logger.setLevel(LEVELS[level])
    logger.propagate = False


def set_format(log_format: str) -> None:
    """Change how the installed handlers write their lines."""
    for handler in logger.handlers:
        handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())


class LimitedEvents:
    """Events that clients cause, at most so many per second and kind."""

    def __init__(self, clock: Clock, events_per_second: float) -> None:
        self._clock = clock
        self._events_per_second = events_per_second
        self._second = 0
        self._counts: dict[str, int] = {}

    def configure(self, events_per_second: float) -> None:
        self._events_per_second = events_per_second

    def event(self, level: int, message: str, /, **fields: object) -> None:
        """Log, or only count. ``message`` is the kind: a fixed sentence, never something a client wrote."""
        if not logger.isEnabledFor(level):
            return
        second = int(self._clock.monotonic())
        if second != self._second:
            self.summarize()
            self._second = second
        count = self._counts.get(message, 0) + 1
        self._counts[message] = count
        if count <= self._events_per_second or not self._events_per_second:
            event(level, message, **fields)

    def summarize(self) -> None:
        """Say what was left out since the last summary."""
        for message, count in self._counts.items():
            suppressed = count - int(self._events_per_second)
            if self._events_per_second and suppressed > 0:
                event(logging.WARNING, message, suppressed=suppressed)
        self._counts.clear()
