"""What the HTTP API shows of owned topics, as records."""

from __future__ import annotations

import heapq

import msgspec

from nearcast.config import TopicRule
from nearcast.fabric.migrations import Migration
from nearcast.fabric.owner_records import Owner
from nearcast.fabric.refusals import Refused
from nearcast.fabric.topic_manager import TopicManager
from nearcast.mqtt.topics import filter_fault
from nearcast.placement.explanations import Explanation
from nearcast.placement.topics import Topics
from nearcast.topiclog.rules import RuleTable

MAX_LEVELS = 1_000
MAX_HISTORY = 20


class OwnedTopicView(msgspec.Struct, kw_only=True):
    """A topic of class ``owned``, as reports of brokers show it. Latencies are one way, in milliseconds."""

    topic: str
    owner: str
    epoch: int
    owned_since: float
    """Seconds since the Unix epoch: what the epoch says."""
    moving_to: str | None
    topic_filter: str | None
    """The rule that makes it owned; none, if there is no such rule any more."""
    max_latency_ms: float
    """Its bound; 0: none."""
    latency_ms: float | None
    """The worst case from a producer over the owner to a consumer; none without both."""
    state: str
    """``ok``, ``violated`` (above its bound), ``unbounded``, or ``idle`` (without producers or consumers)."""
    producers: int
    consumers: int
    messages_per_second: float


class OwnedTopicPage(msgspec.Struct, kw_only=True):
    """Owned topics, in the order of their names; ``next`` goes into ``after`` for the following ones."""

    topics: list[OwnedTopicView]
    total: int
    next: str | None


class MigrationView(msgspec.Struct, kw_only=True):
    """A topic changes hands, or did. Times are seconds since the Unix epoch."""

    number: int
    topic: str
    origin: str | None
    target: str
    kind: str
    reason: str
    state: str
    created_at: float
    ordered_at: float | None
    ended_at: float | None
    duration_ms: float | None
    """From the order's arrival at the old owner to the new owner's word that it is in charge."""
    detail: str
    explanation: Explanation | None = None
    """The decision behind it in figures, where the controller made it and somebody asks why."""


class WhyView(msgspec.Struct, kw_only=True):
    """Why a topic is where it is."""

    topic: OwnedTopicView
    planner: str
    words: str
    """What the planner thinks of it now, in a sentence or two."""
    explanation: Explanation | None
    """The same in figures, with the alternatives; none while no broker's coordinate is known."""
    history: list[MigrationView]
    """How it came here, newest first."""


class TopicMoveRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which topic should be owned by which broker."""

    topic: str
    target: str


def page(
    manager: TopicManager, topic_filter: str, owner: str, violated: bool, after: str, limit: int, now: float
) -> OwnedTopicPage:
    """Topics in the order of their names, of one owner, of one filter, or only those above their bound."""
    owners = manager.directory.owners()
    if owner:
        owners = [one for one in owners if one.owner == owner]
    if topic_filter:
        matches = _matcher(topic_filter)
        owners = [one for one in owners if matches.match(one.topic.encode("utf-8")) is not None]
    if violated:
        arrays = manager.planner.picture(owners, now)
        over = (arrays.bound_ms > 0.0) & (arrays.worst_ms > arrays.bound_ms)
        named = {arrays.names[row] for row in over.nonzero()[0].tolist()}
        owners = [one for one in owners if one.topic in named]
    # There may be a million: only those of the page are put in order and made into records.
    found = heapq.nsmallest(limit + 1, (one for one in owners if one.topic > after), key=lambda one: one.topic)
    shown = found[:limit]
    return OwnedTopicPage(
        topics=_views(manager, shown, now),
        total=len(owners),
        next=shown[-1].topic if len(found) > limit else None,
    )


def _matcher(topic_filter: str) -> RuleTable:
    fault = filter_fault(topic_filter, MAX_LEVELS)
    if fault:
        raise Refused(f"{topic_filter!r} is no topic filter: {fault}")
    return RuleTable([TopicRule(topic=topic_filter)])


def one(manager: TopicManager, topic: str, now: float) -> OwnedTopicView:
    return _views(manager, [manager.owner_of(topic)], now)[0]


def _views(manager: TopicManager, owners: list[Owner], now: float) -> list[OwnedTopicView]:
    arrays = manager.planner.picture(owners, now)
    rows = {name: row for row, name in enumerate(arrays.names)}
    return [_view(manager, owner, arrays, rows[owner.topic]) for owner in owners]


def _view(manager: TopicManager, owner: Owner, arrays: Topics, row: int) -> OwnedTopicView:
    pending = manager.migrations.pending.get(owner.topic)
    rule = manager.rules.rule_of(owner.topic)
    producers, consumers = int(arrays.producer_counts[row]), int(arrays.consumer_counts[row])
    used = producers > 0 and consumers > 0
    bound, worst = float(arrays.bound_ms[row]), float(arrays.worst_ms[row])
    if not used:
        state = "idle"
    elif not bound:
        state = "unbounded"
    else:
        state = "violated" if worst > bound else "ok"
    return OwnedTopicView(
        topic=owner.topic,
        owner=owner.owner,
        epoch=owner.epoch,
        owned_since=round(owner.epoch / 1e6, 3),
        moving_to=None if pending is None else pending.target,
        topic_filter=None if rule is None else rule.topic_filter,
        max_latency_ms=bound,
        latency_ms=round(worst, 3) if used else None,
        state=state,
        producers=producers,
        consumers=consumers,
        messages_per_second=round(float(arrays.rate[row]), 3),
    )


def why(manager: TopicManager, topic: str, now: float) -> WhyView:
    explanation = manager.explain(topic, now)
    return WhyView(
        topic=one(manager, topic, now),
        planner=manager.settings.planner,
        words=manager.words(explanation),
        explanation=explanation,
        history=[migration(past, explained=True) for past in manager.migrations.history(topic)[:MAX_HISTORY]],
    )


def migration(of: Migration, *, explained: bool = False) -> MigrationView:
    return MigrationView(
        number=of.number,
        topic=of.topic,
        origin=of.origin or None,
        target=of.target,
        kind=of.kind,
        reason=of.reason,
        state=of.state,
        created_at=round(of.created_at, 3),
        ordered_at=round(of.ordered_at, 3) or None,
        ended_at=round(of.ended_at, 3) or None,
        duration_ms=round(of.duration_ms, 3) or None,
        detail=of.detail,
        explanation=of.explanation if explained else None,
    )
