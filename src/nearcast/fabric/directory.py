"""The directory of owners: which broker owns a topic, and since which epoch.

Whoever changes an owner says which epoch it believes in: :meth:`Directory.compare_and_set` takes the change only if that is
the epoch there is. So two who decide at the same time never both succeed, and who decides on old knowledge is told the truth.
That one method and :meth:`Directory.find` are all that deciding needs, wherever the directory is: here it is
:class:`OwnerDirectory`, in the controller's memory.

That memory is soft. Brokers say what they own when they register, and :meth:`OwnerDirectory.learn` believes the highest epoch:
an epoch is the wall clock of the decision in microseconds, above the one before, so the highest is the last decision that
reached a broker.
"""

from __future__ import annotations

from typing import Final, Protocol

from nearcast.fabric.owner_records import Owner

MAX_TOPICS: Final = 2_000_000
"""Topics whose owners are known at once, some 300 bytes each. For further ones there is no owner, and they are parked."""


class Directory(Protocol):
    """What deciding about owners needs of a directory."""

    def find(self, topic: str) -> Owner | None:
        """Who owns a topic; ``None`` when nobody ever did, as far as is known."""

    def compare_and_set(self, expected_epoch: int, owner: Owner) -> Owner:
        """Make this the owner, if the topic's epoch now is ``expected_epoch`` (0: nobody owns it) and the new one is above.
        Returns who owns the topic afterwards: the caller has succeeded if that is what it asked for."""


class OwnerDirectory:
    """In memory. ``full`` counts topics that found no room."""

    def __init__(self, max_topics: int = MAX_TOPICS) -> None:
        self._owners: dict[str, Owner] = {}
        self._by_broker: dict[str, dict[str, None]] = {}
        self._max_topics = max_topics
        self._last_epoch = 0
        self.full = 0

    def __len__(self) -> int:
        return len(self._owners)

    def find(self, topic: str) -> Owner | None:
        return self._owners.get(topic)

    def compare_and_set(self, expected_epoch: int, owner: Owner) -> Owner:
        known = self._owners.get(owner.topic)
        held = 0 if known is None else known.epoch
        if held != expected_epoch or owner.epoch <= held:
            return known if known is not None else Owner(owner.topic, 0, "")
        return self._put(owner)

    def learn(self, claim: Owner) -> Owner:
        """A broker says who owns a topic: believed if it is news. Returns what holds afterwards; another epoch than the
        claim's means that the broker is behind and is to be told."""
        known = self._owners.get(claim.topic)
        if known is not None and known.epoch >= claim.epoch:
            return known
        return self._put(claim)

    def give_up(self, topic: str, owner: str, epoch: int) -> bool:
        """The owner has forgotten a topic that nobody uses: so does the directory, unless there is a later owner."""
        known = self._owners.get(topic)
        if known is None or known.owner != owner or known.epoch > epoch:
            return False
        del self._owners[topic]
        self._take_from(known)
        return True

    def next_epoch(self, wall_s: float, above: int = 0) -> int:
        """An epoch for a decision made now: above all there were here, and above what an asker knows."""
        self._last_epoch = max(int(wall_s * 1e6), self._last_epoch + 1, above + 1)
        return self._last_epoch

    def topics_of(self, broker: str) -> list[str]:
        """What a broker owns."""
        return list(self._by_broker.get(broker, ()))

    def count_of(self, broker: str) -> int:
        """How many topics a broker owns."""
        return len(self._by_broker.get(broker, ()))

    def owners(self) -> list[Owner]:
        """All of them."""
        return list(self._owners.values())

    def _put(self, owner: Owner) -> Owner:
        before = self._owners.get(owner.topic)
        if before is None and len(self._owners) >= self._max_topics:
            self.full += 1
            return Owner(owner.topic, 0, "")
        if before is not None:
            self._take_from(before)
        self._owners[owner.topic] = owner
        self._by_broker.setdefault(owner.owner, {})[owner.topic] = None
        self._last_epoch = max(self._last_epoch, owner.epoch)
        return owner

    def _take_from(self, owner: Owner) -> None:
        topics = self._by_broker.get(owner.owner)
        if topics is not None:
            topics.pop(owner.topic, None)
            if not topics:
                del self._by_broker[owner.owner]
