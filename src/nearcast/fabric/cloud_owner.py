"""Who uses a :class:`~nearcast.fabric.cloud.Cloud`, and what it is told."""

from __future__ import annotations

from typing import Protocol

from nearcast.fabric.identities import Identity
from nearcast.mqtt.publication import Publication


class CloudOwner(Protocol):
    """May call any method of the cloud from within these."""

    def connected(self, session_kept: bool, now: float) -> None:
        """There is a connection. ``session_kept``: the cloud still had our session, and has for us what came meanwhile."""

    def lost(self, now: float) -> None:
        """There is none any more. What was relayed and not confirmed goes out again with the next one."""

    def arrived(self, publication: Publication, identity: Identity | None, now: float) -> None:
        """A message came; one without an identity was published at the cloud by somebody else's client."""

    def control(self, topic: str, payload: bytes, now: float) -> None:
        """Something came on the topic where leaders announce themselves."""

    def subscribed(self, version: int, now: float) -> None:
        """The cloud has all subscriptions of this version of the filters, and of those before."""

    def relayed(self, token: int, accepted: bool, now: float) -> None:
        """The cloud has a message, or never will."""

    def marked(self, token: int, now: float) -> None:
        """A marker is back, or was given up."""
