"""The driver's side of a streaming read, against a broker that moves on between two questions."""

from __future__ import annotations

from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable

from nearcast.client.records import TopicState
from nearcast.pipeline.options import parse_read
from nearcast.pipeline.source import SCHEMA
from nearcast.pipeline.stream_source import NearcastStreamReader


class BusyBroker:
    """One topic; whenever it is asked something, ten more records have come."""

    def __init__(self) -> None:
        self.next_index = 1

    def topics(self, *filters: str, newest: bool = False) -> list[TopicState]:
        self.next_index += 10
        return [TopicState("a", 1, self.next_index, 1_000, 1, 2)]

    def indexes_at(self, filters: list[str], time_us: int) -> dict[str, int]:
        self.next_index += 10
        return {"a": self.next_index}


def reader(**options: str) -> NearcastStreamReader:
    made = NearcastStreamReader(SCHEMA, parse_read({"url": "nearcast://h", "topics": "#"} | options, streaming=True))
    broker: Any = BusyBroker()
    made._topics = broker
    return made


def test_records_that_come_between_listing_and_finding_the_time_are_no_loss() -> None:
    stream = reader(startingTime="2999-01-01")
    first = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    assert first["next"] == {"a": 21}, "all before that time is passed over"
    assert stream.partitions(stream.initialOffset(), first) == []


def test_the_same_with_what_is_available_now() -> None:
    stream = reader(startingTime="2999-01-01")
    stream.prepareForTriggerAvailableNow()
    first = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    assert first["next"] == {"a": 21}
    assert stream.latestOffset(first, ReadAllAvailable()) == first, "nothing more in this run, and nothing lost"
