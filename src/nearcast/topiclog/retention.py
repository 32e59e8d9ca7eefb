"""Retention: how topics lose their oldest records, and which segments that makes worth removing or writing anew.

A topic's bounds move its ``first_index``: what lies below does not exist any more, at once, for every reader. The disk
follows: a segment with nothing left is removed; one that has lost more than half is written anew without what is dead, so that
one quiet topic does not pin what all the others wrote beside it.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from nearcast.topiclog.catalog import Catalog
from nearcast.topiclog.jobs import Rewrite
from nearcast.topiclog.reading import block_at, index_at
from nearcast.topiclog.runs import Part, RunColumns
from nearcast.topiclog.segments import Segment, log_name
from nearcast.topiclog.topics import Topic

MICROSECONDS: Final = 1_000_000


def apply_bounds(catalog: Catalog, topic: Topic, now_us: int) -> bool:
    """Move a topic's first index to where its retention wants it; the newest record stays. True if it moved."""
    bounds = topic.retention
    newest = topic.committed_index - 1
    if newest <= topic.first_index:
        return False
    wanted = topic.first_index
    if bounds.max_records:
        wanted = max(wanted, topic.committed_index - bounds.max_records)
    if bounds.max_age_seconds:
        oldest_us = now_us - int(bounds.max_age_seconds * MICROSECONDS)
        if topic.first_time_us < oldest_us:
            wanted = max(wanted, index_at(catalog, topic, oldest_us))
    if bounds.max_bytes and topic.bytes > bounds.max_bytes:
        wanted = max(wanted, _index_by_bytes(catalog, topic, topic.bytes - bounds.max_bytes))
    wanted = min(wanted, newest)
    if wanted <= topic.first_index:
        return False
    advance(catalog, topic, wanted)
    return True


def advance(catalog: Catalog, topic: Topic, index: int) -> None:
    """Remove the records of a topic below ``index``, which may be all there are."""
    while topic.places:
        segment = topic.places[0]
        part = catalog.part_of(segment, topic.number)
        if part.next > index:
            runs = catalog.runs_of(segment)
            _advance_inside(catalog, topic, segment, runs, runs.need(topic.number), index)
            break
        live = part.bytes - topic.dead_bytes
        topic.bytes -= live
        segment.live_bytes -= live
        del topic.places[0]
        del topic.place_firsts[0]
        topic.dead_bytes = 0
        topic.dead_runs = 0
        topic.dead_in_run = 0
        if topic.places:
            topic.first_time_us = catalog.part_of(topic.places[0], topic.number).first_time_us
    topic.first_index = max(topic.first_index, index)
    if topic.places and topic.first_index < topic.place_firsts[0]:
        topic.first_index = topic.place_firsts[0]  # damage had taken what lay between


def _advance_inside(catalog: Catalog, topic: Topic, segment: Segment, runs: RunColumns, part: Part, index: int) -> None:
    """The topic's oldest segment keeps some of it."""
    postings = part.postings
    at = topic.dead_runs
    count: i64 = len(postings)
    # All runs before are dead; of this one perhaps some blocks were.
    dead: i64 = 0
    run_dead = topic.dead_in_run
    while at < count:
        run = postings[at]
        if runs.firsts[run] + runs.counts[run] > index:
            break
        dead += runs.lengths[run] - run_dead
        run_dead = 0
        at += 1
    topic.dead_runs = at
    offset: i64 = runs.offsets[postings[at]]
    size: i64 = runs.lengths[postings[at]]
    data, place = catalog.bytes_at(segment, offset, size)
    shift = offset - place
    begin = place
    end = place + size
    while place < end:
        block = block_at(catalog, segment, data, place, end, shift)
        if block.first_index + block.count > index:
            topic.first_time_us = block.time_us
            break
        place += block.length
    dead += place - begin - run_dead
    topic.dead_in_run = place - begin
    topic.dead_bytes += dead
    topic.bytes -= dead
    segment.live_bytes -= dead


def _index_by_bytes(catalog: Catalog, topic: Topic, excess: i64) -> int:
    """The index up to which at least so many bytes are to be removed: whole blocks."""
    skip = topic.dead_runs
    dead = topic.dead_bytes
    run_dead = topic.dead_in_run
    for segment in topic.places:
        part = catalog.part_of(segment, topic.number)
        if part.bytes - dead <= excess:
            excess -= part.bytes - dead
        else:
            runs = catalog.runs_of(segment)
            postings = runs.need(topic.number).postings
            at = skip
            while at < len(postings) and runs.lengths[postings[at]] - run_dead <= excess:
                excess -= runs.lengths[postings[at]] - run_dead
                run_dead = 0
                at += 1
            run = postings[at]
            return _index_in_run(catalog, segment, runs.offsets[run], runs.lengths[run], excess + run_dead)
        skip = 0
        dead = 0
        run_dead = 0
        if excess <= 0:
            return part.next
    return topic.committed_index


def _index_in_run(catalog: Catalog, segment: Segment, offset: i64, size: i64, excess: i64) -> int:
    data, at = catalog.bytes_at(segment, offset, size)
    shift = offset - at
    begin = at
    end = at + size
    while True:
        block = block_at(catalog, segment, data, at, end, shift)
        if at - begin >= excess:
            return block.first_index
        at += block.length
        if at >= end:
            return block.first_index + block.count


def is_mostly_dead(segment: Segment) -> bool:
    """Whether a segment is worth writing anew."""
    return segment.live_bytes * 2 < segment.whole_bytes


def replace(catalog: Catalog, job: Rewrite) -> None:
    """A segment was written anew: go over to its new file."""
    segment = job.segment
    before = catalog.runs_of(segment)
    live_before: dict[int, int] = {}
    for number in job.floors:
        topic = catalog.numbered.get(number)
        if topic is not None and topic.places and topic.places[0] is segment:
            live_before[number] = before.need(number).bytes - topic.dead_bytes
    catalog.unmap(segment)
    segment.generation = job.generation
    segment.name = log_name(segment.sequence, job.generation)
    segment.size = job.size
    catalog.sealed(segment)
    runs = catalog.runs_of(segment)
    for number, live in live_before.items():
        topic = catalog.numbered[number]
        part = runs.need(number)
        topic.dead_runs = 0
        topic.dead_in_run = 0
        topic.dead_bytes = 0
        topic.place_firsts[0] = part.first
        topic.bytes += part.bytes - live
        segment.live_bytes += part.bytes - live
        advance(catalog, topic, topic.first_index)
    segment.whole_bytes = segment.live_bytes
