"""Virtual time and everything in it: the loop that takes the next event and lets it happen.

One seed makes one run: events happen in the order of their times and, at one time, of their planning; all randomness comes
from generators seeded with the run's seed and a name; nothing looks at the real clock, at hash values or at addresses of
objects.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from nearcast.errors import InvariantViolated, LocalProtocolError, SimulationLimit
from nearcast.network.conditions import Conditions
from nearcast.network.links import FULL, LOST
from nearcast.network.network import Network
from nearcast.simulation.agenda import KINDS, Agenda
from nearcast.simulation.callbacks import SYNCED
from nearcast.simulation.hosts import Host, Node, failure_of
from nearcast.simulation.invariants import Invariant
from nearcast.simulation.segments import FIN, HEADER_BYTES, RST, SYN, Packet
from nearcast.simulation.streams import ANSWERED, SILENCE_TIMEOUT_S, Stream
from nearcast.simulation.tracing import Tracer, shortened

if TYPE_CHECKING:
    from nearcast.scenario.events import Event
    from nearcast.simulation.faults import Faults

DATAGRAM_HEADER_BYTES: Final = 28
"""IPv4 and UDP."""

# Kinds of events; below KINDS.
_DATAGRAM: Final = 0
_WAKE: Final = 1
_PACKET: Final = 2
_STREAM_TIMER: Final = 3
_SYNCED: Final = 4
_ACTION: Final = 5
_CHECK: Final = 6
_KIND_NAMES: Final = ("datagram", "wake", "stream packet", "stream timer", "disk flush", "action", "check")

# The digest stays below 2**42 and its factor below 2**20, so that compiled 64-bit arithmetic does not overflow.
_DIGEST_MASK: Final = (1 << 42) - 1
_DIGEST_FACTOR: Final = 999_983


class World:
    """A simulated deployment: a network, hosts on it, and a clock that only events move."""

    def __init__(self, network: Network, seed: int = 0, tracer: Tracer | None = None, host_names: Sequence[str] = ()) -> None:
        """``host_names`` are the endpoints that have joined the network already, in order; ``place`` puts nodes on them."""
        self.network = network
        self.seed = seed
        self.now = 0.0
        self.rng = random.Random(f"{seed}/world")
        """For protocols: where to put things, when to begin."""
        self.hosts: list[Host] = []
        self.invariants: list[Invariant] = []
        self.check_every_s = 1.0
        self.events: i64 = 0
        """How many events have happened."""
        self.max_events: i64 = 1 << 60
        self.max_events_at_once: i64 = 2_000_000
        """Without time passing; more than that, and it never will."""
        self.digest: i64 = 0
        """A hash of every event so far: what happened when and where, and what datagrams and stream packets contained (of
        datagrams that are objects of the protocol's own, only that they came)."""
        self.checkpoints: list[tuple[float, int, int]] = []
        """Time, events and digest at each check: where two runs that should be the same part."""
        self.segment_bytes: i64 = 1500 - HEADER_BYTES
        self.silence_timeout_s = SILENCE_TIMEOUT_S
        """How long a stream waits for an answer before it ends with ``timeout``."""
        self.tracer = tracer
        self.cause: i64 = -1
        """Number of the event that is happening."""
        self.agenda = Agenda()
        self._by_name: dict[str, Host] = {}
        self._site_numbers: dict[str, int] = {name: index for index, name in enumerate(network.sites)}
        self._faults: Faults | None = None
        self._checking = False
        if len(host_names) != len(network):
            raise LocalProtocolError(f"{len(network)} endpoints have joined the network, and {len(host_names)} have a name")
        for name in host_names:
            self._add_host(name, len(self.hosts))
        if tracer is not None:
            tracer.world = self

    # --- building ---

    def add(
        self, name: str, site: str, factory: Callable[[Host], Node], access: Conditions | None = None, start_s: float = 0.0
    ) -> Host:
        """A new host at a site, with a process on it; see ``place``."""
        if name in self._by_name:
            raise LocalProtocolError(f"two hosts are called {name}; place() puts a node on a host of the topology")
        self._add_host(name, self.network.join(self.site_number(site), access))
        return self.place(name, factory, start_s)

    def place(self, name: str, factory: Callable[[Host], Node], start_s: float = 0.0) -> Host:
        """Say what a host runs: ``factory`` makes its process, now (or at ``start_s``, if later) and after each restart."""
        host = self.host(name)
        if host.factory is not None:
            raise LocalProtocolError(f"{name} has a node already: one process runs on a simulated host")
        host.factory = factory
        self.at(start_s, host.boot)
        return host

    def site_number(self, name: str) -> int:
        number = self._site_numbers.get(name)
        if number is None:
            raise LocalProtocolError(f"there is no site {name}")
        return number

    def host(self, name: str) -> Host:
        """The host with this name."""
        host = self._by_name.get(name)
        if host is None:
            raise LocalProtocolError(f"there is no host {name}")
        return host

    def host_at(self, index: i64) -> Host:
        """The host with this index."""
        if index < 0 or index >= len(self.hosts):
            raise LocalProtocolError(f"there is no host {index}: the world has {len(self.hosts)}")
        return self.hosts[index]

    def has_host(self, name: str) -> bool:
        return name in self._by_name

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something at a moment of the world's time; one that has passed is now."""
        self.agenda.plan(when if when > self.now else self.now, _ACTION, action, None, None)

    def apply(self, event: Event) -> None:
        """A fault, a repair or a movement happens now, whatever its ``at_s`` says; its end is planned if it has one."""
        if self._faults is None:
            from nearcast.simulation.faults import Faults

            self._faults = Faults(self)
        self._faults.apply(event)

    @property
    def is_cut(self) -> bool:
        """Whether the network is cut anywhere now."""
        return self._faults is not None and self._faults.is_cut

    def schedule(self, event: Event) -> None:
        """Apply an event at its ``at_s``."""
        self.agenda.plan(max(event.at_s, self.now), _ACTION, lambda: self.apply(event), None, None)

    # --- running ---

    def run(self, until: float) -> None:
        """Let everything happen up to this moment. May be called again with a later one.

        Raises ``InvariantViolated`` where one is; a ``NodeFailed`` is one too, of a node that raised an exception.
        """
        if not self._checking:
            self._checking = True
            self.agenda.plan(self.now + self.check_every_s, _CHECK, None, None, None)
        host: Host | None = None
        agenda = self.agenda
        instant = self.now
        instant_began = self.events
        try:
            while True:
                entry = agenda.pop(until)
                if entry is None:
                    break
                when: float = entry[0]
                order: i64 = entry[1]
                kind = order % KINDS
                self.cause = order // KINDS
                self.events += 1
                if when > instant:
                    instant = when
                    instant_began = self.events
                    self.now = when
                elif self.events - instant_began > self.max_events_at_once:
                    self._stuck(kind, entry[2])
                if self.events > self.max_events:
                    raise SimulationLimit(
                        f"more than {self.max_events:,} events by {self.now:.3f} s of virtual time (--max-events allows more)"
                    )
                if kind == _DATAGRAM:
                    host = entry[2]
                    message = entry[4]
                    self._mix(when, host.index + _content(message))
                    source: Host = entry[3]
                    if self.tracer is not None:
                        self._trace_arrival(host, source, message)
                    if host.running:
                        node = host.node
                        if node is not None:
                            node.received(source.index, message)
                    elif host.paused:
                        self._keep(host, source, message)
                elif kind == _WAKE:
                    host = entry[2]
                    if host.wake_number == self.cause:
                        self._mix(when, host.index)
                        host.wake()
                elif kind == _PACKET:
                    host = entry[2]
                    packet: Packet = entry[4]
                    self._mix(when, host.index + zlib.crc32(packet.data))
                    if host.powered:
                        self._packet(host, entry[3], packet)
                elif kind == _STREAM_TIMER:
                    stream: Stream = entry[2]
                    host = stream.host
                    stream.timer()
                elif kind == _SYNCED:
                    host = entry[2]
                    self._mix(when, host.index)
                    self._synced(host, entry[3], entry[4])
                elif kind == _ACTION:
                    host = None
                    entry[2]()
                else:
                    host = None
                    self._check()
        except (InvariantViolated, SimulationLimit):
            raise
        except Exception as error:
            if host is None:
                raise
            raise failure_of(host, error) from error
        if until > self.now:
            self.now = until
        self.cause = -1

    def finish(self) -> None:
        """End the run in order: tell the nodes, then ask the invariants for the last time."""
        for host in self.hosts:
            node = host.node
            if node is not None:
                try:
                    node.stop()
                except InvariantViolated:
                    raise
                except Exception as error:
                    raise failure_of(host, error) from error
        for invariant in self.invariants:
            invariant.check()
        for invariant in self.invariants:
            invariant.finish()
        self._mix(self.now, int(self.rng.random() * 1e9))

    def observe(self, host: Host, fact: object) -> None:
        for invariant in self.invariants:
            invariant.observed(host, fact)

    def close(self) -> None:
        """Drop everything that refers to everything, so that memory is free at once."""
        self.agenda.clear()
        for host in self.hosts:
            host.node = None
            host.streams = {}
        self.hosts = []
        self._by_name = {}
        self.invariants = []
        self._faults = None

    # --- what hosts and streams use ---

    def send(self, source: Host, target: i64, message: object, size_bytes: i64) -> None:
        """Put a datagram on its way."""
        receiver = self.hosts[target] if 0 <= target < len(self.hosts) else self.host_at(target)
        network = self.network
        arrival = network.transit(source.index, target, size_bytes + DATAGRAM_HEADER_BYTES, self.now)
        if arrival < 0.0:
            if self.tracer is not None:
                self._trace_loss(source, receiver, shortened(message), arrival)
            return
        number = self.agenda.plan(arrival, _DATAGRAM, receiver, source, message)
        if self.tracer is not None:
            self.tracer.sent(source, receiver, number, message, arrival)
        second = network.take_duplicate()
        if second >= 0.0:
            self.agenda.plan(second, _DATAGRAM, receiver, source, message)

    def plan_wake(self, when: float, host: Host) -> i64:
        return self.agenda.plan(when, _WAKE, host, None, None)

    def plan_sync(self, when: float, host: Host, operation: int, token: int) -> None:
        self.agenda.plan(when, _SYNCED, host, (host.boots, host.starts, operation), token)

    def plan_stream_timer(self, when: float, stream: Stream) -> None:
        self.agenda.plan(when, _STREAM_TIMER, stream, None, None)

    def transmit(self, source: Host, target: Stream, packet: Packet) -> None:
        """Put a packet on its way to a known end of a stream."""
        self._transmit(source, target.host, target, packet)

    def transmit_stream(self, stream: Stream, packet: Packet) -> None:
        """Put a packet on its way to the other end, which a first packet has yet to make."""
        self._transmit(stream.host, stream.remote_host, stream.remote, packet)

    # --- inside ---

    def _add_host(self, name: str, index: int) -> None:
        if index != len(self.hosts):
            raise LocalProtocolError("every endpoint must join the network through the world")
        host = Host(self, index, name)
        self.hosts.append(host)
        self._by_name[name] = host

    def _transmit(self, source: Host, receiver: Host, target: Stream | None, packet: Packet) -> None:
        network = self.network
        arrival = network.transit(source.index, receiver.index, len(packet.data) + HEADER_BYTES, self.now)
        if arrival < 0.0:
            if self.tracer is not None:
                self._trace_loss(source, receiver, _described(packet), arrival)
            return
        number = self.agenda.plan(arrival, _PACKET, receiver, target, packet)
        if self.tracer is not None and (packet.data or packet.flags):
            self.tracer.carried(source, receiver, number, _described(packet))
        second = network.take_duplicate()
        if second >= 0.0:
            self.agenda.plan(second, _PACKET, receiver, target, packet)

    def _packet(self, host: Host, target: Stream | None, packet: Packet) -> None:
        """A stream's packet has reached a machine with power."""
        if target is None:
            # Sent before the sender knew who answers: by now that may be clear.
            target = packet.sender.remote
        if packet.flags & SYN and (target is None or (target.state > ANSWERED and packet.sender.state < ANSWERED)):
            self._connection(host, packet)
        elif target is not None:
            target.arrived(packet)

    def _connection(self, host: Host, packet: Packet) -> None:
        caller = packet.sender
        if not host.up or not host.listens(caller.port):
            self.transmit(host, caller, Packet(caller, RST, 0, b"", 0, 0))
            return
        stream = Stream(host, caller.host, caller.port)
        stream.answer(packet)

    def _synced(self, host: Host, stamp: tuple[int, int, int], token: int) -> None:
        boots, starts, operation = stamp
        if host.boots != boots or not host.powered:
            return
        host.disk.flushed(operation)
        if self.tracer is not None:
            self.tracer.line(host.index, f"disk: everything before flush {token} is safe")
        if host.up and host.starts == starts:
            host.tell(SYNCED, token, None)

    def _keep(self, host: Host, source: Host, message: object) -> None:
        if not host.keep_datagram(source, message) and self.tracer is not None:
            self.tracer.not_taken(host, source, self.cause, message, "the paused process's socket buffer is full")

    def _check(self) -> None:
        self.checkpoints.append((self.now, self.events, self.digest))
        for invariant in self.invariants:
            invariant.check()
        self.agenda.plan(self.now + self.check_every_s, _CHECK, None, None, None)

    def _mix(self, when: float, value: i64) -> None:
        nanoseconds: i64 = int(when * 1e9)
        mixed = (nanoseconds ^ (value * KINDS)) & _DIGEST_MASK
        self.digest = (self.digest * _DIGEST_FACTOR + mixed) & _DIGEST_MASK

    def _stuck(self, kind: i64, what: object) -> None:
        who = what.name if isinstance(what, Host) else "the run"
        raise SimulationLimit(
            f"time stands still at {self.now:.6f} s: {self.max_events_at_once:,} events at one instant, "
            f"the last a {_KIND_NAMES[kind]} of {who}"
        )

    def _trace_arrival(self, host: Host, source: Host, message: object) -> None:
        tracer = self.tracer
        if tracer is None:
            return
        if host.running:
            tracer.arrived(host, source, self.cause, message)
        elif not host.paused:
            why = "no process runs there" if host.powered else "the machine is off"
            tracer.not_taken(host, source, self.cause, message, why)

    def _trace_loss(self, source: Host, target: Host, message: str, outcome: float) -> None:
        tracer = self.tracer
        if tracer is None:
            return
        if outcome == LOST:
            why = "on the way"
        elif outcome == FULL:
            why = "a full queue before a slow link"
        else:
            why = self._faults.why_unreachable(source, target) if self._faults is not None else "no path leads there"
        tracer.lost(source, target, message, why)


def _content(message: object) -> i64:
    """A number for what a message says, the same in every process: not ``hash``, which is another one each time for text."""
    if isinstance(message, bytes):
        return zlib.crc32(message)
    if isinstance(message, str):
        return zlib.crc32(message.encode(errors="surrogatepass"))
    if isinstance(message, int):
        return message & 0xFFFF_FFFF
    if isinstance(message, float):
        return zlib.crc32(repr(message).encode())
    total: i64 = 0
    if isinstance(message, tuple):
        for part in message:
            total = (total * 31 + _content(part) + 1) & 0xFFFF_FFFF
    return total


def _described(packet: Packet) -> str:
    """A stream's packet, in words."""
    if packet.flags & RST:
        return "stream reset"
    if packet.flags & SYN:
        return "stream handshake"
    if packet.flags & FIN:
        return f"stream data, {shortened(packet.data)}, and its end" if packet.data else "the stream's end"
    return f"stream data, {shortened(packet.data)}" if packet.data else "stream acknowledgement"
