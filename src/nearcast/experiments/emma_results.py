"""What came of a run of ``emma``: figures, tables, plots and bars out of recorded events, samples and the controller's moves.

Owns the definitions. An event's time is until the next one; *after* it is the second half of that time, *before* it is the
same of the event before. Latency is *stable* once its mean over a second stays within 10 % (at least 2 ms) of the level after
the event. Gaps are the longest time without a message in a stream around a move.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from nearcast.emulation.wan import Wan
from nearcast.errors import EmulationError
from nearcast.experiments import plots
from nearcast.experiments.emma import EVENTS, GAP_MS, REGIONS, SPACING_S, EmmaParameters, stream_topic
from nearcast.experiments.flows import Deliveries, Flows, binned_mean_ms, longest_gap, stable_after_s
from nearcast.experiments.nodes import MAKER
from nearcast.experiments.run import Run
from nearcast.experiments.sampling import rates, read_samples
from nearcast.scenario.assembly import build_network
from nearcast.scenario.expansion import expand_brokers, expand_gateways, topology_of
from nearcast.scenario.scenario import Scenario

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOPICS = ("global", *REGIONS.values())
REGIONAL = (6, 7)
"""After these events every region has its broker, and clients have had time to go there."""

STABLE_SHARE = 0.1
STABLE_MS = 2.0
BIN_S = 1.0
"""What latency is averaged over, as in the paper, when events are a minute apart."""

LEAST_BIN_S = 0.5

AROUND_S = 0.3
"""How long before a move is ordered and after it ended a gap still counts as its."""

STOPPING = "stopping"
"""Why clients were moved when no controller ordered it: their broker stops."""

STOPPING_S = 2.0
"""How long a broker that stops may take to hand its clients over, to be counted as that."""

MOST_MOVES_SHOWN = 40


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway's clients, moved; times are seconds after the start of the scenario."""

    gateway: str
    origin: str
    target: str
    kind: str
    state: str
    clients: int
    from_s: float
    until_s: float
    detail: str = ""


class MoveView(msgspec.Struct):
    """What the controller says of a move."""

    gateway: str
    origin: str | None
    target: str
    kind: str
    state: str
    moved_clients: int
    created_at: float
    ordered_at: float | None
    ended_at: float | None
    detail: str


class _NodeView(msgspec.Struct):
    """What the controller says of a node."""

    name: str
    role: str
    home: str


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller knows at the end."""

    moves: list[MoveView]
    """Oldest first; times are those of the wall clock."""

    brokers: dict[str, str]
    """Which broker each gateway uses."""


async def ask(wan: Wan, scenario: Scenario) -> Told:
    """The controller's moves, and where everybody was in the end."""
    if scenario.controller is None:
        return Told(moves=[], brokers={})
    secret = Path((await wan.status()).output) / "data" / MAKER / "secret"
    base = f"http://127.0.0.1:{scenario.controller.http_port}/api/v1"
    answers = []
    for what in ("moves?limit=10000", "nodes"):
        command = ["python", "-P", "-m", "nearcast.experiments.asking", f"{base}/{what}", str(secret)]
        answers.append((await wan.run(scenario.controller.host, command, timeout_s=20)).check().output)
    try:
        moves = msgspec.json.decode(answers[0], type=list[MoveView])
        nodes = msgspec.json.decode(answers[1], type=list[_NodeView])
    except msgspec.DecodeError as error:
        raise EmulationError(f"the controller's answer is not as expected: {error}") from error
    return Told(moves=moves[::-1], brokers={node.name: node.home for node in nodes if node.role == "gateway"})


def hand_overs(scenario: Scenario, moves: Sequence[Moved], brokers: Mapping[str, str]) -> list[Moved]:
    """Moves that no controller ordered: a broker that stops asks gateways to take their clients elsewhere. Where to is known
    from the next move from there, or from where they are at the end."""
    found = []
    for broker in expand_brokers(scenario):
        if broker.stop_s is None:
            continue
        for gateway in (each.name for each in expand_gateways(scenario)):
            own = [move for move in moves if move.gateway == gateway and move.state == "done"]
            before = [move for move in own if move.until_s <= broker.stop_s]
            later = [move for move in own if move.from_s > broker.stop_s]
            target = later[0].origin if later else brokers.get(gateway, "")
            if before and before[-1].target == broker.name and target not in ("", broker.name):
                found.append(
                    Moved(
                        gateway=gateway,
                        origin=broker.name,
                        target=target,
                        kind=STOPPING,
                        state="done",
                        clients=before[-1].clients,
                        from_s=broker.stop_s,
                        until_s=broker.stop_s + STOPPING_S,
                    )
                )
    return found


