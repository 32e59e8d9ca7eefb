"""Output of processes: bounded, searched across writes, followed by slow readers."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from pathlib import Path

import hypothesis
from hypothesis import strategies as st

from nearcast.emulation.logs import MAX_FOLLOWED_LINES, MAX_LINE_BYTES, ProcessLog


def test_disk_use_is_bounded_and_the_newest_stays(tmp_path: Path) -> None:
    log = ProcessLog(tmp_path / "a.log", 10_000)
    for number in range(5_000):
        log.write(f"line {number}\n".encode())
    log.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 10_000
    assert ProcessLog(tmp_path / "a.log", 10_000).tail(3) == ["line 4997", "line 4998", "line 4999"]


def test_a_write_beyond_the_bound_keeps_its_end(tmp_path: Path) -> None:
    log = ProcessLog(tmp_path / "a.log", 10_000)
    log.write(b"x" * 100_000 + b"\nend\n")
    assert log.tail(1) == ["end"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 10_000


def test_tail_goes_over_the_rotation(tmp_path: Path) -> None:
    log = ProcessLog(tmp_path / "a.log", 8_192)
    for number in range(500):
        log.write(f"{number:08}\n".encode())
    assert log.tail(470) == [f"{number:08}" for number in range(30, 500)]
    assert log.tail(0) == []


@hypothesis.given(st.binary(max_size=40), st.lists(st.integers(0, 60), max_size=4))
def test_words_are_found_however_they_are_cut(around: bytes, cuts: list[int]) -> None:
    async def search() -> bool:
        with tempfile.TemporaryDirectory() as directory:
            log = ProcessLog(Path(directory) / "a.log", 10_000)
            found = log.expect("ready now")
            data = around + b"ready now" + around
            edges = [0, *sorted(cuts), len(data)]
            for start, end in itertools.pairwise(edges):
                log.write(data[start:end])
            log.close()
            return found.is_set()

    assert asyncio.run(search())


def test_only_what_comes_after_counts(tmp_path: Path) -> None:
    async def search() -> None:
        log = ProcessLog(tmp_path / "a.log", 10_000)
        log.write(b"ready")
        found = log.expect("ready")
        log.write(b"not yet rea")
        assert not found.is_set()
        log.write(b"dy")
        assert found.is_set()

    asyncio.run(search())


def test_a_slow_follower_misses_lines_and_is_told(tmp_path: Path) -> None:
    async def follow() -> None:
        log = ProcessLog(tmp_path / "a.log", 1 << 20)
        follower = log.follow()
        log.write(b"".join(b"%d\n" % number for number in range(MAX_FOLLOWED_LINES + 7)))
        lines = await follower.take()
        assert lines[0] == "[7 lines left out: they came faster than they were read]"
        assert lines[1:] == [str(number) for number in range(7, MAX_FOLLOWED_LINES + 7)]

    asyncio.run(follow())


def test_a_line_without_end_is_followed_in_pieces(tmp_path: Path) -> None:
    async def follow() -> None:
        log = ProcessLog(tmp_path / "a.log", 1 << 20)
        follower = log.follow()
        log.write(b"x" * (3 * MAX_LINE_BYTES + 5))
        log.write(b"y\n\xff\n")
        lines = await follower.take()
        assert "".join(lines) == "x" * (3 * MAX_LINE_BYTES + 5) + "y" + "\N{REPLACEMENT CHARACTER}"
        assert max(len(line) for line in lines) <= MAX_LINE_BYTES

    asyncio.run(follow())


def test_a_full_disk_is_said_and_survived(tmp_path: Path) -> None:
    (tmp_path / "a.log").symlink_to("/dev/full")
    told: list[str] = []
    log = ProcessLog(tmp_path / "a.log", 10_000, told.append)
    log.say("start 1")
    log.write(b"lost\n")
    log.write(b"x" * 20_000)
    assert told == [f"cannot keep output in {tmp_path / 'a.log'}: No space left on device"]
    log.close()


def test_a_directory_that_is_removed_is_said_and_the_bound_holds(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    told: list[str] = []
    log = ProcessLog(tmp_path / "logs" / "a.log", 10_000, told.append)
    (tmp_path / "logs" / "a.log").unlink()
    (tmp_path / "logs").rmdir()
    descriptors = sorted(os.listdir("/proc/self/fd"))
    for _ in range(20):
        log.write(b"x" * 1_000)
        assert os.fstat(log._file).st_size <= 5_000
    assert "No such file" in told[0]
    assert len(told) == 1
    assert sorted(os.listdir("/proc/self/fd")) == descriptors, "another file must not get this number"
    log.close()
