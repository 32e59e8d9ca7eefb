"""Datagrams on real sockets: from one monitor to another, over IPv4, IPv6 and names, and what is in the way."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import statistics
import sys
import time
from typing import Any

import pytest

from nearcast.errors import ConfigError
from nearcast.membership.gossip import Gossip, GossipSettings
from nearcast.membership.monitoring import Monitor, MonitorSettings, Ponged
from nearcast.serving.arrivals import receive
from nearcast.serving.monitoring import MonitoringSockets, bind_udp

PATIENCE_S = 20.0


class Node:
    """A monitor on its sockets."""

    def __init__(self, name: str, host: str) -> None:
        self.monitor = Monitor(name, b"secret", random.Random(name), MonitorSettings(), standing=False)
        self.sockets = MonitoringSockets(self.monitor, bind_udp(host, 0, "port"), time.monotonic, self.flush)
        self.ponged = asyncio.Event()
        self.sockets.start()

    def flush(self) -> None:
        self.sockets.send()
        if any(isinstance(event, Ponged) for event in self.monitor.take_events()):
            self.ponged.set()

    async def reaches(self, address: str) -> None:
        self.ponged.clear()
        async with asyncio.timeout(PATIENCE_S):
            while not self.ponged.is_set():
                self.monitor.ping("other", address, time.monotonic())
                self.flush()
                try:
                    await asyncio.wait_for(self.ponged.wait(), 1.0)
                except TimeoutError:
                    continue  # UDP may lose it


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "host", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6"))]
)
def test_probes_are_answered(host: str) -> None:
    async def main() -> None:
        one, two = Node("one", host), Node("two", host)
        written = f"[{host}]" if ":" in host else host
        await one.reaches(f"{written}:{two.sockets.port}")
        one.sockets.close()
        two.sockets.close()

    asyncio.run(main())


def test_names_are_looked_up_and_nonsense_is_passed_over() -> None:
    async def main() -> None:
        one, two = Node("one", "127.0.0.1"), Node("two", "127.0.0.1")
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        nowhere = ("", "nowhere", "no.such.host.invalid:5", "127.0.0.1:port", ":7", "127.0.0.1:99999", "127.0.0.1:-1")
        for nonsense in (*nowhere, "localhost:²", "a..b:5", f"{'a' * 64}.example:5", "a\0b:5"):
            one.monitor.ping("nobody", nonsense, time.monotonic())
        await one.reaches(f"localhost:{two.sockets.port}")
        async with asyncio.timeout(PATIENCE_S):
            while one.sockets._resolving:
                await asyncio.wait(list(one.sockets._resolving.values()))
        gc.collect()  # a task that failed says so when it is gone
        assert failures == []
        one.sockets.close()
        two.sockets.close()

    asyncio.run(main())


def test_a_name_is_looked_up_again_beside_and_holds_up_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        one, two = Node("one", "127.0.0.1"), Node("two", "127.0.0.1")
        address = f"localhost:{two.sockets.port}"
        await one.reaches(address)
        loop = asyncio.get_running_loop()
        answer, asked = asyncio.Event(), asyncio.Event()
        look_up = loop.getaddrinfo

        async def slow(*given: Any, **options: Any) -> Any:
            asked.set()
            await answer.wait()
            return await look_up(*given, **options)

        monkeypatch.setattr(loop, "getaddrinfo", slow)
        monkeypatch.setattr(one.sockets, "_monotonic", lambda: time.monotonic() + 1_000.0)
        await one.reaches(address)
        await asked.wait()
        answer.set()
        one.sockets.close()
        two.sockets.close()

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux notes when a datagram came")
def test_a_datagram_says_how_long_it_waited() -> None:
    (bound,) = bind_udp("127.0.0.1", 0, "port")
    with bound, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        other.sendto(b"first", bound.getsockname())
        sent_at = time.monotonic()
        time.sleep(0.05)  # what a busy loop does
        data, source, waited_s = receive(bound, 100)
        assert (data, source) == (b"first", other.getsockname())
        assert 0.04 < waited_s <= time.monotonic() - sent_at + 0.01


def busy_round_trips_ms(busy_s: float, rounds: int) -> list[float]:
    """What two nodes on one loop measure of each other, where the loop does something else for so long again and again."""

    async def main() -> list[float]:
        secret = b"secret"
        found: list[float] = []
        gossips: list[Gossip] = []
        sockets: list[MonitoringSockets] = []
        settings = GossipSettings(interval_s=0.01, eager_interval_s=0.01)
        for name in ("one", "two"):
            bound = bind_udp("127.0.0.1", 0, "port")
            monitor = Monitor(name, secret, random.Random(name), MonitorSettings(), standing=False)
            address = f"127.0.0.1:{bound[0].getsockname()[1]}"
            gossip = Gossip(name, address, secret, settings, random.Random(name), time.monotonic(), life=1)
            gossips.append(gossip)
            sockets.append(MonitoringSockets(monitor, bound, time.monotonic, lambda: None, gossip))
            sockets[-1].start()
        gossips[0].know("two", gossips[1].address, time.monotonic())
        heard_at = -1.0
        async with asyncio.timeout(PATIENCE_S):
            while len(found) < rounds:
                gossips[0].tick(time.monotonic())
                sockets[0].send()
                time.sleep(busy_s)  # noqa: ASYNC251  # the loop is busy: that is the test
                await asyncio.sleep(0)
                for member in gossips[0].members():
                    if member.rtt_ms >= 0.0 and member.heard_at != heard_at:
                        heard_at = member.heard_at
                        found.append(member.rtt_ms)
        for each in sockets:
            each.close()
        return found

    return asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux notes when a datagram came")
def test_a_busy_loop_is_hardly_a_distance() -> None:
    """Two waits of 30 ms are on each round trip. The own one is no part of it, and of what the other end says that it took at
    most half of the rest: else it could say to be next door."""
    assert statistics.median(busy_round_trips_ms(0.03, 15)) < 25.0


def test_longer_datagrams_and_garbage_do_no_harm() -> None:
    async def main() -> None:
        one, two = Node("one", "127.0.0.1"), Node("two", "127.0.0.1")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for data in (b"", b"\0", bytes(64), bytes(60_000), b"\x03" * 5_000):
                stranger.sendto(data, ("127.0.0.1", two.sockets.port))
        await one.reaches(f"127.0.0.1:{two.sockets.port}")
        one.sockets.close()
        two.sockets.close()

    asyncio.run(main())


def test_a_port_that_is_taken_and_a_host_that_is_none_are_said() -> None:
    taken = bind_udp("127.0.0.1", 0, "port")
    with pytest.raises(ConfigError, match=r"cannot answer probes on 127\.0\.0\.1:.*is another node running"):
        bind_udp("127.0.0.1", taken[0].getsockname()[1], "port")
    for bound in taken:
        bound.close()
    with pytest.raises(ConfigError, match=r"cannot answer probes on no\.such\.host\.invalid"):
        bind_udp("no.such.host.invalid", 0, "port")
