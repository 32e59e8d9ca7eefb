"""Records, batches and states of topics as the application sees them, and how it says where reading begins and ends.

Shared by the two clients of the bulk port, :mod:`.topics` and :mod:`.blocking_topics`. Opens nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from nearcast.config import Retention, TopicRule
from nearcast.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from nearcast.mqtt import topics as topic_names
from nearcast.mqtt.packets import Properties
from nearcast.mqtt.properties import decode_properties, encode_properties
from nearcast.mqtt.wire import PUBLISH, encode_varint
from nearcast.topiclog import blocks, conversation, wire
from nearcast.topiclog.conversation import MissingRecords

Place = Literal["earliest", "latest"] | int | Mapping[str, int] | datetime
"""A place in topics: by name, by index (of every topic that is read, or by topic), or the first record not before a time."""

OnGap = Callable[[MissingRecords], None]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NONE = Properties()


class Record:
    """One message of a topic's log. ``time_us`` is when the broker took it, in microseconds since 1970."""

    __slots__ = ("_decoded", "encoded_properties", "index", "payload", "publisher", "qos", "retain", "time_us", "topic")

    def __init__(
        self, topic: str, index: int, time_us: int, publisher: str, flags: int, encoded_properties: bytes, payload: bytes
    ) -> None:
        self.topic = topic
        self.index = index
        self.time_us = time_us
        self.publisher = publisher
        self.qos = flags & blocks.QOS_MASK
        self.retain = bool(flags & blocks.RETAIN)
        self.encoded_properties = encoded_properties
        self.payload = payload
        self._decoded: Properties | None = None

    @property
    def time(self) -> datetime:
        """When the broker took it."""
        return time_of(self.time_us)

    @property
    def text(self) -> str:
        """The payload as UTF-8 text; bytes that are none show as U+FFFD."""
        return self.payload.decode("utf-8", "replace")

    @property
    def properties(self) -> Properties:
        """The MQTT 5 properties; all unset when the publisher gave none."""
        if self._decoded is None:
            encoded = self.encoded_properties
            found = decode_properties(encode_varint(len(encoded)) + encoded, 0, PUBLISH)[0] if encoded else None
            self._decoded = found if found is not None else _NONE
        return self._decoded

    @property
    def content_type(self) -> str | None:
        return self.properties.content_type

    @property
    def response_topic(self) -> str | None:
        return self.properties.response_topic

    @property
    def correlation_data(self) -> bytes | None:
        return self.properties.correlation_data

    @property
    def payload_format(self) -> int | None:
        return self.properties.payload_format_indicator

    @property
    def user_properties(self) -> list[tuple[str, str]]:
        """Name and value pairs, in the order the publisher gave."""
        return self.properties.user_properties or []

    def __repr__(self) -> str:
        return f"Record({self.topic!r}, {self.index}, {self.payload!r})"


class Batch(conversation.Batch):
    """Records that came together. ``data`` are whole blocks of the log, as :mod:`nearcast.topiclog.blocks` describes them;
    ``topics`` gives the name of each topic number in them. :meth:`records` takes them apart."""

    __slots__ = ()

    def records(self) -> Iterator[Record]:
        return records_of(self.data, self.topics)


def records_of(data: memoryview | bytes, topics: Mapping[int, str]) -> Iterator[Record]:
    """The records of blocks, in order; raises :class:`RemoteProtocolError` for bytes that are none."""
    view = memoryview(data)
    offset, end = 0, len(view)
    try:
        while offset < end:
            size, _, kind, flags, publisher_bytes, number, index, time_us, count, properties_bytes = blocks.HEADER.unpack_from(
                view, offset
            )
            if size < blocks.HEADER_BYTES or size > end - offset:
                raise RemoteProtocolError(0x81, "a block that reaches beyond its batch")
            if kind == blocks.RECORDS:
                at = offset + blocks.HEADER_BYTES
                ends = struct.unpack_from(f"<{count + 1}I", view, at)
                at += 4 * (count + 1)
                publisher = bytes(view[at : at + publisher_bytes]).decode("utf-8", "replace")
                at += publisher_bytes
                properties = bytes(view[at : at + properties_bytes])
                at += properties_bytes
                topic = topics[number]
                for place in range(count):
                    payload = bytes(view[at + ends[place] : at + ends[place + 1]])
                    yield Record(topic, index + place, time_us, publisher, flags, properties, payload)
            offset += size
    except (struct.error, KeyError) as error:
        raise RemoteProtocolError(0x81, "a batch that is not made of blocks") from error


def single_record(data: memoryview, topic: str) -> Record:
    """The record of a block that has one, whose topic number means nothing."""
    try:
        number = blocks.HEADER.unpack_from(data)[5]
    except struct.error as error:
        raise RemoteProtocolError(0x81, "a record that is no block") from error
    found = list(records_of(data, {number: topic}))
    if len(found) != 1:
        raise RemoteProtocolError(0x82, "one record was asked for, and more or none came")
    return found[0]


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic in the log: records from ``first_index`` to before ``next_index`` can be read."""

    topic: str
    first_index: int
    next_index: int
    bytes: int
    first_time_us: int
    last_time_us: int
    replica_set: str = ""
    """The replica set that keeps it; empty: the broker itself does."""
    leader: str = ""
    """Who leads that set, as far as is known."""

    @property
    def latest_index(self) -> int:
        """The newest record's index; 0 when there never was one."""
        return self.next_index - 1

    @property
    def count(self) -> int:
        """How many records can be read."""
        return self.next_index - self.first_index

    @property
    def name(self) -> str:
        return self.topic


