"""Functions at the leader of a replica set: what they have yet to handle, and what they did as part of the log.

How far a function is with a topic is a mark in the log, its state is a record, what it publishes are records: one entry has
all that a batch brought about (decision 0035). A leader begins behind the marks; whatever an earlier one had begun and not
committed never was. Topics of other sets and classes get outputs by way of an *outbox*, a topic of this set that the leader
empties.

========================================= =====================================================================================
``$nearcast/functions/NAME/state``        the function's state, as of the last batch that changed it
``$nearcast/functions/NAME/outbox``       messages for topics that this set does not keep
``$nearcast/functions/NAME/dead``         messages that failed too often, with the reason
========================================= =====================================================================================

Who runs the code is the driver's business; it takes work here and brings back results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from nearcast.errors import RecordUnavailable, StorageCorrupt
from nearcast.functionconfig import Function
from nearcast.mqtt.topics import matches
from nearcast.topiclog.entries import EntryWriter
from nearcast.topiclog.marks import Mark

if TYPE_CHECKING:
    from nearcast.fabric.hosted_sets import HostedSet
    from nearcast.topiclog.batches import Record

PREFIX: Final = "$nearcast/functions/"
OUTBOX: Final = "/outbox"

MAX_BATCH_BYTES: Final = 4_194_304
"""Payload handed to a function at a time."""

_USER_PROPERTY: Final = b"\x26"


class Posted(msgspec.Struct, array_like=True):
    """A message that a function published."""

    topic: str
    payload: bytes
    qos: int = 1
    retain: bool = False


class Work:
    """Messages of one topic that a function is to handle next."""

    def __init__(self, topic: bytes, records: list[Record]) -> None:
        self.topic = topic
        self.records = records

    @property
    def last_index(self) -> int:
        return self.records[-1].index


class _Progress:
    """One function here: how far it is with its topics, what it was deployed as, and which topics have something new."""

    def __init__(self, function: Function, state: bytes) -> None:
        self.function = function
        self.state = state
        self.consumed: dict[bytes, int] = {}
        self.waiting: dict[bytes, None] = {}


class SetFunctions:
    """See the module. ``generation`` rises when what was proposed may be lost: then all begins again behind the marks."""

    def __init__(self, hosted: HostedSet) -> None:
        self.generation = 0
        self._hosted = hosted
        self._running: dict[str, _Progress] = {}
        self._deployed: tuple[Function, ...] = ()
        self._concerned: dict[bytes, list[_Progress]] = {}
        #: Messages that functions handled here since the start, and those put aside.
        self.handled = 0
        self.dead = 0

    @property
    def names(self) -> list[str]:
        """The functions that are to run here."""
        return list(self._running)

    def function(self, name: str) -> Function | None:
        found = self._running.get(name)
        return None if found is None else found.function

    # --- what is deployed -----------------------------------------------------------------------------------------------

    def deploy(self, functions: tuple[Function, ...]) -> None:
        """These are deployed. Those that are new here begin at the next word of the log."""
        self._deployed = functions
        if self._hosted.leads:
            self.begin()

    def begin(self) -> None:
        """This replica leads, or what it had proposed may be lost: begin behind what is committed."""
        self.generation += 1
        self._running = {}
        self._concerned = {}
        for function in self._deployed:
            if not function.removed:
                self._running[function.name] = _Progress(function, self._state_of(function))
        for topic in self._hosted.topics():
            self._look(topic)

    def end(self) -> None:
        """This replica does not lead any more."""
        self.generation += 1
        self._running = {}
        self._concerned = {}

    def _state_of(self, function: Function) -> bytes:
        record = self._hosted.last_record(f"{PREFIX}{function.name}/state".encode())
        return b"" if record is None else bytes(record.payload)

    def _look(self, topic: bytes) -> None:
        """A topic of the set: whom it concerns, and whether it has something for them."""
        for progress in self._concern(topic):
            if self._consumed(progress, topic) < self._hosted.last_index(topic):
                progress.waiting[topic] = None

    def _concern(self, topic: bytes) -> list[_Progress]:
        found = self._concerned.get(topic)
        if found is None:
            found = []
            if not topic.startswith(b"$"):
                name = topic.decode("utf-8")
                found = [each for each in self._running.values() if matches(each.function.topic, name)]
            self._concerned[topic] = found
        return found

    def _consumed(self, progress: _Progress, topic: bytes) -> int:
        """The last index that a function is done with; a function begins with what comes after it was deployed, unless it was
        to have everything."""
        known = progress.consumed.get(topic)
        if known is None:
            mark = self._hosted.log.committed_mark(_producer(progress.function.name, topic))
            if mark is not None:
                known = mark.batch
            elif progress.function.from_start or self._hosted.log.latest_mark(_begun(progress.function.name)) is not None:
                known = 0  # a topic that is younger than the function
            else:
                known = self._hosted.last_index(topic)
            progress.consumed[topic] = known
        return known

    def beginnings(self, writer: EntryWriter) -> None:
        """Before the first entry of functions that are new: note where they begin with the topics that there are."""
        for progress in self._running.values():
            name = progress.function.name
            if progress.function.from_start or self._hosted.log.latest_mark(_begun(name)) is not None:
                continue
            for topic, concerned in self._concerned.items():
                if progress in concerned:
                    writer.mark(Mark(producer=_producer(name, topic), batch=self._consumed(progress, topic)))
            writer.mark(Mark(producer=_begun(name), batch=progress.function.version))

    @property
    def has_beginnings(self) -> bool:
        """Whether :meth:`beginnings` has something to say."""
        for progress in self._running.values():
            if not progress.function.from_start and self._hosted.log.latest_mark(_begun(progress.function.name)) is None:
                return True
        return False

    # --- work -----------------------------------------------------------------------------------------------------------

    def committed(self, topic: bytes) -> list[str]:
        """A topic has more messages; returns the functions that have something to do."""
        concerned = self._concern(topic)
        for progress in concerned:
            progress.waiting[topic] = None
        return [progress.function.name for progress in concerned]

    def take(self, name: str, most: int) -> Work | None:
        """What a function has to handle next: at most so many messages, of one topic. Topics take turns."""
        progress = self._running.get(name)
        while progress is not None and progress.waiting:
            topic = next(iter(progress.waiting))
            del progress.waiting[topic]
            first = max(self._consumed(progress, topic) + 1, self._hosted.first_index(topic))
            last = min(self._hosted.last_index(topic), first + most - 1)
            records = self._records(topic, first, last)
            if records:
                progress.waiting[topic] = None
                return Work(topic, records)
        return None

    def _records(self, topic: bytes, first: int, last: int) -> list[Record]:
        found: list[Record] = []
        size = 0
        for index in range(first, last + 1):
            try:
                record = self._hosted.record(topic, index)
            except (RecordUnavailable, StorageCorrupt):
                continue  # removed, or damaged: nobody can handle it
            found.append(record)
            size += len(record.payload)
            if size >= MAX_BATCH_BYTES:
                break
        return found

    def state(self, name: str) -> bytes:
        """As of all that was brought back so far."""
        progress = self._running.get(name)
        return b"" if progress is None else progress.state

    def done(self, name: str, generation: int, work: Work, outputs: list[Posted], state: bytes | None, now: float) -> bool:
        """A function handled messages: make all that came of it part of the log. False: not now, there is no room.

        What belongs to an earlier generation is dropped: the same messages are handled again.
        """
        progress = self._running.get(name)
        if progress is None or generation != self.generation:
            return True
        if not self._hosted.has_room():
            return False
        writer = self._hosted.begin_group(now)
        time_us = self._hosted.time_us(now)
        self._post(writer, name, outputs, time_us)
        if state is not None:
            writer.run(f"{PREFIX}{name}/state".encode(), b"", 1, b"", [state], time_us)
            progress.state = state
        self._advance(writer, progress, work)
        self.handled += len(work.records)
        return True

    def give_up(self, name: str, generation: int, work: Work, reason: str, now: float) -> bool:
        """Messages failed too often: put them aside, and go on behind them. As :meth:`done` otherwise."""
        progress = self._running.get(name)
        if progress is None or generation != self.generation:
            return True
        if not self._hosted.has_room():
            return False
        writer = self._hosted.begin_group(now)
        time_us = self._hosted.time_us(now)
        for record in work.records:
            properties = _properties(
                ("topic", work.topic), ("index", b"%d" % record.index), ("reason", reason.encode()[:1_000])
            )
            writer.run(f"{PREFIX}{name}/dead".encode(), b"", 1, properties, [bytes(record.payload)], time_us)
        self._advance(writer, progress, work)
        self.dead += len(work.records)
        return True

    def _advance(self, writer: EntryWriter, progress: _Progress, work: Work) -> None:
        name = progress.function.name
        progress.consumed[work.topic] = work.last_index
        writer.mark(Mark(producer=_producer(name, work.topic), batch=work.last_index))

    def _post(self, writer: EntryWriter, name: str, outputs: list[Posted], time_us: int) -> None:
        publisher = f"$function/{name}".encode()
        elsewhere: list[bytes] = []
        for posted in outputs:
            topic = posted.topic.encode("utf-8")
            if self._hosted.keeps(topic):
                writer.run(topic, publisher, posted.qos | (4 if posted.retain else 0), b"", [posted.payload], time_us)
            else:
                elsewhere.append(msgspec.msgpack.encode(posted))
        if elsewhere:
            writer.run(f"{PREFIX}{name}{OUTBOX}".encode(), publisher, 1, b"", elsewhere, time_us)


def is_outbox(topic: bytes) -> bool:
    """Whether a topic's records are to be published elsewhere."""
    return topic.startswith(PREFIX.encode()) and topic.endswith(OUTBOX.encode())


def posted(payload: bytes) -> Posted:
    """A record of an outbox; ``ValueError`` if it is none."""
    return msgspec.msgpack.decode(payload, type=Posted)


def _producer(name: str, topic: bytes) -> str:
    return f"$function/{name}/{topic.decode('utf-8')}"


def _begun(name: str) -> str:
    return f"$function/{name}"


def _properties(*pairs: tuple[str, bytes]) -> bytes:
    """User properties, encoded."""
    found: list[bytes] = []
    for key, value in pairs:
        found += (_USER_PROPERTY, len(key).to_bytes(2, "big"), key.encode(), len(value).to_bytes(2, "big"), value)
    return b"".join(found)
