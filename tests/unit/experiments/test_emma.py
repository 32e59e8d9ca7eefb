"""EMMA's scenario as data, and what is made of a run: from made-up events, with a real evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from nearcast.emulation import namespaces
from nearcast.errors import ConfigError, InvalidValue
from nearcast.experiments import emma_results
from nearcast.experiments.emma import EVENTS, Emma, EmmaParameters, scenario_of, stream_topic
from nearcast.experiments.emma_results import MoveView, Told, hand_overs, imposed_ms, placed_in_time, round_trip_ms
from nearcast.experiments.experiment import effective_parameters
from nearcast.experiments.run import Outcome, Run, perform
from nearcast.recording import EventWriter, MessageEvent, message_id
from nearcast.scenario.expansion import expand_brokers, expand_clients, expand_gateways
from nearcast.scenario.identity import publisher_number
from nearcast.scenario.schedule import publication_times

QUICK = effective_parameters(Emma(), {}, quick=True)


def test_the_published_scenario() -> None:
    scenario = scenario_of(EmmaParameters())
    clients = expand_clients(scenario)
    groups = [client for client in clients if client.host.startswith("clients-")]
    assert len(groups) == 2 * 10 * 8
    assert sum(bool(client.publish) for client in groups) == 2 * 10 * 7
    assert {stream.topic for client in groups for stream in client.publish} == {"us-east", "eu-west"}
    assert {stream.rate_hz for client in groups for stream in client.publish} == {10.0}
    assert {stream.payload_bytes for client in clients for stream in client.publish} == {118}
    assert {client.start_s for client in groups if "east" in client.name} == {60.0}
    assert {client.start_s for client in groups if "west" in client.name} == {180.0}
    assert len(expand_gateways(scenario)) == 2 * 10 + 3
    assert all(client.broker == client.host for client in clients), "each beside its gateway"
    assert [(broker.name, broker.start_s, broker.stop_s) for broker in expand_brokers(scenario)] == [
        ("broker-central", 0.0, None),
        ("broker-west-1", 120.0, None),
        ("broker-east", 240.0, 420.0),
        ("broker-west-2", 300.0, None),
    ]
    assert [client.leave_s for client in clients if client.name == "global-sub-central"] == [360.0]
    assert scenario.controller is not None
    assert (scenario.controller.interval_s, scenario.controller.ping_interval_ms) == (15.0, 250.0)


def test_every_qos_has_publishers_on_every_machine() -> None:
    clients = expand_clients(scenario_of(EmmaParameters(scale=0.1)))
    levels = [stream.qos for client in clients if client.host == "clients-east" for stream in client.publish]
    assert sorted(levels) == [0, 0, 0, 1, 1, 2, 2]
    only = expand_clients(scenario_of(EmmaParameters(scale=0.1, qos=(1,), stream_qos=1)))
    assert {stream.qos for client in only for stream in client.publish} == {1}


def test_a_shorter_run_has_shorter_periods() -> None:
    scenario = scenario_of(EmmaParameters(duration_s=160.0))
    assert scenario.controller is not None
    assert scenario.controller.interval_s == 5.0
    assert scenario.controller.ping_interval_ms == pytest.approx(83.333, abs=0.001)
    shortest = scenario_of(EmmaParameters(duration_s=16.0)).controller
    assert shortest is not None
    assert shortest.interval_s == 1.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"qos": ()}, "`qos` must be of 0, 1 and 2"),
        ({"qos": (0, 3)}, "`qos` must be of 0, 1 and 2"),
        ({"stream_qos": 3}, "`stream_qos` must be 0, 1 or 2"),
        ({"duration_s": 4.0}, "`duration_s` must be 16 or more"),
    ],
)
def test_parameters_that_make_no_sense(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        EmmaParameters(**wrong)
    assert str(caught.value).startswith(message)
    with pytest.raises(ConfigError, match="more than one machine can run"):
        scenario_of(EmmaParameters(scale=50.0))


def test_without_root_nothing_is_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "available", lambda: "network namespaces need root: run this with sudo")
    outcome = perform(Emma(), QUICK, tmp_path / "out")
    assert outcome.error is not None
    assert outcome.error.startswith("network namespaces need root: run this with sudo; loopback mode carries no UDP")


def test_what_the_network_imposes() -> None:
    scenario = scenario_of(QUICK)
    assert imposed_ms(scenario, "us-east") == pytest.approx(0.5)
    assert round_trip_ms(scenario, "broker-central", "broker-east") == pytest.approx(98.0)
    assert round_trip_ms(scenario, "broker-central", "broker-west-2") == pytest.approx(27.0)
    assert round_trip_ms(scenario, "broker-west-1", "broker-east") == pytest.approx(85.0)
    assert round_trip_ms(scenario, "", "broker-east") == 0.0


def view(**changes: Any) -> MoveView:
    fields: dict[str, Any] = {
        "gateway": "gateway-global-east",
        "origin": "broker-central",
        "target": "broker-east",
        "kind": "nearer",
        "state": "done",
        "moved_clients": 4,
        "created_at": 1017.9,
        "ordered_at": 1018.0,
        "ended_at": 1018.4,
        "detail": "",
    }
    return MoveView(**(fields | changes))


def test_moves_in_the_time_of_the_scenario() -> None:
    before = view(created_at=990.0, ordered_at=990.0, ended_at=995.0)
    pending = view(ordered_at=None, ended_at=None, origin=None)
    first, second = placed_in_time([before, view(), pending], 1_000 * 10**9)
    assert (first.from_s, first.until_s, first.origin) == (18.0, 18.4, "broker-central")
    assert (second.from_s, second.until_s, second.origin) == (17.9, 17.9, "")


def test_who_is_handed_over_when_a_broker_stops() -> None:
    scenario = scenario_of(QUICK)
    (there,) = placed_in_time([view()], 1_000 * 10**9)
    (found,) = hand_overs(scenario, [there], {"gateway-global-east": "broker-west-1"})
    assert (found.gateway, found.origin, found.target, found.clients) == (
        "gateway-global-east",
        "broker-east",
        "broker-west-1",
        4,
    )
    balanced = msgspec.structs.replace(there, origin="broker-central", target="broker-west-2", from_s=30.0, until_s=30.1)
    (found,) = hand_overs(scenario, [there, balanced], {"gateway-global-east": "broker-west-2"})
    assert found.target == "broker-central", "it was moved again afterwards"
    away = msgspec.structs.replace(there, origin="broker-east", target="broker-central", from_s=20.0, until_s=20.1)
    assert hand_overs(scenario, [there, away], {"gateway-global-east": "broker-central"}) == [], "it had gone before"


def latency_ms(topic: str, sent_s: float) -> float:
    """A world in which clients of us-east are served from afar until their broker comes (and 2 s more), and in the end."""
    near = QUICK.event_s(5) + 2.0 <= sent_s < QUICK.event_s(8)
    if topic == "eu-west":
        return 1.5
    return 1.7 if near else 98.0


def record(directory: Path, start_ns: int, *, lose: str = "", repeat: str = "", gap: tuple[float, float] = (0.0, 0.0)) -> None:
    """All that clients of a run would have recorded; ``gap``: nothing arrives in the streams from, until."""
    clients = expand_clients(scenario_of(QUICK))
    with EventWriter(directory, "r") as events:
        for client in clients:
            for wanted in client.subscribe:
                events.write(
                    MessageEvent(
                        kind="subscribed", at_ns=start_ns + int(client.start_s * 1e9), client=client.name, topic=wanted.filter
                    )
                )
            if client.leave_s is not None:
                events.write(MessageEvent(kind="disconnected", at_ns=start_ns + int(client.leave_s * 1e9), client=client.name))
        for client in clients:
            for stream, publishing in enumerate(client.publish):
                number = publisher_number(client.name, stream)
                for sequence, sent_s in enumerate(publication_times(client, stream, 1)):
                    topic = publishing.topic
                    sent_ns = start_ns + int(sent_s * 1e9)
                    common: dict[str, Any] = {
                        "publisher": client.name,
                        "message_id": message_id(number, sequence),
                        "stream": stream,
                        "sequence": sequence,
                        "sent_ns": sent_ns,
                        "topic": topic,
                    }
                    events.write(MessageEvent(kind="published", at_ns=sent_ns, client=client.name, **common))
                    arrives_s = sent_s + latency_ms(topic, sent_s) / 1e3
                    if topic.startswith("stream/") and gap[0] <= arrives_s < gap[1]:
                        arrives_s = gap[1]
                    received_ns = start_ns + int(arrives_s * 1e9)
                    for other in clients:
                        wants = any(wanted.filter == topic for wanted in other.subscribe) and sent_s >= other.start_s
                        gone = other.leave_s is not None and sent_s > other.leave_s
                        if not wants or gone or (client.name == lose and sequence == 3):
                            continue
                        delivered = MessageEvent(
                            kind="delivered",
                            at_ns=received_ns,
                            client=other.name,
                            subscriber=other.name,
                            received_ns=received_ns,
                            retained=False,
                            **common,
                        )
                        events.write(delivered)
                        if client.name == repeat and sequence == 5:
                            events.write(delivered)


class Made(Emma):
    """The evaluation of events that a test made."""

    start_ns = 1_000 * 10**9
    lose = ""
    repeat = ""
    gap = (18.0, 18.1)
    moves: tuple[MoveView, ...] = (view(),)

    def check(self, parameters: EmmaParameters) -> None: ...

    def run(self, run: Run[EmmaParameters]) -> None:
        record(run.events("emma"), self.start_ns, lose=self.lose, repeat=self.repeat, gap=self.gap)
        samples = run.directory("samples")
        lines = [
            {
                "at_ns": self.start_ns + second * 10**9,
                "nearcast_messages_received_total": 50.0 * second,
                "nearcast_messages_sent_total": 70.0 * second,
            }
            for second in range(33)
        ]
        (samples / "broker-central.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        told = Told(moves=list(self.moves), brokers={"gateway-global-east": "broker-central"})
        emma_results.evaluate(run, scenario_of(run.parameters), told, self.start_ns)


def bars(outcome: Outcome) -> dict[str, float | None]:
    return {bar.name: bar.value for bar in outcome.bars}


def test_a_good_run(tmp_path: Path) -> None:
    outcome = perform(Made(), QUICK, tmp_path / "out")
    assert outcome.error is None
    assert outcome.ok
    found = bars(outcome)
    assert found["intra_region_excess_ms"] == pytest.approx(1.2, abs=0.01), "1.7 ms, of which the links make 0.5"
    assert found["interruption_ratio"] == pytest.approx(0.1 / (2 * 0.098 + 0.05), abs=0.05)
    assert found["moves"] == 8
    tables = {table.title: table for table in outcome.tables}
    latency = {(row[0], row[1]): row[2:] for row in tables["latency by topic"].rows}
    before, after, stable = latency["5 broker starts in us-east", "us-east"]
    assert [before, after] == pytest.approx([98.0, 1.7])
    assert stable == pytest.approx(2.0, abs=0.1)
    assert latency["8 broker stops in us-east", "us-east"][:2] == [pytest.approx(1.7), pytest.approx(98.0)]
    assert ("1 clients of `global` appear", "us-east") not in latency
    throughput = tables["messages per second in/out of brokers, after event"]
    assert throughput.rows[0] == ["broker-central", *(["50/70"] * len(EVENTS))]
    assert throughput.rows[1] == ["broker-west-1", *(["-"] * len(EVENTS))]
    move, stopping = tables["moves that a stream of 100 messages a second shows"].rows
    assert move[:6] == [18.0, "global-east", "broker-central", "broker-east", "nearer", 4]
    assert move[8] == 246.0
    assert stopping[:6] == [28.0, "global-east", "broker-east", "broker-central", "stopping", 4]
    assert len(outcome.plots) == 5


def test_what_goes_wrong_is_found(tmp_path: Path) -> None:
    class Bad(Made):
        repeat = "stream-west"
        gap = (18.0, 18.5)
        moves = (view(), view(state="failed", moved_clients=0, detail="the broker did not answer"))

    names = [client.name for client in expand_clients(scenario_of(QUICK)) if client.name.startswith("pub-east-qos-1")]
    Bad.lose = names[0]
    outcome = perform(Bad(), QUICK, tmp_path / "out")
    assert outcome.complete
    assert not outcome.ok
    found = bars(outcome)
    assert (found["lost_qos_0"], found["lost_qos_1"], found["lost_qos_2"]) == (0, 1, 0)
    assert (found["duplicated_qos_0"], found["duplicated_qos_1"], found["duplicated_qos_2"]) == (1, 0, 0)
    assert found["interruption_ratio"] is not None
    assert found["interruption_ratio"] > 1.5
    assert any(note.startswith(f"the first loss: what {names[0]} sent") for note in outcome.notes)
    assert "1 of 3 moves failed, the first because: the broker did not answer" in outcome.notes


def test_streams_are_watched_in_both_regions() -> None:
    clients = {client.name: client for client in expand_clients(scenario_of(QUICK))}
    for word, region in (("east", "us-east"), ("west", "eu-west")):
        assert (
            clients[f"stream-{word}"].publish[0].topic == clients[f"watch-{word}"].subscribe[0].filter == stream_topic(region)
        )


def test_in_the_simulator_every_bar_holds(tmp_path: Path) -> None:
    """Virtual time: latencies and gaps are the network's and the protocol's, the same on every machine."""
    parameters = EmmaParameters(scale=0.1, duration_s=16.0, rate_hz=4.0, simulated=True)
    outcome = perform(Emma(), parameters, tmp_path / "out")
    assert outcome.error is None
    assert [bar.name for bar in outcome.bars if not bar.ok] == [], outcome.notes
    moves = next(table for table in outcome.tables if table.title.startswith("moves"))
    assert {row[4] for row in moves.rows} >= {"nearer", "balance"}
