"""How long clients were away: from losing a connection to having one again, to the subscription, to the next message.

Events of connections are few; only the search for the next message looks at deliveries, and only at those of clients that were
away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention
from pyspark.sql.window import Window

from nearcast.pipeline.evaluation import keys
from nearcast.pipeline.evaluation.deliveries import live_deliveries

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def outages(connections: DataFrame) -> DataFrame:
    """One row for each time that a client that had been connected was not: ``run, client, gone_ns, back_ns, subscribed_ns,
    gone_again_ns, attempts, reason, broker_before, broker_after``. ``back_ns`` is null for one that never came back."""
    life = Window.partitionBy("run", "client").orderBy("at_ns", "rank")
    after = life.rowsBetween(1, Window.unboundedFollowing)
    ranked = connections.where(F.col("kind").isin("connected", "disconnected", "subscribed")).withColumn(
        # At the same nanosecond: gone, then back, then subscribed.
        "rank",
        F.when(F.col("kind") == "disconnected", 0).when(F.col("kind") == "connected", 1).otherwise(2),
    )
    is_connected, is_gone = F.col("kind") == "connected", F.col("kind") == "disconnected"
    # Attempts in vain say disconnected again: an outage begins with the first since the last connection.
    told = ranked.select(
        "*",
        F.last(F.when(F.col("rank") < 2, F.col("kind")), ignorenulls=True)
        .over(life.rowsBetween(Window.unboundedPreceding, -1))
        .alias("was"),
    )
    told = told.select(
        "*",
        F.first(F.when(is_connected, F.col("at_ns")), ignorenulls=True).over(after).alias("back_ns"),
        F.first(F.when(is_connected, F.col("broker")), ignorenulls=True).over(after).alias("broker_after"),
        F.last(F.when(is_connected, F.col("broker")), ignorenulls=True)
        .over(life.rowsBetween(Window.unboundedPreceding, -1))
        .alias("connected_to"),
        F.sum(F.when(is_connected, 1).otherwise(0)).over(life.rowsBetween(Window.unboundedPreceding, 0)).alias("lives"),
    )
    gone = told.where(is_gone)
    begun = gone.where(F.col("was") == "connected").select(
        "run",
        "client",
        F.col("at_ns").alias("gone_ns"),
        "back_ns",
        "reason",
        F.coalesce("connected_to", "broker").alias("broker_before"),
        "broker_after",
        "lives",
    )
    attempts = gone.groupBy("run", "client", "lives").agg((F.count("*") - 1).alias("failed_attempts"))
    subscribed = (
        told.where(F.col("kind") == "subscribed").groupBy("run", "client", "lives").agg(F.min("at_ns").alias("subscribed_ns"))
    )
    next_gone = Window.partitionBy("run", "client").orderBy("gone_ns")
    return (
        begun.join(attempts, ["run", "client", "lives"], "left")
        .join(subscribed.withColumn("lives", F.col("lives") - 1), ["run", "client", "lives"], "left")
        .withColumn("gone_again_ns", F.lead("gone_ns").over(next_gone))
        .drop("lives")
    )


def downtime(events: DataFrame, away: DataFrame, runs: DataFrame) -> DataFrame:
    """The outages with the first delivery after each, in milliseconds from losing the connection."""
    watched = F.broadcast(
        away.where(F.col("back_ns").isNotNull()).select(
            keys.client_key("client").alias("client_key"),
            "gone_ns",
            F.col("back_ns").alias("from_ns"),
            F.coalesce("gone_again_ns", F.lit(2**63 - 1)).alias("until_ns"),
        )
    )
    heard = live_deliveries(events).select(keys.client_key("subscriber").alias("key"), "received_ns")
    first = (
        heard.join(
            watched,
            (F.col("key") == F.col("client_key"))
            & (F.col("received_ns") >= F.col("from_ns"))
            & (F.col("received_ns") < F.col("until_ns")),
        )
        .groupBy("client_key", "gone_ns")
        .agg(F.min("received_ns").alias("first_delivery_ns"))
    )
    ends = F.broadcast(runs.select("run", "end_ns"))
    return (
        away.withColumn("client_key", keys.client_key("client"))
        .join(first, ["client_key", "gone_ns"], "left")
        .join(ends, "run")
        .select(
            "run",
            "client",
            "broker_before",
            "broker_after",
            (F.col("broker_before") != F.col("broker_after")).alias("moved"),
            "reason",
            "failed_attempts",
            "gone_ns",
            "back_ns",
            "subscribed_ns",
            "first_delivery_ns",
            F.col("back_ns").isNotNull().alias("came_back"),
            ((F.coalesce("back_ns", "end_ns") - F.col("gone_ns")) / 1e6).alias("downtime_ms"),
            ((F.col("subscribed_ns") - F.col("gone_ns")) / 1e6).alias("until_subscribed_ms"),
            ((F.col("first_delivery_ns") - F.col("gone_ns")) / 1e6).alias("until_delivery_ms"),
        )
    )
