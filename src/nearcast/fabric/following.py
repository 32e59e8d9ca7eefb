"""Clients that are moved to the owner of the topics they subscribed to, so that messages come to them straight from there.

A session has one home, and a message takes the way over it. The home broker sees who owns all that a client is subscribed to
and says so (FOLLOW): one broker, or nobody, because the topics have several owners or none. The gateway moves the client there
as it moves any client (:mod:`nearcast.fabric.moving`), which the client does not notice; and back to where the gateway's other
clients are once nobody owns all of it.

Topics move, too, and moving a client costs the brokers more than a message that goes a longer way. So a client follows when
the word has stood for :data:`SETTLED_S`; not where its home is on the way, as one in the gateway's own site is
(:data:`WORTH`); and not again for a while, which is short at first and doubles each time (:data:`PAUSE_S`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.fabric.choosing import UNKNOWN_MS

if TYPE_CHECKING:
    from nearcast.fabric.gateway import Gateway
    from nearcast.fabric.tunnels import Channel, Tunnel

SETTLED_S: Final = 1.0
LOOK_S: Final = 0.25

WORTH: Final = 0.1
"""What a move can save is the way between gateway and home, there and back. Where that is less than this share of the way to
the owner, the client stays: its topic may be about to come here."""

PAUSE_S: Final = 2.0
MAX_PAUSE_S: Final = 60.0
RESTED_S: Final = 10.0
"""A client that followed does so again after :data:`PAUSE_S` at the earliest, and after twice as long each further time,
unless it did not for this long although it could have. Too low moves clients of a topic that flaps; too high leaves them
at a broker that their topic has left."""


class Wish:
    """Where a client should be: at ``target``, or with nothing said at its gateway's home. ``since`` when that is known."""

    def __init__(self, target: str, now: float) -> None:
        self.target = target
        self.since = now
        self.pause_s = PAUSE_S
        self.not_before = -RESTED_S

    def followed(self, now: float) -> None:
        """The client is moved."""
        rested = now - self.not_before >= RESTED_S
        self.pause_s = PAUSE_S if rested else min(2 * self.pause_s, MAX_PAUSE_S)
        self.not_before = now + self.pause_s


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
                wish.followed(now)
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
        away_ms = gateway.choice.latency_ms(wish.target)
        if away_ms < UNKNOWN_MS and gateway.choice.latency_ms(upstream.broker) < WORTH * away_ms:
            return ""
        line = gateway.lines.get(wish.target)
        if line is None:
            gateway.reaches(wish.target, now)
            return ""
        return "" if gateway.choice.avoids(line) else wish.target
