"""What bulk clients may ask for, and the answers: topics, records, rules, publishing. Batches are :mod:`.staging`'s.

Reading needs the right to subscribe, publishing that to publish, and changing which topics are kept that to manage them; rules
are told to whom they concern. What has to wait (for a flush of the disk, for a file) runs in a task of its own; a client that
is gone by then gets no answer, and what it asked for is done all the same.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from nearcast.broker.relayed import Relayed, SetReading
from nearcast.broker.sources import DEFINITE_S, FRESH_S, Kept, Sources
from nearcast.broker.staging import Staging
from nearcast.broker.topic_keeping import KeptTopics, Run
from nearcast.config import Retention, TopicRule
from nearcast.errors import (
    BatchRefused,
    ConfigError,
    NearcastError,
    RecordUnavailable,
    RemoteProtocolError,
    RequestRefused,
    StorageCorrupt,
    StorageUnavailable,
    TopicUnknown,
)
from nearcast.fabric.classes import SET
from nearcast.mqtt import reasons
from nearcast.mqtt.pledges import Pledge
from nearcast.mqtt.properties import decode_properties
from nearcast.mqtt.publication import Publication, build_all
from nearcast.mqtt.topics import SHARE_PREFIX, filter_fault, topic_fault
from nearcast.mqtt.wire import PUBLISH, encode_varint
from nearcast.topiclog import wire
from nearcast.topiclog.blocks import RECORDS, RETAIN, encode
from nearcast.topiclog.log import Topic, TopicLog
from nearcast.topiclog.rules import RuleTable
from nearcast.topiclog.streams import MAX_NAMED_BYTES, MAX_SEARCHED

if TYPE_CHECKING:
    from nearcast.broker.bulk import BulkPort, BulkTransport
    from nearcast.broker.process import Broker

SCANNED_TOPICS = 20_000
"""Topics compared with filters for one answer; the client asks on."""

SCAN_SECONDS = 0.005
"""The same, by time: the event loop is everybody's."""

CHECKED_AT_ONCE = 100
"""Topics, or rules, between two looks at the clock."""

MAX_PAYLOADS = 20_000
"""Messages of one :class:`~nearcast.topiclog.wire.Publish`: all are delivered in one turn of the event loop."""

_SOURCE_BITS = 40
"""Where, in what continues a list, the number of the topic ends and the place of the log begins."""

_ELSE = "a member of the replica set answered something else than it was asked"

Answer = wire.Message | bytes | memoryview
"""A message, or the bytes of a record."""

_log = logging.getLogger("nearcast.broker")


