"""What was written and waits to be committed, and taking the tail of it away again.

A log is written in divisions: each is committed, or cut off, without those behind it. With one broker a division is what one
write brought; in a replica it is an entry, so that readers see exactly what the set has agreed on. This module knows no sets.
"""

from __future__ import annotations

from mypy_extensions import i64

from nearcast.errors import LocalProtocolError
from nearcast.topiclog.catalog import OFFSET_BITS, OFFSET_MASK, Catalog
from nearcast.topiclog.marks import Mark
from nearcast.topiclog.reading import block_at
from nearcast.topiclog.runs import Part, RunColumns, Runs
from nearcast.topiclog.segments import Segment, index_name, scan
from nearcast.topiclog.topics import Topic


class Division:
    """What one division brings when it is committed."""

    def __init__(
        self,
        position: int,
        topics: list[Topic],
        first_indexes: list[int],
        next_indexes: list[int],
        marks: list[Mark],
        floors: list[tuple[Topic, int]],
        time_us: int,
    ) -> None:
        self.position = position
        """Where it ends."""
        self.topics = topics
        self.first_indexes = first_indexes
        """What each had as its next index before."""
        self.next_indexes = next_indexes
        self.marks = marks
        self.floors = floors
        """Topics that lose their records below an index."""
        self.time_us = time_us
        """The time of the log's youngest block by then."""


def cut(catalog: Catalog, position: int, time_us: int) -> list[Topic]:
    """Take away all behind a position, which is the end of a division and not before what is committed.

    Nothing is read again, and segments before stay what they are. Returns the topics that lost records. A crash in between
    leaves a longer log, which is cut again.
    """
    sequence = position >> OFFSET_BITS
    lost: dict[int, Topic] = {}
    while True:
        segment = catalog.segments[-1]
        if segment.sequence < sequence:
            raise LocalProtocolError("a cut behind the end of the log")
        is_last = segment.sequence == sequence
        offset: i64 = position & OFFSET_MASK if is_last else 0
        runs = _growing(catalog, segment)
        parts = runs.cut(offset)
        for part, size in parts:
            topic = catalog.numbered[part.number]
            lost[part.number] = topic
            topic.bytes -= size
            segment.live_bytes -= size
            segment.whole_bytes -= size
            _take_back(topic, segment, part)
        for part in runs.parts():
            if part.declared_at >= offset:
                named = catalog.numbered[part.number]
                if named.declared_in == segment.sequence:
                    named.declared_in = -1
        runs.forget_from(offset)
        catalog.storage.remove(index_name(segment.name))
        catalog.unmap(segment)
        if is_last:
            catalog.storage.resume(segment.name, offset)
            segment.size = segment.logical_size = offset
            segment.last_time_us = time_us
            for part, _ in parts:
                if part.next > part.first:
                    part.last_time_us = _last_time(catalog, segment, runs, part)
            break
        catalog.storage.remove(segment.name)
        catalog.drop(segment)
    for topic in lost.values():
        if topic.places:
            topic.last_time_us = catalog.part_of(topic.places[-1], topic.number).last_time_us
        else:
            topic.first_index = topic.next_index
            topic.dead_runs = topic.dead_in_run = topic.dead_bytes = 0
    return list(lost.values())


def _growing(catalog: Catalog, segment: Segment) -> Runs:
    """The runs of a segment, so that they can be cut. An index file does not say where topics were named: what came from one
    is found anew."""
    runs = catalog.runs_of(segment)
    if isinstance(runs, Runs) and not runs.is_restored:
        return runs
    if segment.generation:
        raise LocalProtocolError("a segment that was written anew cannot be cut")
    found = scan(catalog.storage, segment.name, is_last=False)
    found.apply_floors(catalog.committed_in(segment))
    found.runs.settle()
    segment.has_index = False
    catalog.unmap(segment)
    segment.runs = found.runs
    return found.runs


def _take_back(topic: Topic, segment: Segment, part: Part) -> None:
    """The topic has of this segment only what the part still has."""
    topic.next_index = part.next
    if topic.places and topic.places[-1] is segment and topic.place_firsts[-1] >= part.next:
        topic.places.pop()
        topic.place_firsts.pop()


def _last_time(catalog: Catalog, segment: Segment, runs: RunColumns, part: Part) -> int:
    """When the last record that a part still has came."""
    run = part.postings[-1]
    begin: i64 = runs.offsets[run]
    size: i64 = runs.lengths[run]
    data, at = catalog.bytes_at(segment, begin, size)
    shift = begin - at
    end = at + size
    time_us = 0
    while at < end:
        block = block_at(catalog, segment, data, at, end, shift)
        time_us = block.time_us
        at += block.length
    return time_us
