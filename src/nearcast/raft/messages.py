"""What replicas of one set say to each other, as objects and as bytes.

================ ==================== ===================================================================================
message          from → to            says
================ ==================== ===================================================================================
Append           leader → replica     entries behind one that you should have, and how far all is committed
AppendResponse   replica → leader     on my disk up to here; or, rejected, where our logs may part
Heartbeat        leader → replica     I lead; committed is at least this; so patient be, and this is your rank. Round 0 wants
                                      no answer
HeartbeatResponse replica → leader    I follow; on my disk, and in my memory, up to here
VoteRequest      candidate → replica  vote for me (or, ``pre``: would you?); my log ends here
VoteResponse     replica → candidate  yes or no
TimeoutNow       leader → replica     stand for election at once: you have all I have
InstallSnapshot  leader → replica     what you need is not in my log any more; this stands in for it
ReadRequest      replica → leader     up to where must I be, to read what is true now?
ReadResponse     leader → replica     up to here
================ ==================== ===================================================================================

Little-endian; all begin with kind, source, target and term. The set is not named: whoever drives replicas of several sets over
one link says which, and may send many small messages as one. Sizes are bounded here, content is checked here: behind
:func:`decode` nothing needs to be doubted but whether it is true. Garbage raises
:class:`~nearcast.errors.RemoteProtocolError` and nothing else.
"""

from __future__ import annotations

import math
import struct
from typing import Final

from nearcast.errors import RemoteProtocolError
from nearcast.raft.configuration import MAX_ID, Configuration
from nearcast.raft.entries import CONFIGURATION, DATA, NOOP, Entry, Snapshot

APPEND: Final = 1
APPEND_RESPONSE: Final = 2
HEARTBEAT: Final = 3
HEARTBEAT_RESPONSE: Final = 4
VOTE_REQUEST: Final = 5
VOTE_RESPONSE: Final = 6
TIMEOUT_NOW: Final = 7
INSTALL_SNAPSHOT: Final = 8
READ_REQUEST: Final = 9
READ_RESPONSE: Final = 10

MAX_NUMBER: Final = (1 << 62) - 1
"""Terms, indexes and rounds stay below, so that compiled code computes with machine integers."""
MAX_ENTRIES: Final = 65_536
"""In one message."""
MAX_MESSAGE_BYTES: Final = 1 << 29
MAX_DESCRIPTION_BYTES: Final = 1 << 20
MAX_PRIORITY: Final = 1_000_000
MAX_RANK: Final = 63

_HEAD: Final = struct.Struct("<BQQQ")
_APPEND: Final = struct.Struct("<QQQI")
_ENTRY: Final = struct.Struct("<QBI")
_APPEND_RESPONSE: Final = struct.Struct("<BQQQi")
_HEARTBEAT: Final = struct.Struct("<QQdBd")
_HEARTBEAT_RESPONSE: Final = struct.Struct("<QdQQi")
_VOTE_REQUEST: Final = struct.Struct("<BQQ")
_VOTE_RESPONSE: Final = struct.Struct("<B")
_SNAPSHOT: Final = struct.Struct("<QQII")
_READ_REQUEST: Final = struct.Struct("<Q")
_READ_RESPONSE: Final = struct.Struct("<QQ")

_NO_PIECES: Final[list[bytes]] = []


class Message:
    """One of the above; ``kind`` says which. ``source`` and ``target`` are replicas."""

    def __init__(self, kind: int, source: int, target: int, term: int) -> None:
        self.kind = kind
        self.source = source
        self.target = target
        self.term = term

    def encode(self) -> list[bytes]:
        """The message in pieces; payloads are among them as they are."""
        return [_HEAD.pack(self.kind, self.source, self.target, self.term) + self._body()]

    def _body(self) -> bytes:
        return b""

    def __repr__(self) -> str:
        return f"{self.source}→{self.target} {type(self).__name__} term {self.term}{self._details()}"

    def _details(self) -> str:
        return ""


