"""Who publishes what and who subscribes to it, for every traffic pattern.

All topics of a plan have the same length, so that all its PUBLISH packets have the same size.
"""

from __future__ import annotations

import enum

import msgspec

from nearcast.errors import ConfigError


class Pattern(enum.StrEnum):
    ONE_TO_ONE = "one-to-one"
    PAIRS = "pairs"
    FANOUT = "fanout"
    WILDCARD = "wildcard"
    SHARED_TOPIC = "shared-topic"
    SHARED_SUBSCRIPTION = "shared-subscription"


class Plan(msgspec.Struct, frozen=True):
    """Topics of each publisher, filters of each subscriber, and who feeds whom."""

    topics: list[list[bytes]]
    filters: list[list[str]]
    sources: list[list[int]]
    """Per subscriber, the publishers whose messages it gets."""
    group: bool = False
    """Whether the subscribers share one subscription, so that a message goes to one of them."""

    @property
    def copies(self) -> list[int]:
        """Per publisher, how many subscribers get each message."""
        if self.group:
            return [1] * len(self.topics)
        return [sum(publisher in own for own in self.sources) for publisher in range(len(self.topics))]


def make_plan(pattern: Pattern, publishers: int, subscribers: int, prefix: str) -> Plan:
    """The plan of a pattern under the topic ``prefix``.

    one-to-one, pairs: publisher n on its own topic, to subscriber n. fanout: every subscriber subscribes to every
    publisher's topic by name. wildcard: the same reach, by ``prefix/+/v`` for half of the subscribers and ``prefix/#`` for
    the other half. shared-topic: all publish to and subscribe to one topic. shared-subscription: the same topic, one
    ``$share`` group of all subscribers.
    """
    if publishers < 1 or subscribers < 1:
        raise ConfigError("a load needs at least one publisher and one subscriber")
    if pattern is Pattern.ONE_TO_ONE and (publishers, subscribers) != (1, 1):
        raise ConfigError("one-to-one has one publisher and one subscriber; use pairs for more")
    if pattern is Pattern.PAIRS and publishers != subscribers:
        raise ConfigError("pairs needs as many publishers as subscribers")
    own = [f"{prefix}/{number:04d}/v" for number in range(publishers)]
    everyone = list(range(publishers))
    if pattern in (Pattern.ONE_TO_ONE, Pattern.PAIRS):
        return Plan([[topic.encode()] for topic in own], [[topic] for topic in own], [[number] for number in everyone])
    if pattern in (Pattern.SHARED_TOPIC, Pattern.SHARED_SUBSCRIPTION):
        topic = f"{prefix}/0000/v"
        group = pattern is Pattern.SHARED_SUBSCRIPTION
        topic_filter = f"$share/bench/{topic}" if group else topic
        return Plan([[topic.encode()]] * publishers, [[topic_filter]] * subscribers, [everyone] * subscribers, group)
    if pattern is Pattern.WILDCARD:
        shapes = [f"{prefix}/+/v", f"{prefix}/#"]
        filters = [[shapes[number % 2]] for number in range(subscribers)]
    else:
        filters = [own] * subscribers
    return Plan([[topic.encode()] for topic in own], filters, [everyone] * subscribers)


CURVE_TOPICS = 10_000
CURVE_MATCHES = 4


def make_curve_plan(prefix: str) -> Plan:
    """The traffic of the subscription curve: one publisher going through 10,000 topics, each matched by four wildcards."""
    topics = [f"{prefix}/{number:06d}/m/state".encode() for number in range(CURVE_TOPICS)]
    filters = [f"{prefix}/+/m/state", f"{prefix}/#", "+/+/m/state", "+/+/+/state"]
    return Plan([topics], [[topic_filter] for topic_filter in filters], [[0]] * CURVE_MATCHES)


def curve_filters(prefix: str, count: int) -> list[str]:
    """``count`` wildcard subscriptions that share the curve's topics' levels and match none of them."""
    half = count // 2
    return [f"{prefix}/{number:06d}/+/alarm" for number in range(half)] + [
        f"+/{number:06d}/alarm/#" for number in range(count - half)
    ]
