"""What commands that show tables have in common: a console, names that are safe to show, spans of time."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

FILE_COLUMNS = 120
"""Width of tables where no terminal says one."""


def open_console() -> Console:
    """Standard output, as wide as the terminal is."""
    return Console(width=None if sys.stdout.isatty() else FILE_COLUMNS, highlight=False)


def print_json(content: Any) -> None:
    """For programs."""
    typer.echo(json.dumps(content, indent=2, ensure_ascii=False))


def plain(value: object) -> Text:
    """A name as text: whatever could steer a terminal is escaped."""
    words = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))
    return Text(words)


def ago(wall_seconds: float | None) -> str:
    """How long ago a moment was, in seconds since the Unix epoch."""
    if not wall_seconds:
        return "-"
    return span(max(0.0, time.time() - wall_seconds)) + " ago"


def span(seconds: float | None) -> str:
    """A time in the unit that a reader wants."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7_200 else f"{seconds / 3_600:.0f} h"


def counted(number: int, what: str) -> str:
    """A number of things, in the singular where it is one."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def new_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table without lines; ``numbers`` are the columns to align at the right."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table
