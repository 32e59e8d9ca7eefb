"""Whom this broker brings what the cloud has: its own clients, its members, and those that are on their way to or from it.

A broker is *covered* where the interest of its clients is in place at the cloud and messages out of the cloud are passed on to
it. One that leads covers itself and its members (section II-B: the leader subscribes on behalf of the group, and floods what
comes). Changing leaders is make before break: whoever joins another leader is covered by the former one until it is by the
new one (COVERED), and says goodbye only then. A covered broker is

=========  =============================================================================================================
PRESENT    of the group. It gets all that comes out of the cloud
ABSENT     of the group, and not reachable: what matches its interest is kept for it, because nobody else does. After a
           start these are all brokers that the journal knows: any of them may still count on us
DEPARTING  covered elsewhere. It gets all that the cloud had for us until then: a *marker* that went through the cloud and
           came back says that this is through
=========  =============================================================================================================

COVERED names the version of a broker's interest (:mod:`nearcast.fabric.interest`) that is in place; for one that is new, a
marker has been through the cloud as well since it came: what was given to the cloud before, and therefore passed by it, is
past the subscriptions of its former leader. COVERED 0 says that there is no cloud at the moment.
"""

from __future__ import annotations

import sys
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

MAX_STEPS: Final = 16
"""Versions of one broker's interest that wait for the cloud one by one. Of more, some are told with the next."""


class Step:
    """A version of a broker's interest, and the version of our filters at the cloud that has it."""

    def __init__(self, interest: int, filters: int) -> None:
        self.interest = interest
        self.filters = filters


