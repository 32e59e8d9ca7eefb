"""The gateway as a process: brokers that are killed or stop behind it, brokers of other makes, limits, words."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearcast.mqtt.packets import (
    Connect,
    Disconnect,
    PingReq,
    PingResp,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    SubscriptionRequest,
)
from tests.integration.broker.running import Authority, RawClient, wait_for
from tests.integration.brokers import NearcastBroker
from tests.integration.gateways import EmbeddedGateway, NearcastGateway, config, fronted
from tests.integration.test_fabric_links import payloads, publish
from tests.integration.tools import require

pytestmark = pytest.mark.integration


def raw(port: int, version: int = 5) -> RawClient:
    return RawClient(socket.create_connection(("127.0.0.1", port), 20), version)


def joined(port: int, client_id: str, version: int = 5) -> RawClient:
    return raw(port, version).connected(Connect(client_id, version))


def subscriber(port: int, topic_filter: str, client_id: str, version: int = 5, qos: int = 2) -> RawClient:
    client = joined(port, client_id, version)
    client.send(Subscribe(1, [SubscriptionRequest(topic_filter, qos)]))
    assert isinstance(client.receive(), SubAck)
    return client


def broker_of(gateway: NearcastGateway) -> NearcastBroker:
    """The broker that clients are at now."""
    (name,) = [broker["name"] for broker in gateway.health()["brokers"] if broker["clients"]]
    return gateway.behind[int(name[1:])]


@pytest.mark.parametrize("version", [4, 5])
def test_a_broker_is_killed_and_the_clients_stay(tmp_path: Path, version: int) -> None:
    with (
        fronted(tmp_path, brokers=2) as gateway,
        subscriber(gateway.port(), "t/#", "r", version) as listening,
        joined(gateway.port(), "s", version) as speaking,
    ):
        publish(speaking, "t/before", b"before", 1)
        assert payloads(listening, 1) == [b"before"]
        broker_of(gateway).kill()
        for qos in (0, 1, 2):
            if qos == 0:
                # A message of QoS 0 that a dying broker had is gone with it, so not before both are elsewhere.
                wait_for("both clients elsewhere", lambda: gateway.own_metric("clients_resumed_total") == 2)
            publish(speaking, f"t/{qos}", b"after %d" % qos, qos, packet_id=7)
        assert sorted(payloads(listening, 3)) == [b"after 0", b"after 1", b"after 2"]
        assert gateway.own_metric("brokers_lost_total") == 1


def test_a_broker_stops_in_order_and_nothing_is_lost(tmp_path: Path) -> None:
    with (
        fronted(tmp_path, brokers=2) as gateway,
        subscriber(gateway.port(), "t", "r", qos=0) as listening,
        joined(gateway.port(), "s") as speaking,
    ):
        leaving = broker_of(gateway)
        assert leaving.process is not None
        leaving.process.send_signal(signal.SIGTERM)
        for number in range(200):
            speaking.send(Publish("t", b"%d" % number))
        assert payloads(listening, 200) == [b"%d" % number for number in range(200)]
        assert leaving.process.wait(20) == 0
        leaving.process = None
        assert gateway.own_metric("moves_total") == 2
        assert gateway.own_metric("clients_resumed_total") == 0


def test_no_broker_at_all_and_then_one(tmp_path: Path) -> None:
    with fronted(tmp_path, brokers=1) as gateway, subscriber(gateway.port(), "t", "r") as listening:
        (only,) = gateway.behind
        only.kill()
        wait_for("the loss", lambda: gateway.own_metric("clients_waiting") == 1)
        listening.send(PingReq())
        only.start()
        assert isinstance(listening.receive(), PingResp)
        with only.connect() as speaking:
            publish(speaking, "t", b"again", 1)
        assert payloads(listening, 1) == [b"again"]


def test_a_gateway_that_stops_says_so(tmp_path: Path) -> None:
    with fronted(tmp_path, brokers=1) as gateway, joined(gateway.port(), "c") as client:
        assert gateway.process is not None
        gateway.process.send_signal(signal.SIGTERM)
        answer = client.receive()
        assert isinstance(answer, Disconnect)
        assert answer.reason_code == 0x8B
        assert client.receive() is None
        assert gateway.process.wait(20) == 0
        gateway.process = None


def test_too_many_clients_are_turned_away(tmp_path: Path) -> None:
    with fronted(tmp_path, "[limits]\nmax_connections = 2\n", brokers=1) as gateway:
        with joined(gateway.port(), "a"), joined(gateway.port(), "b"), raw(gateway.port()) as third:
            assert third.receive() is None
        assert gateway.own_metric("clients_refused_total") >= 1


def test_who_a_client_is_and_what_it_may_is_the_brokers_business(tmp_path: Path) -> None:
    """A certificate shown to the gateway, over TLS, names the user at the broker."""
    authority = Authority(tmp_path)
    authority.issue("localhost", "server")
    device = authority.issue("device-7", "device")
    listener = f"""
    [[listeners]]
    kind = "tls"
    port = 0
    certificate_file = "{tmp_path}/server.pem"
    key_file = "{tmp_path}/server.key"
    ca_file = "{tmp_path}/ca.pem"
    client_certificates = "optional"
    certificate_username = true
    """
    rules = """
    [security]
    allow_anonymous = false
    acl = [{ action = "allow", topic = "devices/%u/#" }]
    """
    with fronted(tmp_path, listener, broker_config=rules) as gateway:
        plain = socket.create_connection(("127.0.0.1", gateway.port("tls")), 20)
        with RawClient(authority.client_context(device).wrap_socket(plain, server_hostname="localhost")) as client:
            client.connected(Connect("c"))
            client.send(Subscribe(1, [SubscriptionRequest("devices/device-7/#"), SubscriptionRequest("devices/x/#")]))
            answer = client.receive()
            assert isinstance(answer, SubAck)
            assert answer.reason_codes == [0, 0x87]
        with raw(gateway.port()) as nobody:
            assert nobody.connected(Connect("n")).connack.reason_code == 0x87


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--broker", "nonsense", "--fabric-secret", "s"], "write host:port"),
        (["--broker", "mqtt://x", "--broker", "y:1"], "one kind"),
        (["--broker", "x:1", "--fabric-secret", "missing"], "cannot read the fabric's secret"),
        (["--broker", "x:1", "--log-level", "loud"], "--log-level must be debug, info, warning or error"),
    ],
)
def test_mistakes_are_one_line_that_helps(arguments: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "s").write_text("a secret of enough characters", encoding="utf-8")
    (tmp_path / "s").chmod(0o600)
    command = [sys.executable, "-m", "nearcast", "gateway", "--port", "0", "--check", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert result.returncode == 1
    assert told in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


# --- brokers that are not part of a fabric ------------------------------------------------------------------------------


class Mosquitto:
    """A Mosquitto on a port of its own."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._path = directory / f"mosquitto-{self.port}.conf"
        self._path.write_text(f"listener {self.port} 127.0.0.1\nallow_anonymous true\n", encoding="utf-8")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [str(require("mosquitto")), "-c", str(self._path)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for("Mosquitto", self._answers)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"mqtt://{self.name}"

    def connect(self, client_id: str) -> RawClient:
        return joined(self.port, client_id)


@pytest.fixture
def mosquittos(tmp_path: Path) -> Iterator[tuple[Mosquitto, Mosquitto]]:
    require("mosquitto")
    pair = Mosquitto(tmp_path), Mosquitto(tmp_path)
    try:
        for one in pair:
            one.start()
        yield pair
    finally:
        for one in pair:
            one.kill()


def finished(client: RawClient, count: int, qos: int) -> list[bytes]:
    """What arrives, acknowledged to the last step."""
    found: list[bytes] = []
    to_complete = count if qos == 2 else 0
    while len(found) < count or to_complete:
        packet = client.receive()
        if isinstance(packet, Publish):
            found.append(packet.payload)
            if packet.qos:
                client.send(PubAck(packet.packet_id) if packet.qos == 1 else PubRec(packet.packet_id))
        else:
            assert isinstance(packet, PubRel)
            client.send(PubComp(packet.packet_id))
            to_complete -= 1
    return found


def place_of(gateway: EmbeddedGateway, client_id: str) -> str:
    def find(machine: object) -> str:
        for tunnel in gateway.process.machine.tunnels:
            if tunnel.client_id == client_id and tunnel.upstream is not None:
                return tunnel.upstream.broker
        return ""

    return gateway.ask(find)


@pytest.mark.parametrize("version", [4, 5])
def test_a_mosquitto_is_killed_and_the_clients_stay(mosquittos: tuple[Mosquitto, Mosquitto], version: int) -> None:
    with (
        EmbeddedGateway(config([one.url for one in mosquittos])) as gateway,
        subscriber(gateway.port, "t/#", "r", version) as listening,
        joined(gateway.port, "s", version) as speaking,
    ):
        publish(speaking, "t/before", b"before", 2)
        assert payloads(listening, 1) == [b"before"]
        by_name = {one.name: one for one in mosquittos}
        lost = place_of(gateway, "r")
        by_name[lost].kill()
        wait_for("both at the other one", lambda: gateway.ask(lambda machine: machine.stats.resumed) == 2)
        for qos in (0, 1, 2):
            publish(speaking, f"t/{qos}", b"after %d" % qos, qos, packet_id=7)
        assert sorted(payloads(listening, 3)) == [b"after 0", b"after 1", b"after 2"]


@pytest.mark.parametrize(("qos", "version"), [(0, 4), (1, 5), (2, 4), (2, 5)])
def test_a_client_is_moved_between_mosquittos(mosquittos: tuple[Mosquitto, Mosquitto], version: int, qos: int) -> None:
    """Those who publish are at both: the brokers know nothing of each other, and the client hears whichever it is at."""
    with (
        EmbeddedGateway(config([one.url for one in mosquittos])) as gateway,
        subscriber(gateway.port, "t", "r", version, qos) as listening,
        contextlib.ExitStack() as stack,
    ):
        speakers = {one.name: stack.enter_context(one.connect("s")) for one in mosquittos}
        for one in mosquittos:
            # A retained message is not sent again to a client that only moves.
            speakers[one.name].send(Publish("t", b"kept", 0, retain=True))
        payloads(listening, 1)
        for sent in range(0, 30, 5):
            here = place_of(gateway, "r")
            (there,) = [one.name for one in mosquittos if one.name != here]
            wait_for("a move", lambda there=there: gateway.move(there, "r") == 1)  # type: ignore[misc]
            wait_for("its end", lambda there=there: place_of(gateway, "r") == there)  # type: ignore[misc]
            for number in range(sent, sent + 5):
                publish(speakers[there], "t", b"%d" % number, qos, packet_id=number + 1)
            assert finished(listening, 5, qos) == [b"%d" % number for number in range(sent, sent + 5)]


def test_a_subscription_made_while_moving_and_one_given_up(mosquittos: tuple[Mosquitto, Mosquitto]) -> None:
    with (
        EmbeddedGateway(config([one.url for one in mosquittos])) as gateway,
        subscriber(gateway.port, "a", "r", 4) as client,
    ):
        here = place_of(gateway, "r")
        (there,) = [one for one in mosquittos if one.name != here]
        gateway.move(there.name, "r")
        client.send(Subscribe(2, [SubscriptionRequest("b", 1)]))
        assert isinstance(client.receive(), SubAck)
        wait_for("the move", lambda: place_of(gateway, "r") == there.name)
        with there.connect("s") as speaking:

            def heard() -> bool:
                # The subscription may still be on its way to the new broker.
                publish(speaking, "b", b"new", 1)
                client.send(PingReq())
                packet = client.receive()
                found = isinstance(packet, Publish)
                while not isinstance(packet, PingResp):
                    assert isinstance(packet, Publish)
                    client.send(PubAck(packet.packet_id))
                    packet = client.receive()
                return found

            wait_for("the new subscription", heard)


def test_what_a_broker_closes_stays_closed(mosquittos: tuple[Mosquitto, Mosquitto]) -> None:
    """Another client takes the identifier: were the first one connected again, the two would go on for ever."""
    with (
        EmbeddedGateway(config([mosquittos[0].url])) as gateway,
        joined(gateway.port, "same", 4) as first,
        mosquittos[0].connect("same"),
    ):
        assert first.receive() is None


def test_exactly_once_while_moved(mosquittos: tuple[Mosquitto, Mosquitto]) -> None:
    """The client's own QoS 2 messages reach one of the brokers, once."""
    with EmbeddedGateway(config([one.url for one in mosquittos])) as gateway, contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(subscriber(one.port, "own", "l", qos=0)) for one in mosquittos]
        client = stack.enter_context(joined(gateway.port, "c"))
        for number in range(1, 31):
            client.send(Publish("own", b"%d" % number, 2, packet_id=number))
            if number % 10 == 0:
                here = place_of(gateway, "c")
                (there,) = [one.name for one in mosquittos if one.name != here]
                gateway.move(there, "c")
            answer = client.receive()
            assert isinstance(answer, PubRec)
            client.send(PubRel(number))
            assert isinstance(client.receive(), PubComp)
        found: list[bytes] = []
        for listening in listeners:
            listening.send(PingReq())
            packet = listening.receive()
            while not isinstance(packet, PingResp):
                assert isinstance(packet, Publish)
                found.append(packet.payload)
                packet = listening.receive()
        assert sorted(found, key=int) == [b"%d" % number for number in range(1, 31)]


