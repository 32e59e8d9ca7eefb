"""The controller as a pure machine: who is there, who should be where, and telling them so.

It is the :class:`~nearcast.fabric.parts.LinkUser` of brokers' and gateways' links. Every ``interval_s``, and at once when a
broker goes or something new was measured, it takes a snapshot of what it knows, asks
:func:`nearcast.placement.assignment.reconfigure` what should change, and orders the moves. Gateways carry them out; no
message ever waits for the controller.

All state is soft. A controller that was just started knows only what has registered again, so it takes a broker for gone
only when it saw it go: whoever uses a broker that it does not know is left alone.
"""

from __future__ import annotations

import random
from typing import Final

import msgspec

from nearcast.config import Retention
from nearcast.errors import RemoteProtocolError
from nearcast.fabric import frames, links
from nearcast.fabric.classes import MAX_LEVELS, OWNED, SET, class_fault
from nearcast.fabric.control import (
    Assignment,
    ClassRule,
    ClassRules,
    Departure,
    Drain,
    Leaving,
    Members,
    Node,
    Report,
    pack,
    unpack,
)
from nearcast.fabric.links import Link
from nearcast.fabric.moves import Move, Moves
from nearcast.fabric.parts import LinkUser
from nearcast.fabric.refusals import Refused as Refused
from nearcast.fabric.registry import Entry, NodeState, reachable
from nearcast.fabric.set_choice import Placement, choose
from nearcast.fabric.topic_manager import TopicManager
from nearcast.fabric.topic_settings import TopicSettings
from nearcast.fabricconfig import ReplicaSet
from nearcast.functionconfig import Function
from nearcast.membership.detector import Detector
from nearcast.membership.monitoring import Acknowledged, Answered, Monitor, Ponged
from nearcast.membership.packets import ACCEPTED
from nearcast.mqtt import reasons
from nearcast.mqtt.topics import covers, filter_fault
from nearcast.placement.assignment import BrokerState, GatewayState, Network, Policy, ranking, reconfigure

SOON_S: Final = 0.5
"""How long after news a reconfiguration waits for more of it."""

NAMESAKE_S: Final = 3.0
"""A node whose link was heard so lately is there; another one of its name is not the same started again."""

DETECT_INTERVAL_S: Final = 0.1

MAX_CLASS_RULES: Final = 10_000
MAX_LATENCY_BOUND_MS: Final = 3_600_000.0


class ControlSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a controller works."""

    interval_s: float = 15.0
    """Seconds between reconfigurations. Too low moves clients for what passes by itself; too high leaves them far away."""

    moves_at_once: int = 20
    """Gateways that are moved at the same time where nothing is urgent. Too low takes long; too high makes one burst."""

    drain_clients_per_second: float = 100.0
    """How fast a broker is drained unless the request says otherwise."""

    move_timeout_s: float = 30.0
    """How long a gateway may say nothing of a move before it counts as failed."""

    retry_s: float = 60.0
    """How long a gateway is not sent again to a broker that it could not move to."""

    hold_s: float = 600.0
    """How long a gateway that was moved by hand stays where it is, unless that broker goes."""

    forget_s: float = 3_600.0
    """How long nodes that are gone are shown."""

    acknowledge_s: float = 1.0
    """How long the acknowledgement of a move order may take over UDP before it is sent over the link."""

    policy: Policy = Policy()

    topics: TopicSettings = TopicSettings()
    """Topics of class ``owned``."""


MAX_SETS: Final = 1_000
MAX_FUNCTIONS_BYTES: Final = 524_288
"""Of the code of all functions, which every broker has."""


class Controller(LinkUser):
    """See the module. ``wall_offset`` turns ``now`` into wall-clock seconds."""

    def __init__(
        self, settings: ControlSettings, monitor: Monitor, epoch: int, wall_offset: float, rng: random.Random, now: float
    ) -> None:
        self.settings = settings
        self.monitor = monitor
        self.epoch = epoch
        self.detector = Detector()
        self.entries: dict[str, Entry] = {}
        self.rules = ClassRules()
        self.moves = Moves(rng.getrandbits(31) + 1, settings.moves_at_once, settings.move_timeout_s)
        self.reconfigurations = 0
        self.reports = 0
        self.last_reconfigured_at = 0.0
        self.topics = TopicManager(settings.topics, self.entries, wall_offset, rng, now)
        self._wall_offset = wall_offset
        self._rng = rng
        self._next_run = now + settings.interval_s
        self._detect_at = now
        self._next_forget = now + settings.forget_s
        self._unacknowledged: dict[int, float] = {}
        self._avoid: dict[tuple[str, str], float] = {}

    def wall(self, now: float) -> float:
        """Wall-clock seconds."""
        return now + self._wall_offset

    def brokers(self) -> list[Entry]:
        """Brokers that are members."""
        return [entry for entry in self.entries.values() if entry.is_broker and entry.usable]

    def gateways(self) -> list[Entry]:
        """Gateways that are there."""
        return [entry for entry in self.entries.values() if not entry.is_broker and entry.usable]

    # --- links ----------------------------------------------------------------------------------------------------------

    def link_up(self, link: Link, now: float) -> None:
        """Nothing is known of a node until it registers."""

    def link_frame(self, link: Link, content: bytes, now: float) -> None:
        kind = content[0]
        if kind == frames.REGISTER:
            self._register(link, unpack(content, Node), now)
            return
        entry = self._entry_of(link)
        if entry is None:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "REGISTER comes first")
        if kind == frames.REPORT:
            self._report(entry, unpack(content, Report), now)
        elif kind == frames.DEREGISTER:
            self._leave(entry, unpack(content, Leaving), now)
        elif not entry.is_broker or not self.topics.frame(entry, content, now):
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"frame {kind} is not a node's to send")

    def link_down(self, link: Link, now: float) -> None:
        entry = self._entry_of(link)
        if entry is not None:
            entry.link = None
            if entry.leaving:
                self._depart(entry, "left", now)
            elif entry.usable:
                self.detector.link_lost(entry.name, now)

    def _entry_of(self, link: Link) -> Entry | None:
        entry = self.entries.get(link.theirs.name) if link.theirs is not None else None
        return entry if entry is not None and entry.link is link else None

    def _register(self, link: Link, node: Node, now: float) -> None:
        theirs = link.theirs
        role = "broker" if theirs is not None and theirs.role == links.BROKER else "gateway"
        if theirs is None or theirs.name != node.name or role != node.role:
            raise RemoteProtocolError(reasons.NOT_AUTHORIZED, "a node registers itself, under the name of its link")
        host = link.connection.peer.address
        node = msgspec.structs.replace(
            node,
            link=reachable(node.link, host),
            monitoring=reachable(node.monitoring, host),
            mqtt=reachable(node.mqtt, host),
        )
        entry = self.entries.get(node.name)
        before = None if entry is None else entry.link
        if entry is not None and before is not None and before is not link:
            if entry.node.epoch != node.epoch and now - before.last_seen < NAMESAKE_S:
                raise RemoteProtocolError(
                    reasons.NOT_AUTHORIZED,
                    f"another node is called {node.name}: every node needs a name of its own",
                )
            before.close("a newer link of the same name took over")
        if entry is None or entry.node.role != node.role or not entry.usable or entry.node.epoch != node.epoch:
            known, entry = entry, Entry(node, now)
            # What a person said here counts; a controller that knows nothing of the broker yet learns it from it.
            entry.draining = node.draining if known is None else known.draining and known.is_broker
        self.entries[node.name] = entry
        entry.node = node
        entry.link = link
        entry.ranking = ()  # what it was told on another link may be lost
        entry.ranked_for = ()
        entry.state = "up"
        entry.changed_at = now
        self.detector.watch(node.name, now)
        self.moves.order_again(node.name)
        self._adopt_rules(node.classes)
        if entry.is_broker:
            self._tell_others(entry, Members(members=(entry.member(),)))
            self._soon(now)
            self.topics.registered(entry, now)
        members = tuple(other.member() for other in self.brokers() if other is not entry)
        link.send(pack(frames.MEMBERS, Members(whole=True, probing=self.monitor.settings, members=members)))
        if self.rules.stamp > node.classes.stamp:
            link.send(pack(frames.CLASSES, self.rules))
        if entry.is_broker and entry.draining != node.draining:
            link.send(pack(frames.DRAIN, Drain(entry.draining)))

    def _leave(self, entry: Entry, leaving: Leaving, now: float) -> None:
        """A node is going to stop. A broker says so to its gateways as well, and they move their clients by themselves; here
        they are only told where to."""
        entry.leaving = True
        entry.for_good = leaving.for_good
        entry.changed_at = now
        if entry.is_broker:
            self._tell_others(entry, Members(members=(entry.member(),)))
            self._run(now)
            self.topics.shunned(entry, now)

    def _depart(self, entry: Entry, state: NodeState, now: float) -> None:
        """A node left by its own word, or was found dead."""
        if not entry.usable:
            return
        entry.state = state
        entry.changed_at = now
        entry.clients.clear()
        self.detector.forget(entry.name)
        if entry.link is not None:
            # Should it be there after all, it has to register again.
            entry.link.close("this node does not answer")
        wall = self.wall(now)
        if entry.is_broker:
            for other in self.entries.values():
                other.measured.pop(entry.name, None)
            self.moves.give_up_target(entry.name, wall)
            self._tell_others(entry, Members(gone=(Departure(entry.name, left=entry.for_good),)))
            self._run(now)
            self.topics.departed(entry, now)
        else:
            self.moves.give_up(entry.name, wall, f"{entry.name} is gone")

    def _tell_others(self, entry: Entry, members: Members) -> None:
        data = pack(frames.MEMBERS, members)
        for other in self.entries.values():
            if other is not entry and other.link is not None:
                other.link.send(data)

    # --- what nodes report ----------------------------------------------------------------------------------------------

    def _report(self, entry: Entry, report: Report, now: float) -> None:
        self.reports += 1
        entry.freshen(now)
        outcomes = report.outcomes
        before = entry.report.brokers
        if entry.take_report(report, now):
            self._soon(now)
        if entry.is_broker:
            self.topics.reported(now)
        for pending in self.moves.pending.values():
            target = pending.target
            if pending.gateway == entry.name and report.brokers.get(target, 0) > before.get(target, 0):
                self.moves.progressed(pending.number, now)
        for outcome in outcomes:
            move = self.moves.ended(outcome, self.wall(now))
            self._unacknowledged.pop(outcome.number, None)
            if move is None:
                continue
            if move.state == "failed":
                self._failed(entry, move, now)
                self._soon(now)
            elif not move.client and not move.strays:
                entry.home = move.target
                entry.failed_moves = 0
        self._order_due(now)

    def _failed(self, entry: Entry, move: Move, now: float) -> None:
        if not move.client:  # what keeps one client says nothing of the others
            self._avoid[(move.gateway, move.target)] = now + self.settings.retry_s
            entry.failed_moves += 1
            entry.rest_until = now + min(self.settings.retry_s, 2.0 ** min(entry.failed_moves, 10))

    # --- reconfiguration ------------------------------------------------------------------------------------------------

    def _soon(self, now: float) -> None:
        self._next_run = min(self._next_run, now + SOON_S)

    def snapshot(self, now: float) -> Network:
        """The network as it is known now, moves that are pending taken as done."""
        brokers = {
            entry.name: BrokerState(
                entry.name, max(0, entry.report.connections - entry.report.gateway_connections), entry.shunned
            )
            for entry in self.brokers()
        }
        gateways = []
        for entry in self.gateways():
            home = self.moves.target_of(entry.name) or entry.home
            held = entry.held_until > now and entry.home in brokers and not brokers[entry.home].draining
            if held or entry.rest_until > now:
                if home in brokers:  # left where it is, where it is a load like any other
                    busier = brokers[home].connections + max(1, entry.report.connections)
                    brokers[home] = msgspec.structs.replace(brokers[home], connections=busier)
                continue
            latency_ms = entry.latency_ms(now)
            for name in list(latency_ms):
                if self._avoid.get((entry.name, name), 0.0) > now and name != home:
                    del latency_ms[name]
            if home and home not in brokers and self._is_unsure_of(home, entry):
                brokers[home] = BrokerState(home)  # left alone
                latency_ms.pop(home, None)
            gateways.append(GatewayState(entry.name, home, max(1, entry.report.connections), latency_ms))
        return Network(tuple(brokers.values()), tuple(gateways))

    def _is_unsure_of(self, home: str, gateway: Entry) -> bool:
        """Whether a broker may be there though it is no member: it was never seen here, or was given up before this gateway
        came, which has clients there; the controller was cut off from both, and hears the gateway first."""
        broker = self.entries.get(home)
        if broker is None:
            return True
        return broker.changed_at < gateway.registered_at and gateway.report.brokers.get(home, 0) > 0

    def _run(self, now: float) -> None:
        """Reconfigure."""
        self._next_run = now + self.settings.interval_s
        self.last_reconfigured_at = now
        self.reconfigurations += 1
        self._avoid = {pair: until for pair, until in self._avoid.items() if until > now}
        network = self.snapshot(now)
        homes: dict[str, str] = {}
        for migration in reconfigure(network, self.settings.policy):
            origin = self.entries.get(migration.origin)
            if migration.reason == "draining" and origin is not None and origin.leaving:
                homes[migration.gateway] = migration.target
                continue
            self.moves.add(
                Move(
                    number=0,
                    gateway=migration.gateway,
                    origin=migration.origin,
                    target=migration.target,
                    kind=migration.reason,
                    reason=migration.explain(),
                    created_at=self.wall(now),
                    clients_per_second=self._pace(origin) if migration.reason == "draining" else 0.0,
                )
            )
        self._gather_strays(now)
        places = tuple((broker.name, broker.draining) for broker in network.brokers)
        for gateway in network.gateways:
            entry = self.entries[gateway.name]
            made_of = (places, entry.measurements_taken, len(gateway.latency_ms))
            ranked = entry.ranking
            if made_of != entry.ranked_for and entry.link is not None:
                entry.ranked_for = made_of
                ranked = ranking(gateway, network.brokers, self.settings.policy.groups_ms)
            home = homes.get(entry.name, entry.home)
            if (ranked != entry.ranking or home != entry.home) and entry.link is not None:
                entry.ranking = ranked
                # An order that is under way over UDP is not taken back by this.
                home = self.moves.target_of(entry.name) or home
                entry.link.send(pack(frames.ASSIGN, Assignment(home=home, ranking=ranked)))
        self._order_due(now)

    def _gather_strays(self, now: float) -> None:
        """Clients that were moved by hand to a broker that is drained now go back to where their gateway is."""
        for entry in self.gateways():
            if entry.rest_until > now:
                continue
            home = self.moves.target_of(entry.name) or entry.home
            for name, count in entry.report.brokers.items():
                broker = self.entries.get(name)
                if not count or broker is None or not broker.draining or name == home or home not in self.entries:
                    continue
                self.moves.add(
                    Move(
                        number=0,
                        gateway=entry.name,
                        origin=name,
                        target=home,
                        kind="draining",
                        reason=f"{name} is being drained",
                        created_at=self.wall(now),
                        clients_per_second=self._pace(broker),
                        strays=True,
                    )
                )

    def _pace(self, origin: Entry | None) -> float:
        rate = 0.0 if origin is None else origin.drain_clients_per_second
        return rate or self.settings.drain_clients_per_second

    def _order_due(self, now: float) -> None:
        for move in self.moves.due(now, self.wall(now), self._is_linked):
            entry = self.entries[move.gateway]
            if not move.client and entry.node.monitoring and not move.clients_per_second and not move.repeated:
                self.monitor.order(move.number, entry.node.monitoring, entry.name, move.target, self.epoch, now)
                self._unacknowledged[move.number] = now + self.settings.acknowledge_s
            else:
                self._order_over_link(entry, move)

    def _is_linked(self, name: str) -> bool:
        entry = self.entries.get(name)
        return entry is not None and entry.link is not None

    def _order_over_link(self, entry: Entry, move: Move) -> None:
        if entry.link is not None:
            home = self.moves.target_of(entry.name) or entry.home
            entry.link.send(pack(frames.ASSIGN, Assignment(home=home, ranking=entry.ranking, moves=(move.order(),))))

    # --- what people ask for --------------------------------------------------------------------------------------------

    def entry(self, name: str) -> Entry:
        """The node of this name."""
        found = self.entries.get(name)
        if found is None:
            raise Refused(f"there is no node {name!r}; `nearcast nodes` lists them", missing=True)
        return found

    def _target(self, name: str) -> Entry:
        entry = self.entry(name)
        if not entry.is_broker:
            raise Refused(f"{name} is a gateway; clients are moved to brokers")
        if not entry.usable:
            raise Refused(f"broker {name} is {entry.state}")
        if entry.leaving:
            raise Refused(f"broker {name} is stopping")
        if entry.draining:
            raise Refused(f"broker {name} is being drained; `nearcast drain {name} --stop` ends that")
        return entry

    def gateway_of(self, client: str) -> Entry:
        """The gateway that a client is connected to."""
        for entry in self.gateways():
            if client in entry.clients:
                return entry
        for entry in self.brokers():
            if client in entry.clients:
                raise Refused(f"client {client!r} is connected to {entry.name} without a gateway, so it cannot be moved")
        raise Refused(f"no gateway has a client {client!r}; `nearcast status --clients` lists them", missing=True)

    def move(self, target: str, now: float, *, client: str = "", gateway: str = "") -> Move:
        """Move a client, or all clients of a gateway, by hand."""
        self._target(target)
        if bool(client) == bool(gateway):
            raise Refused("say which client to move, or which gateway")
        entry = self.gateway_of(client) if client else self.entry(gateway)
        if entry.is_broker:
            raise Refused(f"{entry.name} is a broker; to empty it, drain it")
        if not entry.usable:
            raise Refused(f"gateway {entry.name} is {entry.state}")
        origin = entry.clients[client].broker if client else entry.home
        if origin == target:
            raise Refused(f"{client or gateway} is at {target} already")
        move = Move(
            number=0,
            gateway=entry.name,
            client=client,
            origin=origin,
            target=target,
            kind="manual",
            reason="asked for by hand",
            created_at=self.wall(now),
        )
        if not self.moves.add(move):
            raise Refused(f"{client or gateway} is on its way to {target} already")
        if not client:
            entry.held_until = now + self.settings.hold_s
        self._order_due(now)
        return move

    def drain(self, name: str, draining: bool, now: float, clients_per_second: float | None = None) -> Entry:
        """Empty a broker of its gateways' clients, at a pace, and send it nobody; or end that."""
        entry = self.entry(name)
        if not entry.is_broker:
            raise Refused(f"{name} is a gateway; brokers are drained")
        others = [other for other in self.brokers() if other is not entry and not other.shunned]
        if draining and not others and any(gateway.home == name for gateway in self.gateways()):
            raise Refused(f"there is no other broker that the clients of {name} could go to")
        entry.drain_clients_per_second = clients_per_second or self.settings.drain_clients_per_second
        if entry.draining != draining:
            entry.draining = draining
            entry.changed_at = now
            self._tell_others(entry, Members(members=(entry.member(),)))
            if entry.link is not None:
                entry.link.send(pack(frames.DRAIN, Drain(draining)))
        if not draining:
            self.moves.cancel_waiting("draining", name, self.wall(now), "the drain was ended")
        self._run(now)
        self.topics.shunned(entry, now)
        return entry

    def drained(self, entry: Entry) -> int:
        """Clients of gateways that are still at a broker."""
        return sum(gateway.report.brokers.get(entry.name, 0) for gateway in self.gateways())

    def set_class(
        self,
        topic_filter: str,
        topic_class: str,
        now: float,
        max_latency_ms: float = 0.0,
        retention: Retention = Retention(),  # noqa: B008  # frozen
    ) -> ClassRules:
        """Topics of this filter are of this class from now on. A rule of the same filter keeps its place; a new one comes
        before those that are wider, which would decide otherwise."""
        fault = class_fault(topic_filter, topic_class) or bound_fault(topic_class, max_latency_ms)
        if (
            not fault
            and topic_class.startswith(SET)
            and topic_class[len(SET) :] not in (known.name for known in self.rules.sets)
        ):
            fault = f"there is no replica set {topic_class[len(SET) :]!r}: `nearcast set create` makes one"
        if fault or topic_filter.startswith("$share/"):
            raise Refused(f"topic class of {topic_filter!r}: {fault or 'a shared subscription has none, its topics do'}")
        rules = list(self.rules.rules)
        places = [place for place, rule in enumerate(rules) if rule.topic_filter == topic_filter]
        if len(rules) >= MAX_CLASS_RULES and not places:
            raise Refused(f"there are {MAX_CLASS_RULES:,} rules already: remove one first")
        rule = ClassRule(topic_filter, topic_class, max_latency_ms, retention)
        if places:
            rules[places[0]] = rule
        else:
            wider = (place for place, other in enumerate(rules) if covers(other.topic_filter, topic_filter))
            rules.insert(next(wider, len(rules)), rule)
        return self._change_rules(tuple(rules), now)

    def remove_class(self, topic_filter: str, now: float) -> ClassRules:
        """Without the rule of this filter."""
        rules = tuple(rule for rule in self.rules.rules if rule.topic_filter != topic_filter)
        if len(rules) == len(self.rules.rules):
            raise Refused(f"there is no rule for {topic_filter!r}; `nearcast class` lists them", missing=True)
        return self._change_rules(rules, now)

    def _change_rules(self, rules: tuple[ClassRule, ...], now: float) -> ClassRules:
        return self._change(msgspec.structs.replace(self.rules, rules=rules), now)

    def _change(self, rules: ClassRules, now: float) -> ClassRules:
        stamp = max(self.rules.stamp + 1, int(self.wall(now) * 1e6))
        self._adopt_rules(msgspec.structs.replace(rules, stamp=stamp))
        return self.rules

    # --- functions ------------------------------------------------------------------------------------------------------

    def deploy(self, function: Function, now: float) -> Function:
        """A function reacts to topics of replica sets from now on. Deployed again, it goes on where it was."""
        fault = filter_fault(function.topic, MAX_LEVELS)
        if fault or function.topic.startswith(("$", "#", "+")):
            raise Refused(f"function {function.name!r}: {fault or 'its topics must begin with a level of their own'}")
        before = next((known for known in self.rules.functions if known.name == function.name), None)
        version = 1 if before is None else before.version + 1
        made = msgspec.structs.replace(function, version=version)
        others = tuple(known for known in self.rules.functions if known.name != function.name)
        if sum(len(content) for known in (*others, made) for content in known.files.values()) > MAX_FUNCTIONS_BYTES:
            raise Refused(f"the code of all functions is at most {MAX_FUNCTIONS_BYTES:,} bytes: remove some first")
        self._change(msgspec.structs.replace(self.rules, functions=(*others, made)), now)
        return made

    def remove_function(self, name: str, now: float) -> None:
        """A function is not to run any more. How far it came stays known, for one of that name that is deployed later."""
        others = tuple(known for known in self.rules.functions if known.name != name)
        if len(others) == len(self.rules.functions):
            raise Refused(f"there is no function {name!r}; `nearcast function list` shows those there are", missing=True)
        self._change(msgspec.structs.replace(self.rules, functions=others), now)

    # --- replica sets ---------------------------------------------------------------------------------------------------

    def create_set(
        self,
        name: str,
        now: float,
        *,
        members: tuple[str, ...] = (),
        replicas: int = 3,
        placement: Placement = "distributed",
        site: str = "",
        preferred: str = "",
        write_quorum: int = 0,
    ) -> ReplicaSet:
        """A new replica set of these ``members``, or of as many ``replicas`` as are chosen by where brokers are."""
        if any(known.name == name for known in self.rules.sets):
            raise Refused(f"there is a replica set {name!r} already; `nearcast set list` shows it")
        if len(self.rules.sets) >= MAX_SETS:
            raise Refused(f"there are {MAX_SETS:,} replica sets already: remove one first")
        brokers = [(entry.name, entry.node.site) for entry in self.brokers() if entry.state == "up"]
        for member in members:
            if member not in (broker for broker, _ in brokers):
                raise Refused(f"broker {member!r} is not there: a set begins with members that are")
        chosen = members or choose(brokers, self.rules.sets, replicas, placement, site)
        try:
            made = ReplicaSet(name=name, members=chosen, preferred=preferred, write_quorum=write_quorum)
        except ValueError as error:
            raise Refused(f"replica set {name!r}: {error}") from error
        self._change(msgspec.structs.replace(self.rules, sets=(*self.rules.sets, made)), now)
        return made

    def remove_set(self, name: str, now: float) -> None:
        """Without this set. What its members have on disk stays there."""
        rule = next((rule for rule in self.rules.rules if rule.topic_class == f"{SET}{name}"), None)
        if rule is not None:
            raise Refused(f"topics {rule.topic_filter!r} are kept by set {name!r}: remove that rule first (`nearcast class`)")
        sets = tuple(known for known in self.rules.sets if known.name != name)
        if len(sets) == len(self.rules.sets):
            raise Refused(f"there is no replica set {name!r}; `nearcast set list` shows those there are", missing=True)
        self._change(msgspec.structs.replace(self.rules, sets=sets), now)

    def _adopt_rules(self, rules: ClassRules) -> None:
        """Rules that are newer than ours, from a person or from a broker that has them from an earlier controller. Those of a
        broker's configuration (stamp 0) are where a person's changes begin."""
        if not self.rules.stamp and not self.rules.rules and not rules.stamp:
            self.rules = rules
            self.topics.use_rules(rules)
        if rules.stamp <= self.rules.stamp:
            return
        self.rules = rules
        self.topics.use_rules(rules)
        data = pack(frames.CLASSES, rules)
        for entry in self.entries.values():
            if entry.link is not None:
                entry.link.send(data)

    # --- time -----------------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        for event in self.monitor.take_events():
            if isinstance(event, Ponged):
                self.detector.heard(event.name, now)
            elif isinstance(event, Answered):
                if event.quality.loss < 1.0:
                    self.detector.heard(event.target, now)
            elif isinstance(event, Acknowledged) and event.result == ACCEPTED:
                # One that is refused does not know the broker yet: word of it, and the order, are on the link.
                self._unacknowledged.pop(event.number, None)
                self.moves.accepted(event.number)
        for number in [number for number in self._unacknowledged if number not in self.moves.by_number]:
            del self._unacknowledged[number]
            self.monitor.withdraw(number)

    def tick(self, now: float) -> None:
        self.monitor.tick(now)
        if now >= self._detect_at:
            self._detect_at = now + DETECT_INTERVAL_S
            for entry in self.entries.values():
                if entry.link is not None:
                    self.detector.spoke(entry.name, entry.link.last_seen)
            self._detect(now)
        for number in [number for number, at in self._unacknowledged.items() if at <= now]:
            del self._unacknowledged[number]
            unheard = self.moves.by_number.get(number)
            if unheard is not None and unheard.gateway in self.entries:
                self._order_over_link(self.entries[unheard.gateway], unheard)
        for move in self.moves.expire(now, self.wall(now)):
            if move.gateway in self.entries:
                self._failed(self.entries[move.gateway], move, now)
        if now >= self._next_run:
            self._run(now)
        self._order_due(now)
        self.topics.tick(now)
        if now >= self._next_forget:
            self._next_forget = now + self.settings.forget_s / 10
            for name in [
                entry.name
                for entry in self.entries.values()
                if not entry.usable and now - entry.changed_at > self.settings.forget_s
            ]:
                del self.entries[name]

    def _detect(self, now: float) -> None:
        decisions = self.detector.tick(now)
        for name in decisions.ping:
            entry = self.entries[name]
            if entry.node.monitoring:
                self.monitor.ping(name, entry.node.monitoring, now)
        for name in decisions.ask:
            for helper in self._helpers(name):
                self.monitor.ask(helper.node.monitoring, name, now)
        for name in decisions.suspected:
            self.entries[name].state = "suspect"
            self.entries[name].changed_at = now
        for name in decisions.cleared:
            self.entries[name].state = "up"
            self.entries[name].changed_at = now
        for name in decisions.failed:
            self._depart(self.entries[name], "down", now)

    def _helpers(self, name: str) -> list[Entry]:
        """Nodes that can say whether another one still answers: they see it over other paths than the controller."""
        able = [
            entry
            for entry in self.entries.values()
            if entry.name != name and entry.state == "up" and entry.node.monitoring and entry.link is not None
        ]
        return able if len(able) <= 3 else self._rng.sample(able, 3)

    def next_deadline(self) -> float:
        deadline = min(self._next_run, self.monitor.next_deadline(), self.moves.next_deadline(), self.topics.next_deadline())
        deadline = min(deadline, max(self._detect_at, self.detector.next_deadline()))
        return min(deadline, min(self._unacknowledged.values(), default=deadline))


def bound_fault(topic_class: str, max_latency_ms: float) -> str:
    """What is wrong with a latency bound, in words; empty when nothing is."""
    if not 0.0 <= max_latency_ms <= MAX_LATENCY_BOUND_MS:
        return f"a latency bound is between 0 (none) and {MAX_LATENCY_BOUND_MS:,.0f} ms"
    if max_latency_ms and topic_class != OWNED:
        return f"only topics of class owned have a latency bound, and this is {topic_class}"
    return ""
