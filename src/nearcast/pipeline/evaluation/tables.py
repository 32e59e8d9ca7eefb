"""The tables of an evaluation, made from what the passes left behind. Each is a DataFrame; docs/guides/evaluating.md lists
them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention
from pyspark.sql.window import Window

from nearcast.pipeline.evaluation import brokers, keys
from nearcast.pipeline.evaluation.deliveries import BY_EPISODE, BY_SITES, BY_TIME, BY_TOPIC
from nearcast.pipeline.evaluation.histograms import GROWTH, PERCENTILES, distribution, lower_ms

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column, DataFrame

    from nearcast.pipeline.evaluation.passes import Passes

LATENCY = ("samples", "mean_ms", "min_ms", *PERCENTILES, "max_ms")
CAUSES = ("away", "unacknowledged", "qos_0", "unexplained")


def _zero(name: str) -> Column:
    return F.coalesce(F.col(name), F.lit(0)).alias(name)


def _share(part: Column, whole: Column) -> Column:
    return F.when(whole > 0, part / whole)


class Tables:
    """All of them by name, in :attr:`all`."""

    def __init__(self, passes: Passes, strategies: Mapping[str, str]) -> None:
        self._passes = passes
        spark = passes.runs.sparkSession
        labels = spark.createDataFrame(list(strategies.items()), "run string, strategy string")
        self._runs = F.broadcast(passes.runs.join(labels, "run", "left").select("*").orderBy("run_code"))
        self._names = F.broadcast(passes.runs.select("run_code", "run"))
        self.flows = passes.keep("flows", self._flows())
        self.episodes = passes.keep("episodes", self._episodes())
        self.all: dict[str, DataFrame] = {
            "flows": self.flows,
            "topics": self._topics(),
            "timeline": self._timeline(),
            "histogram": self._histogram(),
            "episodes": self.episodes,
            "losses": self._losses(),
            "brokers": self._brokers(),
            "downtime": passes.downtime.join(F.broadcast(labels), "run", "left"),
            "refusals": self._refusals(),
        }
        if passes.site_names:
            self.all["site_pairs"] = self._site_pairs()

    def _flows(self) -> DataFrame:
        """What each subscriber got of each stream, and what it should have got."""
        sums = ("deliveries", "samples", "late", "duplicates", "out_of_order", "retained", "bytes", "got", "got_late")
        came = (
            self._passes.cells.where(F.col("part") == BY_EPISODE)
            .groupBy("flow")
            .agg(
                *(F.sum(name).alias(name) for name in sums),
                (F.sum("latency_ms") / F.sum("samples")).alias("mean_ms"),
                (F.max("max_ns") / 1e6).alias("max_ms"),
            )
        )
        lost = self._passes.lost.groupBy("flow").agg(
            F.count("*").alias("lost"), *(F.count_if(F.col("cause") == cause).alias(f"lost_{cause}") for cause in CAUSES)
        )
        names = ["run", "publisher", "subscriber", "stream", "topic"]
        got = (
            self._passes.census.where(F.col("kind") == "delivered")
            .select(*names)
            .distinct()
            .withColumn("flow", keys.flow_key())
            .join(came, "flow")
        )
        wanted = self._passes.flows.select("flow", *(F.col(name).alias(f"_{name}") for name in names), "expected")
        bounds = self._passes.topics.select(F.col("run"), F.col("topic"), (F.col("bound_ns") / 1e6).alias("bound_ms"))
        losses = [_zero(name) for name in ("lost", *(f"lost_{cause}" for cause in CAUSES))]
        return (
            got.join(wanted, "flow", "full")
            .select(
                "flow",
                *(F.coalesce(name, f"_{name}").alias(name) for name in names),
                F.col("expected").isNotNull().alias("entitled"),
                _zero("expected"),
                *(_zero(name) for name in sums),
                "mean_ms",
                "max_ms",
            )
            .join(lost, "flow", "left")
            .select(*names, "flow", "entitled", "expected", *sums, *losses, "mean_ms", "max_ms")
            .join(bounds, ["run", "topic"], "left")
            .withColumn(
                "violations", F.when(F.col("bound_ms").isNotNull() & F.col("entitled"), F.col("got_late") + F.col("lost"))
            )
            .withColumn("bounded", F.when(F.col("violations").isNotNull(), F.col("expected")))
        )

    def _episodes(self) -> DataFrame:
        """Each time that a flow was above its bound without a break."""
        names = ["run", "publisher", "subscriber", "stream", "topic"]
        starts = F.broadcast(self._passes.runs.select("run", "start_ns"))
        return (
            self._passes.cells.where((F.col("part") == BY_EPISODE) & F.col("episode").isNotNull())
            .select("flow", "late", "due_ns", "last_ns", (F.col("max_ns") / 1e6).alias("worst_ms"))
            .join(self.flows.select("flow", *names, "bound_ms"), "flow")
            .join(starts, "run")
            .select(
                *names,
                "bound_ms",
                F.col("due_ns").alias("begin_ns"),
                F.col("last_ns").alias("end_ns"),
                ((F.col("due_ns") - F.col("start_ns")) / 1e9).alias("begin_s"),
                ((F.col("last_ns") - F.col("due_ns")) / 1e6).alias("duration_ms"),
                F.col("late").alias("messages"),
                "worst_ms",
            )
        )

    def _topics(self) -> DataFrame:
        cells = self._passes.cells.where(F.col("part") == BY_TOPIC)
        latency = distribution(cells, ["topic_key"])
        flows = self.flows.groupBy("run", "topic").agg(
            *(
                F.sum(name).alias(name)
                for name in (
                    "expected",
                    "deliveries",
                    "late",
                    "lost",
                    "duplicates",
                    "out_of_order",
                    "retained",
                    "bytes",
                    "violations",
                    "bounded",
                )
            )
        )
        published = (
            self._passes.census.where(F.col("kind") == "published")
            .groupBy("run", "topic")
            .agg(F.sum("messages").alias("published"))
        )
        episodes = self.episodes.groupBy("run", "topic").agg(
            F.count("*").alias("episodes"),
            F.sum("duration_ms").alias("violation_ms"),
            F.max("duration_ms").alias("longest_ms"),
        )
        counts = ("expected", "deliveries", "lost", "duplicates", "out_of_order", "retained", "bytes", "late")
        return (
            self._passes.topics.join(published, ["run", "topic"], "left")
            .join(flows, ["run", "topic"], "left")
            .join(latency, "topic_key", "left")
            .join(episodes, ["run", "topic"], "left")
            .select(
                "run",
                "topic",
                (F.col("bound_ns") / 1e6).alias("bound_ms"),
                _zero("published"),
                *(_zero(name) for name in counts),
                *LATENCY,
                "violations",
                _share(F.col("violations"), F.col("bounded")).alias("violation_ratio"),
                _zero("episodes"),
                _zero("violation_ms"),
                _zero("longest_ms"),
            )
        )

    def _site_pairs(self) -> DataFrame:
        spark = self._passes.runs.sparkSession
        sites = spark.createDataFrame(list(enumerate(self._passes.site_names)), "code int, site string")
        cells = self._passes.cells.where((F.col("part") == BY_SITES) & F.col("pair").isNotNull())
        found = distribution(cells, ["run_code", "pair"], ["deliveries", "late", "duplicates", "out_of_order", "bytes"])
        return (
            found.withColumns({"_from": F.expr("pair div 65536").cast("int"), "_to": (F.col("pair") % 65_536).cast("int")})
            .join(F.broadcast(sites.toDF("_from", "publisher_site")), "_from")
            .join(F.broadcast(sites.toDF("_to", "subscriber_site")), "_to")
            .join(self._names, "run_code")
            .select(
                "run",
                "publisher_site",
                "subscriber_site",
                "deliveries",
                *LATENCY,
                "late",
                "duplicates",
                "out_of_order",
                "bytes",
            )
        )

    def _timeline(self) -> DataFrame:
        """Pieces of time since the run's first message: deliveries by when they came, messages by when they were sent."""
        cells = self._passes.cells.where(F.col("part") == BY_TIME)
        came = distribution(cells, ["run_code", "slot"], ["deliveries", "late", "duplicates", "out_of_order", "bytes"])
        sent = self._passes.published.where(F.col("slot").isNotNull()).select(
            "run_code", "slot", "published", F.col("bytes").alias("published_bytes")
        )
        starts = F.broadcast(self._passes.runs.select("run", "run_code", "start_ns"))
        lost = (
            self._passes.lost.join(starts, "run")
            .select(
                "run_code", F.expr(f"greatest(0, (sent_ns - start_ns) div {self._passes.slot_ns})").cast("int").alias("slot")
            )
            .groupBy("run_code", "slot")
            .agg(F.count("*").alias("lost"))
        )
        seconds = self._passes.slot_ns / 1e9
        both = came.withColumnRenamed("bytes", "delivered_bytes").join(sent, ["run_code", "slot"], "full")
        counts = (
            "published",
            "published_bytes",
            "deliveries",
            "delivered_bytes",
            "late",
            "lost",
            "duplicates",
            "out_of_order",
        )
        return (
            both.join(lost, ["run_code", "slot"], "full")
            .join(self._names, "run_code")
            .select(
                "run",
                (F.col("slot") * seconds).alias("at_s"),
                F.lit(seconds).alias("seconds"),
                *(_zero(name) for name in counts),
                *(
                    (F.coalesce(F.col(name), F.lit(0)) / seconds).alias(f"{name}_per_s")
                    for name in ("published", "published_bytes", "deliveries", "delivered_bytes")
                ),
                *LATENCY,
            )
        )

    def _histogram(self) -> DataFrame:
        """All latencies of each run by bucket, and the share of all up to its end."""
        cells = self._passes.cells.where((F.col("part") == BY_TIME) & F.col("bucket").isNotNull())
        merged = cells.groupBy("run_code", "bucket").agg(F.sum("samples").alias("samples"))
        order = Window.partitionBy("run_code").orderBy("bucket")
        upto = F.sum("samples").over(order.rowsBetween(Window.unboundedPreceding, 0))
        total = F.sum("samples").over(Window.partitionBy("run_code"))
        low = lower_ms(F.col("bucket"))
        return (
            merged.select(
                "run_code",
                "bucket",
                low.alias("from_ms"),
                F.when(F.col("bucket") < 0, 0.0).when(F.col("bucket") == 0, 0.001).otherwise(low * GROWTH).alias("to_ms"),
                "samples",
                (upto / total).alias("share"),
            )
            .join(self._names, "run_code")
            .select("run", "bucket", "from_ms", "to_ms", "samples", "share")
        )

    def _losses(self) -> DataFrame:
        return self._passes.lost.drop("flow")

    def _brokers(self) -> DataFrame:
        columns = ("carried_messages", "carried_bytes", "excess_messages", "excess_bytes")
        traffic = ("published_messages", "published_bytes", "delivered_messages", "delivered_bytes")
        return (
            brokers.traffic(self._passes.census)
            .join(self._passes.carried, ["run", "broker"], "full")
            .join(self._runs.select("run", "strategy"), "run", "left")
            .select(
                "run",
                "strategy",
                "broker",
                *(_zero(name) for name in (*traffic, *columns)),
                _share(F.col("excess_bytes"), F.col("carried_bytes")).alias("excess_share"),
            )
        )

    def _refusals(self) -> DataFrame:
        refused = self._passes.census.where(F.col("kind").isin("refused", "skipped"))
        in_vain = self._passes.connections.where(F.col("kind") == "unconnected")
        return (
            refused.groupBy("run", "kind", "reason")
            .agg(F.sum("messages").alias("events"))
            .unionByName(in_vain.groupBy("run", "kind", "reason").agg(F.count("*").alias("events")))
        )

    def runs(self) -> DataFrame:
        """One row for each run."""
        passes = self._passes
        counts = passes.census.groupBy("run").agg(
            *(
                F.sum(F.when(F.col("kind") == kind, F.col("messages")).otherwise(0)).alias(kind)
                for kind in ("published", "acknowledged", "refused", "skipped", "delivered")
            ),
            F.sum(F.when(F.col("kind") == "published", F.col("bytes")).otherwise(0)).alias("published_bytes"),
            F.sum(F.when(F.col("kind") == "delivered", F.col("bytes")).otherwise(0)).alias("delivered_bytes"),
            F.sum(F.when(F.col("kind") == "published", F.col("late_to_send")).otherwise(0)).alias("late_to_send"),
        )
        latency = distribution(passes.cells.where(F.col("part") == BY_TIME), ["run_code"])
        flows = self.flows.groupBy("run").agg(
            F.count("*").alias("flows"),
            F.countDistinct("topic").alias("topics"),
            F.countDistinct("publisher").alias("publishers"),
            F.countDistinct("subscriber").alias("subscribers"),
            *(
                F.sum(name).alias(name)
                for name in (
                    "expected",
                    "got",
                    "late",
                    "lost",
                    *(f"lost_{cause}" for cause in CAUSES),
                    "duplicates",
                    "out_of_order",
                    "retained",
                    "violations",
                    "bounded",
                )
            ),
            F.sum(F.when(~F.col("entitled"), F.col("deliveries")).otherwise(0)).alias("unexpected"),
        )
        episodes = self.episodes.groupBy("run").agg(
            F.count("*").alias("episodes"),
            F.sum("duration_ms").alias("violation_ms"),
            F.max("duration_ms").alias("longest_violation_ms"),
            F.percentile("duration_ms", 0.5).alias("median_violation_ms"),
        )
        away = passes.downtime.groupBy("run").agg(
            F.count("*").alias("outages"),
            F.count_if(~F.col("came_back")).alias("never_back"),
            F.count_if(F.coalesce("moved", F.lit(False))).alias("moves"),
            F.sum("downtime_ms").alias("downtime_ms"),
            F.percentile("downtime_ms", F.array(F.lit(0.5), F.lit(0.9), F.lit(1.0))).alias("_downtime"),
            F.percentile("until_delivery_ms", F.array(F.lit(0.5), F.lit(0.9), F.lit(1.0))).alias("_delivery"),
        )
        carried = passes.carried.groupBy("run").agg(
            *(F.sum(name).alias(name) for name in ("carried_messages", "carried_bytes", "excess_messages", "excess_bytes"))
        )
        joined = self._runs
        for table in (counts, flows, episodes, away, carried):
            joined = joined.join(table, "run", "left")
        joined = joined.join(latency, "run_code", "left")
        quantiles = [
            F.col(column)[position].alias(f"{name}_{label}_ms")
            for column, name in (("_downtime", "downtime"), ("_delivery", "until_delivery"))
            for position, label in enumerate(("p50", "p90", "max"))
        ]
        zero = (
            "published",
            "acknowledged",
            "refused",
            "skipped",
            "delivered",
            "published_bytes",
            "delivered_bytes",
            "late_to_send",
            "flows",
            "topics",
            "publishers",
            "subscribers",
            "expected",
            "got",
            "late",
            "lost",
            "lost_away",
            "lost_unacknowledged",
            "lost_qos_0",
            "lost_unexplained",
            "duplicates",
            "out_of_order",
            "retained",
            "unexpected",
            "episodes",
            "violation_ms",
            "outages",
            "never_back",
            "moves",
            "downtime_ms",
            "carried_messages",
            "carried_bytes",
            "excess_messages",
            "excess_bytes",
        )
        return joined.select(
            "run",
            "strategy",
            "start_ns",
            "end_ns",
            ((F.col("end_ns") - F.col("start_ns")) / 1e9).alias("duration_s"),
            *(_zero(name) for name in zero),
            _share(F.col("lost"), F.col("expected")).alias("loss_ratio"),
            *LATENCY,
            "violations",
            _share(F.col("violations"), F.col("bounded")).alias("violation_ratio"),
            "median_violation_ms",
            "longest_violation_ms",
            *quantiles,
            _share(F.col("excess_bytes"), F.col("carried_bytes")).alias("excess_share"),
        )
