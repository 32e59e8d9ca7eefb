"""A gateway's part in moving a client from one broker to another, without the client noticing.

::

    ASKED ──MOVE_READY──► READY ──at a packet boundary──► FROZEN_ASKED ──FROZEN and ADOPTED──► done
      │                                                        │
      └─MOVE_FAILED, time-out: the client stays                ├─ the new broker fails: the old one takes the client back
                                                               └─ the old one is lost: RESUME at the new one

Up to READY nothing has changed. From the moment of FREEZE the client's bytes go to the new broker, with a copy kept until it
says ADOPTED; what the new broker sends is held until the old one has said its last word (FROZEN) and the new one has the
session (ADOPTED). What the brokers do meanwhile is :mod:`nearcast.fabric.handover`'s business.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Final

from nearcast.fabric.parts import FOREVER
from nearcast.fabric.trunk_lines import TrunkLine
from nearcast.fabric.tunnels import OPEN, Channel, Tunnel

if TYPE_CHECKING:
    from nearcast.fabric.gateway import Gateway

ASKED: Final = 0
READY: Final = 1
SWITCHING: Final = 2
"""FREEZE and ADOPT were sent."""
RETURNING: Final = 3
"""The new broker failed; the old one was asked to take the client back."""

MAX_FINISHED: Final = 1_000
MAX_QUEUED: Final = 1_000_000


class Order:
    """A wish to move clients: one by one, as fast as ``clients_per_second`` allows (0: as fast as it goes)."""

    def __init__(self, number: int, target: str, clients_per_second: float, now: float) -> None:
        self.number = number
        self.since = now
        self.target = target
        self.clients_per_second = clients_per_second
        self.waiting: deque[Tunnel] = deque()
        self.under_way = 0
        self.moved = 0
        self.failed = 0
        self.reason = ""
        self.longest_gap_ms = 0.0
        self.next_at = 0.0

    @property
    def finished(self) -> bool:
        return not self.waiting and self.under_way == 0


class Move:
    """One client on its way. See the module."""

    def __init__(self, number: int, tunnel: Tunnel, origin: Channel, target: str, order: Order | None, now: float) -> None:
        self.number = number
        self.tunnel = tunnel
        self.origin = origin
        self.target = target
        self.order = order
        self.phase = ASKED
        self.started_at = now
        self.frozen_at = 0.0
        self.adopting: Channel | None = None
        self.frozen = False
        self.adopted = False

    @property
    def wants_to_freeze(self) -> bool:
        """Whether the client's stream is to be cut at the next packet boundary."""
        return self.phase == READY


