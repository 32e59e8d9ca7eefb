"""Wildcards and counts: who there is, under which name, with which topics, at which broker."""

from __future__ import annotations

import pytest

from nearcast.errors import ConfigError
from nearcast.scenario.expansion import expand_brokers, expand_clients, expand_gateways, match_hosts, topology_of
from nearcast.scenario.placeholders import fill, placeholders
from nearcast.scenario.scenario import Broker, Gateway, Scenario
from nearcast.scenario.topology import Host, Site, Topology
from nearcast.scenario.workload import Clients, Publishing, Subscribing

TOPOLOGY = Topology(
    name="t",
    sites=(Site(name="a"),),
    hosts=(Host(name="broker", site="a", count=2), Host(name="car", site="a", count=3), Host(name="bus", site="a")),
)


def scenario(*clients: Clients, **changes: object) -> Scenario:
    brokers = (Broker(host="broker-*", durable=True), Broker(host="bus", port=1))
    settings: dict[str, object] = {"name": "s", "topology": TOPOLOGY, "brokers": brokers, "clients": clients}
    return Scenario(**(settings | changes))  # type: ignore[arg-type]


def test_patterns() -> None:
    hosts = TOPOLOGY.host_names()
    assert hosts == ["broker-1", "broker-2", "car-1", "car-2", "car-3", "bus"]
    assert match_hosts("bus", hosts) == ["bus"]
    assert match_hosts("b*", hosts) == ["broker-1", "broker-2", "bus"]
    assert match_hosts("*", hosts) == hosts
    assert match_hosts("car", hosts) == []
    assert match_hosts("*-1", hosts) == [], "only a trailing star stands for others"


def test_brokers() -> None:
    assert expand_brokers(scenario()) == (
        Broker(host="broker-1", durable=True),
        Broker(host="broker-2", durable=True),
        Broker(host="bus", port=1),
    )


def test_gateways_and_the_names_of_nodes() -> None:
    found = expand_gateways(scenario(gateways=(Gateway(host="car-*", start_s=3), Gateway(host="bus", port=2))))
    assert found == (*(Gateway(host=f"car-{n}", start_s=3) for n in (1, 2, 3)), Gateway(host="bus", port=2))
    assert [gateway.name for gateway in found] == ["gateway-car-1", "gateway-car-2", "gateway-car-3", "gateway-bus-2"]
    assert [broker.name for broker in expand_brokers(scenario())] == ["broker-1", "broker-2", "bus-1"]
    with pytest.raises(ConfigError, match=r"`gateways\[0\]\.host`: no host 'x\*'"):
        expand_gateways(scenario(gateways=(Gateway(host="x*"),)))


def test_clients_beside_their_gateway() -> None:
    clients = expand_clients(scenario(Clients(name="c", host="car-*", broker="{host}", count=2)))
    assert [client.broker for client in clients] == [client.host for client in clients]


def test_names_and_topics_of_one_host() -> None:
    group = Clients(
        name="driver",
        host="bus",
        broker="broker-1",
        count=2,
        publish=(Publishing(topic="{host}/{client}/{index}", rate_hz=5), Publishing(topic="plain")),
        subscribe=(Subscribing(filter="{client}/#", qos=1),),
    )
    first, second = expand_clients(scenario(group))
    assert [first.name, second.name] == ["driver-1", "driver-2"]
    assert [stream.topic for stream in second.publish] == ["bus/driver-2/1", "plain"]
    assert second.publish[0].rate_hz == 5
    assert second.subscribe == (Subscribing(filter="driver-2/#", qos=1),)
    assert expand_clients(scenario(Clients(name="one", host="bus", broker="broker-1")))[0].name == "one"


def test_a_group_on_each_host_shares_the_brokers_in_turn() -> None:
    clients = expand_clients(scenario(Clients(name="c", host="car-*", broker="broker-*", count=3)))
    assert [client.name for client in clients[:4]] == ["c@car-1-1", "c@car-1-2", "c@car-1-3", "c@car-2-1"]
    assert [client.index for client in clients[:4]] == [0, 1, 2, 0]
    assert [client.broker for client in clients] == ["broker-1", "broker-2"] * 4 + ["broker-1"]
    assert len({client.name for client in clients}) == 9


def test_when_clients_stop() -> None:
    stops = [None, 20.0, 500.0]
    groups = [Clients(name=f"c{n}", host="bus", broker="broker-1", stop_s=stop) for n, stop in enumerate(stops)]
    assert [client.stop_s for client in expand_clients(scenario(*groups))] == [60, 20, 60]
    leaving = Clients(name="c", host="bus", broker="broker-1", stop_s=20, leave=True)
    assert [client.leave_s for client in expand_clients(scenario(leaving, *groups))] == [20, None, None, None]


def test_what_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`clients\[0\]\.host`: no host 'cra-1'; did you mean 'car-1'\?"):
        expand_clients(scenario(Clients(name="c", host="cra-1", broker="broker-1")))
    with pytest.raises(ConfigError, match=r"`brokers\[0\]\.host`: no host 'x\*'"):
        expand_brokers(scenario(brokers=(Broker(host="x*"),)))
    with pytest.raises(ConfigError, match="is only a name: use load_scenario or resolve"):
        topology_of(scenario(topology="uav"))


def test_placeholders() -> None:
    assert placeholders("a{b}c{d-e_1}") == ["b", "d-e_1"]
    assert fill("{{a}} {a} {b}}}", {"a": "1", "b": "2"}) == "{a} 1 2}"
    assert fill('{{"x": {{}}}}', {}) == '{"x": {}}'
    with pytest.raises(ValueError, match=r"\{c\} in '\{c\}' stands for nothing; known are a, b"):
        fill("{c}", {"a": "", "b": ""})


@pytest.mark.parametrize("text", ["{", "}", "a{b", "{b c}", "{}", "{a.b}", "{a!r}", "{a:>3}", "{0[1]}", "{{}", "{{{"])
def test_braces_without_a_partner_or_a_plain_name(text: str) -> None:
    with pytest.raises(ValueError, match="has no partner"):
        placeholders(text)
