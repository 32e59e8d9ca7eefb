"""The load generator against real brokers, and the comparison from end to end.

These check counts and shapes, never speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nearcast.bench.brokers import BASELINE, BROKERS, Broker, BrokerNotStarted, RunningBroker
from nearcast.bench.connections import measure_connects, measure_idle
from nearcast.bench.loop import LoadOptions, run_load
from nearcast.bench.patterns import Pattern
from nearcast.bench.scenarios import SCENARIOS, measure

pytestmark = pytest.mark.integration

# nats-server speaks a part of MQTT 3.1.1: what it loses there is its own.
INSTALLED = [broker for broker in BROKERS if broker.installed() and broker.name != "nats-server"]


@pytest.fixture(params=INSTALLED, ids=lambda broker: broker.name, scope="module")
def running(request: pytest.FixtureRequest) -> object:
    broker: Broker = request.param
    with broker.running() as process:
        yield process


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize(
    ("pattern", "publishers", "subscribers"),
    [
        (Pattern.PAIRS, 3, 3),
        (Pattern.FANOUT, 1, 5),
        (Pattern.WILDCARD, 3, 4),
        (Pattern.SHARED_TOPIC, 3, 3),
        (Pattern.SHARED_SUBSCRIPTION, 2, 3),
    ],
)
def test_every_message_of_a_load_arrives(
    running: RunningBroker, pattern: Pattern, publishers: int, subscribers: int, qos: int, version: int
) -> None:
    options = LoadOptions(
        pattern=pattern,
        publishers=publishers,
        subscribers=subscribers,
        qos=qos,
        version=version,
        seconds=0.1,
        warmup_seconds=0.05,
        persistent=qos > 0,
    )
    result = run_load(running.address, options, broker_pid=running.pid)
    copies = 1 if pattern in (Pattern.PAIRS, Pattern.SHARED_SUBSCRIPTION) else subscribers
    assert result.published_total > 0
    assert result.delivered_total == result.published_total * copies
    assert (result.lost, result.duplicates, result.order_violations) == (0, 0, 0)
    assert (result.refused, result.unexpected) == (0, 0)


def test_latency_counts_what_was_sent(running: RunningBroker) -> None:
    result = run_load(running.address, LoadOptions(rate=500, seconds=0.2, warmup_seconds=0.05), broker_pid=running.pid)
    assert result.latency is not None
    assert 0 < result.latency.p50_us <= result.latency.p99_us <= result.latency.max_us
    assert (result.lost, result.duplicates, result.order_violations) == (0, 0, 0)


def test_connections(running: RunningBroker) -> None:
    assert measure_connects(running.address, 300, 20, broker_pid=running.pid).refused == 0
    assert measure_idle(running.address, 400, running.pid).full_rss_bytes > 0


def test_the_subscription_curve(running: RunningBroker) -> None:
    scenario = next(each for each in SCENARIOS if each.subscriptions == 1_000)
    sample = measure(scenario, running, 0.1)
    assert (sample.lost, sample.duplicates, sample.order_violations, sample.unexpected) == (0, 0, 0, 0)


def test_a_broker_that_does_not_start_says_why_in_one_line() -> None:
    failing = Broker(
        "failing",
        lambda: sys.executable,
        lambda path, port, directory, window: [path, "-c", "import sys; sys.exit('no luck today')"],
        lambda path: "0",
    )
    with pytest.raises(BrokerNotStarted, match="failing: exited with status 1: no luck today"), failing.running():
        pass


def test_a_broker_is_stopped_with_its_children() -> None:
    """The process group ends, also when the measurement fails."""
    baseline = next(broker for broker in BROKERS if broker.name == BASELINE)
    if not baseline.installed():
        pytest.skip("Mosquitto is not installed")
    pids: list[int] = []

    def fail_while_running() -> None:
        with baseline.running() as process:
            pids.append(process.pid)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail_while_running()
    with pytest.raises(ProcessLookupError):
        os.killpg(pids[0], 0)


def test_the_comparison_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    if not INSTALLED:
        pytest.skip("no broker is installed")
    output = tmp_path / "results.json"
    command = [sys.executable, "-m", "nearcast.bench", "compare", "--rounds", "1", "--seconds", "0.2"]
    command += ["--only", "qos1-pairs", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "QoS 1, 10→10" in done.stdout
    results = json.loads(output.read_bytes())
    assert {each["broker"] for each in results["measurements"]} <= {broker.name for broker in INSTALLED}
    assert all(each["sample"]["lost"] == 0 for each in results["measurements"])
    assert results["machine"]["cores"] >= 1


def test_the_generator_measures_itself() -> None:
    command = [sys.executable, "-m", "nearcast.bench", "load", "--self-test", "--seconds", "0.2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    result = json.loads(done.stdout)["result"]
    assert result["delivered_total"] == result["published_total"] > 0
    assert result["lost"] == result["duplicates"] == result["order_violations"] == 0


def test_bridging_is_measured_beside_staying() -> None:
    command = [sys.executable, "-m", "nearcast", "bench", "bridged", "--rounds", "1", "--seconds", "0.2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "QoS 2, 4 pairs" in done.stdout
    assert "lost or doubled" not in done.stdout
