"""A set's replicated state as bytes, for the snapshots of its log."""

from __future__ import annotations

from typing import Final

import msgspec

from nearcast.chord.contacts import Contact
from nearcast.chord.identifiers import packed, unpacked
from nearcast.chord.records import Interval, Item, Record, Share, item
from nearcast.chord.state import ReplicatedState, Shadow
from nearcast.errors import RemoteProtocolError


class ShadowSnapshot(msgspec.Struct, frozen=True, array_like=True):
    name: str
    life: int
    have: int
    range_sequence: int
    low: bytes
    predecessors: tuple[Contact, ...]
    version: int
    lost: tuple[Interval, ...]
    items: list[Item]


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    name: str
    chain: int
    me: Contact | None
    phase: int
    life: int
    low: bytes
    predecessors: tuple[Contact, ...]
    predecessor_life: int
    reserved: bool
    knows_second: bool
    successors: tuple[Contact, ...]
    sequence: int
    moved_sequence: int
    version: int
    items: list[Item]
    tail: list[tuple[int, bytes, Record | None]]
    """A change of the range has an empty key."""
    shadows: list[ShadowSnapshot]
    lost: tuple[Interval, ...]
    estate: list[tuple[bytes, str, Record]]
    debts: list[tuple[str, Interval, tuple[Interval, ...]]]


_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(Snapshot)


def pack(state: ReplicatedState) -> bytes:
    """The state; the same bytes for the same state."""
    return _encode(
        Snapshot(
            state.name,
            state.chain,
            state.me,
            state.phase,
            state.life,
            packed(state.low),
            state.predecessors,
            state.predecessor_life,
            state.reserved,
            state.knows_second,
            state.successors,
            state.sequence,
            state.moved_sequence,
            state.version,
            _items(state.share),
            [(sequence, packed(key) if key >= 0 else b"", record) for sequence, key, record in state.tail],
            [_shadow(state.shadows[name]) for name in sorted(state.shadows)],
            state.lost,
            [(packed(key), source, record) for key, (source, record) in sorted(state.estate.items())],
            [(source, interval, rest) for source, (interval, rest) in state.debts.items()],
        )
    )


def unpack(data: bytes) -> ReplicatedState:
    """The state in these bytes; what is none raises RemoteProtocolError."""
    try:
        held = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(0x81, f"no state of a ring's set: {error}") from None
    state = ReplicatedState(held.name, held.chain)
    state.me, state.phase, state.life, state.low = held.me, held.phase, held.life, unpacked(held.low)
    state.predecessors, state.predecessor_life, state.reserved = held.predecessors, held.predecessor_life, held.reserved
    state.knows_second, state.successors = held.knows_second, held.successors
    state.sequence, state.moved_sequence, state.version = held.sequence, held.moved_sequence, held.version
    _fill(state.share, held.items)
    state.tail.extend((sequence, unpacked(key) if key else -1, record) for sequence, key, record in held.tail)
    for one in held.shadows:
        shadow = state.shadows[one.name] = Shadow(one.name, one.life)
        shadow.have, shadow.low, shadow.predecessors = one.have, unpacked(one.low), one.predecessors
        shadow.range_sequence = one.range_sequence
        shadow.version, shadow.lost = one.version, one.lost
        _fill(shadow.share, one.items)
    state.lost = held.lost
    state.estate = {unpacked(key): (source, record) for key, source, record in held.estate}
    state.debts = {source: (interval, rest) for source, interval, rest in held.debts}
    return state


def _items(share: Share) -> list[Item]:
    return [item(key, record) for key, record in sorted(share.items())]


def _fill(share: Share, items: list[Item]) -> None:
    for one in items:
        share.put(unpacked(one.key), one.record)


def _shadow(shadow: Shadow) -> ShadowSnapshot:
    return ShadowSnapshot(
        shadow.name,
        shadow.life,
        shadow.have,
        shadow.range_sequence,
        packed(shadow.low),
        shadow.predecessors,
        shadow.version,
        shadow.lost,
        _items(shadow.share),
    )
