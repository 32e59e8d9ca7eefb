"""All message events of some topics judged together: what was expected, what came, late, twice, out of order or never.

A *flow* is what one subscriber gets of one stream (publisher, stream, topic). Deliveries are ordered by flow and by the
number of the message in its stream, newest first. In that order

- a row whose message is that of the row before is a duplicate;
- a first delivery is out of order when a newer message arrived before it: when the smallest arrival of the rows before is
  earlier;
- late messages with none in time between them, an *episode*, share the number of rows in time before them.

A flow's events are all in one part, so its rows of the tables are final here, as are those of topics that are whole here; what
spans parts (large topics, runs, sites, time, brokers) leaves as sums. A part that has only a :class:`Share` of its topics
counts what belongs to it, so that sums of all parts count everything once.

Knows Arrow and NumPy, not Spark: a part in, tables out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nearcast.pipeline.evaluation import reading
from nearcast.pipeline.evaluation.clients import Clients
from nearcast.pipeline.evaluation.dealing import WHOLE, Share
from nearcast.pipeline.evaluation.histograms import NO_BUCKET, bucket
from nearcast.pipeline.evaluation.places import FOR_EVER, LONG_AGO, Bound
from nearcast.pipeline.evaluation.reading import ACKNOWLEDGED, DELIVERED, NONE, PROCESSED, PUBLISHED, REFUSED, SKIPPED
from nearcast.recording.schema import arrow

Numbers = npt.NDArray[Any]
Table = Any

CAUSES = ("away", "unacknowledged", "qos_0", "unexplained")
SITE_LIMIT = 65_536
PAIRS_AT_A_TIME = 1_000_000
"""So many messages of flows with losses are gone through together."""


@dataclass(frozen=True)
class Run:
    """What is known of a run before its messages are judged."""

    name: str
    start_ns: int
    end_ns: int
    cutoff_ns: int
    linked: bool
    clients: Clients
    places: dict[str, list[tuple[int, int, int]]]
    """By client: ``from_ns, until_ns, site``."""
    processed: bool = False
    """Whether its brokers recorded what they processed."""


@dataclass(frozen=True)
class Question:
    """What every part is asked."""

    runs: list[Run]
    slot_ns: int
    bounds: tuple[Bound, ...]

    def bound_ns(self, run: int, topic: str) -> int | None:
        """How long a delivery of a topic may take."""
        return next((each.bound_ns for each in self.bounds if each.holds(self.runs[run].name, topic)), None)


def combined(*columns: Numbers) -> Numbers:
    """One number for each different row of some columns of small numbers (from -1)."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    size = 1
    for column in columns:
        count = int(column.max(initial=-1)) + 2
        if size * count > 2**62:
            key = pd.factorize(key)[0]
            size = len(key) + 1
        key = key * count + column + 1
        size *= count
    return key


def factors(key: Numbers) -> tuple[Numbers, Numbers, int]:
    """Each row's group, a row of each group, and how many groups there are."""
    group, found = pd.factorize(key)
    example = np.zeros(len(found), dtype=np.int64)
    example[group[::-1]] = np.arange(len(key) - 1, -1, -1)
    return group, example, len(found)


def count(group: Numbers, groups: int, chosen: Numbers | None = None) -> Numbers:
    """How many rows of each group there are, or of those chosen."""
    return np.bincount(group if chosen is None else group[chosen], minlength=groups)


def total(group: Numbers, groups: int, values: Numbers) -> Numbers:
    """The sum of whole numbers, by group."""
    return np.rint(np.bincount(group, values, groups)).astype(np.int64)


def amount(group: Numbers, groups: int, values: Numbers) -> Numbers:
    """The sum of fractions, by group. Of no values at all NumPy makes whole zeros, and the parts of a table would differ."""
    return np.bincount(group, values, groups).astype(np.float64)


