"""What ``nearcast wan`` shows: a live picture of a WAN, tables of latencies, and one line per thing that happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nearcast.emulation.control import Happening, Matrix, ProcessStatus, WanStatus

Show = Callable[[Happening], None]

#: Rows of hosts that a picture has at most; the rest is counted.
MAX_ROWS = 40

#: Hosts that a matrix looks at.
MAX_MATRIX = 200

#: Hosts of a site that are named.
MAX_NAMED = 16

_MATRIX_CELL = 6  # "42.5", and what is between columns
_MATRIX_MARGIN = 6

MAX_PROCESS_WIDTH = 28
SHOWN_NEIGHBOURS = 3
SHOWN_HAPPENINGS = 6

_COLOURS = {
    "running": "green",
    "starting": "yellow",
    "waiting": "dim",
    "stopping": "yellow",
    "paused": "magenta",
    "exited": "red",
    "killed": "red",
    "failed": "bold red",
}
_KIND_COLOURS = {
    "problem": "red",
    "failed": "red",
    "exited": "red",
    "killed": "red",
    "ready": "green",
    "limit": "yellow",
    "fallback": "yellow",
}


def milliseconds(value: float | None) -> str:
    """``0.5``, ``12.3``, ``150``; a dash where nothing gets through."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def process_text(process: ProcessStatus) -> Text:
    """``mqtt running``, with how it ended or how often it was started where that says something."""
    more = ""
    if process.state in ("exited", "killed", "failed") and process.exit_code is not None:
        more = f" ({process.exit_code})"
    if process.starts > 1:
        more += f" ×{process.starts}"
    return Text.assemble((process.name, "bold"), " ", (process.state, _COLOURS[process.state]), more)


def neighbours(matrix: Matrix, index: int) -> str:
    """The nearest hosts and their one-way latency."""
    row = matrix.one_way_ms[index]
    others = sorted((value, matrix.hosts[other]) for other, value in enumerate(row) if other != index and value is not None)
    if not others:
        return "nobody" if len(row) > 1 else ""
    return ", ".join(f"{name} {milliseconds(value)}" for value, name in others[:SHOWN_NEIGHBOURS])


def hosts_table(status: WanStatus, matrix: Matrix) -> Table:
    """One row per host."""
    table = Table(expand=True, box=None, header_style="dim", pad_edge=False)
    # In a narrow terminal, neighbours give way to processes.
    widest = max((len(process.name) + len(" running") for process in status.processes), default=0)
    table.add_column("host", no_wrap=True)
    table.add_column("site", no_wrap=True)
    table.add_column("address", no_wrap=True)
    table.add_column("processes" if status.processes else "", min_width=min(widest, MAX_PROCESS_WIDTH))
    table.add_column("nearest, ms one way", no_wrap=True, overflow="ellipsis", ratio=1)
    on_host: dict[str, list[ProcessStatus]] = {}
    for process in status.processes:
        on_host.setdefault(process.host, []).append(process)
    for index, host in enumerate(status.hosts[:MAX_ROWS]):
        processes = Text(", ").join(process_text(process) for process in on_host.get(host.name, []))
        name = Text(host.name, "bold") if host.up else Text.assemble((host.name, "bold red"), (" crashed", "red"))
        table.add_row(name, host.site, host.address, processes, neighbours(matrix, index))
    if len(status.hosts) > MAX_ROWS:
        table.add_row(Text(f"and {len(status.hosts) - MAX_ROWS} more", "dim"))
    return table


def traffic_text(status: WanStatus) -> str:
    """What passed, in one line."""
    traffic = status.traffic
    words = [f"{traffic.packets:,} packets", f"{traffic.bytes / 1e6:,.1f} MB", f"{traffic.lost:,} lost"]
    if traffic.full:
        words.append(f"{traffic.full:,} over bandwidth")
    if traffic.unreachable:
        words.append(f"{traffic.unreachable:,} cut off")
    if traffic.dropped:
        words.append(f"{traffic.dropped:,} dropped by the router itself")
    if status.mode == "namespaces":
        words.append(f"router late by {traffic.lateness_ms:.2f} ms (p99)")
    else:
        words.append(f"{traffic.connections:,} open {'connection' if traffic.connections == 1 else 'connections'}")
    return " · ".join(words)


