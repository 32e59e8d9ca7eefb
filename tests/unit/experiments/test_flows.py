"""Losses, duplicates, latency over time and gaps out of columns of events."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nearcast.experiments.flows import Count, Deliveries, Flows, Loss, binned_mean_ms, longest_gap, stable_after_s
from nearcast.recording import EventWriter, MessageEvent, message_id
from nearcast.scenario.identity import publisher_number
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.scenario.topology import Host, Site, Topology
from nearcast.scenario.workload import Clients, Publishing, Subscribing

START_NS = 5_000_000_000
SCENARIO = Scenario(
    name="s",
    topology=Topology(name="t", sites=(Site(name="a"),), hosts=(Host(name="one", site="a"), Host(name="two", site="a"))),
    protocol="fabric",
    brokers=(Broker(host="one", fabric=True), Broker(host="two", fabric=True)),
    clients=(
        Clients(name="pub", host="one", broker="one", publish=(Publishing(topic="t", qos=0), Publishing(topic="t", qos=2))),
        Clients(name="stays", host="two", broker="two", subscribe=(Subscribing(filter="t", qos=2),)),
        Clients(name="goes", host="two", broker="two", subscribe=(Subscribing(filter="+", qos=1),), stop_s=5.0, leave=True),
    ),
)


def ns(moment_s: float) -> int:
    return START_NS + round(moment_s * 1e9)


def sent(stream: int, sequence: int, at_s: float) -> MessageEvent:
    number = message_id(publisher_number("pub", stream), sequence)
    return MessageEvent(
        kind="published",
        at_ns=ns(at_s),
        client="pub",
        publisher="pub",
        message_id=number,
        stream=stream,
        sequence=sequence,
        sent_ns=ns(at_s),
        topic="t",
    )


def got(subscriber: str, stream: int, sequence: int, sent_s: float, latency_ms: float, retained: bool = False) -> MessageEvent:
    number = message_id(publisher_number("pub", stream), sequence)
    return MessageEvent(
        kind="delivered",
        at_ns=ns(sent_s + latency_ms / 1e3),
        client=subscriber,
        publisher="pub",
        subscriber=subscriber,
        message_id=number,
        stream=stream,
        sequence=sequence,
        sent_ns=ns(sent_s),
        received_ns=ns(sent_s + latency_ms / 1e3),
        topic="t",
        retained=retained,
    )


def recorded(directory: Path, *events: MessageEvent) -> Flows:
    with EventWriter(directory, "r") as writer:
        for event in events:
            writer.write(event)
    return Flows(directory, SCENARIO, START_NS)


def test_what_is_lost_and_what_came_twice_by_qos(tmp_path: Path) -> None:
    flows = recorded(
        tmp_path,
        MessageEvent(kind="subscribed", at_ns=ns(1.0), client="stays", topic="t"),
        MessageEvent(kind="subscribed", at_ns=ns(1.0), client="goes", topic="+"),
        sent(0, 0, 0.5),  # before anybody subscribed
        sent(0, 1, 1.5),
        sent(0, 2, 2.0),
        sent(1, 0, 2.5),
        sent(1, 1, 6.0),
        got("stays", 0, 1, 1.5, 3.0),
        got("stays", 0, 1, 1.5, 9.0),
        got("stays", 1, 0, 2.5, 5.0),
        got("goes", 0, 1, 1.5, 1.0),
        got("goes", 0, 2, 2.0, 1.0),
        got("goes", 1, 0, 2.5, 1.0),
        MessageEvent(kind="skipped", at_ns=ns(3.0), client="pub"),
        MessageEvent(kind="disconnected", at_ns=ns(5.0), client="goes"),
        MessageEvent(kind="disconnected", at_ns=ns(5.5), client="stays"),
    )
    assert flows.counts() == {
        0: Count(published=3, expected=4, delivered=4, lost=1, duplicated=1),
        1: Count(published=0, expected=1, delivered=1, lost=0, duplicated=0),
        2: Count(published=2, expected=2, delivered=1, lost=1, duplicated=0),
    }, "the QoS of a delivery is the lower one of publication and subscription"
    assert flows.losses() == [Loss("pub", "stays", 2.0, 0), Loss("pub", "stays", 6.0, 2)]
    assert flows.losses(most=1) == [Loss("pub", "stays", 2.0, 0)]
    assert flows.disconnections == [(5.5, "stays")], "one that leaves was to leave"
    assert (flows.skipped, flows.refused, flows.unknown) == (1, 0, 0)


def test_latency_is_that_of_first_deliveries_of_live_messages(tmp_path: Path) -> None:
    flows = recorded(
        tmp_path,
        sent(0, 0, 1.0),
        sent(0, 1, 2.0),
        got("stays", 0, 1, 2.0, 8.0),
        got("stays", 0, 0, 1.0, 40.0),
        got("stays", 0, 0, 1.0, 4.0),
        got("goes", 0, 0, 1.0, 900.0, retained=True),
    )
    found = flows.deliveries("t")
    assert list(found.subscriber) == ["stays", "stays"]
    assert found.latency_ms == pytest.approx([4.0, 8.0])
    assert found.sent_between(0.0, 2.0).latency_ms == pytest.approx([4.0])
    assert len(flows.deliveries("other").sent_s) == 0


def test_order_is_that_of_each_stream_at_each_subscriber(tmp_path: Path) -> None:
    flows = recorded(
        tmp_path,
        *(sent(stream, sequence, 1.0 + sequence) for stream in (0, 1) for sequence in range(4)),
        got("stays", 0, 0, 1.0, 1.0),
        got("stays", 0, 2, 3.0, 1.0),
        got("stays", 1, 0, 1.0, 5000.0),  # late, but the first of its stream
        got("stays", 0, 1, 2.0, 2500.0),  # after 2
        got("stays", 0, 0, 1.0, 3600.0),  # again, which is another matter
        got("stays", 0, 3, 4.0, 1000.0),
        got("goes", 0, 1, 2.0, 1.0),
        got("goes", 0, 3, 4.0, 1.0),
    )
    assert flows.out_of_order() == 1


def test_nothing_recorded_is_everything_lost_of_nothing(tmp_path: Path) -> None:
    flows = recorded(tmp_path, MessageEvent(kind="connected", at_ns=ns(0), client="pub"))
    assert all(count == Count(0, 0, 0, 0, 0) for count in flows.counts().values())
    assert flows.losses() == []
    assert flows.out_of_order() == 0


def test_a_delivery_of_what_nobody_published_is_counted(tmp_path: Path) -> None:
    assert recorded(tmp_path, got("stays", 0, 0, 1.0, 1.0)).unknown == 1


def series(*latencies_ms: float) -> Deliveries:
    """One message a second."""
    sent_s = np.arange(len(latencies_ms), dtype=np.float64) + 0.5
    names = np.array(["p"] * len(latencies_ms), dtype=object)
    return Deliveries(names, names, sent_s, sent_s + np.array(latencies_ms) / 1e3)


def test_mean_by_time() -> None:
    middles, means = binned_mean_ms(series(1, 3, 10, 20), 2.0, 8.0)
    assert list(middles) == [1.0, 3.0, 5.0, 7.0]
    assert list(means[:2]) == pytest.approx([2.0, 15.0])
    assert np.isnan(means[2:]).all()


@pytest.mark.parametrize(
    ("latencies_ms", "expected_s"),
    [
        ((50, 50, 5, 5, 5, 5), 2.0),
        ((5, 5, 5, 5, 5, 5), 0.0),
        ((5, 5, 50, 5, 5, 5), 3.0),
        ((5, 6, 5, 6, 5, 6), 0.0),
        ((), None),
    ],
)
def test_stable_is_from_when_nothing_is_off_any_more(latencies_ms: tuple[float, ...], expected_s: float | None) -> None:
    assert stable_after_s(series(*latencies_ms), 0.0, 6.0, 1.0, 5.0, 2.0) == expected_s


def test_the_longest_gap_around_a_span() -> None:
    moments = np.array([0.0, 1.0, 1.1, 1.2, 1.5, 1.6, 4.0])
    assert longest_gap(moments, 1.05, 1.55) == pytest.approx((1.2, 0.3))
    assert longest_gap(moments, 1.25, 1.3) == pytest.approx((1.2, 0.3)), "a gap that is longer than the span"
    assert longest_gap(moments, 5.0, 6.0) is None
    assert longest_gap(moments[:1], 0.0, 6.0) is None
