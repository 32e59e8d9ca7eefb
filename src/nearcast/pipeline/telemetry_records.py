"""Records of the telemetry topics on executors: first only who they are from and which round they belong to, then, of those
that count, everything (:mod:`.telemetry_rounds` says which).

What cannot be read, and what a topic says in another broker's name, is passed over and counted: telemetry is published by many
and read by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from nearcast.coordinates.coordinate import DIMENSIONS
from nearcast.pipeline.telemetry_rounds import BROKER, CLIENTS, TOPICS, Round, Seen, decode_report, parse_topic
from nearcast.pipeline.telemetry_tables import report_rows, sample_rows
from nearcast.placement.gathering import rows_of
from nearcast.telemetry.records import ClientReport, TopicReport

RECORDS: Final = "topic string, index bigint, time timestamp, payload binary"
"""What is read of the log."""

SEEN: Final = (
    "kind string, broker string, index bigint, time double, round bigint, part bigint, parts bigint, payload binary, "
    "refused boolean"
)

MAX_PARTS: Final = 1_000_000


class _Header(msgspec.Struct):
    """What reports of topics and of clients have in common; the rest is skipped."""

    broker: str
    round: int
    part: int
    parts: int


_header: Final = msgspec.json.Decoder(_Header).decode
_topics: Final = msgspec.json.Decoder(TopicReport).decode
_clients: Final = msgspec.json.Decoder(ClientReport).decode


def headers(batches: Iterable[Any]) -> Iterator[Any]:
    """For ``mapInArrow``: :data:`RECORDS` to :data:`SEEN`."""
    for batch in batches:
        rows = [_seen(*each) for each in _records(batch)]
        columns = list(zip(*rows, strict=True)) if rows else [()] * 9
        yield pa.RecordBatch.from_arrays(
            [pa.array(column, kind) for column, kind in zip(columns, _SEEN_TYPES, strict=True)], names=_SEEN_NAMES
        )


_SEEN_NAMES: Final = ["kind", "broker", "index", "time", "round", "part", "parts", "payload", "refused"]
_SEEN_TYPES: Final = [
    pa.string(),
    pa.string(),
    pa.int64(),
    pa.float64(),
    pa.int64(),
    pa.int64(),
    pa.int64(),
    pa.binary(),
    pa.bool_(),
]
_REFUSED: Final = ("", "", 0, 0.0, 0, 0, 1, b"", True)


def _records(batch: Any) -> Iterator[tuple[str, int, float, bytes]]:
    times = batch.column("time").cast(pa.int64()).to_pylist()
    for topic, index, time_us, payload in zip(
        batch.column("topic").to_pylist(), batch.column("index").to_pylist(), times, batch.column("payload"), strict=True
    ):
        yield topic, index, time_us / 1e6, payload.as_py()


def _seen(topic: str, index: int, time: float, payload: bytes) -> tuple[Any, ...]:
    place = parse_topic(topic)
    if place is None:
        return _REFUSED
    kind, broker = place
    if kind == BROKER:
        if decode_report(payload, broker) is None:
            return _REFUSED
        return kind, broker, index, time, 0, 0, 1, payload, False
    try:
        header = _header(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _REFUSED
    if header.broker != broker or not 0 <= header.part < header.parts <= MAX_PARTS:
        return _REFUSED
    return kind, broker, index, time, header.round, header.part, header.parts, b"", False


def seen_of(rows: Iterable[Mapping[str, Any]]) -> tuple[list[Seen], int]:
    """Collected rows of :data:`SEEN`, and how many were refused."""
    found, refused = [], 0
    for row in rows:
        if row["refused"]:
            refused += 1
            continue
        found.append(Seen(**{name: row[name] for name in Seen.__struct_fields__}))
    return found, refused


def contents(topics: Mapping[str, Round], clients: Mapping[str, Round]) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """For ``mapInArrow``: :data:`RECORDS` to rows of :data:`~nearcast.pipeline.telemetry_tables.ROWS`; of these rounds only.
    Of a broker whose clients are there one by one, its crowds are left out."""

    def read(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            for topic, index, _, payload in _records(batch):
                place = parse_topic(topic)
                if place is None:
                    continue
                kind, broker = place
                chosen = (topics if kind == TOPICS else clients if kind == CLIENTS else {}).get(broker)
                if chosen is None or not chosen.first <= index <= chosen.last:
                    continue
                rows = _rows(kind, broker, chosen.number, payload, with_crowds=broker not in clients)
                if rows is not None:
                    yield rows

    return read


def _rows(kind: str, broker: str, number: int, payload: bytes, *, with_crowds: bool) -> pa.RecordBatch | None:
    try:
        if kind == TOPICS:
            report = _topics(payload)
            if report.broker != broker or report.round != number:
                return None
            return report_rows(rows_of(report.topics), with_crowds=with_crowds)
        clients = _clients(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError):
        return None
    if clients.broker != broker or clients.round != number:
        return None
    good = [each for each in clients.clients if len(each.place.vector) == DIMENSIONS]
    return sample_rows(
        [each.topic for each in good],
        [each.role if each.role in (0, 1) else -1 for each in good],
        np.array([each.place.vector for each in good], np.float64).reshape(len(good), DIMENSIONS),
        [each.place.height for each in good],
        [each.place.adjustment for each in good],
    )
