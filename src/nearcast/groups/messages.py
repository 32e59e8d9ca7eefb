"""What brokers say to each other to form groups. Objects here, MessagePack arrays on a link.

======== ================= ==============================================================================================
message  from → to         says
======== ================= ==============================================================================================
Ask      leader → leader   let us merge: my capability, my group's size, my threshold, the latency I measure
Answer   leader → leader   who is to lead, or why not now
Join     broker → leader   take me in; or, with the ``reign``: I am still yours, and this is the view I have
Welcome  leader → broker   you are in, and this is the whole view
Refuse   broker → broker   I do not lead (now); this one might
Update   leader → member   what changed in the view
Notice   leader → member   I follow another leader from now on; you decide for yourself
Leave    member → leader   I am no longer yours
Report   member → leader   messages that came here since the last one, for somebody and for nobody (adaptive thresholds only)
Seek     member → leader   where is this leader? (flow-aware membership only)
Found    leader → member   there, by its last announcement
======== ================= ==============================================================================================

A leader join takes Ask, Answer and Join, a member join Notice and Join, as the paper counts (section IV-A); Welcome, Update
and Leave are what it leaves to the connection. ``number`` says which question an answer belongs to: a broker never uses one
twice.

What arrives is checked here, so that nothing behind it meets a number that is none, or a name that no broker can have.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from nearcast.groups.views import Member, View

ASK: Final = 1
ANSWER: Final = 2
JOIN: Final = 3
WELCOME: Final = 4
REFUSE: Final = 5
UPDATE: Final = 6
NOTICE: Final = 7
LEAVE: Final = 8
REPORT: Final = 9
SEEK: Final = 10
FOUND: Final = 11

# Verdicts of an Answer.
YOU_LEAD: Final = 1
I_LEAD: Final = 2
BUSY: Final = 3
NO: Final = 4
FOLLOWS: Final = 5
"""It does not lead."""

MAX_NUMBER: Final = 1 << 62
MAX_MEMBERS: Final = 16_384
MAX_NAME_CHARACTERS: Final = 128
MAX_ADDRESS_CHARACTERS: Final = 300


class Message:
    """One of the above; ``kind`` says which."""

    def __init__(self, kind: int, number: int) -> None:
        self.kind = kind
        self.number = number

    def encode(self) -> bytes:
        """The message as the content of a frame."""
        raise NotImplementedError

    @staticmethod
    def decode(content: bytes) -> Message:
        """The message in a frame's content."""
        return decode(content)


class Ask(Message):
    """``address`` and ``probe_address``: as in a Join. Who is asked may not have heard of us."""

    def __init__(
        self,
        number: int,
        lcm: float,
        size: int,
        threshold_ms: float,
        latency_ms: float,
        address: str = "",
        probe_address: str = "",
    ) -> None:
        super().__init__(ASK, number)
        self.lcm = lcm
        self.size = size
        self.threshold_ms = threshold_ms
        self.latency_ms = latency_ms
        self.address = address
        self.probe_address = probe_address

    def encode(self) -> bytes:
        figures = (self.lcm, self.size, self.threshold_ms, self.latency_ms)
        return _encode((ASK, self.number, *figures, self.address, self.probe_address))


class Answer(Message):
    def __init__(self, number: int, verdict: int) -> None:
        super().__init__(ANSWER, number)
        self.verdict = verdict

    def encode(self) -> bytes:
        return _encode((ANSWER, self.number, self.verdict))


class Join(Message):
    """``address`` and ``probe_address``: where the broker takes links and answers probes. ``version``: of the view that it has
    now, of whatever group. ``reign``: the receiver's, as that view says, if the broker is still a member; else 0."""

    def __init__(self, number: int, lcm: float, address: str, probe_address: str, version: int, reign: int) -> None:
        super().__init__(JOIN, number)
        self.lcm = lcm
        self.address = address
        self.probe_address = probe_address
        self.version = version
        self.reign = reign

    def encode(self) -> bytes:
        return _encode((JOIN, self.number, self.lcm, self.address, self.probe_address, self.version, self.reign))


class Welcome(Message):
    def __init__(self, number: int, view: View) -> None:
        super().__init__(WELCOME, number)
        self.view = view

    def encode(self) -> bytes:
        view = self.view
        members = [_fields(member) for member in view.members.values()]
        return _encode((WELCOME, self.number, view.leader, view.reign, view.version, view.join_ms, view.leave_ms, members))


