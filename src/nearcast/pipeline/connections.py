"""Connections to bulk ports, kept for the next task of the same process.

A Python worker of Spark runs one task after the other, and every micro-batch is at least one: connecting and authenticating
each time (a password costs the broker a deliberate hash) would be most of its work. A connection is used by one task at a
time, is put back only when that ended well, and mends itself when the broker was restarted meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from nearcast.client.blocking_topics import BlockingTopics
from nearcast.pipeline.options import Connection

_idle: dict[tuple[int, Connection], BlockingTopics] = {}
"""By process as well: after a fork, the parent's are not ours."""


def connect(connection: Connection) -> BlockingTopics:
    """A new one, not yet open."""
    return BlockingTopics(
        connection.url,
        username=connection.username,
        password=connection.password,
        tls=connection.tls,
        reconnect_seconds=connection.reconnect_seconds,
    )


@contextmanager
def borrowed(connection: Connection, *, patient: bool = False) -> Iterator[BlockingTopics]:
    """One that is open, or was when it was put back; the body may use it and must not close it.

    ``patient``: a first connection, too, is tried for as long as one that was lost.
    """
    key = (os.getpid(), connection)
    topics = _idle.pop(key, None)
    if topics is None:
        topics = connect(connection)
    try:
        # A first connection that fails is a mistake in the options more often than a broker that restarts: no waiting.
        if not patient:
            topics.open()
        yield topics
    except BaseException:
        topics.close()
        raise
    other = _idle.pop(key, None)
    if other is not None:
        other.close()
    _idle[key] = topics
