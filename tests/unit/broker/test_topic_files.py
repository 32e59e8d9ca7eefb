"""The log's files on a real disk."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nearcast.broker import topic_files
from nearcast.broker.topic_files import TopicFiles, open_log
from nearcast.config import Retention
from nearcast.errors import StorageUnavailable
from nearcast.topiclog.batches import parse
from nearcast.topiclog.log import Topic, TopicLog

SEGMENT_BYTES = 20_000


def opened(directory: Path) -> tuple[TopicFiles, TopicLog]:
    return open_log(directory, segment_bytes=SEGMENT_BYTES, max_topics=100)


def topic_of(log: TopicLog, name: bytes) -> Topic:
    topic = log.topic(name)
    assert topic is not None
    return topic


def fill(files: TopicFiles, log: TopicLog, name: bytes, count: int, payload_bytes: int = 100) -> None:
    for number in range(count):
        log.append(topic_of(log, name), b"client", 0, b"", [b"%06d" % number + bytes(payload_bytes)], number)
        if number % 10 == 9:
            log.write()
    position = log.write()
    files.flush().result()
    log.commit(position)


def run_jobs(log: TopicLog) -> None:
    while (job := log.collect(0)) is not None:
        job.run()
        log.finish(job)


@pytest.mark.parametrize("payload_bytes", [10, 9_000])
def test_what_was_written_is_read_after_a_restart(tmp_path: Path, payload_bytes: int) -> None:
    files, log = opened(tmp_path)
    fill(files, log, b"a", 2_000 if payload_bytes == 10 else 50, payload_bytes)
    run_jobs(log)
    expected = [bytes(log.get(topic_of(log, b"a"), index).payload) for index in (1, 25, 50)]
    files.close()
    files, log = opened(tmp_path)
    assert log.damage == []
    assert [bytes(log.get(topic_of(log, b"a"), index).payload) for index in (1, 25, 50)] == expected
    files.close()


def test_cold_and_warm_loading_give_the_same_bytes(tmp_path: Path) -> None:
    async def load() -> None:
        files, log = opened(tmp_path)
        fill(files, log, b"a", 500)
        fill(files, log, b"b", 500)
        fill(files, log, b"a", 500)
        topic = topic_of(log, b"a")
        extents = log.read(topic, 1, topic.committed_index, 1 << 30)
        assert len(extents.pieces) > 1
        views = b"".join(extents.views())
        assert bytes(extents.gather()) == views
        assert bytes(await files.load(extents)) == views
        for name in files.names():
            descriptor = os.open(files.path(name), os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        assert bytes(await files.load(extents)) == views
        assert len(list(parse(views, {topic.number: "a"}))) == 1_000
        assert bytes(await files.load(log.read(topic, topic.committed_index, 1 << 40, 1))) == b""
        files.close()

    asyncio.run(load())


def test_loading_where_the_file_system_does_not_say_what_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def unsupported(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return preadv(descriptor, buffers, offset, flags)

    async def load() -> None:
        files, log = opened(tmp_path)
        fill(files, log, b"a", 500)
        topic = topic_of(log, b"a")
        extents = log.read(topic, 1, topic.committed_index, 1 << 30)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", unsupported)
            assert bytes(await files.load(extents)) == b"".join(extents.views())
        files.close()

    asyncio.run(load())


def test_topics_that_alternate_are_gathered_without_what_lies_between(tmp_path: Path) -> None:
    async def load() -> None:
        files, log = opened(tmp_path)
        for number in range(500):
            for name in (b"a", b"secret"):
                log.append(topic_of(log, name), b"", 0, b"", [b"%d" % number * 20], number)
        log.append(topic_of(log, b"secret"), b"", 0, b"", [bytes(50_000)], 500)
        log.append(topic_of(log, b"a"), b"", 0, b"", [b"last"], 501)
        log.commit(log.write())
        topic = topic_of(log, b"a")
        extents = log.read(topic, 1, topic.committed_index, 1 << 30)
        assert len(extents.pieces) == 501
        data = await files.load(extents)
        found = [bytes(record.payload) for record in parse(data, {topic.number: "a"})]
        assert found == [*(b"%d" % number * 20 for number in range(500)), b"last"]
        files.close()

    asyncio.run(load())


def test_a_file_that_is_removed_while_it_is_read_stays_readable(tmp_path: Path) -> None:
    files, log = opened(tmp_path)
    fill(files, log, b"a", 1_000)
    run_jobs(log)
    topic = topic_of(log, b"a")
    views = log.read(topic, 1, 100, 1 << 20).views()
    expected = [bytes(view) for view in views]
    log.set_retention(topic, Retention(max_records=1))
    run_jobs(log)
    assert "0000000001.log" not in files.names()
    assert [bytes(view) for view in views] == expected
    files.close()


def test_a_removed_file_is_one_clear_error(tmp_path: Path) -> None:
    async def load() -> None:
        files, log = opened(tmp_path)
        fill(files, log, b"a", 10)
        extents = log.read(topic_of(log, b"a"), 1, 5, 1 << 20)
        extents.pieces = [("0000000099.log", 0, 10)]
        with pytest.raises(StorageUnavailable, match=r"0000000099\.log: cannot be read"):
            await files.load(extents)
        files.close()

    asyncio.run(load())


def test_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_files, "_MAX_OPEN", 4)
    files, log = opened(tmp_path)
    fill(files, log, b"a", 3_000)
    run_jobs(log)
    topic = topic_of(log, b"a")
    assert log.segment_count > 10
    assert [bytes(log.get(topic, index).payload[:6]) for index in range(1, 3_001, 100)] == [
        b"%06d" % index for index in range(0, 3_000, 100)
    ]
    assert len(files._open) <= 5
    files.close()


def test_half_a_write_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, log = opened(tmp_path)
    fill(files, log, b"a", 5)
    size = files.size("0000000001.log")
    writev = os.writev

    def half(descriptor: int, pieces: list[bytes]) -> int:
        writev(descriptor, [b"".join(pieces)[:30]])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", half)
    log.append(topic_of(log, b"a"), b"", 0, b"", [b"x"], 0)
    with pytest.raises(StorageUnavailable, match=r"0000000001\.log: cannot be written: No space left"):
        log.write()
    monkeypatch.undo()
    assert files.size("0000000001.log") == size
    fill(files, log, b"a", 1)
    files.close()
    files, log = opened(tmp_path)
    assert (log.damage, topic_of(log, b"a").next_index) == ([], 7)
    files.close()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev, write = os.writev, os.write
    monkeypatch.setattr(os, "writev", lambda descriptor, pieces: writev(descriptor, [b"".join(pieces)[:7]]))
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:11]))
    files, log = opened(tmp_path)
    fill(files, log, b"a", 5)
    monkeypatch.undo()
    files.close()
    files, log = opened(tmp_path)
    assert (log.damage, topic_of(log, b"a").next_index) == ([], 6)
    files.close()


def test_a_failed_flush_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, log = opened(tmp_path)
    log.append(topic_of(log, b"a"), b"", 0, b"", [b"x"], 0)
    log.write()

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StorageUnavailable, match="cannot be flushed: Input/output error"):
        files.flush().result()
    monkeypatch.undo()
    files.close()


def test_what_a_crash_left_half_is_removed(tmp_path: Path) -> None:
    files, _ = opened(tmp_path)
    files.close()
    (tmp_path / "topics" / "0000000001.index.partial").write_bytes(b"half")
    (tmp_path / "topics" / "0000000007.index").write_bytes(b"of a segment that is gone")
    files, _ = opened(tmp_path)
    assert sorted(files.names()) == ["0000000001.log"]
    files.close()


CRASHING = """
import os, sys
from pathlib import Path
from nearcast.broker.topic_files import open_log
files, log = open_log(Path(sys.argv[1]), segment_bytes=20_000, max_topics=10)
topic = log.topic(b"a")
while True:
    for _ in range(20):
        index = log.append(topic, b"", 0, b"", [b"%d" % topic.next_index * 10], 0)
    position = log.write()
    files.flush().result()
    log.commit(position)
    job = log.collect(0)
    if job is not None:
        job.run()
        log.finish(job)
    os.write(1, b"%d\\n" % index)
"""


def test_what_was_committed_survives_a_kill(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", CRASHING, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    last = 0
    for _ in range(60):
        last = int(process.stdout.readline())
    process.kill()
    process.communicate()
    files, log = opened(tmp_path)
    topic = topic_of(log, b"a")
    assert topic.committed_index > last
    assert [bytes(log.get(topic, index).payload) for index in range(1, topic.committed_index)] == [
        b"%d" % index * 10 for index in range(1, topic.committed_index)
    ]
    files.close()
