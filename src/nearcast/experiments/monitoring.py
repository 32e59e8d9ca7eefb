"""``monitoring``: what telemetry costs, against the number of topics and of clients in each (ePulsar §5.6, figure 6).

One broker owns the topics; half of each topic's clients publish, half subscribe, through gateways of the ``mmog`` topology of
:mod:`nearcast.experiments.selection_runs`, whose coordinates the shipped agent found. What it reports is gathered, summarised
and encoded by the functions of the broker (:mod:`nearcast.fabric.telemetry`), and counted as MQTT carries it. *Centroids* is
what brokers report; *AllPairs* is every client's coordinate instead (``telemetry.raw``).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from nearcast.experiments import plots
from nearcast.experiments.experiment import Bar, Experiment, Parameters, at_least, at_most
from nearcast.experiments.run import Run

NAMES = ("centroids", "AllPairs")
BROKER = "broker-0"
FLAT = 1.1
"""What is sent for a topic may differ by so much between few clients and many: numbers have more or fewer digits."""
SAVED = 0.2
"""Of AllPairs' bytes per client, the least that is saved: with two clients, a crowd of one is as large as the client."""


class MonitoringParameters(Parameters, frozen=True, kw_only=True):
    """``scale`` multiplies the topics; nothing takes time here, so ``duration_s`` has no meaning."""

    topics: tuple[int, ...] = (1, 4, 16, 64, 256, 1_024, 4_096)
    clients: tuple[int, ...] = (2, 8, 32, 128)
    """Of each topic."""

    interval_s: float = 5.0
    """Between two reports."""

    gateways: int = 10
    """Through which clients come; with more there are more different coordinates, and none more is sent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.1 <= self.interval_s <= 3_600, "interval_s", "must be between 0.1 and 3,600")
        self.require(2 <= self.gateways <= 100, "gateways", "must be between 2 and 100")
        for name, most in (("topics", 1_000_000), ("clients", 100_000)):
            values = getattr(self, name)
            rising = list(values) == sorted(set(values)) and len(values) >= 2
            self.require(rising and values[0] >= 1 and values[-1] <= most, name, f"must be two or more, rising, to {most:,}")
        self.require(self.clients[0] >= 2, "clients", "must be 2 or more: one publishes, one subscribes")
        self.require(self.counts[-1] * self.clients[-1] <= 10_000_000, "topics", "times clients are more than 10 million")

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(sorted({max(1, round(count * self.scale)) for count in self.topics}))


class Monitoring(Experiment[MonitoringParameters]):
    name = "monitoring"
    summary = "Bytes a second of telemetry over topics and clients, by centroids and by AllPairs (ePulsar, figure 6)."
    parameters = MonitoringParameters
    quick: ClassVar[Mapping[str, Any]] = {"topics": (1, 16, 256)}

    def bars(self, parameters: MonitoringParameters) -> Sequence[Bar]:
        few, many = parameters.clients[0], parameters.clients[-1]
        return [
            at_most("bytes_ratio_over_clients", FLAT, f"per topic, {many} clients against {few}; the most of all topics"),
            at_least(
                "saved_factor", SAVED * many / 2, f"AllPairs' bytes by ours, with {many} clients; the least of all topics"
            ),
            at_most("bytes_per_topic", 1_000.0, "of one report, with the most clients and topics"),
        ]

    def check(self, parameters: MonitoringParameters) -> None:
        from nearcast.scenario.places import find_city

        plots.require()
        find_city("New York, US")

    def run(self, run: Run[MonitoringParameters]) -> None:
        from nearcast.experiments.selection_runs import Asked, measure

        parameters = run.parameters
        run.step(f"coordinates of a broker and {parameters.gateways} gateways")
        places = measure(Asked(topology=f"mmog-{parameters.gateways}", topology_seed=parameters.seed)).places
        owner, *gateways = [places.place(row) for row in (0, *range(parameters.gateways, 2 * parameters.gateways))]
        found: dict[tuple[str, int, int], float] = {}
        for clients in parameters.clients:
            for topics in parameters.counts:
                run.step(f"{topics:,} topics of {clients} clients")
                for name, size in zip(NAMES, report_bytes(owner, gateways, topics, clients, parameters.seed), strict=True):
                    found[(name, topics, clients)] = size / parameters.interval_s
        self._tell(run, found)

    def _tell(self, run: Run[MonitoringParameters], found: Mapping[tuple[str, int, int], float]) -> None:
        parameters = run.parameters
        few, many = parameters.clients[0], parameters.clients[-1]
        rows: list[list[str | float | None]] = []
        for topics in parameters.counts:
            for clients in parameters.clients:
                ours, theirs = (found[(name, topics, clients)] for name in NAMES)
                rows.append([topics, clients, round(ours / 1000, 3), round(theirs / 1000, 3), round(theirs / ours, 2)])
        columns = ["topics", "clients of each", *(f"{name} kB/s" for name in NAMES), "factor"]
        run.table("Telemetry of one broker", columns, rows)
        run.figure("kilobytes_per_second", {"columns": columns, "rows": rows})
        run.measured(
            "bytes_ratio_over_clients",
            round(max(found[(NAMES[0], topics, many)] / found[(NAMES[0], topics, few)] for topics in parameters.counts), 4),
        )
        run.measured(
            "saved_factor",
            round(min(found[(NAMES[1], topics, many)] / found[(NAMES[0], topics, many)] for topics in parameters.counts), 2),
        )
        most = parameters.counts[-1]
        run.measured("bytes_per_topic", round(found[(NAMES[0], most, many)] * parameters.interval_s / most, 1))
        with run.plot("monitoring", "Telemetry of one broker", "topics", "kB/s") as axes:
            for name, style in zip(NAMES, ("-", "--"), strict=True):
                for number, clients in enumerate(parameters.clients):
                    axes.plot(
                        parameters.counts,
                        [found[(name, topics, clients)] / 1000 for topics in parameters.counts],
                        style,
                        marker="o",
                        color=plots.COLOURS[number % len(plots.COLOURS)],
                        label=f"{name}, {clients} clients",
                    )
            axes.set_xscale("log")
            axes.set_yscale("log")


def report_bytes(owner: Any, gateways: Sequence[Any], topics: int, clients: int, seed: int) -> tuple[int, int]:
    """Bytes of one round of reports as MQTT messages: summaries, and every client's place instead. Coordinates are
    :class:`nearcast.telemetry.records.Place`."""
    from nearcast.fabric.crowds import DIGITS, Anchor, Gathering
    from nearcast.fabric.telemetry import PART_BYTES, PREFIX, Writer, around, crowd_of
    from nearcast.telemetry.records import ClientReport, ClientSample, Place, TopicReport, TopicSummary
    from nearcast.telemetry.summaries import CONSUMER, PRODUCER, coordinate_of

    rng = random.Random(f"{seed}/{topics}/{clients}")
    at_owner = coordinate_of(owner)
    anchors = [Anchor(f"gateway-{number}", coordinate_of(place), False) for number, place in enumerate(gateways)]
    room = PART_BYTES - 256
    summaries, samples = Writer(), Writer()
    for number in range(topics):
        name = f"mmog/avatar/{number}"
        crowds = (Gathering(), Gathering())
        for client in range(clients):
            role = PRODUCER if client % 2 == 0 else CONSUMER
            anchor, latency_ms = rng.choice(anchors), rng.uniform(1.0, 20.0)
            crowds[role].add(anchor, latency_ms)
            place = Place(
                anchor.vector,
                round(anchor.coordinate.height + latency_ms, DIGITS),
                round(anchor.coordinate.adjustment, DIGITS),
                round(anchor.coordinate.error, DIGITS),
            )
            samples.add(ClientSample(name, f"client-{number}-{client}", role, place), room)
        for crowd in crowds:
            crowd.sum_up(BROKER, at_owner, False)
        rate = round(rng.uniform(1.0, 300.0), DIGITS)
        summaries.add(
            TopicSummary(
                topic=name,
                epoch=1_790_000_000_000_000 + number,
                owner=BROKER,
                producers=crowd_of(crowds[PRODUCER]),
                consumers=crowd_of(crowds[CONSUMER]),
                in_per_second=rate,
                out_per_second=round(rate * (clients // 2), DIGITS),
                bytes_per_second=round(rate * 998, DIGITS),
                max_latency_ms=100.0,
            ),
            room,
        )
    time_s, round_number = 1_790_000_000.123, 100_000
    sizes = []
    for kind, written in ((TopicReport, summaries), (ClientReport, samples)):
        topic = f"{PREFIX}{'topics' if kind is TopicReport else 'clients'}/{BROKER}"
        total = 0
        for part, records in enumerate(written.parts):
            payload = around(kind(BROKER, time_s, round_number, part, len(written.parts), []), records)
            total += 1 + 3 + 2 + len(topic) + len(payload)  # PUBLISH at QoS 0: type, length, topic, payload
        sizes.append(total)
    return sizes[0], sizes[1]
