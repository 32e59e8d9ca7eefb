"""Gateways for the tests: as a process like :class:`~tests.integration.brokers.NearcastBroker`, or in a thread of this one,
where a test can tell its machine what to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from nearcast.config import Listener
from nearcast.fabric.gateway import Gateway
from nearcast.fabricconfig import Fabric
from nearcast.gateway.config import GatewayConfig
from nearcast.gateway.process import GatewayProcess
from nearcast.serving.secrets import make_secret
from tests.integration.broker.running import wait_for
from tests.integration.brokers import NearcastBroker, running

T = TypeVar("T")


class NearcastGateway(NearcastBroker):
    """``nearcast gateway`` in front of brokers. Clients find it as they would a broker; :meth:`metric` speaks of the brokers
    behind it."""

    def __init__(
        self, directory: Path, config: str = "", *, arguments: Sequence[str] = (), behind: Sequence[NearcastBroker] = ()
    ) -> None:
        super().__init__(directory, config, arguments=arguments)
        self.behind = list(behind)

    def launch(self) -> subprocess.Popen[bytes]:
        tcp_port = self.port() if self.ready else 0
        http_port = int(self.ready["http_port"]) if self.ready else 0
        self._ready_path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "nearcast", "gateway", *self._arguments, "--ready-file", str(self._ready_path)]
        command += ["--port", str(tcp_port), "--http-port", str(http_port)]
        with self.log_path.open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.process = process
        self.launches += 1
        running.append(self)
        return process

    def __enter__(self) -> NearcastGateway:
        self.start()
        return self

    def metric(self, name: str, **labels: str) -> float:
        return sum(broker.metric(name, **labels) for broker in self.behind)

    def own_metric(self, name: str) -> float:
        """One of the gateway's own figures."""
        return self.metrics()[f"nearcast_gateway_{name}"]

    def health(self) -> dict[str, Any]:
        try:
            return super().health()
        except urllib.error.HTTPError as error:  # 503: there is no broker
            found: dict[str, Any] = json.loads(error.read())
            return found

    def there(self, count: int = 1) -> bool:
        """Whether so many brokers are there."""
        return len(self.health()["brokers"]) == count


@contextlib.contextmanager
def fronted(directory: Path, config: str = "", brokers: int = 1, broker_config: str = "") -> Iterator[NearcastGateway]:
    """A gateway in front of brokers that form a fabric, all of them processes."""
    secret = directory / "fabric.secret"
    make_secret(secret)
    with contextlib.ExitStack() as stack:
        behind: list[NearcastBroker] = []
        for number in range(brokers):
            home = directory / f"broker{number}"
            home.mkdir()
            arguments = ["--name", f"b{number}", "--fabric-secret", str(secret)]
            for other in behind:
                arguments += ["--peer", other.link_address]
            behind.append(stack.enter_context(NearcastBroker(home, broker_config, arguments=arguments)))
        for number, broker in enumerate(behind):
            others = [f"b{other}" for other in range(brokers) if other != number]
            wait_for("brokers meeting", lambda broker=broker, others=others: broker.sees(*others))  # type: ignore[misc]
        arguments = ["--name", "g", "--fabric-secret", str(secret)]
        for broker in behind:
            arguments += ["--broker", broker.link_address]
        home = directory / "gateway"
        home.mkdir()
        gateway = stack.enter_context(NearcastGateway(home, config, arguments=arguments, behind=behind))
        wait_for("brokers behind the gateway", lambda: gateway.there(brokers))
        yield gateway


class EmbeddedGateway:
    """A gateway in a thread of its own."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway")
        self.process: GatewayProcess

    def __enter__(self) -> EmbeddedGateway:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)
        return self

    async def _start(self) -> None:
        self.process = GatewayProcess(self._config)
        await self.process.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self.process.stop(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    @property
    def port(self) -> int:
        return self.process.listeners[0].port

    def ask(self, question: Callable[[Gateway], T]) -> T:
        """Call the machine in its thread, and let it act."""
        answer: Future[T] = Future()

        def call() -> None:
            try:
                answer.set_result(question(self.process.machine))
            except BaseException as error:  # noqa: BLE001  # for the thread that asks
                answer.set_exception(error)
            self.process.flush()

        self._loop.call_soon_threadsafe(call)
        return answer.result(20)

    def move(self, target: str, client: str = "") -> int:
        """Move clients to another broker; how many."""
        return self.ask(lambda machine: machine.move(target, self.process.monotonic(), client))


def config(brokers: Sequence[str], secret: Path | None = None) -> GatewayConfig:
    """A gateway on any port in front of these brokers."""
    fabric = Fabric(name="g", secret_file=str(secret) if secret is not None else None)
    return GatewayConfig(listeners=(Listener(port=0),), brokers=tuple(brokers), fabric=fabric, shutdown_timeout_seconds=2.0)
