"""A broker's telemetry: what is in it, who counts, where they are, and how large reports are cut and spread."""

from __future__ import annotations

import functools
from typing import TypeVar

import msgspec
import pytest

from nearcast.coordinates.coordinate import Coordinate
from nearcast.fabric import frames, telemetry
from nearcast.fabric.audience import MEASURES_AT_ONCE, PRODUCER_S
from nearcast.fabric.parts import FOREVER
from nearcast.fabric.plan_intake import PLAN_TOPIC, PlanIntake
from nearcast.fabric.telemetry import PART_BYTES, SLICE_UNITS, TelemetryReporter
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.fabricconfig import Telemetry, TopicClass
from nearcast.mqtt.codec import decode, encode
from nearcast.mqtt.packets import MQTT_5, Connect, Publish, Subscribe, SubscriptionRequest
from nearcast.mqtt.wire import split_packets
from nearcast.telemetry.records import BrokerReport, ClientReport, TopicReport, TopicSummary
from tests.fabric_harness import End, Node
from tests.gateway_hosts import GatewayHost
from tests.ownership_harness import OwnedMesh

R = TypeVar("R", BrokerReport, TopicReport, ClientReport)

CLASSES = (TopicClass(topic="owned/#", topic_class="owned", max_latency_ms=40.0),)
INTERVAL_S = 5.0


class Agent:
    """Coordinates, as gossip would have found them."""

    def __init__(self, coordinate: Coordinate, **others: Coordinate) -> None:
        self.coordinate = coordinate
        self.others = others

    def coordinate_of(self, name: str) -> Coordinate | None:
        return self.others.get(name)


class Controller:
    """The way to a controller that keeps what it is sent."""

    def __init__(self) -> None:
        self.up = True
        self.room = 1_000_000
        self.sent: list[bytes] = []

    def send(self, data: bytes, *, droppable: bool = False) -> bool:
        if not self.up or (droppable and self.room == 0):
            return False
        self.room -= droppable
        self.sent.append(data[frames.LENGTH_BYTES :])
        return True

    def take(self, kind: int, record: type[R]) -> list[R]:
        """Reports of this kind since the last call."""
        found = [data for data in self.sent if data[0] == frames.TELEMETRY and data[1] == kind]
        self.sent = [data for data in self.sent if data not in found]
        return [msgspec.json.decode(data[2:], type=record) for data in found]


class Shares:
    cpu = 0.0
    memory = 0.0

    def sample(self) -> None:
        self.cpu, self.memory = 0.25, 0.5


class Reporting:
    """One broker of a mesh with its reporter."""

    def __init__(self, *brokers: str, raw: bool = False, agent: Agent | None = None, controlled: bool = True) -> None:
        settings = FabricSettings(classes=CLASSES, telemetry=Telemetry(interval_seconds=INTERVAL_S, raw=raw))
        self.mesh = OwnedMesh(*(brokers or ("a",)), settings=settings)
        self.node: Node = self.mesh.nodes["a"]
        self.agent = agent or Agent(Coordinate([0.0, 0.0], 1.0, 0.0, 0.1))
        self.controller = Controller()
        self.reporter = TelemetryReporter(
            self.node.fabric, self.mesh.now, self.agent, self.controller if controlled else None, Shares()
        )
        self.steps = 0

    def client(self, name: str, broker: str = "a") -> End:
        node = self.mesh.nodes[broker]
        client = node.client()
        node.feed(client, encode(Connect(name, MQTT_5), MQTT_5))
        return client

    def say(self, client: End, packet: Publish | Subscribe) -> None:
        client.node.feed(client, encode(packet, MQTT_5))
        self.mesh.run()

    def subscriber(self, name: str, topic_filter: str, broker: str = "a") -> End:
        client = self.client(name, broker)
        self.say(client, Subscribe(1, [SubscriptionRequest(topic_filter, 1)]))
        return client

    def publisher(self, name: str, *topics: str, broker: str = "a", payload: bytes = b"x") -> End:
        client = self.client(name, broker)
        for topic in topics:
            self.say(client, Publish(topic, payload))
        return client

    def rounds(self, count: int = 1) -> None:
        """Let so many rounds begin and end, each step when it is due."""
        for _ in range(count):
            before = self.reporter._round
            while self.reporter._round == before or self.reporter._step_at != FOREVER:
                self.step()

    def step(self) -> None:
        self.steps += 1
        self.mesh.now = max(self.mesh.now, self.reporter.next_deadline())
        self.reporter.tick(self.mesh.now)
        self.node.flush()
        self.mesh.run()

    def topics(self) -> dict[str, TopicSummary]:
        """The topics of the last whole round that the controller got."""
        reports = self.controller.take(telemetry.TOPICS, TopicReport)
        last = [report for report in reports if report.round == reports[-1].round]
        assert [report.part for report in last] == list(range(last[0].parts))
        return {topic.topic: topic for report in last for topic in report.topics}


