"""The records of telemetry, as JSON on the wire (docs/reference/telemetry.md).

=======================================  ======================================================================================
topic                                    record, by each broker every ``fabric.telemetry.interval_seconds``
=======================================  ======================================================================================
``$nearcast/telemetry/broker/<name>``    :class:`BrokerReport`
``$nearcast/telemetry/topics/<name>``    :class:`TopicReport`: what this broker knows of owned topics; several of one ``round``
``$nearcast/telemetry/clients/<name>``   :class:`ClientReport`, with ``fabric.telemetry.raw``: each client's coordinate
=======================================  ======================================================================================

A topic's clients are connected to several brokers, and each reports its own: a :class:`Crowd` of producers and one of
consumers. Crowds of one topic are merged by :mod:`nearcast.telemetry.summaries`. Latencies are one way, in milliseconds: half
the round-trip time that coordinates estimate.
"""

from __future__ import annotations

import msgspec


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A network coordinate (:class:`nearcast.coordinates.coordinate.Coordinate`); milliseconds of round-trip time."""

    vector: tuple[float, ...]
    height: float
    adjustment: float = 0.0
    error: float = 1.5


class Crowd(msgspec.Struct, frozen=True, omit_defaults=True):
    """Producers or consumers of one topic at one broker, in a size that does not depend on their number."""

    count: int = 0
    centroid: Place | None = None
    """Mean of their coordinates; none without clients."""
    deviation_ms: float = 0.0
    """The farthest client from the centroid, one way (:func:`nearcast.telemetry.summaries.deviation_ms`)."""
    worst_ms: float = 0.0
    """The farthest client from the topic's present owner, one way."""


class TopicSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one broker knows of one owned topic. Rates count messages a second since the last report: those that its clients
    published here (or, at the owner, gateways straight to it), and those that this broker passed to clients."""

    topic: str
    epoch: int = 0
    owner: str = ""
    producers: Crowd = Crowd()
    consumers: Crowd = Crowd()
    in_per_second: float = 0.0
    out_per_second: float = 0.0
    bytes_per_second: float = 0.0
    max_latency_ms: float = 0.0
    """The topic's bound by the rules of this broker, so that whoever plans from telemetry alone knows it; 0: none."""


class TopicReport(msgspec.Struct, frozen=True):
    """Owned topics at one broker. ``round`` counts reports; one round is ``parts`` messages, this is the ``part``-th from 0.
    A topic that is in no message of a round has no clients at this broker any more, and is not owned by it."""

    broker: str
    time: float
    round: int
    part: int
    parts: int
    topics: list[TopicSummary]


class BrokerReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A broker's own resources, as shares of what it has (0 to 1), and rates a second since the last report."""

    broker: str
    time: float
    coordinate: Place | None = None
    cpu: float = 0.0
    memory: float = 0.0
    network: float = 0.0
    messages_in_per_second: float = 0.0
    messages_out_per_second: float = 0.0
    bytes_in_per_second: float = 0.0
    bytes_out_per_second: float = 0.0
    topics_owned: int = 0
    clients: int = 0


class ClientSample(msgspec.Struct, frozen=True, array_like=True):
    """One client's part in one topic. ``role``: 0 producer, 1 consumer."""

    topic: str
    client: str
    role: int
    place: Place


class ClientReport(msgspec.Struct, frozen=True):
    """Raw mode: every client of every owned topic at one broker."""

    broker: str
    time: float
    round: int
    part: int
    parts: int
    clients: list[ClientSample]
