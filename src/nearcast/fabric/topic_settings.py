"""How a controller looks after owned topics."""

from __future__ import annotations

from typing import Literal

import msgspec

from nearcast.fabric.migrations import Workflow
from nearcast.placement.topics import PlacementSettings


class TopicSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What :class:`~nearcast.fabric.topic_manager.TopicManager` is told."""

    planner: Literal["own", "spark", "none"] = "own"
    """Who decides where topics belong: the controller itself, from telemetry; "spark", whoever publishes plans on
    ``$nearcast/plan``; or "none". Owners that die or stop are replaced in any case, and a person may move topics."""

    executors: int = 16
    """Migrations under way at once. Too low takes long when many topics have to move; more than some dozens gains little, for
    the brokers do the work one after the other."""

    plan_interval_s: float = 1.0
    """Least seconds between plans. A plan is made when telemetry came, so the brokers' ``fabric.telemetry.interval_seconds``
    says how often that is."""

    migration_timeout_s: float = 30.0
    """How long an owner may say nothing of a migration before it counts as failed."""

    settle_s: float = 10.0
    """How long a controller that was just started waits for brokers that others know, before it makes new owners."""

    workflow: Workflow = "handover"
    """How topics change hands. "release" is the baseline of ePulsar's figure 7, for comparison only."""

    placement: PlacementSettings = PlacementSettings()

    def __post_init__(self) -> None:
        for name, least, most in (
            ("executors", 1, 10_000),
            ("plan_interval_s", 0.01, 3_600),
            ("migration_timeout_s", 0.1, 3_600),
            ("settle_s", 0, 3_600),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"`{name}` must be between {least:g} and {most:,}")
