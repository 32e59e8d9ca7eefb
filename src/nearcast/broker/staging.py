"""Batches, exactly once: uploads, the decision to publish, and its carrying out, which a crash only interrupts.

A batch goes through these states, each of them on disk before the next begins::

    handed in ──commit──► decided ──part by part──► in the log ──► forgotten
        │
        └── given up, or expired

Each part goes into the log together with a mark that says so (:mod:`nearcast.topiclog.marks`): they are there both or not at
all. So after a crash the log itself says with which part to go on, and a batch that was asked for twice is recognised by the
producer's last mark. Rows reach live subscribers as their part goes into the log; after a crash in the middle of a part those
of that part may reach them twice. Topics that no rule keeps reach nobody else.

A producer belongs to the user it is named by: another user's producer of the same name is another one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nearcast.broker.producers import PREFIX, Remembered, producer_of
from nearcast.broker.staging_files import Attempt, Decision, StagingFiles, Upload, key_of
from nearcast.broker.topic_files import DIRECTORY
from nearcast.broker.topic_keeping import Run
from nearcast.errors import BatchRefused, NearcastError, RemoteProtocolError, RequestRefused
from nearcast.mqtt import reasons
from nearcast.serving import logs
from nearcast.topiclog import wire
from nearcast.topiclog.marks import Mark
from nearcast.topiclog.uploads import Rows

if TYPE_CHECKING:
    from nearcast.broker.bulk import BulkTransport
    from nearcast.broker.bulk_requests import BulkRequests
    from nearcast.broker.process import Broker

Result = TypeVar("Result")

PART_BYTES = 524_288
"""Payload bytes of one part: what one turn of the event loop publishes at once."""

MAX_UPLOADS = 256
"""Uploads under way over all connections."""

MAX_ATTEMPTS = 100_000
"""Files that were handed in and wait; also the partitions of one batch."""

MAX_PRODUCERS = 10_000
"""Producers whose last batch is remembered. Beyond, one of the user who has most of them is forgotten, the one that committed
nothing for longest: a batch that it hands in once more would be published once more."""

MAX_PASSING_PRODUCERS = 1_000
"""The same, of those that have a single batch (:data:`nearcast.topiclog.wire.ONCE_PREFIX`)."""

EXPIRY_SECONDS = 86_400.0
"""After this long, what was handed in and never committed is removed: its producer is dead."""

SWEEP_SECONDS = 600.0

THREADS = 2

_LARGEST = (1 << 63) - 1


class _Upload:
    """One upload of one connection. Pieces are written one after the other; ``error`` says why it is over."""

    def __init__(self, transport: BulkTransport, number: int, attempt: Attempt, file: Upload) -> None:
        self.transport = transport
        self.number = number
        self.attempt = attempt
        self.file = file
        self.pieces: deque[bytes] = deque()
        self.task: asyncio.Task[None] | None = None
        self.error: NearcastError | None = None
        self.ended = False
        self.gone = False


class _Turn:
    """Who commits for a producer, one after the other, and how many want to."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.wanted = 0


