"""Charts as inline SVG: lines, bars and heat maps that follow the page's colours, light or dark.

Owns drawing alone. Every text that comes in is data, and is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 44
COLOURS = 6
"""Of lines, as CSS variables ``--c0`` to ``--c5``; more lines than that repeat them, dashed."""


@dataclass(frozen=True)
class Line:
    """A line of a chart; points may have gaps (None)."""

    label: str
    points: Sequence[tuple[float, float | None]]
    colour: int = 0
    dashed: bool = False
    thin: bool = False
    steps: bool = False


@dataclass(frozen=True)
class Mark:
    """A value to compare with: a line across."""

    label: str
    value: float


def line_chart(
    lines: Sequence[Line],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    x_marks: Sequence[Mark] = (),
    y_marks: Sequence[Mark] = (),
    y_max: float | None = None,
    y_format: Callable[[float], str] | None = None,
    title: str = "",
) -> str:
    """Lines over an axis."""
    points = [(px, py) for line in lines for px, py in line.points if py is not None]
    if not points:
        return _nothing()
    xs = [px for px, _ in points if not log_x or px > 0] + [mark.value for mark in x_marks]
    ys = [py for _, py in points if not log_y or py > 0] + [mark.value for mark in y_marks]
    if not xs or not ys:
        return _nothing()
    along = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, log=log_x)
    up = _Axis(min(ys) if log_y else 0.0, y_max or max(ys), HEIGHT - BOTTOM, TOP, log=log_y)
    parts = _frame(along, up, x, y, y_format)
    for mark in x_marks:
        place = along.at(mark.value)
        parts.append(f'<line class="mark" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="marked" x="{place + 4:.1f}" y="{TOP + 10}">{escape(mark.label)}</text>')
    for mark in y_marks:
        place = up.at(mark.value)
        parts.append(f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(
            f'<text class="marked" text-anchor="end" x="{WIDTH - RIGHT}" y="{place - 4:.1f}">{escape(mark.label)}</text>'
        )
    for line in lines:
        parts.append(_path(line, along, up, log_x, log_y))
    return _svg(parts, HEIGHT, title) + _legend([(line.label, line.colour, line.dashed) for line in lines])


def _path(line: Line, along: _Axis, up: _Axis, log_x: bool, log_y: bool) -> str:
    words: list[str] = []
    pen_up, last_y = True, 0.0
    for px, py in line.points:
        if py is None or (log_x and px <= 0) or (log_y and py <= 0):
            pen_up = True
            continue
        at_x, at_y = along.at(px), up.at(py)
        if line.steps and not pen_up:
            words.append(f"L{at_x:.1f},{last_y:.1f}")
        words.append(f"{'M' if pen_up else 'L'}{at_x:.1f},{at_y:.1f}")
        pen_up, last_y = False, at_y
    style = f"stroke:var(--c{line.colour % COLOURS})" + (";stroke-dasharray:5 4" if line.dashed else "")
    if line.thin:
        style += ";stroke-width:1;opacity:.65"
    # A single point is a line without length: round ends make it a dot.
    path = "".join(words)
    dot = "h.01" if len(words) == 1 else ""
    return f'<path class="line" d="{path}{dot}" style="{style}"><title>{escape(line.label)}</title></path>'


@dataclass(frozen=True)
class Bar:
    """A bar of parts that add up."""

    label: str
    parts: Sequence[float]
    note: str = ""


def bar_chart(bars: Sequence[Bar], names: Sequence[str], *, x: str, value_format: Callable[[float], str]) -> str:
    """Bars beside each other, one below the other, each of the named parts."""
    longest = max((sum(bar.parts) for bar in bars), default=0.0)
    if longest <= 0:
        return _nothing()
    left, row = 190, 26
    height = TOP + row * len(bars) + BOTTOM
    along = _Axis(0.0, longest, left, WIDTH - 90, log=False)
    parts: list[str] = []
    for value, place in along.ticks():
        parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{place:.1f}" y="{height - BOTTOM + 16}">'
            f"{escape(value_format(value))}</text>"
        )
    parts.append(f'<text class="axis" text-anchor="middle" x="{(left + WIDTH - 90) / 2}" y="{height - 8}">{escape(x)}</text>')
    for number, bar in enumerate(bars):
        y = TOP + number * row
        parts.append(
            f'<text class="label" text-anchor="end" x="{left - 8}" y="{y + 17}">{escape(_short(bar.label, 28))}</text>'
        )
        begin = 0.0
        for colour, value in enumerate(bar.parts):
            if value > 0:
                x1, x2 = along.at(begin), along.at(begin + value)
                said = f"{bar.label}: {names[colour]} {value_format(value)}"
                parts.append(
                    f'<rect x="{x1:.1f}" y="{y + 4}" width="{max(0.5, x2 - x1):.1f}" height="{row - 8}" '
                    f'style="fill:var(--c{colour})"><title>{escape(said)}</title></rect>'
                )
            begin += value
        parts.append(f'<text class="tick" x="{along.at(begin) + 6:.1f}" y="{y + 17}">{escape(bar.note)}</text>')
    return _svg(parts, height, x) + _legend([(name, colour, False) for colour, name in enumerate(names)])


def heat_map(
    rows: Sequence[str], columns: Sequence[str], values: dict[tuple[str, str], float], *, mark: float | None, said: str
) -> str:
    """A value for each pair; above ``mark`` they have another colour."""
    if not values:
        return _nothing()
    room = max(24, min(90, (WIDTH - 120) // max(1, len(columns))))
    tall = max(20, min(34, room))
    left, top = 120, 70
    width, height = max(WIDTH, left + room * len(columns) + 10), top + tall * len(rows) + 34
    low, high = min(values.values()), max(values.values())
    spread = math.log(max(high, 1e-6)) - math.log(max(low, 1e-6))
    parts: list[str] = []
    for number, name in enumerate(columns):
        x = left + number * room + room / 2
        parts.append(
            f'<text class="label" text-anchor="start" transform="translate({x:.1f},{top - 8}) rotate(-35)">'
            f"{escape(_short(name, 14))}</text>"
        )
    for position, row in enumerate(rows):
        y = top + position * tall
        parts.append(
            f'<text class="label" text-anchor="end" x="{left - 8}" y="{y + tall / 2 + 4:.1f}">{escape(_short(row, 16))}</text>'
        )
        for number, column in enumerate(columns):
            value = values.get((row, column))
            if value is None:
                continue
            share = 0.5 if spread <= 1e-9 else (math.log(max(value, 1e-6)) - math.log(max(low, 1e-6))) / spread
            colour = "--bad" if mark is not None and value > mark else "--c0"
            x = left + number * room
            parts.append(
                f'<rect x="{x + 1}" y="{y + 1}" width="{room - 2}" height="{tall - 2}" rx="2" '
                f'style="fill:var({colour});opacity:{0.15 + 0.75 * share:.2f}">'
                f"<title>{escape(f'{row} → {column}: {value:.3g} ms')}</title></rect>"
            )
            if room >= 36:
                parts.append(
                    f'<text class="cell" text-anchor="middle" x="{x + room / 2:.1f}" y="{y + tall / 2 + 4:.1f}">'
                    f"{value:.3g}</text>"
                )
    parts.append(f'<text class="axis" x="{left}" y="{height - 10}">{escape(said)}</text>')
    return _svg(parts, height, said, width)


# -- parts -----------------------------------------------------------------------------------------------------------------


class _Axis:
    """From values to places."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool) -> None:
        if log:
            low, high = max(low, 1e-6), max(high, 1e-6)
        if high <= low:
            low, high = (low / 1.5, low * 1.5) if log else (low, low + 1.0)
        self.log = log
        self.low, self.high, self.start, self.end = low, high, start, end

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(max(value, 1e-9)), math.log(low), math.log(high)
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[tuple[float, float]]:
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(powers) <= 4 else (1,)
            values = [step * 10.0**power for power in powers for step in steps]
        else:
            raw = (self.high - self.low) / 5
            power = 10.0 ** math.floor(math.log10(raw))
            step = next(size * power for size in (1, 2, 5, 10) if size * power >= raw * 0.999)
            values = [math.ceil(self.low / step) * step + step * number for number in range(7)]
        return [(value, self.at(value)) for value in values if self.low * 0.999 <= value <= self.high * 1.001]


