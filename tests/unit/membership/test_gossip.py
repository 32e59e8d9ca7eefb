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
    assert here.ignored == 1
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
    assert found[1] <= found[0] * 1.3 + 0.01


def test_pairs_that_cannot_reach_each_other_are_placed_by_others() -> None:
    rtt_ms = topologies.scattered(16, 80.0, 4.0, np.random.default_rng(4))
    known = rtt_ms.copy()
    known[2, 9] = known[9, 2] = np.nan
    agents = Agents(known, seed=1)
    agents.run(120.0)
    estimate = agents.coordinates[2].distance_ms(agents.coordinates[9])
    assert estimate == pytest.approx(rtt_ms[2, 9], rel=0.35)
