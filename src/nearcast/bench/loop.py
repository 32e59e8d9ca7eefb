"""The load generator: one thread, one epoll, closed loop for throughput and open loop for latency.

Owns when to write and when to read. Throughput runs are closed loops: a publisher may be ahead of its slowest subscriber by
a window only, so no broker is driven into dropping, and it writes in batches of a fixed size, so every broker gets the same
chunks whatever its speed. Latency runs are open loops: each message leaves at its due time whatever happened to the others.
What arrived, and whether it is right, is :mod:`nearcast.bench.deliveries`'s.
"""

from __future__ import annotations

import gc
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import numpy.typing as npt

from nearcast.bench.acks import PublisherAcks
from nearcast.bench.deliveries import Deliveries
from nearcast.bench.patterns import Pattern, Plan, make_plan
from nearcast.bench.process import cpu_seconds, waited_seconds
from nearcast.bench.results import LoadResult, summarise
from nearcast.bench.traffic import DISCONNECT, PublishBatch, PublishLayout
from nearcast.bench.verify import ExpectedHeads, SubscriberStream
from nearcast.bench.wire import RECEIVE_BYTES, Wire, open_session, subscribe
from nearcast.errors import ConfigError, ConnectionClosed

BATCH_BYTES = 64 * 1024
"""Most that a publisher writes at once."""
STREAM_BYTES = 512 * 1024
"""Most that is under way to one subscriber. Below the buffer that brokers usually grant a slow consumer."""
TOTAL_BYTES = 4 * 1024 * 1024
"""Most that is under way to all subscribers together, so that what is measured is a broker and not the machine's caches."""
STALL_SECONDS = 2.0
"""When nothing arrives for so long, what is under way is given up as lost."""
_MAX_PAUSE_SECONDS = 0.005
_MIN_PAUSE_SECONDS = 0.000_1
_SMALL_READ = 64
"""Messages per ready connection below which deliveries are worth collecting."""


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, to whom, for how long."""

    pattern: Pattern = Pattern.ONE_TO_ONE
    publishers: int = 1
    subscribers: int = 1
    qos: int = 0
    payload_bytes: int = 100
    seconds: float = 3.0
    warmup_seconds: float = 0.5
    window: int = 100
    """QoS 1 and 2: messages a publisher has unacknowledged; with MQTT 5 also the subscribers' Receive Maximum."""
    rate: float = 0.0
    """Messages per second, sent one by one at their due times, with latency measured; 0 sends as fast as the window lets."""
    persistent: bool = False
    """Whether subscribers use sessions that outlive their connections."""
    version: int = 4


class _Publisher:
    def __init__(self, wire_of: Callable[[PublisherAcks], Wire], batch: PublishBatch, qos: int) -> None:
        self.batch = batch
        self.acks = PublisherAcks(qos)
        self.wire = wire_of(self.acks)


