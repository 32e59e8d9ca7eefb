"""What placement is compared with (ePulsar §5.5): AllPairs, which knows every client, and hashing, which knows none.

AllPairs is Algorithm 1 with the exact worst case in place of the one by centroids. Exactly, the worst of all pairs of a
producer and a consumer through a broker is the farthest producer plus the farthest consumer, so no pair has to be looked at.
Hashing is Pulsar's: the space of hashes is divided among the brokers evenly, and a topic belongs to the one in whose part its
name's hash falls.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from nearcast.telemetry.places import Floats, Indices, Places
from nearcast.telemetry.summaries import CONSUMER, PRODUCER

from .policies import RESOLUTION_PER_MS, Policies
from .topics import UNOWNED, Fleet, Topics

_HASHES: Final = 1 << 32


class Clients:
    """Every client's part in every topic: row ``i`` is in role ``roles[i]`` of topic ``topic_ids[i]``. Kept by topic and role,
    so that a topic's clients are one slice."""

    def __init__(
        self, topic_ids: npt.NDArray[np.integer], roles: npt.NDArray[np.integer], places: Places, number: int
    ) -> None:
        """``number``: how many topics there are."""
        keys = topic_ids.astype(np.int64) * 2 + (roles == CONSUMER)
        order = np.argsort(keys, kind="stable")
        self.places = places.rows(order)
        self._begins = np.searchsorted(keys[order], np.arange(2 * number + 1))

    def of(self, topic: int, role: int) -> Places:
        begin, end = self._begins[2 * topic + role : 2 * topic + role + 2]
        return self.places.rows(slice(int(begin), int(end)))

    def worst_cases(self, _: Topics, rows: Indices, fleet: Fleet) -> Floats:
        """What :func:`nearcast.placement.policies.worst_cases` bounds, exactly. In the place of that function
        (:func:`all_pairs`)."""
        worst = np.zeros((len(rows), len(fleet)))
        for role in (PRODUCER, CONSUMER):
            begins = self._begins[2 * rows + role]
            sizes = self._begins[2 * rows + role + 1] - begins
            there = np.flatnonzero(sizes)
            if len(there) == 0:
                continue
            ends = np.cumsum(sizes[there])
            starts = ends - sizes[there]
            # The clients of one topic after those of another, whatever the topics.
            every = np.arange(ends[-1]) + np.repeat(begins[there] - starts, sizes[there])
            worst[there] += np.maximum.reduceat(self.places.rows(every).matrix_ms(fleet.places), starts, axis=0)
        worst *= RESOLUTION_PER_MS / 2
        np.rint(worst, out=worst)
        worst /= RESOLUTION_PER_MS
        return worst


def all_pairs(clients: Clients) -> Policies:
    """Algorithm 1 on every client instead of centroids. For :func:`nearcast.placement.deciding.decide`."""
    return Policies(worst_cases=clients.worst_cases)


def hashed(names: Sequence[str], fleet: Fleet) -> Indices:
    """The broker of each topic by its name alone: a row of the fleet, among those that are usable."""
    usable = np.flatnonzero(fleet.usable)
    if len(usable) == 0:
        return np.full(len(names), UNOWNED, np.int64)
    hashes = np.array([zlib.crc32(name.encode()) for name in names], np.int64)
    return usable[hashes * len(usable) // _HASHES]
