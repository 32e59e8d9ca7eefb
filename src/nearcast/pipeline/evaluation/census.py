"""A first look at all events: who published and got what, how often, over which brokers; and all events of connections.

One aggregation without a shuffle of rows. It answers what needs no message's identity, and brings the names that belong to the
keys of the passes that do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention

from nearcast.pipeline.evaluation import keys

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MESSAGE_KINDS = ("published", "acknowledged", "refused", "skipped", "delivered", "carried")
CONNECTION_KINDS = ("connected", "subscribed", "disconnected", "unconnected")

LATE_TO_SEND_NS = 10_000_000
"""A message sent so much later than due counts as late, as in load processes."""


def census(events: DataFrame) -> DataFrame:
    """Counts by ``run, kind, topic, publisher, subscriber, stream, path`` (and the reason of what was refused or skipped)."""
    lag = F.col("sent_ns") - F.col("due_ns")
    incomplete = (F.col("kind") == "published") & _missing("message_id", "topic", "publisher", "sent_ns") | (
        F.col("kind") == "delivered"
    ) & _missing("message_id", "topic", "publisher", "subscriber", "sent_ns", "received_ns")
    return (
        events.where(F.col("kind").isin(*MESSAGE_KINDS))
        .groupBy(
            "run",
            "kind",
            "topic",
            "publisher",
            "subscriber",
            "stream",
            "path",
            F.when(F.col("kind").isin("refused", "skipped"), F.col("reason")).alias("reason"),
        )
        .agg(
            F.count("*").alias("messages"),
            F.sum(F.col("size_bytes").cast("bigint")).alias("bytes"),
            F.count_if(incomplete).alias("incomplete"),
            F.min("at_ns").alias("first_ns"),
            F.max("at_ns").alias("last_ns"),
            F.min("sequence").alias("lowest"),
            F.max("sequence").alias("highest"),
            F.count("sequence").alias("numbered"),
            F.count_if(lag >= LATE_TO_SEND_NS).alias("late_to_send"),
            F.count_if(F.coalesce("retained", F.lit(False))).alias("retained"),
        )
    )


def _missing(*names: str) -> Column:
    return F.greatest(*(F.col(name).isNull() for name in names))


def connections(events: DataFrame) -> DataFrame:
    """The events of connections: ``run, kind, at_ns, client, topic, qos, broker, reason``."""
    return events.where(F.col("kind").isin(*CONNECTION_KINDS)).select(
        "run", "kind", "at_ns", "client", "topic", "qos", F.try_element_at("path", F.lit(1)).alias("broker"), "reason"
    )


def streams(counted: DataFrame) -> DataFrame:
    """What was published: ``run, publisher, stream, topic, stream_key, published, numbered, numbers, homes``. ``numbers`` is
    how many numbers lie between the first and the last, ``homes`` are the brokers that its publisher was connected to."""
    return (
        counted.where((F.col("kind") == "published") & F.col("topic").isNotNull() & F.col("publisher").isNotNull())
        .groupBy("run", "publisher", "stream", "topic")
        .agg(
            F.sum("messages").alias("published"),
            F.sum("numbered").alias("numbered"),
            (F.max("highest") - F.min("lowest") + 1).alias("numbers"),
            F.collect_set(F.try_element_at("path", F.lit(1))).alias("homes"),
        )
        .withColumn("stream_key", keys.stream_key())
    )
