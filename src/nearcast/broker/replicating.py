"""The broker's part in replica sets: :class:`~nearcast.fabric.replica_sets.ReplicaSets` wired to files, threads and the clock.

Each set has a directory and a thread that flushes. While one flush of a set runs, what is written meanwhile gathers for the
next: group commit, as everywhere. Heartbeats need finer time than the broker's tick, so sets have a timer of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nearcast.broker.running_functions import RunningFunctions
from nearcast.broker.set_files import SetFiles
from nearcast.broker.topic_files import TopicFiles
from nearcast.errors import ConfigError, StorageUnavailable
from nearcast.fabric.fabric import Fabric
from nearcast.fabric.hosted_sets import HostedSet
from nearcast.fabric.replica_sets import replica_number
from nearcast.fabric.set_logs import ReplicaSetLog
from nearcast.fabricconfig import ReplicaSet
from nearcast.raft.configuration import Configuration
from nearcast.raft.node import ROLES
from nearcast.serving import logs
from nearcast.topiclog.log import TopicLog
from nearcast.topiclog.replica import ReplicaLog

if TYPE_CHECKING:
    from nearcast.broker.process import Broker

SETS: Final = "sets"
"""Directories of replicas, below the broker's data directory."""

LEAST_WAIT_S: Final = 0.001
"""Timers are not set closer than this."""


class _Replica:
    """The files of one set here, and its flushes."""

    def __init__(self, files: SetFiles, log: ReplicaSetLog) -> None:
        self.files = files
        self.log = log
        self.asked = 0
        self.flushing = 0


