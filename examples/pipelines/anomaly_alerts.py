"""Alerts for sensors that suddenly read something else than they used to.

    nearcast pipeline run examples/pipelines/anomaly_alerts.py --set sigmas=5

For each sensor a running mean and variance are kept as state (transformWithState; RocksDB, in the checkpoint). A reading that
is more than `sigmas` standard deviations off, after `learn` readings, is published to alerts/NAME and does not become part of
the mean, unless readings have been off `learn` times in a row: then that is the new normal, and learning begins again.

Spark spends about 0.5 ms per sensor and micro-batch on state: this is for thousands of sensors, not for millions.
"""

from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from nearcast.pipeline.payloads import from_json, to_json

STATE = "count bigint, mean double, squares double, off bigint"
ALERT = "sensor string, at timestamp, celsius double, expected double, deviation double, sigmas double"


class Watch(StatefulProcessor):
    """One sensor's history in four numbers (Welford's method: the sum of squared deviations stays exact)."""

    def __init__(self, sigmas, learn):
        self.sigmas = sigmas
        self.learn = learn

    def init(self, handle):
        self.state = handle.getValueState("history", STATE)

    def handleInputRows(self, key, rows, timer_values):
        count, mean, squares, off = self.state.get() or (0, 0.0, 0.0, 0)
        for row in sorted(rows, key=lambda row: row.at):
            deviation = (squares / (count - 1)) ** 0.5 if count > 1 else 0.0
            distance = abs(row.celsius - mean)
            if count >= self.learn and distance > self.sigmas * max(deviation, 0.01):
                off += 1
                yield Row(
                    sensor=key[0],
                    at=row.at,
                    celsius=row.celsius,
                    expected=mean,
                    deviation=deviation,
                    sigmas=distance / max(deviation, 0.01),
                )
                if off < self.learn:
                    continue
                count, mean, squares = 0, 0.0, 0.0
            off = 0
            count += 1
            step = row.celsius - mean
            mean += step / count
            squares += step * (row.celsius - mean)
        self.state.update((count, mean, squares, off))

    def close(self):
        pass


def pipeline(spark, topics):
    spark.conf.set(
        "spark.sql.streaming.stateStore.providerClass",
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    )
    watch = Watch(float(topics.parameters.get("sigmas", "5")), int(topics.parameters.get("learn", "20")))
    messages = topics.stream("sensors/+/temperature", columns=["topic", "payload"], starting_offsets="earliest")
    readings = from_json(messages, "at timestamp not null, celsius double not null", mode="drop")
    by_sensor = readings.withColumn("sensor", F.split("topic", "/")[1]).groupBy("sensor")
    alerts = by_sensor.transformWithState(watch, ALERT, outputMode="append", timeMode="none")
    messages = alerts.withColumn("topic", F.concat(F.lit("alerts/"), "sensor"))
    topics.write_stream(to_json(messages), name="alerts", qos=2)
