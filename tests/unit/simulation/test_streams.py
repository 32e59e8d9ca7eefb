"""Streams behave like TCP: what arrives, in which order, and how each kind of end looks from the other side."""

from __future__ import annotations

import random

import pytest

from nearcast.errors import LocalProtocolError
from nearcast.network.conditions import Conditions
from nearcast.simulation import Stream, World
from nearcast.simulation.segments import HEADER_BYTES
from nearcast.simulation.streams import (
    CONNECT_TIMEOUT_S,
    HIGH_WATER_BYTES,
    MAX_BUFFER_BYTES,
    RECEIVE_BUFFER_BYTES,
)
from tests.unit.simulation.worlds import PORT, Recorder, connected, make_world, recorder, run_until

WORST = Conditions(
    latency_ms=20.0,
    jitter_ms=15.0,
    jitter="uniform",
    loss=0.15,
    reorder=0.2,
    duplicate=0.1,
    bandwidth_mbps=20.0,
    queue_ms=50.0,
)


def pattern(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


class TestOpening:
    def test_takes_one_round_trip_here_and_one_and_a_half_there(self) -> None:
        world = make_world(Conditions(latency_ms=10.0))
        stream = world.hosts[0].connect(1, PORT)
        world.run(1.0)
        assert recorder(world, 0).told[-1] == (0.02, "opened", stream)
        assert recorder(world, 1).told[-1] == (pytest.approx(0.03), "accepted", PORT)
        assert stream.peer == 1
        assert recorder(world, 1).streams[0].peer == 0

    def test_bytes_written_before_it_is_open_are_sent(self) -> None:
        world = make_world()
        world.hosts[0].connect(1, PORT).write(b"early")
        world.run(1.0)
        assert recorder(world, 1).bytes == b"early"

    def test_refused_where_nobody_listens(self) -> None:
        world = make_world(Conditions(latency_ms=10.0))
        world.hosts[0].connect(1, 9)
        world.run(1.0)
        assert recorder(world, 0).told[-1] == (0.02, "closed", "refused")

    def test_refused_where_no_process_runs(self) -> None:
        world = make_world()
        world.hosts[1].kill()
        world.hosts[0].connect(1, PORT)
        world.run(1.0)
        assert recorder(world, 0).told[-1][1:] == ("closed", "refused")

    def test_silence_of_a_machine_without_power_ends_with_a_timeout(self) -> None:
        world = make_world()
        world.hosts[1].crash()
        world.hosts[0].connect(1, PORT)
        world.run(CONNECT_TIMEOUT_S - 1)
        assert recorder(world, 0).what() == ["start"]
        world.run(2 * CONNECT_TIMEOUT_S)
        assert recorder(world, 0).told[-1][1:] == ("closed", "timeout")

    @pytest.mark.parametrize("seed", range(10))
    def test_lost_handshakes_are_repeated_and_make_one_stream(self, seed: int) -> None:
        world = make_world(Conditions(latency_ms=10.0, loss=0.3, duplicate=0.3), seed=seed)
        world.hosts[0].connect(1, PORT).write(b"hello")
        run_until(world, lambda: recorder(world, 1).bytes == b"hello")
        assert recorder(world, 1).what().count("accepted") == 1
        assert recorder(world, 0).what().count("opened") == 1

    def test_a_stream_given_up_while_connecting_leaves_nothing(self) -> None:
        world = make_world()
        stream = world.hosts[0].connect(1, PORT)
        world.run(0.015)
        stream.close()
        world.run(10.0)
        assert not world.hosts[0].streams
        assert not world.hosts[1].streams
        assert recorder(world, 1).what() == ["start"]

    def test_a_paused_process_is_connected_to_by_its_kernel(self) -> None:
        world = make_world()
        world.hosts[1].pause()
        world.hosts[0].connect(1, PORT).write(b"hello")
        world.run(1.0)
        assert "opened" in recorder(world, 0).what()
        assert recorder(world, 1).what() == ["start"]
        world.hosts[1].resume()
        assert recorder(world, 1).what() == ["start", "accepted", "data"]

    def test_who_is_down_cannot_connect(self) -> None:
        world = make_world()
        world.hosts[0].kill()
        with pytest.raises(LocalProtocolError, match="h0 is down"):
            world.hosts[0].connect(1, PORT)


class TestDelivery:
    @pytest.mark.parametrize("seed", range(12))
    def test_everything_in_order_over_the_worst_network(self, seed: int) -> None:
        world = make_world(WORST, seed=seed)
        ours, _ = connected(world)
        recorder(world, 1).echo = True
        sent = pattern(60_000, seed)
        rng = random.Random(seed)
        position = 0
        while position < len(sent):
            size = rng.choice((1, 17, 1448, 5000))
            ours.write(sent[position : position + size])
            position += size
            world.run(world.now + rng.random() * 0.05)
        run_until(world, lambda: len(recorder(world, 0).bytes) >= len(sent))
        assert recorder(world, 1).bytes == sent
        assert recorder(world, 0).bytes == sent
        ours.close()
        run_until(world, lambda: not world.hosts[0].streams and not world.hosts[1].streams)
        assert recorder(world, 1).told[-1][1:] == ("closed", "end")

    def test_a_segment_on_an_idle_link_takes_the_latency(self) -> None:
        world = make_world(Conditions(latency_ms=30.0))
        ours, _ = connected(world)
        before = world.now
        ours.write(b"x" * 100)
        world.run(before + 1.0)
        at = next(at for at, what, _ in recorder(world, 1).told if what == "data")
        assert at - before == pytest.approx(0.030)

    def test_bandwidth_is_shared_with_everything_else_on_the_link(self) -> None:
        world = make_world(Conditions(latency_ms=10.0, bandwidth_mbps=8.0, queue_ms=1000.0))
        ours, _ = connected(world)
        before = world.now
        ours.write(bytes(500_000))
        run_until(world, lambda: len(recorder(world, 1).bytes) == 500_000)
        segments = -(-500_000 // (1500 - HEADER_BYTES))
        seconds = (500_000 + segments * HEADER_BYTES) * 8 / 8e6
        assert seconds < world.now - before < seconds * 1.3

    def test_a_full_queue_slows_the_sender_and_loses_nothing(self) -> None:
        world = make_world(Conditions(latency_ms=10.0, bandwidth_mbps=10.0, queue_ms=20.0))
        ours, _ = connected(world)
        sent = pattern(2_000_000)
        before = world.now
        ours.write(sent)
        run_until(world, lambda: len(recorder(world, 1).bytes) == len(sent))
        assert recorder(world, 1).bytes == sent
        assert world.network.full > 0
        # At least half of what the link could carry.
        assert world.now - before < 2 * len(sent) * 8 / 10e6

    def test_loss_is_a_delay(self) -> None:
        def seconds(loss: float) -> float:
            world = make_world(Conditions(latency_ms=10.0, loss=loss), seed=4)
            ours, _ = connected(world)
            before = world.now
            ours.write(bytes(200_000))
            run_until(world, lambda: len(recorder(world, 1).bytes) == 200_000)
            return world.now - before

        assert seconds(0.0) < seconds(0.02) < seconds(0.2)


class TestBackPressure:
    def test_a_reader_that_pauses_congests_the_writer(self) -> None:
        world = make_world()
        ours, theirs = connected(world)
        theirs.pause()
        sent = pattern(RECEIVE_BUFFER_BYTES + HIGH_WATER_BYTES + 10_000)
        ours.write(sent)
        world.run(world.now + 30.0)
        assert ours.congested
        assert "data" not in recorder(world, 1).what()
        assert "writable" not in recorder(world, 0).what()
        theirs.resume()
        run_until(world, lambda: len(recorder(world, 1).bytes) == len(sent))
        assert recorder(world, 1).bytes == sent
        run_until(world, lambda: "writable" in recorder(world, 0).what())
        assert not ours.congested

    def test_a_paused_process_congests_the_writer(self) -> None:
        world = make_world()
        ours, _ = connected(world)
        world.hosts[1].pause()
        sent = pattern(2 * RECEIVE_BUFFER_BYTES)
        ours.write(sent)
        world.run(world.now + 100.0)
        assert ours.congested
        world.hosts[1].resume()
        run_until(world, lambda: len(recorder(world, 1).bytes) == len(sent))
        assert recorder(world, 1).bytes == sent

    @pytest.mark.parametrize("seed", range(5))
    def test_a_lost_window_update_is_asked_for(self, seed: int) -> None:
        world = make_world(Conditions(latency_ms=10.0, loss=0.2), seed=seed)
        ours, theirs = connected(world)
        theirs.pause()
        sent = pattern(RECEIVE_BUFFER_BYTES + 50_000)
        ours.write(sent)
        world.run(world.now + 60.0)
        theirs.resume()
        run_until(world, lambda: len(recorder(world, 1).bytes) == len(sent))
        assert recorder(world, 1).bytes == sent

    def test_writing_without_end_is_stopped(self) -> None:
        world = make_world()
        ours, theirs = connected(world)
        theirs.pause()
        ours.write(bytes(MAX_BUFFER_BYTES))
        with pytest.raises(LocalProtocolError, match=r"h0 has .* bytes waiting for h1: stop writing"):
            ours.write(b"one more")

    def test_pausing_in_the_middle_keeps_the_order(self) -> None:
        world = make_world()
        ours, theirs = connected(world)
        world.hosts[1].pause()
        ours.write(b"one ")
        world.run(world.now + 1)
        theirs.pause()
        world.hosts[1].resume()
        ours.write(b"two")
        world.run(world.now + 1)
        assert recorder(world, 1).bytes == b""
        theirs.resume()
        assert recorder(world, 1).bytes == b"one two"


class TestEnds:
    def test_close_sends_what_was_written_first(self) -> None:
        world = make_world(Conditions(latency_ms=10.0, bandwidth_mbps=1.0, queue_ms=1000))
        ours, _ = connected(world)
        ours.write(bytes(100_000))
        ours.close()
        ours.write(b"too late")
        world.run(world.now + 60)
        assert len(recorder(world, 1).bytes) == 100_000
        assert recorder(world, 1).told[-1][1:] == ("closed", "end")
        assert "closed" not in recorder(world, 0).what()
        assert no_streams(world)

    def test_both_close_at_once(self) -> None:
        world = make_world()
        ours, theirs = connected(world)
        ours.close()
        theirs.close()
        world.run(world.now + 60)
        assert no_streams(world)

    def test_bytes_for_one_who_closed_are_answered_with_a_reset(self) -> None:
        world = make_world(Conditions(latency_ms=10.0))
        ours, theirs = connected(world)
        ours.close()
        theirs.write(b"are you there?")
        world.run(world.now + 60)
        assert recorder(world, 1).told[-1][1] == "closed"
        assert "data" not in recorder(world, 0).what()
        assert no_streams(world)

    def test_closing_with_unread_bytes_is_a_reset(self) -> None:
        world = make_world()
        ours, theirs = connected(world)
        theirs.pause()
        ours.write(b"unread")
        world.run(world.now + 1)
        theirs.close()
        world.run(world.now + 1)
        assert recorder(world, 0).told[-1][1:] == ("closed", "reset")

    def test_reset_is_one_way_away(self) -> None:
        world = make_world(Conditions(latency_ms=10.0))
        ours, _ = connected(world)
        before = world.now
        ours.reset()
        world.run(world.now + 1)
        assert recorder(world, 1).told[-1] == (pytest.approx(before + 0.01), "closed", "reset")
        assert "closed" not in recorder(world, 0).what()
        assert no_streams(world)

    def test_a_killed_process_is_an_end_after_its_last_words(self) -> None:
        world = make_world(Conditions(latency_ms=10.0))
        ours, theirs = connected(world)
        theirs.write(b"last words")
        before = world.now
        world.hosts[1].kill()
        world.run(before + 1)
        assert recorder(world, 0).bytes == b"last words"
        assert recorder(world, 0).told[-1] == (pytest.approx(before + 0.01), "closed", "end")
        assert no_streams(world)
        assert not ours.open

    def test_a_killed_process_that_had_not_read_is_a_reset(self) -> None:
        world = make_world()
        ours, _ = connected(world)
        world.hosts[1].pause()
        ours.write(b"unread")
        world.run(world.now + 1)
        world.hosts[1].kill()
        world.run(world.now + 1)
        assert recorder(world, 0).told[-1][1:] == ("closed", "reset")

    def test_a_power_cut_is_silence_until_the_machine_is_back(self) -> None:
        world = make_world()
        ours, _ = connected(world)
        world.hosts[1].crash()
        world.run(world.now + 100)
        assert "closed" not in recorder(world, 0).what()
        ours.write(b"anyone?")
        world.run(world.now + 10)
        assert "closed" not in recorder(world, 0).what()
        world.hosts[1].boot()
        run_until(world, lambda: "closed" in recorder(world, 0).what())
        assert recorder(world, 0).told[-1][2] == "reset"

    def test_a_power_cut_for_good_is_a_timeout(self) -> None:
        world = make_world()
        world.silence_timeout_s = 50.0
        ours, _ = connected(world)
        world.hosts[1].crash()
        world.run(world.now + 500)  # Nobody noticed: nothing was sent.
        assert "closed" not in recorder(world, 0).what()
        ours.write(b"anyone?")
        before = world.now
        run_until(world, lambda: "closed" in recorder(world, 0).what())
        assert recorder(world, 0).told[-1][2] == "timeout"
        assert 50.0 <= world.now - before < 200.0

    def test_a_cut_is_a_delay_if_it_heals_and_a_timeout_if_not(self) -> None:
        for heals in (True, False):
            world = make_world()
            world.silence_timeout_s = 60.0
            ours, _ = connected(world)
            handle = world.network.cut([0], [1])
            ours.write(b"hello")
            world.run(world.now + 20)
            assert recorder(world, 1).bytes == b""
            if heals:
                world.network.heal(handle)
            world.run(world.now + 300)
            assert bytes(recorder(world, 1).bytes) == (b"hello" if heals else b"")
            assert ("closed" in recorder(world, 0).what()) is not heals

    def test_a_one_way_cut_lets_bytes_through_and_no_acknowledgement_back(self) -> None:
        world = make_world()
        world.silence_timeout_s = 60.0
        ours, _ = connected(world)
        world.network.cut([1], [0], True)
        ours.write(b"hello")
        world.run(world.now + 300)
        assert recorder(world, 1).bytes == b"hello"
        assert recorder(world, 0).told[-1][1:] == ("closed", "timeout")

    def test_the_end_waits_for_a_reader_that_paused(self) -> None:
        world = make_world()
        ours, theirs = connected(world)
        theirs.pause()
        ours.write(b"read me first")
        ours.close()
        world.run(world.now + 10)
        assert "closed" not in recorder(world, 1).what()
        theirs.resume()
        assert recorder(world, 1).what()[-2:] == ["data", "closed"]
        assert no_streams(world)

    def test_bytes_and_the_end_wait_for_a_process_that_is_paused(self) -> None:
        world = make_world()
        ours, _ = connected(world)
        world.hosts[1].pause()
        ours.write(b"read me first")
        ours.close()
        world.run(world.now + 10)
        world.hosts[1].resume()
        assert recorder(world, 1).bytes == b"read me first"
        assert recorder(world, 1).what()[-2:] == ["data", "closed"]

    @pytest.mark.parametrize(
        "conditions", [Conditions(latency_ms=10.0, duplicate=1.0), Conditions(latency_ms=10.0, reorder=0.5)]
    )
    def test_late_packets_do_not_take_away_what_is_yet_to_be_read(self, conditions: Conditions) -> None:
        for seed in range(10):
            world = make_world(conditions, seed=seed)
            ours, theirs = connected(world)
            world.hosts[1].pause()
            theirs.write(b"something that was on its way")
            world.run(world.now + 10)
            ours.write(pattern(50_000))
            ours.close()
            world.run(world.now + 10)
            assert not world.hosts[0].streams
            world.hosts[1].resume()
            assert recorder(world, 1).bytes == pattern(50_000)
            assert recorder(world, 1).told[-1][1:] == ("closed", "end")

    def test_a_reader_that_pauses_while_it_catches_up_gets_everything_and_then_the_end(self) -> None:
        class Hesitant(Recorder):
            def stream_received(self, stream: Stream, data: bytes) -> None:
                super().stream_received(stream, data)
                stream.pause()

        world = make_world(node=Hesitant)
        ours, theirs = connected(world)
        world.hosts[1].pause()
        for number in range(3):
            ours.write(b"%d" % number)
            world.run(world.now + 1)
        ours.close()
        world.run(world.now + 1)
        world.hosts[1].resume()
        assert recorder(world, 1).bytes == b"012"
        assert recorder(world, 1).what()[-1] == "data"
        theirs.resume()
        assert recorder(world, 1).what()[-1] == "closed"

    def test_nothing_is_heard_of_a_stream_after_closing_it(self) -> None:
        world = make_world()
        ours, theirs = connected(world)
        world.hosts[1].pause()
        ours.write(b"one")
        ours.close()
        world.run(world.now + 1)
        theirs.reset()
        world.hosts[1].resume()
        assert recorder(world, 1).what() == ["start", "accepted"]


def no_streams(world: World) -> bool:
    return not any(host.streams for host in world.hosts)


def test_a_move_keeps_streams() -> None:
    world = make_world(hosts=3)
    ours, _ = connected(world)
    world.network.move(1, 2)
    ours.write(b"hello")
    world.run(world.now + 1)
    assert recorder(world, 1).bytes == b"hello"


def test_a_host_connects_to_itself() -> None:
    world = make_world()
    stream = world.hosts[0].connect(0, PORT)
    stream.write(b"hello")
    world.run(0.0)
    assert recorder(world, 0).bytes == b"hello"
    stream.close()
    world.run(1.0)
    assert no_streams(world)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_what_is_read_is_a_beginning_of_what_was_written(seed: int) -> None:
    """Random faults of both hosts and the network: bytes may be missing at the end, never in between, never twice."""
    rng = random.Random(seed)
    world = make_world(Conditions(latency_ms=5.0, jitter_ms=3.0, loss=0.05, reorder=0.05, duplicate=0.05), seed=seed)
    world.silence_timeout_s = 30.0
    for _ in range(4):
        if not (world.hosts[0].up and world.hosts[1].up):
            world.hosts[0].boot()
            world.hosts[1].boot()
        reader = recorder(world, 1)
        reader.bytes.clear()
        ours = world.hosts[0].connect(1, PORT)
        written = bytearray()
        for step in range(12):
            data = pattern(rng.randrange(1, 4000), step)
            if ours.open:
                ours.write(data)
                written += data
            world.run(world.now + rng.random() * 0.2)
            theirs = reader.streams[-1] if reader.streams else None
            fault = rng.randrange(24)
            host = world.hosts[rng.randrange(2)]
            if fault == 0:
                world.network.cut([0], [1], rng.random() < 0.5)
            elif fault == 1:
                world.network.heal_all()
            elif fault == 2:
                host.pause()
            elif fault == 3:
                host.resume()
            elif fault == 4 and theirs is not None:
                theirs.pause()
            elif fault == 5 and theirs is not None:
                theirs.resume()
            elif fault == 6 and step > 8:
                host.kill()
            elif fault == 7 and step > 8:
                host.crash()
        assert written.startswith(reader.bytes)
        world.network.heal_all()
        for host in world.hosts:
            host.resume()
        if reader.streams:
            reader.streams[-1].resume()
        whole = world.hosts[0].up and world.hosts[1].up and ours.open
        world.run(world.now + 60.0)
        if whole:
            assert bytes(reader.bytes) == bytes(written)
        assert written.startswith(reader.bytes)
        ours.close()
        world.run(world.now + 120.0)
        reader.streams.clear()
    world.hosts[0].kill()
    world.hosts[1].kill()
    world.run(world.now + 300.0)
    assert no_streams(world)


def test_streams_of_one_pair_are_independent() -> None:
    world = make_world()
    first: Stream = world.hosts[0].connect(1, PORT)
    second: Stream = world.hosts[0].connect(1, PORT)
    world.run(1.0)
    first.reset()
    second.write(b"still here")
    world.run(2.0)
    assert recorder(world, 1).bytes == b"still here"
