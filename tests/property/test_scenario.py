"""Descriptions of deployments: what is written is read, garbage is refused in one line, checks agree with the network."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearcast.configfile import Document
from nearcast.errors import ConfigError
from nearcast.network.conditions import Conditions
from nearcast.scenario.assembly import build_network
from nearcast.scenario.checks import scenario_problems, topology_problems
from nearcast.scenario.drawing import draw
from nearcast.scenario.events import Event, RandomFaults
from nearcast.scenario.files import load_scenario, load_topology
from nearcast.scenario.identity import Identity, decode_identity, encode_identity
from nearcast.scenario.mobility import trace_moves
from nearcast.scenario.movement import Trace
from nearcast.scenario.placeholders import fill
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.topology import Host, LatencyModel, Process, Site, SiteLink, Topology

NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,5}", fullmatch=True)
SHARES = st.sampled_from([0.0, 0.25, 1.0])
CONDITIONS = st.builds(
    Conditions,
    latency_ms=st.sampled_from([0.0, 0.5, 20.0]),
    jitter_ms=SHARES,
    jitter=st.sampled_from(["uniform", "normal", "lognormal", "pareto"]),
    loss=SHARES,
    bandwidth_mbps=st.sampled_from([0.0, 100.0]),
    reorder=SHARES,
    duplicate=SHARES,
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@st.composite
def topologies(draw_from: st.DrawFn) -> Topology:
    """Topologies whose references are right; whether all sites reach each other is left to chance."""
    names = draw_from(st.lists(NAMES, min_size=2, max_size=9, unique=True).filter(lambda names: "data" not in names))
    sites, hosts = names[: len(names) // 2 + 1], names[len(names) // 2 + 1 :]
    pairs = [(one, other) for one in sites for other in sites if one != other]
    ends = draw_from(st.lists(st.sampled_from(pairs), unique=True, max_size=6)) if pairs else []
    latencies = draw_from(st.lists(st.sampled_from([0.0, 1.0, 7.5]), min_size=len(ends), max_size=len(ends)))
    modelled = draw_from(st.booleans())
    return Topology(
        name="t",
        description=draw_from(TEXTS),
        sites=tuple(
            Site(name=name, latitude=float(position), longitude=-float(position), local=draw_from(CONDITIONS))
            if modelled
            else Site(name=name)
            for position, name in enumerate(sites)
        ),
        links=tuple(
            SiteLink(between=between, one_way=True, latency_ms=latency_ms)
            for between, latency_ms in zip(ends, latencies, strict=True)
        ),
        model=LatencyModel(inflation=2.0, jitter_ms=1.0) if modelled else None,
        hosts=tuple(
            Host(name=name, site=draw_from(st.sampled_from(sites)), access=draw_from(CONDITIONS), ports=(1, 2))
            for name in hosts
        ),
        processes=tuple(
            Process(
                name=f"p{position}",
                host=name,
                command=("run", "{" + hosts[0] + "}", "{data}", "{{}}"),
                environment={"A": draw_from(TEXTS).replace("{", "{{").replace("}", "}}")},
            )
            for position, name in enumerate(hosts)
        ),
    )


def toml(value: Any) -> str:
    """A value in TOML, tables inline."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items() if inner is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    # JSON's strings are TOML's but for characters that only TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def document(struct: msgspec.Struct) -> str:
    """A struct as a file."""
    fields = msgspec.to_builtins(struct).items()
    return "".join(f"{name} = {toml(value)}\n" for name, value in fields if value is not None)


@given(topologies())
def test_what_is_written_is_read(topology: Topology) -> None:
    assert Document(document(topology), "x").convert(Topology) == topology


@given(topologies(), st.integers(0, 2**32))
def test_the_check_of_ways_agrees_with_the_network(topology: Topology, seed: int) -> None:
    """No problem is found exactly if a packet can get from every site to every other."""
    everywhere = tuple(Host(name=f"at-{site.name}-0", site=site.name) for site in topology.sites)
    topology = msgspec.structs.replace(topology, hosts=everywhere, processes=())
    problems = list(topology_problems(topology))
    if problems:
        assert all("nothing leads from" in problem.message for problem in problems)
        with pytest.raises(ConfigError):
            build_network(topology, Random(seed))
        source, _, target = problems[0].message.partition("from ")[2].partition(":")[0].partition(" to ")
        # The oracle is the same topology with a way that is no way: a model that puts every other pair at a known distance.
        sites = tuple(Site(name=site.name, latitude=0.0, longitude=0.0) for site in topology.sites)
        model = LatencyModel(kind="linear", ms_per_km=0.0, base_ms=1e6)
        network, _ = build_network(msgspec.structs.replace(topology, sites=sites, model=model), Random(seed))
        index = network.sites.index
        assert network.between_sites_ms(index(source), index(target)) == 1e6
    else:
        network, names = build_network(topology, Random(seed))
        assert all(network.one_way_ms(a, b) < math.inf for a in range(len(names)) for b in range(len(names)))


