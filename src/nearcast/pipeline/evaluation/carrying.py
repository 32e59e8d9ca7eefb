"""What brokers carried, and for whom: excess data as the broadcast-group paper counts it (section IV-D).

A broker *carried* a message when it recorded that it processed it; in runs whose brokers recorded nothing, when it is on the
path of an event of it. That was right when it was published there, or a client there was subscribed to it when it was sent;
all else is excess. Each message counts once per broker.

Of what brokers send each other for nobody, clients see only what lies on the way of something that arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from nearcast.pipeline.evaluation import reading
from nearcast.pipeline.evaluation.reading import DELIVERED, PUBLISHED
from nearcast.recording.schema import arrow

if TYPE_CHECKING:
    from nearcast.pipeline.evaluation.judging import Numbers, Part, Table


@dataclass(frozen=True)
class Carried:
    """Messages and brokers that carried them, each pair once."""

    brokers: list[str]
    """Their names, by number."""

    message: Numbers
    broker: Numbers
    size_bytes: Numbers
    vain: Numbers
    """Whether it was for nobody there."""


def carried(part: Part) -> Carried:
    """What was carried, of the messages that this part counts."""
    from nearcast.pipeline.evaluation.judging import factors

    at = _recorded_at(part)
    names = sorted({broker for path in part.paths for broker in path}.union(filter(None, at)))
    codes = {name: code for code, name in enumerate(names)}
    nothing = np.zeros(0, dtype=np.int64)
    found = [(nothing, nothing, nothing, nothing.astype(np.bool_))]
    if part.share.messages:
        found += _on_paths(part, codes)
        found += _processed(part, codes, at)
    message, broker, size, home = (np.concatenate(each) for each in zip(*found, strict=True))
    # Where it was published comes first, and is the one that counts.
    order = np.argsort(~home, kind="stable")
    _, once, _ = factors(message[order] * len(names) + broker[order])
    rows = order[once]
    message, broker, size, home = message[rows], broker[rows], size[rows], home[rows]
    vain = ~home & ~_wanted(part, names, message, broker, _sent(part)[message], ~home)
    return Carried(names, message, broker, size, vain)


def brokers(part: Part, carried: Carried) -> Table:
    """``run_code, broker`` and what it carried, what of it in excess, and what its clients gave and got."""
    from nearcast.pipeline.evaluation.judging import count, total

    width = len(carried.brokers)
    codes = {name: code for code, name in enumerate(carried.brokers)}
    groups = len(part.question.runs) * width
    found: dict[str, Numbers] = {}
    for name, kind, end in (("published", PUBLISHED, 0), ("delivered", DELIVERED, -1)):
        ends = _ends(part, codes, end)
        rows = np.flatnonzero(part.kind == kind)
        at = ends[part.path[rows]]
        rows, at = rows[at >= 0], at[at >= 0]
        group = part.run[rows] * width + at
        found[f"{name}_messages"] = count(group, groups)
        found[f"{name}_bytes"] = total(group, groups, part.size_bytes[rows])
    group = part.stream_run[part.message_stream[carried.message]] * width + carried.broker
    vain = carried.vain
    found |= {
        "carried_messages": count(group, groups),
        "carried_bytes": total(group, groups, carried.size_bytes),
        "excess_messages": count(group, groups, vain),
        "excess_bytes": total(group[vain], groups, carried.size_bytes[vain]),
    }
    table = arrow().table(
        {
            "run_code": np.repeat(np.arange(len(part.question.runs)), width),
            "broker": arrow().array(carried.brokers * len(part.question.runs), arrow().string()),
            **found,
        }
    )
    return table.filter(found["carried_messages"] + found["published_messages"] + found["delivered_messages"] > 0)


_Ways = tuple["Numbers", "Numbers", "Numbers", "Numbers"]
"""Messages, the brokers that carried them, their sizes, and whether they were published there."""


def _on_paths(part: Part, codes: dict[str, int]) -> Iterator[_Ways]:
    """Of runs whose brokers recorded nothing."""
    from nearcast.pipeline.evaluation.judging import combined, factors

    silent = ~np.array([run.processed for run in part.question.runs], dtype=np.bool_)
    # Of each way that a message took, one event: that of publishing, if it is one of them, wherever in the files it is. Then
    # each broker of each way.
    told = (part.message_of >= 0) & (part.path >= 0) & np.isin(part.kind, (PUBLISHED, DELIVERED)) & silent[part.run]
    passing = np.flatnonzero(told)
    passing = passing[np.argsort(part.kind[passing] != PUBLISHED, kind="stable")]
    _, example, _ = factors(combined(part.message_of[passing], part.path[passing]))
    rows = passing[example]
    for code, path in enumerate(part.paths):
        mine = rows[part.path[rows] == code] if path else rows[:0]
        for place in dict.fromkeys(path):
            home = (part.kind[mine] == PUBLISHED) & (place == path[0])
            yield part.message_of[mine], np.full(len(mine), codes[place], dtype=np.int64), part.size_bytes[mine], home


def _recorded_at(part: Part) -> list[str]:
    """Which brokers there are that recorded what they processed, as numbered in their events."""
    return [] if part.processed is None else reading.coded(part.processed["path"])[1].to_pylist()


def _processed(part: Part, codes: dict[str, int], at: list[str]) -> Iterator[_Ways]:
    """What brokers recorded, of messages that clients' events know too."""
    events = part.processed
    if events is None:
        return
    known = np.flatnonzero(part.message_of >= 0)
    identity = pd.factorize(np.concatenate([part.message_id[known], events["message_id"].to_numpy()]))[0]
    run = np.concatenate([part.run[known], events["run"].to_numpy()])
    key = identity * len(part.question.runs) + run
    message_by_key = np.full(int(key.max(initial=-1)) + 1, -1, dtype=np.int64)
    message_by_key[key[: len(known)]] = part.message_of[known]
    message = message_by_key[key[len(known) :]]
    place = np.array([codes.get(name, -1) for name in at] + [-1], dtype=np.int64)[reading.coded(events["path"])[0]]
    rows = np.flatnonzero((message >= 0) & (place >= 0))
    message, place = message[rows], place[rows]
    published = part.published_at[message]
    homes = _ends(part, codes, 0)[part.path[published]]
    yield message, place, events["size_bytes"].to_numpy()[rows], (published >= 0) & (homes == place)


