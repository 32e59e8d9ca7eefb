"""The protocol of the bulk port: frames, and the messages inside them. ``docs/reference/bulk-port.md`` tells it as a story.

A frame is a header of 12 bytes and a body; numbers are little-endian::

    at   size
     0   u32   bytes of the body
     4   u8    kind: MESSAGE or DATA
     5   u8[3] zeros
     8   u32   number: of the request or stream that the frame belongs to; 0 for the connection itself

The body of a MESSAGE is one of the structures below, as a MessagePack array that begins with its name; a field added at the
end later on does not disturb older readers. The body of a DATA frame is blocks of the log, whole ones, byte for byte as
:mod:`nearcast.topiclog.blocks` describes them; their topic numbers hold within the stream and were announced before.

The client speaks first, :class:`Hello`; until the broker's :class:`Welcome` nothing else may follow. Then the client numbers
its requests and streams as it likes, with numbers above 0 that are not in use. Each request gets one answer of its number;
answers come in the order in which they are ready. A stream is opened by :class:`Open` and ends with :class:`End` or
:class:`Refused`; until then the broker sends :class:`Names`, :class:`Gap`, and DATA with its :class:`Progress`; of DATA no
more than the client gave :class:`Credit` for: a frame leaves while credit is above 0, and takes its size off it, so that one
frame may overdraw it.

Here are bytes and types. Who may ask for what, and what is answered, is decided elsewhere.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, Literal

import msgspec

from nearcast.errors import RemoteProtocolError

VERSION: Final = 1

HEADER: Final = struct.Struct("<IB3xI")
HEADER_BYTES: Final = 12

MESSAGE: Final = 1
DATA: Final = 2

MAX_HELLO_BYTES: Final = 16_384
"""A first frame above this is not waited for."""

MAX_MESSAGE_BYTES: Final = 4_194_304
"""Most that a message may have in either direction, beyond the payloads of a :class:`Publish`."""

MAX_NUMBER: Final = 0xFFFFFFFF

MAX_FILTERS: Final = 64
"""Topic filters of one request."""

MAX_NAME_BYTES: Final = 256
"""Of a producer's name."""

ONCE_PREFIX: Final = "once/"
"""With this begins the name of a producer that has one batch and never another. It is remembered for a while, so that the
batch can be asked for again, and takes no room from those that go on."""

PAGE_TOPICS: Final = 2_000
"""Most topics in one answer to :class:`ListTopics`."""

Number = Annotated[int, msgspec.Meta(le=(1 << 63) - 1)]
"""What a client may say: the log counts in 64 bits with a sign, while MessagePack knows larger ones."""

_MALFORMED: Final = 0x81
_TOO_LARGE: Final = 0x95


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Root of everything that travels in a MESSAGE frame."""


# --- what the client says -------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """Who is there. Credentials are those of MQTT: the broker's own rules decide."""

    version: Number = VERSION
    client_id: str = ""
    username: str | None = None
    password: bytes | None = None


class Ping(Message, frozen=True, tag="ping"):
    """Either side, at any time after the welcome; the other answers :class:`Pong` with the same number."""


class ListTopics(Message, frozen=True, tag="topics"):
    """Which topics the log has: those that a filter matches, or without any filter all that the client may read. They are
    listed by their number in the log; ``after`` continues an answer that had more. ``keeper`` names the log: "set:NAME" that
    of a replica set (for brokers), "here" that of the broker that is asked, "" all that it has or can reach. With ``newest``,
    what replica sets keep is told as it is now, by their leaders' word; without, as far as the replica knows that is asked."""

    filters: list[str]
    after: Number = -1
    keeper: str = ""
    newest: bool = False


class FindIndexes(Message, frozen=True, tag="indexes"):
    """For each topic, the index of the first record that is not older than ``time_us``: the next one's, if none is there."""

    filters: list[str]
    time_us: Number
    after: Number = -1
    keeper: str = ""


class Get(Message, frozen=True, tag="get"):
    """One record; answered by a DATA frame with one block of one record, whose topic number means nothing."""

    topic: str
    index: Number
    keeper: str = ""


class Publish(Message, frozen=True, tag="publish"):
    """Append messages that share topic and properties (MQTT 5, encoded, without their length), and deliver them to
    subscribers. Answered by :class:`Done` with the index of the first once all are committed: 0, if a replica set has them and
    lost its leader before that one could say where."""

    topic: str
    payloads: list[bytes]
    properties: bytes = b""
    qos: Number = 1
    retain: bool = False


class ListRules(Message, frozen=True, tag="rules"):
    """Which topics are kept, as far as the client may read them, publish to them, or manage them."""


class Rule(Message, frozen=True, tag="rule"):
    """One rule, as :class:`nearcast.config.TopicRule`. ``origin`` says where it is from: "config" or "created"."""

    topic: str
    mode: Literal["durable", "tap"] = "durable"
    max_records: Number = 0
    max_bytes: Number = 0
    max_age_seconds: float = 0.0
    origin: str = "created"


