"""What a WAN stands on: the seam between the keeper and the two ways of giving hosts a network.

:mod:`nearcast.emulation.namespaced` gives each host a network namespace and routes its packets;
:mod:`nearcast.emulation.loopback` gives it loopback addresses and relays its connections. The keeper does not know which one
it has.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nearcast.emulation.control import Traffic
from nearcast.network.conditions import Conditions


@dataclass(frozen=True)
class Streams:
    """Standard input, output and error of a process, as descriptors of the caller's, who closes them."""

    standard_input: int
    standard_output: int
    standard_error: int


class Underlay(Protocol):
    """Hosts with a network between them. Hosts and sites are numbers: their place in the topology."""

    @property
    def mode(self) -> str:
        """``namespaces`` or ``loopback``."""

    @property
    def limits(self) -> tuple[str, ...]:
        """What it cannot show, a sentence each."""

    async def open(self, failed: Callable[[str], None]) -> None:
        """Make the hosts. ``failed`` is called if the network later ends by itself."""

    async def close(self) -> None:
        """Remove the hosts; their processes have ended."""

    def address(self, host: int, seen_from: int) -> str:
        """Where ``seen_from`` reaches ``host``."""

    def spawn(self, host: int, command: Sequence[str], streams: Streams, directory: str) -> int:
        """Start a program on a host in a session of its own; returns its process number. OSError if it cannot be executed."""

    async def accepts(self, host: int, port: int) -> bool:
        """Whether a TCP connection to the host's own address is accepted, tried on the host itself."""

    async def move(self, host: int, site: int) -> None: ...

    async def connect(self, a: int, b: int, conditions: Conditions, one_way: bool) -> None:
        """Give the link between two sites these conditions."""

    async def disconnect(self, a: int, b: int, one_way: bool) -> None:
        """Take a link away that the topology did not have."""

    async def set_access(self, host: int, conditions: Conditions) -> None: ...

    async def cut(self, sources: Sequence[int], targets: Sequence[int], one_way: bool) -> int:
        """Let nothing pass between hosts; returns a handle for :meth:`heal`."""

    async def heal(self, handle: int) -> None: ...

    async def traffic(self) -> Traffic: ...

    def reaped(self, process: int, code: int) -> bool:
        """A child of the keeper ended: whether it was one of the underlay's own."""


async def connects(probe: socket.socket, address: str, port: int) -> bool:
    """Whether somebody accepts connections there, as seen from the network that ``probe`` was made in."""
    probe.setblocking(False)
    try:
        async with asyncio.timeout(1.0):
            await asyncio.get_running_loop().sock_connect(probe, (address, port))
    except (OSError, TimeoutError):
        return False
    return True