class Refuse(Message):
    """``leader``: whom the refusing broker follows, or is about to; where that one is; and its group's join threshold."""

    def __init__(self, number: int, leader: str, address: str, probe_address: str, threshold_ms: float) -> None:
        super().__init__(REFUSE, number)
        self.leader = leader
        self.address = address
        self.probe_address = probe_address
        self.threshold_ms = threshold_ms

    def encode(self) -> bytes:
        return _encode((REFUSE, self.number, self.leader, self.address, self.probe_address, self.threshold_ms))


class Update(Message):
    """How to get from any view of this reign between the versions ``base`` and ``version`` to the latter: each broker that
    changed is named once, with what holds in the end."""

    def __init__(
        self,
        reign: int,
        base: int,
        version: int,
        join_ms: float,
        leave_ms: float,
        joined: list[Member],
        left: list[str],
    ) -> None:
        super().__init__(UPDATE, 0)
        self.reign = reign
        self.base = base
        self.version = version
        self.join_ms = join_ms
        self.leave_ms = leave_ms
        self.joined = joined
        self.left = left
        self._result: View | None = None

    def applied(self, view: View) -> View | None:
        """The view after the update; none if ``view`` is too old for it or too new, or of another reign."""
        if view.reign != self.reign or not self.base <= view.version < self.version:
            return None
        result = self._result
        if result is None:
            # All views in the range become the same one: whoever is handed this very object may share it.
            members = view.members.copy()
            for name in self.left:
                members.pop(name, None)
            for member in self.joined:
                members[member.name] = member
            result = self._result = View(view.leader, self.version, self.join_ms, self.leave_ms, members, self.reign)
        return result

    def encode(self) -> bytes:
        joined = [_fields(member) for member in self.joined]
        return _encode((UPDATE, 0, self.reign, self.base, self.version, self.join_ms, self.leave_ms, joined, self.left))


class Notice(Message):
    """``leader``: whom the sender follows from now on; where that one is; and its group's join threshold. One that stops, and
    follows nobody, names itself."""

    def __init__(self, leader: str, address: str, probe_address: str, threshold_ms: float) -> None:
        super().__init__(NOTICE, 0)
        self.leader = leader
        self.address = address
        self.probe_address = probe_address
        self.threshold_ms = threshold_ms

    def encode(self) -> bytes:
        return _encode((NOTICE, 0, self.leader, self.address, self.probe_address, self.threshold_ms))


class Leave(Message):
    """``number``: of the sender's last Join at this leader, or 0 where it knows of none."""

    def __init__(self, number: int) -> None:
        super().__init__(LEAVE, number)

    def encode(self) -> bytes:
        return _encode((LEAVE, self.number))


class Report(Message):
    """Counts since the last report; one that is lost is missing from both, which changes no share."""

    def __init__(self, correct: int, redundant: int) -> None:
        super().__init__(REPORT, 0)
        self.correct = correct
        self.redundant = redundant

    def encode(self) -> bytes:
        return _encode((REPORT, 0, self.correct, self.redundant))


class Seek(Message):
    """``leader``: whose announcements the sender does not hear, being a member."""

    def __init__(self, leader: str) -> None:
        super().__init__(SEEK, 0)
        self.leader = leader

    def encode(self) -> bytes:
        return _encode((SEEK, 0, self.leader))


class Found(Message):
    """Where a leader takes links and answers probes, and its group's join threshold."""

    def __init__(self, leader: str, address: str, probe_address: str, threshold_ms: float) -> None:
        super().__init__(FOUND, 0)
        self.leader = leader
        self.address = address
        self.probe_address = probe_address
        self.threshold_ms = threshold_ms

    def encode(self) -> bytes:
        return _encode((FOUND, 0, self.leader, self.address, self.probe_address, self.threshold_ms))


_Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
#: Capabilities, thresholds and latencies may be infinite.
_Measure = Annotated[float, msgspec.Meta(ge=0.0)]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)]
_Address = Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARACTERS)]
_Members = Annotated[list[tuple[_Name, _Address, _Number, _Address]], msgspec.Meta(max_length=MAX_MEMBERS)]
_Names = Annotated[list[_Name], msgspec.Meta(max_length=MAX_MEMBERS)]


