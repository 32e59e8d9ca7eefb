"""What the topic log does on this disk: appending with group commit, reading, opening; against what the disk itself does.

The disk's own figure is taken in the same run, in turns with the log's: the same bytes, written in the same pieces and flushed
as often, without a log. Owns the measuring; where files come from is the caller's business.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Protocol

import msgspec

from nearcast.topiclog.batches import tally
from nearcast.topiclog.log import Topic, TopicLog

GROUP_BYTES = 2 << 20
"""What is gathered between two flushes."""
READ_BYTES = 1 << 20
PUBLISHER = b"bench-client-1"


class LogFiles(Protocol):
    """What keeps the log's files."""

    def flush(self) -> Future[None]: ...

    def close(self) -> None: ...


Opener = Callable[[Path, int], tuple[LogFiles, TopicLog]]
"""Opens the log in a directory, with segments of so many bytes."""


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, and what it has to be; a bar of 0 asks for nothing."""

    name: str
    unit: str
    value: float
    bar: float
    higher_is_better: bool = True
    rounds: list[float]
    disk: float | None = None
    """What the disk does with the same bytes, in the same unit."""
    alternative: float | None = None
    """A lower bar that counts, too: 70 % of the disk."""

    @property
    def is_met(self) -> bool:
        bar = self.bar if self.alternative is None else min(self.bar, self.alternative)
        return self.value >= bar if self.higher_is_better else self.value <= bar

    @property
    def ratio(self) -> float | None:
        """Of the disk's own figure."""
        return self.value / self.disk if self.disk else None


