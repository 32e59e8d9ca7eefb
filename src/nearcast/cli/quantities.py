"""Sizes, durations, counts and times as people write and read them: 10GB, 7d, 1.5M, 2026-11-16 09:30.

The command line's alone: files say seconds and bytes.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

import typer

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SECONDS = {"us": 1e-6, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0, "y": 31_536_000.0}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_NUMBER = r"(\d+(?:[_,]\d{3})*(?:\.\d+)?)"


def parse_size(text: str) -> int:
    """Bytes: ``10GB`` is ten thousand million, ``10GiB`` counts in powers of two; a bare number is bytes."""
    found = re.fullmatch(_NUMBER + r"\s*([kmgt]?i?)b?", text.strip().lower())
    if found is None or found[2] == "i":
        raise typer.BadParameter(f"{text!r} is no size: write it like 500MB, 10GB or 2GiB")
    return round(_number(found[1]) * _SIZES[found[2]])


def parse_duration(text: str) -> float:
    """Seconds: ``7d``, ``36h``, ``1h30m``, ``90s``, ``500ms``; a bare number is seconds."""
    stripped = text.strip().lower()
    if re.fullmatch(_NUMBER, stripped):
        return _number(stripped)
    parts = re.findall(_NUMBER + r"\s*(us|ms|s|m|h|d|w|y)(?![a-z])\s*|(.)", _spelled(stripped))
    if not parts or any(rest for _, _, rest in parts):
        raise typer.BadParameter(f"{text!r} is no duration: write it like 7d, 36h, 1h30m or 90s")
    return sum(_number(number) * _SECONDS[unit] for number, unit, _ in parts)


def parse_count(text: str) -> int:
    """A number of things: ``1000``, ``1_000``, ``10k``, ``2.5M``."""
    found = re.fullmatch(_NUMBER + r"\s*([kmgb]?)", text.strip().lower())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no count: write it like 1000, 10k or 2M")
    return round(_number(found[1]) * _COUNTS[found[2]])


def parse_time(text: str, now: datetime) -> datetime | None:
    """A moment: ISO 8601, in this machine's time zone unless it names one; or how long ago (``10m``). ``None``: neither."""
    stripped = text.strip()
    try:
        found = datetime.fromisoformat(stripped)
    except ValueError:
        pass
    else:
        return found.astimezone(UTC)
    try:
        ago = parse_duration(stripped.removeprefix("-").removesuffix(" ago"))
    except typer.BadParameter:
        return None
    return datetime.fromtimestamp(max(0.0, now.timestamp() - ago), UTC)


def show_size(size: float) -> str:
    """1.2 GB."""
    if size < 1_000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1_000
        if size < 999.5 or unit == "TB":
            break
    return f"{size:.3g} {unit}" if size < 100 else f"{size:,.0f} {unit}"


def show_duration(seconds: float) -> str:
    """The two largest units that say something: ``7 d``, ``1 h 30 min``, ``4.5 s``."""
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1_000:.3g} ms"
    rest = round(seconds)
    parts: list[tuple[int, str]] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or parts:
            parts.append((count, unit))
        if len(parts) == 2:
            break
    return " ".join(f"{count} {unit}" for count, unit in parts if count)


def show_rate(per_second: float) -> str:
    """1,234/s; small ones by the minute, hour or day."""
    for unit, seconds in (("s", 1), ("min", 60), ("h", 3_600)):
        if per_second * seconds >= 1 or per_second == 0:
            rate = per_second * seconds
            return f"{rate:,.0f}/{unit}" if rate >= 100 else f"{rate:.3g}/{unit}"
    return f"{per_second * 86_400:.3g}/d"


def show_time(time_us: int, now: datetime) -> str:
    """A moment in local time, to the millisecond; today's without the date."""
    local = datetime.fromtimestamp(time_us / 1_000_000, UTC).astimezone()
    clock = local.strftime("%H:%M:%S.") + f"{local.microsecond // 1_000:03d}"
    return clock if local.date() == now.astimezone().date() else f"{local:%Y-%m-%d} {clock}"


def show_ago(time_us: int, now: datetime) -> str:
    """How long ago a moment was."""
    seconds = now.timestamp() - time_us / 1_000_000
    return "just now" if seconds < 1 else f"{show_duration(round(seconds))} ago"


def _spelled(text: str) -> str:
    """Whole words and their plurals as the letters they begin with."""
    for word, unit in (("sec", "s"), ("min", "m"), ("hour", "h"), ("day", "d"), ("week", "w"), ("year", "y")):
        text = re.sub(rf"(?<=[\d\s]){word}(?:ond|ute)?s?\b", unit, text)
    return text


def _number(text: str) -> float:
    return float(text.replace("_", "").replace(",", ""))
