"""Latency, loss and duplicates from recorded events, for runs that fit in memory. The evaluation of large ones is Spark's.

What should have arrived is known from the scenario: every message of a stream at every subscriber of the same broker whose
filter matches its topic and who had subscribed when it was sent. That holds for brokers that are not linked.
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
    """Deliveries that should have been: messages times those who had subscribed when they were sent."""

    delivered: int
    lost: int
    """Expected deliveries that never were."""

    lost_at_qos_0: int
    """Those of them at QoS 0, of the publisher or of the subscription: it promises nothing when connections break."""

    duplicated: int
    """Deliveries of what a subscriber had already."""

    unexpected: int
    """Deliveries to somebody who should not have got them."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A run's events, evaluated."""

    delivery: Delivery
    latencies_ms: dict[Pair, npt.NDArray[np.float64]]
    """By pair, in the order of sending."""

    lost: dict[str, int]
    """Expected deliveries that never were, by subscriber."""

    lost_at_qos_0: dict[str, int]
    """Those of them at QoS 0."""


def expected_pairs(scenario: Scenario) -> dict[Pair, dict[int, int]]:
    """Who gets which streams of whom, and at which QoS."""
    pairs: dict[Pair, dict[int, int]] = defaultdict(dict)
    clients = expand_clients(scenario)
    for publisher in clients:
        for stream, publishing in enumerate(publisher.publish):
            for subscriber in clients:
                same_broker = (subscriber.broker, subscriber.port) == (publisher.broker, publisher.port)
                granted = [wanted.qos for wanted in subscriber.subscribe if matches(wanted.filter, publishing.topic)]
                if same_broker and granted:
                    pairs[Pair(publisher.name, subscriber.name)][stream] = min(publishing.qos, max(granted))
    return dict(pairs)


def measure(events: Path, scenario: Scenario) -> Measured:
    """Evaluate the events in a directory."""
    pairs = expected_pairs(scenario)
    columns = (
        "kind",
        "at_ns",
        "client",
        "message_id",
        "publisher",
        "subscriber",
        "stream",
        "sent_ns",
        "received_ns",
        "retained",
    )
    rows = zip(*(read_table(events, columns).column(name).to_pylist() for name in columns), strict=True)
    published: dict[str, set[tuple[int, int, int]]] = defaultdict(set)
    subscribed_ns: dict[str, int] = {}
    acknowledged = 0
    seen: Counter[tuple[Pair, int]] = Counter()
    latencies: dict[Pair, list[tuple[int, float]]] = defaultdict(list)
    unexpected = 0
    for kind, at_ns, client, identity, publisher, subscriber, stream, sent_ns, received_ns, retained in rows:
        if kind == "published":
            published[publisher].add((stream, identity, sent_ns))
        elif kind == "acknowledged":
            acknowledged += 1
        elif kind == "subscribed":
            subscribed_ns[client] = min(at_ns, subscribed_ns.get(client, at_ns))
        elif kind == "delivered":
            pair = Pair(publisher, subscriber)
            if stream not in pairs.get(pair, ()):
                unexpected += 1
                continue
            seen[pair, identity] += 1
            if seen[pair, identity] == 1 and not retained:
                latencies[pair].append((sent_ns, (received_ns - sent_ns) / 1e6))
    expected = {
        (pair, identity): streams[stream]
        for pair, streams in pairs.items()
        for stream, identity, sent_ns in published[pair.publisher]
        # One who never managed to subscribe has lost everything.
        if stream in streams and sent_ns >= subscribed_ns.get(pair.subscriber, sent_ns)
    }
    lost = expected.keys() - seen.keys()
    lost_at_qos_0 = {one for one in lost if expected[one] == 0}
    delivery = Delivery(
        published=sum(map(len, published.values())),
        acknowledged=acknowledged,
        expected=len(expected),
        delivered=seen.total(),
        lost=len(lost),
        lost_at_qos_0=len(lost_at_qos_0),
        duplicated=seen.total() - len(seen),
        unexpected=unexpected,
    )
    ordered = {pair: np.array([latency for _, latency in sorted(values)]) for pair, values in latencies.items()}
    return Measured(
        delivery=delivery,
        latencies_ms=ordered,
        lost=dict(Counter(pair.subscriber for pair, _ in lost)),
        lost_at_qos_0=dict(Counter(pair.subscriber for pair, _ in lost_at_qos_0)),
    )
