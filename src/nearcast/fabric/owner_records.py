"""What brokers and the controller tell each other about the owners of topics.

::

    broker ─OWNERS_ASK {OwnersAsk}─► controller      who owns these? If nobody does, the asker is made the owner
    broker ◄─OWNERS {Owners}──────── controller      answers, and new owners of topics that were asked for
    broker ─OWNED {Owned}──────────► controller      what I own: all of it after the link came up, then what changed
    broker ◄─MIGRATE {MigrateOrder}─ controller      hand this topic over
    broker ─MIGRATED {Migrated}────► controller      done, or why not
    broker ─TELEMETRY {raw bytes}──► controller      kind byte (0 broker, 1 topics) and the JSON of telemetry.records
    broker ─PLAN {raw bytes}───────► controller      a plan that somebody published on ``$nearcast/plan``

An *epoch* is when an owner was decided, in microseconds of wall clock and above the epoch before: of two words about a topic
the one with the higher epoch is true. Only the owner of an epoch ends it, by handing the topic over; or the controller, when
that owner is dead.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

MAX_EPOCH: Final = 1 << 60
"""Some time in the 38th millennium: whoever claims more is not believed, for nobody could ever own the topic after him."""

Epoch = Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """A topic, who owns it, and since which epoch. An empty ``owner``: nobody at the moment; ask again. ``appointed``: the
    controller decided so itself (the first who asked, or in the place of one that is dead): nobody hands it over."""

    topic: str
    epoch: Epoch
    owner: str
    appointed: bool = False


class OwnersAsk(msgspec.Struct, frozen=True):
    """(topic, highest epoch known there) each."""

    topics: tuple[tuple[str, Epoch], ...]


class Owners(msgspec.Struct, frozen=True):
    owners: tuple[Owner, ...]


class Owned(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a broker owns now; whom it handed a topic over to, with that one's epoch; or, with an empty ``owner``, what needs
    none any more. ``whole``: all it knows, from here on; ``more``: that list goes on in the next frame."""

    owners: tuple[Owner, ...]
    whole: bool = False
    more: bool = False


class MigrateOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Hand a topic over to ``target``, if it is owned here in ``epoch``; the new owner's epoch is ``new_epoch``.

    ``workflow``: "handover" is ours (ePulsar §3.6); "release" is the baseline: the topic is given up, everybody asks the
    controller who has it now, and nothing is held in order meanwhile. For comparison only.
    """

    number: int
    topic: str
    epoch: Epoch
    new_epoch: Epoch
    target: str
    workflow: Literal["handover", "release"] = "handover"


class Migrated(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How it went. ``number`` 0: by the owner's own decision (it stops)."""

    number: int
    topic: str
    epoch: Epoch
    """Of the owner there is now, as far as this broker knows."""
    owner: str
    done: bool
    reason: str = ""
    duration_ms: float = 0.0
    """From the order's arrival to the new owner's word that it is in charge."""