def placed_in_time(views: Sequence[MoveView], start_ns: int) -> list[Moved]:
    """Moves in the scenario's time; those before its beginning are none of it."""
    start = start_ns / 1e9
    found = []
    for view in views:
        ended = view.ended_at if view.ended_at is not None else view.created_at
        if ended >= start:
            found.append(
                Moved(
                    gateway=view.gateway,
                    origin=view.origin or "",
                    target=view.target,
                    kind=view.kind,
                    state=view.state,
                    clients=view.moved_clients,
                    from_s=round((view.ordered_at or view.created_at) - start, 3),
                    until_s=round(ended - start, 3),
                    detail=view.detail,
                )
            )
    return found


def simulated(figures: dict[str, Any]) -> Told:
    """The same from the simulator, whose clock begins at 0."""
    return msgspec.convert({"moves": figures.get("moves", []), "brokers": figures.get("gateway_brokers", {})}, Told)


def evaluate(run: Run[EmmaParameters], scenario: Scenario, told: Told, start_ns: int) -> None:
    """Everything, from what was recorded."""
    flows = Flows(run.events("emma"), scenario, start_ns)
    moves = placed_in_time(told.moves, start_ns)
    moves = sorted([*moves, *hand_overs(scenario, moves, told.brokers)], key=lambda move: move.from_s)
    run.figure("moves", moves)
    run.figure("brokers_at_the_end", told.brokers)
    topics = {topic: flows.deliveries(topic) for topic in TOPICS}
    _delivery(run, flows)
    _latency(run, scenario, topics)
    _throughput(run, scenario, start_ns)
    _interruptions(run, scenario, flows, moves)
    _draw(run, topics)


# -- lost and duplicated ------------------------------------------------------------------------------------------------


def _delivery(run: Run[EmmaParameters], flows: Flows) -> None:
    counts = flows.counts()
    rows: list[list[str | int]] = [[f"QoS {qos}", *count] for qos, count in counts.items() if count.published]
    run.table("messages", ["", "published", "expected", "delivered", "lost", "duplicated"], rows)
    run.figure("delivery", {f"qos_{qos}": count._asdict() for qos, count in counts.items()})
    run.figure("skipped", flows.skipped)
    run.figure("refused", flows.refused)
    for qos in sorted({*run.parameters.qos, run.parameters.stream_qos}):
        run.measured(f"lost_qos_{qos}", counts[qos].lost)
        run.measured(f"duplicated_qos_{qos}", counts[qos].duplicated)
    losses = flows.losses()
    if losses:
        run.figure("first_losses", [loss._asdict() for loss in losses])
        first = losses[0]
        run.note(
            f"the first loss: what {first.publisher} sent after {first.sent_s:.3f} s, to {first.subscriber} (QoS {first.qos})"
        )
    run.measured("out_of_order", flows.out_of_order())
    run.figure("disconnections", flows.disconnections[:100])
    run.measured("connections_lost", len(flows.disconnections))
    if flows.unknown:
        run.note(f"{flows.unknown} deliveries are of messages that no publisher recorded")


# -- latency ------------------------------------------------------------------------------------------------------------