class Staging:
    """The batches of one broker."""

    def __init__(self, broker: Broker, requests: BulkRequests) -> None:
        self._broker = broker
        self._requests = requests
        self._files: StagingFiles | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._held: dict[Attempt, tuple[int, float]] = {}
        self.staged_bytes = 0
        self.uploads = 0
        self._upload_tasks: set[asyncio.Task[None]] = set()
        # Batches that are decided on and not yet wholly in the log, by producer.
        self._carrying_out: dict[str, asyncio.Task[None]] = {}
        self._committing: dict[str, _Turn] = {}
        # Decisions that could not be carried out, by producer: they stand, whatever is asked for next.
        self._stuck: dict[str, Decision] = {}
        self._remembered = Remembered(MAX_PRODUCERS, MAX_PASSING_PRODUCERS)
        self._swept_at = 0.0

    # --- life ---------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Go on with what the last run of the broker had decided on. The log is open."""
        directory = self._broker.config.persistence.directory
        if directory is None:
            return
        self._files = StagingFiles(Path(directory) / DIRECTORY / "staging")
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="staging")
        self._held = self._files.sizes()
        self.staged_bytes = sum(size for size, _ in self._held.values())
        for name in [name for name in self._requests.log.marks if name.startswith(PREFIX)]:
            self._remember(name)
        self._forget_committed()
        for decision in sorted(self._files.decisions(), key=lambda found: found.batch):
            self._carry_out(decision)
        self._sweep()

    async def close(self) -> None:
        """Stop; what is decided on goes on at the next start."""
        tasks = [*self._carrying_out.values(), *self._upload_tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def tick(self, now: float) -> None:
        if self._files is not None and now - self._swept_at > SWEEP_SECONDS:
            self._swept_at = now
            self._sweep()

    def _sweep(self) -> None:
        """Remove what nobody will ask for any more."""
        files = self._files
        if files is None:
            return
        oldest = time.time() - EXPIRY_SECONDS
        # What was decided on, or is about to be, is needed however old it is.
        needed = {key_of(producer) for producer in (*self._carrying_out, *self._stuck, *self._committing)}
        expired = [each for each, (_, changed) in self._held.items() if changed < oldest and each.key not in needed]
        if expired:
            logs.event(logging.WARNING, "batches that were handed in and never committed expired", files=len(expired))
            self._forget(expired)

    def _forget(self, attempts: list[Attempt]) -> None:
        files = self._files
        for attempt in attempts:
            size, _ = self._held.pop(attempt, (0, 0.0))
            self.staged_bytes -= size
        if files is not None and self._threads is not None and attempts:
            self._threads.submit(files.remove, attempts)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # --- requests -----------------------------------------------------------------------------------------------------------

    def handle(self, transport: BulkTransport, number: int, content: wire.FromClient) -> None:
        """Answer a request about batches; raises :class:`BatchRefused`."""
        if isinstance(content, wire.StageEnd):
            self._end_upload(transport, number)
            return
        if isinstance(content, wire.Stage):
            self._begin_upload(transport, number, content)
        elif isinstance(content, wire.CommitBatch):
            producer = self._producer(transport, content.producer, content.batch)
            self._requests.later(transport, number, self._commit(transport, producer, content))
        elif isinstance(content, wire.AbortBatch):
            producer = self._producer(transport, content.producer, content.batch)
            self._abort(producer, content.batch)
            transport.send(number, wire.Done(0))
        elif isinstance(content, wire.LastBatch):
            producer = self._producer(transport, content.producer, 0)
            self._requests.later(transport, number, self._last(producer))
        else:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "a message that no client may send")

    @property
    def files(self) -> StagingFiles:
        if self._files is None:
            raise BatchRefused("this broker takes no batches: it has no data directory; start it with --data DIRECTORY")
        return self._files

    def _producer(self, transport: BulkTransport, name: str, batch: int) -> str:
        """Under which name the log remembers this user's producer."""
        size = len(name.encode("utf-8", "surrogatepass"))
        if not 0 < size <= wire.MAX_NAME_BYTES:
            raise BatchRefused(f"a producer's name has between 1 and {wire.MAX_NAME_BYTES} bytes, not {size}")
        if not 0 <= batch <= _LARGEST:
            raise BatchRefused(f"batch {batch}: batches are numbered from 0 on")
        _ = self.files
        return producer_of(transport.username, name)

    # --- uploads ------------------------------------------------------------------------------------------------------------

    def _begin_upload(self, transport: BulkTransport, number: int, content: wire.Stage) -> None:
        producer = self._producer(transport, content.producer, content.batch)
        if not 0 <= content.partition <= _LARGEST or not 0 <= content.attempt <= _LARGEST:
            raise BatchRefused("partitions and attempts are numbered from 0 on")
        if self.uploads >= MAX_UPLOADS or len(self._held) >= MAX_ATTEMPTS:
            raise BatchRefused(
                f"{MAX_UPLOADS} uploads are under way, or {MAX_ATTEMPTS:,} wait to be committed: try again later"
            )
        self._check_room(0)
        attempt = Attempt(key_of(producer), content.batch, content.partition, content.attempt)
        transport.uploads[number] = _Upload(transport, number, attempt, self.files.upload(attempt))
        self.uploads += 1
        transport.send(number, wire.Done(0))

    def _check_room(self, more_bytes: int) -> None:
        most = self._broker.config.topic_log.max_staged_bytes
        if self.staged_bytes + more_bytes > most:
            raise BatchRefused(
                f"{self.staged_bytes:,} bytes wait to be committed already; topic_log.max_staged_bytes is {most:,}:"
                " commit or abort batches, or raise it"
            )

    def data(self, transport: BulkTransport, number: int, body: bytes) -> None:
        """Rows of an upload."""
        upload = transport.uploads.get(number)
        if not isinstance(upload, _Upload) or upload.ended:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "data that belongs to no upload")
        if upload.error is None:
            transport.upload_bytes += len(body)
            upload.pieces.append(body)
            self._go_on(upload)

    def _end_upload(self, transport: BulkTransport, number: int) -> None:
        upload = transport.uploads.get(number)
        if not isinstance(upload, _Upload) or upload.ended:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "the end of an upload that is none")
        upload.ended = True
        self._go_on(upload)

    def closed(self, transport: BulkTransport, number: int) -> None:
        """The client gave an upload up, or is gone."""
        upload = transport.uploads.pop(number, None)
        if isinstance(upload, _Upload):
            upload.gone = True
            self._go_on(upload)

    def lost(self, transport: BulkTransport) -> None:
        for number in list(transport.uploads):
            self.closed(transport, number)

    def _go_on(self, upload: _Upload) -> None:
        if upload.task is None:
            upload.task = asyncio.get_running_loop().create_task(self._write(upload), name="staging-upload")
            self._upload_tasks.add(upload.task)
            upload.task.add_done_callback(self._upload_tasks.discard)

    async def _write(self, upload: _Upload) -> None:
        """Write what waits, then do what is asked for next."""
        transport = upload.transport
        try:
            while upload.pieces and not upload.gone and upload.error is None:
                await self._write_piece(upload, upload.pieces.popleft())
            if upload.gone or upload.error is not None:
                transport.upload_bytes -= sum(map(len, upload.pieces))
                upload.pieces.clear()
                await self._in_thread(upload.file.discard)
                self.staged_bytes -= upload.file.bytes
                upload.file.bytes = 0
            elif upload.ended:
                await self._finish(upload)
        finally:
            upload.task = None
        if upload.gone or upload.ended:
            self._over(upload)
        elif upload.pieces:
            self._go_on(upload)
        transport.unblocked()

    async def _write_piece(self, upload: _Upload, piece: bytes) -> None:
        try:
            self._check_room(len(piece))
            self.staged_bytes += len(piece)
            try:
                groups = await self._in_thread(lambda: upload.file.write(piece))
            except BaseException:
                self.staged_bytes -= len(piece)
                raise
            # In a thread as well: a piece may name tens of thousands of topics.
            await self._in_thread(lambda: self._check(upload.transport, groups))
        except RemoteProtocolError as error:
            upload.error = BatchRefused(f"what was handed in makes no sense: {error.message}")
        except NearcastError as error:
            upload.error = error
        finally:
            upload.transport.upload_bytes -= len(piece)
        upload.transport.unblocked()

    def _check(self, transport: BulkTransport, groups: list[Rows]) -> None:
        """Whether the client may publish these."""
        checked: set[bytes] = set()
        properties: set[bytes] = set()
        limits = self._broker.config.limits
        for rows in groups:
            if rows.topic not in checked:
                checked.add(rows.topic)
                try:
                    self._requests.check_publish(transport, rows.topic.decode("utf-8", "surrogateescape"))
                except RequestRefused as error:
                    raise BatchRefused(str(error)) from error
            if rows.properties not in properties:
                properties.add(rows.properties)
                self._requests.check_properties(rows.properties)
            if rows.flags & 3 > limits.max_qos:
                raise BatchRefused(f"QoS {rows.flags & 3} is not served here")
            if rows.flags & 4 and not limits.retain_available:
                raise BatchRefused("messages are not retained here")
            if rows.largest + len(rows.topic) + len(rows.properties) + 16 > limits.max_packet_bytes:
                raise BatchRefused(f"a row is larger than limits.max_packet_bytes, {limits.max_packet_bytes:,}")

    async def _finish(self, upload: _Upload) -> None:
        try:
            rows = await self._in_thread(upload.file.finish)
        except NearcastError as error:
            upload.error = error
            self.staged_bytes -= upload.file.bytes
            await self._in_thread(upload.file.discard)
            return
        before, _ = self._held.get(upload.attempt, (0, 0.0))
        self.staged_bytes -= before
        self._held[upload.attempt] = (upload.file.bytes, time.time())
        upload.transport.send(upload.number, wire.Done(rows))

    def _over(self, upload: _Upload) -> None:
        self.uploads -= 1
        if upload.transport.uploads.get(upload.number) is upload:
            del upload.transport.uploads[upload.number]
        if upload.error is not None and not upload.gone:
            upload.transport.send(upload.number, self._requests.refusal(upload.error))

    # --- committing ---------------------------------------------------------------------------------------------------------

    def _is_committed(self, producer: str, batch: int) -> bool:
        """Whether the log has all of a batch, or of a later one."""
        mark = self._requests.log.marks.get(producer)
        return mark is not None and (mark.batch > batch or (mark.batch == batch and mark.final))

    async def _commit(self, transport: BulkTransport, producer: str, content: wire.CommitBatch) -> wire.Message:
        turn = self._committing.setdefault(producer, _Turn())
        turn.wanted += 1
        try:
            async with turn.lock:
                return await self._commit_in_turn(transport, producer, content)
        finally:
            turn.wanted -= 1
            if not turn.wanted:
                del self._committing[producer]

    async def _commit_in_turn(self, transport: BulkTransport, producer: str, content: wire.CommitBatch) -> wire.Message:
        files = self.files
        await self._settled(producer)
        if self._is_committed(producer, content.batch):
            self._forget_batches(producer, content.batch)
            return wire.Done(0)
        stuck = self._stuck.pop(producer, None)
        if stuck is not None:
            await asyncio.shield(self._carry_out(stuck))
            if self._is_committed(producer, content.batch):
                return wire.Done(1)
        pairs = sorted(content.attempts)
        if len({partition for partition, _ in pairs}) != len(pairs) or len(pairs) > MAX_ATTEMPTS:
            raise BatchRefused("a batch takes one attempt of each partition")
        key = key_of(producer)
        attempts = [Attempt(key, content.batch, partition, attempt) for partition, attempt in pairs]
        topics = await self._in_thread(lambda: files.survey(attempts))
        await self._in_thread(lambda: self._check_topics(topics))
        decision = Decision(
            producer=producer,
            batch=content.batch,
            attempts=tuple(pairs),
            publisher=transport.client_id,
            part_bytes=PART_BYTES,
        )
        await self._in_thread(lambda: files.decide(decision))
        await asyncio.shield(self._carry_out(decision))
        return wire.Done(1)

    def _check_topics(self, topics: set[bytes]) -> None:
        """Refuse, before anything is decided, a batch whose topics the log has no room for."""
        log, rules = self._requests.log, self._requests.kept.rules
        new = sum(1 for topic in topics if topic not in log.topics and rules.rule_for(topic) is not None)
        most = self._broker.config.topic_log.max_topics
        if new and len(log.topics) + new > most:
            raise BatchRefused(f"its {new:,} new topics would be more than topic_log.max_topics = {most:,}: raise it")

    async def _settled(self, producer: str) -> None:
        """Wait until what is decided on for a producer is in the log."""
        task = self._carrying_out.get(producer)
        if task is not None:
            await asyncio.shield(task)

    def _carry_out(self, decision: Decision) -> asyncio.Task[None]:
        before = self._carrying_out.get(decision.producer)
        task = asyncio.get_running_loop().create_task(self._publish(decision, before), name="staging-publish")
        self._carrying_out[decision.producer] = task
        task.add_done_callback(lambda done: self._carried_out(decision, done))
        return task

    def _carried_out(self, decision: Decision, task: asyncio.Task[None]) -> None:
        if self._carrying_out.get(decision.producer) is task:
            del self._carrying_out[decision.producer]
        if not task.cancelled() and task.exception() is not None:
            self._stuck[decision.producer] = decision
            logs.event(
                logging.ERROR,
                "a batch that was decided on could not be published whole; that goes on when it is committed again, or at the"
                " next start",
                producer=decision.producer,
                batch=decision.batch,
                reason=str(task.exception()),
            )

    async def _publish(self, decision: Decision, before: asyncio.Task[None] | None) -> None:
        """Put a decided batch into the log, part by part, from where the log says that it is."""
        files = self.files
        if before is not None:
            await asyncio.wait([before])
        if not self._is_committed(decision.producer, decision.batch):
            mark = self._requests.log.marks.get(decision.producer)
            done_parts = mark.part + 1 if mark is not None and mark.batch == decision.batch else 0
            parts = files.parts(decision)
            for _ in range(done_parts):
                await self._in_thread(lambda: _next_part(parts))
            number = done_parts
            part = await self._in_thread(lambda: _next_part(parts))
            while part is not None:
                following = await self._in_thread(lambda: _next_part(parts))
                mark = Mark(producer=decision.producer, batch=decision.batch, part=number, final=following is None)
                self._requests.kept.publish_group(part, mark)
                await self._requests.kept.committed()
                part = following
                number += 1
        self._remember(decision.producer)
        self._forget_batches(decision.producer, decision.batch)
        await self._in_thread(lambda: files.undecide(decision))

    def _remember(self, producer: str) -> None:
        """A producer has committed something. Every write of a Spark job is a producer: they must not grow for ever."""
        forgotten = self._remembered.add(producer)
        if forgotten is not None and forgotten not in self._carrying_out and forgotten not in self._stuck:
            self._requests.log.forget_mark(forgotten)

    def _forget_batches(self, producer: str, batch: int) -> None:
        """What was handed in for a batch, or for those before it, is of no use any more."""
        key = key_of(producer)
        self._forget([each for each in self._held if each.key == key and each.batch <= batch])

    def _forget_committed(self) -> None:
        """The last run of the broker may have ended before it removed everything that was in the log by then."""
        if self._held:
            marks = self._requests.log.marks
            done = {key_of(name): mark.batch if mark.final else mark.batch - 1 for name, mark in marks.items()}
            self._forget([each for each in self._held if each.batch <= done.get(each.key, -1)])

    def _abort(self, producer: str, batch: int) -> None:
        stuck = self._stuck.get(producer)
        decided = stuck is not None and stuck.batch == batch
        if producer not in self._carrying_out and producer not in self._committing and not decided:
            key = key_of(producer)
            self._forget([each for each in self._held if each.key == key and each.batch == batch])

    async def _last(self, producer: str) -> wire.Message:
        await self._settled(producer)
        mark = self._requests.log.marks.get(producer)
        return wire.Done(-1 if mark is None else mark.batch)


def _next_part(parts: Iterator[list[Run]]) -> list[Run] | None:
    return next(parts, None)
