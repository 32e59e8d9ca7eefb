"""The scenarios with owned topics as data, and what is made of a run: from made-up events, with the real evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nearcast.emulation import namespaces
from nearcast.errors import InvalidValue
from nearcast.experiments import mmog, mmog_results, owned_results, uav
from nearcast.experiments.experiment import Experiment, effective_parameters
from nearcast.experiments.mmog import Mmog, MmogParameters
from nearcast.experiments.nodes import configuration
from nearcast.experiments.owned_runs import MigrationView, Told
from nearcast.experiments.run import Outcome, Run, perform
from nearcast.experiments.uav import Uav, UavParameters
from nearcast.recording import EventWriter, MessageEvent, message_id
from nearcast.scenario.expansion import Client, expand_brokers, expand_clients, expand_gateways
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.schedule import publication_times

START_NS = 1_700_000_000 * 10**9


class Silent:
    def step(self, text: str) -> None:
        pass

    def advance(self, share: float) -> None:
        pass


def run_of(experiment: Experiment[Any], parameters: Any, folder: Path) -> tuple[Run[Any], Outcome]:
    outcome = Outcome(
        experiment=experiment.name,
        parameters=parameters,
        quick=False,
        figures={},
        bars=list(experiment.bars(parameters)),
        notes=[],
        plots=[],
        events=[],
        command="",
        started="",
        versions={},
        machine={},
    )
    return Run(parameters, folder, outcome, Silent()), outcome


def value(outcome: Outcome, name: str) -> float | None:
    return next(bar.value for bar in outcome.bars if bar.name == name)


def record(
    folder: Path,
    scenario: Scenario,
    seed: int,
    latency_ms: Callable[[str, float], float],
    wants: Callable[[Client, str, float], bool] | None = None,
) -> None:
    """What clients would have seen if a message took so long, by topic and time."""
    clients = expand_clients(scenario)
    with EventWriter(folder, "test", source="test") as writer:
        for client in clients:
            for wanted in client.subscribe:
                writer.write(MessageEvent(kind="subscribed", at_ns=START_NS, client=client.name, topic=wanted.filter, qos=1))
        for client in clients:
            for stream, publishing in enumerate(client.publish):
                for sequence, at_s in enumerate(publication_times(client, stream, seed)):
                    sent_ns = START_NS + int(at_s * 1e9)
                    facts: dict[str, Any] = {
                        "message_id": message_id(client.numbers[stream], sequence),
                        "stream": stream,
                        "sequence": sequence,
                        "topic": publishing.topic,
                        "publisher": client.name,
                        "sent_ns": sent_ns,
                        "qos": publishing.qos,
                        "retained": False,
                        "size_bytes": publishing.payload_bytes,
                    }
                    writer.write(MessageEvent(kind="published", at_ns=sent_ns, client=client.name, **facts))
                    received_ns = sent_ns + int(latency_ms(publishing.topic, at_s) * 1e6)
                    for other in clients:
                        static = any(wanted.filter == publishing.topic for wanted in other.subscribe)
                        if static or (wants is not None and wants(other, publishing.topic, at_s)):
                            writer.write(
                                MessageEvent(
                                    kind="delivered",
                                    at_ns=received_ns,
                                    client=other.name,
                                    subscriber=other.name,
                                    received_ns=received_ns,
                                    **facts,
                                )
                            )


# -- uav ----------------------------------------------------------------------------------------------------------------

FLIGHT = UavParameters(scale=0.02, duration_s=20.0, warm_s=5.0, swarms=2, drones=3, speed_mps=2_000.0, telemetry_s=1.0)


def test_the_published_swarms() -> None:
    scenario = uav.scenario_of(UavParameters())
    clients = expand_clients(scenario)
    assert len(clients) == 8 * 8
    assert {stream.rate_hz for client in clients for stream in client.publish} == {200.0}
    assert {stream.payload_bytes for client in clients for stream in client.publish} == {1_000}
    assert {stream.bound_ms for client in clients for stream in client.publish} == {40.0}
    assert len({stream.topic for client in clients for stream in client.publish}) == 16
    assert all(client.roams == ("gate-1", "gate-2", "gate-3", "gate-4") and not client.clean_start for client in clients)
    assert len(expand_brokers(scenario)) == len(expand_gateways(scenario)) == 4
    assert scenario.duration_s == 630.0
    moves = uav.changes_of(scenario.events)
    assert moves.keys() <= set(uav.swarm_hosts(UavParameters()))
    assert all(30.0 <= at_s <= 630.0 for own in moves.values() for at_s in own), "nobody flies before coordinates settle"
    text = configuration(scenario)
    assert 'classes = [{topic = "uav/#", topic_class = "owned", max_latency_ms = 40.0}]' in text
    assert "telemetry = {interval_seconds = 5.0}" in text


def test_the_same_seed_flies_the_same_ways() -> None:
    assert uav.scenario_of(FLIGHT) == uav.scenario_of(FLIGHT)
    other = UavParameters(**{name: getattr(FLIGHT, name) for name in FLIGHT.__struct_fields__} | {"seed": 2})
    assert uav.scenario_of(FLIGHT).events != uav.scenario_of(other).events


def test_swarms_begin_at_the_gateway_of_their_zone() -> None:
    clients = {client.name: client for client in expand_clients(uav.scenario_of(UavParameters()))}
    assert clients["leader@swarm-1"].broker == "gate-1"
    assert clients["follower@swarm-6-7"].broker == "gate-2"


def test_owners_that_follow_in_time_keep_the_bound(tmp_path: Path) -> None:
    """Late for 1.5 s after each zone change, in time else."""
    scenario = uav.scenario_of(FLIGHT)
    changes = uav.changes_of(scenario.events)
    assert changes, "the seed's swarms change zones"

    def latency_ms(topic: str, at_s: float) -> float:
        own = changes.get(topic.split("/")[1], [])
        return 50.0 if any(change <= at_s < change + 1.5 for change in own) else 20.0

    run, outcome = run_of(Uav(), FLIGHT, tmp_path)
    record(run.events("uav"), scenario, FLIGHT.seed, latency_ms)
    moved = MigrationView(
        topic="uav/swarm-1/sensor_data",
        origin="broker-1",
        target="broker-2",
        kind="latency",
        state="done",
        created_at=START_NS / 1e9 + 7.0,
        ordered_at=START_NS / 1e9 + 7.0,
        ended_at=START_NS / 1e9 + 7.1,
        duration_ms=30.0,
    )
    before = MigrationView(topic="t", origin="a", target="b", kind="latency", state="done", created_at=START_NS / 1e9 - 5)
    told = Told(migrations=[before, moved], owners={}, start_ns=START_NS)
    uav.evaluate(run, scenario, told)
    assert value(outcome, "within_bound_percent") == 100.0
    longest = value(outcome, "longest_violation_s")
    assert longest is not None
    assert 1.0 <= longest <= 1.7
    assert value(outcome, "zone_changes") == sum(map(len, changes.values()))
    assert value(outcome, "migrations") == 1, "what was before the start is none of it"
    assert value(outcome, "lost") == 0
    assert outcome.figures["within_bound"]["percent_of_all_time"] < 100.0
    assert outcome.figures["migrations"][0]["at_s"] == 7.0
    assert (tmp_path / "plots" / "latency.png").exists()


def test_owners_that_stay_behind_are_found_out(tmp_path: Path) -> None:
    scenario = uav.scenario_of(FLIGHT)
    changes = uav.changes_of(scenario.events)

    def latency_ms(topic: str, at_s: float) -> float:
        return 50.0 if at_s >= min(changes.get(topic.split("/")[1], [99.0])) else 20.0

    run, outcome = run_of(Uav(), FLIGHT, tmp_path)
    record(run.events("uav"), scenario, FLIGHT.seed, latency_ms)
    uav.evaluate(run, scenario, Told(migrations=[], owners={}, start_ns=START_NS))
    bars = {bar.name: bar.ok for bar in outcome.bars}
    assert not bars["within_bound_percent"]
    assert not bars["longest_violation_s"]
    assert not bars["migrations"]
    assert outcome.tables[1].title == "the longest violations"


# -- mmog ---------------------------------------------------------------------------------------------------------------

GAME = MmogParameters(scale=0.01, duration_s=20.0, warm_s=6.0, avatars=10, telemetry_s=1.0, stay_s=(4.0, 8.0))


def test_the_published_game() -> None:
    scenario = mmog.scenario_of(MmogParameters())
    clients = [client for client in expand_clients(scenario) if client.name.startswith("avatar-")]
    assert len(clients) == 64
    assert {stream.rate_hz for client in clients for stream in client.publish} == {300.0}
    assert {stream.payload_bytes for client in clients for stream in client.publish} == {998}
    assert MmogParameters().groups == 8
    stays: dict[int, list[float]] = {}
    for each in mmog.memberships(MmogParameters()):
        stays.setdefault(each.avatar, []).append(each.at_s)
    for moments in stays.values():
        assert all(30.0 <= after - before <= 60.0 for before, after in itertools.pairwise(moments[1:]))
    first = [client for client in expand_clients(scenario) if client.name.startswith("first-")]
    assert sum(len(client.publish) for client in first) == 64, "each topic has one who asks for it first"


def test_followers_are_those_of_the_same_group() -> None:
    groups: dict[int, int] = {}
    history = mmog.memberships(GAME)
    followings = mmog.followings(GAME)
    for number, change in enumerate(history):
        groups[change.avatar] = change.group
        until_s = history[number + 1].at_s if number + 1 < len(history) else GAME.warm_s + GAME.duration_s
        if until_s <= change.at_s:
            continue
        middle_s = (change.at_s + until_s) / 2
        now = {(each.follower, each.followed) for each in followings if each.from_s <= middle_s < each.until_s}
        expected = {(a, b) for a in groups for b in groups if a != b and groups[a] == groups[b]}
        assert now == expected


def test_subscriptions_change_with_the_groups() -> None:
    """Played through, changes give what followings say."""
    changes = mmog.changes_of(GAME)
    for avatar, own in changes.items():
        wanted: set[str] = set()
        for change in own:
            asked = {each.filter for each in change.subscribe}
            assert set(change.unsubscribe) <= wanted
            assert not asked & (wanted - set(change.unsubscribe))
            wanted = (wanted - set(change.unsubscribe)) | asked
            at_s = change.at_s
            expected = {
                mmog.avatar_topic(each.followed)
                for each in mmog.followings(GAME)
                if each.follower == avatar and each.from_s <= at_s < each.until_s
            }
            assert wanted == expected


def test_a_game_within_its_bound(tmp_path: Path) -> None:
    scenario = mmog.scenario_of(GAME)
    followings = mmog.followings(GAME)

    def wants(client: Client, topic: str, at_s: float) -> bool:
        return any(
            mmog.avatar_name(each.follower) == client.name
            and mmog.avatar_topic(each.followed) == topic
            and each.from_s <= at_s < each.until_s
            for each in followings
        )

    run, outcome = run_of(Mmog(), GAME, tmp_path)
    record(run.events("mmog"), scenario, GAME.seed, lambda topic, at_s: 80.0, wants)
    mmog_results.evaluate(run, scenario, Told(migrations=[], owners={}, start_ns=START_NS))
    assert value(outcome, "within_bound_percent") == 100.0
    assert value(outcome, "longest_violation_s") == 0.0
    assert value(outcome, "lost") == 0
    assert outcome.figures["followed"]["expected"] > 100
    regroupings = value(outcome, "regroupings")
    assert regroupings is not None
    assert regroupings > 5
    assert (tmp_path / "plots" / "latency.png").exists()


def test_what_a_follower_misses_is_lost(tmp_path: Path) -> None:
    scenario = mmog.scenario_of(GAME)
    run, outcome = run_of(Mmog(), GAME, tmp_path)
    record(run.events("mmog"), scenario, GAME.seed, lambda topic, at_s: 80.0, lambda client, topic, at_s: False)
    mmog_results.evaluate(run, scenario, Told(migrations=[], owners={}, start_ns=START_NS))
    assert value(outcome, "lost") == outcome.figures["followed"]["expected"] > 0
    assert value(outcome, "within_bound_percent") is None, "nothing was measured"


def test_no_placement_could_miss_the_bound_without_longer_links() -> None:
    """Why ``stretch`` is there."""
    from random import Random

    from nearcast.scenario.assembly import build_network

    def worst_ms(stretch: float) -> float:
        network, names = build_network(mmog.topology_of(MmogParameters(stretch=stretch)), Random(0))
        servers = [number for number, name in enumerate(names) if name.startswith("server-")]
        brokers = [number for number, name in enumerate(names) if name.startswith("broker-")]
        return max(
            network.one_way_ms(one, broker) + network.one_way_ms(broker, other)
            for one in servers
            for broker in brokers
            for other in servers
        )

    assert worst_ms(1.0) < 100.0 < worst_ms(2.0)


# -- both ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (UavParameters, {"drones": 1}, "`drones` must be between 2"),
        (UavParameters, {"qos": 3}, "`qos` must be 0, 1 or 2"),
        (UavParameters, {"telemetry_s": 0.0}, "`telemetry_s` must be between"),
        (MmogParameters, {"warm_s": 1.0}, "`warm_s` must be above 3"),
        (MmogParameters, {"stay_s": (5.0, 1.0)}, "`stay_s` must be two times"),
        (MmogParameters, {"stretch": 0.0}, "`stretch` must be between"),
    ],
)
def test_parameters_that_make_no_sense(kind: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        kind(**wrong)


@pytest.mark.parametrize("experiment", [Uav(), Mmog()])
def test_without_root_nothing_is_made_up(experiment: Experiment[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "available", lambda: "network namespaces need root: run this with sudo")
    outcome = perform(experiment, effective_parameters(experiment, {}, quick=True), tmp_path / "out")
    assert outcome.error is not None
    assert outcome.error.startswith("network namespaces need root: run this with sudo; loopback mode carries no UDP")


def test_migrations_are_told_by_what_came_of_them(tmp_path: Path) -> None:
    run, outcome = run_of(Uav(), FLIGHT, tmp_path)
    at = START_NS / 1e9 + 1
    migrations = [
        MigrationView(topic="a", origin="x", target="y", kind="latency", state=state, created_at=at, duration_ms=10.0)
        for state in ("done", "done", "failed")
    ]
    owned_results.tell_migrations(run, Told(migrations=migrations, owners={"a": "y"}, start_ns=START_NS))
    assert outcome.tables[0].rows == [["latency", "done", 2, 10.0], ["latency", "failed", 1, 10.0]]
    assert value(outcome, "migrations") == 2
