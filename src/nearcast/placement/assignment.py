"""Which broker each gateway should use: EMMA's network reconfiguration (section V-C, Algorithm 1).

A network is brokers, gateways (the paper's clients ``c``) and measured round-trip times between them. Each gateway belongs at
a broker of its lowest latency group; within the group, load is balanced by connections, unless that changes too little to be
worth a move (the threshold θ). :func:`reconfigure` decides, and changes nothing; whoever carries a migration out may find
that the world has moved on.

Three things are as in the paper only with their parameter at zero, because as printed they let clients wander:

- *Group borders.* A broker at 2.0 ± 0.1 ms changes its group from one measurement to the next. The current broker is
  therefore taken to be nearer by ``hysteresis``.
- *Exchanges.* With one gateway and two equal brokers, 0 + 0.1·1 < 1, so Algorithm 1 moves it back and forth for ever. A move
  for balance has to leave its target with no more than its origin (``strict_balance``).
- *What is not known.* A broker that a gateway has not measured yet is no candidate; a gateway whose current broker is
  unmeasured but there stays until it is measured.

One thing is more than the paper has: a gateway counts with its number of clients (``weight``), which is 1 there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Final, Literal

import msgspec

LATENCY_GROUPS_MS: Final = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
"""Borders between groups: [0, 2), [2, 5), ... [1000, ∞)."""

MIGRATION_THRESHOLD: Final = 0.1
"""θ: the share of a group's connections by which two brokers must differ for a move that only balances load."""

HYSTERESIS: Final = 0.1
"""Share of its round-trip time by which the current broker is taken to be nearer than measured."""

Reason = Literal["nearer", "balance", "draining", "gone", "first"]


class BrokerState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A broker of the network. ``connections`` are those of gateways that are not part of the snapshot and of clients that
    came without one; ``draining`` ones are to be emptied and get nobody."""

    name: str
    connections: int = 0
    draining: bool = False


class GatewayState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A gateway: its current broker (empty: none yet), how many connections it stands for, and what it measured."""

    name: str
    broker: str = ""
    weight: int = 1
    latency_ms: dict[str, float] = msgspec.field(default_factory=dict)


class Network(msgspec.Struct, frozen=True):
    """A snapshot: the paper's N = (B, C, E), with measured latencies on the edges."""

    brokers: tuple[BrokerState, ...]
    gateways: tuple[GatewayState, ...]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How decisions are made. ``PAPER`` is Algorithm 1 to the letter."""

    groups_ms: tuple[float, ...] = LATENCY_GROUPS_MS
    threshold: float = MIGRATION_THRESHOLD
    hysteresis: float = HYSTERESIS
    strict_balance: bool = True


PAPER: Final = Policy(hysteresis=0.0, strict_balance=False)


class Migration(msgspec.Struct, frozen=True, omit_defaults=True):
    """A gateway belongs elsewhere, and why: the latencies on both sides as far as they are known, and the loads it was
    decided by."""

    gateway: str
    origin: str
    target: str
    reason: Reason
    origin_ms: float | None = None
    target_ms: float | None = None
    origin_connections: int = 0
    target_connections: int = 0

    def explain(self) -> str:
        """The reason in words."""
        if self.reason == "gone":
            return f"{self.origin} is gone"
        if self.reason == "draining":
            return f"{self.origin} is being drained"
        if self.reason == "first":
            return "no broker yet"
        if self.reason == "nearer":
            return f"{self.target} is at {self.target_ms:.1f} ms, {self.origin} at {self.origin_ms:.1f} ms"
        return f"{self.target} has {self.target_connections} connections, {self.origin} {self.origin_connections}"


def group_of(latency_ms: float, groups_ms: tuple[float, ...] = LATENCY_GROUPS_MS) -> int:
    """The number of a latency's group, 0 the nearest; each border belongs to the group above it."""
    return bisect_right(groups_ms, latency_ms)


def reconfigure(network: Network, policy: Policy | None = None) -> list[Migration]:
    """The migrations that Algorithm 1 asks for, in the order of the gateways; each is decided with the ones before it done."""
    policy = policy if policy is not None else Policy()
    brokers = {broker.name: broker for broker in network.brokers}
    connections = {broker.name: broker.connections for broker in network.brokers}
    for gateway in network.gateways:
        if gateway.broker in connections:
            connections[gateway.broker] += gateway.weight
    migrations: list[Migration] = []
    for gateway in network.gateways:
        migration = _decide(gateway, brokers, connections, policy)
        if migration is not None:
            migrations.append(migration)
            if gateway.broker in connections:
                connections[gateway.broker] -= gateway.weight
            connections[migration.target] += gateway.weight
    return migrations


def _decide(
    gateway: GatewayState, brokers: dict[str, BrokerState], connections: dict[str, int], policy: Policy
) -> Migration | None:
    current = brokers.get(gateway.broker)
    forced: Reason | None = None
    if current is None:
        forced = "gone" if gateway.broker else "first"
    elif current.draining:
        forced = "draining"
    lowest = _lowest_group(gateway, brokers, policy, counts_current=forced is None)
    if forced is None and (not lowest or gateway.broker not in gateway.latency_ms):
        return None
    if not lowest:
        # Nothing is measured yet, and it must go somewhere: the least busy one, until something is known.
        lowest = [name for name, broker in brokers.items() if not broker.draining]
        if not lowest:
            return None
    target = min(lowest, key=lambda name: (connections[name], gateway.latency_ms.get(name, 0.0), name))
    if target == gateway.broker:
        return None
    reason: Reason = forced or "nearer"
    if forced is None and gateway.broker in lowest:
        reason = "balance"
        delta = policy.threshold * sum(connections[name] for name in lowest)
        if connections[target] + delta >= connections[gateway.broker]:
            return None
        if policy.strict_balance and connections[target] + gateway.weight > connections[gateway.broker] - gateway.weight:
            return None
    return Migration(
        gateway.name,
        gateway.broker,
        target,
        reason,
        gateway.latency_ms.get(gateway.broker),
        gateway.latency_ms.get(target),
        connections.get(gateway.broker, 0),
        connections[target],
    )


def _lowest_group(
    gateway: GatewayState, brokers: dict[str, BrokerState], policy: Policy, *, counts_current: bool
) -> list[str]:
    """The paper's B'_c: candidates of the lowest latency group in which there is one."""
    best = len(policy.groups_ms) + 1
    found: list[str] = []
    for name, latency_ms in gateway.latency_ms.items():
        broker = brokers.get(name)
        if broker is None or broker.draining:
            continue
        if name == gateway.broker and counts_current:
            latency_ms *= 1.0 - policy.hysteresis
        group = group_of(latency_ms, policy.groups_ms)
        if group < best:
            best = group
            found = [name]
        elif group == best:
            found.append(name)
    return found


def ranking(
    gateway: GatewayState, brokers: tuple[BrokerState, ...], groups_ms: tuple[float, ...] = LATENCY_GROUPS_MS
) -> tuple[str, ...]:
    """All brokers a gateway may use, best first: by latency group, then latency; unmeasured ones behind, by load. Latencies
    that differ by less than a quarter count as equal, so that the order does not change with every measurement."""
    far = len(groups_ms) + 1

    def order(broker: BrokerState) -> tuple[int, int, int, str]:
        latency_ms = gateway.latency_ms.get(broker.name)
        if latency_ms is None:
            return (far, 0, broker.connections, broker.name)
        return (group_of(latency_ms, groups_ms), round(math.log(max(latency_ms, 0.1), 1.25)), 0, broker.name)

    return tuple(broker.name for broker in sorted(brokers, key=order) if not broker.draining)