def payloads(client: End) -> list[tuple[str, bytes, int]]:
    """(topic, payload, QoS) of what a client got."""
    data = bytes(client.received)
    client.received.clear()
    while client.inbox:
        data += client.inbox.popleft()
    found = []
    for packet in split_packets(data):
        if packet[0] >> 4 == 3:
            header = 1
            while packet[header] & 0x80:
                header += 1
            read = decode(packet[0], packet[header + 1 :], MQTT_5)
            assert isinstance(read, Publish)
            found.append((read.topic, read.payload, read.qos))
    return found


# --- the broker ---------------------------------------------------------------------------------------------------------


def test_a_broker_reports_its_resources_rates_and_place() -> None:
    world = Reporting()
    world.publisher("p", "owned/t", "owned/u")
    world.rounds()
    (first,) = world.controller.take(telemetry.BROKER, BrokerReport)
    assert (first.broker, first.cpu, first.memory, first.topics_owned, first.clients) == ("a", 0.25, 0.5, 2, 1)
    assert first.coordinate is not None
    assert (first.coordinate.vector, first.coordinate.height) == ((0.0, 0.0), 1.0)
    assert first.messages_in_per_second == pytest.approx(2.0, rel=0.01), "the first report comes after a second"
    assert first.time == pytest.approx(world.mesh.now + world.node.engine.effects.wall_offset, abs=0.1)
    world.rounds()
    (second,) = world.controller.take(telemetry.BROKER, BrokerReport)
    assert second.messages_in_per_second == 0.0, "since the report before"
    assert second.time - first.time == pytest.approx(INTERVAL_S, abs=0.1)


def test_messages_between_brokers_count_as_output_and_input() -> None:
    world = Reporting("a", "b")
    world.subscriber("s", "plain", broker="b")
    for _ in range(10):
        world.publisher("p", "plain")
    world.rounds()
    (report,) = world.controller.take(telemetry.BROKER, BrokerReport)
    assert report.messages_out_per_second == pytest.approx(10.0, rel=0.01)
    assert report.bytes_out_per_second > 0
    assert report.network == round(
        max(report.bytes_in_per_second, report.bytes_out_per_second) / Telemetry().network_bytes_per_second, 3
    )


# --- who counts ---------------------------------------------------------------------------------------------------------


def test_a_topic_is_summarised_with_its_producers_and_consumers() -> None:
    world = Reporting()
    world.subscriber("s1", "owned/+")
    world.subscriber("s2", "owned/t")
    world.publisher("p", "owned/t")
    world.rounds()
    topic = world.topics()["owned/t"]
    assert (topic.owner, topic.producers.count, topic.consumers.count) == ("a", 1, 2)
    assert topic.max_latency_ms == 40.0
    assert topic.epoch > 0


