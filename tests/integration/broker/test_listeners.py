"""Every kind of listener, with a real socket at the other end."""

from __future__ import annotations

import os
import socket
import ssl
import stat
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin, Subprotocol

from nearcast.mqtt import reasons
from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.packets import ConnAck, Connect, Publish, SubAck, Subscribe, SubscriptionRequest
from tests.integration.broker.running import PATIENCE_SECONDS, Authority, RawClient, RunningBroker, wait_for

pytestmark = pytest.mark.integration

MQTT = [Subprotocol("mqtt")]


def echo(client: RawClient) -> None:
    """Subscribe, publish, and get it back."""
    assert client.connack.reason_code == reasons.SUCCESS
    client.send(Subscribe(1, [SubscriptionRequest("echo", 0)]), Publish("echo", b"x" * 200_000))
    assert isinstance(client.receive(), SubAck)
    message = client.receive()
    assert isinstance(message, Publish)
    assert message.payload == b"x" * 200_000


def tls(broker: RunningBroker, context: ssl.SSLContext) -> RawClient:
    raw = socket.create_connection(("127.0.0.1", broker.port("tls")), PATIENCE_SECONDS)
    return RawClient(context.wrap_socket(raw, server_hostname="localhost"))


def refused(broker: RunningBroker, context: ssl.SSLContext) -> bool:
    """Whether the handshake fails; with TLS 1.3 a client learns that only when it reads."""
    try:
        with tls(broker, context) as client:
            client.send(Connect("c"))
            return client.receive() is None
    except OSError:
        return True


def exchange(websocket: ClientConnection) -> None:
    """CONNECT over WebSocket, in two frames."""
    data = encode(Connect("ws"), 5)
    websocket.send(data[:3])
    websocket.send(data[3:])
    answer = websocket.recv(timeout=PATIENCE_SECONDS)
    assert isinstance(answer, bytes)
    (connack,) = PacketReader(5, 1_000_000).feed(answer)
    assert isinstance(connack, ConnAck)
    assert connack.reason_code == reasons.SUCCESS


def test_tcp_both_versions_at_once(tmp_path: Path) -> None:
    with RunningBroker(tmp_path) as broker, broker.connect() as new, broker.connect(version=4) as old:
        echo(new)
        echo(old)


