"""Real brokers as processes on free loopback ports, for tests that must hold with any of them."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.integration.tools import require

START_TIMEOUT_SECONDS = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool], what: str, seconds: float = START_TIMEOUT_SECONDS) -> None:
    """Look until the condition holds; fails with its name when it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.01)


class Broker:
    """A broker process that can be stopped and started again on the same ports."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.log = directory / "broker.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        for port in self.ports():
            wait_until(partial(self._listening, port), f"listening of {type(self).__name__} on port {port}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(START_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def ports(self) -> list[int]:
        return [self.port]

    def _listening(self, port: int) -> bool:
        if self._process is None or self._process.poll() is not None:
            pytest.fail(f"{type(self).__name__} ended: {self.log.read_text(errors='replace')[-2000:]}")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            return False
        return True


class Mosquitto(Broker):
    """Mosquitto with a TCP and a WebSocket listener; without persistence, so that a restart loses every session."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._program = require("mosquitto")
        self.websocket_port = free_port()
        self.unix_path = directory / "mosquitto.sock"

    def ports(self) -> list[int]:
        return [self.port, self.websocket_port]

    def command(self) -> list[str]:
        configuration = self.directory / "mosquitto.conf"
        lines = [
            f"listener {self.port} 127.0.0.1",
            f"listener {self.websocket_port} 127.0.0.1",
            "protocol websockets",
            f"listener 0 {self.unix_path}",
            "allow_anonymous true",
            "max_queued_messages 100000",
        ]
        if os.geteuid() == 0:
            lines.append("user root")
        configuration.write_text("\n".join(lines) + "\n")
        return [str(self._program), "-c", str(configuration)]


class Nearcast(Broker):
    """Our own broker, as users start it."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "nearcast", "broker", "--port", str(self.port)]


def nearcast_available() -> bool:
    return (
        importlib.util.find_spec("nearcast.broker") is not None
        and importlib.util.find_spec("nearcast.broker.commands") is not None
    )
