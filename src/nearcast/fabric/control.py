"""What nodes and the controller tell each other, and a node's side of it: :class:`Registration`.

A node dials the controller like any other address (role CONTROLLER on the link). The conversation, each frame one msgpack
record behind the kind byte::

    node ─REGISTER {Node}─────────► controller      who I am, each time the link comes up
    node ◄─MEMBERS {Members}─────── controller      brokers there are; later only what changed
    node ◄─CLASSES {ClassRules}──── controller      topic classes, newest stamp wins
    node ◄─ASSIGN {Assignment}───── controller      gateways: which broker to use, whom to move
    node ◄─DRAIN {Drain}─────────── controller      brokers: you are being emptied, or no longer
    node ─REPORT {Report}─────────► controller      figures, measurements, clients, how moves went
    node ─DEREGISTER {Leaving}────► controller      I am going to stop, perhaps for good

and what is said about owned topics (:mod:`nearcast.fabric.owner_records`).

Everything here is soft: the controller keeps nothing on disk, and a node that loses it goes on with what it knows. So a list
of members never takes one away; only a broker that said itself that it leaves is named in ``Members.gone`` with ``left``.
What a node does with what it hears is its :class:`Registrant`'s business.
"""

from __future__ import annotations

from typing import Final, Literal, TypeVar

import msgspec

from nearcast.config import Retention
from nearcast.errors import RemoteProtocolError
from nearcast.fabric import frames, links
from nearcast.fabric.frames import frame
from nearcast.fabric.group_facts import GroupFacts
from nearcast.fabric.links import Link
from nearcast.fabric.owner_records import MigrateOrder, Owner, Owners
from nearcast.fabric.parts import FOREVER, LinkUser
from nearcast.fabricconfig import ReplicaSet
from nearcast.functionconfig import Function
from nearcast.membership.gossip import Gossip
from nearcast.membership.monitoring import Measured, Monitor, MonitorSettings, Ordered
from nearcast.mqtt import reasons

REPORT_INTERVAL_S: Final = 5.0
"""How often a node reports. Whatever is urgent (a move's outcome, a first measurement) is reported at the next settle."""

MAX_CLIENTS_PER_REPORT: Final = 2_000
"""Changes of clients in one report; the rest follows in the next. Bounds a frame to some hundred kilobytes."""


MAX_ORDERS_REMEMBERED: Final = 1_024

CLIENTS_S: Final = 1.0
"""How long a report of clients that came or went waits for more of them: a person who looks for one need not be patient."""

NEWS_S: Final = 0.1
"""How long a report of something new waits for more of it: a new broker is measured along with others."""


class ClassRule(msgspec.Struct, frozen=True, omit_defaults=True):
    """Topics of ``topic_filter`` are of this class; of several rules that match, the first one holds."""

    topic_filter: str
    topic_class: str
    max_latency_ms: float = 0.0
    """Class ``owned``: the bound from a publisher to its farthest subscriber; 0: none."""
    retention: Retention = Retention()
    """Class ``set:NAME``: how much the set keeps of each topic."""


class ClassRules(msgspec.Struct, frozen=True):
    """All rules there are. ``stamp`` is the wall clock in microseconds when they were decided: the newest ones hold, so that
    a controller that was restarted learns them from the brokers."""

    stamp: int = 0
    rules: tuple[ClassRule, ...] = ()
    sets: tuple[ReplicaSet, ...] = ()
    """Replica sets that rules of class ``set:NAME`` are about."""
    functions: tuple[Function, ...] = ()
    """What reacts to topics of replica sets."""


