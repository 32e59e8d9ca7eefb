"""One Spark session for all tests of a run: starting one takes longer than most of them. And brokers with durable topics.

A test that must have a JVM of its own (it kills a driver) starts a process; nothing stops or replaces the shared session.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.integration.brokers import NearcastBroker

DURABLE = """
[[topics]]
topic = "#"
"""
"""Every topic is kept."""

QUICK = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
"""The compiler that starts fast: sessions of tests live for a minute or two, on few cores."""


class LogBroker(NearcastBroker):
    """A broker that keeps all topics; ``bulk_url`` is where Spark reads them."""

    def __init__(self, directory: Path, config: str = DURABLE) -> None:
        super().__init__(directory, config, data=True)
        self._words = list(self._arguments)

    def launch(self) -> subprocess.Popen[bytes]:
        # Whoever reads finds it again where it was.
        self._arguments = [*self._words, "--bulk-port", str(self.port("bulk") if self.ready else 0)]
        return super().launch()

    @property
    def bulk_url(self) -> str:
        return f"nearcast://127.0.0.1:{self.port('bulk')}"


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session that all Spark tests share. They must not stop it, nor leave streaming queries or settings behind."""
    from nearcast.pipeline.session import build_session, stop_session

    session = build_session("nearcast tests", master="local[2]", settings=QUICK)
    yield session
    stop_session(session)


@pytest.fixture(autouse=True)
def _no_query_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Streaming queries of a test that failed do not go on beside the next test."""
    yield
    if "spark" in request.fixturenames:
        streams = request.getfixturevalue("spark").streams
        for query in streams.active:
            query.stop()
        # Nor do those that failed on purpose make the next test's waiting fail.
        streams.resetTerminated()


@pytest.fixture(scope="session")
def log_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LogBroker]:
    """A broker that all tests share: each uses topics of its own, and none kills it."""
    broker = LogBroker(tmp_path_factory.mktemp("log-broker"))
    with broker:
        yield broker


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Callable[..., LogBroker]]:
    """Starts brokers that a test has for itself, to kill or configure as it likes: ``own_broker(config)``."""
    with ExitStack() as stack:

        def start(config: str = DURABLE) -> LogBroker:
            directory = tmp_path / f"broker-{len(list(tmp_path.glob('broker-*')))}"
            directory.mkdir()
            broker = LogBroker(directory, config)
            stack.enter_context(broker)
            return broker

        yield start
