"""What the leader of a replica set sends to other brokers: committed records, to those with subscribers, from where they are.

There are no queues: the log is there, and a place in it says what a broker has yet to get (decision 0034). A
:class:`Reader` is what the leader remembers of one broker on one link: up to which entry everything was *sent* that it wants,
what it *knows* of that, and how many bytes are on their way. One that keeps up is served from the entries that are just
committed; one that fell behind from the log, a window at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.fabric import frames
from nearcast.fabric.set_parts import cut
from nearcast.mqtt.records import blob, number
from nearcast.topiclog.entries import EntryWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from nearcast.fabric.parts import Peer
    from nearcast.mqtt.routing import Router
    from nearcast.topiclog.entries import Run

WINDOW_BYTES: Final = 8_388_608
"""Records on their way to one broker that has not said that it has them."""

TOLD_S: Final = 1.0
"""How often a broker that wants nothing is told how far it is."""


class Reader:
    """See the module."""

    def __init__(self, peer: Peer, sent: int) -> None:
        self.peer = peer
        self.sent = sent
        self.told = sent
        self.unconfirmed_bytes = 0
        self._on_their_way: list[tuple[int, int]] = []

    def sends(self, last: int, size: int) -> None:
        """Records up to an entry went out."""
        self.sent = self.told = last
        self.unconfirmed_bytes += size
        self._on_their_way.append((last, size))

    def has(self, cursor: int) -> None:
        """The broker has everything up to an entry."""
        done = 0
        for last, size in self._on_their_way:
            if last > cursor:
                break
            self.unconfirmed_bytes -= size
            done += 1
        del self._on_their_way[:done]

    def has_room(self) -> bool:
        return self.unconfirmed_bytes < WINDOW_BYTES and self.peer.has_room()


class Readers:
    """The readers of one set. ``runs_of`` gives the messages of an entry; None while the log cannot be read."""

    def __init__(self, set_name: str, router: Router, runs_of: Callable[[int], list[Run] | None]) -> None:
        self.by_name: dict[str, Reader] = {}
        self._set_name = blob(set_name.encode("utf-8"))
        self._router = router
        self._runs_of = runs_of
        self._tell_at = 0.0
        #: Messages sent to other brokers since the start.
        self.sent_messages = 0

    def clear(self) -> None:
        """This broker does not lead any more."""
        self.by_name.clear()

    def opens(self, peer: Peer, cursor: int, commit: int) -> None:
        """A broker says up to where it has everything; 0: it was never told, and begins now."""
        reader = Reader(peer, cursor if cursor else commit)
        self.by_name[peer.name] = reader
        if not cursor and commit:
            self._send(reader, 0, commit, [], [], 0)
        # Without a commit it begins with the first one: `serve` tells it.

    def tell(self, name: str) -> None:
        """A broker's interest changed: what was passed over by the old one is never looked at by the new one."""
        reader = self.by_name.get(name)
        if reader is not None and reader.told < reader.sent:
            self._send(reader, reader.told, reader.sent, [], [], 0)

    def has(self, name: str, cursor: int) -> None:
        reader = self.by_name.get(name)
        if reader is not None:
            reader.has(cursor)

    def serve(self, commit: int) -> None:
        """Send what there is to whoever has room for it."""
        known: dict[int, list[Run] | None] = {}
        wanted: dict[bytes, set[str]] = {}
        for reader in self.by_name.values():
            if not reader.sent and commit:
                reader.sent = commit
                self._send(reader, 0, commit, [], [], 0)
            while reader.sent < commit and reader.has_room():
                index = reader.sent + 1
                if index not in known:
                    known[index] = self._runs_of(index)
                runs = known[index]
                if runs is None:
                    break
                self._pass(reader, index, runs, wanted)

    def _pass(self, reader: Reader, index: int, runs: list[Run], wanted: dict[bytes, set[str]]) -> None:
        """An entry's turn: send of it what the broker wants."""
        writer = EntryWriter()
        ats: list[int] = []
        at = 0
        for run in runs:
            names = wanted.get(run.topic)
            if names is None:
                names = wanted[run.topic] = self._wanted_by(run.topic)
            if reader.peer.name in names:
                writer.add(run)
                ats.append(at)
                self.sent_messages += run.count
            at += run.count
        if writer.items:
            self._send(reader, reader.told, index, ats, writer.finish(), writer.size)
        else:
            reader.sent = index

    def _send(self, reader: Reader, previous: int, last: int, ats: list[int], runs: list[bytes], size: int) -> None:
        """``ats``: for each run, how many messages precede it in its entry."""
        places = [number(at) for at in ats]
        head = (self._set_name, number(previous), number(last), number(len(ats)), *places)
        for data in cut(frames.SET_RECORDS, [*head, *runs]):
            reader.peer.send(data)
        reader.sends(last, size)

    def _wanted_by(self, topic: bytes) -> set[str]:
        return {target.session.client_id[1:] for target in self._router.route_for(topic).peers}

    def tick(self, now: float) -> None:
        """Tell those who want nothing how far they are, so that a new leader need not go through it all again."""
        if now < self._tell_at:
            return
        self._tell_at = now + TOLD_S
        for reader in self.by_name.values():
            if reader.told < reader.sent and reader.has_room():
                self._send(reader, reader.told, reader.sent, [], [], 0)
