"""Reading files of events: what the map side of the two passes does, a piece of a file at a time.

Owns pieces (which row groups of which files a task reads) and the narrow form of message events; :mod:`dealing` says which
part each goes to. Text stays what it is in Parquet, numbers into dictionaries: no string is made for an event. Knows Arrow
and NumPy, not Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nearcast.pipeline.evaluation import dealing
from nearcast.recording.schema import arrow, arrow_schema

if TYPE_CHECKING:
    from nearcast.pipeline.evaluation.inputs import Inputs

MESSAGE_KINDS = ("published", "acknowledged", "refused", "skipped", "delivered")
PUBLISHED, ACKNOWLEDGED, REFUSED, SKIPPED, DELIVERED, PROCESSED = range(6)
_NARROW_KINDS = (*MESSAGE_KINDS, "processed")
CONNECTION_KINDS = ("connected", "subscribed", "unsubscribed", "disconnected", "unconnected")

ROWS_PER_PIECE = 400_000
"""So many events are held at a time where files are read, or those of one row group."""

FILES_PER_TASK = 64

LATE_TO_SEND_NS = 10_000_000
"""A message sent so much later than due counts as late, as in load processes."""

NONE = -(2**63)
"""Stands for a missing number."""

BETWEEN = "\x1f"
"""Between the brokers of a path."""

_TEXT = ("topic", "publisher", "subscriber", "path", "reason")
_CONNECTION_COLUMNS = ["kind", "at_ns", "client", "topic", "qos", "path", "reason"]

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class Piece:
    """Every ``of``-th row group of a file, from ``first``."""

    run: int
    path: str
    first: int = 0
    of: int = 1


def tasks(inputs: Inputs) -> list[list[Piece]]:
    """What each task reads: a share of a large file, or several small ones."""
    found: list[list[Piece]] = []
    gathered: list[Piece] = []
    rows = 0
    for number, run in enumerate(inputs.runs):
        for path, count in zip(run.files, run.file_rows, strict=True):
            shares = -(-count // (2 * ROWS_PER_PIECE))
            if shares > 1:
                found += [[Piece(number, str(path.absolute()), first, shares)] for first in range(shares)]
                continue
            gathered.append(Piece(number, str(path.absolute())))
            rows += count
            if rows >= ROWS_PER_PIECE or len(gathered) == FILES_PER_TASK:
                found.append(gathered)
                gathered, rows = [], 0
    return [*found, gathered] if gathered else found


def _tables(pieces: Iterable[Piece], columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """``(run, table)`` with dictionaries for text, a few hundred thousand rows at a time."""
    from pyarrow import parquet

    text = [name for name in ("kind", "client", *_TEXT) if name in columns and name != "path"]
    for piece in pieces:
        with parquet.ParquetFile(piece.path, read_dictionary=text, memory_map=False) as file:
            gathered: list[int] = []
            rows = 0
            for group in range(piece.first, file.num_row_groups, piece.of):
                gathered.append(group)
                rows += file.metadata.row_group(group).num_rows
                if rows >= ROWS_PER_PIECE:
                    yield piece.run, file.read_row_groups(gathered, columns=list(columns), use_threads=False)
                    gathered, rows = [], 0
            if gathered:
                yield piece.run, file.read_row_groups(gathered, columns=list(columns), use_threads=False)


def coded(column: Any) -> tuple[Numbers, Any]:
    """Numbers into a dictionary of distinct words, and the dictionary; -1 where there is none."""
    pyarrow = arrow()
    if not pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    whole = column.unify_dictionaries().combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column
    if isinstance(whole, pyarrow.ChunkedArray):  # of no chunks at all
        whole = pyarrow.array([], pyarrow.string()).dictionary_encode()
    return whole.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32, copy=False), whole.dictionary


def words(codes: Numbers, dictionary: Any) -> Any:
    """The words of numbers; none for -1."""
    pyarrow = arrow()
    return dictionary.take(pyarrow.array(codes.astype(np.int32), mask=codes < 0))


def _paths(column: Any) -> tuple[Numbers, Any]:
    """Paths coded as one word each."""
    pyarrow = arrow()
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    if not chunks:
        return np.zeros(0, dtype=np.int32), pyarrow.array([], pyarrow.string())
    lengths = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks])
    broker, brokers = coded(pyarrow.chunked_array([chunk.flatten() for chunk in chunks]))
    starts = np.cumsum(lengths) - lengths
    code = np.zeros(len(lengths), dtype=np.int64)
    for place in range(int(lengths.max())):
        # As many broker names as there are make a way one number; ways are few, so numbers stay small.
        there = np.flatnonzero(lengths > place)
        step = np.zeros(len(lengths), dtype=np.int64)
        step[there] = broker[starts[there] + place] + 1
        code = pd.factorize(code * (len(brokers) + 1) + step)[0]
    group, ways = pd.factorize(code)
    example = np.zeros(len(ways), dtype=np.int64)
    example[group[::-1]] = np.arange(len(group) - 1, -1, -1)
    names = brokers.to_pylist()
    words = [BETWEEN.join(names[each] for each in broker[starts[at] : starts[at] + lengths[at]]) for at in example.tolist()]
    return group.astype(np.int32), pyarrow.array(words, pyarrow.string())


# -- the first pass: runs and connections ----------------------------------------------------------------------------------


@dataclass
class Survey:
    """What a first look finds in some pieces."""

    spans: list[tuple[int, bool, int, int]]
    """``run, of_messages, first_ns, last_ns``: when the first and the last event of messages, and of connections, was."""

    ways: set[tuple[int, str, str, bool]]
    """``run, publisher, broker, delivered``: where messages were published, and where they arrived."""

    crossed: set[int]
    """Runs with a path of several brokers."""

    connections: list[dict[str, Any]]

    processed: set[int] = field(default_factory=set)
    """Runs whose brokers recorded what they processed."""

    loads: bytes = b""
    """How many events of messages are deliveries, and how many not, by bucket of topics: 64-bit numbers, two for each."""


def survey(pieces: Iterable[Piece], *, ways: bool) -> Survey:
    """Events of connections, and what has to be known of messages before they can be judged."""
    import pyarrow.compute as pc

    found = Survey([], set(), set(), [])
    loads = np.zeros(2 * dealing.BUCKETS, dtype=np.int64)
    for run, table in _tables(pieces, [*_CONNECTION_COLUMNS, *(["publisher"] if ways else [])]):
        kind, kinds = coded(table["kind"])
        known = kinds.to_pylist()
        is_message = np.array([name in MESSAGE_KINDS for name in known] + [False])[kind]
        is_connection = np.array([name in CONNECTION_KINDS for name in known] + [False])[kind]
        at_ns = table["at_ns"].to_numpy()
        for of_messages, chosen in ((True, is_message), (False, is_connection)):
            if chosen.any():
                times = at_ns[chosen]
                found.spans.append((run, of_messages, int(times.min()), int(times.max())))
        if is_connection.any():
            found.connections += [{"run": run, **row} for row in table.filter(is_connection).to_pylist()]
        delivered = np.array([name == "delivered" for name in known] + [False])[kind]
        topic, topics = coded(table["topic"])
        bucket = dealing.buckets(run, topics.to_pylist())[topic]
        processed = np.array([name == "processed" for name in known] + [False])[kind]
        if processed.any():
            found.processed.add(run)
        loads += np.bincount((2 * bucket + delivered)[is_message | processed], minlength=len(loads))
        if ways and is_message.any():
            longer = pc.greater(pc.list_value_length(table["path"]), 1).to_numpy()
            if (longer & delivered).any():
                found.crossed.add(run)
            else:
                _ways(found, run, table, delivered, np.array([name == "published" for name in known] + [False])[kind])
    found.loads = loads.tobytes()
    return found


def _ways(found: Survey, run: int, table: Any, delivered: Numbers, published: Numbers) -> None:
    publisher, publishers = coded(table["publisher"])
    path, paths = _paths(table["path"])
    chosen = (delivered | published) & (publisher >= 0)
    packed = (publisher[chosen].astype(np.int64) * (len(paths) + 1) + path[chosen]) * 2 + delivered[chosen]
    names, brokers = publishers.to_pylist(), paths.to_pylist()
    for number in np.unique(packed).tolist():
        pair, is_delivered = divmod(number, 2)
        name, way = divmod(pair, len(paths) + 1)
        if brokers[way]:
            ends = brokers[way].split(BETWEEN)
            found.ways.add((run, names[name], ends[-1] if is_delivered else ends[0], bool(is_delivered)))


# -- the second pass: messages ---------------------------------------------------------------------------------------------


def deal(pieces: Iterable[Piece], plan: dealing.Plan) -> Iterator[tuple[int, bytes]]:
    """Message events in narrow form, dealt out as planned: ``(part, batch of them)``."""
    pyarrow = arrow()
    columns = [
        *("kind", "message_id", "stream", "sequence", "topic", "publisher", "subscriber", "due_ns", "sent_ns"),
        *("received_ns", "qos", "retained", "size_bytes", "path", "reason"),
    ]
    for run, table in _tables(pieces, columns):
        narrow, text = _narrow(run, table)
        topic, topics = text["topic"]
        event = {name: narrow[name] for name in ("message_id", "stream")}
        for name in ("publisher", "subscriber"):
            codes, names = text[name]
            event[name] = dealing.hashed(names.to_pylist())[codes]
        bucket = dealing.buckets(run, topics.to_pylist())[topic]
        kind = narrow["kind"]
        for number, chosen in dealing.deal(plan, bucket, kind == DELIVERED, event, kind == PROCESSED):
            arrays = {name: pyarrow.array(values[chosen]) for name, values in narrow.items()}
            arrays |= {name: _compact(codes[chosen], names) for name, (codes, names) in text.items()}
            batch = pyarrow.record_batch(arrays)
            sink = pyarrow.BufferOutputStream()
            with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            yield number, sink.getvalue().to_pybytes()


def gathered(batches: Iterable[bytes]) -> Any:
    """The events of a part again, as one table."""
    pyarrow = arrow()
    tables = [pyarrow.ipc.open_stream(batch).read_all() for batch in batches]
    if tables:
        return pyarrow.concat_tables(tables)
    narrow, text = _narrow(0, arrow_schema("").empty_table())
    return pyarrow.table({**narrow, **{name: _compact(*each) for name, each in text.items()}})


def _narrow(run: int, table: Any) -> tuple[dict[str, Numbers], dict[str, tuple[Numbers, Any]]]:
    """Numbers without gaps, and text as numbers; only of events of messages."""
    code, kinds = coded(table["kind"])
    places = [_NARROW_KINDS.index(name) if name in _NARROW_KINDS else -1 for name in kinds.to_pylist()]
    kind = np.array([*places, -1], dtype=np.int8)[code]
    chosen = kind >= 0
    if not chosen.all():
        table, kind = table.filter(chosen), kind[chosen]
    text = {name: _paths(table[name]) if name == "path" else coded(table[name]) for name in _TEXT}
    numbers: dict[str, Numbers] = {"kind": kind, "run": np.full(len(kind), run, dtype=np.int32)}
    for name, missing in (
        *((name, NONE) for name in ("message_id", "sequence", "sent_ns", "received_ns")),
        *(("stream", -(2**31)), ("qos", 0), ("size_bytes", 0)),
    ):
        numbers[name] = table[name].fill_null(missing).to_numpy()
    numbers["retained"] = table["retained"].fill_null(False).to_numpy().astype(np.bool_)
    due = table["due_ns"].fill_null(NONE).to_numpy()
    sent, received = numbers["sent_ns"], numbers["received_ns"]
    numbers["late_to_send"] = (due != NONE) & (sent != NONE) & (sent - np.where(due == NONE, sent, due) >= LATE_TO_SEND_NS)
    whole = table["message_id"].is_valid().to_numpy() & (sent != NONE) & (text["topic"][0] >= 0) & (text["publisher"][0] >= 0)
    numbers["whole"] = whole & ((kind != DELIVERED) | (text["subscriber"][0] >= 0) & (received != NONE))
    return numbers, text


def _compact(codes: Numbers, names: Any) -> Any:
    """A dictionary array with only those words that are used."""
    pyarrow = arrow()
    used = np.zeros(len(names) + 1, dtype=np.bool_)
    used[codes] = True
    used[-1] = False
    moved = (np.cumsum(used) - 1).astype(np.int32)
    indices = pyarrow.array(moved[codes], mask=codes < 0)
    return pyarrow.DictionaryArray.from_arrays(indices, names.take(pyarrow.array(np.flatnonzero(used))))
