"""The native client on other roads than plain TCP, and with brokers that refuse it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest

import nearcast.client.sync
from nearcast.client import Client, TlsOptions
from nearcast.errors import ConnectionClosed, ConnectionRefused, LocalProtocolError, RemoteProtocolError
from nearcast.mqtt import reasons
from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.packets import ConnAck, Connect, Disconnect, Packet, Properties
from tests.contract.brokers import Mosquitto, free_port
from tests.integration.brokers import NearcastBroker
from tests.integration.tools import require

pytestmark = pytest.mark.integration


def run(scenario: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario

    asyncio.run(bounded())


async def echo(client: Client) -> None:
    """A message goes out and comes back."""
    await client.subscribe("echo", qos=2)
    await client.publish("echo", b"x" * 70_000, qos=2)
    message = await client.messages.get(10)
    assert message is not None
    assert len(message.payload) == 70_000


@pytest.fixture(scope="module")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    broker = Mosquitto(tmp_path_factory.mktemp("mosquitto"))
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()


def test_websocket(mosquitto: Mosquitto) -> None:
    async def scenario() -> None:
        async with Client(f"ws://127.0.0.1:{mosquitto.websocket_port}/mqtt") as client:
            await echo(client)

    run(scenario())


def test_unix_socket(mosquitto: Mosquitto) -> None:
    async def scenario() -> None:
        async with Client(f"unix://{mosquitto.unix_path}") as client:
            await echo(client)

    run(scenario())


def test_a_port_that_speaks_no_websocket(mosquitto: Mosquitto) -> None:
    with pytest.raises(ConnectionClosed):
        nearcast.client.sync.connect(f"ws://127.0.0.1:{mosquitto.port}", connect_timeout_seconds=2)


def test_nothing_listens() -> None:
    with pytest.raises(ConnectionClosed, match="nothing listens there; is the broker running"):
        nearcast.client.sync.connect(f"mqtt://127.0.0.1:{free_port()}")


def test_a_password_is_asked_for(tmp_path: Path) -> None:
    class Guarded(Mosquitto):
        def command(self) -> list[str]:
            command = super().command()
            passwords = self.directory / "passwords"
            passwords.touch(mode=0o600)
            subprocess.run([require("mosquitto_passwd"), "-b", str(passwords), "ada", "secret"], check=True)
            configuration = self.directory / "mosquitto.conf"
            text = configuration.read_text().replace("allow_anonymous true", f"password_file {passwords}")
            configuration.write_text(text)
            return command

    broker = Guarded(tmp_path)
    try:
        broker.start()
        nearcast.client.sync.connect(f"mqtt://ada:secret@127.0.0.1:{broker.port}").close()
        for version in (4, 5):
            with pytest.raises(ConnectionRefused, match="not authorized") as caught:
                nearcast.client.sync.connect(f"mqtt://ada:wrong@127.0.0.1:{broker.port}", version=version)
            assert caught.value.reason_code == reasons.NOT_AUTHORIZED
    finally:
        broker.stop()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA and a certificate for 127.0.0.1."""
    directory = tmp_path_factory.mktemp("certificates")
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing: install the Debian package openssl")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-keyout", "key.pem", "-out", "certificate.pem", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
        ],
        cwd=directory,
        check=True,
        capture_output=True,
    )
    return directory


def test_tls(certificates: Path, tmp_path: Path) -> None:
    class Encrypted(Mosquitto):
        def command(self) -> list[str]:
            command = super().command()
            configuration = self.directory / "mosquitto.conf"
            tls = f"certfile {certificates / 'certificate.pem'}\nkeyfile {certificates / 'key.pem'}\n"
            lines = configuration.read_text().split("\n", 1)
            configuration.write_text(f"{lines[0]}\n{tls}{lines[1]}")
            return command

    async def scenario(port: int) -> None:
        async with Client(
            f"mqtts://127.0.0.1:{port}", tls=TlsOptions(ca_file=str(certificates / "certificate.pem"))
        ) as client:
            await echo(client)
        with pytest.raises(ConnectionClosed, match="cannot trust mqtts://"):
            async with Client(f"mqtts://127.0.0.1:{port}"):
                pass

    broker = Encrypted(tmp_path)
    try:
        broker.start()
        run(scenario(broker.port))
    finally:
        broker.stop()


class Scripted:
    """A server that answers CONNECT with the packets it is given, one list for each connection, the last for all further."""

    def __init__(self, *answers: list[Packet]) -> None:
        self.answers = list(answers)
        self.connects: list[Connect] = []
        self.port = 0

    async def __aenter__(self) -> Scripted:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        packets = PacketReader(5)
        try:
            while data := await reader.read(65_536):
                for packet in packets.feed(data):
                    if isinstance(packet, Connect):
                        self.connects.append(packet)
                        answers = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                        writer.write(b"".join(encode(answer, 5) for answer in answers))
        except (ConnectionError, RemoteProtocolError):
            pass
        finally:
            writer.close()