def _ends(part: Part, codes: dict[str, int], end: int) -> Numbers:
    """By path: its first or its last broker."""
    return np.array([codes[path[end]] if path else -1 for path in part.paths] + [-1], dtype=np.int64)


def _sent(part: Part) -> Numbers:
    """When each message was sent, as whoever saw it says."""
    sent = np.zeros(part.messages, dtype=np.int64)
    rows = np.flatnonzero(part.message_of >= 0)
    sent[part.message_of[rows]] = part.sent_ns[rows]
    return sent


def _wanted(part: Part, names: list[str], message: Numbers, broker: Numbers, sent_ns: Numbers, asked: Numbers) -> Numbers:
    """Whether a client at the broker was subscribed to the message when it was sent."""
    from nearcast.pipeline.evaluation.judging import combined, factors

    found = np.zeros(len(message), dtype=np.bool_)
    rows = np.flatnonzero(asked)
    stream = part.message_stream[message[rows]]
    run, topic = part.stream_run[stream], part.stream_topic[stream]
    group, example, groups = factors(combined(run, topic, broker[rows]))
    order = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[order], np.arange(groups + 1))
    known: dict[tuple[int, int], dict[str, tuple[list[int], list[int]]]] = {}
    for each in range(groups):
        at = example[each]
        key = (int(run[at]), int(topic[at]))
        if key not in known:
            known[key] = part.question.runs[key[0]].clients.wanted(part.entitled(*key))
        spans = known[key].get(names[broker[rows[at]]])
        if spans is not None:
            mine = rows[order[ends[each] : ends[each + 1]]]
            begins, until = (np.array(each, dtype=np.int64) for each in spans)
            place = np.searchsorted(begins, sent_ns[mine], side="right") - 1
            found[mine] = (place >= 0) & (sent_ns[mine] < until[np.maximum(place, 0)])
    return found
