"""A plan as it travels: JSON on ``$nearcast/plan``, from whoever plans to the controller, which carries it out.

A move names the epoch in which its topic was owned by ``origin`` when it was decided; one whose topic has moved on since is
not made. Plans are numbered by their planner, upwards; a controller passes over one that is not above the last it took from
the same planner.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from nearcast.errors import ConfigError

MAX_PLAN_BYTES: Final = 16_777_216
"""A plan is refused above this; some hundred thousand moves."""


MAX_WORDS: Final = 500
"""Characters that a planner may call itself by, and give as a reason: a controller keeps them with every migration."""

Words = Annotated[str, msgspec.Meta(max_length=MAX_WORDS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]


class PlannedMove(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hand ``topic`` over from ``origin`` to ``target``. ``epoch`` 0 and an empty origin: whatever they are now."""

    topic: str
    target: str
    origin: str = ""
    epoch: Count = 0
    reason: Words = ""


class PlanRecord(msgspec.Struct, frozen=True):
    """A plan. ``time``: wall clock, seconds."""

    number: Count
    time: float
    planner: Words
    moves: tuple[PlannedMove, ...]


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(PlanRecord)


def encode_plan(record: PlanRecord) -> bytes:
    return _encoder.encode(record)


def decode_plan(data: bytes) -> PlanRecord:
    """Raises :class:`ConfigError`, which says what is wrong."""
    if len(data) > MAX_PLAN_BYTES:
        raise ConfigError(f"a plan of {len(data):,} bytes is refused: at most {MAX_PLAN_BYTES:,}; send fewer moves at once")
    try:
        record = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a plan: {error}") from error
    for move in record.moves:
        if not move.topic or not move.target:
            raise ConfigError("not a plan: a move needs a topic and a target")
    return record


def split_plan(record: PlanRecord, moves_each: int) -> list[PlanRecord]:
    """The same moves as several plans, numbered one after the other: for topics that take no messages of that size."""
    parts = [record.moves[begin : begin + moves_each] for begin in range(0, len(record.moves), moves_each)] or [()]
    return [msgspec.structs.replace(record, number=record.number + index, moves=part) for index, part in enumerate(parts)]
