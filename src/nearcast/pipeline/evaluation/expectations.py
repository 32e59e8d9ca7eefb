"""What should have been delivered, and what of it never was.

A subscriber is *entitled* to the messages of a stream that were sent after a subscription of its to a filter that matches
their topic was confirmed for the first time, until ``settle`` before the end of the run; not to those the broker refused.
Subscriptions last: a client that comes back has them again, as MQTT clients do.

How many that are is counted without pairing messages and subscribers: each stream's messages are counted once, and a flow
expects all of them, or all but those before its subscription. A flow that got as many messages, with the same exclusive or of
their hashes, lost none. Only the streams of the others are gone through message by message, to say which were lost and how.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention
from pyspark.sql.window import Window

from nearcast.pipeline.evaluation import keys
from nearcast.pipeline.evaluation.deliveries import live_deliveries
from nearcast.pipeline.evaluation.filters import match

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BROADCAST_ROWS = 500_000
"""Up to so many rows of keys are handed to every task; more are joined by shuffling."""

SHARED = "$share/"


def subscriptions(connections: DataFrame) -> DataFrame:
    """When each client was first subscribed to each filter, at the highest QoS: ``run, client, filter, entitled_ns, granted,
    brokers``. Shared subscriptions are left out: who of a group gets a message is the broker's choice."""
    confirmed = connections.where((F.col("kind") == "subscribed") & F.col("topic").isNotNull())
    return (
        confirmed.where(~F.col("topic").startswith(SHARED))
        .groupBy("run", "client", F.col("topic").alias("filter"))
        .agg(
            F.min("at_ns").alias("entitled_ns"),
            F.max(F.coalesce("qos", F.lit(0))).alias("granted"),
            F.collect_set("broker").alias("brokers"),
        )
    )


def entitled_clients(wanted: DataFrame, topics: DataFrame) -> DataFrame:
    """Who may expect what of each topic: ``run, subscriber, topic, entitled_ns, granted, brokers``."""
    return (
        wanted.join(match(wanted, topics), ["run", "filter"])
        .groupBy("run", F.col("client").alias("subscriber"), "topic")
        .agg(
            F.min("entitled_ns").alias("entitled_ns"),
            F.max("granted").alias("granted"),
            F.array_distinct(F.flatten(F.collect_list("brokers"))).alias("brokers"),
        )
    )


def entitled_flows(streams: DataFrame, clients: DataFrame, separate: DataFrame) -> DataFrame:
    """Every stream with each client that is entitled to it. ``separate`` names the runs whose brokers are not linked: there,
    only clients of the publisher's own broker are."""
    paired = streams.join(clients, ["run", "topic"]).join(
        F.broadcast(separate.withColumn("apart", F.lit(True))), "run", "left"
    )
    reachable = F.col("apart").isNull() | F.arrays_overlap("homes", "brokers")
    return paired.where(F.coalesce(reachable, F.lit(True))).select(
        "run",
        "publisher",
        "subscriber",
        "stream",
        "topic",
        "stream_key",
        keys.flow_key().alias("flow"),
        "entitled_ns",
        "granted",
    )


def published_messages(events: DataFrame, runs: DataFrame, *, any_refused: bool) -> DataFrame:
    """The messages that somebody may expect: sent, not refused, not in the last moments."""
    found = (
        events.where((F.col("kind") == "published") & F.col("message_id").isNotNull() & F.col("sent_ns").isNotNull())
        .join(F.broadcast(runs), "run")
        .where(F.col("sent_ns") < F.col("cutoff_ns"))
    )
    if not any_refused:
        return found
    refused = events.where(F.col("kind") == "refused").select("run", "message_id")
    return found.join(refused, ["run", "message_id"], "left_anti")


def expected(entitled: DataFrame, totals: DataFrame, messages: DataFrame, *, late_flows: int) -> DataFrame:
    """``entitled`` with ``expected`` and ``expected_fingerprint``. ``totals``: ``stream_key, messages, fingerprint,
    first_sent_ns`` of what can be expected of each stream. ``late_flows``: how many came after the first message of their
    stream."""
    joined = entitled.join(totals, "stream_key", "left")
    count, mark = F.coalesce("messages", F.lit(0)), F.coalesce("fingerprint", F.lit(0))
    if not late_flows:
        return joined.withColumns({"expected": count, "expected_fingerprint": mark}).drop("messages", "fingerprint")
    missed = _before(late(entitled, totals), messages, late_flows)
    return (
        joined.join(missed, "flow", "left")
        .withColumns(
            {
                "expected": count - F.coalesce("missed", F.lit(0)),
                "expected_fingerprint": mark.bitwiseXOR(F.coalesce("missed_fingerprint", F.lit(0))),
            }
        )
        .drop("messages", "fingerprint", "missed", "missed_fingerprint")
    )


def late(entitled: DataFrame, totals: DataFrame) -> DataFrame:
    """The flows whose subscriber came after the first message of the stream."""
    firsts = totals.select("stream_key", "first_sent_ns")
    return entitled.join(firsts, "stream_key").where(F.col("entitled_ns") > F.col("first_sent_ns")).drop("first_sent_ns")


