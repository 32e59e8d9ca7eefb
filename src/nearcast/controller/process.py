"""The controller as a process. Decides nothing: :class:`nearcast.fabric.controlling.Controller` does."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from nearcast.clock import Clock, SystemClock
from nearcast.config import Limits, Listener
from nearcast.controller.config import ControllerConfig
from nearcast.controller.tokens import Tokens, read_tokens
from nearcast.errors import ConfigError
from nearcast.fabric import links
from nearcast.fabric.controlling import Controller
from nearcast.fabric.hub import Hub
from nearcast.fabric.links import Greeting
from nearcast.fabric.registry import Entry
from nearcast.fabric.topic_planner import PlanJob
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.membership.monitoring import Monitor
from nearcast.mqtt.access import Peer
from nearcast.serving import logs
from nearcast.serving.admission import bounded_connections, is_loopback
from nearcast.serving.certificates import server_context
from nearcast.serving.links import LinkSockets, LinkTransport
from nearcast.serving.listeners import BaseListener
from nearcast.serving.monitoring import MonitoringSockets, bind_udp
from nearcast.serving.secrets import read_secret
from nearcast.serving.sockets import bind_tcp

TICK_SECONDS = 0.05
"""How exactly time-outs are kept. One timer serves everything."""

HANDSHAKE_SECONDS = 10.0


class LinkListener(BaseListener):
    """Where nodes connect."""

    when_taken = "is another controller running? --port takes another one"

    def __init__(self, process: ControllerProcess, config: Listener) -> None:
        super().__init__(process, config)
        self._process = process

    def make_transport(self) -> asyncio.Protocol:
        def peer_of(stream: asyncio.Transport) -> Peer | None:
            peer = self.peer_of(stream)
            return peer if self.admits(peer) else None

        return LinkTransport(self._process.sockets, "", peer_of)


class ControllerProcess:
    """One controller. ``start`` and ``stop`` for embedding; ``serve`` adds signals and returns when told to stop."""

    def __init__(self, config: ControllerConfig, *, clock: Clock | None = None, rng: random.Random | None = None) -> None:
        self.config = config
        self._clock = clock if clock is not None else SystemClock()
        self.monotonic = self._clock.monotonic
        self.events = logs.LimitedEvents(self._clock, 100.0)
        self.handshakes = 0
        secret = read_secret(config.secret_file)
        self.tokens: Tokens = read_tokens(config.token_file, secret)
        # Nonces and ids of probes must not be guessed from those before.
        rng = rng if rng is not None else random.SystemRandom()
        now = self.monotonic()
        self.epoch = rng.getrandbits(60)
        self.name = config.name or f"controller@{socket.gethostname()}"
        settings = FabricSettings(
            probe_interval_seconds=config.probe_interval_seconds, fail_after_seconds=config.fail_after_seconds
        )
        self.hub = Hub(Greeting(links.CONTROLLER, self.name, self.epoch), secret, settings, Limits(), rng)
        monitor = Monitor(self.name, secret, rng, config.monitoring(), standing=False)
        wall_offset = self._clock.wall() - now
        self.controller = Controller(config.control(), monitor, self.epoch, wall_offset, rng, now)
        self.hub.users[links.BROKER] = self.controller
        self.hub.users[links.GATEWAY] = self.controller
        self.sockets = LinkSockets(self.hub, settings, self.monotonic, self.flush)
        self.listener = LinkListener(self, config.listener())
        self._max_links = 100_000
        self._datagrams: MonitoringSockets | None = None
        self._http: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self.started_at = now
        self._ticks = 0
        self._states: dict[str, str] = {}
        self._logged_moves = 0
        self._logged_migrations = 0
        self._logged_plans = (0, 0)
        self._stop_asked = asyncio.Event()
        # Plans for many topics take seconds of a processor, in which nodes are to be heard.
        self._planning = ThreadPoolExecutor(1, "planning")
        self.controller.topics.planner.elsewhere = self._plan_elsewhere
        self._stopping = False

    # --- life -----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open every socket and begin to serve; on any error nothing is left open."""
        self._max_links = bounded_connections(100_000)
        try:
            self.listener.bind()
            udp = self._bind_udp()
            self._datagrams = MonitoringSockets(self.controller.monitor, udp, self.monotonic, self.flush)
            if self.config.http_port is not None:
                self._start_http(self.config.http_host, self.config.http_port)
            self._datagrams.start()
            await self.listener.start()
        except BaseException:
            await self._close()
            raise
        self._tick()
        logs.event(logging.INFO, "listening for nodes", address=self.listener.address, name=self.name)
        if self._http is not None:
            logs.event(logging.INFO, "serving the API", host=self.config.http_host, port=self._http.port)
            if not is_loopback(self.config.http_host) and self.config.http_host != "localhost" and not self._secure_http:
                logs.event(logging.WARNING, "the API is served to other machines without TLS: tokens can be read on the way")

    def _bind_udp(self) -> list[socket.socket]:
        try:
            return bind_udp(self.config.host, self.listener.port, "port")
        except ConfigError:
            if self.config.port:
                raise
            # Whoever takes any port has no firewall to open, and nodes answer to where they were asked from.
            return bind_udp(self.config.host, 0, "port")

    async def stop(self) -> None:
        """Say goodbye; nodes go on with what they know."""
        if self._stopping:
            return
        self._stopping = True
        logs.event(logging.INFO, "stopping", nodes=len(self.controller.entries))
        self.listener.stop_accepting()
        self.sockets.stop_dialling()
        for link in list(self.hub.links):
            link.close("the controller is stopping")
        self.flush()
        try:
            async with asyncio.timeout(2.0):
                await self.sockets.emptied()
        except TimeoutError:
            self.sockets.abort_all()
            await self.sockets.emptied()
        await self._close()
        logs.event(logging.INFO, "stopped")

    def _plan_elsewhere(self, job: PlanJob) -> None:
        done = asyncio.get_running_loop().run_in_executor(self._planning, job.run)
        done.add_done_callback(lambda ended: self._planned(job, ended))

    def _planned(self, job: PlanJob, ended: asyncio.Future[None]) -> None:
        if ended.cancelled() or self._stopping:
            return
        error = ended.exception()
        if error is not None:
            logs.event(logging.ERROR, "planning failed", error=repr(error))
        self.controller.topics.planned(job, self.monotonic())
        self.flush()

    async def _close(self) -> None:
        self._planning.shutdown(wait=False, cancel_futures=True)
        if self._timer is not None:
            self._timer.cancel()
        await self.listener.close()
        self.sockets.cut_all()
        if self._datagrams is not None:
            self._datagrams.close()
        if self._http is not None:
            await self._http.stop()

    async def serve(self, on_ready: Callable[[ControllerProcess], None] | None = None) -> int:
        """Run until SIGTERM or SIGINT; returns the process's exit code."""
        loop = asyncio.get_running_loop()
        await self.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_asked.set)
        try:
            if on_ready is not None:
                on_ready(self)
            await self._stop_asked.wait()
        finally:
            await self.stop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        return 0

    # --- what listeners ask ---------------------------------------------------------------------------------------------

    def admits(self, address: str, listener: str) -> bool:
        """Whether one more link may come in."""
        if len(self.sockets.transports) + self.handshakes < self._max_links:
            return True
        self.events.event(logging.WARNING, "link refused", peer=address, reason="too many links")
        return False

    def handshake_seconds(self) -> float:
        """How long a TLS handshake may take."""
        return HANDSHAKE_SECONDS

    # --- work -----------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """What is done after every call into the machines."""
        now = self.monotonic()
        self.hub.settle(now)
        self.hub.flush(now)
        if self._datagrams is not None:
            self._datagrams.send()
        for link in self.hub.take_ended():
            name = link.theirs.name if link.theirs is not None else None
            level = logging.INFO if name is not None and not self._stopping else logging.DEBUG
            peer = link.connection.peer.address
            self.events.event(level, "link ended", node=name, peer=peer, reason=link.close_reason)

    def _tick(self) -> None:
        now = self.monotonic()
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        self.hub.tick(now)
        self.flush()
        self._log_changes()
        self._ticks += 1
        if self._ticks % 20 == 0:
            self.events.summarize()

    def _log_changes(self) -> None:
        entries = self.controller.entries
        for name, entry in entries.items():
            if self._states.get(name) != entry.state:
                self._states[name] = entry.state
                level = logging.WARNING if entry.state == "down" else logging.INFO
                logs.event(level, f"{entry.node.role} is {entry.state}", node=name, site=entry.node.site or None)
                if entry.state == "up" and _is_out_of_reach(entry):
                    logs.event(
                        logging.WARNING,
                        "other machines cannot reach this broker, it takes links from its own only: start it with --link-host",
                        node=name,
                        link=entry.node.link,
                    )
        if len(self._states) > len(entries):
            self._states = {name: state for name, state in self._states.items() if name in entries}
        moves = self.controller.moves
        ended = sum(moves.counts.values())
        fresh, self._logged_moves = ended - self._logged_moves, ended
        for move in list(moves.past)[-fresh:] if fresh else []:
            self.events.event(
                logging.INFO,
                f"move {move.state}",
                gateway=move.gateway,
                client=move.client or None,
                origin=move.origin or None,
                target=move.target,
                reason=move.reason,
                clients=move.moved_clients,
                detail=move.detail or None,
            )
        migrations = self.controller.topics.migrations
        fresh, self._logged_migrations = migrations.ended - self._logged_migrations, migrations.ended
        for migration in list(migrations.past)[-fresh:] if fresh else []:
            self.events.event(
                logging.INFO,
                f"migration {migration.state}",
                topic=migration.topic,
                origin=migration.origin or None,
                target=migration.target,
                reason=migration.reason,
                detail=migration.detail or None,
            )
        self._log_plans()

    def _log_plans(self) -> None:
        """Plans that others made, the last of each kind: however many come, a line or two a tick."""
        topics = self.controller.topics
        (taken, refused), self._logged_plans = self._logged_plans, (topics.plans_taken, topics.plans_refused)
        if topics.plans_refused > refused:
            self.events.event(
                logging.WARNING, "plan refused", reason=topics.last_refusal, plans=topics.plans_refused - refused
            )
        record = topics.last_plan
        if record is not None and topics.plans_taken > taken:
            self.events.event(
                logging.INFO,
                "plan taken",
                planner=record.planner,
                number=record.number,
                moves=len(record.moves),
                ordered=topics.last_ordered,
                plans=topics.plans_taken - taken,
            )

    # --- HTTP -----------------------------------------------------------------------------------------------------------

    @property
    def _secure_http(self) -> bool:
        return self.config.http_certificate_file is not None

    def _start_http(self, host: str, port: int) -> None:
        # Imported here: the libraries take a moment, and a controller without HTTP does not carry them.
        from nearcast.controller.api import build
        from nearcast.serving.http import HttpServer

        context = None
        if self.config.http_certificate_file is not None:
            listener = Listener(
                kind="tls", certificate_file=self.config.http_certificate_file, key_file=self.config.http_key_file
            )
            context = server_context(listener)
        listening = bind_tcp(host, port, 64, key="http_port", when_taken="--http-port takes another one")
        self._http = HttpServer(build(self), listening, context)
        self._http.start()

    @property
    def http_port(self) -> int | None:
        """The real port of the API, if it is served."""
        return int(self._http.port) if self._http is not None else None

    @property
    def port(self) -> int:
        """The real port for nodes."""
        return self.listener.port


def _is_out_of_reach(entry: Entry) -> bool:
    """Whether a broker of another machine named an address that means something only there: the default, forgotten."""
    host = entry.node.link.rpartition(":")[0].strip("[]")
    return entry.link is not None and bool(host) and is_loopback(host) and not is_loopback(entry.link.connection.peer.address)


def ready_report(process: ControllerProcess, pid: int) -> bytes:
    """Where a running controller is reached, as JSON: what ``--ready-file`` holds."""
    return msgspec.json.encode(
        {"pid": pid, "name": process.name, "host": process.config.host, "port": process.port, "http_port": process.http_port}
    )
