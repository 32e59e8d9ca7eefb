"""Messages of a shared subscription whose receiver ends go to another member (section 4.8.2)."""

from __future__ import annotations

import pytest

from nearcast.mqtt.packets import PubRec
from tests.engine_harness import World, durable_state

FILTER = "$share/workers/jobs"


@pytest.mark.parametrize("durable", [False, True])
def test_unacknowledged_and_queued_jobs_of_a_lost_worker_go_to_another(durable: bool) -> None:
    world = World(durable=durable)
    first, second = world.connect("first"), world.connect("second")
    boss = world.connect("boss")
    first.subscribe(FILTER, 1)
    for number in range(5):
        boss.publish("jobs", b"%d" % number, 1, packet_id=number + 1)
    assert first.payloads() == [b"0", b"1", b"2", b"3", b"4"]
    second.subscribe(FILTER, 1)
    first.lose()
    assert sorted(second.payloads()) == [b"0", b"1", b"2", b"3", b"4"]
    world.validate()


def test_the_queue_of_an_expired_session_goes_to_another_member() -> None:
    world = World(durable=True)
    away, boss = world.connect("away", expiry=10), world.connect("boss")
    away.subscribe(FILTER, 2)
    away.lose()
    boss.publish("jobs", b"waits", 2, packet_id=1)
    worker = world.persistent("worker")
    worker.subscribe(FILTER, 2)
    world.advance(11)
    assert worker.payloads() == [b"waits"]
    recovered = world.recovered()
    assert durable_state(recovered) == durable_state(world)


def test_a_qos_2_message_that_was_sent_is_never_given_to_another() -> None:
    """[MQTT-4.8.2-5]"""
    world = World()
    first, boss = world.connect("first"), world.connect("boss")
    first.subscribe(FILTER, 2)
    boss.publish("jobs", b"once", 2, packet_id=1)
    second = world.connect("second")
    second.subscribe(FILTER, 2)
    first.lose()
    assert second.payloads() == []


def test_a_message_that_a_worker_refused_is_over() -> None:
    """[MQTT-4.8.2-6]"""
    world = World()
    first, second, boss = world.connect("first"), world.connect("second"), world.connect("boss")
    first.subscribe(FILTER, 2)
    boss.publish("jobs", b"no", 2, packet_id=1)
    second.subscribe(FILTER, 2)
    first.send(PubRec(first.messages()[0].packet_id, 0x97))
    first.lose()
    assert second.payloads() == []


def test_nobody_left_is_no_error() -> None:
    world = World()
    only, boss = world.connect("only"), world.connect("boss")
    only.subscribe(FILTER, 1)
    boss.publish("jobs", b"lost", 1, packet_id=1)
    only.lose()
    world.validate()
