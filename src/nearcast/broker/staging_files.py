"""Batches on disk, before they are in the log: what was handed in, and which batches were decided on. Called in threads.

All lie in ``topics/staging``, and their names say what they are; KEY stands for a producer::

    KEY.BATCH.PARTITION.ATTEMPT.rows    what one attempt handed in, flushed
    KEY.BATCH.commit                    the decision to publish a batch: which attempts, and how it is cut into parts
    ANYTHING.part                       either of them, not whole yet

A file gets its final name once its content is on disk, so a crash leaves either the whole of it or a part that is removed at
the next start. A decision is removed last, when the log has all of its batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from nearcast.broker.files import replace_file, sync_directory
from nearcast.broker.topic_keeping import Run
from nearcast.errors import BatchRefused, RemoteProtocolError, StorageCorrupt, StorageUnavailable
from nearcast.topiclog.blocks import HEADER, HEADER_BYTES, QOS_MASK, RETAIN
from nearcast.topiclog.uploads import Rows, UploadReader

_ROWS = re.compile(r"([0-9a-f]{32})\.(\d+)\.(\d+)\.(\d+)\.rows")
_DECISION = re.compile(r"([0-9a-f]{32})\.(\d+)\.commit")

READ_BYTES = 1_048_576

ROW_BYTES = 64
RUN_BYTES = 512
"""What a row, and a run of rows that share a topic, add to their payloads when a batch is cut into parts: rows without payload
are work, too, and a topic that is new costs most (40 µs)."""


_GIVE_UP = (
    "a batch that was decided on cannot be published whole: put back a copy, or remove the batch's .commit file and start"
    " the broker again to do without what is missing"
)


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """What one attempt at one partition of one batch handed in."""

    key: str
    batch: int
    partition: int
    attempt: int

    @property
    def name(self) -> str:
        return f"{self.key}.{self.batch}.{self.partition}.{self.attempt}"


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A batch is going to be published, whatever happens. ``part_bytes`` fixes how it is cut into parts."""

    producer: str
    """Name of the producer's marks in the log."""

    batch: int
    attempts: tuple[tuple[int, int], ...]
    """(partition, attempt) in the order of publishing."""

    publisher: str
    part_bytes: int
    version: int = 1


def key_of(producer: str) -> str:
    """What stands for a producer in file names."""
    return hashlib.sha256(producer.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Upload:
    """One upload that is being written. All calls come from threads, one after the other."""

    def __init__(self, path: Path, final: Path) -> None:
        self._path = path
        self._final = final
        self._descriptor = -1
        self.reader = UploadReader()
        self.bytes = 0

    def write(self, piece: bytes) -> list[Rows]:
        """Check a piece and write it; the groups of rows in it, without their payloads."""
        found = list(self.reader.read(piece, payloads=False))
        try:
            if self._descriptor < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o600)
            _write_fully(self._descriptor, piece)
        except OSError as error:
            raise StorageUnavailable(str(self._path), f"cannot be written: {error.strerror}") from error
        self.bytes += len(piece)
        return found

    def finish(self) -> int:
        """All is there: flush it and give it its final name. Returns how many rows it has."""
        try:
            if self._descriptor < 0:
                self.write(b"")
            os.fdatasync(self._descriptor)
            self.close()
            os.replace(self._path, self._final)
            sync_directory(self._path.parent)
        except OSError as error:
            raise StorageUnavailable(str(self._path), f"cannot be written: {error.strerror}") from error
        return self.reader.rows

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def discard(self) -> None:
        self.close()
        with contextlib.suppress(OSError):  # the next start removes it
            self._path.unlink(missing_ok=True)


