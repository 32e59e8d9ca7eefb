"""Several programs in one simulated process: a host's brokers, gateways, clients, each told only what is its own.

A program has ports that it listens on, streams that it opened or accepted, flushes of the disk that it asked for, and a time
at which it wants to be looked at. It knows nothing of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

from nearcast.simulation.hosts import Host, Node
from nearcast.simulation.streams import Stream

TOKENS_PER_PROGRAM: Final = 4
"""Kinds of flushes that one program may ask for at a time."""

PAUSED_S: Final = 0.1
"""How soon it is looked again whether a paused process goes on."""


class Program:
    """One program. Override what is needed; all of this does nothing."""

    def start(self) -> None:
        """The process has begun."""

    def stop(self) -> None:
        """End in order: asked for while the process goes on with other programs, which this one may take its time for."""

    def tick(self) -> None:
        """The time of :meth:`next_deadline` has come, or an earlier answer of it."""

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next, on the host's own clock. Asked after everything that happens to this program."""
        return math.inf

    def accepted(self, stream: Stream) -> None:
        """A peer connected to a port of this program (``stream.port``)."""

    def opened(self, stream: Stream) -> None:
        """A stream that this program opened is connected."""

    def received(self, stream: Stream, data: bytes) -> None:
        """Bytes arrived."""

    def writable(self, stream: Stream) -> None:
        """A stream that was congested has room again."""

    def lost(self, stream: Stream, reason: str) -> None:
        """A stream ended, and not by this program."""

    def synced(self, purpose: int) -> None:
        """A flush that this program asked for is done."""

    def datagram(self, source: str, data: bytes) -> None:
        """A datagram came to a port of this program, from a host and port."""


class ProgramNode(Node):
    """A process of several programs.

    ``ports`` and ``datagram_ports`` say who listens where; a datagram is a tuple of the two ports and bytes. ``owners`` says
    whose stream is whose; a program enters the streams that it opens, and removes those that it closes.
    """

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.programs: list[Program] = []
        self.ports: dict[int, Program] = {}
        self.datagram_ports: dict[int, Program] = {}
        self.owners: dict[Stream, Program] = {}
        self._numbers: dict[int, int] = {}
        # When each program is looked at next, never later than it has something to do; others wait in the queue unseen.
        self._looks_at: list[float] = []
        self._spans: list[tuple[float, float | None]] = []
        self._queue: list[tuple[float, int]] = []

    def add(self, program: Program, start_s: float = 0.0, stop_s: float | None = None) -> None:
        """Run this one, too: from a time of the world on, until it is asked to end. Before the process starts."""
        self._numbers[id(program)] = len(self.programs)
        self.programs.append(program)
        self._looks_at.append(math.inf)
        self._spans.append((start_s, stop_s))

    def next_token(self) -> int:
        """The first number of a flush that the program added next may use."""
        return TOKENS_PER_PROGRAM * len(self.programs)

    def start(self) -> None:
        now_s = self.host.world.now
        begun = []
        for program, (start_s, stop_s) in zip(self.programs, self._spans, strict=True):
            if stop_s is not None and now_s >= stop_s:
                continue
            if start_s <= now_s:
                program.start()
                begun.append(program)
            else:
                self._at(start_s, program, program.start)
            if stop_s is not None:
                self._at(stop_s, program, program.stop)
        for program in begun:
            self.plan(program)

    def _at(self, when_s: float, program: Program, action: Callable[[], None]) -> None:
        """Do something at a time of the world, or as soon as the process goes on; not if it has ended by then."""
        world = self.host.world

        def act() -> None:
            if self.host.node is not self:
                return
            if self.host.paused:
                world.at(world.now + PAUSED_S, act)
                return
            action()
            self.plan(program)

        world.at(when_s, act)

    def woken(self) -> None:
        now = self.host.now
        queue = self._queue
        due: list[int] = []
        while queue and queue[0][0] <= now:
            when, number = heappop(queue)
            if when == self._looks_at[number]:  # else an earlier look was asked for since, and has been
                self._looks_at[number] = math.inf
                due.append(number)
        for number in due:
            self.programs[number].tick()
            self._look(number)
        self._wake()

    def accepted(self, stream: Stream, port: int) -> None:
        program = self.ports[port]
        self.owners[stream] = program
        program.accepted(stream)
        self.plan(program)

    def opened(self, stream: Stream) -> None:
        program = self.owners.get(stream)
        if program is not None:
            program.opened(stream)
            self.plan(program)

    def stream_received(self, stream: Stream, data: bytes) -> None:
        program = self.owners.get(stream)
        if program is not None:
            program.received(stream, data)
            self.plan(program)

    def writable(self, stream: Stream) -> None:
        program = self.owners.get(stream)
        if program is not None:
            program.writable(stream)
            self.plan(program)

    def closed(self, stream: Stream, reason: str) -> None:
        program = self.owners.pop(stream, None)
        if program is not None:
            program.lost(stream, reason)
            self.plan(program)

    def synced(self, token: int) -> None:
        program = self.programs[token // TOKENS_PER_PROGRAM]
        program.synced(token % TOKENS_PER_PROGRAM)
        self.plan(program)

    def received(self, source: int, message: object) -> None:
        if isinstance(message, tuple):
            target_port, source_port, data = message
            program = self.datagram_ports.get(target_port)
            if program is not None:
                program.datagram(f"{self.host.world.host_at(source).name}:{source_port}", data)
                self.plan(program)

    def send_datagram(self, source_port: int, address: str, data: bytes) -> None:
        """Send a datagram to a host and port; one that does not exist swallows it."""
        name, _, port = address.rpartition(":")
        world = self.host.world
        if world.has_host(name) and port.isdigit():
            self.host.send(world.host(name).index, (int(port), source_port, data), len(data))

    def plan(self, program: Program) -> None:
        """Something happened to a program."""
        self._look(self._numbers[id(program)])
        self._wake()

    def _look(self, number: int) -> None:
        # A deadline that moved away is found out when the old one comes; one that came nearer has to be known now.
        deadline = self.programs[number].next_deadline()
        if deadline < self._looks_at[number]:
            self._looks_at[number] = deadline
            heappush(self._queue, (deadline, number))

    def _wake(self) -> None:
        if self._queue:
            self.host.wake_at(self._queue[0][0])
