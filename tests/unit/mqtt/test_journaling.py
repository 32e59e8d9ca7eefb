"""The journal's machine over files in memory: which generations are read, and which are not."""

from __future__ import annotations

import pytest

from nearcast.errors import StorageUnavailable
from nearcast.mqtt import records
from nearcast.mqtt.frames import HEADER, frame_of, read_frames
from nearcast.mqtt.journaling import DAMAGED, MAX_DAMAGED_FILES, Journaling, file_name
from tests.engine_harness import World, durable_state

COMPLETE = frame_of([records.complete()])


class MemoryStorage:
    """Files as byte strings. ``replace`` is carried out when the test says so."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = {name: bytearray(data) for name, data in (files or {}).items()}
        self.replaced: list[str] = []
        self.full = False
        self._current = ""

    def path(self, name: str) -> str:
        return f"memory/{name}"

    def names(self) -> list[str]:
        return list(reversed(self.files))

    def size(self, name: str) -> int:
        return len(self.files[name])

    def read(self, name: str, offset: int, size: int) -> bytes:
        return bytes(self.files[name][offset : offset + size])

    def create(self, name: str) -> None:
        self.files[name] = bytearray()
        self._current = name

    def append(self, data: bytes) -> None:
        if self.full:
            raise StorageUnavailable(self.path(self._current), "cannot be written: it is full")
        self.files[self._current] += data

    def keep_aside(self, name: str, aside: str) -> None:
        self.files[aside] = bytearray(self.files[name])

    def remove(self, name: str) -> None:
        del self.files[name]

    def replace(self, names: list[str]) -> None:
        self.replaced = names

    def carry_out(self) -> None:
        for name in self.replaced:
            del self.files[name]
        self.replaced = []

    def copy(self) -> MemoryStorage:
        return MemoryStorage({name: bytes(data) for name, data in self.files.items()})


def opened(storage: MemoryStorage, snapshot_bytes: int = 1_000_000, step_bytes: int = 300) -> tuple[Journaling, World]:
    world = World(durable=True)
    journaling = Journaling(world.engine, storage, snapshot_bytes, step_bytes)
    journaling.recover()
    storage.carry_out()
    journaling.replaced()
    journaling.opened(world.now)
    return journaling, world


class Journalled(list[list[bytes]]):
    """Stands for a world's frames: each goes to the journal before the engine is called again."""

    def __init__(self, journaling: Journaling) -> None:
        super().__init__()
        self._journaling = journaling

    def append(self, frame: list[bytes]) -> None:
        self._journaling.append(frame)


def generations(storage: MemoryStorage) -> list[str]:
    return sorted(name for name in storage.files if not name.endswith(DAMAGED))


@pytest.fixture
def two_generations() -> tuple[MemoryStorage, World]:
    """An old generation that a complete one is about to replace; in between a retained message and a session went."""
    storage = MemoryStorage()
    journaling, world = opened(storage, snapshot_bytes=600)
    world.frames = Journalled(journaling)
    ann = world.persistent("ann", receive_maximum=3)
    ann.subscribe("t/#", 1)
    bob = world.connect("bob", 4)
    bob.publish("r/old", b"old", 1, retain=True, packet_id=1)
    bob.publish("r/new", b"new", 1, retain=True, packet_id=2)
    number = 2
    while not storage.replaced:
        number += 1
        assert number < 200
        bob.publish("t/1", b"x" * 30, 1, packet_id=number)
        if number == 4:
            bob.publish("r/old", b"", 0, retain=True)
    assert len(generations(storage)) == 2
    return storage, world


def without_complete(data: bytes) -> bytes:
    """The file as versions before COMPLETE records wrote it."""
    storage = MemoryStorage({"journal-1": data})
    found = [batch for _, batch in read_frames(storage, "journal-1")]
    return HEADER + b"".join(frame_of(batch) for batch in found if batch != [records.complete()])


def test_a_complete_generation_says_so(two_generations: tuple[MemoryStorage, World]) -> None:
    storage, _ = two_generations
    for name in generations(storage):
        assert bytes(storage.files[name]).count(COMPLETE) == 1


