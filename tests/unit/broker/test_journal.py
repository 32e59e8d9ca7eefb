"""The journal on disk: torn, flipped, full, locked, interrupted. Whatever precedes the damage is there again."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nearcast.broker.journal import Files, Journal
from nearcast.errors import StorageCorrupt, StorageUnavailable
from nearcast.mqtt import frames as journal_frames
from nearcast.mqtt import records
from nearcast.mqtt.frames import FRAME, HEADER, frame_of
from nearcast.mqtt.journaling import SNAPSHOT_STEP_BYTES, file_name
from nearcast.mqtt.packets import Will
from tests.engine_harness import World, durable_state

SNAPSHOT_BYTES = 1_000_000


#: What a file without any state in it begins with.
BEGINNING = HEADER + frame_of([records.complete()])


def journal_path(directory: Path, generation: int) -> Path:
    return directory / file_name(generation)


def read_frames(path: Path) -> list[tuple[int, list[bytes]]]:
    files = Files(path.parent)
    try:
        return list(journal_frames.read_frames(files, path.name))
    finally:
        files.close()


def opened(
    directory: Path,
    world: World,
    *,
    snapshot_bytes: int = SNAPSHOT_BYTES,
    snapshot_step_bytes: int = SNAPSHOT_STEP_BYTES,
    fsync: bool = False,
) -> Journal:
    return Journal.open(
        str(directory),
        world.engine,
        world.now,
        fsync=fsync,
        snapshot_bytes=snapshot_bytes,
        snapshot_step_bytes=snapshot_step_bytes,
    )


class Appended(list[list[bytes]]):
    """Stands for a world's frames: each goes to the journal before the engine is called again, as the contract asks."""

    def __init__(self, journal: Journal, then: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._journal = journal
        self._then = then

    def append(self, frame: list[bytes]) -> None:
        self._journal.append(frame)
        super().append(frame)
        self._then()


def busy_world() -> World:
    """A session with everything in it, some retained messages."""
    world = World(durable=True)
    ann = world.persistent("ann", receive_maximum=3)
    ann.subscribe("t/#", 2)
    bob = world.persistent("bob", 4)
    for number in range(6):
        bob.publish("t/1", f"message {number}".encode(), 1 + number % 2, packet_id=number + 1)
    bob.publish("r/1", b"kept", 1, retain=True, packet_id=20)
    bob.publish("r/2", b"gone", 0, retain=True)
    bob.publish("r/2", b"", 0, retain=True)
    return world


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def written(directory: Path) -> tuple[Path, World, list[list[bytes]]]:
    """A closed journal with one file, the world it describes, and its frames."""
    world = busy_world()
    frames = list(world.frames)
    journal = opened(directory, World(durable=True))
    for frame in frames:
        journal.append(frame)
    journal.close()
    (path,) = sorted(directory.glob("journal-*"))
    return path, world, frames


def recover(directory: Path) -> tuple[Journal, World]:
    world = World(durable=True)
    return opened(directory, world), world


def test_what_is_appended_is_recovered(directory: Path, written: tuple[Path, World, list[list[bytes]]]) -> None:
    _, world, frames = written
    journal, other = recover(directory)
    assert durable_state(other) == durable_state(world)
    assert journal.damage == []
    assert journal.recovered_records >= sum(len(frame) for frame in frames)
    other.validate()
    journal.close()


def test_the_file_is_a_header_and_frames(written: tuple[Path, World, list[list[bytes]]]) -> None:
    path, _, frames = written
    raw = path.read_bytes()
    assert raw == BEGINNING + b"".join(frame_of(frame) for frame in frames)
    assert [found for _, found in read_frames(path)] == [[records.complete()], *frames]
    offsets = [offset for offset, _ in read_frames(path)]
    assert offsets[0] == len(HEADER)
    length, _ = FRAME.unpack_from(raw, offsets[0])
    assert offsets[1] == offsets[0] + FRAME.size + length


def test_a_torn_tail_at_every_byte_of_the_last_frame(directory: Path, written: tuple[Path, World, list[list[bytes]]]) -> None:
    path, world, frames = written
    raw = path.read_bytes()
    start = len(raw) - len(frame_of(frames[-1]))
    expected = durable_state(world.recovered(frames[:-1]))
    for size in range(start + 1, len(raw)):
        torn = directory / f"torn-{size}"
        torn.mkdir()
        victim = torn / path.name
        victim.write_bytes(raw[:size])
        journal, other = recover(torn)
        (damage,) = journal.damage
        assert (damage.path, damage.offset) == (str(victim), start)
        assert str(victim) in str(damage)
        assert durable_state(other) == expected
        assert victim.with_name(victim.name + ".damaged").read_bytes() == raw[:size]
        journal.close()
        # The next start finds nothing wrong.
        again, third = recover(torn)
        assert again.damage == []
        assert durable_state(third) == expected
        again.close()


def test_a_flipped_bit_anywhere(directory: Path, written: tuple[Path, World, list[list[bytes]]]) -> None:
    path, world, frames = written
    raw = path.read_bytes()
    offsets = [offset for offset, _ in read_frames(path)]
    # The first frame says that the file is complete, and nothing else.
    states = [durable_state(world.recovered(frames[: max(count - 1, 0)])) for count in range(len(frames) + 1)]
    # Every byte of the header and of the last two frames, and a sample of the rest. Not the version's digit: with another one
    # this is a newer version's journal, which is not touched.
    positions = {*range(len(HEADER)), *range(len(HEADER), len(raw), 7), *range(offsets[-2], len(raw))}
    positions.remove(HEADER.index(b"1"))
    for position in sorted(positions):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << (position % 8)
        place = directory / f"flip-{position}"
        place.mkdir()
        victim = place / path.name
        victim.write_bytes(damaged)
        journal, other = recover(place)
        (damage,) = journal.damage
        hit = max((number for number, offset in enumerate(offsets) if offset <= position), default=-1)
        assert damage.path == str(victim)
        assert damage.offset == (0 if hit < 0 else offsets[hit])
        assert durable_state(other) == states[max(hit, 0)]
        assert victim.with_name(victim.name + ".damaged").read_bytes() == bytes(damaged)
        journal.close()


@pytest.mark.parametrize("size", [0, 1, len(HEADER) - 1])
def test_half_a_header(directory: Path, size: int) -> None:
    directory.mkdir()
    path = journal_path(directory, 3)
    path.write_bytes(HEADER[:size])
    journal, _ = recover(directory)
    (damage,) = journal.damage
    assert (damage.path, damage.offset) == (str(path), 0)
    journal.close()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("journal-*")}


