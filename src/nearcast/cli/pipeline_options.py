"""A job's ``Options`` as options of a command: the fields of a msgspec Struct become parameters of a typer function."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import typer

from nearcast.errors import ConfigError

PANEL = "Options of the job"


def parameters(options: type[msgspec.Struct]) -> list[inspect.Parameter]:
    """One keyword parameter per field, as typer reads them."""
    return [_parameter(field) for field in msgspec.structs.fields(options)]


def build(options: type[msgspec.Struct], values: dict[str, Any]) -> msgspec.Struct:
    """The struct of what was given; a value that it refuses is a ``ConfigError`` that names the option."""
    known = {field.name: field for field in msgspec.structs.fields(options)}
    given = {name: value for name, value in values.items() if name in known and not _is_unset(value, known[name])}
    try:
        return msgspec.convert(given, options, strict=False)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        field = place.strip("`.").partition("[")[0]
        raise ConfigError(f"--{field.replace('_', '-')}: {message}" if field else message) from None


def with_signature(function: Callable[..., None], more: list[inspect.Parameter]) -> Callable[..., None]:
    """The function with these parameters after its own named ones, in place of ``**values``."""
    signature = inspect.signature(function, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    positional = [each for each in more if each.default is inspect.Parameter.empty]
    optional = [each for each in more if each.default is not inspect.Parameter.empty]
    combined = [*positional, *optional, *own]
    # What runs is called by keyword; typer only reads the names, the types and the defaults.
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in combined]
    )
    function.__annotations__ = {each.name: each.annotation for each in combined}
    return function


def _parameter(field: Any) -> inspect.Parameter:
    kind, description, extra = _taken_apart(field.type)
    default = field.default
    if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    repeatable = get_origin(kind) in (tuple, list)
    if repeatable:
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
        default = list(default) if default is not msgspec.NODEFAULT else default
    metavar = extra.get("metavar")
    missing = default is msgspec.NODEFAULT
    if extra.get("argument"):
        information: Any = typer.Argument(help=description, metavar=metavar or field.name.upper(), show_default=False)
    else:
        names = [f"--{field.name.replace('_', '-')}"]
        if kind is bool and default is True:
            names = [f"{names[0]}/--no-{names[0][2:]}"]
        if short := extra.get("short"):
            names.append(f"-{short}")
        shown = not missing and default not in (None, [], "", False)
        information = typer.Option(*names, help=description, metavar=metavar, show_default=shown, rich_help_panel=PANEL)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if missing else default,
        annotation=Annotated[kind, information],
    )


def _taken_apart(annotation: Any) -> tuple[Any, str, dict[str, Any]]:
    """The type without msgspec's remarks, the description, and what a job says for the command line."""
    description = ""
    extra: dict[str, Any] = {}
    while get_origin(annotation) is Annotated:
        annotation, *remarks = get_args(annotation)
        for remark in remarks:
            if isinstance(remark, msgspec.Meta):
                description = remark.description or description
                extra = {**(remark.extra or {}), **extra}
    if get_origin(annotation) in (Union, types.UnionType):
        # X | None, where X may have remarks of its own.
        members = [_taken_apart(each) for each in get_args(annotation)]
        kept = [each for each in members if each[0] is not type(None)]
        if len(kept) == 1:
            kind, inner, inner_extra = kept[0]
            return kind | None, description or inner, {**inner_extra, **extra}
    if get_origin(annotation) is Literal:
        choices = "|".join(map(str, get_args(annotation)))
        return str, description, {"metavar": choices, **extra}
    return annotation, description, extra


def _is_unset(value: object, field: Any) -> bool:
    """typer gives None for what was not given; the struct's own default counts then."""
    return value is None and field.default is not msgspec.NODEFAULT
