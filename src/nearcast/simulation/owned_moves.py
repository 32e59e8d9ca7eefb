"""Topics that are moved at random: what a person with too much time would do to the controller's interface."""

from __future__ import annotations

import random
from collections.abc import Callable

from nearcast.simulation.fabric_controller import SimulatedController
from nearcast.simulation.programs import ProgramNode
from nearcast.simulation.world import World

FindController = Callable[[], tuple[ProgramNode, SimulatedController] | None]


class TopicMoves:
    """Moves ``at_once`` owned topics, any, each to some broker, any, ``per_minute`` times a minute on average."""

    def __init__(
        self, world: World, controller: FindController, brokers: list[str], per_minute: float, at_once: int, until_s: float
    ) -> None:
        self._world = world
        self._controller = controller
        self._brokers = brokers
        self._per_s = per_minute / 60.0
        self._at_once = at_once
        self._until_s = until_s
        self._rng = random.Random(f"{world.seed}/topic moves")
        self.asked = 0

    def plan(self) -> None:
        """Move some after a while, and again after another."""
        self._world.at(self._world.now + self._rng.expovariate(self._per_s), self._move)

    def _move(self) -> None:
        if self._world.now >= self._until_s:
            return
        found = self._controller()
        if found is not None:
            node, controller = found
            topics = controller.owned_topics()
            for topic in self._rng.sample(topics, min(len(topics), self._at_once)):
                self.asked += controller.move_topic(topic, self._rng.choice(self._brokers))
            node.plan(controller)
        self.plan()
