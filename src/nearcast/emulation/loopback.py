"""The underlay without root: hosts are loopback addresses, and TCP connections between them are relayed and delayed.

Every host has one address of its own, and another one for each peer that looks at it: connecting to the latter reaches a
relay, which thereby knows who connects to whom. ``{name}`` in a command is the right one of them. All of it is 127.77.0.0/16,
or the next such network if another WAN has that one.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import random
import resource
import socket
import subprocess
from collections.abc import Callable, Sequence

from nearcast.emulation.control import Traffic
from nearcast.emulation.namespaces import raise_file_limit
from nearcast.emulation.relay import Relay
from nearcast.emulation.underlay import Streams, connects
from nearcast.errors import EmulationError
from nearcast.network.conditions import Conditions
from nearcast.scenario.assembly import build_network
from nearcast.scenario.topology import Topology

#: Pairs of hosts share the 65,534 addresses of one /16.
MAX_HOSTS = 255

_FIRST_NETWORK, _LAST_NETWORK = 77, 126
_MAX_CONNECTIONS = 10_000
_ACCEPT_RETRY_SECONDS = 0.1


class LoopbackUnderlay:
    """Hosts as addresses of this machine."""

    mode = "loopback"

    def __init__(self, topology: Topology, seed: int) -> None:
        self._network, self._names = build_network(topology, random.Random(seed))
        if len(self._names) > MAX_HOSTS:
            raise EmulationError(
                f"loopback mode has room for {MAX_HOSTS} hosts, not for {len(self._names)}: run as root instead"
            )
        self._ports = _declared_ports(topology, self._names)
        self._second_byte = _FIRST_NETWORK
        self._claim: socket.socket | None = None
        self._listeners: list[socket.socket] = []
        self._relays: set[asyncio.Task[None]] = set()
        self.limits = _limits(self._names, self._ports)

    async def open(self, failed: Callable[[str], None]) -> None:
        raise_file_limit()
        count = len(self._names)
        needed = (count - 1) * sum(len(ports) for ports in self._ports)
        available = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if needed > available // 2:
            raise EmulationError(
                f"loopback mode needs {needed} listening sockets for {count} hosts, and this user may have {available}: "
                "raise `ulimit -n`, declare fewer ports, or run as root"
            )
        self._claim_network()
        for target, ports in enumerate(self._ports):
            for port in ports:
                for viewer in range(count):
                    if viewer != target:
                        self._listen(viewer, target, port)

    def _claim_network(self) -> None:
        """Take a /16 that no other WAN of this machine has; the claim ends with the process."""
        for second in range(_FIRST_NETWORK, _LAST_NETWORK + 1):
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                claim.bind(f"\0nearcast-loopback-{second}")
            except OSError:
                claim.close()
                continue
            self._claim, self._second_byte = claim, second
            return
        raise EmulationError("all loopback networks are in use by other WANs: end one (`nearcast wan list`)")

    def _listen(self, viewer: int, target: int, port: int) -> None:
        address = self.address(target, viewer)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listeners.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(128)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                reason = "a program on this machine listens on it at every address: end it, or use another port"
            elif error.errno == errno.EACCES:
                reason = "ports below 1024 are root's: use another port"
            else:
                reason = f"{error.strerror} (address {address})"
            raise EmulationError(f"loopback mode cannot use port {port}: {reason}") from error
        listener.setblocking(False)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener, viewer, target, port)

    def _accept(self, listener: socket.socket, viewer: int, target: int, port: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            # Out of descriptors: the backlog waits, and this loop does not spin.
            loop.remove_reader(listener)
            loop.call_later(_ACCEPT_RETRY_SECONDS, self._resume, listener, viewer, target, port)
            return
        if len(self._relays) >= _MAX_CONNECTIONS:
            client.close()
            return
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        relay = Relay(self._network, viewer, target, client)
        running = relay.run((self.address(target, target), port), self.address(viewer, target))
        task = loop.create_task(running, name=f"relay {self._names[viewer]} to {self._names[target]}:{port}")
        self._relays.add(task)
        task.add_done_callback(self._relays.discard)

    def _resume(self, listener: socket.socket, viewer: int, target: int, port: int) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener, viewer, target, port)

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()
        self._listeners = []
        relays = list(self._relays)
        for relay in relays:
            relay.cancel()
        await asyncio.gather(*relays, return_exceptions=True)
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def address(self, host: int, seen_from: int) -> str:
        pair = seen_from * len(self._names) + host + 1
        return str(ipaddress.IPv4Address((127 << 24) + (self._second_byte << 16) + pair))

    def spawn(self, host: int, command: Sequence[str], streams: Streams, directory: str) -> int:
        started = subprocess.Popen(  # noqa: S603
            command,
            stdin=streams.standard_input,
            stdout=streams.standard_output,
            stderr=streams.standard_error,
            cwd=directory,
            start_new_session=True,
        )
        # The keeper reaps all children itself; without this, subprocess would wait for it behind the keeper's back.
        started.returncode = 0
        return started.pid

    async def accepts(self, host: int, port: int) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            return await connects(probe, self.address(host, host), port)

    async def move(self, host: int, site: int) -> None:
        self._network.move(host, site)

    async def connect(self, a: int, b: int, conditions: Conditions, one_way: bool) -> None:
        self._network.connect(a, b, conditions, one_way)

    async def disconnect(self, a: int, b: int, one_way: bool) -> None:
        self._network.disconnect(a, b, one_way)

    async def set_access(self, host: int, conditions: Conditions) -> None:
        self._network.set_access(host, conditions)

    async def cut(self, sources: Sequence[int], targets: Sequence[int], one_way: bool) -> int:
        return self._network.cut(list(sources), list(targets), one_way)

    async def heal(self, handle: int) -> None:
        self._network.heal(handle)

    async def traffic(self) -> Traffic:
        network = self._network
        return Traffic(
            packets=network.packets,
            bytes=network.bytes,
            lost=network.lost,
            full=network.full,
            unreachable=network.unreachable,
            connections=len(self._relays),
        )

    def reaped(self, process: int, code: int) -> bool:
        return False


def _declared_ports(topology: Topology, names: Sequence[str]) -> list[tuple[int, ...]]:
    """Per host, the ports that others may connect to: its ``ports``, and those of its processes' ready checks."""
    declared: dict[str, set[int]] = {name: set() for name in names}
    for host in topology.hosts:
        for name in host.names():
            declared[name].update(host.ports)
    for process in topology.processes:
        if process.ready.port is not None:
            declared[process.host].add(process.ready.port)
    return [tuple(sorted(declared[name])) for name in names]


def _limits(names: Sequence[str], ports: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    reachable = [f"{name}:{'/'.join(map(str, own))}" for name, own in zip(names, ports, strict=True) if own]
    shown = ", ".join(reachable[:8]) + (", ..." if len(reachable) > 8 else "") if reachable else "none: give hosts `ports`"
    return (
        f"only TCP connections to declared ports are carried ({shown}); UDP and other ports are not",
        "a lost packet is a pause of a round trip and 200 ms; packets are never reordered or doubled",
        "connecting succeeds at once, and its round trip is waited for afterwards; a refusal is a reset, a cut is silence",
        "hosts share this machine's network: a process must listen on {its host}, not 0.0.0.0, and host names do not resolve",
        "delays are kept to about 2 ms, and congestion control is not modelled",
    )
