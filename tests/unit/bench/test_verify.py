"""The verifier finds loss, duplicates and disorder, and finds the same for any chunking."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest

from nearcast.bench.acks import PUBACK, PUBCOMP, PUBREC, PUBREL, one_ack
from nearcast.bench.traffic import PublishBatch, PublishLayout
from nearcast.bench.verify import ExpectedHeads, Gaps, GroupTally, MemberChecker, StreamChecker, SubscriberStream

TOPICS = [[b"t/%03d/v" % number] for number in range(3)]


class Subscriber:
    """A stream with its checker, fed in chunks with the rest carried over as a connection does it."""

    def __init__(self, qos: int = 0, version: int = 4, topics: list[list[bytes]] = TOPICS) -> None:
        self.layout = PublishLayout(len(topics[0][0]), 100, qos, version)
        self.topics = topics
        self.expected: npt.NDArray[np.int64] = np.zeros(len(topics), dtype=np.int64)
        self.checker = StreamChecker(self.expected)
        self.stream = SubscriberStream(ExpectedHeads(self.layout, topics), self.checker)
        self._carry = b""

    def packet(self, publisher: int, sequence: int) -> bytes:
        own = self.topics[publisher]
        return self.layout.publish(own[sequence % len(own)], publisher, sequence, 1)

    def packets(self, publisher: int, sequences: Iterable[int]) -> bytes:
        return b"".join(self.packet(publisher, sequence) for sequence in sequences)

    def feed(self, data: bytes) -> None:
        buffer = bytearray(self._carry + data)
        position = self.stream.feed(buffer, 0, len(buffer))
        self._carry = bytes(buffer[position:])

    def counts(self, sent: list[int]) -> tuple[int, int, int, int, int]:
        lost = sum(self.checker.lost(publisher, count) for publisher, count in enumerate(sent))
        stream, checker = self.stream, self.checker
        return stream.received, lost, checker.duplicates, checker.order_violations, stream.unexpected


FEEDS = ["whole", "bytes", "random"]


def feed_as(subscriber: Subscriber, data: bytes, how: str) -> None:
    if how == "whole":
        subscriber.feed(data)
    elif how == "bytes":
        for index in range(len(data)):
            subscriber.feed(data[index : index + 1])
    else:
        rng = random.Random(7)
        while data:
            cut = rng.randint(1, 700)
            subscriber.feed(data[:cut])
            data = data[cut:]


@pytest.mark.parametrize("how", FEEDS)
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_regular_stream(qos: int, version: int, how: str) -> None:
    subscriber = Subscriber(qos, version)
    feed_as(subscriber, subscriber.packets(0, range(300)), how)
    assert subscriber.counts([300, 0, 0]) == (300, 0, 0, 0, 0)
    answer = {0: 0, 1: PUBACK, 2: PUBREC}[qos]
    acks = b"".join(one_ack(answer, number + 1) for number in range(300)) if qos else b""
    assert bytes(subscriber.stream.output) == acks


@pytest.mark.parametrize("how", FEEDS)
@pytest.mark.parametrize(
    ("sequences", "counts"),
    [
        ([*range(100)], (100, 0, 0, 0, 0)),
        ([*range(50), *range(60, 100)], (90, 10, 0, 0, 0)),
        ([*range(50), *range(40, 100)], (110, 0, 10, 0, 0)),
        ([*range(50), 51, 50, *range(52, 100)], (100, 0, 0, 1, 0)),
    ],
)
def test_comparing_with_the_bytes_sent_counts_the_same(
    sequences: list[int], counts: tuple[int, int, int, int, int], how: str
) -> None:
    subscriber = Subscriber()
    batch = PublishBatch(subscriber.layout, 1, TOPICS[1], 120, rolling=True)
    batch.build(0, 100, 1)
    subscriber.stream.source = (1, batch)
    feed_as(subscriber, subscriber.packets(1, sequences), how)
    assert subscriber.counts([0, 100, 0]) == counts


@pytest.mark.parametrize("how", FEEDS)
@pytest.mark.parametrize(("qos", "answer"), [(1, PUBACK), (2, PUBREC)])
def test_comparing_with_the_bytes_sent_leaves_identifiers_to_the_broker(qos: int, answer: int, how: str) -> None:
    subscriber = Subscriber(qos, 5)
    batch = PublishBatch(subscriber.layout, 1, TOPICS[1], 120, rolling=True)
    batch.build(0, 100, 1)
    subscriber.stream.source = (1, batch)
    size, at = subscriber.layout.packet_bytes, subscriber.layout.id_offset
    packets = bytearray(subscriber.packets(1, range(100)))
    for index in range(100):
        packets[index * size + at : index * size + at + 2] = (index + 500).to_bytes(2, "big")
    releases = b"".join(one_ack(PUBREL, number) for number in range(600, 610)) if qos == 2 else b""
    feed_as(subscriber, bytes(packets[: 40 * size]) + releases + bytes(packets[40 * size :]), how)
    assert subscriber.counts([0, 100, 0]) == (100, 0, 0, 0, 0)
    answers = [one_ack(answer, number) for number in range(500, 600)]
    if qos == 2:
        answers[40:40] = [one_ack(PUBCOMP, number) for number in range(600, 610)]
    assert bytes(subscriber.stream.output) == b"".join(answers)


@pytest.mark.parametrize("how", FEEDS)
def test_publishers_that_interleave(how: str) -> None:
    subscriber = Subscriber()
    rng = random.Random(3)
    following = [0, 0, 0]
    data = b""
    for _ in range(400):
        publisher = rng.randrange(3)
        data += subscriber.packet(publisher, following[publisher])
        following[publisher] += 1
    feed_as(subscriber, data, how)
    assert subscriber.counts(following) == (400, 0, 0, 0, 0)


@pytest.mark.parametrize("how", FEEDS)
@pytest.mark.parametrize(
    ("sequences", "sent", "lost", "duplicates", "order_violations"),
    [
        ([*range(50), *range(60, 100)], 100, 10, 0, 0),
        ([*range(90)], 100, 10, 0, 0),
        ([*range(10, 100)], 100, 10, 0, 0),
        ([*range(50), *range(40, 100)], 100, 0, 10, 0),
        ([*range(50), 49, *range(50, 100)], 100, 0, 1, 0),
        ([*range(50), 51, 50, *range(52, 100)], 100, 0, 0, 1),
        ([*range(50), *range(60, 100), *range(50, 60)], 100, 0, 0, 10),
        ([*range(50), *range(60, 100), 55, 55], 100, 9, 1, 1),
        ([*range(0, 100, 2)], 100, 50, 0, 0),
        ([*range(99, -1, -1)], 100, 0, 0, 99),
    ],
)
def test_irregular_streams(
    sequences: list[int], sent: int, lost: int, duplicates: int, order_violations: int, how: str
) -> None:
    subscriber = Subscriber()
    feed_as(subscriber, subscriber.packets(1, sequences), how)
    assert subscriber.counts([0, sent, 0]) == (len(sequences), lost, duplicates, order_violations, 0)


@pytest.mark.parametrize("how", FEEDS)
def test_other_packets_in_between(how: str) -> None:
    """PINGRESP and PUBREL between the messages; PUBREL alone and in runs is answered in order."""
    subscriber = Subscriber(2)
    data = subscriber.packets(0, range(20)) + b"\xd0\x00" + one_ack(PUBREL, 1) + subscriber.packets(0, range(20, 22))
    data += b"".join(one_ack(PUBREL, number) for number in range(2, 23)) + subscriber.packets(0, range(22, 30))
    feed_as(subscriber, data, how)
    assert subscriber.counts([30, 0, 0]) == (30, 0, 0, 0, 1)
    answers = [(PUBREC, range(1, 21)), (PUBCOMP, range(1, 2)), (PUBREC, range(21, 23)), (PUBCOMP, range(2, 23))]
    answers.append((PUBREC, range(23, 31)))
    assert bytes(subscriber.stream.output) == b"".join(one_ack(kind, number) for kind, ids in answers for number in ids)


@pytest.mark.parametrize("how", FEEDS)
def test_packets_of_another_size_or_topic_are_unexpected(how: str) -> None:
    subscriber = Subscriber()
    wrong_topic = subscriber.layout.publish(b"t/xxx/v", 0, 20)
    wrong_publisher = subscriber.layout.publish(TOPICS[0][0], 9, 20)
    wrong_size = PublishLayout(7, 50, 0, 4).publish(TOPICS[0][0], 0, 20)
    data = subscriber.packets(0, range(20))
    for strange in (wrong_topic, wrong_publisher, wrong_size):
        data += strange
    feed_as(subscriber, data + subscriber.packets(0, range(20, 40)), how)
    assert subscriber.counts([40, 0, 0]) == (40, 0, 0, 0, 3)


@pytest.mark.parametrize("how", FEEDS)
def test_properties_added_by_a_broker_are_no_error(how: str) -> None:
    subscriber = Subscriber(1, 5)
    plain = subscriber.packet(0, 10)
    at = subscriber.layout.payload_offset - 1
    longer = plain[:1] + bytes((plain[1] + 2,)) + plain[2:at] + b"\x02\x0b\x05" + plain[at + 1 :]
    data = subscriber.packets(0, range(10)) + longer + subscriber.packets(0, range(11, 20))
    feed_as(subscriber, data, how)
    assert subscriber.counts([20, 0, 0]) == (20, 0, 0, 0, 0)


@pytest.mark.parametrize("how", FEEDS)
def test_a_repeated_packet_with_the_dup_flag_is_a_duplicate(how: str) -> None:
    subscriber = Subscriber(1)
    again = bytearray(subscriber.packet(0, 5))
    again[0] |= 0x08
    feed_as(subscriber, subscriber.packets(0, range(10)) + bytes(again) + subscriber.packets(0, range(10, 20)), how)
    assert subscriber.counts([20, 0, 0]) == (21, 0, 1, 0, 0)


@pytest.mark.parametrize("how", FEEDS)
def test_a_publisher_with_many_topics(how: str) -> None:
    topics = [[b"t/%04d" % number for number in range(17)]]
    subscriber = Subscriber(topics=topics)
    swapped = subscriber.layout.publish(topics[0][0], 0, 101)
    data = subscriber.packets(0, range(100)) + swapped + subscriber.packets(0, range(100, 200))
    feed_as(subscriber, data, how)
    assert subscriber.counts([200]) == (200, 0, 0, 0, 1)


def test_a_disconnect_is_remembered() -> None:
    subscriber = Subscriber(0, 5)
    subscriber.feed(b"\xe0\x01\x8b")
    assert subscriber.stream.disconnected == 0x8B


def test_send_times_are_kept_on_request() -> None:
    subscriber = Subscriber()
    subscriber.stream.times = []
    subscriber.feed(subscriber.packets(0, range(10)))
    subscriber.feed(subscriber.packet(0, 10))
    assert np.concatenate(subscriber.stream.times).tolist() == [1] * 11


def test_gaps_against_a_set() -> None:
    rng = random.Random(11)
    gaps, naive = Gaps(), set[int]()
    for start in range(0, 1000, 50):
        gaps.append(start, start + 30)
        naive |= set(range(start, start + 30))
    for _ in range(2000):
        number = rng.randrange(1100)
        assert gaps.remove(number) == (number in naive)
        naive.discard(number)
        assert len(gaps) == len(naive)


def as_sequences(*numbers: int) -> npt.NDArray[np.uint64]:
    return np.array(numbers, dtype=np.uint64)


def test_members_of_a_shared_subscription_share_the_messages() -> None:
    tally = GroupTally(1)
    one, other = MemberChecker(tally, 1), MemberChecker(tally, 1)
    one.take(0, as_sequences(0, 2, 4))
    other.take(0, as_sequences(1, 3, 200_000))
    assert (tally.duplicates, tally.lost(0, 200_001)) == (0, 199_995)
    assert one.order_violations + other.order_violations == 0


def test_members_with_several_publishers() -> None:
    tally = GroupTally(2)
    members = [MemberChecker(tally, 2), MemberChecker(tally, 2)]
    for start in range(0, 1000, 4):
        for offset, member in enumerate(members):
            numbers = [start + 2 * offset, start + 2 * offset, start + 2 * offset + 1, start + 2 * offset + 1]
            member.take_mixed(np.array([0, 1, 1, 0], dtype=np.uint32), as_sequences(*numbers))
    assert tally.received.tolist() == [1000, 1000]
    assert tally.duplicates + sum(member.order_violations for member in members) == 0


def test_a_message_for_two_members_is_a_duplicate_and_a_step_back_is_disorder() -> None:
    tally = GroupTally(1)
    one, other = MemberChecker(tally, 1), MemberChecker(tally, 1)
    one.take(0, as_sequences(0, 1, 2, 2))
    other.take(0, as_sequences(2, 4, 3))
    assert (tally.duplicates, tally.lost(0, 5)) == (2, 0)
    assert (one.order_violations, other.order_violations) == (0, 1)
