"""Correct and redundant messages of each broker, from recorded events that fit in memory (broadcast groups, section IV-D).

A message that a broker processed is *correct* there when it was published there, or a client there had subscribed to it when
it was sent; else it is *redundant*: excess data. Each counts once per broker; what came to a broker more than once is told
apart, because no share would show it. Spark computes the same of recordings of any
size, for clients that move too (:mod:`nearcast.pipeline.evaluation.carrying`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from nearcast.mqtt.topics import matches
from nearcast.recording import read_table

_COLUMNS = ("kind", "at_ns", "client", "message_id", "topic", "sent_ns", "path")


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """What brokers processed."""

    correct: int = 0
    redundant: int = 0

    @property
    def excess(self) -> float | None:
        """Share of redundant messages; None of nothing."""
        whole = self.correct + self.redundant
        return self.redundant / whole if whole else None


class Processed(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of some topics."""

    by_broker: Mapping[str, Tally]
    unknown: int
    """Messages that a broker processed and no client recorded as published."""

    repeated: int = 0
    """Times that a broker processed a message which it had processed before: in neither of the tallies."""

    @property
    def total(self) -> Tally:
        tallies = self.by_broker.values()
        return Tally(correct=sum(each.correct for each in tallies), redundant=sum(each.redundant for each in tallies))


def processed(events: Path, flows: Mapping[str, str], since_ns: int = 0) -> dict[str, Processed]:
    """By name of a flow, whose filter says which topics it has; of messages that were sent from ``since_ns`` on."""
    table = read_table(events, _COLUMNS)
    rows = list(zip(*(table.column(name).to_pylist() for name in _COLUMNS), strict=True))
    homes: dict[int, str] = {}
    subscriptions: list[tuple[str, str, int]] = []
    for kind, at_ns, _, identity, topic, _, path in rows:
        if kind == "published":
            homes[identity] = path[0]
        elif kind == "subscribed":
            subscriptions.append((topic, path[0], at_ns))
    since: dict[tuple[str, str], int | None] = {}

    def wanted_since(topic: str, broker: str) -> int | None:
        """When a client there first subscribed to it."""
        if (topic, broker) not in since:
            moments = [at_ns for wanted, where, at_ns in subscriptions if where == broker and matches(wanted, topic)]
            since[topic, broker] = min(moments, default=None)
        return since[topic, broker]

    flow_of: dict[str, str | None] = {}
    correct: Counter[tuple[str, str]] = Counter()
    redundant: Counter[tuple[str, str]] = Counter()
    unknown: Counter[str] = Counter()
    repeated: Counter[str] = Counter()
    seen: set[tuple[int, str]] = set()
    for kind, _, broker, identity, topic, sent_ns, _ in rows:
        if kind != "processed" or sent_ns < since_ns:
            continue
        if topic not in flow_of:
            flow_of[topic] = next((name for name, wanted in flows.items() if matches(wanted, topic)), None)
        flow = flow_of[topic]
        if flow is None:
            continue
        if (identity, broker) in seen:
            repeated[flow] += 1
            continue
        seen.add((identity, broker))
        if identity not in homes:
            unknown[flow] += 1
            continue
        begin_ns = wanted_since(topic, broker)
        right = homes[identity] == broker or (begin_ns is not None and begin_ns <= sent_ns)
        (correct if right else redundant)[flow, broker] += 1
    brokers = sorted({broker for _, broker in (*correct, *redundant)})
    return {
        flow: Processed(
            by_broker={
                broker: Tally(correct=correct[flow, broker], redundant=redundant[flow, broker])
                for broker in brokers
                if correct[flow, broker] or redundant[flow, broker]
            },
            unknown=unknown[flow],
            repeated=repeated[flow],
        )
        for flow in flows
    }
