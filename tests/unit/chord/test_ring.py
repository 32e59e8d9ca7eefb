"""Sets on a ring: joining, leaving, leases, lost neighbours, partitions, and whoever means no good."""

from __future__ import annotations

import random

import pytest

from nearcast.chord.contacts import Contact
from nearcast.chord.fingers import MAX_REMEMBERED
from nearcast.chord.identifiers import identifier, packed
from nearcast.chord.messages import (
    DONE,
    EPOCH,
    MAX_CONTACTS,
    UNCERTAIN,
    VERSION,
    AnyBody,
    Beat,
    Copy,
    Fetch,
    Find,
    Get,
    Hints,
    Join,
    Message,
    Round,
    Route,
    Vouch,
    Write,
    decode,
    encode,
)
from nearcast.chord.records import Record
from nearcast.chord.settings import RingSettings
from nearcast.chord.state import IN, OUT, ReplicatedState
from nearcast.errors import ConfigError, RemoteProtocolError
from tests.chord_harness import Ring

NAMES = tuple(f"s{number}" for number in range(6))


def filled(*names: str, topics: int = 40, **more: object) -> Ring:
    ring = Ring(**more)  # type: ignore[arg-type]
    ring.grow(*(names or NAMES))
    for number in range(topics):
        assert ring.ask(Write(Record(f"t/{number}", "x", epoch=1), EPOCH)).outcome == DONE
    return ring


def has_all(ring: Ring, topics: int = 40) -> bool:
    return all(ring.ask(Get(f"t/{number}")).record is not None for number in range(topics))


def test_a_ring_of_one_answers_for_everything() -> None:
    ring = filled("only")
    assert ring.owners("t/3") == ["only"]
    assert has_all(ring)


def test_each_topic_is_where_it_belongs() -> None:
    ring = filled()
    for number in range(40):
        assert ring.owners(f"t/{number}") == [ring.owner(f"t/{number}")]
    assert sum(len(node.state.share) for node in ring.leading()) == 40


def test_records_move_with_a_set_that_joins() -> None:
    ring = filled("a", "b", topics=100)
    ring.grow("c", "d")
    assert has_all(ring, 100)
    for number in range(100):
        key = identifier(f"t/{number}")
        holders = [node.contact.name for node in ring.leading() if node.state.share.get(key) is not None]
        assert holders == [ring.owner(f"t/{number}")]


def test_more_records_than_one_message_takes_move_too() -> None:
    ring = Ring()
    ring.grow("a")
    long = "x" * 3_000
    for number in range(300):
        assert ring.ask(Write(Record(f"t/{number}/{long}", "x"))).outcome == DONE
    ring.grow("b", "c")
    assert sum(len(node.state.share) for node in ring.leading()) == 300
    copies = sum(len(shadow.share) for node in ring.leading() for shadow in node.state.shadows.values() if shadow.have >= 0)
    assert copies >= 300


def test_leaving_in_order_takes_no_lease_time() -> None:
    ring = filled()
    node = ring.nodes["s3"]
    ring.do(node, node.leave(ring.now))
    ring.gone.add("s3")
    took_s = ring.until(ring.is_whole)
    assert took_s < ring.settings.lease_s
    assert node.state.phase == OUT
    assert not node.state.estate
    assert has_all(ring)


def test_the_last_set_does_not_leave() -> None:
    ring = filled("only", topics=1)
    ring.do(ring.nodes["only"], ring.nodes["only"].leave(0.0))
    ring.run(3.0)
    assert ring.nodes["only"].state.phase == IN


@pytest.mark.parametrize("count", [2, 3, 6])
def test_when_all_leave_at_once_one_stays_with_everything(count: int) -> None:
    names = NAMES[:count]
    ring = filled(*names, topics=20)
    for name in names:
        ring.do(ring.nodes[name], ring.nodes[name].leave(ring.now))
    ring.until(lambda: sum(ring.nodes[name].state.phase != OUT for name in names) == 1)
    (last,) = [ring.nodes[name] for name in names if ring.nodes[name].state.phase != OUT]
    ring.until(lambda: last.state.is_alone and last.has_lease(ring.now))
    assert len(last.state.share) == 20
    assert has_all(ring, 20)


