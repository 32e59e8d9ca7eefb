"""Hosts: clocks and the timer, datagrams, what kill, power cut, pause and restart do."""

from __future__ import annotations

import pytest

from nearcast.errors import LocalProtocolError, NodeFailed
from nearcast.network.conditions import Conditions
from nearcast.scenario.events import Kill
from nearcast.simulation import Host, Node, World
from nearcast.simulation.hosts import EPOCH_S, SOCKET_BUFFER_DATAGRAMS
from tests.unit.simulation.worlds import make_world, recorder


class TestTimer:
    def test_the_earliest_time_wins_and_the_rest_is_forgotten(self) -> None:
        world = make_world()
        world.hosts[0].wake_at(2.0)
        world.hosts[0].wake_at(1.0)
        world.hosts[0].wake_at(3.0)
        world.run(10.0)
        assert [(at, what) for at, what, _ in recorder(world, 0).told] == [(0.0, "start"), (1.0, "woken")]

    def test_a_time_that_has_passed_is_now(self) -> None:
        world = make_world()
        world.run(5.0)
        world.hosts[0].wake_at(1.0)
        world.run(5.0)
        assert recorder(world, 0).told[-1] == (5.0, "woken", 5.0)

    def test_a_deadline_is_never_missed_by_rounding(self) -> None:
        """A machine that asks for its deadline and is woken must find that the deadline has come, at any clock rate."""

        class Machine(Node):
            deadline = 0.1
            woken_at: list[float]

            def start(self) -> None:
                self.woken_at = []
                self.host.wake_at(self.deadline)

            def woken(self) -> None:
                assert self.host.now >= self.deadline
                self.woken_at.append(self.host.now)
                self.deadline += 0.1
                self.host.wake_at(self.deadline)

        world = make_world(node=Machine)
        world.hosts[0].skew(0.0, 1.0 / 3.0)
        world.hosts[1].skew(0.0, 1.0001)
        for step in range(100):
            world.run(step * 0.77)
            world.hosts[0].skew(0.1, 1.0 + step / 777)
        node = world.hosts[0].node
        assert isinstance(node, Machine)
        assert len(node.woken_at) > 500

    def test_a_wake_of_a_dead_process_does_not_reach_the_next(self) -> None:
        world = make_world()
        world.hosts[0].wake_at(1.0)
        world.hosts[0].kill()
        world.hosts[0].boot()
        world.run(5.0)
        assert recorder(world, 0).what() == ["start"]

    def test_infinity_is_no_time(self) -> None:
        world = make_world()
        world.hosts[0].wake_at(float("inf"))
        world.run(5.0)
        assert recorder(world, 0).what() == ["start"]


class TestClocks:
    def test_both_begin_right(self) -> None:
        world = make_world()
        world.run(3.0)
        assert world.hosts[0].now == 3.0
        assert world.hosts[0].wall == EPOCH_S + 3.0

    def test_a_jump_moves_the_wall_clock_only(self) -> None:
        world = make_world()
        world.run(10.0)
        world.hosts[0].skew(-5.0, 1.0)
        assert world.hosts[0].now == 10.0
        assert world.hosts[0].wall == pytest.approx(EPOCH_S + 5.0)

    def test_a_rate_moves_both_and_the_timer(self) -> None:
        world = make_world()
        world.hosts[0].wake_at(10.0)
        world.run(5.0)
        world.hosts[0].skew(0.0, 2.0)
        world.run(20.0)
        assert recorder(world, 0).told[-1] == (7.5, "woken", 10.0)
        assert world.hosts[0].now == pytest.approx(5.0 + 15.0 * 2)
        assert world.hosts[0].wall == pytest.approx(EPOCH_S + 35.0)

    def test_the_monotonic_clock_begins_anew_when_the_machine_boots(self) -> None:
        world = make_world()
        world.run(10.0)
        world.hosts[0].kill()
        world.hosts[0].boot()
        assert world.hosts[0].now == 10.0
        world.hosts[0].crash()
        world.run(12.0)
        world.hosts[0].boot()
        world.run(13.0)
        assert world.hosts[0].now == pytest.approx(1.0)
        assert world.hosts[0].wall == pytest.approx(EPOCH_S + 13.0)

    def test_a_clock_does_not_stand_still(self) -> None:
        with pytest.raises(LocalProtocolError, match="above 0"):
            make_world().hosts[0].skew(0.0, 0.0)


class TestDatagrams:
    def test_it_arrives_after_the_latency(self) -> None:
        world = make_world(Conditions(latency_ms=25.0))
        world.hosts[0].send(1, "hello", 10)
        world.run(1.0)
        assert recorder(world, 1).told[-1] == (0.025, "received", "hello")

    def test_to_itself_at_once(self) -> None:
        world = make_world()
        world.hosts[0].send(0, "note", 10)
        world.run(0.0)
        assert recorder(world, 0).told[-1] == (0.0, "received", "note")

    def test_duplicated_on_the_way(self) -> None:
        world = make_world(Conditions(latency_ms=10.0, duplicate=1.0))
        world.hosts[0].send(1, "hello", 10)
        world.run(1.0)
        assert recorder(world, 1).what() == ["start", "received", "received"]

    def test_lost_on_the_way(self) -> None:
        world = make_world(Conditions(latency_ms=10.0, loss=1.0))
        world.hosts[0].send(1, "hello", 10)
        world.run(1.0)
        assert recorder(world, 1).what() == ["start"]

    def test_to_nobody_is_an_error_of_the_node(self) -> None:
        world = make_world()
        with pytest.raises(LocalProtocolError, match="there is no host 7: the world has 2"):
            world.hosts[0].send(7, "hello", 10)

    def test_what_a_host_sent_before_it_died_arrives(self) -> None:
        world = make_world()
        world.hosts[0].send(1, "last words", 10)
        world.hosts[0].crash()
        world.hosts[0].send(1, "from the grave", 10)
        world.run(1.0)
        assert recorder(world, 1).told[-1][2] == "last words"

    @pytest.mark.parametrize("end", ["kill", "crash"])
    def test_nobody_there(self, end: str) -> None:
        world = make_world()
        getattr(world.hosts[1], end)()
        world.hosts[0].send(1, "hello", 10)
        world.run(1.0)
        world.hosts[1].boot()
        assert recorder(world, 1).what() == ["start"]


