"""Our broker as a process that can be killed, started again, measured and shared by tests.

Builds on :class:`~tests.integration.broker.running.RunningBroker`. The ports are those the broker took at its first start;
later starts of the same object use them again, so that clients find it where it was. The log of every broker that a failing
test could have talked to is shown with the failure (``conftest.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pytest

from tests.integration.broker.running import RunningBroker

_SAMPLE = re.compile(r"^([a-zA-Z_:]\w*(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)

#: Brokers whose log a failing test shows.
running: list[NearcastBroker] = []


class NearcastBroker(RunningBroker):
    """One broker process after another, with the same configuration, ports and data directory.

    ``config`` is the text of a TOML file; listeners in it should have port 0 and are found by :meth:`port`. ``data`` gives
    the broker a data directory. ``arguments`` are further words of the command line.
    """

    def __init__(self, directory: Path, config: str = "", *, data: bool = False, arguments: Sequence[str] = ()) -> None:
        super().__init__(directory, *arguments, config=config)
        self.data = directory / "data"
        self.launches = 0
        if data:
            self._arguments += ["--data", str(self.data)]

    def launch(self) -> subprocess.Popen[bytes]:
        tcp_port = self.port() if self.ready else 0
        http_port = int(self.ready["http_port"]) if self.ready else 0
        self._ready_path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "nearcast", "broker", *self._arguments, "--ready-file", str(self._ready_path)]
        command += ["--port", str(tcp_port), "--http-port", str(http_port)]
        if any(listener["kind"] == "bulk" for listener in self.ready.get("listeners", ())):
            command += ["--bulk-port", str(self.port("bulk"))]
        if any(listener["kind"] == "link" for listener in self.ready.get("listeners", ())):
            command += ["--link-port", str(self.port("link"))]
        with self.log_path.open("ab") as log:
            # A process group of its own: whatever the broker may start ends with it.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.process = process
        self.launches += 1
        running.append(self)
        return process

    def start(self) -> None:
        """Start, and return once clients can come."""
        try:
            super().__enter__()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """End the broker as an administrator would; a traceback in its log is a failure."""
        try:
            super().__exit__(None, None, None)
            assert self.process is None or self.process.returncode == 0, self.log()
        finally:
            self.kill()

    def restart(self) -> None:
        self.stop()
        self.start()

    def kill(self) -> None:
        """``kill -9``, without a word to anybody."""
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self in running:
            running.remove(self)

    def __enter__(self) -> NearcastBroker:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None and self.process is not None:
            self.stop()
        else:
            self.kill()

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port()}"

    @property
    def link_address(self) -> str:
        """Where other nodes of the fabric connect; a broker with a secret has one."""
        return f"127.0.0.1:{self.port('link')}"

    def health(self) -> dict[str, Any]:
        """What /healthz says now."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ready['http_port']}/healthz", timeout=20) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def sees(self, *names: str) -> bool:
        """Whether exactly these other brokers are up, as this one sees it."""
        return sorted(names) == sorted(broker["name"] for broker in self.health()["fabric"]["brokers"] if broker["up"])

    @property
    def bulk_url(self) -> str:
        """Where topic logs are read; a broker with ``data`` has one."""
        return f"nearcast://127.0.0.1:{self.port('bulk')}"

    def metrics(self) -> dict[str, float]:
        """What /metrics says now, by name with labels: ``nearcast_messages_dropped_total{reason="queue_full"}``."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ready['http_port']}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        return {name: float(value) for name, value in _SAMPLE.findall(text)}

    def metric(self, name: str, **labels: str) -> float:
        """One of the broker's own figures, without the common prefix."""
        label_text = ",".join(f'{key}="{value}"' for key, value in labels.items())
        return self.metrics()[f"nearcast_{name}" + (f"{{{label_text}}}" if labels else "")]

    def resident_bytes(self) -> int:
        """Memory the process occupies."""
        return int(psutil.Process(self.ready["pid"]).memory_info().rss)


def started_together(brokers: Sequence[NearcastBroker], stack: contextlib.ExitStack) -> None:
    """Start them at the same time, which takes as long as one where there are cores; they end with the stack."""
    for broker in brokers:
        broker.launch()
        stack.push(broker)
    for broker in brokers:
        broker.await_ready()


@contextlib.contextmanager
def nearcast_broker(
    factory: pytest.TempPathFactory, config: str = "", *, data: bool = False, arguments: Sequence[str] = ()
) -> Iterator[NearcastBroker]:
    """A running broker in a directory of its own, for fixtures that several tests share."""
    with NearcastBroker(factory.mktemp("broker"), config, data=data, arguments=arguments) as broker:
        yield broker
