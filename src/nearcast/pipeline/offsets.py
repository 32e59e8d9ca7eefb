"""Offsets of a streaming read: which record of each topic comes next, and how far the next micro-batch goes.

Pure: states of topics in, offsets out; :mod:`nearcast.pipeline.stream_source` asks the broker and speaks to Spark.

An offset is a JSON object that Spark keeps in the checkpoint::

    {"next": {"sensors/a": 18, "sensors/b": 5}, "new": {"sensors/b": 3}}

``next`` has for each topic the index of the first record that is not yet read. ``new`` has, for topics that this very batch
sees for the first time or that lost records, where it begins with them: Spark repeats a batch from its two offsets alone, and
what "earliest" or "latest" meant must not be asked again then. The offset before the first batch is therefore the empty
object, whatever the options say. With many topics (more than ``PLAIN_TOPICS``) both maps are packed: ``{"packed": "..."}``
holds the same object as JSON, deflated, in base64, about a fifth of the size; :func:`unpack` and :func:`describe` read it.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nearcast.errors import PipelineError, RecordUnavailable
from nearcast.pipeline.options import Positions
from nearcast.pipeline.plan import TopicRange

PLAIN_TOPICS = 500
INITIAL: dict[str, Any] = {}
"""Before the first batch."""

MAX_UNPACKED_BYTES = 1_073_741_824


@dataclass(frozen=True, slots=True)
class TopicState:
    """What the broker says of a topic: readers see ``first_index`` to before ``next_index``, in about ``bytes`` bytes."""

    topic: str
    first_index: int
    next_index: int
    bytes: int = 0

    @property
    def record_bytes(self) -> int:
        records = self.next_index - self.first_index
        return max(1, self.bytes // records) if records > 0 else 1


@dataclass(frozen=True)
class Offset:
    """``next`` and ``new`` as the module's first lines say; ``None`` as ``next`` stands for "before the first batch"."""

    next: Mapping[str, int] | None = None
    new: Mapping[str, int] = field(default_factory=dict)

    def pack(self) -> dict[str, Any]:
        """As Spark keeps it."""
        if self.next is None:
            return dict(INITIAL)
        plain: dict[str, Any] = {"next": dict(self.next)}
        if self.new:
            plain["new"] = dict(self.new)
        if len(self.next) <= PLAIN_TOPICS:
            return plain
        text = json.dumps(plain, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
        return {"packed": base64.b64encode(zlib.compress(text, 1)).decode("ascii")}


def unpack(packed: Mapping[str, Any]) -> Offset:
    """The opposite of :meth:`Offset.pack`; raises :class:`PipelineError` for what it never wrote."""
    try:
        plain: Any = packed
        if "packed" in packed:
            inflater = zlib.decompressobj()
            text = inflater.decompress(base64.b64decode(packed["packed"], validate=True), MAX_UNPACKED_BYTES)
            plain = json.loads(text.decode("utf-8", "surrogatepass"))
        if plain == INITIAL:
            return Offset()
        following, new = dict(plain["next"]), dict(plain.get("new", {}))
        if not all(type(index) is int and index >= 1 for values in (following, new) for index in values.values()):
            raise ValueError("not an index")
    except (KeyError, TypeError, ValueError, AttributeError, zlib.error, binascii.Error, RecursionError) as error:
        raise PipelineError("the checkpoint holds an offset that this source did not write: use a new checkpoint") from error
    return Offset(following, new)


def describe(offset: str) -> dict[str, int]:
    """For people: the next index of each topic, from the JSON that ``query.lastProgress`` or a checkpoint shows."""
    return dict(unpack(json.loads(offset)).next or {})


def ranges_between(start: Offset, end: Offset, record_bytes: Mapping[str, int]) -> list[TopicRange]:
    """The records of the batch from ``start`` to ``end``: from the two offsets alone, so that a repetition is the same."""
    before: Mapping[str, int] = start.next or {}
    ranges = []
    for topic, following in (end.next or {}).items():
        first = end.new.get(topic, before.get(topic, following))
        if first < following:
            ranges.append(TopicRange(topic, first, following, record_bytes.get(topic, 100)))
    return ranges


@dataclass(frozen=True)
class Limit:
    """Most that one micro-batch takes; ``None`` is no limit. Bytes are counted by the average record of each topic."""

    records: int | None = None
    bytes: int | None = None


class Advance:
    """Where the next micro-batch ends. Remembers only whose turn it is when a limit is smaller than the number of topics."""

    def __init__(self, starting: Positions) -> None:
        self._starting = starting
        self._turn = 0
        self.losses: list[RecordUnavailable] = []
        """Records that are gone though they were still to be read, of the last call; the caller reports or raises them."""

    def advance(
        self, start: Offset, states: Iterable[TopicState], limit: Limit, by_time: Mapping[str, int] | None = None
    ) -> Offset:
        """The offset after ``start``, as far as ``states`` and ``limit`` allow; ``start`` itself when there is nothing new.

        ``by_time`` has the first record of each topic when the first batch begins by time.
        """
        self.losses = []
        before = start.next
        available: dict[str, tuple[int, TopicState]] = {}
        new: dict[str, int] = {}
        seen = set()
        for state in states:
            seen.add(state.topic)
            position = None if before is None else before.get(state.topic)
            if position is None:
                position = self._first(state, by_time) if before is None else state.first_index
                new[state.topic] = position
            position = self._checked(state, position, new)
            available[state.topic] = (position, state)
        following = {} if before is None else dict(before)
        for topic in [topic for topic in following if topic not in seen]:
            # Nothing of it is left; if something was unread, it is lost.
            self.losses.append(RecordUnavailable(topic, following[topic], following[topic], following[topic]))
            del following[topic]
        skipped = {topic: position for topic, (position, _) in available.items() if following.get(topic, position) != position}
        following.update({topic: position for topic, (position, _) in available.items()})
        taken = self._take([(position, state) for position, state in available.values() if position < state.next_index], limit)
        if before is not None and not taken and not new and not skipped and len(following) == len(before):
            return start
        following.update(taken)
        # A batch that skips what is lost begins behind it.
        return Offset(following, new | skipped)

    def _first(self, state: TopicState, by_time: Mapping[str, int] | None) -> int:
        """Where the first batch begins with a topic. One that appears later is read from its first record on."""
        if by_time is not None:
            return max(by_time.get(state.topic, state.next_index), state.first_index)
        position = self._starting.topics.get(state.topic, self._starting.default)
        if position == "earliest":
            return state.first_index
        if position == "latest":
            return state.next_index
        if position > state.next_index:
            raise PipelineError(
                f"option startingOffsets: topic {state.topic!r} has no record {position}: its next one gets index "
                f"{state.next_index}"
            )
        return position

    def _checked(self, state: TopicState, position: int, new: dict[str, int]) -> int:
        """The position, or the nearest that exists when it does not; then something is lost."""
        if position < state.first_index:
            nearest = state.first_index
        elif position > state.next_index:
            # The log had more once: it was deleted and made anew, or restored from an older copy.
            nearest = state.first_index
        else:
            return position
        self.losses.append(RecordUnavailable(state.topic, position, state.first_index, state.next_index))
        if state.topic in new:
            new[state.topic] = nearest
        return nearest

    def _take(self, available: list[tuple[int, TopicState]], limit: Limit) -> dict[str, int]:
        """How far each topic may go: each its share of the limit, so that a busy topic does not keep others waiting."""
        total = sum(state.next_index - position for position, state in available)
        total_bytes = sum((state.next_index - position) * state.record_bytes for position, state in available)
        share, whole = 1, 1
        if limit.records is not None and total > limit.records:
            share, whole = limit.records, total
        if limit.bytes is not None and total_bytes > limit.bytes and limit.bytes * whole < share * total_bytes:
            share, whole = limit.bytes, total_bytes
        if share == whole:
            return {state.topic: state.next_index for _, state in available}
        room = max(1, total * share // whole)
        taken = {}
        for position, state in available:
            records = (state.next_index - position) * share // whole
            if records:
                taken[state.topic] = position + records
                room -= records
        # What rounding left goes to one topic after the other, beginning behind the one that had it last.
        count = len(available)
        served = 0
        for step in range(count):
            if room <= 0:
                break
            position, state = available[(self._turn + step) % count]
            reached = taken.get(state.topic, position)
            if reached < state.next_index:
                taken[state.topic] = reached + 1
                room -= 1
            served = step + 1
        self._turn = (self._turn + served) % count if count else 0
        return taken
