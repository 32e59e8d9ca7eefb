"""The router's process: ``python -m nearcast.emulation.router_process CONTROL``. :class:`~nearcast.emulation.router.Router`
starts it.

Owns the descriptors, the timer and how the process is scheduled; obeys commands between two rounds of forwarding. Ends when
the control socket does. A command that cannot be obeyed is answered with an error and changes nothing.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import random
import select
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from nearcast.emulation.forwarding import Forwarder, Histogram
from nearcast.emulation.router import (
    Answer,
    AskStatistics,
    Command,
    Connect,
    CutOff,
    Disconnect,
    Durations,
    HealAll,
    HealCut,
    MoveEndpoint,
    RouterStatistics,
    SetAccess,
    SetLocal,
    Setup,
)
from nearcast.errors import NearcastError
from nearcast.network.network import Network
from nearcast.network.statistics import NetworkFigures
from nearcast.scenario.assembly import build_network

MAX_COMMAND_BYTES: Final = 64 * 1024 * 1024
"""A topology with a thousand hosts is below 1 MB."""

MAX_LINKS: Final = 10_000
"""Links in one statistics answer: the busiest."""

_COMMANDS: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


def main(arguments: list[str]) -> int:
    control = Control(socket.socket(fileno=int(arguments[0])))
    setup = None
    while setup is None:
        lines = control.receive()
        if lines is None:
            return 0
        setup = msgspec.json.decode(lines[0], type=Setup) if lines else None
    try:
        network, _ = build_network(setup.topology, random.Random(setup.seed))
        if len(network) != len(setup.devices):
            raise NearcastError(f"it has {len(network)} hosts and {len(setup.devices)} devices")
    except (NearcastError, ValueError, OSError) as problem:
        control.answer(Answer(error=f"the router cannot use this topology: {problem}"))
        return 1
    settings = setup.settings
    forwarder = Forwarder(
        network,
        [device.descriptor for device in setup.devices],
        [device.address for device in setup.devices],
        setup.topology.mtu_bytes,
        settings.max_held_packets,
        settings.max_held_bytes,
        settings.spin_s,
    )
    if settings.realtime:
        take_precedence()
    control.answer(Answer())
    control.stop_waiting()
    serve(forwarder, network, control)
    return 0


def serve(forwarder: Forwarder, network: Network, control: Control) -> None:
    """Forward packets and obey commands until the control socket ends."""
    timer = Timer()
    poller = select.epoll()
    poller.register(control.descriptor, select.EPOLLIN)
    poller.register(timer.descriptor, select.EPOLLIN | select.EPOLLET)
    for descriptor in forwarder.descriptors:
        poller.register(descriptor, select.EPOLLIN)
    # The loop makes no cycles; a collection in the middle of it would hold packets up.
    gc.collect()
    gc.freeze()
    gc.disable()
    while True:
        forwarder.serve(poller, timer.arm, timer.descriptor)
        if control.pending:
            control.flush()
        else:
            lines = control.receive()
            if lines is None:
                return
            for line in lines:
                control.answer(obey(line, forwarder, network))
        # An answer that its reader does not take holds up commands, never packets.
        poller.modify(control.descriptor, select.EPOLLOUT if control.pending else select.EPOLLIN)


def obey(line: bytes, forwarder: Forwarder, network: Network) -> Answer:
    """Do what a command says."""
    try:
        command = _COMMANDS.decode(line)
        return Answer(result=_perform(command, forwarder, network))
    except (NearcastError, msgspec.DecodeError) as problem:
        return Answer(error=str(problem))


def _perform(command: Command, forwarder: Forwarder, network: Network) -> Any:
    match command:
        case Connect():
            network.connect(command.a, command.b, command.conditions, command.one_way)
        case Disconnect():
            network.disconnect(command.a, command.b, command.one_way)
        case SetLocal():
            network.set_local(command.site, command.conditions)
        case SetAccess():
            network.set_access(command.endpoint, command.conditions)
        case MoveEndpoint():
            network.move(command.endpoint, command.site)
        case CutOff():
            return network.cut(command.sources, command.targets, command.one_way)
        case HealCut():
            network.heal(command.handle)
        case HealAll():
            network.heal_all()
        case AskStatistics():
            return statistics(forwarder, network, links=command.links)
    return None


def statistics(forwarder: Forwarder, network: Network, *, links: bool) -> RouterStatistics:
    figures = network.figures() if links else _totals(network)
    if len(figures.links) > MAX_LINKS:
        busiest = sorted(figures.links, key=lambda link: link.packets, reverse=True)[:MAX_LINKS]
        figures = msgspec.structs.replace(figures, links=tuple(busiest))
    return RouterStatistics(
        received=forwarder.received,
        received_bytes=forwarder.received_bytes,
        delivered=forwarder.delivered,
        held=len(forwarder.held),
        held_bytes=forwarder.held_bytes,
        malformed=forwarder.malformed,
        spoofed=forwarder.spoofed,
        misaddressed=forwarder.misaddressed,
        overflowed=forwarder.overflowed,
        refused=forwarder.refused,
        gone=forwarder.gone,
        lateness=_durations(forwarder.lateness),
        waiting=_durations(forwarder.waiting),
        starved_s=_starved_s(),
        cpu_s=time.process_time(),
        network=figures,
    )


def _totals(network: Network) -> NetworkFigures:
    return NetworkFigures(
        packets=network.packets,
        bytes=network.bytes,
        lost=network.lost,
        full=network.full,
        unreachable=network.unreachable,
        duplicated=network.duplicated,
        links=(),
    )


def _durations(histogram: Histogram) -> Durations:
    return Durations(counts=tuple(histogram.counts), largest_ms=histogram.largest_s * 1000.0)


def _starved_s() -> float:
    """How long this process was ready to run and had no core; 0 where the kernel does not count it."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def take_precedence() -> None:
    """Run before ordinary processes, as far as this process may. It sleeps whenever it has nothing to do."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        _shorten_time_slice()


def _shorten_time_slice() -> None:
    """Without privilege: ask for little at a time, for which Linux 6.12 and newer lets a process run soon."""
    number = {"x86_64": 314, "aarch64": 274}.get(platform.machine())  # sched_setattr: the C library has no function for it
    if number is not None:
        size, policy, flags, nice, priority, slice_ns = 48, os.SCHED_OTHER, 0, 0, 0, 100_000
        attributes = struct.pack("=IIQiIQQQ", size, policy, flags, nice, priority, slice_ns, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)


class Control:
    """Lines of the control socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""
        self.pending = b""
        """What is still to be sent."""
        self.descriptor = connection.fileno()

    def stop_waiting(self) -> None:
        """From now on nothing here waits for the other side."""
        self._connection.setblocking(False)

    def receive(self) -> list[bytes] | None:
        """The whole lines that have come, maybe none yet; None when the other side is gone."""
        try:
            data = self._connection.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data or len(self._received) > MAX_COMMAND_BYTES:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return lines

    def answer(self, answer: Answer) -> None:
        self.pending += msgspec.json.encode(answer) + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what the other side takes now."""
        try:
            while self.pending:
                self.pending = self.pending[self._connection.send(self.pending) :]
        except BlockingIOError:
            pass
        except OSError:
            self.pending = b""  # it is gone; the next receive says so


class _TimerSpecification(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Timer:
    """A kernel timer on ``CLOCK_MONOTONIC`` that epoll can wait for. (``epoll.poll`` itself counts milliseconds; Python has
    timers of its own since 3.13.)"""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor: int = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._specification = _TimerSpecification()
        self._reference = ctypes.byref(self._specification)
        self._set_time = libc.timerfd_settime
        self._set_time.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

    def arm(self, when: float) -> None:
        """Be ready at ``when``; a moment that has passed is now."""
        nanoseconds = int(when * 1e9)
        specification = self._specification
        specification.value_s = nanoseconds // 1_000_000_000
        specification.value_ns = nanoseconds % 1_000_000_000
        self._set_time(self.descriptor, 1, self._reference, None)  # 1: TFD_TIMER_ABSTIME


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
