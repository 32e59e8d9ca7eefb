"""The replicated state: commands in, one outcome on all replicas."""

from __future__ import annotations

import random

from nearcast.chord import messages
from nearcast.chord.commands import (
    Apply,
    Begin,
    Change,
    Enter,
    Found,
    Meet,
    Quit,
    Receive,
    Removed,
    Repaid,
    Retire,
    Split,
    TakeOver,
)
from nearcast.chord.contacts import Contact
from nearcast.chord.identifiers import distance, identifier, packed, within
from nearcast.chord.messages import Copy, Write
from nearcast.chord.records import Interval, Item, Record, cut
from nearcast.chord.snapshots import pack, unpack
from nearcast.chord.state import IN, LEAVING, OUT, TAIL, ReplicatedState


def contact(name: str) -> Contact:
    return Contact(name, (name,))


def founded(name: str = "a") -> ReplicatedState:
    state = ReplicatedState(name)
    assert state.apply(Found(contact(name), 1)).done
    return state


def write(state: ReplicatedState, record: Record, condition: int = messages.ANY, expected: int = 0, **more: object) -> int:
    return state.apply(Change(Write(record, condition, expected, **more))).outcome  # type: ignore[arg-type]


def topics_of(state: ReplicatedState) -> set[str]:
    return {record.topic for _, record in state.share.items()}


def test_the_first_set_has_the_whole_circle() -> None:
    state = founded()
    assert state.is_alone
    assert all(state.owns(identifier(f"t/{number}")) for number in range(50))
    assert not state.apply(Found(contact("a"), 2)).done


def test_compare_and_set_by_version() -> None:
    state = founded()
    assert write(state, Record("t", "x"), messages.VERSION, 5) == messages.CONFLICT
    assert write(state, Record("t", "x"), messages.VERSION, 0) == messages.DONE
    held = state.share.get(identifier("t"))
    assert held is not None
    assert write(state, Record("t", "y"), messages.VERSION, 0) == messages.CONFLICT
    assert write(state, Record("t", "y"), messages.VERSION, held.version) == messages.DONE
    assert write(state, Record("t", "z"), messages.VERSION, held.version) == messages.CONFLICT


def test_compare_and_set_by_epoch_takes_only_a_higher_one() -> None:
    state = founded()
    assert write(state, Record("t", "x", epoch=10), messages.EPOCH, 0) == messages.DONE
    assert write(state, Record("t", "y", epoch=10), messages.EPOCH, 10) == messages.CONFLICT
    assert write(state, Record("t", "y", epoch=11), messages.EPOCH, 9) == messages.CONFLICT
    assert write(state, Record("t", "y", epoch=11), messages.EPOCH, 10) == messages.DONE
    assert write(state, Record("t", "z", epoch=11), messages.NEWER) == messages.CONFLICT
    assert write(state, Record("t", "z", epoch=12), messages.NEWER) == messages.DONE


def test_a_version_never_comes_again() -> None:
    """Also not for a topic that was removed and made anew."""
    state = founded()
    seen = []
    for _ in range(5):
        assert write(state, Record("t", "x"), stamp=100) == messages.DONE
        held = state.share.get(identifier("t"))
        assert held is not None
        seen.append(held.version)
        assert write(state, Record("t"), messages.VERSION, held.version, remove=True) == messages.DONE
        assert state.share.get(identifier("t")) is None
    assert seen == sorted(set(seen))
    assert seen[0] == 100


def test_a_request_that_comes_twice_is_done_once() -> None:
    state = founded()
    mine = Record("t", "x", writer="w 1")
    assert write(state, mine, messages.VERSION, 0) == messages.DONE
    version = state.version
    assert write(state, mine, messages.VERSION, 0) == messages.DONE
    assert state.version == version


def test_a_split_gives_the_lower_part_away_at_once() -> None:
    state = founded("a")
    for number in range(100):
        write(state, Record(f"t/{number}"))
    assert state.apply(Split(contact("b"), 7)).done
    assert state.apply(Split(contact("b"), 7)).done, "asked twice"
    assert not state.apply(Split(contact("c"), 7)).done, "one at a time"
    high = identifier("b")
    for number in range(100):
        key = identifier(f"t/{number}")
        mine = within(key, high, state.place)
        assert state.owns(key) == mine
        assert (state.share.get(key) is not None) == mine
        assert (state.shadows["b"].share.get(key) is not None) == (not mine)


def test_taking_over_with_the_copy_loses_nothing() -> None:
    state = founded("a")
    for number in range(100):
        write(state, Record(f"t/{number}"))
    before = topics_of(state)
    state.apply(Split(contact("b"), 7))
    assert not state.apply(TakeOver("b", 6, packed(0), ())).done, "of another life"
    assert state.apply(TakeOver("b", 7, packed(0), ())).done
    assert state.is_alone
    assert topics_of(state) == before
    assert not state.lost


def joined() -> tuple[ReplicatedState, ReplicatedState]:
    """``a``, and ``b`` that joined before it with a topic each."""
    a, b = founded("a"), ReplicatedState("b")
    for number in range(20):
        write(a, Record(f"t/{number}"))
    a.apply(Split(contact("b"), 7))
    aside = a.shadows["b"]
    b.apply(Begin(contact("b"), 7, (contact("a"),)))
    b.apply(Receive(True, tuple(Item(packed(key), record) for key, record in aside.share.items())))
    low, chain = packed(aside.low), aside.predecessors
    b.apply(Enter(low, chain, aside.have, aside.version, (), -1, 0, packed(0), (), 0, ()))
    a.apply(Meet(contact("b"), 7, (contact("a"),)))
    return a, b