class CreateRule(Message, frozen=True, tag="create"):
    """Keep topics from now on; answered by :class:`Done`, 1 when that changed something and 0 when it was so already."""

    rule: Rule


class DeleteRule(Message, frozen=True, tag="delete"):
    """Keep them no more; answered by :class:`Done`. What was kept goes with ``records``."""

    topic: str
    records: bool = True


class Open(Message, frozen=True, tag="open"):
    """Open a stream over all topics that a filter matches, in the order of the log.

    It begins, for topics in ``start_indexes``, there; for others at ``start``: their "earliest" record, behind their "latest",
    at the "index" ``start_value``, or with the first record that is not older than the "time" ``start_value`` (microseconds
    since 1970). With ``listed_only`` there are no others.

    It ends, exclusively, for topics in ``end_indexes`` there, for others at ``end_index``, and for all at the first record
    that is not older than ``end_time_us``, if that comes sooner. Without ``follow`` nothing is read that is not committed when
    the stream is opened. With it the stream waits for what is committed later; a topic that appears later is read from its
    first record on.
    """

    filters: list[str]
    start: Literal["earliest", "latest", "index", "time"] = "earliest"
    start_value: Number = 0
    start_indexes: dict[str, Number] = {}
    listed_only: bool = False
    end_index: Number | None = None
    end_indexes: dict[str, Number] = {}
    end_time_us: Number | None = None
    follow: bool = False
    credit: Number = 0
    keeper: str = ""


class Credit(Message, frozen=True, tag="credit"):
    """Bytes of DATA more that the stream may send."""

    bytes: Number


class Close(Message, frozen=True, tag="close"):
    """The client wants no more of a stream or an upload. What is under way still arrives; then :class:`End`."""


class Stage(Message, frozen=True, tag="stage"):
    """Begin to hand in rows: what one attempt at one partition of one batch of a producer brings. Answered by :class:`Done`;
    then DATA frames of the same number follow, in which TOPIC blocks number the topics and RECORDS blocks hold rows (indexes
    and times mean nothing), and at last :class:`StageEnd`. Another upload of the same attempt takes the place of the first."""

    producer: str
    batch: int
    partition: int
    attempt: int


class StageEnd(Message, frozen=True, tag="staged"):
    """All rows were sent. Answered by :class:`Done` with their number once they are on disk."""


class CommitBatch(Message, frozen=True, tag="commit"):
    """Publish what these attempts (partition, attempt) handed in, all or nothing, once. Answered by :class:`Done`: 1 when that
    is done now, 0 when this batch or a later one of the producer had been committed before."""

    producer: str
    batch: int
    attempts: list[tuple[Number, Number]]


class AbortBatch(Message, frozen=True, tag="abort"):
    """Forget what was handed in for a batch, unless it was committed; answered by :class:`Done`."""

    producer: str
    batch: int


class LastBatch(Message, frozen=True, tag="last"):
    """Which batch of a producer was committed last; answered by :class:`Done`, -1 for none."""

    producer: str


# --- what the broker says -------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag="welcome"):
    """The client is in. It must be heard of (a :class:`Ping` will do) at least every ``idle_seconds``."""

    version: int
    client_id: str
    idle_seconds: float
    max_frame_bytes: int
    """Most that the body of a frame from the client may have."""
    broker: str = ""


class Pong(Message, frozen=True, tag="pong"):
    """The answer to :class:`Ping`."""


class Refused(Message, frozen=True, tag="refused"):
    """No. For number 0, the connection ends. ``reason_code`` is MQTT's; ``kind`` says which facts are given."""

    kind: str
    """"request", "topic-unknown" (``topic``), "record-unavailable" (``topic``, ``index``, ``first_index``, ``next_index``),
    "batch" or "storage"."""
    message: str
    reason_code: int = 0x80
    topic: str = ""
    index: int = 0
    first_index: int = 0
    next_index: int = 0


class Done(Message, frozen=True, tag="done"):
    """Yes."""

    value: int = 0


class State(Message, frozen=True, tag="state"):
    """A topic in the log. Readers see records from ``first_index`` to before ``next_index``."""

    topic: str
    first_index: int
    next_index: int
    bytes: int
    first_time_us: int
    last_time_us: int
    replica_set: str = ""
    """The set that keeps it; empty: one broker does."""
    leader: str = ""
    """Who leads that set, as far as is known."""


class States(Message, frozen=True, tag="states"):
    """Answer to :class:`ListTopics`. ``after`` is where to go on, -1 when that is all."""

    states: list[State]
    after: int = -1


class Indexes(Message, frozen=True, tag="found"):
    """Answer to :class:`FindIndexes`; ``after`` as in :class:`States`."""

    indexes: list[tuple[str, int]]
    after: int = -1


