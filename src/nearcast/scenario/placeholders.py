"""Placeholders in commands and topics: ``{name}`` is replaced, ``{{`` and ``}}`` are braces. Stricter than :meth:`str.format`,
which would read attributes and format specifications into what is meant to be plain text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from nearcast.scenario.rules import shown

_TOKENS = re.compile(r"\{\{|\}\}|\{([A-Za-z0-9_-]+)\}|[{}]|[^{}]+")


def placeholders(text: str) -> list[str]:
    """The names in a text, in order. ValueError if braces do not pair up or hold something that is not a name."""
    return [name for name, _ in _pieces(text) if name is not None]


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with every placeholder replaced. ValueError for one that ``values`` does not have."""
    parts = []
    for name, literal in _pieces(text):
        if name is None:
            parts.append(literal)
        elif name in values:
            parts.append(values[name])
        else:
            raise ValueError(f"{{{name}}} in {shown(text)} stands for nothing; known are {', '.join(sorted(values))}")
    return "".join(parts)


def rename(text: str, old: str, new: str) -> str:
    """The text with a placeholder called otherwise; everything else, doubled braces too, stays as it is."""
    return _TOKENS.sub(lambda found: f"{{{new}}}" if found.group(1) == old else found.group(), text)


def _pieces(text: str) -> Iterator[tuple[str | None, str]]:
    for found in _TOKENS.finditer(text):
        token = found.group()
        if token in ("{", "}"):
            raise ValueError(f"a `{token}` in {shown(text)} has no partner; a brace itself is written `{token * 2}`")
        yield found.group(1), token[0] if token in ("{{", "}}") else token
