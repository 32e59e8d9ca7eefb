"""Which brokers have links to which, as they tell each other, and the shortest ways through that.

Every broker writes an :class:`Advert` of itself; the newest version counts. Who is told what, and when, is
:mod:`nearcast.fabric.routes`'s business.
"""

from __future__ import annotations

import heapq
from typing import Final

from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.mqtt.records import Fields, blob, number

MAX_HOPS: Final = 16
MAX_BROKERS: Final = 16_384
EXPIRE_S: Final = 1_000.0


class Advert:
    """What a broker says of itself: its neighbours with the distance in milliseconds, and its address.

    It is told with its age, so that one who is gone is forgotten however often it was told of.
    """

    def __init__(
        self, name: str, version: int, address: str, neighbours: dict[str, int], fields: bytes, said_at: float
    ) -> None:
        self.name = name
        self.version = version
        self.address = address
        self.neighbours = neighbours
        self.fields = fields
        self.said_at = said_at

    def frame(self, now: float) -> bytes:
        return frame(frames.NEIGHBOURS, number(max(0, int(now - self.said_at))), self.fields)


def written(name: str, version: int, address: str, neighbours: dict[str, int], now: float) -> Advert:
    """An advert of one's own."""
    fields = [blob(name.encode("utf-8")), number(version), blob(address.encode("utf-8")), number(len(neighbours))]
    for neighbour, distance in neighbours.items():
        fields.append(blob(neighbour.encode("utf-8")) + number(distance))
    return Advert(name, version, address, neighbours, b"".join(fields), now)


def read(content: bytes, now: float) -> Advert:
    """The advert in a NEIGHBOURS frame."""
    fields = Fields(content)
    age_s = fields.number()
    start = fields.position
    name = fields.blob().decode("utf-8")
    version = fields.number()
    address = fields.blob().decode("utf-8")
    neighbours: dict[str, int] = {}
    for _ in range(fields.number()):
        neighbour = fields.blob().decode("utf-8")
        neighbours[neighbour] = fields.number()
    return Advert(name, version, address, neighbours, content[start:], now - age_s)


class Graph:
    """All that was heard, one's own advert included."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.adverts: dict[str, Advert] = {}
        self._ways: dict[str, list[str]] | None = None

    def changed(self) -> None:
        """Ways have to be looked for anew."""
        self._ways = None

    def put(self, advert: Advert) -> None:
        """This is the newest word of a broker."""
        known = self.adverts.get(advert.name)
        if known is None or known.neighbours != advert.neighbours:
            self._ways = None
        self.adverts[advert.name] = advert

    def is_welcome(self, advert: Advert, now: float) -> bool:
        """Whether this is new, young enough, and there is room for it."""
        known = self.adverts.get(advert.name)
        if known is not None:
            return advert.version > known.version and now - advert.said_at <= EXPIRE_S
        return len(self.adverts) < MAX_BROKERS and now - advert.said_at <= EXPIRE_S

    def drop(self, name: str) -> None:
        if self.adverts.pop(name, None) is not None:
            self._ways = None

    def expired(self, now: float) -> list[str]:
        """Brokers that nobody has heard of for long."""
        return [
            advert.name for advert in self.adverts.values() if now - advert.said_at > EXPIRE_S and advert.name != self._name
        ]

    def ways(self, distances: dict[str, int]) -> dict[str, list[str]]:
        """The shortest way to every broker that can be reached, both ends included. A link counts if both its ends say so;
        of one's own, ``distances`` says what there is."""
        found = self._ways
        if found is not None:
            return found
        me = self._name
        found = {me: [me]}
        queue: list[tuple[int, int, str, list[str]]] = []
        for name, distance in distances.items():
            heapq.heappush(queue, (distance, 1, name, [me, name]))
        while queue:
            distance, hops, name, way = heapq.heappop(queue)
            if name in found:
                continue
            found[name] = way
            advert = self.adverts.get(name)
            if advert is None or hops >= MAX_HOPS:
                continue
            for neighbour, step in advert.neighbours.items():
                if neighbour in found:
                    continue
                back = self.adverts.get(neighbour)
                if back is not None and name in back.neighbours:
                    # A millisecond for each broker on the way: they have other things to do.
                    heapq.heappush(queue, (distance + step + 1, hops + 1, neighbour, [*way, neighbour]))
        self._ways = found
        return found

    def stands(self, way: list[str]) -> bool:
        """Whether all links of a way behind the first are there, as far as was heard."""
        for place in range(1, len(way) - 1):
            advert = self.adverts.get(way[place])
            if advert is None or way[place + 1] not in advert.neighbours:
                return False
        return True
