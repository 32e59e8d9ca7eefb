"""Runs of scenarios: same seed same run, replay with a story, schedules, shrinking, limits, protocols that cheat."""

from __future__ import annotations

import itertools
import math
import os
import select
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

from nearcast.errors import ConfigError, InvariantViolated, NearcastError, SimulationLimit
from nearcast.scenario.events import Crash, Kill, RandomFaults
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.timeline import timeline
from nearcast.scenario.topology import Host as HostOfTopology
from nearcast.scenario.topology import Site, SiteLink, Topology
from nearcast.simulation import Invariant, Node, Protocol, World
from nearcast.simulation.protocols import load_protocol
from nearcast.simulation.runs import Options, difference, replay, simulate
from nearcast.simulation.seeds import run_seeds, run_verified
from nearcast.simulation.shrinking import shrink
from nearcast.simulation.tracing import Tracer
from tests.unit.simulation.worlds import make_world

TOPOLOGY = Topology(
    name="two",
    sites=(Site(name="here"), Site(name="there")),
    links=(SiteLink(between=("here", "there"), latency_ms=10.0, jitter_ms=1.0),),
    hosts=(HostOfTopology(name="a", site="here"), HostOfTopology(name="b", site="there", count=2)),
)


class Ticker(Node):
    """Sends its name to everybody every 100 ms."""

    def start(self) -> None:
        self.host.wake_at(self.host.now + 0.1)

    def woken(self) -> None:
        for index in range(3):
            if index != self.host.index:
                self.host.send(index, self.host.name, 20)
        self.host.wake_at(self.host.now + 0.1)


class Ticking(Protocol):
    node: type[Node] = Ticker

    def build(self, world: World, scenario: Scenario) -> list[Invariant]:
        for host in world.hosts:
            world.place(host.name, self.node)
        return []


class NobodyRestarts(Invariant):
    def __init__(self, world: World, allowed: int) -> None:
        self.world = world
        self.allowed = allowed

    def check(self) -> None:
        restarted = [host for host in self.world.hosts if host.starts > 1]
        if len(restarted) > self.allowed:
            raise InvariantViolated(f"{len(restarted)} hosts started again", restarted)


class Fragile(Ticking):
    """Breaks when more than ``allowed`` hosts were restarted."""

    def build(self, world: World, scenario: Scenario) -> list[Invariant]:
        super().build(world, scenario)
        return [NobodyRestarts(world, scenario.settings.get("allowed", 0))]


class Forgetful(Ticking):
    """Depends on what an earlier run left behind."""

    runs = itertools.count()

    def build(self, world: World, scenario: Scenario) -> list[Invariant]:
        super().build(world, scenario)
        run = next(self.runs)
        world.at(3.5, lambda: world.hosts[0].wake_at(3.5 + run / 1000))
        return []


class ForgetfulAndFragile(Fragile):
    runs = itertools.count()

    def build(self, world: World, scenario: Scenario) -> list[Invariant]:
        world.at(0.5 + next(self.runs) / 1000, lambda: world.hosts[0].send(1, "late", 10))
        return super().build(world, scenario)


class Chatty(Ticking):
    """Says something else in every run, at the same times."""

    runs = itertools.count()

    class Node(Ticker):
        def woken(self) -> None:
            self.host.send(0, ("run", (next(Chatty.runs), 0.5)), 20)

    node = Node


class DependsOnTheProcess(Ticking):
    """As the order of a set of text does, and without luck."""

    class Node(Ticker):
        def woken(self) -> None:
            self.host.send(0, os.getpid(), 20)

    node = Node


class Miscounts(Ticking):
    runs = itertools.count()

    def report(self) -> dict[str, Any]:
        return {"run": next(self.runs), "unknown": math.nan}


class Reports(Ticking):
    reported: Any = None

    def report(self) -> dict[str, Any]:
        return self.reported  # type: ignore[no-any-return]


class Unfinished(Ticking):
    def build(self, world: World, scenario: Scenario) -> list[Invariant]:
        super().build(world, scenario)
        return None  # type: ignore[return-value]


