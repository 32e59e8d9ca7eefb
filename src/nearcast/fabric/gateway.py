"""A gateway: clients on one side, brokers on the other, and the freedom to change the broker behind a client's back.

The machine has no sockets and no clock. A driver accepts clients (:meth:`Gateway.accept`), brings what they send, and moves
the bytes of links for the :class:`~nearcast.fabric.hub.Hub`; after every call it calls ``hub.settle`` and ``hub.flush``.

A broker that is lost is replaced at once by the next best one, which goes on with what the gateway knows of the client's
session (RESUME). While there is none at all, clients are kept for a while and what they send waits. Nothing here waits for a
controller: it improves the choice of a broker, and its absence leaves it as it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from nearcast.config import Limits
from nearcast.errors import RemoteProtocolError
from nearcast.fabric import frames, links
from nearcast.fabric.choosing import Choice
from nearcast.fabric.direct import Direct
from nearcast.fabric.following import Following
from nearcast.fabric.hub import Hub
from nearcast.fabric.links import Link
from nearcast.fabric.moving import Move, Moves, Order
from nearcast.fabric.parts import LinkUser
from nearcast.fabric.places import PlaceTeller
from nearcast.fabric.trunk_lines import TrunkLine
from nearcast.fabric.tunnels import CLOSED, GREETING, OPEN, RESUMING, WAITING, Channel, ClientHandle, Tunnel
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Peer
from nearcast.mqtt.records import Fields
from nearcast.mqtt.session import packet_ids_of

RECONSIDER_S: Final = 15.0
"""How often a gateway without a controller looks for a nearer broker."""

FIRST_LOOK_S: Final = 1.0
IDLE_LINK_S: Final = 30.0
"""A link that nobody uses and nothing is planned with is closed after so long."""


class GatewaySettings:
    """What a gateway's machine needs to know, besides :class:`~nearcast.config.Limits`."""

    def __init__(
        self,
        patience_s: float = 10.0,
        max_kept_bytes: int = 4_194_304,
        moves_at_once: int = 64,
        move_timeout_s: float = 10.0,
        publish_to_owners: bool = True,
        follow_owners: bool = True,
    ) -> None:
        #: How long a client waits for a broker before it is sent away.
        self.patience_s = patience_s
        #: Bytes of unanswered requests and messages of one client; it is not read from beyond.
        self.max_kept_bytes = max_kept_bytes
        self.moves_at_once = moves_at_once
        self.move_timeout_s = move_timeout_s
        #: Whether what clients publish of owned topics goes straight to the owner.
        self.publish_to_owners = publish_to_owners
        #: Whether clients whose subscriptions all have one owner are moved there.
        self.follow_owners = follow_owners


class GatewayStats:
    """Counters since the start."""

    def __init__(self) -> None:
        self.opened = 0
        self.refused = 0
        self.resumed = 0
        self.resume_failed = 0
        self.brokers_lost = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.messages_in = 0
        self.messages_out = 0


