"""Leaders announce themselves on a topic at the cloud, and hear of each other there (section II-C).

Nobody needs to trust the cloud: an announcement is signed with a key made from the fabric's secret, for one topic; nobody else
can make one, none counts on another topic or a second time. What the cloud can do is to keep announcements to itself.

Announcements are for all who lead, so N leaders hear N times what one says. The topic as a whole therefore carries a bounded
number of them a second, however many leaders there are: each speaks less often when it hears many, and says how long its word
holds.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import math
import random
from typing import Annotated, Final

import msgspec

from nearcast.groups.messages import MAX_ADDRESS_CHARACTERS, MAX_NAME_CHARACTERS, MAX_NUMBER

FOREVER: Final = math.inf

ANNOUNCEMENTS_PER_S: Final = 200.0
"""About as many a topic carries at most, of all leaders together."""

LIFETIME_INTERVALS: Final = 3.0
LEAST_LIFETIME_S: Final = 2.0
LARGEST_LIFETIME_S: Final = 3_600.0
"""An announcement holds until three more should have come, but not for less or more than this."""

MAX_LEADERS: Final = 16_384
"""Leaders that are known at most. Larger fabrics have regions."""

MAX_REMEMBERED: Final = 4 * MAX_LEADERS
"""Names whose last stamp is remembered, so that what was recorded does not count again."""

MAX_BYTES: Final = 4_096
TAG_BYTES: Final = 16

LEAST_GAP: Final = 0.5
"""Share of the interval that a leader waits at least, whatever has changed: a group that forms changes many times a second."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
_Measure = Annotated[float, msgspec.Meta(ge=0.0)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
_Address = Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARACTERS)]
_Latitude = Annotated[float, msgspec.Meta(ge=-90.0, le=90.0)]
_Longitude = Annotated[float, msgspec.Meta(ge=-180.0, le=180.0)]


class Announcement(msgspec.Struct, frozen=True, array_like=True):
    """What a leader says of itself. ``epoch`` rises with its starts and ``stamp`` within one; ``lifetime_s`` 0 says that it
    leads no more. ``position`` is latitude and longitude in degrees."""

    name: _Name
    epoch: _Number
    stamp: _Number
    lifetime_s: _Measure
    address: _Address
    probe_address: _Address
    lcm: _Measure
    size: _Number
    threshold_ms: _Measure
    position: tuple[_Latitude, _Longitude] | None = None

    def same_place(self, other: Announcement) -> bool:
        """Whether both say the same of what others measure and join by."""
        return (
            self.address == other.address
            and self.probe_address == other.probe_address
            and self.threshold_ms == other.threshold_ms
            and self.position == other.position
        )


def topic(prefix: str, region: str) -> str:
    """Where the leaders of a region announce themselves."""
    return f"{prefix}/leaders/{region}"


