"""What all replicas of a set hold alike: its place on the ring, its share of the directory, and a copy of its predecessor's.

The state changes only by :meth:`ReplicatedState.apply`, with commands from the set's log, in their order. So a replica that
becomes leader goes on where the one before stopped, and the ring does not notice (Canal §III-C). Four rules keep a key from
having two owners:

* A range changes hands by commands, not by pointers. ``(low, me]`` is this set's; ``low`` moves up only by :class:`Split`, for
  a set that joins, and down only by :class:`TakeOver`, of the predecessor.
* Every change is counted by ``sequence``, and none is acknowledged before the successor holds it in *its* log, as a copy. It
  takes copies from its predecessor only: once it has taken over, nothing that the predecessor still does is acknowledged.
* How far the predecessor's range goes is known to the successor's successor, too, before the predecessor hears that it is
  copied: so it is known who comes next when two sets in a row are lost.
* Whoever takes over with a copy has everything that was acknowledged. Without one (both sets were lost), the range is
  marked ``lost``: of a topic there, of which nothing is known, nobody claims that it does not exist.

When a range is answered for at all, leases decide: :mod:`nearcast.chord.node`.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from nearcast.chord import messages
from nearcast.chord.commands import (
    AnyCommand,
    Apply,
    Begin,
    Change,
    Enter,
    Forget,
    Found,
    Meet,
    Mourn,
    Quit,
    Receive,
    Removed,
    Repaid,
    Retire,
    Settled,
    Split,
    Successors,
    TakeOver,
)
from nearcast.chord.contacts import Contact, same
from nearcast.chord.identifiers import between, identifier, packed, unpacked, within
from nearcast.chord.messages import Copy, Write
from nearcast.chord.records import Interval, Record, Share, cut, source

OUT: Final = 0
"""No part of the ring."""
JOINING: Final = 1
"""A range is set aside at the successor, and being fetched."""
IN: Final = 2
LEAVING: Final = 3
"""Answers for nothing any more; the successor is to take over."""

MAX_DEBTS: Final = 64

TAIL: Final = 1_024
"""Changes kept for a successor that has all but those. One that misses more gets everything."""


class Shadow:
    """A copy of another set's range. ``have``: up to which of its changes; -1: not whole yet."""

    def __init__(self, name: str, life: int) -> None:
        self.name = name
        self.life = life
        self.have = -1
        self.range_sequence = 0
        """Change of the set that holds the copy, which told its own successor how far this range goes."""
        self.low = 0
        self.predecessors: tuple[Contact, ...] = ()
        self.version = 0
        self.lost: tuple[Interval, ...] = ()
        self.share = Share()


class Result(msgspec.Struct, frozen=True):
    """What became of a command. ``sequence``: what the successor must hold before anybody is told."""

    outcome: int
    record: Record | None = None
    sequence: int = 0

    @property
    def done(self) -> bool:
        return self.outcome == messages.DONE


REFUSED: Final = Result(messages.CONFLICT)


