"""What replica sets, and brokers that ask them, tell each other; and how it looks as bytes.

Every request has a number, and goes to one replica of a set; its answer has the same number. Whoever does not lead its set
answers every request with :class:`NotLeader`. One request is out at a time for each thing that somebody waits for, so nothing
here needs an order, and everything may be lost.

=============  ==================  ==================================================================================
request        answer              about
=============  ==================  ==================================================================================
``Find``       ``Route``           who is responsible for a key, or knows better (Chord's find_successor)
``Beat``       ``Vouch``           heartbeat to the successor, which renews the lease (stabilize and notify in one)
``Join``       ``Joined``          a set wants its part of the successor's range
``Fetch``      ``Chunk``           records of that part
``Copy``       ``Copied``          changes of a range, to the successor
``Depart``     ``Departed``        the predecessor leaves in order
``Get``        ``Value``, Route    read a topic's record
``Write``      ``Value``, Route    change it, or remove it, if a condition holds
``Round``      ``Passed``          nobody has a lease: is the ring whole?
``Check``      ``Checked``         is the predecessor that the log names on the ring at all?
``Repay``      ``Repayment``       who was lost has nothing more to give back
``Hints``      none                a leader to its followers: sets it knows
=============  ==================  ==================================================================================

On the wire: MessagePack of ``[set, number, body]``, the body being an array that begins with its kind. ``set`` is whom the
request is for, since a broker may hold replicas of many sets; it is empty in an answer.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from nearcast.chord.contacts import Contact, MaybeName, Name
from nearcast.chord.records import MAX_TOPIC_CHARACTERS, Interval, Item, KeyBytes, Number, Record
from nearcast.errors import LocalProtocolError, RemoteProtocolError

MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_RECORD_BYTES: Final = 128 << 10
CHUNK_BYTES: Final = 256 << 10
"""Of records in one message, and one record more."""
MAX_CONTACTS: Final = 64
MAX_ITEMS: Final = 4_096

MALFORMED: Final = 0x81
TOO_LARGE: Final = 0x95

Contacts = Annotated[tuple[Contact, ...], msgspec.Meta(max_length=MAX_CONTACTS)]
Items = Annotated[tuple[Item, ...], msgspec.Meta(max_length=MAX_ITEMS)]
Intervals = Annotated[tuple[Interval, ...], msgspec.Meta(max_length=MAX_ITEMS)]
Topic = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TOPIC_CHARACTERS)]
Sequence = Annotated[int, msgspec.Meta(ge=-1, le=1 << 62)]

# Conditions of a write.
ANY: Final = 0
VERSION: Final = 1
"""``expected`` is the record's version now; 0: there is none."""
EPOCH: Final = 2
"""``expected`` is its epoch now (0: none), and the new one is above."""
NEWER: Final = 3
"""Its epoch is below the new one: an owner speaks for itself."""
RESTORE: Final = 4
"""Nothing is known of it, since the set that offers it now was lost."""

# What became of a request.
DONE: Final = 0
CONFLICT: Final = 1
"""The condition does not hold; the record that there is comes along."""
UNCERTAIN: Final = 2
"""The set that held the topic was lost with its successor: whether there is a record nobody knows until somebody writes it."""
BUSY: Final = 3
"""Not now: no lease, no copy, or too much to do. Ask again."""


