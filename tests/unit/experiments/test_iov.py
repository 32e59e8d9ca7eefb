"""The experiment ``iov``: its scenario is the paper's, its evaluation says what events say, and misses what is wrong."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from nearcast.emulation import namespaces
from nearcast.errors import ConfigError
from nearcast.experiments import group_watch, perform
from nearcast.experiments.excess import Processed, Tally, processed
from nearcast.experiments.experiment import effective_parameters
from nearcast.experiments.iov import STRATEGIES, Iov, IovParameters, scenario_of, with_mosquitto
from nearcast.experiments.iov_results import GroupsSeen, ways
from nearcast.experiments.measures import Pair, expected_pairs
from nearcast.experiments.nodes import with_nodes
from nearcast.recording import EventWriter, MessageEvent, message_id
from nearcast.scenario.expansion import expand_clients

SIMULATED = IovParameters(simulated=True, duration_s=3.0, strategies=("groups",))


def test_the_published_workload() -> None:
    parameters = effective_parameters(Iov(), {}, quick=False)
    assert parameters.duration_s == 900.0
    assert parameters.strategies == ("flooding", "groups", "relay")
    clients = {client.name: client for client in expand_clients(scenario_of(parameters, "groups"))}
    car, camera = clients["car-1"].publish[0], clients["camera"].publish[0]
    assert (car.topic, car.rate_hz, car.payload_bytes, car.qos) == ("/car-telemetry/realtime/1", 20.0, 20, 0)
    assert (camera.topic, camera.rate_hz, camera.payload_bytes) == ("/traffic-control/monitoring/1", 1.0, 1_000)
    assert [wanted.filter for wanted in clients["car-3-hears"].subscribe] == ["/car-telemetry/realtime/+"]
    assert (clients["car-1"].broker, clients["car-2"].broker, clients["authority"].broker) == (
        "broker-2",
        "broker-3",
        "cloud-broker",
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_links_make_the_latencies_of_the_paper(strategy: str) -> None:
    """Section IV-C: 4 ms at one broker, 7 ms between brokers 2 and 3, 55 ms over the cloud, 44 ms to the authority."""
    found = ways(scenario_of(SIMULATED, strategy), STRATEGIES[strategy])
    between = 55.0 if strategy == "relay" else 7.0
    assert {str(pair): way.model_ms for pair, way in found.items()} == {
        "car-2 → car-3-hears": 4.0,
        "car-3 → car-2-hears": 4.0,
        "car-1 → car-2-hears": between,
        "car-1 → car-3-hears": between,
        "car-2 → car-1-hears": between,
        "car-3 → car-1-hears": between,
        "camera → authority": 44.0,
    }


def test_mosquitto_passes_on_what_was_released() -> None:
    scenario = scenario_of(IovParameters(qos=2), "relay")
    found = {str(pair): way.model_ms for pair, way in ways(scenario, STRATEGIES["relay"], releases=True).items()}
    assert found["car-2 → car-3-hears"] == 4.0
    assert found["car-1 → car-2-hears"] == 55.0 + 2 * 25.0
    assert found["camera → authority"] == 44.0 + 2 * 40.0


def test_clients_of_the_cloud_are_expected_to_hear_of_the_edge() -> None:
    assert Pair("camera", "authority") in expected_pairs(scenario_of(SIMULATED, "relay"))


def test_mosquitto_is_the_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/somewhere/{name}")
    scenario = with_mosquitto(scenario_of(IovParameters(), "groups"), tmp_path)
    processes = {process.name: process for process in with_nodes(scenario).processes}
    assert processes["mosquitto"].command == ("/somewhere/mosquitto", "-c", str(tmp_path / "mosquitto.conf"))
    assert "cloud-broker-mqtt-1883" not in processes
    assert "set_tcp_nodelay true" in (tmp_path / "mosquitto.conf").read_text()
    edge = processes["broker-1-mqtt-1883"].command
    assert edge[edge.index("--cloud") + 1] == "mqtt://{cloud-broker}:1883"


def test_what_it_needs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "available", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    outcome = perform(Iov(), IovParameters(), tmp_path / "out")
    assert "apt install mosquitto" in (outcome.error or "")
    monkeypatch.setattr(namespaces, "available", lambda: "network namespaces need root")
    outcome = perform(Iov(), IovParameters(), tmp_path / "out")
    assert "--set simulated=true" in (outcome.error or "")


@pytest.mark.parametrize(
    "wrong", [{"strategies": ["fly"]}, {"strategies": []}, {"strategies": ["relay", "relay"]}, {"qos": 3}]
)
def test_parameters_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        effective_parameters(Iov(), wrong, quick=False)


def test_groups_as_brokers_tell_them() -> None:
    seen = GroupsSeen.told([{"name": "b", "leader": "c"}, {"name": "c", "leader": "c"}, {"name": "a", "leader": "a"}])
    assert seen.count == 2
    assert seen.members_by_leader == {"a": ["a"], "c": ["b", "c"]}
    silent = [{"name": "a"}, {"name": "b"}, {"name": "c"}]
    assert GroupsSeen.told(silent).count == 0, "not one group of all three"


# -- excess data -----------------------------------------------------------------------------------------------------------


def test_correct_and_redundant(tmp_path: Path) -> None:
    """Published there or wanted there by then; each message once per broker; repetitions and others' are counted apart."""
    with EventWriter(tmp_path, "r") as events:

        def write(kind: Any, client: str, broker: str, at_ns: int, topic: str, identity: int | None = None) -> None:
            sent_ns = at_ns if identity is not None else None
            events.write(
                MessageEvent(
                    kind=kind, at_ns=at_ns, client=client, topic=topic, message_id=identity, sent_ns=sent_ns, path=(broker,)
                )
            )

        one, two, other = (message_id(1, number) for number in range(3))
        write("subscribed", "s", "b", 50, "cars/+")
        write("published", "p", "a", 10, "cars/1", one)
        write("published", "p", "a", 60, "cars/1", two)
        for broker in ("a", "b", "c", "b"):
            write("processed", broker, broker, 10, "cars/1", one)
        for broker in ("a", "b", "c"):
            write("processed", broker, broker, 60, "cars/1", two)
        write("processed", "a", "a", 60, "cars/1", other)
        write("processed", "a", "a", 60, "elsewhere", message_id(2, 0))
    found = processed(tmp_path, {"cars": "cars/#", "nothing": "x"})
    assert found["cars"] == Processed(
        by_broker={"a": Tally(correct=2), "b": Tally(correct=1, redundant=1), "c": Tally(redundant=2)},
        unknown=1,
        repeated=1,
    )
    assert found["cars"].total == Tally(correct=3, redundant=3)
    assert found["cars"].total.excess == 0.5
    assert found["nothing"] == Processed(by_broker={}, unknown=0)
    assert found["nothing"].total.excess is None
    assert processed(tmp_path, {"cars": "cars/#"}, since_ns=20)["cars"].total == Tally(correct=2, redundant=1)


