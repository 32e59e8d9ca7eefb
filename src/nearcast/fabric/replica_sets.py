"""Replica sets: topics that several brokers keep as one log, whose leader orders them (Canal, sections III-B to III-E).

Every broker *proposes* what its clients publish (:mod:`nearcast.fabric.set_sessions`) and *reads* what its subscribers want
(:mod:`nearcast.fabric.set_cursors`); the members of a set *host* it (:mod:`nearcast.fabric.hosted_sets`). Between brokers::

    SET_RAFT       member → member    what replicas say to each other (nearcast.raft.messages)
    SET_LEADER     member → broker    who leads a set, in which term; nobody: not this broker, ask again
    SET_OPEN       broker → leader    I have messages for the set; since then I number them
    SET_CHANNEL    leader → broker    all of yours up to this number is committed: go on behind it
    SET_MESSAGES   broker → leader    messages (nearcast.fabric.messages), in order
    SET_COMMITTED  leader → broker    all up to this number is committed; these have these indexes
    SET_READER     broker → leader    I have everything up to this entry; 0: I never had anything
    SET_RECORDS    leader → broker    what you want of the entries behind one, up to another
    SET_READ       broker → leader    that is in my journal
    SET_PART       any → any          some of a frame that is longer than a link takes (nearcast.fabric.set_parts)

A broker that leads a set itself says all of this to itself, by the same functions; what has to wait for the journal goes by a
connection to nobody (:class:`Loopback`), because connections are what waits for journals.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, Protocol

from nearcast.errors import RemoteProtocolError, StorageUnavailable
from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.fabric.hosted_sets import HostedSet, SetLog
from nearcast.fabric.parts import FOREVER, Part, Peer
from nearcast.fabric.set_cursors import CURSOR_PREFIX, Cursors
from nearcast.fabric.set_parts import Parts, cut
from nearcast.fabric.set_sessions import SET_PREFIX, SetSession, SetWatch
from nearcast.functionconfig import Function
from nearcast.mqtt.access import Peer as TransportPeer
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.records import Fields, blob, number
from nearcast.mqtt.routing import Route
from nearcast.raft import messages as raft_messages
from nearcast.raft.messages import Message
from nearcast.raft.settings import RaftSettings

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric
    from nearcast.fabricconfig import ReplicaSet
    from nearcast.mqtt.pledges import Pledge
    from nearcast.mqtt.publication import Publication

ASK_S: Final = 0.25
"""How often a broker that needs a set's leader and knows none asks the members."""

MAX_INDEXES: Final = 65_536
"""In one SET_COMMITTED."""


class SetDriver(Protocol):
    """What a broker's process does for its sets."""

    def open_log(self, definition: ReplicaSet, members: dict[int, str]) -> SetLog:
        """The log of a set that this broker is a member of, as the disk has it; a new one if there is none."""

    def function_has_work(self, set_name: str, function: str) -> None:
        """A function has messages to handle."""

    def functions_changed(self) -> None:
        """Other functions are to run here, or none."""

    def close_log(self, set_name: str) -> None:
        """A set is not hosted here any more. What is on disk stays."""

    def request_sync(self, set_name: str, ready: int) -> None:
        """Flush a set's log, then say :meth:`ReplicaSets.synced` with this number."""

    def looped(self) -> None:
        """There is something in :attr:`ReplicaSets.looped`: settle once more, soon."""

    def failed(self, error: StorageUnavailable) -> None:
        """A disk does not take what must be kept."""


class Loopback:
    """A transport that leads nowhere: what a broker says to itself, once the journal has what that rests on."""

    def __init__(self, sets: ReplicaSets) -> None:
        self.connection: Connection | None = None
        self.held_bytes = 0
        self.waits_to_close = False
        self._sets = sets

    def send(self, chunks: list[bytes]) -> None:
        self._sets.loop_back(chunks)

    def close(self) -> None:
        """There is nothing to close."""


class _Lead:
    """Who leads a set, as far as this broker knows."""

    def __init__(self, name: str, term: int) -> None:
        self.name = name
        self.term = term


