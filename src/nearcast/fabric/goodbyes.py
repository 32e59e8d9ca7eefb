"""Whom this broker has to tell that they need not cover it any longer, and when (make before break).

Until somebody else covers it, a former leader does; only then is it told (Leave). Others may cover this broker without its
knowing: one that restarted takes everybody it knows for its member. So whoever gets a link to us, and does not lead us, is
told as well, and who carries messages to us all the same is told again.

Each Leave has the number of what we said last, so that it does not count for whoever hears from us again before it.
"""

from __future__ import annotations

from typing import Final

from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.fabric.parts import Peer
from nearcast.groups.formation import Formation
from nearcast.groups.messages import Leave

AGAIN_S: Final = 1.0
"""How often one that carries to us is told again."""


class Goodbyes:
    """See the module. ``peers`` are all brokers, as the fabric keeps them."""

    def __init__(self, peers: dict[str, Peer], formation: Formation) -> None:
        self._peers = peers
        self._formation = formation
        #: Former leaders that are to be told.
        self.leaving: dict[str, Leave] = {}
        # Others, as long as there is the link on which they came.
        self._newcomers: dict[str, Leave] = {}
        self._told_at: dict[str, float] = {}

    def leave(self, name: str, number: int) -> None:
        """A broker does not lead us any more. ``number``: of the last Join that it heard, or 0."""
        if name != self._formation.leader:
            self.leaving[name] = Leave(number or self._formation.number)

    def follow(self, name: str) -> None:
        """It does again."""
        self.leaving.pop(name, None)

    def came(self, name: str) -> None:
        """There is a link to a broker. It may have covered us before it restarted, and not know that others do."""
        if name != self._formation.leader:
            self._newcomers[name] = Leave(self._formation.number)

    def went(self, name: str) -> None:
        """Its link is gone."""
        self._newcomers.pop(name, None)

    def gone(self, name: str) -> None:
        """It is forgotten."""
        self.leaving.pop(name, None)
        self._newcomers.pop(name, None)
        self._told_at.pop(name, None)

    def say(self) -> None:
        """We are covered: whoever else does that need not any longer."""
        for name, message in list(self.leaving.items()):
            peer = self._peers.get(name)
            if peer is None or peer.send(frame(frames.GROUP, message.encode())):
                del self.leaving[name]
        if self._newcomers:
            for name, message in self._newcomers.items():
                peer = self._peers.get(name)
                if peer is not None and name != self._formation.leader:
                    peer.send(frame(frames.GROUP, message.encode()))
            self._newcomers = {}

    def answer(self, peer: Peer, now: float) -> None:
        """A broker carried to us, who are covered, what we do not need of it."""
        name = peer.name
        if name == self._formation.leader or name in self.leaving:
            return
        if now - self._told_at.get(name, -AGAIN_S) >= AGAIN_S:
            self._told_at[name] = now
            peer.send(frame(frames.GROUP, Leave(self._formation.number).encode()))
