"""``kill -9`` under load: nothing acknowledged is lost, nothing is delivered twice at QoS 2, order holds.

The moments of the kills follow from a seed, which a failure prints; ``NEARCAST_CRASH_SEED`` chooses another.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from nearcast.mqtt.packets import (
    ConnAck,
    Connect,
    Disconnect,
    Properties,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    SubscriptionRequest,
    Will,
)
from tests.integration.broker.running import wait_for
from tests.integration.brokers import NearcastBroker
from tests.integration.crash_load import Party, Publisher, Subscriber, drive
from tests.integration.wire import Wire

pytestmark = pytest.mark.integration

MESSAGES = 250
#: So small that generations of the journal roll while the load runs.
SMALL_SNAPSHOTS = "[persistence]\nsnapshot_bytes = 65536\n"


def seeded(test: str) -> random.Random:
    seed = os.environ.get("NEARCAST_CRASH_SEED", "1")
    print(f"NEARCAST_CRASH_SEED={seed}")  # noqa: T201  pytest shows it when the test fails
    return random.Random(f"{seed} {test}")


@pytest.mark.parametrize("sync", ["os", "fsync"])
def test_kill_under_load(tmp_path: Path, sync: str) -> None:
    rng = seeded(sync)
    publishers = [Publisher(f"p{index}", 4 + index % 2, rng, MESSAGES, index < 2) for index in range(4)]
    present = [Subscriber("present-4", 4, rng), Subscriber("present-5", 5, rng, window=60)]
    restless = Subscriber("restless", 5, rng, restless=True)
    # What waits for those who are away is state that each generation copies: not all of the load, or none would roll.
    away = [Subscriber("away-4", 4, rng, takes=["p0"]), Subscriber("away-5", 5, rng, window=7, takes=["p1", "p2"])]
    subscribers = [*present, restless, *away]
    parties: list[Party] = [*publishers, *subscribers]
    broker = NearcastBroker(tmp_path, SMALL_SNAPSHOTS, data=True, arguments=["--sync", sync])
    with contextlib.ExitStack() as leaving, broker:
        for party in parties:
            leaving.callback(party.lose)
        port = broker.port()
        drive(subscribers, port, lambda: all(s.subscribed for s in subscribers), "subscribing")
        for subscriber in away:
            subscriber.leave()

        # While messages come in ...
        for due in sorted(rng.sample(range(len(publishers) * 2 * MESSAGES), 5)):
            drive(parties, port, lambda due=due: acknowledged(publishers) >= due, f"acknowledgement {due}")  # type: ignore[misc]
            crash(broker, rng)
            check_retained(port, publishers)
        drive(parties, port, lambda: all(p.done for p in publishers), "acknowledgement of every message")
        # ... and while those who were away take theirs.
        for subscriber in away:
            subscriber.wanted = True
        for due in sorted(rng.sample(range(4 * MESSAGES), 3)):
            drive(parties, port, lambda due=due: away[1].count >= due, f"delivery {due} to a late client")  # type: ignore[misc]
            crash(broker, rng)
            check_retained(port, publishers)

        # What is published now comes behind all else, so nothing can follow it late.
        for subscriber in subscribers:
            subscriber.hurry = True
        with Wire(port) as wire:
            wire.connect()
            wire.send(Publish("load/end", b"", 2, packet_id=1))
            wire.expect(PubRec)
            drive(parties, port, lambda: all(s.ended for s in subscribers), "delivery of everything")
            drive(parties, port, lambda: not any(s.unreleased for s in subscribers), "release of everything")
        drive(parties, port, lambda: broker.metric("inflight_messages") == 0, "the end of all handshakes")
        assert broker.metric("queued_messages") == 0

        for subscriber in subscribers:
            for publisher in subscriber.takes or [publisher.name for publisher in publishers]:
                at_least_once = subscriber.received[f"load/{publisher}/1"]
                exactly_once = subscriber.received[f"load/{publisher}/2"]
                # Duplicates apart, everything came once and in the order of sending.
                assert list(dict.fromkeys(at_least_once)) == list(range(MESSAGES)), (subscriber.name, publisher)
                assert exactly_once == list(range(MESSAGES)), (subscriber.name, publisher)
        # The load met what it was made for.
        assert sum(publisher.sent_again for publisher in publishers) > 0, "no kill came between a publish and its answer"
        assert sum(subscriber.redelivered for subscriber in subscribers) > 0, "no kill came within a QoS 2 delivery"
        # Generations of the journal rolled, at the latest now that little is left to copy.
        with Wire(port) as wire:
            wire.connect()
            for number in range(1, 201):
                wire.send(Publish("filler", bytes(8_000), 1, True, packet_id=number))
                wire.expect(PubAck)
        # A kill within a large write leaves half a frame, and the file aside as journal-N.damaged.
        generations = max(int(path.name[8:18]) for path in broker.data.glob("journal-*"))
        assert generations > broker.launches, "the journal never rolled while the broker ran"
        for party in parties:
            party.lose()
        crash(broker, rng)
        check_retained(port, publishers)
        broker.restart()
        check_retained(port, publishers)


def crash(broker: NearcastBroker, rng: random.Random) -> None:
    """Kill and start again; every other time with a start in between that is killed while it writes the state anew."""
    broker.kill()
    if rng.random() < 0.5:
        before = set(broker.data.iterdir())
        process = broker.launch()
        wait_for("a new generation", lambda: set(broker.data.iterdir()) - before or process.poll() is not None)
        broker.kill()
    broker.start()


def acknowledged(publishers: Sequence[Publisher]) -> int:
    return sum(publisher.acknowledged for publisher in publishers)


def check_retained(port: int, publishers: Sequence[Publisher]) -> None:
    """Of each publisher's retained messages the last one that was acknowledged, or a later one, is there."""
    with Wire(port) as wire:
        wire.connect()
        kept = wire.subscribe("kept/#")
        expected = [publisher for publisher in publishers if publisher.retained_acknowledged]
        while len(kept) < len(expected):
            kept.append(wire.expect(Publish))
        found = {message.topic.removeprefix("kept/"): int(message.payload) for message in kept}
        for publisher in expected:
            assert publisher.retained_acknowledged <= found[publisher.name] <= publisher.retained_sent


