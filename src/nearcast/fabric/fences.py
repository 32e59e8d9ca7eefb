"""Messages that a client had at its old broker and that reach its new one later, on a slower way: they stop at a fence.

When a session is installed, its old broker says how far it had come with each origin's messages, in both streams (see
:mod:`nearcast.fabric.channels`). What comes later from an origin and is not beyond that was delivered there. A fence stands
until the origin's streams have passed it, which the origin is asked to say (PROGRESS). The session's records have it, too:
after a crash, reliable messages come again, and QoS 0 messages do not.

A replica set is an origin as well: its fences stand until this broker's cursor (:mod:`nearcast.fabric.set_cursors`) has passed
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearcast.fabric.parts import Peer
from nearcast.fabric.set_cursors import CURSOR_PREFIX
from nearcast.mqtt.publication import Publication
from nearcast.mqtt.routing import VIA_SEPARATOR
from nearcast.mqtt.session import Session

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric


class Reached:
    """How far somebody has come with an origin's messages: the last sequences of the reliable stream and of the other."""

    def __init__(self, reliable: int, unreliable: int) -> None:
        self.reliable = reliable
        self.unreliable = unreliable

    def has(self, publication: Publication) -> int:
        """How many of these messages, from the first on, are not beyond it."""
        last = self.unreliable if publication.qos == 0 else self.reliable
        return min(max(0, last - publication.sequence + 1), publication.count)


class Fences:
    """All fences: by the origin's name, then by the session's number."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.by_origin: dict[str, dict[int, Reached]] = {}

    def put(self, peer: Peer, session: Session, reached: Reached) -> None:
        """Keep from a session what it had elsewhere, unless all of that has passed here, too."""
        if reached.reliable <= peer.received and reached.unreliable <= peer.received_unreliable:
            return
        if reached.reliable > peer.received:
            session.fences = {**(session.fences or {}), peer.name: reached.reliable}
        self.by_origin.setdefault(peer.name, {})[session.number] = reached
        peer.fenced = True
        self.ask(peer)

    def put_place(self, name: str, session: Session, reached: Reached) -> None:
        """The same for records of a replica set, by the name under which it is an origin."""
        if reached.reliable > self._fabric.sets.cursors.number_of(name):
            session.fences = {**(session.fences or {}), name: reached.reliable}
            self.by_origin.setdefault(name, {})[session.number] = reached

    def behind(self, name: str, place: int) -> set[int]:
        """Sessions that had a record of a replica set elsewhere."""
        fences = self.by_origin.get(name)
        return {session_number for session_number, reached in fences.items() if reached.reliable >= place} if fences else set()

    def passed(self, name: str, place: int) -> None:
        """All records of a replica set up to this number have come here: remove what is not beyond."""
        fences = self.by_origin.get(name)
        if fences is None:
            return
        by_number = self._fabric.engine.sessions.by_number
        for session_number, reached in list(fences.items()):
            if reached.reliable <= place or session_number not in by_number:
                del fences[session_number]
        if not fences:
            del self.by_origin[name]

    def recovered(self, session: Session) -> None:
        """The session was read from the journal, with the fences it had."""
        for name, reliable in (session.fences or {}).items():
            if name[:1] == CURSOR_PREFIX:
                self.put_place(name, session, Reached(reliable, reliable))
            else:
                self.put(self._fabric.peer(name), session, Reached(reliable, 0))

    def ask(self, peer: Peer) -> None:
        """Have the origin say when the fences are behind it."""
        self._fabric.channels.ask_progress(peer, 0)

    def of(self, name: str, session_number: int) -> Reached | None:
        """What a session had of this origin before it came here, if that has not all passed here."""
        fences = self.by_origin.get(name)
        return None if fences is None else fences.get(session_number)

    def progressed(self, peer: Peer) -> None:
        """The peer's streams went on: remove what they have passed."""
        fences = self.by_origin.get(peer.name)
        if fences is None:
            return
        by_number = self._fabric.engine.sessions.by_number
        for session_number, reached in list(fences.items()):
            passed = reached.reliable <= peer.received and reached.unreliable <= peer.received_unreliable
            if passed or session_number not in by_number:
                del fences[session_number]
        if not fences:
            self.forget(peer)

    def forget(self, peer: Peer) -> None:
        """The peer has no fences any more."""
        self.by_origin.pop(peer.name, None)
        peer.fenced = self._fabric.leftovers.records(peer.name)

    def bridge(self, peer: Peer, publication: Publication, via: str, now: float) -> None:
        """Messages of a peer that has fences: hand them on in stretches that the same sessions get."""
        if not via or via[:1] == VIA_SEPARATOR:  # for plain subscribers, among others
            self._fabric.leftovers.passes(peer.name, publication)
        fences = self.by_origin.get(peer.name)
        if fences is None:
            self._fabric.engine.bridge(publication, via, now)
            return
        done = 0
        while done < publication.count:
            fenced: set[int] = set(publication.fenced or ())
            until = publication.count
            for session_number, reached in fences.items():
                had = reached.has(publication)
                if had > done:
                    fenced.add(session_number)
                    until = min(until, had)
            for part in stretch(publication, done, until - done):
                part.fenced = fenced if fenced else None
                self._fabric.engine.bridge(part, via, now)
            done = until


def stretch(publication: Publication, start: int, count: int) -> list[Publication]:
    """Some of a publication's messages, whatever their sizes."""
    if count == publication.count:
        return [publication]
    if publication.stride:
        return [publication.cut(start, count)]
    return publication.parts(publication.count)[start : start + count]