def lowest(group: Numbers, groups: int, values: Numbers) -> Numbers:
    """The smallest, by group."""
    found = np.full(groups, FOR_EVER, dtype=np.int64)
    np.minimum.at(found, group, values)
    return found


def highest(group: Numbers, groups: int, values: Numbers) -> Numbers:
    """The largest, by group."""
    found = np.full(groups, LONG_AGO, dtype=np.int64)
    np.maximum.at(found, group, values)
    return found


class Part:
    """The events of some topics."""

    def __init__(self, events: Table, question: Question, share: Share = WHOLE) -> None:
        self.question = question
        self.share = share
        of_brokers = events["kind"].to_numpy() == PROCESSED
        self.processed = events.filter(of_brokers) if of_brokers.any() else None
        """Events of brokers, if there are any: they are of no flow, and count in :mod:`carrying` alone."""
        events = events if self.processed is None else events.filter(~of_brokers)
        for name in ("kind", "run", "message_id", "sequence", "sent_ns", "received_ns", "stream", "qos", "size_bytes"):
            setattr(self, name, events[name].to_numpy())
        self.retained = events["retained"].to_numpy().astype(np.bool_)
        self.whole = events["whole"].to_numpy().astype(np.bool_)
        self.late_to_send = events["late_to_send"].to_numpy().astype(np.bool_)
        self.topic, topics = reading.coded(events["topic"])
        self.publisher, publishers = reading.coded(events["publisher"])
        self.subscriber, subscribers = reading.coded(events["subscriber"])
        self.path, paths = reading.coded(events["path"])
        self.reason, self.reasons = reading.coded(events["reason"])
        self.topics: list[str] = topics.to_pylist()
        self.publishers: list[str] = publishers.to_pylist()
        self.subscribers: list[str] = subscribers.to_pylist()
        self.paths: list[list[str]] = [path.split(reading.BETWEEN) if path else [] for path in paths.to_pylist()]
        self._streams()
        self._messages()
        self._flows()
        self._deliveries()

    kind: Numbers
    run: Numbers
    message_id: Numbers
    sequence: Numbers
    sent_ns: Numbers
    received_ns: Numbers
    stream: Numbers
    qos: Numbers
    size_bytes: Numbers

    # -- streams, messages, flows ------------------------------------------------------------------------------------------

    def _streams(self) -> None:
        """``stream_of`` each event (-1: none), and of each stream its run, topic, publisher, number and bound."""
        named = (self.topic >= 0) & (self.publisher >= 0)
        numbers, _ = pd.factorize(self.stream)
        group, example, self.streams = factors(combined(self.run, self.topic, self.publisher, numbers)[named])
        self.stream_of = np.full(len(self.kind), -1, dtype=np.int64)
        self.stream_of[named] = group
        at = np.flatnonzero(named)[example]
        self.stream_run, self.stream_topic = self.run[at], self.topic[at]
        self.stream_publisher, self.stream_number = self.publisher[at], self.stream[at]
        known: dict[tuple[int, int], int | None] = {}
        pairs = list(zip(self.stream_run.tolist(), self.stream_topic.tolist(), strict=True))
        for pair in pairs:
            if pair not in known:
                known[pair] = self.question.bound_ns(pair[0], self.topics[pair[1]])
        bounds = [known[pair] for pair in pairs]
        self.stream_bound = np.array([FOR_EVER if bound is None else bound for bound in bounds], dtype=np.int64)

    def _messages(self) -> None:
        """Of each message its stream, when it was sent, whether it can be expected and was acknowledged."""
        rows = np.flatnonzero(self.whole & (self.kind != SKIPPED))
        stream, kind = self.stream_of[rows], self.kind[rows]
        identity, _ = pd.factorize(self.message_id[rows])
        group, _, self.messages = factors(combined(stream, identity))
        self.message_of = np.full(len(self.kind), -1, dtype=np.int64)
        self.message_of[rows] = group
        self.published_at = np.full(self.messages, -1, dtype=np.int64)
        published = kind == PUBLISHED
        self.published_at[group[published][::-1]] = rows[published][::-1]
        self.message_stream = np.full(self.messages, -1, dtype=np.int64)
        self.message_stream[group] = stream
        self.acknowledged = count(group, self.messages, kind == ACKNOWLEDGED) > 0
        refused = count(group, self.messages, kind == REFUSED) > 0
        self.message_sent = self.sent_ns[self.published_at]
        cutoffs = np.array([run.cutoff_ns for run in self.question.runs])[self.stream_run[self.message_stream]]
        self.expectable = (self.published_at >= 0) & ~refused & (self.message_sent < cutoffs)
        # Those that can be expected, stream by stream, in the order in which they were sent.
        due = np.flatnonzero(self.expectable)
        self.due = due[np.lexsort((self.message_sent[due], self.message_stream[due]))]
        self.due_sent = self.message_sent[self.due]
        self.due_from = np.searchsorted(self.message_stream[self.due], np.arange(self.streams + 1))

    def _entitled(self) -> Iterator[tuple[int, str, int, int]]:
        """``stream, client, entitled_ns, granted`` of clients that are judged here."""
        if not self.share.flows:
            return
        published = np.flatnonzero(count(self.stream_of, self.streams, (self.kind == PUBLISHED) & (self.stream_of >= 0)))
        homes = self._homes()
        for stream in published.tolist():
            run = self.question.runs[self.stream_run[stream]]
            for client, subscription in self.entitled(self.stream_run[stream], self.stream_topic[stream]).items():
                home = homes.get(stream, set())
                if not self.share.holds(client):
                    continue
                if run.linked or not home or not subscription.brokers or home & subscription.brokers:
                    yield stream, client, subscription.entitled_ns, subscription.granted

    def entitled(self, run: int, topic: int) -> dict[str, Any]:
        """Who is subscribed to a topic."""
        key = (int(run), int(topic))
        if key not in self._known:
            self._known[key] = self.question.runs[run].clients.entitled(self.topics[topic])
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, int], dict[str, Any]]:
        return {}

    def _homes(self) -> dict[int, set[str]]:
        """Where each stream was published."""
        chosen = (self.kind == PUBLISHED) & (self.stream_of >= 0) & (self.path >= 0)
        found: dict[int, set[str]] = {}
        stream, path = self.stream_of[chosen], self.path[chosen]
        _, example, _ = factors(combined(stream, path))
        for at in example.tolist():
            if self.paths[path[at]]:
                found.setdefault(int(stream[at]), set()).add(self.paths[path[at]][0])
        return found

    def _flows(self) -> None:
        """All pairs of a stream and a client that is entitled to it or got something of it."""
        self.came = np.flatnonzero(self.whole & (self.kind == DELIVERED) & self.share.flows)
        names = {name: number for number, name in enumerate(self.subscribers)}
        entitled = [
            (stream, names.setdefault(client, len(names)), since, granted)
            for stream, client, since, granted in self._entitled()
        ]
        self.subscribers = list(names)
        wanted = np.array(entitled, dtype=np.int64).reshape(-1, 4)
        width = len(self.subscribers) + 1
        flow_came, keys_came = pd.factorize(self.stream_of[self.came] * width + self.subscriber[self.came])
        keys = np.unique(np.concatenate([keys_came, wanted[:, 0] * width + wanted[:, 1]]))
        self.flows = len(keys)
        self.flow_came = np.searchsorted(keys, keys_came)[flow_came]
        self.flow_stream, self.flow_subscriber = keys // width, keys % width
        at = np.searchsorted(keys, wanted[:, 0] * width + wanted[:, 1])
        self.is_entitled = np.zeros(self.flows, dtype=np.bool_)
        self.is_entitled[at] = True
        self.entitled_ns = np.full(self.flows, LONG_AGO, dtype=np.int64)
        self.entitled_ns[at] = wanted[:, 2]
        self.granted = np.zeros(self.flows, dtype=np.int64)
        self.granted[at] = wanted[:, 3]
        # The messages that a flow expects are those of its stream from some one on.
        self.expects_from = self.due_from[self.flow_stream]
        self.expects_until = np.where(self.is_entitled, self.due_from[self.flow_stream + 1], self.expects_from)
        some = self.expects_until > self.expects_from
        first_sent = np.full(self.flows, FOR_EVER, dtype=np.int64)
        first_sent[some] = self.due_sent[self.expects_from[some]]
        for flow in np.flatnonzero(some & (self.entitled_ns > first_sent)).tolist():
            low, high = self.expects_from[flow], self.expects_until[flow]
            self.expects_from[flow] = low + np.searchsorted(self.due_sent[low:high], self.entitled_ns[flow])
        self.expected = self.expects_until - self.expects_from

    # -- what came ---------------------------------------------------------------------------------------------------------

    def _deliveries(self) -> None:
        """Deliveries in order, and what each is."""
        came = self.came
        position = np.where(self.sequence[came] == NONE, self.sent_ns[came], self.sequence[came])
        order = np.lexsort((self.received_ns[came], self.retained[came], self.message_of[came], -position, self.flow_came))
        self.rows = rows = came[order]
        self.flow = flow = self.flow_came[order]
        message = self.message_of[rows]
        begins = np.ones(len(rows), dtype=np.bool_)
        begins[1:] = flow[1:] != flow[:-1]
        self.first = begins.copy()
        self.first[1:] |= message[1:] != message[:-1]
        received = self.received_ns[rows]
        self.latency_ns = received - self.sent_ns[rows]
        self.live = ~self.retained[rows]
        self.sample = self.first & self.live
        bound = self.stream_bound[self.flow_stream[flow]]
        is_late = self.live & (self.latency_ns > bound)
        self.late = self.first & is_late
        self.duplicate = self.live & ~self.first
        self.disordered = self.sample & _overtaken(flow, self.flows, begins, received, self.live)
        # A second copy in time has a first in time beside it, so counting it too divides no episode.
        self.in_time = np.cumsum(self.live & ~is_late)
        self.got = self.first & self.is_entitled[flow] & self.expectable[message]
        self.got &= self.sent_ns[rows] >= self.entitled_ns[flow]
        self.lost = self.expected - count(flow, self.flows, self.got)
        self.bucket = np.where(self.sample, bucket(self.latency_ns), NO_BUCKET)

    def cells(self, *by: Numbers) -> tuple[dict[str, Numbers], Numbers]:
        """Counts and sums of deliveries by some columns and by bucket; and a delivery of each cell."""
        group, example, groups = factors(combined(*by, self.bucket + 1))
        sample = self.sample
        low = np.where(sample, self.latency_ns, FOR_EVER)
        high = np.where(sample, self.latency_ns, LONG_AGO)
        return {
            "bucket": self.bucket[example],
            "deliveries": count(group, groups),
            "samples": count(group, groups, sample),
            "latency_ms": amount(group, groups, np.where(sample, self.latency_ns / 1e6, 0.0)),
            "min_ns": lowest(group, groups, low),
            "max_ns": highest(group, groups, high),
            "late": count(group, groups, self.late),
            "duplicates": count(group, groups, self.duplicate),
            "out_of_order": count(group, groups, self.disordered),
            "bytes": total(group, groups, self.size_bytes[self.rows]),
        }, example


