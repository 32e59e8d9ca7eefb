"""Loss, duplicates and latency out of recorded events."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nearcast.experiments.agreement import AgreementParameters, model_latencies_ms, scenario_of, streams
from nearcast.experiments.measures import Pair, expected_pairs, measure
from nearcast.recording import EventWriter, MessageEvent, message_id
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.scenario.topology import Host, Site, Topology
from nearcast.scenario.workload import Clients, Publishing, Subscribing

SCENARIO = Scenario(
    name="s",
    topology=Topology(
        name="t", sites=(Site(name="here"),), hosts=(Host(name="one", site="here"), Host(name="two", site="here"))
    ),
    brokers=(Broker(host="one"), Broker(host="two")),
    clients=(
        Clients(
            name="pub",
            host="one",
            broker="one",
            count=2,
            publish=(Publishing(topic="a/{client}", qos=1), Publishing(topic="b")),
        ),
        Clients(name="all", host="two", broker="one", subscribe=(Subscribing(filter="#", qos=1),)),
        Clients(name="some", host="two", broker="one", subscribe=(Subscribing(filter="a/pub-1"), Subscribing(filter="c"))),
        Clients(name="elsewhere", host="two", broker="two", subscribe=(Subscribing(filter="#"),)),
    ),
)


def published(publisher: str, stream: int, sequence: int, sent_ns: int) -> MessageEvent:
    return MessageEvent(
        kind="published",
        at_ns=sent_ns,
        client=publisher,
        publisher=publisher,
        message_id=message_id(hash_of(publisher, stream), sequence),
        stream=stream,
        sequence=sequence,
        sent_ns=sent_ns,
    )


def delivered(subscriber: str, publisher: str, stream: int, sequence: int, sent_ns: int, latency_ms: float) -> MessageEvent:
    received_ns = sent_ns + int(latency_ms * 1e6)
    return MessageEvent(
        kind="delivered",
        at_ns=received_ns,
        client=subscriber,
        subscriber=subscriber,
        publisher=publisher,
        message_id=message_id(hash_of(publisher, stream), sequence),
        stream=stream,
        sequence=sequence,
        sent_ns=sent_ns,
        received_ns=received_ns,
        retained=False,
    )


def hash_of(publisher: str, stream: int) -> int:
    return (sum(publisher.encode()) << 8) + stream


def test_who_gets_what_follows_from_filters_and_brokers() -> None:
    assert expected_pairs(SCENARIO) == {
        Pair("pub-1", "all"): {0: 1, 1: 0},
        Pair("pub-1", "some"): {0: 0},
        Pair("pub-2", "all"): {0: 1, 1: 0},
    }


def test_loss_duplicates_and_strays_are_told_apart(tmp_path: Path) -> None:
    with EventWriter(tmp_path, "r") as events:
        events.write(published("pub-1", 0, 0, 10))
        events.write(published("pub-1", 0, 1, 20))
        events.write(published("pub-2", 1, 0, 30))
        events.write(delivered("all", "pub-1", 0, 1, 20, 3.0))
        events.write(delivered("all", "pub-1", 0, 0, 10, 2.0))
        events.write(delivered("all", "pub-1", 0, 0, 10, 9.0))
        events.write(delivered("some", "pub-1", 0, 0, 10, 5.0))
        events.write(delivered("some", "pub-2", 1, 0, 30, 5.0))
    measured = measure(tmp_path, SCENARIO)
    delivery = measured.delivery
    assert (delivery.published, delivery.expected, delivery.delivered) == (3, 5, 4)
    assert (delivery.lost, delivery.duplicated, delivery.unexpected) == (2, 1, 1)
    assert measured.latencies_ms[Pair("pub-1", "all")].tolist() == [2.0, 3.0], "by time of sending, the first of duplicates"
    assert measured.latencies_ms[Pair("pub-1", "some")].tolist() == [5.0]


def test_what_was_sent_before_somebody_subscribed_is_not_lost(tmp_path: Path) -> None:
    with EventWriter(tmp_path, "r") as events:
        events.write(MessageEvent(kind="subscribed", at_ns=15, client="all"))
        events.write(MessageEvent(kind="subscribed", at_ns=99, client="all"))
        events.write(published("pub-1", 1, 0, 10))
        events.write(published("pub-1", 1, 1, 20))
        events.write(published("pub-2", 1, 0, 30))
        events.write(delivered("all", "pub-2", 1, 0, 30, 1.0))
    measured = measure(tmp_path, SCENARIO)
    assert (measured.delivery.expected, measured.delivery.lost) == (2, 1)
    assert measured.lost == {"all": 1}


def test_what_nobody_promised_is_counted_apart(tmp_path: Path) -> None:
    with EventWriter(tmp_path, "r") as events:
        events.write(published("pub-1", 0, 0, 10))
        events.write(published("pub-1", 1, 0, 20))
    measured = measure(tmp_path, SCENARIO)
    assert (measured.delivery.lost, measured.delivery.lost_at_qos_0) == (3, 2)
    assert measured.lost == {"all": 2, "some": 1}
    assert measured.lost_at_qos_0 == {"all": 1, "some": 1}


def test_nothing_recorded_is_nothing_delivered(tmp_path: Path) -> None:
    with EventWriter(tmp_path, "r"):
        pass
    measured = measure(tmp_path, SCENARIO)
    assert measured.latencies_ms == {}
    assert measured.delivery.expected == 0


def test_the_streams_of_agreement_have_the_latencies_of_the_paper() -> None:
    """Broadcast groups, section IV-C: 4, 7, 44 and 55 ms."""
    scenario = scenario_of(AgreementParameters(scale=2.0, jitter_ms=0.0))
    assert set(streams(scenario)) == {"4 ms", "7 ms", "44 ms", "55 ms"}
    assert len(model_latencies_ms(scenario)) == 4 * 4
    assert sorted(set(model_latencies_ms(scenario).values())) == pytest.approx([4, 7, 44, 55])


def fabric() -> Scenario:
    brokers = tuple(Broker(host=host, fabric=True) for host in ("one", "two"))
    left, right = SCENARIO.clients[1], SCENARIO.clients[3]
    leaving = msgspec.structs.replace(right, name="leaving", stop_s=3.0, leave=True)
    return msgspec.structs.replace(SCENARIO, brokers=brokers, clients=(SCENARIO.clients[0], left, right, leaving))


def test_brokers_of_a_fabric_serve_each_others_clients() -> None:
    subscribers = {pair.subscriber for pair in expected_pairs(fabric())}
    assert subscribers == {"all", "elsewhere", "leaving"}


def test_nothing_is_expected_of_one_who_left(tmp_path: Path) -> None:
    second = 10**9
    with EventWriter(tmp_path, "r") as events:
        for subscriber in ("all", "elsewhere", "leaving"):
            events.write(MessageEvent(kind="subscribed", at_ns=0, client=subscriber))
        events.write(MessageEvent(kind="disconnected", at_ns=3 * second, client="leaving"))
        events.write(MessageEvent(kind="disconnected", at_ns=3 * second, client="elsewhere"))
        for sequence, sent_ns in enumerate((1 * second, int(2.5 * second), 4 * second)):
            events.write(published("pub-1", 0, sequence, sent_ns))
            events.write(delivered("all", "pub-1", 0, sequence, sent_ns, 1.0))
    found = measure(tmp_path, fabric())
    assert found.lost == {"leaving": 1, "elsewhere": 3}, "one that only lost its connection is still entitled"
