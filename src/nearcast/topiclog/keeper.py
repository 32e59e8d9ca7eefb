"""The log as a broker uses it: what it keeps, what waits to be written and committed, and how it agrees with the journal.

The engine asks :class:`TopicKeeper` once per route whether a topic is kept, and hands it publications; whoever drives the
engine has it write and commit (:mod:`nearcast.mqtt.commits`). After a crash, log and journal are brought to the same point of
their common history (:mod:`nearcast.mqtt.keeping` tells the whole story). Nothing here knows MQTT beyond a QoS and a client's
name, nor disks, nor who reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nearcast.config import TopicRule
from nearcast.errors import StorageCorrupt
from nearcast.topiclog.blocks import GROUPED, HEADER, HEADER_BYTES, RECORDS, RETAIN, TOPIC
from nearcast.topiclog.log import Topic, TopicLog
from nearcast.topiclog.marks import Mark
from nearcast.topiclog.segments import SEGMENT_HEADER_BYTES, index_name, log_name, parse_log_name, scan
from nearcast.topiclog.storage import Storage

JOURNAL: Final = "$mqtt"
"""The producer whose marks tie QoS 2 publications to the journal. ``batch`` is the mark, ``part`` the mark up to which the
journal was known to be on disk. Others' names must not begin with ``$``."""

_REVIEWED_TOPICS: Final = 1_000
"""Topics whose rule is looked up again in one step after rules changed."""


class TopicKeeping:
    """One topic's way into the log, as long as the rules stay what they are."""

    def __init__(self, keeper: TopicKeeper, name: bytes, rule: TopicRule) -> None:
        self.durable = rule.mode == "durable"
        self.rule = rule
        self._keeper = keeper
        self._name = name
        self._topic: Topic | None = None

    def topic(self) -> Topic | None:
        """The topic in the log, which begins now if it is not there; None when there is no room for it."""
        log = self._keeper.log
        topic = self._topic
        if topic is not None and log.topics.get(self._name) is topic:
            return topic
        topic = log.topic(self._name)
        if topic is not None:
            log.set_retention(topic, self.rule.retention)
            self._topic = topic
        return topic

    def keep(self, payloads: list[bytes], qos: int, retain: bool, properties: bytes, publisher: bytes, mark: int) -> bool:
        """See :class:`nearcast.mqtt.keeping.Keeping`."""
        keeper = self._keeper
        topic = self.topic()
        if topic is None:
            return False
        flags = qos | RETAIN if retain else qos
        if mark:
            keeper.append(topic, publisher, flags | GROUPED, properties, payloads)
            keeper.last_mark = mark
            keeper.mark_journal()
        else:
            keeper.append(topic, publisher, flags, properties, payloads)
        if qos and self.durable:
            keeper.promise()
        return True


