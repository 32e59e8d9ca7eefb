"""Recorded events of a fabric's clients as columns: who got what of whom, when, how often. For runs of millions of events.

Owns what follows from events and scenario alone: losses, duplicates, latency over time, gaps. It refuses to know what an
experiment makes of it. Times are seconds after the start of the scenario.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nearcast.experiments.measures import LEAVING_NS, expected_pairs
from nearcast.recording import read_table
from nearcast.scenario.expansion import expand_clients
from nearcast.scenario.scenario import Scenario

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


COLUMNS = (
    "kind",
    "at_ns",
    "client",
    "message_id",
    "publisher",
    "subscriber",
    "stream",
    "sequence",
    "sent_ns",
    "topic",
    "retained",
)


class Count(NamedTuple):
    """What became of the messages of one QoS."""

    published: int
    expected: int
    """Deliveries that should have been."""

    delivered: int
    """Deliveries that were, every further one of the same message included."""

    lost: int
    duplicated: int


class Loss(NamedTuple):
    """A message that a subscriber should have had."""

    publisher: str
    subscriber: str
    sent_s: float
    qos: int


class Deliveries(NamedTuple):
    """First deliveries of messages that were not retained, in the order of sending."""

    publisher: npt.NDArray[np.object_]
    subscriber: npt.NDArray[np.object_]
    sent_s: Floats
    received_s: Floats

    @property
    def latency_ms(self) -> Floats:
        return (self.received_s - self.sent_s) * 1e3

    def only(self, chosen: Flags) -> Deliveries:
        """Some of them."""
        return Deliveries(self.publisher[chosen], self.subscriber[chosen], self.sent_s[chosen], self.received_s[chosen])

    def sent_between(self, from_s: float, until_s: float) -> Deliveries:
        """Those of messages that were sent in a span of time."""
        return self.only((self.sent_s >= from_s) & (self.sent_s < until_s))


class Flows:
    """The events of a run, and what the scenario says should have come of them."""

    def __init__(self, events: Path, scenario: Scenario, start_ns: int, until_s: float | None = None) -> None:
        """``until_s``: messages sent later are left out, of a load that was ended in the middle."""
        self.start_ns = start_ns
        self._clients = expand_clients(scenario)
        table = read_table(events, COLUMNS)
        self._kind = _words(table, "kind")
        kind = self._kind
        self._read_connections(table)
        sent = kind == "published"
        if until_s is not None:
            sent &= _numbers(table, "sent_ns") <= start_ns + int(until_s * 1e9)
        order = np.argsort(_numbers(table, "message_id")[sent], kind="stable")
        self._id = _numbers(table, "message_id")[sent][order]
        self._sent_ns = _numbers(table, "sent_ns")[sent][order]
        self._publisher = _words(table, "publisher")[sent][order]
        self._stream = _numbers(table, "stream")[sent][order]
        self._sequence = _numbers(table, "sequence")[sent][order]
        got = kind == "delivered"
        ids = _numbers(table, "message_id")[got]
        message = np.minimum(np.searchsorted(self._id, ids), max(0, len(self._id) - 1))
        known = self._id[message] == ids if len(self._id) else np.zeros(len(ids), dtype=np.bool_)
        self.unknown = int(np.count_nonzero(~known))
        """Deliveries of messages whose publisher did not record them."""
        self._message = message[known]
        self._subscriber = _words(table, "subscriber")[got][known]
        self._received_ns = _numbers(table, "at_ns")[got][known]
        self._retained = _numbers(table, "retained")[got][known].astype(np.bool_)
        self._topic = _words(table, "topic")[sent][order]
        # Looked up once each: a game asks for thousands of pairs.
        self._by_topic: dict[str, Integers] = {}
        self._by_subscriber: dict[str, Integers] = {}
        self._expectations = self._expect(scenario)

    def _read_connections(self, table: Any) -> None:
        at_ns, client = _numbers(table, "at_ns"), _words(table, "client")
        self.subscribed_ns: dict[str, int] = {}
        self.left_ns: dict[str, int] = {}
        leaving = {each.name for each in self._clients if each.leave_s is not None}
        self.disconnections: list[tuple[float, str]] = []
        """Connections that broke, though their client was to stay: when, and whose."""
        for row in np.flatnonzero(np.isin(self._kind, ("subscribed", "disconnected"))):
            name, moment = client[row], int(at_ns[row])
            if self._kind[row] == "subscribed":
                self.subscribed_ns[name] = min(moment, self.subscribed_ns.get(name, moment))
            elif name in leaving:
                self.left_ns[name] = max(moment, self.left_ns.get(name, moment))
            else:
                self.disconnections.append((self._seconds(moment), name))
        self.skipped = int(np.count_nonzero(self._kind == "skipped"))
        self.refused = int(np.count_nonzero(self._kind == "refused"))

    def _seconds(self, at_ns: int) -> float:
        return (at_ns - self.start_ns) / 1e9

    def _expect(self, scenario: Scenario) -> dict[str, tuple[Integers, Integers]]:
        """By subscriber: the messages it should get, and at which QoS."""
        wanted: dict[str, list[tuple[str, int, int]]] = {}
        for pair, streams in expected_pairs(scenario).items():
            wanted.setdefault(pair.subscriber, []).extend((pair.publisher, stream, qos) for stream, qos in streams.items())
        by_stream: dict[tuple[str, int], Integers] = {}
        for publisher in np.unique(self._publisher.astype(str)) if len(self._publisher) else ():
            rows = np.flatnonzero(self._publisher == publisher)
            for stream in np.unique(self._stream[rows]):
                by_stream[str(publisher), int(stream)] = rows[self._stream[rows] == stream]
        found: dict[str, tuple[Integers, Integers]] = {}
        nothing = np.zeros(0, dtype=np.int64)
        for subscriber, sources in wanted.items():
            parts = [(by_stream.get((publisher, stream), nothing), qos) for publisher, stream, qos in sources]
            messages = np.concatenate([rows for rows, _ in parts])
            levels = np.concatenate([np.full(len(rows), qos, dtype=np.int64) for rows, qos in parts])
            # One who never managed to subscribe has lost everything.
            begin_ns = self.subscribed_ns.get(subscriber, self.start_ns)
            due = self._sent_ns[messages] >= begin_ns
            if subscriber in self.left_ns:
                due &= self._sent_ns[messages] <= self.left_ns[subscriber] - LEAVING_NS
            found[subscriber] = (messages[due], levels[due])
        return found

    # -- questions ---------------------------------------------------------------------------------------------------------

    def counts(self) -> dict[int, Count]:
        """Losses and duplicates by QoS: the lower one of the publication and the subscription."""
        lost = dict.fromkeys(range(3), 0)
        expected, delivered, duplicated = dict(lost), dict(lost), dict(lost)
        qos_of = {(client.name, stream): each.qos for client in self._clients for stream, each in enumerate(client.publish)}
        published = dict(lost)
        names, number = np.unique(self._publisher.astype(str), return_inverse=True)
        for code, name in enumerate(names):
            for stream, count in zip(*np.unique(self._stream[number == code], return_counts=True), strict=True):
                published[qos_of[str(name), int(stream)]] += int(count)
        for subscriber, (messages, levels) in self._expectations.items():
            got, times = np.unique(self._message[self._subscriber == subscriber], return_counts=True)
            missing = ~np.isin(messages, got)
            level_of = np.full(len(self._id), -1, dtype=np.int64)
            level_of[messages] = levels
            for qos in range(3):
                expected[qos] += int(np.count_nonzero(levels == qos))
                lost[qos] += int(np.count_nonzero(missing & (levels == qos)))
                here = level_of[got] == qos
                delivered[qos] += int(times[here].sum())
                duplicated[qos] += int((times[here] - 1).sum())
        return {qos: Count(published[qos], expected[qos], delivered[qos], lost[qos], duplicated[qos]) for qos in range(3)}

    def out_of_order(self) -> int:
        """First deliveries after one of a newer message of the same stream, to the same subscriber."""
        if not len(self._message):
            return 0
        rows = np.argsort(self._received_ns, kind="stable")
        subscriber = np.unique(self._subscriber[rows].astype(str), return_inverse=True)[1]
        _, first = np.unique(subscriber * len(self._id) + self._message[rows], return_index=True)
        first.sort()
        rows, subscriber = rows[first], subscriber[first]
        publisher = np.unique(self._publisher.astype(str), return_inverse=True)[1]
        streams = publisher * (int(self._stream.max()) + 1) + self._stream
        flow = subscriber * (int(streams.max()) + 1) + streams[self._message[rows]]
        by_flow = np.argsort(flow, kind="stable")
        _, number = np.unique(flow[by_flow], return_inverse=True)
        # Flows one after the other, each beginning above all of the one before: one running maximum serves them all.
        sequence = self._sequence[self._message[rows[by_flow]]]
        raised = number * (int(sequence.max()) + 1) + sequence
        return int(np.count_nonzero(raised < np.maximum.accumulate(raised)))

    def losses(self, most: int = 100) -> list[Loss]:
        """The first messages that somebody should have had and has not."""
        found: list[Loss] = []
        for subscriber, (messages, levels) in self._expectations.items():
            missing = ~np.isin(messages, self._message[self._subscriber == subscriber])
            for row, qos in zip(messages[missing], levels[missing], strict=True):
                moment = self._seconds(int(self._sent_ns[row]))
                found.append(Loss(str(self._publisher[row]), subscriber, round(moment, 4), int(qos)))
        return sorted(found, key=lambda loss: loss.sent_s)[:most]

    def missing(self, topic: str, subscriber: str, from_s: float, until_s: float) -> tuple[int, int]:
        """Of the messages of a topic that were sent in a span of time: how many there were, and how many of them a subscriber
        never got. For subscriptions that change, which a scenario's expectations do not know."""
        rows = self._sent_to(topic)
        sent_s = (self._sent_ns[rows] - self.start_ns) / 1e9
        due = rows[(sent_s >= from_s) & (sent_s < until_s)]
        return len(due), int(np.count_nonzero(~np.isin(due, self._got_by(subscriber))))

    def _sent_to(self, topic: str) -> Integers:
        if topic not in self._by_topic:
            self._by_topic[topic] = np.flatnonzero(self._topic == topic)
        return self._by_topic[topic]

    def _got_by(self, subscriber: str) -> Integers:
        if subscriber not in self._by_subscriber:
            self._by_subscriber[subscriber] = np.unique(self._message[self._subscriber == subscriber])
        return self._by_subscriber[subscriber]

    def deliveries(self, topic: str) -> Deliveries:
        """Of one topic."""
        chosen = np.flatnonzero((self._topic[self._message] == topic) & ~self._retained)
        order = chosen[np.argsort(self._received_ns[chosen], kind="stable")]
        codes = np.unique(self._subscriber[order].astype(str), return_inverse=True)[1]
        _, first = np.unique(codes * len(self._id) + self._message[order], return_index=True)
        rows = order[first]
        rows = rows[np.argsort(self._sent_ns[self._message[rows]], kind="stable")]
        message = self._message[rows]
        return Deliveries(
            publisher=self._publisher[message],
            subscriber=self._subscriber[rows],
            sent_s=(self._sent_ns[message] - self.start_ns) / 1e9,
            received_s=(self._received_ns[rows] - self.start_ns) / 1e9,
        )