def _overtaken(flow: Numbers, flows: int, begins: Numbers, received: Numbers, live: Numbers) -> Numbers:
    """Whether any row before in the same flow arrived earlier."""
    if not len(flow):
        return np.zeros(0, dtype=np.bool_)
    since = received - received.min()
    if (flows + 1) * (int(since.max()) + 2) > 2**62:
        since = np.unique(received, return_inverse=True)[1]
    # Flows follow each other, each with values below all of those before it: one running minimum serves them all.
    height = int(since.max()) + 2
    floor = (flows - 1 - flow) * height
    smallest = np.minimum.accumulate(floor + np.where(live, since, height - 1))
    before = np.empty_like(smallest)
    before[1:] = smallest[:-1]
    before[begins] = FOR_EVER
    overtaken: Numbers = before < floor + since
    return overtaken


# -- the tables ------------------------------------------------------------------------------------------------------------


def judge(events: Table, question: Question, share: Share = WHOLE) -> dict[str, Table]:
    """The tables of a part: final ones of flows, topics, episodes and losses, and sums for what spans parts."""
    from nearcast.pipeline.evaluation import carrying, losing, topics

    part = Part(events, question, share)
    losses, causes = losing.losses(part)
    flows = _flow_table(part, causes)
    episodes, by_topic = _episodes(part)
    found = {"sums": _sums(part, flows), "time": _time(part, losses)}
    carried = carrying.carried(part)
    sums, cells = topics.sums(part, flows, by_topic, carried)
    if share == WHOLE:
        found["topics"] = topics.table(question, sums, cells)
    else:
        found |= {"topic_sums": sums, "topic_cells": cells}
    if share.flows:
        found |= {"flows": flows, "losses": losses, "episodes": episodes}
        found |= {"sites": _sites(part), "heard": losing.heard(part)}
    if share.messages:
        found |= {"brokers": carrying.brokers(part, carried), "refusals": _refusals(part)}
    return found


