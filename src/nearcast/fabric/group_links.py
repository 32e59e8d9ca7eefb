"""Links between brokers of a group, and with those they negotiate with: who is dialled, and whose link ends.

Where a controller or peers are configured the fabric is linked anyhow, and this only adds to it. Otherwise brokers have links
to whom they have to do with, and no others: thousands of brokers in hundreds of groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from nearcast.fabric.broadcast import Broadcast

WANTED_BY: Final = "groups"

RECENT_S: Final = 10.0
"""How long a link is kept to a broker that was last spoken to about groups."""

FORGET_S: Final = 60.0
"""After so long a broker that is of no group with this one any more, has no link, and is owed nothing, is forgotten."""


class GroupLinks:
    """See the module."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self._fabric = broadcast.fabric
        # By name: when we spoke to a broker about groups, the address at which we dial it, since when nobody needs its link.
        self._spoken_at: dict[str, float] = {}
        self._wanted: dict[str, str] = {}
        self._unwanted_since: dict[str, float] = {}

    def spoke(self, name: str, now: float) -> None:
        """Something was said to a broker, or by it, that may need an answer."""
        self._spoken_at[name] = now

    def gone(self, name: str) -> None:
        """A broker is forgotten."""
        self._spoken_at.pop(name, None)
        self._unwanted_since.pop(name, None)

    def keep(self, now: float) -> None:
        """Links to everybody we have to do with, and no longer to others."""
        broadcast = self._broadcast
        names = self._needed(now)
        wanted: dict[str, str] = {}
        for name in names:
            address = broadcast.formation.place_of(name).address or self._wanted.get(name, "")
            if address:
                wanted[name] = address
        for name, address in wanted.items():
            before = self._wanted.get(name, "")
            if before != address:
                if before:
                    self._fabric.forget_address(before, WANTED_BY)
                self._fabric.dial(address, now, name, WANTED_BY)
        for name, address in self._wanted.items():
            if name not in wanted:
                self._fabric.forget_address(address, WANTED_BY)
        self._wanted = wanted
        if not broadcast.links_all:
            self._end(names, now)

    def _needed(self, now: float) -> set[str]:
        broadcast = self._broadcast
        names = {*broadcast.formation.view.members, *broadcast.coverage.covered, *broadcast.goodbyes.leaving}
        candidate = broadcast.formation.candidate
        if candidate is not None:
            names.add(candidate.name)
            broadcast.latencies.learn(candidate.name, candidate.address, candidate.probe_address, now)
        for name, at in list(self._spoken_at.items()):
            if now - at <= RECENT_S:
                names.add(name)
            else:
                del self._spoken_at[name]
        for peer in self._fabric.peers.values():
            if peer.session.queued_messages or peer.session.spilled_messages:
                names.add(peer.name)  # what was flooded to it while it was of our group is nobody else's to bring
        names.discard(self._fabric.name)
        return names

    def _end(self, names: set[str], now: float) -> None:
        """What we dialled and nobody needs; brokers that are of no group with us are forgotten in the end."""
        for peer in list(self._fabric.peers.values()):
            if peer.name in names:
                self._unwanted_since.pop(peer.name, None)
                continue
            since = self._unwanted_since.setdefault(peer.name, now)
            link = peer.link
            if link is not None:
                if link.dialed and now - since > RECENT_S:
                    link.close("not of one group any more")
                    self._fabric.end_link(link, now)
            elif now - since > FORGET_S:
                self._fabric.forget(peer, now)
