"""Messages of class ``broadcast``: flooded inside the group, relayed between groups through the cloud (section II-B).

One broker's part in it, composed of parts that each have their home::

    Formation   who is in the group, and who leads it          nearcast.groups.formation
    Latencies   how far others are                             nearcast.groups.latencies
    LeaderBoard who else leads, as announced at the cloud      nearcast.groups.leaders
    Cloud       the session at the cloud                       nearcast.fabric.cloud
    Relay       from here, or from members, to the cloud       nearcast.fabric.relaying
    Coverage    from the cloud to here, and to members         nearcast.fabric.coverage
    Goodbyes    who is told that others cover this broker      nearcast.fabric.goodbyes
    GroupLinks  to whom there are links                        nearcast.fabric.group_links

Here is what joins them: routes (who is flooded), messages that arrive from other brokers (each is taken once, by its identity,
whatever way it came), and the changes of the group. A message that is published here
goes to every broker of the view, and into the relay's queue; that is decided when routes are compiled and costs nothing for
each. Flooding everywhere and relaying everything are the same with a threshold of infinity, and of zero.

Without a cloud there are no groups, and messages go to every broker of the fabric.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.fabric import errands, frames
from nearcast.fabric.cloud import Cloud
from nearcast.fabric.cloud_filters import shared_intersection
from nearcast.fabric.cloud_intake import CloudIntake
from nearcast.fabric.coverage import ABSENT, Coverage
from nearcast.fabric.fences import stretch
from nearcast.fabric.frames import frame
from nearcast.fabric.goodbyes import Goodbyes
from nearcast.fabric.group_links import GroupLinks
from nearcast.fabric.identities import Seen
from nearcast.fabric.outgoing import PEER_PREFIX
from nearcast.fabric.parts import FOREVER, Part, Peer
from nearcast.fabric.relaying import RELAY_NAME, Relay, RelaySession
from nearcast.fabric.replication import origin_id
from nearcast.groups import leaders
from nearcast.groups.adaptation import Adaptation
from nearcast.groups.flows import Flows
from nearcast.groups.formation import Formation, LeaderChanged
from nearcast.groups.latencies import Latencies, LatencySettings, Pinger
from nearcast.groups.leaders import LeaderBoard
from nearcast.groups.messages import Ask, Found, Leave, Message, Report, Seek
from nearcast.groups.settings import FormationSettings
from nearcast.groups.thresholds import AdaptiveThresholds, Thresholds
from nearcast.mqtt.publication import Publication
from nearcast.mqtt.records import Fields
from nearcast.mqtt.routing import VIA_SEPARATOR, Target
from nearcast.mqtt.session import Session
from nearcast.mqtt.subscriptions import Subscription

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric

LOST_S: Final = 2.0
"""A fellow without a link for so long is lost to the group. A link that broke is mostly back before."""

VIEWS_PER_S: Final = 1_000
"""Views begin with the wall clock, so that their versions rise over restarts; no group changes more often than this."""

LOOK_S: Final = 0.5

_KINDS: Final = [frames.GROUP, frames.RELAYED, frames.RELAY_STATE, frames.RELAY_LIVE, frames.COVERED, frames.RELAY_ASK]


class Broadcast(Part):
    """See the module. ``grouped``: whether there is a cloud, and hence groups."""

    def __init__(self, fabric: Fabric, secret: bytes, now: float) -> None:
        settings = fabric.settings.groups
        self.fabric = fabric
        self.settings = settings
        self.grouped = settings.cloud is not None
        self.links_all = not self.grouped or settings.links == "all"
        if settings.links == "auto" and (fabric.settings.controller is not None or fabric.settings.peers):
            self.links_all = True
        leave_ms = settings.effective_leave_threshold_ms
        self.thresholds = Thresholds(settings.threshold_ms, leave_ms)
        if settings.adaptive:
            self.thresholds = AdaptiveThresholds(
                settings.threshold_ms,
                leave_ms,
                settings.excess_budget,
                settings.least_threshold_ms,
                settings.largest_threshold_ms,
                now,
            )
        topic = leaders.topic(settings.prefix, settings.region)
        # Announcements are ordered by when their broker began to make them, and by their number.
        began_us = int((now + fabric.engine.effects.wall_offset) * 1e6)
        self.board = LeaderBoard(fabric.name, topic, secret, began_us, settings.announce_interval_seconds, fabric.rng, now)
        self.board.position = settings.position
        self.latencies = Latencies(
            fabric.name,
            self.board,
            self.thresholds,
            LatencySettings(
                settings.ping_interval_seconds, settings.ping_window, fabric.settings.fail_after_seconds, settings.position
            ),
            fabric.rng,
            now,
        )
        lcm = 0.0 if settings.lcm is None else settings.lcm
        self.formation = Formation(fabric.name, "", FormationSettings(), self.latencies, self.thresholds, lcm, fabric.rng, now)
        flows = Flows(now) if settings.flow_aware else None
        self.adaptation = Adaptation(
            self.formation, self.thresholds, flows, adaptive=settings.adaptive, rng=fabric.rng, now=now
        )
        self.adaptation.surroundings = self.latencies
        self.seen = Seen()
        self.coverage = Coverage(self)
        self.intake = CloudIntake(self)
        self.links = GroupLinks(self)
        self.goodbyes = Goodbyes(fabric.peers, self.formation)
        self.cloud: Cloud | None = None
        if self.grouped:
            limits = fabric.limits
            self.cloud = Cloud(self.intake, settings, fabric.name, limits, fabric.engine.effects, secret, fabric.rng, now)
        self.relay: Relay | None = None
        self.started = False
        self._leaving = False
        self._cloud_wanted = False
        # The brokers that are flooded, as of the present view; none: to be made.
        self._targets: list[Target] | None = None
        #: Whether our leader has a cloud, as far as it said.
        self.leader_has_cloud = True
        # Our interest as far as the cloud has it; -1: not known yet. The last version of it with a filter that concerns the
        # cloud.
        self._covered_version = -1
        self._concerning_version = 0
        # Brokers without a link, since when.
        self._down_since: dict[str, float] = {}
        self._look_at = 0.0
        fabric.classes.group = self

    def take_part(self) -> None:
        """After interest has settled comes what depends on it."""
        self.fabric.add_part(self, _KINDS)

    @property
    def leads(self) -> bool:
        return self.formation.leads

    def members(self) -> list[str]:
        """The other brokers of the group."""
        return [name for name in self.formation.view.members if name != self.fabric.name]

    # --- beginning ------------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """The journal was read: go on with what it has for the cloud."""
        if not self.grouped:
            return
        session = self.fabric.channels.session_for(RELAY_NAME)
        if isinstance(session, RelaySession):
            self.relay = Relay(self, session)
        self.coverage.recover(list(self.fabric.peers))
        self._regrouped(now)

    def start(self, pinger: Pinger | None, link_address: str, probe_address: str, lcm: float, now: float) -> None:
        """The sockets are open: look for others. ``lcm``: as measured; what is configured goes before."""
        if not self.grouped:
            return
        self.started = True
        self.board.address = link_address
        self.board.probe_address = probe_address
        wall_s = now + self.fabric.engine.effects.wall_offset
        self.formation.begin(link_address, probe_address, int(wall_s * VIEWS_PER_S))
        self.latencies.pinger = pinger
        if self.settings.lcm is None:
            self.formation.lcm = lcm
        self._regrouped(now)

    # --- routes ---------------------------------------------------------------------------------------------------------

    def flooded(self, matched: list[Target], filtered: bool) -> list[Target]:
        if not self.grouped:
            return matched if filtered else [_target(peer, "") for peer in self.fabric.peers.values()]
        targets = self._targets
        if targets is None:
            targets = self._targets = self._make_targets()
        absent = self.coverage.absent()
        if not filtered and not absent:
            return targets
        found = targets
        names = {target.session.client_id for target in matched}
        if filtered:
            # A fellow whose interest is not in place here, because it is new or its link is down, may want anything.
            known = self.fabric.interest.theirs
            found = []
            for target in targets:
                client_id = target.session.client_id
                if target.informed or client_id in names or client_id[len(PEER_PREFIX) :] not in known:
                    found.append(target)
        via = errands.flooded(self.formation.view.version)
        return found + [_target(self.fabric.peers[name], via) for name in absent if PEER_PREFIX + name in names]

    def _make_targets(self) -> list[Target]:
        view = self.formation.view
        via = errands.flooded(view.version)
        targets: list[Target] = []
        for name in view.members:
            if name != self.fabric.name:
                target = _target(self.fabric.peer(name), via)
                target.informed = name == view.leader
                targets.append(target)
        if self.relay is not None:
            target = self.relay.target.with_via(via)
            target.informed = True
            targets.append(target)
        return targets

    def is_fellow(self, session: Session) -> bool:
        return not self.grouped or session.client_id[len(PEER_PREFIX) :] in self.formation.view.members

    def classes_changed(self) -> None:
        self.coverage.rules_changed()

    def forget_routes(self) -> None:
        """Whom messages go to has changed."""
        self._targets = None
        self.fabric.engine.tree.generation += 1

    # --- interest -------------------------------------------------------------------------------------------------------

    def subscribed(self, name: str, topic_filter: str) -> None:
        """A broker, or this one, has its first subscriber to a filter."""
        self.coverage.subscribed(name, topic_filter)

    def unsubscribed(self, name: str, topic_filter: str) -> None:
        """It has none any more."""
        self.coverage.unsubscribed(name, topic_filter)

    def interest_changed(self, name: str, version: int, added: list[str]) -> None:
        """A version of a broker's interest, or of this one's, is in place here, with these new filters."""
        if not self.grouped:
            return
        self.coverage.interest_changed(name)
        if name != self.fabric.name:
            self.forget_routes()
        elif self._concerns_cloud(added):
            self._concerning_version = version

    def _concerns_cloud(self, names: list[str]) -> bool:
        rules = self.fabric.classes.broadcast_filters()
        return any(shared_intersection(name, rule) for name in names for rule in rules)

    def awaits_cloud(self) -> bool:
        """Whether a subscription is in place only once the cloud has it."""
        cloud = self.cloud
        if cloud is None or not self.started:
            return False
        return cloud.connected if self.leads else self.leader_has_cloud

    def covered_version(self) -> int:
        """The version of our interest that the cloud has, or need not have more of."""
        if self._covered_version >= self._concerning_version:
            return self.fabric.interest.version
        return self._covered_version

    def knows_coverage(self) -> bool:
        """Whether our leader has said what of our interest is in place."""
        return self._covered_version >= 0 or not self.leader_has_cloud

    def covered(self, version: int, now: float) -> None:
        """So much of our interest is in place at the cloud, by ourselves or by our leader."""
        self._covered_version = version
        self.fabric.interest.covered()
        if version < self.fabric.interest.version:
            return  # the former leader may have what is missing
        if not self.leads:
            self.coverage.depart(self.fabric.name, now)
        self.goodbyes.say()

    def _is_covered(self) -> bool:
        return self._covered_version >= self.fabric.interest.version

    # --- frames ---------------------------------------------------------------------------------------------------------

    def handle(self, peer: Peer, content: bytes, now: float) -> None:
        if content[0] == frames.GROUP:
            self._told(peer, Message.decode(content[1:]), now)
            return
        fields = Fields(content)
        relay = self.relay
        if content[0] == frames.COVERED:
            self._told_covered(peer, fields.number(), now)
        elif relay is None:
            return
        elif content[0] == frames.RELAYED:
            relay.told_relayed(fields.number(), now)
        elif content[0] == frames.RELAY_STATE:
            relay.told_state(peer, fields.number(), now)
        elif content[0] == frames.RELAY_ASK:
            relay.asked(peer, fields.number() != 0, now)
        else:
            relay.live(peer, fields.number(), fields.number(), now)

    def _told(self, peer: Peer, message: Message, now: float) -> None:
        if not self.grouped:
            return
        if isinstance(message, (Report, Seek, Found)):
            self.adaptation.handle(peer.name, message, now)
            return
        if isinstance(message, Ask):
            self.latencies.learn(peer.name, message.address, message.probe_address, now)
        self.formation.handle(peer.name, message, now)
        if not isinstance(message, Leave):
            self.links.spoke(peer.name, now)
        elif not (self.leads and peer.name in self.formation.view.members):
            self.coverage.depart(peer.name, now)
            if self.relay is not None:
                self.relay.forget(peer.name)
        # At once: what follows in the same stream may be said by a new leader already.
        self._form(now)

    def _told_covered(self, peer: Peer, version: int, now: float) -> None:
        if peer.name != self.formation.leader or self.leads:
            return
        self.leader_has_cloud = version > 0
        if version > 0:
            self.covered(version, now)
        else:
            self._covered_version = -1
            self.fabric.interest.covered()

    def arrived(self, peer: Peer, publication: Publication, via: str, now: float) -> None:
        """Messages of class ``broadcast`` came from another broker."""
        errand = errands.parse(via)
        relay = self.relay
        if errand.kind == errands.CARRIED:
            self._take(peer, publication, errand.origin, errand.epoch, errand.sequence, errand, now)
            if self._is_covered():
                self.goodbyes.answer(peer, now)
            return
        if errand.kind == errands.PUSHED:
            if relay is not None:
                relay.pushed(peer, publication, errand, now)
            if self.coverage.was_flooded_here(peer.name, errand.view):
                return  # that copy says what we are to do with it
        elif relay is not None:
            relay.flooded(peer, publication, errand, now)
        self._take(peer, publication, peer.name, peer.epoch, publication.sequence, errand, now)

    def _take(
        self, peer: Peer, publication: Publication, origin: str, epoch: int, first: int, errand: errands.Errand, now: float
    ) -> None:
        """Hand on what was not here yet."""
        for begin, count in self.seen.take(origin, epoch, first, publication.count):
            for part in stretch(publication, begin - first, count):
                via = errand.rest
                if part.stamp:
                    part.author = origin_id(origin, epoch)
                    if self.fabric.replication.was_told(part, part.author):
                        via = via.lstrip(VIA_SEPARATOR)  # not for plain subscribers again
                        if not via:
                            continue
                self.count(part, errand.relayed_by)
                self.fabric.channels.bridge(peer, part, via, now)

    def count(self, publication: Publication, relayed_by: str) -> None:
        """Messages of another broker came: did anybody here want them?"""
        if self.grouped:
            route = self.fabric.engine.router.route_for(publication.topic)
            self.adaptation.arrived(bool(route.targets or route.groups), relayed_by, publication.count)

    # --- the cloud ------------------------------------------------------------------------------------------------------

    def cloud_came(self, session_kept: bool, now: float) -> None:
        """There is a connection to the cloud."""
        self.coverage.cloud_came(session_kept, now)
        relay = self.relay
        if relay is not None:
            relay.role_changed(now)
            relay.go_all(now)
        self.board.announce_soon(now)

    def cloud_went(self, now: float) -> None:
        """There is none any more: what is in the group goes on."""
        self.coverage.cloud_went(now)
        if self.leads:
            self._covered_version = -1
        self.fabric.interest.covered()

    def announced(self, topic: str, payload: bytes, now: float) -> None:
        """Something was said on a topic where leaders announce themselves."""
        if topic != self.board.topic:
            return
        said = self.board.hear(payload, now)
        if said is not None and said.lifetime_s > 0:
            covered = self.coverage.covered.get(said.name)
            if covered is not None and covered.state == ABSENT:
                self.coverage.depart(said.name, now)  # whoever leads is covered by itself before it says so

    def _wants_cloud(self, now: float) -> None:
        if self.cloud is not None and self.started:
            wanted = self.leads or self.coverage.needs_cloud()
            if wanted != self._cloud_wanted:
                self._cloud_wanted = wanted
                self.cloud.want(wanted, now)

    # --- who comes and goes ---------------------------------------------------------------------------------------------

    def peer_up(self, peer: Peer, now: float) -> None:
        if not self.grouped:
            self.forget_routes()  # flooded to from now on, whether it has subscribers or not
            return
        self._down_since.pop(peer.name, None)
        if self.relay is not None and self.leads and peer.name in self.formation.view.members:
            self.relay.go(peer, now)
        self.coverage.tell_again(peer.name)
        self.goodbyes.came(peer.name)
        self.formation.linked(peer.name, now)
        if self._is_covered():
            self.goodbyes.say()

    def peer_down(self, peer: Peer, now: float) -> None:
        self._down_since[peer.name] = now
        self.goodbyes.went(peer.name)
        self.forget_routes()
        if self.relay is not None:
            self.relay.link_lost(peer, now)

    def peer_gone(self, peer: Peer, now: float) -> None:
        self._down_since.pop(peer.name, None)
        self.goodbyes.gone(peer.name)
        self.links.gone(peer.name)
        self.coverage.forget(peer.name)
        if self.relay is not None:
            self.relay.forget(peer.name)
        if self.grouped:
            self.formation.lost(peer.name, now)
        self.forget_routes()

    # --- the group ------------------------------------------------------------------------------------------------------

    def _form(self, now: float) -> None:
        """What the formation changed and wants to be said."""
        # Said first: a new member hears that it is one before it hears what follows from that.
        for name, message in self.formation.take_outgoing():
            if isinstance(message, Leave):
                self.goodbyes.leave(name, message.number)  # once somebody else covers us
            else:
                self._say(name, message, now)
        changes = self.formation.take_changes()
        for change in changes:
            if isinstance(change, LeaderChanged):
                self._leader_changed(change.former, change.present, now)
        if changes:
            self.adaptation.regrouped(now)
            self._regrouped(now)
        for name, message in self.adaptation.take_outgoing():
            self._say(name, message, now)

    def _say(self, name: str, message: Message, now: float) -> None:
        self.links.spoke(name, now)
        peer = self.fabric.peers.get(name)
        if peer is None or not peer.send(frame(frames.GROUP, message.encode())):
            self._keep_links(now)  # said again when it times out; by then there is a link

    def _keep_links(self, now: float) -> None:
        if self.started:
            self.links.keep(now)

    def _leader_changed(self, former: str, present: str, now: float) -> None:
        self.latencies.belongs_to(present, now)
        self.goodbyes.follow(present)
        if former != self.fabric.name and former not in self.goodbyes.leaving:
            self.goodbyes.leave(former, 0)
        self._covered_version = -1
        self.leader_has_cloud = True
        self.coverage.tell_again(self.fabric.name)
        if self.relay is not None:
            self.relay.leader_changed(now)

    def _regrouped(self, now: float) -> None:
        """The view is another one: routes, links, who is covered, who is relayed for."""
        self.forget_routes()
        view = self.formation.view
        for member in view.members.values():
            if member.name != self.fabric.name:
                self.fabric.peer(member.name)
                self.latencies.learn(member.name, member.address, member.probe_address, now)
        self.coverage.view_changed(now)
        relay = self.relay
        if relay is not None and self.leads:
            relay.go_all(now)
        self._keep_links(now)
        self._wants_cloud(now)
        self.board.announce_soon(now)

    # --- time -----------------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        if not self.grouped:
            return
        self._form(now)
        self.coverage.settle(now)
        if self.relay is not None:
            self.relay.settle(now)
        self._wants_cloud(now)

    def tick(self, now: float) -> None:
        cloud = self.cloud
        if cloud is None or not self.started:
            return
        cloud.tick(now)
        self.latencies.tick(now)
        for name, since in list(self._down_since.items()):
            if now - since >= LOST_S:
                del self._down_since[name]
                self.formation.lost(name, now)
                self.coverage.lost(name)
        self.formation.tick(now)
        self.adaptation.tick(now)
        said = self.board.tick(
            self.leads and self.coverage.is_settled() and not self._leaving,
            self.formation.lcm,
            len(self.formation.view.members),
            self.thresholds.join_ms,
            now,
        )
        if said is not None:
            cloud.publish(self.board.topic, said, now)
        if self.relay is not None:
            self.relay.tick(now)
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._keep_links(now)
            if self.goodbyes.leaving and self._is_covered():
                self.goodbyes.say()

    def next_deadline(self) -> float:
        cloud = self.cloud
        if cloud is None or not self.started:
            return FOREVER
        deadline = min(self._look_at, cloud.next_deadline(), self.latencies.next_deadline(), self.formation.next_deadline())
        deadline = min(deadline, self.adaptation.next_deadline(), self.board.next_deadline())
        return deadline if self.relay is None else min(deadline, self.relay.next_deadline())

    def leave(self, now: float) -> None:
        """Members are to find another leader while this one still covers them; nobody else is to find it."""
        self._leaving = True
        if self.grouped:
            self.formation.retire(now)
            self._form(now)
            self.board.announce_soon(now)

    def has_left(self) -> bool:
        """Whether the cloud, or our leader, has all that was published here, and somebody else covers our members."""
        relay = self.relay
        cloud_up = self.cloud is not None and self.cloud.connected
        if cloud_up and self._leaving and self.coverage.has_guests():
            return False
        leader = self.fabric.peers.get(self.formation.leader)
        if relay is None or not (cloud_up if leader is None else leader.up and self.leader_has_cloud):
            return True  # nobody takes it now: it stays, in the journal if there is one
        return not relay.session.queued_messages and not relay.session.spilled_messages

    # --- figures --------------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, float]:
        """Counters since the start, by name."""
        formation, relay = self.formation, self.relay
        found: dict[str, float] = {
            "asks": formation.asks,
            "leader_joins": formation.leader_joins,
            "member_joins": formation.member_joins,
            "notifications": formation.notifications,
            "leaves": formation.leaves,
            "splits": formation.splits,
            "messages_sent": formation.messages_sent,
            "repeated_messages": self.seen.repeated,
            "carried_messages": self.coverage.carried_messages,
            "foreign_messages": self.intake.foreign_messages,
            "correct_messages": self.adaptation.correct,
            "redundant_messages": self.adaptation.redundant,
        }
        if relay is not None:
            found["relayed_messages"] = relay.relayed_messages
            found["relayed_for_members"] = relay.relayed_for_members
            found["unrelayed_dropped"] = relay.dropped_messages
            found["relay_refused"] = relay.refused_messages
            found["relay_stops"] = relay.stops
        return found


def _target(peer: Peer, via: str) -> Target:
    return Target(Subscription(peer.session, "#", 2, retain_as_published=True), via)