def test_a_ring_without_leases_closes_though_a_set_that_is_named_in_a_log_is_none_of_it() -> None:
    """A set comes back with empty disks while nobody has a lease: no round comes around, and nobody could take it over."""
    ring = filled()
    wiped = ring.owner("t/1")
    ring.nodes[wiped].restore(ReplicatedState(wiped, ring.nodes[wiped].state.chain))
    for broker in list(ring.leaders.values()):
        ring.lead(broker)
    assert not any(node.has_lease(ring.now) for node in ring.leading())
    ring.until(ring.is_whole)
    assert has_all(ring), "its successor had a copy"


def test_a_set_that_was_away_too_long_is_told_and_joins_again() -> None:
    ring = filled()
    away = ring.owner("t/1")
    ring.loses = lambda sender, receiver: away in (sender, receiver)
    ring.run(20.0)
    assert not ring.nodes[away].has_lease(ring.now)
    assert len(ring.owners("t/1")) == 1
    ring.loses = lambda sender, receiver: False
    ring.until(ring.is_whole)
    assert ring.owner("t/1") == away
    assert has_all(ring)


@pytest.mark.parametrize("seed", range(4))
def test_a_lost_neighbourhood_of_two_is_uncertain_until_it_is_back(seed: int) -> None:
    """A set and its successor lost together: nobody claims that their topics do not exist, and they come back with them."""
    ring = filled(*(f"s{number}" for number in range(10)), seed=seed)
    ring.run(5.0)
    nodes = ring.leading()
    gone = [node.contact.name for node in nodes[2:4]]
    topics = [f"t/{number}" for number in range(40) if ring.owner(f"t/{number}") in gone]
    ring.kill(*gone)
    leaders = {name: ring.leaders.pop(name) for name in gone}
    ring.until(ring.is_whole)
    outcomes = {topic: ring.ask(Get(topic)) for topic in topics}
    for answer in outcomes.values():
        assert answer.outcome == UNCERTAIN if answer.record is None else answer.outcome == DONE
    # The copy of one of them was at the other one, which is gone too.
    assert any(answer.outcome == UNCERTAIN for answer in outcomes.values()) or not topics
    ring.down.clear()
    for leader in leaders.values():
        ring.lead(leader)
    ring.until(ring.is_whole)
    ring.until(lambda: not any(node.state.estate for node in ring.nodes.values()))
    assert has_all(ring)
    # And then they say that this was all: of topics that never were, everybody knows that again.
    ring.until(lambda: not any(node.state.debts or node.state.lost for node in ring.leading()))
    assert has_all(ring)
    for number in range(40, 60):
        assert ring.ask(Get(f"t/{number}")).outcome == DONE


def test_nobody_has_a_lease_after_a_power_cut_and_a_round_finds_one() -> None:
    ring = filled()
    takeovers = sum(node.takeovers for node in ring.leading())
    for broker in list(ring.leaders.values()):
        ring.lead(broker)  # a new process: nobody knows of any lease
    assert not any(node.has_lease(ring.now) for node in ring.leading())
    took_s = ring.until(ring.is_whole)
    assert took_s < 3 * ring.settings.takeover_s
    assert sum(node.takeovers for node in ring.leading()) == takeovers
    assert has_all(ring)


def test_two_parts_of_a_ring_never_answer_both_and_become_one_again() -> None:
    ring = filled(*(f"s{number}" for number in range(10)))
    part = {f"s{number}" for number in range(4)}
    ring.loses = lambda sender, receiver: "client" not in (sender, receiver) and (sender in part) != (receiver in part)
    for _ in range(120):
        ring.run(0.5)
        for number in range(40):
            assert len(ring.owners(f"t/{number}")) <= 1
    ring.loses = lambda sender, receiver: False
    ring.until(ring.is_whole)
    ring.until(lambda: not any(node.state.estate for node in ring.nodes.values()))
    assert has_all(ring)