def _before(late: DataFrame, messages: DataFrame, late_flows: int) -> DataFrame:
    """For each late flow, how many messages of its stream were sent before: ``flow, missed, missed_fingerprint``. A running
    count over messages and subscriptions together, in the order of time, instead of a pair of each with each."""
    marks = late.select(
        "stream_key",
        F.col("entitled_ns").alias("at_ns"),
        F.lit(0).alias("rank"),
        "flow",
        F.lit(0).alias("one"),
        F.lit(0).cast("bigint").alias("mark"),
    )
    wanted = late.select("stream_key").distinct()
    relevant = messages.withColumn("stream_key", keys.stream_key()).join(_small(wanted, late_flows), "stream_key", "left_semi")
    sent = relevant.select(
        "stream_key",
        F.col("sent_ns").alias("at_ns"),
        F.lit(1).alias("rank"),
        F.lit(None).cast("bigint").alias("flow"),
        F.lit(1).alias("one"),
        keys.fingerprint().alias("mark"),
    )
    until = Window.partitionBy("stream_key").orderBy("at_ns", "rank").rowsBetween(Window.unboundedPreceding, 0)
    running = (
        marks.unionByName(sent)
        .select("flow", F.sum("one").over(until).alias("missed"), F.bit_xor("mark").over(until).alias("missed_fingerprint"))
        .where(F.col("flow").isNotNull())
    )
    return running


def _small(table: DataFrame, rows: int) -> DataFrame:
    return F.broadcast(table) if rows <= BROADCAST_ROWS else table


def missing(events: DataFrame, messages: DataFrame, suspects: DataFrame, *, suspect_flows: int) -> DataFrame:
    """Every message that a flow expected and never got: ``flow, message_id, sequence, sent_ns, qos``. ``suspects`` are the
    flows that got something else than they expected."""
    streams = _small(suspects.select("stream_key").distinct(), suspect_flows)
    wanted = (
        messages.select(keys.stream_key().alias("stream_key"), "message_id", "sequence", "sent_ns", "qos")
        .join(streams, "stream_key", "left_semi")
        .join(_small(suspects.select("flow", "stream_key", "entitled_ns"), suspect_flows), "stream_key")
        .where(F.col("sent_ns") >= F.col("entitled_ns"))
        .select("flow", "message_id", "sequence", "sent_ns", "qos")
    )
    got = live_deliveries(events).select(keys.flow_key().alias("flow"), "message_id")
    got = got.join(_small(suspects.select("flow"), suspect_flows), "flow", "left_semi")
    return wanted.join(got, ["flow", "message_id"], "left_anti")


def lost_messages(
    events: DataFrame, missed: DataFrame, suspects: DataFrame, away: DataFrame, *, suspect_flows: int
) -> DataFrame:
    """The missing messages with names and causes: ``run, publisher, subscriber, stream, topic, message_id, sequence, sent_ns,
    qos, away, acknowledged, cause``."""
    # Names come back only now, to the few that are left.
    names = suspects.select("flow", "stream_key", "run", "publisher", "subscriber", "stream", "topic", "granted")
    lost = missed.join(_small(names, suspect_flows), "flow")
    acknowledged = (
        events.where(F.col("kind") == "acknowledged")
        .join(missed.select("message_id").distinct(), "message_id", "left_semi")
        .select(keys.stream_key().alias("ack_stream"), F.col("message_id").alias("ack_id"))
        .distinct()
    )
    absent = F.broadcast(
        away.select(
            F.col("run").alias("away_run"),
            F.col("client").alias("away_client"),
            "gone_ns",
            F.coalesce("back_ns", F.lit(2**63 - 1)).alias("back_ns"),
        )
    )
    gone = (
        (F.col("run") == F.col("away_run"))
        & (F.col("subscriber") == F.col("away_client"))
        & (F.col("sent_ns") >= F.col("gone_ns"))
        & (F.col("sent_ns") < F.col("back_ns"))
    )
    agreed = F.least(F.coalesce("qos", F.lit(0)), "granted").cast("int")
    told = (
        lost.join(
            acknowledged, (F.col("stream_key") == F.col("ack_stream")) & (F.col("message_id") == F.col("ack_id")), "left"
        )
        .join(absent, gone, "left")
        .select(
            "run",
            "publisher",
            "subscriber",
            "stream",
            "topic",
            "flow",
            "message_id",
            "sequence",
            "sent_ns",
            agreed.alias("qos"),
            F.col("gone_ns").isNotNull().alias("away"),
            F.col("ack_id").isNotNull().alias("acknowledged"),
            (F.coalesce("qos", F.lit(0)) > 0).alias("_acknowledgeable"),
        )
    )
    cause = (
        F.when(F.col("away"), "away")
        .when(F.col("_acknowledgeable") & ~F.col("acknowledged"), "unacknowledged")
        .when(F.col("qos") == 0, "qos_0")
        .otherwise("unexplained")
    )
    return told.withColumn("cause", cause).drop("_acknowledgeable")
