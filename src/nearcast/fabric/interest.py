"""Who wants what: which filters have a subscriber at which broker, known everywhere, version by version.

A broker's interest is the set of filters that at least one of its sessions subscribes to; a shared subscription counts with
its group (``$share/group/filter``). Every change makes the next version. Brokers tell each other changes as they happen, as
INTEREST frames from one version to another; a frame that does not begin where the receiver is makes it ask for everything
(INTEREST_ASK), and so does a link that comes up. Another broker's interest is the subscriptions of its session, so that
routing finds it like any subscriber; a filter that nobody there wants any more is removed, and no message crosses the link in
vain.

INTEREST_ACK says which version is in place, and the receiver's sequence at that moment: every message it takes on from there
on goes where that version says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearcast.fabric import frames
from nearcast.fabric.channels import PEER_PREFIX
from nearcast.fabric.frames import frame
from nearcast.fabric.parts import Part, Peer
from nearcast.mqtt.records import Fields, blob, number
from nearcast.mqtt.subscriptions import Subscription
from nearcast.mqtt.topics import filter_fault, parse_shared

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric


def shared_name(group: str, inner_filter: str) -> str:
    """A filter as a client would write it."""
    return f"$share/{group}/{inner_filter}" if group else inner_filter


class Interest(Part):
    """This broker's interest, and that of the others. See the module."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._tree = fabric.engine.tree
        self._counts: dict[str, int] = {}
        self.version = 0
        self._added: dict[str, None] = {}
        self._removed: dict[str, None] = {}
        self._announced_version = 0
        #: By peer: the version of theirs that is in place here, and the version of ours that is in place there.
        self.theirs: dict[str, int] = {}
        self.confirmed: dict[str, int] = {}
        #: By peer: its sequence when it put our last confirmed version in place.
        self.confirmed_at: dict[str, int] = {}
        self._tree.watcher = self
        fabric.add_part(self, [frames.INTEREST, frames.INTEREST_ACK, frames.INTEREST_ASK])

    # --- ours -----------------------------------------------------------------------------------------------------------

    def subscribed(self, group: str, inner_filter: str, client_id: str) -> None:
        if client_id[:1] == PEER_PREFIX:
            return
        name = shared_name(group, inner_filter)
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        if count == 0 and self._removed.pop(name, "") == "":
            self._added[name] = None

    def unsubscribed(self, group: str, inner_filter: str, client_id: str) -> None:
        if client_id[:1] == PEER_PREFIX:
            return
        name = shared_name(group, inner_filter)
        count = self._counts.get(name, 0) - 1
        if count > 0:
            self._counts[name] = count
            return
        self._counts.pop(name, None)
        if self._added.pop(name, "") == "":
            self._removed[name] = None

    def recount(self) -> None:
        """Count everything there is, also what was subscribed before anybody watched."""
        self._counts = {}
        self._added = {}
        self._removed = {}
        for session in self._fabric.engine.sessions.by_client.values():
            if session.client_id[:1] != PEER_PREFIX:
                for name in session.subscriptions:
                    self._counts[name] = self._counts.get(name, 0) + 1

    def settle(self, now: float) -> None:
        if not self._added and not self._removed:
            return
        before = self.version
        self.version += 1
        data = _interest(before, self.version, list(self._added), list(self._removed))
        self._added = {}
        self._removed = {}
        for peer in self._fabric.peers.values():
            peer.send(data)

    def _send_all(self, peer: Peer) -> None:
        peer.send(_interest(0, self.version, list(self._counts), []))

    # --- theirs ---------------------------------------------------------------------------------------------------------

    def peer_up(self, peer: Peer, now: float) -> None:
        self.settle(now)
        self._send_all(peer)

    def handle(self, peer: Peer, content: bytes, now: float) -> None:
        fields = Fields(content)
        if content[0] == frames.INTEREST_ASK:
            self.settle(now)
            self._send_all(peer)
        elif content[0] == frames.INTEREST_ACK:
            self.confirmed[peer.name] = fields.number()
            self.confirmed_at[peer.name] = fields.number()
        else:
            self._take(peer, fields)

    def _take(self, peer: Peer, fields: Fields) -> None:
        before = fields.number()
        version = fields.number()
        added = [fields.blob().decode("utf-8") for _ in range(fields.number())]
        removed = [fields.blob().decode("utf-8") for _ in range(fields.number())]
        if before and before != self.theirs.get(peer.name, -1):
            peer.send(frame(frames.INTEREST_ASK))
            return
        sessions = self._fabric.engine.sessions
        session = peer.session
        if before == 0:
            wanted = set(added)
            removed = [name for name in session.subscriptions if name not in wanted]
        for name in removed:
            sessions.unsubscribe(session, name)
        for name in added:
            _, inner = parse_shared(name)
            fault = filter_fault(inner, self._fabric.limits.max_topic_levels)
            if fault:
                raise ValueError(fault)
            if name not in session.subscriptions:
                sessions.subscribe(session, Subscription(session, name, 2, retain_as_published=True))
        self.theirs[peer.name] = version
        peer.send(frame(frames.INTEREST_ACK, number(version), number(self._fabric.engine.router.next_sequence - 1)))


def _interest(before: int, version: int, added: list[str], removed: list[str]) -> bytes:
    parts = [number(before), number(version), number(len(added))]
    parts += [blob(name.encode("utf-8")) for name in added]
    parts.append(number(len(removed)))
    parts += [blob(name.encode("utf-8")) for name in removed]
    return frame(frames.INTEREST, *parts)