class BulkRequests:
    """Answers the requests of all bulk connections."""

    def __init__(self, broker: Broker, port: BulkPort) -> None:
        self._broker = broker
        self._port = port
        self.sources = Sources(broker)
        self.staging = Staging(broker, self)
        self.check_properties = check_properties
        self.refusal = refusal
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def kept(self) -> KeptTopics:
        return self._broker.topics

    def new_client_id(self) -> str:
        """For a client that did not say how it is called."""
        return f"bulk-{secrets.token_hex(8)}"

    async def close(self) -> None:
        """Wait for what is under way."""
        await self.staging.close()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def handle(self, transport: BulkTransport, number: int, content: wire.FromClient) -> None:
        """Answer a request, now or later."""
        try:
            if isinstance(content, wire.ListTopics):
                self._list(transport, number, content)
            elif isinstance(content, wire.FindIndexes):
                self._find(transport, number, content)
            elif isinstance(content, wire.Get):
                self._get(transport, number, content)
            elif transport.trusted:
                raise refused(reasons.NOT_AUTHORIZED, "brokers only read from each other")
            elif isinstance(content, wire.Publish):
                self._publish(transport, number, content)
            elif isinstance(content, wire.ListRules):
                self.later(transport, number, self._rules(transport))
            elif isinstance(content, wire.CreateRule):
                self.later(transport, number, self._create(transport, content.rule))
            elif isinstance(content, wire.DeleteRule):
                self.later(transport, number, self._delete(transport, content))
            else:
                self.staging.handle(transport, number, content)
        except NearcastError as error:
            if isinstance(error, RemoteProtocolError):
                raise
            transport.send(number, refusal(error))

    def later(self, transport: BulkTransport, number: int, work: Coroutine[Any, Any, Answer]) -> None:
        """Answer with what ``work`` comes to."""
        transport.requests_under_way += 1
        task = asyncio.get_running_loop().create_task(self._answer(transport, number, work), name="bulk-request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, transport: BulkTransport, number: int, work: Coroutine[Any, Any, Answer]) -> None:
        answer: Answer
        try:
            answer = await work
        except NearcastError as error:
            answer = refusal(error)
        except Exception:  # noqa: BLE001  a task's edge: whoever asked waits for an answer, whatever it is
            _log.exception("a request on the bulk port failed")
            answer = wire.Refused("request", "the broker could not do it; its log says why", reasons.UNSPECIFIED_ERROR)
        transport.requests_under_way -= 1
        if isinstance(answer, wire.Message):
            transport.send(number, answer)
        else:
            transport.send_data(number, answer)
        transport.unblocked()

    # --- rights -------------------------------------------------------------------------------------------------------------

    def check_read(self, transport: BulkTransport, filters: list[str]) -> None:
        """Whether a client may read these topics."""
        if not filters or len(filters) > wire.MAX_FILTERS:
            raise refused(reasons.TOPIC_FILTER_INVALID, f"give between 1 and {wire.MAX_FILTERS} topic filters")
        for topic_filter in filters:
            fault = filter_fault(topic_filter, self._broker.config.limits.max_topic_levels)
            if not fault and topic_filter.startswith(SHARE_PREFIX):
                fault = "what is read by index is not shared out: leave $share/NAME/ away"
            if fault:
                raise refused(reasons.TOPIC_FILTER_INVALID, f"topic filter {topic_filter!r}: {fault}")
            if transport.trusted:
                continue
            if not self._broker.access.may_subscribe(transport.client_id, transport.username, topic_filter):
                raise refused(reasons.NOT_AUTHORIZED, f"reading {topic_filter!r} is not allowed here")

    def _may_read(self, transport: BulkTransport, topic: str) -> bool:
        if transport.trusted:
            return not topic.startswith("$")  # what a set keeps for itself
        return self._broker.access.may_subscribe(transport.client_id, transport.username, topic)

    @property
    def log(self) -> TopicLog:
        return self.sources.own_log

    def check_publish(self, transport: BulkTransport, topic: str) -> bytes:
        """The topic's name as bytes, for a client that may publish there."""
        try:
            name = topic.encode("utf-8")
        except UnicodeEncodeError:
            name = b"\0"
        fault = topic_fault(name, self._broker.config.limits.max_topic_levels)
        if fault:
            raise refused(reasons.TOPIC_NAME_INVALID, f"topic {topic!r}: {fault}")
        if name.startswith(b"$SYS/") or not self._broker.access.may_publish(transport.client_id, transport.username, topic):
            raise refused(reasons.NOT_AUTHORIZED, f"publishing to {topic!r} is not allowed here")
        return name

    def _check_manage(self, transport: BulkTransport, topic_filter: str) -> None:
        if not self._broker.access.may_manage(transport.client_id, transport.username, topic_filter):
            raise refused(
                reasons.NOT_AUTHORIZED,
                f'to change how {topic_filter!r} is kept is not allowed here: it takes a rule with access = "manage"',
            )

    # --- topics and records -------------------------------------------------------------------------------------------------

    def _topics(
        self, transport: BulkTransport, kept: Kept, filters: list[str], after: int, most: int
    ) -> tuple[list[Topic], int]:
        """Topics of a log that a filter matches, without one all that may be read; and where to go on: -1 when these were the
        last."""
        log, hidden = kept.log, kept.hidden
        if filters and not any("+" in topic_filter or "#" in topic_filter for topic_filter in filters):
            named = [log.topic(topic_filter.encode(), create=False) for topic_filter in dict.fromkeys(filters)]
            return [topic for topic in named if topic is not None], -1
        table = RuleTable(TopicRule(topic=topic_filter) for topic_filter in filters)
        found: list[Topic] = []
        last = log.last_number()
        at = max(0, after)
        stop = min(last, at + SCANNED_TOPICS)
        until = self._broker.monotonic() + SCAN_SECONDS
        name_bytes = 0
        while at < stop and len(found) < most and name_bytes < MAX_NAMED_BYTES:
            at += 1
            topic = log.numbered(at)
            if (
                topic is not None
                and (table.match(topic.name) is not None if filters else self._may_read(transport, topic.text()))
                and not (hidden is not None and hidden(topic.name))
            ):
                found.append(topic)
                name_bytes += len(topic.name)
            if at % CHECKED_AT_ONCE == 0 and self._broker.monotonic() >= until:
                break
        return found, at if at < last else -1

    def _list(self, transport: BulkTransport, number: int, content: wire.ListTopics) -> None:
        if content.filters:
            self.check_read(transport, content.filters)
        sources = self.sources.of(content.filters, content.keeper, trusted=transport.trusted)
        if sources == [""]:
            transport.send(number, self._listed(transport, self.sources.kept(""), content.filters, content.after))
        else:
            self.later(transport, number, self._list_sets(transport, sources, content))

    def _listed(self, transport: BulkTransport, kept: Kept, filters: list[str], after: int) -> wire.States:
        topics, after = self._topics(transport, kept, filters, after, wire.PAGE_TOPICS)
        leader = self.sources.leader_of(kept.source)
        states = [
            wire.State(
                topic.text(),
                topic.first_index,
                topic.committed_index,
                topic.bytes,
                topic.first_time_us,
                topic.last_time_us,
                kept.source,
                leader,
            )
            for topic in topics
        ]
        return wire.States(states, after)

    async def _list_sets(self, transport: BulkTransport, sources: list[str], content: wire.ListTopics) -> wire.Message:
        """A page of the log at which the question before ended, or of the next one."""
        place, after = _place_of(content.after)
        if place >= len(sources):
            return wire.States([])
        source = sources[place]
        if self.sources.serves(source):
            if source and content.newest:
                await self.sources.catch_up(source)
            else:
                await self.sources.refresh(source)
            found = self._listed(transport, self.sources.kept(source), content.filters, after)
        else:
            asked = wire.ListTopics(content.filters, after, SET + source, content.newest)
            answer = (await self.sources.lines.ask(source, asked, newest=content.newest)).answer
            if not isinstance(answer, wire.States):
                raise refused(reasons.UNSPECIFIED_ERROR, _ELSE)
            states = [state for state in answer.states if content.filters or self._may_read(transport, state.topic)]
            found = wire.States(states, answer.after)
        return wire.States(found.states, _after(place, found.after, len(sources)))

    def _find(self, transport: BulkTransport, number: int, content: wire.FindIndexes) -> None:
        if not content.filters:
            raise refused(reasons.TOPIC_FILTER_INVALID, "say for which topics: a filter at least")
        self.check_read(transport, content.filters)
        sources = self.sources.of(content.filters, content.keeper, trusted=transport.trusted)
        if sources == [""]:
            transport.send(number, self._found(transport, self.sources.kept(""), content, content.after))
        else:
            self.later(transport, number, self._find_sets(transport, sources, content))

    def _found(self, transport: BulkTransport, kept: Kept, content: wire.FindIndexes, after: int) -> wire.Indexes:
        topics, after = self._topics(transport, kept, content.filters, after, MAX_SEARCHED)
        return wire.Indexes([(topic.text(), kept.log.index_at(topic, content.time_us)) for topic in topics], after)

    async def _find_sets(self, transport: BulkTransport, sources: list[str], content: wire.FindIndexes) -> wire.Message:
        place, after = _place_of(content.after)
        if place >= len(sources):
            return wire.Indexes([])
        source = sources[place]
        if self.sources.serves(source):
            await self.sources.refresh(source)
            found = self._found(transport, self.sources.kept(source), content, after)
        else:
            asked = wire.FindIndexes(content.filters, content.time_us, after, SET + source)
            answer = (await self.sources.lines.ask(source, asked)).answer
            if not isinstance(answer, wire.Indexes):
                raise refused(reasons.UNSPECIFIED_ERROR, _ELSE)
            found = answer
        return wire.Indexes(found.indexes, _after(place, found.after, len(sources)))

    def _get(self, transport: BulkTransport, number: int, content: wire.Get) -> None:
        if "+" in content.topic or "#" in content.topic:
            raise refused(reasons.TOPIC_NAME_INVALID, f"{content.topic!r} is a filter: one record is of one topic")
        self.check_read(transport, [content.topic])
        source = self.sources.of([content.topic], content.keeper, trusted=transport.trusted)[0]
        if not self.sources.serves(source):
            self.later(transport, number, self._get_there(source, content))
            return
        kept = self.sources.kept(source)
        topic = kept.log.topic(content.topic.encode(), create=False)
        if (topic is None or content.index >= topic.committed_index) and self.sources.may_lag(source):
            self.later(transport, number, self._get_later(kept, content))
        else:
            transport.send_data(number, self._record(kept, content))

    async def _get_there(self, source: str, content: wire.Get) -> bytes | memoryview:
        data = (await self.sources.lines.ask(source, wire.Get(content.topic, content.index, SET + source))).data
        if data is None:
            raise refused(reasons.UNSPECIFIED_ERROR, _ELSE)
        return data

    async def _get_later(self, kept: Kept, content: wire.Get) -> bytes:
        """A record that this replica may only not know yet."""
        await self.sources.catch_up(kept.source)
        return self._record(kept, content)

    def _record(self, kept: Kept, content: wire.Get) -> bytes:
        topic = kept.log.topic(content.topic.encode(), create=False)
        if topic is None:
            raise TopicUnknown(
                content.topic, f"the log has no topic {content.topic!r}: nothing was published to it since it is kept"
            )
        record = kept.log.get(topic, content.index)
        flags = record.qos | (RETAIN if record.retain else 0)
        publisher = record.publisher.encode()
        return encode(
            RECORDS, flags, topic.number, record.index, record.time_us, publisher, record.properties, [bytes(record.payload)]
        )

    # --- streams ------------------------------------------------------------------------------------------------------------

    def relay(self, transport: BulkTransport, number: int, content: wire.Open, sources: list[str]) -> Relayed:
        """A stream over logs that are elsewhere, or over several."""
        readings = [SetReading(source, self.sources.part_of(content, source)) for source in sources]
        return Relayed(number, readings, content, self.sources.lines, transport.pump_soon)

    def catch_up(self, transport: BulkTransport, number: int, source: str, content: wire.Open) -> None:
        """Say :meth:`BulkTransport.caught_up` once the replica here has what is committed now."""
        work = self._caught_up(transport, number, source, content)
        task = asyncio.get_running_loop().create_task(work, name="bulk-catch-up")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _caught_up(self, transport: BulkTransport, number: int, source: str, content: wire.Open) -> None:
        error: NearcastError | None = None
        try:
            try:
                is_beyond = self.sources.is_beyond(source, content)
                await self.sources.catch_up(source, DEFINITE_S if is_beyond else FRESH_S)
            except RequestRefused:
                # Without a majority, what is committed can be read still; but an end that is not known is no end.
                if self.sources.is_beyond(source, content):
                    raise
        except NearcastError as failed:
            error = failed
        transport.caught_up(number, source, error)

    # --- publishing ---------------------------------------------------------------------------------------------------------

    def _publish(self, transport: BulkTransport, number: int, content: wire.Publish) -> None:
        name = self.check_publish(transport, content.topic)
        limits = self._broker.config.limits
        if not content.payloads:
            raise refused(reasons.PROTOCOL_ERROR, "a publish without a payload")
        if len(content.payloads) > MAX_PAYLOADS:
            raise refused(
                reasons.QUOTA_EXCEEDED,
                f"{len(content.payloads):,} messages in one request: at most {MAX_PAYLOADS:,} are taken",
            )
        if max(map(len, content.payloads)) + len(name) + len(content.properties) + 16 > limits.max_packet_bytes:
            raise refused(
                reasons.PACKET_TOO_LARGE, f"a message is larger than limits.max_packet_bytes, {limits.max_packet_bytes}"
            )
        if content.qos not in (0, 1, 2) or content.qos > limits.max_qos:
            raise refused(reasons.QOS_NOT_SUPPORTED, f"QoS {content.qos} is not served here")
        if content.retain and not limits.retain_available:
            raise refused(reasons.RETAIN_NOT_SUPPORTED, "messages are not retained here")
        check_properties(content.properties)
        set_name = self.sources.set_of(name)
        if set_name:
            # There is no promise about QoS 0, and whoever asked waits for one.
            publications = build_all(name, content.payloads, max(1, content.qos), content.retain, content.properties)
            self.later(transport, number, self._propose(set_name, publications, transport.client_id))
            return
        _ = self.log
        if self.kept.rules.rule_for(name) is None:
            raise TopicUnknown(
                content.topic,
                f"no rule keeps the topic {content.topic!r}: `nearcast topic create {content.topic}` makes one",
            )
        run = Run(
            name,
            content.payloads,
            publisher=transport.client_id.encode(),
            properties=content.properties,
            qos=content.qos,
            retain=content.retain,
        )
        index = self.kept.publish(run)
        self.later(transport, number, self._committed(index))

    async def _propose(self, set_name: str, publications: list[Publication], publisher: str) -> wire.Message:
        """Have a replica set keep messages; they are numbered with everything else that this broker proposes."""
        pledges = []
        for publication in publications:
            pledge = self.sources.sets.publish(publication, publisher, self._broker.monotonic())
            if pledge is None:
                raise refused(reasons.SERVER_UNAVAILABLE, f"replica set {set_name} does not keep this topic any more")
            pledges.append(pledge)
        self._broker.flush()
        for pledge in pledges:
            await _settled(pledge)
            if pledge.reason_code >= reasons.UNSPECIFIED_ERROR:
                raise refused(
                    pledge.reason_code,
                    f"replica set {set_name} did not take it: {reasons.name(pledge.reason_code)}; what waits here for it"
                    " is bounded",
                )
        return wire.Done(pledges[0].first_index)

    async def _committed(self, index: int) -> wire.Message:
        await self.kept.committed()
        return wire.Done(index)

    # --- rules --------------------------------------------------------------------------------------------------------------

    async def _rules(self, transport: BulkTransport) -> wire.Message:
        """The rules about topics that the client has something to do with."""
        rules = self.kept.rules
        configured = len(rules.configured)
        found = []
        for place, rule in enumerate(rules.rules):
            if self._broker.access.may_know(transport.client_id, transport.username, rule.topic):
                found.append(
                    wire.Rule(
                        rule.topic,
                        rule.mode,
                        rule.retention.max_records,
                        rule.retention.max_bytes,
                        rule.retention.max_age_seconds,
                        "config" if place < configured else "created",
                    )
                )
            if place % CHECKED_AT_ONCE == CHECKED_AT_ONCE - 1:
                await asyncio.sleep(0)
        return wire.Rules(found)

    async def _create(self, transport: BulkTransport, rule: wire.Rule) -> wire.Message:
        self._check_manage(transport, rule.topic)
        try:
            retention = Retention(max_records=rule.max_records, max_bytes=rule.max_bytes, max_age_seconds=rule.max_age_seconds)
        except ValueError as error:
            raise refused(reasons.PROTOCOL_ERROR, str(error)) from error
        outcome = await self.kept.rules.create(TopicRule(topic=rule.topic, mode=rule.mode, retention=retention))
        return wire.Done(0 if outcome == "unchanged" else 1)

    async def _delete(self, transport: BulkTransport, content: wire.DeleteRule) -> wire.Message:
        self._check_manage(transport, content.topic)
        _ = self.log
        unknown: TopicUnknown | None = None
        try:
            await self.kept.rules.delete(content.topic)
        except TopicUnknown as error:
            # There may be records of a rule that is gone: those can be deleted still.
            unknown = error
        topics = await self.kept.delete_records(content.topic) if content.records else 0
        if unknown is not None and not topics:
            raise unknown
        await self.kept.committed()
        return wire.Done(topics)


def _place_of(after: int) -> tuple[int, int]:
    """Of what continues a list over several logs: which log, and the topic's number there."""
    return (0, -1) if after < 0 else (after >> _SOURCE_BITS, after & ((1 << _SOURCE_BITS) - 1))


def _after(place: int, after: int, count: int) -> int:
    """The reverse of it, for the answer."""
    if after >= 0:
        return place << _SOURCE_BITS | after
    return (place + 1) << _SOURCE_BITS if place + 1 < count else -1


async def _settled(pledge: Pledge) -> None:
    """Return once a promise is kept, or broken."""
    if pledge.is_settled:
        return
    told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    pledge.on_settled = lambda _: None if told.done() else told.set_result(None)
    await told


def check_properties(encoded: bytes) -> None:
    """Refuse properties that a subscriber could choke on."""
    if not encoded:
        return
    try:
        properties, _ = decode_properties(encode_varint(len(encoded)) + encoded, 0, PUBLISH)
    except RemoteProtocolError as error:
        raise refused(error.reason_code, f"properties that MQTT does not know: {error.message}") from error
    if properties is not None and (properties.topic_alias is not None or properties.subscription_identifiers is not None):
        raise refused(reasons.PROTOCOL_ERROR, "a topic alias or a subscription identifier means nothing in the log")


def refused(reason_code: int, message: str) -> RequestRefused:
    return RequestRefused(reason_code, message)


def refusal(error: NearcastError) -> wire.Refused:
    """How an error reaches the client."""
    if isinstance(error, TopicUnknown):
        return wire.Refused("topic-unknown", str(error), reasons.TOPIC_NAME_INVALID, topic=error.topic)
    if isinstance(error, RecordUnavailable):
        return wire.Refused(
            "record-unavailable",
            str(error),
            reasons.IMPLEMENTATION_SPECIFIC,
            error.topic,
            error.index,
            error.first_index,
            error.next_index,
        )
    if isinstance(error, BatchRefused):
        return wire.Refused("batch", str(error), reasons.QUOTA_EXCEEDED)
    if isinstance(error, StorageUnavailable | StorageCorrupt):
        return wire.Refused("storage", str(error), reasons.UNSPECIFIED_ERROR)
    if isinstance(error, RequestRefused):
        return wire.Refused("request", str(error), error.reason_code)
    if isinstance(error, ConfigError):
        return wire.Refused("request", str(error), reasons.IMPLEMENTATION_SPECIFIC)
    return wire.Refused("request", str(error), reasons.UNSPECIFIED_ERROR)
