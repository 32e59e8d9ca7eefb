"""Whatever a cloud says, allows and takes: a broker goes on. A run is drawn from a seed, which a failure shows."""

from __future__ import annotations

import random

import pytest

from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.packets import (
    MQTT_5,
    ConnAck,
    Packet,
    Properties,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    UnsubAck,
    Unsubscribe,
)
from tests.unit.fabric.clouds import Leader, ScriptedCloud

FILTERS = ["a/b", "a/+", "+/b", "#", "$share/g/a/b", "x/y/#", "é/1"]
TOPICS = ["a/b", "nearcast/marks/a", "nearcast/filters/a/3", "nearcast/leaders/world", "nearcast/other", "$SYS/x"]


def limits(rng: random.Random) -> Properties:
    return Properties(
        receive_maximum=rng.choice([None, 1, 20]),
        maximum_qos=rng.choice([None, 0, 1]),
        retain_available=rng.choice([None, 0]),
        maximum_packet_size=rng.choice([None, 1, 30, 200, 1_000]),
        wildcard_subscription_available=rng.choice([None, 0]),
        subscription_identifier_available=rng.choice([None, 0]),
        shared_subscription_available=rng.choice([None, 0]),
        server_keep_alive=rng.choice([None, 0, 5]),
    )


def answer(packet: Packet, rng: random.Random) -> Packet | None:
    if isinstance(packet, Publish) and packet.qos:
        return PubAck(packet.packet_id, rng.choice([0, 0x10, 0x87])) if packet.qos == 1 else PubRec(packet.packet_id)
    if isinstance(packet, PubRel):
        return PubComp(packet.packet_id)
    if isinstance(packet, Subscribe):
        return SubAck(packet.packet_id, [rng.choice([0, 1, 2, 0x80]) for _ in packet.subscriptions])
    if isinstance(packet, Unsubscribe):
        return UnsubAck(packet.packet_id, [0] * len(packet.topic_filters))
    return None


def said(version: int, rng: random.Random) -> bytes:
    """Something that was not asked for, broken or not."""
    properties = Properties(user_properties=[("nearcast", rng.choice(["", "AAAA", "é"]))]) if version == MQTT_5 else None
    qos = rng.randrange(3)
    payload = rng.randbytes(rng.randrange(60))
    data = bytearray(encode(Publish(rng.choice(TOPICS), payload, qos, qos == 1, packet_id=3, properties=properties), version))
    kind = rng.randrange(3)
    if kind == 0:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data) if kind else rng.randbytes(rng.randrange(20))


@pytest.mark.parametrize("cloud_version", ["5", "3.1.1"])
@pytest.mark.parametrize("seed", range(60))
def test_a_broker_survives_its_cloud(seed: int, cloud_version: str) -> None:
    rng = random.Random(seed)
    leader = Leader("a", cloud_version=cloud_version)
    cloud, script = leader.cloud, ScriptedCloud(leader)
    cloud.want(True, 0.0)
    now, version = 0.0, 0
    for _ in range(4):
        now = max(now, cloud.next_deadline())
        assert cloud.wants_dial(now)
        cloud.opened(script, now)
        script.reader = PacketReader(script.version)
        connack = ConnAck(0, rng.random() < 0.5, limits(rng) if script.version == MQTT_5 else None)
        script.say(connack, now=now)
        for _ in range(rng.randrange(20)):
            now += rng.random() * rng.choice([0.1, 20.0])
            version += 1
            match rng.randrange(8):
                case 0:
                    leader.relay("a/b", bytes(rng.randrange(300)), rng.randrange(3), rng.random() < 0.5)
                case 1:
                    cloud.mark(version, now)
                case 2:
                    leader.set_filters(set(rng.sample(FILTERS, rng.randrange(4))), version, now)
                case 3:
                    cloud.publish("nearcast/leaders/world", bytes(rng.randrange(200)), now)
                case 4:
                    cloud.tick(now)
                case 5:
                    cloud.receive(said(script.version, rng), now)
                case _:
                    for packet in script.heard():
                        found = answer(packet, rng)
                        if found is not None and rng.random() < 0.9:
                            script.say(found, now=now)
        leader.take()
        cloud.lost(now)
    # One that answers is enough to bring everything to its end.
    now = max(now, cloud.next_deadline())
    packets = script.accept(now, session_present=True)
    while packets:
        for packet in packets:
            found = answer(packet, rng)
            if found is not None:
                script.say(found, now=now)
        packets = script.heard()
    assert cloud.machine.unacknowledged == 0
    assert cloud.relaying.unconfirmed_bytes == 0
    assert len(leader.owner.confirmed) == leader.sequence
    assert len(leader.owner.versions) == len(set(leader.owner.versions))
