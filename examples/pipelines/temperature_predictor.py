"""Outdoor temperature predicted from the CPU temperature of small computers nearby.

    nearcast pipeline run examples/pipelines/temperature_predictor.py

Canal was evaluated with an application of this kind (Canal, section IV-C, footnote 1, after Golubovic et al., "Improving the
Accuracy of Outdoor Temperature Prediction by IoT Devices", 2019): a computer in a box in a field knows the temperature of its
own CPU, which follows the weather; a linear regression on it gives the temperature outside without a thermometer at each box.
Taken from there: the idea, the regression on the CPU's temperature and its recent past, and fitting it against one real
thermometer. Of our own: the fit is not repeated over a window of history but kept incrementally (recursive least squares with
forgetting, a few numbers per station as state), so that each reading costs the same however long the history is.

Topics, all with JSON {"at": "2026-05-01T12:00:00Z", "celsius": 41.3}:

- stations/NAME/cpu        readings that are predicted from
- stations/NAME/outdoor    readings of a real thermometer, as often or as rarely as there are any: what is learned from
- stations/NAME/predicted  what this publishes for each CPU reading, once enough pairs are known: the prediction, how many
  pairs it rests on, and the average error of recent predictions that a thermometer could check
"""

import numpy as np
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from nearcast.pipeline.payloads import from_json, to_json

MODEL = "weights array<double>, covariance array<double>, cpu double, before double, pairs bigint, error double"
PREDICTION = "station string, at timestamp, celsius double, pairs bigint, error double"

UNCERTAIN = 1_000.0
"""How little is known of the weights at first."""


class Predictor(StatefulProcessor):
    """outdoor = w0 + w1 * cpu + w2 * (cpu - cpu before), per station."""

    def __init__(self, forgetting, needed):
        self.forgetting = forgetting
        self.needed = needed

    def init(self, handle):
        self.state = handle.getValueState("model", MODEL)

    def handleInputRows(self, key, rows, timer_values):
        known = self.state.get()
        if known is None:
            weights, covariance = np.zeros(3), np.eye(3) * UNCERTAIN
            cpu = before = error = None
            pairs = 0
        else:
            weights, covariance = np.array(known[0]), np.array(known[1]).reshape(3, 3)
            cpu, before, pairs, error = known[2:]
        for row in sorted(rows, key=lambda row: (row.at, row.kind)):
            if row.kind == "cpu":
                cpu, before = row.celsius, row.celsius if cpu is None else cpu
                if pairs >= self.needed:
                    predicted = float(weights @ (1.0, cpu, cpu - before))
                    yield Row(station=key[0], at=row.at, celsius=predicted, pairs=pairs, error=error)
            elif cpu is not None:
                features = np.array((1.0, cpu, cpu - before))
                missed = row.celsius - float(weights @ features)
                if pairs >= self.needed:
                    error = abs(missed) if error is None else 0.95 * error + 0.05 * abs(missed)
                gain = covariance @ features
                gain /= self.forgetting + features @ gain
                weights = weights + gain * missed
                covariance = (covariance - np.outer(gain, features @ covariance)) / self.forgetting
                pairs += 1
        self.state.update((weights.tolist(), covariance.ravel().tolist(), cpu, before, pairs, error))

    def close(self):
        pass


def pipeline(spark, topics):
    spark.conf.set(
        "spark.sql.streaming.stateStore.providerClass",
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    )
    parameters = topics.parameters
    predictor = Predictor(float(parameters.get("forgetting", "0.999")), int(parameters.get("needed", "10")))
    messages = topics.stream("stations/+/cpu", "stations/+/outdoor", columns=["topic", "payload"], starting_offsets="earliest")
    readings = from_json(messages, "at timestamp not null, celsius double not null", mode="drop")
    levels = F.split("topic", "/")
    by_station = readings.select(levels[1].alias("station"), levels[2].alias("kind"), "at", "celsius").groupBy("station")
    predictions = by_station.transformWithState(predictor, PREDICTION, outputMode="append", timeMode="none")
    messages = predictions.withColumn("topic", F.concat(F.lit("stations/"), "station", F.lit("/predicted")))
    topics.write_stream(to_json(messages), name="predictions")