def _latency(run: Run[EmmaParameters], scenario: Scenario, topics: dict[str, Deliveries]) -> None:
    parameters = run.parameters
    width_s = _bin_s(parameters)
    rows: list[list[str | float | None]] = []
    for number, event in enumerate(EVENTS, start=1):
        for topic, deliveries in topics.items():
            after = _mean_after(deliveries, parameters, number)
            if after is None:
                continue
            stable = stable_after_s(
                deliveries,
                parameters.event_s(number),
                parameters.event_s(number + 1),
                width_s,
                after,
                max(STABLE_MS, STABLE_SHARE * after),
            )
            rows.append([f"{number} {event}", topic, _mean_after(deliveries, parameters, number - 1), after, stable])
    run.table("latency by topic", ["event", "topic", "before (ms)", "after (ms)", "stable after (s)"], rows)
    columns = ("event", "topic", "before_ms", "after_ms", "stable_after_s")
    run.figure("latency", [dict(zip(columns, row, strict=True)) for row in rows])
    excess: dict[str, float] = {}
    for region in REGIONS.values():
        found = [topics[region].sent_between(*_after(parameters, number)).latency_ms for number in REGIONAL]
        latencies = np.concatenate(found)
        if len(latencies):
            excess[region] = round(float(latencies.mean()) - imposed_ms(scenario, region), 3)
            run.figure(
                f"intra_region_{region}_ms",
                {
                    "mean": latencies.mean(),
                    "p50": np.median(latencies),
                    "p99": np.quantile(latencies, 0.99),
                    "count": len(latencies),
                },
            )
    run.figure("intra_region_excess_ms", excess)
    run.measured("intra_region_excess_ms", max(excess.values()) if len(excess) == len(REGIONS) else None)


def _bin_s(parameters: EmmaParameters) -> float:
    return max(LEAST_BIN_S, BIN_S * parameters.spacing_s / SPACING_S)


def _after(parameters: EmmaParameters, number: int) -> tuple[float, float]:
    begin_s, end_s = parameters.event_s(number), parameters.event_s(number + 1)
    return (begin_s + end_s) / 2, end_s


def _mean_after(deliveries: Deliveries, parameters: EmmaParameters, number: int) -> float | None:
    if number < 1:
        return None
    found = deliveries.sent_between(*_after(parameters, number)).latency_ms
    return round(float(found.mean()), 3) if len(found) else None


def imposed_ms(scenario: Scenario, region: str) -> float:
    """What the network alone makes a message take from a client of a region to another over the region's broker; gateways are
    on the clients' hosts. The least over its brokers: a message that takes two of them takes longer."""
    topology = topology_of(scenario)
    network, names = build_network(topology, random.Random(0))
    sites = {name: host.site for host in topology.hosts for name in host.names()}
    index = {name: number for number, name in enumerate(names)}
    clients = [name for name in names if sites[name] == region and name.startswith("clients-")]
    brokers = [broker.host for broker in expand_brokers(scenario) if sites[broker.host] == region]
    return min(
        network.one_way_ms(index[client], index[broker]) + network.one_way_ms(index[broker], index[client])
        for client in clients
        for broker in brokers
    )


def round_trip_ms(scenario: Scenario, one: str, other: str) -> float:
    """Between two brokers, by their names."""
    network, names = build_network(topology_of(scenario), random.Random(0))
    hosts = {broker.name: names.index(broker.host) for broker in expand_brokers(scenario)}
    if one not in hosts or other not in hosts:
        return 0.0
    return network.one_way_ms(hosts[one], hosts[other]) + network.one_way_ms(hosts[other], hosts[one])


# -- throughput ---------------------------------------------------------------------------------------------------------


def _throughput(run: Run[EmmaParameters], scenario: Scenario, start_ns: int) -> None:
    """Messages per second in and out of each broker after each event; nothing where nobody samples, as in the simulator."""
    parameters = run.parameters
    series: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for broker in expand_brokers(scenario):
        samples = read_samples(run.folder / "samples" / f"{broker.name}.jsonl")
        found = {}
        for way, metric in (("in", "nearcast_messages_received_total"), ("out", "nearcast_messages_sent_total")):
            points = [((at_ns - start_ns) / 1e9, rate) for at_ns, rate in rates(samples, metric)]
            found[way] = ([at_s for at_s, _ in points], [rate for _, rate in points])
        series[broker.name] = found
    if not any(at_s for found in series.values() for at_s, _ in found.values()):
        return
    rows: list[list[str]] = []
    figures: dict[str, dict[str, list[float | None]]] = {}
    for name, found in series.items():
        means = {
            way: [_mean_in(points, _after(parameters, number)) for number in range(1, len(EVENTS) + 1)]
            for way, points in found.items()
        }
        figures[name] = means
        cells = [
            "-" if into is None or out is None else f"{into:.0f}/{out:.0f}"
            for into, out in zip(means["in"], means["out"], strict=True)
        ]
        rows.append([name, *cells])
    run.table("messages per second in/out of brokers, after event", ["broker", *map(str, range(1, len(EVENTS) + 1))], rows)
    run.figure("throughput_per_second", figures)
    for way, title in (("in", "received"), ("out", "sent")):
        with run.plot(f"throughput-{way}", f"Messages {title} by brokers", "time (s)", "messages per second") as axes:
            for name, found in series.items():
                axes.plot(*found[way], label=name)
            _mark_events(axes, parameters)


