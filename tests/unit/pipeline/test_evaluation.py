"""What an evaluation does without Spark: finding and refusing files, sites, bounds, drawing the report."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pytest
from pyarrow import parquet

from nearcast.errors import ConfigError, NearcastError
from nearcast.mqtt.topics import matches
from nearcast.pipeline import evaluate as job
from nearcast.pipeline.evaluation import charts
from nearcast.pipeline.evaluation.filters import FilterIndex, pattern
from nearcast.pipeline.evaluation.inputs import find_inputs, strategies
from nearcast.pipeline.evaluation.places import FOR_EVER, LONG_AGO, Bound, all_bounds, parse_duration_ns, read_sites, sites_of
from nearcast.pipeline.evaluation.report import render
from nearcast.pipeline.evaluation.synthetic import Synthetic, write
from nearcast.recording import EventWriter, MessageEvent, check
from nearcast.scenario.events import Move
from nearcast.scenario.files import resolve
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.scenario.workload import Clients, Publishing, Subscribing


def record(directory: Path, run: str, events: int = 1) -> Path:
    with EventWriter(directory, run) as writer:
        for number in range(events):
            writer.write(MessageEvent(kind="connected", at_ns=number, client="c", path=("b",)))
    return directory


# -- inputs ----------------------------------------------------------------------------------------------------------------


def test_a_folder_of_an_experiment_is_known_with_its_scenario_and_command(tmp_path: Path) -> None:
    folder = tmp_path / "agreement-1"
    record(folder / "events" / "simulation", "agreement-1/simulation")
    record(folder / "events" / "emulation", "agreement-1/emulation", 2)
    (folder / "scenario.json").write_bytes(msgspec.json.encode(scenario()))
    (folder / "figures.json").write_bytes(b'{"parameters": {"seed": 9, "strategy": "flooding"}, "complete": false}')
    (folder / "command.txt").write_text("nearcast experiment agreement\n")
    record(folder / "evaluation", "not events of this run")
    found = find_inputs([folder])
    assert [(run.name, run.rows, run.part) for run in found.runs] == [
        ("agreement-1/emulation", 2, "emulation"),
        ("agreement-1/simulation", 1, "simulation"),
    ]
    about = found.runs[0].folder
    assert about is not None
    assert about.scenario == scenario()
    assert (about.seed, about.command, about.strategy, about.complete) == (
        9,
        "nearcast experiment agreement",
        "flooding",
        False,
    )
    assert strategies(found.runs, []) == dict.fromkeys(("agreement-1/emulation", "agreement-1/simulation"), "flooding")
    assert strategies(found.runs, ["a", "agreement-1/emulation=b"])["agreement-1/emulation"] == "b"
    with pytest.raises(ConfigError, match="there is no run 'other'"):
        strategies(found.runs, ["other=b"])


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [record(tmp_path / name / "events", "load").parent for name in ("one", "two")]
    found = find_inputs(folders)
    assert [run.name for run in found.runs] == ["one/load", "two/load"]
    assert [run.name for run in find_inputs([folders[0], folders[0] / "events"]).runs] == ["load"], "named twice, read once"


def test_what_cannot_be_evaluated_is_refused_in_a_line(tmp_path: Path) -> None:
    good = record(tmp_path / "good", "run")
    cut = tmp_path / "cut" / "events.parquet"
    cut.parent.mkdir()
    cut.write_bytes(next(good.glob("*.parquet")).read_bytes()[:-20])
    (tmp_path / "empty.parquet").write_bytes(b"")
    (tmp_path / "nothing").mkdir()
    foreign = tmp_path / "foreign.parquet"
    parquet.write_table(pyarrow.table({"a": [1]}), foreign)
    newer = tmp_path / "newer.parquet"
    table = parquet.read_table(next(good.glob("*.parquet")))
    metadata = {**table.schema.metadata, b"nearcast.schema_version": b"2"}
    parquet.write_table(table.replace_schema_metadata(metadata), newer)
    no_rows = tmp_path / "no-rows.parquet"
    parquet.write_table(table.slice(0, 0), no_rows)
    cases = {
        tmp_path / "gone": "no such file",
        tmp_path / "nothing": "no recorded events",
        cut: "leave it out with --skip-damaged",
        tmp_path / "empty.parquet": "leave it out with --skip-damaged",
        foreign: "not one of recorded events",
        newer: "version 2",
        no_rows: "hold no events",
    }
    for path, words in cases.items():
        with pytest.raises(NearcastError, match=words) as caught:
            find_inputs([path])
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    kept = find_inputs([good, cut], skip_damaged=True)
    assert kept.rows == 1
    assert any("left out" in note for note in kept.notes)


def test_unfinished_files_are_left_out_with_a_note(tmp_path: Path) -> None:
    directory = record(tmp_path / "events", "run")
    (directory / ".client-1.parquet").write_bytes(b"PAR1")
    found = find_inputs([tmp_path])
    assert found.rows == 1
    assert any("unfinished" in note for note in found.notes)


def test_an_evaluation_among_the_events_is_not_taken_for_events(tmp_path: Path) -> None:
    record(tmp_path, "run")
    (tmp_path / "evaluation" / "runs.parquet").mkdir(parents=True)
    (tmp_path / "evaluation" / "report.html").write_text("")
    parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "evaluation" / "runs.parquet" / "part-0.parquet")
    assert find_inputs([tmp_path]).rows == 1


def test_the_job_refuses_before_spark_starts(tmp_path: Path) -> None:
    record(tmp_path / "run" / "events", "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    given: dict[str, Any] = {"paths": (str(tmp_path / "run"),), "out": str(tmp_path / "out")}
    job.check(job.Options(**given))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"out": str(tmp_path / "full")}, "something else than an evaluation"),
        ({"bound": ("50",)}, "a number and a unit"),
        ({"bound": ("a/#/b=5ms",)}, "cannot be used"),
        ({"bound": ("5ms", "#=7ms")}, "given twice"),
        ({"bucket": "0s"}, "above zero"),
        ({"sites": str(tmp_path / "none.csv")}, "cannot be read"),
        ({"strategy": ("x=y",)}, "no run 'x'"),
    ]
    for change, words in changes:
        with pytest.raises(NearcastError, match=words):
            job.check(job.Options(**{**given, **change}))


# -- sites and bounds ------------------------------------------------------------------------------------------------------


def scenario() -> Scenario:
    return resolve(
        Scenario(
            name="small",
            topology="iov",
            duration_s=10,
            brokers=(Broker(host="broker-1"),),
            clients=(
                Clients(
                    name="car", host="car-1", broker="broker-1", publish=(Publishing(topic="cars/{client}", bound_ms=20.0),)
                ),
                Clients(name="home", host="authority", broker="broker-1", subscribe=(Subscribing(filter="cars/#"),)),
            ),
            events=(Move(at_s=4.0, host="car-1", site="edge-3"),),
        )
    )


def test_sites_and_bounds_come_from_the_scenario(tmp_path: Path) -> None:
    record(tmp_path / "events", "run")
    (tmp_path / "scenario.json").write_bytes(msgspec.json.encode(scenario()))
    runs = find_inputs([tmp_path]).runs
    places = sites_of(runs, None, {"run": 0})
    car = [place for place in places if place.client == "car"]
    assert [(place.from_ns, place.until_ns) for place in car] == [(LONG_AGO, 4_000_000_000), (4_000_000_000, FOR_EVER)]
    assert car[1].site == "edge-3"
    assert all_bounds([Bound.parse("b/#=5ms"), Bound.parse("1s")], runs) == [
        Bound("b/#", 5_000_000),
        Bound("cars/+", 20_000_000, "run"),
        Bound("#", 1_000_000_000),
    ]


def test_sites_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sites.csv"
    path.write_text("client,site\na,Vienna\n\nb, Graz\n")
    assert read_sites(path) == {"a": "Vienna", "b": "Graz"}
    path.write_text("name,place\na,b\n")
    with pytest.raises(ConfigError, match=re.escape("client,site")):
        read_sites(path)
    path.write_text("client,site\na\n")
    with pytest.raises(ConfigError, match=r"sites\.csv:2"):
        read_sites(path)


@pytest.mark.parametrize(
    ("text", "ns"), [("50ms", 50_000_000), ("1.5s", 1_500_000_000), ("200us", 200_000), ("2m", 120 * 10**9)]
)
def test_durations(text: str, ns: int) -> None:
    assert parse_duration_ns(text, "--bound") == ns


@pytest.mark.parametrize("text", ["50", "ms", "-1s", "1e3s", "", "1 fortnight", "99999999999999h"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError, match="a number and a unit"):
        parse_duration_ns(text, "--bound")


@pytest.mark.parametrize("topic_filter", ["#", "+", "a/#", "a/+/c", "+/b", "a", "a/b.c", "a/(b", "/", "/+", "a/+/#", "$sys/#"])
def test_patterns_match_what_the_filter_matches(topic_filter: str) -> None:
    compiled = re.compile(pattern(topic_filter).replace("\\z", "\\Z"))
    for topic in ("a", "a/b", "a/b/c", "a/b.c", "a/bxc", "a/(b", "b", "/", "/a", "$sys/x", "$sys", "a/", "", "a\nb", "a/\n/c"):
        if topic:
            assert bool(compiled.match(topic)) == matches(topic_filter, topic), (topic_filter, topic)


# -- made-up events and the report -----------------------------------------------------------------------------------------


def test_made_up_events_keep_to_the_schema(tmp_path: Path) -> None:
    rows = write(tmp_path, Synthetic(events=4_000, publishers=20, subscribers=6, moves=3, rows_per_file=1_500))
    found = check(tmp_path)
    assert found.problems == ()
    assert found.rows == rows
    assert found.kinds["delivered"] > found.kinds["published"] > 0


class Page(HTMLParser):
    """Tags that open and close, and what would load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [name for name, _ in attrs if name in ("src", "href", "onload", "onclick")]
        if tag not in ("meta", "br", "line", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("line", "rect") and (not self.open or self.open[-1] != tag):
            return
        assert self.open.pop() == tag


def summary(*runs: str, **more: Any) -> dict[str, Any]:
    zeros = dict.fromkeys(
        [
            "published",
            "delivered",
            "expected",
            "lost",
            "lost_unexplained",
            "lost_away",
            "lost_unacknowledged",
            "lost_qos_0",
            "duplicates",
            "out_of_order",
            "retained",
            "unexpected",
            "late",
            "episodes",
            "violation_ms",
            "outages",
            "moves",
            "never_back",
        ],
        0,
    )
    return {
        "events": 3,
        "nearcast": "1",
        "relative_error": 0.005,
        "settle_s": 1.0,
        "bounds": [],
        "notes": [],
        "runs": [{**zeros, "run": run, "strategy": ""} for run in runs],
        **{
            name: []
            for name in [
                "histogram",
                "timeline",
                "worst_topics",
                "site_pairs",
                "longest_episodes",
                "most_losses",
                "brokers",
                "longest_outages",
                "downtime_distribution",
                "until_delivery_distribution",
                "refusals",
            ]
        },
        **more,
    }


def test_a_report_of_nothing_is_a_page() -> None:
    page = Page()
    page.feed(render(summary("run"), title="Nothing"))
    assert page.open == []
    assert "script" not in page.tags


def test_a_report_escapes_every_name_and_loads_nothing() -> None:
    evil = '"><script>alert(1)</script>'
    slot = {"at_s": 0.0, "seconds": 1.0, "late": 1, "samples": 2, "lost": 1, "p50_ms": 5.0, "p95_ms": 6.0, "p99_ms": 7.0}
    slot |= dict.fromkeys(("published_per_s", "deliveries_per_s", "published_bytes_per_s", "delivered_bytes_per_s"), 2.0)
    found = summary(
        evil,
        notes=[evil],
        bounds=[{"filter": evil, "bound_ms": 6.5}],
        histogram=[{"run": evil, "from_ms": 1.0, "to_ms": 1.01, "samples": 1, "share": 1.0}],
        timeline=[{"run": evil, **slot}, {"run": evil, **slot, "at_s": 1.0, "p50_ms": None}],
        site_pairs=[{"run": evil, "publisher_site": evil, "subscriber_site": evil, "p99_ms": 7.0}],
        worst_topics=[{"run": evil, "topic": evil}],
        longest_episodes=[{"run": evil, "topic": evil, "subscriber": evil, "begin_s": 0.0}],
        brokers=[
            {
                "run": evil,
                "strategy": evil,
                "broker": evil,
                "carried_bytes": 10,
                "excess_bytes": 4,
                "excess_share": 0.4,
                "published_messages": 1,
            }
        ],
        longest_outages=[{"run": evil, "client": evil, "reason": evil}],
        downtime_distribution=[{"run": evil, "values_ms": [0.0, 1.0]}],
        refusals=[{"run": evil, "kind": "refused", "reason": evil, "events": 1}],
    )
    found["runs"][0] |= {"lost": 3, "lost_away": 3, "command": evil, "folder": evil}
    text = render(found, title=evil, command=evil)
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.outside == []
    assert "script" not in page.tags
    assert page.tags.count("svg") >= 8
    assert evil not in text


def test_charts_of_one_value_and_of_none() -> None:
    assert "Nothing to show" in charts.line_chart([], x="x", y="y")
    assert "Nothing to show" in charts.line_chart([charts.Line("a", [(1.0, None)])], x="x", y="y")
    assert "<path" in charts.line_chart([charts.Line("a", [(1.0, 1.0)])], x="x", y="y", log_x=True, log_y=True)
    assert "Nothing to show" in charts.bar_chart([], [], x="x", value_format=charts.number)
    assert [charts.number(value) for value in (0, 0.04, 12.5, 1200, 3.4e6)] == ["0", "0.04", "12.5", "1,200", "3.4 M"]


def test_the_program_in_the_guide_is_one() -> None:
    guide = Path(__file__).parents[3] / "docs/guides/evaluating.md"
    (program,) = re.findall(r"^```python\n(.*?)^```", guide.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102
    assert callable(names["slowest"])


def test_what_a_failed_evaluation_left_may_be_replaced(tmp_path: Path) -> None:
    folder = record(tmp_path / "one" / "events", "load").parent
    (tmp_path / "out" / "flows.parquet").mkdir(parents=True)
    job.check(job.Options(paths=(str(folder),), out=str(tmp_path / "out")))


def test_filters_are_found_as_mqtt_matches_them() -> None:
    filters = ["a/#", "a/+/c", "+/one/c", "a/one/c", "#", "b/+", "$special/x", "b", "+", "+/#", "$special/#", "/+", "a//c"]
    index = FilterIndex(filters)
    for topic in ("a", "a/one/c", "a/two/c", "b", "b/x", "b/", "/b", "a//c", "$special/x", "$special", "c/one/c", "a/b/c/d"):
        assert sorted(index.matching(topic)) == sorted(each for each in filters if matches(each, topic)), topic