class Replicating:
    """See the module."""

    def __init__(self, broker: Broker, fabric: Fabric, flush: Callable[[], None]) -> None:
        self._broker = broker
        self._sets = fabric.sets
        self._name = fabric.name
        self._flush = flush
        self.functions = RunningFunctions(broker, fabric.sets, flush)
        self._replicas: dict[str, _Replica] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._flush_soon = False
        self._sets.driver = self
        for definition in self._sets.definitions.values():
            if self._name in definition.members:
                self._check_data(definition.name)

    def _check_data(self, set_name: str) -> None:
        if self._broker.config.persistence.directory is None:
            raise ConfigError(
                f"{self._name} is a member of replica set {set_name} and needs a place for its log: --data DIRECTORY",
                key="persistence.directory",
            )

    # --- what sets want -------------------------------------------------------------------------------------------------

    def open_log(self, definition: ReplicaSet, members: dict[int, str]) -> ReplicaSetLog:
        """See :class:`~nearcast.fabric.replica_sets.SetDriver`."""
        self._check_data(definition.name)
        persistence = self._broker.config.persistence
        settings = self._broker.config.topic_log
        directory = Path(persistence.directory or "") / SETS / definition.name
        files = SetFiles(directory, fsync=persistence.sync == "fsync")
        voters = tuple(replica_number(name) for name in definition.members)
        log = ReplicaSetLog(
            ReplicaLog(files.topics, settings.segment_bytes, settings.max_topics),
            files,
            Configuration(voters, (), definition.write_quorum),
        )
        log.log.log.on_commit = self._broker.bulk.committed
        self._replicas[definition.name] = _Replica(files, log)
        return log

    def readable(self, set_name: str) -> tuple[TopicLog, TopicFiles] | None:
        """What readers of a set that is hosted here read."""
        replica = self._replicas.get(set_name)
        return None if replica is None else (replica.log.log.log, replica.files.topics)

    def request_sync(self, set_name: str, ready: int) -> None:
        replica = self._replicas[set_name]
        replica.asked = ready
        if not replica.flushing:
            self._begin(set_name, replica)

    def looped(self) -> None:
        """This broker has something to say to itself, after whatever runs now."""
        if not self._flush_soon and self._loop is not None:
            self._flush_soon = True
            self._loop.call_soon(self._flush_now)

    def failed(self, error: StorageUnavailable) -> None:
        self._broker.storage_failed(error)

    # --- flushes --------------------------------------------------------------------------------------------------------

    def _begin(self, set_name: str, replica: _Replica) -> None:
        loop = self._loop
        if loop is None:
            return
        replica.flushing = replica.asked
        if self._broker.config.persistence.sync != "fsync":
            loop.call_soon(self._flushed, set_name, None)
            return
        future = replica.files.flush()
        future.add_done_callback(lambda done: self._flushed_later(loop, set_name, done))

    def _flushed_later(self, loop: asyncio.AbstractEventLoop, set_name: str, future: Future[None]) -> None:
        error = future.exception()
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._flushed, set_name, error)

    def _flushed(self, set_name: str, error: BaseException | None) -> None:
        replica = self._replicas.get(set_name)
        if replica is None:
            return
        if isinstance(error, StorageUnavailable):
            self.failed(error)
            return
        done, replica.flushing = replica.flushing, 0
        self._sets.synced(set_name, done, self._broker.monotonic())
        if replica.asked > done:
            self._begin(set_name, replica)
        self._flush()

    def _flush_now(self) -> None:
        self._flush_soon = False
        self._flush()

    # --- time -----------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """The journal was read; replicas may begin."""
        self._loop = asyncio.get_running_loop()

    def schedule(self) -> None:
        """Called after every event: wake up when a set needs it."""
        loop = self._loop
        if loop is None or not self._sets.hosted:
            return
        deadline = self._sets.next_deadline()
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = loop.call_later(max(deadline - self._broker.monotonic(), LEAST_WAIT_S), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._sets.tick(self._broker.monotonic())
        self._flush()

    # --- the end --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The broker stops: what was written is flushed, so that the next start finds it fast."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sets.hosted.clear()
        for set_name in list(self._replicas):
            self.close_log(set_name)

    def function_has_work(self, set_name: str, function: str) -> None:
        self.functions.wake(set_name, function)

    def functions_changed(self) -> None:
        self.functions.review_soon()

    def close_log(self, set_name: str) -> None:
        replica = self._replicas.pop(set_name, None)
        if replica is None:
            return
        try:
            replica.log.log.close()
            replica.files.close()
        except StorageUnavailable as error:
            logs.event(logging.ERROR, "a replica could not be flushed at the end", path=error.path, reason=str(error))

    # --- figures --------------------------------------------------------------------------------------------------------

    def facts(self) -> list[dict[str, object]]:
        """The sets that this broker knows, for /healthz."""
        found: list[dict[str, object]] = []
        for definition in self._sets.definitions.values():
            facts: dict[str, object] = {
                "name": definition.name,
                "members": list(definition.members),
                "leader": self._sets.leader_of(definition.name) or None,
            }
            hosted = self._sets.hosted.get(definition.name)
            if hosted is not None:
                facts |= _role(hosted)
                ring = self._sets.fabric.ring
                if ring.enabled:
                    facts["ring"] = ring.standing(definition.name)
            found.append(facts)
        return found

    def gauges(self) -> dict[str, tuple[float, str]]:
        """Figures for /metrics."""
        hosted = self._sets.hosted.values()
        return {
            "replicas": (len(hosted), "Replica sets that this broker is a member of."),
            "replicas_leading": (sum(each.leads for each in hosted), "Those that it leads."),
        }

    def counters(self) -> dict[str, tuple[float, str]]:
        """Figures for /metrics."""
        hosted = list(self._sets.hosted.values())
        cursors = self._sets.cursors
        return {
            "replicated_entries": (sum(each.entries for each in hosted), "Entries that this broker proposed as a leader."),
            "replicated_messages": (
                sum(each.committed_messages for each in hosted),
                "Messages committed while this broker led their set.",
            ),
            "replicated_delivered": (cursors.delivered, "Messages of replica sets handed to subscribers here."),
            "replicated_duplicates": (
                sum(each.duplicates for each in hosted),
                "Messages proposed again that the log had already.",
            ),
        }


def _role(hosted: HostedSet) -> dict[str, object]:
    node = hosted.node
    return {
        "role": ROLES[node.role],
        "term": node.term,
        "commit": hosted.commit,
        "last": node.view.last_index,
        "uncommitted": node.view.last_index - hosted.commit,
    }