def names(part: Part, stream: Numbers, subscriber: Numbers | None = None) -> dict[str, Any]:
    """The columns that say which stream, or which flow."""
    pyarrow = arrow()
    text = pyarrow.string()
    runs = pyarrow.array([run.name for run in part.question.runs], text)
    found = {
        "run": reading.words(part.stream_run[stream], runs),
        "publisher": reading.words(part.stream_publisher[stream], pyarrow.array(part.publishers, text)),
    }
    if subscriber is not None:
        found["subscriber"] = reading.words(subscriber, pyarrow.array(part.subscribers, text))
    number = part.stream_number[stream].astype(np.int32)
    found["stream"] = pyarrow.array(number, mask=number == -(2**31))
    found["topic"] = reading.words(part.stream_topic[stream], pyarrow.array(part.topics, text))
    return found


def optional(values: Numbers, some: Numbers) -> Any:
    """A column with gaps."""
    return arrow().array(values, mask=~some)


def _flow_table(part: Part, causes: dict[str, Numbers]) -> Table:
    flow, flows = part.flow, part.flows
    samples = count(flow, flows, part.sample)
    latency = np.bincount(flow, np.where(part.sample, part.latency_ns / 1e6, 0.0), flows)
    bound = part.stream_bound[part.flow_stream]
    bounded = bound != FOR_EVER
    got_late = count(flow, flows, part.late & part.got)
    judged = bounded & part.is_entitled
    return arrow().table(
        {
            **names(part, part.flow_stream, part.flow_subscriber),
            "entitled": part.is_entitled,
            "expected": part.expected,
            "deliveries": count(flow, flows),
            "samples": samples,
            "late": count(flow, flows, part.late),
            "duplicates": count(flow, flows, part.duplicate),
            "out_of_order": count(flow, flows, part.disordered),
            "retained": count(flow, flows, ~part.live),
            "bytes": total(flow, flows, part.size_bytes[part.rows]),
            "got": count(flow, flows, part.got),
            "got_late": got_late,
            "lost": part.lost,
            **{f"lost_{cause}": causes[cause] for cause in CAUSES},
            "mean_ms": optional(latency / np.maximum(samples, 1), samples > 0),
            "max_ms": optional(highest(flow, flows, np.where(part.sample, part.latency_ns, LONG_AGO)) / 1e6, samples > 0),
            "bound_ms": optional(bound / 1e6, bounded),
            "violations": optional(got_late + part.lost, judged),
            "bounded": optional(part.expected, judged),
        }
    )


