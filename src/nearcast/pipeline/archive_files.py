"""The files of an archive: how a batch gets in, once; how many small files become a few; what a crash leaves, and how it ends.

An archive is a directory::

    topic_key=sensors%2Fa/date=2026-05-01/000000000012-00000.parquet     what readers see: one or more files per batch
    _checkpoint/          Spark's: how far the stream has been read
    _state.json           the last batch that is in, and the next index of every topic
    _gaps.jsonl           records that were gone before they were archived, a line each
    _work/                files on their way; readers pass over names that begin with _
    _lock                 held by the one job that writes

A batch is written into ``_work``, then decided on by a plan beside it (there whole or not at all), then its files are renamed
to their places, then the state says so. A crash before the plan leaves rubbish; one after it leaves a plan that is carried out
when the job starts again. Compaction writes a directory anew beside the old one and swaps the two in one system call: at every
moment a directory holds each row exactly once. Everything is flushed to disk before anything depends on it.

Owns the directory; knows nothing of Spark or brokers.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nearcast.errors import PipelineError, StorageUnavailable

WORK = "_work"
STATE = "_state.json"
GAPS = "_gaps.jsonl"
LOCK = "_lock"
CHECKPOINT = "_checkpoint"

_EXCHANGE = 2
_HERE = -100
_ROWS_AT_ONCE = 65_536


Document = TypeVar("Document", bound=msgspec.Struct)


class State(msgspec.Struct, kw_only=True):
    """How far an archive has come."""

    query: str
    """Id of the streaming query that fills it. It lives in the checkpoint: another one would begin from the start."""
    last_batch: int = -1
    rows: int = 0
    next_indexes: dict[str, int] = {}


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One file of a batch: where it was written and where it belongs, both below the archive."""

    source: str
    target: str


class Plan(msgspec.Struct, frozen=True):
    """A batch that was decided on."""

    batch: int
    moves: list[Move]
    after: State


class Gap(msgspec.Struct, frozen=True):
    """Records of a topic, from ``first_index`` to before ``next_index``, that were not there any more."""

    topic: str
    first_index: int
    next_index: int
    batch: int


class FileFacts(msgspec.Struct, frozen=True):
    """What the footer of a file of one topic says."""

    path: Path
    topic: str
    first_index: int
    last_index: int
    rows: int


def _no_step(_: str) -> None:
    pass


