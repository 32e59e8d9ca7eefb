"""Offsets of streams: where reading begins, what is lost, what a checkpoint may hold."""

from __future__ import annotations

import json

import pytest

from nearcast.errors import PipelineError
from nearcast.pipeline import offsets
from nearcast.pipeline.offsets import INITIAL, Advance, Limit, Offset, TopicState, describe, ranges_between, unpack
from nearcast.pipeline.options import Positions

A = TopicState("a", 5, 20)
B = TopicState("b", 1, 3)


def first_batch(starting: Positions, by_time: dict[str, int] | None = None) -> tuple[Offset, Advance]:
    advance = Advance(starting)
    return advance.advance(unpack(INITIAL), [A, B], Limit(), by_time), advance


def spans(start: Offset, end: Offset) -> dict[str, tuple[int, int]]:
    return {each.topic: (each.start, each.end) for each in ranges_between(start, end, {})}


def test_a_stream_begins_where_the_options_say() -> None:
    start = Offset()
    assert spans(start, first_batch(Positions("earliest"))[0]) == {"a": (5, 20), "b": (1, 3)}
    assert spans(start, first_batch(Positions("latest"))[0]) == {}
    assert spans(start, first_batch(Positions("earliest", {"a": 19, "b": "latest"}))[0]) == {"a": (19, 20)}
    assert spans(start, first_batch(Positions("latest"), {"a": 7, "b": 3})[0]) == {"a": (7, 20)}


def test_a_start_at_the_latest_is_kept_even_when_nothing_comes() -> None:
    """Otherwise what is published between this start and the next one, after a crash, would be passed over."""
    found, advance = first_batch(Positions("latest"))
    assert found.next == {"a": 20, "b": 3}
    assert advance.advance(found, [A, B], Limit()) is found


def test_a_repeated_first_batch_is_the_same_though_the_log_moved_on() -> None:
    end = unpack(json.loads(json.dumps(first_batch(Positions("earliest"))[0].pack())))
    assert spans(unpack(INITIAL), end) == {"a": (5, 20), "b": (1, 3)}


def test_topics_that_appear_later_are_read_from_their_first_record() -> None:
    found, advance = first_batch(Positions("latest"))
    following = advance.advance(found, [A, B, TopicState("c", 4, 9)], Limit())
    assert spans(found, following) == {"c": (4, 9)}
    assert following.new == {"c": 4}
    assert advance.advance(following, [A, B, TopicState("c", 4, 10)], Limit()).new == {}


def test_records_that_retention_removed_are_reported_and_passed_over() -> None:
    advance = Advance(Positions("earliest"))
    start = Offset({"a": 3, "b": 2})
    end = advance.advance(start, [A, B], Limit())
    assert [(loss.topic, loss.index, loss.first_index) for loss in advance.losses] == [("a", 3, 5)]
    assert spans(start, end) == {"a": (5, 20), "b": (2, 3)}
    assert spans(start, unpack(end.pack())) == {"a": (5, 20), "b": (2, 3)}


def test_all_unread_records_removed() -> None:
    advance = Advance(Positions("earliest"))
    start = Offset({"a": 3})
    end = advance.advance(start, [TopicState("a", 20, 20)], Limit())
    assert len(advance.losses) == 1
    assert end.next == {"a": 20}
    assert spans(start, end) == {}
    assert advance.advance(end, [TopicState("a", 20, 20)], Limit()) is end


def test_a_log_that_is_behind_the_offset_is_a_loss() -> None:
    advance = Advance(Positions("earliest"))
    end = advance.advance(Offset({"b": 9}), [B], Limit())
    assert [(loss.topic, loss.index) for loss in advance.losses] == [("b", 9)]
    assert end.next == {"b": 3}


def test_a_topic_that_is_gone_is_a_loss_and_forgotten() -> None:
    advance = Advance(Positions("earliest"))
    end = advance.advance(Offset({"a": 20, "gone": 7}), [A], Limit())
    assert [(loss.topic, loss.index) for loss in advance.losses] == [("gone", 7)]
    assert end.next == {"a": 20}


def test_a_starting_index_that_does_not_exist_is_a_loss() -> None:
    _, advance = first_batch(Positions("earliest", {"a": 2}))
    assert [(loss.topic, loss.index, loss.first_index) for loss in advance.losses] == [("a", 2, 5)]


def test_a_start_behind_the_end_is_a_mistake_and_not_a_loss() -> None:
    """Passed over as a loss it would read the topic from its first record."""
    with pytest.raises(PipelineError, match="startingOffsets: topic 'b' has no record 4: its next one gets index 3"):
        first_batch(Positions("earliest", {"b": 4}))


def test_limits_share_fairly() -> None:
    advance = Advance(Positions("earliest"))
    states = [TopicState("busy", 1, 9_001, 90_000), TopicState("quiet", 1, 1_001, 10_000)]
    start = Offset({"busy": 1, "quiet": 1})
    assert advance.advance(start, states, Limit(records=100)).next == {"busy": 91, "quiet": 11}
    assert advance.advance(start, states, Limit(bytes=1_000)).next == {"busy": 91, "quiet": 11}
    assert advance.advance(start, states, Limit(records=100, bytes=500)).next == {"busy": 46, "quiet": 6}
    assert sum((advance.advance(start, states, Limit(bytes=1)).next or {}).values()) == 3, "one record, or nothing ever moves"


def test_offsets_of_many_topics_are_packed() -> None:
    offset = Offset({f"sensors/building-{number % 40}/{number}": number + 1 for number in range(20_000)}, {"sensors/x": 4})
    packed = offset.pack()
    assert list(packed) == ["packed"]
    assert len(packed["packed"]) < len(json.dumps(dict(offset.next or {}))) / 3
    assert unpack(json.loads(json.dumps(packed))) == offset
    assert describe(json.dumps(packed)) == offset.next


@pytest.mark.parametrize(
    "stored",
    [
        {"next": 3},
        {"next": {"a": "x"}},
        {"next": {"a": 0}},
        {"next": {"a": True}},
        {"other": 1},
        {"packed": 5},
        {"packed": "!!"},
        {"packed": "AAAA"},
        {"packed": "eJwDAAAAAAE="},
        {"next": {"a": 1}, "new": [1]},
    ],
)
def test_a_checkpoint_of_something_else_gets_a_clear_line(stored: dict[str, object]) -> None:
    with pytest.raises(PipelineError, match="use a new checkpoint"):
        unpack(stored)


def test_before_the_first_batch() -> None:
    assert unpack(INITIAL) == Offset()
    assert Offset().pack() == INITIAL
    assert offsets.unpack({"next": {}}).next == {}