def test_a_client_that_subscribed_twice_is_one_consumer() -> None:
    world = Reporting()
    client = world.subscriber("s", "owned/+")
    world.say(client, Subscribe(2, [SubscriptionRequest("owned/#", 0)]))
    world.publisher("p", "owned/t")
    world.rounds()
    assert world.topics()["owned/t"].consumers.count == 1


def test_members_of_a_shared_subscription_are_consumers_and_one_of_them_gets_each_message() -> None:
    world = Reporting()
    for name in ("s1", "s2", "s3"):
        world.subscriber(name, "$share/g/owned/t")
    publisher = world.publisher("p", "owned/t")
    world.rounds()
    world.topics()
    for _ in range(10):
        world.say(publisher, Publish("owned/t", b"x"))
    world.rounds()
    topic = world.topics()["owned/t"]
    assert topic.consumers.count == 3
    assert (topic.in_per_second, topic.out_per_second) == (2.0, 2.0)


def test_each_broker_reports_its_own_clients_and_what_passed_there() -> None:
    world = Reporting("a", "b")
    world.publisher("first", "owned/t", broker="b")
    world.subscriber("s1", "owned/t")
    world.subscriber("s2", "owned/t")
    world.rounds()
    publisher = world.publisher("p", "owned/t", broker="b")
    for _ in range(9):
        world.say(publisher, Publish("owned/t", b"x"))
    world.rounds()
    topic = world.topics()["owned/t"]
    assert (topic.owner, topic.producers.count, topic.consumers.count) == ("b", 0, 2)
    assert (topic.in_per_second, topic.out_per_second) == (0.0, 4.0)


def test_clients_that_left_do_not_count() -> None:
    world = Reporting()
    world.subscriber("s", "owned/t")
    publisher = world.publisher("p", "owned/t")
    world.rounds()
    assert world.topics()["owned/t"].producers.count == 1
    assert publisher.other is not None
    assert publisher.other.connection is not None
    world.node.engine.lose(publisher.other.connection, world.mesh.now)
    world.rounds()
    assert world.topics()["owned/t"].producers.count == 0


def test_whoever_publishes_nothing_for_a_while_is_no_producer_any_more() -> None:
    world = Reporting()
    world.subscriber("s", "owned/t")
    world.publisher("p", "owned/t")
    world.rounds()
    assert world.topics()["owned/t"].producers.count == 1
    world.mesh.now += PRODUCER_S
    world.rounds()
    assert world.topics()["owned/t"].producers.count == 0
    (topic,) = world.node.fabric.ownership.topics.values()
    assert topic.producers == {}, "nor remembered"


def test_producers_are_forgotten_also_where_nobody_wants_to_know_of_them() -> None:
    world = Reporting(controlled=False)
    world.publisher("p", "owned/t")
    (topic,) = world.node.fabric.ownership.topics.values()
    assert topic.producers
    end = world.mesh.now + 3 * PRODUCER_S
    while world.mesh.now < end:
        world.step()
    assert topic.producers == {}
    assert world.reporter.reports == 0


def test_a_topic_without_clients_is_reported_by_its_owner_only() -> None:
    world = Reporting("a", "b")
    world.publisher("first", "owned/t", broker="b")
    world.publisher("first", "owned/mine")
    world.mesh.now += PRODUCER_S + 1
    world.rounds()
    assert set(world.topics()) == {"owned/mine"}


# --- where they are -----------------------------------------------------------------------------------------------------


def test_clients_are_where_their_broker_is_raised_by_their_latency() -> None:
    world = Reporting(agent=Agent(Coordinate([3.0, 4.0], 1.0, 0.0, 0.1)))
    client = world.subscriber("s", "owned/t")
    assert client.other is not None
    client.other.rtt_ms = lambda: 8.0  # type: ignore[attr-defined]
    world.publisher("p", "owned/t")
    world.rounds()
    topic = world.topics()["owned/t"]
    assert topic.consumers.centroid is not None
    assert (topic.consumers.centroid.vector, topic.consumers.centroid.height) == ((3.0, 4.0), 9.0)
    assert topic.consumers.worst_ms == 4.0, "the owner is this broker: half of the connection's round trip"
    assert topic.producers.worst_ms == 0.0


