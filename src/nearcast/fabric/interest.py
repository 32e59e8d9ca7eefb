"""Who wants what: which filters have a subscriber at which broker, known everywhere, version by version.

A broker's interest is the set of filters that at least one of its sessions subscribes to; a shared subscription counts with
its group (``$share/group/filter``). Every change makes the next version. Brokers tell each other changes as they happen, as
INTEREST frames from one version to another; a frame that does not begin where the receiver is makes it ask for everything
(INTEREST_ASK), and so does a link that comes up. Another broker's interest is the subscriptions of its session, so that
routing finds it like any subscriber; a filter that nobody there wants any more is removed, and no message crosses the link in
vain. Filters of ``$SYS/`` stay at home: a broker's figures are its own.

INTEREST_ACK says which version is in place, and the receiver's sequence at that moment: every message it takes on from there
on goes where that version says, also after a crash, because the acknowledgement waits for the journal.

A client's SUBACK waits until every broker that is there has the subscription, for one round trip to the farthest of them. So
what is published anywhere after SUBACK arrives. A broker that does not answer in time is not waited for
(``subscribe_timeout_seconds``)::

    INTEREST   flags (1: everything there is, 2: more of this version follows) | version before | version
               | number, filters that are new | number, filters that are gone
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from nearcast.fabric import frames
from nearcast.fabric.channels import PEER_PREFIX
from nearcast.fabric.frames import frame
from nearcast.fabric.parts import FOREVER, Part, Peer
from nearcast.mqtt.connection import CONNECTED, Connection
from nearcast.mqtt.records import Fields, blob, number
from nearcast.mqtt.subscriptions import Subscription
from nearcast.mqtt.topics import filter_fault, parse_shared

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric

WHOLE: Final = 1
MORE: Final = 2

#: Filters of one frame, in bytes, beyond which another one is begun.
MAX_PIECE_BYTES: Final = 262_144

#: SUBACKs of one client that may wait: one who asks for more without waiting for an answer gets the oldest early.
MAX_HELD: Final = 1_000

#: Filters that another broker may have: what its own clients may, and no more than memory bears.
MAX_FILTERS: Final = 10_000_000


def shared_name(group: str, inner_filter: str) -> str:
    """A filter as a client would write it."""
    return f"$share/{group}/{inner_filter}" if group else inner_filter


class HeldAnswer:
    """A SUBACK (or what came behind one) that waits until a version is in place everywhere."""

    def __init__(self, answer: bytes, version: int, due_at: float) -> None:
        self.answer = answer
        self.version = version
        self.due_at = due_at


class Interest(Part):
    """This broker's interest, and that of the others. See the module."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._tree = fabric.engine.tree
        self._counts: dict[str, int] = {}
        #: The version that is in place here. What changed since the last one was told is in ``_added`` and ``_removed``.
        self.version = 1
        self._added: dict[str, None] = {}
        self._removed: dict[str, None] = {}
        #: By peer: the version of theirs that is in place here, and the version of ours that is in place there.
        self.theirs: dict[str, int] = {}
        self.confirmed: dict[str, int] = {}
        #: By peer: its sequence when it put our last confirmed version in place.
        self.confirmed_at: dict[str, int] = {}
        # By peer: the filters of an INTEREST frame with everything, as far as its pieces came.
        self._gathering: dict[str, set[str]] = {}
        # New filters that are not in place everywhere, oldest first, with the version that has them.
        self._spreading: dict[str, int] = {}
        self._held: dict[Connection, list[HeldAnswer]] = {}
        # What of that waits for which version, lowest first (behind it, a number that keeps equal ones apart): with thousands
        # of clients that wait, not all of them are looked at with every word of every broker.
        self._waiting: list[tuple[int, int, Connection]] = []
        self._timeout_s: float = fabric.settings.subscribe_timeout_seconds
        #: SUBACKs that waited, and those that were sent although some broker had not answered.
        self.held_answers = 0
        self.late_answers = 0
        self._tree.watcher = self
        fabric.engine.requests.gate = self
        fabric.add_part(self, [frames.INTEREST, frames.INTEREST_ACK, frames.INTEREST_ASK])

    # --- ours -----------------------------------------------------------------------------------------------------------

    def filters(self) -> list[str]:
        """What anybody here subscribes to."""
        return list(self._counts)

    def subscribed(self, group: str, inner_filter: str, client_id: str) -> None:
        if inner_filter[:5] == "$SYS/":
            return
        name = shared_name(group, inner_filter)
        if client_id[:1] == PEER_PREFIX:
            self._fabric.broadcast.subscribed(client_id[1:], name)
            return
        if client_id in self._fabric.leftovers.by_client:
            self._fabric.leftovers.subscribed(client_id, name)
        self._fabric.hints.changed(client_id)
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        if count == 0:
            self._fabric.broadcast.subscribed(self._fabric.name, name)
            if name in self._removed:
                del self._removed[name]
            else:
                self._added[name] = None

    def unsubscribed(self, group: str, inner_filter: str, client_id: str) -> None:
        if inner_filter[:5] == "$SYS/":
            return
        name = shared_name(group, inner_filter)
        if client_id[:1] == PEER_PREFIX:
            self._fabric.broadcast.unsubscribed(client_id[1:], name)
            return
        if client_id in self._fabric.leftovers.by_client:
            self._fabric.leftovers.unsubscribed(client_id, name)
        self._fabric.hints.changed(client_id)
        count = self._counts.get(name, 0) - 1
        if count > 0:
            self._counts[name] = count
            return
        self._counts.pop(name, None)
        self._fabric.broadcast.unsubscribed(self._fabric.name, name)
        if name in self._added:
            del self._added[name]
        else:
            self._removed[name] = None

    def recount(self) -> None:
        """Count everything there is, also what was subscribed before anybody watched."""
        self._counts = {}
        self._added = {}
        self._removed = {}
        for session in self._fabric.engine.sessions.by_client.values():
            for topic_filter in session.subscriptions:
                group, inner = parse_shared(topic_filter)
                self.subscribed(group, inner, session.client_id)

    def settle(self, now: float) -> None:
        if not self._added and not self._removed:
            return
        before = self.version
        self.version += 1
        added = list(self._added)
        removed = list(self._removed)
        self._added = {}
        self._removed = {}
        self._fabric.broadcast.interest_changed(self._fabric.name, self.version, added)
        spreads = self._fabric.broadcast.awaits_cloud()
        data = b""
        for peer in self._fabric.peers.values():
            if peer.up:
                data = data or _interest(0, before, self.version, added, removed)
                peer.send(data)
                spreads = True
        if spreads:
            for name in added:
                self._spreading[name] = self.version

    def _send_all(self, peer: Peer) -> None:
        peer.send(_interest(WHOLE, 0, self.version, list(self._counts), []))

    # --- answers that wait ----------------------------------------------------------------------------------------------

    def hold(self, connection: Connection, names: list[str], answer: bytes, now: float) -> bool:
        """Whether an answer to SUBSCRIBE or UNSUBSCRIBE is kept back here until these filters are known everywhere."""
        if self._timeout_s <= 0:
            return False
        waiting = self._held.get(connection)
        self.settle(now)
        version = 0
        everywhere = self.everywhere()
        if everywhere == 0 and names:  # a broker that came just now knows nothing yet
            version = self.version
        elif self._spreading:
            for name in names:
                version = max(version, self._spreading.get(name, 0))
        if waiting is None:
            if version <= everywhere:
                return False
            waiting = []
            self._held[connection] = waiting
        elif not version:
            version = waiting[-1].version  # answers stay in order
        waiting.append(HeldAnswer(answer, version, now + self._timeout_s))
        self.held_answers += 1
        heapq.heappush(self._waiting, (version, self.held_answers, connection))
        if len(waiting) > MAX_HELD:
            self.late_answers += 1
            self._answer(connection, waiting)
        return True

    def answer(self, connection: Connection) -> None:
        """Send what waits for a connection now; whoever moves its session away has made sure of the rest."""
        for held in self._held.pop(connection, []):
            connection.push_held(held.answer)

    def take(self, connection: Connection) -> list[HeldAnswer]:
        """What waits for a connection that is about to be replaced by another one."""
        return self._held.pop(connection, [])

    def give(self, connection: Connection, waiting: list[HeldAnswer]) -> None:
        """Have it wait for this one."""
        if waiting:
            self._held[connection] = waiting
            for held in waiting:
                self.held_answers += 1
                heapq.heappush(self._waiting, (held.version, self.held_answers, connection))
            self._release()

    def everywhere(self) -> int:
        """The version that all brokers that are there have in place, and the cloud; all versions when there is none."""
        everywhere = self.version
        if self._fabric.broadcast.awaits_cloud():
            everywhere = min(everywhere, self._fabric.broadcast.covered_version())
        for peer in self._fabric.peers.values():
            if peer.up:
                everywhere = min(everywhere, self.confirmed.get(peer.name, 0))
        return everywhere

    def covered(self) -> None:
        """More, or nothing any more, is in place at the cloud."""
        self._release()

    def _release(self) -> None:
        if not self._spreading and not self._waiting:
            return
        everywhere = self.everywhere()
        while self._spreading:
            name = next(iter(self._spreading))
            if self._spreading[name] > everywhere:
                break
            del self._spreading[name]
        while self._waiting and self._waiting[0][0] <= everywhere:
            _, _, connection = heapq.heappop(self._waiting)
            waiting = self._held.get(connection)
            if waiting is None:
                continue
            while waiting and waiting[0].version <= everywhere:
                self._answer(connection, waiting)
            if not waiting:
                del self._held[connection]

    def _answer(self, connection: Connection, waiting: list[HeldAnswer]) -> None:
        held = waiting.pop(0)
        if connection.state == CONNECTED:
            connection.push_held(held.answer)

    def tick(self, now: float) -> None:
        for connection, waiting in list(self._held.items()):
            while waiting and waiting[0].due_at <= now:
                self.late_answers += 1
                self._answer(connection, waiting)
            if not waiting or connection.state != CONNECTED:
                del self._held[connection]
        if len(self._waiting) > MAX_HELD:
            self._tidy()

    def _tidy(self) -> None:
        """A broker that is there and never confirms must not make us remember everybody who waited for it in vain."""
        held = 0
        for waiting in self._held.values():
            held += len(waiting)
        if len(self._waiting) > 2 * held:
            found: list[tuple[int, int, Connection]] = []
            for connection, waiting in self._held.items():
                for answer in waiting:
                    found.append((answer.version, len(found), connection))
            heapq.heapify(found)
            self._waiting = found

    def next_deadline(self) -> float:
        deadline = FOREVER
        for waiting in self._held.values():
            deadline = min(deadline, waiting[0].due_at)
        return deadline

    # --- theirs ---------------------------------------------------------------------------------------------------------

    def peer_up(self, peer: Peer, now: float) -> None:
        self._forget(peer)
        self.settle(now)
        self._send_all(peer)

    def peer_down(self, peer: Peer, now: float) -> None:
        self._forget(peer)
        self._release()

    def peer_gone(self, peer: Peer, now: float) -> None:
        self._forget(peer)
        self._release()

    def _forget(self, peer: Peer) -> None:
        self.theirs.pop(peer.name, None)
        self.confirmed.pop(peer.name, None)
        self.confirmed_at.pop(peer.name, None)
        self._gathering.pop(peer.name, None)

    def handle(self, peer: Peer, content: bytes, now: float) -> None:
        fields = Fields(content)
        if content[0] == frames.INTEREST_ASK:
            self.settle(now)
            self._send_all(peer)
        elif content[0] == frames.INTEREST_ACK:
            self.confirmed[peer.name] = fields.number()
            self.confirmed_at[peer.name] = fields.number()
            self._fabric.leftovers.confirmed(peer)
            self._release()
        else:
            self._take(peer, fields)

    def _take(self, peer: Peer, fields: Fields) -> None:
        flags = fields.number()
        before = fields.number()
        version = fields.number()
        added = [fields.blob().decode("utf-8") for _ in range(fields.number())]
        removed = [fields.blob().decode("utf-8") for _ in range(fields.number())]
        sessions = self._fabric.engine.sessions
        session = peer.session
        if flags & WHOLE:
            wanted = self._gathering.get(peer.name)
            if wanted is None:
                wanted = set()
                self._gathering[peer.name] = wanted
            wanted.update(added)
            if not flags & MORE:
                del self._gathering[peer.name]
                removed = [name for name in session.subscriptions if name not in wanted]
        elif before != self.theirs.get(peer.name, -1):
            if not flags & MORE:
                peer.send(frame(frames.INTEREST_ASK))
            return
        self._fabric.sets.interest_changed(peer.name)
        for name in removed:
            sessions.unsubscribe(session, name)
        for name in added:
            _, inner = parse_shared(name)
            # More levels than are allowed here: no message of ours has them. Refusing would end the link again and again.
            if name in session.subscriptions or filter_fault(inner, self._fabric.limits.max_topic_levels):
                continue
            if len(session.subscriptions) >= MAX_FILTERS:
                raise ValueError(f"more than {MAX_FILTERS} filters")
            sessions.subscribe(session, Subscription(session, name, 2, retain_as_published=True))
        if not flags & MORE:
            self.theirs[peer.name] = version
            self._fabric.broadcast.interest_changed(peer.name, version, added)
            peer.send_held(frame(frames.INTEREST_ACK, number(version), number(self._fabric.engine.router.next_sequence - 1)))


def _interest(flags: int, before: int, version: int, added: list[str], removed: list[str]) -> bytes:
    """One or more INTEREST frames, ready to be sent."""
    made: list[bytes] = []
    new: list[bytes] = []
    gone: list[bytes] = []
    size = 0
    for name in added:
        encoded = blob(name.encode("utf-8"))
        new.append(encoded)
        size += len(encoded)
        if size >= MAX_PIECE_BYTES:
            made.append(_piece(flags | MORE, before, version, new, gone))
            new = []
            size = 0
    for name in removed:
        encoded = blob(name.encode("utf-8"))
        gone.append(encoded)
        size += len(encoded)
        if size >= MAX_PIECE_BYTES:
            made.append(_piece(flags | MORE, before, version, new, gone))
            new = []
            gone = []
            size = 0
    made.append(_piece(flags, before, version, new, gone))
    return b"".join(made)


def _piece(flags: int, before: int, version: int, new: list[bytes], gone: list[bytes]) -> bytes:
    return frame(
        frames.INTEREST,
        number(flags),
        number(before),
        number(version),
        number(len(new)),
        b"".join(new),
        number(len(gone)),
        b"".join(gone),
    )
