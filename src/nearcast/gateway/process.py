"""The gateway as a process: the pure machine, wired to sockets, clock, log and signals.

:class:`GatewayProcess` owns every moving part and the order in which they start and stop. It decides nothing about clients,
brokers or moves: that is :mod:`nearcast.fabric.gateway`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from nearcast import __version__
from nearcast.clock import Clock, SystemClock
from nearcast.config import SECURE_KINDS
from nearcast.errors import ConfigError, NearcastError
from nearcast.fabric import links, tunnels
from nearcast.fabric.control import Node, Registration
from nearcast.fabric.gateway import Gateway, GatewaySettings
from nearcast.fabric.gateway_node import GatewayNode
from nearcast.fabric.hub import Hub
from nearcast.fabric.links import Greeting, Link
from nearcast.fabric.moving import Order
from nearcast.fabric.plain import PlainGateway
from nearcast.fabric.trunk_lines import TrunkLine
from nearcast.fabric.tunnels import Tunnel
from nearcast.gateway.config import GatewayConfig, plain_name
from nearcast.gateway.plain_sockets import PlainSockets
from nearcast.gateway.transports import ClientTransport, GatewayListener
from nearcast.membership.gossip import Gossip, GossipSettings
from nearcast.membership.monitoring import Monitor, MonitorSettings
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Peer
from nearcast.serving import logs, running
from nearcast.serving.admission import ConnectRate, bounded_connections
from nearcast.serving.certificates import server_context
from nearcast.serving.links import LinkSockets
from nearcast.serving.monitoring import MonitoringSockets, bind_udp
from nearcast.serving.secrets import read_secret
from nearcast.serving.sockets import bind_tcp

TICK_SECONDS = 0.05
CHECKS_EVERY_TICKS = 20


class GatewayProcess:
    """One gateway. ``start`` and ``stop`` for embedding; ``serve`` adds signals and returns when told to stop."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        reload_config: Callable[[], GatewayConfig] | None = None,
    ) -> None:
        config.check()
        self.config = config
        self._reload_config = reload_config
        self._clock = clock if clock is not None else SystemClock()
        self.monotonic = self._clock.monotonic
        self.events = logs.LimitedEvents(self._clock, config.observability.log_events_per_second)
        # Nonces of links must not be guessed from those before.
        rng = rng if rng is not None else random.SystemRandom()
        now = self.monotonic()
        fabric = config.fabric
        self.name = fabric.name or f"{socket.gethostname()}-gateway-{secrets.token_hex(3)}"
        secret = b"" if fabric.secret_file is None else read_secret(fabric.secret_file)
        epoch = rng.getrandbits(60)
        self.hub = Hub(Greeting(links.GATEWAY, self.name, epoch), secret, fabric, config.limits, rng)
        settings = GatewaySettings(
            config.patience_seconds, config.max_kept_bytes, config.moves_at_once, config.move_timeout_seconds
        )
        self._plain: PlainSockets | None = None
        if config.plain:
            brokers = self._broker_list(config)
            plain = PlainGateway(self.hub, config.limits, settings, rng, now, brokers, config.replay_timeout_seconds)
            self.machine: Gateway = plain
            self._plain = PlainSockets(plain, config, self.monotonic, self.flush)
        else:
            self.machine = Gateway(self.hub, config.limits, settings, rng, now)
        self.machine.on_connected = self._connected
        self.machine.on_ended = self._ended
        self.machine.on_line = self._line_changed
        self.machine.on_order = self._order_finished
        self._epoch = epoch
        self.registration: Registration | None = None
        self._monitoring: MonitoringSockets | None = None
        self.gossip: Gossip | None = None
        """Who keeps the gateway's coordinate, which is that of its clients, too (ePulsar's NC proxy)."""
        if fabric.controller is not None:
            monitor = Monitor(self.name, secret, random.SystemRandom(), MonitorSettings(), standing=True)
            wall_offset = self._clock.wall() - now
            self.registration = Registration(GatewayNode(self.machine, self._describe, wall_offset), monitor)
            life = int((now + wall_offset) * 1e6)
            self.gossip = Gossip(self.name, "", secret, GossipSettings(), random.SystemRandom(), now, life=life)
            self.registration.gossip = self.gossip
            self.machine.places.agent = self.gossip
            self.hub.users[links.CONTROLLER] = self.registration
        self.link_sockets = LinkSockets(self.hub, fabric, self.monotonic, self.flush)
        self.listeners: list[GatewayListener] = []
        self.clients: dict[ClientTransport, None] = {}
        self.stalled: dict[ClientTransport, None] = {}
        self.handshakes = 0
        self.stopping = False
        self._connect_rate = ConnectRate(self._clock, config.connect_rate_per_second, config.connect_burst, True)
        self._max_connections = config.limits.max_connections
        self._http: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticks = 0
        self._started_at = now
        self._empty = asyncio.Event()
        self._stop_asked = asyncio.Event()

    # --- life -----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open every listener, begin to look for brokers, and serve; on any error nothing is left open."""
        self._max_connections = bounded_connections(self.config.limits.max_connections)
        self._started_at = self.monotonic()
        try:
            for listener_config in self.config.listeners:
                listener = GatewayListener(self, listener_config)
                self.listeners.append(listener)
                listener.bind()
            self._start_monitoring()
            observability = self.config.observability
            if observability.http_port is not None:
                self._start_http(observability.http_host, observability.http_port)
            self._look_for_brokers()
            for listener in self.listeners:
                await listener.start()
        except BaseException:
            await self._close()
            raise
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        for listener in self.listeners:
            logs.event(logging.INFO, "listening", listener=listener.config.kind, address=listener.address, port=listener.port)
        if self._http is not None:
            logs.event(logging.INFO, "serving metrics", host=self.config.observability.http_host, port=self._http.port)

    def _look_for_brokers(self) -> None:
        now = self.monotonic()
        if not self.config.plain:
            self.machine.use(self._broker_list(self.config), now)
        if self.config.fabric.controller is not None:
            self.hub.dial(self.config.fabric.controller, now)
        self.flush()

    def _start_monitoring(self) -> None:
        registration = self.registration
        if registration is not None and registration.monitor is not None:
            host = "0.0.0.0"  # noqa: S104  # probes are answered to whoever asks, with nothing but the probe itself
            sockets = bind_udp(host, 0, key="fabric.controller")
            self._monitoring = MonitoringSockets(registration.monitor, sockets, self.monotonic, self.flush, self.gossip)
            self._monitoring.start()

    def _describe(self) -> Node:
        return Node(
            name=self.name,
            role="gateway",
            epoch=self._epoch,
            monitoring=f":{self._monitoring.port}" if self._monitoring is not None else "",
            mqtt=self.listeners[0].address if self.listeners else "",
            site=self.config.fabric.site,
            version=__version__,
        )

    async def stop(self) -> None:
        """Stop listening, send clients away (0x8B), give them the configured time, then cut off whoever is left."""
        if self.stopping:
            return
        self.stopping = True
        logs.event(logging.INFO, "stopping", clients=len(self.clients))
        if self._timer is not None:
            self._timer.cancel()
        for listener in self.listeners:
            await listener.close()
        now = self.monotonic()
        for tunnel in list(self.machine.tunnels):
            tunnel.refuse(reasons.SERVER_SHUTTING_DOWN, "the gateway is stopping", now)
        if self.registration is not None:
            self.registration.leave(now)
        self.flush()
        try:
            async with asyncio.timeout(self.config.shutdown_timeout_seconds):
                await self._emptied()
        except TimeoutError:
            logs.event(logging.WARNING, "clients did not take their last bytes in time", clients=len(self.clients))
        await self._close()
        self.events.summarize()
        logs.event(logging.INFO, "stopped")

    async def _close(self) -> None:
        for listener in self.listeners:
            await listener.close()
        for client in list(self.clients):
            client.abort()
        await self._emptied()
        if self._plain is not None:
            await self._plain.close()
        self.link_sockets.stop_dialling()
        for link in list(self.hub.links):
            link.close("the gateway stops")
        self.hub.flush(self.monotonic())
        try:
            async with asyncio.timeout(1.0):
                await self.link_sockets.emptied()
        except TimeoutError:
            self.link_sockets.abort_all()
            await self.link_sockets.emptied()
        if self._monitoring is not None:
            self._monitoring.close()
        if self._http is not None:
            await self._http.stop()

    async def _emptied(self) -> None:
        while self.clients:
            self._empty.clear()
            await self._empty.wait()

    async def serve(self, on_ready: Callable[[GatewayProcess], None] | None = None) -> int:
        """Run until SIGTERM or SIGINT; returns the process's exit code."""
        await running.run(self, lambda: None if on_ready is None else on_ready(self), self._stop_asked)
        return 0

    def reload(self) -> None:
        """What SIGHUP does: take over certificates, brokers and what is logged, all or nothing. The rest needs a restart."""
        try:
            new = self._reload_config() if self._reload_config is not None else self.config
            new.check()
            if new.plain != self.config.plain:
                raise ConfigError("brokers of a fabric and others cannot take each other's place without a restart")
            if [item.name for item in new.listeners] != [item.name for item in self.config.listeners]:
                raise ConfigError("other listeners need a restart", key="listeners")
            contexts = [server_context(item) if item.kind in SECURE_KINDS else None for item in new.listeners]
        except (NearcastError, ValueError, OSError) as error:
            logs.event(logging.ERROR, "reload refused, the old configuration stays", reason=str(error))
            return
        for listener, listener_config, context in zip(self.listeners, new.listeners, contexts, strict=True):
            listener.reload(listener_config, context)
        observability = new.observability
        logs.logger.setLevel(logs.LEVELS[observability.log_level])
        logs.set_format(observability.log_format)
        self.events.configure(observability.log_events_per_second)
        if new.brokers != self.config.brokers:
            self.machine.use(self._broker_list(new), self.monotonic())
        self.config = msgspec.structs.replace(
            self.config, listeners=new.listeners, brokers=new.brokers, observability=observability
        )
        self.flush()
        logs.event(logging.INFO, "configuration reloaded", brokers=len(new.brokers))

    @staticmethod
    def _broker_list(config: GatewayConfig) -> list[tuple[str, str]]:
        """Addresses of brokers, and the names of those that do not tell theirs."""
        return [(address, plain_name(address) if config.plain else "") for address in config.brokers]

    def ask_to_stop(self) -> None:
        """What SIGTERM does. Asked again while stopping, clients are cut off at once."""
        if self.stopping:
            for client in list(self.clients):
                client.abort()
        self._stop_asked.set()

    # --- what transports call -------------------------------------------------------------------------------------------

    def admits(self, address: str, listener: str) -> bool:
        """Whether one more connection may come in, by number and by rate."""
        if len(self.clients) + self.handshakes >= self._max_connections:
            reason = "too many connections"
        elif not self._connect_rate.admits(address):
            reason = "this address connects too fast"
        else:
            return True
        self.machine.stats.refused += 1
        self.events.event(logging.WARNING, "connection refused", peer=address or "unix", listener=listener, reason=reason)
        return False

    def handshake_seconds(self) -> float:
        """How long a TLS handshake may take."""
        return self.config.limits.connect_timeout_seconds

    def opened(self, client: ClientTransport, peer: Peer) -> Tunnel:
        """A transport was accepted and admitted."""
        self.clients[client] = None
        return self.machine.accept(client, peer, self.monotonic())

    def gone(self, client: ClientTransport, tunnel: Tunnel | None) -> None:
        """A transport is gone."""
        self.clients.pop(client, None)
        self.stalled.pop(client, None)
        if tunnel is not None:
            self.machine.lost(tunnel, self.monotonic())
            self.flush()
        if not self.clients:
            self._empty.set()

    def flush(self) -> None:
        """Carry out what the machine decided. Called after every call into it."""
        now = self.monotonic()
        self.hub.settle(now)
        self.hub.flush(now)
        self.link_sockets.dial()
        if self._plain is not None:
            self._plain.dial()
        if self._monitoring is not None:
            self._monitoring.send()
        for link, up in self.hub.take_news():
            self._tell_of(link, up)

    # --- time -----------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self.monotonic()
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        if self.hub.next_deadline() <= now:
            self.hub.tick(now)
            self.flush()
        if self.gossip is not None and self._monitoring is not None and self.gossip.next_deadline() <= now:
            self.gossip.tick(self.monotonic())
            self._monitoring.send()
        self._ticks += 1
        if self._ticks % CHECKS_EVERY_TICKS == 0:
            self.events.summarize()
            self._cut_stalled(now)
            if self._ticks % (60 * CHECKS_EVERY_TICKS) == 0:
                self._connect_rate.sweep()

    def _cut_stalled(self, now: float) -> None:
        """Cut off clients that took not a byte for too long."""
        timeout = self.config.limits.stall_timeout_seconds
        for client in list(self.stalled):
            waiting = client.write_buffer_bytes()
            if waiting < client.stall_bytes:
                client.stall_bytes = waiting
                client.stall_since = now
            elif timeout and now - client.stall_since >= timeout:
                if client.tunnel is not None:
                    client.tunnel.close_reason = "took no data for too long"
                client.abort()

    # --- what the machine tells -----------------------------------------------------------------------------------------

    def _tell_of(self, link: Link, up: bool) -> None:
        """A link that came up or ended, for the log. Brokers that came or went are told by :meth:`_line_changed`."""
        if up:
            if link.role == "controller":
                self.events.event(logging.INFO, "controller there", controller=link.name, address=link.dialed)
        elif not link.was_up:
            name = link.name or None
            self.events.event(logging.WARNING, "link failed", node=name, address=link.dialed, reason=link.close_reason)
        elif link.role == "controller" and not self.stopping:
            self.events.event(logging.WARNING, "controller lost", controller=link.name, reason=link.close_reason)

    def _connected(self, tunnel: Tunnel) -> None:
        mirror = tunnel.mirror
        self.events.event(
            logging.INFO,
            "client connected",
            client=tunnel.client_id,
            user=None if mirror is None else mirror.username,
            peer=tunnel.peer.address or "unix",
            listener=tunnel.peer.listener,
            version=None if mirror is None else mirror.version,
            broker=None if tunnel.upstream is None else tunnel.upstream.broker,
        )

    def _ended(self, tunnel: Tunnel) -> None:
        level, message = logging.DEBUG, "connection ended before a CONNECT"
        if tunnel.announced:
            level, message = logging.INFO, "client disconnected"
        elif tunnel.mirror is not None:
            level, message = logging.INFO, "client refused"
        peer = tunnel.peer.address or "unix"
        self.events.event(level, message, client=tunnel.client_id, peer=peer, reason=tunnel.close_reason)

    def _line_changed(self, line: TrunkLine, up: bool) -> None:
        if up:
            logs.event(logging.INFO, "broker there", broker=line.name, address=line.link.dialed)
        elif not self.stopping:
            clients = len(line.channels)
            logs.event(logging.WARNING, "broker lost", broker=line.name, clients=clients, reason=line.link.close_reason)

    def _order_finished(self, order: Order) -> None:
        if self.registration is not None:
            self.registration.urgent()
        if order.moved or order.failed:
            level = logging.WARNING if order.failed else logging.INFO
            logs.event(
                level,
                "clients moved",
                broker=order.target,
                moved=order.moved,
                failed=order.failed or None,
                reason=order.reason or None,
                longest_gap_ms=round(order.longest_gap_ms, 1),
            )

    # --- observability --------------------------------------------------------------------------------------------------

    def _start_http(self, host: str, port: int) -> None:
        # Imported here: a gateway without HTTP does not carry the libraries.
        from nearcast.gateway.observing import ObservabilityApp
        from nearcast.serving.http import HttpServer

        self._http = HttpServer(ObservabilityApp(self), bind_tcp(host, port, 64, key="observability.http_port"))
        self._http.start()

    @property
    def http_port(self) -> int | None:
        """The real port of /metrics, if it is served."""
        return int(self._http.port) if self._http is not None else None

    def health(self) -> dict[str, object]:
        """What /healthz shows. A gateway without any broker is not well."""
        machine = self.machine
        controller = self.registration
        brokers: list[dict[str, object]] = [
            {
                "name": line.name,
                "address": line.link.dialed,
                "clients": len(line.channels),
                "rtt_ms": round(line.link.rtt_ms, 3),
                "leaving": line.leaving,
            }
            for line in machine.lines.values()
        ]
        if isinstance(machine, PlainGateway):
            brokers = [
                {"name": broker.name, "address": broker.address, "clients": broker.clients, "rtt_ms": round(broker.rtt_ms, 3)}
                for broker in machine.brokers
                if not broker.down
            ]
        return {
            "ok": bool(brokers) and not self.stopping,
            "version": __version__,
            "name": self.name,
            "uptime_seconds": round(self.monotonic() - self._started_at, 3),
            "connections": len(self.clients),
            "waiting": machine.count(tunnels.WAITING) + machine.count(tunnels.RESUMING),
            "home": machine.choice.home,
            "brokers": brokers,
            "controller": None if controller is None else {"name": controller.controller, "up": controller.up},
            "moves": {"under_way": len(machine.moves.under_way), "done": machine.moves.moved, "failed": machine.moves.failed},
            "listeners": [{"kind": listener.config.kind, "address": listener.address} for listener in self.listeners],
        }
