"""From rows of telemetry to a plan, on Spark: summaries on the executors, the decision on the driver.

What costs is linear in the clients, and is shared out by topic: summaries, and the look at which topics press. What depends on
everything else, the order in which topics are placed, is the work of :func:`nearcast.placement.deciding.decide` on the topics
that press, here as in a controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from nearcast.pipeline.telemetry_summaries import SUMMARIES, Bound, Totals, from_table, summariser
from nearcast.placement.deciding import Plan, decide
from nearcast.placement.plans import PlanRecord, split_plan
from nearcast.placement.topics import Fleet, PlacementSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PLAN_TOPIC: Final = "$nearcast/plan"
PLANNER: Final = "spark"

MAX_MESSAGE_BYTES: Final = 262_144
"""A plan with more moves travels as several."""


def summaries(
    rows: DataFrame, fleet: Fleet, settings: PlacementSettings, bounds: Sequence[Bound] = (), *, everything: bool = True
) -> DataFrame:
    """What there is to know of topics, from rows of :data:`~nearcast.pipeline.telemetry_tables.ROWS`:
    :data:`~nearcast.pipeline.telemetry_summaries.SUMMARIES`, of all topics or of those that press."""
    together = rows.repartition("topic")
    return together.mapInArrow(summariser(fleet, settings, tuple(bounds), everything=everything), SUMMARIES)


def plan(found: DataFrame, fleet: Fleet, settings: PlacementSettings, now: float) -> tuple[Plan, Totals]:
    """The plan for summaries; ``now`` is wall-clock time, as epochs are."""
    table: Any = found.where("pressing OR totals IS NOT NULL").toArrow()
    topics, totals = from_table(table, fleet)
    return decide(topics, fleet, settings, now), totals


def messages(record: PlanRecord) -> list[PlanRecord]:
    """A plan in messages of bounded size, to be published in this order."""
    largest = max((len(msgspec.json.encode(move)) + 1 for move in record.moves), default=1)
    return split_plan(record, max(1, (MAX_MESSAGE_BYTES - 1024) // largest))


def publish(spark: SparkSession, record: PlanRecord, connection: dict[str, str], topic: str = PLAN_TOPIC) -> int:
    """Publish a plan, each message once, in order; how many messages it took."""
    payloads = [(msgspec.json.encode(part),) for part in messages(record)]
    frame = spark.createDataFrame(payloads, "payload binary").coalesce(1)
    # At least one message may be a single move of a topic with a very long name.
    largest = str(max(MAX_MESSAGE_BYTES, max(len(payload) for (payload,) in payloads)) + 65_536)
    options = {**connection, "topic": topic, "maxMessageBytes": largest}
    frame.write.format("nearcast").mode("append").options(**options).save()
    return len(payloads)
