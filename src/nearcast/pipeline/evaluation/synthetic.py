"""Recorded runs that never were: events in the schema of recordings, made by the million, to try the evaluation on.

``python -m nearcast.pipeline.evaluation.synthetic FOLDER --events 20000000`` writes a folder like that of an experiment:
events, and the sites of its clients. What is wrong with the deliveries (late, lost, twice, out of order) is drawn from the
seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nearcast.recording.schema import COLUMNS, arrow, arrow_schema

ROW_GROUP_ROWS = 65_536
START_NS = 1_700_000_000_000_000_000
_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """What is made up."""

    events: int = 1_000_000
    """About so many in all: a message at QoS 1 is published, acknowledged and delivered to each subscriber."""

    publishers: int = 1_000
    """Each publishes to a topic of its own."""

    subscribers: int = 200
    """Each takes its share of the topics."""

    fan_out: int = 2
    """Subscribers of a topic."""

    brokers: int = 4
    """Clients are spread over them; a delivery to another broker passes the cloud's."""

    sites: int = 8
    duration_s: float = 600.0
    lost: float = 0.0005
    late: float = 0.01
    duplicated: float = 0.0005
    reordered: float = 0.0005
    moves: int = 200
    """Subscribers that lose their connection and come back, spread over the run."""

    seed: int = 1
    run: str = "synthetic"
    rows_per_file: int = 1_000_000

    @property
    def messages_per_publisher(self) -> int:
        return max(1, round(self.events / (self.publishers * (2 + self.fan_out))))


def write(directory: str | Path, options: Synthetic) -> int:
    """Write a folder with the events and ``sites.csv``; returns the number of events."""
    from pyarrow import parquet

    folder = Path(directory)
    events = folder / "events"
    events.mkdir(parents=True, exist_ok=True)
    sites = ["client,site"]
    sites += [f"publisher-{number},site-{number % options.sites}" for number in range(options.publishers)]
    sites += [f"subscriber-{number},site-{number % options.sites}" for number in range(options.subscribers)]
    (folder / "sites.csv").write_text("\n".join(sites) + "\n")
    rows = 0
    for number, table in enumerate(tables(options)):
        parquet.write_table(
            table, events / f"synthetic-{number:05}.parquet", compression="zstd", version="2.6", row_group_size=ROW_GROUP_ROWS
        )
        rows += table.num_rows
    (folder / "synthetic.json").write_text(json.dumps(vars(options), indent=2) + "\n")
    return rows


def tables(options: Synthetic) -> Iterator[Any]:
    """The events as Arrow tables of about ``rows_per_file`` rows, each in the order of time, the connections first."""
    rng = np.random.default_rng(options.seed)
    yield _connections(options, rng)
    per_publisher = options.messages_per_publisher * (2 + options.fan_out)
    step = max(1, options.rows_per_file // per_publisher)
    for first in range(0, options.publishers, step):
        yield _messages(options, rng, np.arange(first, min(first + step, options.publishers), dtype=np.int64))


def _table(options: Synthetic, columns: dict[str, Any], rows: int) -> Any:
    pyarrow = arrow()
    schema = arrow_schema(options.run)
    arrays = []
    for column in COLUMNS:
        kind = schema.field(column.name).type
        value = columns.get(column.name)
        if value is None:
            arrays.append(pyarrow.nulls(rows, kind))
        else:
            arrays.append(value if isinstance(value, pyarrow.Array) else pyarrow.array(value, type=kind))
    return pyarrow.Table.from_arrays(arrays, schema=schema)


def _words(codes: npt.NDArray[Any], words: list[str], missing: npt.NDArray[np.bool_] | None = None) -> Any:
    """Text by number: what most columns are."""
    pyarrow = arrow()
    indices = pyarrow.array(codes.astype(np.int32), mask=missing)
    return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(words, type=pyarrow.string())).cast(pyarrow.string())


