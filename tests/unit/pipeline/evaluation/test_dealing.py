"""Events are dealt out so that what is judged together is together, nothing is counted twice, and no part is large."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from nearcast.pipeline.evaluation import dealing

ROWS_PER_PART = 1_000


def dealt(
    topics: int, publishers: int, subscribers: int, messages: int
) -> tuple[dealing.Plan, dict[str, np.ndarray], dict[int, list[int]]]:
    """``messages`` of each publisher to each topic, to all subscribers; with the rows of each part."""
    rows = [
        (topic, publisher, number, subscriber)
        for topic in range(topics)
        for publisher in range(publishers)
        for number in range(messages)
        for subscriber in range(-1, subscribers)
    ]
    topic, publisher, number, subscriber = np.array(rows).T
    bucket = dealing.buckets(0, [f"topic/{each}" for each in range(topics)])[topic]
    came = subscriber >= 0
    others, deliveries = (np.bincount(bucket[each], minlength=dealing.BUCKETS) for each in (~came, came))
    plan = dealing.plan(others, deliveries, ROWS_PER_PART)
    message = (topic * publishers + publisher) * messages + number
    event = {
        "message_id": message,
        "stream": np.zeros(len(rows), dtype=np.int32),
        "publisher": dealing.hashed(f"publisher-{each}" for each in range(publishers))[publisher],
        "subscriber": dealing.hashed(f"subscriber-{each}" for each in range(subscribers))[subscriber],
    }
    parts: dict[int, list[int]] = defaultdict(list)
    for part, chosen in dealing.deal(plan, bucket, came, event, np.zeros(len(rows), dtype=np.bool_)):
        parts[part] += chosen.tolist()
    columns = {"stream": topic * publishers + publisher, "message": message, "subscriber": subscriber, "topic": topic}
    return plan, columns, parts


@pytest.mark.parametrize(
    ("topics", "publishers", "subscribers", "messages"),
    [(1, 1, 200, 100), (1, 200, 1, 100), (1, 60, 20, 15), (300, 2, 3, 5), (3, 40, 10, 20)],
    ids=["one to many", "many to one", "many to many", "small topics", "a few large ones"],
)
def test_each_is_judged_once_with_all_that_it_needs(topics: int, publishers: int, subscribers: int, messages: int) -> None:
    plan, columns, parts = dealt(topics, publishers, subscribers, messages)
    assert set(parts) <= set(range(plan.parts))
    assert len(parts) > 5
    counted: Counter[int] = Counter()
    places: dict[int, set[int]] = defaultdict(set)
    flows: dict[tuple[int, int], set[int]] = defaultdict(set)
    published: dict[tuple[int, int], int] = Counter()
    for part, rows in parts.items():
        share = plan.share(part)
        # Hashes are not even; the sizes they make are near to what was asked for.
        assert len(rows) < 3 * ROWS_PER_PART
        assert len(rows) == len(set(rows))
        for row in rows:
            stream, subscriber = int(columns["stream"][row]), int(columns["subscriber"][row])
            if share.messages:
                counted[row] += 1
                places[int(columns["message"][row])].add(part)
            if share.flows and subscriber >= 0:
                assert share.holds(f"subscriber-{subscriber}")
                flows[stream, subscriber].add(part)
            if share.flows and subscriber < 0:
                published[part, stream] += 1
    assert counted == Counter(range(len(columns["stream"]))), "each event is counted once"
    assert all(len(each) == 1 for each in places.values()), "with all others of its message"
    assert all(len(each) == 1 for each in flows.values()), "a flow is in one part"
    for (stream, _), (part,) in flows.items():
        assert published[part, stream] == messages, "with all that was published"


def test_what_is_small_is_one_part() -> None:
    plan, columns, parts = dealt(20, 2, 3, 4)
    assert (plan.parts, plan.splits, plan.share(0)) == (1, {}, dealing.WHOLE)
    assert sorted(parts[0]) == list(range(len(columns["topic"])))


def test_published_events_are_repeated_no_more_than_there_are_deliveries() -> None:
    for publishers, subscribers in ((1, 100), (30, 30), (100, 1), (100, 0)):
        plan, columns, parts = dealt(1, publishers, subscribers, 30)
        repeated = sum(len(rows) for part, rows in parts.items() if not plan.share(part).messages)
        others = int((columns["subscriber"] < 0).sum())
        deliveries = len(columns["topic"]) - others
        assert repeated <= 2 * deliveries + others
