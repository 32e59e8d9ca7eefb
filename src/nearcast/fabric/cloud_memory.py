"""What this broker subscribed to at the cloud, written down there: MQTT has no way of asking a server.

The session at the cloud outlives a process of this broker; what the process knew of its subscriptions does not. One that the
next process does not want would go on for ever: messages for nobody, and, with a shared subscription, messages that somebody
else should have had. So the list is kept at the cloud as well, as retained messages to ourselves, in :data:`BUCKETS` pieces so
that a change writes little. A piece is written before the SUBSCRIBE of what is new in it, and after the UNSUBACK of what is
gone, so the list names all that is there and perhaps more, which does no harm: it only ever leads to an UNSUBSCRIBE of what is
not wanted. Pieces are signed all the same: whoever may publish there could else make us ask for what ends a connection.
"""

from __future__ import annotations

import hashlib
import hmac
import zlib
from typing import Final

from nearcast.mqtt.records import Fields, blob, number

BUCKETS: Final = 256
MAX_RECALLED: Final = 1_000_000
"""Filters believed to be there from before, from all pieces."""

TAG_BYTES: Final = 16


class FilterMemory:
    """The list, by pieces. ``topic`` is what their topics begin with."""

    def __init__(self, topic: str, secret: bytes) -> None:
        self.topic = topic
        self._key = hmac.digest(secret, b"nearcast filters\0" + topic.encode("utf-8"), hashlib.sha256)
        # Filters as they are written, by piece.
        self._pieces: dict[int, dict[str, bytes]] = {}

    def add(self, filters: list[str]) -> list[tuple[str, bytes]]:
        """Note these; returns the messages to write first."""
        changed: dict[int, None] = {}
        for topic_filter in filters:
            bucket = bucket_of(topic_filter)
            piece = self._pieces.setdefault(bucket, {})
            if topic_filter not in piece:
                piece[topic_filter] = blob(topic_filter.encode("utf-8"))
                changed[bucket] = None
        return [self._message(bucket) for bucket in changed]

    def remove(self, filters: list[str]) -> list[tuple[str, bytes]]:
        """These are not there any more; returns the messages to write."""
        changed: dict[int, None] = {}
        for topic_filter in filters:
            bucket = bucket_of(topic_filter)
            piece = self._pieces.get(bucket)
            if piece is not None and topic_filter in piece:
                del piece[topic_filter]
                changed[bucket] = None
        return [self._message(bucket) for bucket in changed]

    def _message(self, bucket: int) -> tuple[str, bytes]:
        topic = f"{self.topic}{bucket}"
        piece = self._pieces[bucket]
        if not piece:
            return topic, b""
        said = number(len(piece)) + b"".join(piece.values())
        return topic, self._tag(said) + said

    def _tag(self, said: bytes) -> bytes:
        return hmac.digest(self._key, said, hashlib.sha256)[:TAG_BYTES]

    def clear(self) -> None:
        """The cloud forgot the session, and with it all that is listed."""
        self._pieces.clear()

    def recall(self, payload: bytes) -> tuple[list[str], list[tuple[str, bytes]]]:
        """What a piece that an earlier process wrote says, nothing if that was somebody else; and the messages to write, where
        this process has put what it knew itself in the place of such a piece already."""
        said = payload[TAG_BYTES:]
        if not hmac.compare_digest(payload[:TAG_BYTES], self._tag(said)):
            return [], []
        fields = Fields(b"\x00" + said)
        found = [fields.blob().decode("utf-8") for _ in range(fields.number())]
        if sum([len(piece) for piece in self._pieces.values()]) + len(found) > MAX_RECALLED:
            return [], []
        written = {bucket for bucket, piece in self._pieces.items() if piece}
        changed: dict[int, None] = {}
        for topic_filter in found:
            bucket = bucket_of(topic_filter)
            piece = self._pieces.setdefault(bucket, {})
            if topic_filter not in piece:
                piece[topic_filter] = blob(topic_filter.encode("utf-8"))
                if bucket in written:
                    changed[bucket] = None
        return found, [self._message(bucket) for bucket in changed]


def bucket_of(topic_filter: str) -> int:
    """The piece that lists a filter."""
    return zlib.crc32(topic_filter.encode("utf-8")) % BUCKETS