class LeaderBoard:
    """Who leads, as far as announcements say, and when to announce oneself."""

    def __init__(
        self, name: str, on_topic: str, secret: bytes, epoch: int, interval_s: float, rng: random.Random, now: float
    ) -> None:
        self.name = name
        self.topic = on_topic
        self.address = ""
        self.probe_address = ""
        self.position: tuple[float, float] | None = None
        """What is announced; whoever opens the sockets knows."""
        self.version = 0
        """Rises when a leader comes or goes, or is to be measured or joined in another way than before."""
        self.heard = 0
        self.ignored = 0
        self._key = hmac.digest(secret, b"nearcast leaders\0" + on_topic.encode(), hashlib.sha256)
        self._decoder = msgspec.msgpack.Decoder(Announcement)
        self._epoch = epoch
        self._stamp = 0
        self._interval_s = interval_s
        self._rng = rng
        self._leads = False
        self._announce_at = now
        self._announced_at = -FOREVER
        self._leaders: dict[str, Announcement] = {}
        self._expires_at: dict[str, float] = {}
        #: One entry a leader: when it is due, the leader has usually spoken since, and the entry is put off.
        self._expiries: list[tuple[float, str]] = []
        self._queued: set[str] = set()
        self._last: dict[str, tuple[int, int]] = {}

    # --- others ---------------------------------------------------------------------------------------------------------

    def announced(self) -> list[Announcement]:
        """All leaders but this broker."""
        return list(self._leaders.values())

    def get(self, name: str) -> Announcement | None:
        """What a leader said last, while that holds."""
        return self._leaders.get(name)

    def __len__(self) -> int:
        return len(self._leaders)

    def hear(self, content: bytes, now: float) -> Announcement | None:
        """An announcement arrived. Returns it if it counts: the cloud, and whoever may publish there, can send anything."""
        said = self._read(content)
        if said is None or said.name == self.name or not self._is_news(said):
            self.ignored += 1
            return None
        self.heard += 1
        before = self._leaders.get(said.name)
        if said.lifetime_s <= 0.0:
            self._forget(said.name)
            return said
        if before is None and len(self._leaders) >= MAX_LEADERS:
            self.ignored += 1
            return None
        self._leaders[said.name] = said
        expires_at = now + min(max(said.lifetime_s, LEAST_LIFETIME_S), LARGEST_LIFETIME_S)
        self._expires_at[said.name] = expires_at
        if said.name not in self._queued:
            self._queued.add(said.name)
            heapq.heappush(self._expiries, (expires_at, said.name))
        if before is None or not said.same_place(before):
            self.version += 1
        return said

    def forget(self, name: str) -> None:
        """It is known otherwise that this broker does not lead now. What it says later counts again."""
        self._forget(name)

    def _forget(self, name: str) -> None:
        if self._leaders.pop(name, None) is not None:
            self._expires_at.pop(name)
            self.version += 1

    def _is_news(self, said: Announcement) -> bool:
        moment = (said.epoch, said.stamp)
        if self._last.get(said.name, (-1, -1)) >= moment:
            return False
        self._last.pop(said.name, None)
        self._last[said.name] = moment
        if len(self._last) > MAX_REMEMBERED:
            del self._last[next(iter(self._last))]  # not heard of for longest
        return True

    def _read(self, content: bytes) -> Announcement | None:
        body, tag = content[:-TAG_BYTES], content[-TAG_BYTES:]
        if len(content) > MAX_BYTES or not hmac.compare_digest(self._tag(body), tag):
            return None
        try:
            said = self._decoder.decode(body)
        except msgspec.DecodeError:
            return None  # of a version that we do not know
        return said if said.name.isprintable() else None

    def _tag(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, hashlib.sha256)[:TAG_BYTES]

    # --- oneself --------------------------------------------------------------------------------------------------------

    @property
    def interval_s(self) -> float:
        """How often leaders announce themselves, as many as there are."""
        return max(self._interval_s, (len(self._leaders) + 1) / ANNOUNCEMENTS_PER_S)

    def announce_soon(self, now: float) -> None:
        """The cloud is there again, or something of what is announced has changed."""
        self._announce_at = min(self._announce_at, max(now, self._announced_at + LEAST_GAP * self.interval_s))

    def tick(self, leads: bool, lcm: float, size: int, threshold_ms: float, now: float) -> bytes | None:
        """Time has passed. Returns what to publish on :attr:`topic` now, if anything."""
        self._expire(now)
        if not leads:
            was_leading, self._leads = self._leads, False
            return self._announcement(0.0, lcm, size, threshold_ms) if was_leading else None
        if self._leads and now < self._announce_at:
            return None
        self._leads = True
        self._announced_at = now
        interval_s = self.interval_s
        self._announce_at = now + interval_s * (0.9 + 0.2 * self._rng.random())
        lifetime_s = min(max(LIFETIME_INTERVALS * interval_s, LEAST_LIFETIME_S), LARGEST_LIFETIME_S)
        return self._announcement(lifetime_s, lcm, size, threshold_ms)

    def next_deadline(self) -> float:
        """When :meth:`tick` has something to do while nothing else happens."""
        announce_at = self._announce_at if self._leads else FOREVER
        return min(announce_at, self._expiries[0][0] if self._expiries else FOREVER)

    def _announcement(self, lifetime_s: float, lcm: float, size: int, threshold_ms: float) -> bytes:
        self._stamp += 1
        body = msgspec.msgpack.encode(
            Announcement(
                self.name,
                self._epoch,
                self._stamp,
                lifetime_s,
                self.address,
                self.probe_address,
                lcm,
                size,
                threshold_ms,
                self.position,
            )
        )
        return body + self._tag(body)

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            _, name = heapq.heappop(self._expiries)
            expires_at = self._expires_at.get(name, now)
            if expires_at > now:
                heapq.heappush(self._expiries, (expires_at, name))
            else:
                self._queued.discard(name)
                self._forget(name)