class Append:
    """Appends records of one size to topics in turn, in blocks of so many, until so many bytes of payload are in the log."""

    def __init__(self, payload_bytes: int, block_records: int, topics: int = 8) -> None:
        self.payload_bytes = payload_bytes
        self.block_records = block_records
        self.topics = topics
        self.payloads = [random.Random(1).randbytes(payload_bytes) for _ in range(block_records)]

    def run(self, log: TopicLog, files: LogFiles, total_bytes: int) -> tuple[float, int, int]:
        """(seconds, records, bytes in the files). A flush runs while the next group is gathered, as in the broker."""
        topics = [_topic(log, f"bench/{number}".encode()) for number in range(self.topics)]
        append, payloads, count = log.append, self.payloads, self.topics
        per_block = self.payload_bytes * self.block_records
        group = max(1, GROUP_BYTES // per_block)
        groups = max(1, total_bytes // (group * per_block))
        flushing: Future[None] | None = None
        flushed_position = 0
        before = log.disk_bytes
        start = time.perf_counter()
        for _ in range(groups):
            now_us = time.time_ns() // 1_000
            for number in range(group):
                append(topics[number % count], PUBLISHER, 1, b"", payloads, now_us)
            position = log.write()
            if flushing is not None:
                flushing.result()
                log.commit(flushed_position)
            flushing, flushed_position = files.flush(), position
        if flushing is not None:
            flushing.result()
            log.commit(flushed_position)
        seconds = time.perf_counter() - start
        return seconds, groups * group * self.block_records, log.disk_bytes - before


def disk_seconds(directory: Path, total_bytes: int) -> float:
    """How long the disk takes for so many bytes, in pieces like the log's, each flushed while the next is written."""
    path = directory / "disk.bench"
    data = random.Random(2).randbytes(GROUP_BYTES)
    with ThreadPoolExecutor(1) as flusher:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            flushing: Future[None] | None = None
            start = time.perf_counter()
            for _ in range(max(1, total_bytes // GROUP_BYTES)):
                os.write(descriptor, data)
                if flushing is not None:
                    flushing.result()
                flushing = flusher.submit(os.fdatasync, descriptor)
            if flushing is not None:
                flushing.result()
            return time.perf_counter() - start
        finally:
            os.close(descriptor)
            path.unlink()


def run_jobs(log: TopicLog) -> None:
    """Do what a broker does in the background: index files, removal."""
    while True:
        job = log.collect(time.time_ns() // 1_000)
        if job is None:
            return
        job.run()
        log.finish(job)


def read_all(log: TopicLog) -> tuple[int, int]:
    """(records, payload bytes) of the whole log, read in its order, every block checked."""
    records = 0
    payload_bytes = 0
    cursor = 0
    while cursor < log.committed_position:
        extents = log.scan(None, cursor, READ_BYTES)
        cursor = extents.cursor
        for view in extents.views():
            found = tally(view)
            records += found[0]
            payload_bytes += found[1]
    return records, payload_bytes


def read_topic(log: TopicLog, topic: Topic) -> tuple[int, int]:
    """The same of one topic, which lies between others."""
    records = 0
    payload_bytes = 0
    at = topic.first_index
    while at < topic.committed_index:
        extents = log.read(topic, at, topic.committed_index, READ_BYTES)
        at = extents.next_index
        found = tally(extents.gather())
        records += found[0]
        payload_bytes += found[1]
    return records, payload_bytes


def measure(
    directory: Path, opener: Opener, *, rounds: int, round_bytes: int, open_bytes: int, segment_bytes: int
) -> Iterator[Bar]:
    """Every bar, one after the other, as it is measured."""
    for payload_bytes, bar, by_records in ((100, 200_000.0, True), (8_192, 300.0, False)):
        for block_records in (1, 64 if payload_bytes == 100 else 8):
            yield _measure_append(
                directory, opener, payload_bytes, block_records, bar, by_records, rounds, round_bytes, segment_bytes
            )
    yield from _measure_reading(directory, opener, rounds, round_bytes, segment_bytes)
    yield _measure_open(directory, opener, open_bytes, segment_bytes)


def _measure_append(
    directory: Path,
    opener: Opener,
    payload_bytes: int,
    block_records: int,
    bar: float,
    by_records: bool,
    rounds: int,
    round_bytes: int,
    segment_bytes: int,
) -> Bar:
    ours: list[float] = []
    disk: list[float] = []
    for number in range(rounds):
        place = directory / f"append-{payload_bytes}-{block_records}-{number}"
        files, log = opener(place, segment_bytes)
        try:
            seconds, records, written = Append(payload_bytes, block_records).run(log, files, round_bytes)
        finally:
            files.close()
            _remove(place)
        # Records count as records; 8 KB records count as megabytes of payload.
        ours.append(records / seconds if by_records else records * payload_bytes / seconds / 1e6)
        bytes_per_second = written / disk_seconds(directory, written)
        disk.append(bytes_per_second / (written / records) if by_records else bytes_per_second / 1e6)
    kind = "one record a block" if block_records == 1 else f"{block_records} records a block"
    size = "100 B" if payload_bytes == 100 else "8 KB"
    own = median(disk)
    return Bar(
        name=f"append {size}, {kind}",
        unit="records/s" if by_records else "MB/s",
        value=median(ours),
        bar=bar,
        rounds=ours,
        disk=own,
        alternative=0.7 * own,
    )


def _measure_reading(directory: Path, opener: Opener, rounds: int, round_bytes: int, segment_bytes: int) -> Iterator[Bar]:
    for block_records in (1, 64):
        place = directory / f"read-{block_records}"
        files, log = opener(place, segment_bytes)
        try:
            _, records, _ = Append(100, block_records).run(log, files, round_bytes)
            run_jobs(log)
            topics = [topic for topic in log.topics.values() if topic.committed_index > 1]
            rates: list[float] = []
            alone: list[float] = []
            for _ in range(rounds):
                start = time.perf_counter()
                found, payload_bytes = read_all(log)
                rates.append(found / (time.perf_counter() - start))
                if (found, payload_bytes) != (records, records * 100):
                    raise AssertionError(f"{records} records of 100 bytes were written, {found} with {payload_bytes} read")
                start = time.perf_counter()
                found, _ = read_topic(log, topics[0])
                alone.append(found / (time.perf_counter() - start))
            kind = "one record a block" if block_records == 1 else f"{block_records} records a block"
            yield Bar(name=f"sequential read 100 B, {kind}", unit="records/s", value=median(rates), bar=1e6, rounds=rates)
            name = f"one of {len(topics)} topics that alternate, {kind}"
            yield Bar(name=name, unit="records/s", value=median(alone), bar=0.0, rounds=alone)
            yield _measure_get(log, topics, rounds, kind)
        finally:
            files.close()
            _remove(place)


def _measure_get(log: TopicLog, topics: list[Topic], rounds: int, kind: str) -> Bar:
    choose = random.Random(3)
    wanted = [(topic, choose.randrange(topic.first_index, topic.committed_index)) for topic in choose.choices(topics, k=5_000)]
    times: list[float] = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for topic, index in wanted:
            log.get(topic, index)
        times.append((time.perf_counter() - start) / len(wanted) * 1e6)
    times = times[1:]  # the first one made it warm
    return Bar(
        name=f"get by index, warm, {kind}", unit="µs", value=median(times), bar=50.0, higher_is_better=False, rounds=times
    )


def _measure_open(directory: Path, opener: Opener, open_bytes: int, segment_bytes: int) -> Bar:
    place = directory / "open"
    files, log = opener(place, segment_bytes)
    try:
        # Half of it in many small blocks, half in large ones; the last segment, which is read at opening, in small ones.
        Append(8_192, 1).run(log, files, open_bytes // 2)
        while log.disk_bytes < open_bytes:
            Append(100, 1).run(log, files, segment_bytes // 8)
        run_jobs(log)
        held = log.disk_bytes
        expected = _indexes(log)
        log.close()
    finally:
        files.close()
    times: list[float] = []
    try:
        for _ in range(3):
            _forget_cached(place)
            start = time.perf_counter()
            files, log = opener(place, segment_bytes)
            times.append(time.perf_counter() - start)
            log.close()
            files.close()
            if _indexes(log) != expected:
                raise AssertionError("the log does not open as it was closed")
    finally:
        _remove(place)
    return Bar(
        name=f"open a log of {held / 1e9:.1f} GB, not in memory",
        unit="s",
        value=median(times),
        bar=1.0,
        higher_is_better=False,
        rounds=times,
    )


def _topic(log: TopicLog, name: bytes) -> Topic:
    topic = log.topic(name)
    if topic is None:
        raise AssertionError("the log has no room for a topic")
    return topic


def _indexes(log: TopicLog) -> dict[bytes, int]:
    return {topic.name: topic.next_index for topic in log.topics.values() if topic.next_index > 1}


def _forget_cached(directory: Path) -> None:
    """Have the kernel drop what it holds of these files."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _remove(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    if directory.exists():
        directory.rmdir()
