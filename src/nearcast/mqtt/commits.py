"""The order of things after every call into the engine: the topic log, then records, then what they hold back.

The contract is :class:`~nearcast.mqtt.effects.Effects`'s. Here it meets the disk:

- without a journal everything is sent at once;
- with a journal that need not be flushed, log and records are written, then everything is sent;
- with one that must be, log and records are written, output that waits for nothing is sent, and the held output is gathered
  until the next flush of the disk has covered what it promises. While one flush runs, the next batch gathers: group commit. A
  client for which ``max_output_bytes`` wait for the disk gets its further output gathered by the engine, under the engine's
  bounds, until the flush is done.

What was written to the log is shown to its readers at the same moment: after a flush of both files, or once both are written.
Messages that nobody waits for (a tap's, those of QoS 0) ask for a flush as well, so that readers get them; output that does
not depend on it does not wait for that one.

A disk that fails stops the broker (:attr:`Commits.failed`): an acknowledgement that nothing stands behind must not leave.

How a flush is done is the driver's business. It is asked for one by ``request_sync``; when it begins one it calls
:meth:`Commits.begin_sync`, when the disk has it :meth:`Commits.synced`, and goes on so as long as the former says that
something waits. A flush covers the log first, then the journal (:mod:`nearcast.mqtt.keeping` says why). ``syncing`` is true
from the request to the end of the last flush; a driver that gives up in between says so there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from nearcast.errors import StorageUnavailable
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.engine import Engine


class Journal(Protocol):
    """What is written before something is promised."""

    needs_sync: bool

    @property
    def unsynced(self) -> bool:
        """Whether something was appended that no flush has covered and ended since."""

    def append(self, records: list[bytes]) -> None:
        """Write records; raises :class:`StorageUnavailable`."""


class Log(Protocol):
    """What keeps topics. All that is appended is first gathered, then written, then committed: shown to readers."""

    @property
    def gathered(self) -> bool:
        """Whether something was appended and not written."""

    @property
    def uncommitted(self) -> bool:
        """Whether something was written and not committed."""

    @property
    def unsynced(self) -> bool:
        """The same, of what acknowledgements wait for."""

    def write(self) -> None:
        """Write what was gathered; raises :class:`StorageUnavailable`."""

    def begin_commit(self) -> None:
        """What is written by now is going to be committed."""

    def commit(self) -> None:
        """Do so."""


class Transport(Protocol):
    """The ``handle`` of a connection."""

    connection: Connection | None
    held_bytes: int
    waits_to_close: bool

    def send(self, chunks: list[bytes]) -> None:
        """Send bytes after those sent before."""

    def close(self) -> None:
        """Close once what was sent is out."""


class Commits:
    """Carries out what the engine decided. ``journal`` and ``log`` are set while there are such; no log without a journal."""

    def __init__(
        self,
        engine: Engine,
        monotonic: Callable[[], float],
        request_sync: Callable[[], None],
        on_failure: Callable[[StorageUnavailable], None],
    ) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self._request_sync = request_sync
        self._on_failure = on_failure
        self.journal: Journal | None = None
        self.log: Log | None = None
        self.failed: StorageUnavailable | None = None
        self._held: list[tuple[Transport, list[bytes], int]] = []
        self._batch: list[tuple[Transport, list[bytes], int]] = []
        self.syncing = False

    def flush(self) -> None:
        """Persist and send whatever is pending. Called after every call into the engine."""
        engine = self._engine
        journal = self.journal
        if journal is not None:
            self._commit(journal)
            return
        ready = engine.ready()
        while ready:
            for connection in ready:
                if connection.congested and not connection.closing:
                    continue
                handle = cast(Transport, connection.handle)
                chunks = connection.take()
                if chunks:
                    handle.send(chunks)
                if connection.closing:
                    handle.close()
                elif connection.starved and not connection.congested:
                    engine.writable(connection, self._monotonic())
            ready = engine.ready()

    def begin_sync(self) -> bool:
        """A flush begins: it covers what was written until now. False when nothing waits for one any more."""
        log = self.log
        waits = bool(self._held) or (log is not None and log.uncommitted)
        self.syncing = waits and self.failed is None
        self._batch = self._held
        self._held = []
        if log is not None and self.syncing:
            log.begin_commit()
        return self.syncing

    def synced(self) -> None:
        """The flush is done."""
        batch = self._batch
        self._batch = []
        journal = self.journal
        if self.failed is not None or journal is None:
            return
        if self.log is not None:
            self.log.commit()
        for handle, chunks, size in batch:
            handle.held_bytes -= size
            handle.send(chunks)
            connection = handle.connection
            if connection is not None and not handle.held_bytes and connection.held is None:
                # Not before: what was held back only because its client waits for the disk must not be overtaken.
                connection.committed()
            if handle.waits_to_close:
                if not handle.held_bytes:
                    handle.close()
            elif connection is not None and (connection.starved or connection.held is not None):
                # It was left out while too much of it was waiting here. A congested one has to wait for its client.
                connection.touch()
        self._commit(journal)

    def fail(self, error: StorageUnavailable) -> None:
        """The disk failed. Nothing that waits for it leaves any more."""
        if self.failed is None:
            self.failed = error
            self._held = []
            self._on_failure(error)

    def _commit(self, journal: Journal) -> None:
        while self.failed is None and self._commit_once(journal):
            pass

    def _commit_once(self, journal: Journal) -> bool:
        """One round of records and output; returns whether that made more of either."""
        engine = self._engine
        records = engine.take_records()
        log = self.log
        try:
            if log is not None and log.gathered:
                log.write()
            if records:
                journal.append(records)
        except StorageUnavailable as error:
            self.fail(error)
            return False
        if log is not None and log.uncommitted and not journal.needs_sync:
            log.begin_commit()
            log.commit()
        for connection in engine.ready():
            if connection.congested and not connection.closing:
                continue
            handle = cast(Transport, connection.handle)
            chunks = connection.take()
            if chunks and connection.closing and handle.held_bytes:
                # The last word, a DISCONNECT: it must not overtake the answers that wait for the disk [MQTT-3.14.4-1].
                self._hold(handle, chunks, sum(map(len, chunks)))
            elif chunks:
                handle.send(chunks)
            if handle.held_bytes >= connection.max_output_bytes and not connection.closing:
                # Enough waits for the disk. The rest stays with the engine, which counts it; `synced` comes back for it.
                continue
            if engine.effects.records and connection.held is not None:
                # Sending to another one made records, and this output may rest on them: in the next round they are written.
                connection.touch()
                continue
            counted = connection.out_bytes
            held = connection.take_held()
            if held:
                # A flush that is under way may be the one this output waits for, if its client could not take it before.
                unsafe = journal.needs_sync and (journal.unsynced or (log is not None and log.unsynced))
                if handle.held_bytes or unsafe:
                    self._hold(handle, held, counted - connection.out_bytes)
                else:
                    handle.send(held)
                    connection.committed()
            if connection.closing:
                if handle.held_bytes:
                    handle.waits_to_close = True
                else:
                    handle.close()
            elif connection.starved and not connection.congested:
                engine.writable(connection, self._monotonic())
        if (self._held or (log is not None and log.uncommitted)) and not self.syncing:
            self.syncing = True
            self._request_sync()
        # Output that went into another connection's (a client behind a gateway, whose transport is a link) is to leave, too.
        return bool(engine.effects.dirty or engine.effects.records)

    def _hold(self, handle: Transport, chunks: list[bytes], size: int) -> None:
        self._held.append((handle, chunks, size))
        handle.held_bytes += size
