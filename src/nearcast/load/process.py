"""All clients of one host in one event loop: starts them together, counts and records, ends in time or on a signal."""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import signal
import time
from collections.abc import Sequence

import uvloop

from nearcast.client import Message
from nearcast.errors import ConfigError, NearcastError
from nearcast.load.clients import LoadClient, Outgoing
from nearcast.load.meeting import begin
from nearcast.load.spec import LoadSpec, SharedClock
from nearcast.load.tally import Histogram, LoadSummary, Received
from nearcast.recording import EventWriter, Kind, MessageEvent, message_id
from nearcast.scenario import expansion
from nearcast.scenario.expansion import expand_clients, sites_of, topology_of
from nearcast.scenario.identity import decode_identity
from nearcast.scenario.roaming import itinerary
from nearcast.scenario.rules import unknown
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.schedule import publication_times
from nearcast.scenario.workload import Subscribing

CONNECTING_AT_ONCE = 100
"""Connections being opened at the same time: a thousand SYNs at once overflow a listener's queue, and cost a second each."""

FLUSH_S = 1.0
SPARE_DESCRIPTORS = 64
EARLY_NS = 1_000_000


def run_load(spec: LoadSpec) -> LoadSummary:
    """Run the clients of a specification (see :func:`~nearcast.load.spec.read_spec`) until the scenario is over or SIGTERM or
    SIGINT comes. What fails meanwhile is in the summary."""
    return uvloop.run(_Load(spec).run())


