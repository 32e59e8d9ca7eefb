"""A gateway in front of brokers that are not part of a fabric (Mosquitto, or anything that speaks MQTT).

Each client has a connection of its own to its broker. To move it, or when its broker is lost, the gateway makes a connection
to another broker in its place (:mod:`nearcast.fabric.replays`)::

    moved:   connect and subscribe at the new one ─► unsubscribe at the old one, wait for its last messages
             ─► wait for its answers to what the client sent ─► DISCONNECT there ─► the new one's output goes to the client
    lost:    connect and subscribe at the next one ─► send again what was not answered

What a broker keeps for itself (queued messages of a session, retained messages, QoS 2 exchanges that it alone knows) stays
there, and brokers that do not forward to each other are worlds of their own; docs/guides/gateway.md says what that means.

A connection that a broker closes while the broker itself can be reached is its verdict on the client, and is passed on. Only
a broker that cannot be reached counts as lost.
"""

from __future__ import annotations

import random
from typing import Final, Protocol

from nearcast.config import Limits
from nearcast.errors import RemoteProtocolError
from nearcast.fabric import replays
from nearcast.fabric.gateway import Gateway, GatewaySettings
from nearcast.fabric.hub import Hub
from nearcast.fabric.replays import Farewell, Replay
from nearcast.fabric.tunnels import CLOSED, OPEN, RESUMING, Tunnel, Upstream
from nearcast.mqtt import reasons

PROBE_S: Final = 15.0
"""How often the way to each broker is measured, by connecting to it."""

FIRST_RETRY_S: Final = 0.5
LAST_RETRY_S: Final = 15.0
DRAIN_S: Final = 1.0
"""How long an old broker may take to answer what the client sent before the move; then it is sent again to the new one."""

ASKED_S: Final = 0.25
"""How long a connection must last to show that a broker is alive."""

ROOM_BYTES: Final = 1_048_576


class PlainHandle(Protocol):
    """A connection to such a broker, as the driver gives it."""

    def send(self, chunks: list[bytes]) -> None:
        """Send bytes after those sent before."""

    def close(self) -> None:
        """Close once what was sent is out."""

    def pause_reading(self) -> None:
        """Read nothing more for now."""

    def resume_reading(self) -> None:
        """Go on reading."""


class PlainBroker:
    """One of the brokers. ``rtt_ms`` is what a TCP handshake took last; ``down`` ones are tried again at ``retry_at``."""

    def __init__(self, address: str, name: str, place: int) -> None:
        self.address = address
        self.name = name
        self.place = place
        self.rtt_ms = 0.0
        self.down = False
        self.retry_s = FIRST_RETRY_S
        self.retry_at = 0.0
        self.clients = 0
        self.failure = ""


class Dial:
    """A connection that is to be opened: for a client, or (without one) to see whether and how fast a broker answers."""

    def __init__(self, broker: PlainBroker, upstream: PlainUpstream | None, now: float) -> None:
        self.broker = broker
        self.upstream = upstream
        self.begun_at = now


class PlainUpstream(Upstream):
    """One client's connection to one broker."""

    def __init__(self, tunnel: Tunnel, to: PlainBroker, max_packet_bytes: int, replay: Replay | None, now: float) -> None:
        super().__init__(tunnel, max_packet_bytes)
        self.to = to
        self.replay = replay
        self.farewell: Farewell | None = None
        self.handle: PlainHandle | None = None
        self.congested = False
        self.since = now
        self.released = False
        self._paused = False
        self.holding = replay is not None
        to.clients += 1

    @property
    def broker(self) -> str:
        return self.to.name

    def room(self) -> int:
        return 0 if self.closed or self.handle is None or self.congested else ROOM_BYTES

    def send(self, data: bytes) -> None:
        if self.handle is not None and not self.closed:
            self.handle.send([data])

    def passed_on(self) -> None:
        if self._paused and self.handle is not None and not self.holding:
            self._paused = False
            self.handle.resume_reading()

    def pause(self) -> None:
        """The client does not take more for now."""
        if not self._paused and self.handle is not None:
            self._paused = True
            self.handle.pause_reading()

    def close(self, reason: str) -> None:
        if not self.closed:
            self.closed = True
            self.to.clients -= 1
            if self.handle is not None:
                self.handle.close()


