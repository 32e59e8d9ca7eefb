"""The router between real hosts: what real packets experience, while it runs and when it does not."""

from __future__ import annotations

import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nearcast.emulation.measurement import line_topology, measure_accuracy, measure_echo, running
from nearcast.emulation.namespaces import QUEUE_PACKETS, HostNamespace
from nearcast.emulation.router import Router, RouterSettings
from nearcast.errors import EmulationError
from nearcast.network.conditions import Conditions
from nearcast.scenario.topology import Topology
from tests.integration.emulation.wans import calm, require_namespaces, wait_until

pytestmark = pytest.mark.integration

LEFT, RIGHT = 0, 1
SLACK_MS = 8.0
"""How late a median may be on a busy test machine; the bars are measured by ``nearcast experiment wan-accuracy``."""


class Line:
    """Two hosts at two sites, a UDP socket on each."""

    def __init__(self, hosts: list[HostNamespace], router: Router) -> None:
        self.hosts = hosts
        self.router = router
        self.left, self.right = (self.udp(host) for host in hosts)

    @staticmethod
    def udp(host: HostNamespace) -> socket.socket:
        def make() -> socket.socket:
            one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            one.bind((host.address, 9000))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_000_000)
            one.settimeout(10.0)
            return one

        return host.call(make)

    def send(self, data: bytes = b"x" * 100) -> None:
        self.left.sendto(data, (self.hosts[RIGHT].address, 9000))

    def send_back(self, data: bytes = b"x" * 100) -> None:
        self.right.sendto(data, (self.hosts[LEFT].address, 9000))

    def delay_ms(self) -> float:
        began = time.monotonic()
        self.send()
        self.right.recv(2000)
        return (time.monotonic() - began) * 1000.0

    def median_ms(self) -> float:
        return statistics.median(self.delay_ms() for _ in range(9))

    def settled(self, packets: int) -> None:
        """Wait until the router has read so many packets and holds none."""

        def gone() -> bool:
            seen = self.router.statistics()
            return seen.received >= packets and seen.held == 0

        wait_until(gone, f"{packets} packets through the router")

    def received(self) -> list[bytes]:
        found = []
        self.right.setblocking(False)
        while True:
            try:
                found.append(self.right.recv(2000))
            except BlockingIOError:
                self.right.settimeout(10.0)
                return found


@contextmanager
def line(conditions: Conditions, *, seed: int = 5, settings: RouterSettings | None = None) -> Iterator[Line]:
    require_namespaces()
    with running(line_topology(0.0), seed=seed, settings=settings) as (hosts, router, _):
        router.connect(LEFT, RIGHT, conditions)
        made = Line(hosts, router)
        try:
            yield made
        finally:
            made.left.close()
            made.right.close()


def test_delay() -> None:
    with line(Conditions(latency_ms=15.0)) as wan:
        assert min(wan.delay_ms() for _ in range(30)) >= 14.9
        assert calm(wan.median_ms, 15.0 + SLACK_MS) < 15.0 + SLACK_MS


def test_a_changed_link_counts_at_once() -> None:
    with line(Conditions(latency_ms=1.0)) as wan:
        wan.router.connect(LEFT, RIGHT, Conditions(latency_ms=40.0), one_way=True)
        assert wan.delay_ms() >= 39.9

        def back_ms() -> float:
            began = time.monotonic()
            wan.send_back()
            wan.left.recv(2000)
            return (time.monotonic() - began) * 1000.0

        assert calm(back_ms, 39.0) < 39.0


def test_loss_is_what_was_asked_for() -> None:
    with line(Conditions(loss=0.3)) as wan:
        for _ in range(1000):
            wan.send()
        wan.settled(1000)
        arrived = len(wan.received())
        seen = wan.router.statistics()
    assert 600 < arrived < 800
    assert seen.network.lost == 1000 - arrived
    assert seen.delivered == arrived


def test_duplicates_and_order() -> None:
    with line(Conditions(latency_ms=2.0, jitter_ms=1.0, duplicate=0.2)) as wan:
        for number in range(200):
            wan.send(number.to_bytes(2, "big"))
        wan.settled(200)
        arrived = [int.from_bytes(data, "big") for data in wan.received()]
    assert len(arrived) > 210
    assert sorted(set(arrived)) == list(range(200))
    assert list(dict.fromkeys(arrived)) == list(range(200)), "jitter alone does not reorder"