class Append(Message):
    """Entries that follow ``previous_index``, whose term is ``previous_term``."""

    def __init__(
        self,
        source: int,
        target: int,
        term: int,
        previous_index: int,
        previous_term: int,
        commit: int,
        entries: list[Entry],
    ) -> None:
        super().__init__(APPEND, source, target, term)
        self.previous_index = previous_index
        self.previous_term = previous_term
        self.commit = commit
        self.entries = entries

    def encode(self) -> list[bytes]:
        entries = self.entries
        parts = [
            _HEAD.pack(APPEND, self.source, self.target, self.term),
            _APPEND.pack(self.previous_index, self.previous_term, self.commit, len(entries)),
        ]
        for entry in entries:
            parts.append(_ENTRY.pack(entry.term, entry.kind, entry.size))
        pieces = [b"".join(parts)]
        for entry in entries:
            pieces.extend(entry.pieces)
        return pieces

    def _details(self) -> str:
        text = f", after {self.previous_index}/{self.previous_term}, commit {self.commit}"
        return f"{text}: {' '.join(map(repr, self.entries))}" if self.entries else text


class AppendResponse(Message):
    """``index``: on the disk, and as the leader has it, up to here. With ``rejected``: the entry that is missing or of another
    term; up to ``hint_index`` the logs may agree, where this replica has ``hint_term``. ``priority``: of the sender."""

    def __init__(
        self,
        source: int,
        target: int,
        term: int,
        index: int,
        rejected: bool = False,
        hint_index: int = 0,
        hint_term: int = 0,
        priority: int = 0,
    ) -> None:
        super().__init__(APPEND_RESPONSE, source, target, term)
        self.index = index
        self.rejected = rejected
        self.hint_index = hint_index
        self.hint_term = hint_term
        self.priority = priority

    def _body(self) -> bytes:
        return _APPEND_RESPONSE.pack(self.rejected, self.index, self.hint_index, self.hint_term, self.priority)

    def _details(self) -> str:
        if self.rejected:
            return f", rejects {self.index}, hint {self.hint_index}/{self.hint_term}"
        return f", has {self.index}"


class Heartbeat(Message):
    """``sent_s`` comes back in the answer: the leader's own clock, for its round trips. ``rank``: how many others are to stand
    for election before the target, should this leader go. ``election_timeout_s``: how long to wait before that."""

    def __init__(
        self,
        source: int,
        target: int,
        term: int,
        commit: int,
        round_: int,
        sent_s: float,
        rank: int,
        election_timeout_s: float,
    ) -> None:
        super().__init__(HEARTBEAT, source, target, term)
        self.commit = commit
        self.round = round_
        self.sent_s = sent_s
        self.rank = rank
        self.election_timeout_s = election_timeout_s

    def _body(self) -> bytes:
        return _HEARTBEAT.pack(self.commit, self.round, self.sent_s, self.rank, self.election_timeout_s)

    def _details(self) -> str:
        return f", commit {self.commit}, round {self.round}" if self.round else f", commit {self.commit}, no answer"


class HeartbeatResponse(Message):
    """``index`` as in an AppendResponse; ``received``: the same, but in memory."""

    def __init__(
        self, source: int, target: int, term: int, round_: int, sent_s: float, index: int, received: int, priority: int = 0
    ) -> None:
        super().__init__(HEARTBEAT_RESPONSE, source, target, term)
        self.round = round_
        self.sent_s = sent_s
        self.index = index
        self.received = received
        self.priority = priority

    def _body(self) -> bytes:
        return _HEARTBEAT_RESPONSE.pack(self.round, self.sent_s, self.index, self.received, self.priority)

    def _details(self) -> str:
        return f", round {self.round}, has {self.index}, received {self.received}"


class VoteRequest(Message):
    """``pre``: nobody's term changes, and ``term`` is the one that the election would have (thesis §9.6). ``transfer``: the
    leader wants it, so those who hear it well vote as well (thesis §4.2.3)."""

    def __init__(
        self, source: int, target: int, term: int, last_index: int, last_term: int, pre: bool, transfer: bool = False
    ) -> None:
        super().__init__(VOTE_REQUEST, source, target, term)
        self.last_index = last_index
        self.last_term = last_term
        self.pre = pre
        self.transfer = transfer

    def _body(self) -> bytes:
        return _VOTE_REQUEST.pack(self.pre | self.transfer << 1, self.last_index, self.last_term)

    def _details(self) -> str:
        how = ", pre" if self.pre else ", transfer" if self.transfer else ""
        return f"{how}, log ends {self.last_index}/{self.last_term}"