def test_the_worst_case_is_measured_to_the_owner() -> None:
    world = Reporting("a", "b", agent=Agent(Coordinate([0.0, 0.0], 1.0), b=Coordinate([30.0, 40.0], 2.0)))
    world.publisher("first", "owned/t", broker="b")
    client = world.subscriber("s", "owned/t")
    assert client.other is not None
    client.other.rtt_ms = lambda: 7.0  # type: ignore[attr-defined]
    world.publisher("again", "owned/t", broker="b")
    world.rounds()
    assert world.topics()["owned/t"].consumers.worst_ms == (50.0 + 1.0 + 2.0 + 7.0) / 2


def test_an_owner_whose_place_is_not_known_is_not_far_from_anybody() -> None:
    world = Reporting("a", "b")
    world.publisher("first", "owned/t", broker="b")
    world.subscriber("s", "owned/t")
    world.publisher("again", "owned/t", broker="b")
    world.rounds()
    crowd = world.topics()["owned/t"].consumers
    assert (crowd.count, crowd.worst_ms) == (1, 0.0)
    assert crowd.centroid is not None


def test_connections_are_asked_for_their_latency_a_bounded_number_at_a_time() -> None:
    world = Reporting()
    asked: list[int] = []

    def measured(number: int) -> float:
        asked.append(number)
        return 4.0

    for number in range(MEASURES_AT_ONCE + 50):
        client = world.subscriber(f"s{number}", "owned/t")
        assert client.other is not None
        client.other.rtt_ms = functools.partial(measured, number)  # type: ignore[attr-defined]
    world.publisher("p", "owned/t")
    world.rounds()
    assert len(asked) == MEASURES_AT_ONCE
    world.rounds()
    assert len(set(asked)) == MEASURES_AT_ONCE + 50, "those that were not asked before come first"


def gatewayed(world: Reporting, name: str = "g") -> GatewayHost:
    host = GatewayHost(world.mesh, name)
    host.link("a")
    return host


def test_clients_of_a_gateway_are_where_that_says() -> None:
    world = Reporting()
    host = gatewayed(world)
    host.machine.places.agent = Agent(Coordinate([6.0, 8.0], 2.0, 0.0, 0.2))
    client = host.accept()
    client.round_trip_ms = 5.0
    client.say(Connect("c", MQTT_5))
    client.say(Subscribe(1, [SubscriptionRequest("owned/t", 1)]))
    world.publisher("p", "owned/t")
    host.advance(1.0)
    world.rounds()
    crowd = world.topics()["owned/t"].consumers
    assert crowd.centroid is not None
    assert (crowd.centroid.vector, crowd.centroid.height) == ((6.0, 8.0), 7.0)
    assert crowd.worst_ms == (10.0 + 2.0 + 5.0 + 1.0) / 2


@pytest.mark.parametrize("gossiped", [True, False])
def test_a_gateway_that_does_not_say_where_it_is(gossiped: bool) -> None:
    world = Reporting()
    if gossiped:
        world.agent.others["g"] = Coordinate([0.0, 5.0], 2.0)
    host = gatewayed(world)
    (trunk,) = world.node.fabric.trunks.by_link.values()
    trunk.link.rtt_ms = 12.0
    client = host.connect("c")
    client.say(Subscribe(1, [SubscriptionRequest("owned/t", 1)]))
    world.publisher("p", "owned/t")
    world.rounds()
    crowd = world.topics()["owned/t"].consumers
    assert crowd.centroid is not None
    if gossiped:
        assert (crowd.centroid.vector, crowd.centroid.height) == ((0.0, 5.0), 2.0)
    else:
        assert (crowd.centroid.vector, crowd.centroid.height) == ((0.0, 0.0), 13.0), "as far away as its link says"


