"""What connects experiments to the two runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from nearcast.emulation import namespaces
from nearcast.errors import ConfigError, InvariantViolated, NearcastError
from nearcast.experiments import Parameters, Run, effective_parameters, perform
from nearcast.experiments.agreement import AgreementParameters, scenario_of
from nearcast.experiments.emulated import run_emulated
from nearcast.experiments.measures import measure
from nearcast.experiments.nodes import with_nodes
from nearcast.experiments.registry import find
from nearcast.experiments.simulated import run_simulated
from nearcast.experiments.simulator_scale import ScaleParameters, SimulatorScale, scaled
from nearcast.experiments.wan_accuracy import AccuracyParameters, WanAccuracy
from nearcast.recording import check, read_table
from nearcast.scenario.expansion import topology_of
from nearcast.scenario.files import load_scenario
from nearcast.scenario.scenario import Broker
from nearcast.scenario.topology import Process, ReadyCheck
from tests.unit.experiments.toys import Toy, ToyParameters


def in_a_run(tmp_path: Path, action: Any) -> Any:
    """Do something with a run, and have what it returns or raises."""
    found = []

    class Once(Toy):
        def run(self, run: Run[ToyParameters]) -> None:
            try:
                found.append(action(run))
            except NearcastError as error:
                found.append(error)

    perform(Once(), ToyParameters(), tmp_path / "out")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def test_simulated_clients_are_recorded_like_real_ones(tmp_path: Path) -> None:
    scenario = scenario_of(AgreementParameters(duration_s=2.0, publishers=1, jitter_ms=0.0))
    result = in_a_run(tmp_path, lambda run: run_simulated(run, scenario, 7, events="simulation"))
    found = check(tmp_path / "out/events/simulation")
    assert found.problems == ()
    assert set(read_table(tmp_path / "out/events", ["run"]).column("run").to_pylist()) == {"out/simulation"}
    assert set(found.kinds) >= {"published", "acknowledged", "delivered", "connected", "subscribed"}
    delivery = measure(tmp_path / "out/events/simulation", scenario).delivery
    assert (delivery.published, delivery.lost, delivery.duplicated, delivery.unexpected) == (60, 0, 0, 0)
    again = in_a_run(tmp_path / "again", lambda run: run_simulated(run, scenario, 7))
    assert again.digest == result.digest, "recording a run does not change it"


def test_a_broker_killed_in_the_simulator_loses_nothing_that_its_clients_keep_sessions_for(tmp_path: Path) -> None:
    scenario = scenario_of(AgreementParameters(duration_s=4.0, kill=True))
    in_a_run(tmp_path, lambda run: run_simulated(run, scenario, 3, events="simulation"))
    assert check(tmp_path / "out/events/simulation").kinds["disconnected"] == 4
    delivery = measure(tmp_path / "out/events/simulation", scenario).delivery
    assert (delivery.published, delivery.acknowledged, delivery.lost) == (240, 240, 0)


def test_a_violated_invariant_is_an_error_with_its_message(tmp_path: Path) -> None:
    scenario = msgspec.structs.replace(
        scaled(ScaleParameters(scale=0.005, duration_s=1.0)),
        protocol="tests.unit.experiments.violating:Violating",
        settings={},
    )
    with pytest.raises(InvariantViolated, match=r"in the simulator, after .* two and two are five"):
        in_a_run(tmp_path, lambda run: run_simulated(run, scenario, 1))


def test_a_child_that_cannot_run_says_why(tmp_path: Path) -> None:
    scenario = msgspec.structs.replace(scaled(ScaleParameters(scale=0.005)), protocol="no.such:Protocol")
    with pytest.raises(NearcastError, match=r"the simulator ended without a result: .*no module"):
        in_a_run(tmp_path, lambda run: run_simulated(run, scenario, 1))


def test_scale_multiplies_the_hosts() -> None:
    assert len(topology_of(scaled(ScaleParameters())).host_names()) == 10_000
    assert len(topology_of(scaled(ScaleParameters(scale=0.1))).host_names()) == 1_000


def test_simulator_scale_measures_both_bars_and_says_when_it_is_too_small(tmp_path: Path) -> None:
    outcome = perform(SimulatorScale(), ScaleParameters(scale=0.02, duration_s=2.0), tmp_path / "out")
    assert outcome.complete
    assert all(bar.value is not None and bar.value > 0 for bar in outcome.bars)
    assert outcome.figures["nodes"] == 200
    assert any("200 nodes instead of 10,000" in note for note in outcome.notes)
    assert outcome.figures["events_per_cpu_second"] > 0
    assert (tmp_path / "out/scenario.json").exists()
    assert outcome.plots == ["plots/pace.png"]


def test_without_root_accuracy_is_not_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "available", lambda: "network namespaces need root: run this with sudo")
    outcome = perform(WanAccuracy(), AccuracyParameters(), tmp_path / "out")
    assert outcome.error is not None
    assert outcome.error.startswith("network namespaces need root: run this with sudo; loopback mode")
    assert [bar.value for bar in outcome.bars] == [None, None, None]


def test_brokers_become_processes_that_listen_on_their_own_host() -> None:
    scenario = msgspec.structs.replace(
        scenario_of(AgreementParameters()), brokers=(Broker(host="broker-1"), Broker(host="broker-3", port=1884, durable=True))
    )
    plain, durable = with_nodes(scenario).processes
    assert plain.command == ("nearcast", "broker", "--host", "{broker-1}", "--port", "1883", "--allow-anonymous")
    assert (durable.host, durable.ready.port) == ("broker-3", 1884)
    assert durable.command[-4:] == ("--data", "{data}", "--sync", "fsync")
    assert issubclass(ScaleParameters, Parameters)


def test_real_brokers_keep_the_durable_topics_of_a_scenario() -> None:
    (broker,) = with_nodes(load_scenario("topics")).processes
    assert broker.command[-4:] == ("--durable", "plant/#", "--durable", "farm/+/valve")


def test_a_program_of_the_topology_with_the_port_of_a_broker_is_the_broker() -> None:
    scenario = scenario_of(AgreementParameters())
    mosquitto = Process(name="m", host="broker-3", command=("mosquitto",), ready=ReadyCheck(port=1883))
    topology = msgspec.structs.replace(topology_of(scenario), processes=(mosquitto,))
    changed = msgspec.structs.replace(scenario, topology=topology, brokers=(Broker(host="broker-2"), Broker(host="broker-3")))
    assert [process.name for process in with_nodes(changed).processes] == ["broker-2-mqtt-1883", "m"]


def test_a_run_may_use_the_emulated_wan_more_than_once(tmp_path: Path) -> None:
    """The load of the second must not begin by the meeting of the first."""
    scenario = msgspec.structs.replace(scenario_of(AgreementParameters(duration_s=0.5, publishers=1)), settle_s=0.5)

    def twice(run: Run[ToyParameters]) -> list[float]:
        found = [run_emulated(run, scenario, 1, events=events, mode="loopback") for events in ("first", "second")]
        return [load.started_late_ms for result in found for load in result.loads.values()]

    assert max(in_a_run(tmp_path, twice)) < 2_500, "the first began 3 s earlier at least"
    for events in ("first", "second"):
        assert measure(tmp_path / "out/events" / events, scenario).delivery.delivered > 0
    assert set(read_table(tmp_path / "out/events", ["run"]).column("run").to_pylist()) == {"out/first", "out/second"}


def test_the_simulator_imports_nothing_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
    monkeypatch.chdir(tmp_path)
    scenario = scaled(ScaleParameters(scale=0.005, duration_s=1.0))
    assert in_a_run(tmp_path, lambda run: run_simulated(run, scenario, 1)).events > 0


@pytest.mark.parametrize(
    ("experiment", "key", "value", "message"),
    [
        ("agreement", "publishers", "-3", "`publishers` must be 1 or more"),
        ("simulator-scale", "period_s", "0", "`period_s` must be above 0"),
        ("wan-accuracy", "scale", "51", "`scale` must be at most 50: 1,000 hosts"),
        ("wan-accuracy", "packets_per_s", "0", "`packets_per_s` must be above 0"),
        ("wan-accuracy", "rung_s", "-1", "`rung_s` must be above 0"),
    ],
)
def test_parameters_that_make_no_sense_are_refused_before_anything_begins(
    experiment: str, key: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        effective_parameters(find(experiment), {key: value}, quick=True)


@pytest.mark.parametrize(
    ("experiment", "key", "value", "message"),
    [
        ("agreement", "qos", 7, "`qos` must be 0, 1 or 2"),
        ("agreement", "jitter_ms", -1, "`jitter_ms` must be 0 or more"),
        ("agreement", "scale", 1e6, "`count` must be between 1 and 1,000,000"),
        ("simulator-scale", "scale", 1e6, "`count` must be between 1 and 100,000"),
        ("simulator-scale", "scale", 20, "more than 100,000 hosts"),
    ],
)
def test_what_the_scenario_refuses_is_one_line_and_leaves_nothing(
    tmp_path: Path, experiment: str, key: str, value: float, message: str
) -> None:
    found = find(experiment)
    outcome = perform(found, effective_parameters(found, {key: value}, quick=True), tmp_path / "out")
    assert message in str(outcome.error)
    assert not (tmp_path / "out").exists()


def test_memory_is_the_simulators_own_whatever_this_process_has(tmp_path: Path) -> None:
    ballast = b"x" * 400_000_000
    scenario = scaled(ScaleParameters(scale=0.005, duration_s=1.0))
    peak_bytes = in_a_run(tmp_path, lambda run: run_simulated(run, scenario, 1)).peak_bytes
    assert 10_000_000 < peak_bytes < len(ballast)
