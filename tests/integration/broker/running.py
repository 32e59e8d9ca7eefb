"""A broker process for the tests: started as users start it, found through its ready file, and a small raw client."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.packets import ConnAck, Connect, Packet

PATIENCE_SECONDS = 20.0


def wait_for(what: str, condition: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    """The first true value of ``condition``; fails by name when there is none."""
    deadline = time.monotonic() + seconds
    pause_s = 0.005
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not happen within {seconds:g} s")
        # Less and less often: whoever is asked again and again has no time to become ready.
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, 0.05)


class RunningBroker:
    """``nearcast broker`` in a process of its own; a context manager that stops it."""

    def __init__(self, directory: Path, *arguments: str, config: str | None = None) -> None:
        self.directory = directory
        self.config_path = directory / "broker.toml"
        self.log_path = directory / "broker.log"
        self._ready_path = directory / "ready.json"
        self._arguments = list(arguments)
        if config is not None:
            self.config_path.write_text(config, encoding="utf-8")
            self._arguments += ["--config", str(self.config_path)]
        if config is None and "--port" not in arguments:
            self._arguments += ["--port", "0"]
        self.process: subprocess.Popen[bytes] | None = None
        self.ready: dict[str, Any] = {}

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the process without waiting for it."""
        self._ready_path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "nearcast", "broker", "--ready-file", str(self._ready_path), *self._arguments]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self.process

    def await_ready(self) -> None:
        """Return once clients can come to the process that was launched."""
        process = self.process
        assert process is not None

        def ready() -> bool:
            if process.poll() is not None:
                pytest.fail(f"the broker ended: {self.log()}")
            return self._ready_path.exists()

        wait_for("readiness of the broker", ready)
        self.ready = json.loads(self._ready_path.read_bytes())

    def __enter__(self) -> RunningBroker:
        self.launch()
        self.await_ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        process = self.process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert "Traceback" not in self.log(), self.log()

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def wait_for_log(self, text: str) -> None:
        wait_for(f"log line {text!r}", lambda: text in self.log())

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def reload(self) -> None:
        """SIGHUP, and wait for its answer in the log."""
        before = self.log().count("reload")
        self.signal(signal.SIGHUP)
        wait_for("the reload", lambda: self.log().count("reload") > before)

    def port(self, kind: str = "tcp") -> int:
        return next(int(listener["port"]) for listener in self.ready["listeners"] if listener["kind"] == kind)

    def connect(self, packet: Connect | None = None, **options: Any) -> RawClient:
        """A client over TCP that has sent CONNECT and read the answer (``client.connack``)."""
        client = RawClient(socket.create_connection(("127.0.0.1", self.port()), PATIENCE_SECONDS), **options)
        return client.connected(packet)


class RawClient:
    """Packets over a socket, in whatever order a test wants."""

    def __init__(self, sock: socket.socket, version: int = 5) -> None:
        self.socket = sock
        self.socket.settimeout(PATIENCE_SECONDS)
        self._version = version
        self._reader = PacketReader(version, 268_435_460)
        self._received: list[Packet] = []
        self.connack = ConnAck(reason_code=-1)

    def connected(self, packet: Connect | None = None) -> RawClient:
        self.send(packet if packet is not None else Connect("", version=self._version))
        answer = self.receive()
        assert isinstance(answer, ConnAck), answer
        self.connack = answer
        return self

    def send(self, *packets: Packet) -> None:
        self.socket.sendall(b"".join(encode(packet, self._version) for packet in packets))

    def receive(self) -> Packet | None:
        """The next packet; ``None`` when the broker closed."""
        while not self._received:
            try:
                data = self.socket.recv(65_536)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._received.extend(self._reader.feed(data))
        return self._received.pop(0)

    def closed(self) -> bool:
        """Read to the end; whether the broker closed."""
        while self.receive() is not None:
            pass
        return True

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Authority:
    """A certificate authority of the test's own, by the ``openssl`` program."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self._name = name
        self.certificate = directory / f"{name}.pem"
        self._key = directory / f"{name}.key"
        self._run("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                  "-subj", f"/CN={name}", "-keyout", str(self._key), "-out", str(self.certificate))  # fmt: skip

    def issue(self, common_name: str, file_name: str) -> tuple[Path, Path]:
        """Certificate and key for a name, valid for localhost too."""
        certificate, key = self._directory / f"{file_name}.pem", self._directory / f"{file_name}.key"
        request, extensions = self._directory / f"{file_name}.csr", self._directory / f"{file_name}.ext"
        self._run("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={common_name}",
                  "-keyout", str(key), "-out", str(request))  # fmt: skip
        extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n", encoding="ascii")
        self._run("x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey", str(self._key),
                  "-CAcreateserial", "-days", "2", "-extfile", str(extensions), "-out", str(certificate))  # fmt: skip
        return certificate, key

    def client_context(self, own: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """What a client needs to trust this authority, and to show a certificate of its own."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        if own is not None:
            context.load_cert_chain(*own)
        return context

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