def _mean_in(points: tuple[list[float], list[float]], span: tuple[float, float]) -> float | None:
    values = [rate for at_s, rate in zip(*points, strict=True) if span[0] <= at_s < span[1]]
    return round(sum(values) / len(values), 2) if values else None


# -- moves --------------------------------------------------------------------------------------------------------------


def _interruptions(run: Run[EmmaParameters], scenario: Scenario, flows: Flows, moves: Sequence[Moved]) -> None:
    """The gap in the stream of each region around each move of the gateway that its subscriber uses."""
    streams = {f"gateway-global-{word}": flows.deliveries(stream_topic(region)) for word, region in REGIONS.items()}
    rows: list[list[str | float | None]] = []
    ratios: list[float] = []
    for move in moves:
        stream = streams.get(move.gateway)
        if stream is None or move.kind == "first" or not move.clients:
            continue
        gap = longest_gap(stream.received_s, move.from_s - AROUND_S, move.until_s + AROUND_S)
        if gap is None:
            continue
        allowed_ms = 2 * round_trip_ms(scenario, move.origin, move.target) + GAP_MS
        ratios.append(gap[1] * 1e3 / allowed_ms)
        rows.append(
            [
                round(move.from_s, 2),
                move.gateway.removeprefix("gateway-"),
                move.origin,
                move.target,
                move.kind,
                move.clients,
                None if move.kind == STOPPING else round((move.until_s - move.from_s) * 1e3),
                round(gap[1] * 1e3, 1),
                round(allowed_ms, 1),
            ]
        )
    columns = ["at (s)", "gateway", "from", "to", "why", "clients", "took (ms)", "gap (ms)", "allowed (ms)"]
    run.table("moves that a stream of 100 messages a second shows", columns, rows[:MOST_MOVES_SHOWN])
    run.figure("interruptions", [dict(zip(columns, row, strict=True)) for row in rows])
    run.measured("moves", sum(move.clients for move in moves if move.kind != "first"))
    run.measured("interruption_ratio", round(max(ratios), 3) if ratios else None)
    failed = [move for move in moves if move.state == "failed"]
    if failed:
        run.note(f"{len(failed)} of {len(moves)} moves failed, the first because: {failed[0].detail or 'nobody said'}")


# -- plots --------------------------------------------------------------------------------------------------------------


def _draw(run: Run[EmmaParameters], topics: dict[str, Deliveries]) -> None:
    parameters = run.parameters
    width_s = _bin_s(parameters)
    with run.plot("latency", "Mean latency by topic (figure 5b)", "time (s)", "latency (ms)") as axes:
        for topic, deliveries in topics.items():
            axes.plot(*binned_mean_ms(deliveries, width_s, parameters.duration_s), label=topic)
        _mark_events(axes, parameters)
    with run.plot("intra-region", "Latency while both regions have brokers (figure 5c)", "time (s)", "latency (ms)") as axes:
        for region in REGIONS.values():
            middles, means = binned_mean_ms(topics[region], width_s, parameters.duration_s)
            inside = (middles >= parameters.event_s(5)) & (middles < parameters.event_s(8))
            axes.plot(middles[inside], means[inside], label=region)
        axes.set_ylim(bottom=0.0)
    with run.plot("global", "Latency of `global` by subscriber (figure 6)", "time (s)", "latency (ms)") as axes:
        for number, subscriber in enumerate(("global-sub-east", "global-sub-west", "global-sub-central")):
            found = topics["global"].only(topics["global"].subscriber == subscriber)
            middles, means = binned_mean_ms(found, width_s, parameters.duration_s)
            axes.plot(middles, means, label=subscriber, color=plots.COLOURS[number])
        _mark_events(axes, parameters)


def _mark_events(axes: Axes, parameters: EmmaParameters) -> None:
    for number in range(1, len(EVENTS) + 1):
        axes.axvline(parameters.event_s(number), linestyle=":", color="#888888", linewidth=0.8)
        axes.text(parameters.event_s(number), 1.0, str(number), transform=axes.get_xaxis_transform(), ha="center", va="bottom")
