"""``selection``: what it costs to know only centroids: where four policies put topics (ePulsar §5.5, figures 4 and 5).

A thousand permutations of who plays and flies where, for each number of cities and of zones, each a point of a Spark sweep.
The model is stated in :mod:`nearcast.experiments.selection_runs`. Judged is every pair of a producer and a consumer, by the
true latencies; by those that coordinates estimate, as the paper does, beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from nearcast.experiments import plots
from nearcast.experiments.experiment import Bar, Experiment, Parameters, at_least, at_most
from nearcast.experiments.run import Run
from nearcast.recording.schema import arrow

if TYPE_CHECKING:
    import numpy as np

    Column = np.ndarray[Any, np.dtype[np.float64]]

TITLES = {"mmog": "players in cities", "uav": "swarms over zones"}
SITES = {"mmog": "cities", "uav": "zones"}
NAMES = {"centroids": "centroids", "all_pairs": "AllPairs", "hashing": "hashing"}
SIMILAR = 1.25
"""The paper calls it "similar": how much longer the worst case may be than with every client known."""
WORSE = 1.3
"""How much longer hashing's worst case is at least."""
MOST_FAILURES_SHOWN = 5


class SelectionParameters(Parameters, frozen=True, kw_only=True):
    """``scale`` multiplies the permutations; nothing takes time here, so ``duration_s`` has no meaning."""

    permutations: int = 1_000
    cities: tuple[int, ...] = (5, 10, 20, 40)
    zones: tuple[int, ...] = (2, 4, 8, 16)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(1 <= self.count <= 100_000, "permutations", "must be between 1 and 100,000, scaled")
        for name in ("cities", "zones"):
            sizes = getattr(self, name)
            fits = all(2 <= size <= 100 for size in sizes) and len(set(sizes)) == len(sizes)
            self.require(fits, name, "must be numbers between 2 and 100, each once")
        self.require(bool(self.cities or self.zones), "cities", "or zones: name at least one number")

    @property
    def count(self) -> int:
        return max(1, round(self.permutations * self.scale))

    @property
    def sites(self) -> dict[str, tuple[int, ...]]:
        return {kind: sizes for kind, sizes in (("mmog", self.cities), ("uav", self.zones)) if sizes}