def copy_of(state: ReplicatedState, after: int, items: tuple[Item, ...] = (), swept: Interval | None = None) -> Copy:
    return Copy(
        state.name, state.life, after, state.sequence, items, swept, packed(state.low), state.predecessors, state.version, ()
    )


def test_a_copy_follows_change_by_change() -> None:
    a, b = joined()
    topic = next(topic for topic in (f"u/{number}" for number in range(100)) if b.owns(identifier(topic)))
    before = b.sequence
    write(b, Record(topic))
    changes = b.changes_after(before)
    assert changes is not None
    items = tuple(Item(packed(key), record) for _, key, record in changes)
    assert not a.apply(Apply(copy_of(b, before + 1, items))).done, "something is missing in between"
    assert a.apply(Apply(copy_of(b, before, items))).done
    assert a.shadows["b"].have == b.sequence
    a.apply(TakeOver("b", 7, packed(0), ()))
    assert not a.apply(Apply(copy_of(b, before, items))).done, "nothing is taken of one that was taken over"
    assert topic in topics_of(a)


def test_without_a_copy_the_range_is_lost_and_nobody_says_what_was_in_it() -> None:
    a, b = joined()
    a.shadows.clear()
    assert a.apply(TakeOver("b", 7, packed(b.low), ())).done
    key = next(key for key, _ in b.share.items())
    record = b.share.get(key)
    assert record is not None
    assert write(a, other_owner(record), messages.VERSION, 0) == messages.UNCERTAIN
    assert write(a, record, messages.RESTORE, source="b 6") == messages.UNCERTAIN
    assert write(a, record, messages.RESTORE, source="b 7") == messages.DONE
    assert a.share.get(key) == record
    assert write(a, record, messages.RESTORE, source="b 7") == messages.CONFLICT, "it is known now"


def test_who_gave_everything_back_says_so_but_for_what_it_did_not_know() -> None:
    a, b = joined()
    a.shadows.clear()
    a.apply(TakeOver("b", 7, packed(b.low), ()))
    absent = [topic for topic in (f"none/{number}" for number in range(200)) if within(identifier(topic), b.low, b.place)]
    assert write(a, Record(absent[0]), messages.VERSION, 0) == messages.UNCERTAIN
    unknown = identifier(absent[1])
    rest = (Interval(packed(unknown - 1), packed(unknown), "c 3"),)
    before = a.sequence
    assert a.apply(Repaid("somebody 1", ())).done
    assert a.sequence == before, "none of its business"
    assert a.apply(Repaid("b 7", rest)).done
    assert a.lost == rest
    assert a.sequence > before, "the successor has to know"
    assert write(a, Record(absent[0]), messages.VERSION, 0) == messages.DONE
    assert write(a, Record(absent[1]), messages.VERSION, 0) == messages.UNCERTAIN
    assert write(a, Record(absent[1]), messages.RESTORE, source="c 3") == messages.DONE


def other_owner(record: Record) -> Record:
    return Record(record.topic, "other")


def test_who_is_removed_keeps_what_it_had_for_its_heirs() -> None:
    _, b = joined()
    mine = dict(b.share.items())
    b.apply(Removed(keep=True))
    assert b.phase == OUT
    assert {key: record for key, (source, record) in b.estate.items() if source == "b 7"} == mine
    debt, rest = b.debts["b 7"]
    assert (debt.low, debt.high, rest) == (packed(identifier("a")), packed(b.place), ())
    assert unpack(pack(b)).debts == b.debts
    b.apply(Quit("b 7"))
    assert not b.debts


def test_one_that_leaves_answers_for_nothing() -> None:
    a, b = joined()
    assert b.apply(Retire()).done
    assert b.phase == LEAVING
    assert not any(b.owns(key) for key, _ in b.share.items())
    assert not founded().apply(Retire()).done, "the last one stays"
    assert a.phase == IN


def test_all_replicas_come_to_the_same_state() -> None:
    rng = random.Random(3)
    one, other = founded(), founded()
    for number in range(400):
        record = Record(f"t/{rng.randrange(30)}", f"o{number}", epoch=number + 1)
        command = Change(Write(record, rng.randrange(4), rng.randrange(50), rng.random() < 0.2, number))
        assert one.apply(command) == other.apply(command)
    one.apply(Split(contact("b"), 7))
    other.apply(Split(contact("b"), 7))
    assert pack(one) == pack(other)


def test_a_snapshot_is_the_state() -> None:
    a, b = joined()
    for state in (a, b, founded()):
        again = unpack(pack(state))
        assert pack(again) == pack(state)
        assert topics_of(again) == topics_of(state)
        assert (again.phase, again.low, again.predecessors) == (state.phase, state.low, state.predecessors)
        assert again.changes_after(again.sequence - 1) == state.changes_after(state.sequence - 1)


def test_only_the_last_changes_are_kept() -> None:
    state = founded()
    for number in range(TAIL + 10):
        write(state, Record(f"t/{number}"))
    assert state.changes_after(0) is None
    changes = state.changes_after(state.sequence - 5)
    assert changes is not None
    assert [sequence for sequence, _, _ in changes] == list(range(state.sequence - 4, state.sequence + 1))
    assert state.changes_after(state.sequence + 1) is None


def test_cutting_intervals() -> None:
    def interval(low: int, high: int) -> Interval:
        return Interval(packed(low), packed(high), "s 1")

    assert cut((interval(10, 20),), 15, 30) == (interval(15, 20),)
    assert cut((interval(10, 20),), 5, 15) == (interval(10, 15),)
    assert cut((interval(10, 20),), 12, 15) == (interval(12, 15),)
    assert cut((interval(10, 20),), 20, 30) == ()
    assert cut((interval(10, 20),), 30, 10) == ()
    assert cut((interval(10, 20),), 3, 3) == (interval(10, 20),)
    assert distance(10, 20) == 10
