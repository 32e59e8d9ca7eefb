"""The shipped MQTT broker, journal and client in virtual time, under every fault the simulator has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nearcast.errors import ConfigError
from nearcast.experiments.recorder import Recorder
from nearcast.recording import EventWriter, read_events
from nearcast.scenario.events import Crash, Event, FailDisk, Kill, RandomFaults
from nearcast.scenario.files import load_scenario
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.scenario.topology import Host, Site, SiteLink, Topology
from nearcast.scenario.workload import Clients, Publishing, Subscribing
from nearcast.simulation.mqtt import Mqtt, MqttNode
from nearcast.simulation.mqtt_broker import SimulatedBroker
from nearcast.simulation.runs import Outcome, simulate
from tests.simulation.deployments import deployment

#: How many seeds of each scenario the suite runs. By hand: thousands.
SEEDS = 50

TOPOLOGY = Topology(
    name="test",
    sites=(Site(name="region"), Site(name="edge")),
    links=(SiteLink(between=("region", "edge"), latency_ms=5.0, jitter_ms=1.0),),
    hosts=(Host(name="broker", site="region"), Host(name="device", site="edge", count=2), Host(name="phone", site="edge")),
)


def scenario(
    *,
    durable: bool = True,
    faults: RandomFaults | None = None,
    events: tuple[Event, ...] = (),
    protocol: str = "mqtt",
    clean_start: bool = False,
    rate_hz: float = 4.0,
    duration_s: float = 6.0,
    settle_s: float = 6.0,
    version: str = "5.0",
    settings: dict[str, Any] | None = None,
) -> Scenario:
    """Few hosts, a lot of traffic for them, a journal that begins a new file all the time."""
    return msgspec.convert(
        {
            "name": "test",
            "topology": TOPOLOGY,
            "protocol": protocol,
            "settings": settings if settings is not None else {"snapshot_bytes": 1_500, "snapshot_step_bytes": 300},
            "duration_s": duration_s,
            "settle_s": settle_s,
            "brokers": (Broker(host="broker", durable=durable),),
            "clients": (
                Clients(
                    name="publisher",
                    host="device*",
                    broker="broker",
                    clean_start=clean_start,
                    keepalive_s=1,
                    protocol=version,  # type: ignore[arg-type]
                    publish=(
                        Publishing(topic="{client}/0", rate_hz=rate_hz, qos=0),
                        Publishing(topic="{client}/1", rate_hz=rate_hz, qos=1, retain=True),
                        Publishing(topic="{client}/2", rate_hz=rate_hz, qos=2, poisson=True),
                    ),
                ),
                Clients(
                    name="subscriber",
                    host="phone",
                    broker="broker",
                    clean_start=clean_start,
                    keepalive_s=1,
                    subscribe=(Subscribing(filter="#", qos=2),),
                ),
                Clients(
                    name="visitor",
                    host="phone",
                    broker="broker",
                    keepalive_s=1,
                    subscribe=(Subscribing(filter="+/2", qos=2),),
                    publish=(Publishing(topic="{client}/2", rate_hz=rate_hz, qos=2),),
                ),
            ),
            "random_faults": faults,
            "events": events,
        },
        Scenario,
    )


def faults(*hosts: str, per_minute: float = 20.0, max_fault_s: float = 1.0) -> RandomFaults:
    return RandomFaults(
        hosts=hosts,
        kills_per_minute=per_minute,
        crashes_per_minute=per_minute,
        pauses_per_minute=per_minute / 2,
        cuts_per_minute=per_minute / 2,
        slow_links_per_minute=per_minute / 4,
        skews_per_minute=per_minute / 4,
        max_fault_s=max_fault_s,
        quiet_s=1.0,
    )


def slow_disk(sync_s: float) -> FailDisk:
    return FailDisk(at_s=0.0, host="broker", sync_s=sync_s)


def run(described: Scenario, seed: int) -> Outcome:
    outcome = simulate(described, seed)
    assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
    return outcome


CASES = {
    "durable": scenario(faults=faults()),
    "durable with a slow disk": scenario(faults=faults("broker", "phone", per_minute=40.0), events=(slow_disk(0.15),)),
    "not durable": scenario(durable=False, faults=faults()),
    "3.1.1": scenario(version="3.1.1", faults=faults(), events=(slow_disk(0.05),)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_promised_holds_under_random_faults(name: str) -> None:
    delivered = 0
    for seed in range(1, SEEDS + 1):
        delivered += run(CASES[name], seed).figures["delivered"]
    assert delivered > 50 * SEEDS, "the faults left something to look at"


def test_what_is_promised_holds_in_random_deployments() -> None:
    for number in range(1, 13):
        run(deployment(number, settle_s=5.0), number)


def test_without_faults_everything_arrives_once() -> None:
    outcome = run(scenario(), 1)
    figures = outcome.figures
    assert figures["expected"] > 200
    assert (figures["lost"], figures["pending"], figures["duplicated"], figures["skipped"]) == (0, 0, 0, 0)
    assert figures["delivered"] >= figures["expected"]
    # Two legs of 5 ms, and at QoS 1 and 2 the flush of the disk in between.
    assert 9.0 < figures["latency_p50_ms"] < 20.0
    assert figures["latency_p50_ms"] <= figures["latency_p95_ms"] <= figures["latency_p99_ms"] <= figures["latency_max_ms"]


def test_the_ready_scenario() -> None:
    described = load_scenario("mqtt")
    for seed in (1, 2):
        figures = run(described, seed).figures
        assert figures["delivered"] > 1_000
        assert figures["pending"] == 0, "faults are over, and everything has arrived"


# --- planted faults: the invariants find them -----------------------------------------------------------------------------


class HastyBroker(SimulatedBroker):
    """Sends acknowledgements before the disk has what they acknowledge."""

    def request_sync(self) -> None:
        while self.commits.begin_sync():
            self.commits.synced()


class ForgetfulBroker(SimulatedBroker):
    """Keeps no journal of what it promised."""

    def start(self) -> None:
        for name in self.host.disk.list():
            self.host.disk.remove(name)
        super().start()


class RepeatingBroker(SimulatedBroker):
    """Forgets, at times, which QoS 2 messages it has."""

    def received(self, stream: Any, data: bytes) -> None:
        for session in self.engine.sessions.by_client.values():
            session.received_ids = None
        super().received(stream, data)


class Hasty(Mqtt):
    broker_class = HastyBroker


class Forgetful(Mqtt):
    broker_class = ForgetfulBroker


class Repeating(Mqtt):
    broker_class = RepeatingBroker


@pytest.mark.parametrize(
    ("mutant", "said"),
    [
        (Hasty, "lost|session|subscription|retained|twice"),
        (Forgetful, "session|lost|subscription|retained"),
        (Repeating, "twice at QoS 2"),
    ],
)
def test_a_planted_fault_is_found(mutant: type[Mqtt], said: str) -> None:
    described = scenario(
        protocol=f"{mutant.__module__}:{mutant.__name__}",
        faults=faults("broker", "device*", per_minute=40.0),
        events=(slow_disk(0.1),),
    )
    sys.modules.setdefault(mutant.__module__, sys.modules[__name__])
    for seed in range(1, 31):
        outcome = simulate(described, seed)
        if outcome.violation is not None:
            again = simulate(described, seed)
            assert again.violation == outcome.violation
            assert again.digest == outcome.digest
            assert any(word in outcome.violation.message for word in said.split("|")), outcome.violation
            assert outcome.violation.hosts
            return
    pytest.fail("no seed found it")


# --- the disk -------------------------------------------------------------------------------------------------------------


def test_a_full_disk_ends_the_broker_and_nothing_promised_is_lost() -> None:
    described = scenario(
        events=(
            FailDisk(at_s=2.0, host="broker", full=True, for_s=1.0),
            Kill(at_s=3.5, host="broker", restart_after_s=0.1),
        )
    )
    for seed in range(1, 6):
        figures = run(described, seed).figures
        assert figures["delivered"] > 0


def test_a_power_cut_in_every_tenth_of_a_flush() -> None:
    """Wherever the tear is, what was acknowledged is there again."""
    for tenth in range(10):
        described = scenario(
            events=(
                slow_disk(0.1),
                *(Crash(at_s=1.0 + tenth * 0.011 + round_, host="broker", restart_after_s=0.05) for round_ in range(4)),
            )
        )
        for seed in (1, 2):
            run(described, seed)


# --- one seed, one run ----------------------------------------------------------------------------------------------------

_DIGEST = """
from nearcast.scenario.files import load_scenario
from nearcast.simulation.runs import simulate
import msgspec
described = msgspec.structs.replace(load_scenario("mqtt"), duration_s=6.0, settle_s=2.0)
print(simulate(described, 1).digest)
"""


def test_one_seed_is_one_run_in_every_process() -> None:
    printed = set()
    for hash_seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", _DIGEST]
        printed.add(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert len(printed) == 1, printed


# --- what a run hands out -------------------------------------------------------------------------------------------------


def test_message_events_tell_the_run(tmp_path: Path) -> None:
    described = scenario(faults=faults())
    with EventWriter(tmp_path, "test") as writer:
        outcome = simulate(described, 3, observers=[Recorder(described, writer)])
    events = list(read_events(tmp_path))
    kinds = {kind: [event for event in events if event.kind == kind] for kind in {event.kind for event in events}}
    figures = outcome.figures
    assert len(kinds["published"]) == figures["published"]
    assert len(kinds["acknowledged"]) == figures["acknowledged"]
    fresh = [event for event in kinds["delivered"] if not event.retained]
    assert len(fresh) == figures["delivered"] + figures["duplicated"]
    assert len({(event.message_id, event.subscriber) for event in fresh}) == figures["delivered"]
    for event in kinds["delivered"]:
        assert event.path == ("broker",)
        assert event.received_ns is not None
        assert event.sent_ns is not None
        assert event.received_ns > event.sent_ns
    assert [event.at_ns for event in events] == sorted(event.at_ns for event in events)


# --- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"snapshot_byte": 1}, "snapshot_byte"),
        ({"snapshot_bytes": 0}, "at least 1"),
        ({"limits": {"max_qos": 3}}, "max_qos"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        simulate(scenario(settings=settings), 1)


def test_a_client_without_a_broker_is_named() -> None:
    described = scenario()
    lonely = msgspec.structs.replace(described, brokers=(Broker(host="broker", port=1884),))
    with pytest.raises(ConfigError, match="publisher@device-1 connects to broker at port 1883, where no broker is"):
        simulate(lonely, 1)


def test_a_queue_that_is_full_is_no_broken_promise() -> None:
    described = scenario(
        settings={"limits": {"max_queued_messages": 5, "max_inflight": 2}},
        faults=faults("phone"),
        rate_hz=20.0,
        duration_s=4.0,
    )
    assert sum(run(described, seed).figures["lost"] for seed in range(1, 6)) > 0


class Watched(Mqtt):
    """Says how many streams the nodes know of."""

    def report(self) -> dict[str, Any]:
        assert self._world is not None
        nodes = [host.node for host in self._world.hosts]
        return {**super().report(), "streams": sum(len(node.owners) for node in nodes if isinstance(node, MqttNode))}


def test_streams_that_were_given_up_are_forgotten() -> None:
    """A broker that is off for long: attempts end by the client's patience, not by the stream's."""
    off = scenario(
        events=(Crash(at_s=1.0, host="broker", restart_after_s=300.0),),
        duration_s=310.0,
        rate_hz=0.1,
        protocol=f"{__file__}:Watched",
    )
    figures = simulate(off).figures
    assert figures["streams"] == 2 * figures["clients"], "one end is the client's, the other the broker's"


def test_a_host_can_be_broker_and_client() -> None:
    described = scenario(faults=faults("broker"))
    both = msgspec.structs.replace(
        described, clients=tuple(msgspec.structs.replace(group, host="broker") for group in described.clients)
    )
    for seed in range(1, 6):
        run(both, seed)