def test_with_abandoning_half_of_all_sets_can_die_for_good() -> None:
    ring = Ring(RingSettings(abandon_s=30.0))
    ring.grow(*(f"s{number}" for number in range(16)))
    ring.run(10.0)
    for name in random.Random(5).sample(sorted(ring.sets), 8):
        ring.kill(name)
        del ring.leaders[name]
    ring.until(ring.is_whole, limit_s=600.0)
    assert len(ring.leading()) == 8


def test_losses_only_delay() -> None:
    ring = Ring(seed=7)
    rng = random.Random(7)
    ring.loses = lambda sender, receiver: rng.random() < 0.1
    ring.grow(*NAMES)
    seen = 0
    for number in range(30):
        answer = ring.ask(Write(Record("t", f"o{number}", writer=f"w {number}"), VERSION, seen))
        assert answer.outcome == DONE
        assert answer.record is not None
        assert answer.record.version > seen
        seen = answer.record.version


def test_a_broken_link_is_not_waited_for() -> None:
    ring = Ring()
    ring.grow("a", "b", replicas=3)
    ring.ask(Get("t"))
    owner = ring.owner("t")
    ring.down.add(ring.leaders[owner])
    ring.lead(f"{owner}.1")
    number = ring.client.get("t", ring.now)
    ring.client.unreachable(f"{owner}.0", ring.now)
    took_s = ring.until(lambda: number in ring.finished)
    assert took_s < 0.3


# --- hostile and confused peers -------------------------------------------------------------------------------------------


def test_hostile_messages_change_nothing_and_nothing_grows() -> None:
    ring = filled("a", "b", "c", topics=10)
    node = ring.nodes["a"]
    rng = random.Random(2)
    before = (node.state.low, node.state.predecessors, node.state.successors, len(node.state.share))
    entries = ring.log["a"]
    for number in range(3_000):
        name = f"evil-{rng.randrange(10**9)}"
        evil = Contact(name, (name,))
        key = packed(rng.getrandbits(160))
        bodies: list[AnyBody] = [
            Beat(evil, rng.randrange(9), 3, (evil,)),
            Copy(name, 1, -1, 5, (), None, key, (evil,), 1, ()),
            Copy("b", 1, -1, 5, (), None, key, (evil,), 1, ()),
            Fetch(name, 1, "b", key),
            Round(name, number, "b", 1),
            Find(key),
            Hints((evil,) * MAX_CONTACTS),
        ]
        body = rng.choice(bodies)
        ring.do(node, node.receive("mallory", Message("a", number, body), ring.now))
        for answer in (Vouch(True, True, 5, True, evil, (evil,)), Route(True, (evil,))):
            ring.do(node, node.receive("mallory", Message("", rng.getrandbits(48), answer), ring.now))
    assert (node.state.low, node.state.predecessors, node.state.successors, len(node.state.share)) == before
    assert len(node.fingers.remembered()) <= MAX_REMEMBERED
    assert len(node.state.shadows) <= 2
    assert ring.log["a"] - entries <= 3_000
    ring.until(ring.is_whole)
    assert has_all(ring, 10)


def test_random_bodies_never_break_a_node() -> None:
    ring = filled("a", "b", "c", topics=10)
    rng = random.Random(4)
    seeds = [
        Message("a", 1, Beat(Contact("b", ("b",)), 1, 1, ())),
        Message("a", 2, Join(Contact("z", ("z",)), 5)),
        Message("a", 3, Write(Record("t", "x"))),
        Message("a", 4, Copy("b", 1, 0, 1, (), None, packed(4), (), 1, ())),
        Message("", 5, Route(True, ())),
    ]
    for _ in range(5_000):
        data = bytearray(encode(rng.choice(seeds)))
        for _ in range(rng.randint(0, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            message = decode(bytes(data))
        except RemoteProtocolError:
            continue
        ring.do(ring.nodes["a"], ring.nodes["a"].receive("mallory", message, ring.now))
    ring.run(30.0)
    ring.until(ring.is_whole)


@pytest.mark.parametrize("wrong", [{"lease_s": 1.0}, {"successors": 0}, {"beat_s": 0.0}, {"abandon_s": -1.0}])
def test_settings_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RingSettings(**wrong)  # type: ignore[arg-type]
