"""Everything that follows from ``delivered`` events, in one pass over them: one shuffle, one sort, one window, one
aggregation.

A *flow* is what one subscriber gets of one stream (publisher, stream, topic). Rows are brought together by flow and ordered by
the number of the message in its stream, newest first. In that order

- a row whose message is that of the row before is a duplicate;
- a first delivery is out of order when a newer message arrived before it, that is, when the smallest arrival of the rows
  before
  is earlier;
- late messages with none in time between them, an *episode*, share the number of rows in time before them.

What comes out is cells: counts and sums of each flow and episode, and of each latency bucket by topic, by pair of sites and by
time. They are few, and all tables are made from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention
from pyspark.sql.window import Window

from nearcast.pipeline.evaluation import keys
from nearcast.pipeline.evaluation.histograms import bucket

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

BY_EPISODE, BY_TOPIC, BY_SITES, BY_TIME = "episode", "topic", "sites", "time"


def live_deliveries(events: DataFrame) -> DataFrame:
    """The ``delivered`` events that say all that their kind has to say."""
    whole = [F.col(name).isNotNull() for name in ("message_id", "topic", "publisher", "subscriber", "sent_ns", "received_ns")]
    condition = F.col("kind") == "delivered"
    for each in whole:
        condition &= each
    return events.where(condition)


def cells(
    events: DataFrame,
    runs: DataFrame,
    slot_ns: int,
    *,
    bounds: DataFrame | int | None,
    sites: DataFrame | None,
    starts: DataFrame | None,
) -> DataFrame:
    """The cells.

    ``runs``: ``run, run_code, start_ns, cutoff_ns``. ``bounds``: ``topic_key, bound_ns``, or one for all. ``sites``:
    ``client_key, from_ns, until_ns, site_code``. ``starts``: ``flow, entitled_ns`` of those flows whose subscriber came after
    the first message.
    """
    rows = live_deliveries(events).join(F.broadcast(runs), "run")
    pair: Column = F.lit(None).cast("int")
    columns: list[Column | str] = [
        keys.flow_key().alias("flow"),
        F.coalesce("sequence", "sent_ns").alias("position"),
        "message_id",
        F.coalesce("retained", F.lit(False)).alias("retained"),
        "sent_ns",
        "received_ns",
        F.coalesce("size_bytes", F.lit(0)).alias("size_bytes"),
        keys.topic_key().alias("topic_key"),
        "run_code",
        F.expr(f"greatest(0, (received_ns - start_ns) div {slot_ns})").cast("int").alias("slot"),
        (F.col("sent_ns") < F.col("cutoff_ns")).alias("counts"),
    ]
    if sites is not None:
        for role, moment in (("publisher", "sent_ns"), ("subscriber", "received_ns")):
            places = F.broadcast(sites.select([F.col(name).alias(f"{role}_{name}") for name in sites.columns]))
            here = (
                (keys.client_key(role) == F.col(f"{role}_client_key"))
                & (F.col(moment) >= F.col(f"{role}_from_ns"))
                & (F.col(moment) < F.col(f"{role}_until_ns"))
            )
            rows = rows.join(places, here, "left")
        pair = F.col("publisher_site_code") * 65_536 + F.col("subscriber_site_code")
    rows = rows.select(*columns, pair.cast("int").alias("pair"))
    if isinstance(bounds, int):
        rows = rows.withColumn("bound_ns", F.lit(bounds).cast("bigint"))
    elif bounds is not None:
        rows = rows.join(bounds, "topic_key", "left")
    else:
        rows = rows.withColumn("bound_ns", F.lit(None).cast("bigint"))
    rows = rows.repartition("flow")
    if starts is not None:
        rows = rows.join(starts, "flow", "left")
        rows = rows.withColumn("counts", F.col("counts") & (F.col("sent_ns") >= F.coalesce("entitled_ns", F.lit(-(2**63)))))
    return _aggregated(_ordered(rows), with_sites=sites is not None)


def _ordered(rows: DataFrame) -> DataFrame:
    latency = F.col("received_ns") - F.col("sent_ns")
    live = ~F.col("retained")
    late = F.coalesce(live & (latency > F.col("bound_ns")), F.lit(False))
    order = Window.partitionBy("flow").orderBy(F.desc("position"), "message_id", "retained", "received_ns")
    before = order.rowsBetween(Window.unboundedPreceding, -1)
    seen = order.rowsBetween(Window.unboundedPreceding, 0)
    return rows.select(
        "*",
        F.coalesce(F.lag("message_id").over(order) != F.col("message_id"), F.lit(True)).alias("first"),
        F.min(F.when(live, F.col("received_ns"))).over(before).alias("newer_ns"),
        # A second copy in time has a first in time beside it, so counting it too divides no episode.
        F.sum(F.when(live & ~late, 1).otherwise(0)).over(seen).alias("in_time"),
        latency.alias("latency_ns"),
        live.alias("live"),
        late.alias("is_late"),
    )


def _aggregated(rows: DataFrame, *, with_sites: bool) -> DataFrame:
    by_sites = "(run_code, pair, bucket), " if with_sites else ""
    sample = F.col("first") & F.col("live")
    late = F.col("first") & F.col("is_late")
    prepared = rows.select(
        "flow",
        F.when(late, F.col("in_time")).alias("episode"),
        "topic_key",
        "run_code",
        "pair",
        "slot",
        F.when(sample, bucket(F.col("latency_ns"))).alias("bucket"),
        F.when(sample, F.col("latency_ns")).alias("latency_ns"),
        late.alias("late"),
        (F.col("live") & ~F.col("first")).alias("duplicate"),
        (sample & (F.col("newer_ns") < F.col("received_ns"))).alias("disordered"),
        "retained",
        "size_bytes",
        (F.col("first") & F.col("counts")).alias("got"),
        (late & F.col("counts")).alias("got_late"),
        keys.fingerprint().alias("fingerprint"),
        F.when(late, F.col("sent_ns") + F.col("bound_ns")).alias("due_ns"),
        "received_ns",
    )
    view = "nearcast_evaluation_deliveries"
    prepared.createOrReplaceTempView(view)
    try:
        return prepared.sparkSession.sql(f"""
            select
              case grouping_id(run_code, flow, episode, topic_key, pair, slot, bucket)
                when {0b001111} then '{BY_EPISODE}' when {0b110110} then '{BY_TOPIC}'
                when {0b111010} then '{BY_SITES}' when {0b111100} then '{BY_TIME}' end as part,
              run_code, flow, episode, topic_key, pair, slot, bucket,
              count(*) as deliveries,
              count(latency_ns) as samples,
              sum(latency_ns / 1e6D) as latency_ms,
              min(latency_ns) as min_ns,
              max(latency_ns) as max_ns,
              count_if(late) as late,
              count_if(duplicate) as duplicates,
              count_if(disordered) as out_of_order,
              count_if(retained) as retained,
              sum(size_bytes) as bytes,
              count_if(got) as got,
              count_if(got_late) as got_late,
              bit_xor(if(got, fingerprint, 0L)) as got_fingerprint,
              min(due_ns) as due_ns,
              max(received_ns) as last_ns
            from {view}
            group by run_code, flow, episode, topic_key, pair, slot, bucket grouping sets (
              (run_code, flow, episode), (run_code, topic_key, bucket), {by_sites}(run_code, slot, bucket)
            )
        """)  # noqa: S608  # no word of it comes from outside
    finally:
        prepared.sparkSession.catalog.dropTempView(view)