@pytest.mark.parametrize("version", [b"2", b"9", b"10", b"123456789"])
def test_a_file_of_a_newer_version_is_not_touched(directory: Path, version: bytes) -> None:
    directory.mkdir()
    path = journal_path(directory, 7)
    path.write_bytes(b"nearcast journal " + version + b"\nwhat that version acknowledged")
    before = contents(directory)
    for _ in range(2):  # the second time finds the directory unlocked
        with pytest.raises(StorageUnavailable, match="newer version of nearcast: use that version, or another directory"):
            recover(directory)
    assert contents(directory) == before


def test_damage_does_not_set_aside_what_a_newer_version_wrote(
    directory: Path, written: tuple[Path, World, list[list[bytes]]]
) -> None:
    path, _, _ = written
    path.write_bytes(path.read_bytes()[:-1])
    journal_path(directory, int(path.name[8:]) + 1).write_bytes(b"nearcast journal 2\n...")
    before = contents(directory)
    with pytest.raises(StorageUnavailable, match="newer version"):
        recover(directory)
    assert contents(directory) == before


def test_a_record_of_a_newer_version_is_not_touched(directory: Path, written: tuple[Path, World, list[list[bytes]]]) -> None:
    path, _, _ = written
    with path.open("ab") as file:
        file.write(frame_of([b"\x63newer"]))
    before = contents(directory)
    with pytest.raises(StorageUnavailable, match="newer version") as failure:
        recover(directory)
    assert failure.value.path == str(path)
    assert contents(directory) == before


@pytest.mark.parametrize("header", [b"nearcast journal 0\n", b"nearcast journal x\n", b"nearcast journal 01", b"#" * 40])
def test_a_file_of_no_version_is_damage(directory: Path, header: bytes) -> None:
    directory.mkdir()
    path = journal_path(directory, 1)
    path.write_bytes(header)
    with pytest.raises(StorageCorrupt):
        read_frames(path)
    journal, _ = recover(directory)
    assert [damage.offset for damage in journal.damage] == [0]
    journal.close()


