"""Checking what subscribers receive: loss, duplicates and order of every (publisher, subscriber) stream.

Owns parsing of the receiving side. Runs of regular PUBLISH packets are compared with what must be there a column at a time;
anything else (another packet, a packet of another size, a flag that should not be set) goes through a general path that
reads one packet. Both give the same counts for any chunking. Knows nothing of sockets.
"""

from __future__ import annotations

import bisect
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nearcast.bench.acks import ACK_BYTES, MIN_RUN, PUBACK, PUBCOMP, PUBREC, PUBREL, ack_run, find_run, one_ack
from nearcast.bench.traffic import (
    MAGIC,
    PAYLOAD_HEAD,
    PublishBatch,
    PublishLayout,
    Records,
    Sequences,
    packet_end,
    skip_properties,
    true_prefix,
)

_FIRST_ATTEMPT = 64


class Gaps:
    """Sequence numbers that were passed over and have not come since: sorted, disjoint ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def append(self, start: int, end: int) -> None:
        self._starts.append(start)
        self._ends.append(end)

    def remove(self, number: int) -> bool:
        """Whether ``number`` was missing; it no longer is."""
        index = bisect.bisect_right(self._starts, number) - 1
        if index < 0 or number >= self._ends[index]:
            return False
        start, end = self._starts[index], self._ends[index]
        pieces = [(start, number), (number + 1, end)]
        kept = [(low, high) for low, high in pieces if low < high]
        self._starts[index : index + 1] = [low for low, _ in kept]
        self._ends[index : index + 1] = [high for _, high in kept]
        return True


class Checker(Protocol):
    """What becomes of the sequence numbers that one subscriber receives."""

    def take(self, publisher: int, sequences: Sequences) -> None:
        """Messages of one publisher, in the order they came."""

    def take_mixed(self, publishers: npt.NDArray[np.uint32], sequences: Sequences) -> None:
        """Messages of several publishers, in the order they came."""


def take_each(checker: Checker, publishers: npt.NDArray[np.uint32], sequences: Sequences) -> None:
    """Messages of several publishers, given to the checker publisher by publisher."""
    order = np.argsort(publishers.astype(np.uint16), kind="stable")
    publishers = publishers[order]
    sequences = sequences[order]
    breaks = (np.flatnonzero(publishers[1:] != publishers[:-1]) + 1).tolist()
    for low, high in zip([0, *breaks], [*breaks, len(order)], strict=True):
        checker.take(int(publishers[low]), sequences[low:high])


class StreamChecker:
    """A subscriber that must get every message of its publishers, in order.

    ``expected[publisher]`` is the next sequence number: a row of a matrix that the load's window looks at.
    """

    def __init__(self, expected: npt.NDArray[np.int64]) -> None:
        self._expected = expected
        self._gaps = [Gaps() for _ in expected]
        self.duplicates = 0
        self.order_violations = 0

    def take(self, publisher: int, sequences: Sequences) -> None:
        start = int(self._expected[publisher])
        count = len(sequences)
        regular = int(sequences[0]) == start and int(sequences[-1]) == start + count - 1
        if regular and (count <= 2 or true_prefix(sequences[1:] - sequences[:-1] == 1) == count - 1):
            self._expected[publisher] = start + count
            return
        breaks = (np.flatnonzero(sequences[1:] != sequences[:-1] + np.uint64(1)) + 1).tolist()
        for low, high in zip([0, *breaks], [*breaks, count], strict=True):
            self._take_contiguous(publisher, int(sequences[low]), int(sequences[high - 1]) + 1)

    def take_mixed(self, publishers: npt.NDArray[np.uint32], sequences: Sequences) -> None:
        # Sorted by publisher (stable, so each publisher's order stays), message k of a publisher must be its expected + k.
        order = np.argsort(publishers.astype(np.uint16), kind="stable")
        grouped = publishers[order]
        counts = np.bincount(grouped, minlength=len(self._expected))
        offsets = self._expected - (np.cumsum(counts) - counts)
        if true_prefix(sequences[order].astype(np.int64) == offsets[grouped] + np.arange(len(order))) == len(order):
            self._expected += counts
        else:
            take_each(self, publishers, sequences)

    def _take_contiguous(self, publisher: int, start: int, end: int) -> None:
        expected = int(self._expected[publisher])
        gaps = self._gaps[publisher]
        for sequence in range(start, min(end, expected)):
            if gaps.remove(sequence):
                self.order_violations += 1  # it came after a later one
            else:
                self.duplicates += 1
        if start > expected:
            gaps.append(expected, start)
        self._expected[publisher] = max(expected, end)

    def following(self, publisher: int) -> int:
        """The next sequence number of a publisher."""
        return int(self._expected[publisher])

    def advance(self, publisher: int, count: int) -> None:
        """The next ``count`` messages of a publisher came, seen to be right by other means."""
        self._expected[publisher] += count

    def lost(self, publisher: int, sent: int) -> int:
        """Messages of ``publisher`` that never came, when it sent ``sent``."""
        return len(self._gaps[publisher]) + max(0, sent - int(self._expected[publisher]))


class GroupTally:
    """A shared subscription's group: every message goes to exactly one member."""

    def __init__(self, publishers: int) -> None:
        self._seen: npt.NDArray[np.bool_] = np.zeros((publishers, 1 << 16), dtype=np.bool_)
        self.received: npt.NDArray[np.int64] = np.zeros(publishers, dtype=np.int64)
        self.duplicates = 0

    def take(self, publishers: npt.NDArray[np.int64], sequences: npt.NDArray[np.int64]) -> None:
        """Messages that one member received, no two of them the same."""
        top = int(sequences.max())
        capacity = self._seen.shape[1]
        if top >= capacity:
            self._seen = np.pad(self._seen, ((0, 0), (0, max(top + 1 - capacity, capacity))))
        again = self._seen[publishers, sequences]
        self._seen[publishers, sequences] = True
        self.duplicates += int(np.count_nonzero(again))
        self.received += np.bincount(publishers[~again], minlength=len(self.received))

    def lost(self, publisher: int, sent: int) -> int:
        return sent - int(self.received[publisher])


