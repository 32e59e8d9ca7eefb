"""Who notices, in a simulated group, that somebody is gone: what links that break and pings that stay out would say.

A broker that is down, paused or cut off for ``detect_s`` is lost for its leader and its members; one that began anew is lost
at once, because its links broke when the process before it ended. Leaders whose announcements have stopped reaching the
cloud leave the board. Only runs in which something can go wrong pay for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from nearcast.simulation.group_knowledge import Board, Surroundings
    from nearcast.simulation.groups import GroupNode
    from nearcast.simulation.world import World

LOOK_S: Final = 0.25
"""How often everybody is looked at."""


class Detector:
    """Looks at all hosts again and again, and tells those concerned."""

    def __init__(
        self,
        world: World,
        board: Board,
        surroundings: Surroundings,
        running: Callable[[], dict[int, GroupNode]],
        reaches_cloud: Callable[[int], bool],
        *,
        detect_s: float,
        expire_s: float,
    ) -> None:
        self._world = world
        self._board = board
        self._surroundings = surroundings
        self._running = running
        self._detect_s = detect_s
        self._expire_s = expire_s
        self._reaches_cloud = reaches_cloud
        self._starts = {host.index: host.starts for host in world.hosts}
        self._down_since: dict[int, float] = {}
        self._apart_since: dict[tuple[int, int], float] = {}
        self._unheard_since: dict[int, float] = {}

    def begin(self) -> None:
        """Look for the first time, a moment from now."""
        self._world.at(self._world.now + LOOK_S, self._look)

    def _look(self) -> None:
        nodes = self._running()
        self._forget_dead()
        self._part(nodes)
        self._announce(nodes)
        self.begin()

    def _forget_dead(self) -> None:
        """Whose pings are not answered any more."""
        now = self._world.now
        silent = self._surroundings.silent
        for host in self._world.hosts:
            if host.running:
                silent.discard(host.index)
                self._down_since.pop(host.index, None)
            elif now - self._down_since.setdefault(host.index, now) >= self._detect_s:
                silent.add(host.index)

    def _part(self, nodes: dict[int, GroupNode]) -> None:
        """Leaders and members that have lost each other."""
        began_anew = {
            host.index
            for host in self._world.hosts
            if host.starts != self._starts[host.index] and self._starts[host.index] > 0
        }
        self._starts = {host.index: host.starts for host in self._world.hosts}
        apart: dict[tuple[int, int], float] = {}
        now = self._world.now
        for number, node in nodes.items():
            for other in node.partners():
                if other in began_anew:
                    node.lost(other)
                elif self._is_apart(number, other, nodes):
                    since = self._apart_since.get((number, other), now)
                    if now - since >= self._detect_s:
                        node.lost(other)
                    else:
                        apart[number, other] = since
        self._apart_since = apart

    def _is_apart(self, one: int, other: int, nodes: dict[int, GroupNode]) -> bool:
        if other not in nodes:
            return True
        return self._world.is_cut and self._surroundings.latency_ms(one, other) == math.inf

    def _announce(self, nodes: dict[int, GroupNode]) -> None:
        """Keep the board to what repeated announcements would make it."""
        board, now = self._board, self._world.now
        for who in board.who[: board.listed].tolist():
            node = nodes.get(who)
            if node is not None and node.leads and self._reaches_cloud(who):
                self._unheard_since.pop(who, None)
            elif board.is_listed(who) and now - self._unheard_since.setdefault(who, now) >= self._expire_s:
                board.withdraw(who, now)
                del self._unheard_since[who]
        for number, node in nodes.items():
            if node.leads and not board.is_listed(number) and self._reaches_cloud(number):
                board.post(number, now)