class Unmade(Ticking):
    def __init__(self) -> None:
        raise ValueError("not today")


class FragileOrEndless(Fragile):
    """Runs away unless somebody restarts."""

    class Node(Ticker):
        def start(self) -> None:
            self.host.wake_at(3.0)

        def woken(self) -> None:
            if all(host.starts == 1 for host in self.host.world.hosts):
                self.host.wake_at(self.host.now)

    node = Node


class Runaway(Ticking):
    class Node(Node):
        def start(self) -> None:
            self.host.wake_at(1.0)

        def woken(self) -> None:
            self.host.wake_at(self.host.now)

    node = Node


class Floods(Ticking):
    class Node(Node):
        def received(self, source: int, message: object) -> None:
            for _ in range(2):
                self.host.send(source, message, 10)

        def start(self) -> None:
            self.host.send(0, "more", 10)

    node = Node


def scenario(protocol: type[Protocol] = Ticking, **fields: Any) -> Scenario:
    named = f"{Path(__file__)}:{protocol.__qualname__}"
    return Scenario(name="test", topology=TOPOLOGY, protocol=named, **{"duration_s": 10.0, "settle_s": 1.0, **fields})


ENDLESS = """
import os, threading
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.topology import Host, Site, Topology
from nearcast.simulation import Protocol
from nearcast.simulation.seeds import run_seeds

class Endless(Protocol):
    def build(self, world, scenario):
        os.write(1, b"began\\n")
        threading.Event().wait()

if __name__ == "__main__":
    topology = Topology(name="one", sites=(Site(name="s"),), hosts=(Host(name="a", site="s"),))
    run_seeds(Scenario(name="endless", topology=topology, protocol="endless.py:Endless"), range(2), jobs=2)
"""

CRASHES = tuple(Crash(at_s=float(1 + index), host=host, restart_after_s=0.5) for index, host in enumerate(("a", "b-1", "b-2")))


class TestSimulate:
    def test_one_seed_is_one_run(self) -> None:
        first, second = simulate(scenario(), 5), simulate(scenario(), 5)
        assert difference(first, second) is None
        assert first.events > 500
        assert simulate(scenario(), 6).digest != first.digest

    def test_tracing_and_progress_change_nothing(self) -> None:
        plain = simulate(scenario(), 5)
        told: list[tuple[float, int]] = []
        traced = simulate(scenario(), 5, tracer=Tracer(), progress=lambda now, events: told.append((now, events)))
        assert difference(plain, traced) is None
        assert told[-1] == (11.0, traced.events)

    def test_a_run_in_pieces_is_the_same_run(self) -> None:
        def run(pieces: int) -> int:
            world = make_world(node=Ticker, hosts=3)
            for piece in range(1, pieces + 1):
                world.run(10.0 * piece / pieces)
            return world.digest

        assert run(1) == run(7) == run(1000)

    def test_a_violation_is_part_of_the_outcome(self) -> None:
        outcome = simulate(scenario(Fragile, events=CRASHES[:1]))
        assert outcome.violation is not None
        assert outcome.violation.message == "1 hosts started again"
        assert outcome.violation.hosts == ("a",)
        assert outcome.violation.at_s == 2.0
        assert outcome.faults == ("1.000000 s power cut at a",)

    def test_only_some_faults(self) -> None:
        with_all = scenario(Fragile, events=CRASHES)
        assert simulate(with_all, options=Options(only=())).ok
        some = simulate(with_all, options=Options(only=(2, 1)))
        assert some.violation is not None
        assert some.applied == (1, 2)
        with pytest.raises(ConfigError, match="there is no fault 3: this seed has 3"):
            simulate(with_all, options=Options(only=(3,)))

    def test_limits(self) -> None:
        with pytest.raises(SimulationLimit, match="more than 100 events by"):
            simulate(scenario(), options=Options(max_events=100))

    def test_time_that_stands_still(self) -> None:
        world = make_world(node=Runaway.node, hosts=3)
        world.max_events_at_once = 1000
        with pytest.raises(SimulationLimit, match=r"time stands still at 1\.000000 s: 1,000 events .* a wake of h\d"):
            world.run(10.0)

    def test_a_flood(self) -> None:
        with pytest.raises(SimulationLimit, match=r"more than [0-9,]+ events"):
            simulate(scenario(Floods), options=Options(max_events=50_000))