def test_all_kinds_side_by_side(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("localhost", "server")
    files = 'certificate_file = "server.pem"\nkey_file = "server.key"'
    config = f"""
    [[listeners]]
    port = 0
    [[listeners]]
    host = "::1"
    port = 0
    [[listeners]]
    kind = "tls"
    port = 0
    {files}
    [[listeners]]
    kind = "ws"
    port = 0
    path = "/mqtt"
    [[listeners]]
    kind = "wss"
    port = 0
    {files}
    [[listeners]]
    kind = "unix"
    path = "broker.sock"
    mode = 0o600
    """
    context = authority.client_context()
    with RunningBroker(tmp_path, config=config) as broker:
        with broker.connect() as client:
            echo(client)
        with tls(broker, context) as client:
            echo(client.connected())
        path = tmp_path / "broker.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        local = socket.socket(socket.AF_UNIX)
        local.connect(str(path))
        with RawClient(local) as client:
            echo(client.connected())
        with connect(f"ws://127.0.0.1:{broker.port('ws')}/mqtt", subprotocols=MQTT, compression=None) as websocket:
            assert websocket.subprotocol == "mqtt"
            exchange(websocket)
        url = f"wss://localhost:{broker.port('wss')}/anything"
        with connect(url, subprotocols=MQTT, ssl=context) as websocket:
            exchange(websocket)
        for url, options, status in (
            (f"ws://127.0.0.1:{broker.port('ws')}/other", {"subprotocols": MQTT}, 404),
            (f"ws://127.0.0.1:{broker.port('ws')}/mqtt", {}, 400),
            (
                f"ws://127.0.0.1:{broker.port('ws')}/mqtt",
                {"subprotocols": MQTT, "origin": Origin("https://evil.example")},
                403,
            ),
        ):
            with pytest.raises(InvalidStatus) as answer:
                connect(url, **options)
            assert answer.value.response.status_code == status
    assert not path.exists()


def test_tls_1_1_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("localhost", "server")
    config = '[[listeners]]\nkind = "tls"\nport = 0\ncertificate_file = "server.pem"\nkey_file = "server.key"'
    with RunningBroker(tmp_path, config=config) as broker:
        with socket.create_connection(("127.0.0.1", broker.port("tls")), PATIENCE_SECONDS) as raw:
            # A ClientHello for TLS 1.1, as it goes over the wire: version, random, no session, one cipher, no compression.
            hello = b"\x03\x02" + bytes(32) + b"\x00" + b"\x00\x02\xc0\x13" + b"\x01\x00"
            raw.sendall(
                b"\x16\x03\x01" + (len(hello) + 4).to_bytes(2, "big") + b"\x01" + len(hello).to_bytes(3, "big") + hello
            )
            assert raw.recv(100)[:1] in (b"", b"\x15"), "an alert, or nothing"
        broker.wait_for_log("TLS handshake failed")
        with tls(broker, authority.client_context()) as client:
            assert isinstance(client.socket, ssl.SSLSocket)
            assert client.socket.version() in ("TLSv1.2", "TLSv1.3")


def test_client_certificates_name_users(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("localhost", "server")
    device = authority.issue("device-7", "device")
    stranger = Authority(tmp_path, "other-ca").issue("device-7", "stranger")
    config = """
    [[listeners]]
    kind = "tls"
    port = 0
    certificate_file = "server.pem"
    key_file = "server.key"
    ca_file = "ca.pem"
    client_certificates = "required"
    certificate_username = true
    [security]
    acl = [{ action = "allow", topic = "devices/%u/#" }]
    """
    with RunningBroker(tmp_path, config=config) as broker:
        with tls(broker, authority.client_context(device)) as client:
            client.connected(Connect("c", username="someone-else", password=b"x"))
            assert client.connack.reason_code == reasons.SUCCESS
            requests = [SubscriptionRequest("devices/device-7/#", 0), SubscriptionRequest("devices/device-8/#", 0)]
            client.send(Subscribe(1, requests))
            answer = client.receive()
            assert isinstance(answer, SubAck)
            assert answer.reason_codes == [reasons.SUCCESS, reasons.NOT_AUTHORIZED]
        for own in (None, stranger):
            assert refused(broker, authority.client_context(own))
        broker.wait_for_log("TLS handshake failed")


def test_a_stale_socket_file_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "broker.sock"
    leftover = socket.socket(socket.AF_UNIX)
    leftover.bind(str(path))
    leftover.close()
    config = '[[listeners]]\nkind = "unix"\npath = "broker.sock"'
    with RunningBroker(tmp_path, config=config):
        second_directory = tmp_path / "second"
        second_directory.mkdir()
        second = RunningBroker(second_directory, config=f'[[listeners]]\nkind = "unix"\npath = "{path}"')
        assert second.launch().wait(PATIENCE_SECONDS) == 1
        assert "another process answers there" in second.log()
        assert path.exists()


def test_a_file_in_the_way_stays(tmp_path: Path) -> None:
    (tmp_path / "broker.sock").write_text("precious", encoding="utf-8")
    broker = RunningBroker(tmp_path, config='[[listeners]]\nkind = "unix"\npath = "broker.sock"')
    assert broker.launch().wait(PATIENCE_SECONDS) == 1
    assert "no socket is in the way" in broker.log()
    assert (tmp_path / "broker.sock").read_text(encoding="utf-8") == "precious"


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        broker = RunningBroker(tmp_path, "--port", str(taken.getsockname()[1]))
        assert broker.launch().wait(PATIENCE_SECONDS) == 1
    assert len(broker.log().strip().splitlines()) == 1
    assert "is another broker running?" in broker.log()


def test_certificates_are_reloaded(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("localhost", "server")
    config = '[[listeners]]\nkind = "tls"\nport = 0\ncertificate_file = "server.pem"\nkey_file = "server.key"'

    def serial(broker: RunningBroker) -> object:
        with tls(broker, authority.client_context()) as client:
            assert isinstance(client.socket, ssl.SSLSocket)
            shown = client.socket.getpeercert()
            assert shown is not None
            return shown["serialNumber"]

    with RunningBroker(tmp_path, config=config) as broker:
        first = serial(broker)
        authority.issue("localhost", "server")
        assert serial(broker) == first
        broker.reload()
        assert serial(broker) != first
        (tmp_path / "server.key").write_text("broken", encoding="utf-8")
        broker.reload()
        assert "reload refused" in broker.log()
        assert serial(broker) != first


def test_client_certificates_and_their_names_are_reloaded_together(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("localhost", "server")
    device = authority.issue("device-7", "device")
    plain = """
    [security]
    acl = [{ action = "allow", topic = "devices/%u/#" }]
    [[listeners]]
    kind = "tls"
    port = 0
    certificate_file = "server.pem"
    key_file = "server.key"
    """
    named = plain + 'ca_file = "ca.pem"\nclient_certificates = "optional"\ncertificate_username = true\n'

    def granted(broker: RunningBroker) -> int:
        with tls(broker, authority.client_context(device)) as client:
            client.connected(Connect("c"))
            client.send(Subscribe(1, [SubscriptionRequest("devices/device-7/#", 0)]))
            answer = client.receive()
            assert isinstance(answer, SubAck)
            return answer.reason_codes[0]

    with RunningBroker(tmp_path, config=named) as broker:
        found = [granted(broker)]
        for config in (plain, named, named + 'ca_file = "again"', plain.replace("server.key", "missing.key"), plain):
            broker.config_path.write_text(config, encoding="utf-8")
            broker.reload()
            found.append(granted(broker))
        no = reasons.NOT_AUTHORIZED
        assert found == [0, no, 0, 0, 0, no], "the two that cannot be used change nothing"
        assert broker.log().count("reload refused, the old configuration stays") == 2


def test_silent_clients_are_closed_on_every_kind(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("localhost", "server")
    config = """
    [limits]
    connect_timeout_seconds = 0.5
    [[listeners]]
    port = 0
    [[listeners]]
    kind = "ws"
    port = 0
    [[listeners]]
    kind = "tls"
    port = 0
    certificate_file = "server.pem"
    key_file = "server.key"
    """
    with RunningBroker(tmp_path, config=config) as broker:
        for kind in ("tcp", "ws", "tls"):
            with socket.create_connection(("127.0.0.1", broker.port(kind)), PATIENCE_SECONDS) as silent:
                silent.settimeout(PATIENCE_SECONDS)
                assert silent.recv(100) == b"", kind
        with connect(f"ws://127.0.0.1:{broker.port('ws')}/", subprotocols=MQTT) as websocket:
            wait_for("the end of a silent WebSocket", lambda: websocket.close_code is not None or _ended(websocket))


def _ended(websocket: ClientConnection) -> bool:
    return bool(websocket.state.name == "CLOSED")


def test_http_where_mqtt_is_spoken_is_closed(tmp_path: Path) -> None:
    with RunningBroker(tmp_path) as broker:
        with socket.create_connection(("127.0.0.1", broker.port()), PATIENCE_SECONDS) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert browser.recv(100) == b""
        with broker.connect() as client:
            echo(client)


def test_descriptors_do_not_leak(tmp_path: Path) -> None:
    with RunningBroker(tmp_path) as broker:
        descriptors = Path(f"/proc/{broker.ready['pid']}/fd")
        with broker.connect() as client:
            echo(client)
        before = len(os.listdir(descriptors))
        for _ in range(50):
            broker.connect().close()
        wait_for("closing of all descriptors", lambda: len(os.listdir(descriptors)) <= before)
