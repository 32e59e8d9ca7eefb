"""The broker's part in a fabric: :class:`~nearcast.fabric.fabric.Fabric` wired to files, sockets, clock and log.

Whom to trust comes from the secret's file, who this broker is from the configuration; everything else is decided by the
fabric's machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nearcast.broker.grouping import Grouping
from nearcast.broker.probing import Probing
from nearcast.broker.registering import Registering
from nearcast.broker.replicating import Replicating
from nearcast.broker.reporting import Reporting
from nearcast.broker.set_lines import SetLines
from nearcast.broker.spool_files import SPOOL, SpoolFiles
from nearcast.config import LINK_KINDS, BrokerConfig
from nearcast.errors import ConfigError, StorageUnavailable
from nearcast.fabric.fabric import Fabric
from nearcast.fabric.links import BROKER, Link
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Peer
from nearcast.serving import logs
from nearcast.serving.links import LinkSockets, LinkTransport, join_address, split_address
from nearcast.serving.secrets import read_secret

if TYPE_CHECKING:
    from nearcast.broker.listeners import BoundListener
    from nearcast.broker.process import Broker

GOODBYE_SECONDS = 1.0
"""How long links may take to get rid of their last bytes when the broker stops."""

MQTT_KINDS = ("tcp", "tls", "ws", "wss")


class Links:
    """All links of a broker that is part of a fabric."""

    def __init__(self, broker: Broker, flush_engine: Callable[[], None]) -> None:
        config = broker.config
        settings = config.fabric
        if settings.secret_file is None:
            raise ConfigError("a broker of a fabric needs its secret: `nearcast secret FILE`", key="fabric.secret_file")
        self._broker = broker
        self._flush_engine = flush_engine
        self._leaving = False
        self._hurried = False
        self._left = asyncio.Event()
        self._spool: SpoolFiles | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        for address in (*settings.peers, settings.controller, settings.advertise):
            if address is not None:
                split_address(address)
        now = broker.monotonic()
        # Nonces must not be guessed from those before.
        rng = random.SystemRandom()
        secret = read_secret(settings.secret_file)
        self.fabric = Fabric(
            settings,
            config.limits,
            broker.engine,
            broker_name(config),
            rng.getrandbits(60),
            secret,
            b"",
            rng,
            now,
        )
        self.sockets = LinkSockets(self.fabric, settings, broker.monotonic, self.flush)
        wall_s = now + broker.engine.effects.wall_offset
        self.probing = Probing(self.fabric.name, secret, broker.monotonic, self.flush, wall_s)
        self.replicating = Replicating(broker, self.fabric, self.flush)
        self.lines = SetLines(broker, self.fabric, self.flush)
        self.registering: Registering | None = None
        self.grouping: Grouping | None = None
        if settings.controller:
            self.registering = Registering(broker, self.fabric, self.probing)
        registration = None if self.registering is None else self.registering.registration
        self.reporting = Reporting(broker, self.fabric, self.probing.gossip, registration, self.flush)
        if settings.groups.cloud:
            self.grouping = Grouping(broker, self.fabric.broadcast, self.probing, self.flush)

    def open(self) -> None:
        """The journal was read: go on with what it has for other brokers, and where too much of that is to go."""
        persistence = self._broker.config.persistence
        self._loop = asyncio.get_running_loop()
        self.replicating.open()
        self.fabric.begin(self._broker.monotonic())
        if self.registering is not None:
            self.registering.restore(self._broker.monotonic())
        if persistence.directory is not None:
            directory = Path(persistence.directory) / SPOOL
            self._spool = SpoolFiles(directory, self._spilled_later, fsync=persistence.sync == "fsync")
            self.fabric.channels.use_spool(self._spool)
            self.probing.keep_in(Path(persistence.directory))

    def close(self) -> None:
        """What is being written to the spool is to be whole before the journal is closed; the next start does not need it."""
        self.lines.close()
        self.replicating.close()
        spool, self._spool = self._spool, None
        if spool is not None:
            spool.close()

    def _spilled_later(self, session_number: int, file_number: int, failed: StorageUnavailable | None) -> None:
        loop = self._loop
        if loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: the broker has stopped
            loop.call_soon_threadsafe(self._spilled, session_number, file_number, failed)

    def _spilled(self, session_number: int, file_number: int, failed: StorageUnavailable | None) -> None:
        if self._spool is None:
            return
        if failed is not None:
            reason = str(failed)
            self._broker.events.event(
                logging.ERROR, "messages for another broker cannot be put on disk", path=failed.path, reason=reason
            )
        self.fabric.channels.spilled(session_number, file_number, failed is not None)
        self.flush()

    def start(self, listeners: list[BoundListener]) -> None:
        """Everything is bound: say where this broker is reached, and begin to look for the others."""
        settings = self._broker.config.fabric
        self.fabric.routes.address = settings.advertise or advertised(listeners)
        self.probing.start(listeners, self.fabric.routes.address)
        now = self._broker.monotonic()
        for peer in settings.peers:
            self.fabric.dial(peer, now)
            self.probing.gossip.know("", peer, now)
        if settings.controller is not None and self.registering is not None:
            self.registering.start(listeners)
            self.fabric.dial(settings.controller, now)
        if self.grouping is not None:
            self.grouping.start(self.fabric.routes.address, now)
        self.reporting.start()
        self.fabric.tick(now)
        self.flush()

    def transport_for(self, listener: BoundListener) -> LinkTransport:
        """A node connects to a link listener."""

        def peer_of(stream: asyncio.Transport) -> Peer | None:
            peer = listener.peer_of(stream)
            return peer if listener.admits(peer) else None

        return LinkTransport(self.sockets, "", peer_of)

    def flush(self) -> None:
        """What the broker does after every call into its machines."""
        fabric = self.fabric
        fabric.settle(self._broker.monotonic())
        for connection in fabric.presence.take_let_in():
            self._broker.let_in(connection)
        self._flush_engine()
        self.sockets.dial()
        if self.grouping is not None:
            self.grouping.flush()
        self.probing.send()
        for link, up in fabric.take_news():
            self._log(link, up)
        self.replicating.schedule()
        if self._leaving and self._is_idle():
            self._left.set()

    def tick(self, now: float) -> None:
        """Time passed."""
        if self.fabric.next_deadline() <= now:
            self.fabric.tick(now)
            self.flush()
        self.probing.tick(now)
        if self.grouping is not None:
            self.grouping.tick()

    # --- the end --------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Have others take over what they can: clients of gateways, sessions of clients that are away."""
        self._leaving = True
        self.fabric.leave(self._broker.monotonic())
        self.flush()

    async def left(self) -> None:
        """Wait until nothing of that is left, and the others have all that was published here."""
        self._left.clear()
        self.flush()
        if not self._hurried:
            await self._left.wait()

    def _is_idle(self) -> bool:
        if not self.fabric.has_left():
            return False
        sessions = [peer.session for peer in self.fabric.peers.values() if peer.up]
        return not any(session.queued_messages or session.spilled_messages for session in sessions)

    def hurry(self) -> None:
        """Whoever waits for :meth:`left` need not any longer."""
        self._hurried = True
        self._left.set()

    async def stop_functions(self) -> None:
        """End the processes of functions."""
        await self.replicating.functions.close()

    async def say_goodbye(self) -> None:
        """Send away who is still here, and close every link, each once what was sent on it is out; relayed ones first."""
        waiting = sum(peer.session.queued_messages for peer in self.fabric.peers.values() if peer.up)
        clients = self.fabric.trunks.clients()
        if waiting or clients:
            logs.event(logging.WARNING, "leaving before all was handed over", messages=waiting, clients_of_gateways=clients)
        self.sockets.stop_dialling()
        self.fabric.trunks.disconnect_all(reasons.SERVER_SHUTTING_DOWN, self._broker.monotonic())
        self.flush()
        for relayed in (True, False):
            for link in list(self.fabric.links):
                if link.relayed == relayed:
                    link.close("the broker is stopping")
            self.flush()
        if self.grouping is not None:
            self.grouping.socket.say_goodbye()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self.emptied()

    async def emptied(self) -> None:
        """Wait until there is no connection left, to whomever."""
        await self.sockets.emptied()
        if self.grouping is not None:
            await self.grouping.socket.ended()

    def cut(self) -> None:
        """End everything at once; the machines hear nothing."""
        self.reporting.close()
        self.sockets.cut_all()
        if self.grouping is not None:
            self.grouping.socket.cut()
        self.probing.close()

    def abort(self) -> None:
        """End everything at once."""
        self.reporting.close()
        self.sockets.abort_all()
        if self.grouping is not None:
            self.grouping.socket.abort()
        self.probing.close()

    # --- figures --------------------------------------------------------------------------------------------------------

    def _log(self, link: Link, up: bool) -> None:
        facts = {"node": link.name or None, "role": link.role, "address": link.dialed or link.connection.peer.address}
        if up:
            self._broker.events.event(logging.INFO, "link up", **facts)
        elif link.was_up:
            self._broker.events.event(logging.INFO, "link down", **facts, reason=link.close_reason)
        elif not link.met_itself:
            self._broker.events.event(logging.WARNING, "link failed", **facts, reason=link.close_reason)

    def gauges(self) -> dict[str, tuple[float, str]]:
        """Figures for /metrics."""
        fabric = self.fabric
        peers = list(fabric.peers.values())
        up = [link for link in fabric.links if link.is_up]
        return {
            "links": (len(up), "Links to other nodes that are up, relayed ones included."),
            "relayed_links": (sum(link.relayed for link in up), "Links that other brokers relay."),
            "fabric_brokers": (len(peers), "Other brokers known, up or away."),
            "fabric_brokers_up": (sum(peer.up for peer in peers), "Other brokers that can be reached."),
            "fabric_gateways": (sum(link.role == "gateway" for link in up), "Gateways that are connected."),
            **self.probing.gauges(),
            **self.reporting.gauges(),
            **self.replicating.gauges(),
            **({} if self.grouping is None else self.grouping.gauges()),
        }

    def counters(self) -> dict[str, tuple[float, str]]:
        """Figures for /metrics."""
        fabric = self.fabric
        owners, words = fabric.ownership, fabric.ownership.words
        return {
            "relayed_bytes": (fabric.routes.relayed_bytes, "Bytes passed on between other brokers."),
            "link_protocol_errors": (fabric.protocol_errors, "Links ended because the other end was at fault or silent."),
            "fabric_duplicates": (fabric.channels.duplicates, "Messages of other brokers that came again and were known."),
            "fabric_messages_received": (fabric.channels.received_messages, "Messages taken on from other brokers."),
            "fabric_messages_refused": (fabric.channels.refused, "Messages of topics that this broker does not allow."),
            "fabric_gaps": (fabric.channels.gaps, "Times that something was missing on a link and sent again."),
            "fabric_subacks_held": (fabric.interest.held_answers, "SUBACKs that waited for other brokers."),
            "fabric_subacks_late": (fabric.interest.late_answers, "SUBACKs sent before every other broker had answered."),
            "fabric_takeovers": (fabric.presence.takeovers, "Connections ended because their client connected elsewhere."),
            "fabric_sessions_given": (fabric.presence.given, "Sessions that followed their client to another broker."),
            "fabric_moves_out": (fabric.handover.departures.moved, "Sessions handed over to another broker."),
            "fabric_moves_in": (fabric.handover.arrivals.installed, "Sessions taken over from another broker."),
            "fabric_moves_failed": (fabric.handover.departures.failed, "Sessions that were to leave and stayed."),
            "fabric_moves_back": (fabric.handover.departures.thawed, "Clients brought back because their new broker failed."),
            "owned_acquired": (words.acquired, "Topics that this broker became the owner of."),
            "owned_handed_over": (words.handed_over, "Topics handed over to another owner."),
            "owned_orders_refused": (words.refused_orders, "Orders to hand a topic over that could not be followed."),
            "owned_messages_parked": (owners.parked_messages, "Messages that waited for a topic's owner, or for its turn."),
            "owned_messages_passed_on": (
                owners.passed_on_messages,
                "Messages that came here after their topic had left, and were passed on to its owner.",
            ),
            "owned_messages_stale": (owners.stale_messages, "Messages of owners that were none any more, not delivered."),
            "owned_gates_late": (
                owners.late_gates,
                "Waits for what should come first that ended because their time was over.",
            ),
            **self.probing.counters(),
            **self.reporting.counters(),
            **self.replicating.counters(),
            **({} if self.grouping is None else self.grouping.counters()),
        }

    def by_broker(self) -> dict[str, tuple[str, dict[str, float]]]:
        """Figures for /metrics that each other broker has: by name, what they mean and the value by broker."""
        peers = self.fabric.peers.values()
        return {
            "broker_up": ("Whether a broker can be reached.", {peer.name: float(peer.up) for peer in peers}),
            "broker_queued_messages": (
                "QoS 1 and 2 messages that a broker has not confirmed.",
                {peer.name: float(peer.session.queued_messages + peer.session.spilled_messages) for peer in peers},
            ),
            "broker_spilled_bytes": (
                "Bytes of those that wait in files.",
                {peer.name: float(peer.session.spilled_bytes) for peer in peers},
            ),
            "broker_sent_messages": (
                "Messages passed on to a broker since the start, those sent again included.",
                {peer.name: float(peer.session.sent_messages) for peer in peers},
            ),
            "broker_dropped_messages": (
                "Messages for a broker that found no link or no room since the start.",
                {peer.name: float(peer.session.dropped_messages) for peer in peers},
            ),
            "broker_round_trip_ms": (
                "Round-trip time of the link to a broker.",
                {peer.name: peer.link.rtt_ms for peer in peers if peer.link is not None},
            ),
        }

    def figures(self) -> dict[str, int]:
        """Figures for ``$SYS``."""
        peers = self.fabric.peers.values()
        groups = {} if self.grouping is None else self.grouping.figures()
        return {"fabric/brokers/known": len(peers), "fabric/brokers/connected": sum(peer.up for peer in peers), **groups}

    def health(self) -> dict[str, object]:
        """What /healthz shows."""
        brokers: list[dict[str, object]] = []
        for peer in self.fabric.peers.values():
            facts: dict[str, object] = {"name": peer.name, "up": peer.up, "queued": peer.session.queued_messages}
            link = peer.link
            if link is not None:
                facts |= {"relayed": link.relayed, "round_trip_ms": round(link.rtt_ms, 3)}
            brokers.append(facts)
        others = [link for link in self.fabric.links if link.is_up and link.theirs is not None and link.theirs.role != BROKER]
        return {
            "name": self.fabric.name,
            "address": self.fabric.routes.address,
            "brokers": brokers,
            "controller": None if self.registering is None else self.registering.health(),
            "sets": self.replicating.facts(),
            "functions": self.replicating.functions.facts(),
            "others": [{"name": link.name, "role": link.role} for link in others],
        }