def longest_gap(received_s: Floats, from_s: float, until_s: float) -> tuple[float, float] | None:
    """The longest time without a message that overlaps a span: when it began, and how long it was, in seconds."""
    ordered = np.sort(received_s)
    if len(ordered) < 2:
        return None
    overlapping = (ordered[1:] >= from_s) & (ordered[:-1] < until_s)
    if not overlapping.any():
        return None
    gaps = np.where(overlapping, np.diff(ordered), -1.0)
    at = int(np.argmax(gaps))
    return float(ordered[at]), float(gaps[at])


def binned_mean_ms(deliveries: Deliveries, width_s: float, until_s: float) -> tuple[Floats, Floats]:
    """Mean latency by time of sending: the middles of the bins, and the means (NaN where nothing was sent)."""
    edges = np.arange(0.0, until_s + width_s, width_s)
    place = np.digitize(deliveries.sent_s, edges) - 1
    inside = (place >= 0) & (place < len(edges) - 1)
    counts = np.bincount(place[inside], minlength=len(edges) - 1)
    sums = np.bincount(place[inside], weights=deliveries.latency_ms[inside], minlength=len(edges) - 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = sums / counts
    return (edges[:-1] + width_s / 2), means


def stable_after_s(
    deliveries: Deliveries, from_s: float, until_s: float, width_s: float, level_ms: float, tolerance_ms: float
) -> float | None:
    """How long after ``from_s`` the mean of a bin was last further from a level than tolerated; None without deliveries."""
    middles, means = binned_mean_ms(deliveries, width_s, until_s)
    inside = (middles >= from_s) & (middles < until_s) & ~np.isnan(means)
    if not inside.any():
        return None
    off = inside & (np.abs(means - level_ms) > tolerance_ms)
    if not off.any():
        return 0.0
    return float(max(0.0, middles[np.flatnonzero(off)[-1]] + width_s / 2 - from_s))


def _numbers(table: Any, name: str) -> Integers:
    """A column as integers; -1 where there is none."""
    import pyarrow.compute as compute

    column = table.column(name)
    if name == "retained":
        column = compute.cast(column, "int64")
    return np.asarray(compute.fill_null(compute.cast(column, "int64"), -1).to_numpy(zero_copy_only=False), dtype=np.int64)


def _words(table: Any, name: str) -> npt.NDArray[np.object_]:
    """A column as text, each word once in memory."""
    encoded = table.column(name).combine_chunks().dictionary_encode()
    words: npt.NDArray[np.object_] = np.array([*encoded.dictionary.to_pylist(), None], dtype=object)
    codes: Integers = np.asarray(encoded.indices.fill_null(len(words) - 1).to_numpy(zero_copy_only=False), dtype=np.int64)
    return words[codes]
