"""Telemetry at the controller: the newest reports of every broker, ready to be planned on (ePulsar §3.2).

Brokers report in rounds, a round in parts; a round counts when it is whole, and until the next one is. A report that is older
than a few intervals of its broker counts for nothing. Parts are turned into arrays as they arrive, so that a plan only puts
together what is there (:mod:`nearcast.placement.gathering`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from nearcast.placement.gathering import Held, Rows, fleet_of, rows_of, topics_of
from nearcast.placement.topics import Fleet, Topics
from nearcast.telemetry.records import BrokerReport, TopicReport

#: The first byte behind a TELEMETRY frame's kind: which record follows as JSON.
BROKER_REPORT: Final = 0
TOPIC_REPORT: Final = 1
CLIENT_REPORT: Final = 2

STALE_INTERVALS: Final = 3.0
LEAST_STALE_S: Final = 15.0
"""A report counts for three intervals of its broker, and for so long at least."""

MAX_PARTS: Final = 16_384
"""Parts of a round: a million topics."""


class BrokerTelemetry:
    """What one broker reported last."""

    def __init__(self) -> None:
        self.report: BrokerReport | None = None
        self.report_at = 0.0
        self.interval_s = 0.0
        self.rows: list[Rows] = []
        self.rows_at = 0.0
        self._round = -1
        self._gathering: dict[int, Rows] = {}

    def take_report(self, report: BrokerReport, now: float) -> None:
        if self.report_at:
            self.interval_s = now - self.report_at
        self.report = report
        self.report_at = now

    def take_part(self, report: TopicReport, now: float) -> bool:
        """One message of a round; whether the round is whole now."""
        if not 0 <= report.part < report.parts <= MAX_PARTS:
            raise ValueError(f"part {report.part} of {report.parts}")
        if report.round != self._round:
            self._round = report.round
            self._gathering = {}
        self._gathering[report.part] = rows_of(report.topics)
        if len(self._gathering) < report.parts:
            return False
        self.rows = [self._gathering[part] for part in sorted(self._gathering)]
        self.rows_at = now
        self._gathering = {}
        return True

    def is_fresh(self, at: float, now: float) -> bool:
        """Whether what came then still counts."""
        return at > 0.0 and now - at <= max(LEAST_STALE_S, STALE_INTERVALS * self.interval_s)


class Telemetry:
    """Of all brokers. ``rounds`` counts those that came whole, ``refused`` what was no telemetry."""

    def __init__(self) -> None:
        self.brokers: dict[str, BrokerTelemetry] = {}
        self.rounds = 0
        self.reports = 0
        self.refused = 0
        self.bytes_received = 0

    def take(self, broker: str, content: bytes, now: float) -> bool:
        """A TELEMETRY frame; whether a round is whole with it. What cannot be read is counted, and the link stays: telemetry
        is no reason to lose a broker."""
        self.bytes_received += len(content)
        known = self.brokers.setdefault(broker, BrokerTelemetry())
        kind = content[1] if len(content) > 1 else -1
        data = memoryview(content)[2:]
        try:
            if kind == BROKER_REPORT:
                report = _decode_broker(data)
                _refuse_others(report.broker, broker)
                known.take_report(report, now)
                self.reports += 1
            elif kind == TOPIC_REPORT:
                topics = _decode_topics(data)
                _refuse_others(topics.broker, broker)
                whole = known.take_part(topics, now)
                self.rounds += whole
                return whole
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, OverflowError):
            self.refused += 1
        return False

    def forget(self, broker: str) -> None:
        """It is gone: what it said of its clients is old."""
        self.brokers.pop(broker, None)

    def report_of(self, broker: str, now: float) -> BrokerReport | None:
        """What a broker said of itself lately."""
        known = self.brokers.get(broker)
        return known.report if known is not None and known.is_fresh(known.report_at, now) else None

    def fleet(self, brokers: Sequence[str], leaving: Collection[str], unusable: Collection[str], now: float) -> Fleet:
        """These brokers. One that said nothing lately has no coordinate, and so gets no topics."""
        reports = [self.report_of(name, now) or BrokerReport(name, 0.0) for name in brokers]
        return fleet_of(reports, leaving=leaving, unusable=unusable)

    def fresh_rows(self, now: float) -> FreshRows:
        """What all brokers said of topics, as far as it still counts."""
        return FreshRows(
            [part for known in self.brokers.values() if known.is_fresh(known.rows_at, now) for part in known.rows]
        )


class FreshRows:
    """Reports on topics at one moment. They never change: newer ones take their place."""

    def __init__(self, parts: list[Rows]) -> None:
        self._parts = parts

    def picked(self, held: Mapping[str, Held]) -> FreshRows:
        """Only what is about these topics."""
        return FreshRows([_picked(part, held) for part in self._parts])

    def topics(self, fleet: Fleet, held: Mapping[str, Held], bound_of: Callable[[str], float]) -> Topics:
        """The topics of ``held``, and those that are reported and nobody is known to own."""
        return topics_of(self._parts, fleet, held, bound_of)


def _refuse_others(told: str, broker: str) -> None:
    if told != broker:
        raise ValueError("a broker reports for itself")


def _picked(part: Rows, held: Mapping[str, Held]) -> Rows:
    places = [place for place, name in enumerate(part.names) if name in held]
    rows = np.array(places, np.int64)
    return Rows(
        [part.names[place] for place in places],
        [part.owners[place] for place in places],
        part.epochs[rows],
        part.producers.rows(rows),
        part.consumers.rows(rows),
        part.rates[rows],
    )


_decode_broker: Final = msgspec.json.Decoder(BrokerReport).decode
_decode_topics: Final = msgspec.json.Decoder(TopicReport).decode