def doubt_line(doubt: str) -> str:
    return f"do not trust this run: {doubt}"


def picture(status: WanStatus, matrix: Matrix, happened: Sequence[Happening], progress: str | None = None) -> RenderableType:
    """Everything at a glance."""
    parts: list[RenderableType] = [hosts_table(status, matrix), Text(), Text(traffic_text(status))]
    if status.error is not None:
        parts.append(Text(status.error, "bold red"))
    parts += [Text(doubt_line(doubt), "red") for doubt in status.traffic.doubts]
    if status.cuts:
        parts.append(Text("cut: " + "; ".join(status.cuts), "red"))
    if status.pending_events:
        parts.append(Text(f"{status.pending_events} events to come", "dim"))
    if progress is not None:
        parts.append(Text(progress, "bold"))
    parts.append(Text())
    parts += [happening_text(happening) for happening in list(happened)[-SHOWN_HAPPENINGS:]]
    title = f"[bold]{escape(status.name)}[/bold] {status.mode}, {status.state} {status.uptime_s:.0f} s"
    return Panel(Group(*parts), title=title, title_align="left", subtitle="Ctrl-C ends it", subtitle_align="right")


def happening_line(happening: Happening) -> str:
    """``   1.234 s  mqtt is ready``."""
    mark = {"limit": "cannot show: ", "problem": "problem: "}.get(happening.kind, "")
    return f"{happening.at_s:9.3f} s  {mark}{happening.text}"


def happening_text(happening: Happening) -> Text:
    return Text(happening_line(happening), _KIND_COLOURS.get(happening.kind, ""))


def matrix_table(matrix: Matrix, width: int) -> RenderableType:
    """One-way latencies: from the row's host to the column's, which is numbered so that the table stays narrow. Hosts that are
    equally far from everybody share a row; as many columns are shown as fit."""
    groups = _alike(matrix)
    labels = [matrix.hosts[group[0]] + (f" +{len(group) - 1}" if len(group) > 1 else "") for group in groups]
    fitting = max(2, (width - max(map(len, labels), default=0) - _MATRIX_MARGIN) // _MATRIX_CELL)
    shown = range(min(len(groups), fitting))
    hidden = len(matrix.hosts) - sum(len(groups[number]) for number in shown)
    caption = "one way, ms, without jitter; - is no way"
    if any(len(groups[number]) > 1 for number in shown):
        caption += "; +1 is one more such host"
    if hidden:
        caption += f"\n{hidden:,} hosts are not shown: --json has them"
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("", style="dim", justify="right")
    table.add_column("from \\ to", style="bold", no_wrap=True)
    for column in shown:
        table.add_column(str(column + 1), justify="right", no_wrap=True)
    for row in shown:
        values = []
        for column in shown:
            source, target = groups[row][0], groups[column][-1]  # two members, where there are two
            values.append(milliseconds(matrix.one_way_ms[source][target]) if source != target else "")
        table.add_row(str(row + 1), labels[row], *values)
    return Group(table, Text(caption, "dim"))


def _alike(matrix: Matrix) -> list[list[int]]:
    """The hosts in groups of which all members are equally far, both ways, from everybody else."""
    rows = matrix.one_way_ms
    everyone = range(min(len(rows), MAX_MATRIX))
    groups: list[list[int]] = []
    for host in everyone:
        for group in groups:
            first = group[0]
            others = (other for other in everyone if other not in (first, host))
            if rows[first][host] == rows[host][first] and all(
                rows[first][other] == rows[host][other] and rows[other][first] == rows[other][host] for other in others
            ):
                group.append(host)
                break
        else:
            groups.append([host])
    return groups


class Recent:
    """The last things that happened."""

    def __init__(self) -> None:
        self.happenings: deque[Happening] = deque(maxlen=100)
        self.counts: dict[str, int] = {}
        self.progress: str | None = None
        """How far the clients are."""
        self.taken_down = False
        """By somebody else."""

    def add(self, happening: Happening) -> None:
        self.happenings.append(happening)
        self.counts[happening.kind] = self.counts.get(happening.kind, 0) + 1