def test_a_broker_is_taken_out_of_the_file(mosquittos: tuple[Mosquitto, Mosquitto], tmp_path: Path) -> None:
    both = "brokers = [{}]\n".format(", ".join(f'"{one.url}"' for one in mosquittos))
    with NearcastGateway(tmp_path, both) as gateway, subscriber(gateway.port(), "t", "r") as client:
        (place,) = [broker["name"] for broker in gateway.health()["brokers"] if broker["clients"]]
        (other,) = [one for one in mosquittos if one.name != place]
        gateway.config_path.write_text(f'brokers = ["{other.url}"]\n', encoding="utf-8")
        assert gateway.process is not None
        gateway.process.send_signal(signal.SIGHUP)
        wait_for(
            "the move",
            lambda: [(broker["name"], broker["clients"]) for broker in gateway.health()["brokers"]] == [(other.name, 1)],
        )
        wait_for("its subscriptions there", lambda: gateway.own_metric("moves_under_way") == 0)
        with other.connect("s") as speaking:
            publish(speaking, "t", b"there", 1)
            assert payloads(client, 1) == [b"there"]
        gateway.config_path.write_text('brokers = ["nonsense"]\n', encoding="utf-8")
        gateway.process.send_signal(signal.SIGHUP)
        wait_for("the refusal", lambda: "reload refused" in gateway.log())