class Selection(Experiment[SelectionParameters]):
    name = "selection"
    summary = "Owners chosen by centroids against AllPairs and hashing: worst case and violations (ePulsar, figures 4 and 5)."
    parameters = SelectionParameters
    quick: ClassVar[Mapping[str, Any]] = {"permutations": 25, "cities": (5, 15), "zones": (4, 8)}

    def bars(self, parameters: SelectionParameters) -> Sequence[Bar]:
        runs = parameters.count * sum(len(sizes) for sizes in parameters.sites.values())
        found = [at_least("runs", runs, "permutations placed; none failed")]
        for kind in parameters.sites:
            found += [
                at_most(
                    f"{kind}_worst_ratio", SIMILAR, "worst case by that of AllPairs, mean over permutations; most of sizes"
                ),
                at_most(
                    f"{kind}_violations_added", 0.01, "share of pairs above the bound, above AllPairs' share; most of sizes"
                ),
                at_least(
                    f"{kind}_hashing_ratio", WORSE, "hashing's worst case by ours, mean over permutations; least of sizes"
                ),
            ]
        if "uav" in parameters.sites:
            found.append(at_most("uav_violations", 0.0, "share of pairs above the bound, most of all permutations"))
        return found

    def check(self, parameters: SelectionParameters) -> None:
        from nearcast.pipeline.session import require_pyspark
        from nearcast.scenario.places import find_city

        arrow()
        plots.require()
        require_pyspark()
        find_city("New York, US")

    def run(self, run: Run[SelectionParameters]) -> None:
        parameters = run.parameters
        run.step(f"{parameters.count:,} permutations of each topology")
        results = self._read(run, self._sweep(run))
        run.step("evaluating")
        for kind, sizes in parameters.sites.items():
            self._tell(run, kind, [size for size in sizes if f"{kind}-{size}" in results], results)

    def _sweep(self, run: Run[SelectionParameters]) -> Path:
        from nearcast.experiments.groups_results import Told
        from nearcast.pipeline import sweep
        from nearcast.pipeline.jobs import JobModule
        from nearcast.pipeline.running import Where, run_job

        parameters = run.parameters
        directory = run.directory("sweep")
        topologies = [f"{kind}-{size}" for kind, sizes in parameters.sites.items() for size in sizes]
        options = sweep.Options(
            function="nearcast.experiments.selection_runs:choose",
            set=(f"topology={','.join(topologies)}", f"topology_seed={parameters.seed}"),
            seeds=f"{parameters.seed}..{parameters.seed + parameters.count - 1}",
            out=str(directory),
        )
        run_job("selection", cast(JobModule, sweep), options, Where(log_file=directory / "spark.log"), Told(run))
        return directory / "results.parquet"

    def _read(self, run: Run[SelectionParameters], path: Path) -> dict[str, dict[str, Column]]:
        """Figures of each topology, by name, as columns over permutations."""
        import numpy as np
        import pyarrow.parquet as pq

        rows = pq.read_table(path).to_pylist()
        good = [row for row in rows if row["error_type"] is None]
        run.measured("runs", len(good))
        for row in [row for row in rows if row["error_type"] is not None][:MOST_FAILURES_SHOWN]:
            run.note(f"{row['topology']}, seed {row['seed']}: {row['error_type']}: {row['error_message']}")
        results = {}
        for topology in {row["topology"] for row in good}:
            there = [row for row in good if row["topology"] == topology]
            names = [name for name in there[0] if name.endswith(("_ms", "_violations", "_sure"))]
            results[topology] = {name: np.array([row[name] for row in there], np.float64) for name in names}
        return results

    def _tell(
        self,
        run: Run[SelectionParameters],
        kind: str,
        sizes: Sequence[int],
        results: Mapping[str, Mapping[str, Column]],
    ) -> None:
        rows: list[list[str | float | None]] = []
        promised: list[list[str | float | None]] = []
        ratios, added, hashing, violations = [], [], [], []
        for size in sizes:
            column = results[f"{kind}-{size}"]
            ratios.append(float((column["centroids_worst_ms"] / column["all_pairs_worst_ms"]).mean()))
            hashing.append(float((column["hashing_worst_ms"] / column["centroids_worst_ms"]).mean()))
            added.append(float((column["centroids_violations"] - column["all_pairs_violations"]).mean()))
            violations.append(float(column["centroids_violations"].max()))
            promised.append([size, *(round(100 * float(column[name].mean()), 2) for name in ("ours_sure", "published_sure"))])
            for policy, title in NAMES.items():
                figures = [column[f"{policy}_{name}"] for name in ("worst_ms", "mean_ms", "violations")]
                estimated = [column[f"{policy}_estimated_{name}"] for name in ("worst_ms", "violations")]
                factors = (1, 1, 100, 1, 100)
                means = [factor * float(each.mean()) for factor, each in zip(factors, [*figures, *estimated], strict=True)]
                rows.append([size, title, *(round(mean, 2) for mean in means)])
        columns = [SITES[kind], "policy", "worst ms", "mean ms", "violations %", "estimated: worst ms", "violations %"]
        run.table(f"{TITLES[kind]}: end to end, one way", columns, rows)
        sure = [SITES[kind], "sure by W(t, b) %", "with the paper's deviation %"]
        run.table(f"{TITLES[kind]}: topics that are sure to keep their bound where they are put", sure, promised)
        run.figure(kind, {"columns": columns, "rows": rows, "sure": promised})
        if sizes:
            run.measured(f"{kind}_worst_ratio", round(max(ratios), 4))
            run.measured(f"{kind}_violations_added", round(max(added), 5))
            run.measured(f"{kind}_hashing_ratio", round(min(hashing), 4))
            if kind == "uav":
                run.measured("uav_violations", max(violations))
            self._plot(run, kind, sizes, results)

    def _plot(
        self,
        run: Run[SelectionParameters],
        kind: str,
        sizes: Sequence[int],
        results: Mapping[str, Mapping[str, Column]],
    ) -> None:
        from nearcast.experiments.selection_runs import MMOG_BOUND_MS, UAV_BOUND_MS

        bound_ms = MMOG_BOUND_MS if kind == "mmog" else UAV_BOUND_MS
        for figure, title, axis, factor in (
            ("worst_ms", "worst case", "end to end, one way (ms)", 1.0),
            ("violations", "violations", "pairs above the bound (%)", 100.0),
        ):
            with run.plot(f"{kind}-{figure.removesuffix('_ms')}", f"{TITLES[kind]}: {title}", SITES[kind], axis) as axes:
                for policy, name in NAMES.items():
                    values = [factor * float(results[f"{kind}-{size}"][f"{policy}_{figure}"].mean()) for size in sizes]
                    axes.plot(sizes, values, marker="o", label=name)
                if figure == "worst_ms":
                    axes.axhline(bound_ms, color="grey", linestyle=":", label="bound")