def test_a_coordinate_of_another_space_is_not_used() -> None:
    world = Reporting()
    host = gatewayed(world)
    host.machine.places.agent = Agent(Coordinate([6.0, 8.0, 1.0], 2.0))
    client = host.connect("c")
    client.say(Subscribe(1, [SubscriptionRequest("owned/t", 1)]))
    host.advance(1.0)
    world.publisher("p", "owned/t")
    world.rounds()
    crowd = world.topics()["owned/t"].consumers
    assert crowd.centroid is not None
    assert len(crowd.centroid.vector) == 2


def test_a_crowd_at_several_places() -> None:
    world = Reporting()
    for name, place in (("g1", [10.0, 0.0]), ("g2", [-10.0, 0.0])):
        host = gatewayed(world, name)
        host.machine.places.agent = Agent(Coordinate(place, 1.0))
        client = host.connect(f"c-{name}")
        client.say(Subscribe(1, [SubscriptionRequest("owned/t", 1)]))
        host.advance(1.0)
    world.publisher("p", "owned/t")
    world.rounds()
    crowd = world.topics()["owned/t"].consumers
    assert crowd.centroid is not None
    assert (crowd.count, crowd.centroid.vector, crowd.centroid.height) == (2, (0.0, 0.0), 1.0)
    assert (crowd.deviation_ms, crowd.worst_ms) == (5.0, 6.0)


def test_a_broker_that_does_not_know_where_it_is_counts_without_places() -> None:
    world = Reporting()
    world.reporter = TelemetryReporter(world.node.fabric, world.mesh.now, None, world.controller)
    world.subscriber("s", "owned/t")
    world.publisher("p", "owned/t")
    world.rounds()
    (report,) = world.controller.take(telemetry.BROKER, BrokerReport)
    assert report.coordinate is None
    topic = world.topics()["owned/t"]
    assert (topic.consumers.count, topic.consumers.centroid, topic.producers.count) == (1, None, 1)


# --- through gateways straight to the owner -------------------------------------------------------------------------------


def submitted(world: Reporting, gateway: str, client: str) -> None:
    (topic,) = world.node.fabric.ownership.topics.values()
    topic.gateway_producers[gateway, client] = (world.mesh.now, 6.0)


def direct() -> tuple[Reporting, GatewayHost, GatewayHost]:
    world = Reporting()
    hosts = []
    for name, place in (("g1", [10.0, 0.0]), ("g2", [0.0, 10.0])):
        host = gatewayed(world, name)
        host.machine.places.agent = Agent(Coordinate(place, 1.0))
        host.advance(1.0)
        hosts.append(host)
    publisher = world.publisher("p", "owned/t")
    assert publisher.other is not None
    assert publisher.other.connection is not None
    world.node.engine.lose(publisher.other.connection, world.mesh.now)
    return world, hosts[0], hosts[1]


def test_clients_that_publish_straight_to_the_owner_are_producers() -> None:
    world, _, _ = direct()
    submitted(world, "g1", "c")
    world.rounds()
    crowd = world.topics()["owned/t"].producers
    assert crowd.centroid is not None
    assert (crowd.count, crowd.centroid.vector, crowd.centroid.height) == (1, (10.0, 0.0), 7.0)


def test_a_client_that_went_to_another_gateway_counts_there_alone() -> None:
    world, _, _ = direct()
    submitted(world, "g1", "c")
    world.mesh.now += 1.0
    submitted(world, "g2", "c")
    world.rounds()
    crowd = world.topics()["owned/t"].producers
    assert crowd.centroid is not None
    assert (crowd.count, crowd.centroid.vector) == (1, (0.0, 10.0))


def test_a_client_that_left_its_gateway_does_not_count() -> None:
    world, first, _ = direct()
    submitted(world, "g1", "c")
    first.machine.places.left("c", ["a"])
    first.advance(1.0)
    world.rounds()
    assert world.topics()["owned/t"].producers.count == 0
    world.mesh.now += 0.1
    submitted(world, "g1", "c")
    world.rounds()
    assert world.topics()["owned/t"].producers.count == 1, "it came back"


