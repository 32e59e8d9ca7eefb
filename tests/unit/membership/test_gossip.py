"""Gossip: joining, forgetting, what is believed of whom, and what a restart keeps."""

from __future__ import annotations

import hmac
import random

import numpy as np
import pytest

from nearcast.coordinates import topologies
from nearcast.coordinates.coordinate import Coordinate
from nearcast.experiments.coordinates import Liar
from nearcast.experiments.coordinates_model import accuracy
from nearcast.membership import gossip_packets
from nearcast.membership.gossip import Gossip, GossipSettings
from nearcast.membership.gossip_packets import ANSWER, MAX_PACKET_BYTES, PROBE, Heard, Packet
from nearcast.membership.packets import monitoring_key
from nearcast.simulation.agents import Agents, Noise

SECRET = b"secret"
KEY = monitoring_key(SECRET)


def node(name: str, life: int = 1) -> Gossip:
    return Gossip(name, f"{name}:1", SECRET, GossipSettings(), random.Random(name), 0.0, life=life)


def deliver(*nodes: Gossip, now: float, seconds: float = 0.01) -> None:
    """All that is on its way arrives, each datagram after so long."""
    by_address = {gossip.address: gossip for gossip in nodes}
    for _ in range(4):
        for gossip in nodes:
            for address, data in gossip.take_outgoing():
                target = by_address.get(address)
                if target is not None:
                    target.handle(data, gossip.address, now + seconds)
        now += seconds


def packet(name: str, kind: int = PROBE, *, identifier: int = 1, number: int = 1, members: tuple[Heard, ...] = ()) -> Packet:
    where = Coordinate([1.0] * 8, 2.0, 0.5, 0.25)
    return Packet(
        kind=kind,
        identifier=identifier,
        life=1,
        number=number,
        coordinate=where,
        name=name,
        address=f"{name}:1",
        members=members,
    )


def test_a_packet_is_read_as_it_was_written() -> None:
    sent = packet("berlin", members=(Heard("wien", "10.0.0.1:1", 7), Heard("ü", "[::1]:9", 8)))
    read = gossip_packets.unpack(gossip_packets.pack(sent, KEY), KEY)
    assert read is not None
    assert (read.name, read.address, read.members) == (sent.name, sent.address, sent.members)
    assert read.coordinate.vector == sent.coordinate.vector


def test_no_packet_is_larger_than_a_path_takes() -> None:
    crowd = tuple(Heard("n" * 250, "a" * 250, number) for number in range(50))
    assert len(gossip_packets.pack(packet("n" * 250, members=crowd), KEY)) <= MAX_PACKET_BYTES


def test_what_is_cut_or_changed_is_nothing() -> None:
    data = gossip_packets.pack(packet("berlin", members=(Heard("wien", "w:1", 7),)), KEY)
    for length in range(len(data)):
        assert gossip_packets.unpack(data[:length], KEY) is None
    for at in range(len(data)):
        assert gossip_packets.unpack(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], KEY) is None
    assert gossip_packets.unpack(data, monitoring_key(b"another")) is None


def test_bytes_behind_a_right_tag_may_still_be_nothing() -> None:
    rng = random.Random(5)
    for _ in range(500):
        body = bytes([rng.choice((7, 8))]) + rng.randbytes(rng.randrange(120))
        tagged = body + hmac.digest(KEY, body, "sha256")[:16]
        gossip_packets.unpack(tagged, KEY)  # raises nothing


def test_two_nodes_find_how_far_they_are_apart() -> None:
    agents = Agents(topologies.star(2, 40.0), seed=1)
    agents.run(60.0)
    first, second = agents.gossips
    there = first.coordinate_of(second.name)
    assert there is not None
    assert first.coordinate.distance_ms(there) == pytest.approx(40.0, rel=0.02)
    assert [member.name for member in second.members()] == [first.name]


def test_what_is_not_gossip_is_left_to_others() -> None:
    assert not node("a").handle(b"\x03\x00\x00\x00\x01", "x:1", 0.0)


