"""Structs as options of a command."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from nearcast.cli.pipeline_options import build, parameters, with_signature
from nearcast.errors import ConfigError, InvalidValue


class Options(msgspec.Struct, frozen=True, kw_only=True):
    source: Annotated[str, msgspec.Meta(description="Where from.", extra={"argument": True, "metavar": "DIR"})]
    max_rows: Annotated[Annotated[int, msgspec.Meta(ge=1)] | None, msgspec.Meta(description="Most rows.")] = None
    ratio: float = 0.5
    loud: Annotated[bool, msgspec.Meta(description="Say more.", extra={"short": "l"})] = False
    strict: bool = True
    kind: Literal["a", "b"] = "a"
    set: Annotated[tuple[str, ...], msgspec.Meta(description="Several.")] = ()

    def __post_init__(self) -> None:
        if self.ratio > 1:
            raise InvalidValue("ratio is at most 1")


def parsed(*arguments: str) -> Any:
    found: list[Any] = []
    app = typer.Typer(add_completion=False)

    def command(master: Annotated[str, typer.Option("--master")] = "local", **values: Any) -> None:
        found.append((master, build(Options, values)))

    app.command()(with_signature(command, parameters(Options)))
    result = CliRunner().invoke(app, list(arguments))
    if not found:
        if isinstance(result.exception, ConfigError):
            raise result.exception
        raise RuntimeError(result.output)
    return found[0]


def test_defaults_are_the_structs() -> None:
    assert parsed("here") == ("local", Options(source="here"))


def test_everything_can_be_given() -> None:
    words = ["here", "--max-rows", "3", "--ratio", "0.25", "-l", "--no-strict", "--kind", "b", "--set", "x", "--set", "y"]
    expected = Options(source="here", max_rows=3, ratio=0.25, loud=True, strict=False, kind="b", set=("x", "y"))
    assert parsed(*words, "--master", "spark://x") == ("spark://x", expected)


def test_the_help_has_the_descriptions() -> None:
    with pytest.raises(RuntimeError) as shown:
        parsed("--help")
    text = " ".join(str(shown.value).split())
    for word in ("Where from.", "Most rows.", "Say more.", "--max-rows", "--no-strict", "a|b"):
        assert word in text


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--max-rows", "0"], "--max-rows: Expected `int` >= 1"),
        (["--kind", "c"], "--kind: Invalid enum value 'c'"),
        (["--ratio", "2"], "ratio is at most 1"),
    ],
)
def test_a_value_that_the_struct_refuses_is_said_with_its_option(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parsed("here", *words)


@pytest.mark.parametrize("words", [[], ["here", "--max-rows", "many"], ["here", "--nonsense"], ["here", "there"]])
def test_wrong_usage(words: list[str]) -> None:
    with pytest.raises(RuntimeError):
        parsed(*words)