def test_clients_of_a_gateway_that_is_gone_do_not_count() -> None:
    world, first, _ = direct()
    submitted(world, "g1", "c")
    first.cut("a")
    world.rounds()
    assert world.topics()["owned/t"].producers.count == 0


# --- rounds ---------------------------------------------------------------------------------------------------------------


def test_a_round_without_topics_is_one_empty_message() -> None:
    world = Reporting()
    world.rounds()
    (report,) = world.controller.take(telemetry.TOPICS, TopicReport)
    assert (report.part, report.parts, report.topics) == (0, 1, [])


def many(world: Reporting, topics: int, name: str = "owned/{}") -> None:
    client = world.client("p")
    for number in range(topics):
        world.node.feed(client, encode(Publish(name.format(number), b"x"), MQTT_5))
    world.mesh.run()


def test_large_reports_are_cut_and_every_topic_is_in_one_part() -> None:
    world = Reporting()
    many(world, 1_000)
    world.rounds()
    reports = world.controller.take(telemetry.TOPICS, TopicReport)
    assert [report.part for report in reports] == list(range(len(reports)))
    assert {report.parts for report in reports} == {len(reports)}
    assert {report.round for report in reports} == {1}
    names = [topic.topic for report in reports for topic in report.topics]
    assert sorted(names) == sorted(f"owned/{number}" for number in range(1_000))
    assert len(reports) > 2


def test_no_part_is_larger_than_said_whatever_topics_are_called() -> None:
    world = Reporting()
    many(world, 300, "owned/" + '"\\\x01' * 60 + "{}")
    world.rounds()
    sizes = [len(data) - 2 for data in world.controller.sent if data[1] == telemetry.TOPICS]
    assert len(sizes) > 3
    assert max(sizes) <= PART_BYTES
    assert min(sizes[:-1]) > PART_BYTES - 2_000, "and they are full"


def test_a_topic_with_a_name_of_the_largest_size_has_a_part_for_itself() -> None:
    world = Reporting()
    many(world, 3, "owned/" + "x" * 65_000 + "{}")
    world.rounds()
    assert [len(report.topics) for report in world.controller.take(telemetry.TOPICS, TopicReport)] == [1, 1, 1]


def test_work_is_spread_over_many_steps() -> None:
    world = Reporting()
    many(world, 10 * SLICE_UNITS)
    world.rounds()
    assert world.steps >= 10
    assert 10 * telemetry.PAUSE_S <= world.reporter.round_seconds < INTERVAL_S


def test_a_round_that_takes_long_is_finished_before_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "PAUSE_S", 1.0)
    world = Reporting()
    many(world, 12 * SLICE_UNITS)
    world.rounds(2)
    reports = world.controller.take(telemetry.TOPICS, TopicReport)
    for number in (1, 2):
        assert sum(len(report.topics) for report in reports if report.round == number) == 12 * SLICE_UNITS
    brokers = world.controller.take(telemetry.BROKER, BrokerReport)
    assert len(brokers) >= 4, "the broker itself is reported all the while"


def test_a_controller_that_listens_slowly_is_waited_for_and_then_passed_over() -> None:
    world = Reporting()
    many(world, 1_000)
    world.controller.room = 3
    while not world.reporter._leaving:
        world.step()
    for _ in range(20):
        world.step()
    assert len(world.controller.take(telemetry.TOPICS, TopicReport)) == 2, "the first was the broker's own report"
    world.controller.room = 1_000
    world.rounds()
    last = world.controller.take(telemetry.TOPICS, TopicReport)[-1]
    assert last.part == last.parts - 1
    world.controller.room = 0
    world.rounds()
    assert world.reporter.unsent > 0


# --- in the fabric --------------------------------------------------------------------------------------------------------


