"""Brokers as processes that are one: their links, whom they trust, what they do when one of them goes."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from nearcast.mqtt.packets import Connect, Properties, PubAck, PubComp, Publish, PubRec, PubRel, Subscribe, SubscriptionRequest
from nearcast.serving.secrets import make_secret
from tests.integration.broker.running import Authority, RawClient, wait_for
from tests.integration.brokers import NearcastBroker

NOWHERE = "127.0.0.1:1"
"""An address where nobody answers: a broker that says it is there can be reached only by those that it dials."""


class Brokers:
    """Brokers of one fabric, each in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.secret = directory / "fabric.secret"
        make_secret(self.secret)
        self._stack = ExitStack()
        self.by_name: dict[str, NearcastBroker] = {}

    def add(
        self,
        name: str,
        *peers: NearcastBroker,
        secret: Path | None = None,
        data: bool = False,
        advertise: str = "",
        config: str = "",
    ) -> NearcastBroker:
        arguments = ["--name", name, "--fabric-secret", str(secret or self.secret)]
        for peer in peers:
            arguments += ["--peer", peer.link_address]
        if advertise:
            arguments += ["--advertise", advertise]
        home = self.directory / name
        home.mkdir()
        broker = NearcastBroker(home, config, data=data, arguments=arguments)
        self.by_name[name] = self._stack.enter_context(broker)
        return broker

    def meet(self, *names: str) -> None:
        """Wait until these all have links to each other."""
        for name in names:
            others = [other for other in names if other != name]
            wait_for(f"{name} meeting {others}", partial(self.by_name[name].sees, *others))

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    made = Brokers(tmp_path)
    yield made
    made.close()


def subscriber(broker: NearcastBroker, topic_filter: str, client_id: str = "", expiry_seconds: int = 0) -> RawClient:
    properties = Properties(session_expiry_interval=expiry_seconds) if expiry_seconds else None
    client = broker.connect(Connect(client_id, version=5, clean_start=not expiry_seconds, properties=properties))
    client.send(Subscribe(1, [SubscriptionRequest(topic_filter, 2)]))
    client.receive()
    return client


def publish(client: RawClient, topic: str, payload: bytes, qos: int, packet_id: int = 1) -> None:
    """Publish, and return once the broker took it on."""
    client.send(Publish(topic, payload, qos, packet_id=packet_id if qos else 0))
    if qos == 1:
        assert isinstance(client.receive(), PubAck)
    elif qos == 2:
        assert isinstance(client.receive(), PubRec)
        client.send(PubRel(packet_id))
        assert isinstance(client.receive(), PubComp)


def payloads(client: RawClient, count: int) -> list[bytes]:
    """What arrives, acknowledged."""
    found: list[bytes] = []
    while len(found) < count:
        packet = client.receive()
        assert packet is not None, found
        if isinstance(packet, Publish):
            found.append(packet.payload)
            if packet.qos == 1:
                client.send(PubAck(packet.packet_id))
            elif packet.qos == 2:
                client.send(PubRec(packet.packet_id))
        elif isinstance(packet, PubRel):
            client.send(PubComp(packet.packet_id))
    return found


def test_two_brokers_are_one(brokers: Brokers) -> None:
    a = brokers.add("a")
    b = brokers.add("b", a)
    brokers.meet("a", "b")
    with subscriber(a, "rooms/#") as listening, b.connect() as speaking:
        for qos in (0, 1, 2):
            publish(speaking, f"rooms/{qos}", b"to a, %d" % qos, qos)
        assert sorted(payloads(listening, 3)) == [b"to a, 0", b"to a, 1", b"to a, 2"]
    with subscriber(b, "rooms/#") as listening, a.connect() as speaking:
        for qos in (0, 1, 2):
            publish(speaking, f"rooms/{qos}", b"to b, %d" % qos, qos)
        assert sorted(payloads(listening, 3)) == [b"to b, 0", b"to b, 1", b"to b, 2"]
    assert a.metric("fabric_brokers_up") == 1
    assert a.metric("broker_up", broker="b") == 1
    assert a.health()["fabric"]["name"] == "a"


def test_a_broker_that_is_told_of_one_finds_all(brokers: Brokers) -> None:
    a = brokers.add("a")
    brokers.add("b", a)
    brokers.add("c", a)
    brokers.meet("a", "b", "c")
    wait_for("links of their own", lambda: not brokers.by_name["b"].metric("relayed_links"))


def test_what_cannot_be_dialled_is_reached_through_others(brokers: Brokers) -> None:
    middle = brokers.add("m")
    a = brokers.add("a", middle, advertise=NOWHERE)
    z = brokers.add("z", middle, advertise=NOWHERE)
    brokers.meet("a", "m", "z")
    assert a.metric("relayed_links") == z.metric("relayed_links") == 1
    with subscriber(z, "rooms/#") as listening, a.connect() as speaking:
        for qos in (0, 1, 2):
            publish(speaking, "rooms/1", b"%d" % qos, qos)
        assert sorted(payloads(listening, 3)) == [b"0", b"1", b"2"]
    assert middle.metric("relayed_bytes_total") > 0


def test_who_does_not_have_the_secret_stays_outside(brokers: Brokers) -> None:
    a = brokers.add("a")
    other = brokers.directory / "other.secret"
    make_secret(other)
    stranger = brokers.add("stranger", a, secret=other)
    a.wait_for_log("the other end does not have this fabric's secret")
    stranger.wait_for_log("link failed")
    assert a.sees()
    assert stranger.sees()
    for secret in (brokers.secret, other):
        content = secret.read_text().strip()
        assert content not in a.log() + stranger.log()


