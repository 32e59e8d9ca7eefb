"""``groups``: the formation of broadcast groups at the scale of the world, as section IV-A of the paper studies it.

Brokers in up to 12,000 cities organise themselves with the shipped formation, in the simulator; thresholds and numbers of
brokers are swept, each combination a point of a Spark sweep. The model (places, capabilities, latencies) is stated in
:mod:`nearcast.experiments.groups_runs`, the workload that excess data is computed of in
:mod:`nearcast.experiments.groups_workload`, and what becomes of the rows in :mod:`nearcast.experiments.groups_results`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from nearcast.experiments import plots
from nearcast.experiments.experiment import Bar, Bound, Experiment, Parameters, at_least, at_most
from nearcast.experiments.groups_reference import REFERENCE
from nearcast.experiments.run import Run
from nearcast.recording.schema import arrow

if TYPE_CHECKING:
    from nearcast.experiments.groups_results import Row

BROKERS = tuple(range(1_200, 12_001, 1_200))
THRESHOLDS_MS = (0.0, 2.0, 5.0, *range(10, 101, 10), *range(150, 401, 50))
"""The paper's 16, and below them what groups are for within a region."""

LINEAR = 0.95
"""Share of the variation (r²) that a straight line has to explain. It explains 0.95 of a square over the published numbers of
brokers, too: so there is :data:`GROWTH`."""

GROWTH = 1.25
"""Power of the number of brokers that joins may grow with at the largest threshold: 1 is linear, 2 quadratic. At small
ones the power is larger, in the paper's simulation too (1.3 at 10 ms): among few brokers hardly anybody is near somebody."""

NOTIFICATIONS = 1.2
"""The paper has 1.04 of them for each member join; the rest are members for which the new leader is too far."""

TIMED_S = 120.0
CHANGE = 0.2
"""The paper calls it "considerably shorter". The leader of the largest group is among those that die."""

REFERENCE_FACTOR = 1.5
"""How far from the stored results of the paper's simulation the number of groups may be: other cities, other randomness."""


class GroupsParameters(Parameters, frozen=True, kw_only=True):
    """``scale`` multiplies the numbers of brokers; ``duration_s`` is how long formation may take, of virtual time: a run ends
    as soon as it has ended."""

    duration_s: float = 600.0
    brokers: tuple[int, ...] = BROKERS
    """How many there are."""

    thresholds_ms: tuple[float, ...] = THRESHOLDS_MS
    """One way, in milliseconds."""

    seeds: int = 1
    """Runs of each combination, with other cities and other randomness: ``seed`` and those after it."""

    fibre: bool = False
    """Latency by distance over fibre, as elsewhere in Nearcast, instead of the paper's 0.021 ms/km."""

    timed_brokers: int = 10_000
    """Of the run that is timed, alone in its process."""

    timed_threshold_ms: float = 10.0
    """Its threshold."""

    changed_brokers: int = 1_200
    """Of the run in which some die and come back."""

    changed_threshold_ms: float = 30.0
    """Its threshold."""

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = self.counts
        self.require(bool(counts) and len(set(counts)) == len(counts), "brokers", "must be numbers, each once")
        self.require(all(1 <= count <= 14_000 for count in counts), "brokers", "must be between 1 and 14,000, scaled")
        thresholds = self.thresholds_ms
        self.require(
            bool(thresholds) and len(set(thresholds)) == len(thresholds), "thresholds_ms", "must be numbers, each once"
        )
        self.require(all(0.0 <= each <= 1e6 for each in thresholds), "thresholds_ms", "must be between 0 and a million")
        self.require(1 <= self.seeds <= 1_000, "seeds", "must be between 1 and 1,000")
        for field in ("timed_brokers", "changed_brokers"):
            self.require(1 <= getattr(self, field) <= 14_000, field, "must be between 1 and 14,000")
        for field in ("timed_threshold_ms", "changed_threshold_ms"):
            self.require(0.0 <= getattr(self, field) <= 1e6, field, "must be between 0 and a million")

    @property
    def counts(self) -> tuple[int, ...]:
        """Brokers, scaled, the fewest first."""
        return tuple(sorted(max(1, round(count * self.scale)) for count in self.brokers))

    @property
    def runs(self) -> int:
        return len(self.brokers) * len(self.thresholds_ms) * self.seeds


