"""Any struct from TOML: unions, nesting and containers are refused with line and key like a broker's settings are."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Union

import msgspec
import pytest

from nearcast import configfile
from nearcast.configfile import Document, key_of
from nearcast.errors import ConfigError


class Circle(msgspec.Struct, tag="circle", tag_field="kind", forbid_unknown_fields=True):
    radius: float


class Square(msgspec.Struct, tag="square", tag_field="kind", forbid_unknown_fields=True):
    side: float
    colour: Literal["red", "blue"] = "red"

    def __post_init__(self) -> None:
        if self.side < 0:
            raise ValueError("`side` must not be negative")


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    depth: int = 0
    pair: tuple[int, str] = (0, "")


class Drawing(msgspec.Struct, forbid_unknown_fields=True):
    shapes: tuple[Union[Circle, Square], ...] = ()
    where: str | Inner = ""
    maybe: Inner | None = None
    words: dict[str, str] = {}


def refused(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Document(text, "drawing.toml").convert(Drawing)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("text", "line", "key", "says"),
    [
        ("[[shapes]]\nkind = 'circle'\nradius = 'x'", 3, "shapes[0].radius", "expected `float`"),
        ("[[shapes]]\nkind = 'circle'\nradios = 1", 3, "shapes[0].radios", "did you mean `radius`?"),
        ("[[shapes]]\nkind = 'cirle'", 2, "shapes[0].kind", 'must be "circle" or "square"'),
        ("[[shapes]]\nradius = 1", 1, "shapes[0].kind", 'is missing: one of "circle", "square"'),
        ("[[shapes]]\nkind = 'circle'", 1, "shapes[0].radius", "is missing"),
        ("[[shapes]]\nkind = 'square'\nside = -1", 3, "shapes[0].side", "must not be negative"),
        ("[[shapes]]\nkind = 'square'\nside = 1\ncolour = 'green'", 4, "shapes[0].colour", '"red" or "blue"'),
        ("shapes = [\n  {kind = 'circle', radius = 1},\n  {kind = 'square', sid = 1},\n]", 3, "shapes[1].sid", "`side`"),
        ("[where]\ndepht = 1", 2, "where.depht", "did you mean `depth`?"),
        ("where = 3", 1, "where", "expected `str | table`"),
        ("[maybe]\ndepht = 1", 2, "maybe.depht", "did you mean `depth`?"),
        ("maybe = 'x'", 1, "maybe", "expected `table`, got `str`"),
        ("[maybe]\npair = [1, 2]", 2, "maybe.pair[1]", "expected `str`"),
        ("[maybe]\npair = [1]", 2, "maybe.pair", "length 2"),
        ("[words]\na = 'b'\nc = 1", 3, "words.c", "expected `str`"),
        ("shapes = 1", 1, "shapes", "expected `array`"),
        ("[shapes]\nkind = 'circle'", 1, "shapes", "write [[shapes]], with two brackets"),
        ("[[maybe]]\ndepth = 1", 1, "maybe", "write [maybe], with single brackets"),
        ("[maybe]\npair = 'x'", 2, "maybe.pair", 'write a list: ["one", "another"]'),
        ("[[shapes]]\nkind = 'square'\nwidth = 1", 3, "shapes[0].width", "known here: kind, side, colour"),
        ("[other]\na = 1", 1, "other", "unknown key `other`"),
    ],
)
def test_refusals_name_line_and_key(text: str, line: int, key: str, says: str) -> None:
    error = refused(text)
    assert (error.line, error.key) == (line, key)
    assert says in str(error)
    assert str(error).startswith(f"drawing.toml:{line}: ")


def test_what_is_right_converts() -> None:
    shapes = "[[shapes]]\nkind = 'square'\nside = 1\n[[shapes]]\nkind = 'circle'\nradius = 2"
    text = f"where = {{depth = 2}}\nwords = {{a = 'b'}}\n{shapes}"
    drawing = Document(text, "x").convert(Drawing)
    assert drawing == Drawing(shapes=(Square(1), Circle(2)), where=Inner(depth=2), words={"a": "b"})


def test_rules_of_others_are_refused_at_their_line() -> None:
    document = Document("[[shapes]]\nkind = 'circle'\nradius = 1\n\n[[shapes]]\nkind = 'circle'\nradius = 2\n", "x.toml")
    assert str(document.refusal(("shapes", 1, "radius"), "too big")) == "x.toml:7: too big"
    assert document.refusal(("shapes", 1, "colour"), "x").line == 5, "the table, where the key is not written"
    assert document.refusal(("nothing",), "x").line is None
    assert document.refusal((), "x").key == ""


def test_lines_are_counted_with_windows_line_ends(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\r\n\r\n[maybe]\r\ndepht = 1\r\n")
    with pytest.raises(ConfigError) as caught:
        Document.read(tmp_path / "x.toml", "it").convert(Drawing)
    assert caught.value.line == 4


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configfile, "MAX_FILE_BYTES", 2**20)
    (tmp_path / "x.toml").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(ConfigError, match="cannot read the thing: larger than 1 MiB"):
        Document.read(tmp_path / "x.toml", "the thing")


@pytest.mark.parametrize(("path", "says"), [("", "Is a directory"), ("none", "No such file"), ("nul\0", "null")])
def test_what_cannot_be_read_is_one_line(tmp_path: Path, path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot read the thing: .*{says}"):
        Document.read(f"{tmp_path}/{path}", "the thing")


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        Document("a = " + "[" * 100_000, "x")


def test_keys_are_written_as_in_toml() -> None:
    assert key_of(("hosts", 2, "site")) == "hosts[2].site"
    assert key_of(()) == ""


def test_the_mark_that_some_editors_put_in_front_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "drawing.toml").write_bytes(b"\xef\xbb\xbfwords = { a = 'b' }\r\n[maybe]\r\ndepht = 1\r\n")
    with pytest.raises(ConfigError, match=r"drawing\.toml:3: unknown key `maybe\.depht`"):
        Document.read(tmp_path / "drawing.toml", "the drawing").convert(Drawing)


@pytest.mark.parametrize("depth", [10, 150, 300, 450])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ("{a=", "}")])
def test_deep_nesting_is_refused_in_one_line(opening: str, closing: str, depth: int) -> None:
    refused(f"words = {opening * depth}1{closing * depth}")
