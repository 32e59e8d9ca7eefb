"""The board of announced leaders."""

from __future__ import annotations

import itertools
import math
import random

import msgspec
import pytest

from nearcast.groups import leaders
from nearcast.groups.leaders import Announcement, LeaderBoard

SECRET = b"the fabric's secret"


def board(name: str, *, topic: str = "nearcast/leaders/world", secret: bytes = SECRET, epoch: int = 1) -> LeaderBoard:
    made = LeaderBoard(name, topic, secret, epoch, 0.5, random.Random(name), 0.0)
    made.address = f"{name}:1884"
    made.probe_address = f"{name}:1885"
    return made


def announcement(of: LeaderBoard, now: float, *, lcm: float = 10.0, size: int = 1, threshold_ms: float = 5.0) -> bytes:
    """What it says next."""
    of.announce_soon(now)
    said = of.tick(True, lcm, size, threshold_ms, now)
    assert said is not None
    return said


def names(of: LeaderBoard) -> list[str]:
    return [leader.name for leader in of.announced()]


def test_leaders_hear_of_each_other() -> None:
    one, other = board("one"), board("other")
    one.position = (52.5, 13.4)
    said = other.hear(announcement(one, 0.0, lcm=7.5, size=3, threshold_ms=4.0), 0.1)
    assert said == Announcement("one", 1, 1, 2.0, "one:1884", "one:1885", 7.5, 3, 4.0, (52.5, 13.4))
    assert other.announced() == [said]
    assert other.get("one") == said
    assert len(other) == 1


def test_a_leader_announces_itself_at_intervals() -> None:
    one = board("one")
    times = []
    now = 0.0
    while now < 20.0:
        if one.tick(True, 1.0, 1, 5.0, now) is not None:
            times.append(now)
        assert one.next_deadline() > now
        now = one.next_deadline()
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps) >= 0.45
    assert max(gaps) <= 0.55
    assert len(set(gaps)) > 1, "leaders that started together do not speak together"


def test_a_group_that_changes_all_the_time_is_not_announced_all_the_time() -> None:
    one = board("one")
    said = 0
    for step in range(1_000):
        now = step * 0.01
        one.announce_soon(now)
        said += one.tick(True, 1.0, step, 5.0, now) is not None
    assert 30 <= said <= 41, "twice an interval, in ten seconds"


def test_one_that_stops_leading_says_so_once() -> None:
    one, other = board("one"), board("other")
    other.hear(announcement(one, 0.0), 0.0)
    version = other.version
    end = one.tick(False, 1.0, 2, 5.0, 0.1)
    assert end is not None
    other.hear(end, 0.1)
    assert names(other) == []
    assert other.version > version
    assert one.tick(False, 1.0, 2, 5.0, 0.2) is None
    assert board("never led").tick(False, 1.0, 1, 5.0, 0.0) is None


def test_a_silent_leader_is_forgotten_in_time() -> None:
    one, other = board("one"), board("other")
    other.hear(announcement(one, 0.0), 0.0)
    other.tick(False, 1.0, 1, 5.0, 1.9)
    assert names(other) == ["one"]
    other.hear(announcement(one, 1.9), 1.9)
    other.tick(False, 1.0, 1, 5.0, other.next_deadline())
    assert names(other) == ["one"], "it has spoken since"
    version = other.version
    other.tick(False, 1.0, 1, 5.0, 3.9)
    assert names(other) == []
    assert other.version == version + 1
    assert other.next_deadline() == float("inf")


def test_coming_and_going_leaves_nothing_behind() -> None:
    one, other = board("one"), board("other")
    for turn in range(50):
        now = turn * 0.01
        other.hear(announcement(one, now), now)
        end = one.tick(False, 1.0, 1, 5.0, now)
        assert end is not None
        other.hear(end, now)
    assert len(other._expiries) == 1
    other.tick(False, 1.0, 1, 5.0, 10.0)
    assert other._expiries == []
    assert other._queued == set()


def test_the_version_rises_only_with_what_measuring_and_joining_go_by() -> None:
    one, other = board("one"), board("other")
    other.hear(announcement(one, 0.0), 0.0)
    version = other.version
    other.hear(announcement(one, 0.5, lcm=99.0, size=7), 0.5)
    assert other.version == version
    found = other.get("one")
    assert found is not None
    assert (found.lcm, found.size) == (99.0, 7)
    other.hear(announcement(one, 1.0, threshold_ms=4.0), 1.0)
    assert other.version == version + 1
    one.address = "elsewhere:1884"
    other.hear(announcement(one, 1.5, threshold_ms=4.0), 1.5)
    assert other.version == version + 2


# --- the cloud is not trusted ---------------------------------------------------------------------------------------------


