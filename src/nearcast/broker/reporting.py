"""A broker's telemetry in a real process: :class:`~nearcast.fabric.telemetry.TelemetryReporter` on the event loop's clock,
with the figures of :mod:`nearcast.broker.resources`.

It has a timer of its own, finer than the broker's tick: a large report is made in many short slices.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nearcast.broker.resources import Resources
from nearcast.fabric.control import Registration
from nearcast.fabric.fabric import Fabric
from nearcast.fabric.plan_intake import PlanIntake
from nearcast.fabric.telemetry import TelemetryReporter
from nearcast.membership.gossip import Gossip

if TYPE_CHECKING:
    from nearcast.broker.process import Broker


class Reporting:
    """See the module. Without a controller reports go to subscribers only."""

    def __init__(
        self,
        broker: Broker,
        fabric: Fabric,
        gossip: Gossip,
        registration: Registration | None,
        flush: Callable[[], None],
    ) -> None:
        self._broker = broker
        self._flush = flush
        self._timer: asyncio.TimerHandle | None = None
        self.resources = Resources(broker.monotonic)
        now = broker.monotonic()
        self.reporter = TelemetryReporter(fabric, now, gossip, registration, self.resources, time.perf_counter)
        self.plans: PlanIntake | None = None
        self._unheard_plans = 0
        if registration is not None:
            self.plans = PlanIntake(broker.engine.router, registration)

    def start(self) -> None:
        """Everything is bound: begin to report."""
        self.resources.restart()
        self._plan_next()

    def close(self) -> None:
        """Report no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _plan_next(self) -> None:
        delay = max(0.0, self.reporter.next_deadline() - self._broker.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay, self._run)

    def _run(self) -> None:
        self.reporter.tick(self._broker.monotonic())
        self._plan_next()
        self._flush()
        plans = self.plans
        if plans is not None and plans.unheard > self._unheard_plans:
            self._broker.events.event(
                logging.WARNING,
                "plans were published while there is no controller to carry them out",
                plans=plans.unheard - self._unheard_plans,
            )
            self._unheard_plans = plans.unheard

    def gauges(self) -> dict[str, tuple[float, str]]:
        """Figures for /metrics."""
        reporter, resources = self.reporter, self.resources
        return {
            "cpu_share": (resources.cpu, "Share of the processor time that this broker may use, as in its last report."),
            "memory_share": (resources.memory, "Share of the memory that this broker may use, as in its last report."),
            "telemetry_topics": (reporter.topics_reported, "Owned topics in the last round of reports."),
            "telemetry_round_seconds": (reporter.round_seconds, "How long the last round of reports took, pauses included."),
            "telemetry_longest_slice_seconds": (
                reporter.longest_slice_seconds,
                "Longest time for which reports were made without a pause.",
            ),
        }

    def counters(self) -> dict[str, tuple[float, str]]:
        """Figures for /metrics."""
        reporter, plans = self.reporter, self.plans
        return {
            "telemetry_reports": (reporter.reports, "Messages of telemetry published."),
            "telemetry_bytes": (reporter.report_bytes, "Bytes of telemetry published."),
            "telemetry_unsent": (reporter.unsent, "Messages of telemetry that the controller had no room for."),
            "plans_passed_on": (0 if plans is None else plans.passed_on, "Plans of clients passed on to the controller."),
            "plans_unheard": (0 if plans is None else plans.unheard, "Plans of clients that found no controller."),
        }
