"""Clients that are moved to the owner of the topics they subscribed to, so that messages come to them straight from there.

A session has one home, and a message takes the way over it. The home broker sees who owns all that a client is subscribed to
and says so (FOLLOW): one broker, or nobody, because the topics have several owners or none. The gateway moves the client there
as it moves any client (:mod:`nearcast.fabric.moving`), which the client does not notice; and back to where the gateway's other
clients are once nobody owns all of it.

Topics move, too. A client follows when the word has stood for :data:`SETTLED_S`, and not again within :data:`PAUSE_S`: moving
it costs the brokers more than a message that goes a longer way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from nearcast.fabric.gateway import Gateway
    from nearcast.fabric.tunnels import Channel, Tunnel

SETTLED_S: Final = 1.0
PAUSE_S: Final = 10.0
LOOK_S: Final = 0.25


class Wish:
    """Where a client should be: at ``target``, or with nothing said at its gateway's home. ``since`` when that is known."""

    def __init__(self, target: str, now: float) -> None:
        self.target = target
        self.since = now
        self.not_before = 0.0


class Following:
    """See the module. One per gateway."""

    def __init__(self, gateway: Gateway, enabled: bool) -> None:
        self._gateway = gateway
        self._enabled = enabled
        #: Clients that are not where they should be, or are there because of that.
        self.wishes: dict[Tunnel, Wish] = {}
        self.next_look = gateway.now + LOOK_S
        self.moved = 0

    def told(self, channel: Channel, target: str, now: float) -> None:
        """FOLLOW: the home broker says who owns all that a client is subscribed to."""
        tunnel = channel.tunnel
        if not self._enabled or tunnel.ended or tunnel.upstream is not channel:
            return
        wish = self.wishes.get(tunnel)
        if wish is None:
            if target:
                self.wishes[tunnel] = Wish(target, now)
        elif wish.target != target:
            wish.target = target
            wish.since = now

    def forget(self, tunnel: Tunnel) -> None:
        """The client is gone, or goes on at another broker, which says it anew."""
        self.wishes.pop(tunnel, None)
        tunnel.followed = False

    def tick(self, now: float) -> None:
        """Move those whose time has come."""
        if now < self.next_look:
            return
        self.next_look = now + LOOK_S
        if not self.wishes:
            return
        chosen: dict[str, list[Tunnel]] = {}
        for tunnel, wish in list(self.wishes.items()):
            target = self._target(tunnel, wish, now)
            if target:
                chosen.setdefault(target, []).append(tunnel)
                wish.not_before = now + PAUSE_S
                tunnel.followed = wish.target != ""
        for target, tunnels in chosen.items():
            self.moved += len(tunnels)
            self._gateway.moves.order(0, target, tunnels, 0.0, now)

    def _target(self, tunnel: Tunnel, wish: Wish, now: float) -> str:
        """Where to move a client now; empty: nowhere."""
        gateway = self._gateway
        upstream = tunnel.upstream
        if upstream is None or tunnel.move is not None:
            return ""
        if not wish.target and not tunnel.followed:
            del self.wishes[tunnel]
            return ""
        if wish.target == upstream.broker:
            tunnel.followed = True
            return ""
        if now - wish.since < SETTLED_S or now < wish.not_before:
            return ""
        if not wish.target:
            home = gateway.choice.best()
            if home is None or home.name == upstream.broker:
                del self.wishes[tunnel]
                tunnel.followed = False
                return ""
            return home.name
        line = gateway.lines.get(wish.target)
        if line is None:
            gateway.reaches(wish.target, now)
            return ""
        return "" if gateway.choice.avoids(line) else wish.target
