"""Coming to the ring: a set looks for its place, asks its successor for its part of the range, and fetches what is there.

The successor gives the part away by an entry of its log (``Split``) and sets the records aside; the joiner puts them in its
own log bit by bit, and is on the ring with ``Enter``. Whatever gets lost on the way, the joiner begins anew, and the successor
takes back what nobody fetched (:mod:`nearcast.chord.stabilising`).
"""

from __future__ import annotations

from nearcast.chord.commands import Begin, Enter, Receive, Removed, Split
from nearcast.chord.contacts import Contact
from nearcast.chord.effects import FOREVER
from nearcast.chord.identifiers import identifier, packed, unpacked, within
from nearcast.chord.messages import AnyBody, Chunk, Fetch, Join, Joined, item_chunk
from nearcast.chord.records import item
from nearcast.chord.stabilising import Stabilising
from nearcast.chord.state import JOINING, OUT, Result

CHUNK_ITEMS = 1_024


class Joining(Stabilising):
    """See the module."""

    _seeds: tuple[Contact, ...] = ()
    """Sets that may be asked for the way before any other is known."""
    _join_at = FOREVER
    _fetched_by = 0.0
    """By when fetching is to be done: an answer or an entry was lost otherwise."""
    _fetching = ""
    _own_part: Chunk | None = None
    """The last of the answers about the own range."""

    # --- the set that joins ----------------------------------------------------------------------------------------------

    def _seek_place(self, now: float) -> None:
        """Who is our successor?"""
        self._join_at = now + 3.0 * self.settings.failed_s
        self.fingers.remember(self._seeds)

        def found(contacts: tuple[Contact, ...], hops: int, now: float) -> None:
            others = [contact for contact in contacts if contact.name != self.contact.name]
            if others and self.state.phase == OUT:
                self._ask_in(others[0], now)
            else:
                self._join_later(now)

        self.seeker.lookup(self.contact.place, found, now, self.contact.name)

    def _ask_in(self, successor: Contact, now: float) -> None:
        life = self._new_life(now)

        def answered(body: AnyBody | None, now: float) -> None:
            if isinstance(body, Joined) and body.accepted and self.state.phase == OUT:
                self.fingers.remember(body.contacts)
                begin = Begin(self.me(), life, self.next_ones(list(body.contacts)))
                self.propose(begin, lambda result, now: self._fetch(now), now)
            else:
                self._join_later(now)

        self._caller.ask(successor, Join(self.me(), life), answered, now)

    def _join_later(self, now: float) -> None:
        self._join_at = now + self.settings.beat_s * (0.2 + 0.4 * self._rng.random())

    def _go_on_joining(self, now: float) -> None:
        """The next step of fetching, if one is due."""
        if now >= self._fetched_by:
            self._fetching = ""
        self._fetch(now)

    def _fetch(self, now: float) -> None:
        """Get the next part of what is ours; then of the copy of the predecessor's."""
        state = self.state
        if self._fetching or state.phase != JOINING:
            return
        self._fetching = self.contact.name
        self._own_part = None
        self._fetched_by = now + 2.0 * self.settings.takeover_s
        self._fetch_part(self.contact.name, b"", now)

    def _fetch_part(self, of: str, after: bytes, now: float) -> None:
        state = self.state
        fetch = Fetch(self.contact.name, state.life, of, after or packed(0))
        if not after:
            # From the lower end, which the first answer tells: from the own place on, all around, nothing is missed.
            fetch = Fetch(self.contact.name, state.life, of, packed(identifier(of)))

        def answered(body: AnyBody | None, now: float) -> None:
            if state.phase != JOINING or state.life != fetch.life:
                return
            if isinstance(body, Chunk):
                self._got(of, body, now)
            elif isinstance(body, Joined) or body is None:
                # The successor has changed its mind, or is gone: begin anew.
                self._fetching = ""
                self.propose(Removed(keep=False), None, now)
                self._join_later(now)

        self._caller.ask(state.successors[0], fetch, answered, now, self.settings.takeover_s)

    def _got(self, of: str, chunk: Chunk, now: float) -> None:
        is_own = of == self.contact.name
        if is_own and chunk.sequence < 0:
            self._fetching = ""
            self.propose(Removed(keep=False), None, now)
            self._join_later(now)
            return
        if chunk.items:
            self.propose(Receive(is_own, chunk.items), None, now)
        if chunk.more and chunk.items:
            self._fetch_part(of, chunk.items[-1].key, now)
        elif is_own:
            self._own_part = chunk
            self._fetch_part(chunk.predecessors[0].name, b"", now)
        elif self._own_part is not None:
            own = self._own_part
            self.propose(
                Enter(
                    own.low,
                    own.predecessors,
                    own.sequence,
                    own.version,
                    own.lost,
                    chunk.sequence,
                    chunk.life,
                    chunk.low,
                    chunk.predecessors,
                    chunk.version,
                    chunk.lost,
                ),
                self._entered,
                now,
            )

    def _entered(self, result: Result | None, now: float) -> None:
        self._fetching = ""
        self.reset_neighbours(now)
        self.stabilise(now)

    def _new_life(self, now: float) -> int:
        return max(self.wall_us(now), self.state.life + 1)

    # --- its successor ---------------------------------------------------------------------------------------------------

    def on_join(self, broker: str, number: int, join: Join, now: float) -> None:
        """A set wants to be our predecessor."""
        state = self.state
        is_again = state.predecessor is not None and state.predecessor.name == join.sender.name
        may = self.has_lease(now) and state.owns(join.sender.place) and not state.reserved and not self._taking_over
        # The successor must be able to take the news: one that has a joiner of its own is not, for a moment.
        may = may and self.is_copied(0)
        if is_again and state.reserved and state.predecessor_life == join.life:
            self.answer(broker, number, Joined(True, (self.me(), *state.successors)))
            return
        if not may or join.sender.name == self.contact.name:
            self.answer(broker, number, Joined(False, ()))
            return

        def applied(result: Result | None, now: float) -> None:
            accepted = result is not None and result.done
            if accepted:
                self._granted_at = now
            self.answer(broker, number, Joined(accepted, (self.me(), *state.successors) if accepted else ()))

        self.confirm(lambda now: self.propose(Split(join.sender, join.life), applied, now))

    def on_fetch(self, broker: str, number: int, fetch: Fetch) -> None:
        """Records set aside; only once our own successor knows that they are not ours any more."""
        state = self.state
        former = state.predecessor
        if former is None or former.name != fetch.sender or state.predecessor_life != fetch.life or not state.reserved:
            self.answer(broker, number, Joined(False, ()))
            return
        if not self.is_settled(state.moved_sequence):
            return  # it asks again
        shadow = state.shadows.get(fetch.of)
        if shadow is None or shadow.have < 0:
            self.answer(broker, number, Chunk(-1, 0, False, (), packed(0), (), 0, ()))
            return
        after = unpacked(fetch.after)
        end = identifier(fetch.of)
        behind = shadow.share.clockwise(after, CHUNK_ITEMS)
        records = [(key, record) for key, record in behind if within(key, after, end)]
        items = [item(key, record) for key, record in records]
        fits = item_chunk(items)
        more = fits < len(items) or (len(records) == CHUNK_ITEMS and records[-1][0] != end)
        self.answer(
            broker,
            number,
            Chunk(
                shadow.have,
                shadow.life,
                more,
                tuple(items[:fits]),
                packed(shadow.low),
                shadow.predecessors,
                shadow.version,
                shadow.lost,
            ),
        )
