"""The directory of a sweep: what survives, what is refused, and the table."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from nearcast.errors import PipelineError
from nearcast.pipeline.sweep_journal import Identity, Journal, summarise, table_of
from nearcast.pipeline.sweep_points import Failure, Row, points

IDENTITY = Identity("module:function", ["a"])


def row(a: Any, seed: int, error: Failure | None = None, **figures: Any) -> Row:
    return Row({"a": a}, seed, 0.5, figures, error)


def test_rows_come_back(tmp_path: Path) -> None:
    rows = [row(1, 1, x=1.5, y="ä\n", z=None, w=True), row(1, 2, Failure("ValueError", "no", "trace")), row(2, 1, big=2**70)]
    with Journal(tmp_path / "out", IDENTITY) as journal:
        journal.append(rows[:2])
        journal.append(rows[2:])
    with Journal(tmp_path / "out", IDENTITY) as journal:
        assert list(journal.rows.values()) == [*rows[:2], row(2, 1, big=float(2**70))]


def test_numbers_that_are_none_come_back(tmp_path: Path) -> None:
    with Journal(tmp_path, IDENTITY) as journal:
        journal.append([row(1, 1, x=math.inf, y=-math.inf, z=math.nan)])
    with Journal(tmp_path, IDENTITY) as journal:
        (found,) = journal.rows.values()
    assert found.figures["x"] == math.inf
    assert found.figures["y"] == -math.inf
    assert math.isnan(found.figures["z"])  # type: ignore[arg-type]


def test_the_later_of_two_rows_counts(tmp_path: Path) -> None:
    with Journal(tmp_path, IDENTITY) as journal:
        journal.append([row(1, 1, Failure("E", "m", "t"))])
        journal.append([row(1, 1, x=2)])
    with Journal(tmp_path, IDENTITY) as journal:
        assert list(journal.rows.values()) == [row(1, 1, x=2)]


def test_a_line_that_a_kill_cut_short_is_dropped_at_every_byte(tmp_path: Path) -> None:
    with Journal(tmp_path, IDENTITY) as journal:
        journal.append([row(1, 1, x=1)])
        journal.append([row(2, 1, x=2)])
    whole = (tmp_path / "journal.jsonl").read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        (tmp_path / "journal.jsonl").write_bytes(whole[:length])
        with Journal(tmp_path, IDENTITY) as journal:
            assert list(journal.rows.values()) == [row(1, 1, x=1)]
            journal.append([row(3, 1, x=3)])
        with Journal(tmp_path, IDENTITY) as journal:
            assert len(journal.rows) == 2


@pytest.mark.parametrize("garbage", [b"{}\n", b"nonsense\n", b'{"figures": {}}\n', b"\xff\xfe\n", b'{"figures": 3}\n'])
def test_damage_is_said_with_its_line(tmp_path: Path, garbage: bytes) -> None:
    with Journal(tmp_path, IDENTITY) as journal:
        journal.append([row(1, 1, x=1)])
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(garbage)
    with pytest.raises(PipelineError, match=r"journal\.jsonl:2: damaged"), Journal(tmp_path, IDENTITY):
        pass


def test_a_directory_belongs_to_one_function_and_its_parameters(tmp_path: Path) -> None:
    with Journal(tmp_path, IDENTITY):
        pass
    with (
        pytest.raises(PipelineError, match="holds a sweep of module:function"),
        Journal(tmp_path, Identity("other:one", ["a"])),
    ):
        pass
    with pytest.raises(PipelineError, match="over the parameters a"), Journal(tmp_path, Identity("module:function", ["b"])):
        pass


def test_one_sweep_at_a_time(tmp_path: Path) -> None:
    with (
        Journal(tmp_path, IDENTITY),
        pytest.raises(PipelineError, match="another sweep is writing"),
        Journal(tmp_path, IDENTITY),
    ):
        pass


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PipelineError, match="cannot use"), Journal(tmp_path / "file" / "out", IDENTITY):
        pass


def test_a_full_disk_leaves_the_rows_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Journal(tmp_path, IDENTITY) as journal:
        journal.append([row(1, 1, x=1)])
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(PipelineError, match="No space left"):
            journal.append([row(2, 1, x=2)])
        monkeypatch.undo()
        assert len(journal.rows) == 1
    with Journal(tmp_path, IDENTITY) as journal:
        assert list(journal.rows.values()) == [row(1, 1, x=1)]


def test_the_table_has_parameters_seed_figures_seconds_and_errors_in_the_points_order(tmp_path: Path) -> None:
    wanted = points({"a": [1, 2]}, 2)
    with Journal(tmp_path, IDENTITY) as journal:
        journal.append([row(2, 2, x=1), row(2, 1, Failure("ValueError", "no", "trace")), row(1, 1, x=0.5, y="text")])
        path = journal.write_results(wanted)
    table = pq.read_table(path)
    assert table.column_names == ["a", "seed", "x", "y", "seconds", "error_type", "error_message", "error_traceback"]
    assert [tuple(each.values())[:4] for each in table.to_pylist()] == [
        (1, 1, 0.5, "text"),
        (2, 1, None, None),
        (2, 2, 1.0, None),
    ]
    assert table["error_type"].to_pylist() == [None, "ValueError", None]


def test_columns_have_the_narrowest_type_that_holds_all() -> None:
    table = table_of([row(1, 1, i=1, f=1, b=True, s=1, n=None), row("x", 2, i=2, f=0.5, b=False, s="t", n=None)])
    types = {field.name: str(field.type) for field in table.schema}
    assert (types["a"], types["i"], types["f"], types["b"], types["s"], types["n"]) == (
        "string", "int64", "double", "bool", "string", "string",
    )  # fmt: skip
    assert table["a"].to_pylist() == ["1", "x"]


def test_figures_called_like_other_columns_are_told_apart() -> None:
    table = table_of([Row({"a": 1}, 2, 0.5, {"a": 3, "seed": 4, "seconds": 5})])
    assert table.select(["a", "seed", "figure_a", "figure_seed", "figure_seconds"]).to_pylist() == [
        {"a": 1, "seed": 2, "figure_a": 3, "figure_seed": 4, "figure_seconds": 5}
    ]


def test_an_empty_table() -> None:
    assert table_of([]).num_rows == 0


def test_the_summary_is_by_parameters_over_the_seeds_that_did_not_fail() -> None:
    rows = [row(1, 1, x=1, t="a"), row(1, 2, x=3), row(1, 3, Failure("E", "m", "t")), row(2, 1, Failure("E", "m", "t"))]
    assert list(summarise(rows)) == [({"a": 1}, 3, 1, {"x": (2.0, 1.0, 3.0)}), ({"a": 2}, 1, 1, {})]