class Groups(Experiment[GroupsParameters]):
    name = "groups"
    summary = "Broadcast groups of up to 12,000 brokers in cities of the world form: how many, how soon, at what cost."
    parameters = GroupsParameters
    quick: ClassVar[Mapping[str, Any]] = {
        "brokers": (400, 800, 1_200),
        "thresholds_ms": (0.0, 10.0, 50.0, 100.0, 400.0),
    }

    def bars(self, parameters: GroupsParameters) -> Sequence[Bar]:
        found = [
            at_least("runs", parameters.runs, "in which formation ended as section II-C says; none failed"),
            at_most(
                "timed_run_s",
                TIMED_S,
                f"{parameters.timed_brokers:,} brokers at {parameters.timed_threshold_ms:g} ms until stable, on one core",
            ),
        ]
        if parameters.changed_threshold_ms > 0 and parameters.changed_brokers > 1:
            found.append(
                at_most("change_joins_share", CHANGE, "joins when 1 % die or come back, of those when all start: the larger")
            )
        if len(parameters.counts) > 2:
            found += [
                at_least("operations_linear_r2", LINEAR, "joins over brokers, for the threshold that is least linear"),
                at_least("messages_linear_r2", LINEAR, "the same of messages, counted as the paper does"),
            ]
            if any(threshold_ms > 0 for threshold_ms in parameters.thresholds_ms):
                found.append(at_most("operations_exponent", GROWTH, "of brokers, in joins, at the largest threshold"))
        if any(threshold_ms > 0 for threshold_ms in parameters.thresholds_ms):
            found.append(at_most("notifications_per_member_join", NOTIFICATIONS, "median over runs; the paper has 1.04"))
        if len([each for each in parameters.thresholds_ms if 10 <= each <= 100]) > 1:
            found.append(
                Bar(
                    name="groups_exponent",
                    bound=Bound(at_least=-2.3, at_most=-1.2),
                    meaning="of the threshold, from 10 to 100 ms with most brokers: groups fall about quadratically",
                )
            )
        if not parameters.fibre and self._compared(parameters):
            found.append(at_most("reference_factor", REFERENCE_FACTOR, "groups against the paper's stored runs, the worst"))
        return found

    @staticmethod
    def _compared(parameters: GroupsParameters) -> bool:
        return any((each.brokers, each.threshold_ms) in _grid(parameters) for each in REFERENCE)

    def check(self, parameters: GroupsParameters) -> None:
        from nearcast.pipeline.session import require_pyspark
        from nearcast.scenario.places import find_city

        arrow()
        plots.require()
        require_pyspark()
        find_city("Frankfurt am Main, DE")

    def run(self, run: Run[GroupsParameters]) -> None:
        # NumPy, pyarrow and Spark are loaded where they are needed: `list` imports this module.
        from nearcast.experiments import groups_results

        parameters = run.parameters
        run.step(f"{parameters.timed_brokers:,} brokers at {parameters.timed_threshold_ms:g} ms, in a process of their own")
        self._time(run)
        run.step(f"{parameters.changed_brokers:,} brokers at {parameters.changed_threshold_ms:g} ms: some die and come back")
        self._change(run)
        rows = self._sweep(run)
        run.step("evaluating")
        groups_results.evaluate(run, rows, {bar.name for bar in self.bars(parameters)})

    def _time(self, run: Run[GroupsParameters]) -> None:
        """One run with nothing beside it."""
        from nearcast.experiments import groups_runs
        from nearcast.experiments.simulated import run_simulated

        parameters = run.parameters
        places = groups_runs.chosen(groups_runs.city_pool(), parameters.timed_brokers, parameters.seed)
        model = groups_runs.latency_model(fibre=parameters.fibre)
        scenario = groups_runs.formation_scenario(places, parameters.timed_threshold_ms, model, parameters.duration_s)
        result = run_simulated(run, scenario, parameters.seed)
        run.figure("timed_run", result)
        run.measured("timed_run_s", result.wall_s)

    def _change(self, run: Run[GroupsParameters]) -> None:
        """What happens when some die and come back."""
        from nearcast.experiments import groups_runs
        from nearcast.experiments.groups_changes import changes

        parameters = run.parameters
        places = groups_runs.chosen(groups_runs.city_pool(), parameters.changed_brokers, parameters.seed)
        model = groups_runs.latency_model(fibre=parameters.fibre)
        found = changes(places, parameters.changed_threshold_ms, model, parameters.seed)
        run.figure("changes", found)
        run.table(
            f"{len(places):,} brokers at {parameters.changed_threshold_ms:g} ms: what a change costs",
            ["what", "brokers", "stable s", "joins", "notices", "splits"],
            [[each.what, each.brokers, each.stable_after_s, each.joins, each.notifications, each.splits] for each in found],
        )
        first, *later = found
        if first.joins:
            run.measured("change_joins_share", round(max(each.joins for each in later) / first.joins, 4))

    def _sweep(self, run: Run[GroupsParameters]) -> list[Row]:
        """All combinations, as a job on Spark."""
        from nearcast.experiments import groups_results
        from nearcast.pipeline import sweep
        from nearcast.pipeline.jobs import JobModule
        from nearcast.pipeline.running import Where, run_job

        parameters = run.parameters
        directory = run.directory("sweep")
        options = sweep.Options(
            function="nearcast.experiments.groups_runs:form",
            set=(
                f"brokers={','.join(map(str, parameters.counts))}",
                f"threshold_ms={','.join(f'{each:g}' for each in parameters.thresholds_ms)}",
                f"fibre={'true' if parameters.fibre else 'false'}",
                f"duration_s={parameters.duration_s!r}",
            ),
            seeds=f"{parameters.seed}..{parameters.seed + parameters.seeds - 1}",
            out=str(directory),
        )
        told = groups_results.Told(run)
        run_job("groups", cast(JobModule, sweep), options, Where(log_file=directory / "spark.log"), told)
        return groups_results.read_rows(directory / "results.parquet")


def _grid(parameters: GroupsParameters) -> set[tuple[int, float]]:
    return {(count, threshold_ms) for count in parameters.counts for threshold_ms in parameters.thresholds_ms}