def refuse_ownerless(settings: FabricSettings) -> None:
    """Topics of class owned need somebody who says which broker owns them."""
    rule = next((rule for rule in settings.classes if rule.effective_class == "owned"), None)
    if rule is not None and settings.controller is None:
        raise ConfigError(
            f"topics of class owned ({rule.topic}) need a controller, which says who owns them: start the broker with "
            "--controller HOST:PORT and --fabric-secret FILE",
            key="fabric.classes",
        )


def broker_name(config: BrokerConfig) -> str:
    """What this broker is called: what was configured, or its machine and port."""
    if config.fabric.name is not None:
        return config.fabric.name
    port = next((listener.effective_port for listener in config.listeners if listener.kind in MQTT_KINDS), 0)
    if port:
        return f"{socket.gethostname()}:{port}"
    if config.persistence.directory is not None:
        message = "a broker with a data directory and no fixed port needs a name that stays the same: --name"
        raise ConfigError(message, key="fabric.name")
    return f"{socket.gethostname()}:{secrets.token_hex(4)}"


def advertised(listeners: list[BoundListener]) -> str:
    """Where other nodes reach this broker, as far as its listeners tell; empty when nowhere."""
    for listener in listeners:
        if listener.config.kind in LINK_KINDS:
            host = listener.config.host
            if host in ("0.0.0.0", "::", ""):  # noqa: S104  # nothing is bound here
                host = socket.gethostname()
            return join_address(host, listener.port)
    return ""