class Node(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node says of itself. Addresses are ``host:port``; one whose host is empty or stands for every interface gets
    the host that the controller sees the node come from."""

    name: str
    role: Literal["broker", "gateway"]
    epoch: int = 0
    link: str = ""
    """Where a broker takes links."""
    monitoring: str = ""
    """Where a node answers probes, over UDP."""
    mqtt: str = ""
    """Where clients connect, for people and for MQTT 5's Server Reference."""
    site: str = ""
    version: str = ""
    classes: ClassRules = ClassRules()
    draining: bool = False
    """Whether it is being emptied: a controller that was restarted learns it from the broker."""


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A broker, as the controller tells others of it. ``draining``: no client should be sent there."""

    name: str
    link: str
    monitoring: str = ""
    mqtt: str = ""
    site: str = ""
    epoch: int = 0
    draining: bool = False


class Departure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A broker that is no member any more: it ``left`` for good by its own word, or does not answer."""

    name: str
    left: bool = False


class Members(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Brokers that are there, new or changed, and those that are not any more. ``whole``: all there are, as far as this
    controller knows; it may have been started a moment ago."""

    whole: bool = False
    probing: MonitorSettings | None = None
    """How nodes are to measure; with the first list."""
    members: tuple[Member, ...] = ()
    gone: tuple[Departure, ...] = ()


class MoveOrder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Move this client, or without one all clients that are not at ``target`` yet (or only those at ``origin``), to
    ``target``. ``clients_per_second``: how fast at most; 0 is as fast as it goes."""

    number: int
    target: str
    origin: str = ""
    client: str = ""
    clients_per_second: float = 0.0


class Assignment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which broker a gateway is to use for clients that come (``home``), where to go if it is lost (``ranking``, best first,
    the home included), and clients to move now."""

    home: str = ""
    ranking: tuple[str, ...] = ()
    moves: tuple[MoveOrder, ...] = ()


class Leaving(msgspec.Struct, frozen=True):
    """A node is going to stop: it gets no more clients, and when its link ends it has left. ``for_good``: nothing need be
    kept for it then; one that has its sessions on disk comes back for them."""

    for_good: bool = True


class Drain(msgspec.Struct, frozen=True):
    """Whether this broker is being emptied for maintenance."""

    draining: bool


class Measurement(msgspec.Struct, frozen=True, omit_defaults=True):
    """The path to a broker: round-trip time, how much it varies, and the share of probes that were lost (0 to 1). With all
    lost there is no time."""

    target: str
    latency_ms: float
    jitter_ms: float = 0.0
    loss: float = 0.0


class LinkFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """A broker's link to another one, or, with ``hops`` above 1, the way there over others."""

    name: str
    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    queued_messages: int = 0
    hops: int = 1


class ClientFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """A client that is connected: through a gateway to ``broker``, or at the broker that reports it. ``since`` is wall-clock
    seconds."""

    client: str
    broker: str = ""
    since: float = 0.0
    username: str | None = None


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the move ``number`` went. ``longest_gap_ms``: the longest any of its clients could not be served."""

    number: int
    moved: int
    failed: int = 0
    reason: str = ""
    longest_gap_ms: float = 0.0


class Report(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a node tells regularly. Clients are told as changes; ``clients_whole`` begins anew."""

    home: str = ""
    """Gateways: the broker that new clients are connected to."""
    connections: int = 0
    """Clients connected now; for a broker those of gateways as well."""
    gateway_connections: int = 0
    """Brokers: how many of them came through gateways."""
    brokers: dict[str, int] = msgspec.field(default_factory=dict)
    """Gateways: clients by broker."""
    sessions: int = 0
    figures: dict[str, float] = msgspec.field(default_factory=dict)
    """Counters since the start, by name: ``messages_received``, ``messages_sent``, ``bytes_received``, ``bytes_sent``, ..."""
    measurements: list[Measurement] = msgspec.field(default_factory=list)
    links: list[LinkFacts] = msgspec.field(default_factory=list)
    group: GroupFacts | None = None
    """Brokers with broadcast groups: theirs."""
    clients: list[ClientFacts] = msgspec.field(default_factory=list)
    clients_gone: list[str] = msgspec.field(default_factory=list)
    clients_whole: bool = False
    outcomes: list[Outcome] = msgspec.field(default_factory=list)


R = TypeVar("R")

_encode: Final = msgspec.msgpack.Encoder().encode


def pack(kind: int, record: msgspec.Struct) -> bytes:
    """A frame with one record."""
    return frame(kind, _encode(record))


def unpack(content: bytes, record: type[R]) -> R:
    """The record of a frame; one that is none ends the link."""
    try:
        return msgspec.msgpack.decode(memoryview(content)[1:], type=record)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(reasons.MALFORMED_PACKET, f"frame {content[0]}: {error}") from error


class Registrant:
    """A node, as its :class:`Registration` sees it. All of this does nothing; a node overrides what concerns it."""

    def attached(self, registration: Registration) -> None:
        """This is the conversation that the node is told of from now on, and may send on."""

    def node(self) -> Node:
        """What to register with. Asked each time the link comes up: ports and rules may have changed."""
        raise NotImplementedError

    def report(self, now: float) -> Report:
        """What to report now. Lists of changes are handed over: what is in a report is not reported again."""
        return Report()

    def has_news(self) -> bool:
        """Whether clients came or went since the last report."""
        return False

    def registered(self, controller: str, now: float) -> None:
        """The controller is there (again), and is told everything from the beginning: next reports have to be whole."""

    def members(self, changed: tuple[Member, ...], gone: tuple[Departure, ...], now: float) -> None:
        """Brokers that are new or changed, never this node itself, and those that are no members any more."""

    def measured(self, measurement: Measurement, now: float) -> None:
        """The path to a broker was measured. Reporting it is not this node's business."""

    def assigned(self, assignment: Assignment, now: float) -> None:
        """Gateways: what the controller wants."""

    def classes(self, rules: ClassRules, now: float) -> None:
        """Topic classes, only ever newer ones."""

    def draining(self, draining: bool, now: float) -> None:
        """Brokers: this one is to be emptied, or not any more."""

    def owners(self, owners: tuple[Owner, ...], now: float) -> None:
        """Brokers: who owns topics."""

    def migrate(self, order: MigrateOrder, now: float) -> None:
        """Brokers: hand a topic over."""

    def leaves_for_good(self) -> bool:
        """Whether a node that stops now has nothing to come back for."""
        return True

    def controller_lost(self, now: float) -> None:
        """There is no controller now. Nothing changes but that nobody improves things."""

    def settle(self, now: float) -> None:
        """After every event: send what gathered for the controller."""

    def tick(self, now: float) -> None:
        """Time passed."""

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next."""
        return FOREVER


class Registration(LinkUser):
    """A node's conversation with its controller; the link itself is dialled by whoever has the links.

    ``monitor`` measures the paths to the brokers that the controller speaks of, and hears its orders; what it finds goes into
    the reports. Whoever drives the node moves its datagrams.
    """

    def __init__(
        self, registrant: Registrant, monitor: Monitor | None = None, report_interval_s: float = REPORT_INTERVAL_S
    ) -> None:
        self.registrant = registrant
        self.monitor = monitor
        self.gossip: Gossip | None = None
        """Who keeps this node's coordinate, if somebody does: it hears of the brokers. Whoever drives the node drives it."""
        self.link: Link | None = None
        self.controller = ""
        self.name = ""
        self.known: dict[str, Member] = {}
        """Brokers that the controller spoke of, this node not included."""
        self.rules = ClassRules()
        self._report_interval_s = report_interval_s
        self._report_at = FOREVER
        self._urgent = False
        self._leaving = False
        self._measurements: dict[str, Measurement] = {}
        self._reported: dict[str, Measurement] = {}
        self._orders: dict[int, None] = {}
        registrant.attached(self)

    @property
    def up(self) -> bool:
        """Whether there is a controller."""
        return self.link is not None

    def urgent(self) -> None:
        """Something is worth a report at the next settle."""
        self._urgent = True

    def send(self, data: bytes, *, droppable: bool = False) -> bool:
        """Send the controller a frame; false when there is none, or, for what is ``droppable``, when it listens too slowly."""
        link = self.link
        if link is None or link.state != links.UP or (droppable and not link.connection.has_room()):
            return False
        link.send(data)
        return True

    def leave(self, now: float) -> None:
        """Tell the controller that this node stops."""
        self._leaving = True
        if self.link is not None:
            self.link.send(pack(frames.DEREGISTER, Leaving(self.registrant.leaves_for_good())))

    # --- what the owner of the links calls ------------------------------------------------------------------------------

    def link_up(self, link: Link, now: float) -> None:
        before, self.link = self.link, link
        if before is not None:
            before.close("a newer link to the controller took over")
        theirs = link.theirs
        self.controller = theirs.name if theirs is not None else ""
        if self.monitor is not None and theirs is not None:
            self.monitor.registered(theirs.epoch)
        node = self.registrant.node()
        self.name = node.name
        self.rules = node.classes if node.classes.stamp >= self.rules.stamp else self.rules
        link.send(pack(frames.REGISTER, msgspec.structs.replace(node, classes=self.rules)))
        if self._leaving:
            self.leave(now)  # what was said on the link before is forgotten with it
        self._orders.clear()
        self._measurements |= self._reported
        self._reported.clear()
        self.registrant.registered(self.controller, now)
        self._report_at = now
        self._urgent = True

    def link_down(self, link: Link, now: float) -> None:
        if self.link is link:
            self.link = None
            self._report_at = FOREVER
            self.registrant.controller_lost(now)

    def link_frame(self, link: Link, content: bytes, now: float) -> None:
        if link is not self.link:
            return
        kind = content[0]
        if kind == frames.MEMBERS:
            self._members(unpack(content, Members), now)
        elif kind == frames.ASSIGN:
            self._assign(unpack(content, Assignment), now)
        elif kind == frames.CLASSES:
            rules = unpack(content, ClassRules)
            if rules.stamp > self.rules.stamp:
                self.rules = rules
                self.registrant.classes(rules, now)
        elif kind == frames.DRAIN:
            self.registrant.draining(unpack(content, Drain).draining, now)
        elif kind == frames.OWNERS:
            self.registrant.owners(unpack(content, Owners).owners, now)
        elif kind == frames.MIGRATE:
            self.registrant.migrate(unpack(content, MigrateOrder), now)
        else:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"frame {kind} is not the controller's to send")

    def _members(self, told: Members, now: float) -> None:
        if self.monitor is not None and told.probing is not None:
            self.monitor.settings = told.probing
        changed = []
        for member in told.members:
            if member.name != self.name and self.known.get(member.name) != member:
                self.known[member.name] = member
                changed.append(member)
                if self.monitor is not None:
                    self.monitor.know(member.name, member.monitoring, now)
                if self.gossip is not None:
                    self.gossip.know(member.name, member.monitoring, now)
        for departure in told.gone:
            self.known.pop(departure.name, None)
            self._measurements.pop(departure.name, None)
            self._reported.pop(departure.name, None)
            if self.monitor is not None:
                self.monitor.forget(departure.name)
            if self.gossip is not None:
                self.gossip.forget(departure.name)
        if changed or told.gone:
            self.registrant.members(tuple(changed), told.gone, now)

    def _assign(self, assignment: Assignment, now: float) -> None:
        """An order may come twice, over UDP and over the link: it is carried out once."""
        moves = tuple(move for move in assignment.moves if move.number not in self._orders)
        for move in moves:
            self._orders[move.number] = None
            if len(self._orders) > MAX_ORDERS_REMEMBERED:
                del self._orders[next(iter(self._orders))]
        self.registrant.assigned(msgspec.structs.replace(assignment, moves=moves), now)

    # --- what the monitor finds -----------------------------------------------------------------------------------------

    def _hear_monitor(self, monitor: Monitor, now: float) -> None:
        for event in monitor.take_events():
            if isinstance(event, Measured):
                quality = event.quality
                found = Measurement(event.target, quality.latency_ms, quality.jitter_ms, quality.loss)
                before = self._reported.get(event.target)
                if before is None or event.news or _differs(before, found):
                    self._measurements[event.target] = found
                if event.news and self.link is not None:
                    self._report_at = min(self._report_at, now + NEWS_S)
                self.registrant.measured(found, now)
            elif isinstance(event, Ordered):
                order = MoveOrder(number=event.number, target=event.broker)
                self._assign(Assignment(home=event.broker, moves=(order,)), now)

    def settle(self, now: float) -> None:
        if self.monitor is not None:
            self._hear_monitor(self.monitor, now)
        self.registrant.settle(now)
        if self._urgent and self.link is not None and self.link.state == links.UP:
            self._report(now)

    def tick(self, now: float) -> None:
        if self.monitor is not None:
            self.monitor.tick(now)
        self.registrant.tick(now)
        if self.link is not None:
            if self._report_at > now + CLIENTS_S and self.registrant.has_news():
                self._report_at = now + CLIENTS_S
            if now >= self._report_at:
                self._report(now)

    def _report(self, now: float) -> None:
        link = self.link
        if link is None or not link.connection.has_room():
            self._report_at = now + NEWS_S
            return
        self._urgent = False
        self._report_at = now + self._report_interval_s
        report = self.registrant.report(now)
        report.measurements.extend(self._measurements.values())
        self._reported |= self._measurements
        self._measurements.clear()
        link.send(pack(frames.REPORT, report))

    def next_deadline(self) -> float:
        deadline = min(self._report_at, self.registrant.next_deadline())
        return deadline if self.monitor is None else min(deadline, self.monitor.next_deadline())


def _differs(before: Measurement, after: Measurement) -> bool:
    """Whether a measurement changed enough to be reported."""
    change_ms = abs(after.latency_ms - before.latency_ms)
    return change_ms > max(0.1, 0.05 * before.latency_ms) or abs(after.loss - before.loss) > 0.05