class Gateway(LinkUser):
    """See the module."""

    def __init__(self, hub: Hub, limits: Limits, settings: GatewaySettings, rng: random.Random, now: float) -> None:
        self.hub = hub
        self.limits = limits
        self.settings = settings
        self.rng = rng
        self.now = now
        self.stats = GatewayStats()
        self.lines: dict[str, TrunkLine] = {}
        self.choice = Choice(self.lines)
        self.moves = Moves(self, rng, settings.moves_at_once, settings.move_timeout_s)
        self.direct = Direct(self, settings.publish_to_owners)
        self.following = Following(self, settings.follow_owners)
        self.tunnels: dict[Tunnel, None] = {}
        self.places = PlaceTeller(self)
        #: For logs and reports; called with a client that is in, one that is gone, a broker that came or was lost.
        self.on_connected: Callable[[Tunnel], None] | None = None
        self.on_ended: Callable[[Tunnel], None] | None = None
        self.on_line: Callable[[TrunkLine, bool], None] | None = None
        self.on_order: Callable[[Order], None] | None = None
        self._by_link: dict[Link, TrunkLine] = {}
        self._greeting: dict[Tunnel, None] = {}
        self._waiting: dict[Tunnel, None] = {}
        self._dirty: list[Tunnel] = []
        self._kept_dials: dict[str, float] = {}
        self._reconsider_at = now + FIRST_LOOK_S
        self._next_look = now + FIRST_LOOK_S
        hub.users[links.BROKER] = self

    # --- clients --------------------------------------------------------------------------------------------------------

    def accept(self, handle: ClientHandle, peer: Peer, now: float) -> Tunnel:
        """A client's transport is there."""
        self.now = now
        tunnel = Tunnel(self, handle, peer, now)
        self.tunnels[tunnel] = None
        self._greeting[tunnel] = None
        self.stats.opened += 1
        return tunnel

    def receive(self, tunnel: Tunnel, data: bytes, now: float) -> None:
        """A client sent bytes."""
        self.now = now
        self.stats.bytes_in += len(data)
        tunnel.receive(data, now)

    def writable(self, tunnel: Tunnel, now: float) -> None:
        """A client's transport has room again."""
        self.now = now
        tunnel.congested = False
        self.touch(tunnel)

    def lost(self, tunnel: Tunnel, now: float) -> None:
        """A client's transport is gone."""
        self.now = now
        if tunnel.state == CLOSED:
            return
        mirror = tunnel.mirror
        reason = "client disconnected" if mirror is not None and mirror.leaving else "connection lost"
        self.leave_brokers(tunnel, reason, now)
        tunnel.close_reason = tunnel.close_reason or reason
        tunnel.state = CLOSED
        self.tunnels.pop(tunnel, None)
        self.stats.bytes_out += tunnel.bytes_out
        if mirror is not None:
            self.stats.messages_in += mirror.messages_in
            self.stats.messages_out += mirror.messages_out
        if self.on_ended is not None:
            self.on_ended(tunnel)

    def leave_brokers(self, tunnel: Tunnel, reason: str, now: float) -> None:
        """Tell the brokers of a client that it is gone."""
        self._greeting.pop(tunnel, None)
        self._waiting.pop(tunnel, None)
        self.following.forget(tunnel)
        self.direct.client_gone(tunnel)
        if tunnel.move is not None:
            self.moves.client_gone(tunnel.move, now)
        upstream, tunnel.upstream = tunnel.upstream, None
        if upstream is not None:
            upstream.close(reason)
        # One that was frozen hears from the other broker; its channel carries nothing more.
        previous, tunnel.previous = tunnel.previous, None
        if isinstance(previous, Channel) and not previous.closed:
            previous.line.end(previous)

    def touch(self, tunnel: Tunnel) -> None:
        """Look at a client before the next flush."""
        if tunnel.mark():
            self._dirty.append(tunnel)

    # --- which broker ---------------------------------------------------------------------------------------------------

    def place(self, tunnel: Tunnel, now: float) -> None:
        """A client that connects gets the best broker there is, or waits for one."""
        self._greeting.pop(tunnel, None)
        line = self.choice.best()
        if line is None:
            self._wait(tunnel, now)
            return
        self._waiting.pop(tunnel, None)
        channel = line.channel(tunnel, self.limits.max_packet_bytes)
        line.open(channel)
        tunnel.attach(channel)

    def resume(self, tunnel: Tunnel, now: float, but: str = "") -> None:
        """A client whose broker was lost without a handover goes on at the next best one."""
        mirror = tunnel.mirror
        if tunnel.closing or tunnel.state == CLOSED or mirror is None:
            return
        if tunnel.upstream is not None and mirror.connected:
            mirror.remember_lost(tunnel.upstream.broker)
        tunnel.lost(complete_here=False)
        if not mirror.connected and not mirror.authenticating:
            self.place(tunnel, now)
            return
        if not mirror.resumable:
            tunnel.end("the broker was lost", now)
            return
        self.following.forget(tunnel)
        line = self.choice.best(but)
        if line is None:
            self._wait(tunnel, now)
            return
        self._waiting.pop(tunnel, None)
        channel = line.channel(tunnel, self.limits.max_packet_bytes)
        tunnel.upstream = channel
        tunnel.state = RESUMING
        tunnel.since = now
        line.resume(channel, mirror.facts())

    def _wait(self, tunnel: Tunnel, now: float) -> None:
        if tunnel not in self._waiting:
            self._waiting[tunnel] = None
            tunnel.since = now
        tunnel.state = WAITING

    def reaches(self, name: str, now: float) -> bool:
        """Whether there is or may soon be a link to a broker."""
        if name in self.lines:
            return True
        known = self.choice.named(name)
        if known is None:
            return False
        self._keep(known.address, now)
        return True

    def _keep(self, address: str, now: float) -> None:
        self._kept_dials[address] = now
        self.hub.dial(address, now)

    def connect(self, now: float) -> None:
        """Keep the links that are wanted, and let go of those that are not."""
        for address in self.choice.wanted():
            self._keep(address, now)
        for line in list(self.lines.values()):
            if line.channels:
                self._kept_dials[line.link.dialed] = now
        for address, wanted_at in list(self._kept_dials.items()):
            if now - wanted_at > IDLE_LINK_S:
                del self._kept_dials[address]
                self.hub.forget_address(address)
                for line in list(self.lines.values()):
                    if line.link.dialed == address:
                        line.link.close("no longer used")

    def use(self, addresses: list[tuple[str, str]], now: float) -> None:
        """These are the configured brokers from now on, (address, name or nothing) each. Clients leave those that are not
        among them, as far as there are others."""
        listed = {address for address, _ in addresses}
        for known in self.choice.known.values():
            if known.configured and known.address not in listed:
                known.configured = False
                known.draining = True
        for address, name in addresses:
            self.choice.add(address, name, configured=True).draining = False
        self.connect(now)
        for line in list(self.lines.values()):
            found = self.choice.named(line.name)
            if found is not None and found.address == line.link.dialed:
                line.leaving = line.leaving or found.draining
                if line.leaving:
                    self._empty(line, now)

    def assign(self, home: str, ranking: list[str], now: float) -> None:
        """The controller's word: the broker for clients that come, and where to go if it is lost."""
        self.choice.home = home
        self.choice.ranking = ranking
        self.choice.governed = bool(home)
        self.connect(now)

    def move(self, target: str, now: float, client: str = "", origin: str = "", number: int = 0, per_second: float = 0) -> int:
        """Move clients to the broker ``target``: all that are elsewhere, or those at ``origin``, or one. Returns how many.

        Those that follow the owner of what they subscribed to stay where they are, unless they are meant by name or place."""
        chosen: list[Tunnel] = []
        for tunnel in self.tunnels:
            upstream = tunnel.upstream
            if upstream is None or upstream.broker == target:
                continue
            if not client and not origin and tunnel.followed:
                continue
            if (not client or tunnel.client_id == client) and (not origin or upstream.broker == origin):
                chosen.append(tunnel)
        self.moves.order(number, target, chosen, per_second, now)
        return len(chosen)

    def finished_order(self, order: Order) -> None:
        """An order to move clients is done."""
        if self.on_order is not None:
            self.on_order(order)

    # --- links to brokers -----------------------------------------------------------------------------------------------

    def link_up(self, link: Link, now: float) -> None:
        self.now = now
        theirs = link.theirs
        if theirs is None:
            return
        before = self.lines.get(theirs.name)
        if before is not None:
            if before.link.state == links.UP and before.link.dialed != link.dialed:
                link.close("there is another link between the two")
                self.hub.forget_address(link.dialed)
                return
            before.link.close_reason = "a newer link took over"
            before.link.end()  # without a goodbye, on which the broker would end the sessions of clients that are here
            self.link_down(before.link, now)
        self.choice.add(link.dialed, theirs.name)
        line = TrunkLine(theirs.name, link)
        self.lines[theirs.name] = line
        self._by_link[link] = line
        if self.on_line is not None:
            self.on_line(line, True)
        for tunnel in list(self._waiting):
            if tunnel.mirror is not None and tunnel.mirror.connected:
                self.resume(tunnel, now)
            else:
                self.place(tunnel, now)
        self.moves.proceed(now)

    def link_down(self, link: Link, now: float) -> None:
        self.now = now
        line = self._by_link.pop(link, None)
        if line is None:
            return
        if self.lines.get(line.name) is line:
            del self.lines[line.name]
        self.stats.brokers_lost += 1
        if self.on_line is not None:
            self.on_line(line, False)
        channels = list(line.channels.values())
        line.channels.clear()
        for channel in channels:
            channel.closed = True
        affected: dict[Tunnel, None] = {}
        for channel in channels:
            affected[channel.tunnel] = None
        self.direct.line_lost(line)
        # Moves to this broker have no channel there before they switch.
        for move in list(self.moves.under_way.values()):
            if move.target == line.name:
                affected[move.tunnel] = None
        for tunnel in affected:
            if tunnel.state == CLOSED or tunnel.closing:
                continue
            if tunnel.move is not None and self.moves.line_lost(tunnel.move, line, now):
                continue
            upstream = tunnel.upstream
            if isinstance(upstream, Channel) and upstream.line is line:
                self.resume(tunnel, now)

    def link_writable(self, link: Link, now: float) -> None:
        self.now = now
        line = self._by_link.get(link)
        if line is not None:
            self.direct.drain(line)
            for channel in list(line.channels.values()):
                if channel.tunnel.pending_bytes and channel.tunnel.upstream is channel:
                    channel.tunnel.drain()

    def link_frame(self, link: Link, content: bytes, now: float) -> None:
        self.now = now
        line = self._by_link.get(link)
        if line is None:
            return
        kind = content[0]
        if kind == frames.LEAVING:
            line.leaving = True
            self._empty(line, now)
            return
        fields = Fields(content)
        if frames.OWNER <= kind <= frames.OWNED_ACK:
            self.direct.handle(line, kind, fields, now)
            return
        channel = line.channels.get(fields.number())
        if kind == frames.FOLLOW:
            if channel is not None:
                self.following.told(channel, fields.blob().decode("utf-8"), now)
            return
        if kind < frames.CLIENT_DATA or kind > frames.FOUND:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"frame {kind} is not for a gateway")
        if channel is None:
            return  # the client left, and the broker has yet to hear of it
        tunnel = channel.tunnel
        if kind == frames.CLIENT_DATA:
            data = content[fields.position :]
            channel.unconfirmed_bytes += len(data)
            tunnel.deliver(channel, data, now)
            if not tunnel.announced and tunnel.mirror is not None and tunnel.mirror.connected:
                tunnel.announced = True
                if self.on_connected is not None:
                    self.on_connected(tunnel)
        elif kind == frames.CLIENT_WINDOW:
            channel.outstanding_bytes = max(0, channel.outstanding_bytes - fields.number())
            if tunnel.pending_bytes and tunnel.upstream is channel:
                tunnel.drain()
        elif kind == frames.CLIENT_CLOSE:
            self._closed_by_broker(channel, fields.blob().decode("utf-8", "replace"), now)
        elif kind == frames.RESUMED:
            if tunnel.state == RESUMING and tunnel.upstream is channel:
                self.stats.resumed += 1
                tunnel.resumed()
        elif kind == frames.FOUND:
            if tunnel.upstream is channel and tunnel.mirror is not None:
                subscriptions: list[tuple[str, int, int]] = []
                for _ in range(fields.number()):
                    topic_filter = fields.blob().decode("utf-8")
                    options = fields.number()
                    subscriptions.append((topic_filter, options, fields.number()))
                tunnel.mirror.found(subscriptions, packet_ids_of(fields.blob()))
        else:
            self._move_frame(kind, channel, fields, now)

    def _closed_by_broker(self, channel: Channel, reason: str, now: float) -> None:
        tunnel = channel.tunnel
        channel.line.end(channel)
        if tunnel.upstream is not channel:
            return
        if tunnel.state == RESUMING:
            self.stats.resume_failed += 1
        tunnel.end(reason or f"closed by {channel.broker}", now)

    def _move_frame(self, kind: int, channel: Channel, fields: Fields, now: float) -> None:
        move: Move | None = self.moves.under_way.get(fields.number())
        if move is None or move.tunnel is not channel.tunnel:
            return  # given up meanwhile
        if kind == frames.MOVE_READY:
            self.moves.ready(move, now)
        elif kind == frames.FROZEN and channel is move.origin:
            self.moves.was_frozen(move, now)
        elif kind == frames.ADOPTED:
            self.moves.was_adopted(move, channel, now)
        elif kind == frames.MOVE_FAILED:
            self.moves.failed_at(move, channel, fields.blob().decode("utf-8", "replace"), now)
        else:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"frame {kind} is not for a gateway")

    def _empty(self, line: TrunkLine, now: float) -> None:
        """Move all clients away from a broker that stops."""
        target = self.choice.best(line.name)
        if target is None or target.leaving:
            return
        queued: set[Tunnel] = set()
        for order in self.moves.orders:
            queued.update(order.waiting)
        chosen: list[Tunnel] = []
        for channel in line.channels.values():
            tunnel = channel.tunnel
            if tunnel.upstream is channel and tunnel.move is None and tunnel not in queued:
                chosen.append(tunnel)
        if chosen:
            self.moves.order(0, target.name, chosen, 0.0, now)

    # --- time -----------------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        self.now = now
        if self.moves.wants_to_proceed:
            self.moves.proceed(now)
        while self._dirty:
            dirty, self._dirty = self._dirty, []
            for tunnel in dirty:
                tunnel.settle()

    def tick(self, now: float) -> None:
        self.now = now
        for tunnel in list(self._greeting):
            if now < tunnel.opened_at + self.limits.connect_timeout_seconds:
                break
            tunnel.end("no CONNECT in time", now)
        for tunnel in list(self._waiting):
            if now < tunnel.since + self.settings.patience_s:
                break
            self.stats.refused += 1
            tunnel.refuse(reasons.SERVER_UNAVAILABLE, "there is no broker", now)
        self.moves.tick(now)
        self.places.tick(now)
        self.direct.tick(now)
        self.following.tick(now)
        if now >= self._next_look:
            self._look(now)

    def _look(self, now: float) -> None:
        """Every second: links, brokers that stop, and, without a controller, whether another broker is nearer."""
        self._next_look = now + FIRST_LOOK_S
        self.connect(now)
        for line in list(self.lines.values()):
            if line.leaving and line.channels:
                self._empty(line, now)
        for tunnel in list(self.tunnels):
            if tunnel.state == RESUMING and now >= tunnel.since + self.settings.patience_s:
                self.stats.resume_failed += 1
                tunnel.refuse(reasons.SERVER_UNAVAILABLE, "no broker went on with it in time", now)
        if not self.choice.governed and now >= self._reconsider_at:
            self._reconsider_at = now + RECONSIDER_S
            target = self.choice.reconsider()
            if target and any(tunnel.state == OPEN for tunnel in self.tunnels):
                self.move(target, now)

    def next_deadline(self) -> float:
        deadline = min(self._next_look, self.moves.next_deadline(), self.places.next_deadline())
        deadline = min(deadline, self.direct.next_look, self.following.next_look)
        for tunnel in self._greeting:
            deadline = min(deadline, tunnel.opened_at + self.limits.connect_timeout_seconds)
            break
        for tunnel in self._waiting:
            deadline = min(deadline, tunnel.since + self.settings.patience_s)
            break
        return deadline

    def totals(self) -> tuple[int, int, int]:
        """Messages from clients, messages to clients, bytes to clients, since the start."""
        messages_in = self.stats.messages_in
        messages_out = self.stats.messages_out
        bytes_out = self.stats.bytes_out
        for tunnel in self.tunnels:
            bytes_out += tunnel.bytes_out
            mirror = tunnel.mirror
            if mirror is not None:
                messages_in += mirror.messages_in
                messages_out += mirror.messages_out
        return messages_in, messages_out, bytes_out

    def count(self, state: int) -> int:
        """Clients in a state of :mod:`nearcast.fabric.tunnels`."""
        if state == GREETING:
            return len(self._greeting)
        if state == WAITING:
            return len(self._waiting)
        return sum([1 for tunnel in self.tunnels if tunnel.state == state])
