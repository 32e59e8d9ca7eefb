"""Who is told of every message that a broker processes: a seam for experiments that measure what brokers carry for nobody.

Without a witness (:attr:`nearcast.mqtt.effects.Effects.witness`) it costs one comparison for each publication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nearcast.mqtt.publication import Publication


class Witness(Protocol):
    """Told once for each way that messages come: a message that comes twice is told twice."""

    def processed(self, publication: Publication, now: float) -> None:
        """Messages came in: from a client, from another broker, out of the cloud."""

    def relayed(self, publication: Publication, index: int, now: float) -> None:
        """One of these messages was given to the cloud."""
