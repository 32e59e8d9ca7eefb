"""The passes over the events, in the order in which one needs the other; what they leave behind is small and kept.

What they find is written to files, and the next pass begins from those. Owns how often events are read: once for the census
and once each for connections, for what was published and for what was delivered; and again, in part, only where something was
lost, where clients lost their connections, and where messages passed other brokers than their publisher's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention

from nearcast.errors import PipelineError
from nearcast.pipeline.evaluation import brokers, census, deliveries, downtime, expectations, keys
from nearcast.pipeline.evaluation.filters import pattern
from nearcast.pipeline.evaluation.places import MAX_SITES, Bound, sites_of
from nearcast.recording.schema import COLUMNS, arrow

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import Column, DataFrame, SparkSession

    from nearcast.pipeline.evaluation.inputs import Inputs
    from nearcast.pipeline.progress import Progress

Links = Literal["auto", "linked", "separate"]

SCHEMA = ", ".join(f"`{column.name}` {column.spark}" for column in COLUMNS)
SLOTS = 120
"""About so many pieces of time, unless told otherwise."""

MAX_SLOTS = 100_000
_NICE_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 86_400)


def read_events(spark: SparkSession, inputs: Inputs) -> DataFrame:
    """All events; the column ``run`` is the run's name in results."""
    # File names are taken as they are, brackets and stars included.
    reader = spark.read.schema(SCHEMA).option("__globPaths__", "false")
    if not inputs.renamed:
        return reader.parquet(*(f"file://{path.absolute()}" for run in inputs.runs for path in run.files))
    tables = [
        reader.parquet(*(f"file://{path.absolute()}" for path in run.files)).withColumn("run", F.lit(run.name))
        for run in inputs.runs
    ]
    union = tables[0]
    for table in tables[1:]:
        union = union.unionByName(table)
    return union


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked of the passes."""

    bounds: Sequence[Bound] = ()
    sites: str | Path | None = None
    slot_ns: int | None = None
    settle_ns: int = 1_000_000_000
    links: Links = "auto"


class Passes:
    """Makes the passes when it is made; what they find is kept as files in ``work``."""

    def __init__(self, spark: SparkSession, inputs: Inputs, wanted: Wanted, work: Path, progress: Progress) -> None:
        self._spark = spark
        self._work = work.absolute()
        self._inputs = inputs
        self._wanted = wanted
        self.bounds = wanted.bounds
        self.notes: list[str] = []
        self.events = read_events(spark, inputs)
        progress.step("counting who published and got what")
        self.census = self.keep("census", census.census(self.events))
        self.connections = self.keep("connections", census.connections(self.events))
        self._look_at_runs()
        progress.step("matching subscriptions")
        self._find_topics()
        self._count_published()
        self._find_entitled()
        progress.step("ordering deliveries")
        self._order_deliveries()
        progress.step("looking for what was lost")
        self._find_lost()
        progress.step("what brokers carried, how long clients were away")
        self._count_carried()
        self._time_outages()

    def keep(self, name: str, table: DataFrame) -> DataFrame:
        """Write a table and read it from there: what follows is planned from a file of known size, not from all that led to
        it."""
        path = f"file://{self._work / name}.parquet"
        table.write.mode("overwrite").parquet(path)
        return self._spark.read.schema(table.schema).option("__globPaths__", "false").parquet(path)

    # -- runs --------------------------------------------------------------------------------------------------------------

    def _look_at_runs(self) -> None:
        """``runs``: ``run, run_code, start_ns, end_ns, cutoff_ns``; and whether their brokers are linked."""
        found = self._facts().orderBy("run").collect()
        if not found:
            raise PipelineError("the files hold no events of a kind that this version knows")
        for fact in found:
            if fact.mixed is not None:
                raise PipelineError(
                    f"the run {fact.run} holds more messages of {fact.mixed} than it has numbers for: events of two runs with "
                    "one name are mixed; keep each in a folder of its own and name both"
                )
            if fact.incomplete:
                self.notes.append(
                    f"{fact.run}: {fact.incomplete:,} events lack what their kind has to have; they are left out"
                )
        self.start_ns = {fact.run: fact.start_ns for fact in found}
        longest_ns = max(fact.end_ns - fact.start_ns for fact in found)
        self.slot_ns = self._wanted.slot_ns or _nice_ns(longest_ns)
        if longest_ns // self.slot_ns > MAX_SLOTS:
            raise PipelineError(
                f"{longest_ns / 1e9:,.0f} s are more than {MAX_SLOTS:,} pieces of {self.slot_ns / 1e9:g} s: lengthen --bucket"
            )
        rows = [
            (fact.run, number, fact.start_ns, fact.end_ns, fact.end_ns - self._wanted.settle_ns)
            for number, fact in enumerate(found)
        ]
        self.runs = self._spark.createDataFrame(
            rows, "run string, run_code int, start_ns bigint, end_ns bigint, cutoff_ns bigint"
        )
        told = self._wanted.links
        self.links = {fact.run: told if told != "auto" else ("linked" if fact.crossings else "separate") for fact in found}
        self.beyond_home = any(fact.crossings or fact.carried for fact in found)

    def _facts(self) -> DataFrame:
        """Of each run: when it began and ended; ``mixed``, a publisher with more messages than numbers for them (two
        recordings under one name); ``crossings``, flows that went from one broker to another."""
        is_message, is_carried = F.col("kind").isin(*census.MESSAGE_KINDS), F.col("kind") == "carried"
        everything = self.census.select("run", "kind", "first_ns", "last_ns", "incomplete").unionByName(
            self.connections.select(
                "run", "kind", F.col("at_ns").alias("first_ns"), F.col("at_ns").alias("last_ns"), F.lit(0).alias("incomplete")
            )
        )
        spans = everything.groupBy("run").agg(
            F.coalesce(F.min(F.when(is_message, F.col("first_ns"))), F.min("first_ns")).alias("start_ns"),
            F.max("last_ns").alias("end_ns"),
            F.sum("incomplete").alias("incomplete"),
            F.count_if(is_carried).alias("carried"),
        )
        streams = census.streams(self.census)
        mixed = streams.groupBy("run").agg(
            F.max(F.when(F.col("numbered") > F.col("numbers"), F.col("publisher"))).alias("mixed")
        )
        crossings = (
            self.census.where((F.col("kind") == "delivered") & (F.size("path") > 0))
            .withColumn("stream_key", keys.stream_key())
            .join(streams.select("stream_key", "homes"), "stream_key")
            .where((F.size("path") > 1) | ~F.array_contains("homes", F.try_element_at("path", F.lit(-1))))
            .groupBy("run")
            .agg(F.count("*").alias("crossings"))
        )
        return spans.join(mixed, "run", "left").join(crossings, "run", "left")

    # -- what can be expected ----------------------------------------------------------------------------------------------

    def _find_topics(self) -> None:
        """``topics``: ``run, topic, topic_key, bound_ns``."""
        topics = (
            self.census.where(F.col("kind").isin("published", "delivered") & F.col("topic").isNotNull())
            .select("run", "topic")
            .distinct()
        )
        bound: Column = F.lit(None).cast("bigint")
        for each in reversed(self._wanted.bounds):
            applies = F.col("topic").rlike(pattern(each.filter))
            if each.run is not None:
                applies &= F.col("run") == each.run
            bound = F.when(applies, F.lit(each.bound_ns).cast("bigint")).otherwise(bound)
        self.topics = self.keep(
            "known_topics", topics.select("run", "topic", keys.topic_key().alias("topic_key"), bound.alias("bound_ns"))
        )

    def _count_published(self) -> None:
        """``published``: by ``stream_key``, what can be expected; by ``run_code, slot``, all that was sent."""
        sent = (
            self.events.where((F.col("kind") == "published") & F.col("message_id").isNotNull() & F.col("sent_ns").isNotNull())
            .join(F.broadcast(self.runs), "run")
            .select(
                "run",
                "run_code",
                keys.stream_key().alias("stream_key"),
                "message_id",
                "sent_ns",
                F.coalesce("size_bytes", F.lit(0)).cast("bigint").alias("size_bytes"),
                F.expr(f"greatest(0, (sent_ns - start_ns) div {self.slot_ns})").cast("int").alias("slot"),
                (F.col("sent_ns") < F.col("cutoff_ns")).alias("counts"),
                keys.fingerprint().alias("mark"),
            )
        )
        refused = self.census.where(F.col("kind") == "refused").agg(F.sum("messages")).collect()[0][0] or 0
        if refused:
            names = self.events.where(F.col("kind") == "refused").select("run", "message_id").distinct()
            names = names.withColumn("refused", F.lit(True))
            sent = sent.join(names, ["run", "message_id"], "left")
            sent = sent.withColumn("counts", F.col("counts") & F.col("refused").isNull())
        self._refused = int(refused)
        view = "nearcast_evaluation_published"
        sent.createOrReplaceTempView(view)
        grouped = self._spark.sql(f"""
            select stream_key, run_code, slot,
              count(*) as published, sum(size_bytes) as bytes,
              count_if(counts) as messages, bit_xor(if(counts, mark, 0L)) as fingerprint,
              min(if(counts, sent_ns, null)) as first_sent_ns
            from {view} group by stream_key, run_code, slot grouping sets ((stream_key), (run_code, slot))
        """)  # noqa: S608  # no word of it comes from outside
        self._spark.catalog.dropTempView(view)
        self.published = self.keep("published", grouped)

    def _find_entitled(self) -> None:
        """``flows``: the entitled ones with ``expected`` and ``expected_fingerprint``; ``clients``: who may expect which
        topic."""
        subscriptions = expectations.subscriptions(self.connections)
        shared = self.connections.where(F.col("topic").startswith(expectations.SHARED)).count()
        if shared:
            self.notes.append(f"{shared:,} shared subscriptions: nobody is expected to get what one of a group gets")
        self.clients = self.keep("clients", expectations.entitled_clients(subscriptions, self.topics))
        apart = [(run,) for run, kind in self.links.items() if kind == "separate"]
        separate = self._spark.createDataFrame(apart, "run string")
        entitled = self.keep("entitled", expectations.entitled_flows(census.streams(self.census), self.clients, separate))
        totals = self.published.where(F.col("stream_key").isNotNull()).select(
            "stream_key", "messages", "fingerprint", "first_sent_ns"
        )
        self._late = self.keep("late", expectations.late(entitled, totals))
        self._late_flows = self._late.count()
        messages = self._messages()
        self.flows = self.keep("expected", expectations.expected(entitled, totals, messages, late_flows=self._late_flows))

    def _messages(self) -> DataFrame:
        return expectations.published_messages(self.events, self.runs, any_refused=self._refused > 0)

    # -- what came ---------------------------------------------------------------------------------------------------------

    def _order_deliveries(self) -> None:
        bounds: DataFrame | int | None = None
        found = [row.bound_ns for row in self.topics.select("bound_ns").distinct().limit(2).collect()]
        if len(found) == 1 and found[0] is not None:
            bounds = int(found[0])
        elif found != [None]:
            bounds = self.topics.where(F.col("bound_ns").isNotNull()).select("topic_key", "bound_ns")
        self.bounded = bounds is not None
        places = sites_of(self._inputs.runs, self._wanted.sites, self.start_ns)
        if len({place.site for place in places}) > MAX_SITES:
            self.notes.append(f"more than {MAX_SITES:,} sites: pairs of them are left out")
            places = []
        self.site_names = sorted({place.site for place in places})
        codes = {site: number for number, site in enumerate(self.site_names)}
        sites = None
        if places:
            table = self._spark.createDataFrame(
                arrow().table(
                    {
                        "run": [each.run for each in places],
                        "client": [each.client for each in places],
                        "from_ns": [each.from_ns for each in places],
                        "until_ns": [each.until_ns for each in places],
                        "site_code": [codes[each.site] for each in places],
                    }
                )
            )
            sites = table.select(keys.client_key("client").alias("client_key"), "from_ns", "until_ns", "site_code")
        starts = None
        if self._late_flows:
            starts = self._late.select("flow", "entitled_ns")
            if self._late_flows <= expectations.BROADCAST_ROWS:
                starts = F.broadcast(starts)
        table = deliveries.cells(self.events, self.runs, self.slot_ns, bounds=bounds, sites=sites, starts=starts)
        self.cells = self.keep("cells", table)

    def _find_lost(self) -> None:
        got = (
            self.cells.where(F.col("part") == deliveries.BY_EPISODE)
            .groupBy("flow")
            .agg(F.sum("got").alias("got"), F.bit_xor("got_fingerprint").alias("got_fingerprint"))
        )
        suspects = self.keep(
            "suspects",
            self.flows.join(got, "flow", "left").where(
                (F.coalesce("got", F.lit(0)) != F.col("expected"))
                | (F.coalesce("got_fingerprint", F.lit(0)) != F.col("expected_fingerprint"))
            ),
        )
        self.outages = self.keep("outages", downtime.outages(self.connections))
        count = suspects.count()
        missed = expectations.missing(self.events, self._messages(), suspects, suspect_flows=count)
        missed = self.keep("missing", missed if count else missed.where(F.lit(False)))
        lost = expectations.lost_messages(self.events, missed, suspects, self.outages, suspect_flows=count)
        self.lost = self.keep("lost", lost if count else lost.where(F.lit(False)))

    def _count_carried(self) -> None:
        places = brokers.wanted(self.clients, brokers.presence(self.connections))
        if self.beyond_home:
            places = self.keep("wanted", places)
        table = brokers.carried(self.events, self.census, places, beyond_home=self.beyond_home)
        self.carried = self.keep("carried", table)

    def _time_outages(self) -> None:
        table = downtime.downtime(self.events, self.outages, self.runs)
        self.downtime = self.keep("downtime", table if self.outages.limit(1).count() else table.where(F.lit(False)))


def _nice_ns(span_ns: int) -> int:
    wanted_s = span_ns / 1e9 / SLOTS
    return round(next((each for each in _NICE_S if each >= wanted_s), wanted_s) * 1e9)
