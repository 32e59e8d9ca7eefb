"""The underlay with root: a network namespace per host, and the router that carries packets between them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from nearcast.emulation.control import Traffic
from nearcast.emulation.namespaces import HostNamespace, address_of, create_hosts
from nearcast.emulation.router import Durations, Router
from nearcast.emulation.supervision import describe_end
from nearcast.emulation.underlay import Streams, connects
from nearcast.errors import EmulationError
from nearcast.network.conditions import Conditions
from nearcast.scenario.topology import Topology

#: The lateness that is shown is of at least so many seconds.
_WINDOW_SECONDS = 1.0


class NamespaceUnderlay:
    """Hosts with a network of their own; unmodified programs, every protocol over IPv4."""

    mode = "namespaces"
    limits: tuple[str, ...] = ()

    def __init__(self, topology: Topology, seed: int) -> None:
        self._topology = topology
        self._seed = seed
        self._hosts: list[HostNamespace] = []
        self._router: Router | None = None
        self._failed: Callable[[str], None] | None = None
        self._window: tuple[float, Durations] | None = None
        self._lateness_ms = 0.0

    async def open(self, failed: Callable[[str], None]) -> None:
        self._failed = failed
        self._hosts = create_hosts(self._topology.host_names(), self._topology.mtu_bytes)
        self._router = Router.start(self._topology, self._hosts, seed=self._seed)

    async def close(self) -> None:
        self._failed = None
        if self._router is not None:
            self._router.close()
            self._router = None
        for host in self._hosts:
            host.close()
        self._hosts = []

    def address(self, host: int, seen_from: int) -> str:
        return str(address_of(host))

    def spawn(self, host: int, command: Sequence[str], streams: Streams, directory: str) -> int:
        started = self._hosts[host].spawn(
            command,
            stdin=streams.standard_input,
            stdout=streams.standard_output,
            stderr=streams.standard_error,
            cwd=directory,
        )
        # The keeper reaps all children itself; without this, subprocess would wait for it behind the keeper's back.
        started.returncode = 0
        return started.pid

    async def accepts(self, host: int, port: int) -> bool:
        probe = self._hosts[host].call(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        with probe:
            return await connects(probe, self.address(host, host), port)

    async def move(self, host: int, site: int) -> None:
        await asyncio.to_thread(self._running().move, host, site)

    async def connect(self, a: int, b: int, conditions: Conditions, one_way: bool) -> None:
        await asyncio.to_thread(self._running().connect, a, b, conditions, one_way)

    async def disconnect(self, a: int, b: int, one_way: bool) -> None:
        await asyncio.to_thread(self._running().disconnect, a, b, one_way)

    async def set_access(self, host: int, conditions: Conditions) -> None:
        await asyncio.to_thread(self._running().set_access, host, conditions)

    async def cut(self, sources: Sequence[int], targets: Sequence[int], one_way: bool) -> int:
        return await asyncio.to_thread(self._running().cut, list(sources), list(targets), one_way)

    async def heal(self, handle: int) -> None:
        await asyncio.to_thread(self._running().heal, handle)

    async def traffic(self) -> Traffic:
        if self._router is None:
            return Traffic()
        seen = await asyncio.to_thread(self._router.statistics, links=False)
        now = asyncio.get_running_loop().time()
        if self._window is None or now - self._window[0] >= _WINDOW_SECONDS:
            recent = seen.lateness if self._window is None else seen.lateness.since(self._window[1])
            self._lateness_ms = recent.percentile_ms(99)
            self._window = (now, seen.lateness)
        return Traffic(
            packets=seen.received,
            bytes=seen.received_bytes,
            lost=seen.network.lost,
            full=seen.network.full,
            unreachable=seen.network.unreachable,
            dropped=seen.overflowed + seen.refused + seen.unfetched,
            lateness_ms=round(self._lateness_ms, 3),
            doubts=tuple(seen.doubts()),
        )

    def reaped(self, process: int, code: int) -> bool:
        if self._router is None or process != self._router.process.pid:
            return False
        self._router.process.returncode = code
        if self._failed is not None:
            self._failed(f"the router ended by itself ({describe_end(code)}): no packet passes any more")
        return True

    def _running(self) -> Router:
        if self._router is None or self._router.process.returncode is not None:
            raise EmulationError("the router has ended: take this WAN down and start it again")
        return self._router
