"""Brokers, gateways and the controller of a scenario as processes: commands, the order, and when they come and go."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from nearcast.configfile import load_broker_config
from nearcast.experiments import writing
from nearcast.experiments.emulated import happening
from nearcast.experiments.nodes import CONTROLLER, MAKER, WRITER, Recorded, http_ports, node_events, with_nodes
from nearcast.fabricconfig import Fabric, Groups, TopicClass
from nearcast.scenario.checks import check_topology
from nearcast.scenario.events import Heal, Start, Stop
from nearcast.scenario.files import load_scenario
from nearcast.scenario.scenario import Broker, Controller, Gateway, Scenario
from nearcast.scenario.topology import Host, Process, Site, Topology

TOPOLOGY = Topology(
    name="t",
    sites=(Site(name="here"),),
    hosts=(
        Host(name="hq", site="here"),
        Host(name="broker", site="here", count=2, ports=(7,)),
        Host(name="car", site="here", count=2),
    ),
)
FABRIC = Scenario(
    name="s",
    topology=TOPOLOGY,
    protocol="fabric",
    controller=Controller(host="hq", interval_s=2.5),
    brokers=(Broker(host="broker-1", fabric=True), Broker(host="broker-2", fabric=True, start_s=5, stop_s=20, durable=True)),
    gateways=(Gateway(host="car*"), Gateway(host="hq", controller=False, start_s=1)),
    events=(Heal(at_s=7),),
)


def following(process: Process, word: str) -> str:
    return process.command[process.command.index(word) + 1]


def test_nodes_of_a_fabric_find_each_other_through_the_controller() -> None:
    topology = with_nodes(FABRIC)
    check_topology(topology)
    processes = {process.name: process for process in topology.processes}
    assert list(processes) == [
        MAKER,
        CONTROLLER,
        "broker-1-mqtt-1883",
        "broker-2-mqtt-1883",
        "gateway-car-1",
        "gateway-car-2",
        "gateway-hq",
    ], "the secret is there before anybody needs it"
    second = processes["broker-2-mqtt-1883"]
    assert second.manual
    assert following(second, "--name") == "broker-2"
    assert following(second, "--controller") == following(processes["gateway-car-1"], "--controller") == "{hq}:1885"
    assert following(second, "--fabric-secret") == "{data}/../fabric-secret/secret"
    assert "--data" in second.command
    assert not processes["broker-1-mqtt-1883"].manual
    assert [processes[f"gateway-car-{n}"].together for n in (1, 2)] == [False, True]
    alone = processes["gateway-hq"]
    assert "--controller" not in alone.command
    assert [following(alone, "--broker"), alone.command[-1]] == ["{broker-1}:1884", "{broker-2}:1884"]
    assert topology.hosts[1].ports == (7, 1884), "loopback mode has to be told of links"
    assert http_ports(FABRIC) == {"broker-1": ("broker-1", 19_100), "broker-2": ("broker-2", 19_101)}


def test_without_a_controller_brokers_are_told_of_each_other() -> None:
    scenario = msgspec.structs.replace(FABRIC, controller=None, gateways=())
    maker, first, second = with_nodes(scenario).processes
    assert (maker.host, following(first, "--peer"), following(second, "--peer")) == (
        "broker-1",
        "{broker-2}:1884",
        "{broker-1}:1884",
    )


def test_nodes_come_and_go_between_the_other_events() -> None:
    assert node_events(FABRIC) == [
        Start(at_s=1, process="gateway-hq"),
        Start(at_s=5, process="broker-2-mqtt-1883"),
        Stop(at_s=20, process="broker-2-mqtt-1883"),
    ]
    events, notes = happening(FABRIC, 1)
    assert [event.at_s for event in events] == [1, 5, 7, 20]
    assert notes == []


def test_the_fabric_of_the_guide(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/emulating.md").read_text()
    (text,) = re.findall(r"^```toml\n(# two-brokers\.toml\n.*?)^```", guide, re.DOTALL | re.MULTILINE)
    (tmp_path / "two-brokers.toml").write_text(text)
    scenario = load_scenario(tmp_path / "two-brokers.toml")
    assert [process.name for process in with_nodes(scenario).processes] == [
        MAKER,
        CONTROLLER,
        "vienna-dc-mqtt-1883",
        "sydney-dc-mqtt-1883",
        "gateway-phone",
    ]


GROUPS = Scenario(
    name="s",
    topology=TOPOLOGY,
    protocol="fabric",
    brokers=(Broker(host="hq"), Broker(host="broker-1", fabric=True), Broker(host="broker-2", fabric=True)),
    settings={
        "fabric": {
            "classes": [{"topic": "cars/{id}/é", "topic_class": "broadcast"}],
            "groups": {"cloud": "mqtt://hq:1883", "threshold_ms": 7.5, "flow_aware": True, "position": [1.5, -2]},
        },
        "limits": {"max_inflight": 7},
        "lcm": {"broker-2": 9.0},
    },
)


def test_what_no_option_says_is_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology = with_nodes(GROUPS, Recorded(directory="/events", run="r"))
    check_topology(topology)
    maker, writer, cloud, first, second = topology.processes
    assert [process.name for process in (maker, writer, cloud)] == [MAKER, WRITER, "hq-mqtt-1883"]
    for process in (first, second):
        assert following(process, "--config") == "{data}/../fabric-settings/broker.toml"
        assert following(process, "--cloud") == "mqtt://{hq}:1883"
        assert "--peer" not in process.command, "leaders announce themselves"
    assert "--lcm" not in first.command
    assert following(second, "--lcm") == "9"
    assert "--config" not in cloud.command
    assert [process.together for process in (cloud, first, second)] == [False, False, True]
    # As the WAN does: what is doubled is single again.
    text = writer.command[-1].replace("{{", "{").replace("}}", "}")
    assert writing.main(str(tmp_path / "broker.toml"), text) == 0
    assert "/broker.toml: " in capsys.readouterr().out
    config = load_broker_config(tmp_path / "broker.toml")
    assert config.fabric == Fabric(
        classes=(TopicClass(topic="cars/{id}/é", topic_class="broadcast"),),
        groups=Groups(threshold_ms=7.5, flow_aware=True, position=(1.5, -2)),
    )
    assert config.limits.max_inflight == 7
    assert (config.recording.directory, config.recording.run, config.recording.cloud) == ("/events", "r", "hq")


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert writing.main(str(tmp_path), "") == 1
    assert capsys.readouterr().err == f"{tmp_path}: Is a directory\n"