class TestSchedule:
    def test_given_and_drawn_by_time(self) -> None:
        drawn = RandomFaults(crashes_per_minute=30.0, cuts_per_minute=30.0, quiet_s=2.0, max_fault_s=2.0)
        events = timeline(scenario(events=(Kill(at_s=3.0, host="a"),), random_faults=drawn), 1)
        assert Kill(at_s=3.0, host="a") in events
        assert len(events) > 1
        assert [event.at_s for event in events] == sorted(event.at_s for event in events)
        assert events == timeline(scenario(events=(Kill(at_s=3.0, host="a"),), random_faults=drawn), 1)
        assert events != timeline(scenario(events=(Kill(at_s=3.0, host="a"),), random_faults=drawn), 2)


class TestReplay:
    def test_the_same_end_with_a_story(self) -> None:
        failing = scenario(Fragile, events=CRASHES)
        first = simulate(failing, 9)
        assert first.story is None
        again = replay(failing, first)
        assert difference(first, again) is None
        assert again.story is not None
        text = again.story.text()
        assert "(fault)" in text
        assert "power cut at a" in text
        assert "a        starts, process number 2" in text
        assert "lost: the machine is off: 'b-1'" in text
        assert again.story == replay(failing, first).story

    def test_what_is_not_determined_is_found(self) -> None:
        with pytest.raises(NearcastError, match=r"seed 4 does not determine the run: .* between 3 s and 4 s") as caught:
            run_verified(scenario(Forgetful), 4, Options())
        assert "time.time()" in str(caught.value)

    def test_so_is_what_only_messages_say(self) -> None:
        with pytest.raises(NearcastError, match=r"seed 4 does not determine the run: .* between 0 s and 1 s"):
            run_verified(scenario(Chatty), 4, Options())

    def test_and_what_only_figures_say(self) -> None:
        with pytest.raises(NearcastError, match=r"the figure run is 0 the first time, 1 the second"):
            run_verified(scenario(Miscounts), 4, Options())

    def test_a_replay_that_ends_otherwise_is_found(self) -> None:
        failing = scenario(ForgetfulAndFragile, events=CRASHES)
        first = simulate(failing)
        assert difference(first, replay(failing, first)) is not None


class TestShrinking:
    @pytest.mark.parametrize("allowed", [0, 1, 2])
    def test_only_what_it_takes_is_left(self, allowed: int) -> None:
        noise = tuple(Kill(at_s=0.1 + index / 10, host="b-2") for index in range(4))
        failing = scenario(Fragile, events=(*noise, *CRASHES), settings={"allowed": allowed})
        first = simulate(failing)
        assert first.violation is not None
        told: list[tuple[int, int]] = []
        shrunk = shrink(failing, first, told=lambda runs, left: told.append((runs, left)))
        assert shrunk.violation is not None
        assert len(shrunk.applied) == allowed + 1
        assert all("power cut" in shrunk.faults[number] for number in shrunk.applied)
        assert told[-1][1] == allowed + 1
        assert difference(shrunk, simulate(failing, options=Options(only=shrunk.applied))) is None

    def test_its_cost_is_bounded(self) -> None:
        failing = scenario(Fragile, events=CRASHES * 10)
        told: list[int] = []
        shrink(failing, simulate(failing), max_runs=5, told=lambda runs, left: told.append(runs))
        assert told[-1] == 5

    def test_a_run_that_runs_away_with_fewer_faults_is_another_failure(self) -> None:
        failing = scenario(FragileOrEndless, events=CRASHES)
        options = Options(max_events=2_000)
        first = simulate(failing, options=options)
        assert len(shrink(failing, first, options).applied) == 1

    def test_a_run_that_holds_is_left_alone(self) -> None:
        outcome = simulate(scenario())
        assert shrink(scenario(), outcome) is outcome