# -- waiting for groups ----------------------------------------------------------------------------------------------------


def facts(**changes: Any) -> dict[str, Any]:
    known = {"name": "b", "leader": "c", "fellows": [{"name": "c"}], "cloud_state": "not needed", "relay": "live"}
    return known | changes


def test_when_a_group_is_formed() -> None:
    assert group_watch.formed(facts(), "c", {"b", "c"})
    assert not group_watch.formed(None, "c", {"b", "c"})
    assert not group_watch.formed(facts(), "b", {"b", "c"}), "another one leads"
    assert not group_watch.formed(facts(), "c", {"a", "b", "c"}), "somebody is missing"
    assert not group_watch.formed(facts(relay="held"), "c", {"b", "c"}), "nothing would reach the cloud"
    leading = facts(leader="b")
    assert not group_watch.formed(leading, "b", {"b", "c"}), "a leader needs the cloud"
    assert group_watch.formed(leading | {"cloud_state": "connected"}, "b", {"b", "c"})


@pytest.fixture
def broker() -> Iterator[tuple[str, list[bytes]]]:
    """A broker that says one thing after the other, and the last one for ever."""
    answers: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers.pop(0) if len(answers) > 1 else answers[0])

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/healthz", answers
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_waits_until_then(broker: tuple[str, list[bytes]], capsys: pytest.CaptureFixture[str]) -> None:
    url, answers = broker
    answers += [b"not ready", b'{"groups": null}', json.dumps({"groups": facts()}).encode()]
    assert group_watch.main([url, "c", "c", "b"]) == 0
    assert json.loads(capsys.readouterr().out)["leader"] == "c"


def test_patience_ends_with_what_is_known(broker: tuple[str, list[bytes]], capsys: pytest.CaptureFixture[str]) -> None:
    url, answers = broker
    answers.append(json.dumps({"groups": facts(leader="b")}).encode())
    assert group_watch.main([url, "c", "c", "b", "--patience", "0"]) == 1
    assert json.loads(capsys.readouterr().out)["leader"] == "b"
    assert group_watch.main([url]) == 0, "without a leader it asks once"
