"""Whose messages a broker relays to the cloud, and how far it is with them."""

from __future__ import annotations

from collections import deque

from nearcast.fabric.errands import Errand
from nearcast.fabric.parts import Peer
from nearcast.mqtt.publication import Publication


class UnderWay:
    """A message that was given to the cloud."""

    def __init__(self, source: Source, sequence: int) -> None:
        self.source = source
        self.sequence = sequence
        self.done = False


class Waiting:
    """Messages that the cloud has no room for yet. Empty: all that was pushed is in front of it."""

    def __init__(self, publication: Publication | None, errand: Errand | None) -> None:
        self.publication = publication
        self.errand = errand


class Source:
    """Whose messages are relayed here: this broker's own (no peer), or a member's, in one turn."""

    def __init__(self, peer: Peer | None, turn: int) -> None:
        self.peer = peer
        self.turn = turn
        #: Of which its numbers are.
        self.epoch = 0 if peer is None else peer.epoch
        #: Messages up to this one were pushed: those after it are taken from what is flooded. -1: not that far yet.
        self.live_after = -1
        self.backlog: deque[Waiting] = deque()
        self.backlog_bytes = 0
        #: The cloud has everything up to this number.
        self.reached = 0
        self._under_way: deque[UnderWay] = deque()

    def given(self, sequence: int) -> UnderWay:
        entry = UnderWay(self, sequence)
        self._under_way.append(entry)
        return entry

    def advance(self) -> None:
        """See how far everything is done."""
        under_way = self._under_way
        while under_way and under_way[0].done:
            self.reached = under_way.popleft().sequence