@given(st.data())
def test_a_wrong_name_is_found_at_its_line(data: st.DataObject) -> None:
    """Whichever host names a site that is not there, the error names that host's line."""
    count = data.draw(st.integers(1, 8))
    wrong = data.draw(st.integers(0, count - 1))
    lines = ['name = "t"', "[[sites]]", 'name = "s"']
    expected = 0
    for number in range(count):
        lines += data.draw(st.lists(st.sampled_from(["", "# site = 'x'", "  "]), max_size=3))
        lines += ["[[hosts]]", f'name = "h{number}"']
        lines += data.draw(
            st.lists(st.sampled_from(["", "ports = [\n  1,\n  2]", "access.loss = 0.5"]), max_size=3, unique=True)
        )
        lines.append(f'site = "{"x" if number == wrong else "s"}"')
        if number == wrong:
            expected = "\n".join(lines).count("\n") + 1
    text = "\n".join(lines)
    read = Document(text, "x.toml")
    (problem,) = topology_problems(read.convert(Topology))
    error = read.refusal(problem.steps, problem.message)
    assert (error.line, error.key) == (expected, f"hosts[{wrong}].site")


@st.composite
def spoilt_files(draw_from: st.DrawFn) -> bytes:
    """A good scenario file with bytes cut out, doubled, replaced."""
    good = (Path(__file__).parents[2] / "docs/reference/topology.md").read_text().split("```toml\n")
    text = bytearray(good[draw_from(st.integers(1, 2))].partition("```")[0].encode())
    for _ in range(draw_from(st.integers(1, 4))):
        start = draw_from(st.integers(0, len(text) - 1))
        length = draw_from(st.integers(0, 30))
        text[start : start + length] = draw_from(
            st.one_of(st.binary(max_size=8), st.sampled_from([b"[[", b'"', b"=", b"\n", b"-1"]))
        )
    return bytes(text)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spoilt")


@settings(max_examples=300)
@given(content=st.one_of(spoilt_files(), st.binary(max_size=60), TEXTS.map(str.encode)))
def test_garbage_is_refused_in_one_line(directory: Path, content: bytes) -> None:
    (directory / "x.toml").write_bytes(content)
    for load in (load_topology, load_scenario):
        said = ""
        try:
            load(directory / "x.toml")
        except ConfigError as error:
            said = str(error)
        assert "\n" not in said
        assert len(said) < 2_000


@given(st.builds(Identity, *[st.integers(0, 2**64 - 1)] * 3), st.integers(32, 3_000))
def test_identities_there_and_back(identity: Identity, size: int) -> None:
    payload = encode_identity(identity, size)
    assert len(payload) == size
    assert decode_identity(payload) == identity


@given(st.binary(max_size=100))
def test_garbage_has_no_identity(payload: bytes) -> None:
    assert decode_identity(payload) is None
    assert decode_identity(b"NCID" + payload) is None


@given(TEXTS)
def test_braces_written_twice_are_braces(text: str) -> None:
    assert fill(text.replace("{", "{{").replace("}", "}}"), {}) == text


@settings(max_examples=60)
@given(
    faults=st.builds(
        RandomFaults,
        kills_per_minute=st.floats(0, 30),
        crashes_per_minute=st.floats(0, 30),
        pauses_per_minute=st.floats(0, 30),
        cuts_per_minute=st.floats(0, 30),
        slow_links_per_minute=st.floats(0, 30),
        skews_per_minute=st.floats(0, 30),
        max_fault_s=st.floats(0.001, 1_000),
        max_skew_s=st.floats(0, 10),
        quiet_s=st.floats(0, 100),
    ),
    count=st.integers(1, 12),
    duration_s=st.floats(0.1, 200),
    seed=st.integers(0, 2**32),
)
def test_random_faults_are_valid_events_that_end(faults: RandomFaults, count: int, duration_s: float, seed: int) -> None:
    topology = Topology(name="t", sites=(Site(name="s"),), hosts=(Host(name="h", site="s", count=count),))
    events = draw(faults, topology.host_names(), duration_s, Random(seed))
    assert events == draw(faults, topology.host_names(), duration_s, Random(seed))
    scenario = Scenario(name="x", topology=topology, duration_s=duration_s, settle_s=0, events=events)
    assert list(scenario_problems(scenario, topology)) == []
    for event in events:
        lasting_s = getattr(event, "for_s", None) or getattr(event, "restart_after_s", None) or 0.0
        assert event.at_s + lasting_s <= duration_s - faults.quiet_s + 1e-5
    # What goes to the emulated WAN's router over its control socket comes out the same.
    assert msgspec.json.decode(msgspec.json.encode(events), type=tuple[Event, ...]) == events


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["a-1", "a-2"]), st.sampled_from(["x", "y", "z"])), max_size=30))
def test_a_trace_ends_where_it_says(rows: list[tuple[int, str, str]]) -> None:
    """Played move by move, each host is at every moment where the last row up to then put it."""
    topology = Topology(
        name="t",
        sites=(Site(name="x"), Site(name="y"), Site(name="z")),
        links=(SiteLink(between=("x", "y")), SiteLink(between=("y", "z"))),
        hosts=(Host(name="a", site="x", count=2),),
    )
    lines = ["time_s,host,site\n", *(f"{at_s},{host},{site}\n" for at_s, host, site in rows)]
    moves = trace_moves(topology, lines, Trace(file="f"), "f")
    for now in range(51):
        told = {"a-1": "x", "a-2": "x"}
        told.update({host: site for at_s, host, site in sorted(rows, key=lambda row: row[0]) if at_s <= now})
        played = {"a-1": "x", "a-2": "x"}
        played.update({move.host: move.site for move in moves if move.at_s <= now})
        assert played == told
