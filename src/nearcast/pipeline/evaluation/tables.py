"""The tables of an evaluation that span topics, added up from what the parts left behind. docs/guides/evaluating.md lists
them.

They have a row for each run, piece of time, bucket, pair of sites, broker or outage, so they are made here, in Arrow; those of
flows, topics, episodes and losses are made by the parts and only looked through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from nearcast.errors import PipelineError
from nearcast.pipeline.evaluation.histograms import GROWTH, NO_BUCKET, PERCENTILES, distributions, lower_ms
from nearcast.pipeline.evaluation.judging import SITE_LIMIT, Numbers, combined, count, factors, optional, total
from nearcast.recording.schema import arrow

if TYPE_CHECKING:
    from pathlib import Path

    from nearcast.pipeline.evaluation.passes import Passes

LATENCY = ("samples", "mean_ms", "min_ms", *PERCENTILES, "max_ms")
SPANNING = ("runs", "timeline", "histogram", "site_pairs", "brokers", "downtime", "refusals")
_COUNTS = ("deliveries", "late", "duplicates", "out_of_order", "bytes")


def read(path: Path, columns: list[str] | None = None) -> Any:
    """A file of a table."""
    from pyarrow import parquet

    return parquet.ParquetFile(path).read(columns=columns)


class Tables:
    """All that span topics, by name, in :attr:`all`; ``notes`` qualify them."""

    def __init__(self, passes: Passes, strategies: Mapping[str, str]) -> None:
        self._passes = passes
        self._names = [run.name for run in passes.runs]
        self._strategies = [strategies.get(name, "") for name in self._names]
        self.notes: list[str] = []
        self._sums = self._added("sums", ["run_code"])
        self._check()
        time = self._added("time", ["run_code", "slot", "bucket"])
        brokers, downtime = self._brokers(), self._downtime()
        self.all: dict[str, Any] = {
            "runs": self._runs(time, brokers, downtime),
            "timeline": self._timeline(time),
            "histogram": self._histogram(time),
            "brokers": brokers,
            "downtime": downtime,
            "refusals": self._refusals(),
        }
        if passes.site_names:
            self.all["site_pairs"] = self._site_pairs()

    def _added(self, name: str, keys: list[str]) -> dict[str, Numbers]:
        """The sums of all parts added up by ``keys``; part by part, for there may be many."""
        found: Any = None
        for path in self._passes.files(name):
            part = read(path)
            if "mixed" in part.column_names:
                part = part.drop_columns(["mixed"])
            found = part if found is None else _add(arrow().concat_tables([found, part]), keys)
        found = _add(found, keys)
        return {
            column: found[column].fill_null(NO_BUCKET if column == "bucket" else 0).to_numpy() for column in found.column_names
        }

    def _check(self) -> None:
        for path in self._passes.files("sums"):
            for run, publisher in enumerate(read(path, ["mixed"])["mixed"].to_pylist()):
                if publisher is not None:
                    raise PipelineError(
                        f"the run {self._names[run]} holds more messages of {publisher} than it has numbers for: events of "
                        "two runs with one name are mixed; keep each in a folder of its own and name both"
                    )
        for run, incomplete in zip(self._sums["run_code"].tolist(), self._sums["incomplete"].tolist(), strict=True):
            if incomplete:
                self.notes.append(
                    f"{self._names[run]}: {incomplete:,} events lack what their kind has to have; they are left out"
                )

    def _column(self, run: Numbers) -> Any:
        return arrow().array(self._names, arrow().string()).take(arrow().array(run))

    # -- by time and place -------------------------------------------------------------------------------------------------

    def _timeline(self, time: dict[str, Numbers]) -> Any:
        """Pieces of time since the run's first message: deliveries by when they came, messages by when they were sent."""
        order = np.lexsort((time["slot"], time["run_code"]))
        group, example, groups = factors(combined(time["run_code"][order], time["slot"][order]))
        back = np.empty(len(order), dtype=np.int64)
        back[order] = group
        example = order[example]
        seconds = self._passes.slot_ns / 1e9
        told = {"bytes": "delivered_bytes"}
        sums = {
            told.get(name, name): total(back, groups, time[name])
            for name in ("published", "published_bytes", "deliveries", "bytes", "late", "lost", "duplicates", "out_of_order")
        }
        return arrow().table(
            {
                "run": self._column(time["run_code"][example]),
                "at_s": time["slot"][example] * seconds,
                "seconds": np.full(groups, seconds),
                **sums,
                **{
                    f"{name}_per_s": sums[name] / seconds
                    for name in ("published", "published_bytes", "deliveries", "delivered_bytes")
                },
                **_told(distributions(back, groups, time)),
            }
        )

    def _histogram(self, time: dict[str, Numbers]) -> Any:
        """All latencies of each run by bucket, and the share of all up to its end."""
        some = np.flatnonzero((time["bucket"] != NO_BUCKET) & (time["samples"] > 0))
        run, number, samples = time["run_code"][some], time["bucket"][some], time["samples"][some]
        keys, group = np.unique(run * 8_192 + number + 1, return_inverse=True)
        samples = total(group, len(keys), samples)
        run, number = keys // 8_192, keys % 8_192 - 1
        upto = np.cumsum(samples)
        totals = np.bincount(run, samples, len(self._names))
        before = np.cumsum(totals) - totals
        low = lower_ms(number)
        return arrow().table(
            {
                "run": self._column(run),
                "bucket": number.astype(np.int32),
                "from_ms": low,
                "to_ms": np.where(number < 0, 0.0, np.where(number == 0, 0.001, low * GROWTH)),
                "samples": samples,
                "share": (upto - before[run]) / totals[run],
            }
        )

    def _site_pairs(self) -> Any:
        cells = self._added("sites", ["run_code", "pair", "bucket"])
        group, example, groups = factors(combined(cells["run_code"], cells["pair"]))
        pair = cells["pair"][example]
        sites = arrow().array(self._passes.site_names, arrow().string())
        sums = {name: total(group, groups, cells[name]) for name in _COUNTS}
        table = arrow().table(
            {
                "run": self._column(cells["run_code"][example]),
                "publisher_site": sites.take(arrow().array(pair // SITE_LIMIT)),
                "subscriber_site": sites.take(arrow().array(pair % SITE_LIMIT)),
                "deliveries": sums.pop("deliveries"),
                **_told(distributions(group, groups, cells)),
                **sums,
            }
        )
        return table.sort_by([(name, "ascending") for name in ("run", "publisher_site", "subscriber_site")])

    # -- brokers, outages, refusals ----------------------------------------------------------------------------------------

    def _brokers(self) -> Any:
        parts = arrow().concat_tables([read(path) for path in self._passes.files("brokers")])
        found = _add(parts, ["run_code", "broker"]).sort_by([("run_code", "ascending"), ("broker", "ascending")])
        run = found["run_code"].to_numpy()
        carried, excess = found["carried_bytes"].to_numpy(), found["excess_bytes"].to_numpy()
        columns = {name: found[name] for name in found.column_names if name not in ("run_code", "broker")}
        return arrow().table(
            {
                "run": self._column(run),
                "strategy": arrow().array(self._strategies, arrow().string()).take(arrow().array(run)),
                "broker": found["broker"],
                **columns,
                "excess_share": optional(excess / np.maximum(carried, 1), carried > 0),
            }
        )

    def _downtime(self) -> Any:
        """The outages with the first delivery after each, in milliseconds from losing the connection."""
        heard: dict[tuple[int, int], int] = {}
        for path in self._passes.files("heard"):
            for row in read(path).to_pylist():
                key = (row["run_code"], row["outage"])
                heard[key] = min(row["first_ns"], heard.get(key, row["first_ns"]))
        rows = []
        for code, run in enumerate(self._passes.runs):
            for number, outage in enumerate(run.clients.outages):
                first_ns = heard.get((code, number))
                before, after = outage.broker_before, outage.broker_after
                back_ns = run.end_ns if outage.back_ns is None else outage.back_ns
                rows.append(
                    {
                        "run": run.name,
                        "client": outage.client,
                        "broker_before": before,
                        "broker_after": after,
                        "moved": None if before is None or after is None else before != after,
                        "reason": outage.reason,
                        "failed_attempts": outage.failed_attempts,
                        "gone_ns": outage.gone_ns,
                        "back_ns": outage.back_ns,
                        "subscribed_ns": outage.subscribed_ns,
                        "first_delivery_ns": first_ns,
                        "came_back": outage.back_ns is not None,
                        "downtime_ms": (back_ns - outage.gone_ns) / 1e6,
                        "until_subscribed_ms": _since(outage.gone_ns, outage.subscribed_ns),
                        "until_delivery_ms": _since(outage.gone_ns, first_ns),
                        "strategy": self._strategies[code],
                    }
                )
        return arrow().Table.from_pylist(rows, schema=_schema(_DOWNTIME))

    def _refusals(self) -> Any:
        found: dict[tuple[str, str, str | None], int] = {}
        for path in self._passes.files("refusals"):
            for row in read(path).to_pylist():
                key = (self._names[row["run_code"]], row["kind"], row["reason"])
                found[key] = found.get(key, 0) + row["events"]
        for run in self._passes.runs:
            for reason, events in run.clients.unconnected.items():
                found[run.name, "unconnected", reason] = events
        rows = [{"run": run, "kind": kind, "reason": reason, "events": n} for (run, kind, reason), n in found.items()]
        return arrow().Table.from_pylist(rows, schema=_schema({"run": "s", "kind": "s", "reason": "s", "events": "i"}))

    # -- runs --------------------------------------------------------------------------------------------------------------

    def _runs(self, time: dict[str, Numbers], brokers: Any, downtime: Any) -> Any:
        """One row for each run."""
        runs = len(self._names)
        sums = {name: np.zeros(runs, dtype=np.int64) for name in self._sums}
        for name, values in self._sums.items():
            sums[name][self._sums["run_code"]] = values
        distinct = self._distinct()
        found: dict[str, Any] = {
            "run": self._column(np.arange(runs)),
            "strategy": arrow().array(self._strategies, arrow().string()),
            "start_ns": np.array([run.start_ns for run in self._passes.runs], dtype=np.int64),
            "end_ns": np.array([run.end_ns for run in self._passes.runs], dtype=np.int64),
            "duration_s": np.array([(run.end_ns - run.start_ns) / 1e9 for run in self._passes.runs]),
            **{name: sums[name] for name in _RUN_SUMS},
            **distinct,
            **self._episodes(),
            **self._outages(downtime),
        }
        for name in ("carried_messages", "carried_bytes", "excess_messages", "excess_bytes"):
            by_run = dict.fromkeys(self._names, 0)
            for run, value in zip(brokers["run"].to_pylist(), brokers[name].to_pylist(), strict=True):
                by_run[run] += value
            found[name] = np.array(list(by_run.values()), dtype=np.int64)
        judged = sums["judged"] > 0
        carried = found["carried_bytes"]
        found |= {
            "loss_ratio": optional(sums["lost"] / np.maximum(sums["expected"], 1), sums["expected"] > 0),
            **_told(distributions(time["run_code"], runs, time)),
            "violations": optional(sums["violations"], judged),
            "violation_ratio": optional(sums["violations"] / np.maximum(sums["bounded"], 1), judged & (sums["bounded"] > 0)),
            "excess_share": optional(found["excess_bytes"] / np.maximum(carried, 1), carried > 0),
        }
        return arrow().table(found)

    def _distinct(self) -> dict[str, Numbers]:
        """Topics, publishers and subscribers of the flows of each run."""
        codes = {name: code for code, name in enumerate(self._names)}
        found = {}
        for name in ("topic", "publisher", "subscriber"):
            seen: set[tuple[str, str]] = set()
            for path in self._passes.files("flows"):
                pairs = read(path, ["run", name]).group_by(["run", name]).aggregate([])
                seen.update(zip(pairs["run"].to_pylist(), pairs[name].to_pylist(), strict=True))
            numbers = np.array([codes[run] for run, _ in seen], dtype=np.int64)
            found[f"{name}s"] = count(numbers, len(codes))
        return found

    def _episodes(self) -> dict[str, Any]:
        lasted: dict[str, list[Numbers]] = {name: [np.zeros(0)] for name in self._names}
        for path in self._passes.files("episodes"):
            run, duration = (read(path, ["run", "duration_ms"])[name] for name in ("run", "duration_ms"))
            names, values = np.array(run.to_pylist(), dtype=object), duration.to_numpy()
            for name in self._names:
                lasted[name].append(values[names == name])
        whole = [np.concatenate(each) for each in lasted.values()]
        some = np.array([len(each) > 0 for each in whole])
        return {
            "episodes": np.array([len(each) for each in whole]),
            "violation_ms": np.array([each.sum() for each in whole]),
            "median_violation_ms": optional(np.array([np.median(each) if len(each) else 0 for each in whole]), some),
            "longest_violation_ms": optional(np.array([each.max(initial=0) for each in whole]), some),
        }

    def _outages(self, downtime: Any) -> dict[str, Any]:
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in self._names}
        for row in downtime.to_pylist():
            rows[row["run"]].append(row)
        found: dict[str, Any] = {
            "outages": np.array([len(each) for each in rows.values()]),
            "never_back": np.array([sum(not row["came_back"] for row in each) for each in rows.values()]),
            "moves": np.array([sum(bool(row["moved"]) for row in each) for each in rows.values()]),
            "downtime_ms": np.array([float(sum(row["downtime_ms"] for row in each)) for each in rows.values()]),
        }
        for name in ("downtime", "until_delivery"):
            values = [[row[f"{name}_ms"] for row in each if row[f"{name}_ms"] is not None] for each in rows.values()]
            some = np.array([bool(each) for each in values])
            for label, share in (("p50", 50), ("p90", 90), ("max", 100)):
                shares = np.array([np.percentile(each, share) if each else 0.0 for each in values])
                found[f"{name}_{label}_ms"] = optional(shares, some)
        return found


_RUN_SUMS = (
    *("published", "acknowledged", "refused", "skipped", "delivered", "published_bytes", "delivered_bytes", "late_to_send"),
    *("flows", "expected", "got", "late", "lost", "lost_away", "lost_unacknowledged", "lost_qos_0", "lost_unexplained"),
    *("duplicates", "out_of_order", "retained", "unexpected"),
)

_DOWNTIME = {
    "run": "s",
    "client": "s",
    "broker_before": "s",
    "broker_after": "s",
    "moved": "b",
    "reason": "s",
    "failed_attempts": "i",
    "gone_ns": "i",
    "back_ns": "i",
    "subscribed_ns": "i",
    "first_delivery_ns": "i",
    "came_back": "b",
    "downtime_ms": "f",
    "until_subscribed_ms": "f",
    "until_delivery_ms": "f",
    "strategy": "s",
}


def _schema(columns: Mapping[str, str]) -> Any:
    pyarrow = arrow()
    kinds = {"s": pyarrow.string(), "i": pyarrow.int64(), "f": pyarrow.float64(), "b": pyarrow.bool_()}
    return pyarrow.schema([(name, kinds[kind]) for name, kind in columns.items()])


def _since(gone_ns: int, at_ns: int | None) -> float | None:
    return None if at_ns is None else (at_ns - gone_ns) / 1e6


def _told(latency: dict[str, Numbers]) -> dict[str, Any]:
    """Without values where there was nothing to measure."""
    return {name: optional(values, ~np.isnan(values)) for name, values in latency.items()}


def _add(table: Any, keys: list[str]) -> Any:
    """Sums of all columns but those of extremes, by ``keys``."""
    ways = {"min_ns": "min", "max_ns": "max"}
    others = [name for name in table.column_names if name not in keys]
    found = table.group_by(keys, use_threads=False).aggregate([(name, ways.get(name, "sum")) for name in others])
    return found.select([*keys, *(f"{name}_{ways.get(name, 'sum')}" for name in others)]).rename_columns([*keys, *others])


def worst(parts: Iterator[Any], by: list[str], rows: int) -> list[dict[str, Any]]:
    """Of each run, the rows with the largest values, nulls last; from tables that come one after the other."""
    found: dict[str, Any] = {}
    pyarrow = arrow()
    for part in parts:
        for run in part["run"].unique().to_pylist():
            mine = part.filter(pyarrow.compute.equal(part["run"], run))
            mine = mine if run not in found else pyarrow.concat_tables([found[run], mine])
            found[run] = mine.sort_by([(name, "descending") for name in by]).slice(0, rows)
    return [row for _, table in sorted(found.items()) for row in table.to_pylist()]