def test_only_who_has_the_secret_can_announce() -> None:
    other = board("other")
    assert other.hear(announcement(board("one", secret=b"another"), 0.0), 0.0) is None
    body = msgspec.msgpack.encode(Announcement("one", 1, 1, 60.0, "evil:1884", "evil:1885", 1e9, 1, 5.0))
    for content in (b"", body, body + b"\0" * leaders.TAG_BYTES):
        assert other.hear(content, 0.0) is None
    assert names(other) == []
    assert other.ignored == 4


@pytest.mark.parametrize("position", [0, 10, -1])
def test_an_announcement_that_was_changed_does_not_count(position: int) -> None:
    content = bytearray(announcement(board("one"), 0.0))
    content[position] ^= 1
    assert board("other").hear(bytes(content), 0.0) is None


@pytest.mark.parametrize(
    "said",
    [
        Announcement("one", 1, 1, math.nan, "one:1", "", 1.0, 1, 5.0),
        Announcement("one", 1, 1, 2.0, "one:1", "", math.nan, 1, 5.0),
        Announcement("one", 1, 1, 2.0, "one:1", "", 1.0, 1, math.nan),
        Announcement("one", 1, 1, 2.0, "one:1", "", 1.0, 1, 5.0, (math.inf, 0.0)),
        Announcement("one", 1, 1, 2.0, "one:1", "", 1.0, 1, 5.0, (0.0, math.nan)),
        Announcement("one", 2**64 - 1, 1, 2.0, "one:1", "", 1.0, 1, 5.0),
        Announcement("one\n", 1, 1, 2.0, "one:1", "", 1.0, 1, 5.0),
        Announcement("", 1, 1, 2.0, "one:1", "", 1.0, 1, 5.0),
        Announcement("one" * 99, 1, 1, 2.0, "one:1", "", 1.0, 1, 5.0),
        Announcement("one", 1, 1, 2.0, "1" * 999, "", 1.0, 1, 5.0),
    ],
)
def test_an_announcement_that_no_broker_makes_does_not_count(said: Announcement) -> None:
    other = board("other")
    body = msgspec.msgpack.encode(said)
    assert other.hear(body + other._tag(body), 0.0) is None
    assert (names(other), other.ignored) == ([], 1)


def test_an_announcement_counts_on_its_own_topic_only() -> None:
    said = announcement(board("one", topic="nearcast/leaders/europe"), 0.0)
    assert board("other", topic="nearcast/leaders/asia").hear(said, 0.0) is None
    assert board("other", topic="nearcast/leaders/europe").hear(said, 0.0) is not None


def test_what_was_recorded_does_not_count_again() -> None:
    one, other = board("one"), board("other")
    first, second = announcement(one, 0.0), announcement(one, 0.5)
    assert other.hear(second, 0.5) is not None
    assert other.hear(first, 0.6) is None
    other.tick(False, 1.0, 1, 5.0, 100.0)
    assert other.hear(second, 100.0) is None
    assert names(other) == []
    assert other.hear(announcement(one, 101.0), 101.0) is not None


def test_a_restarted_leader_is_believed_and_its_earlier_life_is_not() -> None:
    other = board("other")
    former, present = board("one", epoch=4), board("one", epoch=5)
    for now in range(3):
        assert other.hear(announcement(former, now), now) is not None
    assert other.hear(announcement(present, 3.0), 3.0) is not None
    assert other.hear(announcement(former, 4.0), 4.0) is None


def test_a_broker_does_not_hear_itself() -> None:
    assert board("one").hear(announcement(board("one", epoch=2), 0.0), 0.0) is None


# --- many -----------------------------------------------------------------------------------------------------------------


def test_a_topic_carries_a_bounded_number_of_announcements() -> None:
    reader = board("reader")
    for number in range(1_000):
        reader.hear(announcement(board(f"b{number}"), 0.0), 0.0)
    assert reader.interval_s == pytest.approx(1_001 / leaders.ANNOUNCEMENTS_PER_S)
    said = msgspec.msgpack.decode(announcement(reader, 0.0)[: -leaders.TAG_BYTES], type=Announcement)
    assert said.lifetime_s == pytest.approx(3 * reader.interval_s), "it says how long its word holds"
    assert 4.5 <= reader.next_deadline() <= 5.6 or reader.next_deadline() == 2.0


def test_no_more_leaders_are_kept_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaders, "MAX_LEADERS", 2)
    monkeypatch.setattr(leaders, "MAX_REMEMBERED", 3)
    reader = board("reader")
    for number in range(5):
        reader.hear(announcement(board(f"b{number}"), 0.0), 0.0)
    assert names(reader) == ["b0", "b1"]
    assert len(reader._last) == 3


def test_a_lifetime_is_believed_within_bounds() -> None:
    one, other = board("one"), board("other")
    other.hear(one._announcement(1e300, 1.0, 1, 5.0), 0.0)
    assert other.next_deadline() == leaders.LARGEST_LIFETIME_S
