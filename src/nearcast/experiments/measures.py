"""Latency, loss and duplicates from recorded events, for runs that fit in memory. The evaluation of large ones is Spark's.

What should have arrived is known from the scenario: every message of a stream at every subscriber of the same broker whose
filter matches its topic. That holds for brokers that are not linked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from nearcast.mqtt.topics import matches
from nearcast.recording import read_table
from nearcast.scenario.expansion import expand_clients
from nearcast.scenario.scenario import Scenario


class Pair(NamedTuple):
    """A publisher and one of its subscribers."""

    publisher: str
    subscriber: str

    def __str__(self) -> str:
        return f"{self.publisher} → {self.subscriber}"


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the messages of a run."""

    published: int
    acknowledged: int
    expected: int
    """Deliveries that should have been: messages times their subscribers."""

    delivered: int
    lost: int
    """Expected deliveries that never were."""

    duplicated: int
    """Deliveries of what a subscriber had already."""

    unexpected: int
    """Deliveries to somebody who should not have got them."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A run's events, evaluated."""

    delivery: Delivery
    latencies_ms: dict[Pair, npt.NDArray[np.float64]]
    """By pair, in the order of sending."""


def expected_pairs(scenario: Scenario) -> dict[Pair, set[int]]:
    """Who gets which streams of whom."""
    pairs: dict[Pair, set[int]] = defaultdict(set)
    clients = expand_clients(scenario)
    for publisher in clients:
        for stream, publishing in enumerate(publisher.publish):
            for subscriber in clients:
                same_broker = (subscriber.broker, subscriber.port) == (publisher.broker, publisher.port)
                if same_broker and any(matches(wanted.filter, publishing.topic) for wanted in subscriber.subscribe):
                    pairs[Pair(publisher.name, subscriber.name)].add(stream)
    return dict(pairs)


def measure(events: Path, scenario: Scenario) -> Measured:
    """Evaluate the events in a directory."""
    pairs = expected_pairs(scenario)
    columns = ("kind", "message_id", "publisher", "subscriber", "stream", "sent_ns", "received_ns", "retained")
    rows = zip(*(read_table(events, columns).column(name).to_pylist() for name in columns), strict=True)
    published: dict[str, set[tuple[int, int]]] = defaultdict(set)
    acknowledged = 0
    seen: Counter[tuple[Pair, int]] = Counter()
    latencies: dict[Pair, list[tuple[int, float]]] = defaultdict(list)
    unexpected = 0
    for kind, identity, publisher, subscriber, stream, sent_ns, received_ns, retained in rows:
        if kind == "published":
            published[publisher].add((stream, identity))
        elif kind == "acknowledged":
            acknowledged += 1
        elif kind == "delivered":
            pair = Pair(publisher, subscriber)
            if stream not in pairs.get(pair, ()):
                unexpected += 1
                continue
            seen[pair, identity] += 1
            if seen[pair, identity] == 1 and not retained:
                latencies[pair].append((sent_ns, (received_ns - sent_ns) / 1e6))
    expected = {
        (pair, identity)
        for pair, streams in pairs.items()
        for stream, identity in published[pair.publisher]
        if stream in streams
    }
    delivery = Delivery(
        published=sum(map(len, published.values())),
        acknowledged=acknowledged,
        expected=len(expected),
        delivered=seen.total(),
        lost=len(expected - seen.keys()),
        duplicated=seen.total() - len(seen),
        unexpected=unexpected,
    )
    ordered = {pair: np.array([latency for _, latency in sorted(values)]) for pair, values in latencies.items()}
    return Measured(delivery=delivery, latencies_ms=ordered)
