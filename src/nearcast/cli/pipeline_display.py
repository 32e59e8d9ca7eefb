"""What a running Spark job looks like: moving lines on a terminal, plain lines elsewhere, JSON lines for programs."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Protocol, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from nearcast.pipeline.progress import Progress
from nearcast.pipeline.watching import Query, Stage, Watcher

_FILE_COLUMNS = 120
_PLAIN_SECONDS = 5.0
"""Between two lines about the same thing, where nobody watches a terminal."""


class Display(Progress, Protocol):
    """Where a job reports, and what watches it."""

    def look(self, watcher: Watcher) -> None: ...

    def close(self) -> None: ...

    def failed(self, message: str) -> None: ...

    def result(self, result: dict[str, object], elapsed_seconds: float) -> None: ...


def console_for(stream: TextIO) -> Console:
    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _FILE_COLUMNS)
    return console


class TerminalDisplay:
    """Moving lines on stderr, results on stdout."""

    def __init__(self) -> None:
        self._messages, self._results = console_for(sys.stderr), console_for(sys.stdout)
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._step = ""
        self._share: float | None = None
        self._spinner = Spinner("dots")
        self._stages: list[Stage] = []
        self._queries: list[Query] = []
        self._tables: list[RenderableType] = []
        self._said: dict[str, tuple[float, object]] = {}
        self._live: Live | None = None
        if self._messages.is_terminal:
            # No refreshing thread: it would take turns with what runs.
            self._live = Live(console=self._messages, auto_refresh=False, transient=True)
            self._live.start()

    def step(self, text: str) -> None:
        with self._lock:
            self._step, self._share = text, None
            if self._live is None:
                self._say(text)
        self._draw()

    def advance(self, share: float) -> None:
        with self._lock:
            self._share = min(1.0, max(0.0, share))

    def note(self, text: str) -> None:
        with self._lock:
            if self._live is None:
                self._say(text)
            else:
                self._live.console.print(text, markup=False)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
        for number, column in enumerate(columns):
            numeric = bool(rows) and all(isinstance(row[number], (int, float)) for row in rows)
            table.add_column(column, justify="right" if numeric else "left")
        for row in rows:
            table.add_row(*(Text(shown(value)) for value in row))
        with self._lock:
            self._tables.append(table)

    def look(self, watcher: Watcher) -> None:
        queries = watcher.queries()
        stages = watcher.stages() if not queries else []
        with self._lock:
            self._stages, self._queries = stages, queries
            if self._live is None:
                self._say_now_and_then()
        self._draw()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def result(self, result: dict[str, object], elapsed_seconds: float) -> None:
        for table in self._tables:
            self._results.print(table)
        for key, value in result.items():
            self._results.print(f"{key.replace('_', ' ')}: {shown(value)}", markup=False, soft_wrap=True)
        self._messages.print(f"done in {elapsed_seconds:.1f} s", style="dim")

    def failed(self, message: str) -> None:
        """The command's own last line says it."""

    def _draw(self) -> None:
        if self._live is None:
            return
        with self._lock:
            self._live.update(self._picture(), refresh=True)

    def _picture(self) -> Group:
        elapsed = time.monotonic() - self._began
        heading = Table.grid(padding=(0, 1))
        share = "" if self._share is None else ProgressBar(total=1.0, completed=self._share, width=30)
        heading.add_row(self._spinner, Text(self._step), share, Text(f"{elapsed:.0f} s", style="dim"))
        lines: list[RenderableType] = [heading]
        for stage in self._stages[-4:]:
            row = Table.grid(padding=(0, 1))
            bar = ProgressBar(total=stage.tasks, completed=stage.done, width=30)
            row.add_row(f"  stage {stage.id}", bar, Text(_stage_text(stage)))
            lines.append(row)
        lines += [Text(f"  {_query_text(query)}") for query in self._queries]
        return Group(*lines)

    def _say(self, text: str) -> None:
        self._messages.print(f"{time.monotonic() - self._began:6.1f} s  {text}", markup=False, soft_wrap=True)

    def _say_now_and_then(self) -> None:
        now = time.monotonic()
        for query in self._queries:
            said_at, said = self._said.get(query.name, (0.0, None))
            if now - said_at >= _PLAIN_SECONDS and query.batch >= 0 and said != query:
                self._said[query.name] = (now, query)
                self._say(_query_text(query))
        said_at, said = self._said.setdefault("", (now, None))
        if self._stages and now - said_at >= _PLAIN_SECONDS and said != self._stages:
            self._said[""] = (now, self._stages)
            self._say("; ".join(f"stage {stage.id}: {_stage_text(stage)}" for stage in self._stages))


class JsonDisplay:
    """One JSON object per line on stdout: ``event`` is step, progress, note, table, stage, query,
    finished or failed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[object, object] = {}
        # What a user's code prints meanwhile, or a library, goes to stderr: the lines here are for programs.
        sys.stdout.flush()
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def step(self, text: str) -> None:
        self._emit("step", text=text)

    def advance(self, share: float) -> None:
        self._emit_changed("share", round(share, 2), "progress", share=round(share, 4))

    def note(self, text: str) -> None:
        self._emit("note", text=text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        self._emit("table", title=title, rows=[dict(zip(columns, row, strict=True)) for row in rows])

    def look(self, watcher: Watcher) -> None:
        for query in watcher.queries():
            if query.batch >= 0:
                self._emit_changed(("query", query.name), query, "query", **_fields(query))
        for stage in watcher.stages():
            self._emit_changed(("stage", stage.id), stage, "stage", **_fields(stage))

    def close(self) -> None:
        pass

    def result(self, result: dict[str, object], elapsed_seconds: float) -> None:
        self._emit("finished", seconds=round(elapsed_seconds, 3), result=result)

    def failed(self, message: str) -> None:
        self._emit("failed", error=message)

    def _emit_changed(self, key: object, value: object, event: str, **facts: object) -> None:
        if self._seen.get(key) != value:
            self._seen[key] = value
            self._emit(event, **facts)

    def _emit(self, event: str, **facts: object) -> None:
        text = json.dumps({"event": event, **_plain(facts)}, default=str, ensure_ascii=False)
        with self._lock:
            try:
                self._out.write(f"{text}\n")
                self._out.flush()
            except BrokenPipeError:
                # The reader left. The main thread ends the job for it; the job's own thread would only fail.
                if threading.current_thread() is threading.main_thread():
                    raise


def _fields(value: Any) -> dict[str, object]:
    return dict(vars(value))


def _plain(value: Any) -> Any:
    """JSON has no numbers that are none."""
    if isinstance(value, float) and value - value != 0:
        return None
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def _stage_text(stage: Stage) -> str:
    failed = f", {stage.failed} failed" if stage.failed else ""
    return f"{stage.done}/{stage.tasks} tasks{failed}"


def _query_text(query: Query) -> str:
    if query.batch < 0:
        return f"{query.name}: no batch yet"
    lag = "" if query.lag_records is None else f", {query.lag_records:,} behind"
    return (
        f"{query.name}: batch {query.batch}, {query.total_rows:,} rows, {query.rows_per_second:,.0f} rows/s, "
        f"{query.batch_ms} ms a batch{lag}"
    )


def shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(shown(each) for each in value)
    return str(value) if not isinstance(value, PurePath) else value.as_posix()
