"""A value that must not be forgotten: the last one counts, whatever a crash leaves behind it."""

from __future__ import annotations

from random import Random

import pytest

from nearcast.errors import LocalProtocolError, StorageUnavailable
from nearcast.topiclog import statefile
from nearcast.topiclog.statefile import StateFile
from nearcast.topiclog.storage import MemoryStorage


def opened(storage: MemoryStorage) -> StateFile:
    file = StateFile(storage)
    file.load()
    return file


def test_there_is_none_at_first() -> None:
    assert opened(MemoryStorage()).value == b""


def test_the_last_value_counts() -> None:
    storage = MemoryStorage()
    file = opened(storage)
    for value in (b"term 1", b"term 2, vote for 7"):
        file.save(value)
    again = opened(storage)
    assert (again.value, again.damage) == (b"term 2, vote for 7", [])
    again.save(b"term 3")
    assert opened(storage).value == b"term 3"


def test_a_write_that_was_cut_short_never_was() -> None:
    for rest in range(1, 12):
        storage = MemoryStorage()
        file = opened(storage)
        file.save(b"old")
        before = len(storage.files["state-0000000001"])
        file.save(b"new")
        del storage.files["state-0000000001"][before + rest :]
        again = opened(storage)
        if rest == 11:
            assert again.value == b"new"
            continue
        assert again.value == b"old"
        assert [(each.torn, each.offset, each.path) for each in again.damage] == [(True, before, "memory/state-0000000001")]
        again.save(b"newer")
        assert (opened(storage).value, opened(storage).damage) == (b"newer", [])


def test_zeros_at_the_end_are_a_write_that_was_cut_short() -> None:
    storage = MemoryStorage()
    opened(storage).save(b"old")
    storage.files["state-0000000001"] += bytes(30)
    again = opened(storage)
    assert again.value == b"old"
    assert [each.torn for each in again.damage] == [True]


def test_damage_is_reported_with_its_place() -> None:
    storage = MemoryStorage()
    file = opened(storage)
    file.save(b"old")
    file.save(b"new")
    storage.files["state-0000000001"][-1] ^= 1
    again = opened(storage)
    assert again.value == b"old"
    assert [(each.torn, str(each)) for each in again.damage] == [
        (False, "memory/state-0000000001: byte 11: the checksum does not match")
    ]


def test_files_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statefile, "MAX_FILE_BYTES", 100)
    storage = MemoryStorage()
    file = opened(storage)
    for number in range(50):
        file.save(b"value %d" % number)
        if number % 7 == 0:
            file.flushed()
        assert opened_copy(storage).value == b"value %d" % number
    file.flushed()
    assert len(storage.files) == 1
    assert len(next(iter(storage.files.values()))) < 200


def opened_copy(storage: MemoryStorage) -> StateFile:
    copied = MemoryStorage()
    copied.files = {name: bytearray(data) for name, data in storage.files.items()}
    return opened(copied)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_was_flushed_is_there_after_a_power_cut(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(statefile, "MAX_FILE_BYTES", 60)
    random = Random(seed)
    storage = MemoryStorage()
    file = opened(storage)
    saved = [b""]
    flushed = 0
    durable = {name: len(data) for name, data in storage.files.items()}
    for number in range(60):
        choice = random.randrange(6)
        if choice < 3:
            saved.append(b"%d" % number * random.randrange(1, 9))
            file.save(saved[-1])
        elif choice < 5:
            durable = {name: len(data) for name, data in storage.files.items()}
            flushed = len(saved) - 1
            file.flushed()
        else:
            for name, data in list(storage.files.items()):
                kept = durable.get(name, 0)
                del data[random.randrange(kept, len(data) + 1) :]
                if name not in durable and random.random() < 0.5:
                    del storage.files[name]
            file = opened(storage)
            assert file.value in saved[flushed:]
            saved = [file.value]
            flushed = 0
            durable = {name: len(data) for name, data in storage.files.items()}


def test_a_full_disk_keeps_the_old_value() -> None:
    storage = MemoryStorage()
    file = opened(storage)
    file.save(b"old")
    storage.capacity_bytes = 12
    with pytest.raises(StorageUnavailable):
        file.save(b"new")
    assert file.value == b"old"
    assert opened(storage).value == b"old"


def test_a_disk_that_gets_full_between_two_files_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statefile, "MAX_FILE_BYTES", 10)
    storage = MemoryStorage()
    file = opened(storage)
    file.save(b"old")
    storage.capacity_bytes = 12
    with pytest.raises(StorageUnavailable):
        file.save(b"new")
    file.flushed()
    assert opened_copy(storage).value == b"old"
    storage.capacity_bytes = 1_000
    file.save(b"new")
    file.flushed()
    assert opened_copy(storage).value == b"new"
    assert list(storage.files) == ["state-0000000002"]


def test_nothing_is_no_value() -> None:
    with pytest.raises(LocalProtocolError):
        opened(MemoryStorage()).save(b"")
