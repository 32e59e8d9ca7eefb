"""The shipped broker on a simulated host: engine, journal, topic log and output order of ``nearcast broker``, with other I/O.

What differs from the process in :mod:`nearcast.broker`: everyone is let in, time-outs are looked at when they are due and not
on a tick, and clients that take nothing are left to their keep-alive or to TCP instead of being cut off after a while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nearcast.config import EngineSettings, Limits
from nearcast.errors import StorageUnavailable
from nearcast.mqtt import reasons
from nearcast.mqtt.access import AllowAll, Peer
from nearcast.mqtt.commits import Commits
from nearcast.mqtt.engine import Engine
from nearcast.mqtt.journaling import Journaling
from nearcast.mqtt.keeping import MarkedLog
from nearcast.simulation.disks import Disk
from nearcast.simulation.folders import DiskFolder
from nearcast.simulation.handles import StreamHandle
from nearcast.simulation.hosts import Host
from nearcast.simulation.mqtt_facts import BrokerFailed, BrokerOpened, BrokerStarted, TopicsCommitted
from nearcast.simulation.mqtt_topics import SimulatedTopics
from nearcast.simulation.programs import Program, ProgramNode
from nearcast.simulation.streams import Stream
from nearcast.topiclog.keeper import TopicKeeper
from nearcast.topiclog.log import TopicLog

# What a flush of the disk is for.
OUTPUT: Final = 0
REPLACEMENT: Final = 1

TIDY_S: Final = 1.0
"""How often retention does a step."""


class DiskStorage(DiskFolder):
    """A simulated disk as the journal's storage; ``on_replace`` is asked for what has to wait for a flush."""

    def __init__(self, disk: Disk, folder: str, on_replace: Callable[[list[str]], None]) -> None:
        super().__init__(disk, folder)
        self._on_replace = on_replace
        self._current = ""

    def create(self, name: str) -> None:
        # A flush covers names, too, so that nothing of the file is promised before its name is safe.
        self._current = self.path(name)
        self._disk.write(self._current, b"")

    def append(self, data: bytes) -> None:
        self._disk.append(self._current, data)

    def keep_aside(self, name: str, aside: str) -> None:
        self._disk.write(self.path(aside), self._disk.read(self.path(name)))

    def remove(self, name: str) -> None:
        self._disk.remove(self.path(name))

    def replace(self, names: list[str]) -> None:
        self._on_replace(names)


class SimulatedJournal:
    """The journal as :class:`~nearcast.mqtt.commits.Commits` sees it."""

    def __init__(self, machine: Journaling) -> None:
        self.needs_sync = True
        self._machine = machine
        self._covered_bytes = 0
        self._flushed_bytes = 0

    @property
    def unsynced(self) -> bool:
        return self._machine.bytes_written > self._flushed_bytes

    def append(self, records: list[bytes]) -> None:
        self._machine.append(records)

    def flushing(self) -> None:
        """A flush of the disk begins."""
        self._covered_bytes = self._machine.bytes_written

    def flushed(self) -> None:
        """It is done."""
        self._flushed_bytes = self._covered_bytes


