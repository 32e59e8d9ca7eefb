"""Sensor averages per window, published back to topics.

    nearcast pipeline run examples/pipelines/windowed_averages.py --set window="1 minute"

Reads JSON readings {"at": "2026-05-01T12:00:00Z", "celsius": 21.5} of all topics sensors/NAME/temperature and publishes, for
each sensor and window of time, average, extremes and count to averages/NAME. The time is the sensor's own. A window is
published once, when readings `late` after its end have been seen; readings that come later still are left out.
"""

from pyspark.sql import functions as F

from nearcast.pipeline.payloads import from_json, to_json


def pipeline(spark, topics):
    window = topics.parameters.get("window", "1 minute")
    late = topics.parameters.get("late", "30 seconds")
    messages = topics.stream("sensors/+/temperature", columns=["topic", "payload"], starting_offsets="earliest")
    readings = from_json(messages, "at timestamp not null, celsius double not null", mode="drop")
    averages = (
        readings.withWatermark("at", late)
        .groupBy(F.window("at", window).alias("window"), F.split("topic", "/")[1].alias("sensor"))
        .agg(
            F.avg("celsius").alias("average"),
            F.min("celsius").alias("lowest"),
            F.max("celsius").alias("highest"),
            F.count("*").alias("count"),
        )
    )
    messages = averages.select(
        F.concat(F.lit("averages/"), "sensor").alias("topic"),
        F.col("window.start").alias("start"),
        F.col("window.end").alias("end"),
        "average",
        "lowest",
        "highest",
        "count",
    )
    topics.write_stream(to_json(messages), name="averages")