class TestSeeds:
    def test_in_order_and_the_same_in_other_processes(self) -> None:
        finished: list[int] = []
        here = run_seeds(scenario(), range(3, 6), finished=lambda outcome: finished.append(outcome.seed))
        there = run_seeds(scenario(), range(3, 6), jobs=2)
        assert [outcome.seed for outcome in here] == [3, 4, 5] == finished
        assert [difference(one, other) for one, other in zip(here, there, strict=True)] == [None, None, None]

    def test_only_what_is_run_again_keeps_its_checkpoints(self) -> None:
        assert not any(outcome.checkpoints for outcome in run_seeds(scenario(), range(3)))
        assert all(outcome.checkpoints for outcome in run_seeds(scenario(Fragile, events=CRASHES), range(3)))

    def test_verified_is_compared_with_another_process_too(self) -> None:
        assert [outcome.seed for outcome in run_seeds(scenario(), range(3, 5), verify=True)] == [3, 4]
        with pytest.raises(NearcastError, match="seed 3 does not determine the run"):
            run_seeds(scenario(DependsOnTheProcess), [3], verify=True)

    def test_an_error_in_another_process_is_one_line(self) -> None:
        with pytest.raises(SimulationLimit, match=r"seed [12]: more than 10 events"):
            run_seeds(scenario(), range(1, 3), Options(max_events=10), jobs=2)

    @pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
    def test_no_process_outlives_the_one_that_asked(self, tmp_path: Path, ending: signal.Signals) -> None:
        """Whoever simulates holds the other end of a pipe; it ends when the last of them is gone."""
        (tmp_path / "endless.py").write_text(ENDLESS)
        command = [sys.executable, "endless.py"]
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            began = process.stdout.readline() + process.stdout.readline()
            assert began == b"began\nbegan\n"
            process.send_signal(ending)
            readable, _, _ = select.select([process.stdout], [], [], 30.0)
            assert readable, "a process that simulates is still there"
            assert process.stdout.read() == b""


class TestWhatAProtocolGivesBack:
    def test_figures_are_plain_whatever_they_were_computed_with(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reported = {"mean": numpy.float64(1.5), "count": numpy.int64(3), 7: [Fraction(1, 2), True, None, "text"]}
        monkeypatch.setattr(loaded(Reports), "reported", reported)
        assert simulate(scenario(Reports)).figures == {"mean": 1.5, "count": 3, "7": [0.5, True, None, "text"]}

    @pytest.mark.parametrize("reported", [None, 3, {"node": object()}, {"world": 1j}])
    def test_what_is_no_figure_is_refused(self, monkeypatch: pytest.MonkeyPatch, reported: object) -> None:
        monkeypatch.setattr(loaded(Reports), "reported", reported)
        with pytest.raises(ConfigError, match=r"report\(\) of .*:Reports must return"):
            simulate(scenario(Reports))

    def test_no_list_of_invariants(self) -> None:
        with pytest.raises(ConfigError, match=r"build\(\) of .*:Unfinished must return a list of invariants"):
            simulate(scenario(Unfinished))

    def test_one_that_cannot_be_made(self) -> None:
        with pytest.raises(NearcastError, match=r":Unmade raised ValueError: not today \(test_runs.py:\d+\)"):
            simulate(scenario(Unmade))


def loaded(protocol: type[Protocol]) -> type[Protocol]:
    """The class as the simulator finds it, in its own copy of this module."""
    return type(load_protocol(scenario(protocol).protocol))


def test_outcomes_can_be_written_and_read() -> None:
    failing = scenario(Fragile, events=CRASHES)
    outcome = replay(failing, simulate(failing))
    assert msgspec.json.decode(msgspec.json.encode(outcome), type=type(outcome)) == outcome


class Half(Protocol):
    def build(self, world: World, scenario: Scenario) -> list[Invariant]:
        world.place("a", Ticker)
        return []


def test_a_host_that_nobody_runs_on_can_be_crashed() -> None:
    assert simulate(scenario(Half, events=CRASHES)).ok