def _paths(codes: npt.NDArray[Any], paths: list[list[str]]) -> Any:
    pyarrow = arrow()
    kind = arrow_schema("").field("path").type
    return pyarrow.array(paths, type=kind).take(pyarrow.array(codes))


def subscribers_of(options: Synthetic, publisher: npt.NDArray[Any], position: int) -> npt.NDArray[Any]:
    """Who takes the topic of a publisher, first, second and so on."""
    return (publisher * options.fan_out + position) % options.subscribers


def _connections(options: Synthetic, rng: np.random.Generator) -> Any:
    kinds: list[str] = []
    clients: list[str] = []
    topics: list[str | None] = []
    times: list[int] = []
    paths: list[list[str]] = []
    reasons: list[str | None] = []

    def add(kind: str, client: str, at_ns: int, broker: int, topic: str | None = None, reason: str | None = None) -> None:
        kinds.append(kind)
        clients.append(client)
        times.append(at_ns)
        topics.append(topic)
        paths.append([f"broker-{broker}"])
        reasons.append(reason)

    for number in range(options.publishers):
        add("connected", f"publisher-{number}", START_NS - 2_000_000_000, number % options.brokers)
    for number in range(options.subscribers):
        add("connected", f"subscriber-{number}", START_NS - 2_000_000_000, number % options.brokers)
    for number in range(options.publishers):
        for position in range(min(options.fan_out, options.subscribers)):
            subscriber = (number * options.fan_out + position) % options.subscribers
            filter_ = (
                f"area-{number % 10}/sensor-{number}/#" if number % 3 == 0 else f"area-{number % 10}/sensor-{number}/value"
            )
            add("subscribed", f"subscriber-{subscriber}", START_NS - 1_000_000_000, subscriber % options.brokers, filter_)
    moments = np.sort(rng.uniform(0.05, 0.9, options.moves)) * options.duration_s * 1e9
    for number, moment in enumerate(moments):
        client = number % options.subscribers
        gone_ns = START_NS + int(moment)
        back_ns = gone_ns + int(rng.lognormal(np.log(0.3e9), 0.6))
        add("disconnected", f"subscriber-{client}", gone_ns, client % options.brokers, reason="moved")
        add("connected", f"subscriber-{client}", back_ns, client % options.brokers)
    qos = [1 if kind == "subscribed" else None for kind in kinds]
    columns = {"kind": kinds, "at_ns": times, "client": clients, "topic": topics, "path": paths, "reason": reasons, "qos": qos}
    return _table(options, columns | {"run": [options.run] * len(kinds)}, len(kinds))