class _Load:
    """Counts, records, and ends. It is the :class:`~nearcast.load.clients.Observer` of its clients."""

    def __init__(self, spec: LoadSpec) -> None:
        if not isinstance(spec.scenario, Scenario):
            raise ConfigError("the scenario is only a name: read the specification with read_spec")
        self._spec = spec
        self._scenario = spec.scenario
        self._clock = SharedClock(spec.clock_offset_ns)
        everyone = expand_clients(self._scenario)
        self._descriptions = [client for client in everyone if spec.host is None or client.host == spec.host]
        if spec.host is not None and not self._descriptions:
            raise ConfigError(unknown("host with clients", spec.host, {client.host for client in everyone}))
        self._streams = {number: (client.name, stream) for client in everyone for stream, number in enumerate(client.numbers)}
        self._sites = sites_of(topology_of(self._scenario))
        self._places = {client.name: client.broker for client in self._descriptions}
        """Which host's broker or gateway each is at, or on its way to."""
        self._require_descriptors(len(self._descriptions))
        self._events = None
        if spec.events is not None:
            self._events = EventWriter(
                spec.events, spec.run, source=spec.host or "load", seconds_per_file=spec.seconds_per_file
            )
        self._late_ns = int(spec.late_ms * 1e6)
        self._oldest_ns = 0
        self._received: dict[tuple[str, int], Received] = {}
        self._ending = False
        self._failure: Exception | None = None
        self._over = asyncio.Event()
        self.sent = self.acknowledgements = self.refusals = self.skips = self.deliveries = self.duplicates = 0
        self.foreign = self.late = self.connections = self.connection_failures = self.disconnections = 0
        self._latency, self._acknowledgement, self._lag = Histogram(), Histogram(), Histogram()

    async def run(self) -> LoadSummary:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._over.set)
        began, began_cpu = time.monotonic(), time.process_time()
        start_ns = await self._start_ns()
        ready_ns = self._clock.now_ns()
        if self._spec.host is None or self._spec.meeting is not None or self._spec.start_ns is not None:
            # Nobody of this run sends before its start (but for a timer that comes early): what is older was retained, or
            # kept for a session, by a broker that saw a run before.
            self._oldest_ns = start_ns - EARLY_NS
        end_ns = start_ns + int((self._scenario.duration_s + self._scenario.settle_s) * 1e9)
        connecting = asyncio.Semaphore(CONNECTING_AT_ONCE)
        clients = [self._client(description, start_ns, connecting) for description in self._descriptions]
        # What is there now stays; looking through it again and again would hold everything up.
        gc.collect()
        gc.freeze()
        tasks = [
            loop.create_task(client.run(), name=description.name)
            for client, description in zip(clients, self._descriptions, strict=True)
        ]
        for task in tasks:
            task.add_done_callback(self._task_ended)
        flushing = loop.create_task(self._flush(), name="recording")
        complete = False
        try:
            async with asyncio.timeout((end_ns - self._clock.now_ns()) / 1e9):
                await self._over.wait()
        except TimeoutError:
            complete = True
        for client in clients:
            client.stop_publishing()
        waiting, answered = sum(client.waiting for client in clients), self.acknowledgements + self.refusals
        self._ending = True
        for task in (*tasks, flushing):
            task.cancel()
        await asyncio.gather(*tasks, flushing, return_exceptions=True)
        self._close_events()
        gc.unfreeze()
        elapsed = time.monotonic() - began
        return LoadSummary(
            run=self._spec.run,
            host=self._spec.host,
            complete=complete and self._failure is None,
            error=None if self._failure is None else " ".join(str(self._failure).split()),
            clients=len(clients),
            connections=self.connections,
            connection_failures=self.connection_failures,
            disconnections=self.disconnections,
            sent=self.sent,
            acknowledged=self.acknowledgements,
            refused=self.refusals,
            skipped=self.skips,
            # Some answers still came while the clients were ended.
            unacknowledged=waiting - (self.acknowledgements + self.refusals - answered),
            delivered=self.deliveries,
            duplicated=self.duplicates,
            lost=sum(received.missing for received in self._received.values()),
            dropped=sum(client.dropped for client in clients),
            foreign=self.foreign,
            latency=self._latency.times(),
            acknowledgement=self._acknowledgement.times(),
            lag=self._lag.times(),
            late=self.late,
            started_late_ms=round(max(0, ready_ns - start_ns) / 1e6, 3),
            recorded=0 if self._events is None else self._events.rows,
            recording_stalled_ms=0.0 if self._events is None else round(self._events.stalled_s * 1e3, 3),
            cpu_share=round((time.process_time() - began_cpu) / max(elapsed, 1e-9), 3),
        )

    async def _start_ns(self) -> int:
        if self._spec.meeting is None:
            return self._clock.now_ns() if self._spec.start_ns is None else self._spec.start_ns
        meeting = asyncio.create_task(begin(self._spec.meeting, self._spec.host or "load"), name="meeting")
        over = asyncio.create_task(self._over.wait(), name="over")
        try:
            await asyncio.wait((meeting, over), return_when=asyncio.FIRST_COMPLETED)
            return meeting.result() if meeting.done() else self._clock.now_ns()
        except NearcastError:
            self._close_events()
            raise
        finally:
            meeting.cancel()
            over.cancel()

    def _client(self, description: expansion.Client, start_ns: int, connecting: asyncio.Semaphore) -> LoadClient:
        url = self._url(description.broker, description.port)
        stops = [
            (at_s, host, self._url(host, description.port))
            for at_s, host in itinerary(description, self._sites, self._spec.moves)
        ]
        seed = self._spec.seed
        dues = [iter(publication_times(description, stream, seed)) for stream in range(len(description.publish))]
        rng = random.Random(f"{seed}/{description.name}/load")
        return LoadClient(description, url, dues, start_ns, self._clock, self, rng, connecting, stops)

    def _url(self, host: str, port: int) -> str:
        address = self._spec.addresses.get(host, host)
        return f"mqtt://{address}" if ":" in address else f"mqtt://{address}:{port}"

    def _require_descriptors(self, clients: int) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if clients + SPARE_DESCRIPTORS > hard:
            raise ConfigError(
                f"{clients:,} clients need as many file descriptors and this process may have {hard:,}: raise `ulimit -n`, or "
                "spread the clients over more hosts"
            )

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A client's task ends by cancellation, at the end, or when the client leaves; anything else ends the load."""
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())

    def _fail(self, error: BaseException | None) -> None:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if self._failure is None:
            internal = NearcastError(f"internal error: {error!r}")
            self._failure = error if isinstance(error, NearcastError) else internal
        self._over.set()

    async def _flush(self) -> None:
        """Events of quiet clients reach the disk too."""
        while self._events is not None:
            await asyncio.sleep(FLUSH_S)
            try:
                self._events.flush()
            except NearcastError as error:
                self._fail(error)
                return

    def _close_events(self) -> None:
        if self._events is not None:
            try:
                self._events.close()
            except NearcastError as error:
                self._failure = self._failure or error

    def _record(self, event: MessageEvent) -> None:
        if self._events is not None:
            try:
                self._events.write(event)
            except NearcastError as error:
                self._fail(error)

    # -- what the clients tell ---------------------------------------------------------------------------------------------

    def published(self, message: Outgoing) -> None:
        self.sent += 1
        lag_ns = max(0, message.sent_ns - message.due_ns)
        self._lag.add(lag_ns)
        self.late += lag_ns >= self._late_ns
        self._record_outgoing("published", message, message.sent_ns)

    def acknowledged(self, message: Outgoing) -> None:
        now_ns = self._clock.now_ns()
        self.acknowledgements += 1
        self._acknowledgement.add(now_ns - message.sent_ns)
        self._record_outgoing("acknowledged", message, now_ns)

    def refused(self, message: Outgoing, reason: str) -> None:
        self.refusals += 1
        self._record_outgoing("refused", message, self._clock.now_ns(), reason)

    def skipped(self, message: Outgoing, reason: str) -> None:
        self.skips += 1
        self._record_outgoing("skipped", message, self._clock.now_ns(), reason)

    def delivered(self, client: expansion.Client, message: Message) -> None:
        now_ns = self._clock.now_ns()
        identity = decode_identity(message.payload)
        stream = None if identity is None else self._streams.get(identity.publisher)
        if identity is None or stream is None or identity.sent_ns < self._oldest_ns:
            self.foreign += 1
            return
        self.deliveries += 1
        key = (client.name, identity.publisher)
        received = self._received.get(key)
        if received is None:
            received = self._received[key] = Received()
        if not received.add(identity.sequence):
            self.duplicates += 1
        elif not message.retain:
            self._latency.add(now_ns - identity.sent_ns)
        if self._events is None:
            return
        self._record(
            MessageEvent(
                kind="delivered",
                at_ns=now_ns,
                client=client.name,
                message_id=message_id(identity.publisher, identity.sequence),
                stream=stream[1],
                sequence=identity.sequence,
                topic=message.topic,
                publisher=stream[0],
                subscriber=client.name,
                sent_ns=identity.sent_ns,
                received_ns=now_ns,
                qos=message.qos,
                retained=message.retain,
                size_bytes=len(message.payload),
                path=(self._places[client.name],),
            )
        )

    def connected(self, client: expansion.Client) -> None:
        self.connections += 1
        self._record_connection("connected", client, None)

    def subscribed(self, client: expansion.Client, wanted: Sequence[Subscribing]) -> None:
        for each in wanted:
            self._record_connection("subscribed", client, None, each)

    def unsubscribed(self, client: expansion.Client, filters: Sequence[str]) -> None:
        for given_up in filters:
            self._record_connection("unsubscribed", client, None, Subscribing(filter=given_up))

    def moved(self, client: expansion.Client, broker: str) -> None:
        self._places[client.name] = broker

    def disconnected(self, client: expansion.Client, reason: str) -> None:
        if not self._ending:
            self.disconnections += 1
            self._record_connection("disconnected", client, reason)

    def left(self, client: expansion.Client) -> None:
        self._record_connection("disconnected", client, "left, as the scenario says")

    def failed_to_connect(self, client: expansion.Client, reason: str) -> None:
        self.connection_failures += 1
        self._record_connection("unconnected", client, reason)

    def _record_outgoing(self, kind: Kind, message: Outgoing, at_ns: int, reason: str | None = None) -> None:
        if self._events is None:
            return
        publishing = message.client.publish[message.stream]
        self._record(
            MessageEvent(
                kind=kind,
                at_ns=at_ns,
                client=message.client.name,
                message_id=message_id(message.number, message.sequence),
                stream=message.stream,
                sequence=message.sequence,
                topic=publishing.topic,
                publisher=message.client.name,
                due_ns=message.due_ns,
                sent_ns=None if kind == "skipped" else message.sent_ns,
                qos=publishing.qos,
                retained=publishing.retain,
                size_bytes=publishing.payload_bytes,
                path=(self._places[message.client.name],),
                reason=reason,
            )
        )

    def _record_connection(
        self, kind: Kind, client: expansion.Client, reason: str | None, wanted: Subscribing | None = None
    ) -> None:
        if self._events is None:
            return
        self._record(
            MessageEvent(
                kind=kind,
                at_ns=self._clock.now_ns(),
                client=client.name,
                topic=None if wanted is None else wanted.filter,
                qos=None if wanted is None else wanted.qos,
                path=(self._places[client.name],),
                reason=reason,
            )
        )