class SimulatedBroker(Program):
    """One broker's process, on a node that it is added to next."""

    def __init__(
        self,
        host: Host,
        port: int,
        durable: bool,
        limits: Limits,
        snapshot_bytes: int,
        step_bytes: int,
        node: ProgramNode,
        topics: SimulatedTopics | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.token = node.next_token()
        self._owners = node.owners
        self.open = False
        self.failed = False
        settings = EngineSettings(limits=limits, durable=durable)
        self.engine = Engine(settings, AllowAll(), None, host.rng, host.wall - host.now)
        self.commits = Commits(self.engine, self._now, self.request_sync, self._disk_failed)
        self.machine: Journaling | None = None
        self._journal: SimulatedJournal | None = None
        self._storage: DiskStorage | None = None
        self.keeper: TopicKeeper | None = None
        self._tidy_at = host.now
        if durable:
            if topics is not None:
                self.keeper = topics.keeper(host.disk, f"broker-{port}-topics/", self._wall, self._committed)
                self.engine.keep_with(self.keeper)
            self._storage = DiskStorage(host.disk, f"broker-{port}/", self._begin_replacing)
            self.machine = Journaling(self.engine, self._storage, snapshot_bytes, step_bytes, self.marked_log())
            self._journal = SimulatedJournal(self.machine)
        self._useless: list[str] = []
        self._transports: dict[Stream, StreamHandle] = {}
        self._closed: list[StreamHandle] = []

    def marked_log(self) -> MarkedLog | None:
        """The log that the journal has to agree with."""
        return self.keeper

    def _now(self) -> float:
        return self.host.now

    def _wall(self) -> float:
        return self.host.wall

    def _committed(self) -> None:
        self.host.observe(TopicsCommitted(self.host.name, self.port))

    # --- life -----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.host.observe(BrokerStarted(self.host.name))
        if self.machine is None:
            self._let_in()
            return
        try:
            self.machine.recover()
        except StorageUnavailable as error:
            self._disk_failed(error)
            return
        for damage in self.machine.damage:
            self.host.note(f"the journal is damaged: {damage}")
        keeper = self.keeper
        if keeper is not None:
            for damage in keeper.damage:
                self.host.note(f"the topic log is damaged: {damage}")
            if keeper.disagreement:
                self.host.note(keeper.disagreement)
            if keeper.cut_records:
                self.host.note(f"{keeper.cut_records} messages that the journal does not know of were cut off the topic log")

    def _let_in(self) -> None:
        self.open = True
        self.host.listen(self.port)
        self.host.observe(BrokerOpened(self.host.name))

    def stop(self) -> None:
        """As the real one: clients are told, what was promised is kept, and nothing comes in any more."""
        if not self.open:
            return
        self.host.stop_listening(self.port)
        for transport in list(self._transports.values()):
            if transport.connection is not None:
                self.engine.disconnect(transport.connection, reasons.SERVER_SHUTTING_DOWN, self.host.now)
        self._settle()
        self.open = False
        self.host.note("the broker has stopped")

    def _disk_failed(self, error: StorageUnavailable) -> None:
        """As the real one: nothing more comes in or goes out, and the process ends."""
        if self.failed:
            return
        self.failed = True
        self.open = False
        self.host.note(f"the journal cannot be written, stopping: {error}")
        self.host.observe(BrokerFailed(self.host.name, str(error)))
        starts = self.host.starts

        def end() -> None:
            if self.host.starts == starts:
                self.host.kill()

        self.host.world.at(self.host.world.now, end)

    # --- the disk -------------------------------------------------------------------------------------------------------

    def request_sync(self) -> None:
        """Output waits for a flush."""
        if self._journal is not None and self.commits.begin_sync():
            self._journal.flushing()
            self.host.disk.sync(self.token + OUTPUT)

    def _begin_replacing(self, names: list[str]) -> None:
        self._useless = names
        self.host.disk.sync(self.token + REPLACEMENT)

    def synced(self, purpose: int) -> None:
        if self.failed or self.machine is None:
            return
        if purpose == OUTPUT:
            if self._journal is not None:
                self._journal.flushed()
            self.commits.synced()
            self.request_sync()
            self._settle()
            return
        if purpose != REPLACEMENT:
            return
        for name in self._useless:
            if self._storage is not None:
                self._storage.remove(name)
        self._useless = []
        self.machine.replaced()
        if not self.open:
            self._recovered(self.machine)

    def _recovered(self, machine: Journaling) -> None:
        try:
            machine.opened(self.host.now)
        except StorageUnavailable as error:
            self._disk_failed(error)
            return
        self.commits.journal = self._journal
        self.commits.log = self.keeper
        self._let_in()

    # --- streams --------------------------------------------------------------------------------------------------------

    def accepted(self, stream: Stream) -> None:
        if self.failed:
            stream.reset()
            return
        transport = StreamHandle(stream, self._closed.append)
        self._transports[stream] = transport
        peer = Peer(stream.remote_host.name)
        transport.connection = self.engine.open(peer, transport, self.host.now)

    def received(self, stream: Stream, data: bytes) -> None:
        transport = self._transports.get(stream)
        if transport is None or transport.connection is None or self.failed:
            return
        connection = transport.connection
        self.engine.receive(connection, data, self.host.now)
        self._settle()
        if connection.congested and connection.out_bytes > connection.max_output_bytes:
            connection.reading = False
            stream.pause()

    def writable(self, stream: Stream) -> None:
        transport = self._transports.get(stream)
        if transport is None or transport.connection is None or self.failed:
            return
        was_reading = transport.connection.reading
        self.engine.writable(transport.connection, self.host.now)
        self._settle()
        if not was_reading:
            stream.resume()

    def lost(self, stream: Stream, reason: str) -> None:
        transport = self._transports.pop(stream, None)
        if transport is not None and not self.failed:
            self._lose(transport)
            self._settle()

    def _lose(self, transport: StreamHandle) -> None:
        connection, transport.connection = transport.connection, None
        if connection is not None:
            self.engine.lose(connection, self.host.now)

    def _settle(self) -> None:
        """After every call into the engine. A transport that was closed is lost only then, as an event loop would have it."""
        self._flush()
        while self._closed and not self.failed:
            for transport in self._closed:
                self._transports.pop(transport.stream, None)
                self._owners.pop(transport.stream, None)
                self._lose(transport)
            self._closed.clear()
            self._flush()

    def _flush(self) -> None:
        """Let out what may leave."""
        self.commits.flush()

    # --- time -----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        if self.open and self.engine.next_deadline() <= self.host.now:
            self.engine.tick(self.host.now)
            self._settle()
        if self.open and self.keeper is not None and self._tidy_at <= self.host.now:
            self._tidy_at = self.host.now + TIDY_S
            self._tidy(self.keeper.log)

    def _tidy(self, log: TopicLog) -> None:
        """A step of what retention does; what a thread does about files in the real one takes no time here."""
        job = log.collect(int(self.host.wall * 1e6))
        if job is not None:
            failed = False
            try:
                job.run()
            except StorageUnavailable as error:
                failed = True
                self.host.note(f"files of the topic log cannot be tidied up: {error}")
            log.finish(job, failed)

    def next_deadline(self) -> float:
        if not self.open:
            return float("inf")
        deadline = self.engine.next_deadline()
        return deadline if self.keeper is None else min(deadline, self._tidy_at)