class KeptRule(TopicRule, frozen=True, kw_only=True):
    """A rule as a broker has it."""

    origin: str
    """Where it is from: "config", the broker's configuration, or "created" at run time, and so to be changed like that."""


def time_of(time_us: int) -> datetime:
    """A time of the log, in UTC."""
    seconds, microseconds = divmod(time_us, 1_000_000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=microseconds)


def time_us_of(time: datetime) -> int:
    """Microseconds since 1970. A time without a zone is local time, as everywhere in Python."""
    since = time.astimezone(UTC) - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def opening(filters: str | list[str] | tuple[str, ...], start: Place, end: Place | None, *, follow: bool) -> wire.Open:
    """The message that asks for such a stream."""
    kind: Literal["earliest", "latest", "index", "time"] = "earliest"
    start_value = 0
    start_indexes: dict[str, int] = {}
    if isinstance(start, datetime):
        kind, start_value = "time", time_us_of(start)
    elif isinstance(start, int):
        kind, start_value = "index", start
    elif isinstance(start, Mapping):
        start_indexes = dict(start)
    elif start in ("earliest", "latest"):
        kind = start
    else:
        raise ConfigError(f'start={start!r}: use "earliest", "latest", an index, a dict of indexes by topic, or a datetime')
    end_index: int | None = None
    end_indexes: dict[str, int] = {}
    end_time_us: int | None = None
    if isinstance(end, datetime):
        end_time_us = time_us_of(end)
    elif isinstance(end, Mapping):
        end_indexes = dict(end)
    elif isinstance(end, int):
        end_index = end
    elif end is not None and end != "latest":
        raise ConfigError(
            f"end={end!r}: use an index, a dict of indexes by topic, or a datetime; leave it out for all there is"
        )
    return wire.Open(
        filters=checked_filters(filters),
        start=kind,
        start_value=start_value,
        start_indexes=start_indexes,
        end_index=end_index,
        end_indexes=end_indexes,
        end_time_us=end_time_us,
        follow=follow,
    )


def checked_filters(filters: str | list[str] | tuple[str, ...]) -> list[str]:
    """Topic filters, checked before a broker is bothered."""
    found = [filters] if isinstance(filters, str) else list(filters)
    if not found or len(found) > wire.MAX_FILTERS:
        raise ConfigError(f"{len(found)} topic filters: give between 1 and {wire.MAX_FILTERS}")
    for topic_filter in found:
        fault = topic_names.filter_fault(topic_filter, 65_535)
        if fault:
            raise ConfigError(f"topic filter {topic_filter!r}: {fault}")
    return found


def publishing(
    topic: str, payloads: list[bytes], properties: Properties | bytes | None, qos: int, retain: bool
) -> wire.Publish:
    """The message that publishes."""
    fault = topic_names.topic_fault(topic.encode("utf-8", "surrogatepass"), 65_535)
    if fault:
        raise LocalProtocolError(f"topic {topic!r}: {fault}")
    if qos not in (0, 1, 2):
        raise LocalProtocolError(f"qos={qos}: it is 0, 1 or 2")
    return wire.Publish(topic, payloads, encoded_properties(properties), qos, retain)


def encoded_properties(properties: Properties | bytes | None) -> bytes:
    """Properties as the log has them: encoded, without their length."""
    if properties is None:
        return b""
    if isinstance(properties, bytes):
        return properties
    encoded = encode_properties(properties, PUBLISH)
    skip = 1
    while encoded[skip - 1] & 0x80:
        skip += 1
    return encoded[skip:]


def rule_message(topic_filter: str, retention: Retention | None, mode: Literal["durable", "tap"]) -> wire.CreateRule:
    """The message that makes a rule; without ``retention`` everything is kept."""
    retention = retention if retention is not None else Retention()
    return wire.CreateRule(
        wire.Rule(topic_filter, mode, retention.max_records, retention.max_bytes, retention.max_age_seconds)
    )


def rules_of(answer: wire.Rules) -> list[KeptRule]:
    return [
        KeptRule(
            topic=rule.topic,
            mode=rule.mode,
            retention=Retention(max_records=rule.max_records, max_bytes=rule.max_bytes, max_age_seconds=rule.max_age_seconds),
            origin=rule.origin,
        )
        for rule in answer.rules
    ]


def states_of(answer: wire.States) -> list[TopicState]:
    return [
        TopicState(
            state.topic,
            state.first_index,
            state.next_index,
            state.bytes,
            state.first_time_us,
            state.last_time_us,
            state.replica_set,
            state.leader,
        )
        for state in answer.states
    ]


def batch_of(found: conversation.Batch, on_gap: OnGap | None) -> Batch:
    """A batch for the application. Without ``on_gap`` missing records are an error."""
    for missing in found.gaps:
        if on_gap is None:
            raise missing.error()
        on_gap(missing)
    return Batch(found.data, found.topics, found.next_indexes, found.gaps)