class Rules(Message, frozen=True, tag="ruled"):
    """Answer to :class:`ListRules`."""

    rules: list[Rule]


class Name(msgspec.Struct, frozen=True, array_like=True):
    """A topic of a stream: its number there, and from where to where the stream will read it (``None``: without end)."""

    number: int
    topic: str
    start: int
    end: int | None


class Names(Message, frozen=True, tag="names"):
    """Topics that the stream reads, before anything is said of them."""

    names: list[Name]


class Opened(Message, frozen=True, tag="opened"):
    """All topics that were there when the stream was opened have been named."""


class Gap(Message, frozen=True, tag="gap"):
    """Records that the stream had to read are gone: retention removed them before they were read."""

    number: int
    first_index: int
    next_index: int
    """The first that is there."""


class Progress(Message, frozen=True, tag="progress"):
    """How far the stream has come with the DATA frame before: (topic number, index to go on with) of each topic in it."""

    next_indexes: list[tuple[int, int]]


class End(Message, frozen=True, tag="end"):
    """The stream is over: everything up to its end was sent, or the client closed it."""


FromClient = (
    Hello
    | Ping
    | Pong
    | ListTopics
    | FindIndexes
    | Get
    | Publish
    | ListRules
    | CreateRule
    | DeleteRule
    | Open
    | Credit
    | Close
    | Stage
    | StageEnd
    | CommitBatch
    | AbortBatch
    | LastBatch
)
FromBroker = Welcome | Ping | Pong | Refused | Done | States | Indexes | Rules | Names | Opened | Gap | Progress | End

_encoder: Final = msgspec.msgpack.Encoder()
_from_client: Final = msgspec.msgpack.Decoder(FromClient)
_from_broker: Final = msgspec.msgpack.Decoder(FromBroker)


def message(number: int, content: Message) -> bytes:
    """A MESSAGE frame."""
    body = _encoder.encode(content)
    return HEADER.pack(len(body), MESSAGE, number) + body


def data_header(number: int, size: int) -> bytes:
    """What precedes ``size`` bytes of blocks."""
    return HEADER.pack(size, DATA, number)


def decode_from_client(body: bytes | memoryview | bytearray) -> FromClient:
    """What a client's MESSAGE frame says; raises :class:`RemoteProtocolError`."""
    try:
        content: FromClient = _from_client.decode(body)
        return content
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        # The error's text may quote what was sent, a password among it.
        raise RemoteProtocolError(_MALFORMED, "a message that is none of this protocol") from error


def decode_from_broker(body: bytes | memoryview | bytearray) -> FromBroker:
    """What a broker's MESSAGE frame says; raises :class:`RemoteProtocolError`."""
    try:
        content: FromBroker = _from_broker.decode(body)
        return content
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise RemoteProtocolError(_MALFORMED, f"a message that is none of this protocol: {error}") from error


def read_header(
    header: bytes | bytearray | memoryview, offset: int, max_message_bytes: int, max_data_bytes: int
) -> tuple[int, int, int]:
    """(bytes of the body, kind, number) of a frame; raises :class:`RemoteProtocolError` for one that must not be read on."""
    size, kind, number = HEADER.unpack_from(header, offset)
    if kind == MESSAGE:
        limit = max_message_bytes
    elif kind == DATA:
        limit = max_data_bytes
    else:
        raise RemoteProtocolError(_MALFORMED, f"a frame of unknown kind {kind}: is this the bulk port's protocol?")
    if size > limit:
        raise RemoteProtocolError(_TOO_LARGE, f"a frame of {size} bytes, {limit} allowed")
    return size, kind, number


class FrameReader:
    """Takes bytes as they come and gives frames: (kind, number, body). Bodies are copies, and small ones come together."""

    def __init__(self, max_message_bytes: int, max_data_bytes: int) -> None:
        self.max_message_bytes = max_message_bytes
        self.max_data_bytes = max_data_bytes
        self._partial = bytearray()
        self._needed = HEADER_BYTES

    @property
    def waiting_bytes(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._partial)

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """The frames that are whole now. Raises :class:`RemoteProtocolError` at the first that cannot be one."""
        partial = self._partial
        if partial:
            partial += data
            if len(partial) < self._needed:
                return []
            data = bytes(partial)
            self._partial = bytearray()
        frames: list[tuple[int, int, bytes]] = []
        position, end = 0, len(data)
        while end - position >= HEADER_BYTES:
            size, kind, number = read_header(data, position, self.max_message_bytes, self.max_data_bytes)
            body = position + HEADER_BYTES
            if end - body < size:
                self._needed = HEADER_BYTES + size
                break
            frames.append((kind, number, data[body : body + size]))
            position = body + size
        else:
            self._needed = HEADER_BYTES
        if position < end:
            self._partial = bytearray(data[position:])
        return frames
