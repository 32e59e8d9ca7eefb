"""``coordinates``: how well network coordinates tell round-trip times that nobody measured (ePulsar §5.3, figure 3).

The shipped gossip and the shipped agent run at every node, in virtual time (:mod:`nearcast.simulation.agents`): on the paper's
star topology, on a generated matrix like that of the Internet, once more there with noise and with an infected node, or on any
matrix that is given. Beside them, on the same matrix, Vivaldi as published. What the agents cost is measured on the way.
"""

from __future__ import annotations

import math
import random
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from nearcast.coordinates import topologies
from nearcast.coordinates.coordinate import Coordinate
from nearcast.experiments import plots
from nearcast.experiments.coordinates_model import (
    Accuracy,
    Matrix,
    accuracy,
    published_vivaldi,
    read_matrix,
    relative_errors,
)
from nearcast.experiments.experiment import Bar, Experiment, Parameters, at_most
from nearcast.experiments.run import Run
from nearcast.membership.gossip import Gossip
from nearcast.simulation.agents import Agents, Noise

STAR_ERROR_MS = 3.5
STAR_ERROR = 0.06
INTERNET_ERROR = 0.11
INFECTED_RATIO = 1.1
CPU_SHARE = 0.01
MEMORY_MB = 15.0
STAR_RTT_MS = 100.0
EXACT_ERROR = 0.01
"""Where the space has room for a matrix, both find it, and what is left is noise: nobody has to be nearer than this."""

KNOWN_S = 30.0
PUBLISHED_SAMPLES = 500
"""A node, for Vivaldi as published: more do not help it."""

COLUMNS = (
    "nodes",
    "median error",
    "p90",
    "p95",
    "mean (ms)",
    "median (ms)",
    "p90 (ms)",
    "closest broker",
    "added (ms)",
)