def test_a_probe_counts_once_and_an_answer_only_when_asked_for() -> None:
    here = node("a")
    probe = gossip_packets.pack(packet("b"), KEY)
    here.handle(probe, "b:1", 0.0)
    heard = here.members()[0].heard_at
    here.handle(probe, "elsewhere:1", 5.0)
    assert here.members()[0].heard_at == heard
    here.handle(gossip_packets.pack(packet("c", ANSWER, identifier=99), KEY), "c:1", 5.0)
    assert here.ignored == 2
    assert here.coordinate_of("c") is None
    assert here.vivaldi.samples == 0


def test_answers_are_limited() -> None:
    here = node("a")
    for number in range(1, 1_001):
        here.handle(gossip_packets.pack(packet("b", number=number), KEY), "b:1", 0.0)
    assert len(here.take_outgoing()) <= GossipSettings().answers_per_second


def test_the_dead_are_forgotten_unless_somebody_knows_better() -> None:
    here = node("a")
    here.handle(gossip_packets.pack(packet("gossiped"), KEY), "gossiped:1", 0.0)
    here.know("told", "told:1", 0.0)
    for step in range(400):
        here.tick(step * 0.5)
    assert "gossiped" not in here._members
    assert "told" in here._members
    here.forget("told")
    assert not here._members


def test_hearsay_moves_nobody_that_answers() -> None:
    here, there = node("a"), node("b")
    here.know("b", "b:1", 0.0)
    here.tick(0.0)
    deliver(here, there, now=0.0)
    here._listen((Heard("b", "liar:1", 10**9), Heard("a", "liar:1", 10**9), Heard("", "liar:1", 1)), 1.0)
    assert [member.address for member in here.members()] == ["b:1"]
    assert set(here._members) == {"b"}


def test_the_members_are_bounded() -> None:
    here = Gossip("a", "a:1", SECRET, GossipSettings(max_members=10), random.Random(1), 0.0)
    here._listen(tuple(Heard(f"n{number}", "x:1", 1) for number in range(100)), 0.0)
    assert len(here._members) == 10


def test_a_restart_keeps_the_place_and_whom_to_ask() -> None:
    here, there = node("a"), node("b")
    here.know("b", "b:1", 0.0)
    for step in range(50):
        here.tick(step)
        there.tick(step)
        deliver(here, there, now=float(step))
    again = node("a", life=2)
    assert again.restore(here.save())
    assert again.coordinate.vector == here.coordinate.vector
    again.tick(0.0)
    assert [address for address, _ in again.take_outgoing()] == ["b:1"]


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff" * 10, b'{"format":1,"vector":[1],"height":1,"adjustment":0,"error":1}'])
def test_what_cannot_be_restored_changes_nothing(data: bytes) -> None:
    here = node("a")
    before = here.coordinate
    assert not here.restore(data)
    assert here.coordinate is before


def test_all_find_all_from_one_address_each_whatever_is_lost() -> None:
    agents = Agents(topologies.star(20, 30.0), seed=3, noise=Noise(jitter=0.1, loss=0.1))
    agents.run(60.0)
    assert {len(gossip.members()) for gossip in agents.gossips} == {19}


def test_one_infected_node_does_not_spoil_the_others() -> None:
    rtt_ms = topologies.internet(24, np.random.default_rng(2))
    honest = np.delete(np.delete(rtt_ms, 5, 0), 5, 1)
    found = []
    for infected in ({}, {5: Liar(1)}):
        agents = Agents(rtt_ms, seed=1, infected=infected)
        agents.run(90.0)
        coordinates = agents.coordinates
        found.append(accuracy(coordinates[:5] + coordinates[6:], honest).median_error)
    assert found[1] <= found[0] * 1.1 + 0.002


