"""The router of the emulated WAN as its user holds it: starts the process, tells it what changes, asks what it saw.

One process forwards all packets between the hosts' devices (:mod:`nearcast.emulation.router_process`). This module owns the
handle, and the words that travel over the socket between: JSON lines, one answer to each command. A router's methods are those
of :class:`nearcast.network.network.Network`: what may be done to the model may be done to the router.

The handle blocks for as long as an answer takes, well below a millisecond unless the router is overloaded; it may be used from
several threads. The router ends when the socket does, so it cannot outlive its user.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, TypeVar, Union

import msgspec

from nearcast.emulation.namespaces import HostNamespace
from nearcast.errors import EmulationError
from nearcast.network.conditions import Conditions
from nearcast.network.statistics import NetworkFigures
from nearcast.scenario.topology import Topology

START_TIMEOUT_S: Final = 60.0
ANSWER_TIMEOUT_S: Final = 30.0
DOUBTFUL_MS: Final = 1.0
"""A run with more lateness than this at the 99th percentile shows the machine as much as the network."""


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the router works; the defaults were measured (docs/emulation-accuracy.md)."""

    max_held_packets: int = 200_000
    """Packets under way at once; more are dropped and counted as ``overflowed``. Too low drops on long fat paths."""

    max_held_bytes: int = 256 * 1024 * 1024
    """The same in bytes."""

    realtime: bool = True
    """Ask for real-time scheduling, so that busy processes do not delay packets; where refused, ask for a short time slice."""

    spin_s: float = 100e-6
    """Wake up so long before a packet is due, in seconds, and wait for the moment awake, as far as a quarter of the idle time
    goes. 0 saves a few percent of a core and makes packets a tenth of a millisecond late."""


class Device(msgspec.Struct, frozen=True):
    """A host as the router sees it; its index is its place in the list."""

    descriptor: int
    address: bytes


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """First line to the router."""

    topology: Topology
    devices: tuple[Device, ...]
    seed: int
    settings: RouterSettings


# -- commands: the methods of Network, and a question ----------------------------------------------------------------------


class _Command(msgspec.Struct, frozen=True, tag_field="do"):
    pass


class Connect(_Command, tag="connect", frozen=True):
    a: int
    b: int
    conditions: Conditions
    one_way: bool = False


class Disconnect(_Command, tag="disconnect", frozen=True):
    a: int
    b: int
    one_way: bool = False


class SetLocal(_Command, tag="local", frozen=True):
    site: int
    conditions: Conditions


class SetAccess(_Command, tag="access", frozen=True):
    endpoint: int
    conditions: Conditions


class MoveEndpoint(_Command, tag="move", frozen=True):
    endpoint: int
    site: int


class CutOff(_Command, tag="cut", frozen=True):
    """Answered with a handle."""

    sources: list[int]
    targets: list[int]
    one_way: bool = False


class HealCut(_Command, tag="heal", frozen=True):
    handle: int


class HealAll(_Command, tag="heal-all", frozen=True):
    pass


class AskStatistics(_Command, tag="statistics", frozen=True):
    """Answered with :class:`RouterStatistics`."""

    links: bool = True
    """Whether with a row for each link. Packets wait while those are made: about a microsecond each."""


Command = Union[Connect, Disconnect, SetLocal, SetAccess, MoveEndpoint, CutOff, HealCut, HealAll, AskStatistics]


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The line that follows a command. ``result`` is the command's own."""

    error: str | None = None
    result: Any = None


# -- statistics ------------------------------------------------------------------------------------------------------------


class Durations(msgspec.Struct, frozen=True, kw_only=True):
    """A histogram of durations: counts per bucket (microseconds up to 15, then eight buckets to each doubling)."""

    counts: tuple[int, ...]
    largest_ms: float
    """Since the router's start, also in a difference."""

    def percentile_ms(self, percent: float) -> float:
        """Upper edge of the bucket that holds this percentile; 0 when nothing was counted."""
        wanted = sum(self.counts) * percent / 100.0
        seen = 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return min(_upper_edge_us(bucket) / 1000.0, self.largest_ms)
        return 0.0

    def since(self, before: Durations) -> Durations:
        """What was counted after ``before`` was."""
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return Durations(counts=counts, largest_ms=self.largest_ms)


def _upper_edge_us(bucket: int) -> int:
    if bucket < 16:
        return bucket + 1
    octave, mantissa = bucket // 8 - 1, bucket % 8 + 8
    return int((mantissa + 1) << octave)


class RouterStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Everything since the router's start. A packet that was received is counted once more by what became of it."""

    received: int
    received_bytes: int
    delivered: int
    """Written to a host's device, duplicates included."""

    held: int
    """Under way now."""

    held_bytes: int
    malformed: int
    """Not a whole IPv4 packet: IPv6, garbage, truncated."""

    spoofed: int
    """Not from the host's own address."""

    misaddressed: int
    """To no host's address: multicast, broadcast, unknown, its own."""

    overflowed: int
    """The router held as much as it may. Above zero, the run shows the router, not the network."""

    refused: int
    """The host's kernel did not take them: its device is down or gone."""

    gone: int
    """Devices that somebody inside the host has removed."""

    lateness: Durations
    """Per packet: how much later than due it was written."""

    waiting: Durations
    """Per packet: an upper bound on how long it waited in its device because the router was busy."""

    starved_s: float
    """How long the router was ready to run and had no core."""

    cpu_s: float
    """Processor time the router has used."""

    network: NetworkFigures
    """What the network model did to packets, all together and by link."""

    unfetched: int = 0
    """Dropped by hosts' kernels because the router, overloaded, did not fetch them in time. They are not in ``received``."""

    def doubts(self) -> list[str]:
        """Why what ran on this network should not be trusted, a sentence each; empty when nothing speaks against it."""
        found = []
        if self.unfetched:
            found.append(f"{self.unfetched:,} packets were dropped because the router could not keep up")
        if self.overflowed:
            found.append(f"{self.overflowed:,} packets were dropped because the router held as many as it may")
        late_ms = self.lateness.percentile_ms(99)
        if late_ms > DOUBTFUL_MS:
            found.append(f"1 % of the packets left the router {late_ms:.1f} ms late or later")
        waited_ms = self.waiting.percentile_ms(99)
        if waited_ms > DOUBTFUL_MS:
            found.append(f"1 % of the packets may have waited {waited_ms:.1f} ms or longer for the router to look at them")
        return found


T = TypeVar("T")


class Router:
    """A running router."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, hosts: Sequence[HostNamespace]) -> None:
        self.process = process
        self._hosts = tuple(hosts)
        self._control = control
        self._lock = threading.Lock()
        self._received = b""
        self._broken = ""

    @classmethod
    def start(
        cls, topology: Topology, hosts: Sequence[HostNamespace], *, seed: int = 0, settings: RouterSettings | None = None
    ) -> Router:
        """Start a router between ``hosts``, which are the topology's hosts in its order; returns when it forwards packets."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", "-m", "nearcast.emulation.router_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *(host.tun_fd for host in hosts)],
                start_new_session=True,  # Ctrl-C is for its user
            )
        router = cls(process, ours, hosts)
        setup = Setup(
            topology=topology,
            devices=tuple(Device(host.tun_fd, ipaddress.IPv4Address(host.address).packed) for host in hosts),
            seed=seed,
            settings=settings or RouterSettings(),
        )
        try:
            router._exchange(setup, None, START_TIMEOUT_S)
        except BaseException:
            router.close()
            raise
        return router

    def connect(self, a: int, b: int, conditions: Conditions, one_way: bool = False) -> None:
        """Give the link between two sites conditions, as :meth:`Network.connect` does."""
        self._exchange(Connect(a, b, conditions, one_way), None)

    def disconnect(self, a: int, b: int, one_way: bool = False) -> None:
        self._exchange(Disconnect(a, b, one_way), None)

    def set_local(self, site: int, conditions: Conditions) -> None:
        self._exchange(SetLocal(site, conditions), None)

    def set_access(self, endpoint: int, conditions: Conditions) -> None:
        self._exchange(SetAccess(endpoint, conditions), None)

    def move(self, endpoint: int, site: int) -> None:
        self._exchange(MoveEndpoint(endpoint, site), None)

    def cut(self, sources: list[int], targets: list[int], one_way: bool = False) -> int:
        return self._exchange(CutOff(sources, targets, one_way), int)

    def heal(self, handle: int) -> None:
        self._exchange(HealCut(handle), None)

    def heal_all(self) -> None:
        self._exchange(HealAll(), None)

    def statistics(self, *, links: bool = True) -> RouterStatistics:
        """What it saw. Ask without links while something is measured: making thousands of rows holds packets up."""
        seen = self._exchange(AskStatistics(links), RouterStatistics)
        return msgspec.structs.replace(seen, unfetched=sum(host.dropped_packets() for host in self._hosts))

    def close(self) -> None:
        """End the router; packets under way are lost. Closing twice is fine."""
        self._control.close()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _exchange(self, message: msgspec.Struct, kind: type[T] | None, timeout_s: float = ANSWER_TIMEOUT_S) -> T:
        """Send a line, wait for its answer, give its result as ``kind``."""
        with self._lock:
            if self._broken:
                raise EmulationError(self._broken)
            try:
                self._control.settimeout(timeout_s)
                self._control.sendall(msgspec.json.encode(message) + b"\n")
                while b"\n" not in self._received:
                    data = self._control.recv(1 << 16)
                    if not data:
                        raise EmulationError(self._epitaph())
                    self._received += data
            except TimeoutError:
                # A late answer would be taken for the next one's.
                self._broken = f"the router did not answer within {timeout_s:g} s: the machine is overloaded"
                raise EmulationError(self._broken) from None
            except OSError as problem:
                raise EmulationError(f"{self._epitaph()} ({problem.strerror or problem})") from problem
            line, _, self._received = self._received.partition(b"\n")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error is not None:
            raise EmulationError(answer.error)
        return msgspec.convert(answer.result, type=kind)

    def _epitaph(self) -> str:
        """How it ended. Only looks: the keeper, which reaps all its children, is to hear of this end as well."""
        deadline = time.monotonic() + 1.0
        while self.process.returncode is None and time.monotonic() < deadline:
            try:
                seen = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return "the router ended"
            if seen is not None:
                code = seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
                return f"the router ended (exit code {code})"
            time.sleep(0.01)
        if self.process.returncode is None:
            return "the router closed its control socket"
        return f"the router ended (exit code {self.process.returncode})"
