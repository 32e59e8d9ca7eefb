"""Small rules that several structs share: names, ranges, and how a value is refused.

A refusal is an ``InvalidValue`` that begins with the field in backticks; :mod:`nearcast.configfile` finds the line by it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from nearcast.errors import InvalidValue

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def require(condition: bool, field: str, message: str) -> None:
    """Refuse the value of a field."""
    if not condition:
        raise InvalidValue(f"`{field}` {message}", key=field)


def require_name(value: str, field: str = "name") -> None:
    """Names of sites, hosts and processes end up as host names and file names, so they are plain."""
    require(
        _NAME.fullmatch(value) is not None,
        field,
        f"must be 1 to 63 letters, digits, `-` and `_`, and begin with a letter or digit, not {shown(value)}",
    )


def require_range(value: float, low: float, high: float, field: str) -> None:
    """Refuse a number outside of ``low`` to ``high``; not-a-number is outside of everything."""
    require(low <= value <= high, field, f"must be between {low:,} and {high:,}, not {value:,}")


def require_seconds(value: float | None, field: str, zero: bool = True) -> None:
    """Refuse a time or duration that is negative, endless or, without ``zero``, nothing. None is no value, and fine."""
    if value is not None:
        require(0 <= value < 1e9 and (zero or value > 0), field, f"must be {'0 or more' if zero else 'above 0'}, and finite")


def shown(value: str) -> str:
    """A user's text inside a message: one line, and not too much of it."""
    return repr(value if len(value) <= 80 else value[:77] + "...")


def unknown(what: str, name: str, known: Collection[str]) -> str:
    """``no host `bokrer`; did you mean `broker`?``, or a list of what there is."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"no {what} {shown(name)}; did you mean {shown(near[0])}?"
    if not known:
        return f"no {what} {shown(name)}; there is none at all"
    some = ", ".join(sorted(known)[:8]) + (", ..." if len(known) > 8 else "")
    return f"no {what} {shown(name)}; there {'is' if len(known) == 1 else 'are'} {some}"
