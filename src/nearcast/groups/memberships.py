"""What a member keeps of its group: its leader's view, and when to look whether that one is still near and still knows us."""

from __future__ import annotations

import random

from nearcast.groups.neighbours import Neighbours
from nearcast.groups.settings import FormationSettings
from nearcast.groups.steps import FOREVER
from nearcast.groups.views import View


class Membership:
    """From the leader's Welcome on, until there is another leader."""

    def __init__(self, view: View, measured: bool, settings: FormationSettings, rng: random.Random, now: float) -> None:
        """``measured``: whether the latency to the leader is known already."""
        self.view = view
        # Spread: a group that joined together does not speak to its leader together for ever.
        self.check_at = now + settings.check_interval_s * (0.5 + rng.random())
        self.renew_at = now + settings.renew_interval_s * (0.5 + rng.random())
        self._settings = settings
        self._begun_at = now
        self._measured = measured

    def is_near(self, neighbours: Neighbours, now: float) -> bool:
        """Whether the leader is below the leave threshold, as its group has it. One that has not been measured yet is given
        time; one that was, and does not answer any more, is not."""
        latency_ms = neighbours.latency_ms(self.view.leader)
        if latency_ms < FOREVER:
            self._measured = True
            return latency_ms <= self.view.leave_ms
        return not self._measured and now < self._begun_at + self._settings.measure_timeout_s
