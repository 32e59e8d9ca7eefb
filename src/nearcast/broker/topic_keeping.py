"""Topics that one broker keeps: its rules, its log and the files of that, and who waits until something is committed.

What MQTT clients publish goes into the log through the engine. What comes in another way (the bulk port) comes through
:meth:`KeptTopics.publish` and :meth:`KeptTopics.publish_group`: into the log and to live subscribers, in the same order as
everything else. Both are written and flushed with the journal (:mod:`nearcast.mqtt.commits`).

What retention removes, it removes here, too: a step of bookkeeping every second (more often with many topics), and a thread
that makes index files, rewrites segments that are mostly dead, and removes those that are dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nearcast.broker.topic_files import DIRECTORY, TopicFiles
from nearcast.broker.topics import Definitions, TopicRules
from nearcast.clock import Clock
from nearcast.config import BrokerConfig, TopicRule
from nearcast.errors import BatchRefused, LocalProtocolError, NearcastError, RequestRefused, StorageCorrupt, StorageUnavailable
from nearcast.mqtt import reasons
from nearcast.mqtt.engine import Engine
from nearcast.serving import logs
from nearcast.topiclog.blocks import GROUPED, RETAIN
from nearcast.topiclog.jobs import Job
from nearcast.topiclog.keeper import TopicKeeper, TopicKeeping
from nearcast.topiclog.log import TopicLog
from nearcast.topiclog.marks import Mark
from nearcast.topiclog.rules import RuleTable

_SHOWN_DAMAGE = 10
_DELETED_AT_ONCE = 500
"""Topics that one step of a deletion looks at."""


class Run:
    """Messages of one topic that share everything but their payload. ``publisher`` is a client identifier."""

    __slots__ = ("payloads", "properties", "publisher", "qos", "retain", "topic")

    def __init__(
        self,
        topic: bytes,
        payloads: list[bytes],
        *,
        publisher: bytes = b"",
        properties: bytes = b"",
        qos: int = 1,
        retain: bool = False,
    ) -> None:
        self.topic = topic
        self.payloads = payloads
        self.publisher = publisher
        self.properties = properties
        self.qos = qos
        self.retain = retain


class KeptTopics:
    """See the module. ``log`` and ``files`` are there while the broker runs and has a data directory; ``flush`` is its own."""

    def __init__(self, config: BrokerConfig, engine: Engine, clock: Clock, flush: Callable[[], None]) -> None:
        self.rules = TopicRules()
        self.log: TopicLog | None = None
        self.files: TopicFiles | None = None
        self.keeper: TopicKeeper | None = None
        #: Called after every commit, when readers can see more than before. Must not take long.
        self.on_commit: list[Callable[[], None]] = []
        self._config = config
        self._engine = engine
        self._clock = clock
        self._flush = flush
        self._failed: StorageUnavailable | None = None
        # Who waits for which position, in order.
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._worker: ThreadPoolExecutor | None = None
        self._work: asyncio.Task[None] | None = None
        self._work_failed = False
        self._stopping = False
        self._told_damage = 0

    # --- life -----------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Read the rules; the log itself is read in :meth:`reconcile`, when the journal has been. The directory is locked."""
        directory = self._config.persistence.directory
        if directory is None:
            return
        place = Path(directory) / DIRECTORY
        self.rules = TopicRules(self._config.topics, Definitions(place))
        settings = self._config.topic_log
        self.files = TopicFiles(place, fsync=self._config.persistence.sync == "fsync")
        self.log = TopicLog(self.files, settings.segment_bytes, settings.max_topics)
        self.log.on_commit = self._committed
        self.keeper = TopicKeeper(self.log, self.files, self._rule_for, self._clock.wall)
        self.rules.on_change.append(self._rules_changed)

    def reconcile(self, journal_mark: int) -> int:
        """See :class:`nearcast.mqtt.keeping.MarkedLog`."""
        keeper = self.keeper
        if keeper is None:
            return 0
        last_mark = keeper.reconcile(journal_mark)
        self._tell_damage(keeper.damage, "the topic log is damaged; what precedes the damage was recovered")
        self._told_damage = len(keeper.log.damage)
        if keeper.disagreement:
            logs.event(logging.ERROR, "topic log and journal do not fit together", reason=keeper.disagreement)
        if keeper.cut_records:
            logs.event(
                logging.INFO,
                "messages that were not acknowledged before the broker ended were taken out of the topic log",
                messages=keeper.cut_records,
            )
        self._engine.keep_with(keeper)
        return last_mark

    def _tell_damage(self, found: Sequence[StorageCorrupt], what: str) -> None:
        for damage in found:
            level = logging.WARNING if damage.torn else logging.ERROR
            logs.event(level, what, path=damage.path, offset=damage.offset, reason=str(damage))

    def flush_step(self) -> Callable[[], None] | None:
        """See :class:`nearcast.broker.journal.FlushedLog`."""
        files = self.files
        if files is None or not files.unsynced:
            return None
        flushed = files.flush()
        return flushed.result

    async def stop_work(self) -> None:
        """Let what is being done about files end, before they are closed."""
        self._stopping = True
        work = self._work
        if work is not None:
            await asyncio.wait([work])
        if self._worker is not None:
            self._worker.shutdown(wait=True)
            self._worker = None

    def close(self) -> None:
        """Close the files. Whoever waits for a commit waits no more."""
        self.fail(StorageUnavailable(self._config.persistence.directory or "", "the broker is stopping"))
        self._engine.keep_with(None)
        files, self.files = self.files, None
        log, self.log, self.keeper = self.log, None, None
        if files is not None:
            try:
                if log is not None:
                    log.close()
                files.close()
            except StorageUnavailable as error:
                logs.event(logging.ERROR, "the topic log could not be flushed at the end", path=error.path, reason=str(error))

    def fail(self, error: StorageUnavailable) -> None:
        """Nothing more will be committed."""
        self._failed = self._failed or error
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)

    # --- retention ------------------------------------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether one step a second is too few for so many topics."""
        keeper = self.keeper
        return keeper is not None and (keeper.reviewing or keeper.log.collecting)

    def tick(self) -> None:
        """A second passed, or less while :attr:`is_behind`: a step of what retention has to do. Never takes long."""
        keeper = self.keeper
        if keeper is None or self._failed is not None:
            return
        keeper.review()
        damage = keeper.log.damage
        self._tell_damage(damage[self._told_damage :], "the topic log is damaged; what is broken cannot be read")
        self._told_damage = len(damage)
        try:
            job = self._collect(keeper.log)
        except NearcastError as error:
            self._tidying_failed(error)
            return
        if job is not None:
            self._work = asyncio.get_running_loop().create_task(self._run(keeper.log, job), name="topic-files")

    def _collect(self, log: TopicLog) -> Job | None:
        return None if self._stopping else log.collect(int(self._clock.wall() * 1_000_000))

    async def _run(self, log: TopicLog, job: Job | None) -> None:
        """Do what is to be done about files in a thread, one thing after the other, until there is nothing left."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="topic-files")
        try:
            while job is not None:
                done = False
                try:
                    await asyncio.get_running_loop().run_in_executor(self._worker, job.run)
                    done = True
                finally:
                    log.finish(job, failed=not done)
                self._work_failed = False
                job = self._collect(log)
        except NearcastError as error:
            self._tidying_failed(error)
        finally:
            self._work = None

    def _tidying_failed(self, error: NearcastError) -> None:
        """Nothing that was promised depends on it: it is tried again in a second, and said once."""
        if not self._work_failed:
            logs.event(logging.ERROR, "files of the topic log cannot be tidied up; trying on", reason=str(error))
        self._work_failed = True

    async def delete_records(self, topic_filter: str) -> int:
        """Remove all records of the topics that a filter matches and no rule keeps any more; returns how many topics that
        were. Readers see it once it is :meth:`committed`. Topics of other rules stay as they are."""
        self._check()
        keeper = self._kept_keeper
        topics = keeper.log.topics
        is_pattern = "+" in topic_filter or "#" in topic_filter
        table = RuleTable([TopicRule(topic=topic_filter)])
        found = 0
        for place, name in enumerate(list(topics) if is_pattern else [topic_filter.encode("utf-8")], 1):
            topic = topics.get(name) if table.match(name) is not None else None
            if topic is not None and self.rules.rule_for(name) is None and topic.next_index > topic.first_index:
                keeper.delete(topic)
                found += 1
            if place % _DELETED_AT_ONCE == 0:  # with many topics, others get their turn
                self._flush()
                await asyncio.sleep(0)
                self._check()
        self._flush()
        return found

    # --- rules ----------------------------------------------------------------------------------------------------------

    def _rule_for(self, topic: bytes) -> TopicRule | None:
        return self.rules.rule_for(topic)

    def _rules_changed(self) -> None:
        keeper = self.keeper
        if keeper is not None:
            keeper.rules_changed()
            self._engine.keep_with(keeper)

    # --- publishing past MQTT -------------------------------------------------------------------------------------------

    def publish(self, run: Run) -> int:
        """Keep messages and hand them to subscribers; returns the index of the first, 0 when no rule keeps the topic.

        They are acknowledged to nobody before :meth:`committed`. Raises :class:`RequestRefused` when the log has no room for
        another topic, :class:`StorageUnavailable` when the disk failed.
        """
        self._check()
        kept = self._keeping(run.topic)
        index = 0
        if kept is not None:
            topic = kept.topic()
            if topic is None:
                self._engine.stats.not_kept += len(run.payloads)
                if kept.durable:
                    raise RequestRefused(
                        reasons.QUOTA_EXCEEDED, f"the log keeps {len(self._kept_log.topics):,} topics already"
                    )
            else:
                index = self._append(run, kept, 0)
        self._deliver(run)
        self._flush()
        return index

    def publish_group(self, runs: Sequence[Run], mark: Mark) -> None:
        """The same for messages of many topics, of which those that are kept are in the log together with ``mark`` or not at
        all. Raises :class:`BatchRefused`, and nothing was done, when the log has no room for their topics."""
        self._check()
        keepings: dict[bytes, TopicKeeping | None] = {}
        for run in runs:
            if run.topic not in keepings:
                keepings[run.topic] = self._keeping(run.topic)
        log = self._kept_log
        new = sum(1 for name, kept in keepings.items() if kept is not None and name not in log.topics)
        most = self._config.topic_log.max_topics
        if len(log.topics) + new > most:
            raise BatchRefused(f"its {new:,} new topics would be more than topic_log.max_topics = {most:,}: raise it")
        for run in runs:
            kept = keepings[run.topic]
            if kept is not None:
                self._append(run, kept, GROUPED)
        self._kept_keeper.append_mark(mark)
        for run in runs:
            self._deliver(run)
        self._flush()

    async def committed(self) -> None:
        """Return once everything published by now is on disk and there for readers."""
        self._check()
        log = self.log
        if log is None or log.committed_position >= log.written_position:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((log.written_position, future))
        await future

    def _append(self, run: Run, kept: TopicKeeping, flags: int) -> int:
        topic = kept.topic()
        if topic is None:
            raise LocalProtocolError("room for a topic was made sure of and is gone")
        flags |= run.qos | (RETAIN if run.retain else 0)
        # No promise to the engine: no output of its own waits for this, and whoever asked waits for `committed`.
        return self._kept_keeper.append(topic, run.publisher, flags, run.properties, run.payloads)

    def _deliver(self, run: Run) -> None:
        self._engine.deliver(run.topic, run.payloads, run.qos, run.retain, run.properties, self._clock.monotonic())

    def _keeping(self, topic: bytes) -> TopicKeeping | None:
        kept = self._engine.router.route_for(topic).kept
        return kept if isinstance(kept, TopicKeeping) else None

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    @property
    def _kept_keeper(self) -> TopicKeeper:
        if self.keeper is None:
            raise LocalProtocolError("this broker keeps no topics: it has no data directory")
        return self.keeper

    @property
    def _kept_log(self) -> TopicLog:
        return self._kept_keeper.log

    # --- what is committed ----------------------------------------------------------------------------------------------

    def _committed(self) -> None:
        log = self.log
        if log is None:
            return
        waiting = self._waiting
        while waiting and waiting[0][0] <= log.committed_position:
            _, future = waiting.popleft()
            if not future.done():
                future.set_result(None)
        for callback in self.on_commit:
            callback()

    # --- figures --------------------------------------------------------------------------------------------------------

    @property
    def topic_count(self) -> int:
        """Topics that the log has."""
        return 0 if self.log is None else len(self.log.topics)

    def gauges(self) -> dict[str, tuple[float, str]]:
        """What /metrics shows of the log; nothing without one."""
        keeper, files = self.keeper, self.files
        if keeper is None or files is None:
            return {}
        waiting = keeper.log.written_position > keeper.log.committed_position
        return {
            "topic_log_topics": (self.topic_count, "Topics in the log."),
            "topic_log_rules": (len(self.rules.rules), "Rules that say which topics are kept."),
            "topic_log_segments": (keeper.log.segment_count, "Files of the log."),
            "topic_log_disk_bytes": (keeper.log.disk_bytes, "Their size, without index files."),
            "topic_log_uncommitted": (int(waiting), "Whether records wait for the disk."),
            "topic_log_waiting": (len(self._waiting), "Requests on the bulk port that wait for the disk."),
        }

    def counters(self) -> dict[str, tuple[float, str]]:
        """The same, of what only grows."""
        keeper = self.keeper
        if keeper is None:
            return {}
        return {
            "topic_log_records": (keeper.records, "Records appended to the log."),
            "topic_log_record_bytes": (keeper.record_bytes, "Bytes of their payloads."),
        }

    def figures(self) -> dict[str, int]:
        """The same below ``$SYS/broker/``."""
        keeper = self.keeper
        if keeper is None:
            return {}
        return {
            "topic log/topics": self.topic_count,
            "topic log/records": keeper.records,
            "topic log/bytes": keeper.record_bytes,
            "topic log/refused": self._engine.stats.not_kept,
        }

    def health(self) -> dict[str, object]:
        """What /healthz shows of the log."""
        log = self.log
        return {
            "enabled": log is not None,
            "rules": len(self.rules.rules),
            "topics": self.topic_count,
            "damage": [str(damage) for damage in ([] if log is None else log.damage[:_SHOWN_DAMAGE])],
        }