class VoteResponse(Message):
    """A granted ``pre`` vote has the term that was asked for, everything else the sender's."""

    def __init__(self, source: int, target: int, term: int, granted: bool, pre: bool) -> None:
        super().__init__(VOTE_RESPONSE, source, target, term)
        self.granted = granted
        self.pre = pre

    def _body(self) -> bytes:
        return _VOTE_RESPONSE.pack(self.granted | self.pre << 1)

    def _details(self) -> str:
        return f"{', pre' if self.pre else ''}, {'granted' if self.granted else 'denied'}"


class TimeoutNow(Message):
    def __init__(self, source: int, target: int, term: int) -> None:
        super().__init__(TIMEOUT_NOW, source, target, term)


class InstallSnapshot(Message):
    """The driver fetches what the snapshot describes, and hands the message on when it has it."""

    def __init__(self, source: int, target: int, term: int, snapshot: Snapshot) -> None:
        super().__init__(INSTALL_SNAPSHOT, source, target, term)
        self.snapshot = snapshot

    def _body(self) -> bytes:
        snapshot = self.snapshot
        configuration = snapshot.configuration.encode()
        head = _SNAPSHOT.pack(snapshot.index, snapshot.term, len(configuration), len(snapshot.description))
        return head + configuration + snapshot.description

    def _details(self) -> str:
        return f", {self.snapshot}"


class ReadRequest(Message):
    def __init__(self, source: int, target: int, term: int, number: int) -> None:
        super().__init__(READ_REQUEST, source, target, term)
        self.number = number

    def _body(self) -> bytes:
        return _READ_REQUEST.pack(self.number)

    def _details(self) -> str:
        return f", number {self.number}"


class ReadResponse(Message):
    def __init__(self, source: int, target: int, term: int, number: int, index: int) -> None:
        super().__init__(READ_RESPONSE, source, target, term)
        self.number = number
        self.index = index

    def _body(self) -> bytes:
        return _READ_RESPONSE.pack(self.number, self.index)

    def _details(self) -> str:
        return f", number {self.number}: {self.index}"


def decode(content: bytes) -> Message:
    """The message in these bytes, which are exactly one."""
    if len(content) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(0x95, f"a raft message of {len(content)} bytes")
    try:
        return _decoded(content)
    except struct.error as error:
        raise RemoteProtocolError(0x81, f"no raft message: {error}") from error


def _decoded(content: bytes) -> Message:
    kind, source, target, term = _HEAD.unpack_from(content)
    if not (0 < source <= MAX_ID and 0 < target <= MAX_ID and term <= MAX_NUMBER):
        raise RemoteProtocolError(0x81, "a raft message from nobody, to nobody or of no term")
    at = _HEAD.size
    if kind == APPEND:
        return _append(content, source, target, term)
    if kind == INSTALL_SNAPSHOT:
        return _install_snapshot(content, source, target, term)
    if kind == APPEND_RESPONSE:
        flags, index, hint_index, hint_term, priority = _exactly(_APPEND_RESPONSE, content)
        _check_flags(flags, 1)
        _check(index, hint_index, hint_term)
        _check_priority(priority)
        return AppendResponse(source, target, term, index, bool(flags), hint_index, hint_term, priority)
    if kind == HEARTBEAT:
        commit, round_, sent_s, rank, timeout_s = _exactly(_HEARTBEAT, content)
        _check(commit, round_, 0)
        if rank > MAX_RANK or not (math.isfinite(sent_s) and 0.0 <= timeout_s <= 3_600.0):
            raise RemoteProtocolError(0x81, "a heartbeat with a time that is none")
        return Heartbeat(source, target, term, commit, round_, sent_s, rank, timeout_s)
    if kind == HEARTBEAT_RESPONSE:
        round_, sent_s, index, received, priority = _exactly(_HEARTBEAT_RESPONSE, content)
        _check(round_, index, received)
        _check_priority(priority)
        if not math.isfinite(sent_s):
            raise RemoteProtocolError(0x81, "a heartbeat's answer with a time that is none")
        return HeartbeatResponse(source, target, term, round_, sent_s, index, received, priority)
    if kind == VOTE_REQUEST:
        flags, last_index, last_term = _exactly(_VOTE_REQUEST, content)
        _check_flags(flags, 2)  # a leader's wish needs no pre-vote
        _check(last_index, last_term, 0)
        return VoteRequest(source, target, term, last_index, last_term, flags == 1, flags == 2)
    if kind == VOTE_RESPONSE:
        (flags,) = _exactly(_VOTE_RESPONSE, content)
        _check_flags(flags, 3)
        return VoteResponse(source, target, term, bool(flags & 1), bool(flags & 2))
    if kind == TIMEOUT_NOW:
        if len(content) != at:
            raise RemoteProtocolError(0x81, "a raft message has the wrong length")
        return TimeoutNow(source, target, term)
    if kind == READ_REQUEST:
        (number,) = _exactly(_READ_REQUEST, content)
        _check(number, 0, 0)
        return ReadRequest(source, target, term, number)
    if kind == READ_RESPONSE:
        number, index = _exactly(_READ_RESPONSE, content)
        _check(number, index, 0)
        return ReadResponse(source, target, term, number, index)
    raise RemoteProtocolError(0x81, f"no raft message: kind {kind}")