def _frame(along: _Axis, up: _Axis, x: str, y: str, y_format: Callable[[float], str] | None) -> list[str]:
    parts = []
    for value, place in along.ticks():
        parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{place:.1f}" y="{HEIGHT - BOTTOM + 16}">'
            f"{escape(number(value))}</text>"
        )
    for value, place in up.ticks():
        shown = (y_format or number)(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{place + 4:.1f}">{escape(shown)}</text>')
    parts.append(
        f'<text class="axis" text-anchor="middle" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}">{escape(x)}</text>'
    )
    parts.append(
        f'<text class="axis" text-anchor="middle" transform="translate(14,{(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">'
        f"{escape(y)}</text>"
    )
    return parts


def _svg(parts: list[str], height: float, title: str, width: float = WIDTH) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}" '
        f'preserveAspectRatio="xMidYMid meet">{"".join(parts)}</svg>'
    )


def _legend(entries: Sequence[tuple[str, int, bool]]) -> str:
    keys = "".join(
        f'<span><i class="{"dashed" if dashed else ""}" style="--k:var(--c{colour % COLOURS})"></i>'
        f"{escape(_short(label, 60))}</span>"
        for label, colour, dashed in entries
        if label
    )
    return f'<div class="legend">{keys}</div>'


def _nothing() -> str:
    return '<p class="none">Nothing to show.</p>'


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def number(value: float) -> str:
    """As people read it: 1,200, 12.5, 0.04, 3.4 M."""
    if value == 0:
        return "0"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
