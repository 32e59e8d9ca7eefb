"""``canal-availability``: how many requests a replica set can serve over the availability of the edge (Canal, section IV-C).

A public cloud of 99.99 % and an edge cloud whose availability varies; 0 to 3 of a set's replicas are at the edge. A request is
served while a majority of replicas is up, and not in the moments of an election after the leader was lost. Two ways in which
machines fail: each for itself, or a site as a whole (the microwave link of Canal's farm). Each point is computed, and drawn:
two-state processes with a mean time to repair, over virtual years, whose seconds without a majority are counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from nearcast.experiments import plots
from nearcast.experiments.experiment import Bar, Experiment, Parameters, at_least, at_most
from nearcast.experiments.run import Run

REPLICAS = 3
PAPER_EDGE = 0.9
PAPER_SHARE = 0.99
"""With one replica at an edge of 90 %, the paper serves 99 % of its requests."""

PAPER_WHOLE_EDGE = 0.98
PAPER_WHOLE = 0.9995
"""At 98 % it serves all of them: of its trace, which had some thousands."""


class AvailabilityParameters(Parameters, frozen=True, kw_only=True):
    """``scale`` multiplies the drawn years. There is no duration."""

    edge: tuple[float, ...] = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999)
    cloud: float = 0.9999
    repair_s: float = 600.0
    """Mean time until something that failed is there again."""

    election_s: float = 0.3
    """Without a leader after the leader was lost."""

    years: float = 200.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(bool(self.edge) and all(0 < each < 1 for each in self.edge), "edge", "must be shares between 0 and 1")
        self.require(0 < self.cloud < 1, "cloud", "must be a share between 0 and 1")
        self.require(1 <= self.repair_s <= 1e6, "repair_s", "must be between 1 and a million")
        self.require(0 <= self.election_s <= 60, "election_s", "must be between 0 and 60")
        self.require(0.01 <= self.years <= 1e5, "years", "must be between 0.01 and 100,000")


class CanalAvailability(Experiment[AvailabilityParameters]):
    name = "canal-availability"
    summary = "Requests that a replica set serves, over the availability of the edge and where replicas are (Canal, IV-C)."
    parameters = AvailabilityParameters
    quick: ClassVar[Mapping[str, Any]] = {"years": 40.0}

    def bars(self, parameters: AvailabilityParameters) -> Sequence[Bar]:
        return [
            at_least("served_at_90_percent", PAPER_SHARE, "of requests, one replica at an edge of 90 %; however things fail"),
            at_least(
                "served_at_98_percent", PAPER_WHOLE, "of requests, one replica at an edge of 98 %: the paper's trace lost none"
            ),
            at_most("drawn_error", 4.0, "drawn against computed unavailability, in standard errors of the drawing; the worst"),
        ]

    def check(self, parameters: AvailabilityParameters) -> None:
        plots.require()

    def run(self, run: Run[AvailabilityParameters]) -> None:
        parameters = run.parameters
        rng = np.random.default_rng(parameters.seed)
        rows: list[tuple[str, int, float, float, float]] = []
        worst = 0.0
        for failing, at_edge, edge in itertools.product(("machines", "sites"), range(REPLICAS + 1), parameters.edge):
            run.step(f"{failing} fail, {at_edge} at the edge, {edge:.4g}")
            computed = served(failing, at_edge, edge, parameters)
            drawn, error = draw(failing, at_edge, edge, parameters, rng)
            worst = max(worst, abs(drawn - computed) / error)
            rows.append((failing, at_edge, edge, computed, drawn))
        by_point = {(failing, at_edge, edge): computed for failing, at_edge, edge, computed, _ in rows}
        run.table(
            "Requests that are served (section IV-C)",
            ("what fails", "edge available", *(f"{at_edge} of {REPLICAS} there" for at_edge in range(REPLICAS + 1))),
            [
                (failing, f"{edge:.4%}", *(f"{by_point[failing, at_edge, edge]:.5%}" for at_edge in range(REPLICAS + 1)))
                for failing, edge in itertools.product(("machines", "sites"), parameters.edge)
            ],
        )
        run.figure(
            "served", [dict(zip(("failing", "at_edge", "edge", "computed", "drawn"), row, strict=True)) for row in rows]
        )
        run.measured("served_at_90_percent", _one_at_edge(PAPER_EDGE, parameters))
        run.measured("served_at_98_percent", _one_at_edge(PAPER_WHOLE_EDGE, parameters))
        run.measured("drawn_error", round(worst, 2))
        run.note("a request is served if the set can serve it: clients behind an edge that is cut off reach nothing elsewhere")
        for failing in ("machines", "sites"):
            with run.plot(f"served-{failing}", f"Requests not served, {failing} fail", "edge unavailable", "share") as axes:
                axes.set_xscale("log")
                axes.set_yscale("log")
                for at_edge in range(REPLICAS + 1):
                    points = [(1 - row[2], 1 - row[3]) for row in rows if row[0] == failing and row[1] == at_edge]
                    axes.plot(*zip(*points, strict=True), marker="o", label=f"{at_edge} of {REPLICAS} at the edge")


def _one_at_edge(edge: float, parameters: AvailabilityParameters) -> float:
    return min(served(failing, 1, edge, parameters) for failing in ("machines", "sites"))


def units(failing: str, at_edge: int, edge: float, cloud: float) -> list[tuple[int, float]]:
    """What fails as one: how many replicas are on it, and how available it is."""
    if failing == "sites":
        return [(count, share) for count, share in ((at_edge, edge), (REPLICAS - at_edge, cloud)) if count]
    return [(1, edge)] * at_edge + [(1, cloud)] * (REPLICAS - at_edge)


def served(failing: str, at_edge: int, edge: float, parameters: AvailabilityParameters) -> float:
    """The share of requests, by adding up all states of what can fail. The leader is in the cloud where a replica is; each of
    its failures that leaves a majority costs an election."""
    parts = units(failing, at_edge, edge, parameters.cloud)
    up_s = 0.0
    for states in itertools.product((True, False), repeat=len(parts)):
        chance = 1.0
        for (_, share), is_up in zip(parts, states, strict=True):
            chance *= share if is_up else 1 - share
        if _has_majority(parts, states):
            up_s += chance
    leader, share = len(parts) - 1, parts[-1][1]
    others = [part for number, part in enumerate(parts) if number != leader]
    survives = 0.0
    for states in itertools.product((True, False), repeat=len(others)):
        chance = 1.0
        for (_, other), is_up in zip(others, states, strict=True):
            chance *= other if is_up else 1 - other
        if _has_majority(others, states):
            survives += chance
    # Failures of the leader in a second: it is up that long on average for every repair.
    failures_hz = (1 - share) / parameters.repair_s
    return up_s - failures_hz * survives * min(parameters.election_s, parameters.repair_s)


def _has_majority(parts: Sequence[tuple[int, float]], states: Sequence[bool]) -> bool:
    return 2 * sum(count for (count, _), is_up in zip(parts, states, strict=True) if is_up) > REPLICAS


def draw(
    failing: str, at_edge: int, edge: float, parameters: AvailabilityParameters, rng: np.random.Generator
) -> tuple[float, float]:
    """(share of the time with a leader, its standard error) of processes that fail and are repaired, in parts of the whole."""
    total_s = parameters.years * parameters.scale * 365.25 * 86_400
    batches = 20
    parts = units(failing, at_edge, edge, parameters.cloud)
    shares = np.array([_drawn(parts, total_s / batches, parameters, rng) for _ in range(batches)])
    # Where hardly anything fails, a batch without a failure says less than it seems to.
    least = parameters.repair_s / total_s
    return float(shares.mean()), max(float(shares.std(ddof=1) / np.sqrt(batches)), least)


def _drawn(
    parts: Sequence[tuple[int, float]], total_s: float, parameters: AvailabilityParameters, rng: np.random.Generator
) -> float:
    times: list[npt.NDArray[np.float64]] = []
    changes: list[npt.NDArray[np.int64]] = []
    leader_downs = np.empty(0)
    begin = 0
    for number, (count, share) in enumerate(parts):
        up_s = parameters.repair_s * share / (1 - share)
        most = int(2 * total_s / (up_s + parameters.repair_s)) + 64
        is_up = rng.random() < share
        begin += count if is_up else 0
        means = np.where((np.arange(2 * most) % 2 == 0) == is_up, up_s, parameters.repair_s)
        at = np.cumsum(rng.exponential(means))
        at = at[at < total_s]
        downwards = (np.arange(len(at)) % 2 == 0) == is_up
        times.append(at)
        changes.append(np.where(downwards, -count, count))
        if number == len(parts) - 1:
            leader_downs = at[downwards]
    at = np.concatenate(times)
    order = np.argsort(at, kind="stable")
    at = at[order]
    up = begin + np.concatenate([[0], np.cumsum(np.concatenate(changes)[order])])
    spans = np.diff(np.concatenate([[0.0], at, [total_s]]))
    majority = 2 * up > REPLICAS
    with_majority_s = float(spans[majority].sum())
    # After the leader's failure: is there a majority left?
    after = majority[np.searchsorted(at, leader_downs, side="right")] if len(leader_downs) else np.empty(0, np.bool_)
    return (with_majority_s - float(after.sum()) * parameters.election_s) / total_s
