"""Small fleets and topics on a line, for tests that tell a story: places are milliseconds of round trip along one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nearcast.placement.topics import UNOWNED, Fleet, Topics
from nearcast.telemetry.places import Places
from nearcast.telemetry.records import Place
from nearcast.telemetry.summaries import Crowds, Summaries, crowd


def at(position: float, height: float = 0.0) -> Place:
    return Place((float(position), 0.0), height)


def line(brokers: Mapping[str, float], **columns: Mapping[str, float]) -> Fleet:
    """Brokers by name and position; ``cpu={"a": 0.9}`` and the like for what is not zero."""
    names = list(brokers)
    values = {
        column: np.array([given.get(name, 0.0) for name in names])
        for column, given in columns.items()
        if column in ("cpu", "memory", "network", "out_rate")
    }
    flags = {
        column: np.array([bool(given.get(name, column == "usable")) for name in names])
        for column, given in columns.items()
        if column in ("usable", "leaving")
    }
    return Fleet(names, Places.of([at(position) for position in brokers.values()]), **values, **flags)


class Topic:
    """One topic: where its clients are, who owns it."""

    def __init__(
        self,
        name: str,
        producers: Sequence[float],
        consumers: Sequence[float],
        owner: str = "",
        *,
        bound_ms: float = 0.0,
        rate: float = 0.0,
        moved_at: float = 0.0,
    ) -> None:
        self.name = name
        self.producers = producers
        self.consumers = consumers
        self.owner = owner
        self.bound_ms = bound_ms
        self.rate = rate
        self.moved_at = moved_at


def topics_on(fleet: Fleet, *topics: Topic) -> Topics:
    """With E(t) and W(t) as their clients make them."""
    index = {name: row for row, name in enumerate(fleet.names)}

    def crowds(side: str) -> Crowds:
        found = []
        for topic in topics:
            owner = fleet.places.place(index[topic.owner]) if topic.owner in index else None
            found.append(crowd([at(position) for position in getattr(topic, side)], owner))
        places = Places.of([each.centroid or at(0.0) for each in found], 2)
        return Crowds(
            np.array([each.count for each in found], np.int64),
            places,
            np.array([each.deviation_ms for each in found]),
            np.array([each.worst_ms for each in found]),
        )

    return Topics.of(
        [topic.name for topic in topics],
        Summaries(crowds("producers"), crowds("consumers")),
        bound_ms=np.array([topic.bound_ms for topic in topics]),
        owner=np.array([index.get(topic.owner, UNOWNED) for topic in topics], np.int64),
        rate=np.array([topic.rate for topic in topics]),
        moved_at=np.array([topic.moved_at for topic in topics]),
        epochs=np.arange(1, len(topics) + 1),
    )
