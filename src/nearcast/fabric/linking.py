"""The links of one node, whatever it is: who is dialled, who came, which of them live.

:class:`Linking` opens links, feeds them, probes them, gives up those that are silent and dials addresses again and again. What
is done with a link that is up is its subclass's business (:class:`~nearcast.fabric.fabric.Fabric` for brokers,
:class:`~nearcast.fabric.hub.Hub` for other nodes), or that of the :class:`~nearcast.fabric.parts.LinkUser` of the other end's
role. A driver moves the bytes::

    accepted(handle) / connected(address, handle) ─► Link ─► receive(link, data) … lost(link)
"""

from __future__ import annotations

import random
from typing import Final

from nearcast.config import Limits
from nearcast.errors import RemoteProtocolError
from nearcast.fabric import links
from nearcast.fabric.links import Greeting, Link
from nearcast.fabric.parts import FOREVER, LinkUser
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Peer as TransportPeer
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.effects import Effects

FRAME_OVERHEAD_BYTES: Final = 1_048_576
"""What a frame may be longer than the largest packet: a session that moves, an interest table, come in pieces below this."""

OUTPUT_BYTES: Final = 16_777_216
"""Bytes kept for a link that takes them too slowly. One link carries what thousands of clients want, so it is more than a
client's; above it QoS 0 messages are dropped and counted, and others wait in their queue."""

STUCK_BYTES: Final = 4 * OUTPUT_BYTES
STUCK_INTERVALS: Final = 6
"""A link that speaks and does not listen is given up: when so many bytes wait for it, or when no probe was answered for so
many times ``fail_after_seconds``. Probes wait behind what was sent before, so a busy link gets more time than a silent one."""

FIRST_RETRY_S: Final = 0.2
LAST_RETRY_S: Final = 10.0
LASTED_S: Final = 1.0
"""A link that ended sooner was perhaps not wanted (another node has our name): it is dialled less and less often, too."""
GREETING_S: Final = 10.0
MAX_STRANGERS: Final = 1_024
"""Links that came from others and have not proved anything yet. With more the oldest goes: who has the secret needs one round
trip, and somebody without it must not keep the others out, nor use up this process's descriptors."""

MAX_NEWS: Final = 1_024


class Dialing:
    """An address that is to be connected to, and how that goes. ``name`` is who is expected there, or was met there.

    ``wanted_by`` says who wants it: as long as anybody does, it is dialled."""

    def __init__(self, address: str, name: str, due_at: float) -> None:
        self.address = address
        self.name = name
        self.expected = name
        self.retry_s = FIRST_RETRY_S
        self.due_at = due_at
        self.failures = 0
        self.under_way = False
        self.link: Link | None = None
        self.wanted_by: set[str] = set()


