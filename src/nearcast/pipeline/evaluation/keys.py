"""Short keys for what events are grouped by: 64-bit hashes, so that what is shuffled and sorted is numbers, not text.

Two of a million flows have the same one with a probability of 3e-8; names come back by joining on the same hash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention

if TYPE_CHECKING:
    from pyspark.sql import Column


def flow_key(run: str = "run", subscriber: str = "subscriber") -> Column:
    """What one subscriber gets of one stream."""
    return F.xxhash64(run, subscriber, "publisher", "stream", "topic")


def stream_key() -> Column:
    """The messages that a publisher sends to a topic, one after the other."""
    return F.xxhash64("run", "publisher", "stream", "topic")


def topic_key() -> Column:
    """A topic of a run."""
    return F.xxhash64("run", "topic")


def client_key(column: str) -> Column:
    """A client of a run."""
    return F.xxhash64("run", column)


def fingerprint() -> Column:
    """Of a message: two sets of messages are the same when their counts and the exclusive or of these are."""
    return F.xxhash64("message_id")
