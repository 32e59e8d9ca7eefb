"""Readers' side of the log: one record, a range of a topic, several topics in the order of the log, a time's index.

Nothing that is not committed gets out of here. A range is found in the index alone, without a look at the blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from mypy_extensions import i64

from nearcast.errors import StorageCorrupt
from nearcast.topiclog.batches import Block, Record
from nearcast.topiclog.blocks import HEADER_BYTES
from nearcast.topiclog.catalog import OFFSET_BITS, OFFSET_MASK, Catalog
from nearcast.topiclog.segments import Segment
from nearcast.topiclog.topics import Extents, Topic

MAX_WALK: Final = 65_536
"""Runs that one scan looks at before it hands over to whoever waits."""
STRETCH: Final = 256
"""Runs that are taken out of their columns at once."""


def get(catalog: Catalog, topic: Topic, index: int) -> Record:
    """One record."""
    segment = catalog.place_of(topic, index)
    runs = catalog.runs_of(segment)
    part = runs.part(topic.number)
    if part is None or index >= part.next:
        raise topic.unavailable(index)
    run = part.postings[runs.posting_of(part, index)]
    begin: i64 = runs.offsets[run]
    size: i64 = runs.lengths[run]
    data, at = catalog.bytes_at(segment, begin, size)
    shift = begin - at
    end = at + size
    while at < end:
        block = block_at(catalog, segment, data, at, end, shift)
        if index < block.first_index:
            break
        if index < block.first_index + block.count:
            if not block.check():
                raise StorageCorrupt(catalog.storage.path(segment.name), at + shift, "the checksum does not match")
            return block.record(index - block.first_index, topic.text())
        at += block.length
    raise topic.unavailable(index)


def block_at(catalog: Catalog, segment: Segment, data: memoryview, at: i64, end: i64, shift: i64) -> Block:
    """The block at a place in ``data``, of which ``shift`` bytes more lie before it in the file."""
    if at + HEADER_BYTES + 4 <= end:
        block = Block(data, at)
        length: i64 = block.length
        if HEADER_BYTES + 4 <= length <= end - at:
            return block
    raise StorageCorrupt(catalog.storage.path(segment.name), at + shift, "no block begins here")


def read(catalog: Catalog, topic: Topic, start: int, end: int, max_bytes: int) -> Extents:
    """A range of a topic."""
    found = Extents(catalog.storage)
    if start < topic.first_index or start > topic.committed_index:
        raise topic.unavailable(start)
    stop = min(end, topic.committed_index)
    found.next_index = start
    place: i64 = bisect_right(topic.place_firsts, start) - 1
    if place < 0:
        place = 0
    limit: i64 = max_bytes
    while found.next_index < stop and place < len(topic.places):
        if not _read_part(catalog, found, topic.places[place], topic.number, stop, limit):
            found.close()
            return found
        place += 1
    if found.next_index < stop:
        found.next_index = stop  # nothing more is there: damage took it
    found.close()
    return found


def _read_part(catalog: Catalog, found: Extents, segment: Segment, number: int, stop: int, max_bytes: i64) -> bool:
    """What one segment has of a read; False when the read is to end here."""
    runs = catalog.runs_of(segment)
    part = runs.part(number)
    if part is None or found.next_index >= part.next:
        return True
    committed = catalog.committed_in(segment)
    at: i64 = runs.posting_of(part, found.next_index)
    postings = part.postings
    count: i64 = len(postings)
    firsts, offsets, lengths, counts = runs.firsts, runs.offsets, runs.lengths, runs.counts
    total: i64 = found.bytes
    wanted: i64 = found.next_index
    until: i64 = stop
    going = True
    while at < count:
        run = postings[at]
        first: i64 = firsts[run]
        if first >= until:
            break
        offset: i64 = offsets[run]
        size: i64 = lengths[run]
        after: i64 = first
        after += counts[run]
        if offset + size > committed:
            size = committed - offset
            after = until
        if size <= 0 or (total and total + size > max_bytes):
            going = False
            break
        if after > wanted:
            found.add(segment, offset, size)
            total += size
            wanted = after if after < until else until
        at += 1
    found.next_index = wanted
    return going


def scan(catalog: Catalog, numbers: set[int] | None, cursor: int, max_bytes: int) -> Extents:
    """Several topics, in the order of the log."""
    found = Extents(catalog.storage)
    walked: i64 = 0
    limit: i64 = max_bytes
    total: i64 = 0
    sequence = cursor >> OFFSET_BITS
    begin: i64 = cursor & OFFSET_MASK
    at: i64 = bisect_right(catalog.sequences, sequence) - 1
    if at < 0 or catalog.sequences[at] != sequence:
        at += 1
        begin = 0
    while at < len(catalog.segments):
        segment = catalog.segments[at]
        base = segment.sequence << OFFSET_BITS
        if base > catalog.committed_position:
            break
        committed = catalog.committed_in(segment)
        runs = catalog.runs_of(segment)
        run: i64 = runs.run_at(begin)
        while run < runs.count:
            # Lists of a stretch of each column: compiled code takes from them at a fraction of what a view or array costs.
            until = min(run + STRETCH, runs.count)
            logicals, offsets, lengths = (
                list(runs.logical[run:until]),
                list(runs.offsets[run:until]),
                list(runs.lengths[run:until]),
            )
            topics, firsts, counts = list(runs.topics[run:until]), list(runs.firsts[run:until]), list(runs.counts[run:until])
            number_of_runs: i64 = len(logicals)
            place: i64 = 0
            while place < number_of_runs:
                offset: i64 = offsets[place]
                if offset >= committed:
                    break
                logical: i64 = logicals[place]
                if walked >= MAX_WALK:
                    found.cursor = base + logical
                    found.close()
                    return found
                walked += 1
                number = topics[place]
                if numbers is None or number in numbers:
                    size: i64 = lengths[place]
                    if begin > logical:
                        offset += begin - logical
                        size -= begin - logical
                    if offset + size > committed:
                        size = committed - offset
                    if catalog.is_live(number, firsts[place] + counts[place]):
                        if total and total + size > limit:
                            found.cursor = base + (logical if logical > begin else begin)
                            found.close()
                            return found
                        found.add(segment, offset, size)
                        total += size
                place += 1
            if place < number_of_runs:
                break
            run += number_of_runs
        at += 1
        begin = 0
    found.cursor = catalog.committed_position
    found.close()
    return found


def position_of(catalog: Catalog, topic: Topic, index: int) -> int:
    """Where to scan from, to meet a record and those behind it."""
    if index >= topic.committed_index:
        return catalog.committed_position
    index = max(index, topic.first_index)
    segment = catalog.place_of(topic, index)
    runs = catalog.runs_of(segment)
    part = runs.part(topic.number)
    if part is None or index >= part.next:  # damage took it: whatever follows begins with the next segment
        return (segment.sequence + 1) << OFFSET_BITS
    return (segment.sequence << OFFSET_BITS) + runs.logical[part.postings[runs.posting_of(part, index)]]


def index_at(catalog: Catalog, topic: Topic, time_us: int) -> int:
    """The first index whose record came at a time or later."""
    low: i64 = 0
    high: i64 = len(topic.places)
    while low < high:
        middle = (low + high) // 2
        if catalog.part_of(topic.places[middle], topic.number).last_time_us < time_us:
            low = middle + 1
        else:
            high = middle
    if low == len(topic.places):
        return topic.committed_index
    found = _index_in(catalog, topic.places[low], topic.number, time_us)
    return min(max(found, topic.first_index), topic.committed_index)


def _index_in(catalog: Catalog, segment: Segment, number: int, time_us: int) -> int:
    """The first index in a segment that came at a time or later; the segment has one."""
    runs = catalog.runs_of(segment)
    part = runs.need(number)
    postings = part.postings
    low: i64 = 0
    high: i64 = len(postings)
    while low < high:  # the first run that begins at that time or later
        middle = (low + high) // 2
        data, at = catalog.bytes_at(segment, runs.offsets[postings[middle]], HEADER_BYTES + 4)
        if Block(data, at).time_us < time_us:
            low = middle + 1
        else:
            high = middle
    if low == 0:
        return part.first
    # It may lie inside the run before.
    run = postings[low - 1]
    begin: i64 = runs.offsets[run]
    size: i64 = runs.lengths[run]
    data, at = catalog.bytes_at(segment, begin, size)
    shift = begin - at
    end = at + size
    while at < end:
        block = block_at(catalog, segment, data, at, end, shift)
        if block.time_us >= time_us:
            return block.first_index
        at += block.length
    return int(runs.firsts[run] + runs.counts[run])
