"""Partitions and offsets: however a read is divided, each record is in it exactly once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from nearcast.pipeline import offsets, plan
from nearcast.pipeline.offsets import Advance, Limit, Offset, TopicState
from nearcast.pipeline.options import Positions
from nearcast.pipeline.plan import TopicRange, divide

RANGES = st.dictionaries(
    st.text("abc/", min_size=1, max_size=4),
    st.tuples(st.integers(1, 50), st.integers(0, 60), st.integers(0, 40_000_000)),
    max_size=12,
).map(lambda topics: [TopicRange(topic, start, start + count, size) for topic, (start, count, size) in topics.items()])


def records(ranges: list[TopicRange]) -> Counter[tuple[str, int]]:
    return Counter((each.topic, index) for each in ranges for index in range(each.start, each.end))


@given(RANGES, st.none() | st.integers(1, 200), st.none() | st.integers(1, 100))
def test_any_division_has_every_record_once(
    ranges: list[TopicRange], min_partitions: int | None, rows_per_partition: int | None
) -> None:
    partitions = divide(ranges, min_partitions=min_partitions, rows_per_partition=rows_per_partition)
    assert records([each for partition in partitions for each in partition]) == records(ranges)
    total = sum(each.records for each in ranges)
    assert all(partition and all(each.records > 0 for each in partition) for partition in partitions)
    assert all(len({each.topic for each in partition}) == len(partition) for partition in partitions)
    if rows_per_partition is not None:
        assert all(sum(each.records for each in partition) <= rows_per_partition for partition in partitions)
    if min_partitions is not None:
        assert len(partitions) >= min(min_partitions, total)


def test_many_small_topics_make_few_partitions() -> None:
    partitions = divide([TopicRange(f"sensors/{number}/temperature", 1, 11, 60) for number in range(100_000)])
    assert len(partitions) == 100_000 // plan.MAX_TOPICS


def test_long_names_fit_into_a_request() -> None:
    partitions = divide([TopicRange("n" * 60_000 + str(number), 1, 2) for number in range(100)])
    assert all(sum(len(each.topic) for each in partition) <= plan.MAX_NAME_BYTES for partition in partitions)


def test_a_small_read_is_one_partition_and_a_big_one_several() -> None:
    assert len(divide([TopicRange("a", 1, 10_001, 120)])) == 1
    assert len(divide([TopicRange("a", 1, 2_000_001, 120)])) == 8
    assert len(divide([TopicRange("a", 1, 20_000_001, 1_000)])) == 150


LOGS = st.lists(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=6),
    min_size=1,
    max_size=8,
)


@given(
    LOGS,
    st.none() | st.integers(1, 12),
    st.none() | st.integers(1, 400),
    st.sampled_from(["earliest", "latest"]),
    st.booleans(),
)
def test_a_stream_reads_every_record_once(
    growth: list[dict[str, tuple[int, int]]], max_records: int | None, max_bytes: int | None, start: str, packed: bool
) -> None:
    """Topics appear and grow between triggers, the offset goes through JSON; batches join without gap or overlap, also when
    each is planned a second time."""
    plain_topics = offsets.PLAIN_TOPICS
    offsets.PLAIN_TOPICS = 0 if packed else plain_topics
    try:
        advance = Advance(Positions("earliest" if start == "earliest" else "latest"))
        limit = Limit(max_records, max_bytes)
        log: dict[str, tuple[int, int]] = {}
        offset = dict(offsets.INITIAL)
        read: Counter[tuple[str, int]] = Counter()
        began: dict[str, int] = {}

        def trigger(limit: Limit) -> bool:
            nonlocal offset
            states = [
                TopicState(topic, first, following, 40 * (following - first)) for topic, (first, following) in log.items()
            ]
            before = offsets.unpack(offset)
            after = advance.advance(before, states, limit)
            assert not advance.losses
            if after is before:
                return False
            began.update({topic: index for topic, index in after.new.items() if topic not in began})
            again = offsets.unpack(after.pack())
            ranges = offsets.ranges_between(before, again, {})
            assert again == after
            if limit.records is not None:
                assert sum(each.records for each in ranges) <= limit.records
            read.update(records(ranges))
            offset = after.pack()
            return True

        for step in growth:
            for topic, (skipped, count) in step.items():
                first, following = log.get(topic, (skipped + 1, skipped + 1))
                log[topic] = (first, following + count)
            trigger(limit)
        while trigger(limit):
            pass
        expected = Counter((topic, index) for topic, (_, following) in log.items() for index in range(began[topic], following))
        assert read == expected
        if start == "earliest":
            assert began == {topic: first for topic, (first, _) in log.items()}
    finally:
        offsets.PLAIN_TOPICS = plain_topics


def test_limits_starve_no_topic() -> None:
    """More topics than a batch may have records: each gets its turn though all keep growing."""
    advance = Advance(Positions("earliest"))
    offset = Offset({f"t/{number}": 1 for number in range(100)})
    following = 1
    for _ in range(10):
        following += 1
        states = [TopicState(f"t/{number}", 1, following) for number in range(100)]
        offset = advance.advance(offset, states, Limit(records=10))
    assert offset.next is not None
    assert all(index > 1 for index in offset.next.values())