class ReplicatedState:
    """See the module. ``chain`` is how many predecessors are remembered."""

    def __init__(self, name: str, chain: int = 4) -> None:
        self.name = name
        self.place = identifier(name)
        self.chain = chain
        self.me: Contact | None = None
        self.phase = OUT
        self.life = 0
        self.low = self.place
        self.predecessors: tuple[Contact, ...] = ()
        self.predecessor_life = 0
        """0: not known; the predecessor says it."""
        self.reserved = False
        """The predecessor's range was set aside for it, and it has not shown that it has it: nobody ever vouched for it."""
        self.successors: tuple[Contact, ...] = ()
        self.sequence = 0
        self.moved_sequence = 0
        """Of the last change of the range: what it means for a predecessor, none gets before the successor knows."""
        self.version = 0
        self.share = Share()
        self.tail: deque[tuple[int, int, Record | None]] = deque(maxlen=TAIL)
        """(sequence, key, record or none) of the last changes, without gaps."""
        self.shadows: dict[str, Shadow] = {}
        """The predecessor's, and while a set joins, that of the one before."""
        self.knows_second = False
        """Whether it is certain who comes before the predecessor, also if that one is lost now."""
        self.lost: tuple[Interval, ...] = ()
        self.estate: dict[int, tuple[str, Record]] = {}
        """What this set held when it was removed from the ring, and has not offered to its heirs yet."""
        self.debts: dict[str, tuple[Interval, tuple[Interval, ...]]] = {}
        """By former life: the range that it had, and what it did not know of it itself. Until all its heirs know that there is
        nothing more to come."""

    # --- what it means ---------------------------------------------------------------------------------------------------

    @property
    def is_alone(self) -> bool:
        return self.phase == IN and not self.predecessors

    @property
    def predecessor(self) -> Contact | None:
        return self.predecessors[0] if self.predecessors else None

    @property
    def is_sole(self) -> bool:
        """Whether no other set can ever have had a lease: this one is alone, or with one that has not entered yet."""
        return self.is_alone or (self.phase == IN and self.reserved and self.predecessors[1].name == self.name)

    def owns(self, key: int) -> bool:
        return self.phase == IN and within(key, self.low, self.place)

    def holds(self, key: int) -> bool:
        """Whether a key is in the range, though it may not be answered for any more."""
        return self.phase in (IN, LEAVING) and within(key, self.low, self.place)

    def chained(self, contacts: tuple[Contact, ...]) -> tuple[Contact, ...]:
        """Those before this set as it remembers them: once around at most, itself included."""
        names = [contact.name for contact in contacts[: self.chain]]
        return contacts[: names.index(self.name) + 1 if self.name in names else self.chain]

    def lost_by(self, key: int) -> str | None:
        """Whose records of this part of the circle were lost."""
        return next((interval.source for interval in self.lost if interval.has(key)), None)

    def changes_after(self, sequence: int) -> list[tuple[int, int, Record | None]] | None:
        """What changed since; none if that is not known any more."""
        missing = self.sequence - sequence
        if not 0 <= missing <= len(self.tail):
            return None
        return [self.tail[index] for index in range(len(self.tail) - missing, len(self.tail))]

    # --- commands --------------------------------------------------------------------------------------------------------

    def apply(self, command: AnyCommand) -> Result:
        """The next entry of the log."""
        match command:
            case Change():
                return self._change(command.write)
            case Apply():
                return self._copy(command.copy)
            case Split():
                return self._split(command)
            case TakeOver():
                return self._take_over(command)
            case Successors():
                self.successors = command.successors
            case Meet():
                return self._meet(command)
            case Found():
                return self._found(command)
            case Begin():
                return self._begin(command)
            case Receive():
                return self._receive(command)
            case Enter():
                return self._enter(command)
            case Forget():
                if self.predecessor is None or self.predecessor.name != command.name:
                    self.shadows.pop(command.name, None)
            case Retire():
                if self.phase != IN or self.is_sole:
                    return REFUSED
                self.phase = LEAVING
            case Removed():
                self._removed(command.keep)
            case Settled():
                for key in command.keys:
                    self.estate.pop(unpacked(key), None)
            case Repaid():
                self._repaid(command)
            case Quit():
                self.debts.pop(command.source, None)
            case Mourn():
                self.lost = ()
                self._mutated()
        return self._done()

    def _done(self, record: Record | None = None) -> Result:
        return Result(messages.DONE, record, self.sequence)

    def _mutated(self, key: int | None = None, record: Record | None = None) -> None:
        """Something that the successor has to know. Without a key it is the range; what goes along with every copy."""
        self.sequence += 1
        self.tail.append((self.sequence, -1 if key is None else key, record))

    # --- joining and leaving ---------------------------------------------------------------------------------------------

    def _found(self, command: Found) -> Result:
        if self.phase != OUT:
            return REFUSED
        self._reset()
        self.me = msgspec.structs.replace(command.me, life=command.life)
        self.life, self.phase = command.life, IN
        return self._done()

    def _begin(self, command: Begin) -> Result:
        if self.phase != OUT:
            return REFUSED
        self._reset()
        self.me = msgspec.structs.replace(command.me, life=command.life)
        self.life, self.phase = command.life, JOINING
        self.successors = command.successors
        return self._done()

    def _receive(self, command: Receive) -> Result:
        if self.phase != JOINING:
            return REFUSED
        # The name of the copy's set is known when everything is there.
        share = self.share if command.own else self.shadows.setdefault("", Shadow("", 0)).share
        for item in command.items:
            share.put(unpacked(item.key), item.record)
        return self._done()

    def _enter(self, command: Enter) -> Result:
        if self.phase != JOINING or not command.predecessors:
            return REFUSED
        self.phase = IN
        self.low = unpacked(command.low)
        self.predecessors = self.chained(command.predecessors)
        self.sequence, self.version, self.lost = command.sequence, command.version, command.lost
        self.predecessor_life = command.copied_life
        shadow = self.shadows.pop("", None)
        self.shadows.clear()
        if command.copied >= 0:
            shadow = shadow or Shadow("", 0)
            shadow.name, shadow.life, shadow.have = command.predecessors[0].name, command.copied_life, command.copied
            shadow.low, shadow.predecessors = unpacked(command.copied_low), command.copied_predecessors
            shadow.version, shadow.lost = command.copied_version, command.copied_lost
            self.shadows[shadow.name] = shadow
        return self._done()

    def _split(self, command: Split) -> Result:
        joiner = msgspec.structs.replace(command.joiner, life=command.life)
        if self.predecessor is not None and self.predecessor.name == joiner.name:
            return self._done() if self.predecessor_life == command.life else REFUSED
        if self.phase != IN or self.reserved or self.me is None or not between(joiner.place, self.low, self.place):
            return REFUSED
        before = self.predecessors or (self.me,)
        aside = Shadow(joiner.name, command.life)
        aside.low, aside.predecessors, aside.version = self.low, before[: self.chain], self.version
        aside.share = self.share.take(self.low, joiner.place)
        aside.lost = cut(self.lost, self.low, joiner.place)
        elder = self.shadows.get(before[0].name)
        self.shadows = {joiner.name: aside} if elder is None else {joiner.name: aside, elder.name: elder}
        self.lost = cut(self.lost, joiner.place, self.place)
        self.low = joiner.place
        self.predecessors = self.chained((joiner, *before))
        self.predecessor_life = command.life
        self.reserved = True
        if not self.successors:
            self.successors = (joiner,)
        self._mutated()
        aside.have = self.moved_sequence = self.sequence
        return self._done()

    def _take_over(self, command: TakeOver) -> Result:
        former = self.predecessor
        is_on = self.phase in (IN, LEAVING)
        if not is_on or former is None or (former.name, self.predecessor_life) != (command.name, command.life):
            return REFUSED
        shadow = self.shadows.get(former.name)
        if shadow is not None and shadow.have >= 0 and shadow.life == command.life:
            self.low, self.predecessors, self.knows_second = shadow.low, shadow.predecessors, True
            self.share.add(shadow.share.take(shadow.low, former.place))
            self.lost += shadow.lost
            self.version = max(self.version, shadow.version)
        else:
            self.low, self.predecessors, self.knows_second = unpacked(command.low), command.predecessors, False
            self.lost += (Interval(command.low, packed(former.place), source(former.name, former.life)),)
        if not self.predecessors or self.predecessors[0].name == self.name:
            self.low, self.predecessors, self.successors = self.place, (), ()
            self.phase = IN  # the last one stays, whatever it wanted
        self.predecessors = self.chained(self.predecessors)
        self.predecessor_life = 0
        self.reserved = False
        self.shadows.clear()
        # The successor gets it all anew: what was added is not among the last changes.
        self._mutated()
        self.moved_sequence = self.sequence
        self.tail.clear()
        return self._done()

    def _meet(self, command: Meet) -> Result:
        contact = msgspec.structs.replace(command.contact, life=command.life)
        if self.predecessor is not None and self.predecessor.name == contact.name:
            if self.predecessor_life not in (0, command.life):
                return REFUSED
            self.predecessors = self.chained((contact, *command.predecessors))
            self.predecessor_life = command.life
            self.reserved = False
            self.knows_second = True
            self._mutated()
        return self._done()

    def _removed(self, keep: bool) -> None:
        if self.phase in (IN, LEAVING) and keep:
            mine = source(self.name, self.life)
            while len(self.debts) >= MAX_DEBTS:
                del self.debts[next(iter(self.debts))]
            self.debts[mine] = (Interval(packed(self.low), packed(self.place), mine), self.lost)
            self.estate |= {key: (mine, record) for key, record in self.share.items()}
        self._reset()

    def _reset(self) -> None:
        self.phase, self.life, self.low = OUT, 0, self.place
        self.predecessors, self.predecessor_life, self.reserved, self.successors = (), 0, False, ()
        self.sequence = self.moved_sequence = self.version = 0
        self.share = Share()
        self.tail.clear()
        self.shadows.clear()
        self.lost = ()
        self.knows_second = False

    def _repaid(self, command: Repaid) -> None:
        """What was lost with a set is here again; what that one had not known, others may know."""
        settled = [interval for interval in self.lost if interval.source == command.source]
        if settled:
            rest = [part for one in settled for part in cut(command.rest, unpacked(one.low), unpacked(one.high))]
            self.lost = (*(one for one in self.lost if one.source != command.source), *rest)
            self._mutated()

    # --- the copy of the predecessor's range -----------------------------------------------------------------------------

    def _copy(self, copy: Copy) -> Result:
        former = self.predecessor
        is_on = self.phase in (IN, LEAVING)
        if not is_on or former is None or former.name != copy.sender or self.predecessor_life not in (0, copy.life):
            return REFUSED
        shadow = self.shadows.get(copy.sender)
        if shadow is None or shadow.life != copy.life:
            shadow = self.shadows[copy.sender] = Shadow(copy.sender, copy.life)
        if copy.swept is not None:
            shadow.share.clear_between(unpacked(copy.swept.low), unpacked(copy.swept.high))
        elif shadow.have != copy.after:
            return REFUSED
        for item in copy.items:
            shadow.share.put(unpacked(item.key), item.record)
        if copy.until >= 0:
            is_moved = shadow.low != unpacked(copy.low) or not same(shadow.predecessors[:1], copy.predecessors[:1])
            shadow.have, shadow.version, shadow.lost = copy.until, copy.version, copy.lost
            shadow.predecessors = copy.predecessors
            if is_moved:
                self.predecessors = self.chained((former, *copy.predecessors))
                self._mutated()
                shadow.range_sequence = self.sequence
            if shadow.low != unpacked(copy.low):
                shadow.low = unpacked(copy.low)
                shadow.share = shadow.share.take(shadow.low, former.place)
        return self._done()

    # --- the directory ---------------------------------------------------------------------------------------------------

    def _change(self, write: Write) -> Result:
        record = write.record
        key = record.key
        if not self.owns(key):
            return Result(messages.BUSY)
        held = self.share.get(key)
        if held is not None and record.writer and held.writer == record.writer:
            return self._done(held)
        refusal = self._refusal(write, held, self.lost_by(key))
        if refusal is not None:
            return Result(refusal, held, self.sequence)
        if write.remove:
            self.version = max(self.version + 1, write.stamp)
            self.share.put(key, None)
            self._mutated(key)
            return self._done()
        version = record.version if write.condition == messages.RESTORE else max(self.version + 1, write.stamp)
        self.version = max(self.version, version)
        held = msgspec.structs.replace(record, version=version)
        self.share.put(key, held)
        self._mutated(key, held)
        return self._done(held)

    @staticmethod
    def _refusal(write: Write, held: Record | None, lost_by: str | None) -> int | None:
        """Why a write is not to be done."""
        condition = write.condition
        unknown = held is None and lost_by is not None
        if unknown and condition in (messages.VERSION, messages.EPOCH):
            return messages.UNCERTAIN
        epoch = 0 if held is None else held.epoch
        if condition == messages.VERSION:
            holds = (0 if held is None else held.version) == write.expected
        elif condition == messages.EPOCH:
            holds = epoch == write.expected and (write.remove or write.record.epoch > epoch)
        elif condition == messages.NEWER:
            holds = write.record.epoch > epoch
        elif condition == messages.RESTORE:
            if unknown and write.source != lost_by:
                return messages.UNCERTAIN  # whose loss it was then has something to say about it first
            holds = unknown
        else:
            holds = True
        return None if holds else messages.CONFLICT
