"""Whom this broker brings what the cloud has: its own clients, its members, and those that are on their way to or from it.

A broker is *covered* where the interest of its clients is in place at the cloud and messages out of the cloud are passed on to
it. One that leads covers itself and its members (section II-B: the leader subscribes on behalf of the group, and floods what
comes). Changing leaders is make before break: whoever joins another leader is covered by the former one until it is by the
new one (COVERED), and says goodbye only then. A covered broker is

=========  =============================================================================================================
PRESENT    of the group. It gets all that comes out of the cloud
ABSENT     of the group, and not reachable: what matches its interest is kept for it, because nobody else does
DEPARTING  covered elsewhere. It gets all that the cloud had for us until then: a *marker* that went through the cloud and
           came back says that this is through
=========  =============================================================================================================

COVERED names the version of a broker's interest (:mod:`nearcast.fabric.interest`) that is in place; for one that is new, a
marker has been through the cloud as well since it came: what was given to the cloud before, and therefore passed by it, is
past the subscriptions of its former leader. COVERED 0 says that there is no cloud at the moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.fabric import errands, frames
from nearcast.fabric.cloud_filters import CloudFilters
from nearcast.fabric.frames import frame
from nearcast.fabric.identities import Identity
from nearcast.fabric.outgoing import PEER_PREFIX
from nearcast.mqtt.publication import Publication
from nearcast.mqtt.records import number
from nearcast.mqtt.routing import GROUP, GROUP_FILTERED, Target
from nearcast.mqtt.subscriptions import Subscription

if TYPE_CHECKING:
    from nearcast.fabric.broadcast import Broadcast

PRESENT: Final = 0
ABSENT: Final = 1
DEPARTING: Final = 2

QOS: Final = 2
"""At which everything is subscribed to at the cloud: a message keeps its own."""


class Covered:
    """A broker that is covered here. ``version`` of its interest is in place at the cloud, ``told`` was said to be."""

    def __init__(self, name: str, arrival: int) -> None:
        self.name = name
        self.state = PRESENT
        #: The marker that must be back before the broker counts as covered; 0: it is.
        self.arrival = arrival
        #: The marker that must be back before it is let go.
        self.departure = 0
        self.told = -1
        self.filters: dict[str, None] = {}


class Coverage:
    """See the module."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self._fabric = broadcast.fabric
        self._router = broadcast.fabric.engine.router
        self.covered: dict[str, Covered] = {}
        self.filters = CloudFilters(self._fabric.classes.broadcast_filters())
        # The version of the filters that was asked for, and that the cloud has.
        self._asked = -1
        self._placed = -1
        self._marker = 0
        self._first_marker = 0
        #: Messages passed on to brokers that are covered here, each counted once for each of them.
        self.carried_messages = 0

    # --- who is covered -------------------------------------------------------------------------------------------------

    def view_changed(self, now: float) -> None:
        """The group is another one."""
        broadcast = self._broadcast
        if not broadcast.leads:
            return
        members = broadcast.formation.view.members
        for name in members:
            known = self.covered.get(name)
            if known is None or known.state == DEPARTING:
                self._cover(name, now)
            elif known.state == ABSENT:
                known.state = PRESENT
        for name, covered in self.covered.items():
            if name not in members and covered.state == PRESENT:
                covered.state = ABSENT  # it was lost, or it left and says so itself

    def rules_changed(self) -> None:
        """Other topics are of class ``broadcast`` now."""
        self.filters.set_rules(self._fabric.classes.broadcast_filters())

    def _cover(self, name: str, now: float) -> None:
        known = self.covered.get(name)
        if known is None:
            known = Covered(name, 0)
            self.covered[name] = known
            if name == self._fabric.name:
                names = self._fabric.interest.filters()
            else:
                peer = self._fabric.peers.get(name)
                names = [] if peer is None else list(peer.session.subscriptions)
            for topic_filter in names:
                known.filters[topic_filter] = None
                self.filters.add(topic_filter, QOS)
        known.state = PRESENT
        known.departure = 0
        known.told = -1
        known.arrival = self._mark(now)
        cloud = self._broadcast.cloud
        peer = self._fabric.peers.get(name)
        if peer is not None and cloud is not None and not cloud.connected:
            peer.send(frame(frames.COVERED, number(0)))

    def _mark(self, now: float) -> int:
        """A marker through the cloud."""
        self._marker += 1
        cloud = self._broadcast.cloud
        if cloud is not None:
            cloud.mark(self._marker, now)
        return self._marker

    def depart(self, name: str, now: float) -> None:
        """A broker is covered elsewhere."""
        covered = self.covered.get(name)
        if covered is not None and covered.state != DEPARTING:
            covered.state = DEPARTING
            covered.departure = self._mark(now)

    def forget(self, name: str) -> None:
        """Nothing is kept for this broker any more."""
        covered = self.covered.pop(name, None)
        if covered is not None:
            for topic_filter in covered.filters:
                self.filters.remove(topic_filter, QOS)

    def covers_members(self) -> bool:
        """Whether anybody depends on this broker's way to the cloud."""
        return any(name != self._fabric.name for name in self.covered)

    # --- interest -------------------------------------------------------------------------------------------------------

    def subscribed(self, name: str, topic_filter: str) -> None:
        """A broker, or this one, has a subscriber to this filter."""
        covered = self.covered.get(name)
        if covered is not None and topic_filter not in covered.filters:
            covered.filters[topic_filter] = None
            self.filters.add(topic_filter, QOS)

    def unsubscribed(self, name: str, topic_filter: str) -> None:
        """It has none any more."""
        covered = self.covered.get(name)
        if covered is not None and topic_filter in covered.filters:
            del covered.filters[topic_filter]
            self.filters.remove(topic_filter, QOS)

    def _version_of(self, name: str) -> int:
        """The interest of a broker that is in place here."""
        interest = self._fabric.interest
        return interest.version if name == self._fabric.name else interest.theirs.get(name, -1)

    # --- the cloud ------------------------------------------------------------------------------------------------------

    def cloud_came(self, session_kept: bool, now: float) -> None:
        """The cloud is connected. What was asked for is asked for again by whoever talks to it."""
        if not self._first_marker:
            self._first_marker = self._mark(now)
        if not session_kept:
            # What the cloud had for us it has lost, so markers say nothing about it; those who wait for one have waited.
            self._asked = -1
            self._placed = -1

    def cloud_went(self, now: float) -> None:
        """There is no cloud: nobody is to wait for it."""
        for covered in self.covered.values():
            covered.told = -1
            peer = self._fabric.peers.get(covered.name)
            if peer is not None:
                peer.send(frame(frames.COVERED, number(0)))

    def placed(self, version: int, now: float) -> None:
        """The cloud has the filters of this version."""
        self._placed = max(self._placed, version)

    def marked(self, token: int, now: float) -> None:
        """A marker is back: all that the cloud had before it is through."""
        for covered in list(self.covered.values()):
            if covered.arrival and covered.arrival <= token:
                covered.arrival = 0
            if covered.state == DEPARTING and covered.departure <= token:
                self.forget(covered.name)
        if self._first_marker and self._first_marker <= token:
            self._first_marker = -1

    def settle(self, now: float) -> None:
        """Ask the cloud for what is wanted now, and tell everybody what is in place."""
        cloud = self._broadcast.cloud
        if cloud is None:
            return
        version = self.filters.version
        if version != self._asked and cloud.connected:
            self._asked = version
            cloud.set_filters(self.filters.wanted(), version, now)
        if not cloud.connected or self._placed < self.filters.version:
            return
        for covered in self.covered.values():
            if covered.arrival or covered.state == DEPARTING:
                continue
            interest = self._version_of(covered.name)
            if interest <= covered.told or interest < 0:
                continue
            if covered.name == self._fabric.name:
                covered.told = interest
                if self._broadcast.leads:
                    self._broadcast.covered(interest, now)
                continue
            peer = self._fabric.peers.get(covered.name)
            if peer is not None and peer.send(frame(frames.COVERED, number(interest))):
                covered.told = interest

    def is_settled(self) -> bool:
        """Whether this broker's own interest is in place at the cloud."""
        own = self.covered.get(self._fabric.name)
        return own is not None and own.told >= 0

    # --- messages -------------------------------------------------------------------------------------------------------

    def carry_missing(self, publication: Publication, origin: str, epoch: int, view: int, now: float) -> None:
        """Messages of the group, flooded by their origin as of this view, for those covered here whom that did not reach."""
        broadcast = self._broadcast
        members = broadcast.formation.view.members if broadcast.leads else {}
        theirs = members.get(origin)
        elsewhere = theirs is None or theirs.joined_version > view
        targets: list[Target] = []
        matched: set[str] | None = None
        filtered = self._fabric.classes.reach(publication.topic) == GROUP_FILTERED
        for covered in self.covered.values():
            name = covered.name
            if name in (origin, self._fabric.name) or covered.state == DEPARTING:
                continue
            member = members.get(name)
            if member is not None and not elsewhere and member.joined_version <= view:
                continue
            if filtered or member is None:
                if matched is None:
                    matched = self._matching(publication.topic)
                if name not in matched:
                    continue
            self._add_target(targets, name)
        if targets:
            self._carry(publication, Identity(origin, epoch, publication.sequence), "", targets, now)

    def from_cloud(self, publication: Publication, identity: Identity, deliver: bool, now: float) -> None:
        """A message out of the cloud, for everybody who is covered here, and, where it is new here, for this broker."""
        targets: list[Target] = []
        matched: set[str] | None = None
        reach = self._fabric.classes.reach(publication.topic)
        for covered in self.covered.values():
            if covered.name in (identity.origin, self._fabric.name):
                continue
            if reach != GROUP or covered.state == ABSENT:
                if matched is None:
                    matched = self._matching(publication.topic)
                if covered.name not in matched:
                    continue
            self._add_target(targets, covered.name)
        if self._first_marker >= 0:
            # What the cloud kept while this broker was away was for those who were its members then, whoever they are.
            for name in self._matching(publication.topic):
                if name not in self.covered and name != identity.origin:
                    self._add_target(targets, name)
        self._carry_and_deliver(publication, identity, targets, deliver, now)

    def _add_target(self, targets: list[Target], name: str) -> None:
        peer = self._fabric.peers.get(name)
        if peer is not None:
            targets.append(Target(Subscription(peer.session, "#", 2, retain_as_published=True)))

    def _matching(self, topic: bytes) -> set[str]:
        """Other brokers with a plain subscriber to a topic."""
        found: set[str] = set()
        for subscription in self._fabric.engine.tree.match(topic).subscriptions:
            if subscription.session.is_peer:
                found.add(subscription.session.client_id[len(PEER_PREFIX) :])
        return found

    def _carry(self, publication: Publication, identity: Identity, rest: str, targets: list[Target], now: float) -> None:
        via = errands.carried(identity.origin, identity.epoch, identity.sequence, identity.leader) + rest
        carried = publication.anew()
        carried.stamp = publication.stamp
        self.carried_messages += carried.count * len(targets)
        self._router.carry(carried, [target.with_via(via) for target in targets], None, now)

    def _carry_and_deliver(
        self, publication: Publication, identity: Identity, targets: list[Target], deliver: bool, now: float
    ) -> None:
        via = errands.carried(identity.origin, identity.epoch, identity.sequence, identity.leader)
        self.carried_messages += publication.count * len(targets)
        route = self._router.route_for(publication.topic) if deliver else None
        self._router.carry(publication, [target.with_via(via) for target in targets], route, now)
