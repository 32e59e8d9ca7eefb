"""docs/semantics.md with clients that others wrote, at brokers that are processes: Paho and Mosquitto's command line."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest
from paho.mqtt.enums import MQTTProtocolVersion

from tests.integration import tools
from tests.integration.broker.running import PATIENCE_SECONDS, wait_for
from tests.integration.brokers import NearcastBroker
from tests.integration.test_fabric_links import Brokers
from tests.integration.test_paho import Paho

pytestmark = pytest.mark.integration

MQTTv311 = MQTTProtocolVersion.MQTTv311
MQTTv5 = MQTTProtocolVersion.MQTTv5

both_versions = pytest.mark.parametrize("version", [MQTTv311, MQTTv5], ids=["3.1.1", "5.0"])


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    made = Brokers(tmp_path_factory.mktemp("fabric"))
    config = "[fabric]\nretained_interval_seconds = 0.2\n"
    first = made.add("a", data=True, config=config)
    made.add("b", first, config=config)
    made.meet("a", "b")
    yield made
    made.close()


@pytest.fixture
def pair(brokers: Brokers) -> tuple[NearcastBroker, NearcastBroker]:
    return brokers.by_name["a"], brokers.by_name["b"]


@pytest.fixture
def clients() -> Iterator[list[Paho]]:
    made: list[Paho] = []
    yield made
    for client in made:
        client.close()


def mosquitto_sub(broker: NearcastBroker, *arguments: str) -> str:
    command = [str(tools.require("mosquitto_sub")), "-h", "127.0.0.1", "-p", str(broker.port()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    return done.stdout


def mosquitto_pub(broker: NearcastBroker, *arguments: str) -> None:
    command = [str(tools.require("mosquitto_pub")), "-h", "127.0.0.1", "-p", str(broker.port()), *arguments]
    subprocess.run(command, timeout=PATIENCE_SECONDS, check=True)


@pytest.mark.parametrize("version", ["mqttv311", "mqttv5"])
def test_a_retained_message_is_found_at_the_other_broker(pair: tuple[NearcastBroker, NearcastBroker], version: str) -> None:
    a, b = pair
    topic = f"state/{version}"
    mosquitto_pub(a, "-V", version, "-q", "1", "-r", "-t", topic, "-m", "warm")
    assert mosquitto_sub(b, "-V", version, "-q", "1", "-t", f"{topic}/#", "-C", "1", "-F", "%r %p") == "1 warm\n"
    mosquitto_pub(b, "-V", version, "-q", "1", "-r", "-t", topic, "-m", "cold")
    wait_for(
        "the newer one",
        lambda: mosquitto_sub(a, "-V", version, "-q", "1", "-t", topic, "-C", "1", "-F", "%r %p") == "1 cold\n",
    )


@both_versions
def test_a_session_follows_its_client(
    pair: tuple[NearcastBroker, NearcastBroker], clients: list[Paho], version: MQTTProtocolVersion
) -> None:
    a, b = pair
    name = f"traveller {version.name}"
    first = Paho(a.port(), version, name, persistent=True)
    clients.append(first)
    first.subscribe(f"news/{version.name}/#", 2)
    first.client.disconnect()
    first.ends.get(timeout=PATIENCE_SECONDS)
    mosquitto_pub(b, "-q", "2", "-t", f"news/{version.name}/1", "-m", "while away")
    wait_for("a knows it", lambda: a.metric("queued_messages") >= 1)
    again = Paho(b.port(), version, name, persistent=True)
    clients.append(again)
    assert again.session_present
    assert again.messages.get(timeout=PATIENCE_SECONDS).payload == b"while away"
    mosquitto_pub(a, "-q", "1", "-t", f"news/{version.name}/1", "-m", "after")
    assert again.messages.get(timeout=PATIENCE_SECONDS).payload == b"after"
    assert again.messages.empty()


def test_who_connects_elsewhere_is_told_at_the_old_broker(
    pair: tuple[NearcastBroker, NearcastBroker], clients: list[Paho]
) -> None:
    a, b = pair
    first = Paho(a.port(), MQTTv5, "twice")
    clients.append(first)
    second = Paho(b.port(), MQTTv5, "twice")
    clients.append(second)
    assert first.ends.get(timeout=PATIENCE_SECONDS).value == 0x8E
    third = Paho(a.port(), MQTTv5, "twice")
    clients.append(third)
    assert second.ends.get(timeout=PATIENCE_SECONDS).value == 0x8E
    wait_for("b's word", lambda: b.log().count("session taken over") == 1)
    assert a.log().count("client connected client=twice") == 2  # also of the one that had to wait


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_each_job_has_one_worker_over_both_brokers(
    pair: tuple[NearcastBroker, NearcastBroker], clients: list[Paho], qos: int
) -> None:
    a, b = pair
    workers = [Paho(a.port(), MQTTv5, f"worker a {qos}"), Paho(b.port(), MQTTv5, f"worker b {qos}")]
    watcher = Paho(a.port(), MQTTv5, f"watcher {qos}")
    clients.extend([*workers, watcher])
    for worker in workers:
        worker.subscribe(f"$share/pool/jobs/{qos}", qos)
    watcher.subscribe(f"jobs/{qos}", qos)
    publisher = Paho(b.port(), MQTTv5, f"publisher {qos}")
    clients.append(publisher)
    for number in range(50):
        publisher.client.publish(f"jobs/{qos}", b"%d" % number, qos)
    seen = [watcher.messages.get(timeout=PATIENCE_SECONDS).payload for _ in range(50)]
    assert seen == [b"%d" % number for number in range(50)]
    # The publisher's broker has a member: all go there.
    served = [workers[1].messages.get(timeout=PATIENCE_SECONDS).payload for _ in range(50)]
    assert served == seen
    assert workers[0].messages.empty()
    # Without it, all go to the other broker's.
    workers[1].client.disconnect()
    wait_for("its leaving", lambda: f'client disconnected client="worker b {qos}"' in b.log())
    publisher.client.publish(f"jobs/{qos}", b"last", qos)
    assert workers[0].messages.get(timeout=PATIENCE_SECONDS).payload == b"last"


@both_versions
def test_a_will_reaches_the_other_broker(
    pair: tuple[NearcastBroker, NearcastBroker], clients: list[Paho], version: MQTTProtocolVersion
) -> None:
    a, b = pair
    topic = f"wills/{version.name}"
    watcher = Paho(a.port(), version, f"watcher {version.name}")
    clients.append(watcher)
    watcher.subscribe(topic, 1)
    command = [str(tools.require("mosquitto_sub")), "-h", "127.0.0.1", "-p", str(b.port()), "-t", "nothing", "-v"]
    command += ["-i", f"dying {version.name}", "--will-topic", topic, "--will-payload", "gone", "--will-qos", "1"]
    dying = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for("its connection", lambda: b.metric("connected_clients") >= 1)
    finally:
        dying.send_signal(signal.SIGKILL)
        dying.wait(PATIENCE_SECONDS)
    assert watcher.messages.get(timeout=PATIENCE_SECONDS).payload == b"gone"


def test_a_broker_that_was_killed_gives_way_when_it_is_back(
    brokers: Brokers, pair: tuple[NearcastBroker, NearcastBroker], clients: list[Paho]
) -> None:
    a, b = pair
    first = Paho(a.port(), MQTTv5, "survivor", persistent=True)
    clients.append(first)
    first.subscribe("news/survivor", 1)
    mosquitto_pub(b, "-q", "1", "-r", "-t", "state/survivor", "-m", "kept")
    a.kill()
    wait_for("b misses a", lambda: not b.sees("a"))
    again = Paho(b.port(), MQTTv5, "survivor", persistent=True)
    clients.append(again)
    assert not again.session_present
    again.subscribe("news/survivor", 1)
    a.start()
    brokers.meet("a", "b")
    mosquitto_pub(a, "-q", "1", "-t", "news/survivor", "-m", "once")
    assert again.messages.get(timeout=PATIENCE_SECONDS).payload == b"once"
    # Nobody is left there but the session of broker b.
    wait_for("a's session is over", lambda: a.metric("sessions") == 1)
    assert again.messages.empty()
    assert mosquitto_sub(a, "-q", "1", "-t", "state/survivor", "-C", "1") == "kept\n"