def referring_to(port: int, code: int = reasons.USE_ANOTHER_SERVER) -> Packet:
    return ConnAck(code, False, Properties(server_reference=f"127.0.0.1:{port}"))


def test_server_reference_of_a_refusal(mosquitto: Mosquitto) -> None:
    async def scenario() -> None:
        async with Scripted([referring_to(mosquitto.port)]) as first:
            async with Client(f"mqtt://127.0.0.1:{first.port}") as client:
                await echo(client)
            with pytest.raises(ConnectionRefused) as caught:
                async with Client(f"mqtt://127.0.0.1:{first.port}", follow_server_reference=False):
                    pass
            assert caught.value.server_reference == f"127.0.0.1:{mosquitto.port}"

    run(scenario())


def test_server_reference_of_a_disconnect(mosquitto: Mosquitto) -> None:
    async def scenario() -> None:
        moved = Disconnect(reasons.SERVER_MOVED, Properties(server_reference=f"127.0.0.1:{mosquitto.port}"))
        async with (
            Scripted([ConnAck(), moved]) as first,
            Client(f"mqtt://127.0.0.1:{first.port}", client_id="mover") as client,
        ):
            await echo(client)
            assert len(first.connects) == 1

    run(scenario())


def test_references_in_a_circle() -> None:
    async def scenario() -> None:
        async with Scripted([]) as first:
            first.answers = [[referring_to(first.port)]]
            with pytest.raises(ConnectionRefused, match="only refer further"):
                async with Client(f"mqtt://127.0.0.1:{first.port}"):
                    pass

    run(scenario())


def test_a_refusal_while_reconnecting_is_final() -> None:
    async def scenario() -> None:
        shutting_down = Disconnect(reasons.SERVER_SHUTTING_DOWN)
        async with Scripted([ConnAck(), shutting_down], [ConnAck(reasons.SERVER_BUSY)], [ConnAck(reasons.BANNED)]) as server:
            async with Client(f"mqtt://127.0.0.1:{server.port}", client_id="c") as client:
                with pytest.raises(ConnectionRefused, match="banned"):
                    await client.publish("x", qos=1)
            assert len(server.connects) == 3

    run(scenario())


def test_a_client_that_moves_keeps_its_session(tmp_path: Path) -> None:
    """It goes to another address of the same broker, which stands for another gateway of the same fabric."""
    listeners = "".join(f'[[listeners]]\nkind = "{kind}"\nport = 0\n' for kind in ("tcp", "ws"))
    listeners += "[security]\nallow_anonymous = true\n"
    with NearcastBroker(tmp_path, listeners) as broker:
        websocket = f"ws://127.0.0.1:{broker.port('ws')}/mqtt"
        seen: list[str | None] = []

        async def scenario() -> None:
            async with Client(f"mqtt://127.0.0.1:{broker.port()}", client_id="roams", on_connection=seen.append) as client:
                await client.subscribe("echo", qos=1)
                await client.move(websocket)
                assert client.connected
                await client.publish("echo", b"after", qos=1)
                message = await client.messages.get(10)
                assert message is not None
                assert message.payload == b"after", "the subscription went along"
                # Again and again, without waiting in between: the last one counts.
                moves = [asyncio.create_task(client.move(url)) for url in (websocket, f"mqtt://127.0.0.1:{broker.port()}")]
                await asyncio.gather(*moves)
                await client.publish("echo", b"again", qos=1)
                message = await client.messages.get(10)
                assert message is not None
                assert message.payload == b"again"
            assert seen[0] is None
            assert seen.count(None) >= 3

        run(scenario())


def test_moving_needs_another_connection(mosquitto: Mosquitto) -> None:
    async def scenario() -> None:
        async with Client(f"mqtt://127.0.0.1:{mosquitto.port}", reconnect=False) as client:
            with pytest.raises(LocalProtocolError, match="leave `reconnect` on"):
                await client.move(f"mqtt://127.0.0.1:{mosquitto.port}")

    run(scenario())


def test_a_client_that_moves_where_nobody_is_comes_back_when_it_may(mosquitto: Mosquitto) -> None:
    """Nobody listens there; a second move, to where somebody does, ends the first."""

    async def scenario() -> None:
        async with Client(f"mqtt://127.0.0.1:{mosquitto.port}", client_id="lost") as client:
            nowhere = asyncio.create_task(client.move(f"mqtt://127.0.0.1:{free_port()}"))
            await asyncio.sleep(0)
            await client.move(f"mqtt://127.0.0.1:{mosquitto.port}")
            await nowhere
            await echo(client)

    run(scenario())