class MemberChecker:
    """One member of a shared subscription: what it gets of a publisher must be in order, gaps are the other members'."""

    def __init__(self, tally: GroupTally, publishers: int) -> None:
        self._tally = tally
        self._last: npt.NDArray[np.int64] = np.full(publishers, -1, dtype=np.int64)
        self.order_violations = 0

    def take(self, publisher: int, sequences: Sequences) -> None:
        self.take_mixed(np.full(len(sequences), publisher, dtype=np.uint32), sequences)

    def take_mixed(self, publishers: npt.NDArray[np.uint32], sequences: Sequences) -> None:
        order = np.argsort(publishers.astype(np.uint16), kind="stable")
        grouped = publishers[order].astype(np.int64)
        numbers = sequences[order].astype(np.int64)
        previous = np.empty_like(numbers)
        previous[1:] = numbers[:-1]
        starts = np.flatnonzero(np.diff(grouped, prepend=-1))
        previous[starts] = self._last[grouped[starts]]
        if true_prefix(numbers > previous) == len(numbers):  # growing, so no two are the same
            self._last[grouped] = numbers  # of several values for one place the last stays
            self._tally.take(grouped, numbers)
            return
        for publisher, number in zip(grouped.tolist(), numbers.tolist(), strict=True):
            last = int(self._last[publisher])
            self.order_violations += number < last
            self._last[publisher] = max(last, number)
            self._tally.take(np.array([publisher]), np.array([number]))


class ExpectedHeads:
    """What the packets of all publishers look like up to the publisher's number, one row per (publisher, topic)."""

    def __init__(self, layout: PublishLayout, topics: list[list[bytes]]) -> None:
        self.layout = layout
        self.publishers = len(topics)
        self.topics_each = len(topics[0])
        self.topics = [topic for own in topics for topic in own]
        packets = b"".join(layout.publish(topic, number) for number, own in enumerate(topics) for topic in own)
        records = layout.view(bytearray(packets), 0, len(self.topics))
        self._columns = [(word, records[word].copy()) for word in layout.words]

    def matching(self, records: Records) -> tuple[int, bool]:
        """How many records from the first on are regular packets, and whether they are all of one publisher."""
        publishers = records["publisher"]
        first = int(publishers[0])
        if first >= self.publishers:
            return 0, True
        if self.topics_each == 1:  # try one publisher's packets: compare with constants
            word, column = self._columns[0]
            good = records[word] == column[first]
            for word, column in self._columns[1:]:
                good &= records[word] == column[first]
            count = true_prefix(good)
            if count == len(records) or self.publishers == 1:
                return count, True
        good = publishers < self.publishers
        rows = np.where(good, publishers, 0).astype(np.int64)
        if self.topics_each > 1:
            rows = rows * self.topics_each + (records["sequence"] % np.uint64(self.topics_each)).astype(np.int64)
        for word, column in self._columns:
            good &= records[word] == column[rows]
        return true_prefix(good), self.publishers == 1


