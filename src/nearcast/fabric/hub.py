"""The links of a node that is no broker: a controller accepts them, a gateway dials.

Does for such a node what :class:`~nearcast.fabric.fabric.Fabric` does for a broker, without an engine: it has links, dials
addresses again and again, probes what is silent, and hands frames to the :class:`~nearcast.fabric.parts.LinkUser` of the
other end's role. It knows nothing of what the frames say. A driver calls :meth:`settle` and :meth:`flush` after every call,
then dials what :meth:`take_dials` says.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Final

from nearcast.config import Limits
from nearcast.errors import RemoteProtocolError
from nearcast.fabric import links
from nearcast.fabric.links import Greeting, Link
from nearcast.fabric.parts import FOREVER, LinkUser
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Peer as TransportPeer
from nearcast.mqtt.commits import Transport
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.effects import Effects

FIRST_RETRY_S: Final = 0.2
LAST_RETRY_S: Final = 10.0
GREETING_S: Final = 10.0
FRAME_OVERHEAD_BYTES: Final = 1_048_576
MAX_ENDED: Final = 256


class Dial:
    """An address that a link is kept to."""

    def __init__(self, now: float) -> None:
        self.due_at = now
        self.retry_s = FIRST_RETRY_S
        self.under_way = False
        self.link: Link | None = None


class Hub:
    """See the module."""

    def __init__(
        self,
        greeting: Greeting,
        secret: bytes,
        settings: FabricSettings,
        limits: Limits,
        rng: random.Random,
        max_links: int = 100_000,
    ) -> None:
        self.greeting = greeting
        self.settings = settings
        self.limits = limits
        self.effects = Effects(gated=False)
        self.links: dict[Link, None] = {}
        self.users: dict[int, LinkUser] = {}
        self.protocol_errors = 0
        self.ended: deque[Link] = deque(maxlen=MAX_ENDED)
        self._secret = secret
        self._rng = rng
        self._max_links = max_links
        self._dialing: dict[str, Dial] = {}
        self._dials: list[str] = []
        self._next_check = 0.0

    # --- dialling -------------------------------------------------------------------------------------------------------

    def dial(self, address: str, now: float) -> None:
        """Keep a link to this address from now on."""
        if address and address not in self._dialing:
            self._dialing[address] = Dial(now)
            self._dial_due(now)

    def forget_address(self, address: str) -> None:
        """No longer keep a link to it. One that is open stays."""
        self._dialing.pop(address, None)

    def take_dials(self) -> list[str]:
        """Addresses to connect to now. Each is answered by :meth:`connected` or :meth:`dial_failed`."""
        taken, self._dials = self._dials, []
        return taken

    def dial_failed(self, address: str, now: float) -> None:
        dial = self._dialing.get(address)
        if dial is not None:
            self._retry(dial, now)

    def _retry(self, dial: Dial, now: float) -> None:
        dial.under_way = False
        dial.link = None
        dial.due_at = now + dial.retry_s * (0.5 + self._rng.random())
        dial.retry_s = min(dial.retry_s * 2, LAST_RETRY_S)

    def _dial_due(self, now: float) -> None:
        for address, dial in self._dialing.items():
            if not dial.under_way and dial.link is None and dial.due_at <= now:
                dial.under_way = True
                self._dials.append(address)

    # --- links ----------------------------------------------------------------------------------------------------------

    def accepted(self, handle: object, peer: TransportPeer, now: float) -> Link:
        """Another node connected to us."""
        link = self._open(handle, peer, "", now)
        if len(self.links) > self._max_links:
            self._break(link, f"there are {self._max_links} links already", now)
        return link

    def connected(self, address: str, handle: object, now: float) -> Link:
        """A connection that :meth:`take_dials` asked for is there."""
        link = self._open(handle, TransportPeer(address, "link"), address, now)
        dial = self._dialing.get(address)
        if dial is not None:
            dial.under_way = False
            dial.link = link
        return link

    def _open(self, handle: object, peer: TransportPeer, dialed: str, now: float) -> Link:
        connection = Connection(self.effects, peer, handle, now, self.limits)
        link = Link(self.greeting, self._secret, connection, dialed, self._rng, now)
        self.links[link] = None
        return link

    def receive(self, link: Link, data: bytes, now: float) -> None:
        """Bytes arrived on a link."""
        if link.state == links.CLOSED:
            return
        was_up = link.state == links.UP
        try:
            found = link.feed(data, now)
            if not was_up and link.state == links.UP:
                self._link_up(link, now)
            theirs = link.theirs
            for content in found:
                if link.state == links.CLOSED or theirs is None:
                    break
                self.users[theirs.role].link_frame(link, content, now)
        except RemoteProtocolError as error:
            self._break(link, error.message, now)
        except ValueError as error:
            self._break(link, f"a frame that makes no sense: {error}", now)
        if link.state == links.CLOSED:
            self._ended(link, now)

    def _link_up(self, link: Link, now: float) -> None:
        theirs = link.theirs
        if theirs is None:
            return
        link.max_frame_bytes = self.limits.max_packet_bytes + FRAME_OVERHEAD_BYTES
        dial = self._dialing.get(link.dialed)
        if dial is not None:
            dial.retry_s = FIRST_RETRY_S
        user = self.users.get(theirs.role)
        if user is None:
            raise RemoteProtocolError(reasons.NOT_AUTHORIZED, "nodes of this kind do not connect here")
        link.probe(now)
        user.link_up(link, now)

    def _break(self, link: Link, reason: str, now: float) -> None:
        self.protocol_errors += 1
        link.close(reason)
        self._ended(link, now)

    def lost(self, link: Link, now: float) -> None:
        """The link's transport is gone."""
        if not link.close_reason:
            link.close_reason = "connection lost"
        link.state = links.CLOSED
        self._ended(link, now)
        link.connection.out = []
        link.connection.out_bytes = 0

    def _ended(self, link: Link, now: float) -> None:
        if link not in self.links:
            return
        del self.links[link]
        self.ended.append(link)
        dial = self._dialing.get(link.dialed)
        if dial is not None and dial.link is link:
            self._retry(dial, now)
        theirs = link.theirs
        user = self.users.get(theirs.role) if theirs is not None else None
        if user is not None:
            user.link_down(link, now)

    def writable(self, link: Link, now: float) -> None:
        """The link's transport has room again."""
        connection = link.connection
        connection.congested = False
        connection.starved = False
        connection.touch()
        theirs = link.theirs
        user = self.users.get(theirs.role) if theirs is not None and link.state == links.UP else None
        if user is not None:
            user.link_writable(link, now)

    def take_ended(self) -> list[Link]:
        """Links that ended since the last call, for logs."""
        taken = list(self.ended)
        self.ended.clear()
        return taken

    # --- time and output ------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        """After every event: send what gathered."""
        for user in self.users.values():
            user.settle(now)

    def flush(self, now: float) -> None:
        """Give what there is to send to the transports."""
        while self.effects.dirty:
            dirty, self.effects.dirty = self.effects.dirty, []
            for connection in dirty:
                connection.dirty = False
            for connection in dirty:
                if connection.congested and not connection.closing:
                    continue
                handle: Transport = connection.handle  # type: ignore[assignment]
                chunks = connection.take()
                if chunks:
                    handle.send(chunks)
                if connection.closing:
                    handle.close()

    def tick(self, now: float) -> None:
        """Time passed: probes, time-outs, dials that are due."""
        if now >= self._next_check:
            self._next_check = now + self.settings.probe_interval_seconds / 2
            self._check(now)
        self._dial_due(now)
        for user in self.users.values():
            user.tick(now)

    def _check(self, now: float) -> None:
        settings = self.settings
        for link in list(self.links):
            if link.state != links.UP:
                if now - link.opened_at > GREETING_S:
                    self._break(link, "no greeting in time", now)
            elif now - link.last_seen > settings.fail_after_seconds:
                self._break(link, f"silent for {settings.fail_after_seconds:g} s", now)
            elif now - link.last_ping >= settings.probe_interval_seconds:
                link.probe(now)

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next."""
        deadline = self._next_check if self.links else FOREVER
        for dial in self._dialing.values():
            if not dial.under_way and dial.link is None:
                deadline = min(deadline, dial.due_at)
        for user in self.users.values():
            deadline = min(deadline, user.next_deadline())
        return deadline