class Archive:
    """The directory of an archive, opened by the job that writes it; use it with ``with``.

    ``step`` is told what is about to be done, before each step that a crash could cut off; tests crash there.
    """

    def __init__(self, directory: Path, step: Callable[[str], None] = _no_step) -> None:
        self.directory = directory
        self._step = step
        self._lock: int | None = None
        self.state: State | None = None

    def __enter__(self) -> Archive:
        try:
            (self.directory / WORK).mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageUnavailable(str(self.directory), error.strerror or str(error)) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise PipelineError(
                f"{self.directory}: another archive job writes here: stop it, or choose another directory"
            ) from None
        try:
            self._recover()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- batches ------------------------------------------------------------------------------------------------------------

    def begin(self, query: str) -> None:
        """Say which query fills the archive."""
        if self.state is None:
            if any(self.directory.glob("topic_key=*")):
                raise PipelineError(
                    f"{self.directory} has files of an archive and no {STATE}: restore it, or choose another directory"
                )
            self.state = State(query=query)
        elif self.state.query != query:
            raise PipelineError(
                f"{self.directory} was filled by a query whose checkpoint is gone: its rows would be there twice. "
                f"Restore {CHECKPOINT}, or choose another directory"
            )

    def is_in(self, batch: int) -> bool:
        """Whether a batch that Spark repeats is in the archive already."""
        return self.state is not None and batch <= self.state.last_batch

    def work_directory(self, batch: int) -> Path:
        """Where a batch is to be written; whatever an earlier attempt left there is gone."""
        directory = self.directory / WORK / f"batch-{batch}"
        shutil.rmtree(directory, ignore_errors=True)
        return directory

    def add(self, batch: int) -> list[Gap]:
        """Take in the files that were written to :meth:`work_directory`; the gaps that show in them."""
        state = self.state
        if state is None:
            raise PipelineError("begin() comes first")
        written = self.directory / WORK / f"batch-{batch}"
        files = sorted(written.rglob("*.parquet"))
        moves = []
        facts = []
        for number, path in enumerate(files):
            facts.append(_facts(path))
            _flush(path)
            place = path.parent.relative_to(written)
            moves.append(
                Move(str(path.relative_to(self.directory)), str(place / f"{batch:012d}-{number:05d}.parquet")),
            )
        gaps, after = follow(state, batch, facts)
        self._step("note the gaps")
        self._note(gaps)
        self._step("decide")
        plan = self.directory / WORK / "plan.json"
        _replace(plan, msgspec.json.encode(Plan(batch, moves, after)))
        self._carry_out()
        return gaps

    def _carry_out(self) -> None:
        """Carry out the plan, however far that has come before."""
        path = self.directory / WORK / "plan.json"
        plan = _read(path, Plan)
        if plan is None:
            return
        if self.state is not None and plan.batch <= self.state.last_batch:
            # Carried out, and removed, but a power cut brought it back; its files may be part of larger ones by now.
            path.unlink()
            return
        changed = set()
        for move in plan.moves:
            source, target = self.directory / move.source, self.directory / move.target
            self._step("make a directory")
            target.parent.mkdir(parents=True, exist_ok=True)
            self._step("move a file")
            try:
                source.rename(target)
            except FileNotFoundError:
                if not target.exists():
                    raise PipelineError(f"{source} is missing: the archive lost a file of batch {plan.batch}") from None
            changed |= {target.parent, target.parent.parent, self.directory}
        for directory in changed:
            _flush(directory)
        self._step("write the state")
        _replace(self.directory / STATE, msgspec.json.encode(plan.after))
        self.state = plan.after
        self._step("forget the plan")
        path.unlink()
        shutil.rmtree(self.directory / WORK / f"batch-{plan.batch}", ignore_errors=True)

    def _note(self, gaps: list[Gap]) -> None:
        if not gaps:
            return
        path = self.directory / GAPS
        known = set(read_gaps(self.directory))
        cut_off = path.exists() and not path.read_bytes().endswith(b"\n")
        with path.open("ab") as file:
            if cut_off:
                # A line that a crash left without its end must not swallow the next one.
                file.write(b"\n")
            for gap in gaps:
                if gap not in known:
                    file.write(msgspec.json.encode(gap) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _recover(self) -> None:
        self.state = _read(self.directory / STATE, State)
        self._carry_out()
        for path in (self.directory / WORK).iterdir():
            # What no plan names was never part of the archive, or was swapped out of it.
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    # --- compaction ---------------------------------------------------------------------------------------------------------

    def partitions(self) -> Iterator[Path]:
        """The directories that hold files."""
        for top in sorted(self.directory.glob("topic_key=*")):
            for directory, _, names in os.walk(top):
                if any(name.endswith(".parquet") for name in names):
                    yield Path(directory)

    def compact(self, partition: Path, *, min_files: int, target_bytes: int) -> int:
        """Put the small files of a directory together; how many files that saved."""
        files = sorted(path for path in partition.iterdir() if path.suffix == ".parquet")
        groups = _groups(files, target_bytes)
        small = sum(len(group) for group in groups if len(group) > 1)
        if small < min_files:
            return 0
        work = self.directory / WORK / "swap"
        shutil.rmtree(work, ignore_errors=True)
        self._step("make the other directory")
        work.mkdir()
        for group in groups:
            if len(group) == 1:
                self._step("link a file")
                os.link(group[0], work / group[0].name)
            else:
                # The name of the first: files stay in the order of their batches, and no later batch has that name.
                self._step("write a file")
                _merge(group, work / group[0].name)
        _flush(work)
        self._step("swap")
        _swap(work, partition)
        _flush(partition.parent)
        _flush(work.parent)
        self._step("remove the old files")
        shutil.rmtree(work, ignore_errors=True)
        return len(files) - len(groups)


def missing_indexes(files: list[Path]) -> list[tuple[int, int]]:
    """Where the indexes in files of one topic do not follow each other: (first missing, next one there)."""
    columns = [pq.read_table(path, columns=["index"], partitioning=None).column("index").to_numpy() for path in files]
    indexes = np.sort(np.concatenate(columns))
    before = np.flatnonzero(np.diff(indexes) > 1)
    return [(int(indexes[place]) + 1, int(indexes[place + 1])) for place in before]


def follow(
    state: State,
    batch: int,
    facts: list[FileFacts],
    missing: Callable[[list[Path]], list[tuple[int, int]]] = missing_indexes,
) -> tuple[list[Gap], State]:
    """The state after a batch of these files, and the records that are missing before or within it."""
    ranges: dict[str, list[FileFacts]] = {}
    for each in facts:
        ranges.setdefault(each.topic, []).append(each)
    next_indexes = dict(state.next_indexes)
    gaps = []
    for topic, found in ranges.items():
        first = min(each.first_index for each in found)
        end = max(each.last_index for each in found) + 1
        expected = next_indexes.get(topic)
        if expected is not None and first > expected:
            gaps.append(Gap(topic, expected, first, batch))
        rows = sum(each.rows for each in found)
        if rows < end - first:
            gaps += [Gap(topic, start, stop, batch) for start, stop in missing([each.path for each in found])]
        next_indexes[topic] = end
    rows = state.rows + sum(each.rows for each in facts)
    return gaps, State(query=state.query, last_batch=batch, rows=rows, next_indexes=next_indexes)


def read_gaps(directory: Path) -> list[Gap]:
    """The gaps that an archive noted; a line that a crash cut off is passed over."""
    gaps = []
    try:
        lines = (directory / GAPS).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            gaps.append(msgspec.json.decode(line, type=Gap))
        except msgspec.MsgspecError:
            continue
    return gaps


def _facts(path: Path) -> FileFacts:
    """Read from the statistics in a file's footer. Every file holds one topic."""
    metadata = pq.read_metadata(path)
    topics: set[str] = set()
    first, last = None, None
    places = {metadata.schema.column(number).path: number for number in range(metadata.num_columns)}
    for group in range(metadata.num_row_groups):
        index = metadata.row_group(group).column(places["index"]).statistics
        topic = metadata.row_group(group).column(places["topic"]).statistics
        if index is None or not index.has_min_max:
            raise PipelineError(f"{path}: a file without statistics: is parquet.column.statistics.enabled off?")
        first = index.min if first is None else min(first, index.min)
        last = index.max if last is None else max(last, index.max)
        # Statistics of long texts are cut off; the first row has the whole.
        if topic is not None and topic.has_min_max and len(topic.min) < 60:
            topics |= {topic.min, topic.max}
    if not topics:
        topics = {pq.ParquetFile(path).read_row_group(0, columns=["topic"]).column(0)[0].as_py()}
    if first is None or last is None or len(topics) != 1:
        raise PipelineError(f"{path}: not the records of one topic: {sorted(topics)[:3]}")
    return FileFacts(path, topics.pop(), first, last, metadata.num_rows)


def _groups(files: list[Path], target_bytes: int) -> list[list[Path]]:
    """Neighbours that together stay within the target; a file above half of it stays alone."""
    groups: list[list[Path]] = []
    size = 0
    for path in files:
        own = path.stat().st_size
        if groups and size + own <= target_bytes and own <= target_bytes // 2:
            groups[-1].append(path)
            size += own
        else:
            groups.append([path])
            size = own
    return groups


def _merge(files: list[Path], target: Path) -> None:
    """One file with the rows of several, in their order; memory is bounded by a few thousand rows."""
    schema = pq.read_schema(files[0])
    rows = 0
    gathered: list[pa.RecordBatch] = []
    with pq.ParquetWriter(target, schema, compression="zstd", coerce_timestamps="us") as writer:
        waiting = 0
        for path in files:
            with pq.ParquetFile(path) as file:
                rows += file.metadata.num_rows
                for batch in file.iter_batches(_ROWS_AT_ONCE):
                    gathered.append(batch)
                    waiting += batch.num_rows
                    if waiting >= _ROWS_AT_ONCE * 2:
                        writer.write_table(pa.Table.from_batches(gathered, schema))
                        gathered, waiting = [], 0
        if gathered:
            writer.write_table(pa.Table.from_batches(gathered, schema))
    written = pq.read_metadata(target).num_rows
    if written != rows:
        raise PipelineError(f"{target}: {written} rows were written where {rows} were read; nothing was replaced")
    _flush(target)


def _swap(one: Path, other: Path) -> None:
    """Exchange two directories in one step of the file system: renameat2(2)."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise PipelineError("compaction needs Linux, where two directories can be swapped in one step")
    if library.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS):
            raise PipelineError(f"{other}: this file system cannot swap directories in one step, which compaction needs")
        raise StorageUnavailable(str(other), os.strerror(code))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _flush(path.parent)


def _read(path: Path, kind: type[Document]) -> Document | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise PipelineError(f"{path} is damaged ({error}): restore it, or choose another directory") from error
