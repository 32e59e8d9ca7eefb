"""Moves that a controller ordered: waiting, under way and past, each with its reason; and how fast they may go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from nearcast.fabric.control import MoveOrder, Outcome

MAX_PAST: Final = 1_000
MAX_PENDING: Final = 100_000

MoveState = Literal["waiting", "ordered", "accepted", "done", "failed", "superseded"]


class Move(msgspec.Struct, kw_only=True):
    """One move of a gateway's clients, or of one client. Times are wall-clock seconds; ``0`` is not yet."""

    number: int
    gateway: str
    client: str = ""
    origin: str = ""
    target: str
    kind: str
    """nearer, balance, draining, gone, first or manual."""
    reason: str = ""
    state: MoveState = "waiting"
    created_at: float = 0.0
    ordered_at: float = 0.0
    ended_at: float = 0.0
    moved_clients: int = 0
    failed_clients: int = 0
    longest_gap_ms: float = 0.0
    detail: str = ""
    clients_per_second: float = 0.0
    strays: bool = False
    """Only clients that are at ``origin``, though their gateway is not: they were moved there by hand."""
    repeated: bool = False
    """Ordered before, on a link that is gone. Over UDP the gateway would take it for a repetition and do nothing."""

    @property
    def place(self) -> tuple[str, str, str]:
        """What this is a move of; one of them is pending at a time."""
        return (self.gateway, self.client, self.origin if self.strays else "")

    @property
    def pending(self) -> bool:
        return self.state in ("waiting", "ordered", "accepted")

    def order(self) -> MoveOrder:
        return MoveOrder(
            number=self.number,
            target=self.target,
            origin=self.origin if self.client or self.strays else "",
            client=self.client,
            clients_per_second=self.clients_per_second,
        )


class Moves:
    """All of them. At most one per gateway, and one per client, is pending: a newer one takes the older one's place.

    Those that only improve things are spread out, ``at_once`` at a time; those that are urgent (the broker is gone) are not;
    those of one drain go one gateway after the other.
    """

    def __init__(self, first_number: int, at_once: int, timeout_s: float) -> None:
        self._next_number = first_number
        self._at_once = at_once
        self._timeout_s = timeout_s
        self.pending: dict[tuple[str, str, str], Move] = {}
        self.by_number: dict[int, Move] = {}
        self.past: deque[Move] = deque(maxlen=MAX_PAST)
        self.counts: dict[str, int] = {}
        self._deadlines: dict[int, float] = {}

    def add(self, move: Move) -> bool:
        """A move that is wanted; its number is given here. False when the same one is pending, or there are too many."""
        before = self.pending.get(move.place)
        if before is not None:
            if before.target == move.target:
                return False
            self._end(before, "superseded", move.created_at, "a newer decision took its place")
        if len(self.pending) >= MAX_PENDING:
            return False
        move.number = self._next_number
        self._next_number = self._next_number % 0xFFFF_FFFF + 1
        self.pending[move.place] = move
        self.by_number[move.number] = move
        return True

    def due(self, now: float, wall: float, is_linked: Callable[[str], bool]) -> list[Move]:
        """The moves to order now. Those of a gateway that cannot be told wait, and keep nobody else from going."""
        under_way = 0
        draining: set[str] = set()
        for move in self.pending.values():
            if move.state != "waiting":
                under_way += move.kind not in ("gone", "first")
                if move.kind == "draining":
                    draining.add(move.origin)
        found: list[Move] = []
        for move in self.pending.values():
            if move.state != "waiting" or not is_linked(move.gateway):
                continue
            if move.kind not in ("gone", "first", "manual"):
                if under_way >= self._at_once or (move.kind == "draining" and move.origin in draining):
                    continue
                under_way += 1
                draining.add(move.origin if move.kind == "draining" else "")
            move.state = "ordered"
            move.ordered_at = wall
            self._deadlines[move.number] = now + self._timeout_s
            found.append(move)
        return found

    def accepted(self, number: int) -> None:
        """The gateway has the order."""
        move = self.by_number.get(number)
        if move is not None and move.state == "ordered":
            move.state = "accepted"

    def progressed(self, number: int, now: float) -> None:
        """It is still being carried out: a slow drain is no failed one."""
        if number in self._deadlines:
            self._deadlines[number] = now + self._timeout_s

    def ended(self, outcome: Outcome, wall: float) -> Move | None:
        """A gateway said how it went; the move, if it is known."""
        move = self.by_number.get(outcome.number)
        if move is None or not move.pending:
            return None
        move.moved_clients = outcome.moved
        move.failed_clients = outcome.failed
        move.longest_gap_ms = outcome.longest_gap_ms
        self._end(move, "failed" if outcome.reason or outcome.failed else "done", wall, outcome.reason)
        return move

    def expire(self, now: float, wall: float) -> list[Move]:
        """Moves of which nothing was heard for too long; they have failed now."""
        expired = [self.by_number[number] for number, at in self._deadlines.items() if at <= now]
        for move in expired:
            self._end(move, "failed", wall, "the gateway did not say in time how it went")
        return expired

    def order_again(self, gateway: str) -> None:
        """A gateway's link is new: what it was told or said on the one before may be lost. Doing it twice does no harm."""
        for move in self.pending.values():
            if move.gateway == gateway:
                move.repeated = move.repeated or move.state != "waiting"
                move.state = "waiting"
                self._deadlines.pop(move.number, None)

    def give_up(self, gateway: str, wall: float, why: str) -> None:
        """A gateway is gone."""
        for move in [move for move in self.pending.values() if move.gateway == gateway]:
            self._end(move, "failed", wall, why)

    def give_up_target(self, broker: str, wall: float) -> None:
        """A broker is gone: nobody need go there any more."""
        for move in [move for move in self.pending.values() if move.target == broker]:
            self._end(move, "failed", wall, f"{broker} is gone")

    def cancel_waiting(self, kind: str, origin: str, wall: float, why: str) -> None:
        """Those not ordered yet are no longer wanted."""
        for move in list(self.pending.values()):
            if move.kind == kind and move.origin == origin and move.state == "waiting":
                self._end(move, "superseded", wall, why)

    def target_of(self, gateway: str) -> str:
        """Where a gateway is on its way to, or empty."""
        move = self.pending.get((gateway, "", ""))
        return move.target if move is not None else ""

    def next_deadline(self) -> float:
        return min(self._deadlines.values(), default=float("inf"))

    def _end(self, move: Move, state: MoveState, wall: float, detail: str) -> None:
        move.state = state
        move.ended_at = wall
        move.detail = detail
        self.pending.pop(move.place, None)
        self.by_number.pop(move.number, None)
        self._deadlines.pop(move.number, None)
        self.past.append(move)
        self.counts[state] = self.counts.get(state, 0) + 1
