"""What brokers carried, and for whom: excess data as the broadcast-group paper counts it (section IV-D).

A broker *carried* a message when it is on the path of an event of it. That was right when it was published there, or a client
there was subscribed to it when it was sent; all else is excess. Each message counts once per broker.

Of what brokers send each other for nobody, clients see only what lies on the way of something that arrived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nearcast.pipeline.evaluation.reading import DELIVERED, PUBLISHED
from nearcast.recording.schema import arrow

if TYPE_CHECKING:
    from nearcast.pipeline.evaluation.judging import Numbers, Part, Table


def brokers(part: Part) -> Table:
    """``run_code, broker`` and what it carried, what of it in excess, and what its clients gave and got."""
    from nearcast.pipeline.evaluation.judging import combined, count, factors, total

    names = sorted({broker for path in part.paths for broker in path})
    codes = {name: code for code, name in enumerate(names)}
    width = len(names)
    groups = len(part.question.runs) * width
    found: dict[str, Numbers] = {}
    firsts = np.array([codes[path[0]] if path else -1 for path in part.paths] + [-1], dtype=np.int64)
    lasts = np.array([codes[path[-1]] if path else -1 for path in part.paths] + [-1], dtype=np.int64)
    for name, kind, ends in (("published", PUBLISHED, firsts), ("delivered", DELIVERED, lasts)):
        rows = np.flatnonzero(part.kind == kind)
        at = ends[part.path[rows]]
        rows, at = rows[at >= 0], at[at >= 0]
        group = part.run[rows] * width + at
        found[f"{name}_messages"] = count(group, groups)
        found[f"{name}_bytes"] = total(group, groups, part.size_bytes[rows])
    carried, excess = np.zeros(groups, dtype=np.int64), np.zeros(groups, dtype=np.int64)
    carried_bytes, excess_bytes = np.zeros(groups, dtype=np.int64), np.zeros(groups, dtype=np.int64)
    # Of each way that a message took, one event: that of publishing, if it is one of them, wherever in the files it is. Then
    # each broker of each way.
    passing = np.flatnonzero((part.message_of >= 0) & (part.path >= 0) & np.isin(part.kind, (PUBLISHED, DELIVERED)))
    passing = passing[np.argsort(part.kind[passing] != PUBLISHED, kind="stable")]
    _, example, _ = factors(combined(part.message_of[passing], part.path[passing]))
    rows = passing[example]
    message, broker, size, at_home = [], [], [], []
    for code, path in enumerate(part.paths):
        mine = rows[part.path[rows] == code] if path else rows[:0]
        for place in dict.fromkeys(path):
            message.append(part.message_of[mine])
            broker.append(np.full(len(mine), codes[place], dtype=np.int64))
            size.append(part.size_bytes[mine])
            at_home.append((part.kind[mine] == PUBLISHED) & (place == path[0]))
    if message and width:
        whose, where, sizes, homes = (np.concatenate(each) for each in (message, broker, size, at_home))
        # Where it was published comes first, and is the one that counts.
        order = np.argsort(~homes, kind="stable")
        whose, where, sizes, homes = whose[order], where[order], sizes[order], homes[order]
        _, once, _ = factors(whose * width + where)
        whose, where, sizes, homes = whose[once], where[once], sizes[once], homes[once]
        group = part.stream_run[part.message_stream[whose]] * width + where
        vain = ~homes & ~_wanted(part, names, whose, where, _sent(part)[whose], ~homes)
        carried, carried_bytes = count(group, groups), total(group, groups, sizes)
        excess, excess_bytes = count(group, groups, vain), total(group[vain], groups, sizes[vain])
    table = arrow().table(
        {
            "run_code": np.repeat(np.arange(len(part.question.runs)), width),
            "broker": arrow().array(names * len(part.question.runs), arrow().string()),
            **found,
            "carried_messages": carried,
            "carried_bytes": carried_bytes,
            "excess_messages": excess,
            "excess_bytes": excess_bytes,
        }
    )
    seen = carried + found["published_messages"] + found["delivered_messages"] > 0
    return table.filter(seen)


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