class TopicKeeper:
    """See the module. ``rule_for`` says which rule decides about a topic, ``wall`` what time it is, in seconds since 1970."""

    def __init__(
        self,
        log: TopicLog,
        storage: Storage,
        rule_for: Callable[[bytes], TopicRule | None],
        wall: Callable[[], float],
    ) -> None:
        self.log = log
        self.gathered = False
        self.last_mark = 0
        self.covered_mark = 0
        self.records = 0
        """Records appended since the start."""
        self.record_bytes = 0
        """Bytes of their payloads."""
        self.damage: list[StorageCorrupt] = []
        """What recovery found broken."""
        self.cut_records = 0
        """Records that recovery cut off, because the journal did not have them."""
        self.disagreement = ""
        """What recovery has to say about log and journal, if they do not fit together."""
        self._storage = storage
        self._rule_for = rule_for
        self._wall = wall
        self._promising = False
        self._promised_position = 0
        self._committing_position = 0
        self._covering_mark = 0
        self._noted_mark = 0
        self._unreviewed: list[Topic] = []

    # --- topics and rules -----------------------------------------------------------------------------------------------

    def keeping(self, topic: bytes) -> TopicKeeping | None:
        """How a topic is kept, or ``None`` when it is not."""
        rule = self._rule_for(topic)
        return None if rule is None else TopicKeeping(self, topic, rule)

    def rules_changed(self) -> None:
        """Rules are not what they were: what is kept of topics that are there may be another amount now."""
        self._unreviewed = list(self.log.topics.values())

    @property
    def reviewing(self) -> bool:
        """Whether there is more for :meth:`review`."""
        return bool(self._unreviewed)

    def review(self) -> bool:
        """Look at some topics whose rule may have changed; returns whether there are more. Never takes long."""
        unreviewed = self._unreviewed
        for topic in unreviewed[-_REVIEWED_TOPICS:]:
            rule = self._rule_for(topic.name)
            # What no rule keeps any more stays as it was: removing it is a decision of its own.
            if rule is not None and rule.retention != topic.retention:
                self.log.set_retention(topic, rule.retention)
        del unreviewed[-_REVIEWED_TOPICS:]
        return bool(unreviewed)

    # --- writing --------------------------------------------------------------------------------------------------------

    def append(self, topic: Topic, publisher: bytes, flags: int, properties: bytes, payloads: list[bytes]) -> int:
        """Gather records; returns the first one's index."""
        self.gathered = True
        self.records += len(payloads)
        for payload in payloads:
            self.record_bytes += len(payload)
        return self.log.append(topic, publisher, flags, properties, payloads, int(self._wall() * 1_000_000))

    def append_mark(self, mark: Mark) -> None:
        """End the group that was gathered."""
        self.gathered = True
        self.log.append_mark(mark)

    def mark_journal(self) -> None:
        """Note how far marks have come, and up to where the journal is known to be on disk."""
        self.append_mark(Mark(producer=JOURNAL, batch=self.last_mark, part=self.covered_mark))
        self._noted_mark = self.covered_mark

    def delete(self, topic: Topic) -> None:
        """Gather that all records of a topic are removed."""
        self.gathered = True
        self.log.delete(topic)

    def promise(self) -> None:
        """An acknowledgement waits for what was gathered."""
        self._promising = True

    @property
    def uncommitted(self) -> bool:
        """Whether something was written and not committed."""
        return self.log.written_position > self.log.committed_position

    @property
    def unsynced(self) -> bool:
        """The same, of what acknowledgements wait for."""
        return self._promised_position > self.log.committed_position

    def write(self) -> None:
        """Write what was gathered; raises :class:`StorageUnavailable`."""
        if self.gathered and self.covered_mark > self._noted_mark:
            self.mark_journal()  # what comes now must not be cut off if the journal is lost
        self.gathered = False
        position = self.log.write()
        if self._promising:
            self._promising = False
            self._promised_position = position

    def begin_commit(self) -> None:
        """What is written by now is going to be committed: a flush of log and journal begins, which covers it."""
        self._committing_position = self.log.written_position
        self._covering_mark = self.last_mark

    def commit(self) -> None:
        """That flush is done."""
        self.covered_mark = self._covering_mark
        self.log.commit(self._committing_position)

    # --- after a crash --------------------------------------------------------------------------------------------------

    def reconcile(self, journal_mark: int) -> int:
        """See :class:`nearcast.mqtt.keeping.MarkedLog`."""
        log = self.log
        log.recover()
        self.damage = list(log.damage)
        last = self._last_mark()
        if last.batch > max(journal_mark, 0):
            if journal_mark < last.part:
                # The journal once had what it has not now. Then it says nothing about what was promised.
                ends = "is gone" if journal_mark < 0 else f"ends at mark {journal_mark}"
                self.disagreement = (
                    f"the journal {ends} and had {last.part} on disk: it was damaged or removed; "
                    "messages published at QoS 2 may be in the log twice"
                )
            else:
                self._cut_before(journal_mark + 1)
                last = self._last_mark()
        self._review_all()
        self.last_mark = self.covered_mark = self._covering_mark = max(last.batch, journal_mark, 0)
        self._noted_mark = last.part
        return last.batch

    def _last_mark(self) -> Mark:
        return self.log.marks.get(JOURNAL, Mark(producer=JOURNAL))

    def _review_all(self) -> None:
        for topic in self.log.topics.values():
            rule = self._rule_for(topic.name)
            if rule is not None:
                self.log.set_retention(topic, rule.retention)

    def _cut_before(self, mark: int) -> None:
        """Cut the log off before the first group with this mark or a later one, and recover it again."""
        storage = self._storage
        before = self._count()
        for name in reversed(self._segments()):
            marks = [(at, each.batch) for at, each in scan(storage, name, is_last=False).marks if each.producer == JOURNAL]
            later = [at for at, number in marks if number >= mark]
            # A segment begins with the marks as they stood: a later one right there belongs to a group further back.
            begin = self._group_begin(name, later[0]) if later else 0
            if begin >= 0:
                if begin:
                    storage.remove(index_name(name))
                    storage.resume(name, begin)
                break
            storage.remove(index_name(name))
            storage.remove(name)
        self.log.recover()
        self.cut_records = before - self._count()

    def _segments(self) -> list[str]:
        newest: dict[int, int] = {}
        for name in self._storage.names():
            parsed = parse_log_name(name)
            if parsed is not None:
                newest[parsed[0]] = max(parsed[1], newest.get(parsed[0], 0))
        return [log_name(sequence, newest[sequence]) for sequence in sorted(newest)]

    def _group_begin(self, name: str, mark_at: int) -> int:
        """Where the group begins that the mark at this offset ends; -1 for one of the marks that a segment begins with."""
        data = self._storage.read(name, 0, mark_at)
        offset = SEGMENT_HEADER_BYTES
        begin = -1
        grouped = False
        while offset < mark_at:
            length, _, kind, flags, _, _, _, _, _, _ = HEADER.unpack_from(data, offset)
            if kind == RECORDS and flags & GROUPED:
                begin = begin if grouped else offset
                grouped = True
            elif kind != TOPIC:
                grouped = False
            offset += max(length, HEADER_BYTES)
        return begin if grouped else -1

    def _count(self) -> int:
        return sum(topic.next_index - topic.first_index for topic in self.log.topics.values())
