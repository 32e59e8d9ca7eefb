"""The process: users, rules, limits, signals, metrics and what is said when something is wrong."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from nearcast.broker.passwords import ScramVerifier, ScryptVerifier, store_user
from nearcast.mqtt import reasons
from nearcast.mqtt.packets import (
    Auth,
    ConnAck,
    Connect,
    Disconnect,
    Properties,
    PubAck,
    Publish,
    SubAck,
    Subscribe,
    SubscriptionRequest,
)
from tests.integration.broker.running import PATIENCE_SECONDS, RawClient, RunningBroker, wait_for

pytestmark = pytest.mark.integration


def code(client: RawClient) -> int:
    client.close()
    return client.connack.reason_code


def ann(password: bytes | None = b"secret", client_id: str = "c") -> Connect:
    return Connect(client_id, username="ann", password=password)


def add_user(directory: Path, name: str, password: bytes) -> None:
    store_user(str(directory / "passwords"), name, ScryptVerifier.create(password, 10))


def granted(client: RawClient, topic_filter: str) -> int:
    client.send(Subscribe(1, [SubscriptionRequest(topic_filter, 1)]))
    answer = client.receive()
    assert isinstance(answer, SubAck)
    return answer.reason_codes[0]


def published(client: RawClient, topic: str, payload: bytes = b"x", retain: bool = False) -> int:
    client.send(Publish(topic, payload, qos=1, packet_id=1, retain=retain))
    answer = client.receive()
    assert isinstance(answer, PubAck)
    return answer.reason_code


def fetch(broker: RunningBroker, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{broker.ready['http_port']}{path}") as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


# --- users and rules ------------------------------------------------------------------------------------------------------


def test_passwords_and_reload(tmp_path: Path) -> None:
    add_user(tmp_path, "ann", b"secret")
    with RunningBroker(tmp_path, "--password-file", str(tmp_path / "passwords")) as broker:
        assert code(broker.connect(ann())) == reasons.SUCCESS
        assert code(broker.connect(ann(b"wrong"))) == reasons.BAD_USER_NAME_OR_PASSWORD
        assert code(broker.connect(Connect("c", username="bob", password=b"secret"))) == reasons.BAD_USER_NAME_OR_PASSWORD
        assert code(broker.connect(Connect("c"))) == reasons.NOT_AUTHORIZED
        old = Connect("c", version=4, username="ann", password=b"wrong")
        assert code(broker.connect(old, version=4)) == reasons.BAD_USER_NAME_OR_PASSWORD  # return code 4 on the wire
        with broker.connect(ann(client_id="stays")) as stays:
            add_user(tmp_path, "ann", b"new")
            add_user(tmp_path, "bob", b"bobs")
            broker.reload()
            assert code(broker.connect(ann())) == reasons.BAD_USER_NAME_OR_PASSWORD
            assert code(broker.connect(ann(b"new"))) == reasons.SUCCESS
            assert code(broker.connect(Connect("c", username="bob", password=b"bobs"))) == reasons.SUCCESS
            assert published(stays, "t") in (reasons.SUCCESS, reasons.NO_MATCHING_SUBSCRIBERS)
        broker.wait_for_log('client refused client=c peer=127.0.0.1 listener=tcp:127.0.0.1:0 reason="user name or password')
    assert "secret" not in broker.log()


def test_a_packet_that_follows_connect_waits_for_the_verdict(tmp_path: Path) -> None:
    add_user(tmp_path, "ann", b"secret")
    with RunningBroker(tmp_path, "--password-file", str(tmp_path / "passwords")) as broker:
        client = RawClient(socket.create_connection(("127.0.0.1", broker.port()), PATIENCE_SECONDS))
        client.send(ann(), Subscribe(1, [SubscriptionRequest("t", 0)]), Publish("t", b"early"))
        kinds = [type(client.receive()) for _ in range(3)]
        assert kinds == [ConnAck, SubAck, Publish]
        client.close()


def test_rules_and_reload(tmp_path: Path) -> None:
    (tmp_path / "acl").write_text("allow all topic open/#\nallow all topic own/%c/#\n", encoding="utf-8")
    with RunningBroker(tmp_path, "--acl-file", str(tmp_path / "acl")) as broker, broker.connect(Connect("dev")) as client:
        assert granted(client, "open/+") == 1
        assert granted(client, "own/dev/x") == 1
        assert granted(client, "own/+/x") == reasons.NOT_AUTHORIZED
        assert granted(client, "$SYS/#") == reasons.NOT_AUTHORIZED
        assert published(client, "closed/x") == reasons.NOT_AUTHORIZED
        (tmp_path / "acl").write_text("allow all topic closed/#\n", encoding="utf-8")
        broker.reload()
        assert published(client, "closed/x") in (reasons.SUCCESS, reasons.NO_MATCHING_SUBSCRIBERS)
        assert published(client, "open/x") == reasons.NOT_AUTHORIZED
        (tmp_path / "acl").write_text("allow all topics nonsense\n", encoding="utf-8")
        broker.reload()
        assert "reload refused, the old configuration stays" in broker.log()
        assert published(client, "closed/x") in (reasons.SUCCESS, reasons.NO_MATCHING_SUBSCRIBERS)


def test_nobody_writes_sys(tmp_path: Path) -> None:
    with RunningBroker(tmp_path) as broker, broker.connect() as client:
        assert published(client, "$SYS/broker/version") == reasons.NOT_AUTHORIZED


def test_a_host_beyond_loopback_lets_only_this_machine_in_and_says_so(tmp_path: Path) -> None:
    with RunningBroker(tmp_path, "--host", "0.0.0.0") as broker:
        assert "nearcast passwd" in broker.log()
        assert code(broker.connect()) == reasons.SUCCESS
    with RunningBroker(tmp_path, "--host", "0.0.0.0", "--no-anonymous") as broker:
        assert code(broker.connect()) == reasons.NOT_AUTHORIZED


def scram_login(broker: RunningBroker, username: str, password: bytes) -> tuple[ConnAck, bytes]:
    """A whole SCRAM-SHA-256 login over AUTH packets; the answer, and the server's proof that we expect in it."""

    def properties(data: str) -> Properties:
        return Properties(authentication_method="SCRAM-SHA-256", authentication_data=data.encode())

    with socket.create_connection(("127.0.0.1", broker.port()), PATIENCE_SECONDS) as raw:
        client = RawClient(raw)
        bare = f"n={username},r=clientnonce"
        client.send(Connect("c", properties=properties(f"n,,{bare}")))
        challenge = client.receive()
        assert isinstance(challenge, Auth), challenge
        assert challenge.properties is not None
        server_first = (challenge.properties.authentication_data or b"").decode()
        fields = dict(part.split("=", 1) for part in server_first.split(","))
        salted = hashlib.pbkdf2_hmac("sha256", password, base64.b64decode(fields["s"]), int(fields["i"]))
        key = hmac.digest(salted, b"Client Key", "sha256")
        without_proof = f"c=biws,r={fields['r']}"
        signed = f"{bare},{server_first},{without_proof}".encode()
        signature = hmac.digest(hashlib.sha256(key).digest(), signed, "sha256")
        proof = base64.b64encode(bytes(a ^ b for a, b in zip(key, signature, strict=True))).decode()
        client.send(Auth(reasons.CONTINUE_AUTHENTICATION, properties(f"{without_proof},p={proof}")))
        answer = client.receive()
        assert isinstance(answer, ConnAck), answer
        server_key = hmac.digest(salted, b"Server Key", "sha256")
        return answer, b"v=" + base64.b64encode(hmac.digest(server_key, signed, "sha256"))