def test_a_cut_is_silent_and_can_be_one_way() -> None:
    with line(Conditions()) as wan:
        handle = wan.router.cut([LEFT], [RIGHT], one_way=True)
        wan.send()
        wan.send_back(b"still there")
        assert wan.left.recv(2000) == b"still there"
        wan.settled(2)
        assert wan.received() == []
        assert wan.router.statistics().network.unreachable == 1
        wan.router.heal(handle)
        wan.send(b"healed")
        assert wan.right.recv(2000) == b"healed"
        wan.router.cut([LEFT], [RIGHT])
        wan.send_back()
        wan.settled(4)
        wan.router.heal_all()
        wan.send_back(b"healed")
        assert wan.left.recv(2000) == b"healed"


def test_a_host_moves_with_its_connections() -> None:
    with line(Conditions(latency_ms=30.0)) as wan, tcp(wan) as (source, target):
        assert wan.delay_ms() >= 29.9
        source.sendall(b"before")
        assert target.recv(100) == b"before"
        wan.router.move(RIGHT, LEFT)
        assert calm(wan.median_ms, 29.0) < 29.0
        source.sendall(b"after")
        assert target.recv(100) == b"after"


def test_bandwidth_spreads_a_burst_and_a_full_queue_drops() -> None:
    with line(Conditions(bandwidth_mbps=8.0, queue_ms=50.0)) as wan:
        began = time.monotonic()
        for _ in range(100):
            wan.send(bytes(1000 - 28))  # 1,000 bytes on the link: 1 ms each
        sending_ms = (time.monotonic() - began) * 1000.0
        wan.settled(100)
        arrived = len(wan.received())
        elapsed_ms = (time.monotonic() - began) * 1000.0
        seen = wan.router.statistics()
    assert seen.network.full == 100 - arrived
    # 50 wait, and one more gets a place for every millisecond that sending took on a busy machine.
    assert 50 <= arrived <= 52 + sending_ms
    assert elapsed_ms >= 49.0


def test_tcp_survives_loss() -> None:
    payload = bytes(range(256)) * 2_000
    with line(Conditions(latency_ms=1.0, loss=0.01, reorder=0.02)) as wan, tcp(wan) as (source, target):
        received = bytearray()

        def read() -> None:
            while len(received) < len(payload):
                data = target.recv(1 << 16)
                if not data:
                    return
                received.extend(data)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        source.sendall(payload)
        reader.join(30.0)
        lost = wan.router.statistics().network.lost
    assert bytes(received) == payload
    assert lost > 0