class Linking:
    """See the module. ``protocol_errors`` counts links that ended because the other end broke the protocol."""

    def __init__(
        self,
        greeting: Greeting,
        secret: bytes,
        settings: FabricSettings,
        limits: Limits,
        effects: Effects,
        rng: random.Random,
        max_links: int,
    ) -> None:
        self.greeting = greeting
        self.settings = settings
        self.limits = limits
        self.effects = effects
        self.rng = rng
        self.links: dict[Link, None] = {}
        self._strangers: dict[Link, None] = {}
        self.users: dict[int, LinkUser] = {}
        self.protocol_errors = 0
        self._secret = secret
        self._max_links = max_links
        self._dialing: dict[str, Dialing] = {}
        self._dials: list[str] = []
        self._news: list[tuple[Link, bool]] = []
        self._next_check = 0.0
        self._last_check = 0.0

    # --- what a subclass decides ----------------------------------------------------------------------------------------

    def link_up(self, link: Link, now: float) -> None:
        """A link is authenticated. RemoteProtocolError ends it."""
        theirs = link.theirs
        user = None if theirs is None else self.users.get(theirs.role)
        if user is None:
            raise RemoteProtocolError(reasons.NOT_AUTHORIZED, "nodes of this kind do not connect here")
        user.link_up(link, now)

    def link_frame(self, link: Link, content: bytes, now: float) -> None:
        """A frame came on a link that is up."""
        theirs = link.theirs
        if theirs is not None:
            self.users[theirs.role].link_frame(link, content, now)

    def link_down(self, link: Link, now: float) -> None:
        """A link whose other end is known, though perhaps not believed, ended."""
        theirs = link.theirs
        user = None if theirs is None else self.users.get(theirs.role)
        if user is not None:
            user.link_down(link, now)

    def link_writable(self, link: Link, now: float) -> None:
        """A link that is up has room again."""
        theirs = link.theirs
        user = None if theirs is None else self.users.get(theirs.role)
        if user is not None:
            user.link_writable(link, now)

    def needs_dial(self, dialing: Dialing, now: float) -> bool:
        """Whether an address whose time has come is to be dialled now."""
        return True

    def dial_delay_s(self, name: str) -> float:
        """How long the other end is given to dial first."""
        return 0.0

    # --- dialling -------------------------------------------------------------------------------------------------------

    def dial(self, address: str, now: float, name: str = "", wanted_by: str = "") -> None:
        """Keep a link to this address from now on; with a name, only to the node of that name.

        Configuration, other brokers and the controller may all know the same address: ``wanted_by`` tells them apart.
        """
        if not address:
            return
        known = self._dialing.get(address)
        if known is not None:
            known.wanted_by.add(wanted_by)
            if known.expected != name:
                known.expected = ""  # whoever it is: one of the two has moved
            return
        dialing = Dialing(address, name, now + self.dial_delay_s(name))
        dialing.wanted_by.add(wanted_by)
        self._dialing[address] = dialing
        self._dial_due(now)

    def forget_address(self, address: str, wanted_by: str = "") -> None:
        """No longer keep a link to it, unless somebody else wants that. One that is open stays."""
        dialing = self._dialing.get(address)
        if dialing is not None:
            dialing.wanted_by.discard(wanted_by)
            if not dialing.wanted_by:
                del self._dialing[address]

    def dialing_of(self, name: str) -> list[Dialing]:
        """The addresses at which a node is expected."""
        return [dialing for dialing in self._dialing.values() if dialing.name == name]

    def take_dials(self) -> list[str]:
        """Addresses to connect to now. Each is answered by :meth:`connected` or :meth:`dial_failed`."""
        taken = self._dials
        if taken:
            self._dials = []
        return taken

    def dial_failed(self, address: str, now: float) -> None:
        """Nobody answered there. It is tried again, less and less often."""
        dialing = self._dialing.get(address)
        if dialing is not None:
            self._retry(dialing, now)

    def _retry(self, dialing: Dialing, now: float) -> None:
        dialing.under_way = False
        dialing.link = None
        dialing.failures += 1
        dialing.due_at = now + dialing.retry_s * (0.5 + self.rng.random())
        dialing.retry_s = min(dialing.retry_s * 2, LAST_RETRY_S)

    def _dial_due(self, now: float) -> None:
        for dialing in self._dialing.values():
            if dialing.under_way or dialing.link is not None or dialing.due_at > now:
                continue
            if self.needs_dial(dialing, now):
                dialing.under_way = True
                self._dials.append(dialing.address)
            else:
                dialing.due_at = now + LAST_RETRY_S

    # --- links ----------------------------------------------------------------------------------------------------------

    def accepted(self, handle: object, peer: TransportPeer, now: float) -> Link:
        """Another node connected to us."""
        link = self.open_link(handle, peer, "", "", now)
        self._strangers[link] = None
        if len(self.links) > self._max_links:
            self.break_link(link, f"there are {self._max_links} links already", now)
        elif len(self._strangers) > MAX_STRANGERS:
            self.break_link(next(iter(self._strangers)), "too many connect at once", now)
        return link

    def connected(self, address: str, handle: object, now: float) -> Link:
        """A connection that :meth:`take_dials` asked for is there."""
        dialing = self._dialing.get(address)
        expected = "" if dialing is None else dialing.expected
        link = self.open_link(handle, TransportPeer(address, "link"), address, expected, now)
        if dialing is not None:
            dialing.under_way = False
            dialing.link = link
        return link

    def open_link(self, handle: object, peer: TransportPeer, dialed: str, expected: str, now: float) -> Link:
        """A link over a transport that is there."""
        connection = Connection(self.effects, peer, handle, now, self.limits)
        connection.max_output_bytes = max(connection.max_output_bytes, OUTPUT_BYTES)
        link = Link(self.greeting, self._secret, connection, dialed, self.rng, now, expected)
        link.max_frame_bytes_up = self.limits.max_packet_bytes + FRAME_OVERHEAD_BYTES
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
                self._up(link, now)
            for content in found:
                if link.state == links.CLOSED:
                    break
                self.link_frame(link, content, now)
            if link.left and link.state != links.CLOSED:
                link.end()
        except RemoteProtocolError as error:
            self.break_link(link, error.message, now)
        except ValueError as error:
            self.break_link(link, f"a frame that makes no sense: {error}", now)
        if link.state == links.CLOSED:
            self.end_link(link, now)

    def _up(self, link: Link, now: float) -> None:
        self._strangers.pop(link, None)
        dialing = self._dialing.get(link.dialed)
        if dialing is not None:
            if link.theirs is not None:
                dialing.name = link.theirs.name
            dialing.failures = 0
        self._tell(link, True)
        link.last_pong = now
        link.probe(now)
        self.link_up(link, now)

    def break_link(self, link: Link, reason: str, now: float) -> None:
        """The other end is at fault, or silent."""
        self.protocol_errors += 1
        link.close(reason)
        self.end_link(link, now)

    def lost(self, link: Link, now: float) -> None:
        """The link's transport is gone."""
        if not link.close_reason:
            link.close_reason = "connection lost"
        link.state = links.CLOSED
        self.end_link(link, now)
        connection = link.connection
        connection.out = []
        connection.held = None
        connection.out_bytes = 0

    def end_link(self, link: Link, now: float) -> None:
        """A link is closed: let go of it."""
        if link not in self.links:
            return
        del self.links[link]
        self._strangers.pop(link, None)
        self._tell(link, False)
        dialing = self._dialing.get(link.dialed)
        if dialing is not None and dialing.link is link:
            if link.met_itself:
                del self._dialing[link.dialed]
            else:
                if now - link.opened_at >= LASTED_S:
                    dialing.retry_s = FIRST_RETRY_S
                self._retry(dialing, now)
        if link.theirs is not None:
            self.link_down(link, now)

    def writable(self, link: Link, now: float) -> None:
        """The link's transport has room again."""
        connection = link.connection
        connection.congested = False
        connection.starved = False
        connection.touch()
        if link.state == links.UP:
            self.link_writable(link, now)

    def _tell(self, link: Link, up: bool) -> None:
        if len(self._news) < MAX_NEWS:
            self._news.append((link, up))

    def take_news(self) -> list[tuple[Link, bool]]:
        """Links that came up (true) or ended (false) since the last call, for logs."""
        taken = self._news
        if taken:
            self._news = []
        return taken

    # --- time -----------------------------------------------------------------------------------------------------------

    def tick_links(self, now: float) -> None:
        """Time passed: probes, time-outs, dials that are due."""
        if now >= self._next_check:
            interval = self.settings.probe_interval_seconds
            if now - self._last_check > interval + self.settings.fail_after_seconds / 2:
                # This process slept, not the others: what they said meanwhile has yet to be read.
                for link in self.links:
                    link.last_seen = now
                    link.last_pong = now
            self._last_check = now
            self._next_check = now + interval / 2
            self._check_links(now)
        self._dial_due(now)

    def _check_links(self, now: float) -> None:
        settings = self.settings
        for link in list(self.links):
            if link.state != links.UP:
                if now - link.opened_at > GREETING_S:
                    self.break_link(link, "no greeting in time", now)
            elif now - link.last_seen > settings.fail_after_seconds:
                self.break_link(link, f"silent for {settings.fail_after_seconds:g} s", now)
            elif (
                link.connection.out_bytes > STUCK_BYTES or now - link.last_pong > STUCK_INTERVALS * settings.fail_after_seconds
            ):
                self.break_link(link, "it does not take what is sent", now)
            elif now - link.last_ping >= settings.probe_interval_seconds:
                link.probe(now)

    def links_deadline(self) -> float:
        """When :meth:`tick_links` is needed next."""
        deadline = self._next_check if self.links else FOREVER
        for dialing in self._dialing.values():
            if not dialing.under_way and dialing.link is None:
                deadline = min(deadline, dialing.due_at)
        return deadline