class CoordinatesParameters(Parameters, frozen=True, kw_only=True):
    """``scale`` multiplies the nodes of the generated Internet; ``duration_s``, of virtual time, is what the agents have."""

    duration_s: float = 600.0
    matrix: str = ""
    """A file of round-trip times to run on instead: ``.npz`` with the key ``rtt_ms``, or CSV; NaN where one is not known."""

    star_nodes: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128)
    star_rtts_ms: tuple[float, ...] = (10.0, 50.0, 100.0, 200.0)
    """Tried with the middle one of the numbers of nodes."""

    nodes: int = 128
    """Of the generated Internet; of a matrix that has more, so many are drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (*self.star_nodes, self.nodes)
        self.require(all(2 <= nodes <= 4_096 for nodes in sizes), "nodes", "and `star_nodes` must be between 2 and 4,096")
        self.require(bool(self.star_nodes), "star_nodes", "must not be empty")
        self.require(all(0.1 <= rtt <= 5_000 for rtt in self.star_rtts_ms), "star_rtts_ms", "must be between 0.1 and 5,000")


class Coordinates(Experiment[CoordinatesParameters]):
    name = "coordinates"
    summary = (
        "How well network coordinates tell latencies: star, Internet-like or any matrix; with noise and a liar; the cost."
    )
    parameters = CoordinatesParameters
    quick: ClassVar[Mapping[str, Any]] = {
        "duration_s": 100.0,
        "star_nodes": (2, 16, 48),
        "star_rtts_ms": (10.0, 200.0),
        "nodes": 48,
    }

    def bars(self, parameters: CoordinatesParameters) -> Sequence[Bar]:
        better = at_most(
            "error_against_published", 1.0, "median relative error, as a share of that of Vivaldi as published (or 1 %)"
        )
        if parameters.matrix:
            return [better]
        return [
            at_most("star_error_ms", STAR_ERROR_MS, "mean error of a pair on stars of 100 ms, the worst of all sizes"),
            at_most("star_error", STAR_ERROR, "mean relative error of a pair on a star, the worst of all sizes and times"),
            at_most("internet_median_error", INTERNET_ERROR, "median relative error on the Internet-like matrix"),
            better,
            at_most(
                "infected_error_ratio", INFECTED_RATIO, "median error of honest nodes beside a liar, as a share of without"
            ),
            at_most("agent_cpu_share", CPU_SHARE, "of one core, for one agent, the simulator's own work included"),
            at_most("agent_memory_mb", MEMORY_MB, "that an agent keeps, once it knows all others"),
        ]

    def check(self, parameters: CoordinatesParameters) -> None:
        plots.require()
        if parameters.matrix:
            read_matrix(Path(parameters.matrix))

    def run(self, run: Run[CoordinatesParameters]) -> None:
        parameters = run.parameters
        if parameters.matrix:
            self._given(run)
            return
        self._stars(run)
        rtt_ms = topologies.internet(
            max(round(parameters.nodes * parameters.scale), 2), np.random.default_rng(parameters.seed)
        )
        self._internet(run, rtt_ms)

    # --- the paper's star -----------------------------------------------------------------------------------------------

    def _stars(self, run: Run[CoordinatesParameters]) -> None:
        parameters = run.parameters
        middle = sorted(parameters.star_nodes)[len(parameters.star_nodes) // 2]
        cases = [(nodes, STAR_RTT_MS) for nodes in parameters.star_nodes]
        cases += [(middle, rtt) for rtt in parameters.star_rtts_ms if rtt != STAR_RTT_MS]
        rows: list[tuple[int, float, float, float]] = []
        for nodes, rtt in cases:
            run.step(f"star of {nodes} nodes, {rtt:g} ms from each to each")
            matrix = topologies.star(nodes, rtt)
            agents = _settled(run, Agents(matrix, seed=parameters.seed))
            found = accuracy(agents.coordinates, matrix)
            rows.append((nodes, rtt, found.mean_error_ms, found.mean_error_ms / rtt))
        run.table(
            "Star (figure 3): mean error of a pair",
            ("nodes", "RTT (ms)", "error (ms)", "share"),
            [(nodes, rtt, round(error, 3), round(share, 4)) for nodes, rtt, error, share in rows],
        )
        run.measured("star_error_ms", round(max(error for _, rtt, error, _ in rows if rtt == STAR_RTT_MS), 3))
        run.measured("star_error", round(max(share for _, _, _, share in rows), 4))

    # --- the Internet ---------------------------------------------------------------------------------------------------

    def _internet(self, run: Run[CoordinatesParameters], rtt_ms: Matrix) -> None:
        parameters = run.parameters
        nodes = len(rtt_ms)
        run.step(f"Internet-like matrix of {nodes} nodes")
        began = time.process_time()
        agents = Agents(rtt_ms, seed=parameters.seed)
        progress = _watched(run, agents, rtt_ms)
        run.measured("agent_cpu_share", round((time.process_time() - began) / (nodes * parameters.duration_s), 6))
        run.measured("agent_memory_mb", round(_kept_bytes(nodes, parameters.seed) / 1e6, 3))
        found = accuracy(agents.coordinates, rtt_ms)
        run.measured("internet_median_error", round(found.median_error, 4))
        run.figure(
            "bytes_per_second", round(sum(gossip.bytes_sent for gossip in agents.gossips) / nodes / parameters.duration_s)
        )
        published = self._compare(run, rtt_ms, found)
        run.step("the same with jitter, queues and loss")
        noise = Noise(jitter=0.02, spikes=0.05, loss=0.01)
        noisy = _settled(run, Agents(rtt_ms, seed=parameters.seed, noise=noise))
        run.step("the same with one infected node")
        infected = _settled(run, Agents(rtt_ms, seed=parameters.seed, infected={nodes // 2: Liar(parameters.seed)}))
        honest = np.delete(np.delete(rtt_ms, nodes // 2, 0), nodes // 2, 1)
        beside = accuracy(_without(infected.coordinates, nodes // 2), honest)
        alone = accuracy(_without(agents.coordinates, nodes // 2), honest)
        run.measured("infected_error_ratio", round(beside.median_error / alone.median_error, 3))
        run.table(
            "Internet-like matrix",
            ("", *COLUMNS),
            [
                ("Nearcast", *_row(nodes, found)),
                ("with noise", *_row(nodes, accuracy(noisy.coordinates, rtt_ms))),
                ("beside a liar", *_row(nodes - 1, beside)),
                ("Vivaldi as published", *_row(nodes, accuracy(published, rtt_ms))),
            ],
        )
        run.note("the matrix is generated: like the King data in kind and difficulty, not in numbers")
        _draw(run, rtt_ms, agents.coordinates, published, progress)

    def _compare(self, run: Run[CoordinatesParameters], rtt_ms: Matrix, found: Accuracy) -> list[Coordinate]:
        run.step("Vivaldi as published, in two dimensions with height")
        published = published_vivaldi(rtt_ms, samples=PUBLISHED_SAMPLES, seed=run.parameters.seed)
        theirs = accuracy(published, rtt_ms)
        run.measured("error_against_published", round(found.median_error / max(theirs.median_error, EXACT_ERROR), 3))
        run.figure("accuracy", found)
        run.figure("published_accuracy", theirs)
        return published

    def _given(self, run: Run[CoordinatesParameters]) -> None:
        parameters = run.parameters
        rtt_ms = read_matrix(Path(parameters.matrix))
        if len(rtt_ms) > parameters.nodes:
            rng = np.random.default_rng(parameters.seed)
            drawn = np.sort(rng.choice(len(rtt_ms), parameters.nodes, replace=False))
            run.note(f"{parameters.nodes} of {len(rtt_ms):,} nodes, drawn by the seed; --set nodes={len(rtt_ms)} takes all")
            rtt_ms = rtt_ms[np.ix_(drawn, drawn)]
        run.step(f"{parameters.matrix}: {len(rtt_ms)} nodes")
        agents = Agents(rtt_ms, seed=parameters.seed)
        progress = _watched(run, agents, rtt_ms)
        found = accuracy(agents.coordinates, rtt_ms)
        published = self._compare(run, rtt_ms, found)
        rows = [
            ("Nearcast", *_row(len(rtt_ms), found)),
            ("Vivaldi as published", *_row(len(rtt_ms), accuracy(published, rtt_ms))),
        ]
        run.table(Path(parameters.matrix).name, ("", *COLUMNS), rows)
        _draw(run, rtt_ms, agents.coordinates, published, progress)


class Liar:
    """An infected node: sure of itself, it says to be far out, in another direction every ten seconds."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, gossip: Gossip, now: float) -> None:
        rng = random.Random(f"{self._seed} {int(now / 10)}")
        vector = [rng.gauss(0.0, 500.0) for _ in gossip.coordinate.vector]
        gossip.vivaldi.coordinate = Coordinate(vector, rng.random() * 100.0, 0.0, 0.001)


