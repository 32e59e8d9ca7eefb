"""What an evaluation has to find, said again in plain Python and NumPy, one event after the other; and runs to try it on."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from nearcast.mqtt.topics import matches
from nearcast.recording import EventWriter, MessageEvent, message_id, read_table

MS = 1_000_000
START_NS = 1_700_000_000_000_000_000
Row = dict[str, Any]
Flow = tuple[str, str, int | None, str]
"""Subscriber, publisher, stream, topic."""


def record_processed(directory: Path, run: str, seed: int) -> None:
    """What the brokers of a chaotic run processed: some messages twice, some that no client knows, some nowhere."""
    rng = random.Random(seed)
    published = [row for row in read_table(directory).to_pylist() if row["kind"] == "published"]
    with EventWriter(directory, run, source=f"a-brokers-{seed}") as writer:
        for row in published:
            others = [broker for broker in ("east", "west", "north", "cloud") if rng.random() < 0.5]
            home = [row["path"][0]] if rng.random() < 0.95 else []
            for broker in [*home, *others, *others[:1]]:
                writer.write(
                    MessageEvent(
                        kind="processed",
                        at_ns=row["sent_ns"] + 5 * MS,
                        client=broker,
                        path=(broker,),
                        **{name: row[name] for name in ("message_id", "sequence", "topic", "sent_ns", "qos", "size_bytes")},
                    )
                )
        # Long after the run: it belongs to somebody else, and makes the run no longer than it was.
        later_ns = START_NS + 1_000_000 * MS
        writer.write(
            MessageEvent(
                kind="processed",
                at_ns=later_ns,
                client="attic",
                path=("attic",),
                message_id=1,
                topic="a/one/c",
                sent_ns=later_ns,
                size_bytes=40,
            )
        )


def record_chaos(directory: Path, run: str, seed: int, *, messages: int = 60) -> None:
    """A run in which everything goes wrong that can: late, lost, twice, disordered, retained, refused, away, moved."""
    rng = random.Random(seed)
    brokers = ["east", "west", "north"]
    filters = ["a/#", "a/+/c", "+/one/c", "a/one/c", "#", "b/+", "$special/x", "$share/g/a/#", "b"]
    # As load processes do it, each writes its own file; what was got is read before what was published.
    with (
        EventWriter(directory, run, source=f"a-subscribers-{seed}") as arrivals,
        EventWriter(directory, run, source=f"b-publishers-{seed}") as writer,
    ):
        clients = {f"sub-{number}": brokers[number % 3] for number in range(6)}
        for number, (client, broker) in enumerate(clients.items()):
            writer.write(MessageEvent(kind="connected", at_ns=START_NS - 900 * MS, client=client, path=(broker,)))
            for topic_filter in rng.sample(filters, 3):
                # Some subscribe in the middle of it, some twice.
                at_ns = START_NS + rng.choice([-500, -500, 1500, 2200]) * MS
                for again in range(1 + (number == 0)):
                    writer.write(
                        MessageEvent(
                            kind="subscribed",
                            at_ns=at_ns + again * 100 * MS,
                            client=client,
                            topic=topic_filter,
                            qos=rng.choice([0, 1, 2]),
                            path=(broker,),
                        )
                    )
        for number in (1, 2, 3):
            client = f"sub-{number}"
            gone_ns = START_NS + (800 + 300 * number) * MS
            writer.write(
                MessageEvent(kind="disconnected", at_ns=gone_ns, client=client, path=(clients[client],), reason="network")
            )
            writer.write(
                MessageEvent(
                    kind="disconnected", at_ns=gone_ns + 50 * MS, client=client, path=(clients[client],), reason="again"
                )
            )
            if number < 3:
                clients[client] = rng.choice(brokers)
                writer.write(MessageEvent(kind="connected", at_ns=gone_ns + 200 * MS, client=client, path=(clients[client],)))
            if number == 1:
                writer.write(
                    MessageEvent(
                        kind="subscribed", at_ns=gone_ns + 260 * MS, client=client, topic="a/#", qos=1, path=(clients[client],)
                    )
                )
        writer.write(MessageEvent(kind="unconnected", at_ns=START_NS, client="shy", path=("east",), reason="refused"))
        topics = ["a/one/c", "a/two/c", "b", "b/x", "a", "$special/x"]
        for publisher in range(5):
            for stream in range(2):
                topic = topics[(publisher + 3 * stream) % len(topics)] if publisher < 4 else "quiet"
                qos = rng.choice([0, 1, 2])
                for sequence in range(messages):
                    # The first moves to another broker in the middle of it.
                    home = brokers[(publisher + (publisher == 0 and sequence >= messages // 2)) % 3]
                    sent_ns = START_NS + (50 * sequence + rng.randrange(20)) * MS
                    message: dict[str, Any] = {
                        "message_id": message_id(publisher * 1_000_003 + stream * 7, sequence),
                        "stream": stream,
                        "sequence": sequence,
                        "topic": topic,
                        "publisher": f"pub-{publisher}",
                        "qos": qos,
                        "size_bytes": 40 + publisher,
                    }
                    about: dict[str, Any] = {
                        **message,
                        "due_ns": sent_ns - rng.randrange(30) * MS,
                        "path": (home,),
                        "client": f"pub-{publisher}",
                    }
                    if rng.random() < 0.03:
                        writer.write(MessageEvent(kind="skipped", at_ns=sent_ns, reason="no connection", **about))
                        continue
                    writer.write(MessageEvent(kind="published", at_ns=sent_ns, sent_ns=sent_ns, **about))
                    if rng.random() < 0.03:
                        writer.write(MessageEvent(kind="refused", at_ns=sent_ns + 3, sent_ns=sent_ns, reason="quota", **about))
                        continue
                    if qos and rng.random() < 0.9:
                        writer.write(MessageEvent(kind="acknowledged", at_ns=sent_ns + 9 * MS, sent_ns=sent_ns, **about))
                    for client, broker in clients.items():
                        if rng.random() < 0.35 or topic == "quiet":
                            continue
                        late = 120 if (sequence // 7) % 4 == 0 and rng.random() < 0.8 else 0
                        path = (home,) if broker == home else rng.choice([(home, broker), (home, "cloud", broker)])
                        for copy in range(1 + (rng.random() < 0.1)):
                            latency_ns = (rng.randrange(1, 90) + late + 30 * copy) * MS + rng.randrange(MS)
                            arrivals.write(
                                MessageEvent(
                                    kind="delivered",
                                    at_ns=sent_ns + latency_ns,
                                    received_ns=sent_ns + latency_ns,
                                    client=client,
                                    subscriber=client,
                                    sent_ns=sent_ns,
                                    retained=rng.random() < 0.05,
                                    path=path,
                                    **message,
                                )
                            )


class Reference:
    """One run, evaluated slowly."""

    def __init__(self, directory: Path, bounds_ms: dict[str, float], *, settle_ns: int, linked: bool) -> None:
        self.rows: list[Row] = read_table(directory).to_pylist()
        self.by_kind: dict[str, list[Row]] = defaultdict(list)
        for row in self.rows:
            self.by_kind[row["kind"]].append(row)
        self.bounds_ms = bounds_ms
        of_clients = [row for row in self.rows if row["kind"] != "processed"]
        self.start_ns = min(row["at_ns"] for row in of_clients if row["message_id"] is not None)
        self.end_ns = max(row["at_ns"] for row in of_clients)
        self.cutoff_ns = self.end_ns - settle_ns
        self.linked = linked
        self._entitlements()
        self._flows()

    def bound_ms(self, topic: str) -> float | None:
        return next((bound for topic_filter, bound in self.bounds_ms.items() if matches(topic_filter, topic)), None)

    def _entitlements(self) -> None:
        self.entitled: dict[tuple[str, str], tuple[int, int, set[str]]] = {}
        topics = {row["topic"] for kind in ("published", "delivered") for row in self.by_kind[kind]}
        for row in self.by_kind["subscribed"]:
            if row["topic"].startswith("$share/"):
                continue
            for topic in topics:
                if matches(row["topic"], topic):
                    key = (row["client"], topic)
                    at_ns, qos, brokers = self.entitled.get(key, (row["at_ns"], row["qos"], set()))
                    self.entitled[key] = (min(at_ns, row["at_ns"]), max(qos, row["qos"]), brokers | {row["path"][0]})

    def _flows(self) -> None:
        refused = {row["message_id"] for row in self.by_kind["refused"]}
        acknowledged = {row["message_id"] for row in self.by_kind["acknowledged"]}
        streams: dict[tuple[str, int | None, str], list[Row]] = defaultdict(list)
        for row in self.by_kind["published"]:
            streams[row["publisher"], row["stream"], row["topic"]].append(row)
        came: dict[Flow, list[Row]] = defaultdict(list)
        for row in self.by_kind["delivered"]:
            came[row["subscriber"], row["publisher"], row["stream"], row["topic"]].append(row)
        self.expected: dict[Flow, set[int]] = {}
        self.lost: dict[Flow, dict[int, str]] = {}
        for (publisher, stream, topic), sent in streams.items():
            homes = {row["path"][0] for row in sent}
            for (client, wanted), (from_ns, granted, brokers) in self.entitled.items():
                if wanted != topic or (not self.linked and not homes & brokers):
                    continue
                flow = (client, publisher, stream, topic)
                due = {
                    row["message_id"]: row
                    for row in sent
                    if from_ns <= row["sent_ns"] < self.cutoff_ns and row["message_id"] not in refused
                }
                self.expected[flow] = set(due)
                got = {row["message_id"] for row in came[flow]}
                self.lost[flow] = {}
                for identity in set(due) - got:
                    row = due[identity]
                    if any(gone <= row["sent_ns"] < back for gone, back in self.absences(client)):
                        cause = "away"
                    elif row["qos"] > 0 and identity not in acknowledged:
                        cause = "unacknowledged"
                    else:
                        cause = "qos_0" if min(row["qos"], granted) == 0 else "unexplained"
                    self.lost[flow][identity] = cause
        self.came = {flow: rows for flow, rows in came.items() if rows}

    def absences(self, client: str) -> list[tuple[int, float]]:
        found: list[tuple[int, float]] = []
        gone: int | None = None
        events = [row for row in self.rows if row["client"] == client and row["kind"] in ("connected", "disconnected")]
        for row in sorted(events, key=lambda row: row["at_ns"]):
            if row["kind"] == "disconnected" and gone is None:
                gone = row["at_ns"]
            elif row["kind"] == "connected" and gone is not None:
                found.append((gone, row["at_ns"]))
                gone = None
        return found if gone is None else [*found, (gone, float("inf"))]

    def firsts(self, flow: Flow) -> dict[int, Row]:
        """The first delivery of each message, retained ones only where there is no other."""
        found: dict[int, Row] = {}
        for row in sorted(self.came.get(flow, []), key=lambda row: (bool(row["retained"]), row["received_ns"])):
            found.setdefault(row["message_id"], row)
        return found

    def samples(self, flow: Flow) -> list[Row]:
        return [row for row in self.firsts(flow).values() if not row["retained"]]

    def duplicates(self, flow: Flow) -> int:
        live = [row for row in self.came.get(flow, []) if not row["retained"]]
        return len(live) - len(self.samples(flow))

    def out_of_order(self, flow: Flow) -> int:
        live = [row for row in self.came.get(flow, []) if not row["retained"]]
        return sum(
            any(other["sequence"] > row["sequence"] and other["received_ns"] < row["received_ns"] for other in live)
            for row in self.samples(flow)
        )

    def late(self, flow: Flow) -> list[Row]:
        bound = self.bound_ms(flow[3])
        return [row for row in self.samples(flow) if bound is not None and _latency_ms(row) > bound]

    def violations(self, flow: Flow) -> int | None:
        if self.bound_ms(flow[3]) is None or flow not in self.expected:
            return None
        return sum(row["message_id"] in self.expected[flow] for row in self.late(flow)) + len(self.lost[flow])

    def episodes(self, flow: Flow) -> list[tuple[int, int, int]]:
        """Begin, end and number of messages of each time above the bound."""
        late = {row["message_id"] for row in self.late(flow)}
        found: list[list[Row]] = [[]]
        for row in sorted(self.samples(flow), key=lambda row: row["sequence"]):
            if row["message_id"] in late:
                found[-1].append(row)
            elif found[-1]:
                found.append([])
        bound_ns = round((self.bound_ms(flow[3]) or 0) * MS)
        return sorted(
            (min(row["sent_ns"] for row in rows) + bound_ns, max(row["received_ns"] for row in rows), len(rows))
            for rows in found
            if rows
        )

    def latencies_ms(self, *, topic: str | None = None) -> np.ndarray[Any, Any]:
        rows = [row for flow in self.came for row in self.samples(flow) if topic is None or flow[3] == topic]
        return np.array([_latency_ms(row) for row in rows])

    def carried(self) -> dict[str, tuple[int, int]]:
        """Messages carried and in excess, by broker."""
        at: dict[str, dict[int, Row | None]] = defaultdict(dict)
        homes = {row["message_id"]: row["path"][0] for row in self.by_kind["published"]}
        if self.by_kind["processed"]:
            for row in self.by_kind["processed"]:
                if row["message_id"] in homes:
                    at_home = homes[row["message_id"]] == row["client"]
                    at[row["client"]][row["message_id"]] = None if at_home else row
        else:
            for row in self.by_kind["delivered"]:
                for broker in row["path"]:
                    at[broker][row["message_id"]] = row
            for identity, home in homes.items():
                # Where this one was published, wherever else its publisher has been.
                at[home][identity] = None
        return {
            broker: (len(rows), sum(row is not None and not self._wanted(broker, row) for row in rows.values()))
            for broker, rows in at.items()
        }

    def _wanted(self, broker: str, row: Row) -> bool:
        return any(
            topic == row["topic"] and from_ns <= row["sent_ns"] and self._broker_of(client, row["sent_ns"]) == broker
            for (client, topic), (from_ns, _, _) in self.entitled.items()
        )

    def _broker_of(self, client: str, at_ns: int) -> str | None:
        kinds = ("connected", "subscribed")
        seen = [row for row in self.rows if row["client"] == client and row["kind"] in kinds and row["at_ns"] <= at_ns]
        return max(seen, key=lambda row: row["at_ns"])["path"][0] if seen else None


def _latency_ms(row: Row) -> float:
    return float(row["received_ns"] - row["sent_ns"]) / MS


def quantile(values: np.ndarray[Any, Any], share: float) -> float:
    """The nearest rank."""
    return float(np.quantile(values, share, method="inverted_cdf"))
