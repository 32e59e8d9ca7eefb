"""Plans that somebody publishes: a client that may (an access rule must name ``$nearcast/plan``) tells any broker of the
fabric which topics are to move, and that broker passes it on to the controller (PLAN), which carries it out if it is told to
listen to others (``planner = "spark"``).

What a plan says is the controller's to read. Retained, kept and passed on to subscribers it is like any other message, so that
a planner's plans can be watched; only the broker that got it from the client sends it to the controller.
"""

from __future__ import annotations

from typing import Final

from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.fabric.telemetry import Controller
from nearcast.mqtt.publication import Publication
from nearcast.mqtt.routing import Router, RouteWatch
from nearcast.mqtt.session import Session

PLAN_TOPIC: Final = b"$nearcast/plan"


class PlanIntake(RouteWatch):
    """See the module. Counts plans that reached the controller, and those that found none."""

    def __init__(self, router: Router, controller: Controller) -> None:
        self._controller = controller
        self.passed_on = 0
        self.unheard = 0
        router.watches[PLAN_TOPIC] = self
        router.forget(PLAN_TOPIC)

    def published(self, publication: Publication, publisher: Session | None, now: float) -> None:
        for payload in publication.payloads():
            if self._controller.send(frame(frames.PLAN, payload)):
                self.passed_on += 1
            else:
                self.unheard += 1