class TestPause:
    def test_what_came_meanwhile_comes_later_in_order(self) -> None:
        world = make_world()
        world.hosts[1].wake_at(2.0)
        world.hosts[1].disk.append("f", b"x")
        world.hosts[1].disk.sync(9)
        world.hosts[1].pause()
        world.hosts[0].send(1, "one", 10)
        world.hosts[0].send(1, "two", 10)
        world.run(5.0)
        assert recorder(world, 1).what() == ["start"]
        world.hosts[1].resume()
        assert recorder(world, 1).told[1:] == [
            (5.0, "synced", 9),
            (5.0, "received", "one"),
            (5.0, "received", "two"),
            (5.0, "woken", 5.0),
        ]

    def test_the_socket_buffer_is_bounded(self) -> None:
        world = make_world()
        world.hosts[1].pause()
        for number in range(SOCKET_BUFFER_DATAGRAMS + 50):
            world.hosts[0].send(1, number, 10)
        world.run(1.0)
        world.hosts[1].resume()
        assert recorder(world, 1).what().count("received") == SOCKET_BUFFER_DATAGRAMS

    def test_a_killed_process_is_not_resumed(self) -> None:
        world = make_world()
        world.hosts[1].pause()
        world.hosts[0].send(1, "one", 10)
        world.run(1.0)
        world.hosts[1].kill()
        world.hosts[1].resume()
        assert not world.hosts[1].up
        world.hosts[1].boot()
        assert recorder(world, 1).what() == ["start"]

    def test_pausing_what_is_down_does_nothing(self) -> None:
        world = make_world()
        world.hosts[1].kill()
        world.hosts[1].pause()
        world.hosts[1].boot()
        assert world.hosts[1].running


class TestProcesses:
    def test_each_start_makes_a_new_node(self) -> None:
        world = make_world()
        first = recorder(world, 0)
        world.hosts[0].kill()
        assert world.hosts[0].node is None
        world.hosts[0].boot()
        assert recorder(world, 0) is not first
        world.hosts[0].boot()
        assert recorder(world, 0).what() == ["start"]
        assert world.hosts[0].starts == 2

    def test_a_node_may_start_later(self) -> None:
        world = make_world()
        world.add("late", "s0", type(recorder(world, 0)), start_s=3.0)
        world.run(2.9)
        assert not world.hosts[2].up
        world.run(3.0)
        assert world.hosts[2].up

    def test_an_exception_names_the_host_and_the_place(self) -> None:
        class Faulty(Node):
            def received(self, source: int, message: object) -> None:
                raise ValueError("cannot read this")

        world = make_world(node=Faulty)
        world.hosts[0].send(1, "hello", 10)
        with pytest.raises(NodeFailed, match=r"h1 raised ValueError: cannot read this \(test_hosts\.py:\d+\)") as caught:
            world.run(1.0)
        assert caught.value.hosts == ("h1",)
        assert isinstance(caught.value.__cause__, ValueError)

    def test_an_exception_at_the_start_or_after_a_pause_names_the_host_too(self) -> None:
        class Unready(Node):
            def start(self) -> None:
                if self.host.starts > 1:
                    raise OSError("cannot start")

            def received(self, source: int, message: object) -> None:
                raise ValueError("cannot read this")

        world = make_world(node=Unready)
        world.hosts[1].pause()
        world.hosts[0].send(1, "hello", 10)
        world.run(1.0)
        with pytest.raises(NodeFailed, match="h1 raised ValueError"):
            world.hosts[1].resume()
        world.apply(Kill(at_s=0.0, host="h0", restart_after_s=1.0))
        with pytest.raises(NodeFailed, match="h0 raised OSError: cannot start"):
            world.run(3.0)

    def test_names_are_unique(self) -> None:
        world = make_world()
        with pytest.raises(LocalProtocolError, match="two hosts are called h0"):
            world.add("h0", "s0", Node)
        with pytest.raises(LocalProtocolError, match="h0 has a node already"):
            world.place("h0", Node)
        with pytest.raises(LocalProtocolError, match="there is no host nobody"):
            world.place("nobody", Node)
        with pytest.raises(LocalProtocolError, match="there is no site nowhere"):
            world.add("h9", "nowhere", Node)

    def test_the_same_name_and_seed_draw_the_same(self) -> None:
        def drawn(seed: int, index: int) -> float:
            return make_world(seed=seed).hosts[index].rng.random()

        assert drawn(1, 0) == drawn(1, 0)
        assert len({drawn(1, 0), drawn(1, 1), drawn(2, 0)}) == 3

    def test_stop_comes_at_the_end(self) -> None:
        stopped = []

        class Stopping(Node):
            def stop(self) -> None:
                stopped.append(self.host.name)

        world = make_world(node=Stopping)
        world.hosts[0].crash()
        world.run(1.0)
        world.finish()
        assert stopped == ["h1"]


def test_a_host_shows_itself() -> None:
    world: World = make_world()
    host: Host = world.hosts[1]
    assert repr(host) == "<Host 1 h1>"