class ReplicaSets(Part):
    """See the module. One per broker."""

    def __init__(self, fabric: Fabric, definitions: tuple[ReplicaSet, ...]) -> None:
        self.fabric = fabric
        #: Those of the configuration are hosted whatever the controller says.
        self._configured = definitions
        self.definitions = {definition.name: definition for definition in definitions}
        self.hosted: dict[str, HostedSet] = {}
        self.sessions: dict[str, SetSession] = {}
        self.cursors = Cursors(fabric)
        self._parts = Parts()
        self.functions: tuple[Function, ...] = ()
        self.driver: SetDriver | None = None
        self.looped: list[bytes] = []
        self._leads: dict[str, _Lead] = {}
        self._ask_at = FOREVER
        self._asked_at = -ASK_S
        # By set: who said of himself, and for which term, that he does not lead it. Others may not have noticed yet.
        self._denied: dict[str, tuple[str, int]] = {}
        self._loopback: Connection | None = None
        fabric.add_part(
            self,
            [
                frames.SET_RAFT,
                frames.SET_LEADER,
                frames.SET_OPEN,
                frames.SET_CHANNEL,
                frames.SET_MESSAGES,
                frames.SET_COMMITTED,
                frames.SET_READER,
                frames.SET_RECORDS,
                frames.SET_READ,
                frames.SET_PART,
            ],
        )

    def begin(self, now: float) -> None:
        """The journal was read: host the sets that this broker is a member of, and go on with what was proposed to others."""
        for definition in self.definitions.values():
            if self.fabric.name in definition.members and self.driver is not None:
                self._host(definition, now)
        for client_id in list(self.fabric.engine.sessions.by_client):
            if client_id[1:2] == SET_PREFIX and client_id[:1] == "\0":
                self.session(client_id[2:])
        for set_name in self.definitions:
            self.session(set_name)

    def replace(self, definitions: tuple[ReplicaSet, ...], now: float) -> None:
        """These are the sets from now on. Members of one that is there already are what its log says they are."""
        wanted = {definition.name: definition for definition in (*self._configured, *definitions)}
        for set_name in [name for name in self.definitions if name not in wanted]:
            del self.definitions[set_name]
            self._leads.pop(set_name, None)
            if self.hosted.pop(set_name, None) is not None and self.driver is not None:
                self.driver.close_log(set_name)
            self.cursors.forget(set_name)
            session = self.sessions.get(set_name)
            if session is not None:
                session.abandon()
        for definition in definitions:
            if definition.name in self.definitions:
                self.definitions[definition.name] = definition
                continue
            self.definitions[definition.name] = definition
            if self.fabric.name in definition.members:
                self._host(definition, now)
            self.session(definition.name)

    def deploy(self, functions: tuple[Function, ...]) -> None:
        """These functions react to topics of sets from now on."""
        if functions == self.functions:
            return
        self.functions = functions
        for hosted in self.hosted.values():
            hosted.functions.deploy(functions)
        if self.driver is not None:
            self.driver.functions_changed()

    def function_has_work(self, set_name: str, function: str) -> None:
        if self.driver is not None:
            self.driver.function_has_work(set_name, function)

    def _host(self, definition: ReplicaSet, now: float) -> None:
        driver = self.driver
        if driver is None:
            return
        members = {replica_number(name): name for name in definition.members}
        hosted = HostedSet(
            self,
            definition.name,
            replica_number(self.fabric.name),
            members,
            driver.open_log(definition, members),
            RaftSettings(),
            self.fabric.rng,
            now,
        )
        hosted.node.set_priority(1 if definition.preferred == self.fabric.name else 0, now)
        hosted.functions.deploy(self.functions)
        self.hosted[definition.name] = hosted

    # --- routes ---------------------------------------------------------------------------------------------------------

    def session(self, set_name: str) -> SetSession:
        """What waits for a set, from now on."""
        found = self.sessions.get(set_name)
        if found is None:
            made = self.fabric.channels.session_for(SET_PREFIX + set_name)
            if not isinstance(made, SetSession):
                raise TypeError("a replica set's queue with the name of a broker")
            found = made
            found.sets = self
            self.sessions[set_name] = found
            self._promise(found)
            self._reopen(set_name)
        return found

    def _promise(self, session: SetSession) -> None:
        """What the journal has of a queue was published by clients that may ask for it again, and is not committed yet."""
        by_client = self.fabric.engine.sessions.by_client
        for client_id, last in session.unanswered().items():
            publisher = by_client.get(client_id)
            if publisher is not None and publisher.received_ids:
                publisher.awaits(session.promise(last))

    def direct(self, route: Route, set_name: str) -> None:
        """Make the route of a topic that a set keeps."""
        watch = SetWatch(self.session(set_name))
        route.watch = watch
        route.way = watch.way

    # --- proposing ------------------------------------------------------------------------------------------------------

    def takes(self, set_name: str) -> bool:
        """Whether the way to a set's leader takes more now."""
        lead = self._leads.get(set_name)
        if lead is None:
            return False
        if lead.name == self.fabric.name:
            return True
        peer = self.fabric.peers.get(lead.name)
        return peer is not None and peer.has_room()

    def publish(self, publication: Publication, publisher: str, now: float) -> Pledge | None:
        """A message of a replicated topic that came in another way than MQTT, with QoS 1 or 2; the promise about it."""
        route = self.fabric.engine.router.route_for(publication.topic)
        watch = route.watch
        if not isinstance(watch, SetWatch):
            return None
        effects = self.fabric.engine.effects
        effects.pledge = None
        watch.sponsor = publisher
        self.fabric.engine.router.publish(route, publication, None, now)
        watch.sponsor = ""
        return effects.take_pledge()

    def writable(self, name: str, now: float) -> None:
        """The way to a broker takes more again: what waits for the sets that it leads goes on."""
        for set_name, session in self.sessions.items():
            if self.leader_of(set_name) == name:
                session.drain(now)

    def propose(self, set_name: str, content: bytes, held: bool) -> None:
        """Send messages to a set's leader; ``held``: not before the journal has them."""
        data = frame(frames.SET_MESSAGES, blob(set_name.encode("utf-8")), content)
        lead = self._leads.get(set_name)
        self._send("" if lead is None else lead.name, data, held)

    def _send(self, name: str, data: bytes, held: bool = False) -> None:
        """To another broker, or to this one itself."""
        if name == self.fabric.name:
            if held:
                self._own_connection().push_held(data)
            else:
                self.looped.append(data)
            return
        peer = self.fabric.peers.get(name)
        if peer is None:
            return
        if held:
            peer.send_held(data)
        else:
            peer.send(data)

    def loop_back(self, sent: list[bytes]) -> None:
        """What this broker says to itself may be said now: the journal has what it rests on."""
        self.looped += sent
        if self.driver is not None:
            self.driver.looped()

    def _own_connection(self) -> Connection:
        found = self._loopback
        if found is None:
            handle = Loopback(self)
            limits = self.fabric.limits
            found = Connection(self.fabric.engine.effects, TransportPeer("loopback"), handle, 0.0, limits)
            handle.connection = found
            self._loopback = found
        return found

    def _reopen(self, set_name: str) -> None:
        """Ask the leader from where on it wants what waits here."""
        session = self.sessions.get(set_name)
        lead = self._leads.get(set_name)
        if session is None:
            return
        session.closed()
        if lead is not None and lead.name:
            self._send(lead.name, frame(frames.SET_OPEN, blob(set_name.encode("utf-8")), number(self.fabric.epoch)))
        else:
            self._ask_at = min(self._ask_at, self._asked_at + ASK_S)

    # --- what hosted sets say -------------------------------------------------------------------------------------------

    def send_raft(self, hosted: HostedSet, message: Message) -> None:
        peer = self.fabric.peers.get(hosted.members.get(message.target, ""))
        if peer is not None:
            for data in cut(frames.SET_RAFT, [blob(hosted.name.encode("utf-8")), *message.encode()]):
                peer.send(data)

    def request_sync(self, set_name: str, ready: int) -> None:
        if self.driver is not None:
            self.driver.request_sync(set_name, ready)

    def synced(self, set_name: str, ready: int, now: float) -> None:
        """A flush is done that covers everything up to a Ready."""
        hosted = self.hosted.get(set_name)
        if hosted is not None:
            hosted.persisted(ready, now)

    def led_by(self, hosted: HostedSet, now: float) -> None:
        """A replica here knows of another leader, or that there is none."""
        if self.driver is not None:
            self.driver.functions_changed()
        if hosted.leads:
            for peer in self.fabric.peers.values():
                self.tell_leader(peer.name, hosted)
        if hosted.leader or hosted.leads:
            self._led(hosted.name, hosted.leader, hosted.term, now)
        else:
            self._nobody_leads(hosted.name)

    def tell_leader(self, name: str, hosted: HostedSet) -> None:
        """Tell a broker who leads; one that hears that this one does asks from where on its messages are wanted."""
        leader = "" if hosted.leader == self.fabric.name and not hosted.leads else hosted.leader
        fields = (blob(hosted.name.encode("utf-8")), number(hosted.term), blob(leader.encode("utf-8")))
        self._send(name, frame(frames.SET_LEADER, *fields))

    def tell_channel(self, name: str, hosted: HostedSet, last: int) -> None:
        self._send(name, frame(frames.SET_CHANNEL, blob(hosted.name.encode("utf-8")), number(last)))

    def tell_committed(self, name: str, hosted: HostedSet, last: int, indexes: dict[int, int]) -> None:
        fields = [blob(hosted.name.encode("utf-8")), number(last), number(len(indexes))]
        for sequence, index in indexes.items():
            fields.append(number(sequence) + number(index))
        self._send(name, frame(frames.SET_COMMITTED, *fields))

    def serve_here(self, hosted: HostedSet, now: float) -> None:
        """This broker leads a set: what is committed goes to its own subscribers."""
        origin = self.fabric.engine.origins.of(CURSOR_PREFIX + hosted.name)
        if not origin.received and hosted.commit:
            self.cursors.reached(hosted.name, hosted.commit)
        while origin.received < hosted.commit:
            runs = hosted.log.runs(origin.received + 1)
            if runs is None:
                return
            at = 0
            for run in runs:
                self.cursors.deliver(hosted.name, origin.received + 1, at, run, now)
                at += run.count
            self.cursors.reached(hosted.name, origin.received + 1)

    # --- who leads ------------------------------------------------------------------------------------------------------

    def leader_of(self, set_name: str) -> str:
        """Who leads a set, as far as is known here; empty if it is not."""
        lead = self._leads.get(set_name)
        return "" if lead is None else lead.name

    def _led(self, set_name: str, leader: str, term: int, now: float) -> None:
        known = self._leads.get(set_name)
        if known is not None and (term < known.term or (term == known.term and known.name and known.name != leader)):
            return
        peer = self.fabric.peers.get(leader)
        if leader != self.fabric.name and (peer is None or not peer.up):
            return
        self._leads[set_name] = _Lead(leader, term)
        if leader == self.fabric.name:
            hosted = self.hosted.get(set_name)
            if hosted is None or not hosted.leads:
                return
        else:
            self._send(leader, frame(frames.SET_READER, blob(set_name.encode("utf-8")), number(self.cursors.of(set_name))))
        self._reopen(set_name)

    def _nobody_leads(self, set_name: str) -> None:
        lead = self._leads.get(set_name)
        if lead is not None:
            lead.name = ""
        session = self.sessions.get(set_name)
        if session is not None:
            session.closed()
        self._ask_at = min(self._ask_at, self._asked_at + ASK_S)

    # --- frames ---------------------------------------------------------------------------------------------------------

    def handle(self, peer: Peer, content: bytes, now: float) -> None:
        if content[0] == frames.SET_PART:
            whole = self._parts.add(peer.name, content)
            if whole is None:
                return
            content = whole
        self._handle(peer.name, peer, content, now)

    def _handle(self, name: str, peer: Peer | None, content: bytes, now: float) -> None:
        fields = Fields(content)
        kind = content[0]
        set_name = fields.blob().decode("utf-8")
        hosted = self.hosted.get(set_name)
        if kind == frames.SET_RAFT:
            if hosted is not None and name in hosted.members.values():
                message = raft_messages.decode(content[fields.position :])
                if hosted.members.get(message.source) != name:
                    raise RemoteProtocolError(0x82, f"{name} speaks for another replica")
                hosted.step(message, now)
        elif kind == frames.SET_LEADER:
            self._told_leader(name, set_name, fields.number(), fields.blob().decode("utf-8"), now)
        elif kind in (frames.SET_OPEN, frames.SET_MESSAGES, frames.SET_READER, frames.SET_READ):
            if hosted is not None:
                self._to_leader(hosted, kind, name, peer, fields, now)
        elif kind == frames.SET_CHANNEL:
            session = self.sessions.get(set_name)
            if session is not None and self.leader_of(set_name) == name:
                session.opened(fields.number(), now)
        elif kind == frames.SET_COMMITTED:
            self._committed(set_name, fields, now)
        elif peer is not None and set_name in self.definitions:
            self.cursors.arrived(peer, set_name, fields, now)

    def _to_leader(self, hosted: HostedSet, kind: int, name: str, peer: Peer | None, fields: Fields, now: float) -> None:
        if kind == frames.SET_OPEN:
            if name != self.fabric.name or fields.number() == self.fabric.epoch:
                hosted.opens(name, self._epoch_of(name))
        elif kind == frames.SET_MESSAGES:
            # What follows is a frame's content without its length: its kind byte is skipped by whoever reads it.
            hosted.proposes(name, self._epoch_of(name), fields.data[fields.position :], now)
        elif peer is not None and hosted.leads:
            if kind == frames.SET_READER:
                hosted.readers.opens(peer, fields.number(), hosted.commit)
            else:
                hosted.readers.has(name, fields.number())

    def _epoch_of(self, name: str) -> int:
        peer = self.fabric.peers.get(name)
        return self.fabric.epoch if peer is None else peer.epoch

    def _told_leader(self, name: str, set_name: str, term: int, leader: str, now: float) -> None:
        if set_name not in self.definitions or set_name in self.hosted:
            if set_name in self.hosted and leader == name:
                self._led(set_name, leader, term, now)
            return
        if not leader:
            self._denied[set_name] = (name, term)
            if self.leader_of(set_name) == name:
                self._nobody_leads(set_name)
        elif leader == name or (leader, term) != self._denied.get(set_name):
            self._led(set_name, leader, term, now)

    def _committed(self, set_name: str, fields: Fields, now: float) -> None:
        session = self.sessions.get(set_name)
        last = fields.number()
        count = fields.number()
        if count > MAX_INDEXES:
            raise ValueError("more indexes than messages")
        indexes = {fields.number(): fields.number() for _ in range(count)}
        if session is not None:
            session.committed(last, indexes, now)

    def interest_changed(self, name: str) -> None:
        """A broker wants other messages from here on."""
        for hosted in self.hosted.values():
            if hosted.leads:
                hosted.readers.tell(name)

    # --- brokers come and go --------------------------------------------------------------------------------------------

    def peer_up(self, peer: Peer, now: float) -> None:
        for hosted in self.hosted.values():
            self.tell_leader(peer.name, hosted)

    def peer_down(self, peer: Peer, now: float) -> None:
        self._parts.forget(peer.name)
        for hosted in self.hosted.values():
            hosted.readers.by_name.pop(peer.name, None)
            for replica, name in hosted.members.items():
                if name == peer.name:
                    hosted.node.unreachable(replica, now)
        for set_name, lead in self._leads.items():
            if lead.name == peer.name:
                self._nobody_leads(set_name)

    # --- time -----------------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        while True:
            try:
                for hosted in self.hosted.values():
                    hosted.settle(now)
            except StorageUnavailable as error:
                self.hosted.clear()
                if self.driver is not None:
                    self.driver.failed(error)
            if not self.looped:
                break
            looped, self.looped = self.looped, []
            for data in looped:
                self._handle(self.fabric.name, None, data[frames.LENGTH_BYTES :], now)
        self.cursors.settle(now)

    def tick(self, now: float) -> None:
        for hosted in self.hosted.values():
            hosted.tick(now)
        if now >= self._ask_at:
            self._ask_at = FOREVER
            self._ask(now)

    def _ask(self, now: float) -> None:
        """Members of sets whose leader is not known are asked."""
        self._asked_at = now
        for definition in self.definitions.values():
            if self.leader_of(definition.name):
                continue
            self._ask_at = now + ASK_S
            for name in definition.members:
                if name != self.fabric.name:
                    fields = (blob(definition.name.encode("utf-8")), number(self.fabric.epoch))
                    self._send(name, frame(frames.SET_OPEN, *fields))

    def next_deadline(self) -> float:
        deadline = self._ask_at
        for hosted in self.hosted.values():
            deadline = min(deadline, hosted.next_deadline())
        return deadline


def replica_number(name: str) -> int:
    """A broker's number as a replica."""
    return 1 + int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:7], "big")
