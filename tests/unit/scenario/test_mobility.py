"""Movement: random waypoint and traces become moves, without flapping, and refuse what cannot be."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from nearcast.errors import ConfigError
from nearcast.scenario.events import Kill, Move, RandomFaults
from nearcast.scenario.files import load_topology
from nearcast.scenario.mobility import Cells, moves, random_waypoint, read_trace, trace_moves
from nearcast.scenario.movement import Trace, Waypoints
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.timeline import timeline
from nearcast.scenario.topology import Host, Site, SiteLink, Topology

# Two cells 10 km apart on a meridian, and a site without a place.
TOPOLOGY = Topology(
    name="t",
    sites=(
        Site(name="south", latitude=0.0, longitude=0.0),
        Site(name="north", latitude=0.09, longitude=0.0),
        Site(name="cloud"),
    ),
    links=(SiteLink(between=("south", "cloud")), SiteLink(between=("north", "cloud"))),
    hosts=(Host(name="car", site="south", count=2), Host(name="lamp", site="cloud")),
)
TRACE = Trace(file="way.csv")


def trace(text: str, mobility: Trace = TRACE) -> list[Move]:
    return trace_moves(TOPOLOGY, text.splitlines(keepends=True), mobility, "way.csv")


def test_a_trace_of_sites_moves_when_the_site_changes() -> None:
    found = trace("time_s,host,site\n0,car-1,south\n5,car-1,north\n6,car-1,north\n\n5.5,car-2,cloud\n9, car-1 , south\n")
    assert found == [
        Move(at_s=5, host="car-1", site="north"),
        Move(at_s=5.5, host="car-2", site="cloud"),
        Move(at_s=9, host="car-1", site="south"),
    ]


def test_a_trace_of_coordinates_goes_to_the_nearest_site() -> None:
    rows = "".join(f"{step},car-1,{step * 0.001},0.0001\n" for step in range(91))
    (one,) = trace("time_s,host,latitude,longitude\n" + rows)
    # Nearer by a tenth: 0.09 - x < 0.9 x, at x = 0.0474.
    assert one == Move(at_s=48, host="car-1", site="north")
    (early,) = trace("time_s,host,latitude,longitude\n" + rows, Trace(file="way.csv", hysteresis=0.0))
    assert early.at_s in (45, 46), "half way, give or take a rounding"


def test_a_host_on_the_border_does_not_flap() -> None:
    rows = "".join(f"{step},car-1,{0.045 + (0.001 if step % 2 else -0.001)},0\n" for step in range(100))
    text = "time_s,host,latitude,longitude\n" + rows
    assert trace(text) == []
    assert len(trace(text, Trace(file="way.csv", hysteresis=0.0))) > 90


def test_rows_may_be_in_any_order() -> None:
    assert [move.at_s for move in trace("time_s,host,site\n9,car-1,north\n1,car-2,north\n")] == [1, 9]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "the first line must be time_s,host,site or time_s,host,latitude,longitude"),
        ("time,host,site\n", 1, "the first line must be"),
        ("time_s,host,site\n1,car-1,south\n1,bus,south\n", 3, "no host 'bus'; there are car-1, car-2, lamp"),
        ("time_s,host,site\n1,car-1,suoth\n", 2, "no site 'suoth'; did you mean 'south'?"),
        ("time_s,host,site\nx,car-1,south\n", 2, "time_s is 'x', not a number"),
        ("time_s,host,site\n-1,car-1,south\n", 2, "time_s is -1: must be between 0"),
        ("time_s,host,site\nnan,car-1,south\n", 2, "time_s is nan"),
        ("time_s,host,site\n1,car-1\n", 2, "2 values where the header has 3"),
        ("time_s,host,latitude,longitude\n1,car-1,91,0\n", 2, "latitude is 91: must be between -90 and 90"),
        ("time_s,host,latitude,longitude\n1,car-1,1,inf\n", 2, "longitude is inf"),
    ],
)
def test_a_trace_is_refused_by_line(text: str, line: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trace(text)
    assert caught.value.line == line
    assert str(caught.value).startswith(f"way.csv:{line}: ")
    assert says in str(caught.value)


def test_a_trace_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace: No such file"):
        read_trace(TOPOLOGY, Trace(file=str(tmp_path / "none.csv")))
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not a CSV file"):
        read_trace(TOPOLOGY, Trace(file=str(tmp_path / "x.csv")))


def test_a_trace_of_coordinates_needs_sites_with_coordinates() -> None:
    nowhere = Topology(name="t", sites=(Site(name="a"),), hosts=(Host(name="h", site="a"),))
    with pytest.raises(ConfigError, match="needs sites with coordinates; t has none"):
        trace_moves(nowhere, ["time_s,host,latitude,longitude\n"], TRACE, "x")


def test_swarms_change_zones_while_they_fly() -> None:
    """ePulsar 5.8.1: eight swarms, random waypoint at 50 m/s, ten minutes, "several mobility-driven topic migrations"."""
    uav = load_topology("uav")
    waypoints = Waypoints(hosts=("swarm-*",), min_speed_mps=50, max_speed_mps=50)
    found = random_waypoint(uav, waypoints, 600.0, Random(1))
    assert len(found) >= 8
    where = {name: host.site for host in uav.hosts for name in host.names()}
    for move in found:
        assert move.host.startswith("swarm-")
        assert move.site.startswith("zone-")
        assert move.site != where[move.host], "a move is a change"
        assert 0 <= move.at_s < 600
        where[move.host] = move.site
    assert [move.at_s for move in found] == sorted(move.at_s for move in found)
    assert found == random_waypoint(uav, waypoints, 600.0, Random(1))
    assert found != random_waypoint(uav, waypoints, 600.0, Random(2))


def test_a_host_goes_its_way_whoever_else_moves() -> None:
    uav = load_topology("uav")
    settings = {"min_speed_mps": 50.0, "max_speed_mps": 50.0, "max_pause_s": 5.0}
    alone = random_waypoint(uav, Waypoints(hosts=("swarm-3",), **settings), 900.0, Random(4))  # type: ignore[arg-type]
    together = random_waypoint(uav, Waypoints(hosts=("swarm-*",), **settings), 900.0, Random(4))  # type: ignore[arg-type]
    assert alone
    assert alone == [move for move in together if move.host == "swarm-3"]


def test_a_fast_host_moves_more_often_than_a_slow_one() -> None:
    def count(speed_mps: float) -> int:
        waypoints = Waypoints(hosts=("car-*",), min_speed_mps=speed_mps, max_speed_mps=speed_mps)
        return len(random_waypoint(TOPOLOGY, waypoints, 5_000.0, Random(1)))

    assert count(100) > 3 * count(10) > 0


def test_a_host_that_stands_still_does_not_move() -> None:
    waypoints = Waypoints(hosts=("car-1",), min_speed_mps=100, max_speed_mps=100, max_pause_s=1e6)
    assert len(random_waypoint(TOPOLOGY, waypoints, 5_000.0, Random(1))) <= 1


def test_one_from_elsewhere_comes_into_the_area_first() -> None:
    found = random_waypoint(TOPOLOGY, Waypoints(hosts=("lamp",)), 60.0, Random(1))
    assert found[0].at_s == 0
    assert found[0].site in ("south", "north")


@pytest.mark.parametrize(
    ("waypoints", "duration_s", "says"),
    [
        (Waypoints(hosts=("bus",)), 60.0, "no host 'bus'"),
        (Waypoints(hosts=("car-*",), sites=("south",)), 60.0, "needs two sites or more with coordinates; t has 1"),
        (Waypoints(hosts=("car-*",), sites=("south", "cloud")), 60.0, "cloud has neither city nor coordinates"),
        (Waypoints(hosts=("car-*",), sites=("south", "x")), 60.0, "no site 'x'"),
        (Waypoints(hosts=("car-*",)), 1e8, "more than 2,000,000 steps"),
        (Waypoints(hosts=("car-*",), max_speed_mps=50_000), 60.0, "crosses the area of the sites within one step"),
    ],
)
def test_waypoints_that_cannot_be(waypoints: Waypoints, duration_s: float, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        random_waypoint(TOPOLOGY, waypoints, duration_s, Random(1))
    assert says in str(caught.value)


def test_sites_at_one_place_are_no_area() -> None:
    sites = (Site(name="a", latitude=1, longitude=1), Site(name="b", latitude=1, longitude=1))
    topology = Topology(name="t", sites=sites, hosts=(Host(name="h", site="a"),))
    with pytest.raises(ConfigError, match="within one step"):
        random_waypoint(topology, Waypoints(hosts=("h",)), 60.0, Random(1))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hosts": ()}, "`hosts` must name at least one"),
        ({"min_speed_mps": 0}, "`min_speed_mps` must be between 0.01"),
        ({"min_speed_mps": 20}, "`max_speed_mps` must not be below `min_speed_mps`"),
        ({"hysteresis": 1}, "`hysteresis` must be between 0 and 0.9"),
        ({"step_s": 0}, "`step_s` must be between"),
        ({"max_pause_s": -1}, "`max_pause_s` must be 0 or more"),
    ],
)
def test_values_that_make_no_sense(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Waypoints(**({"hosts": ("h",)} | change))  # type: ignore[arg-type]


def test_the_nearest_cell_over_the_date_line() -> None:
    sites = (Site(name="fiji", latitude=-17, longitude=178), Site(name="samoa", latitude=-14, longitude=-171))
    cells = Cells(Topology(name="t", sites=sites))
    assert cells.choose(-16, -179, "samoa", 0.0) == "fiji"


def test_the_timeline_is_everything_in_order(tmp_path: Path) -> None:
    (tmp_path / "way.csv").write_text("time_s,host,site\n5,car-1,north\n59,car-1,south\n500,car-1,north\n")
    scenario = Scenario(
        name="s",
        topology=TOPOLOGY,
        events=(Kill(at_s=50, host="lamp"), Kill(at_s=5, host="lamp")),
        mobility=(Trace(file=str(tmp_path / "way.csv")), Waypoints(hosts=("car-2",), max_speed_mps=500)),
        random_faults=RandomFaults(hosts=("lamp",), crashes_per_minute=10),
    )
    events = timeline(scenario, 3)
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert set(scenario.events) <= set(events)
    assert [event.at_s for event in events if isinstance(event, Move) and event.host == "car-1"] == [5, 59], "until the end"
    assert timeline(scenario, 3) == events != timeline(scenario, 4)
    without = Scenario(name="s", topology=TOPOLOGY, random_faults=scenario.random_faults)
    assert set(timeline(without, 3)) <= set(events), "faults do not depend on who moves"


def test_moves_takes_either_kind(tmp_path: Path) -> None:
    (tmp_path / "way.csv").write_text("time_s,host,site\n5,car-1,north\n")
    assert moves(TOPOLOGY, Trace(file=str(tmp_path / "way.csv")), 60.0, Random(1)) == [
        Move(at_s=5, host="car-1", site="north")
    ]
    assert moves(TOPOLOGY, Waypoints(hosts=("lamp",)), 60.0, Random(1))
