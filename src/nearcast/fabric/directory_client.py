"""A broker's side of the directory of owners: asks the controller, reports what this broker owns, hands on its answers.

Nothing is lost with the link: what was asked stays asked until somebody answers, and after each registration everything that
this broker owns is told anew, as is every topic it knows of another owner (whoever was cut off may have missed that the owner
died). An answer that does not come is asked for again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from nearcast.fabric import frames
from nearcast.fabric.control import Registration, pack
from nearcast.fabric.owner_records import Migrated, Owned, Owner, OwnersAsk
from nearcast.fabric.parts import FOREVER

ASK_AGAIN_S: Final = 2.0
"""How long an answer may take. The controller waits up to 10 s for brokers after its own start; asking twice is harmless."""

CHUNK_BYTES: Final = 262_144
"""Of topics in one frame, well below what a link takes."""

MAX_OUTCOMES: Final = 10_000
"""Outcomes of migrations kept for a controller that is away. Who owns what is told again in any case."""


class KnownTopic(Protocol):
    """A topic, as far as this module looks at it (:class:`nearcast.fabric.owned_topics.OwnedTopic`)."""

    name: bytes
    epoch: int
    owner: str

    @property
    def mine(self) -> bool: ...


class OwnershipUser(Protocol):
    """Who is told of owners (:class:`nearcast.fabric.ownership.Ownership`)."""

    @property
    def topics(self) -> Mapping[bytes, KnownTopic]: ...

    def told(self, name: str, epoch: int, owner: str, now: float, appointed: bool = False) -> None:
        """The directory's word. ``appointed``: by its own decision, so that nobody hands the topic over."""


class ControllerDirectory:
    """See the module. ``name`` is this broker's."""

    def __init__(self, registration: Registration, ownership: OwnershipUser, name: str) -> None:
        self._registration = registration
        self._ownership = ownership
        self._name = name
        self._asking: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._ask_again_at = FOREVER
        self._changes: dict[str, Owner] = {}
        self._outcomes: list[Migrated] = []
        self._whole = False

    # --- what ownership says --------------------------------------------------------------------------------------------

    def ask(self, topics: list[tuple[str, int]], now: float) -> None:
        """Who owns these? (topic, highest epoch known here) each."""
        self._asking.update(topics)

    def owned(self, topic: str, epoch: int, mine: bool) -> None:
        """This broker became the owner of a topic, or (``mine`` false) is not any more: because it hands it over, and then
        says to whom, or because nobody needs an owner."""
        owner = self._name if mine else ""
        known = self._ownership.topics.get(topic.encode("utf-8"))
        if not mine and known is not None and known.owner and known.epoch > epoch:
            epoch, owner = known.epoch, known.owner
        self._changes[topic] = Owner(topic, epoch, owner)

    def migrated(self, record: Migrated) -> None:
        """How handing a topic over went."""
        if len(self._outcomes) < MAX_OUTCOMES:
            self._outcomes.append(record)

    # --- what the controller says ---------------------------------------------------------------------------------------

    def registered(self, now: float) -> None:
        """The controller is there (again), and may be another one."""
        self._whole = True
        self._asking = self._asked | self._asking
        self._asked = {}
        for topic in self._ownership.topics.values():
            if not topic.mine:
                self._asking.setdefault(topic.name.decode("utf-8"), topic.epoch)

    def owners(self, owners: tuple[Owner, ...], now: float) -> None:
        """Answers and news."""
        for owner in owners:
            if owner.owner:
                self._asked.pop(owner.topic, None)
                self._asking.pop(owner.topic, None)
            self._ownership.told(owner.topic, owner.epoch, owner.owner, now, owner.appointed)

    # --- sending --------------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        if not (self._whole or self._changes or self._asking or self._outcomes):
            return
        send = self._registration.send
        if not self._registration.up:
            return
        if self._whole:
            self._whole = False
            self._changes.clear()
            self._tell_all()
        elif self._changes:
            changes, self._changes = self._changes, {}
            for part, _ in parts(list(changes.values())):
                send(pack(frames.OWNED, Owned(part)))
        outcomes, self._outcomes = self._outcomes, []
        for outcome in outcomes:
            send(pack(frames.MIGRATED, outcome))
        if self._asking:
            asking, self._asking = self._asking, {}
            self._asked.update(asking)
            self._ask_again_at = min(self._ask_again_at, now + ASK_AGAIN_S)
            for part, _ in parts([Owner(topic, epoch, "") for topic, epoch in asking.items()]):
                send(pack(frames.OWNERS_ASK, OwnersAsk(tuple((one.topic, one.epoch) for one in part))))

    def _tell_all(self) -> None:
        # Others' as well: this broker may have handed them over while the controller was away.
        known = [
            Owner(topic.name.decode("utf-8"), topic.epoch, topic.owner)
            for topic in self._ownership.topics.values()
            if topic.owner
        ]
        whole = True
        for part, more in parts(known):
            self._registration.send(pack(frames.OWNED, Owned(part, whole, more)))
            whole = False
        if whole:
            self._registration.send(pack(frames.OWNED, Owned((), True)))

    def tick(self, now: float) -> None:
        if now >= self._ask_again_at:
            self._ask_again_at = FOREVER
            self._asking = self._asked | self._asking
            self._asked = {}

    def next_deadline(self) -> float:
        return self._ask_again_at


def parts(owners: list[Owner]) -> Iterator[tuple[tuple[Owner, ...], bool]]:
    """Cut into frames; with each, whether another one follows."""
    part: list[Owner] = []
    size = 0
    for owner in owners:
        if size >= CHUNK_BYTES:
            yield tuple(part), True
            part, size = [], 0
        part.append(owner)
        size += len(owner.topic) + len(owner.owner) + 16
    if part:
        yield tuple(part), False
