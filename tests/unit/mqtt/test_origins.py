"""What the journal knows of other brokers, and of files that a queue went to, comes back from it."""

from __future__ import annotations

from nearcast.mqtt import records
from nearcast.mqtt.origins import RESERVED_AT_ONCE
from nearcast.mqtt.session import Spilled
from tests.engine_harness import World
from tests.unit.mqtt.test_journaling import MemoryStorage, opened


def journalled(storage: MemoryStorage) -> World:
    journaling, world = opened(storage)
    world.engine.origins.begin(77)
    world.engine.origins.reserve(1_000)
    origin = world.engine.origins.of("brüssel")
    origin.epoch = 5
    origin.received = 123_456_789_012
    world.engine.origins.advanced(origin)
    gone = world.engine.origins.of("gone")
    world.engine.origins.advanced(gone)
    world.engine.origins.forget("gone")
    journaling.append(world.engine.take_records())
    return world


def test_epochs_and_positions_come_back_from_records_and_from_snapshots() -> None:
    storage = MemoryStorage()
    journalled(storage)
    for _ in range(2):  # the second start reads what the first one wrote anew
        _, world = opened(storage)
        origins = world.engine.origins
        assert origins.epoch == 77
        assert list(origins.by_name) == ["brüssel"]
        assert (origins.by_name["brüssel"].epoch, origins.by_name["brüssel"].received) == (5, 123_456_789_012)
        assert world.engine.router.next_sequence >= 1_000 + RESERVED_AT_ONCE


def test_numbers_are_reserved_once_for_many() -> None:
    world = World(durable=True)
    origins = world.engine.origins
    origins.reserve(10)
    origins.reserve(10 + RESERVED_AT_ONCE)
    assert len(world.engine.take_records()) == 1
    origins.reserve(11 + RESERVED_AT_ONCE)
    assert len(world.engine.take_records()) == 1


def test_messages_in_a_file_are_no_longer_in_the_queue() -> None:
    storage = MemoryStorage()
    journaling, world = opened(storage)
    ann = world.persistent("ann")
    ann.subscribe("t", 1)
    ann.lose()
    bob = world.connect("bob", 4)
    for number in range(1, 6):
        bob.publish("t", b"x", 1, packet_id=number)
    session = world.engine.sessions.by_client["ann"]
    for frame in world.frames:
        journaling.append(frame)
    journaling.append(
        [
            records.spilled(session.number, Spilled(9, 33, 3, 300), 3),
            records.spilled(session.number, Spilled(10, 34, 1, 100), 1),
        ]
    )
    for _ in range(2):
        _, after = opened(storage)
        found = after.engine.sessions.by_client["ann"]
        assert found.queued_messages == 1
        assert [(file.number, file.last_sequence, file.messages, file.size) for file in found.spilled or []] == [
            (9, 33, 3, 300),
            (10, 34, 1, 100),
        ]
    journaling, after = opened(storage)
    journaling.append([records.unspilled(found.number, 9)])
    _, after = opened(storage)
    assert [file.number for file in after.engine.sessions.by_client["ann"].spilled or []] == [10]
