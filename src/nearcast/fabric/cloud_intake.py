"""What comes from the cloud: messages for the group, leaders' announcements, and word of what the cloud has of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearcast.fabric.identities import Identity
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
        broadcast = self._broadcast
        if fabric.classes.reach(topic) < GROUP or topic_fault(topic, fabric.limits.max_topic_levels):
            self.foreign_messages += publication.count
            return
        witness = fabric.engine.effects.witness
        if witness is not None:
            witness.processed(publication, now)
        # Our own, by another leader or as a retained message that a new subscription brings, was here from the start; those we
        # still cover may not have it.
        ours = identity is not None and identity.origin == fabric.name and identity.epoch == fabric.epoch
        if identity is None:
            # Of somebody else's client at the cloud: it becomes ours, and is known as such to whoever gets it from us.
            identity = Identity(fabric.name, fabric.epoch, fabric.engine.router.next_sequence)
        new = not ours and bool(broadcast.seen.take(identity.origin, identity.epoch, identity.sequence, publication.count))
        publication.stamp = identity.stamp
        if identity.stamp:
            publication.author = origin_id(identity.origin, identity.epoch)
        if new:
            broadcast.count(publication, identity.leader)
            if publication.retain:
                fabric.engine.inbound.retain(publication, now)
        broadcast.coverage.from_cloud(publication, identity, new, now)
