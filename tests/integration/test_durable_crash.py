"""``kill -9`` of a broker whose topics are durable, under load.

Whatever was acknowledged is in the log: once and in order at QoS 2, at least once and in order at QoS 1, with indexes from 1
on without a gap. What a reader saw once, at an index, is there for ever. The moments of the kills follow from a seed, which a
failure prints; ``NEARCAST_CRASH_SEED`` chooses another.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from nearcast.client.blocking_topics import BlockingTopics
from nearcast.client.records import Record
from nearcast.mqtt.packets import Packet, PubAck, Publish, PubRec
from tests.integration.broker.running import PATIENCE_SECONDS, wait_for
from tests.integration.brokers import NearcastBroker
from tests.integration.crash_load import Party, Publisher, Subscriber, drive

pytestmark = pytest.mark.integration

MESSAGES = 150
KILLS = 4

#: So small that segments of the log, and generations of the journal, roll while the load runs.
CONFIG = """
[[topics]]
topic = "load/#"
[[topics]]
topic = "kept/#"
mode = "tap"
[topic_log]
segment_bytes = 65536
[persistence]
snapshot_bytes = 65536
"""


def seeded(test: str) -> random.Random:
    seed = os.environ.get("NEARCAST_CRASH_SEED", "1")
    print(f"NEARCAST_CRASH_SEED={seed}")  # noqa: T201  pytest shows it when the test fails
    return random.Random(f"{seed} {test}")


class PromisedPublisher(Publisher):
    """Remembers which messages the broker took: PUBACK at QoS 1, PUBREC at QoS 2."""

    def __init__(self, name: str, version: int, rng: random.Random, same_size: bool) -> None:
        super().__init__(name, version, rng, MESSAGES, same_size)
        self.promised: dict[str, set[int]] = defaultdict(set)

    def handle(self, packet: Packet) -> None:
        if isinstance(packet, PubAck | PubRec):
            message = self.unfinished.get(packet.packet_id)
            if isinstance(message, Publish) and not message.retain:
                self.promised[message.topic].add(int(message.payload[:6]))
        super().handle(packet)


class Follower:
    """Reads everything as it is committed, in a thread, over as many connections as it takes."""

    def __init__(self, url: str) -> None:
        self.seen: dict[str, list[Record]] = defaultdict(list)
        self.error: BaseException | None = None
        self._url = url
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with BlockingTopics(self._url, reconnect_seconds=60.0) as topics:
                for record in topics.tail("load/#", start="earliest"):
                    if record.topic == "load/end":
                        return
                    self.seen[record.topic].append(record)
        except BaseException as error:  # noqa: BLE001  # shown by whoever joins
            self.error = error

    def join(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        assert self.error is None, self.error
        assert not self._thread.is_alive(), "the follower did not get to the end"


@pytest.mark.parametrize("sync", ["os", "fsync"])
def test_kill_under_load(tmp_path: Path, sync: str) -> None:
    rng = seeded(sync)
    publishers = [PromisedPublisher(f"p{index}", 4 + index % 2, rng, index < 2) for index in range(4)]
    live = Subscriber("live", 5, rng, window=60)
    parties: list[Party] = [*publishers, live]
    broker = NearcastBroker(tmp_path, CONFIG, data=True, arguments=["--sync", sync])
    known: dict[tuple[str, int], bytes] = {}
    with contextlib.ExitStack() as leaving, broker:
        for party in parties:
            leaving.callback(party.lose)
        port = broker.port()
        drive([live], port, lambda: live.subscribed, "subscribing")
        follower = Follower(broker.bulk_url)
        for due in sorted(rng.sample(range(len(publishers) * 2 * MESSAGES), KILLS)):
            drive(parties, port, lambda due=due: is_due(publishers, due), f"acknowledgement {due}")  # type: ignore[misc]
            crash(broker, rng)
            check(broker, publishers, known)
        drive(parties, port, lambda: all(publisher.done for publisher in publishers), "acknowledgement of every message")
        check(broker, publishers, known)
        assert sum(publisher.sent_again for publisher in publishers) > 0, "no kill came between a publish and its answer"

        with BlockingTopics(broker.bulk_url) as topics:
            topics.publish("load/end", b"")
        live.hurry = True
        drive(parties, port, lambda: live.ended, "delivery of everything")
        follower.join()
        # Readers that were there all the time saw each index once, and so did live subscribers each QoS 2 message.
        assert {(topic, record.index): record.payload for topic in follower.seen for record in follower.seen[topic]} == {
            place: payload for place, payload in known.items() if place[0].startswith("load/")
        }
        for topic, records in follower.seen.items():
            assert [record.index for record in records] == list(range(1, len(records) + 1)), topic
        for publisher in publishers:
            assert live.received[f"load/{publisher.name}/2"] == list(range(MESSAGES))
        assert len(list((broker.data / "topics").glob("*.log"))) > 2, "segments never rolled"
        broker.restart()
        check(broker, publishers, known)


def crash(broker: NearcastBroker, rng: random.Random) -> None:
    """Kill and start again; every other time with a start in between that is killed while it recovers."""
    broker.kill()
    if rng.random() < 0.5:
        before = set(broker.data.iterdir())
        process = broker.launch()
        wait_for("a new generation", lambda: set(broker.data.iterdir()) - before or process.poll() is not None)
        broker.kill()
    broker.start()


def is_due(publishers: Sequence[Publisher], due: int) -> bool:
    """So much is acknowledged, and something is not: that is the moment for a kill."""
    waiting = any(publisher.unfinished for publisher in publishers) or all(publisher.done for publisher in publishers)
    return waiting and sum(publisher.acknowledged for publisher in publishers) >= due


def check(broker: NearcastBroker, publishers: Sequence[PromisedPublisher], known: dict[tuple[str, int], bytes]) -> None:
    """The log holds what was promised, and what it held the last time."""
    found: dict[str, list[Record]] = defaultdict(list)
    with BlockingTopics(broker.bulk_url) as topics:
        for batch in topics.read("#"):
            for record in batch.records():
                found[record.topic].append(record)
    now = {(topic, record.index): record.payload for topic in found for record in found[topic]}
    for place, payload in known.items():
        assert now.get(place) == payload, f"{place} was there and is not, or not the same"
    known.update(now)
    for topic, records in found.items():
        assert [record.index for record in records] == list(range(1, len(records) + 1)), topic
        times = [record.time_us for record in records]
        assert times == sorted(times), topic
    for publisher in publishers:
        for qos in (1, 2):
            topic = f"load/{publisher.name}/{qos}"
            numbers = [int(record.payload[:6]) for record in found[topic]]
            once = list(dict.fromkeys(numbers))
            assert once == list(range(len(once))), f"{topic}: out of order, or a hole"
            assert publisher.promised[topic] <= set(once), f"{topic}: an acknowledged message is not in the log"
            if qos == 2:
                assert numbers == once, f"{topic}: a message is in the log twice"
            assert {record.publisher for record in found[topic]} <= {publisher.name}
            assert {record.qos for record in found[topic]} <= {qos}