class StagingFiles:
    """The directory. It is made when it is first needed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def upload(self, attempt: Attempt) -> Upload:
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StorageUnavailable(str(self.directory), f"cannot be made: {error.strerror}") from error
        # Two uploads of one attempt do not write to one file; the one that ends last counts.
        return Upload(self.directory / f"{secrets.token_hex(8)}.part", self.directory / f"{attempt.name}.rows")

    def sizes(self) -> dict[Attempt, tuple[int, float]]:
        """(bytes, time of last change in seconds since 1970) of all that was handed in; unfinished uploads are removed."""
        found: dict[Attempt, tuple[int, float]] = {}
        for entry in self._entries():
            if entry.name.endswith(".part"):
                os.unlink(entry.path)
            parsed = _ROWS.fullmatch(entry.name)
            if parsed is None:
                continue
            facts = entry.stat()
            found[Attempt(parsed[1], int(parsed[2]), int(parsed[3]), int(parsed[4]))] = (facts.st_size, facts.st_mtime)
        return found

    def decisions(self) -> list[Decision]:
        """All that were made and not yet carried out."""
        found = []
        for entry in self._entries():
            if _DECISION.fullmatch(entry.name) is not None:
                content = Path(entry.path).read_bytes()
                try:
                    found.append(msgspec.json.decode(content, type=Decision))
                except ValueError as error:
                    raise StorageCorrupt(entry.path, 0, f"{error}; {_GIVE_UP}") from error
        return found

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.directory) as entries:
                return list(entries)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageUnavailable(str(self.directory), f"cannot be read: {error.strerror}") from error

    def decide(self, decision: Decision) -> None:
        """Write a decision; returns once the disk has it."""
        path = self._decision_path(decision)
        replace_file(path, self.directory / f"{secrets.token_hex(8)}.part", msgspec.json.encode(decision))

    def undecide(self, decision: Decision) -> None:
        """Remove a decision: all of it is in the log, or none of it, and its rows are needed no more or were never to be."""
        try:
            self._decision_path(decision).unlink(missing_ok=True)
            sync_directory(self.directory)
        except OSError as error:
            raise StorageUnavailable(str(self.directory), f"cannot be used: {error.strerror}") from error

    def remove(self, attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            (self.directory / f"{attempt.name}.rows").unlink(missing_ok=True)

    def _decision_path(self, decision: Decision) -> Path:
        return self.directory / f"{key_of(decision.producer)}.{decision.batch}.commit"

    # --- reading it again ---------------------------------------------------------------------------------------------------

    def survey(self, attempts: Iterable[Attempt]) -> set[bytes]:
        """The topics of rows that are about to be decided on; raises :class:`BatchRefused` when something is not whole."""
        topics: set[bytes] = set()
        for attempt in attempts:
            reader = UploadReader()
            try:
                for piece in self._pieces(attempt):
                    for _ in reader.read(piece, payloads=False):
                        pass
            except FileNotFoundError as error:
                raise BatchRefused(
                    f"attempt {attempt.attempt} at partition {attempt.partition} of batch {attempt.batch} was not handed in"
                    " here, or was given up since: hand it in again"
                ) from error
            except (RemoteProtocolError, OSError) as error:
                raise BatchRefused(
                    f"what was handed in for partition {attempt.partition} of batch {attempt.batch} is damaged on the"
                    f" broker's disk ({error}): hand it in again"
                ) from error
            topics.update(reader.names.values())
        return topics

    def parts(self, decision: Decision) -> Iterator[list[Run]]:
        """A decided batch in parts, the same ones each time; at least one, though it may be empty."""
        publisher = decision.publisher.encode("utf-8", "surrogatepass")
        gathered: list[Run] = []
        gathered_bytes = 0
        for rows in self._decided_rows(decision):
            begin = 0
            gathered_bytes += RUN_BYTES
            for place, payload in enumerate(rows.payloads):
                size = len(payload) + ROW_BYTES
                if gathered_bytes + size > decision.part_bytes and (gathered or place > begin):
                    if place > begin:
                        gathered.append(_run(rows, rows.payloads[begin:place], publisher))
                    yield gathered
                    gathered, gathered_bytes, begin = [], RUN_BYTES, place
                gathered_bytes += size
            gathered.append(_run(rows, rows.payloads[begin:], publisher))
        yield gathered

    def _decided_rows(self, decision: Decision) -> Iterator[Rows]:
        key = key_of(decision.producer)
        for partition, number in decision.attempts:
            attempt = Attempt(key, decision.batch, partition, number)
            reader = UploadReader()
            try:
                for piece in self._pieces(attempt):
                    yield from reader.read(piece)
            except (RemoteProtocolError, OSError) as error:
                raise StorageCorrupt(str(self.directory / f"{attempt.name}.rows"), 0, f"{error}; {_GIVE_UP}") from error

    def _pieces(self, attempt: Attempt) -> Iterator[bytes]:
        """Pieces of a file, of whole blocks."""
        rest = b""
        with open(self.directory / f"{attempt.name}.rows", "rb") as file:
            while True:
                more = file.read(READ_BYTES)
                data = rest + more if rest else more
                end = _whole_blocks(data)
                if end:
                    yield data[:end]
                rest = data[end:]
                if not more:
                    break
        if rest:
            raise RemoteProtocolError(0x81, "the file ends inside a block")


def _run(rows: Rows, payloads: list[bytes], publisher: bytes) -> Run:
    return Run(
        rows.topic,
        payloads,
        publisher=publisher,
        properties=rows.properties,
        qos=rows.flags & QOS_MASK,
        retain=bool(rows.flags & RETAIN),
    )


def _write_fully(descriptor: int, data: bytes) -> None:
    """All of it: a disk that is nearly full takes less than it is given, and says so only at the next call."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _whole_blocks(data: bytes) -> int:
    """How many bytes at the beginning are whole blocks."""
    offset = 0
    while len(data) - offset >= HEADER_BYTES:
        length = HEADER.unpack_from(data, offset)[0]
        if length < HEADER_BYTES:
            raise RemoteProtocolError(0x81, "no block begins here")
        if offset + length > len(data):
            break
        offset += length
    return offset
