"""What a set agrees on: entries of its replicated log, applied by :class:`nearcast.chord.state.ReplicatedState`.

A command says everything that applying it needs, so that all replicas come to the same state, whenever they do. Who proposed
it and under which number is part of the entry: a leader that waits for its own commands recognises them.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from nearcast.chord.contacts import Contact, Name
from nearcast.chord.messages import MAX_ITEMS, Contacts, Copy, Intervals, Items, Sequence, Write
from nearcast.chord.records import KeyBytes, Number
from nearcast.errors import RemoteProtocolError


class Command(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """One of the following."""


class Found(Command, tag=0, frozen=True):
    """This set is the first: the whole circle is its range."""

    me: Contact
    life: Number


class Begin(Command, tag=1, frozen=True):
    """A successor has set a range aside for this set, which now fetches it."""

    me: Contact
    life: Number
    successors: Contacts


class Receive(Command, tag=2, frozen=True):
    """Records of the own range, or (``own`` false) of the copy of the predecessor's."""

    own: bool
    items: Items


class Enter(Command, tag=3, frozen=True):
    """Everything is fetched: this set is on the ring. ``copied``: what the copy of the predecessor's range holds, -1 for
    none."""

    low: KeyBytes
    predecessors: Contacts
    sequence: Number
    version: Number
    lost: Intervals
    copied: Sequence
    copied_life: Number
    copied_low: KeyBytes
    copied_predecessors: Contacts
    copied_version: Number
    copied_lost: Intervals


class Split(Command, tag=4, frozen=True):
    """The lower part of the range is the joiner's from here on; its records are set aside for it."""

    joiner: Contact
    life: Number


class TakeOver(Command, tag=5, frozen=True):
    """The predecessor's range is this set's from here on: with its copy if that is whole, else down to ``low``, with what was
    there lost."""

    name: Name
    life: Number
    low: KeyBytes
    predecessors: Contacts


class Successors(Command, tag=6, frozen=True):
    successors: Contacts


class Meet(Command, tag=7, frozen=True):
    """Which replicas the predecessor has, which life it is in, and who comes before it."""

    contact: Contact
    life: Number
    predecessors: Contacts


class Apply(Command, tag=8, frozen=True):
    """A copy of changes of the predecessor's range."""

    copy: Copy


class Forget(Command, tag=9, frozen=True):
    """The copy of a set that is not the predecessor is needed no more."""

    name: Name


class Retire(Command, tag=10, frozen=True):
    """Leave in order: answer for nothing from here on."""


class Removed(Command, tag=11, frozen=True):
    """Another set answers for the range. ``keep``: what was in it is to be offered to whoever does."""

    keep: bool


class Settled(Command, tag=12, frozen=True):
    """These former records were offered."""

    keys: Annotated[tuple[KeyBytes, ...], msgspec.Meta(max_length=MAX_ITEMS)]


class Mourn(Command, tag=13, frozen=True):
    """What was lost stays lost: topics of which nothing is known do not exist."""


class Change(Command, tag=14, frozen=True):
    """A write to the directory."""

    write: Write


class Repaid(Command, tag=15, frozen=True):
    """Who had this range has given everything back, but for what it did not know itself (``rest``)."""

    source: str
    rest: Intervals


class Quit(Command, tag=16, frozen=True):
    """All who have the range of this former life now know that there is nothing more to give back."""

    source: str


AnyCommand = (
    Found
    | Begin
    | Receive
    | Enter
    | Split
    | TakeOver
    | Successors
    | Meet
    | Apply
    | Forget
    | Retire
    | Removed
    | Settled
    | Mourn
    | Change
    | Repaid
    | Quit
)


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A command in the log."""

    proposer: Name
    number: Number
    command: AnyCommand


_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(Entry)


def encode_entry(entry: Entry) -> bytes:
    return _encode(entry)


def decode_entry(data: bytes) -> Entry:
    """The entry in these bytes; what is none raises RemoteProtocolError."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(0x81, f"no command of the ring: {error}") from None
