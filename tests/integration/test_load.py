"""The clients of a scenario against a real broker: what they do, record and say at the end."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nearcast.load import LoadSpec
from nearcast.load.meeting import start_together
from nearcast.load.spec import SharedClock
from nearcast.recording import check, read_events
from nearcast.scenario.events import Move
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.scenario.topology import Host, Site, SiteLink, Topology
from nearcast.scenario.workload import Change, Clients, Publishing, Subscribing
from tests.integration.brokers import NearcastBroker

pytestmark = pytest.mark.integration

MAX_FILE_BLOCKS = 8
"""Of 512 or 1,024 bytes, as the shell likes: less than the first file of a recording needs."""

TOPOLOGY = Topology(
    name="t",
    sites=(Site(name="here"),),
    hosts=(Host(name="broker", site="here"), Host(name="left", site="here"), Host(name="right", site="here")),
)


def scenario(*clients: Clients, duration_s: float = 1.5, settle_s: float = 0.5) -> Scenario:
    return Scenario(
        name="load",
        topology=TOPOLOGY,
        brokers=(Broker(host="broker"),),
        clients=clients,
        duration_s=duration_s,
        settle_s=settle_s,
    )


def group(name: str, host: str = "left", **rest: Any) -> Clients:
    return Clients(name=name, host=host, broker="broker", **rest)


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """A test that fails leaves no load behind."""
    yield
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.kill()
        process.communicate()


def start(directory: Path, spec: LoadSpec, limit: str = "") -> subprocess.Popen[str]:
    path = directory / f"{spec.host or 'all'}.json"
    path.write_bytes(msgspec.json.encode(spec))
    program = shlex.join([sys.executable, "-W", "error", "-m", "nearcast.load", str(path)])
    command = ["sh", "-c", f"{limit}exec {program}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _started.append(process)
    return process


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err == ""
    summary: dict[str, Any] = json.loads(out)
    return summary


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def here(broker: NearcastBroker) -> dict[str, str]:
    return {"broker": f"127.0.0.1:{broker.port()}"}


def test_two_hosts_exchange_messages_and_every_one_is_accounted_for(tmp_path: Path) -> None:
    load = scenario(
        group("sub", "right", count=5, subscribe=(Subscribing(filter="s/#", qos=1),), protocol="3.1.1"),
        group(
            "pub",
            count=20,
            start_s=1.5,
            publish=(
                Publishing(topic="s/{client}", rate_hz=20, qos=1, payload_bytes=64),
                Publishing(topic="s/{index}/second", rate_hz=10, poisson=True, qos=2),
            ),
        ),
        duration_s=3.0,
        settle_s=1.0,
    )
    with NearcastBroker(tmp_path) as broker:
        clock = SharedClock()
        spec = LoadSpec(
            scenario=load,
            run="two hosts",
            meeting=str(tmp_path),
            clock_offset_ns=clock.offset_ns,
            addresses=here(broker),
            events=str(tmp_path / "events"),
        )
        left = start(tmp_path, msgspec.structs.replace(spec, host="left"))
        right = start(tmp_path, msgspec.structs.replace(spec, host="right"))
        asyncio.run(start_together(tmp_path, ["left", "right"], clock))
        sent, got = finish(left), finish(right)
    assert sent["complete"]
    assert got["complete"]
    assert sent["clients"] == sent["connections"] == 20
    assert sent["sent"] > 300
    assert sent["sent"] == sent["acknowledged"]
    assert got["delivered"] == 5 * sent["sent"]
    assert sent["lost"] == got["lost"] == got["duplicated"] == sent["unacknowledged"] == got["foreign"] == 0
    assert 0 < got["latency"]["p50_ms"] <= got["latency"]["p99_ms"] <= got["latency"]["max_ms"]
    assert sent["lag"]["count"] == sent["sent"]
    assert max(sent["started_late_ms"], got["started_late_ms"]) < 1_000

    found = check(tmp_path / "events")
    assert found.problems == ()
    assert found.kinds["published"] == found.kinds["acknowledged"] == sent["sent"]
    assert found.kinds["delivered"] == got["delivered"]
    assert found.kinds["subscribed"] == 5
    events = list(read_events(tmp_path / "events"))
    filters = {wanted.filter for clients in load.clients for wanted in clients.subscribe}
    assert {event.topic for event in events if event.kind == "subscribed"} == filters
    published = {event.message_id: event for event in events if event.kind == "published"}
    assert len(published) == sent["sent"]
    for event in events:
        if event.kind == "delivered":
            origin = published[event.message_id]
            assert (event.publisher, event.stream, event.sequence) == (origin.publisher, origin.stream, origin.sequence)
            assert (event.topic, event.sent_ns, event.size_bytes) == (origin.topic, origin.sent_ns, origin.size_bytes)
            assert event.received_ns is not None
            assert event.sent_ns is not None
            assert event.received_ns > event.sent_ns
            assert event.path == ("broker",)


def test_clients_come_back_after_the_broker_was_killed_and_say_what_that_cost(tmp_path: Path) -> None:
    load = scenario(
        group("sub", count=3, subscribe=(Subscribing(filter="s/#", qos=1),), clean_start=False),
        group("one", start_s=1.5, publish=(Publishing(topic="s/1", rate_hz=50, qos=1),), clean_start=False),
        group("zero", start_s=1.5, publish=(Publishing(topic="s/0", rate_hz=50),)),
        duration_s=6.0,
        settle_s=2.0,
    )
    with NearcastBroker(tmp_path, data=True) as broker:
        process = start(tmp_path, LoadSpec(scenario=load, addresses=here(broker), events=str(tmp_path / "events")))
        wait_for(lambda: broker.metric("messages_received_total", qos="0") > 50, "messages flow")
        broker.kill()
        broker.start()
        summary = finish(process)
    assert summary["disconnections"] == 5
    assert summary["connections"] == 10
    assert summary["acknowledged"] > 100
    assert summary["unacknowledged"] == 0
    kinds = check(tmp_path / "events").kinds
    assert kinds["disconnected"] == 5
    assert kinds.get("skipped", 0) == summary["skipped"]
    events = list(read_events(tmp_path / "events"))
    acknowledged = {event.message_id for event in events if event.kind == "acknowledged"}
    for number in (1, 2, 3):
        delivered = {event.message_id for event in events if event.kind == "delivered" and event.client == f"sub-{number}"}
        assert acknowledged <= delivered, "what was acknowledged at QoS 1 was delivered, over the crash"


def test_a_broker_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    load = scenario(group("c", publish=(Publishing(topic="t", rate_hz=20, qos=1),)), duration_s=600.0)
    broker = NearcastBroker(tmp_path)
    with broker:
        addresses = here(broker)
    process = start(tmp_path, LoadSpec(scenario=load, addresses=addresses, events=str(tmp_path / "events")))
    wait_for(
        lambda: any(name.name.startswith(".") for name in (tmp_path / "events").glob("*")), "a failed attempt is recorded"
    )
    with broker:
        wait_for(lambda: broker.metric("messages_received_total", qos="1") > 10, "messages flow")
        process.send_signal(signal.SIGTERM)
        summary = finish(process)
    assert summary["connection_failures"] >= 1
    assert summary["acknowledged"] + summary["unacknowledged"] == summary["sent"]
    assert summary["acknowledged"] > 0
    assert summary["acknowledgement"]["max_ms"] > 250, "what was due before there was a connection has waited for one"


def test_what_a_broker_has_kept_of_an_earlier_run_is_not_of_this_one(tmp_path: Path) -> None:
    load = scenario(
        group("sub", subscribe=(Subscribing(filter="t", qos=1),)),
        group("pub", start_s=1.5, publish=(Publishing(topic="t", rate_hz=20, qos=1, retain=True),)),
        duration_s=2.0,
    )
    with NearcastBroker(tmp_path) as broker:
        spec = LoadSpec(scenario=load, addresses=here(broker))
        first, second = finish(start(tmp_path, spec)), finish(start(tmp_path, spec))
    assert (first["foreign"], second["foreign"]) == (0, 1)
    assert (second["duplicated"], second["lost"], second["delivered"]) == (0, 0, second["sent"])


def test_sigterm_ends_it_with_a_summary_and_whole_files(tmp_path: Path) -> None:
    load = scenario(
        group("both", count=10, publish=(Publishing(topic="t", rate_hz=50),), subscribe=(Subscribing(filter="t"),)),
        duration_s=600.0,
    )
    with NearcastBroker(tmp_path) as broker:
        process = start(tmp_path, LoadSpec(scenario=load, addresses=here(broker), events=str(tmp_path / "events")))
        wait_for(lambda: broker.metric("messages_received_total", qos="0") > 100, "messages flow")
        process.send_signal(signal.SIGTERM)
        summary = finish(process)
    assert not summary["complete"]
    assert summary["error"] is None
    assert summary["sent"] > 100
    found = check(tmp_path / "events")
    assert (found.problems, found.unfinished) == ((), ())
    assert found.rows == summary["recorded"]


def test_a_disk_that_takes_no_more_ends_the_load_with_one_line(tmp_path: Path) -> None:
    load = scenario(
        group("both", count=10, publish=(Publishing(topic="t", rate_hz=40),), subscribe=(Subscribing(filter="t"),)),
        duration_s=60.0,
    )
    with NearcastBroker(tmp_path) as broker:
        events = str(tmp_path / "events")
        spec = LoadSpec(scenario=load, addresses=here(broker), events=events, seconds_per_file=0.5)
        process = start(tmp_path, spec, limit=f"ulimit -f {MAX_FILE_BLOCKS}; ")
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "events cannot be recorded: File too large; make room or record elsewhere" in err
    assert err.count("\n") == 1
    assert not json.loads(out)["complete"]
    assert list((tmp_path / "events").iterdir()) == [], "no half file"


def test_a_client_that_leaves_is_gone_once_everything_is_answered(tmp_path: Path) -> None:
    load = scenario(
        group("stays", subscribe=(Subscribing(filter="s/#", qos=2),)),
        group("leaves", subscribe=(Subscribing(filter="s/#", qos=2),), stop_s=2.0, leave=True),
        group("sends", start_s=1.0, stop_s=2.5, leave=True, publish=(Publishing(topic="s/1", rate_hz=100, qos=2),)),
        duration_s=3.0,
    )
    with NearcastBroker(tmp_path) as broker:
        process = start(tmp_path, LoadSpec(scenario=load, addresses=here(broker), events=str(tmp_path / "events")))
        wait_for(lambda: broker.metric("connections") == 1, "two of three have left")
        summary = finish(process)
    assert summary["complete"]
    assert summary["disconnections"] == summary["unacknowledged"] == summary["lost"] == summary["duplicated"] == 0
    events = list(read_events(tmp_path / "events"))
    left = {event.client: event.at_ns for event in events if event.kind == "disconnected"}
    assert set(left) == {"leaves", "sends"}
    published = {event.message_id for event in events if event.kind == "published"}
    got = {event.message_id for event in events if event.kind == "delivered" and event.client == "stays"}
    assert got == published
    fewer = {event.message_id for event in events if event.kind == "delivered" and event.client == "leaves"}
    assert 0 < len(fewer) < len(got)
    assert max(event.at_ns for event in events if event.kind == "delivered" and event.client == "leaves") <= left["leaves"]


def test_clients_that_roam_and_change_what_they_want(tmp_path: Path) -> None:
    """Two names of one broker stand for two gateways of a fabric: the session is found at either."""
    topology = Topology(
        name="t",
        sites=(Site(name="east"), Site(name="west")),
        links=(SiteLink(between=("east", "west")),),
        hosts=(Host(name="gate-1", site="east"), Host(name="gate-2", site="west"), Host(name="drone", site="east")),
    )
    wanted = Subscribing(filter="a/#", qos=1)
    load = Scenario(
        name="roaming",
        topology=topology,
        brokers=(Broker(host="gate-*"),),
        clients=(
            Clients(
                name="drone",
                host="drone",
                broker="gate-*",
                roam=True,
                clean_start=False,
                subscribe=(wanted,),
                changes=(Change(at_s=1.0, subscribe=(Subscribing(filter="b", qos=1),), unsubscribe=("a/#",)),),
                publish=(
                    Publishing(topic="a/{client}", rate_hz=50, qos=1),
                    Publishing(topic="b", rate_hz=50, qos=1),
                ),
            ),
        ),
        duration_s=2.0,
        settle_s=0.5,
    )
    with NearcastBroker(tmp_path) as broker:
        address = f"127.0.0.1:{broker.port()}"
        spec = LoadSpec(
            scenario=load,
            addresses={"gate-1": address, "gate-2": address},
            moves=(Move(at_s=0.5, host="drone", site="west"), Move(at_s=1.5, host="drone", site="east")),
            events=str(tmp_path / "events"),
        )
        summary = finish(start(tmp_path, spec))
    assert summary["complete"]
    assert summary["connections"] == 3
    assert summary["sent"] == summary["acknowledged"]
    assert summary["lost"] == 0, "the session went along"
    assert check(tmp_path / "events").problems == ()
    events = list(read_events(tmp_path / "events"))
    assert [event.path[0] for event in events if event.kind == "connected"] == ["gate-1", "gate-2", "gate-1"]
    [given_up] = [event for event in events if event.kind == "unsubscribed"]
    assert given_up.topic == "a/#"
    asked = {event.topic: event.at_ns for event in events if event.kind == "subscribed"}
    assert asked["a/#"] < given_up.at_ns < asked["b"]
    delivered = {event.topic for event in events if event.kind == "delivered" and event.at_ns > asked["b"] + 200_000_000}
    assert delivered == {"b"}