def _episodes(part: Part) -> tuple[Table, dict[str, Numbers]]:
    """Each time that a flow was above its bound without a break; and, by stream, how many, how long, the longest."""
    at = np.flatnonzero(part.late)
    flow, rows = part.flow[at], part.rows[at]
    group, example, groups = factors(combined(flow, part.in_time[at]))
    stream = part.flow_stream[flow[example]]
    bound = part.stream_bound[stream]
    begin = lowest(group, groups, part.sent_ns[rows]) + bound
    end = highest(group, groups, part.received_ns[rows])
    starts = np.array([run.start_ns for run in part.question.runs])[part.stream_run[stream]]
    duration = (end - begin) / 1e6
    table = arrow().table(
        {
            **names(part, stream, part.flow_subscriber[flow[example]]),
            "bound_ms": bound / 1e6,
            "begin_ns": begin,
            "end_ns": end,
            "begin_s": (begin - starts) / 1e9,
            "duration_ms": duration,
            "messages": count(group, groups),
            "worst_ms": highest(group, groups, part.latency_ns[at]) / 1e6,
        }
    )
    longest = np.zeros(part.streams)
    np.maximum.at(longest, stream, duration)
    return table, {
        "episodes": count(stream, part.streams),
        "violation_ms": amount(stream, part.streams, duration),
        "longest_ms": longest,
    }


