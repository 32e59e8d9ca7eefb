"""What clients' connections tell: who is subscribed since when, at which broker each client was, how long it was away.

Events of connections are few and fit in memory. Pure: lists of events in, what the judging of messages asks for out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nearcast.pipeline.evaluation.filters import FilterIndex

FOR_EVER = 2**63 - 1
SHARED = "$share/"

Event = Mapping[str, Any]


@dataclass
class Subscription:
    """Of a client to a filter: since its first confirmation, at the highest QoS, at all brokers that confirmed it."""

    entitled_ns: int
    granted: int
    brokers: set[str] = field(default_factory=set)

    def widen(self, other: Subscription) -> None:
        """Together with another one of the same client."""
        self.entitled_ns = min(self.entitled_ns, other.entitled_ns)
        self.granted = max(self.granted, other.granted)
        self.brokers |= other.brokers


@dataclass
class Outage:
    """A time that a client that had been connected was not; ``back_ns`` is None for one that never came back."""

    client: str
    gone_ns: int
    reason: str | None
    broker_before: str | None
    back_ns: int | None = None
    broker_after: str | None = None
    subscribed_ns: int | None = None
    gone_again_ns: int | None = None
    failed_attempts: int = 0


class Clients:
    """The clients of one run."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._filters: dict[str, dict[str, Subscription]] = defaultdict(dict)
        self.presence: dict[str, list[tuple[str, int, int]]] = {}
        """By client: ``broker, from_ns, until_ns``. At a broker until it appears at another one."""
        self.outages: list[Outage] = []
        self.shared = 0
        self.given_up = 0
        """Subscriptions that a client had for a time only: nobody judges what it missed of them."""
        self.unconnected: Counter[str | None] = Counter()
        """Why clients never got a first connection."""
        lives: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            if event["kind"] == "unconnected":
                self.unconnected[event["reason"]] += 1
            lives[event["client"]].append(event)
        for client, life in lives.items():
            # At the same nanosecond: gone, then back, then subscribed.
            life.sort(key=lambda event: (event["at_ns"], _RANKS.get(event["kind"], 3)))
            self._subscribe(client, life)
            self._follow(client, life)
        self._index = FilterIndex(self._filters)

    def _subscribe(self, client: str, life: Sequence[Event]) -> None:
        given_up = {event["topic"] for event in life if event["kind"] == "unsubscribed"}
        self.given_up += len(given_up)
        for event in life:
            topic_filter = event["topic"]
            if event["kind"] != "subscribed" or topic_filter is None or topic_filter in given_up:
                continue
            if topic_filter.startswith(SHARED):
                self.shared += 1
                continue
            found = Subscription(event["at_ns"], event["qos"] or 0, set(event["path"][:1]))
            self._filters[topic_filter].setdefault(client, found).widen(found)

    def _follow(self, client: str, life: Sequence[Event]) -> None:
        stays: list[tuple[str, int]] = []
        outage: Outage | None = None
        last: Outage | None = None
        connected, connected_to = False, None
        for event in life:
            kind, broker = event["kind"], next(iter(event["path"]), None)
            if kind in ("connected", "subscribed") and broker is not None and (not stays or stays[-1][0] != broker):
                stays.append((broker, event["at_ns"]))
            if kind == "disconnected":
                # Attempts in vain say disconnected again: an outage begins with the first since the last connection.
                if connected:
                    if last is not None:
                        last.gone_again_ns = event["at_ns"]
                    last = outage = Outage(client, event["at_ns"], event["reason"], connected_to or broker)
                    self.outages.append(outage)
                elif outage is not None:
                    outage.failed_attempts += 1
                connected = False
            elif kind == "connected":
                if outage is not None:
                    outage.back_ns, outage.broker_after = event["at_ns"], broker
                    outage = None
                connected, connected_to = True, broker
            elif kind == "subscribed" and connected and last is not None and last.subscribed_ns is None:
                last.subscribed_ns = event["at_ns"]
        if stays:
            ends = [from_ns for _, from_ns in stays[1:]] + [FOR_EVER]
            self.presence[client] = [
                (broker, from_ns, until_ns) for (broker, from_ns), until_ns in zip(stays, ends, strict=True)
            ]

    def entitled(self, topic: str) -> dict[str, Subscription]:
        """Who is subscribed to a topic."""
        found: dict[str, Subscription] = {}
        for topic_filter in self._index.matching(topic):
            for client, each in self._filters[topic_filter].items():
                if client in found:
                    found[client].widen(each)
                else:
                    found[client] = Subscription(each.entitled_ns, each.granted, set(each.brokers))
        return found

    def wanted(self, entitled: Mapping[str, Subscription]) -> dict[str, tuple[list[int], list[int]]]:
        """By broker, when one of these clients was subscribed there, without overlaps: beginnings and ends."""
        spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for client, subscription in entitled.items():
            for broker, from_ns, until_ns in self.presence.get(client, ()):
                if max(from_ns, subscription.entitled_ns) < until_ns:
                    spans[broker].append((max(from_ns, subscription.entitled_ns), until_ns))
        return {broker: _merged(each) for broker, each in spans.items()}


_RANKS = {"disconnected": 0, "connected": 1, "subscribed": 2}


def _merged(spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    begins: list[int] = []
    ends: list[int] = []
    for from_ns, until_ns in sorted(spans):
        if ends and from_ns <= ends[-1]:
            ends[-1] = max(ends[-1], until_ns)
        else:
            begins.append(from_ns)
            ends.append(until_ns)
    return begins, ends
