"""Events that come at run time, and topologies made in Python, are checked like those in files."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from nearcast.errors import ConfigError
from nearcast.network.conditions import Conditions
from nearcast.scenario.checks import check_scenario, check_topology, event_problems
from nearcast.scenario.events import ChangeAccess, ChangeLink, Cut, Event, Heal, Kill, Move
from nearcast.scenario.files import load_topology
from nearcast.scenario.scenario import Broker, Controller, Gateway, Scenario
from nearcast.scenario.topology import Host, LatencyModel, Site, SiteLink, Topology
from nearcast.scenario.workload import Clients

IOV = load_topology("iov")


@pytest.mark.parametrize(
    "event",
    [
        Kill(at_s=0, host="car-1"),
        Move(at_s=0, host="car-1", site="edge-1"),
        Cut(at_s=0, source=("edge-1", "car-1"), target=("cloud",)),
        ChangeLink(at_s=0, between=("edge-1", "edge-2"), conditions=Conditions(loss=1)),
        Heal(at_s=0),
    ],
)
def test_events_that_are_fine(event: Event) -> None:
    assert list(event_problems(event, IOV)) == []


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Kill(at_s=0, host="car"), "`host`: no host 'car'; did you mean 'car-3'?"),
        (Move(at_s=0, host="car-1", site="edge-4"), "`site`: no site 'edge-4'; did you mean 'edge-3'?"),
        (Move(at_s=0, host="edge-1", site="edge-2"), "`host`: no host 'edge-1'"),
        (Cut(at_s=0, source=("edge-1",), target=("x",)), "`target[0]`: no host or site 'x'"),
        (ChangeLink(at_s=0, between=("edge-1", "car-1"), conditions=Conditions()), "`between[1]`: no site 'car-1'"),
        (ChangeAccess(at_s=0, host="edge-1", conditions=Conditions()), "`host`: no host 'edge-1'"),
    ],
)
def test_events_for_nobody(event: Event, message: str) -> None:
    (problem,) = event_problems(event, IOV)
    assert problem.message.startswith(message)


def test_the_first_problem_is_raised_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^`hosts\[0\]\.site`: no site 'b'; there is a$") as caught:
        check_topology(Topology(name="t", sites=(Site(name="a"),), hosts=(Host(name="h", site="b"),)))
    assert caught.value.key == "hosts[0].site"
    with pytest.raises(ConfigError, match=r"^`brokers\[0\]\.host`: no host begins with 'x'$"):
        check_scenario(Scenario(name="s", topology=IOV, brokers=(Broker(host="x*"),)), IOV)


def test_ways_over_one_way_links() -> None:
    def ring(*pairs: tuple[str, str], model: LatencyModel | None = None) -> Topology:
        sites = tuple(Site(name=name) for name in "abc")
        links = tuple(SiteLink(between=pair, one_way=True) for pair in pairs)
        return Topology(name="t", sites=sites, links=links, model=model)

    check_topology(ring(("a", "b"), ("b", "c"), ("c", "a")))
    with pytest.raises(ConfigError, match="nothing leads from b to a"):
        check_topology(ring(("a", "b"), ("b", "c")))
    with pytest.raises(ConfigError, match="a needs a city or coordinates"):
        check_topology(ring(("a", "b"), ("b", "c"), model=LatencyModel()))
    check_topology(ring(("a", "b"), ("b", "c"), ("c", "a"), model=LatencyModel()))


def test_an_unknown_city_is_a_problem_of_its_site() -> None:
    sites = (Site(name="a", city="Vienna"), Site(name="b", city="Atlnata"))
    with pytest.raises(ConfigError, match=r"`sites\[1\]\.city`: no city 'Atlnata'.*did you mean 'Atlanta, US'"):
        check_topology(Topology(name="t", sites=sites, model=LatencyModel()))


def test_one_site_needs_no_links() -> None:
    check_topology(Topology(name="t", sites=(Site(name="a"),), hosts=(Host(name="h", site="a", count=3),)))


FABRIC = Topology(
    name="t",
    sites=(Site(name="a"),),
    hosts=(Host(name="broker", site="a"), Host(name="car", site="a"), Host(name="hq", site="a")),
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"controller": Controller(host="hp")}, "`controller.host`: no host 'hp'; there are broker, car, hq"),
        ({"controller": Controller(host="broker", port=1884)}, "port 1884 of broker is taken by brokers[0] already"),
        ({"controller": Controller(host="car", http_port=1883)}, "port 1883 of car is taken by gateways[0] already"),
        (
            {"brokers": (Broker(host="broker"),)},
            "`gateways[0]`: has no broker to go to: none of [[brokers]] has `fabric = true`",
        ),
        ({"gateways": ()}, "nothing listens on port 1883 of car: add it to [[brokers]] or [[gateways]]"),
        ({"gateways": (Gateway(host="c"),)}, "`gateways[0].host`: no host 'c'"),
    ],
)
@pytest.mark.parametrize("protocol", ["mqtt", "fabric"])
def test_nodes_of_a_fabric(changes: dict[str, Any], message: str, protocol: str) -> None:
    good = Scenario(
        name="s",
        topology=FABRIC,
        protocol=protocol,
        brokers=(Broker(host="broker", fabric=True),),
        gateways=(Gateway(host="car"),),
        controller=Controller(host="hq"),
        clients=(Clients(name="c", host="car", broker="{host}"),),
    )
    check_scenario(good, FABRIC)
    with pytest.raises(ConfigError) as caught:
        check_scenario(msgspec.structs.replace(good, **changes), FABRIC)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Broker(host="b", fabric=True, port=1884), "`link_port` must not be the same as `port`"),
        (lambda: Broker(host="b", start_s=5, stop_s=5), "`stop_s` must be after `start_s`"),
        (lambda: Controller(host="b", http_port=1885), "`http_port` must not be the same as `port`"),
        (lambda: Controller(host="b", interval_s=0), "`interval_s` must be above 0"),
        (lambda: Gateway(host="b", port=0), "`port` must be between 1 and 65,535"),
        (lambda: Clients(name="c", host="b", broker="b", leave=True), "`leave` needs `stop_s`"),
    ],
)
def test_nodes_that_make_no_sense(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        wrong()