def _sums(part: Part, flows: Table) -> Table:
    """By run: counts of events and of flows; ``mixed`` names a publisher with more messages than numbers for them."""
    runs = len(part.question.runs)
    run_of = part.stream_run[part.flow_stream]
    found: dict[str, Any] = {"run_code": np.arange(runs)}
    for number, kind in enumerate(reading.MESSAGE_KINDS):
        chosen = (part.kind == number) & part.share.messages
        found[kind] = count(part.run, runs, chosen)
        found[f"{kind}_bytes"] = total(part.run[chosen], runs, part.size_bytes[chosen])
    found["late_to_send"] = count(part.run, runs, part.late_to_send & (part.kind == PUBLISHED) & part.share.messages)
    incomplete = ~part.whole & np.isin(part.kind, (PUBLISHED, DELIVERED)) & part.share.messages
    found["incomplete"] = count(part.run, runs, incomplete)
    found["flows"] = count(run_of, runs)
    for name in (
        *("expected", "got", "late", "lost", *(f"lost_{cause}" for cause in CAUSES)),
        *("duplicates", "out_of_order", "retained", "violations", "bounded"),
    ):
        found[name] = total(run_of, runs, flows[name].fill_null(0).to_numpy())
    found["judged"] = count(run_of, runs, flows["violations"].is_valid().to_numpy())
    found["unexpected"] = total(run_of, runs, np.where(part.is_entitled, 0, flows["deliveries"].to_numpy()))
    numbered = np.flatnonzero((part.kind == PUBLISHED) & (part.stream_of >= 0) & (part.sequence != NONE))
    stream, sequence = part.stream_of[numbered], part.sequence[numbered]
    numbers = highest(stream, part.streams, sequence) - lowest(stream, part.streams, sequence) + 1
    mixed: list[str | None] = [None] * runs
    for each in np.flatnonzero(count(stream, part.streams) > np.maximum(numbers, 0)).tolist():
        if np.any(stream == each):
            mixed[part.stream_run[each]] = part.publishers[part.stream_publisher[each]]
    return arrow().table(found | {"mixed": arrow().array(mixed, arrow().string())})


