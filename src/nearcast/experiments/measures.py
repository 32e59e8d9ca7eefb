"""Latency, loss and duplicates from recorded events, for runs that fit in memory. The evaluation of large ones is Spark's.

What should have arrived is known from the scenario: every message of a stream at every subscriber of the same broker, or the
same fabric, whose filter matches its topic and who had subscribed when it was sent and had not left.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np
import numpy.typing as npt

from nearcast.mqtt.topics import matches
from nearcast.recording import read_table
from nearcast.scenario.expansion import Client, expand_brokers, expand_clients, expand_gateways
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


LEAVING_NS = 1_000_000_000
"""What was sent so shortly before a subscriber left may still have been on its way."""


def served_together(scenario: Scenario, clients: Sequence[Client]) -> dict[str, tuple[str, int] | None]:
    """By client, what tells who reaches whom: clients of one broker have the same, and all clients of the fabric's brokers, of
    its gateways and of the cloud of its groups."""
    fabric = {(broker.host, broker.port) for broker in expand_brokers(scenario) if broker.fabric}
    cloud = scenario.settings.get("fabric", {}).get("groups", {}).get("cloud") if scenario.protocol == "fabric" else None
    if cloud is not None:
        url = urlsplit(cloud)
        fabric.add((url.hostname or "", url.port or 1883))
    fabric |= {(gateway.host, gateway.port) for gateway in expand_gateways(scenario)}
    return {
        client.name: None if (client.broker, client.port) in fabric else (client.broker, client.port) for client in clients
    }


def expected_pairs(scenario: Scenario) -> dict[Pair, dict[int, int]]:
    """Who gets which streams of whom, and at which QoS."""
    pairs: dict[Pair, dict[int, int]] = defaultdict(dict)
    clients = expand_clients(scenario)
    served = served_together(scenario, clients)
    for publisher in clients:
        for stream, publishing in enumerate(publisher.publish):
            for subscriber in clients:
                granted = [wanted.qos for wanted in subscriber.subscribe if matches(wanted.filter, publishing.topic)]
                if granted and served[subscriber.name] == served[publisher.name]:
                    pairs[Pair(publisher.name, subscriber.name)][stream] = min(publishing.qos, max(granted))
    return dict(pairs)


def measure(events: Path, scenario: Scenario, since_ns: int = 0) -> Measured:
    """Evaluate the events in a directory; latencies are those of messages that were sent from ``since_ns`` on."""
    pairs = expected_pairs(scenario)
    leaving = {client.name for client in expand_clients(scenario) if client.leave_s is not None}
    left_ns: dict[str, int] = {}
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
        elif kind == "disconnected" and client in leaving:
            left_ns[client] = max(at_ns, left_ns.get(client, at_ns))
        elif kind == "delivered":
            pair = Pair(publisher, subscriber)
            if stream not in pairs.get(pair, ()):
                unexpected += 1
                continue
            seen[pair, identity] += 1
            if seen[pair, identity] == 1 and not retained and sent_ns >= since_ns:
                latencies[pair].append((sent_ns, (received_ns - sent_ns) / 1e6))
    expected = {
        (pair, identity): streams[stream]
        for pair, streams in pairs.items()
        for stream, identity, sent_ns in published[pair.publisher]
        # One who never managed to subscribe has lost everything.
        if stream in streams and sent_ns >= subscribed_ns.get(pair.subscriber, sent_ns)
        if sent_ns <= left_ns.get(pair.subscriber, sent_ns + LEAVING_NS) - LEAVING_NS
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