def test_reports_are_published_for_whoever_subscribes_anywhere() -> None:
    world = Reporting("a", "b", controlled=False)
    watcher = world.subscriber("w", "$nearcast/telemetry/#", broker="b")
    world.publisher("p", "owned/t")
    world.rounds()
    found = {topic: payload for topic, payload, _ in payloads(watcher)}
    assert set(found) == {"$nearcast/telemetry/broker/a", "$nearcast/telemetry/topics/a"}
    assert msgspec.json.decode(found["$nearcast/telemetry/broker/a"], type=BrokerReport).broker == "a"
    report = msgspec.json.decode(found["$nearcast/telemetry/topics/a"], type=TopicReport)
    assert [topic.topic for topic in report.topics] == ["owned/t"]


def test_a_subscription_to_everything_does_not_get_them() -> None:
    world = Reporting(controlled=False)
    watcher = world.subscriber("w", "#")
    world.step()
    assert payloads(watcher) == []
    assert world.reporter.reports == 0, "and where nobody wants them, none are made"


def test_raw_mode_tells_of_every_client() -> None:
    world = Reporting(raw=True)
    watcher = world.subscriber("w", "$nearcast/telemetry/clients/#")
    consumer = world.subscriber("s", "owned/t")
    assert consumer.other is not None
    consumer.other.rtt_ms = lambda: 8.0  # type: ignore[attr-defined]
    world.publisher("p", "owned/t")
    world.rounds()
    ((_, payload, _),) = payloads(watcher)
    report = msgspec.json.decode(payload, type=ClientReport)
    found = {(sample.topic, sample.client, sample.role): sample.place.height for sample in report.clients}
    assert found == {("owned/t", "s", 1): 9.0, ("owned/t", "p", 0): 1.0}
    assert not [data for data in world.controller.sent if data[1] == telemetry.CLIENTS], "the controller has no use for them"


def test_without_raw_mode_no_single_client_is_told_of() -> None:
    world = Reporting()
    watcher = world.subscriber("w", "$nearcast/telemetry/clients/#")
    world.publisher("p", "owned/t")
    world.rounds()
    assert payloads(watcher) == []


# --- plans ----------------------------------------------------------------------------------------------------------------


def test_a_plan_that_is_published_reaches_the_controller_once() -> None:
    world = Reporting("a", "b")
    theirs = Controller()
    intake = PlanIntake(world.node.engine.router, world.controller)
    others = PlanIntake(world.mesh.nodes["b"].engine.router, theirs)
    watcher = world.subscriber("w", "$nearcast/plan", broker="b")
    world.node.engine.publish(PLAN_TOPIC.decode(), b"{}", 1, False, world.mesh.now)
    world.node.flush()
    world.mesh.run()
    assert [data for data in world.controller.sent if data[0] == frames.PLAN] == [bytes([frames.PLAN]) + b"{}"]
    assert theirs.sent == [], "only the broker that it was published at passes it on"
    assert [payload for _, payload, _ in payloads(watcher)] == [b"{}"]
    assert (intake.passed_on, others.passed_on) == (1, 0)


def test_a_plan_without_a_controller_is_counted() -> None:
    world = Reporting()
    world.controller.up = False
    intake = PlanIntake(world.node.engine.router, world.controller)
    world.node.engine.publish(PLAN_TOPIC.decode(), b"{}", 0, False, world.mesh.now)
    assert (intake.passed_on, intake.unheard) == (0, 1)


def test_clients_cannot_publish_what_brokers_say() -> None:
    world = Reporting()
    intake = PlanIntake(world.node.engine.router, world.controller)
    watcher = world.subscriber("w", "$nearcast/#")
    world.publisher("p", "$nearcast/plan", "$nearcast/telemetry/broker/a")
    assert payloads(watcher) == []
    assert intake.passed_on == 0
    assert world.node.engine.stats.dropped_not_authorized == 2