def test_an_unfinished_delivery_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Identifiers, DUP and the place in each handshake are the same as before."""
    with NearcastBroker(tmp_path, data=True) as broker:
        with Wire(broker.port()) as taker, Wire(broker.port()) as giver:
            taker.connect("taker", expiry_seconds=1_000)
            taker.subscribe("t", 2)
            giver.connect("giver", expiry_seconds=1_000)
            giver.send(*(Publish("t", b"%d" % number, 2, packet_id=number) for number in (1, 2, 3)))
            giver.send(Publish("t", b"4", 1, packet_id=4))
            for number in (1, 2, 3):
                assert giver.expect(PubRec).packet_id == number
            giver.expect(PubAck)
            first, second, third, fourth = (taker.expect(Publish) for _ in range(4))
            taker.send(PubRec(second.packet_id))
            taker.expect(PubRel)
            taker.send(PubRec(third.packet_id))
            taker.expect(PubRel)
            taker.send(PubComp(third.packet_id))
            giver.send(PubRel(1))
            giver.expect(PubComp)
            wait_for("the end of one delivery", lambda: broker.metric("inflight_messages") == 3)
        broker.kill()
        broker.start()
        with Wire(broker.port()) as taker, Wire(broker.port()) as giver:
            assert taker.connect("taker", clean_start=False, expiry_seconds=1_000).session_present
            again = [taker.expect(Publish), taker.expect(Publish)]
            assert [(message.packet_id, message.payload, message.qos, message.dup) for message in again] == [
                (first.packet_id, b"1", 2, True),
                (fourth.packet_id, b"4", 1, True),
            ]
            assert taker.expect(PubRel).packet_id == second.packet_id
            taker.send(PubRec(first.packet_id), PubAck(fourth.packet_id), PubComp(second.packet_id))
            assert taker.expect(PubRel).packet_id == first.packet_id
            taker.send(PubComp(first.packet_id))
            # The giver's side: 1 was finished; 2 and 3 are known, so that sending them again delivers nothing.
            assert giver.connect("giver", clean_start=False, expiry_seconds=1_000).session_present
            giver.send(*(Publish("t", b"%d" % number, 2, dup=True, packet_id=number) for number in (2, 3)))
            assert [giver.expect(PubRec).packet_id for _ in range(2)] == [2, 3]
            giver.send(PubRel(2), PubRel(3))
            assert [giver.expect(PubComp).reason_code for _ in range(2)] == [0, 0]
            giver.send(Publish("t", b"last", 2, packet_id=1))
            assert taker.expect(Publish).payload == b"last"


def test_everything_about_a_session_survives(tmp_path: Path) -> None:
    """Subscriptions with their options, properties and expiry of what waits, wills; and time goes on meanwhile."""
    with NearcastBroker(tmp_path, data=True) as broker:
        with Wire(broker.port()) as taker, Wire(broker.port()) as brief, Wire(broker.port()) as device:
            taker.connect("taker", expiry_seconds=1_000)
            filters = [SubscriptionRequest("a/#", 2, retain_as_published=True), SubscriptionRequest("$share/group/b", 1)]
            taker.send(Subscribe(1, filters, Properties(subscription_identifiers=[42])))
            taker.expect(SubAck)
            brief.connect("brief", expiry_seconds=1)
            will = Will("a/will", b"died", 1, properties=Properties(content_type="text/plain"))
            device.send(Connect("device", will=will, properties=Properties(session_expiry_interval=1_000)))
            device.expect(ConnAck)
            for leaving in (taker, brief):
                leaving.send(Disconnect())
                assert leaving.receive() is None
            with Wire(broker.port()) as giver:
                giver.connect()
                marks = Properties(message_expiry_interval=1_000, user_properties=[("key", "1"), ("key", "2")])
                giver.send(Publish("a/1", b"marked", 1, True, packet_id=1, properties=marks))
                giver.send(Publish("a/2", b"short-lived", 2, packet_id=2, properties=Properties(message_expiry_interval=1)))
                giver.send(Publish("b", b"shared", 1, packet_id=3))
                assert [type(giver.receive()) for _ in range(3)] == [PubAck, PubRec, PubAck]
            broker.kill()
        killed_at = time.monotonic()
        wait_for("the expiry", lambda: time.monotonic() > killed_at + 1.2)
        broker.start()
        with Wire(broker.port()) as taker, Wire(broker.port()) as brief:
            assert taker.connect("taker", clean_start=False, expiry_seconds=1_000).session_present
            marked, shared, died = (taker.expect(Publish) for _ in range(3))
            assert (marked.payload, marked.qos, marked.retain) == (b"marked", 1, True)
            assert marked.properties is not None
            assert marked.properties.user_properties == [("key", "1"), ("key", "2")]
            assert marked.properties.subscription_identifiers == [42]
            assert 900 < (marked.properties.message_expiry_interval or 0) < 1_000
            assert (shared.topic, shared.payload) == ("b", b"shared")
            assert (died.topic, died.payload, died.qos) == ("a/will", b"died", 1)
            assert died.properties is not None
            assert died.properties.content_type == "text/plain"
            assert not brief.connect("brief", clean_start=False).session_present
            brief.send(Publish("a/3", b"live"), Publish("b", b"live"))
            assert [taker.expect(Publish).topic for _ in range(2)] == ["a/3", "b"]


@pytest.mark.parametrize("damage", ["torn", "cut short", "flipped bit"])
def test_a_damaged_journal_is_reported_and_what_precedes_the_damage_is_there(tmp_path: Path, damage: str) -> None:
    rng = seeded(damage)
    messages = 40
    with NearcastBroker(tmp_path, data=True) as broker:
        with Wire(broker.port()) as taker:
            taker.connect("taker", expiry_seconds=1_000)
            taker.subscribe("t", 1)
        with Wire(broker.port()) as giver:
            giver.connect()
            for number in range(messages):  # one frame of the journal each
                giver.send(Publish("t", b"%06d" % number, 1, packet_id=number + 1))
                giver.expect(PubAck)
        broker.kill()
        (journal,) = broker.data.glob("journal-*")
        content = bytearray(journal.read_bytes())
        # The messages' frames are at the end of the file, and all of one size or nearly.
        reach = (len(content) - content.index(b"%06d" % 0)) * 3 // 4
        if damage == "torn":
            del content[-rng.randrange(1, 10) :]
        elif damage == "cut short":
            del content[-rng.randrange(reach // 3, reach) :]
        else:
            content[-rng.randrange(reach // 3, reach)] ^= 1 << rng.randrange(8)
        journal.write_bytes(content)
        broker.start()

        (line,) = [line for line in broker.log().splitlines() if "the journal is damaged" in line]
        said = re.search(r"path=(\S+) offset=(\d+)", line)
        assert said is not None, line
        assert said[1] == str(journal)
        assert 0 < int(said[2]) < len(content)
        assert journal.with_name(journal.name + ".damaged").read_bytes() == content
        intact = content[: int(said[2])]
        survivors = [number for number in range(messages) if b"%06d" % number in intact]
        with Wire(broker.port()) as taker:
            assert taker.connect("taker", clean_start=False, expiry_seconds=1_000).session_present
            received = [int(taker.expect(Publish).payload) for _ in survivors]
        assert received == survivors == list(range(len(survivors)))
        assert messages // 8 <= len(survivors) < messages
        # The damage is history at the next start.
        broker.kill()
        broker.start()
        assert broker.log().count("the journal is damaged") == 1
        assert broker.metric("inflight_messages") == len(survivors)
