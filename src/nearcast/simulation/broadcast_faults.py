"""Faults that wait for their moment: leaders that die while groups merge, which a schedule by the clock hardly ever hits."""

from __future__ import annotations

import random
from typing import Final

from nearcast.scenario.events import Crash, Kill
from nearcast.simulation import mqtt_facts as facts
from nearcast.simulation.hosts import Host
from nearcast.simulation.invariants import Invariant
from nearcast.simulation.world import World

LONGEST_S: Final = 0.5
"""By then a step of a merge is over: question, answer and join, or the members' turn."""

LONGEST_DOWN_S: Final = 3.0


class MergeKills(Invariant):
    """Sees leaders ask each other and brokers join, and in a ``share`` of these moments ends the process or the machine of one
    of the two. ``hosts`` are those of brokers, by name."""

    def __init__(self, world: World, hosts: dict[str, str], share: float, until_s: float) -> None:
        self._world = world
        self._hosts = hosts
        self._share = share
        self._until_s = until_s
        self._rng = random.Random(f"{world.seed}/merges")

    def observed(self, host: Host, fact: object) -> None:
        if isinstance(fact, facts.MergeBegan):
            involved = [fact.broker]
        elif isinstance(fact, facts.GroupChanged) and fact.leader != fact.broker:
            involved = [fact.broker, fact.leader]
        else:
            return
        if self._rng.random() >= self._share:
            return
        victim = self._hosts[self._rng.choice(involved)]
        at_s = self._world.now + self._rng.uniform(0.0, LONGEST_S)
        down_s = self._rng.uniform(0.05, LONGEST_DOWN_S)
        fault = self._rng.choice((Kill, Crash))
        if at_s + down_s < self._until_s:
            self._world.schedule(fault(at_s=at_s, host=victim, restart_after_s=down_s))