def test_scram_over_the_wire(tmp_path: Path) -> None:
    store_user(str(tmp_path / "passwords"), "ann", ScramVerifier.create(b"secret", 4_096))
    with RunningBroker(tmp_path, "--password-file", str(tmp_path / "passwords")) as broker:
        answer, proof = scram_login(broker, "ann", b"secret")
        assert answer.reason_code == reasons.SUCCESS
        assert answer.properties is not None
        assert answer.properties.authentication_data == proof
        answer, _ = scram_login(broker, "ann", b"wrong")
        assert answer.reason_code == reasons.NOT_AUTHORIZED
        assert code(broker.connect(ann())) == reasons.SUCCESS, "the plain password works too"
        unknown = Connect("c", properties=Properties(authentication_method="GSSAPI", authentication_data=b""))
        assert code(broker.connect(unknown)) == reasons.BAD_AUTHENTICATION_METHOD


# --- limits ---------------------------------------------------------------------------------------------------------------


def test_connections_are_limited_and_freed(tmp_path: Path) -> None:
    with RunningBroker(tmp_path, config="[[listeners]]\nport = 0\n[limits]\nmax_connections = 2") as broker:
        first, second = broker.connect(), broker.connect()
        with socket.create_connection(("127.0.0.1", broker.port()), PATIENCE_SECONDS) as third:
            assert RawClient(third).receive() is None
        broker.wait_for_log("too many connections")
        first.close()

        def admitted() -> bool:
            with socket.create_connection(("127.0.0.1", broker.port()), PATIENCE_SECONDS) as raw:
                client = RawClient(raw)
                try:
                    client.send(Connect("again"))
                except OSError:
                    return False
                return isinstance(client.receive(), ConnAck)

        wait_for("room for another connection", admitted)
        second.close()