def _append(content: bytes, source: int, target: int, term: int) -> Message:
    previous_index, previous_term, commit, count = _APPEND.unpack_from(content, _HEAD.size)
    _check(previous_index, previous_term, commit)
    at = _HEAD.size + _APPEND.size
    payload_at = at + count * _ENTRY.size
    if count > MAX_ENTRIES or payload_at > len(content):
        raise RemoteProtocolError(0x81, "entries of a raft message are cut short")
    entries: list[Entry] = []
    index = previous_index
    at_least = previous_term
    for _ in range(count):
        entry_term, kind, size = _ENTRY.unpack_from(content, at)
        at += _ENTRY.size
        payload_end = payload_at + size
        if payload_end > len(content) or kind not in (DATA, CONFIGURATION, NOOP) or not at_least <= entry_term <= term:
            raise RemoteProtocolError(0x81, "a raft message has an entry that is none")
        index += 1
        at_least = entry_term
        payload = content[payload_at:payload_end]
        if kind == CONFIGURATION:
            Configuration.decode(payload)
        entries.append(Entry(index, entry_term, kind, [payload] if payload else _NO_PIECES))
        payload_at = payload_end
    if payload_at != len(content):
        raise RemoteProtocolError(0x81, "a raft message has the wrong length")
    return Append(source, target, term, previous_index, previous_term, commit, entries)


def _install_snapshot(content: bytes, source: int, target: int, term: int) -> Message:
    index, snapshot_term, configuration_bytes, description_bytes = _SNAPSHOT.unpack_from(content, _HEAD.size)
    _check(index, snapshot_term, 0)
    at = _HEAD.size + _SNAPSHOT.size
    end = at + configuration_bytes
    if description_bytes > MAX_DESCRIPTION_BYTES or end + description_bytes != len(content):
        raise RemoteProtocolError(0x81, "a raft message has the wrong length")
    configuration = Configuration.decode(content[at:end])
    if not configuration.voters or snapshot_term > term:
        raise RemoteProtocolError(0x81, "a snapshot of no replica set, or of a term to come")
    return InstallSnapshot(source, target, term, Snapshot(index, snapshot_term, configuration, content[end:]))


def _exactly(form: struct.Struct, content: bytes) -> tuple:  # type: ignore[type-arg]
    if len(content) != _HEAD.size + form.size:
        raise RemoteProtocolError(0x81, "a raft message has the wrong length")
    return form.unpack_from(content, _HEAD.size)


def _check(first: int, second: int, third: int) -> None:
    if first > MAX_NUMBER or second > MAX_NUMBER or third > MAX_NUMBER:
        raise RemoteProtocolError(0x81, "a raft message with a number out of range")


def _check_priority(priority: int) -> None:
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise RemoteProtocolError(0x81, "a raft message with a priority out of range")


def _check_flags(flags: int, most: int) -> None:
    if flags > most:
        raise RemoteProtocolError(0x81, "a raft message with flags that are none")