class Body(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """What a message says."""


class NotLeader(Body, tag=0, frozen=True):
    """``leader``: who does lead, as far as is known here."""

    leader: MaybeName = ""


class Find(Body, tag=1, frozen=True):
    key: KeyBytes


class Route(Body, tag=2, frozen=True):
    """``found``: the first contact is the key's successor, others follow it. Else they precede it, nearest first: ask them."""

    found: bool
    contacts: Contacts


class Beat(Body, tag=3, frozen=True):
    """``life``: of the sender on the ring, another one after each joining. ``predecessors``: those before it, nearest
    first."""

    sender: Contact
    life: Number
    sequence: Number
    predecessors: Contacts


class Vouch(Body, tag=4, frozen=True):
    """``granted``: the lease is renewed. ``removed``: the sender is no part of the ring any more. ``have``: up to which change
    the answering set has a copy of the sender's range, -1 if it has none; ``settled``: and its own successor
    knows how far that range goes."""

    granted: bool
    removed: bool
    have: Sequence
    settled: bool
    predecessor: Contact | None
    successors: Contacts


class Join(Body, tag=5, frozen=True):
    sender: Contact
    life: Number


class Joined(Body, tag=6, frozen=True):
    """``accepted``: ``(low, sender]`` is the sender's, once it has it. Else ask again later, or another one."""

    accepted: bool
    contacts: Contacts


class Fetch(Body, tag=7, frozen=True):
    """Records of the share set aside for ``sender`` (``of`` is itself), or of the copy of its predecessor's, behind
    ``after``."""

    sender: Name
    life: Number
    of: Name
    after: KeyBytes


class Chunk(Body, tag=8, frozen=True):
    """``sequence``: of the whole share; -1: there is none here. ``life``: of the set whose share it is."""

    sequence: Sequence
    life: Number
    more: bool
    items: Items
    low: KeyBytes
    predecessors: Contacts
    version: Number
    lost: Intervals


class Copy(Body, tag=9, frozen=True):
    """Changes of the sender's range. With ``swept``, the items are all that there is in that interval; then ``until`` is -1,
    or what the copy holds now that it has been swept all around. Else they come behind change ``after``, up to ``until``."""

    sender: Name
    life: Number
    after: Sequence
    until: Sequence
    items: Items
    swept: Interval | None
    low: KeyBytes
    predecessors: Contacts
    version: Number
    lost: Intervals


class Copied(Body, tag=10, frozen=True):
    """``have`` and ``settled``: as in a Vouch. ``taken``: what was sent is in the copy."""

    taken: bool
    have: Sequence
    settled: bool


class Depart(Body, tag=11, frozen=True):
    sender: Name
    life: Number
    sequence: Number


class Departed(Body, tag=12, frozen=True):
    done: bool


class Get(Body, tag=13, frozen=True):
    topic: Topic


class Write(Body, tag=14, frozen=True):
    """See the conditions. ``stamp`` is the leader's to set: wall clock in microseconds."""

    record: Record
    condition: Annotated[int, msgspec.Meta(ge=ANY, le=RESTORE)] = ANY
    expected: Number = 0
    remove: bool = False
    stamp: Number = 0
    source: Annotated[str, msgspec.Meta(max_length=160)] = ""
    """With RESTORE: whose record it was."""


class Value(Body, tag=15, frozen=True):
    outcome: Annotated[int, msgspec.Meta(ge=DONE, le=BUSY)]
    record: Record | None


class Hints(Body, tag=16, frozen=True):
    contacts: Contacts


class Round(Body, tag=17, frozen=True):
    """No set has a lease, and ``origin`` asks all around the ring whether each is still its successor's predecessor.
    ``sender``: the set whose successor is asked now."""

    origin: Name
    number: Number
    sender: Name
    life: Number


class Passed(Body, tag=18, frozen=True):
    done: bool


class Check(Body, tag=19, frozen=True):
    """From a set whose log has the addressee for its predecessor, and that does not hear it."""


class Checked(Body, tag=20, frozen=True):
    """``over``: the set is no part of a ring, and whatever it was in a former life it will not be again."""

    over: bool


class Repay(Body, tag=21, frozen=True):
    """To whoever is responsible for the key behind ``low``: of ``(low, high]``, a range of its former life ``source``, the
    sender has given everything back, but for what it did not know itself (``rest``)."""

    source: Annotated[str, msgspec.Meta(max_length=160)]
    low: KeyBytes
    high: KeyBytes
    rest: Intervals


class Repayment(Body, tag=22, frozen=True):
    """``done``: it is noted; go on behind ``upto``, where the answering set's range ends."""

    done: bool
    upto: KeyBytes


AnyBody = (
    NotLeader
    | Find
    | Route
    | Beat
    | Vouch
    | Join
    | Joined
    | Fetch
    | Chunk
    | Copy
    | Copied
    | Depart
    | Departed
    | Get
    | Write
    | Value
    | Hints
    | Round
    | Passed
    | Check
    | Checked
    | Repay
    | Repayment
)

REQUESTS: Final = (Find, Beat, Join, Fetch, Copy, Depart, Get, Write, Hints, Round, Check, Repay)


class Message(msgspec.Struct, frozen=True, array_like=True):
    """See the module."""

    replica_set: MaybeName
    number: Number
    body: AnyBody

    @property
    def is_request(self) -> bool:
        return bool(self.replica_set)


_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    data = _encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise LocalProtocolError(f"a message of {len(data)} bytes about the ring is too long")
    return data


def decode(data: bytes) -> Message:
    """The message in these bytes; what is none raises RemoteProtocolError."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(TOO_LARGE, f"a message of {len(data)} bytes about the ring is too long")
    try:
        message = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(MALFORMED, f"no message about the ring: {error}") from None
    if message.is_request != isinstance(message.body, REQUESTS):
        raise RemoteProtocolError(MALFORMED, f"{type(message.body).__name__} with the wrong addressee")
    if isinstance(message.body, Write) and size_of(message.body.record) > MAX_RECORD_BYTES:
        raise RemoteProtocolError(TOO_LARGE, "a topic's record is too large")
    return message


def size_of(record: Record) -> int:
    """Bytes of a record on the wire."""
    return len(_encode(record))


def item_chunk(items: list[Item]) -> int:
    """How many of these fit in one message."""
    size = 0
    for number, item in enumerate(items):
        size += 32 + (0 if item.record is None else size_of(item.record))
        if size > CHUNK_BYTES:
            return number + 1
    return len(items)