class Moves:
    """All moves of a gateway, under way and wanted."""

    def __init__(self, gateway: Gateway, rng: random.Random, at_once: int, timeout_s: float) -> None:
        self._gateway = gateway
        self._rng = rng
        self._at_once = at_once
        self._timeout_s = timeout_s
        self.under_way: dict[int, Move] = {}
        self.orders: list[Order] = []
        #: Orders that are done, until somebody takes them.
        self.finished: deque[Order] = deque(maxlen=MAX_FINISHED)
        self.wants_to_proceed = False
        self.moved = 0
        self.failed = 0
        self.taken_back = 0
        self.longest_gap_ms = 0.0
        self.last_failure = ""

    # --- wishes ---------------------------------------------------------------------------------------------------------

    def order(self, number: int, target: str, tunnels: list[Tunnel], clients_per_second: float, now: float) -> Order:
        """Move these clients to ``target``, a broker's name."""
        order = Order(number, target, clients_per_second, now)
        order.waiting.extend(tunnels[:MAX_QUEUED])
        order.next_at = now
        self.orders.append(order)
        self.proceed(now)
        return order

    def take_finished(self) -> list[Order]:
        taken = list(self.finished)
        self.finished.clear()
        return taken

    def proceed(self, now: float) -> None:
        """Begin as many moves as may be under way."""
        self.wants_to_proceed = False
        for order in list(self.orders):
            busy = 0
            while len(order.waiting) > busy and len(self.under_way) < self._at_once and order.next_at <= now:
                line = self._gateway.lines.get(order.target)
                if line is None:
                    if now >= order.since + self._timeout_s or not self._gateway.reaches(order.target, now):
                        self._give_up(order, f"{order.target} cannot be reached")
                    break
                tunnel = order.waiting.popleft()
                if tunnel.move is not None:
                    order.waiting.append(tunnel)  # its turn comes when that move is over
                    busy += 1
                elif self._begin(tunnel, line, order, now) and order.clients_per_second:
                    order.next_at = max(order.next_at, now - 1.0) + 1 / order.clients_per_second
            if order.finished:
                self.orders.remove(order)
                self.finished.append(order)
                self._gateway.finished_order(order)

    def _give_up(self, order: Order, reason: str) -> None:
        order.failed += len(order.waiting)
        order.reason = reason
        order.waiting.clear()

    def _begin(self, tunnel: Tunnel, line: TrunkLine, order: Order | None, now: float) -> bool:
        """Ask the client's broker to prepare; false when there is nothing to move."""
        origin = tunnel.upstream
        mirror = tunnel.mirror
        if (
            tunnel.state != OPEN
            or tunnel.closing
            or not isinstance(origin, Channel)
            or origin.closed
            or origin.line is line
            or mirror is None
            or not mirror.connected
            or mirror.leaving
        ):
            return False
        move = Move(self._rng.getrandbits(60), tunnel, origin, line.name, order, now)
        self.under_way[move.number] = move
        tunnel.move = move
        if order is not None:
            order.under_way += 1
        origin.line.move(origin, move.number, line.name)
        return True

    # --- what the brokers say -------------------------------------------------------------------------------------------

    def ready(self, move: Move, now: float) -> None:
        """MOVE_READY: everything is prepared."""
        if move.phase != ASKED:
            return
        mirror = move.tunnel.mirror
        if mirror is None or mirror.leaving or self._gateway.lines.get(move.target) is None:
            return  # the old broker gives up by itself
        move.phase = READY
        move.tunnel.drain()

    def freeze(self, move: Move) -> None:
        """The client's stream is at a packet boundary: cut it here."""
        gateway = self._gateway
        tunnel = move.tunnel
        line = gateway.lines.get(move.target)
        if line is None or move.origin.closed:
            move.phase = ASKED  # the old broker gives up by itself, or is gone
            return
        move.phase = SWITCHING
        move.frozen_at = gateway.now
        move.origin.line.freeze(move.origin, move.number)
        channel = line.channel(tunnel, gateway.limits.max_packet_bytes)
        channel.holding = True
        channel.copies = []
        move.adopting = channel
        line.adopt(channel, move.number, tunnel.client_id)
        tunnel.previous = move.origin
        tunnel.upstream = channel

    def was_frozen(self, move: Move, now: float) -> None:
        """FROZEN: the old broker has said its last word."""
        move.frozen = True
        move.origin.line.end(move.origin)
        self._check(move, now)

    def was_adopted(self, move: Move, channel: Channel, now: float) -> None:
        """ADOPTED: the new broker, or the old one again, has the session."""
        if channel is not move.adopting:
            return
        move.adopted = True
        channel.copies = None
        self._check(move, now)

    def _check(self, move: Move, now: float) -> None:
        channel = move.adopting
        if not (move.frozen and move.adopted) or channel is None:
            return
        tunnel = move.tunnel
        tunnel.previous = None
        tunnel.release(channel)
        gap_ms = (now - move.frozen_at) * 1e3
        self.longest_gap_ms = max(self.longest_gap_ms, gap_ms)
        if move.phase == RETURNING:
            self.taken_back += 1
            self._finish(move, False, f"{move.target} failed, {channel.broker} took the client back", now)
        else:
            if move.order is not None:
                move.order.longest_gap_ms = max(move.order.longest_gap_ms, gap_ms)
            self._finish(move, True, "", now)
        tunnel.drain()

    def failed_at(self, move: Move, channel: Channel, reason: str, now: float) -> None:
        """MOVE_FAILED on one of the two channels."""
        if move.phase in (ASKED, READY):
            self._finish(move, False, reason, now)
        elif channel is move.adopting and not move.adopted:
            channel.line.end(channel)
            if move.phase == SWITCHING:
                self._take_back(move, reason, now)
            else:
                self._resume(move, reason, now)

    def _take_back(self, move: Move, reason: str, now: float, *, lost: bool = False) -> None:
        """The new broker does not have the client: the old one still does. One that was ``lost`` may have had it, and have
        passed on what it was sent at QoS 0: that does not go out again."""
        line = move.origin.line
        if self._gateway.lines.get(line.name) is not line:
            self._resume(move, reason, now)
            return
        failed = move.adopting
        move.phase = RETURNING
        tunnel = move.tunnel
        channel = line.channel(tunnel, self._gateway.limits.max_packet_bytes)
        channel.holding = True
        channel.copies = []
        move.adopting = channel
        line.adopt(channel, move.number, tunnel.client_id)
        tunnel.upstream = channel
        if failed is not None and failed.copies is not None:
            sent = b"".join(failed.copies)
            if lost and tunnel.mirror is not None:
                sent = tunnel.mirror.without_unreliable(sent)
            if sent:
                channel.send(sent)
        tunnel.drain()

    def _resume(self, move: Move, reason: str, now: float) -> None:
        """Neither broker has the client as it was: go on with what the gateway knows."""
        tunnel = move.tunnel
        self._finish(move, False, reason, now)
        if move.adopting is not None and not move.adopting.closed:
            move.adopting.line.end(move.adopting)
        if not move.origin.closed:
            move.origin.line.end(move.origin)
        tunnel.previous = None
        if tunnel.mirror is not None:
            tunnel.mirror.remember_lost(move.origin.broker)
            tunnel.mirror.remember_lost(move.target)
        self._gateway.resume(tunnel, now)

    def line_lost(self, move: Move, line: TrunkLine, now: float) -> bool:
        """The link to a broker broke; true when that is all there is to do for the client."""
        if move.phase in (ASKED, READY):
            if move.origin.line is line:
                self._finish(move, False, f"{line.name} was lost", now)
                return False
            return True  # the old broker notices, too, and says so
        adopting = move.adopting
        if adopting is not None and adopting.line is line:
            if move.adopted or move.phase == RETURNING:
                self._resume(move, f"{line.name} was lost", now)
            else:
                self._take_back(move, f"{line.name} was lost", now, lost=True)
        elif move.frozen:
            pass  # the session is on its way to the new broker, which says whether it has it
        elif move.adopted:
            # The old broker has handed the session over, and its last word does not come any more.
            self.was_frozen(move, now)
        else:
            self._resume(move, f"{line.name} was lost", now)
        return True

    def client_gone(self, move: Move, now: float) -> None:
        """The client left in the middle of it."""
        self._finish(move, False, "the client left", now)

    def _finish(self, move: Move, moved: bool, reason: str, now: float) -> None:
        if self.under_way.pop(move.number, None) is None:
            return
        move.tunnel.move = None
        order = move.order
        if moved:
            self.moved += 1
        else:
            self.failed += 1
            self.last_failure = reason
        if order is not None:
            order.under_way -= 1
            order.moved += 1 if moved else 0
            order.failed += 0 if moved else 1
            order.reason = reason or order.reason
        self.wants_to_proceed = True  # at the next settle, when the client has its place again

    # --- time -----------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Give up what takes too long."""
        for move in list(self.under_way.values()):
            if now >= move.started_at + self._timeout_s and move.phase == ASKED:
                self._finish(move, False, f"{move.origin.broker} was not ready in time", now)
            elif move.phase >= SWITCHING and now >= move.frozen_at + self._timeout_s:
                if move.phase == SWITCHING and not move.adopted:
                    if move.adopting is not None:
                        move.adopting.close("took too long")
                    move.frozen_at = now
                    self._take_back(move, f"{move.target} did not take over in time", now)
                else:
                    self._resume(move, "took too long", now)
        self.proceed(now)

    def next_deadline(self) -> float:
        deadline = FOREVER
        for move in self.under_way.values():
            if move.phase == READY:
                continue  # it goes on with the client's next packet, not with time
            began = move.frozen_at if move.phase >= SWITCHING else move.started_at
            deadline = min(deadline, began + self._timeout_s)
        for order in self.orders:
            if order.waiting:
                if order.target not in self._gateway.lines:
                    deadline = min(deadline, order.since + self._timeout_s)
                elif order.next_at > self._gateway.now:
                    deadline = min(deadline, order.next_at)
        return deadline
