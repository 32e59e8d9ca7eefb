"""The brokers under test: how to find, configure, start and stop each.

Adding a broker is one entry in :data:`BROKERS`. Every measurement gets a fresh process with an empty directory, in its own
process group, which is killed whatever happens.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from nearcast.bench.process import on_cores
from nearcast.bench.traffic import DISCONNECT
from nearcast.bench.wire import open_session
from nearcast.errors import ConnectionClosed, ConnectionRefused, NearcastError

_START_SECONDS = 15.0
_STOP_SECONDS = 5.0


class BrokerNotStarted(NearcastError):
    """A broker under test did not come up. ``broker`` is its name."""

    def __init__(self, broker: str, message: str) -> None:
        super().__init__(f"{broker}: {message}")
        self.broker = broker


class Broker:
    """How to run one broker.

    ``persistent`` says that it keeps its state on disk, ``mqtt5`` that it speaks MQTT 5; one that does not is given the same
    load in 3.1.1 and sits out shared subscriptions.
    """

    def __init__(
        self,
        name: str,
        locate: Callable[[], str | None],
        command: Callable[[str, int, Path, int], list[str]],
        version: Callable[[str], str],
        *,
        persistent: bool = False,
        mqtt5: bool = True,
    ) -> None:
        self.name = name
        self.mqtt5 = mqtt5
        self.persistent = persistent
        self._locate = locate
        self._command = command
        self._version = version

    def installed(self) -> bool:
        return self._locate() is not None

    def version(self) -> str:
        path = self._locate()
        return self._version(path) if path else "not installed"

    @contextmanager
    def running(self, cores: set[int] | None = None, window: int = 100) -> Iterator[RunningBroker]:
        """A fresh process on a free loopback port; ``window`` is how many messages may be in flight per client."""
        path = self._locate()
        if path is None:
            raise BrokerNotStarted(self.name, "not installed")
        with tempfile.TemporaryDirectory(prefix="nearcast-bench-") as directory:
            log_path = Path(directory, "broker.log")
            port = free_port()
            command = self._command(path, port, Path(directory), window)
            try:
                with on_cores(cores), log_path.open("wb") as log:
                    process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                    )
            except OSError as error:
                raise BrokerNotStarted(self.name, f"cannot run {command[0]}: {error.strerror}") from None
            try:
                self._await(process, port, log_path)
                yield RunningBroker(process.pid, ("127.0.0.1", port), log_path)
            finally:
                stop_group(process)

    def _await(self, process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
        deadline = time.monotonic() + _START_SECONDS
        reason = "no answer"
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise BrokerNotStarted(self.name, f"exited with status {process.returncode}{_last_line(log_path)}")
            try:
                with open_session(("127.0.0.1", port), "bench-probe", 4) as peer:
                    peer.sendall(DISCONNECT)
                return
            except (ConnectionClosed, ConnectionRefused, OSError) as error:
                reason = str(error)
                time.sleep(0.02)
        raise BrokerNotStarted(self.name, f"not ready after {_START_SECONDS:.0f} s ({reason}){_last_line(log_path)}")


class RunningBroker:
    """A broker that answers."""

    def __init__(self, pid: int, address: tuple[str, int], log_path: Path) -> None:
        self.pid = pid
        self.address = address
        self.log_path = log_path


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started: politely, then not."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            break
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    try:  # the leader is gone; whatever it left behind in its group goes too
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _last_line(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""


def _program(name: str) -> Callable[[], str | None]:
    """Find a program on the PATH or where Debian puts daemons, which is often not on it."""
    return lambda: shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


def _version_from(*options: str) -> Callable[[str], str]:
    def read(path: str) -> str:
        try:
            done = subprocess.run([path, *options], capture_output=True, text=True, timeout=5, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return "unknown"
        found = re.search(r"\d+\.\d+(\.\d+)?", done.stdout + done.stderr)
        return found.group() if found else "unknown"

    return read


# --- ours


def _our_python() -> str | None:
    return sys.executable if find_spec("nearcast.__main__") else None


def _our_version(_: str) -> str:
    compiled = any(
        spec is not None and spec.origin is not None and not spec.origin.endswith(".py")
        for spec in (find_spec("nearcast.mqtt.engine"), find_spec("nearcast.mqtt.codec"))
    )
    return "compiled" if compiled else "plain Python"


def _ours(path: str, port: int, directory: Path, window: int) -> list[str]:
    return [path, "-m", "nearcast", "broker", "--port", str(port)]


def _ours_with_data(path: str, port: int, directory: Path, window: int) -> list[str]:
    return [*_ours(path, port, directory, window), "--data", str(directory / "data"), "--no-bulk-port"]


# --- others


def _mosquitto(path: str, port: int, directory: Path, window: int) -> list[str]:
    configuration = directory / "mosquitto.conf"
    configuration.write_text(
        f"listener {port} 127.0.0.1\n"
        "allow_anonymous true\n"
        "persistence false\n"
        "max_queued_messages 0\n"
        f"max_inflight_messages {window}\n"
        "set_tcp_nodelay true\n"
        "log_type error\n"
    )
    return [path, "-c", str(configuration)]


def _nats(path: str, port: int, directory: Path, window: int) -> list[str]:
    configuration = directory / "nats.conf"
    configuration.write_text(
        f"host: 127.0.0.1\nport: {free_port()}\nserver_name: bench\n"
        f'jetstream {{ store_dir: "{directory / "jetstream"}" }}\n'
        f"mqtt {{ host: 127.0.0.1, port: {port}, max_ack_pending: {window} }}\n"
    )
    return [path, "-c", str(configuration)]


def _flashmq(path: str, port: int, directory: Path, window: int) -> list[str]:
    configuration = directory / "flashmq.conf"
    configuration.write_text(
        "allow_anonymous true\n"
        f"listen {{\n  protocol mqtt\n  port {port}\n  inet_protocol ip4\n  inet4_bind_address 127.0.0.1\n}}\n"
    )
    return [path, "-c", str(configuration)]


BASELINE = "mosquitto"

BROKERS = [
    Broker(BASELINE, _program("mosquitto"), _mosquitto, _version_from("-h")),
    Broker("nearcast", _our_python, _ours, _our_version),
    Broker("nearcast --data", _our_python, _ours_with_data, _our_version, persistent=True),
    Broker("nats-server", _program("nats-server"), _nats, _version_from("--version"), mqtt5=False),
    Broker("flashmq", _program("flashmq"), _flashmq, _version_from("--version")),
]
