"""Where clients go that roam, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from nearcast.errors import ConfigError, InvalidValue
from nearcast.scenario.events import Move
from nearcast.scenario.expansion import expand_clients, sites_of, topology_of
from nearcast.scenario.roaming import itinerary
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.scenario.topology import Host, Site, SiteLink, Topology
from nearcast.scenario.workload import Change, Clients, Subscribing
from nearcast.simulation.runs import simulate

TOPOLOGY = Topology(
    name="t",
    sites=tuple(Site(name=name) for name in ("east", "west", "north")),
    links=(SiteLink(between=("east", "west")), SiteLink(between=("east", "north"))),
    hosts=(
        Host(name="gate-1", site="east"),
        Host(name="gate-2", site="west"),
        Host(name="car-1", site="west"),
        Host(name="car-2", site="north"),
    ),
)


def scenario(**changes: object) -> Scenario:
    clients = Clients(name="car", host="car-*", broker="gate-*", roam=True)
    return Scenario(
        name="roaming",
        topology=TOPOLOGY,
        brokers=(Broker(host="gate-*"),),
        clients=(msgspec.structs.replace(clients, **changes),),
    )


def test_clients_are_where_their_host_is() -> None:
    one, other = expand_clients(scenario())
    assert one.broker == "gate-2"
    assert other.broker == "gate-2", "in turn, where there is none at the site"
    assert one.roams == other.roams == ("gate-1", "gate-2")
    stays, _ = expand_clients(scenario(roam=False))
    assert stays.roams == ()


def test_they_go_on_when_it_moves() -> None:
    found = scenario()
    sites = sites_of(topology_of(found))
    one, other = expand_clients(found)
    moves = [
        Move(at_s=1.0, host="car-1", site="east"),
        Move(at_s=2.0, host="car-2", site="west"),
        Move(at_s=3.0, host="car-1", site="north"),
        Move(at_s=4.0, host="car-1", site="east"),
        Move(at_s=5.0, host="car-1", site="west"),
    ]
    assert itinerary(one, sites, moves) == [(1.0, "gate-1"), (5.0, "gate-2")], "none in the north: it stays"
    assert itinerary(other, sites, moves) == []
    stays, _ = expand_clients(scenario(roam=False))
    assert itinerary(stays, sites, moves) == []


def test_changes_have_their_names_filled_in() -> None:
    change = Change(at_s=1.0, subscribe=(Subscribing(filter="{host}/b", qos=1),), unsubscribe=("{client}/a",))
    client, _ = expand_clients(scenario(changes=(change,)))
    assert client.changes == (
        Change(at_s=1.0, subscribe=(Subscribing(filter="car-1/b", qos=1),), unsubscribe=("car@car-1/a",)),
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Clients(name="c", host="h", broker="b", roam=True), "`roam` needs a `broker` with a trailing `\\*`"),
        (lambda: Change(at_s=1.0), "`subscribe` and `unsubscribe` are both empty"),
        (lambda: Change(at_s=1.0, unsubscribe=("a/#/b",)), "`unsubscribe` may have"),
        (
            lambda: Clients(
                name="c",
                host="h",
                broker="b",
                changes=(Change(at_s=2.0, unsubscribe=("a",)), Change(at_s=1.0, unsubscribe=("b",))),
            ),
            "`changes` must be in the order of their time",
        ),
    ],
)
def test_what_makes_no_sense(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(InvalidValue, match=message):
        make()


def test_the_simulator_says_what_it_cannot() -> None:
    with pytest.raises(ConfigError, match="car@car-1 roams: only clients on the emulated WAN can"):
        simulate(scenario(), 1)
    changing = scenario(roam=False, changes=(Change(at_s=1.0, unsubscribe=("a",)),))
    with pytest.raises(ConfigError, match="changes its subscriptions"):
        simulate(changing, 1)