def test_two_of_one_name_are_told_so(brokers: Brokers) -> None:
    a = brokers.add("a")
    home = brokers.directory / "namesake"
    home.mkdir()
    arguments = ["--name", "a", "--fabric-secret", str(brokers.secret), "--peer", a.link_address]
    with NearcastBroker(home, arguments=arguments) as namesake:
        namesake.wait_for_log("two nodes are called a")
        assert namesake.sees()


def test_a_broker_may_find_itself_among_its_peers(brokers: Brokers) -> None:
    a = brokers.add("a")
    b = brokers.add("b", a)
    brokers.meet("a", "b")
    a.stop()
    a._arguments += ["--peer", a.link_address, "--peer", b.link_address]
    a.start()
    brokers.meet("a", "b")
    assert "link failed" not in a.log()


def test_after_a_crash_everything_goes_on_and_nothing_is_missing(brokers: Brokers) -> None:
    a = brokers.add("a", data=True)
    b = brokers.add("b", a, data=True)
    brokers.meet("a", "b")
    subscriber(b, "rooms/#", "sleeper", expiry_seconds=3_600).close()
    with a.connect() as speaking:
        publish(speaking, "rooms/1", b"before", 1)
        wait_for("the first message crossing", lambda: a.metric("broker_queued_messages", broker="b") == 0)
        b.kill()
        wait_for("the loss of b", lambda: a.sees())
        publish(speaking, "rooms/1", b"meanwhile", 1)
        publish(speaking, "rooms/1", b"meanwhile, too", 2, 2)
        a.kill()
    a.start()
    b.start()
    brokers.meet("a", "b")
    with b.connect(Connect("sleeper", version=5, clean_start=False)) as listening:
        assert payloads(listening, 3) == [b"before", b"meanwhile", b"meanwhile, too"]


def test_a_broker_that_stops_hands_over_what_was_published_there(brokers: Brokers) -> None:
    a = brokers.add("a")
    b = brokers.add("b", a)
    brokers.meet("a", "b")
    count = 500
    with subscriber(b, "rooms/#") as listening, a.connect() as speaking:
        for number in range(1, count + 1):
            speaking.send(Publish("rooms/1", b"%d" % number, 1, packet_id=number))
        for _ in range(count):
            assert isinstance(speaking.receive(), PubAck)
        a.signal(signal.SIGTERM)
        assert payloads(listening, count) == [b"%d" % number for number in range(1, count + 1)]
    wait_for("the end of a", lambda: a.process is not None and a.process.poll() == 0)
    b.wait_for_log("the broker is stopping")


def test_links_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("localhost", "server")
    authority.issue("a broker", "broker")
    make_secret(tmp_path / "fabric.secret")
    secure = """
    [[listeners]]
    kind = "tcp"
    port = 0
    [[listeners]]
    kind = "link-tls"
    port = 0
    certificate_file = "../server.pem"
    key_file = "../server.key"
    ca_file = "../ca.pem"
    client_certificates = "required"
    [fabric]
    name = "a"
    secret_file = "../fabric.secret"
    """
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    with NearcastBroker(tmp_path / "a", secure) as a:
        peer = f"localhost:{a.port('link-tls')}"
        trusting = f"""
        [fabric]
        name = "b"
        secret_file = "../fabric.secret"
        peers = ["{peer}"]
        tls = true
        ca_file = "../ca.pem"
        certificate_file = "../broker.pem"
        key_file = "../broker.key"
        """
        with NearcastBroker(tmp_path / "b", trusting) as b:
            wait_for("the link", lambda: b.sees("a"))
            with subscriber(a, "rooms/#") as listening, b.connect() as speaking:
                publish(speaking, "rooms/1", b"warm", 1)
                assert payloads(listening, 1) == [b"warm"]
        mistrusting = trusting.replace('"b"', '"c"').replace('ca_file = "../ca.pem"', "")
        with NearcastBroker(tmp_path / "c", mistrusting) as c:
            c.wait_for_log("cannot reach a node")
            assert c.sees()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "nearcast", *arguments], capture_output=True, text=True, check=False)


def test_a_secret_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "fabric.secret"
    assert run("secret", str(path)).returncode == 0
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    before = path.read_bytes()
    again = run("secret", str(path))
    assert again.returncode == 1
    assert "there is such a file already" in again.stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--fabric-secret", "nowhere"], "`nearcast secret FILE` makes one"),
        (["--peer", "127.0.0.1:1884"], "(--fabric-secret) is needed"),
        (["--fabric-secret", "SECRET", "--peer", "localhost"], "write host:port"),
        (["--fabric-secret", "SECRET", "--peer", "::1:1884"], "[address]:port"),
        (["--fabric-secret", "SECRET", "--port", "0", "--data", "d"], "--name"),
        (["--link-port", "1884"], "`nearcast secret FILE` makes one"),
        (["--fabric-secret", "SECRET", "--name", ""], "must be 1 to 128 characters"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(tmp_path: Path, arguments: list[str], says: str) -> None:
    make_secret(tmp_path / "s")
    words = [str(tmp_path / "s") if word == "SECRET" else word for word in arguments]
    refused = run("broker", "--check", *words)
    assert refused.returncode == 1, refused.stdout
    assert says in refused.stderr
    assert refused.stderr.count("\n") == 1
