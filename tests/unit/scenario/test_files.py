"""Topologies and scenarios from files: what is refused, at which line, and what is found by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearcast.errors import ConfigError
from nearcast.scenario.events import Kill
from nearcast.scenario.files import load_scenario, load_topology, ready_scenarios, ready_topologies, resolve
from nearcast.scenario.movement import Trace
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.scenario.topology import Host, LatencyModel, Site, Topology

SITES = """name = "try"
[[sites]]
name = "a"
[[sites]]
name = "b"
"""
LINK = """[[links]]
between = ["a", "b"]
"""
HOSTS = """[[hosts]]
name = "broker"
site = "a"
[[hosts]]
name = "car"
site = "b"
count = 3
"""
WHOLE = SITES + LINK + HOSTS  # 14 lines


def topology_refused(directory: Path, text: str) -> ConfigError:
    (directory / "try.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_topology(directory / "try.toml")
    assert str(caught.value).startswith(f"{directory}/try.toml:")
    assert "\n" not in str(caught.value)
    return caught.value


def scenario_refused(directory: Path, text: str) -> ConfigError:
    (directory / "net.toml").write_text(WHOLE, encoding="utf-8")
    (directory / "run.toml").write_text(f'name = "run"\ntopology = "net.toml"\n{text}', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_scenario(directory / "run.toml")
    assert str(caught.value).startswith(f"{directory}/run.toml:")
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("text", "line", "key", "says"),
    [
        (SITES + '[[hosts]]\nname = "x"\nsite = "aa"\n' + LINK, 8, "hosts[0].site", "no site 'aa'; did you mean 'a'?"),
        (SITES + '[[hosts]]\nname = "x"\nsite = "zzz"\n' + LINK, 8, "hosts[0].site", "no site 'zzz'; there are a, b"),
        (SITES + '[[links]]\nbetween = [\n "a",\n "c"]', 9, "links[0].between[1]", "no site 'c'"),
        (SITES + '[[links]]\nbetween = ["a", "a"]', 7, "links[0].between", "must be two sites"),
        (SITES + LINK + LINK, 9, "links[1].between", "a to b is described by links[0] already"),
        (SITES + LINK + LINK + "one_way = true", 9, "links[1].between", "a to b is described by links[0] already"),
        (SITES + '[[sites]]\nname = "a"\n' + LINK, 7, "sites[2].name", "the name a is taken by sites[0] already"),
        (SITES + LINK + '[[hosts]]\nname = "a"\nsite = "b"', 9, "hosts[0].name", "the name a is taken by sites[0]"),
        (WHOLE + '[[hosts]]\nname = "car-2"\nsite = "b"', 16, "hosts[2].name", "the name car-2 is taken by hosts[1]"),
        (WHOLE + '[[hosts]]\nname = "data"\nsite = "b"', 16, "hosts[2].name", "must not be `data` or `host`"),
        (WHOLE + '[[hosts]]\nname = "x y"\nsite = "b"', 16, "hosts[2].name", "letters, digits"),
        (WHOLE + '[[hosts]]\nname = "x"\nsite = "b"\ncount = 0', 18, "hosts[2].count", "between 1 and 100,000"),
        (WHOLE + '[[hosts]]\nname = "x"\nsite = "b"\ncount = 99999', 18, "hosts[2].count", "more than 100,000 hosts in all"),
        (WHOLE + '[[hosts]]\nname = "x"\nsite = "b"\nports = [1, 0]', 18, "hosts[2].ports", "between 1 and 65,535"),
        (WHOLE + '[[hosts]]\nname = "x"\nsite = "b"\n[hosts.access]\nloss = 2', 19, "hosts[2].access.loss", "between 0 and 1"),
        (WHOLE + "mtu_bytes = 1", 15, "hosts[1].mtu_bytes", "unknown key"),
        ("mtu_bytes = 1\n" + WHOLE, 1, "mtu_bytes", "between 576 and 65,535"),
        (SITES, None, "links", "nothing leads from a to b: add a link, or a [model]"),
        (SITES + LINK + "one_way = true", 6, "links", "nothing leads from b to a"),
        (
            SITES + '[model]\nkind = "linear"',
            2,
            "sites[0]",
            "a needs a city or coordinates: the linear model goes by distance",
        ),
        (SITES + '[model]\nkind = "matrix"', 6, "model.file", "is needed by a matrix model"),
        (SITES + '[model]\nfile = "x.csv"', 7, "model.file", "means nothing to a fibre model"),
        (SITES + "[model]\ninflation = 0.5", 7, "model.inflation", "between 1 and 100"),
        (SITES + "[model]\nloss = 1.5", 7, "model.loss", "between 0 and 1"),
        (SITES + "[model]\njitter = 'bell'", 7, "model.jitter", '"uniform" or "normal"'),
        (SITES + "latitude = 1.0\n" + LINK, 4, "sites[1].longitude", "is missing beside `latitude`"),
        (SITES + "latitude = 91\nlongitude = 0\n" + LINK, 6, "sites[1].latitude", "between -90 and 90"),
        (SITES + "latitude = nan\nlongitude = 0\n" + LINK, 6, "sites[1].latitude", "between -90 and 90, not nan"),
        (SITES + "city = 'Rome'\nlatitude = 1\nlongitude = 0\n" + LINK, 6, "sites[1].city", "keep one of them"),
        (SITES + "tier = 'fog'\n" + LINK, 6, "sites[1].tier", '"cloud" or "region"'),
        ('name = "x"\nsites = []', 2, "sites", "at least one"),
        ("sites = []", None, "name", "is missing"),
        (
            WHOLE + "[[processes]]\nname = 'p'\nhost = 'brker'\ncommand = ['x']",
            17,
            "processes[0].host",
            "did you mean 'broker'?",
        ),
        (
            WHOLE + "[[processes]]\nname = 'p'\nhost = 'car'\ncommand = ['x']",
            17,
            "processes[0].host",
            "car stands for 3 hosts: write car-* for all of them",
        ),
        (WHOLE + "[[processes]]\nname = 'p'\nhost = 'car-1'\ncommand = []", 18, "processes[0].command", "name a program"),
        (
            WHOLE + "[[processes]]\nname = 'p'\nhost = 'car-1'\ncommand = ['x',\n '{brokr}']",
            19,
            "processes[0].command[1]",
            "{brokr} is neither {data} nor {host} nor a host: no host 'brokr'; did you mean 'broker'?",
        ),
        (WHOLE + "[[processes]]\nname = 'p'\nhost = 'broker'\ncommand = ['{']", 18, "processes[0].command", "written `{{`"),
        (
            WHOLE + "[[processes]]\nname = 'p'\nhost = 'broker'\ncommand = ['x']\n" * 2,
            20,
            "processes[1].name",
            "the name p is taken by processes[0]",
        ),
        (
            WHOLE + "[[processes]]\nname = 'p'\nhost = 'broker'\ncommand = ['x']\n[processes.environment]\n'A=B' = 'c'",
            19,
            "processes[0].environment",
            "without `=`",
        ),
        (
            WHOLE + "[[processes]]\nname = 'p'\nhost = 'broker'\ncommand = ['x']\nenvironment.A = 'x'\nenvironment.B = '{x}'",
            20,
            "processes[0].environment.B",
            "{x} is neither",
        ),
        (
            WHOLE + "[[processes]]\nname = 'p'\nhost = 'car-*'\ncommand = ['x']\n"
            "[[processes]]\nname = 'p-car-2'\nhost = 'broker'\ncommand = ['x']\n",
            20,
            "processes[1].name",
            "the name p-car-2 is taken by processes[0]",
        ),
        (
            WHOLE + "[[processes]]\nname = 'p'\nhost = 'broker'\ncommand = ['x']\nready.port = 0",
            19,
            "processes[0].ready.port",
            "between 1 and",
        ),
        ('topology = "uav"\nname = "x"', 1, "topology", "this is a scenario, not a topology"),
    ],
)
def test_topologies_are_refused_by_line_and_key(tmp_path: Path, text: str, line: int | None, key: str, says: str) -> None:
    error = topology_refused(tmp_path, text)
    assert (error.line, error.key) == (line, key)
    assert says in str(error)


@pytest.mark.parametrize(
    ("text", "line", "key", "says"),
    [
        ("[[brokers]]\nhost = 'brokr'", 4, "brokers[0].host", "no host 'brokr'; did you mean 'broker'?"),
        ("[[brokers]]\nhost = 'car'", 4, "brokers[0].host", "car stands for 3 hosts: write car-* for all of them"),
        ("[[brokers]]\nhost = 'x*'", 4, "brokers[0].host", "no host begins with 'x'"),
        (
            "[[brokers]]\nhost = 'car-1'\n[[brokers]]\nhost = 'c*'",
            5,
            "brokers[1]",
            "port 1883 of car-1 is taken by brokers[0]",
        ),
        ("[[brokers]]\nhost = 'broker'\nport = 0", 5, "brokers[0].port", "between 1 and 65,535"),
        ("[[clients]]\nname = 'c'\nhost = 'car*'\nbroker = 'broker'", 6, "clients[0].broker", "nothing listens on port 1883"),
        ("[[clients]]\nname = 'c'\nhost = 'bus'\nbroker = 'broker'", 5, "clients[0].host", "no host 'bus'"),
        ("[[clients]]\nname = 'c/d'\nhost = 'car*'\nbroker = 'broker'", 4, "clients[0].name", "none of / + # @"),
        (
            "brokers = [{host = 'broker'}]\n[[clients]]\nname = 'c'\nhost = 'car*'\nbroker = 'broker'\ncount = 400000",
            8,
            "clients[0].count",
            "more than 1,000,000 clients",
        ),
        (
            "brokers = [{host = 'broker'}]\n"
            "[[clients]]\nname = 'c-1'\nhost = 'car-1'\nbroker = 'broker'\n"
            "[[clients]]\nname = 'c'\nhost = 'car-1'\nbroker = 'broker'\ncount = 2",
            9,
            "clients[1].name",
            "the name c-1 is taken by clients[0]",
        ),
        (
            "[[clients]]\nname = 'c'\nhost = 'car-1'\nbroker = 'broker'\nprotocol = '4'",
            7,
            "clients[0].protocol",
            '"5.0" or "3.1.1"',
        ),
        (
            "[[clients]]\nname = 'c'\nhost = 'car-1'\nbroker = 'broker'\n[[clients.publish]]\ntopic = 'a/{car}'",
            8,
            "clients[0].publish[0].topic",
            "knows {client}, {index} and {host}, not {car}",
        ),
        (
            "[[clients]]\nname = 'c'\nhost = 'car-1'\nbroker = 'broker'\npublish = [{topic = 'a/+'}]",
            7,
            "clients[0].publish[0].topic",
            "it names one topic",
        ),
        (
            "[[clients]]\nname = 'c'\nhost = 'car-1'\nbroker = 'broker'\nsubscribe = [{filter = 'a/#/#'}]",
            7,
            "clients[0].subscribe[0].filter",
            "`#` as the whole last one",
        ),
        (
            "[[clients]]\nname = 'c'\nhost = 'car-1'\nbroker = 'broker'\npublish = [{topic = 'a', payload_bytes = 19}]",
            7,
            "clients[0].publish[0].payload_bytes",
            "between 20 and",
        ),
        (
            "[[clients]]\nname = 'c'\nhost = 'car-1'\nbroker = 'broker'\npublish = [{topic = 'a', rate_hz = 0}]",
            7,
            "clients[0].publish[0].rate_hz",
            "between 1e-06 and",
        ),
        (
            "[[clients]]\nname = 'c'\nhost = 'x'\nbroker = 'y'\nstart_s = 5\nstop_s = 5",
            8,
            "clients[0].stop_s",
            "after `start_s`",
        ),
        ("[[events]]\nat_s = 1\nkind = 'kill'\nhost = 'bus'", 6, "events[0].host", "no host 'bus'"),
        ("[[events]]\nat_s = 1\nkind = 'kil'\nhost = 'bus'", 5, "events[0].kind", '"kill" or "crash"'),
        ("[[events]]\nat_s = -1\nkind = 'heal'", 4, "events[0].at_s", "must be 0 or more"),
        ("[[events]]\nat_s = 71\nkind = 'heal'", 4, "events[0].at_s", "the run is over after 70 s"),
        ("[[events]]\nat_s = 1\nkind = 'move'\nhost = 'car-1'\nsite = 'c'", 7, "events[0].site", "no site 'c'"),
        ("[[events]]\nat_s = 1\nkind = 'cut'\nsource = ['a', 'c']", 6, "events[0].source[1]", "no host or site 'c'"),
        ("[[events]]\nat_s = 1\nkind = 'cut'\nsource = []", 6, "events[0].source", "at least one"),
        ("[[events]]\nat_s = 1\nkind = 'cut'\nsource = ['a']\nfor_s = 0", 7, "events[0].for_s", "above 0"),
        (
            "[[events]]\nat_s = 1\nkind = 'link'\nbetween = ['a', 'z']\nconditions = {}",
            6,
            "events[0].between[1]",
            "no site 'z'",
        ),
        (
            "[[events]]\nat_s = 1\nkind = 'link'\nbetween = ['a', 'b']\nconditions = {latency = 1}",
            7,
            "events[0].conditions.latency",
            "did you mean `latency_ms`?",
        ),
        ("[[events]]\nat_s = 1\nkind = 'skew'\nhost = 'broker'\nrate = 0", 7, "events[0].rate", "between 0.01 and 100"),
        ("[random_faults]\nhosts = ['brok*', 'bus*']", 4, "random_faults.hosts[1]", "no host begins with 'bus'"),
        ("[random_faults]\nkills_per_minute = -1", 4, "random_faults.kills_per_minute", "between 0 and"),
        ("[random_faults]\nquiet_s = 60", 4, "random_faults.quiet_s", "no time is left for faults"),
        ("[[mobility]]\nkind = 'waypoints'\nhosts = ['bus*']", 5, "mobility[0].hosts[0]", "no host begins with 'bus'"),
        ("[[mobility]]\nkind = 'waypoints'\nhosts = ['car*']", 3, "mobility[0]", "needs two sites with a city or coordinates"),
        ("[[mobility]]\nkind = 'waypoints'\nhosts = ['car*']\nsites = ['a']", 6, "mobility[0].sites[0]", "a has no city"),
        ("[[mobility]]\nkind = 'trace'\nfile = 'x'\nsites = ['q']", 6, "mobility[0].sites[0]", "no site 'q'"),
        ("duration_s = 0", 3, "duration_s", "above 0"),
        ("duration_s = inf", 3, "duration_s", "finite"),
    ],
)
def test_scenarios_are_refused_by_line_and_key(tmp_path: Path, text: str, line: int, key: str, says: str) -> None:
    error = scenario_refused(tmp_path, text)
    assert (error.line, error.key) == (line, key)
    assert says in str(error)


def test_a_topology_inside_a_scenario_is_checked_at_its_lines(tmp_path: Path) -> None:
    text = 'name = "x"\n[topology]\nname = "t"\n[[topology.sites]]\nname = "a"\n[[topology.hosts]]\nname = "h"\nsite = "b"\n'
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_scenario(tmp_path / "x.toml")
    assert (caught.value.line, caught.value.key) == (8, "topology.hosts[0].site")


def test_a_topology_file_is_no_scenario(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(WHOLE)
    with pytest.raises(ConfigError, match=r"x\.toml:2: this is a topology, not a scenario"):
        load_scenario(tmp_path / "x.toml")


def test_a_scenario_gets_its_topology_from_a_file_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.toml").write_text(WHOLE)
    text = 'name = "x"\ntopology = "net.toml"\n[[events]]\nkind = "kill"\nhost = "car-3"\nat_s = 2\n'
    (tmp_path / "run.toml").write_text(text + '[[mobility]]\nkind = "trace"\nfile = "way.csv"\n')
    monkeypatch.chdir("/")
    scenario = load_scenario(str(tmp_path / "run.toml"))
    assert scenario.topology == load_topology(tmp_path / "net.toml")
    assert scenario.events == (Kill(at_s=2, host="car-3"),)
    assert scenario.mobility == (Trace(file=str(tmp_path / "way.csv")),)


def test_an_unknown_topology_is_refused_in_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('name = "x"\ntopology = "uavv"\n')
    with pytest.raises(ConfigError, match=r"run\.toml:2: `topology`: no topology 'uavv'.*did you mean uav\?"):
        load_scenario(tmp_path / "run.toml")


def test_errors_in_a_topology_that_a_scenario_names_are_of_that_file(tmp_path: Path) -> None:
    (tmp_path / "net.toml").write_text(SITES)
    (tmp_path / "run.toml").write_text('name = "x"\ntopology = "net.toml"\n')
    with pytest.raises(ConfigError, match=r"net\.toml: `links`: nothing leads"):
        load_scenario(tmp_path / "run.toml")


def test_the_matrix_of_a_model_is_beside_the_topology(tmp_path: Path) -> None:
    (tmp_path / "net.toml").write_text(SITES + '[model]\nkind = "matrix"\nfile = "rtt.csv"\n')
    model = load_topology(tmp_path / "net.toml").model
    assert model == LatencyModel(kind="matrix", file=str(tmp_path / "rtt.csv"))


def test_a_process_on_many_hosts_is_one_on_each(tmp_path: Path) -> None:
    text = "[[processes]]\nname = 'gateway'\nhost = 'car-*'\ncommand = ['run', '--listen={host}', '{broker}', '{{host}}']\n"
    (tmp_path / "net.toml").write_text(WHOLE + text + "environment = { ME = '{host}', DATA = '{data}' }\n")
    processes = load_topology(tmp_path / "net.toml").processes
    assert [(process.name, process.host) for process in processes] == [
        (f"gateway-car-{number}", f"car-{number}") for number in (1, 2, 3)
    ]
    assert processes[1].command == ("run", "--listen={car-2}", "{broker}", "{{host}}")
    assert processes[1].environment == {"ME": "{car-2}", "DATA": "{data}"}


def test_names_are_looked_up_before_files() -> None:
    assert {"uav", "mmog", "iov", "emma", "canal"} <= set(ready_topologies())
    assert load_topology("iov").name == "iov"
    with pytest.raises(ConfigError, match=r"no topology 'ov': neither ready-made nor a file; did you mean iov\?"):
        load_topology("ov")
    with pytest.raises(ConfigError, match="'iov' is a ready-made topology, not a scenario; name it in a scenario"):
        load_scenario("iov")
    with pytest.raises(ConfigError, match=r"no scenario 'zzzzzz': neither ready-made nor a file"):
        load_scenario("zzzzzz")
    with pytest.raises(ConfigError, match=r"^x/y\.toml: cannot read the topology: No such file"):
        load_topology("x/y.toml")


@pytest.mark.parametrize("name", ready_scenarios())
def test_ready_made_scenarios_load(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.description
    assert isinstance(scenario.topology, Topology)


def test_scenarios_made_in_python_are_checked_too() -> None:
    scenario = resolve(Scenario(name="x", topology="iov", brokers=(Broker(host="broker-*"),)))
    assert isinstance(scenario.topology, Topology)
    with pytest.raises(ConfigError, match=r"`brokers\[0\]\.host`: no host 'x'"):
        resolve(Scenario(name="x", topology="iov", brokers=(Broker(host="x"),)))
    alone = Topology(name="t", sites=(Site(name="a"),), hosts=(Host(name="h", site="b"),))
    with pytest.raises(ConfigError, match=r"`hosts\[0\]\.site`: no site 'b'"):
        resolve(Scenario(name="x", topology=alone))