@contextmanager
def tcp(wan: Line) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection from left to right."""
    address = (wan.hosts[RIGHT].address, 9001)
    with wan.hosts[RIGHT].call(lambda: socket.create_server(address)) as listener:
        source = wan.hosts[LEFT].call(lambda: socket.create_connection(address, 10.0))
        target, _ = listener.accept()
    target.settimeout(10.0)
    with source, target:
        yield source, target


def test_unwanted_packets_are_counted_and_harm_nobody() -> None:
    with line(Conditions()) as wan:
        wan.left.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        for target in ("10.77.0.99", "10.77.255.255", "224.0.0.251"):
            wan.left.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(wan.hosts[LEFT].address))
            wan.left.sendto(b"hello?", (target, 9000))
        with wan.hosts[LEFT].call(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)) as raw:
            header = struct.pack(
                ">BBHHHBBH4s4s", 0x45, 0, 28, 0, 0, 64, 17, 0, socket.inet_aton("10.77.0.2"), socket.inet_aton("10.77.0.2")
            )
            raw.sendto(header + bytes(8), (wan.hosts[RIGHT].address, 0))
        wan.settled(4)
        seen = wan.router.statistics()
        assert seen.misaddressed >= 3
        assert seen.spoofed == 1
        wan.send(b"fine")
        assert wan.right.recv(2000) == b"fine"


def test_what_the_router_may_hold_is_bounded() -> None:
    with line(Conditions(latency_ms=300.0), settings=RouterSettings(max_held_packets=50)) as wan:
        for _ in range(80):
            wan.send()
        wan.settled(80)
        assert len(wan.received()) == 50
        assert wan.router.statistics().overflowed == 30


def test_packets_that_an_overloaded_router_does_not_fetch_are_counted_and_told() -> None:
    with line(Conditions()) as wan:
        assert wan.router.statistics().doubts() == []
        wan.router.process.send_signal(signal.SIGSTOP)
        for _ in range(QUEUE_PACKETS + 1000):
            wan.send(b"x")
        wan.router.process.send_signal(signal.SIGCONT)
        wan.settled(QUEUE_PACKETS)
        seen = wan.router.statistics()
    assert 0 < seen.unfetched <= 1000
    assert seen.received + seen.unfetched == QUEUE_PACKETS + 1000
    assert any("could not keep up" in doubt for doubt in seen.doubts())


def test_a_host_without_its_device_does_not_take_the_router_along() -> None:
    program = shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        pytest.skip("the ip command is missing: install the Debian package iproute2")
    with line(Conditions()) as wan:
        assert wan.hosts[RIGHT].spawn([program, "link", "set", "wan0", "down"]).wait(30) == 0
        wan.send()
        wait_until(lambda: wan.router.statistics().refused == 1, "a packet that a host did not take")
        assert wan.hosts[RIGHT].spawn([program, "link", "set", "wan0", "up"]).wait(30) == 0
        wan.send(b"up again")
        assert wan.right.recv(2000) == b"up again"
        assert wan.hosts[RIGHT].spawn([program, "link", "delete", "wan0"]).wait(30) == 0
        wait_until(lambda: wan.router.statistics().gone == 1, "a device that is gone")
        before = wan.router.statistics()
        wan.send()
        wait_until(lambda: wan.router.statistics().refused == 2, "a packet that nobody takes")
        assert wan.router.statistics().cpu_s - before.cpu_s < 1.0


def test_an_idle_router_sleeps() -> None:
    with line(Conditions(latency_ms=500.0)) as wan:
        before = wan.router.statistics().cpu_s
        delay_ms = wan.delay_ms()
        used_ms = (wan.router.statistics().cpu_s - before) * 1000.0
    assert delay_ms >= 499.0
    assert used_ms < 50.0


def test_a_command_that_makes_no_sense_is_an_error_and_the_router_goes_on() -> None:
    with line(Conditions()) as wan:
        with pytest.raises(EmulationError, match="no endpoint 7"):
            wan.router.move(7, 0)
        with pytest.raises(EmulationError, match="no site 9"):
            wan.router.connect(0, 9, Conditions())
        wan.send()
        assert wan.right.recv(2000)


def test_a_topology_that_cannot_be_used_is_an_error() -> None:
    require_namespaces()
    with running(line_topology(1.0)) as (hosts, _, _), pytest.raises(EmulationError, match="cannot use this topology"):
        Router.start(Topology(name="empty", sites=line_topology(1.0).sites), hosts)


def test_a_router_that_was_killed_says_so() -> None:
    with line(Conditions()) as wan:
        wan.router.process.send_signal(signal.SIGKILL)
        wan.router.process.wait()
        with pytest.raises(EmulationError, match="the router ended"):
            wan.router.statistics()
        with pytest.raises(EmulationError, match="the router ended"):
            wan.router.move(0, 1)


def test_the_router_ends_with_its_user() -> None:
    with line(Conditions()) as wan:
        process = wan.router.process
        wan.router.close()
        wan.router.close()
        assert process.returncode == 0


def test_measuring() -> None:
    require_namespaces()

    def error_ms() -> float:
        result = measure_accuracy(duration_s=1.5)
        assert result.hosts == 20
        assert len(result.pairs) == 380
        assert 0.99 * result.sent <= result.received <= result.sent
        assert min(pair.error.median_ms for pair in result.pairs) > -0.1
        assert result.circumstances.router_cpu_share is not None
        assert result.error.median_ms > 0.0
        return result.error.median_ms

    def echo_ms() -> float:
        echo = measure_echo(latency_ms=3.0, count=20)
        assert echo.round_trip.median_ms >= 5.9
        return echo.round_trip.median_ms

    assert calm(error_ms, SLACK_MS) < SLACK_MS
    assert calm(echo_ms, 6.0 + 2 * SLACK_MS) < 6.0 + 2 * SLACK_MS


def test_programs_inside_talk_by_name() -> None:
    with (
        line(Conditions(latency_ms=5.0)) as wan,
        wan.hosts[RIGHT].call(lambda: socket.create_server(("0.0.0.0", 9002))) as listener,
    ):
        program = "import socket; s = socket.create_connection(('host-2', 9002)); print(s.recv(100).decode())"
        client = wan.hosts[LEFT].spawn([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        connection, (address, _) = listener.accept()
        with connection:
            connection.sendall(b"hello by name")
        text, _ = client.communicate(timeout=30)
    assert address == "10.77.0.1"
    assert text == "hello by name\n"