def cut(agents: Agents, left: range, right: range, seconds: float) -> None:
    """No datagram passes between the two for so long."""
    paths = agents.rtt_ms.copy()
    agents.rtt_ms[np.ix_(left, right)] = np.nan
    agents.rtt_ms[np.ix_(right, left)] = np.nan
    agents.run(agents.now + seconds)
    agents.rtt_ms[:] = paths


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("nodes", [2, 16])
def test_halves_find_each_other_again_after_hours_apart(nodes: int, seed: int) -> None:
    agents = Agents(topologies.star(nodes, 30.0), seed=seed)
    agents.run(60.0)
    cut(agents, range(nodes // 2), range(nodes // 2, nodes), 7_200.0)
    assert {len(gossip.members()) for gossip in agents.gossips} == {nodes // 2 - 1}
    agents.run(agents.now + 120.0)
    assert {len(gossip.members()) for gossip in agents.gossips} == {nodes - 1}


def test_a_seed_is_a_seed_again_once_its_node_is_forgotten() -> None:
    here, there = node("a"), node("b")
    here.know("", "b:1", 0.0)
    here.tick(0.0)
    deliver(here, there, now=0.0)
    assert [member.name for member in here.members()] == ["b"]
    here.know("", "b:1", 1.0)
    assert not here._seeds  # its node is known
    here.forget("b")
    here.tick(10.0)
    assert [address for address, _ in here.take_outgoing()] == ["b:1"]


def test_the_lost_cost_few_probes_however_many_they_are() -> None:
    here, there = node("a"), node("b")
    here.know("b", "b:1", 0.0)
    here._listen(tuple(Heard(f"n{number}", f"n{number}:1", 1) for number in range(100)), 0.0)
    asked = {"b:1": 0, "others": 0}
    for step in range(6_000):
        here.tick(float(step))
        for address, data in here.take_outgoing():
            if step >= 1_000:
                asked["b:1" if address == "b:1" else "others"] += 1
            if address == "b:1":
                there.handle(data, "a:1", step + 0.01)
        for address, data in there.take_outgoing():
            assert address == "a:1"
            here.handle(data, "b:1", step + 0.02)
    assert len(here._lost) == 100
    assert 0.01 < asked["others"] / asked["b:1"] < 0.04
    here.tick(1e6)
    assert not here._lost  # not for ever


def test_whoever_repeats_probes_uses_up_no_answers() -> None:
    here = node("a")
    probe = gossip_packets.pack(packet("b"), KEY)
    for _ in range(1_000):
        here.handle(probe, "elsewhere:1", 0.0)
    assert [address for address, _ in here.take_outgoing()] == ["elsewhere:1"]
    here.handle(gossip_packets.pack(packet("c"), KEY), "c:1", 0.0)
    assert [address for address, _ in here.take_outgoing()] == ["c:1"]


def test_a_probe_that_was_overtaken_is_answered_once() -> None:
    here = node("a")
    for number in (100, 98, 99, 98, 100, 20):
        here.handle(gossip_packets.pack(packet("b", number=number), KEY), "b:1", 0.0)
    assert len(here.take_outgoing()) == 3  # 20 is too old to tell whether it came before


def test_what_the_dead_said_does_not_bring_them_back() -> None:
    here = node("a")
    probe = gossip_packets.pack(packet("b"), KEY)
    here.handle(probe, "b:1", 0.0)
    for step in range(40):
        here.tick(float(step))
    assert "b" not in here._members
    here.handle(probe, "b:1", 40.0)
    assert "b" not in here._members
    here.handle(gossip_packets.pack(packet("b", number=2), KEY), "b:1", 41.0)
    assert "b" in here._members


def test_a_clock_that_was_put_back_is_believed_by_an_answer() -> None:
    here, there = node("a"), node("b", life=9)
    here.know("b", "b:1", 0.0)
    here.tick(0.0)
    deliver(here, there, now=0.0)
    again = node("b", life=3)
    here.tick(2.0)
    deliver(here, again, now=2.0)
    assert here._members["b"].life == 3


def test_pairs_that_cannot_reach_each_other_are_placed_by_others() -> None:
    rtt_ms = topologies.scattered(16, 80.0, 4.0, np.random.default_rng(4))
    known = rtt_ms.copy()
    known[2, 9] = known[9, 2] = np.nan
    agents = Agents(known, seed=1)
    agents.run(120.0)
    estimate = agents.coordinates[2].distance_ms(agents.coordinates[9])
    assert estimate == pytest.approx(rtt_ms[2, 9], rel=0.35)
