"""Retained messages and publications: what stays in memory."""

from __future__ import annotations

from nearcast.mqtt.packets import Properties
from nearcast.mqtt.publication import MAX_FORMS, V5_FLAG, build
from nearcast.mqtt.retained import RetainedMessages
from nearcast.mqtt.routing import encode_identifier
from tests.engine_harness import World


def test_replacing_keeps_the_count_and_changes_the_bytes() -> None:
    store = RetainedMessages()
    first, second = build(b"a/b", b"1", 0, True), build(b"a/b", b"12345", 0, True)
    store.set(b"a/b", first)
    store.set(b"a/b", second)
    assert (store.count, store.bytes) == (1, len(second.packets))
    assert store.get(b"a/b") is second
    assert store.get(b"a") is None
    assert store.remove(b"a/b")
    assert not store.remove(b"a/b")
    assert (store.count, store.bytes) == (0, 0)
    assert store._root.children == {}, "levels that led to it are gone, too"


def test_expired_messages_are_neither_sent_nor_kept() -> None:
    world = World(durable=True)
    publisher = world.connect("p", 5)
    publisher.publish("t", b"m", retain=True, properties=Properties(message_expiry_interval=5))
    world.advance(5)
    reader = world.connect("r", 5)
    reader.subscribe("#")
    assert reader.payloads() == []
    world.advance(60)
    assert world.engine.retained.count == 0
    assert world.engine.stats.dropped_expired == 1
    assert world.recovered().engine.retained.count == 0
    world.validate()


def test_forms_of_a_message_that_lives_long_are_bounded() -> None:
    message = build(b"t", b"payload", 0, True)
    for identifier in range(1, 100):
        message.form(V5_FLAG, encode_identifier(identifier), 0, 0.0)
    assert message._forms is not None
    assert len(message._forms) <= MAX_FORMS


def test_a_retained_message_of_a_run_does_not_keep_the_run() -> None:
    world = World()
    publisher = world.connect("p", 4)
    publisher.send(b"".join(b"\x31\x04\x00\x01t" + bytes([number]) for number in range(100)))
    (message,) = world.engine.retained.all()
    assert message.payloads() == [bytes([99])]
    assert len(message.packets) < 10