def test_the_connect_rate_is_limited(tmp_path: Path) -> None:
    config = """
    [[listeners]]
    port = 0
    [security]
    connect_rate_per_second = 0.001
    connect_burst = 3
    connect_rate_exempts_loopback = false
    """
    with RunningBroker(tmp_path, config=config) as broker:
        clients = [broker.connect() for _ in range(3)]
        with socket.create_connection(("127.0.0.1", broker.port()), PATIENCE_SECONDS) as fourth:
            assert RawClient(fourth).receive() is None
        broker.wait_for_log("connects too fast")
        for client in clients:
            client.close()


def test_limits_are_reloaded_for_new_clients(tmp_path: Path) -> None:
    config = "[[listeners]]\nport = 0\n"
    with RunningBroker(tmp_path, config=config) as broker:
        with broker.connect() as client:
            assert client.connack.properties is None or client.connack.properties.maximum_qos is None
        broker.config_path.write_text(
            config + '[limits]\nmax_qos = 1\n[persistence]\ndirectory = "x"\n[observability]\nlog_level = "debug"',
            encoding="utf-8",
        )
        broker.reload()
        with broker.connect() as client:
            assert client.connack.properties is not None
            assert client.connack.properties.maximum_qos == 1
        broker.wait_for_log("changed=limits.max_qos,observability.log_level")
        broker.wait_for_log("changes that need a restart were left out keys=persistence.directory")
        broker.config_path.write_text(config + "[limits]\nmax_qos = 9", encoding="utf-8")
        broker.reload()
        broker.wait_for_log("broker.toml:4: `limits.max_qos` must be 0, 1 or 2")
        with broker.connect() as client:
            assert client.connack.properties is not None
            assert client.connack.properties.maximum_qos == 1


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


def test_a_subscriber_that_stops_reading_does_not_grow_the_broker(tmp_path: Path) -> None:
    config = "[[listeners]]\nport = 0\n[limits]\nstall_timeout_seconds = 1"
    with (
        RunningBroker(tmp_path, "--http-port", "0", config=config) as broker,
        broker.connect(Connect("deaf")) as deaf,
        broker.connect(Connect("loud")) as loud,
    ):
        assert granted(deaf, "flood") == 1
        before = resident_bytes(broker.ready["pid"])
        for _ in range(600):
            loud.send(Publish("flood", bytes(100_000)))
        assert published(loud, "end") in (reasons.SUCCESS, reasons.NO_MATCHING_SUBSCRIBERS)
        assert resident_bytes(broker.ready["pid"]) - before < 20_000_000
        dropped = re.search(r'messages_dropped_total{reason="slow_consumer"} (\S+)', fetch(broker, "/metrics")[1])
        assert dropped is not None
        assert float(dropped.group(1)) > 500
        broker.wait_for_log('client=deaf peer=127.0.0.1 listener=tcp:127.0.0.1:0 reason="took no data for too long"')


# --- signals --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_graceful_end(tmp_path: Path, number: signal.Signals) -> None:
    with RunningBroker(tmp_path) as broker, broker.connect() as new, broker.connect(version=4) as old:
        broker.signal(number)
        goodbye = new.receive()
        assert isinstance(goodbye, Disconnect)
        assert goodbye.reason_code == reasons.SERVER_SHUTTING_DOWN
        assert new.receive() is None
        assert old.receive() is None
        assert broker.process is not None
        assert broker.process.wait(PATIENCE_SECONDS) == 0
        assert broker.log().rstrip().endswith("stopped")


def test_a_client_that_does_not_read_cannot_hold_up_the_end(tmp_path: Path) -> None:
    config = "shutdown_timeout_seconds = 0.2\n[[listeners]]\nport = 0"
    with RunningBroker(tmp_path, config=config) as broker, broker.connect(Connect("deaf")) as deaf, broker.connect() as loud:
        assert granted(deaf, "flood") == 1
        for _ in range(100):
            loud.send(Publish("flood", bytes(200_000)))
        assert published(loud, "end") in (reasons.SUCCESS, reasons.NO_MATCHING_SUBSCRIBERS)
        broker.signal(signal.SIGTERM)
        assert broker.process is not None
        assert broker.process.wait(PATIENCE_SECONDS) == 0
        assert "did not take their last bytes" in broker.log()


