"""How a read is divided into partitions: every record in exactly one, many small topics in one, big topics in several.

Pure: ranges of indexes in, lists of ranges out. The ranges are laid end to end and the line is cut into pieces of about the
same cost, so that no record can be left out or read twice; ``tests/property/test_spark_plan.py`` holds it to that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PARTITION_BYTES = 134_217_728
"""What a partition holds unless the options say otherwise. Smaller ones cost a task each, some 20 ms; larger ones leave cores
without work at the end, and lose more when a task fails."""

MIN_PARTITION_BYTES = 8_388_608
"""Below this a further partition costs more than it saves: a small read, or a micro-batch, is one task."""

DEFAULT_PARALLELISM = 8
"""Partitions that a read of some size is divided into at least, though each would hold less than PARTITION_BYTES."""

MAX_TOPICS = 5_000
MAX_NAME_BYTES = 1_000_000
"""Topics of one partition, and the bytes of their names: the request that reads them has to fit into a message of 4 MiB."""


@dataclass(frozen=True, slots=True)
class TopicRange:
    """Records of one topic, from ``start`` to before ``end``. ``record_bytes`` is about what one of them has."""

    topic: str
    start: int
    end: int
    record_bytes: int = 100

    @property
    def records(self) -> int:
        return self.end - self.start


def divide(
    ranges: Iterable[TopicRange], *, min_partitions: int | None = None, rows_per_partition: int | None = None
) -> list[list[TopicRange]]:
    """Partitions, in the order of the ranges. ``rows_per_partition`` is a maximum; ``min_partitions`` is met where there are
    as many records. Without either, partitions are made by size."""
    wanted = [each for each in ranges if each.records > 0]
    total_records = sum(each.records for each in wanted)
    total_bytes = sum(each.records * each.record_bytes for each in wanted)
    if total_records == 0:
        return []
    if min_partitions is not None or rows_per_partition is not None:
        # Asked for by number: every record costs the same.
        capacity = rows_per_partition or total_records
        if min_partitions is not None:
            capacity = min(capacity, max(1, total_records // min_partitions))
        return _cut(wanted, capacity, by_bytes=False)
    capacity = max(MIN_PARTITION_BYTES, min(PARTITION_BYTES, -(-total_bytes // DEFAULT_PARALLELISM)))
    return _cut(wanted, capacity, by_bytes=True)


def _cut(ranges: list[TopicRange], capacity: int, *, by_bytes: bool) -> list[list[TopicRange]]:
    partitions: list[list[TopicRange]] = []
    current: list[TopicRange] = []
    room = capacity
    name_bytes = 0
    for each in ranges:
        cost = max(1, each.record_bytes) if by_bytes else 1
        start = each.start
        while start < each.end:
            if current and (room < cost or len(current) >= MAX_TOPICS or name_bytes + len(each.topic) > MAX_NAME_BYTES):
                partitions.append(current)
                current, room, name_bytes = [], capacity, 0
            taken = min(each.end - start, max(1, room // cost))
            current.append(TopicRange(each.topic, start, start + taken, each.record_bytes))
            name_bytes += len(each.topic)
            room -= taken * cost
            start += taken
    if current:
        partitions.append(current)
    return partitions