def _messages(options: Synthetic, rng: np.random.Generator, publishers: Integers) -> Any:
    count = options.messages_per_publisher
    messages = len(publishers) * count
    publisher = np.repeat(publishers, count)
    sequence = np.tile(np.arange(count, dtype=np.int64), len(publishers))
    gap_ns = options.duration_s * 1e9 / count
    phase = rng.uniform(0, gap_ns, len(publishers))
    sent = START_NS + (np.repeat(phase, count) + sequence * gap_ns).astype(np.int64)
    numbers = np.random.default_rng(7).integers(0, 2**64, options.publishers, dtype=np.uint64)
    with np.errstate(over="ignore"):
        identity = (numbers[publisher] + sequence.astype(np.uint64) * _GOLDEN).view(np.int64)
    due = sent - rng.integers(0, 200_000, messages)
    size = 60 + (publisher % 5) * 100
    home = publisher % options.brokers

    parts: list[dict[str, npt.NDArray[Any]]] = []

    def part(kind: int, at: Integers, chosen: npt.NDArray[Any], **more: npt.NDArray[Any]) -> None:
        parts.append({"kind": np.full(len(chosen), kind), "at": at, "message": chosen, **more})

    everything = np.arange(messages)
    nobody = np.full(messages, -1)
    part(0, sent, everything, subscriber=nobody, path=home)
    acknowledged = sent + rng.lognormal(np.log(8e6), 0.3, messages).astype(np.int64)
    part(1, acknowledged, everything, subscriber=nobody, path=home)
    for position in range(options.fan_out):
        subscriber = subscribers_of(options, publisher, position)
        distance = np.abs(publisher % options.sites - subscriber % options.sites)
        latency = (2e6 + distance * 4e6) * rng.lognormal(0, 0.2, messages)
        # Lateness comes in stretches, as of a link that is bad for a while.
        bad = (np.sin(sequence / 40.0 + publisher) > 0.9) & (rng.random(messages) < options.late * 12)
        latency = np.where(bad, latency + rng.exponential(60e6, messages), latency)
        swapped = rng.random(messages) < options.reordered
        latency = np.where(swapped, latency + 2.5 * gap_ns, latency)
        received = sent + latency.astype(np.int64)
        kept = np.flatnonzero(rng.random(messages) >= options.lost)
        away = subscriber % options.brokers
        path = options.brokers + home * options.brokers + away
        part(2, received[kept], kept, subscriber=subscriber[kept], path=path[kept])
        again = kept[rng.random(len(kept)) < options.duplicated]
        part(2, received[again] + 5_000_000, again, subscriber=subscriber[again], path=path[again])

    kind, at, message, subscriber, path = (
        np.concatenate([each[name] for each in parts]) for name in ("kind", "at", "message", "subscriber", "path")
    )
    order = np.argsort(at, kind="stable")
    kind, at, message, subscriber, path = kind[order], at[order], message[order], subscriber[order], path[order]
    by = publisher[message]
    delivered = kind == 2
    names = [f"publisher-{number}" for number in range(options.publishers)]
    names += [f"subscriber-{number}" for number in range(options.subscribers)]
    brokers = [f"broker-{number}" for number in range(options.brokers)]
    ways = [[broker] for broker in brokers] + [
        [one] if one == other else [one, "cloud", other] for one in brokers for other in brokers
    ]
    pyarrow = arrow()
    rows = len(kind)
    columns = {
        "run": _words(np.zeros(rows), [options.run]),
        "kind": _words(kind, ["published", "acknowledged", "delivered"]),
        "at_ns": at,
        "client": _words(np.where(delivered, options.publishers + subscriber, by), names),
        "message_id": identity[message],
        "stream": np.zeros(rows, dtype=np.int32),
        "sequence": sequence[message],
        "topic": _words(by, [f"area-{number % 10}/sensor-{number}/value" for number in range(options.publishers)]),
        "publisher": _words(by, names),
        "subscriber": _words(options.publishers + np.maximum(subscriber, 0), names, ~delivered),
        "due_ns": pyarrow.array(due[message], mask=delivered),
        "sent_ns": sent[message],
        "received_ns": pyarrow.array(at, mask=~delivered),
        "qos": np.ones(rows, dtype=np.int8),
        "retained": np.zeros(rows, dtype=np.bool_),
        "size_bytes": size[message].astype(np.int32),
        "path": _paths(path, ways),
    }
    return _table(options, columns, rows)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m nearcast.pipeline.evaluation.synthetic", description="Write made-up recorded events."
    )
    parser.add_argument("folder", metavar="FOLDER", help="where to write")
    parser.add_argument("--events", type=int, default=1_000_000, metavar="N", help="about so many (default 1,000,000)")
    parser.add_argument("--publishers", type=int, default=1_000, metavar="N", help="each with a topic of its own")
    parser.add_argument("--subscribers", type=int, default=200, metavar="N", help="who take them")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="all that is random follows from it")
    parser.add_argument("--run", default="synthetic", metavar="NAME", help="name of the run")
    given = parser.parse_args(arguments)
    options = Synthetic(
        events=given.events, publishers=given.publishers, subscribers=given.subscribers, seed=given.seed, run=given.run
    )
    rows = write(given.folder, options)
    sys.stdout.write(f"{rows} events in {given.folder}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