class SubscriberStream:
    """Everything one subscriber receives; its acknowledgements collect in ``output``."""

    def __init__(self, heads: ExpectedHeads, checker: Checker) -> None:
        self._heads = heads
        self._layout = heads.layout
        self._checker = checker
        self._attempt = _FIRST_ATTEMPT
        self._answer = {1: PUBACK, 2: PUBREC}.get(heads.layout.qos, 0)
        self.output = bytearray()
        self.received = 0
        self.unexpected = 0
        self.disconnected: int | None = None
        self.source: tuple[int, PublishBatch] | None = None
        """The only publisher of this stream and its rolling batch: what arrives is then compared with what was sent."""
        self.times: list[npt.NDArray[np.uint64]] | None = None
        """Send times of what arrived, for those who want them."""

    def feed(self, buffer: bytearray, position: int, end: int) -> int:
        """Parse what is complete; returns where the incomplete rest begins."""
        layout = self._layout
        size = layout.packet_bytes
        if self.source is not None:
            position = self._take_identical(buffer, position, end)
        regular = layout.first_byte
        while position < end:
            first_byte = buffer[position]
            if first_byte == regular:
                count = min((end - position) // size, self._attempt)
                # A look at the packet that a run would have there decides whether NumPy pays.
                if count >= MIN_RUN and buffer[position + (MIN_RUN - 1) * size] == regular:
                    taken = self._take_run(layout.view(buffer, position, count))
                    self._attempt = self._attempt * 2 if taken == count else _FIRST_ATTEMPT
                    if taken:
                        position += taken * size
                        continue
            elif first_byte == PUBREL:
                ids = find_run(buffer, position, end)
                if ids is not None:
                    self.output += ack_run(PUBCOMP, ids)
                    position += len(ids) * ACK_BYTES
                    continue
            body, next_position = packet_end(buffer, position, end)
            if not next_position:
                break
            self._take_one(first_byte, bytes(buffer[body:next_position]))
            position = next_position
        return position

    def _take_identical(self, buffer: bytearray, position: int, end: int) -> int:
        """Take packets that are byte for byte what the publisher sent next; several times as fast as columns."""
        if self.source is None or not isinstance(self._checker, StreamChecker):
            return position
        publisher, batch = self.source
        layout = self._layout
        size = layout.packet_bytes
        regular = bytes((layout.first_byte,))
        while (count := (end - position) // size) >= MIN_RUN:
            if self._answer:  # acknowledgements stand between the messages
                count -= len(buffer[position : position + count * size : size].lstrip(regular))
                if count < MIN_RUN:
                    break
            count = batch.holds(self._checker.following(publisher), buffer, position, count)
            if not count:
                break
            if self._answer:
                self.output += ack_run(self._answer, layout.view(buffer, position, count)["id"])
            self._checker.advance(publisher, count)
            self.received += count
            position += count * size
        return position

    def _take_run(self, records: Records) -> int:
        count, one_publisher = self._heads.matching(records)
        if not count:
            return 0
        records = records[:count]
        publishers = records["publisher"]
        sequences = records["sequence"]
        if one_publisher:
            self._checker.take(int(publishers[0]), sequences)
        else:
            self._checker.take_mixed(publishers, sequences)
        self.received += count
        if self._answer:
            self.output += ack_run(self._answer, records["id"])
        if self.times is not None:
            self.times.append(records["time"].copy())
        return count

    def _take_one(self, first_byte: int, body: bytes) -> None:
        kind = first_byte & 0xF0
        if kind == 0x30:
            self._take_publish(first_byte, body)
        elif first_byte == PUBREL and len(body) >= 2:
            self.output += one_ack(PUBCOMP, int.from_bytes(body[:2], "big"))
        elif kind == 0xE0:
            self.disconnected = body[0] if body else 0
        else:
            self.unexpected += 1

    def _take_publish(self, first_byte: int, body: bytes) -> None:
        qos = first_byte >> 1 & 3
        topic_end = 2 + int.from_bytes(body[:2], "big")
        position = topic_end
        if qos:
            packet_id = int.from_bytes(body[position : position + 2], "big")
            position += 2
            self.output += one_ack(PUBACK if qos == 1 else PUBREC, packet_id)
        if self._layout.version == 5:
            position = skip_properties(body, position)
        payload = body[position:]
        if qos != self._layout.qos or len(payload) != self._layout.payload_bytes or payload[:4] != MAGIC:
            self.unexpected += 1
            return
        _, publisher, sequence, time_ns = PAYLOAD_HEAD.unpack_from(payload)
        heads = self._heads
        if publisher >= heads.publishers or (
            heads.topics[publisher * heads.topics_each + sequence % heads.topics_each] != body[2:topic_end]
        ):
            self.unexpected += 1
            return
        self.received += 1
        self._checker.take(publisher, np.array([sequence], dtype=np.uint64))
        if self.times is not None:
            self.times.append(np.array([time_ns], dtype=np.uint64))