class Covered:
    """A broker that is covered here. ``told``: the version of its interest that was said to be in place at the cloud."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = PRESENT
        #: The marker that must be back before the broker counts as covered; 0: it is.
        self.arrival = 0
        #: The marker that must be back before it is let go.
        self.departure = 0
        self.told = -1
        #: While it is absent it gets the messages that are published here from this number on.
        self.absent_from = 0
        self.filters: dict[str, None] = {}
        # What is to be told once the cloud has it, oldest first; and the last of that.
        self.steps: list[Step] = []
        self.noted = -1

    def untell(self) -> None:
        """What was said does not hold any more, or was not heard."""
        self.told = -1
        self.noted = -1
        self.steps = []


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
        self._marker_waits = False
        # Covered brokers that have something to be told.
        self._untold: dict[str, None] = {}
        # Of all covered here, for every message: see _recount.
        self._latest_join = 0
        self._has_others = False
        self._has_outsiders = False
        self._present: list[Target] = []
        #: Messages passed on to brokers that are covered here, each counted once for each of them.
        self.carried_messages = 0

    # --- who is covered -------------------------------------------------------------------------------------------------

    def recover(self, names: list[str]) -> None:
        """Brokers that the journal knows. They may think that we cover them; those that do not say so when they hear of us."""
        for name in names:
            if name not in self.covered:
                self._misses(self._add(name))

    def view_changed(self, now: float) -> None:
        """The group is another one, or somebody else leads it."""
        broadcast = self._broadcast
        if broadcast.leads:
            members = broadcast.formation.view.members
            for name in members:
                known = self.covered.get(name)
                if known is None or known.state != PRESENT:
                    self._cover(name, now)
            for name, covered in self.covered.items():
                if name not in members and covered.state == PRESENT:
                    self._misses(covered)  # it was lost, or it left and says so itself
        self._recount()

    def rules_changed(self) -> None:
        """Other topics are of class ``broadcast`` now."""
        self.filters.set_rules(self._fabric.classes.broadcast_filters())

    def _add(self, name: str) -> Covered:
        known = Covered(name)
        self.covered[name] = known
        if name == self._fabric.name:
            names = self._fabric.interest.filters()
        else:
            names = list(self._fabric.peer(name).session.subscriptions)
        for topic_filter in names:
            known.filters[topic_filter] = None
            self.filters.add(topic_filter, QOS)
        return known

    def _cover(self, name: str, now: float) -> None:
        known = self.covered.get(name)
        if known is None:
            known = self._add(name)
        known.state = PRESENT
        known.departure = 0
        known.arrival = self._mark(now)
        known.untell()
        self._untold[name] = None
        self._tell_cloudless(name)

    def _tell_cloudless(self, name: str) -> None:
        cloud = self._broadcast.cloud
        peer = self._fabric.peers.get(name)
        if peer is not None and cloud is not None and not cloud.connected:
            peer.send(frame(frames.COVERED, number(0)))

    def _mark(self, now: float) -> int:
        """A marker through the cloud. One that waits for the cloud will do for all; one that was sent may come back early."""
        cloud = self._broadcast.cloud
        if cloud is not None and (cloud.connected or not self._marker_waits):
            self._marker_waits = not cloud.connected
            self._marker += 1
            cloud.mark(self._marker, now)
        return self._marker

    def lost(self, name: str) -> None:
        """There is no way to a broker any more, and if it was a member, it is none now."""
        covered = self.covered.get(name)
        if covered is not None and covered.state == PRESENT and not self._is_member(name):
            self._misses(covered)
            self._recount()

    def _misses(self, covered: Covered) -> None:
        covered.state = ABSENT
        covered.absent_from = self._router.next_sequence

    def _is_member(self, name: str) -> bool:
        return self._broadcast.leads and name in self._broadcast.formation.view.members

    def depart(self, name: str, now: float) -> None:
        """A broker is covered elsewhere."""
        covered = self.covered.get(name)
        if covered is not None and covered.state != DEPARTING:
            covered.state = DEPARTING
            covered.departure = self._mark(now)
            self._recount()

    def forget(self, name: str) -> None:
        """Nothing is kept for this broker any more."""
        covered = self.covered.pop(name, None)
        if covered is not None:
            for topic_filter in covered.filters:
                self.filters.remove(topic_filter, QOS)
            self._untold.pop(name, None)
            self._recount()

    def absent(self) -> list[str]:
        """Brokers that only their queues here reach, unless they are of the group that this one is in now."""
        members = self._broadcast.formation.view.members
        return [covered.name for covered in self.covered.values() if covered.state == ABSENT and covered.name not in members]

    def has_guests(self) -> bool:
        """Whether other brokers that can be reached get here what the cloud has, or the cloud does not know yet who does."""
        if self._placed < self.filters.version:
            return True
        return any(self._fabric.peers[name].up for name in self.covered if name in self._fabric.peers)

    def needs_cloud(self) -> bool:
        """Whether anybody is covered here, or the cloud has more subscriptions of ours than it should."""
        return bool(self.covered) or self._placed < self.filters.version

    def _recount(self) -> None:
        """Who is covered changed: make what is asked for every message."""
        broadcast = self._broadcast
        members = broadcast.formation.view.members
        # Of messages that were flooded as of this version or a later one, no member has missed any.
        self._latest_join = sys.maxsize
        if broadcast.leads:
            self._latest_join = max([member.joined_version for member in members.values()])
        self._has_others = False
        self._has_outsiders = False
        self._present = []
        for covered in self.covered.values():
            if covered.name == self._fabric.name:
                continue
            self._has_others = True
            if covered.state != ABSENT:
                self._add_target(self._present, covered.name)
            if covered.state != DEPARTING and not self._is_member(covered.name):
                self._has_outsiders = True
        broadcast.forget_routes()  # those of messages that are published here have the absent brokers

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

    def interest_changed(self, name: str) -> None:
        """A new version of a broker's interest, or of ours, is in place here."""
        if name in self.covered:
            self._untold[name] = None

    def tell_again(self, name: str) -> None:
        """A broker has not heard what is in place for it."""
        covered = self.covered.get(name)
        if covered is not None:
            covered.untell()
            self._untold[name] = None
            self._tell_cloudless(name)

    def _version_of(self, name: str) -> int:
        """The interest of a broker that is in place here."""
        interest = self._fabric.interest
        return interest.version if name == self._fabric.name else interest.theirs.get(name, -1)

    # --- the cloud ------------------------------------------------------------------------------------------------------

    def cloud_came(self, session_kept: bool, now: float) -> None:
        """The cloud is connected. What was asked for is asked for again by whoever talks to it."""
        if not session_kept:
            # What the cloud had for us it has lost, so markers say nothing about it; those who wait for one have waited.
            self._asked = -1
            self._placed = -1
        self._marker_waits = False
        for name in self.covered:
            self._untold[name] = None

    def cloud_went(self, now: float) -> None:
        """There is no cloud: nobody is to wait for it."""
        for covered in self.covered.values():
            covered.untell()
            self._tell_cloudless(covered.name)

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

    def settle(self, now: float) -> None:
        """Ask the cloud for what is wanted now, and tell everybody what is in place."""
        cloud = self._broadcast.cloud
        if cloud is None or not cloud.connected:
            return
        version = self.filters.version
        if version != self._asked:
            self._asked = version
            cloud.change_filters(self.filters.take_changes(), version, now)
        if self._untold:
            for name in list(self._untold):
                covered = self.covered.get(name)
                if covered is None or covered.state != PRESENT or self._tell(covered, now):
                    self._untold.pop(name, None)

    def _tell(self, covered: Covered, now: float) -> bool:
        """Tell a broker what is in place; whether that is all there is to tell by now."""
        if covered.arrival:
            return False
        interest = self._version_of(covered.name)
        steps = covered.steps
        if interest > covered.noted:
            covered.noted = interest
            if len(steps) >= MAX_STEPS:
                steps.pop()
            steps.append(Step(interest, self.filters.version))
        reached = -1
        while steps and steps[0].filters <= self._placed:
            reached = steps.pop(0).interest
        if reached > covered.told:
            covered.told = reached
            peer = self._fabric.peers.get(covered.name)
            if peer is not None:
                peer.send(frame(frames.COVERED, number(reached)))
            elif self._broadcast.leads:
                self._broadcast.covered(reached, now)
        return not steps

    def is_settled(self) -> bool:
        """Whether this broker's own interest is in place at the cloud."""
        own = self.covered.get(self._fabric.name)
        return own is not None and own.told >= 0

    # --- messages -------------------------------------------------------------------------------------------------------

    def was_flooded_here(self, origin: str, view: int) -> bool:
        """Whether messages that a broker flooded as of this view come here by that way."""
        broadcast = self._broadcast
        member = broadcast.formation.view.members.get(origin) if broadcast.leads else None
        return member is not None and member.joined_version <= view

    def carry_missing(self, publication: Publication, origin: str, epoch: int, view: int, now: float) -> None:
        """Messages of the group, flooded by their origin as of this view, for those covered here whom that did not reach."""
        if not self._has_others:
            return
        flooded_here = self.was_flooded_here(origin, view)
        if flooded_here and self._latest_join <= view and not self._has_outsiders:
            return
        broadcast = self._broadcast
        members = broadcast.formation.view.members if broadcast.leads else {}
        targets: list[Target] = []
        matched: set[str] | None = None
        own = origin == self._fabric.name
        filtered = self._fabric.classes.reach(publication.topic) == GROUP_FILTERED
        for covered in self.covered.values():
            name = covered.name
            if name in (origin, self._fabric.name) or covered.state == DEPARTING:
                continue
            member = members.get(name)
            if member is not None and flooded_here and member.joined_version <= view:
                continue
            if covered.state == ABSENT and own and publication.sequence >= covered.absent_from:
                continue
            if filtered or member is None:
                if matched is None:
                    matched = self._matching(publication.topic)
                if name not in matched:
                    continue
            self._add_target(targets, name)
        if targets:
            carried = publication.anew()
            carried.stamp = publication.stamp
            self._carry(carried, Identity(origin, epoch, publication.sequence), targets, False, now)

    def from_cloud(self, publication: Publication, identity: Identity, deliver: bool, now: float) -> None:
        """A message out of the cloud, for everybody who is covered here, and, where it is new here, for this broker."""
        targets = self._present
        if not self._has_others:
            targets = []
        elif (
            self._has_outsiders
            or identity.origin in self.covered
            or self._fabric.classes.reach(publication.topic) == GROUP_FILTERED
        ):
            targets = self._interested(publication.topic, identity.origin)
        self._carry(publication, identity, targets, deliver, now)

    def _interested(self, topic: bytes, origin: str) -> list[Target]:
        targets: list[Target] = []
        matched: set[str] | None = None
        reach = self._fabric.classes.reach(topic)
        for covered in self.covered.values():
            if covered.name in (origin, self._fabric.name):
                continue
            if reach != GROUP or covered.state == ABSENT:
                if matched is None:
                    matched = self._matching(topic)
                if covered.name not in matched:
                    continue
            self._add_target(targets, covered.name)
        return targets

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

    def _carry(self, publication: Publication, identity: Identity, targets: list[Target], deliver: bool, now: float) -> None:
        via = errands.carried(identity.origin, identity.epoch, identity.sequence, identity.leader)
        self.carried_messages += publication.count * len(targets)
        route = self._router.route_for(publication.topic) if deliver else None
        self._router.carry(publication, [target.with_via(via) for target in targets], route, now)
