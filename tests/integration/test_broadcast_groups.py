"""Broadcast groups of real brokers with an ordinary Mosquitto as the cloud, and clients that others wrote at both."""

from __future__ import annotations

import contextlib
import io
import json
import queue
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from paho.mqtt.enums import MQTTProtocolVersion

from nearcast.cli.main import main
from tests.integration.broker.running import PATIENCE_SECONDS, wait_for
from tests.integration.clouds import QUICK, GroupedBroker, GroupedBrokers
from tests.integration.controllers import NearcastController
from tests.integration.test_paho import Paho

pytestmark = pytest.mark.integration

MQTTv311 = MQTTProtocolVersion.MQTTv311
MQTTv5 = MQTTProtocolVersion.MQTTv5

Connect = Callable[..., Paho]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Clients that are closed with the test."""
    made: list[Paho] = []

    def connecting(port: int, client_id: str = "", version: MQTTProtocolVersion = MQTTv5, *, persistent: bool = False) -> Paho:
        made.append(Paho(port, version, client_id, persistent=persistent))
        return made[-1]

    yield connecting
    for client in made:
        client.close()


def grouped(directory: Path, config: str = QUICK) -> GroupedBrokers:
    """Two brokers in the east, of which east-1 comes to lead, and one in the west; not started yet."""
    brokers = GroupedBrokers(directory, config=config)
    brokers.make("east-1", "east", lcm=20.0)
    brokers.make("east-2", "east", lcm=10.0)
    brokers.make("west", "west", lcm=5.0)
    return brokers


def formed(brokers: GroupedBrokers) -> None:
    brokers.form("east-1", "east-2")
    brokers.form("west")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupedBrokers]:
    """For tests that break nothing. All tests use topics of their own: what one leaves behind does not concern others."""
    with grouped(tmp_path_factory.mktemp("groups")) as brokers:
        brokers.start()
        formed(brokers)
        wait_for("the member to do without the cloud", lambda: not brokers.by_name["east-2"].metric("cloud_connected"))
        yield brokers


@pytest.fixture
def brokers(shared: GroupedBrokers) -> Iterator[GroupedBrokers]:
    """The same brokers, to be broken; they are whole again for whoever comes next."""
    yield shared
    shared.mend()
    formed(shared)


class Traffic:
    """Numbered messages from one client, at its own pace, until told to stop; ``sent`` counts the acknowledged ones."""

    def __init__(self, client: Paho, topic: str, qos: int = 1) -> None:
        self._client = client
        self._topic = topic
        self._qos = qos
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"traffic {topic}")
        self.sent = 0

    def _run(self) -> None:
        while not self._stop.is_set():
            self._client.client.publish(self._topic, b"%d" % self.sent, self._qos).wait_for_publish(PATIENCE_SECONDS)
            self.sent += 1

    def reaches(self, more: int) -> None:
        """Wait until so many more were acknowledged."""
        wanted = self.sent + more
        wait_for(f"{more} more messages", lambda: self.sent >= wanted)

    def end(self) -> list[bytes]:
        self._stop.set()
        self._thread.join()
        return [b"%d" % number for number in range(self.sent)]

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def by_topic(subscriber: Paho, count: int) -> dict[str, list[bytes]]:
    """The next messages, or as many of them as come, by topic and in order."""
    found: dict[str, list[bytes]] = {}
    with contextlib.suppress(queue.Empty):
        for _ in range(count):
            message = subscriber.receive()
            found.setdefault(message.topic, []).append(bytes(message.payload))
    return found


# --- a fabric that nothing happens to ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [MQTTv311, MQTTv5], ids=["3.1.1", "5.0"])
def test_messages_cross_groups_at_every_qos(shared: GroupedBrokers, connect: Connect, version: MQTTProtocolVersion) -> None:
    topics = f"cars/{version.name}"
    subscribers = {name: connect(broker.port(), f"s {name}", version) for name, broker in shared.by_name.items()}
    for subscriber in subscribers.values():
        subscriber.subscribe(f"{topics}/#", 2)
    for name, broker in shared.by_name.items():
        publisher = connect(broker.port(), f"p {name}", version)
        for qos in (0, 1, 2):
            for number in range(20):
                publisher.publish(f"{topics}/{name}/{qos}", b"%d" % number, qos)
    expected = {
        f"{topics}/{name}/{qos}": [b"%d" % number for number in range(20)] for name in shared.by_name for qos in (0, 1, 2)
    }
    for subscriber in subscribers.values():
        assert by_topic(subscriber, 180) == expected
        assert subscriber.messages.empty()


def test_only_the_leader_of_a_group_talks_to_the_cloud(shared: GroupedBrokers) -> None:
    groups = {name: broker.group() for name, broker in shared.by_name.items()}
    assert {name: group["cloud_state"] for name, group in groups.items()} == {
        "east-1": "connected",
        "east-2": "not needed",
        "west": "connected",
    }
    # And brokers have links to those of their group only.
    assert {name: broker.fellows() for name, broker in shared.by_name.items()} == {
        "east-1": {"east-2"},
        "east-2": {"east-1"},
        "west": set(),
    }
    assert shared.by_name["west"].sees()


def test_clients_at_the_cloud_are_part_of_it(shared: GroupedBrokers, connect: Connect) -> None:
    outside = connect(shared.cloud.port, "outside")
    outside.subscribe("cars/outside/#", 2)
    inside = [connect(broker.port(), f"inside {name}") for name, broker in shared.by_name.items()]
    for client in inside:
        client.subscribe("cars/outside/#", 2)
    for qos in (0, 1, 2):
        outside.publish("cars/outside/down", b"to all, %d" % qos, qos)
    for client in [outside, *inside]:
        assert sorted(client.payloads(3)) == [b"to all, 0", b"to all, 1", b"to all, 2"]
    for number, client in enumerate(inside):
        client.publish("cars/outside/up", b"from %d" % number, 1, ContentType="text/plain", UserProperty=[("own", "kept")])
    for client in [outside, *inside]:
        assert sorted(client.payloads(3)) == [b"from 0", b"from 1", b"from 2"]
        assert client.messages.empty()


def test_what_brokers_tell_each_other_is_not_shown_to_clients(shared: GroupedBrokers, connect: Connect) -> None:
    subscriber = connect(shared.by_name["west"].port(), "curious")
    subscriber.subscribe("#", 1)
    connect(shared.by_name["east-2"].port(), "p").publish("cars/shown", b"x", 1, UserProperty=[("own", "kept")])
    payload, found = subscriber.received()
    assert (payload, found.UserProperty) == (b"x", [("own", "kept")])
    assert subscriber.messages.empty()


def test_topics_of_other_classes_stay_out_of_it(shared: GroupedBrokers, connect: Connect) -> None:
    outside = connect(shared.cloud.port, "outside too")
    outside.subscribe("#", 1)
    near = connect(shared.by_name["east-1"].port(), "near")
    near.subscribe("rooms/#", 1)
    publisher = connect(shared.by_name["east-2"].port(), "rooms")
    publisher.publish("rooms/1", b"bridged", 1)
    publisher.publish("cars/last", b"broadcast", 1)
    assert near.payloads(1) == [b"bridged"]
    seen: list[str] = []
    while "cars/last" not in seen:
        seen.append(outside.receive().topic)
    assert [topic for topic in seen if not topic.startswith("nearcast/")] == ["cars/last"]


def test_the_command_shows_the_groups(shared: GroupedBrokers) -> None:
    output = io.StringIO()
    asked = [word for url in shared.urls() for word in ("--broker", url)]
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as ended:
        main(["groups", *asked])
    assert ended.value.code == 0
    shown = output.getvalue()
    assert "2 groups of 3 brokers" in shown
    assert re.search(r"^east-1 +leads +- +1000 ms \(leave 1250\) +20 +connected +live +0", shown, re.MULTILINE)
    assert re.search(r"^  east-2 +member +[\d.]+ ms +10 +not needed +live +0", shown, re.MULTILINE)
    assert re.search(r"^west +leads +- +1000 ms \(leave 1250\) +5 +connected +live +0", shown, re.MULTILINE)
    # A broker that leads knows the leaders of its own region only.
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit):
        main(["groups", "--json", "--broker", shared.urls()[2]])
    assert [group["leader"] for group in json.loads(output.getvalue())] == ["west"]


def test_metrics_and_sys_topics_tell_of_the_group(shared: GroupedBrokers, connect: Connect) -> None:
    leader, member = shared.by_name["east-1"], shared.by_name["east-2"]
    assert (leader.metric("group_leads"), member.metric("group_leads")) == (1.0, 0.0)
    assert (leader.metric("group_size"), shared.by_name["west"].metric("group_size")) == (2.0, 1.0)
    assert (leader.metric("cloud_connected"), member.metric("cloud_connected")) == (1.0, 0.0)
    assert leader.metric("group_join_threshold_ms") == 1_000.0
    relayed = leader.metric("cloud_relayed_messages_total")
    connect(member.port(), "counted").publish("cars/counted", b"x", 1)
    wait_for("the message at the cloud", lambda: leader.metric("cloud_relayed_messages_total") > relayed)
    reader = connect(member.port(), "reader")
    reader.subscribe("$SYS/broker/fabric/group/#")
    found: dict[str, bytes] = {}
    while found != {"leads": b"0", "size": b"2", "waiting": b"0"}:
        message = reader.receive()  # what is retained at first, and what changed since
        found[message.topic.removeprefix("$SYS/broker/fabric/group/")] = bytes(message.payload)


def test_a_controller_knows_all_groups(tmp_path: Path, connect: Connect) -> None:
    with GroupedBrokers(tmp_path) as brokers:
        home = tmp_path / "controller"
        home.mkdir()
        controller = NearcastController(home, brokers.secret)
        with controller:
            registered = ["--controller", controller.link_address]
            brokers.make("east-1", "east", lcm=20.0, more=registered)
            brokers.make("east-2", "east", lcm=10.0, more=registered)
            brokers.make("west", "west", lcm=5.0, more=registered)
            brokers.start()
            formed(brokers)
            api = ["--api", controller.api, "--fabric-secret", str(brokers.secret)]

            def shown() -> str:
                output = io.StringIO()
                with contextlib.redirect_stdout(output), pytest.raises(SystemExit):
                    main(["groups", *api])
                return output.getvalue()

            def settled_groups() -> bool:
                groups = controller.client().get("/groups")
                found = {
                    group["leader"]: [member["name"] for member in group["members"]] for group in groups if group["settled"]
                }
                return found == {"east-1": ["east-1", "east-2"], "west": ["west"]}

            wait_for("the controller's knowledge", settled_groups)
            member = re.compile(r"^  east-2 +member +[\d.]+ ms +10 +not needed +live", re.MULTILINE)
            wait_for("the member to be settled", lambda: member.search(shown()) is not None)
            # All brokers have links here, and the controller says what is broadcast.
            wait_for("links", lambda: brokers.by_name["west"].sees("east-1", "east-2"))
            subscriber = connect(brokers.by_name["west"].port(), "subscriber")
            subscriber.subscribe("#", 1)
            with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as ended:
                main(["class", "plain/#", "broadcast", *api])
            assert ended.value.code == 0
            publisher = connect(brokers.by_name["east-2"].port(), "publisher")
            relayed = brokers.by_name["east-1"].metric("cloud_relayed_messages_total")

            def published() -> bool:
                publisher.publish("plain/1", b"x", 1)
                return brokers.by_name["east-1"].metric("cloud_relayed_messages_total") > relayed

            wait_for("the new class", published)
            publisher.publish("rooms/1", b"last", 1)
            while subscriber.receive().topic != "rooms/1":
                pass


# --- faults -------------------------------------------------------------------------------------------------------------


def test_a_cloud_that_is_restarted_under_load_loses_nothing(brokers: GroupedBrokers, connect: Connect) -> None:
    near, far = brokers.by_name["east-1"], brokers.by_name["west"]
    subscribers = [connect(broker.port(), f"s {broker.directory.name}") for broker in (near, far)]
    for subscriber in subscribers:
        subscriber.subscribe("cars/restarted/#", 2)
    with contextlib.ExitStack() as stack:
        from_member = stack.enter_context(Traffic(connect(brokers.by_name["east-2"].port(), "p east"), "cars/restarted/east"))
        from_leader = stack.enter_context(Traffic(connect(far.port(), "p west"), "cars/restarted/west", 2))
        for _ in range(2):
            from_member.reaches(50)
            from_leader.reaches(50)
            brokers.cloud.stop()
            from_member.reaches(50)  # nobody waits for the cloud
            from_leader.reaches(50)
            brokers.cloud.start()
            wait_for("the leaders' return", lambda: all(broker.metric("cloud_connected") == 1.0 for broker in (near, far)))
        expected = {"cars/restarted/east": from_member.end(), "cars/restarted/west": from_leader.end()}
    for subscriber in subscribers:
        found: dict[str, list[bytes]] = {topic: [] for topic in expected}
        while any(len(found[topic]) < len(expected[topic]) for topic in expected):
            message = subscriber.receive()
            found[message.topic].append(bytes(message.payload))
        assert found == expected, "each once, and in order"


def test_without_the_cloud_a_group_goes_on(brokers: GroupedBrokers, connect: Connect) -> None:
    near, far = connect(brokers.by_name["east-1"].port(), "near"), connect(brokers.by_name["west"].port(), "far")
    for subscriber in (near, far):
        subscriber.subscribe("cars/cloudless/#", 2)
    brokers.cloud.stop()
    wait_for("the loss", lambda: all(brokers.by_name[name].metric("cloud_connected") == 0.0 for name in ("east-1", "west")))
    publisher = connect(brokers.by_name["east-2"].port(), "p")
    late = connect(brokers.by_name["east-1"].port(), "late")
    late.subscribe("cars/cloudless/#", 2)
    for qos in (0, 1, 2):
        publisher.publish(f"cars/cloudless/{qos}", b"%d" % qos, qos)
    assert sorted(near.payloads(3)) == sorted(late.payloads(3)) == [b"0", b"1", b"2"]
    assert brokers.by_name["east-2"].leader() == "east-1"
    assert far.messages.empty()
    brokers.cloud.start()
    assert sorted(far.payloads(2)) == [b"1", b"2"]
    publisher.publish("cars/cloudless/9", b"9", 1)
    for subscriber in (near, far, late):
        assert subscriber.payloads(1) == [b"9"]
        assert subscriber.messages.empty()


def test_a_leader_that_is_killed_takes_no_message_along(brokers: GroupedBrokers, connect: Connect) -> None:
    leader, member, far = (brokers.by_name[name] for name in ("east-1", "east-2", "west"))
    subscriber = connect(far.port(), "far")
    at_member = connect(member.port(), "at member")
    for client in (subscriber, at_member):
        client.subscribe("cars/leader/#", 2)
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(Traffic(connect(member.port(), "p member"), "cars/leader/there"))
        back = stack.enter_context(Traffic(connect(far.port(), "p far"), "cars/leader/back"))
        there.reaches(50)
        back.reaches(50)
        leader.kill()
        wait_for("the member to lead", lambda: member.leader() == "east-2" and member.metric("cloud_connected") == 1.0)
        there.reaches(50)
        back.reaches(50)
        leader.start()
        brokers.form("east-1", "east-2")
        there.reaches(50)
        back.reaches(50)
        expected = {"cars/leader/there": there.end(), "cars/leader/back": back.end()}
    for client in (subscriber, at_member):
        found: dict[str, set[bytes]] = {topic: set() for topic in expected}
        while any(len(found[topic]) < len(expected[topic]) for topic in expected):
            message = client.receive()
            found[message.topic].add(bytes(message.payload))
        assert {topic: sorted(payloads) for topic, payloads in found.items()} == {
            topic: sorted(payloads) for topic, payloads in expected.items()
        }


def test_a_member_that_is_killed_gets_what_it_missed(brokers: GroupedBrokers, connect: Connect) -> None:
    leader, member, far = (brokers.by_name[name] for name in ("east-1", "east-2", "west"))
    subscriber = connect(member.port(), "kept", persistent=True)
    subscriber.subscribe("cars/member/#", 1)
    publisher = connect(far.port(), "p")
    publisher.publish("cars/member/1", b"before", 1)
    assert subscriber.payloads(1) == [b"before"]
    wait_for("its acknowledgement", lambda: member.metric("inflight_messages") == 0)
    member.kill()
    wait_for("the leader's notice", lambda: not leader.fellows())
    for number in range(10):
        publisher.publish("cars/member/1", b"%d" % number, 1)
    member.start()
    again = connect(member.port(), "kept", persistent=True)
    assert again.session_present
    assert again.payloads(10) == [b"%d" % number for number in range(10)]


def test_all_stopped_in_order_and_started_again(brokers: GroupedBrokers, connect: Connect) -> None:
    """What waits for the cloud is on disk."""
    far = connect(brokers.by_name["west"].port(), "far", persistent=True)
    far.subscribe("cars/stopped/#", 1)
    brokers.cloud.stop()
    member: GroupedBroker = brokers.by_name["east-2"]
    publisher = connect(member.port(), "p")
    for number in range(10):
        publisher.publish("cars/stopped/1", b"%d" % number, 1)
    for broker in brokers.by_name.values():
        broker.stop()
    brokers.mend()
    again = connect(brokers.by_name["west"].port(), "far", persistent=True)
    assert again.payloads(10) == [b"%d" % number for number in range(10)]


def test_a_cloud_of_the_older_version(tmp_path: Path, connect: Connect) -> None:
    with grouped(tmp_path, QUICK + 'cloud_version = "3.1.1"\n') as brokers:
        brokers.start()
        formed(brokers)
        subscribers = [connect(broker.port(), f"s {name}") for name, broker in brokers.by_name.items()]
        for subscriber in subscribers:
            subscriber.subscribe("cars/#", 2)
        publishers = [connect(broker.port(), f"p {name}") for name, broker in brokers.by_name.items()]
        outside = connect(brokers.cloud.port, "outside", MQTTv311)
        for number in range(30):
            for place, publisher in enumerate(publishers):
                publisher.publish(f"cars/{place}", b"%d" % number, number % 3)
            outside.publish("cars/outside", b"%d" % number, 1)
        expected = sorted(b"%d" % number for number in range(30))
        for subscriber in subscribers:
            found = {topic: sorted(payloads) for topic, payloads in by_topic(subscriber, 120).items()}
            assert found == dict.fromkeys(("cars/0", "cars/1", "cars/2", "cars/outside"), expected)
            assert subscriber.messages.empty()


def test_a_cloud_that_cannot_be_used_is_said_in_the_log(tmp_path: Path, connect: Connect) -> None:
    rules = tmp_path / "rules"
    rules.write_text("topic readwrite nearcast/#\ntopic read cars/#\n", encoding="utf-8")
    brokers = GroupedBrokers(tmp_path, mosquitto=f"acl_file {rules}\n")
    broker = brokers.make("alone", lcm=1.0)
    with broker:
        broker.wait_for_log("no connection to the cloud, trying again")
        assert "end at the group" in broker.log()
        group = broker.group()
        assert (group["cloud_state"], group["relay"]) == ("connecting", "no cloud")
        assert group["cloud_problem"] == "nothing listens there"
        with brokers.cloud:
            connect(broker.port(), "p").publish("cars/1", b"not for others", 1)
            broker.wait_for_log("the cloud does not take messages")


def test_a_broker_that_broadcasts_nothing_is_told_so(tmp_path: Path) -> None:
    with GroupedBrokers(tmp_path, broadcast=()).make("alone", lcm=1.0) as broker:
        broker.wait_for_log("no topic is broadcast")