def test_zeros_at_the_end_are_damage(directory: Path, written: tuple[Path, World, list[list[bytes]]]) -> None:
    """What a file system may leave after a power cut: the size was written, the data was not."""
    path, world, _ = written
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(64))
    journal, other = recover(directory)
    assert [damage.offset for damage in journal.damage] == [size]
    assert durable_state(other) == durable_state(world)
    journal.close()


def test_a_record_that_makes_no_sense_is_damage(directory: Path, written: tuple[Path, World, list[list[bytes]]]) -> None:
    path, world, _ = written
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(frame_of([bytes([records.TARGETED, 0x63])]))
    journal, other = recover(directory)
    (damage,) = journal.damage
    assert damage.offset == size
    assert "a publication is named that was not stored" in str(damage)
    assert durable_state(other) == durable_state(world)
    journal.close()


def test_files_younger_than_the_damage_are_set_aside(directory: Path, written: tuple[Path, World, list[list[bytes]]]) -> None:
    path, _, frames = written
    path.write_bytes(path.read_bytes()[:-1])
    number = int(path.name[8:])
    younger = journal_path(directory, number + 1)
    younger.write_bytes(HEADER + frame_of(frames[0]))
    journal, _ = recover(directory)
    assert len(journal.damage) == 1
    assert younger.with_name(younger.name + ".damaged").exists()
    assert [item.name for item in sorted(directory.glob("journal-*")) if item.suffix != ".damaged"] == [
        journal_path(directory, number + 2).name
    ]
    journal.close()