def _slot(part: Part, run: Numbers, at_ns: Numbers) -> Numbers:
    starts = np.array([each.start_ns for each in part.question.runs], dtype=np.int64)
    return np.maximum(0, (at_ns - starts[run]) // part.question.slot_ns)


def _time(part: Part, losses: Table) -> Table:
    """By run, piece of time and bucket: deliveries; by run and piece of time: what was published and lost."""
    pyarrow = arrow()
    run = part.run[part.rows]
    slot = _slot(part, run, part.received_ns[part.rows])
    cells, at = part.cells(run, slot)
    came = pyarrow.table({"run_code": run[at], "slot": slot[at], **cells})
    sent = np.flatnonzero((part.kind == PUBLISHED) & (part.sent_ns != NONE) & part.share.messages)
    run, slot = part.run[sent], _slot(part, part.run[sent], part.sent_ns[sent])
    group, example, groups = factors(combined(run, slot))
    published = pyarrow.table(
        {
            "run_code": run[example],
            "slot": slot[example],
            "published": count(group, groups),
            "published_bytes": total(group, groups, part.size_bytes[sent]),
        }
    )
    numbers = {each.name: number for number, each in enumerate(part.question.runs)}
    run = np.array([numbers[name] for name in losses["run"].to_pylist()], dtype=np.int32)
    slot = _slot(part, run, losses["sent_ns"].to_numpy())
    group, example, groups = factors(combined(run, slot))
    lost = pyarrow.table({"run_code": run[example], "slot": slot[example], "lost": count(group, groups)})
    return pyarrow.concat_tables([came, published, lost], promote_options="permissive")


def _sites(part: Part) -> Table:
    """By run, pair of sites and bucket."""
    run = part.run[part.rows]
    one = _site(part, part.publisher[part.rows], part.publishers, part.sent_ns[part.rows])
    other = _site(part, part.flow_subscriber[part.flow], part.subscribers, part.received_ns[part.rows])
    pair = np.where((one < 0) | (other < 0), -1, one * SITE_LIMIT + other)
    cells, at = part.cells(run, pair)
    table = arrow().table({"run_code": run[at], "pair": pair[at], **cells})
    return table.filter(pair[at] >= 0)


def _site(part: Part, client: Numbers, clients: list[str], at_ns: Numbers) -> Numbers:
    """Where each client was at each time; -1 where that is not known."""
    run = part.run[part.rows]
    group, example, groups = factors(combined(run, client))
    stays = [part.question.runs[run[at]].places.get(clients[client[at]], []) for at in example.tolist()]
    sites = np.array([stay[0][2] if stay else -1 for stay in stays] or [-1], dtype=np.int64)[group] if groups else group
    moving = np.array([len(stay) > 1 for stay in stays], dtype=np.bool_)
    if moving.any():
        rows = np.flatnonzero(moving[group])
        rows = rows[np.argsort(group[rows], kind="stable")]
        ends = np.searchsorted(group[rows], np.arange(groups + 1))
        for each in np.flatnonzero(moving).tolist():
            mine = rows[ends[each] : ends[each + 1]]
            begins = np.array([from_ns for from_ns, _, _ in stays[each]], dtype=np.int64)
            codes = np.array([-1] + [site for _, _, site in stays[each]], dtype=np.int64)
            sites[mine] = codes[np.searchsorted(begins, at_ns[mine], side="right")]
    return sites


def _refusals(part: Part) -> Table:
    pyarrow = arrow()
    chosen = np.flatnonzero(np.isin(part.kind, (REFUSED, SKIPPED)))
    run, kind, reason = part.run[chosen], part.kind[chosen], part.reason[chosen]
    group, example, groups = factors(combined(run, kind, reason))
    return pyarrow.table(
        {
            "run_code": run[example],
            "kind": pyarrow.array([reading.MESSAGE_KINDS[each] for each in kind[example]], pyarrow.string()),
            "reason": reading.words(reason[example], part.reasons),
            "events": count(group, groups),
        }
    )