@pytest.mark.parametrize("position", [0, len(HEADER) + 3, -5])
def test_damage_in_an_old_generation_does_not_touch_a_complete_one(
    two_generations: tuple[MemoryStorage, World], position: int
) -> None:
    storage, world = two_generations
    old, _ = generations(storage)
    storage.files[old][position] ^= 1
    journaling, other = opened(storage)
    assert journaling.damage == []
    assert durable_state(other) == durable_state(world)
    assert not any(name.endswith(DAMAGED) for name in storage.files)
    assert len(generations(storage)) == 1


def test_an_old_generation_that_comes_back_brings_nothing_back(two_generations: tuple[MemoryStorage, World]) -> None:
    """Removing files is not atomic: after a power cut an old one may be there and one that was younger not."""
    storage, world = two_generations
    _, current = generations(storage)
    old_world = World(durable=True)
    old_world.connect("bob", 4).publish("r/old", b"back from the dead", 1, retain=True, packet_id=1)
    returned = HEADER + COMPLETE + b"".join(frame_of(frame) for frame in old_world.frames)
    _, other = opened(MemoryStorage({file_name(0): returned, current: bytes(storage.files[current])}))
    assert durable_state(other) == durable_state(world)


def test_a_generation_without_a_complete_snapshot_is_read_after_the_ones_before_it(
    two_generations: tuple[MemoryStorage, World],
) -> None:
    storage, world = two_generations
    _, current = generations(storage)
    whole = bytes(storage.files[current])
    storage.files[current] = bytearray(whole[: whole.index(COMPLETE)])
    assert len(storage.files[current]) > len(HEADER), "there was something to copy"
    _, other = opened(storage)
    assert durable_state(other) == durable_state(world)


def test_a_generation_damaged_before_it_was_complete_is_not_relied_on(two_generations: tuple[MemoryStorage, World]) -> None:
    storage, world = two_generations
    _, current = generations(storage)
    storage.files[current][len(HEADER) + 12] ^= 1
    journaling, other = opened(storage)
    (damage,) = journaling.damage
    assert (damage.path, damage.offset) == (f"memory/{current}", len(HEADER))
    # The old file has everything but what the damaged one received since.
    assert other.session("ann").subscriptions.keys() == world.session("ann").subscriptions.keys()
    assert b"r/new" in [message.topic for message in other.engine.retained.all()]
    assert current + DAMAGED in storage.files


def test_a_journal_of_before_complete_records_is_replayed_whole(two_generations: tuple[MemoryStorage, World]) -> None:
    storage, world = two_generations
    old = MemoryStorage({name: without_complete(bytes(data)) for name, data in storage.files.items()})
    assert not any(COMPLETE in data for data in old.files.values())
    journaling, other = opened(old)
    assert journaling.damage == []
    assert durable_state(other) == durable_state(world)
    assert all(COMPLETE in data for data in old.files.values()), "it is written anew in today's form"


def test_few_damaged_files_are_kept() -> None:
    storage = MemoryStorage()
    for _ in range(MAX_DAMAGED_FILES + 3):
        journaling, world = opened(storage)
        world.frames = Journalled(journaling)
        world.persistent("ann")
        (current,) = generations(storage)
        del storage.files[current][-1]
    assert len([name for name in storage.files if name.endswith(DAMAGED)]) == MAX_DAMAGED_FILES + 1


def test_a_full_disk_is_the_callers_to_hear() -> None:
    storage = MemoryStorage()
    journaling, world = opened(storage)
    storage.full = True
    world.frames = Journalled(journaling)
    with pytest.raises(StorageUnavailable, match="it is full"):
        world.persistent("ann")


def test_the_next_snapshot_waits_until_the_last_one_replaced_its_files(two_generations: tuple[MemoryStorage, World]) -> None:
    storage, world = two_generations
    frames = world.frames
    assert isinstance(frames, Journalled)
    journaling = frames._journaling
    world.now += 1
    before = world.engine.effects.generation
    bob = world.connect("eve", 4)
    for number in range(1, 200):
        bob.publish("t/2", b"y" * 30, 1, packet_id=number)
    assert world.engine.effects.generation == before
    storage.carry_out()
    journaling.replaced()
    bob.publish("t/2", b"y" * 30, 1, packet_id=300)
    assert world.engine.effects.generation == before + 1
    assert journaling.snapshots == 1
