"""Coordinates in virtual time: the shipped gossip at every node of a matrix of round-trip times.

A node is nothing but its :class:`~nearcast.membership.gossip.Gossip`; a datagram takes half the round-trip time of its pair,
and what the noise adds. Pairs whose time is not known (NaN) hear nothing of each other. All that is random follows from the
seed.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from nearcast.coordinates.coordinate import Coordinate
from nearcast.coordinates.settings import VivaldiSettings
from nearcast.membership.gossip import Gossip, GossipSettings

SECRET: Final = b"what all agents of a run share"
LEAST_ONE_WAY_S: Final = 10e-6

Lie = Callable[[Gossip, float], None]
"""What an infected node does to itself before each packet, at this time."""


class Noise:
    """What a datagram takes beyond half its round-trip time: exponential with a mean of ``jitter`` of it, and now and then
    (``spikes`` of the datagrams) a queue of as much as ``spike_ms``. ``loss`` of them never arrive."""

    def __init__(self, jitter: float = 0.0, spikes: float = 0.0, spike_ms: float = 50.0, loss: float = 0.0) -> None:
        self.jitter = jitter
        self.spikes = spikes
        self.spike_ms = spike_ms
        self.loss = loss


class Agents:
    """See the module. Each node knows one address to begin with, of a node before it; all start within a second."""

    def __init__(
        self,
        rtt_ms: npt.NDArray[np.float64],
        *,
        seed: int,
        settings: GossipSettings | None = None,
        vivaldi: VivaldiSettings | None = None,
        noise: Noise | None = None,
        infected: Mapping[int, Lie] | None = None,
    ) -> None:
        self.rtt_ms = rtt_ms
        self.now = 0.0
        self._noise = noise if noise is not None else Noise()
        self._infected = dict(infected or {})
        self._rng = random.Random(f"agents {seed}")
        self._queue: list[tuple[float, int, int, int, bytes | None]] = []
        self._planned = 0
        settings = settings if settings is not None else GossipSettings()
        self.gossips: list[Gossip] = []
        for node in range(len(rtt_ms)):
            rng = random.Random(f"agent {seed} {node}")
            gossip = Gossip(f"n{node}", _address(node), SECRET, settings, rng, 0.0, life=1, vivaldi=vivaldi)
            reachable = np.flatnonzero(np.isfinite(rtt_ms[node, :node]))
            if len(reachable):
                gossip.know("", _address(int(self._rng.choice(reachable))), 0.0)
            self.gossips.append(gossip)
            self._plan(self._rng.random(), node, node, None)

    @property
    def coordinates(self) -> list[Coordinate]:
        """Where the nodes are, as they think."""
        return [gossip.coordinate for gossip in self.gossips]

    def run(self, until_s: float) -> None:
        """Let time pass."""
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            now, _, node, source, data = heapq.heappop(queue)
            self.now = now
            gossip = self.gossips[node]
            lie = self._infected.get(node)
            if lie is not None:
                lie(gossip, now)
            if data is None:
                gossip.tick(now)
                self._plan(max(gossip.next_deadline(), now + 1e-6), node, node, None)
            else:
                gossip.handle(data, _address(source), now)
            for address, packet in gossip.take_outgoing():
                self._send(node, int(address[1 : address.index(":")]), packet)
        self.now = until_s

    def _send(self, source: int, target: int, packet: bytes) -> None:
        one_way_s = float(self.rtt_ms[source, target]) / 2e3
        noise = self._noise
        if math.isnan(one_way_s) or (noise.loss and self._rng.random() < noise.loss):
            return
        if noise.jitter:
            one_way_s += self._rng.expovariate(1.0) * noise.jitter * one_way_s
        if noise.spikes and self._rng.random() < noise.spikes:
            one_way_s += self._rng.random() * noise.spike_ms / 1e3
        self._plan(self.now + max(one_way_s, LEAST_ONE_WAY_S), target, source, packet)

    def _plan(self, when: float, node: int, source: int, packet: bytes | None) -> None:
        self._planned += 1
        heapq.heappush(self._queue, (when, self._planned, node, source, packet))


def _address(node: int) -> str:
    return f"n{node}:1"
