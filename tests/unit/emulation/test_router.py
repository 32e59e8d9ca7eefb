"""The router's words: commands, answers, statistics, and lines in pieces."""

from __future__ import annotations

import random
import socket

import msgspec
import numpy as np
import pytest

from nearcast.emulation.forwarding import Forwarder, Histogram
from nearcast.emulation.router import (
    Answer,
    AskStatistics,
    Command,
    Connect,
    CutOff,
    Disconnect,
    Durations,
    HealAll,
    HealCut,
    MoveEndpoint,
    RouterStatistics,
    SetAccess,
    SetLocal,
)
from nearcast.emulation.router_process import Control, obey
from nearcast.network.conditions import Conditions
from nearcast.network.network import Network


@pytest.fixture
def network() -> Network:
    made = Network(["left", "right"], None, random.Random(1))
    made.connect(0, 1, Conditions(latency_ms=5.0))
    made.join(0)
    made.join(1)
    return made


def tell(network: Network, command: Command) -> object:
    forwarder = Forwarder(network, [-1, -2], [b"aaaa", b"bbbb"], 1500, 10, 10, 0.0)
    answer = obey(msgspec.json.encode(command), forwarder, network)
    assert answer.error is None
    return answer.result


def test_commands_do_to_the_network_what_they_say(network: Network) -> None:
    tell(network, Connect(0, 1, Conditions(latency_ms=7.0)))
    assert network.one_way_ms(0, 1) == 7.0
    tell(network, Connect(1, 0, Conditions(latency_ms=9.0), one_way=True))
    assert (network.one_way_ms(0, 1), network.one_way_ms(1, 0)) == (7.0, 9.0)
    tell(network, SetAccess(1, Conditions(latency_ms=1.0)))
    assert network.one_way_ms(0, 1) == 8.0
    tell(network, MoveEndpoint(1, 0))
    tell(network, SetLocal(0, Conditions(latency_ms=0.5)))
    assert network.one_way_ms(0, 1) == 1.5
    handle = tell(network, CutOff([0], [1], one_way=True))
    assert isinstance(handle, int)
    assert (network.one_way_ms(0, 1), network.one_way_ms(1, 0)) == (float("inf"), 1.5)
    tell(network, HealCut(handle))
    assert network.one_way_ms(0, 1) == 1.5
    tell(network, CutOff([0], [1]))
    tell(network, HealAll())
    assert network.one_way_ms(0, 1) == 1.5
    tell(network, MoveEndpoint(1, 1))
    tell(network, Disconnect(0, 1))
    assert network.one_way_ms(0, 1) == float("inf")


def test_statistics_come_as_one_record(network: Network) -> None:
    result = tell(network, AskStatistics())
    assert isinstance(result, RouterStatistics)
    assert msgspec.json.decode(msgspec.json.encode(result), type=RouterStatistics) == result


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"", "truncated"),
        (b"garbage", "malformed"),
        (b'{"do":"fly"}', "fly"),
        (b'{"do":"move","endpoint":"one","site":1}', "endpoint"),
        (b'{"do":"move","endpoint":99,"site":1}', "no endpoint 99"),
        (b'{"do":"move","endpoint":0,"site":-1}', "no site -1"),
        (b'{"do":"access","endpoint":0,"conditions":{"loss":7}}', "loss"),
        (b'{"do":"cut","sources":[0],"targets":[5]}', "no endpoint 5"),
    ],
)
def test_a_command_that_makes_no_sense_is_answered_and_changes_nothing(network: Network, line: bytes, expected: str) -> None:
    forwarder = Forwarder(network, [-1, -2], [b"aaaa", b"bbbb"], 1500, 10, 10, 0.0)
    answer = obey(line, forwarder, network)
    assert answer.error is not None
    assert expected in answer.error
    assert network.one_way_ms(0, 1) == 5.0


@pytest.mark.parametrize("percent", [1, 50, 95, 99, 100])
def test_percentiles_are_within_an_eighth(percent: int) -> None:
    rng = np.random.default_rng(7)
    values_s = rng.lognormal(-8.0, 2.0, 5_000)
    histogram = Histogram()
    for value in values_s:
        histogram.add(float(value))
    durations = Durations(counts=tuple(histogram.counts), largest_ms=histogram.largest_s * 1000.0)
    truth_ms = float(np.percentile(values_s, percent)) * 1000.0
    assert truth_ms * 0.99 - 0.001 <= durations.percentile_ms(percent) <= truth_ms * 1.14 + 0.002


def test_percentiles_of_nothing_and_differences() -> None:
    histogram = Histogram()
    before = Durations(counts=tuple(histogram.counts), largest_ms=0.0)
    assert before.percentile_ms(99) == 0.0
    histogram.add(0.001)
    after = Durations(counts=tuple(histogram.counts), largest_ms=1.0)
    assert after.since(before).percentile_ms(50) == pytest.approx(1.0, rel=0.13)
    assert after.since(after).percentile_ms(50) == 0.0


def test_lines_come_in_pieces_and_the_end_is_noticed() -> None:
    ours, theirs = socket.socketpair()
    control = Control(theirs)
    control.stop_waiting()
    assert control.receive() == []
    ours.send(b"one\ntw")
    assert control.receive() == [b"one"]
    ours.send(b"o\n")
    assert control.receive() == [b"two"]
    ours.close()
    assert control.receive() is None
    theirs.close()


def test_an_answer_nobody_reads_is_kept_without_waiting() -> None:
    ours, theirs = socket.socketpair()
    control = Control(theirs)
    control.stop_waiting()
    control.answer(Answer(result="x" * 10_000_000))
    assert control.pending
    ours.setblocking(False)
    received = 0
    while control.pending:
        received += len(ours.recv(1 << 20))
        control.flush()
    while received < 10_000_000:
        received += len(ours.recv(1 << 20))
    ours.close()
    control.answer(Answer(result="nobody is there"))
    assert control.receive() is None
    theirs.close()
