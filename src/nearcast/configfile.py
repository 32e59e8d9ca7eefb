"""Configuration files: TOML in, :class:`~nearcast.config.BrokerConfig` out.

Whatever cannot be used is refused with the file, the line and the key at fault (:class:`~nearcast.errors.ConfigError`).
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from nearcast.config import BrokerConfig
from nearcast.errors import ConfigError


def load_broker_config(path: str | Path) -> BrokerConfig:
    """Read a broker's TOML file. File names in it are taken relative to its own directory."""
    location = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigError(f"cannot read the configuration: {reason}", path=location) from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"line (\d+)", str(error))
        line = int(found.group(1)) if found else text.count("\n") + 1
        raise ConfigError(f"not valid TOML: {error}", path=location, line=line) from error
    try:
        config = msgspec.convert(data, BrokerConfig)
    except msgspec.ValidationError as error:
        raise _explain(str(error), text, location) from error
    return _anchor(config, Path(path).parent)


def _anchor(config: BrokerConfig, directory: Path) -> BrokerConfig:
    """The same configuration with its file names made relative to the current directory instead of the file's."""

    def anchored(name: str | None) -> str | None:
        return None if name is None else str(directory / name)

    listeners = tuple(
        msgspec.structs.replace(
            listener,
            path=anchored(listener.path) if listener.kind == "unix" else listener.path,
            certificate_file=anchored(listener.certificate_file),
            key_file=anchored(listener.key_file),
            ca_file=anchored(listener.ca_file),
        )
        for listener in config.listeners
    )
    security = config.security
    return msgspec.structs.replace(
        config,
        listeners=listeners,
        security=msgspec.structs.replace(
            security, password_file=anchored(security.password_file), acl_file=anchored(security.acl_file)
        ),
        persistence=msgspec.structs.replace(config.persistence, directory=anchored(config.persistence.directory)),
    )


def _explain(message: str, text: str, location: str) -> ConfigError:
    """msgspec's message with the key spelt out, its line, and the nearest valid key for a typing error."""
    message, _, place = message.partition(" - at `$")
    found = re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", place.rstrip("`"))
    steps: list[str | int] = [int(index) if index else name for name, index in found]
    field = re.search(r"`([^`]+)`", message)
    names_field = message.startswith(("`", "Object contains unknown field", "Object missing required field"))
    if field is not None and names_field:
        steps.append(field.group(1))
    key = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
    if message.startswith("Object contains unknown field"):
        near = difflib.get_close_matches(str(steps[-1]), _fields_at(steps[:-1]), n=1, cutoff=0.5)
        hint = f"; did you mean `{near[0]}`?" if near else f"; known here: {', '.join(_fields_at(steps[:-1]))}"
        message = f"unknown key `{key}`{hint}"
    elif message.startswith("Object missing required field"):
        message = f"`{key}` is missing"
    elif message.startswith("`"):
        message = f"`{key}`{message[message.index('`', 1) + 1 :]}"
    elif message.startswith("Invalid enum value"):
        choices = " or ".join(f'"{choice}"' for choice in _type_at(steps).__args__)
        message = f"`{key}` must be {choices}"
    else:
        message = f"`{key}`: {message[0].lower()}{message[1:]}"
    return ConfigError(message, path=location, key=key, line=_line_of(text, tuple(steps)))


def _type_at(steps: list[str | int]) -> Any:
    """The type of the value at ``steps``, as the structs declare it."""
    found: Any = BrokerConfig
    for step in steps:
        if isinstance(step, int):
            found = found.__args__[0]
        else:
            found = {field.name: field.type for field in msgspec.structs.fields(found)}[step]
    return found


def _fields_at(steps: list[str | int]) -> list[str]:
    """The keys that the table at ``steps`` may hold."""
    return [field.name for field in msgspec.structs.fields(_type_at(steps))]


def _line_of(text: str, steps: tuple[str | int, ...]) -> int | None:
    """The line of a key, or of the innermost table around it that the file mentions."""
    lines: dict[tuple[str | int, ...], int] = {}
    for found, position in _TomlKeys(text).positions():
        # A dotted key or header also opens the tables it goes through.
        for length in range(1, len(found) + 1):
            lines.setdefault(found[:length], text.count("\n", 0, position) + 1)
    while steps:
        if steps in lines:
            return lines[steps]
        steps = steps[:-1]
    return None


class _TomlKeys:
    """Where each key of a TOML document stands. Reads only what :mod:`tomllib` has accepted, so it checks nothing itself."""

    _BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
    _STRING = re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'', re.DOTALL)
    _BARE = re.compile(r"[A-Za-z0-9_-]+")
    _SCALAR = re.compile(r"[^,\]}#\n]+")

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def positions(self) -> Iterator[tuple[tuple[str | int, ...], int]]:
        """Every key's path with its position, in the order of the file."""
        lengths: dict[tuple[str | int, ...], int] = {}
        table: tuple[str | int, ...] = ()
        self._skip()
        while self._at < len(self._text):
            start = self._at
            if self._text[start] == "[":
                array = self._text.startswith("[[", start)
                self._at += 2 if array else 1
                table = ()
                names = self._key()
                for index, name in enumerate(names):
                    table += (name,)
                    if array and index == len(names) - 1:
                        lengths[table] = lengths.get(table, 0) + 1
                    if table in lengths:
                        table += (lengths[table] - 1,)
                self._at += 2 if array else 1
                yield table, start
            else:
                yield from self._pair(table)
            self._skip()

    def _skip(self) -> None:
        found = self._BLANK.match(self._text, self._at)
        if found is not None:
            self._at = found.end()

    def _key(self) -> list[str]:
        names = []
        while True:
            self._skip()
            if self._text[self._at] in "\"'":
                names.append(next(iter(tomllib.loads(f"{self._take(self._STRING)} = 0"))))
            else:
                names.append(self._take(self._BARE))
            self._skip()
            if self._text[self._at] != ".":
                return names
            self._at += 1

    def _pair(self, table: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], int]]:
        start = self._at
        path = (*table, *self._key())
        yield path, start
        self._at += 1
        yield from self._value(path)

    def _value(self, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], int]]:
        self._skip()
        opening = self._text[self._at]
        if opening in "[{":
            closing = "]" if opening == "[" else "}"
            self._at += 1
            self._skip()
            index = 0
            while self._text[self._at] != closing:
                if opening == "[":
                    yield (*path, index), self._at
                    yield from self._value((*path, index))
                else:
                    yield from self._pair(path)
                index += 1
                self._skip()
                if self._text[self._at] == ",":
                    self._at += 1
                    self._skip()
            self._at += 1
        elif opening in "\"'":
            self._take(self._STRING)
        else:
            self._take(self._SCALAR)

    def _take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise ConfigError("a key's line could not be found")
        self._at = found.end()
        return found.group()
