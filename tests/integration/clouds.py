"""Brokers that form broadcast groups, and the cloud between them: an ordinary Mosquitto, which keeps its state on disk."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from nearcast.serving.secrets import make_secret
from tests.integration.broker.running import PATIENCE_SECONDS, wait_for
from tests.integration.brokers import NearcastBroker, started_together
from tests.integration.tools import require

QUICK = """
[observability]
sys_interval_seconds = 0.5
[fabric.groups]
announce_interval_seconds = 0.1
ping_interval_seconds = 0.05
threshold_ms = 1000
"""
"""So that a test need not wait for what takes seconds by default, nor fear a machine that is slow to answer."""


class MosquittoCloud:
    """A Mosquitto that can be stopped and comes back at the same port, with what it had. ``config``: more of its file."""

    def __init__(self, directory: Path, config: str = "") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._config_path = directory / "mosquitto.conf"
        self._log_path = directory / "mosquitto.log"
        self._config_path.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\nuser root\n"
            f"persistence true\npersistence_location {directory}/\nmax_queued_messages 0\n{config}",
            encoding="utf-8",
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        command = [str(require("mosquitto")), "-c", str(self._config_path)]
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for("Mosquitto", self._answers)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def stop(self) -> None:
        """As an administrator would: it saves what it has."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(PATIENCE_SECONDS)
            finally:
                process.kill()
                process.wait()

    def restart(self) -> None:
        self.stop()
        self.start()

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def __enter__(self) -> MosquittoCloud:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


class GroupedBroker(NearcastBroker):
    """A broker of a group."""

    def group(self) -> dict[str, Any]:
        """What it says of its group."""
        found: dict[str, Any] = self.health()["groups"]
        return found

    def leader(self) -> str:
        return str(self.group()["leader"])

    def fellows(self) -> set[str]:
        """The other brokers of its group that it is connected to."""
        return {fellow["name"] for fellow in self.group()["fellows"] if fellow["up"]}


class GroupedBrokers:
    """Brokers of one fabric that know nothing but their cloud. On one machine all are near each other: regions part them."""

    def __init__(
        self, directory: Path, broadcast: Sequence[str] = ("cars/#",), mosquitto: str = "", config: str = QUICK
    ) -> None:
        self.directory = directory
        self.secret = directory / "fabric.secret"
        make_secret(self.secret)
        self._broadcast = broadcast
        self._config = config
        self._stack = contextlib.ExitStack()
        home = directory / "cloud"
        home.mkdir()
        self.cloud = MosquittoCloud(home, mosquitto)
        self.by_name: dict[str, GroupedBroker] = {}

    def make(self, name: str, region: str = "world", *, lcm: float, more: Sequence[str] = ()) -> GroupedBroker:
        """A broker that is not started yet. Of a region, that with the highest ``lcm`` comes to lead."""
        home = self.directory / name
        home.mkdir()
        arguments = ["--name", name, "--fabric-secret", str(self.secret), "--cloud", self.cloud.url, *more]
        arguments += ["--region", region, "--lcm", str(lcm)]
        for topic_filter in self._broadcast:
            arguments += ["--broadcast", topic_filter]
        broker = GroupedBroker(home, self._config, data=True, arguments=arguments)
        self.by_name[name] = broker
        return broker

    def start(self) -> None:
        """The cloud, and all brokers at the same time."""
        self._stack.enter_context(self.cloud)
        started_together(list(self.by_name.values()), self._stack)

    def mend(self) -> None:
        """Start again what does not run: the cloud, and all brokers at the same time."""
        if not self.cloud.running:
            self.cloud.start()
        down = [broker for broker in self.by_name.values() if broker.process is None]
        for broker in down:
            broker.launch()
        for broker in down:
            broker.await_ready()

    def form(self, leader: str, *members: str) -> None:
        """Wait until these are a group: each says so, has links to all others, and a way to the cloud."""
        names = {leader, *members}

        def formed() -> bool:
            for name in names:
                group = self.by_name[name].group()
                up = {fellow["name"] for fellow in group["fellows"] if fellow["up"]}
                if group["leader"] != leader or up != names - {name} or group["relay"] != "live":
                    return False
            return True

        wait_for(f"the group of {leader} with {sorted(members)}", formed)

    def urls(self) -> list[str]:
        """Where ``nearcast groups --broker`` asks."""
        return [f"http://127.0.0.1:{broker.ready['http_port']}" for broker in self.by_name.values()]

    def __enter__(self) -> GroupedBrokers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)