class PlainGateway(Gateway):
    """See the module."""

    def __init__(
        self,
        hub: Hub,
        limits: Limits,
        settings: GatewaySettings,
        rng: random.Random,
        now: float,
        brokers: list[tuple[str, str]],
        replay_timeout_s: float,
    ) -> None:
        super().__init__(hub, limits, settings, rng, now)
        self.brokers = [PlainBroker(address, name, place) for place, (address, name) in enumerate(brokers)]
        self.replays_done = 0
        self.replays_failed = 0
        self.retained_left_out = 0
        self._replay_timeout_s = replay_timeout_s
        self._dials: list[Dial] = []
        self._probe_at = now
        self._replacing: dict[PlainUpstream, None] = {}
        self._leaving: dict[PlainUpstream, None] = {}
        self._held: dict[PlainUpstream, None] = {}
        self._asking: dict[_Asking, None] = {}
        self._retired: dict[str, PlainBroker] = {}

    # --- what the driver calls ------------------------------------------------------------------------------------------

    def take_plain_dials(self) -> list[Dial]:
        """Connections to open. Each is answered by :meth:`plain_connected` or :meth:`plain_failed`."""
        taken = self._dials
        if taken:
            self._dials = []
        return taken

    def plain_connected(self, dial: Dial, handle: PlainHandle, now: float) -> bool:
        """A connection is there; false when it is not needed (any more) and should be closed."""
        self.now = now
        broker = dial.broker
        broker.rtt_ms = (now - dial.begun_at) * 1e3
        broker.retry_s = FIRST_RETRY_S
        was_down, broker.down = broker.down, False
        upstream = dial.upstream
        wanted = upstream is not None and not upstream.closed
        if isinstance(upstream, _Asking) and wanted:
            # A process that is being killed may still have this one accepted: it counts when it stays.
            upstream.handle = handle
            upstream.since = now
            self._asking[upstream] = None
        elif upstream is not None and wanted:
            upstream.handle = handle
            if upstream.replay is not None:
                self._say(upstream)
            else:
                upstream.tunnel.attach(upstream)
        if was_down:
            self._serve_waiting(now)
        return wanted

    def plain_failed(self, dial: Dial, reason: str, now: float) -> None:
        """It is not."""
        self.now = now
        broker = dial.broker
        broker.failure = reason
        self._went_down(broker, now)
        upstream = dial.upstream
        if upstream is not None and not upstream.closed:
            self._gave_up(upstream, f"{broker.name}: {reason}", now)

    def _went_down(self, broker: PlainBroker, now: float) -> None:
        if not broker.down:
            broker.down = True
            broker.retry_s = FIRST_RETRY_S
        broker.retry_at = now + broker.retry_s * (0.5 + self.rng.random())
        broker.retry_s = min(broker.retry_s * 2, LAST_RETRY_S)

    def plain_receive(self, upstream: PlainUpstream, data: bytes, now: float) -> None:
        """A broker sent bytes."""
        self.now = now
        tunnel = upstream.tunnel
        if upstream.closed or tunnel.closing:
            return
        replay, farewell = upstream.replay, upstream.farewell
        if replay is None and farewell is None:
            tunnel.deliver(upstream, data, now)
        else:
            self._converse(upstream, data, now)
        if tunnel.congested:
            upstream.pause()
        if not tunnel.announced and tunnel.mirror is not None and tunnel.mirror.connected:
            tunnel.announced = True
            if self.on_connected is not None:
                self.on_connected(tunnel)

    def plain_writable(self, upstream: PlainUpstream, now: float) -> None:
        """A broker takes more."""
        self.now = now
        upstream.congested = False
        if upstream.tunnel.upstream is upstream:
            upstream.tunnel.drain()

    def plain_lost(self, upstream: PlainUpstream, now: float) -> None:
        """A connection to a broker is gone."""
        self.now = now
        if upstream.closed:
            return
        tunnel = upstream.tunnel
        if isinstance(upstream, _Asking):
            self._asking.pop(upstream, None)
            self._went_down(upstream.to, now)
            self._gave_up(upstream, f"{upstream.broker} was lost", now)
            return
        if upstream in self._replacing:
            self._gave_up(upstream, f"{upstream.broker} closed the connection", now)
            return
        was_farewell = upstream.farewell is not None
        upstream.close("connection lost")
        if was_farewell:
            self._left(upstream, now)
            return
        mirror = tunnel.mirror
        if tunnel.upstream is not upstream or mirror is None:
            return
        tunnel.upstream = None
        if mirror.leaving or (mirror.connected and not mirror.resumable):
            tunnel.end(f"closed by {upstream.broker}", now)
            return
        # Its verdict on this client, or its end? A broker that can be reached meant this client.
        tunnel.state = RESUMING
        tunnel.since = now
        asking = Dial(upstream.to, _Asking(tunnel, upstream.to, now), now)
        self._dials.append(asking)

    # --- which broker ---------------------------------------------------------------------------------------------------

    def _best(self, but: str = "") -> PlainBroker | None:
        best: PlainBroker | None = None
        for broker in self.brokers:
            if broker.down or broker.name == but:
                continue
            if broker.name == self.choice.home:
                return broker
            if best is None or self._distance(broker) < self._distance(best):
                best = broker
        if best is not None and not but:
            # All clients of a gateway are at one broker as long as it is there: brokers that do not forward to each other are
            # worlds of their own, and a measurement that wavers must not part those who talk to each other.
            self.choice.home = best.name
        return best

    def _distance(self, broker: PlainBroker) -> tuple[float, int]:
        return (broker.rtt_ms or 1e6, broker.place)

    def place(self, tunnel: Tunnel, now: float) -> None:
        self._greeting.pop(tunnel, None)
        broker = self._best()
        if broker is None:
            self._wait(tunnel, now)
            return
        self._waiting.pop(tunnel, None)
        tunnel.state = RESUMING
        tunnel.since = now
        upstream = PlainUpstream(tunnel, broker, self.limits.max_packet_bytes, None, now)
        tunnel.upstream = upstream
        self._dials.append(Dial(broker, upstream, now))

    def resume(self, tunnel: Tunnel, now: float, but: str = "") -> None:
        mirror = tunnel.mirror
        if tunnel.closing or tunnel.state == CLOSED or mirror is None:
            return
        tunnel.lost(complete_here=True)
        if not mirror.connected:
            if mirror.authenticating:
                tunnel.end("the broker was lost", now)
            else:
                self.place(tunnel, now)
            return
        broker = self._best(but)
        if broker is None:
            self._wait(tunnel, now)
            return
        self._waiting.pop(tunnel, None)
        tunnel.state = RESUMING
        tunnel.since = now
        tunnel.upstream = self._begin_replay(tunnel, broker, now)

    def _begin_replay(self, tunnel: Tunnel, broker: PlainBroker, now: float) -> PlainUpstream | None:
        mirror = tunnel.mirror
        if mirror is None:
            return None
        upstream = PlainUpstream(tunnel, broker, self.limits.max_packet_bytes, Replay(mirror), now)
        self._replacing[upstream] = None
        self._dials.append(Dial(broker, upstream, now))
        return upstream

    def _serve_waiting(self, now: float) -> None:
        for tunnel in list(self._waiting):
            if tunnel.mirror is not None and tunnel.mirror.connected:
                self.resume(tunnel, now)
            else:
                self.place(tunnel, now)

    def reaches(self, name: str, now: float) -> bool:
        return any(broker.name == name and not broker.down for broker in self.brokers)

    def connect(self, now: float) -> None:
        """There are no links to keep."""

    def use(self, addresses: list[tuple[str, str]], now: float) -> None:
        before = {broker.address: broker for broker in self.brokers}
        self.brokers = []
        for place, (address, name) in enumerate(addresses):
            broker = before.pop(address, None) or PlainBroker(address, name, place)
            broker.place = place
            self.brokers.append(broker)
        self._probe_at = now
        for address, broker in before.items():
            self._retired[address] = broker
        for address, _ in addresses:
            self._retired.pop(address, None)
        self._retire(now)

    def _retire(self, now: float) -> None:
        """Move clients away from brokers that are no longer named, until nobody is left there."""
        target = self._best()
        for address, broker in list(self._retired.items()):
            if not broker.clients:
                del self._retired[address]
            elif target is not None:
                self.move(target.name, now, origin=broker.name)

    def _look(self, now: float) -> None:
        super()._look(now)
        self._retire(now)

    # --- moves ----------------------------------------------------------------------------------------------------------

    def move(self, target: str, now: float, client: str = "", origin: str = "", number: int = 0, per_second: float = 0) -> int:
        moved = 0
        broker = next((broker for broker in self.brokers if broker.name == target), None)
        if broker is not None and not client and not origin:
            self.choice.home = target
        for tunnel in list(self.tunnels):
            upstream = tunnel.upstream
            mirror = tunnel.mirror
            if broker is None or not isinstance(upstream, PlainUpstream) or mirror is None:
                continue
            movable = tunnel.state == OPEN and not tunnel.closing and mirror.resumable and upstream.farewell is None
            movable = movable and not upstream.holding
            elsewhere = upstream.to is not broker and (not origin or upstream.broker == origin)
            if not movable or not elsewhere or (client and mirror.client_id != client):
                continue
            if any(other.tunnel is tunnel for other in self._replacing):
                continue
            self._begin_replay(tunnel, broker, now)
            moved += 1
        return moved

    def _say(self, upstream: PlainUpstream) -> None:
        if upstream.replay is not None and upstream.handle is not None:
            packets = upstream.replay.take()
            if packets:
                upstream.handle.send(packets)

    def _converse(self, upstream: PlainUpstream, data: bytes, now: float) -> None:
        """A broker's part of a replay or a farewell is taken out of what it sends."""
        tunnel = upstream.tunnel
        try:
            run = upstream.cutter.feed(data)
        except RemoteProtocolError as error:
            tunnel.end(f"{upstream.broker}: {error.message}", now)
            return
        replay = upstream.replay
        if replay is not None and run:
            run = replay.filter(run)
            self._say(upstream)
        farewell = upstream.farewell
        if farewell is not None and run:
            run = farewell.filter(run)
        if run:
            tunnel.pass_run(upstream, run)
        if replay is not None and upstream in self._replacing:
            if replay.state == replays.DONE:
                self._replayed(upstream, now)
            elif replay.state == replays.FAILED:
                self._gave_up(upstream, replay.failure, now)
        elif replay is not None and replay.over:
            upstream.replay = None
        if farewell is not None and farewell.done and not upstream.closed:
            self._hush(upstream, now)

    def _replayed(self, upstream: PlainUpstream, now: float) -> None:
        """The client has a place at the new broker."""
        del self._replacing[upstream]
        self.replays_done += 1
        if upstream.replay is not None:
            self.retained_left_out += upstream.replay.retained
        tunnel = upstream.tunnel
        old = tunnel.upstream
        if old is upstream:
            self.stats.resumed += 1
            self._take_over(upstream, now)
            return
        mirror = tunnel.mirror
        if not isinstance(old, PlainUpstream) or mirror is None or tunnel.state != OPEN:
            upstream.close("not needed")
            return
        tunnel.previous = upstream
        old.farewell = Farewell(mirror)
        old.since = now
        self._leaving[old] = None
        for packet in old.farewell.packets:
            old.send(packet)

    def _hush(self, old: PlainUpstream, now: float) -> None:
        """The old broker has sent all it had: now the client waits until it has answered what the client sent."""
        tunnel = old.tunnel
        mirror = tunnel.mirror
        if tunnel.upstream is old and mirror is not None:
            if tunnel.settling is None:
                tunnel.state = RESUMING
                tunnel.since = now
                tunnel.settling = old
            if mirror.at_rest:
                self._left(old, now)

    def _left(self, old: PlainUpstream, now: float) -> None:
        """The client is no longer at the old broker."""
        self._leaving.pop(old, None)
        tunnel = old.tunnel
        mirror = tunnel.mirror
        successor = tunnel.previous
        tunnel.previous = None
        if mirror is None or tunnel.closing:
            return
        if not old.closed:
            old.send(replays.goodbye(mirror.version))
            old.close("moved")
        tunnel.lost(complete_here=True)
        if isinstance(successor, PlainUpstream) and not successor.closed:
            self.moves.moved += 1
            tunnel.upstream = successor
            self._take_over(successor, now)
        else:
            self.moves.failed += 1
            self.resume(tunnel, now)

    def _take_over(self, upstream: PlainUpstream, now: float) -> None:
        tunnel = upstream.tunnel
        upstream.since = now
        if upstream.replay is not None:
            upstream.replay.catch_up()
            self._say(upstream)
        tunnel.resumed()
        self._release(upstream, now)

    def _release(self, upstream: PlainUpstream, now: float) -> None:
        """The new broker's messages go to the client once exchanges that the old one began are over: the two may use the same
        packet identifiers, and a client that still has one takes the other for a duplicate."""
        mirror = upstream.tunnel.mirror
        if mirror is None or upstream.released or upstream.tunnel.upstream is not upstream:
            return
        if not mirror.orphans or now - upstream.since >= DRAIN_S:
            self._held.pop(upstream, None)
            upstream.released = True
            upstream.tunnel.release(upstream)
        else:
            self._held[upstream] = None

    def _gave_up(self, upstream: PlainUpstream, reason: str, now: float) -> None:
        """No place at that broker."""
        self._replacing.pop(upstream, None)
        upstream.close(reason)
        tunnel = upstream.tunnel
        if isinstance(upstream, _Asking):
            self.stats.brokers_lost += 1
            self.resume(tunnel, now)
            return
        if upstream.replay is not None:
            self.replays_failed += 1
            self.moves.last_failure = reason
        if tunnel.upstream is not upstream:
            self.moves.failed += 1
            return  # it stays where it is
        tunnel.upstream = None
        replay = upstream.replay
        if replay is not None and replay.state == replays.FAILED:
            self.stats.resume_failed += 1
            tunnel.refuse(reasons.SERVER_UNAVAILABLE, reason, now)
        elif replay is not None:
            self.resume(tunnel, now)
        else:
            self.place(tunnel, now)

    # --- clients --------------------------------------------------------------------------------------------------------

    def receive(self, tunnel: Tunnel, data: bytes, now: float) -> None:
        super().receive(tunnel, data, now)
        upstream = tunnel.upstream
        if isinstance(upstream, PlainUpstream):
            if upstream.holding and upstream not in self._replacing:
                self._release(upstream, now)
            elif tunnel.settling is upstream:
                self._hush(upstream, now)

    def leave_brokers(self, tunnel: Tunnel, reason: str, now: float) -> None:
        for upstream in list(self._replacing):
            if upstream.tunnel is tunnel:
                del self._replacing[upstream]
                upstream.close(reason)
        successor, tunnel.previous = tunnel.previous, None
        if isinstance(successor, PlainUpstream):
            mirror = tunnel.mirror
            if mirror is not None and mirror.leaving:
                successor.send(replays.goodbye(mirror.version))
            successor.close(reason)
        if isinstance(tunnel.upstream, PlainUpstream):
            self._leaving.pop(tunnel.upstream, None)
        super().leave_brokers(tunnel, reason, now)

    # --- time -----------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        super().tick(now)
        for upstream in list(self._replacing):
            if now - upstream.since >= self._replay_timeout_s:
                self._gave_up(upstream, f"{upstream.broker} did not take the client in time", now)
        for old in list(self._leaving):
            if now - old.since >= DRAIN_S:
                self._left(old, now)
        for asking in list(self._asking):
            if now - asking.since >= ASKED_S:
                del self._asking[asking]
                asking.close("answered")
                asking.tunnel.end(f"closed by {asking.broker}", now)
        for upstream in list(self._held):
            if upstream.closed or upstream.tunnel.upstream is not upstream:
                del self._held[upstream]
            else:
                self._release(upstream, now)
        for broker in self.brokers:
            if broker.down and broker.retry_at <= now:
                self._went_down(broker, now)
                self._dials.append(Dial(broker, None, now))
        if now >= self._probe_at:
            self._probe_at = now + PROBE_S
            if len(self.brokers) > 1:
                for broker in self.brokers:
                    if not broker.down:
                        self._dials.append(Dial(broker, None, now))

    def next_deadline(self) -> float:
        deadline = min(super().next_deadline(), self._probe_at)
        for upstream in self._replacing:
            deadline = min(deadline, upstream.since + self._replay_timeout_s)
            break
        for old in self._leaving:
            deadline = min(deadline, old.since + DRAIN_S)
            break
        for asking in self._asking:
            deadline = min(deadline, asking.since + ASKED_S)
            break
        for upstream in self._held:
            deadline = min(deadline, upstream.since + DRAIN_S)
            break
        for broker in self.brokers:
            if broker.down:
                deadline = min(deadline, broker.retry_at)
        return deadline


class _Asking(PlainUpstream):
    """Not a connection for a client, but the question whether its broker can be reached at all."""

    def __init__(self, tunnel: Tunnel, to: PlainBroker, now: float) -> None:
        super().__init__(tunnel, to, 1, None, now)