def test_a_crash_while_recovering_from_damage_loses_nothing(
    directory: Path, written: tuple[Path, World, list[list[bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, world, frames = written
    path.write_bytes(path.read_bytes()[:-1])
    expected = durable_state(world.recovered(frames[:-1]))

    def crash(self: Files, data: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Files, "append", crash)
        with pytest.raises(KeyboardInterrupt):
            recover(directory)
    journal, other = recover(directory)
    assert journal.damage
    assert durable_state(other) == expected
    journal.close()


def test_two_brokers_cannot_share_a_directory(directory: Path) -> None:
    first, _ = recover(directory)
    with pytest.raises(StorageUnavailable, match="another broker"):
        recover(directory)
    first.close()
    second, _ = recover(directory)
    second.close()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageUnavailable, match="file"):
        recover(tmp_path / "file")


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Files of this process end at 6,000 bytes, as on a full disk. Not for a whole test: pytest's output may be a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_reported_and_leaves_whole_frames(directory: Path) -> None:
    world = World(durable=True)
    journal = opened(directory, world)
    world.frames = Appended(journal)
    ann = world.persistent("ann")
    ann.subscribe("t", 1)
    bob = world.connect("bob", 4)
    kept = 0
    failure: StorageUnavailable | None = None
    with small_files():
        while failure is None:
            try:
                bob.publish("t", b"x" * 300, 1, packet_id=kept + 1)
                kept += 1
            except StorageUnavailable as error:
                failure = error
    assert "cannot be written" in str(failure)
    assert Path(failure.path).parent == directory
    assert kept > 5
    journal.close()
    again, other = recover(directory)
    assert again.damage == []
    assert world.session("ann").queued_messages == 0
    assert len(other.session("ann").inflight) == kept
    again.close()


def broken(path: object, *_: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


def test_a_disk_that_fails_at_the_end_is_logged_and_unlocked(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal, _ = recover(directory)
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "nearcast.broker"):
        patch.setattr(os, "fdatasync", broken)
        journal.close()
    assert [record.getMessage() for record in caplog.records] == ["the journal could not be flushed at the end"]
    assert len(os.listdir("/proc/self/fd")) == before - 2  # the file and the lock
    again, _ = recover(directory)
    again.close()


@pytest.mark.parametrize("call", ["fsync", "ftruncate", "fdatasync"])
def test_a_disk_that_fails_while_a_generation_begins(directory: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, broken)
        with pytest.raises(StorageUnavailable, match="Input/output error"):
            recover(directory)
    assert len(os.listdir("/proc/self/fd")) == before
    again, _ = recover(directory)
    again.close()


@pytest.mark.parametrize("in_log", [False, True])
def test_a_flush_that_failed_is_final(directory: Path, monkeypatch: pytest.MonkeyPatch, in_log: bool) -> None:
    """A snapshot's flush fails; the one behind it, which has nothing left to do, must not say that all is well."""
    journal, _ = recover(directory)
    journal.append([b"\x00"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        if in_log:
            failed = journal.files._flusher.submit(journal.files._flush, broken_log, [], [])
        else:
            failed = journal.files.flush()
        with pytest.raises(StorageUnavailable):
            failed.result()
    with pytest.raises(StorageUnavailable):
        journal.files.flush().result()
    journal.close()


def broken_log() -> None:
    raise StorageUnavailable("topics", "cannot be flushed: Input/output error")


def test_a_generation_that_cannot_be_made_closes_every_file_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = recover(directory)
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", broken)
        with pytest.raises(StorageUnavailable, match="cannot be made"):
            journal.files.create(file_name(99))
    journal.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_a_journal_that_cannot_be_read_says_so(directory: Path) -> None:
    journal_path(directory, 1).mkdir(parents=True)
    with pytest.raises(StorageUnavailable, match="journal-0000000001: cannot be used: Is a directory"):
        recover(directory)


def test_a_snapshot_replaces_older_generations(directory: Path) -> None:
    world = World(durable=True)
    journal = opened(directory, world, snapshot_bytes=2_000, snapshot_step_bytes=300)
    world.frames = Appended(journal)
    ann = world.persistent("ann", receive_maximum=4)
    ann.subscribe("t/#", 1)
    bob = world.persistent("bob", 4)
    started = world.engine.effects.generation
    number = 0
    while journal.snapshots < 3:
        number += 1
        assert number < 3_000
        bob.publish(f"t/{number % 7}", b"x" * 50, 1 + number % 2, retain=number % 5 == 0, packet_id=number % 900 + 1)
        if number % 3 == 0:
            ann.acknowledge_all()
        bob.acknowledge_all()
        journal.await_replaced()
    assert world.engine.effects.generation >= started + 3
    current = {int(path.name[8:]) for path in directory.glob("journal-*")}
    assert min(current) >= started + 2
    assert len(current) <= 2
    journal.close()
    again, other = recover(directory)
    assert again.damage == []
    assert durable_state(other) == durable_state(world)
    assert len(list(directory.glob("journal-*"))) == 1
    again.close()


def test_a_crash_between_any_two_steps_of_a_snapshot(directory: Path) -> None:
    """Copies the directory after every append while a snapshot is under way: each copy is what a crash would leave."""
    world = World(durable=True)
    journal = opened(directory, world, snapshot_bytes=3_000, snapshot_step_bytes=120)
    crashes = 0

    def crash() -> None:
        nonlocal crashes
        if not journal.copying:
            return
        crashes += 1
        copy = directory.parent / f"copy-{crashes}"
        copy.mkdir()
        for path in directory.glob("journal-*"):
            (copy / path.name).write_bytes(path.read_bytes())
        again, other = recover(copy)
        assert again.damage == []
        assert durable_state(other) == durable_state(world)
        again.close()

    world.frames = Appended(journal, crash)
    clients = [world.persistent(f"c{number}", receive_maximum=2) for number in range(5)]
    for client in clients:
        client.subscribe("t", 2)
    bob = world.connect("bob", 4)
    number = 0
    while crashes < 30:
        number += 1
        journal.await_replaced()  # the disk may be slow, and the next snapshot waits for it
        assert number < 2_000
        bob.publish("t", f"{number:04d}".encode() * 10, 1 + number % 2, packet_id=number)
        bob.acknowledge_all()
        clients[number % 5].acknowledge_all()
    journal.close()


def test_wills_of_clients_that_were_connected_are_published_after_a_crash(directory: Path) -> None:
    world = World(durable=True)
    journal = opened(directory, world)
    world.frames = Appended(journal)
    ann = world.persistent("ann")
    ann.subscribe("w", 1)
    world.connect("bob", 5, expiry=100, will=Will("w", b"gone", 1))
    journal.close()
    again, other = recover(directory)
    assert other.session("ann").queued_messages == 1
    assert other.session("bob").will is None
    other.validate()
    again.close()
    # That the will was published is on disk, too: it is not published again.
    third, last = recover(directory)
    assert last.session("ann").queued_messages == 1
    last.validate()
    third.close()


def test_sync_covers_what_was_appended(directory: Path) -> None:
    world = busy_world()
    journal = opened(directory, World(durable=True), fsync=True)
    assert journal.needs_sync
    for frame in world.frames:
        journal.append(frame)
    before = journal.unsynced
    asyncio.run(journal.sync())
    assert (before, journal.unsynced) == (True, False)
    journal.close()
