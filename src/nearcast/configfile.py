"""Files of settings: TOML in, typed structs out. :class:`Document` reads any struct, :func:`load_broker_config` a broker's.

Whatever cannot be used is refused with the file, the line and the key at fault (:class:`~nearcast.errors.ConfigError`). What
the settings mean is not known here: rules that span several keys are checked by whoever owns the struct, which then asks
:meth:`Document.refusal` for an error that names the line.
"""

from __future__ import annotations

import bisect
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nearcast.config import DEFAULT_LISTENERS, BrokerConfig
from nearcast.errors import ConfigError

Struct = TypeVar("Struct", bound=msgspec.Struct)

Steps = tuple[str | int, ...]
"""The way to a value from the top of a document: keys of tables and positions in arrays."""

MAX_FILE_BYTES = 64 * 1024 * 1024
"""A file beyond this is not read: it is not settings, and reading it would take the memory of everything else."""


def load_broker_config(path: str | Path) -> BrokerConfig:
    """Read a broker's TOML file. File names in it are taken relative to its own directory."""
    return _anchor(Document.read(path, "the configuration").convert(BrokerConfig), Path(path).parent)


def key_of(steps: Steps) -> str:
    """A way to a value as a person writes it: ``hosts[2].site``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")


class Document:
    """A TOML file that was read, and where in it everything stands."""

    def __init__(self, text: str, location: str) -> None:
        self.location = location
        self._text = text
        self._lines: dict[Steps, int] | None = None
        try:
            self.data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            found = re.search(r"line (\d+)", str(error))
            line = int(found.group(1)) if found else text.count("\n") + 1
            raise ConfigError(f"not valid TOML: {error}", path=location, line=line) from error
        except RecursionError:
            raise ConfigError("not valid TOML: nested too deeply", path=location) from None

    @classmethod
    def read(cls, path: str | Path, what: str) -> Document:
        """Read a file; ``what`` names it in the error if that fails ("the configuration")."""
        location = str(path)
        try:
            with Path(path).open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            if len(content) > MAX_FILE_BYTES:
                raise ConfigError(f"cannot read {what}: larger than {MAX_FILE_BYTES // 2**20} MiB", path=location)
            # With the mark that some editors put in front.
            text = content.decode("utf-8-sig")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            if isinstance(error, OSError):
                reason = error.strerror or str(error)
            else:
                reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            raise ConfigError(f"cannot read {what}: {reason}", path=location) from error
        return cls(text.replace("\r\n", "\n"), location)

    def convert(self, kind: type[Struct]) -> Struct:
        """The whole document as a ``kind``."""
        try:
            return msgspec.convert(self.data, kind)
        except msgspec.ValidationError as error:
            raise self._explain(str(error), kind) from error

    def refusal(self, steps: Steps, message: str) -> ConfigError:
        """An error about the value at ``steps``, or about the innermost table around it that the file mentions."""
        return ConfigError(message, path=self.location, key=key_of(steps), line=self._line_of(steps))

    def _explain(self, message: str, kind: type[msgspec.Struct]) -> ConfigError:
        """msgspec's message with the key spelt out, its line, and the nearest valid key for a typing error."""
        message, _, place = message.partition(" - at `")
        steps: Steps = ()
        for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]", place.partition("$")[2].rstrip("`")):
            if index == "...":
                steps = (*steps, *self._culprit(steps, kind))
            else:
                steps = (*steps, int(index) if index else name)
        field = re.search(r"`([^`]+)`", message)
        names_field = message.startswith(("`", "Object contains unknown field", "Object missing required field"))
        if field is not None and names_field:
            steps = (*steps, field.group(1))
        key = key_of(steps)
        if message.startswith("Object contains unknown field"):
            known = _fields_of(self._type_at(steps[:-1], kind))
            near = difflib.get_close_matches(str(steps[-1]), known, n=1, cutoff=0.6)
            hint = f"; did you mean `{near[0]}`?" if near else f"; known here: {', '.join(known)}"
            message = f"unknown key `{key}`{hint}"
        elif message.startswith("Object missing required field"):
            message = f"`{key}` is missing{_one_of(self._choices_at(steps, kind))}"
        elif message.startswith("`"):
            message = f"`{key}`{message[message.index('`', 1) + 1 :]}"
        elif message.startswith(("Invalid enum value", "Invalid value")):
            message = f"`{key}` must be {' or '.join(self._choices_at(steps, kind))}"
        else:
            # msgspec speaks of JSON; TOML's word is table, and it has no null.
            told = re.sub(r"\bobject\b", "table", message[0].lower() + message[1:]).replace(" | null`", "`")
            message = f"`{key}`: {told}{_brackets(told, steps)}" if key else told
        return self.refusal(steps, message)

    def _culprit(self, steps: Steps, kind: Any) -> Steps:
        """The key of a table of free names whose value is refused; msgspec does not say which."""
        table: Any = self.data
        for step in steps:
            table = table[step]
        arguments = typing.get_args(self._type_at(steps, kind))
        for name, value in table.items():
            try:
                msgspec.convert(value, arguments[1])
            except msgspec.ValidationError:
                return (name,)
        return ()

    def _choices_at(self, steps: Steps, kind: Any) -> list[str]:
        """What the value at ``steps`` may be, if that is a short list: a literal, or the tags of a union."""
        declared = self._type_at(steps[:-1], kind, whole_union=True)
        tagged = [member for member in _members(declared) if _tag_of(member) is not None]
        if tagged and tagged[0].__struct_config__.tag_field == steps[-1]:
            return [f'"{_tag_of(member)}"' for member in tagged]
        literal = self._type_at(steps, kind)
        return [f'"{choice}"' for choice in typing.get_args(literal)] if typing.get_origin(literal) is typing.Literal else []

    def _type_at(self, steps: Steps, kind: Any, whole_union: bool = False) -> Any:
        """The type of the value at ``steps``, as declared; of a union, the member that the value is meant to be."""
        found: Any = kind
        value: Any = self.data
        for step in steps:
            found = _member_for(found, value)
            if isinstance(step, int):
                arguments = [argument for argument in typing.get_args(found) if argument is not ...]
                found = arguments[min(step, len(arguments) - 1)] if arguments else Any
                value = value[step] if isinstance(value, list) and step < len(value) else None
            else:
                declared = {field.name: field.type for field in msgspec.structs.fields(found)} if _is_struct(found) else {}
                found = declared.get(step, Any)
                value = value.get(step) if isinstance(value, dict) else None
        return found if whole_union else _member_for(found, value)

    def _line_of(self, steps: Steps) -> int | None:
        """The line of a key, or of the innermost table around it that the file mentions."""
        if self._lines is None:
            self._lines = {}
            ends = [found.start() for found in re.finditer("\n", self._text)]
            for path, position in _TomlKeys(self._text).positions():
                line = bisect.bisect_left(ends, position) + 1
                # A dotted key or header also opens the tables it goes through.
                for length in range(1, len(path) + 1):
                    self._lines.setdefault(path[:length], line)
        while steps:
            if steps in self._lines:
                return self._lines[steps]
            steps = steps[:-1]
        return None


def _one_of(choices: list[str]) -> str:
    return f": one of {', '.join(choices)}" if choices else ""


def _brackets(told: str, steps: Steps) -> str:
    """What to write instead, where TOML's brackets are what went wrong."""
    header = ".".join(step for step in steps if isinstance(step, str))
    if told == "expected `array`, got `table`":
        return f"; write [[{header}]], with two brackets, above each entry, or put the entry into [ ]"
    if told == "expected `table`, got `array`":
        return f"; there is only one: write [{header}], with single brackets, above it"
    return '; write a list: ["one", "another"]' if told == "expected `array`, got `str`" else ""


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _members(kind: Any) -> list[Any]:
    """The members of a union, or the type itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [member for argument in typing.get_args(kind) for member in _members(argument)]
    return [kind]


def _tag_of(kind: Any) -> str | int | None:
    return kind.__struct_config__.tag if _is_struct(kind) else None


def _member_for(kind: Any, value: Any) -> Any:
    """The member of a union that a value is meant to be: by its tag, or by being a table at all."""
    members = [member for member in _members(kind) if member is not type(None)]
    if len(members) == 1:
        return members[0]
    structs = [member for member in members if _is_struct(member)]
    if isinstance(value, dict):
        for member in structs:
            tag_field = member.__struct_config__.tag_field
            if tag_field is None or value.get(tag_field) == _tag_of(member):
                return member
    return kind


def _fields_of(kind: Any) -> list[str]:
    """The keys that a table of this type may hold."""
    if not _is_struct(kind):
        return []
    tag_field = kind.__struct_config__.tag_field
    return ([] if tag_field is None else [tag_field]) + [field.name for field in msgspec.structs.fields(kind)]


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


def _anchor(config: BrokerConfig, directory: Path) -> BrokerConfig:
    """The same configuration with its file names made relative to the current directory instead of the file's."""

    def anchored(name: str | None) -> str | None:
        return None if name is None else str(directory / name)

    listeners = config.listeners
    if listeners is not DEFAULT_LISTENERS:
        listeners = tuple(
            msgspec.structs.replace(
                listener,
                path=anchored(listener.path) if listener.kind == "unix" else listener.path,
                certificate_file=anchored(listener.certificate_file),
                key_file=anchored(listener.key_file),
                ca_file=anchored(listener.ca_file),
            )
            for listener in listeners
        )
    security = config.security
    fabric = config.fabric
    groups = fabric.groups
    return msgspec.structs.replace(
        config,
        listeners=listeners,
        security=msgspec.structs.replace(
            security, password_file=anchored(security.password_file), acl_file=anchored(security.acl_file)
        ),
        persistence=msgspec.structs.replace(config.persistence, directory=anchored(config.persistence.directory)),
        recording=msgspec.structs.replace(config.recording, directory=anchored(config.recording.directory)),
        fabric=msgspec.structs.replace(
            fabric,
            secret_file=anchored(fabric.secret_file),
            ca_file=anchored(fabric.ca_file),
            certificate_file=anchored(fabric.certificate_file),
            key_file=anchored(fabric.key_file),
            groups=msgspec.structs.replace(
                groups,
                cloud_password_file=anchored(groups.cloud_password_file),
                cloud_ca_file=anchored(groups.cloud_ca_file),
                cloud_certificate_file=anchored(groups.cloud_certificate_file),
                cloud_key_file=anchored(groups.cloud_key_file),
            ),
        ),
    )