class Load:
    """One run against one broker. Use :func:`run_load`."""

    def __init__(
        self,
        address: tuple[str, int],
        options: LoadOptions,
        plan: Plan,
        broker_pid: int | None,
        publish_at: tuple[str, int] | None = None,
    ) -> None:
        self._options = options
        self._plan = plan
        self._broker_pid = broker_pid
        self._address = address
        self._publish_at = publish_at or address
        layout = PublishLayout(len(plan.topics[0][0]), options.payload_bytes, options.qos, options.version)
        self._layout = layout
        self._buffer = bytearray(RECEIVE_BYTES + layout.packet_bytes)
        self._view = memoryview(self._buffer)
        self._epoll = select.epoll()
        self._wires: dict[int, Wire] = {}
        self._streams: dict[int, SubscriberStream] = {}
        self._publishers: list[_Publisher] = []
        self._by_descriptor: dict[int, _Publisher] = {}
        self._sessions: list[str] = []
        self._tag = f"{os.getpid():x}-{time.monotonic_ns() & 0xFFFFFF:x}"
        self._spin = (os.cpu_count() or 1) > 1
        self._idle_seconds = 0.0

        self._copies = plan.copies
        widest = max(len(own) for own in plan.sources)
        under_way = min(STREAM_BYTES, TOTAL_BYTES // len(plan.filters)) // layout.packet_bytes
        self._window = max(4, under_way // widest)
        if options.qos:
            self._burst = max(1, min(options.window // 4, self._window // 4, BATCH_BYTES // layout.packet_bytes))
            most = max(1, min(options.window, self._window, BATCH_BYTES // layout.packet_bytes))
        else:
            self._burst = most = max(1, min(self._window // 4, BATCH_BYTES // layout.packet_bytes))
        self._most = most
        # A rolling buffer longer than the window keeps all that is under way, so that subscribers of a single publisher can be
        # checked against the very bytes that were sent. It holds whole batches of QoS 0, which have one size.
        self._rolling = len(plan.topics[0]) == 1 and not plan.group
        self._kept = (self._window // most + 2) * most if self._rolling else most

        self._deliveries = Deliveries(plan)

    # --- opening and closing

    def open(self) -> None:
        options, plan = self._options, self._plan
        heads = ExpectedHeads(self._layout, plan.topics)
        for number, filters in enumerate(plan.filters):
            client_id = f"bench-{self._tag}-sub-{number}"
            peer = open_session(
                self._address,
                client_id,
                options.version,
                persistent=options.persistent,
                receive_maximum=options.window if options.qos and options.version == 5 else 0,
            )
            if options.persistent:
                self._sessions.append(client_id)
            subscribe(peer, filters, options.qos, options.version)
            stream = SubscriberStream(heads, self._deliveries.checker(number))
            wire = self._add(Wire(peer, stream.feed))
            self._streams[wire.descriptor] = stream
        for number, topics in enumerate(plan.topics):
            peer = open_session(self._publish_at, f"bench-{self._tag}-pub-{number}", options.version)
            batch = PublishBatch(self._layout, number, topics, self._kept, rolling=self._rolling)
            publisher = _Publisher(lambda acks, peer=peer: self._add(Wire(peer, acks.feed)), batch, options.qos)  # type: ignore[misc]
            self._publishers.append(publisher)
            self._by_descriptor[publisher.wire.descriptor] = publisher
        if self._rolling and not options.rate:
            for stream, sources in zip(self._streams.values(), plan.sources, strict=True):
                if len(sources) == 1:
                    stream.source = (sources[0], self._publishers[sources[0]].batch)

    def _add(self, wire: Wire) -> Wire:
        self._wires[wire.descriptor] = wire
        self._epoll.register(wire.descriptor, select.EPOLLIN)
        return wire

    def close(self) -> None:
        for wire in self._wires.values():
            if not wire.closed:
                try:
                    wire.peer.send(DISCONNECT)
                except OSError:
                    pass  # the broker is gone or its socket is full: closing says the same
            wire.close()
        self._epoll.close()
        for client_id in self._sessions:  # a clean start and end leaves no session behind
            try:
                with open_session(self._address, client_id, self._options.version) as peer:
                    peer.sendall(DISCONNECT)
            except (ConnectionClosed, OSError):
                break

    # --- one turn of the loop

    def _turn(self, timeout_seconds: float) -> tuple[int, int]:
        """Read what is there and answer it; returns messages received and connections that were ready."""
        events = self._epoll.poll(timeout_seconds)
        received = 0
        for descriptor, event in events:
            wire = self._wires[descriptor]
            if event & ~select.EPOLLOUT:
                stream = self._streams.get(descriptor)
                if stream is not None:
                    before = stream.received
                    wire.read(self._buffer, self._view)
                    received += stream.received - before
                    output = stream.output
                else:
                    wire.read(self._buffer, self._view)
                    output = self._by_descriptor[descriptor].acks.output
                if output:
                    wire.write_later(output)
                    output.clear()
                if wire.closed:
                    raise ConnectionClosed(self._why_closed(descriptor))
            if event & select.EPOLLOUT:
                wire.flush()
            self._watch(wire)
        return received, len(events)

    def _why_closed(self, descriptor: int) -> str:
        stream = self._streams.get(descriptor)
        who = "a publisher" if stream is None else "a subscriber"
        if stream is not None and stream.disconnected is not None:
            return f"the broker disconnected {who} with reason code {stream.disconnected:#04x}"
        return f"the broker closed the connection of {who}"

    def _watch(self, wire: Wire) -> None:
        if wire.blocked != wire.watched:
            wire.watched = wire.blocked
            self._epoll.modify(wire.descriptor, select.EPOLLIN | (select.EPOLLOUT if wire.watched else 0))

    def _pump(self) -> int:
        """Let every publisher whose window has room for a batch write it; returns the messages under way after that."""
        options = self._options
        under_way = 0
        for publisher, delivered, copies in zip(self._publishers, self._deliveries.progress(), self._copies, strict=True):
            acks = publisher.acks
            ahead = acks.sent - delivered
            if not publisher.wire.blocked:
                room = self._window - ahead
                if options.qos:
                    room = min(room, options.window - acks.in_flight)
                if room >= self._burst:
                    count = self._burst
                    if options.qos:
                        count = min(room, self._most, self._kept - acks.sent % self._kept if self._rolling else room)
                    batch = publisher.batch.build(acks.sent, count, time.monotonic_ns())
                    acks.sent += count
                    ahead += count
                    publisher.wire.write(batch)
                    self._watch(publisher.wire)
            under_way += ahead * copies
        return under_way

    @property
    def _received(self) -> int:
        return sum(stream.received for stream in self._streams.values())

    # --- throughput

    def run_throughput(self) -> LoadResult:
        options = self._options
        begin = time.monotonic()
        start = begin + options.warmup_seconds
        end = start + options.seconds
        quiet_since = begin
        received = under_way = 0
        ready = 1
        mark: tuple[float, int, tuple[float, float]] | None = None
        now = begin
        while now < end:
            if mark is None and now >= start:
                mark = (now, received, self._usage())
                self._idle_seconds = 0.0
            if ready:  # windows open only by what arrives
                under_way = self._pump()
            fresh, ready = self._turn(0.0 if self._spin else 0.01)
            received += fresh
            after = time.monotonic()
            if ready:
                quiet_since = after
                if fresh < _SMALL_READ * ready:
                    after = self._pause(under_way, received / (after - begin), after)
            else:
                self._idle_seconds += after - now
                if after - quiet_since > STALL_SECONDS:
                    self._deliveries.write_off([publisher.acks.sent for publisher in self._publishers])
                    quiet_since = after
                    ready = 1
            now = after
        first_now, first_received, first_usage = mark or (begin, 0, (0.0, 0.0))
        usage = _difference(self._usage(), first_usage)
        idle = self._idle_seconds
        self._drain()
        return self._result(now - first_now, received - first_received, usage, idle / (now - first_now))

    def _pause(self, under_way: int, rate: float, now: float) -> float:
        """Let small deliveries collect: at most an eighth of the time that the broker needs for what is under way.

        With QoS a message comes to the generator several times before its exchange is over, and may wait each time.
        A broker that writes packet by packet would otherwise make the generator read packet by packet and tire it out.
        """
        visits = 1 + 2 * self._options.qos
        seconds = min(_MAX_PAUSE_SECONDS, under_way / (8 * visits * rate)) if rate > 0 else 0.0
        if seconds < _MIN_PAUSE_SECONDS:
            return now
        time.sleep(seconds)
        after = time.monotonic()
        self._idle_seconds += after - now
        return after

    def _drain(self) -> None:
        """Wait for what is still under way, until it is all there or nothing more comes."""
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < STALL_SECONDS:
            outstanding = any(
                publisher.acks.sent > delivered or (self._options.qos and publisher.acks.in_flight)
                for publisher, delivered in zip(self._publishers, self._deliveries.progress(), strict=True)
            )
            if not outstanding and not any(wire.blocked for wire in self._wires.values()):
                return
            if self._turn(0.05)[1]:
                quiet_since = time.monotonic()

    # --- latency

    def run_latency(self) -> LoadResult:
        options = self._options
        if len(self._publishers) != 1:
            raise ConfigError("latency is measured with one publisher")
        publisher = self._publishers[0]
        wire, acks, batch = publisher.wire, publisher.acks, publisher.batch
        stream = next(iter(self._streams.values()))
        stream.times = []
        period_ns = int(1e9 / options.rate)
        begin = time.monotonic_ns()
        start = begin + int(options.warmup_seconds * 1e9)
        end = start + int(options.seconds * 1e9)
        due = begin
        late = 0
        samples: list[npt.NDArray[np.int64]] = []
        mark: tuple[int, int, tuple[float, float]] | None = None
        clock = time.monotonic_ns
        now = begin
        while now < end:
            if mark is None and now >= start:
                mark = (now, self._received, self._usage())
                samples.clear()
            if now >= due and not wire.blocked and (not options.qos or acks.in_flight < options.window):
                late += now - due > 1_000_000
                due += period_ns
                message = batch.build(acks.sent, 1, clock())
                acks.sent += 1
                wire.write(message)
                self._watch(wire)
            if self._turn(0.0)[0]:
                arrived = clock()
                samples += [arrived - sent.astype(np.int64) for sent in stream.times]
                stream.times.clear()
            now = clock()
        first_now, first_received, first_usage = mark or (begin, 0, (0.0, 0.0))
        usage = _difference(self._usage(), first_usage)
        received = self._received
        self._drain()
        all_samples = np.concatenate(samples) if samples else np.empty(0, dtype=np.int64)
        result = self._result((now - first_now) / 1e9, received - first_received, usage, 1.0)
        return msgspec.structs.replace(result, latency=summarise(all_samples, late))

    # --- results

    def _usage(self) -> tuple[float, float]:
        """CPU seconds that the broker has used so far, and that it has waited for."""
        if self._broker_pid is None:
            return 0.0, 0.0
        return cpu_seconds(self._broker_pid), waited_seconds(self._broker_pid)

    def _result(self, seconds: float, delivered: int, usage: tuple[float, float], idle: float) -> LoadResult:
        cpu, waited = usage
        known = self._broker_pid is not None and delivered > 0
        sent = [publisher.acks.sent for publisher in self._publishers]
        return LoadResult(
            seconds=seconds,
            delivered=delivered,
            messages_per_second=delivered / seconds,
            published_total=sum(sent),
            delivered_total=self._received,
            lost=self._deliveries.lost(sent),
            duplicates=self._deliveries.duplicates,
            order_violations=self._deliveries.order_violations,
            refused=sum(publisher.acks.refused for publisher in self._publishers),
            unexpected=sum(publisher.acks.unexpected + publisher.acks.disorder for publisher in self._publishers)
            + sum(stream.unexpected for stream in self._streams.values()),
            generator_idle=idle,
            cpu_us_per_message=cpu / delivered * 1e6 if known else None,
            cpu_share=cpu / seconds if known else None,
            wait_share=waited / seconds if known else None,
        )


def _difference(later: tuple[float, float], earlier: tuple[float, float]) -> tuple[float, float]:
    return later[0] - earlier[0], later[1] - earlier[1]


@contextmanager
def _no_collections() -> Iterator[None]:
    """Garbage collection would show up as the broker's latency."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run_load(
    address: tuple[str, int],
    options: LoadOptions,
    *,
    broker_pid: int | None = None,
    plan: Plan | None = None,
    publish_at: tuple[str, int] | None = None,
) -> LoadResult:
    """Connect, send, receive, check, disconnect. Publishers connect to ``publish_at``, where that is another broker."""
    if options.rate < 0 or options.seconds <= 0 or options.window < 1 or not 0 <= options.qos <= 2:
        raise ConfigError("rate must not be negative, seconds and window must be positive, qos is 0, 1 or 2")
    if options.version not in (4, 5):
        raise ConfigError("version is 4 (MQTT 3.1.1) or 5")
    if plan is None:
        plan = make_plan(options.pattern, options.publishers, options.subscribers, f"b{os.getpid() % 100_000:05d}")
    load = Load(address, options, plan, broker_pid, publish_at)
    try:
        load.open()
        with _no_collections():
            return load.run_latency() if options.rate else load.run_throughput()
    finally:
        load.close()
