"""What a broker and a worker process say to each other on two pipes: MessagePack behind a length, nothing that executes.

============ ==================== ==================================================================================
frame        direction            says
============ ==================== ==================================================================================
Begin        broker → worker      be this function, with this state
Run          broker → worker      messages of one topic, in order
Found        broker → worker      what was asked for; nothing: it is not there
Ready        worker → broker      the function is loaded; or, with a fault, it cannot be
Progress     worker → broker      some messages of a Run are done, and it goes on
Done         worker → broker      all messages of a Run are done: outputs, and the state if it changed; or one failed
Ask          worker → broker      a record of a topic by its index; 0: the latest index
Said         worker → broker      what the function printed
============ ==================== ==================================================================================
"""

from __future__ import annotations

from typing import Final

import msgspec

from nearcast.functionconfig import Function

LENGTH_BYTES: Final = 4
MAX_FRAME_BYTES: Final = 67_108_864
PROGRESS_SHARE: Final = 0.25
"""Of what a message may take: a worker with many says at least so often that it goes on."""


class Begin(msgspec.Struct, tag="begin"):
    function: Function
    state: bytes


class Run(msgspec.Struct, tag="run"):
    number: int
    topic: str
    indexes: list[int]
    times_us: list[int]
    payloads: list[bytes]


class Found(msgspec.Struct, tag="found"):
    payload: bytes | None
    index: int
    fault: str = ""


class Ready(msgspec.Struct, tag="ready"):
    fault: str = ""


class Output(msgspec.Struct, array_like=True):
    topic: str
    payload: bytes
    qos: int = 1
    retain: bool = False


class Done(msgspec.Struct, tag="done"):
    number: int
    outputs: list[Output]
    state: bytes | None
    """The new one; None: as it was."""
    fault: str = ""
    """Why a message failed; then nothing of this Run counts."""
    failed_index: int = 0


class Progress(msgspec.Struct, tag="progress"):
    number: int


class Ask(msgspec.Struct, tag="ask"):
    topic: str
    index: int


class Said(msgspec.Struct, tag="said"):
    text: str


ToWorker = Begin | Run | Found
ToBroker = Ready | Done | Progress | Ask | Said

_ENCODER: Final = msgspec.msgpack.Encoder()
_TO_WORKER: Final[msgspec.msgpack.Decoder[ToWorker]] = msgspec.msgpack.Decoder(ToWorker)
_TO_BROKER: Final[msgspec.msgpack.Decoder[ToBroker]] = msgspec.msgpack.Decoder(ToBroker)


def encode(frame: ToWorker | ToBroker) -> bytes:
    """A frame with its length."""
    body = _ENCODER.encode(frame)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def to_worker(body: bytes) -> ToWorker:
    """A frame for a worker; ``ValueError`` for anything else."""
    return _TO_WORKER.decode(body)


def to_broker(body: bytes) -> ToBroker:
    """A frame of a worker; ``ValueError`` for anything else."""
    return _TO_BROKER.decode(body)
