"""The steps of ePulsar's Algorithm 1, each a function of its own that may be replaced (§3.4).

=======================  ========================================================  ==========
function                 what it decides                                           section
=======================  ========================================================  ==========
:func:`latency_violated` which topics exceed their bound                           §3.3, l. 16
:func:`worst_cases`      W(t, b): what to expect of each topic at each broker      §3.4.1
:func:`feasible`         which brokers keep a topic's bound; all, if none does     §3.4.1
:func:`overloaded`       which brokers have too much                               §3.4.2
:func:`topics_to_shed`   which topics such a broker gives away                     §3.4.3
:func:`capacities`       how much a broker can take (``can_host``)                 l. 8
=======================  ========================================================  ==========

:mod:`nearcast.placement.deciding` puts them together. Three things go past the paper's words where these leave room. *What a
broker can take* counts the CPU and network that a topic's messages will need, at the cost per message that the fleet has now
(but at most what the rate limit implies, so that the idle load of a quiet fleet is not taken for the cost of its few
messages). *Within one plan, load only grows*: a broker's capacity is free when a topic has gone, which is after this plan. And
*ties*, of less than a microsecond, go to the broker that passes on least.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from nearcast.telemetry.places import Floats, Indices, Mask, Places

from .topics import Fleet, PlacementSettings, Topics

RESOLUTION_PER_MS: Final = 1000.0
"""Worst cases are compared in microseconds: coordinates know no more, and ties are ties on every machine."""


def latency_violated(topics: Topics) -> Mask:
    """E(t) > Lth(t), where there is a bound."""
    return (topics.bound_ms > 0.0) & (topics.worst_ms > topics.bound_ms)


def worst_cases(topics: Topics, rows: Indices, fleet: Fleet) -> Floats:
    """W(t, b) for the topics ``rows`` (axis 0) at every broker (axis 1), rounded to microseconds. A topic without producers or
    without consumers is judged by those it has."""
    brokers = fleet.places.levels()
    fixed = 2.0 * topics.deviation_ms[rows]
    total = _side(topics.producers.rows(rows), topics.producer_counts[rows] == 0, fleet.places, brokers, fixed)
    total += _side(topics.consumers.rows(rows), topics.consumer_counts[rows] == 0, fleet.places, brokers, fixed)
    total += fixed[:, None]
    total += 2.0 * brokers[None, :]
    total *= RESOLUTION_PER_MS / 2
    np.rint(total, out=total)
    total /= RESOLUTION_PER_MS
    return total


def _side(clients: Places, missing: Mask, fleet: Places, brokers: Floats, fixed: Floats) -> Floats:
    """Round trips of producers or consumers, without the brokers' heights and adjustments (``brokers``), and without their own
    where these are added to ``fixed`` instead: what a row and a column add is then added once for both sides."""
    levels = clients.levels()
    if brokers.min(initial=np.inf) + levels.min(initial=np.inf) > 0.0:
        distances = clients.flat_ms(fleet)
        fixed += np.where(missing, 0.0, levels)
    else:  # somewhere adjustments may have to be left out
        distances = clients.matrix_ms(fleet)
        distances -= brokers[None, :]
    distances[missing] = -brokers
    return distances


def feasible(expected: Floats, bound_ms: Floats, usable: Mask) -> Mask:
    """The brokers that keep each topic's bound; every usable one where there is no bound, or where none keeps it."""
    keeps = expected <= bound_ms[:, None]
    keeps &= usable[None, :]
    keeps[(bound_ms <= 0.0) | ~keeps.any(axis=1)] = usable
    return keeps


def overloaded(fleet: Fleet, settings: PlacementSettings) -> Mask:
    """CPU, memory or network above the watermark, or too many messages passed on."""
    busiest = np.maximum(np.maximum(fleet.cpu, fleet.memory), fleet.network)
    over: Mask = busiest > settings.high_watermark
    if settings.out_rate_limit > 0.0:
        over |= fleet.out_rate > settings.out_rate_limit
    return over


def topics_to_shed(broker: int, owned: Indices, topics: Topics, fleet: Fleet, settings: PlacementSettings) -> Indices:
    """The fewest of the broker's topics (rows ``owned``), busiest first, with which it would not be overloaded any more.

    With a resource above its watermark, the target is the rate at which it would be there: utilisation is taken to be in
    proportion to messages.
    """
    rate = float(fleet.out_rate[broker])
    target = rate
    if settings.out_rate_limit > 0.0:
        target = min(target, settings.out_rate_limit)
    busiest = float(max(fleet.cpu[broker], fleet.memory[broker], fleet.network[broker]))
    if busiest > settings.high_watermark:
        target = min(target, rate * settings.high_watermark / busiest)
    busy = owned[topics.rate[owned] > 0.0]
    order = busy[np.argsort(-topics.rate[busy], kind="stable")]
    # The first is gone when any excess is left before it: side = "left" keeps a topic that would not be needed.
    needed = int(np.searchsorted(np.cumsum(topics.rate[order]), rate - target, side="left")) + 1 if rate > target else 0
    return order[:needed]


def capacities(fleet: Fleet, settings: PlacementSettings) -> Floats:
    """Messages a second that each broker can take on without being overloaded: it can host a topic whose rate is not above.
    Negative for one that can host nothing."""
    capacity = np.full(len(fleet), np.inf)
    if settings.out_rate_limit > 0.0:
        capacity = settings.out_rate_limit - fleet.out_rate
        passed_on = float(fleet.out_rate[fleet.usable].sum())
        for shares in (fleet.cpu, fleet.network):
            most = settings.high_watermark / settings.out_rate_limit
            used = float(shares[fleet.usable].sum())
            cost = min(most, used / passed_on) if passed_on > 0.0 else most
            if cost > 0.0:
                capacity = np.minimum(capacity, (settings.high_watermark - shares) / cost)
    capacity[overloaded(fleet, settings) | ~fleet.usable] = -1.0
    return capacity


@dataclass(frozen=True, slots=True)
class Policies:
    """One function for each step. Another ``worst_cases`` is another idea of where a topic belongs
    (:mod:`nearcast.placement.baselines`)."""

    latency_violated: Callable[[Topics], Mask] = latency_violated
    worst_cases: Callable[[Topics, Indices, Fleet], Floats] = worst_cases
    feasible: Callable[[Floats, Floats, Mask], Mask] = feasible
    overloaded: Callable[[Fleet, PlacementSettings], Mask] = overloaded
    topics_to_shed: Callable[[int, Indices, Topics, Fleet, PlacementSettings], Indices] = topics_to_shed
    capacities: Callable[[Fleet, PlacementSettings], Floats] = capacities
