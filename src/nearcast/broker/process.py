"""The broker as a process: the pure engine, wired to sockets, disk, clock and signals.

:class:`Broker` owns every moving part and the order in which they start and stop. It decides nothing about MQTT.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from nearcast import __version__
from nearcast.broker import reloading
from nearcast.broker.access_rules import load_access_list
from nearcast.broker.authentication import BrokerAuthenticator, ExtendedAuthenticator
from nearcast.broker.bulk import BulkPort, BulkTransport
from nearcast.broker.journal import Journal, open_journal
from nearcast.broker.links import Links, refuse_ownerless
from nearcast.broker.listeners import BoundListener
from nearcast.broker.output import Outbox
from nearcast.broker.passwords import PasswordTable, load_passwords
from nearcast.broker.rates import Rates
from nearcast.broker.scram import METHOD as SCRAM
from nearcast.broker.scram import ScramSha256
from nearcast.broker.spool_files import clear_spool
from nearcast.broker.stalls import StallWatch
from nearcast.broker.sys_topics import SysTopics
from nearcast.broker.topic_keeping import KeptTopics
from nearcast.broker.topics import check_configured
from nearcast.broker.transports import ClientTransport, peer_name
from nearcast.clock import Clock, SystemClock
from nearcast.config import LINK_KINDS, SECURE_KINDS, BrokerConfig, Security
from nearcast.errors import NearcastError, StorageUnavailable
from nearcast.fabric.channels import forget_peers
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Peer, Verdict
from nearcast.mqtt.connection import CONNECTED, Connection
from nearcast.mqtt.engine import Engine
from nearcast.serving import logs, running
from nearcast.serving.admission import bounded_connections, connect_rate, is_loopback
from nearcast.serving.certificates import server_context
from nearcast.serving.sockets import bind_tcp

if TYPE_CHECKING:
    from nearcast.broker.recording import ProcessedMessages

TICK_SECONDS = 0.1
"""How exactly time-outs are kept. One timer serves all connections."""

CHECKS_EVERY_TICKS = 10
"""Ticks between looks at stalled clients and suppressed log lines."""


class Broker:
    """One broker. ``start`` and ``stop`` for embedding; ``serve`` adds signals and returns when told to stop.

    ``reload_config`` gives the configuration anew at SIGHUP. When the disk fails, listeners and connections are closed at
    once; whoever embeds a broker sees that in :meth:`health`, and still calls ``stop``.
    """

    def __init__(
        self,
        config: BrokerConfig,
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        reload_config: Callable[[], BrokerConfig] | None = None,
    ) -> None:
        self.config = config
        self._clock = clock if clock is not None else SystemClock()
        self.monotonic = self._clock.monotonic
        self._reload_config = reload_config
        self.events = logs.LimitedEvents(self._clock, config.observability.log_events_per_second)
        self._authenticator = BrokerAuthenticator(self._clock, self._authenticated, self._call_on_loop)
        self._authenticator.configure(config.security, config.listeners, _load_passwords(config.security))
        self._authenticator.register(SCRAM, ScramSha256(lambda: self._authenticator.passwords))
        wall_offset = self._clock.wall() - self._clock.monotonic()
        self.access = load_access_list(config.security.acl, config.security.acl_file)
        check_configured(config.topics, config.persistence.directory)
        self.engine = Engine(
            config.engine_settings(),
            self._authenticator,
            self.access,
            rng if rng is not None else random.Random(secrets.randbits(128)),
            wall_offset,
        )
        self._journal: Journal | None = None
        self._outbox = Outbox(self.engine, self.monotonic, self.storage_failed)
        self.flush = self._outbox.flush
        self.links: Links | None = None
        refuse_ownerless(config.fabric)
        if config.fabric.secret_file is not None:
            self.links = Links(self, self._outbox.flush)
            self.flush = self.links.flush
        self.topics = KeptTopics(config, self.engine, self._clock, self.flush)
        self.bulk = BulkPort(self)
        self.authenticate = self._authenticator.authenticate
        self._recording: ProcessedMessages | None = None
        self._connect_rate = connect_rate(config.security, self._clock)
        self.rates = Rates(config.observability.top_n)
        self.handles: set[ClientTransport] = set()
        self.handshakes = 0
        self.stalls = StallWatch()
        self.listeners: list[BoundListener] = []
        self._max_connections = config.limits.max_connections
        self._http: Any = None
        self._rate_sampler: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticks = 0
        self._sys_topics = SysTopics(self.engine.stats, lambda: self.engine.tree.count, self._publish_sys, self._sys_figures)
        self._sys_updated_at = 0.0
        self._started_at = self.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._empty = asyncio.Event()
        self._stop_asked = asyncio.Event()
        self._stopping = False
        self._exit_code = 0

    def register_method(self, method: str, extended: ExtendedAuthenticator) -> None:
        """Serve an enhanced authentication method of MQTT 5."""
        self._authenticator.register(method, extended)

    # --- life -----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open every listener and begin to serve; on any error nothing is left open."""
        self._loop = asyncio.get_running_loop()
        self._max_connections = bounded_connections(self.config.limits.max_connections)
        self._started_at = self.monotonic()
        try:
            self._record()
            self._open_journal()
            self.bulk.start()
            if self.config.observability.sys_interval_seconds:
                self._update_sys_topics(self._started_at)
            for listener_config in self.config.listeners:
                listener = BoundListener(self, listener_config)
                self.listeners.append(listener)
                listener.bind()
            if self.config.observability.http_port is not None:
                self._start_http(self.config.observability.http_host, self.config.observability.http_port)
            for listener in self.listeners:
                await listener.start()
            if self.links is not None:
                self.links.start(self.listeners)
            if self._outbox.failed is not None:
                raise self._outbox.failed
        except BaseException:
            await self._abandon_start()
            raise
        self._warn_of_closed_doors()
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        for listener in self.listeners:
            logs.event(logging.INFO, "listening", listener=listener.config.kind, address=listener.address, port=listener.port)
        if self._http is not None:
            logs.event(logging.INFO, "serving metrics", host=self.config.observability.http_host, port=self._http.port)

    async def _abandon_start(self) -> None:
        await self._close_listeners()
        self.bulk.abort_all()
        for handle in list(self.handles):
            handle.cut()
        if self.links is not None:
            self.links.cut()
        await self._emptied()
        await self.bulk.close()
        await self._stop_http()
        await self._outbox.drain()
        self._close_journal()
        self._end_recording()

    async def stop(self) -> None:
        """Stop listening, send clients away (0x8B), give them the configured time, then cut off whoever is left."""
        if self._stopping:
            return
        self._stopping = True
        logs.event(logging.INFO, "stopping", clients=self.engine.stats.connected_clients)
        await self._close_listeners()
        now = self.monotonic()
        self.bulk.disconnect_all("the broker is stopping")
        for handle in list(self.handles):
            if handle.connection is not None:
                self.engine.disconnect(handle.connection, reasons.SERVER_SHUTTING_DOWN, now)
        self.flush()
        if self.links is not None:
            await self.links.stop_functions()
        if self.links is not None and self._outbox.failed is None:
            self.links.leave()
        # With a journal that failed, what is held back must not leave, so there is nothing to wait for.
        patience = self.config.shutdown_timeout_seconds if self._outbox.failed is None else 0.0
        try:
            async with asyncio.timeout(patience):
                await self._outbox.drain()
                await self._clients_gone()
                if self.links is not None:
                    # After the clients: their sessions can only go elsewhere once they are away.
                    await self.links.left()
        except TimeoutError:
            logs.event(logging.WARNING, "clients did not take their last bytes in time", clients=len(self.handles))
        if self.links is not None and self._outbox.failed is None:
            await self.links.say_goodbye()
        if self._timer is not None:
            self._timer.cancel()
        self.bulk.abort_all()
        for handle in list(self.handles):
            handle.abort()
        if self.links is not None:
            self.links.abort()
        await self._emptied()
        await self._stop_http()
        self._authenticator.close()
        await self.bulk.close()
        # A flush that took longer than the clients were given must end before its file is closed.
        await self._outbox.drain()
        await self.topics.stop_work()
        self._close_journal()
        self._end_recording()
        self.events.summarize()
        logs.event(logging.INFO, "stopped")

    async def serve(self, on_ready: Callable[[Broker], None] | None = None) -> int:
        """Run until SIGTERM, SIGINT or a failing disk; returns the process's exit code."""
        await running.run(self, lambda: None if on_ready is None else on_ready(self), self._stop_asked)
        return self._exit_code

    def ask_to_stop(self) -> None:
        """What SIGTERM does. Asked again while stopping, clients are cut off at once."""
        if self._stopping:
            self.bulk.abort_all()
            for handle in list(self.handles):
                handle.abort()
            if self.links is not None:
                self.links.hurry()
        self._stop_asked.set()

    async def _clients_gone(self) -> None:
        while self.handles:
            self._empty.clear()
            await self._empty.wait()
        await self.bulk.emptied()

    async def _emptied(self) -> None:
        await self._clients_gone()
        if self.links is not None:
            await self.links.emptied()

    async def _close_listeners(self) -> None:
        for listener in self.listeners:
            await listener.close()

    # --- what transports call -------------------------------------------------------------------------------------------

    def admits(self, address: str, listener: str) -> bool:
        """Whether one more connection may come in, by number and by rate."""
        if len(self.handles) + len(self.bulk.transports) + self.handshakes >= self._max_connections:
            reason = "too many connections"
        elif not self._connect_rate.admits(address):
            reason = "this address connects too fast"
        else:
            return True
        self.events.event(logging.WARNING, "connection refused", peer=address or "unix", listener=listener, reason=reason)
        return False

    def handshake_seconds(self) -> float:
        """How long a TLS handshake may take."""
        return self.config.limits.connect_timeout_seconds

    def opened(self, handle: ClientTransport, peer: Peer) -> None:
        """A transport was accepted and admitted."""
        self.handles.add(handle)
        if self._outbox.failed is not None:
            handle.abort()
            return
        handle.connection = self.engine.open(peer, handle, self.monotonic())

    def announce(self, handle: ClientTransport, connection: Connection) -> None:
        """Log the connection once its CONNECT was accepted."""
        if connection.state == CONNECTED:
            handle.announced = True
            self.events.event(
                logging.INFO,
                "client connected",
                client=connection.client_id,
                user=connection.username,
                peer=peer_name(connection),
                listener=connection.peer.listener,
                version=connection.version,
                keep_alive=connection.keep_alive_seconds,
            )

    def let_in(self, connection: Connection) -> None:
        """A client that had to wait for its session from another broker was let in, or not."""
        handle = connection.handle
        if isinstance(handle, ClientTransport) and not handle.announced:
            self.announce(handle, connection)

    def lost(self, handle: ClientTransport, connection: Connection | None) -> None:
        """A transport is gone; without a connection, one that was refused or cut off."""
        self.handles.discard(handle)
        self.stalls.unwatch(handle)
        if connection is not None:
            self._authenticator.forget(connection)
            self.engine.lose(connection, self.monotonic())
            self.flush()
            self._log_end(handle, connection)
        if not self.handles:
            self._empty.set()

    def _log_end(self, handle: ClientTransport, connection: Connection) -> None:
        if handle.announced:
            level, message = logging.INFO, "client disconnected"
        elif connection.version:
            level, message = logging.INFO, "client refused"
        else:
            level, message = logging.DEBUG, "connection ended before a CONNECT"
        self.events.event(
            level,
            message,
            client=connection.client_id,
            peer=peer_name(connection),
            listener=connection.peer.listener,
            reason=connection.close_reason,
        )

    # --- time -----------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self.monotonic()
        loop = cast(asyncio.AbstractEventLoop, self._loop)
        self._timer = loop.call_later(TICK_SECONDS, self._tick)
        if self.engine.next_deadline() <= now:
            self.engine.tick(now)
            self.flush()
        if self.links is not None and self._outbox.failed is None:
            self.links.tick(now)
        if self._outbox.failed is not None:
            return
        self._ticks += 1
        checks = self._ticks % CHECKS_EVERY_TICKS == 0
        if checks or self.topics.is_behind:
            self.topics.tick()
        if checks:
            self.stalls.check(now, self.config.limits.stall_timeout_seconds)
            self.bulk.tick(now)
            self.events.summarize()
            if self._recording is not None:
                self._recording.flush()
            if self._ticks % (60 * CHECKS_EVERY_TICKS) == 0:
                self._connect_rate.sweep()
        interval = self.config.observability.sys_interval_seconds
        if interval and now - self._sys_updated_at >= interval:
            self._update_sys_topics(now)

    def _update_sys_topics(self, now: float) -> None:
        elapsed = now - self._sys_updated_at if self._sys_updated_at else TICK_SECONDS
        self._sys_updated_at = now
        self._sys_topics.update(now - self._started_at, elapsed)
        self.flush()

    def _publish_sys(self, topic: str, payload: bytes) -> None:
        self.engine.publish(topic, payload, 0, True, self.monotonic())

    # --- late verdicts --------------------------------------------------------------------------------------------------

    def _call_on_loop(self, callback: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _authenticated(self, connection: object, verdict: Verdict) -> None:
        if isinstance(connection, BulkTransport):
            connection.decide(verdict)
        elif isinstance(connection, Connection) and self._outbox.failed is None:
            self.engine.authenticated(connection, verdict, self.monotonic())
            handle = cast(ClientTransport, connection.handle)
            if not handle.announced:
                self.announce(handle, connection)
            self.flush()

    # --- the journal ----------------------------------------------------------------------------------------------------

    def _open_journal(self) -> None:
        """Recover what the data directory holds, before any client can come in."""
        self._journal = open_journal(self.config.persistence, self.engine, self.topics, self.monotonic())
        self._outbox.use(self._journal, self.topics.keeper)
        if self.links is not None:
            self.links.open()
        else:
            forget_peers(self.engine, self.monotonic())
            clear_spool(self.config.persistence.directory)

    def _close_journal(self) -> None:
        journal, self._journal = self._journal, None
        self._outbox.use(None)
        if self.links is not None:
            self.links.close()
        self.topics.close()
        if journal is not None:
            journal.close()

    # --- what was processed ---------------------------------------------------------------------------------------------

    def _record(self) -> None:
        directory = self.config.recording.directory
        if directory is not None:
            # Imported here: a broker that records nothing does not carry the libraries.
            from nearcast.broker.recording import ProcessedMessages

            self._recording = ProcessedMessages(self.config, directory, self._clock)
            self.engine.effects.witness = self._recording

    def _end_recording(self) -> None:
        recording, self._recording = self._recording, None
        self.engine.effects.witness = None
        if recording is not None:
            recording.close()
            logs.event(logging.INFO, "recorded", broker=recording.name, events=recording.events)

    # --- trouble --------------------------------------------------------------------------------------------------------

    def storage_failed(self, error: StorageUnavailable) -> None:
        """Nothing that comes from now on could be kept, so nothing more comes in, whoever runs the loop.

        The engine is ahead of the disk now and is not asked again; :meth:`stop` has only to close what is left.
        """
        logs.event(logging.ERROR, "the disk does not take what must be kept, stopping", path=error.path, reason=str(error))
        self._exit_code = 1
        self.topics.fail(error)
        if self._timer is not None:
            self._timer.cancel()
        for listener in self.listeners:
            listener.stop_accepting()
        self.bulk.abort_all()
        for handle in list(self.handles):
            handle.cut()
        if self.links is not None:
            self.links.cut()
        self._stop_asked.set()

    def _warn_of_closed_doors(self) -> None:
        """Say so when a listener can be reached from elsewhere and would let nobody from there in."""
        security = self.config.security
        for listener in self.listeners:
            config = listener.config
            allowed = config.allow_anonymous if config.allow_anonymous is not None else security.allow_anonymous
            closed = security.password_file is None and not config.certificate_username and allowed is None
            local = config.kind == "unix" or is_loopback(config.host) or config.host == "localhost"
            if closed and not local and config.kind not in LINK_KINDS:
                logs.event(
                    logging.WARNING,
                    "clients of other machines are refused here: no users are configured. Make some with `nearcast passwd FILE"
                    " USER` and set security.password_file, or set allow_anonymous = true",
                    listener=config.name,
                )

    # --- reload ---------------------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """What SIGHUP does: read everything again, and take over what a running broker can. All or nothing."""
        try:
            new = self._reload_config() if self._reload_config is not None else self.config
            merged = reloading.merge(self.config, new)
            passwords = _load_passwords(merged.security)
            access_list = load_access_list(merged.security.acl, merged.security.acl_file)
            topics = check_configured(merged.topics, merged.persistence.directory)
            contexts = [server_context(item) if item.kind in SECURE_KINDS else None for item in merged.listeners]
        except (NearcastError, ValueError, OSError) as error:
            logs.event(logging.ERROR, "reload refused, the old configuration stays", reason=str(error))
            return
        changed = reloading.changed_keys(self.config, new)
        needs_restart = [key for key in changed if not reloading.is_reloadable(key)]
        self.config = merged
        self._authenticator.configure(merged.security, merged.listeners, passwords)
        self.access = access_list
        self.engine.set_authorizer(access_list)
        self.engine.apply(merged.limits)
        self.topics.rules.reconfigure(topics)
        self._max_connections = bounded_connections(merged.limits.max_connections)
        self._connect_rate = connect_rate(merged.security, self._clock)
        for listener, listener_config, context in zip(self.listeners, merged.listeners, contexts, strict=True):
            listener.reload(listener_config, context)
        observability = merged.observability
        logs.logger.setLevel(logs.LEVELS[observability.log_level])
        logs.set_format(observability.log_format)
        self.events.configure(observability.log_events_per_second)
        self.rates.top_n = observability.top_n
        logs.event(
            logging.INFO,
            "configuration reloaded",
            changed=",".join(key for key in changed if key not in needs_restart) or "nothing",
            users=len(passwords) if passwords is not None else 0,
            rules=access_list.rule_count,
        )
        if needs_restart:
            logs.event(logging.WARNING, "changes that need a restart were left out", keys=",".join(needs_restart))

    # --- observability --------------------------------------------------------------------------------------------------

    def _start_http(self, host: str, port: int) -> None:
        # Imported here: a broker without HTTP does not carry the libraries.
        from nearcast.broker.http import ObservabilityApp
        from nearcast.broker.metrics import BrokerCollector, Metrics
        from nearcast.serving.http import HttpServer

        listening = bind_tcp(host, port, 64, key="observability.http_port")
        by_broker = dict if self.links is None else self.links.by_broker
        collector = BrokerCollector(self.engine.stats, self.rates, self._gauges, self._counters, by_broker)
        self._http = HttpServer(ObservabilityApp(Metrics(collector), self.rates, self.health), listening)
        self._http.start()
        sampling = self.rates.run(self.engine.topic_counts, self.handles, self.monotonic)
        self._rate_sampler = asyncio.get_running_loop().create_task(sampling, name="rates")

    async def _stop_http(self) -> None:
        if self._rate_sampler is not None:
            self._rate_sampler.cancel()
            await asyncio.wait([self._rate_sampler])
        if self._http is not None:
            await self._http.stop()

    @property
    def http_port(self) -> int | None:
        """The real port of /metrics, if it is served."""
        return int(self._http.port) if self._http is not None else None

    def _gauges(self) -> dict[str, tuple[float, str]]:
        return {
            "uptime_seconds": (self.monotonic() - self._started_at, "Seconds since the start."),
            "subscriptions": (self.engine.tree.count, "Subscriptions of all sessions."),
            "stalled_clients": (len(self.stalls), "Clients that are slow to take their output."),
            "password_checks_pending": (self._authenticator.pending, "Password checks waiting or running."),
            **self.topics.gauges(),
            **self.bulk.gauges(),
            **({} if self.links is None else self.links.gauges()),
        }

    def _counters(self) -> dict[str, tuple[float, str]]:
        return {**self.topics.counters(), **({} if self.links is None else self.links.counters())}

    def _sys_figures(self) -> dict[str, int]:
        return {**self.topics.figures(), **({} if self.links is None else self.links.figures())}

    def health(self) -> dict[str, object]:
        """What /healthz shows."""
        failed = self._outbox.failed
        persistence = self.config.persistence
        return {
            "ok": failed is None and not self._stopping,
            "version": __version__,
            "uptime_seconds": round(self.monotonic() - self._started_at, 3),
            "connections": len(self.handles),
            "listeners": [{"kind": listener.config.kind, "address": listener.address} for listener in self.listeners],
            "journal": {
                "enabled": persistence.directory is not None,
                "sync": persistence.sync if persistence.directory is not None else None,
                "error": None if failed is None else str(failed),
            },
            "topics": self.topics.health(),
            "fabric": None if self.links is None else self.links.health(),
            "groups": None if self.links is None or self.links.grouping is None else self.links.grouping.facts(),
        }


def _load_passwords(security: Security) -> PasswordTable | None:
    return None if security.password_file is None else load_passwords(security.password_file)