# --- persistence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["os", "fsync"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_was_acknowledged_survives(tmp_path: Path, sync: str, number: signal.Signals) -> None:
    data = tmp_path / "data"
    durable = Connect("keeper", clean_start=False, properties=Properties(session_expiry_interval=1_000))
    with RunningBroker(tmp_path, "--data", str(data), "--sync", sync) as broker:
        with broker.connect(durable) as keeper:
            assert granted(keeper, "t/#") == 1
            keeper.send(Disconnect(0))
            assert keeper.closed()
        with broker.connect() as publisher:
            assert published(publisher, "t/1", b"kept") == reasons.SUCCESS
            assert published(publisher, "t/r", b"retained", retain=True) == reasons.SUCCESS
        broker.signal(number)
        assert broker.process is not None
        broker.process.wait(PATIENCE_SECONDS)
    with RunningBroker(tmp_path, "--data", str(data), "--sync", sync) as broker, broker.connect(durable) as keeper:
        assert keeper.connack.session_present
        messages = [keeper.receive(), keeper.receive()]
        payloads = [message.payload for message in messages if isinstance(message, Publish)]
        assert payloads == [b"kept", b"retained"]
        with broker.connect() as other:
            # The SUBACK of a session may wait for the disk, a retained QoS 0 message does not (section 3.8.4 allows it).
            other.send(Subscribe(1, [SubscriptionRequest("t/r", 0)]))
            answers = [other.receive(), other.receive()]
            assert any(isinstance(answer, SubAck) for answer in answers)
            (message,) = [answer for answer in answers if isinstance(answer, Publish)]
            assert (message.payload, message.retain) == (b"retained", True)


def test_a_data_directory_serves_one_broker(tmp_path: Path) -> None:
    with RunningBroker(tmp_path, "--data", str(tmp_path / "data")):
        (tmp_path / "second").mkdir()
        second = RunningBroker(tmp_path / "second", "--data", str(tmp_path / "data"))
        assert second.launch().wait(PATIENCE_SECONDS) == 1
        assert "another broker uses this directory" in second.log()


# --- observability --------------------------------------------------------------------------------------------------------


def test_metrics_health_and_sys_topics(tmp_path: Path) -> None:
    config = "[[listeners]]\nport = 0\n[observability]\nhttp_port = 0\nsys_interval_seconds = 0.2"
    with RunningBroker(tmp_path, config=config) as broker, broker.connect(Connect("watcher")) as client:
        status, text = fetch(broker, "/metrics")
        assert status == 200
        assert "nearcast_connected_clients 1.0" in text
        status, text = fetch(broker, "/healthz")
        health: dict[str, Any] = json.loads(text)
        assert (status, health["ok"], health["connections"]) == (200, True, 1)
        assert health["listeners"][0]["address"] == f"mqtt://127.0.0.1:{broker.port()}"
        assert fetch(broker, "/rates")[0] == 200
        assert fetch(broker, "/nothing")[0] == 404
        client.send(
            Subscribe(1, [SubscriptionRequest("$SYS/broker/uptime", 0), SubscriptionRequest("$SYS/broker/version", 0)])
        )
        seen: dict[str, list[bytes]] = {}
        while len(seen.get("$SYS/broker/uptime", [])) < 2:
            message = client.receive()
            if isinstance(message, Publish):
                seen.setdefault(message.topic, []).append(message.payload)
        assert seen["$SYS/broker/version"][0].startswith(b"nearcast version ")


def test_json_logs_tell_of_connections(tmp_path: Path) -> None:
    with RunningBroker(tmp_path, "--log-format", "json") as broker:
        with broker.connect(Connect("forger\n")) as client:
            client.send(Disconnect(0))
            assert client.closed()
        broker.wait_for_log("client disconnected")
        events = [json.loads(line) for line in broker.log().splitlines()]
        connected = next(event for event in events if event["event"] == "client connected")
        assert connected["client"] == "forger\n"
        assert connected["peer"] == "127.0.0.1"


# --- errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "config", "says"),
    [
        (["--sync", "never"], None, "sync"),
        (["--password-file", "/nonexistent"], None, "cannot read the password file"),
        ([], "[limits]\nmax_qoss = 1", "broker.toml:2: unknown key `limits.max_qoss`; did you mean `max_qos`?"),
        ([], '[[listeners]]\nkind = "tls"\ncertificate_file = "x"\nkey_file = "y"', "cannot read the certificate"),
        ([], '[[listeners]]\nhost = "no.such.host.invalid"', "cannot listen on no.such.host.invalid"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(tmp_path: Path, arguments: list[str], config: str | None, says: str) -> None:
    broker = RunningBroker(tmp_path, *arguments, config=config)
    assert broker.launch().wait(PATIENCE_SECONDS) == 1
    assert len(broker.log().strip().splitlines()) == 1, broker.log()
    assert says in broker.log()


def test_passwd_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    command = [sys.executable, "-m", "nearcast", "passwd", str(path), "ann", "--password-stdin"]
    subprocess.run(command, input=b"secret\n", check=True, capture_output=True)
    with RunningBroker(tmp_path, "--password-file", str(path)) as broker:
        assert code(broker.connect(ann())) == reasons.SUCCESS
