"""What comes from the cloud: messages for the group, leaders' announcements, and word of what the cloud has of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearcast.fabric.identities import Identity, Seen
from nearcast.fabric.replication import origin_id
from nearcast.mqtt.publication import Publication
from nearcast.mqtt.routing import GROUP
from nearcast.mqtt.topics import topic_fault

if TYPE_CHECKING:
    from nearcast.fabric.broadcast import Broadcast


class CloudIntake:
    """The :class:`~nearcast.fabric.cloud.CloudOwner` of a broker with groups."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self._fabric = broadcast.fabric
        # What came for members of shared subscriptions: apart, because plain subscribers get a copy of their own.
        self._shared = Seen()
        #: Messages of topics that are not of class ``broadcast``, or not allowed here.
        self.foreign_messages = 0

    def connected(self, session_kept: bool, now: float) -> None:
        self._broadcast.cloud_came(session_kept, now)

    def lost(self, now: float) -> None:
        self._broadcast.cloud_went(now)

    def control(self, topic: str, payload: bytes, now: float) -> None:
        self._broadcast.announced(topic, payload, now)

    def subscribed(self, version: int, now: float) -> None:
        self._broadcast.coverage.placed(version, now)

    def marked(self, token: int, now: float) -> None:
        self._broadcast.coverage.marked(token, now)

    def relayed(self, token: int, accepted: bool, now: float) -> None:
        relay = self._broadcast.relay
        if relay is not None:
            relay.relayed(token, accepted, now)

    def arrived(self, publication: Publication, identity: Identity | None, now: float) -> None:
        topic = publication.topic
        fabric = self._fabric
        # The class is its origin's to decide, also where rules changed since. Others' clients have none.
        is_ours = identity is not None or fabric.classes.reach(topic) >= GROUP
        if not is_ours or topic_fault(topic, fabric.limits.max_topic_levels):
            self.foreign_messages += publication.count
            return
        witness = fabric.engine.effects.witness
        if witness is not None:
            witness.processed(publication, now)
        cloud = self._broadcast.cloud
        if cloud is not None and cloud.arrived_by:
            self._arrived_for_shares(publication, identity, cloud.arrived_by, now)
        else:
            self._arrived_for_all(publication, identity, now)

    def _arrived_for_all(self, publication: Publication, identity: Identity | None, now: float) -> None:
        fabric = self._fabric
        broadcast = self._broadcast
        # What comes by subscriptions that are being given up comes by our leader as well, and in order.
        covered = fabric.name in broadcast.coverage.covered
        if identity is None:
            if self._is_stored(publication):
                return
            # Of somebody else's client at the cloud: it becomes ours, and is known as such to whoever gets it from us.
            identity = Identity(fabric.name, fabric.epoch, fabric.engine.router.next_sequence)
            new = covered
        else:
            publication.stamp = identity.stamp
            publication.author = origin_id(identity.origin, identity.epoch)
            new = covered and self._is_new(publication, identity)
        if new:
            if publication.retain:
                fabric.engine.inbound.retain(publication, now)
            broadcast.count(publication, identity.leader)
        broadcast.coverage.from_cloud(publication, identity, new, now)

    def _is_stored(self, publication: Publication) -> bool:
        """Whether this is what a new subscription brought of what the cloud retains, and is retained here as well."""
        cloud = self._broadcast.cloud
        if cloud is None or not cloud.may_be_stored:
            return False
        kept = self._fabric.engine.retained.get(publication.topic)
        return kept is not None and kept.payloads() == publication.payloads()

    def _is_new(self, publication: Publication, identity: Identity) -> bool:
        """Whether this broker's clients have not had a message yet."""
        fabric = self._fabric
        origin, epoch = identity.origin, identity.epoch
        if origin == fabric.name and epoch == fabric.epoch:
            return False  # it was published here; whoever is covered here may need it all the same
        if not self._broadcast.seen.take(origin, epoch, identity.sequence, publication.count):
            return False
        return not (publication.stamp and fabric.replication.was_told(publication, publication.author))

    def _arrived_for_shares(self, publication: Publication, identity: Identity | None, names: list[str], now: float) -> None:
        """The cloud chose us for shared subscriptions: one member of each, here or at a broker of the group, gets it."""
        router = self._fabric.engine.router
        publication.sequence = router.next_sequence
        router.next_sequence += publication.count
        for at_cloud in names:
            name = self._broadcast.coverage.filters.shared_as(at_cloud)
            if identity is not None:
                if name in identity.served:
                    continue  # a member near the publisher has it
                if not self._shared.take(f"{name}\0{identity.origin}", identity.epoch, identity.sequence, publication.count):
                    continue
            router.serve(name, publication, now)
        publication.forget_forms()