def _kept_bytes(nodes: int, seed: int) -> float:
    """What an agent has allocated when it knows the others; its share of what is on its way included."""
    tracemalloc.start()
    try:
        agents = Agents(topologies.star(nodes, STAR_RTT_MS), seed=seed)
        agents.run(KNOWN_S)
        return tracemalloc.get_traced_memory()[0] / nodes
    finally:
        tracemalloc.stop()


def _settled(run: Run[CoordinatesParameters], agents: Agents) -> Agents:
    duration_s = run.parameters.duration_s
    for part in range(1, 11):
        agents.run(duration_s * part / 10)
        run.advance(part / 10)
    return agents


def _watched(run: Run[CoordinatesParameters], agents: Agents, rtt_ms: Matrix) -> list[tuple[float, float]]:
    """Let the agents run; returns the median relative error over time."""
    duration_s = run.parameters.duration_s
    progress = []
    for part in range(1, 41):
        agents.run(duration_s * (part / 40) ** 2)  # the beginning is what is interesting
        progress.append((agents.now, accuracy(agents.coordinates, rtt_ms).median_error))
        run.advance(part / 40)
    return progress


def _without(coordinates: list[Coordinate], node: int) -> list[Coordinate]:
    return coordinates[:node] + coordinates[node + 1 :]


def _row(nodes: int, found: Accuracy) -> tuple[float | None, ...]:
    return (
        nodes,
        round(found.median_error, 4),
        round(found.p90_error, 4),
        round(found.p95_error, 4),
        round(found.mean_error_ms, 2),
        round(found.median_error_ms, 2),
        round(found.p90_error_ms, 2),
        None if found.hit_rate is None else round(found.hit_rate, 3),
        None if found.added_ms is None else round(found.added_ms, 2),
    )


def _draw(
    run: Run[CoordinatesParameters],
    rtt_ms: Matrix,
    coordinates: list[Coordinate],
    published: list[Coordinate],
    progress: list[tuple[float, float]],
) -> None:
    with run.plot("errors", "Relative error of all pairs", "relative error", "share of pairs") as axes:
        plots.cdf(axes, relative_errors(coordinates, rtt_ms), "Nearcast")
        plots.cdf(axes, relative_errors(published, rtt_ms), "Vivaldi as published", dashed=True)
        axes.set_xlim(0.0, 1.0)
    with run.plot("convergence", "From the start of all nodes at once", "time (s)", "median relative error") as axes:
        axes.plot([moment for moment, _ in progress], [min(error, 1.0) for _, error in progress], label="Nearcast")
        axes.axhline(INTERNET_ERROR, color="black", linestyle="--", linewidth=1, label="Vivaldi on the King data: 11 %")
        axes.set_ylim(bottom=0.0)
        axes.set_xlim(0.0, math.ceil(progress[-1][0]))
