"""The links of a node that is no broker: a controller accepts them, a gateway dials.

:class:`~nearcast.fabric.linking.Linking` without an engine: frames go to the :class:`~nearcast.fabric.parts.LinkUser` of the
other end's role, and nothing here knows what they say. A driver calls :meth:`settle` and :meth:`flush` after every call, then
dials what :meth:`take_dials` says.
"""

from __future__ import annotations

import random

from nearcast.config import Limits
from nearcast.fabric.linking import Linking
from nearcast.fabric.links import Greeting, Link
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.mqtt.commits import Transport
from nearcast.mqtt.effects import Effects


class Hub(Linking):
    """See the module."""

    def __init__(
        self,
        greeting: Greeting,
        secret: bytes,
        settings: FabricSettings,
        limits: Limits,
        rng: random.Random,
        max_links: int = 100_000,
    ) -> None:
        super().__init__(greeting, secret, settings, limits, Effects(gated=False), rng, max_links)

    def take_ended(self) -> list[Link]:
        """Links that ended since the last call, for logs."""
        return [link for link, up in self.take_news() if not up]

    # --- time and output ------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        """After every event: send what gathered."""
        for user in self.users.values():
            user.settle(now)

    def flush(self, now: float) -> None:
        """Give what there is to send to the transports."""
        while self.effects.dirty:
            dirty, self.effects.dirty = self.effects.dirty, []
            for connection in dirty:
                connection.dirty = False
            for connection in dirty:
                if connection.congested and not connection.closing:
                    continue
                handle: Transport = connection.handle  # type: ignore[assignment]
                chunks = connection.take()
                if chunks:
                    handle.send(chunks)
                if connection.closing:
                    handle.close()

    def tick(self, now: float) -> None:
        """Time passed: probes, time-outs, dials that are due."""
        self.tick_links(now)
        for user in self.users.values():
            user.tick(now)

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next."""
        deadline = self.links_deadline()
        for user in self.users.values():
            deadline = min(deadline, user.next_deadline())
        return deadline
