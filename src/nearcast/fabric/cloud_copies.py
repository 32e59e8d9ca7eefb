"""Messages of the cloud that carry no identity, and are here already all the same: echoes and copies.

*Echoes*. An MQTT 3.1.1 server sends us what we published when it matches what we subscribed to. A server keeps the order of
one publisher's messages of one QoS on one topic [MQTT-4.6.0-6], so their echoes come in the order in which we published: each
is known by its content, and with it those before it are over, lost or not. Two messages of the same content are
interchangeable, so it does not matter whose echo is whose. What never comes back is forgotten after :data:`EXPECTED_S`.

*Copies*. A server may send one copy of a message for each of our subscriptions that match it [MQTT-3.3.5-1]. Where
subscriptions overlap they have subscription identifiers, and a message that comes by identifier A and again by identifier B
is one message. One that comes twice by A is two. So as many messages of one content were published as came by the busiest
identifier.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Final

EXPECTED_S: Final = 60.0
MAX_EXPECTED: Final = 100_000
"""Echoes expected at once; beyond, the oldest topic's are forgotten, and what comes back of them is delivered again."""

REMEMBERED_S: Final = 30.0
MAX_REMEMBERED: Final = 10_000

DIGEST_BYTES: Final = 16


def content_digest(payload: bytes) -> bytes:
    """What stands for a message's content, beside its topic."""
    return payload if len(payload) <= DIGEST_BYTES else hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()


class Echoes:
    """What we published and expect to come back, by topic and QoS."""

    def __init__(self) -> None:
        self._expected: dict[tuple[str, int], deque[tuple[bytes, float]]] = {}
        self._count = 0

    def expect(self, topic: str, qos: int, payload: bytes, now: float) -> None:
        """A message was published that we are subscribed to."""
        waiting = self._expected.pop((topic, qos), None)
        if waiting is None:
            waiting = deque()
        self._expected[topic, qos] = waiting  # the topic used last is the last
        while waiting and waiting[0][1] <= now:
            waiting.popleft()
            self._count -= 1
        waiting.append((content_digest(payload), now + EXPECTED_S))
        self._count += 1
        while self._count > MAX_EXPECTED:
            self._count -= len(self._expected.pop(next(iter(self._expected))))

    def is_echo(self, topic: str, qos: int, payload: bytes, now: float) -> bool:
        """Whether this is one of them. It is not expected any longer then, nor are those before it. A server that granted us
        less than QoS 2 sends it at less than we published it with."""
        digest = content_digest(payload)
        return any(self._is_echo((topic, published), digest, now) for published in range(qos, 3))

    def _is_echo(self, key: tuple[str, int], digest: bytes, now: float) -> bool:
        waiting = self._expected.get(key)
        if waiting is None:
            return False
        for place, (expected, until) in enumerate(waiting):
            if expected == digest and until > now:
                for _ in range(place + 1):
                    waiting.popleft()
                self._count -= place + 1
                if not waiting:
                    del self._expected[key]
                return True
        return False

    def clear(self) -> None:
        """The server forgot our session: nothing more comes of what was published before."""
        self._expected.clear()
        self._count = 0


class Copies:
    """How often each content came by each subscription identifier lately."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, bytes], tuple[float, dict[int, int]]] = {}

    def is_copy(self, topic: str, payload: bytes, identifiers: list[int], now: float) -> bool:
        """Whether a message that came by these identifiers is one that came before by another."""
        seen = self._seen
        key = (topic, content_digest(payload))
        since, counts = seen.pop(key, (now, {}))
        age_s = now - since
        if age_s > 2 * REMEMBERED_S or (age_s > REMEMBERED_S and len(set(counts.values())) == 1):
            # Counting begins anew where nothing is half-way; else a copy that was lost would excuse the loss of a message.
            since, counts = now, {}
        highest = max(counts.values(), default=0)
        reached = 0
        for identifier in identifiers:
            count = counts.get(identifier, 0) + 1
            counts[identifier] = count
            reached = max(reached, count)
        seen[key] = (since, counts)
        while len(seen) > MAX_REMEMBERED:
            del seen[next(iter(seen))]
        return reached <= highest

    def clear(self) -> None:
        """Subscriptions changed: who came by which says nothing any more."""
        self._seen.clear()