def _fields(member: Member) -> tuple[str, str, int, str]:
    return member.name, member.address, member.joined_version, member.probe_address


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_ask: Final = msgspec.msgpack.Decoder(
    tuple[int, _Number, _Measure, _Number, _Measure, _Measure, _Address, _Address]
).decode
_decode_answer: Final = msgspec.msgpack.Decoder(tuple[int, _Number, int]).decode
_decode_join: Final = msgspec.msgpack.Decoder(tuple[int, _Number, _Measure, _Address, _Address, _Number, _Number]).decode
_decode_welcome: Final = msgspec.msgpack.Decoder(
    tuple[int, _Number, _Name, _Number, _Number, _Measure, _Measure, _Members]
).decode
_decode_refuse: Final = msgspec.msgpack.Decoder(tuple[int, _Number, _Name, _Address, _Address, _Measure]).decode
_decode_update: Final = msgspec.msgpack.Decoder(
    tuple[int, int, _Number, _Number, _Number, _Measure, _Measure, _Members, _Names]
).decode
_decode_notice: Final = msgspec.msgpack.Decoder(tuple[int, int, _Name, _Address, _Address, _Measure]).decode
_decode_leave: Final = msgspec.msgpack.Decoder(tuple[int, _Number]).decode

_decode_report: Final = msgspec.msgpack.Decoder(tuple[int, int, _Number, _Number]).decode
_decode_seek: Final = msgspec.msgpack.Decoder(tuple[int, int, _Name]).decode
_decode_found: Final = msgspec.msgpack.Decoder(tuple[int, int, _Name, _Address, _Address, _Measure]).decode


def decode(content: bytes) -> Message:
    """The message in a frame's content; what is none raises ValueError."""
    try:
        return _decoded(content)
    except msgspec.DecodeError as error:
        raise ValueError(f"no message about groups: {error}") from error


def _decoded(content: bytes) -> Message:
    # MessagePack: the kind is the small number behind the byte that says how many fields there are.
    kind = content[1] if len(content) > 1 else 0
    if kind == ASK:
        _, number, lcm, size, threshold_ms, latency_ms, address, probe_address = _decode_ask(content)
        return Ask(number, lcm, size, threshold_ms, latency_ms, address, probe_address)
    if kind == ANSWER:
        _, number, verdict = _decode_answer(content)
        return Answer(number, verdict)
    if kind == JOIN:
        _, number, lcm, address, probe_address, version, reign = _decode_join(content)
        return Join(number, lcm, address, probe_address, version, reign)
    if kind == WELCOME:
        _, number, leader, reign, version, join_ms, leave_ms, listed = _decode_welcome(content)
        members = {member.name: member for member in _members(listed)}
        return Welcome(number, View(leader, version, join_ms, leave_ms, members, reign))
    if kind == REFUSE:
        _, number, leader, address, probe_address, threshold_ms = _decode_refuse(content)
        return Refuse(number, _named(leader), address, probe_address, threshold_ms)
    if kind == UPDATE:
        _, _, reign, base, version, join_ms, leave_ms, joined, left = _decode_update(content)
        return Update(reign, base, version, join_ms, leave_ms, _members(joined), left)
    if kind == NOTICE:
        _, _, leader, address, probe_address, threshold_ms = _decode_notice(content)
        return Notice(_named(leader), address, probe_address, threshold_ms)
    if kind == LEAVE:
        return Leave(_decode_leave(content)[1])
    if kind == REPORT:
        _, _, correct, redundant = _decode_report(content)
        return Report(correct, redundant)
    if kind == SEEK:
        return Seek(_decode_seek(content)[2])
    if kind == FOUND:
        _, _, leader, address, probe_address, threshold_ms = _decode_found(content)
        return Found(_named(leader), address, probe_address, threshold_ms)
    raise ValueError(f"no message about groups: kind {kind}")


def _members(listed: list[tuple[str, str, int, str]]) -> list[Member]:
    return [Member(_named(name), address, version, probe_address) for name, address, version, probe_address in listed]


def _named(name: str) -> str:
    """As brokers may be called in the configuration."""
    if not name or not name.isprintable():
        raise ValueError(f"no message about groups: {name!r} is no broker's name")
    return name
