"""The table of topics: from sums of one part, or, where a topic was dealt out to several, from theirs added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nearcast.pipeline.evaluation import reading
from nearcast.pipeline.evaluation.histograms import distributions
from nearcast.pipeline.evaluation.places import FOR_EVER
from nearcast.pipeline.evaluation.reading import PUBLISHED
from nearcast.recording.schema import arrow

if TYPE_CHECKING:
    from nearcast.pipeline.evaluation.carrying import Carried
    from nearcast.pipeline.evaluation.judging import Numbers, Part, Question, Table

_COUNTS = ("expected", "deliveries", "lost", "duplicates", "out_of_order", "retained", "bytes", "late")
_CARRIED = ("carried_messages", "excess_messages")
_LARGEST = ("bound_ns", "longest_ms", "max_ns")


def sums(part: Part, flows: Table, episodes: dict[str, Numbers], carried: Carried) -> tuple[Table, Table]:
    """By run and topic: sums; and counts of latencies by bucket."""
    from nearcast.pipeline.evaluation.judging import amount, combined, count, factors, total

    pyarrow = arrow()
    topic, example, topics = factors(combined(part.stream_run, part.stream_topic))
    of_flow = topic[part.flow_stream]
    of_row = topic[part.flow_stream[part.flow]]
    published = part.stream_of[(part.kind == PUBLISHED) & (part.stream_of >= 0) & part.share.messages]
    longest = np.zeros(topics)
    np.maximum.at(longest, topic, episodes["longest_ms"])
    named = {
        "run_code": part.stream_run[example],
        "topic": reading.words(part.stream_topic[example], pyarrow.array(part.topics, pyarrow.string())),
    }
    found = {
        **named,
        "bound_ns": part.stream_bound[example],
        "published": count(topic[published], topics),
        **{name: total(of_flow, topics, flows[name].fill_null(0).to_numpy()) for name in (*_COUNTS, "violations", "bounded")},
        "judged": count(of_flow, topics, flows["violations"].is_valid().to_numpy()),
        "episodes": total(topic, topics, episodes["episodes"]),
        "violation_ms": amount(topic, topics, episodes["violation_ms"]),
        "longest_ms": longest,
        "carried_messages": count(topic[part.message_stream[carried.message]], topics),
        "excess_messages": count(topic[part.message_stream[carried.message[carried.vain]]], topics),
    }
    cells, at = part.cells(of_row)
    chosen = {name: cells[name] for name in ("bucket", "samples", "latency_ms", "min_ns", "max_ns")}
    whose = pyarrow.table(named).take(pyarrow.array(of_row[at]))
    return pyarrow.table(found), pyarrow.table({name: whose[name] for name in named} | chosen)


def merged(parts: Sequence[Table], keys: Sequence[str]) -> Table:
    """Sums of several parts added up."""
    table = arrow().concat_tables(parts)
    ways = dict.fromkeys(_LARGEST, "max") | {"min_ns": "min"}
    others = [name for name in table.column_names if name not in keys]
    found = table.group_by(list(keys), use_threads=False).aggregate([(name, ways.get(name, "sum")) for name in others])
    return found.select([*keys, *(f"{name}_{ways.get(name, 'sum')}" for name in others)]).rename_columns([*keys, *others])


def table(question: Question, sums: Table, cells: Table) -> Table:
    """The rows of topics that are whole in these sums."""
    from nearcast.pipeline.evaluation.judging import optional

    pyarrow = arrow()
    values: dict[str, Any] = {name: sums[name].to_numpy() for name in sums.column_names if name != "topic"}
    places = {key: place for place, key in enumerate(_keys(sums))}
    whose = np.array([places[key] for key in _keys(cells)], dtype=np.int64)
    columns = {name: cells[name].to_numpy() for name in cells.column_names if name not in ("run_code", "topic")}
    latency = distributions(whose, len(sums), columns)
    runs = pyarrow.array([run.name for run in question.runs], pyarrow.string())
    bound, judged, bounded = values["bound_ns"], values["judged"] > 0, values["bounded"]
    made = pyarrow.table(
        {
            "run": reading.words(values["run_code"], runs),
            "topic": sums["topic"],
            "bound_ms": optional(bound / 1e6, bound != FOR_EVER),
            "published": values["published"],
            **{name: values[name] for name in _COUNTS},
            **{name: optional(each, ~np.isnan(each)) for name, each in latency.items()},
            "violations": optional(values["violations"], judged),
            "violation_ratio": optional(values["violations"] / np.maximum(bounded, 1), judged & (bounded > 0)),
            **{name: values[name] for name in ("episodes", "violation_ms", "longest_ms", *_CARRIED)},
            "excess_share": optional(
                values["excess_messages"] / np.maximum(values["carried_messages"], 1), values["carried_messages"] > 0
            ),
        }
    )
    # A topic that was only skipped, refused or acknowledged is none that anything is known about.
    return made.filter((values["published"] > 0) | (values["deliveries"] > 0))


def _keys(table: Table) -> list[tuple[int, str]]:
    return list(zip(table["run_code"].to_pylist(), table["topic"].to_pylist(), strict=True))
