"""A simulated machine and the process on it: clock, timer, datagrams, disk; what a kill, a power cut and a pause do to them.

``Node`` is what a user writes and ``Host`` what it talks to. A host is powered or not, and its process is up or not: a kill
ends the process and leaves the machine (its kernel goes on with connections and disk), a crash ends both. Each start makes a
new ``Node``; only the disk connects it with the one before.
"""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from mypy_extensions import i64, mypyc_attr

from nearcast.errors import InvariantViolated, LocalProtocolError, NodeFailed, SimulationLimit
from nearcast.simulation.callbacks import ACCEPTED, CLOSED, OPENED, RECEIVED, STREAM_RECEIVED, SYNCED, WRITABLE
from nearcast.simulation.disks import Disk
from nearcast.simulation.streams import Stream
from nearcast.simulation.tracing import shortened

if TYPE_CHECKING:
    from nearcast.simulation.world import World

EPOCH_S: Final = 1_700_000_000.0
"""What every wall clock shows when a run begins."""

SOCKET_BUFFER_DATAGRAMS: Final = 256
"""Datagrams that wait for a paused process, at most; further ones are dropped. About what Linux's default buffer holds of
small ones."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Node:
    """What runs on a simulated host. Subclass it and override what you need; every callback here does nothing.

    A node is a process: it is made at boot and again at each restart, and knows nothing of its predecessor but what
    ``host.disk`` holds.
    """

    def __init__(self, host: Host) -> None:
        self.host = host

    def start(self) -> None:
        """The process has begun."""

    def received(self, source: int, message: object) -> None:
        """A datagram from the host with index ``source``."""

    def woken(self) -> None:
        """The time asked for with ``host.wake_at`` has come. Ask again if there is more to wait for."""

    def accepted(self, stream: Stream, port: int) -> None:
        """A peer connected to a port that the node listens on."""

    def opened(self, stream: Stream) -> None:
        """A stream of ``host.connect`` is connected."""

    def stream_received(self, stream: Stream, data: bytes) -> None:
        """Bytes in order; where one write ends and the next begins is not kept."""

    def writable(self, stream: Stream) -> None:
        """A stream that was congested has room again."""

    def closed(self, stream: Stream, reason: str) -> None:
        """A stream ended, and not by this node's own ``close`` or ``reset``. The reason is ``end`` (the peer closed it),
        ``reset``, ``refused`` (nobody listens there) or ``timeout``."""

    def synced(self, token: int) -> None:
        """Everything written before ``host.disk.sync(token)`` survives a power cut."""

    def stop(self) -> None:
        """The run ends in order; the last chance to tell the invariants something."""


class Host:
    """One machine. Its ``index`` is its address: what ``send`` and ``connect`` take and ``received`` gives."""

    def __init__(self, world: World, index: int, name: str) -> None:
        self.world = world
        self.index: i64 = index
        self.name = name
        self.up = False
        """Whether a process runs (paused counts)."""
        self.powered = True
        self.paused = False
        self.node: Node | None = None
        self.disk = Disk(self)
        self.starts: i64 = 0
        """How many processes there have been, this one included."""
        self.boots: i64 = 1
        """How often the machine was switched on."""
        self.running = False
        self.wake_number: i64 = -1
        self.factory: Callable[[Host], Node] | None = None
        self._rng: random.Random | None = None
        self._listening: set[int] = set()
        self.streams: dict[Stream, None] = {}
        # Clocks: at world time `_anchor` the monotonic one showed `_own_anchor` and the wall clock `_wall_anchor`.
        self._anchor = world.now
        self._own_anchor = world.now
        self._wall_anchor = EPOCH_S + world.now
        self._rate = 1.0
        self._floor = -math.inf
        self._wake_own = math.inf
        self._woken_in_pause = False
        self._deferred: list[tuple[int, Any, Any]] = []
        self._waiting_datagrams: i64 = 0

    def __repr__(self) -> str:
        return f"<Host {self.index} {self.name}>"

    # --- what a node uses ---

    @property
    def now(self) -> float:
        """Seconds on the machine's own monotonic clock: never goes back, runs at the machine's rate, begins at 0 when the
        machine boots (at the world's time when it is added). Not comparable between hosts."""
        own = self._own_anchor + (self.world.now - self._anchor) * self._rate
        return own if own > self._floor else self._floor

    @property
    def wall(self) -> float:
        """Seconds since the Unix epoch on the machine's own wall clock, which may be wrong and may jump."""
        return self._wall_anchor + (self.world.now - self._anchor) * self._rate

    @property
    def rng(self) -> random.Random:
        """Randomness from the run's seed and the host's name."""
        if self._rng is None:
            self._rng = random.Random(f"{self.world.seed}/host/{self.name}")
        return self._rng

    def send(self, target: int, message: object, size_bytes: int) -> None:
        """Send a datagram: it arrives once, not at all, or (where the network duplicates) twice. The message must be
        immutable, since it is not copied; ``size_bytes`` is what it would be on the wire without UDP and IP headers."""
        if self.up:
            self.world.send(self, target, message, size_bytes)

    def wake_at(self, when: float) -> None:
        """Call ``woken`` at ``when``, own clock (``now``). The earliest time asked for wins, later ones are forgotten."""
        if when >= self._wake_own or not self.up:
            return
        self._wake_own = when
        self._plan_wake()

    def listen(self, port: int) -> None:
        """Accept streams on this port until the process ends."""
        self._listening.add(port)

    def stop_listening(self, port: int) -> None:
        """Accept no more streams on this port."""
        self._listening.discard(port)

    def listens(self, port: int) -> bool:
        return port in self._listening

    def connect(self, target: int, port: int) -> Stream:
        """Open a stream. ``opened`` or ``closed`` is called later; writing before that is allowed."""
        if not self.up:
            raise LocalProtocolError(f"{self.name} is down and cannot connect")
        stream = Stream(self, self.world.host_at(target), port)
        stream.begin()
        return stream

    def note(self, text: str) -> None:
        """A line in the story of this run, which is kept only while tracing; pass what is cheap to make."""
        if self.world.tracer is not None:
            self.world.tracer.note(self, text)

    def observe(self, fact: object) -> None:
        """Tell the invariants something that happened here."""
        self.world.observe(self, fact)

    # --- what the world does ---

    def boot(self) -> None:
        """Begin a process, on a machine that is switched on for it if need be."""
        factory = self.factory
        if self.up or factory is None:
            return
        if not self.powered:
            self.powered = True
            self.boots += 1
            self._own_anchor = 0.0
            self._wall_anchor += (self.world.now - self._anchor) * self._rate
            self._anchor = self.world.now
            self._floor = -math.inf
        self.up = True
        self.paused = False
        self.running = True
        self.starts += 1
        if self.world.tracer is not None:
            self.world.tracer.line(self.index, "starts" if self.starts == 1 else f"starts, process number {self.starts}")
        try:
            node = factory(self)
            self.node = node
            node.start()
        except (InvariantViolated, SimulationLimit):
            raise
        except Exception as error:
            raise failure_of(self, error) from error

    def kill(self) -> None:
        """The process is gone at once. The kernel sends what was written to its streams and closes them."""
        if not self.up:
            return
        self._end_process()
        for stream in list(self.streams):
            stream.close()

    def crash(self) -> int:
        """The machine loses power; returns how many bytes its disk lost."""
        self._end_process()
        self.powered = False
        for stream in list(self.streams):
            stream.vanish()
        return self.disk.lose_power()

    def pause(self) -> None:
        if self.up:
            self.paused = True
            self.running = False

    def resume(self) -> None:
        """Go on; what came meanwhile comes now, in the order it came."""
        if not self.paused:
            return
        self.paused = False
        self.running = True
        starts = self.starts
        deferred = self._deferred
        self._deferred = []
        self._waiting_datagrams = 0
        try:
            for what, first, second in deferred:
                # A callback may end or pause the process through the world; what is left then goes its way.
                if self.starts == starts and self.up:
                    self.tell(what, first, second)
            if self._woken_in_pause and self.running and self.starts == starts:
                self._woken_in_pause = False
                self.wake()
        except (InvariantViolated, SimulationLimit):
            raise
        except Exception as error:
            raise failure_of(self, error) from error

    def skew(self, offset_s: float, rate: float) -> None:
        """The wall clock jumps, and both clocks run at another rate from now on."""
        if not rate > 0.0:
            raise LocalProtocolError(f"a clock rate must be above 0, not {rate}")
        now = self.world.now
        self._own_anchor += (now - self._anchor) * self._rate
        self._wall_anchor += (now - self._anchor) * self._rate + offset_s
        self._anchor = now
        self._rate = rate
        if self._wake_own < math.inf:
            self._plan_wake()

    def wake(self) -> None:
        """The planned moment is here."""
        if not self.running:
            self._woken_in_pause = self.paused
            return
        # The moment was computed from the own clock's time; rounding on the way back must not show an earlier one, or a
        # machine whose deadline this is would find nothing to do and ask for the same moment again, for ever.
        if self._wake_own < math.inf and self._wake_own > self._floor and self.now < self._wake_own:
            self._floor = self._wake_own
        self._wake_own = math.inf
        node = self.node
        if node is not None:
            node.woken()

    def tell(self, what: i64, first: Any, second: Any) -> None:
        """Call the node, or remember to while the process is paused."""
        node = self.node
        if node is None:
            return
        if self.paused:
            self._deferred.append((what, first, second))
            return
        if self.world.tracer is not None:
            self._trace(what, first, second)
        if what == RECEIVED:
            source: Host = first
            node.received(source.index, second)
        elif what == SYNCED:
            node.synced(first)
        else:
            stream: Stream = first
            if stream.finished:
                return  # Closed by this process while it could not be told.
            if what == STREAM_RECEIVED:
                stream.read()
            elif what == ACCEPTED:
                node.accepted(stream, stream.port)
            elif what == OPENED:
                node.opened(stream)
            elif what == WRITABLE:
                node.writable(stream)
            else:
                node.closed(stream, second)

    def keep_datagram(self, source: Host, message: object) -> bool:
        """A datagram for a paused process; False if its socket's buffer is full."""
        if self._waiting_datagrams >= SOCKET_BUFFER_DATAGRAMS:
            return False
        self._waiting_datagrams += 1
        self._deferred.append((RECEIVED, source, message))
        return True

    def plan_sync(self, when: float, operation: int, token: int) -> None:
        self.world.plan_sync(when, self, operation, token)

    def _plan_wake(self) -> None:
        now = self.world.now
        when = self._anchor + (self._wake_own - self._own_anchor) / self._rate
        self.wake_number = self.world.plan_wake(when if when > now else now, self)

    def _trace(self, what: i64, first: Any, second: Any) -> None:
        tracer = self.world.tracer
        if tracer is None or what in (SYNCED, WRITABLE, STREAM_RECEIVED):
            return
        if what == RECEIVED:
            tracer.line(self.index, f"takes, late, from {first.name}: {shortened(second)}")
            return
        name = first.remote_host.name
        if what == CLOSED:
            tracer.line(self.index, f"stream with {name}: ended: {second}")
        else:
            tracer.line(self.index, f"stream with {name}: {'accepted' if what == ACCEPTED else 'open'}")

    def _end_process(self) -> None:
        self.up = False
        self.running = False
        self.paused = False
        self.node = None
        self.wake_number = -1
        self._wake_own = math.inf
        self._woken_in_pause = False
        self._deferred = []
        self._waiting_datagrams = 0
        self._listening = set()


def failure_of(host: Host, error: Exception) -> NodeFailed:
    """An exception that a node let out, with the place it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    failure = NodeFailed(f"{host.name} raised {type(error).__name__}: {error}{place}", [host])
    failure.__cause__ = error  # mypyc forgets what `raise ... from` says
    return failure
