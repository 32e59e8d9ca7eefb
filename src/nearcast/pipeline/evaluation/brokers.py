"""What brokers carried, and for whom: excess data as the broadcast-group paper counts it (section IV-D).

A broker *carried* a message when it is on the path of an event of it. That was right when the publisher is connected there,
or a client there was subscribed to it when it was sent; all else is excess. Each message counts once per broker.

Of what brokers send each other for nobody, clients see only what lies on the way of something that arrived. Brokers that
record events of the kind ``carried`` (``path``: their own name) are counted in full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention
from pyspark.sql.window import Window

from nearcast.pipeline.evaluation import keys

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_FOR_EVER = 2**63 - 1


def presence(connections: DataFrame) -> DataFrame:
    """Where each client was: ``run, client, broker, from_ns, until_ns``. At a broker until it appears at another one."""
    life = Window.partitionBy("run", "client").orderBy("at_ns")
    seen = connections.where(F.col("kind").isin("connected", "subscribed") & F.col("broker").isNotNull())
    arrived = seen.withColumn("before", F.lag("broker").over(life)).where(
        F.col("before").isNull() | (F.col("before") != F.col("broker"))
    )
    return arrived.select(
        "run",
        "client",
        "broker",
        F.col("at_ns").alias("from_ns"),
        F.coalesce(F.lead("at_ns").over(life), F.lit(_FOR_EVER)).alias("until_ns"),
    )


def wanted(clients: DataFrame, present: DataFrame) -> DataFrame:
    """When somebody at a broker wanted a topic, without overlaps: ``place_key, from_ns, until_ns``."""
    spans = (
        clients.join(present.withColumnRenamed("client", "subscriber"), ["run", "subscriber"])
        .select(
            _place_key("broker").alias("place_key"),
            F.greatest("entitled_ns", "from_ns").alias("from_ns"),
            "until_ns",
        )
        .where(F.col("from_ns") < F.col("until_ns"))
    )
    order = Window.partitionBy("place_key").orderBy("from_ns", "until_ns")
    reached = F.max("until_ns").over(order.rowsBetween(Window.unboundedPreceding, -1))
    starts = spans.withColumn("begins", F.coalesce(F.col("from_ns") > reached, F.lit(True)).cast("int"))
    numbered = starts.withColumn("span", F.sum("begins").over(order.rowsBetween(Window.unboundedPreceding, 0)))
    return (
        numbered.groupBy("place_key", "span")
        .agg(F.min("from_ns").alias("from_ns"), F.max("until_ns").alias("until_ns"))
        .drop("span")
    )


def _place_key(broker: str | Column) -> Column:
    return F.xxhash64("run", "topic", broker)


def carried(events: DataFrame, counted: DataFrame, places: DataFrame, *, beyond_home: bool) -> DataFrame:
    """``run, broker, carried_messages, carried_bytes, excess_messages, excess_bytes``. ``beyond_home``: whether any message
    was seen at another broker than its publisher's; if not, the census has all of it."""
    at_home = (
        counted.where(F.col("kind") == "published")
        .select("run", F.try_element_at("path", F.lit(1)).alias("broker"), "messages", "bytes")
        .where(F.col("broker").isNotNull())
        .groupBy("run", "broker")
        .agg(F.sum("messages").alias("carried_messages"), F.sum("bytes").alias("carried_bytes"))
        .withColumns({"excess_messages": F.lit(0).cast("bigint"), "excess_bytes": F.lit(0).cast("bigint")})
    )
    if not beyond_home:
        return at_home
    # Where a publisher has one broker all the time, what passes there was counted when it was published.
    homes = (
        counted.where((F.col("kind") == "published") & (F.size("path") > 0))
        .groupBy("run", "publisher")
        .agg(F.collect_set(F.col("path")[0]).alias("homes"))
        .select(keys.client_key("publisher").alias("home_key"), "homes")
    )
    passed = (
        events.where(F.col("kind").isin("delivered", "carried") & F.col("message_id").isNotNull() & (F.size("path") > 0))
        .select("run", "topic", "publisher", "message_id", "sent_ns", "size_bytes", "path")
        .join(homes, keys.client_key("publisher") == F.col("home_key"), "left")
        .select("run", "topic", "message_id", "sent_ns", "size_bytes", "homes", F.explode("path").alias("broker"))
    )
    # Spark would explode first and filter after; the paths of most deliveries are short, so that costs little.
    foreign = passed.where(F.col("homes").isNull() | ~F.array_contains("homes", F.col("broker")))
    once = foreign.groupBy(F.xxhash64("run", "broker").alias("at"), _place_key("broker").alias("place_key"), "message_id").agg(
        F.min("sent_ns").alias("sent_ns"), F.max("size_bytes").cast("bigint").alias("size_bytes")
    )
    served = (
        (F.col("place_key") == F.col("wanted_key"))
        & (F.col("sent_ns") >= F.col("from_ns"))
        & (F.col("sent_ns") < F.col("until_ns"))
    )
    spans = places.withColumnRenamed("place_key", "wanted_key")
    sums = (
        once.join(spans, served, "left")
        .groupBy("at")
        .agg(
            F.count("*").alias("carried_messages"),
            F.sum("size_bytes").alias("carried_bytes"),
            F.count_if(F.col("wanted_key").isNull()).alias("excess_messages"),
            F.sum(F.when(F.col("wanted_key").isNull(), F.col("size_bytes")).otherwise(0)).alias("excess_bytes"),
        )
    )
    names = counted.select("run", F.explode("path").alias("broker")).distinct().withColumn("at", F.xxhash64("run", "broker"))
    elsewhere = names.join(sums, "at").drop("at")
    columns = ["carried_messages", "carried_bytes", "excess_messages", "excess_bytes"]
    return (
        at_home.select("run", "broker", *columns)
        .unionByName(elsewhere.select("run", "broker", *columns))
        .groupBy("run", "broker")
        .agg(*(F.sum(name).alias(name) for name in columns))
    )


def traffic(counted: DataFrame) -> DataFrame:
    """What clients of each broker gave to it and got from it: ``run, broker, published_messages, published_bytes,
    delivered_messages, delivered_bytes``."""
    first = F.try_element_at("path", F.lit(1))
    last = F.try_element_at("path", F.lit(-1))
    by_kind = counted.where(F.col("kind").isin("published", "delivered")).select(
        "run", "kind", "messages", "bytes", F.when(F.col("kind") == "published", first).otherwise(last).alias("broker")
    )
    return (
        by_kind.where(F.col("broker").isNotNull())
        .groupBy("run", "broker")
        .agg(
            *(
                F.sum(F.when(F.col("kind") == kind, F.col(column)).otherwise(0)).alias(f"{kind}_{column}")
                for kind in ("published", "delivered")
                for column in ("messages", "bytes")
            )
        )
    )
