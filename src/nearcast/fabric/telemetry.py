"""Telemetry of one broker: its own resources, and what it knows of owned topics (ePulsar §3.2, docs/reference/telemetry.md).

Every ``fabric.telemetry.interval_seconds`` a round of reports begins. A :class:`~nearcast.telemetry.records.BrokerReport` is
made at once. Summaries of topics are made a few at a time, with pauses in between that leave messages their latency; when all
are there, they leave as messages of at most :data:`PART_BYTES`. A round of very many topics therefore takes longer than the
interval, and the next one begins when it is done. With ``raw``, every client's coordinate is gathered beside the summaries.
Who counts as a client of a topic, and where it is, is :mod:`nearcast.fabric.audience`'s to say.

Reports are published in the fabric, below ``$nearcast/telemetry/``, and the same bytes go to the controller (TELEMETRY) but
for those of single clients. Where there is neither a subscriber, nor a rule that keeps them, nor a controller, none are made.

A machine without I/O: a driver calls :meth:`TelemetryReporter.tick` when it is due, and flushes after that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from nearcast.coordinates.coordinate import Coordinate
from nearcast.fabric import frames
from nearcast.fabric.audience import Audience
from nearcast.fabric.crowds import DIGITS, Anchor, Gathering
from nearcast.fabric.frames import frame
from nearcast.fabric.links import Link
from nearcast.fabric.owned_topics import OwnedTopic
from nearcast.fabric.parts import FOREVER
from nearcast.fabric.places import Agent, own_place
from nearcast.telemetry.records import (
    BrokerReport,
    ClientReport,
    ClientSample,
    Crowd,
    Place,
    TopicReport,
    TopicSummary,
)

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric

#: Which record a report is: first byte of a TELEMETRY frame's content, and the topic it is published in.
BROKER: Final = 0
TOPICS: Final = 1
CLIENTS: Final = 2
PREFIX: Final = "$nearcast/telemetry/"
NAMES: Final = ("broker", "topics", "clients")

PART_BYTES: Final = 65_536
"""Larger reports are cut into several; one whose topic has a longer name is larger all the same."""

SLICE_S: Final = 0.001
SLICE_UNITS: Final = 120
CLIENTS_PER_UNIT: Final = 8
"""A slice of work takes so long, or is so many units, whichever ends first, and at most a topic more: a topic is a unit, and
so are so many clients."""

PAUSE_S: Final = 0.004
PAUSES: Final = 4.0
"""Between two slices, and so many times as long as the one before took: at most a fifth of the time goes into reports, however
many topics there are and whatever a slice costs."""

PARTS_PER_STEP: Final = 4

UNHEARD_S: Final = 60.0
"""How often topics are looked through although nobody wants to know, to forget producers."""

NOBODY: Final = Crowd()

_LARGE: Final = 1 << 53
_LONG: Final = 12_345_678_901.123

_encode: Final = msgspec.json.Encoder().encode


class Shares(Protocol):
    """What this broker uses of what it has, 0 to 1 (:class:`nearcast.broker.resources.Resources`)."""

    cpu: float
    memory: float

    def sample(self) -> None:
        """Bring both up to date."""


class Controller(Protocol):
    """The way to the controller (:class:`nearcast.fabric.control.Registration`)."""

    @property
    def up(self) -> bool: ...

    def send(self, data: bytes, *, droppable: bool = False) -> bool: ...


class Writer:
    """Records of one kind that become messages of bounded size. The records are the last field of the report, so that each is
    encoded once and its report is written around them."""

    def __init__(self) -> None:
        self.parts: list[list[bytes]] = [[]]
        self.count = 0
        self._room = 0

    def add(self, record: msgspec.Struct, room: int) -> None:
        """One more record; ``room`` is what a message has for records."""
        encoded = _encode(record)
        if self.parts[-1]:
            if len(encoded) + 1 > self._room:
                self.parts.append([])
                self._room = room
        else:
            self._room = room
        self.count += 1
        self.parts[-1].append(encoded)
        self._room -= len(encoded) + 1


def around(report: msgspec.Struct, records: list[bytes]) -> bytes:
    """The JSON of a report whose last field, an empty list, is filled with records."""
    return b"".join((_encode(report)[:-2], b",".join(records), b"]}"))


class TelemetryReporter:
    """See the module. ``agent`` and ``controller`` are there if the broker has them, ``shares`` and a ``clock`` that goes on
    while the machine works where there is something to measure."""

    def __init__(
        self,
        fabric: Fabric,
        now: float,
        agent: Agent | None = None,
        controller: Controller | None = None,
        shares: Shares | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._fabric = fabric
        self._engine = fabric.engine
        self._settings = fabric.settings.telemetry
        self._agent = agent
        self._controller = controller
        self._shares = shares
        self._clock = clock
        self._audience = Audience(fabric, agent)
        self._report_at = now + min(1.0, self._settings.interval_seconds)
        self._step_at = FOREVER
        self._look_at = now + UNHEARD_S
        # What a part has for records, whatever its numbers are.
        self._room = PART_BYTES - len(around(TopicReport(fabric.name, _LONG, _LARGE, _LARGE, _LARGE, []), []))
        # The round under way.
        self._round = 0
        self._begun_at = now
        self._earlier_at = now
        self._waiting: list[OwnedTopic] = []
        self._summaries = Writer()
        self._samples: Writer | None = None
        # What is to leave, and which part of the first of it is next.
        self._leaving: deque[tuple[int, Writer]] = deque()
        self._part = 0
        # From one round to the next.
        self._link_bytes: dict[Link, int] = {}
        self._links_in = 0
        self._totals = self._count_totals()
        self._totals_at = now
        #: Counters since the start, and figures of the last round.
        self.reports = 0
        self.report_bytes = 0
        self.unsent = 0
        self.topics_reported = 0
        self.round_seconds = 0.0
        self.longest_slice_seconds = 0.0

    # --- time -----------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time passed: begin a round, or go on with one."""
        if now >= self._report_at:
            self._report_at = now + self._settings.interval_seconds
            self._report_broker(now)
            if self._step_at == FOREVER and (self._is_wanted(TOPICS) or now >= self._look_at):
                self._begin(now)
        if now >= self._step_at:
            self._step(now)

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next."""
        return min(self._report_at, self._step_at)

    # --- this broker ----------------------------------------------------------------------------------------------------

    def _count_totals(self) -> tuple[int, int, int, int]:
        """Messages in and out, bytes in and out, since the start, of clients and of other nodes."""
        fabric = self._fabric
        stats = self._engine.stats
        trunks = fabric.trunks
        sent = sum([peer.session.sent_messages for peer in fabric.peers.values()])
        # The engine counts what clients of gateways send and get, and what links are given: the first is part of the second.
        arrived = 0
        for link in fabric.links:
            arrived += link.bytes_in - self._link_bytes.get(link, 0)
        self._link_bytes = {link: link.bytes_in for link in fabric.links}
        self._links_in += arrived
        return (
            sum(stats.publishes_received) + fabric.channels.received_messages,
            sum(stats.publishes_sent) + sent,
            stats.bytes_received - trunks.bytes_in + self._links_in,
            stats.bytes_sent - trunks.bytes_out,
        )

    def _report_broker(self, now: float) -> None:
        before, self._totals = self._totals, self._count_totals()
        seconds = max(now - self._totals_at, 1e-3)
        self._totals_at = now
        # What brokers that were forgotten got is forgotten with them: a rate is not negative.
        rates = [round(max(0, after - earlier) / seconds, DIGITS) for after, earlier in zip(self._totals, before, strict=True)]
        shares = self._shares
        if shares is not None:
            shares.sample()
        if not self._is_wanted(BROKER):
            return
        own = own_place(self._agent)
        report = BrokerReport(
            broker=self._fabric.name,
            time=self._wall(now),
            coordinate=None if own is None else place_of(own),
            cpu=0.0 if shares is None else round(shares.cpu, DIGITS),
            memory=0.0 if shares is None else round(shares.memory, DIGITS),
            network=round(min(1.0, max(rates[2], rates[3]) / self._settings.network_bytes_per_second), DIGITS),
            messages_in_per_second=rates[0],
            messages_out_per_second=rates[1],
            bytes_in_per_second=rates[2],
            bytes_out_per_second=rates[3],
            topics_owned=len(self._fabric.ownership.owned()),
            clients=self._engine.stats.connected_clients,
        )
        self._publish(BROKER, _encode(report), now)

    def _wall(self, now: float) -> float:
        return round(now + self._engine.effects.wall_offset, DIGITS)

    # --- a round --------------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        self._look_at = now + UNHEARD_S
        self._round += 1
        self._waiting = list(self._fabric.ownership.topics.values())
        self._waiting.reverse()
        self._summaries = Writer()
        is_raw = self._settings.raw and self._is_wanted(CLIENTS)
        self._samples = Writer() if is_raw else None
        self._audience.begin(self._sample if is_raw else None, now)
        self._earlier_at, self._begun_at = self._begun_at, now
        self._step_at = now

    def _step(self, now: float) -> None:
        clock = self._clock
        began = 0.0 if clock is None else clock()
        self._step_at = now + PAUSE_S
        if self._leaving:
            self._send_some(now)
        else:
            self._audience.may_measure()
            units = SLICE_UNITS
            waiting = self._waiting
            while waiting and units > 0 and (clock is None or clock() - began < SLICE_S):
                units -= 1 + self._look(waiting.pop(), now) // CLIENTS_PER_UNIT
            if not waiting:
                self._finish(now)
        if clock is not None and self._step_at != FOREVER:
            took = clock() - began
            self.longest_slice_seconds = max(self.longest_slice_seconds, took)
            self._step_at = now + max(PAUSE_S, PAUSES * took)

    def _look(self, topic: OwnedTopic, now: float) -> int:
        """Summarise one topic, if it has anybody here; returns how many clients there were to look at."""
        audience = self._audience
        producers, consumers = Gathering(), Gathering()
        receivers = audience.consumers(topic, consumers)
        looked_at = audience.producers(topic, producers, now) + consumers.count
        # What passed since the round before, or since it was made if the topic was not known then.
        per_second = 1 / max(now - (topic.reported_at or self._earlier_at), 1e-3)
        messages = (topic.messages - topic.reported_messages) * per_second
        ordered = (topic.ordered - topic.reported_ordered) * per_second
        size = (topic.bytes - topic.reported_bytes) * per_second
        topic.reported_at = now
        topic.reported_messages, topic.reported_ordered, topic.reported_bytes = topic.messages, topic.ordered, topic.bytes
        if not (producers.count or consumers.count or topic.mine):
            return looked_at
        owner = topic.owner
        is_here = owner == self._fabric.name
        place = audience.place_of(owner)
        producers.sum_up(owner, place, is_here)
        consumers.sum_up(owner, place, is_here)
        summary = TopicSummary(
            topic=topic.text,
            epoch=topic.epoch,
            owner=owner,
            producers=crowd_of(producers),
            consumers=crowd_of(consumers),
            in_per_second=round(messages, DIGITS),
            out_per_second=round(ordered * receivers, DIGITS),
            bytes_per_second=round(size, DIGITS),
            max_latency_ms=self._fabric.classes.max_latency_ms(topic.name),
        )
        self._summaries.add(summary, self._room)
        return looked_at

    def _finish(self, now: float) -> None:
        """All topics are summarised: the reports are written, and begin to leave."""
        if self._is_wanted(TOPICS):
            self._leaving.append((TOPICS, self._summaries))
            self.topics_reported = self._summaries.count
        if self._samples is not None:
            self._leaving.append((CLIENTS, self._samples))
        self._summaries = Writer()
        self._samples = None
        self._part = 0
        self._send_some(now)

    def _send_some(self, now: float) -> None:
        for _ in range(PARTS_PER_STEP):
            if not self._leaving:
                break
            kind, written = self._leaving[0]
            if not self._publish(kind, self._written(kind, written.parts), now):
                return  # the controller listens slowly: again after a pause
            self._part += 1
            if self._part == len(written.parts):
                self._leaving.popleft()
                self._part = 0
        if not self._leaving:
            self._step_at = FOREVER
            self.round_seconds = now - self._begun_at

    def _written(self, kind: int, parts: list[list[bytes]]) -> bytes:
        """The part that is to leave next."""
        name, wall, part, count = self._fabric.name, self._wall(self._begun_at), self._part, len(parts)
        report: TopicReport | ClientReport = TopicReport(name, wall, self._round, part, count, [])
        if kind == CLIENTS:
            report = ClientReport(name, wall, self._round, part, count, [])
        return around(report, parts[part])

    # --- where reports go -----------------------------------------------------------------------------------------------

    def _is_wanted(self, kind: int) -> bool:
        """Whether anybody gets reports of this kind. The controller has no use for single clients."""
        if kind != CLIENTS and self._controller is not None and self._controller.up:
            return True
        route = self._engine.router.route_for((PREFIX + NAMES[kind] + "/" + self._fabric.name).encode("utf-8"))
        return bool(route.targets or route.peers or route.groups or route.kept is not None)

    def _publish(self, kind: int, payload: bytes, now: float) -> bool:
        """Hand a report out; false when the controller has no room for it, which is worth waiting for, for a while."""
        controller = self._controller
        if kind != CLIENTS and controller is not None and controller.up:
            sent = controller.send(frame(frames.TELEMETRY, bytes([kind]), payload), droppable=True)
            if not sent and kind != BROKER and now - self._begun_at < 2 * self._settings.interval_seconds:
                return False
            self.unsent += not sent
        self.reports += 1
        self.report_bytes += len(payload)
        topic = PREFIX + NAMES[kind] + "/" + self._fabric.name
        kept = self._engine.router.route_for(topic.encode("utf-8")).kept
        self._engine.publish(topic, payload, 1 if kept is not None and kept.durable else 0, False, now)
        return True

    # --- raw mode -------------------------------------------------------------------------------------------------------

    def _sample(self, topic: OwnedTopic, client: str, role: int, anchor: Anchor, latency_ms: float) -> None:
        if self._samples is not None:
            at = anchor.coordinate
            height, adjustment = round(at.height + latency_ms, DIGITS), round(at.adjustment, DIGITS)
            place = Place(anchor.vector, height, adjustment, round(at.error, DIGITS))
            self._samples.add(ClientSample(topic.text, client, role, place), self._room)


def place_of(coordinate: Coordinate) -> Place:
    """A coordinate as a record, to the microsecond."""
    return Place(
        tuple([round(value, DIGITS) for value in coordinate.vector]),
        round(coordinate.height, DIGITS),
        round(coordinate.adjustment, DIGITS),
        round(coordinate.error, DIGITS),
    )


def crowd_of(crowd: Gathering) -> Crowd:
    """A crowd that is summed up, as a record."""
    if not crowd.count:
        return NOBODY
    if not crowd.placed:
        return Crowd(count=crowd.count)
    return Crowd(
        count=crowd.count,
        centroid=Place(crowd.vector, round(crowd.height, DIGITS), round(crowd.adjustment, DIGITS), round(crowd.error, DIGITS)),
        deviation_ms=round(crowd.deviation_ms, DIGITS),
        worst_ms=round(crowd.worst_ms, DIGITS),
    )
