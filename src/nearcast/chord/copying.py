"""The copy of a set's range at its successor, seen from the set: nothing is acknowledged before the successor has it.

Changes go in batches, one on its way at a time. A successor that has no copy, or misses more than the log of changes holds,
gets everything: it is swept clockwise, interval by interval, and then told what changed meanwhile. Its old copy stays good
until the sweep is through.
"""

from __future__ import annotations

from collections.abc import Callable

from nearcast.chord.identifiers import distance, packed
from nearcast.chord.messages import MAX_ITEMS, AnyBody, Copied, Copy, item_chunk
from nearcast.chord.records import Interval, Item, item
from nearcast.chord.standing import Standing
from nearcast.chord.state import IN, LEAVING

CHUNK_ITEMS = 1_024
MAX_WAITING = 20_000
AGAIN_S = 0.1


class Copying(Standing):
    """See the module."""

    _holder = ""
    """The successor that ``_copied`` is about."""
    _copied = -1
    """Up to which change the successor has this set's range."""
    _settled = -1
    """And up to which one its own successor knows how far that range goes."""
    _is_copying = False
    _swept: int | None = None
    """How far the sweep is, while there is one."""
    _sweep_began = 0
    _sweep_context: Copy | None = None
    _copy_again_at = 0.0
    _beat_at = 0.0
    """When the next heartbeat is due."""
    lease_until = float("-inf")

    def reset_copy(self) -> None:
        self._holder = ""
        self._copied = self._settled = -1
        self._is_copying = False
        self._swept = None
        self._waiting: list[tuple[int, Callable[[float], None]]] = []

    # --- who may answer --------------------------------------------------------------------------------------------------

    def has_lease(self, now: float) -> bool:
        """Whether this set may answer for its range, or vouch for its predecessor."""
        state = self.state
        return self.leads and state.phase == IN and (now < self.lease_until or state.is_sole)

    def is_copied(self, sequence: int) -> bool:
        """Whether the successor knows this change; there is none that has to, as long as no other set can have a lease."""
        return self.state.is_sole or self._copied >= sequence

    def is_settled(self, sequence: int) -> bool:
        """Whether this change outlives the loss of this set, and the range is known to outlive that of its successor, too."""
        return self.state.is_sole or self._settled >= sequence

    def when_settled(self, sequence: int, then: Callable[[float], None], now: float) -> None:
        """Do something once this change is where it has to be. If it never gets there, neither is it done."""
        if self.is_settled(sequence):
            then(now)
        elif len(self._waiting) < MAX_WAITING:
            self._waiting.append((sequence, then))
            self.copy(now)

    def has_copy(self, holder: str, have: int, settled: bool, now: float) -> None:
        """The successor said what it has."""
        if holder != self._holder:
            self._holder, self._swept, self._settled = holder, None, -1
        self._copied = have
        if settled:
            self._settled = have
        else:
            self._beat_at = min(self._beat_at, now + AGAIN_S)
        if self._waiting and settled:
            waiting, self._waiting = self._waiting, []
            for sequence, then in waiting:
                if sequence <= have:
                    then(now)
                else:
                    self._waiting.append((sequence, then))
        self.copy(now)

    # --- sending ---------------------------------------------------------------------------------------------------------

    def copy(self, now: float) -> None:
        """Send what the successor does not have, if nothing is on its way."""
        state = self.state
        if self._is_copying or not self.leads or state.phase not in (IN, LEAVING) or not state.successors or state.is_sole:
            return
        successor = state.successors[0]
        if successor.name != self._holder or self._copied == state.sequence or now < self._copy_again_at:
            return
        message = self._next_copy()
        self._is_copying = True

        def answered(body: AnyBody | None, now: float) -> None:
            self._is_copying = False
            if successor.name != self._holder:
                self.copy(now)
            elif isinstance(body, Copied):
                if not body.taken:
                    self._swept = None
                    # It is about to have another predecessor: the next heartbeat says which.
                    self._copy_again_at = now + AGAIN_S
                    self._beat_at = min(self._beat_at, now + AGAIN_S)
                elif message.swept is not None:
                    self._advance(message)
                self.has_copy(successor.name, body.have, body.settled, now)
            else:
                self._copied = -1  # the next heartbeat says what it has

        self._caller.ask(successor, message, answered, now)

    def _next_copy(self) -> Copy:
        state = self.state
        changes = None if self._copied < 0 or self._swept is not None else state.changes_after(self._copied)
        if changes is None:
            return self._sweep()
        items = [item(key, record) for _, key, record in changes[:CHUNK_ITEMS] if key >= 0]
        count = len(changes[:CHUNK_ITEMS])
        fits = item_chunk(items)
        if fits < len(items):
            # Up to the change before the first that does not fit.
            items = items[:fits]
            seen = 0
            for index, (_, key, _) in enumerate(changes):
                seen += key >= 0
                if seen > fits:
                    count = index
                    break
        return self._copy_of(self._copied, self._copied + count, tuple(items), None)

    def _sweep(self) -> Copy:
        state = self.state
        context = self._sweep_context
        if self._swept is None or context is None:
            self._swept = state.low
            self._sweep_began = state.sequence
            # What holds when the sweep is through is what held when it began; then come the changes since.
            context = self._sweep_context = self._copy_of(-1, -1, (), None)
        low = self._swept
        end = state.place
        room = distance(low, end)
        found = [(key, record) for key, record in state.share.clockwise(low, CHUNK_ITEMS) if distance(low, key) <= room]
        items = [item(key, record) for key, record in found]
        fits = item_chunk(items)
        high = end if fits == len(items) and len(found) < CHUNK_ITEMS else found[fits - 1][0]
        is_last = high == end
        until = self._sweep_began if is_last else -1
        return Copy(
            context.sender,
            context.life,
            -1,
            until,
            tuple(items[:fits]),
            Interval(packed(low), packed(high)),
            context.low,
            context.predecessors,
            context.version,
            context.lost,
        )

    def _advance(self, message: Copy) -> None:
        """A part of the sweep is done."""
        if self._swept is None or message.swept is None:
            return
        self._swept = None if message.until >= 0 else int.from_bytes(message.swept.high, "big")

    def _copy_of(self, after: int, until: int, items: tuple[Item, ...], swept: Interval | None) -> Copy:
        state = self.state
        return Copy(
            self.contact.name,
            state.life,
            after,
            until,
            items[:MAX_ITEMS],
            swept,
            packed(state.low),
            (state.predecessors or (self.me(),))[: state.chain],
            state.version,
            state.lost,
        )
