"""Which records of telemetry topics count: of every broker the newest round that is whole, and its last report of itself.

Pure: what was seen goes in, in the order of the log, and ranges of indexes come out. A broker publishes the parts of a round
one after the other on a topic of its own, so a round is a run of parts 0, 1, 2, … with one number; one with a part missing
(QoS 0, a crash) never counts, and neither does one that a broker which began anew left unfinished. Times are those of the
broker that keeps the topics: one clock for all, whatever theirs say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from nearcast.telemetry.records import BrokerReport

PREFIX: Final = "$nearcast/telemetry/"
BROKER: Final = "broker"
TOPICS: Final = "topics"
CLIENTS: Final = "clients"
FILTER: Final = f"{PREFIX}#"

MAX_BROKERS: Final = 100_000
"""Brokers that are kept in mind; no fabric is that large, but anybody may be allowed to publish."""


class Seen(msgspec.Struct, frozen=True):
    """A record of a telemetry topic, without what it says of topics and clients."""

    kind: str
    broker: str
    index: int
    time: float
    """Seconds, when the broker that keeps the topic took it."""
    round: int = 0
    part: int = 0
    parts: int = 1
    payload: bytes = b""
    """Of a broker's report of itself."""


class Round(NamedTuple):
    """A whole round: records ``first`` to ``last`` of the broker's topic of that kind."""

    number: int
    first: int
    last: int
    time: float
    """When its last record came."""
    began: float
    """When its first did."""


class _Gathering:
    __slots__ = ("began", "first", "next_part", "number")

    def __init__(self, number: int, first: int, began: float) -> None:
        self.number = number
        self.first = first
        self.began = began
        self.next_part = 0


class Rounds:
    """See the module. ``refused`` counts what was no telemetry."""

    def __init__(self) -> None:
        self.refused = 0
        self.latest = 0.0
        """When the last record came."""
        self._rounds: dict[tuple[str, str], Round] = {}
        self._gathering: dict[tuple[str, str], _Gathering] = {}
        self._reports: dict[str, tuple[float, bytes]] = {}

    def take(self, seen: Iterable[Seen]) -> bool:
        """Records that came, in any order between topics; whether they change what counts."""
        news = False
        for each in sorted(seen, key=_by_index):
            self.latest = max(self.latest, each.time)
            if each.kind == BROKER:
                if each.broker in self._reports or len(self._reports) < MAX_BROKERS:
                    self._reports[each.broker] = (each.time, each.payload)
                    news = True
            else:
                news |= self._take_part(each)
        return news

    def _take_part(self, seen: Seen) -> bool:
        key = (seen.kind, seen.broker)
        if key not in self._gathering and len(self._gathering) >= 2 * MAX_BROKERS:
            return False
        gathering = self._gathering.get(key)
        if seen.part == 0:
            gathering = self._gathering[key] = _Gathering(seen.round, seen.index, seen.time)
        elif gathering is None or gathering.number != seen.round or gathering.next_part != seen.part:
            self._gathering.pop(key, None)
            return False
        gathering.next_part += 1
        if gathering.next_part < seen.parts:
            return False
        del self._gathering[key]
        self._rounds[key] = Round(seen.round, gathering.first, seen.index, seen.time, gathering.began)
        return True

    def whole(self, kind: str, since: float) -> dict[str, Round]:
        """The newest whole round of each broker, unless it is older than that; by broker."""
        return {
            broker: found for (each, broker), found in sorted(self._rounds.items()) if each == kind and found.time >= since
        }

    def reports(self, since: float) -> list[BrokerReport]:
        """What brokers said of themselves. One that said nothing lately is there without a coordinate: it keeps what it owns
        and gets no more."""
        found = []
        for broker, (time, payload) in sorted(self._reports.items()):
            report = decode_report(payload, broker)
            if report is None:
                self.refused += 1
            else:
                found.append(report if time >= since else BrokerReport(broker, report.time))
        return found

    def forget(self, before: float) -> None:
        """Brokers that have said nothing since then."""
        for broker in [broker for broker, (time, _) in self._reports.items() if time < before]:
            del self._reports[broker]
        for key in [key for key, found in self._rounds.items() if found.time < before]:
            del self._rounds[key]


def _by_index(seen: Seen) -> tuple[str, str, int]:
    return seen.kind, seen.broker, seen.index


def topic_of(kind: str, broker: str) -> str:
    return f"{PREFIX}{kind}/{broker}"


def parse_topic(topic: str) -> tuple[str, str] | None:
    """(kind, broker) of a telemetry topic; None for other topics."""
    if not topic.startswith(PREFIX):
        return None
    kind, _, broker = topic[len(PREFIX) :].partition("/")
    return (kind, broker) if kind in (BROKER, TOPICS, CLIENTS) and broker else None


def decode_report(payload: bytes, broker: str) -> BrokerReport | None:
    """A broker speaks for itself, in the topic of its name."""
    try:
        report = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return report if report.broker == broker else None


_decode: Final = msgspec.json.Decoder(BrokerReport).decode
