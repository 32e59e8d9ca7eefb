"""Ways to brokers that cannot be reached directly: who has links to whom, and streams that others pass on.

Every broker tells its neighbours, and they tell theirs, which brokers it has links of its own to, how far they are, and at
which address it is reached (NEIGHBOURS; the newest version of each broker's counts). So each knows the graph, and dials
whomever it does not have a link to. Where that fails, the broker with the smaller name opens a stream along the shortest way
(:class:`Relay`), and on it a :class:`~nearcast.fabric.links.Link` like any other: it greets, proves, is probed and given up
end to end, and nobody above can tell the difference.

A piece of such a stream (ROUTED) names its whole way, so it can neither loop nor be overtaken by one sent later, whatever the
brokers on the way think of the graph. Pieces are counted: one that is missing ends the stream, and with it the link, whose
users then say again what was not confirmed. A broker that cannot pass a piece on says so to where it came from. At most
:data:`WINDOW_BYTES` of a stream are under way, so that a slow way costs the brokers on it a bounded amount of memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.fabric import frames, graph
from nearcast.fabric.frames import frame
from nearcast.fabric.graph import MAX_HOPS, Advert, Graph
from nearcast.fabric.links import Link
from nearcast.fabric.parts import FOREVER, Part, Peer
from nearcast.mqtt.access import Peer as TransportPeer
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.records import Fields, blob, number

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric

WINDOW_BYTES: Final = 4_194_304
"""Bytes of a relayed stream that may be under way in one direction. Below this, throughput follows the distance."""

PIECE_BYTES: Final = 65_536
RELAYED_BYTES: Final = 33_554_432
"""Output that may wait on a link before pieces of others' streams are refused there."""

ADVERTISE_S: Final = 0.25
"""Least time between two adverts: links that come up together are told of together."""

REFRESH_S: Final = 300.0
LOOK_S: Final = 0.5
FIRST_RETRY_S: Final = 0.5
LAST_RETRY_S: Final = 10.0
PATIENCE_S: Final = 2.0
"""How long a direct link is waited for before others are asked to relay."""

FEW_NEIGHBOURS: Final = 8
"""With more, an advert is not passed on to those who have it from the one it came from."""

# What a piece is.
_DATA: Final = 0
_TAKEN: Final = 1
_CLOSED: Final = 2


class Relay:
    """One end of a relayed stream, as the transport of its link. ``way`` begins here and ends at the other end."""

    def __init__(self, routes: Routes, token: int, way: list[str], opened_here: bool) -> None:
        self.routes = routes
        self.token = token
        self.way = way
        self.opened_here = opened_here
        self.link: Link | None = None
        self.connection: Connection | None = None
        self.held_bytes = 0
        self.waits_to_close = False
        self.closed = False
        self.sent_bytes = 0
        self.taken_bytes = 0
        self.received_bytes = 0
        self.confirmed_bytes = 0
        self._head = routed_head(way, token)

    @property
    def other(self) -> str:
        return self.way[len(self.way) - 1]

    def send(self, chunks: list[bytes]) -> None:
        """Send bytes of the stream."""
        if self.closed:
            return
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            self.pass_on(_DATA, self.sent_bytes, piece)
            self.sent_bytes += len(piece)
        connection = self.connection
        if connection is not None and self.sent_bytes - self.taken_bytes >= WINDOW_BYTES:
            connection.congested = True

    def pass_on(self, kind: int, offset: int, piece: bytes = b"") -> None:
        """Give one piece to the first broker on the way."""
        link = self.routes.direct_link(self.way[1])
        if link is None:
            self.routes.broken.append(self)
            return
        link.send(frame(frames.ROUTED, self._head, number(kind), number(offset), piece))

    def close(self) -> None:
        """Everything that was sent is on its way; end it."""
        if not self.closed:
            self.pass_on(_CLOSED, self.sent_bytes)
            self.routes.forget(self)


def routed_head(way: list[str], token: int) -> bytes:
    """What a ROUTED frame begins with at the first broker it reaches."""
    return b"".join((b"\x01", number(len(way)), *[blob(name.encode("utf-8")) for name in way], number(token)))


def _wanted_by(name: str) -> str:
    """Who wants an address dialled that a broker said of itself."""
    return f"advert {name}"


class Routes(Part):
    """See the module."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.address = ""
        self.graph = Graph(fabric.name)
        self._told: dict[str, int] = {}
        self._told_address = ""
        self._advertised_at = -FOREVER
        self._changed = False
        self._relays: dict[tuple[str, int], Relay] = {}
        self._retry_at: dict[str, float] = {}
        self._retry_s: dict[str, float] = {}
        self._wanted_since: dict[str, float] = {}
        self._dialed: dict[str, str] = {}
        self._next_look = 0.0
        self.broken: list[Relay] = []
        self.relayed_bytes = 0
        self.refused_pieces = 0
        fabric.add_part(self, [frames.NEIGHBOURS, frames.NEIGHBOURS_SEEN, frames.ROUTED])

    def direct_link(self, name: str) -> Link | None:
        """The link to a neighbour, if there is one of our own."""
        peer = self._fabric.peers.get(name)
        link = None if peer is None else peer.link
        return None if link is None or link.relayed else link

    @property
    def relays(self) -> list[Relay]:
        """The streams that end here."""
        return list(self._relays.values())

    def known(self) -> list[str]:
        """Every broker that was heard of lately, this one included."""
        return sorted(self.graph.adverts)

    # --- who has links to whom ------------------------------------------------------------------------------------------

    def peer_up(self, peer: Peer, now: float) -> None:
        self._wanted_since.pop(peer.name, None)
        self._retry_s.pop(peer.name, None)
        self._retry_at.pop(peer.name, None)
        if peer.link is None or peer.link.relayed:
            return
        self._changed = True
        self.graph.changed()
        self._tell_seen(peer, False)

    def _tell_seen(self, peer: Peer, ask: bool) -> None:
        """Say what was heard here. Both ends do when a link comes up; later, whoever says it asks for the other's."""
        seen = [number(1 if ask else 0), number(len(self.graph.adverts))]
        for advert in self.graph.adverts.values():
            seen.append(blob(advert.name.encode("utf-8")) + number(advert.version))
        peer.send(frame(frames.NEIGHBOURS_SEEN, *seen))

    def peer_down(self, peer: Peer, now: float) -> None:
        self._changed = self._changed or peer.name in self._told
        self.graph.changed()
        self._next_look = 0.0
        for relay in self.relays:
            if relay.way[1] == peer.name:
                self.broken.append(relay)

    def peer_gone(self, peer: Peer, now: float) -> None:
        self._drop(peer.name)

    def handle(self, peer: Peer, content: bytes, now: float) -> None:
        if peer.link is None or peer.link.relayed:
            raise ValueError("what only neighbours say came from farther away")
        kind = content[0]
        if kind == frames.ROUTED:
            self._routed(peer, content, now)
        elif kind == frames.NEIGHBOURS:
            self._hear(peer, content, now)
        else:
            self._compare(peer, Fields(content), now)

    def _compare(self, peer: Peer, fields: Fields, now: float) -> None:
        """A neighbour says what it has heard: tell it the rest."""
        if fields.number():
            self._tell_seen(peer, False)
        theirs: dict[str, int] = {}
        for _ in range(fields.number()):
            name = fields.blob().decode("utf-8")
            theirs[name] = fields.number()
        for advert in self.graph.adverts.values():
            if advert.version > theirs.get(advert.name, 0) and advert.name != peer.name:
                peer.send(advert.frame(now))

    def _hear(self, peer: Peer, content: bytes, now: float) -> None:
        advert = graph.read(content, now)
        name = advert.name
        known = self.graph.adverts.get(name)
        if name == self._fabric.name:
            if advert.version > (known.version if known is not None else 0):
                # What we said in an earlier life, with a clock that was ahead: say the truth above it.
                self._fabric.seen_stamp(advert.version)
                self._changed = True
            return
        if not self.graph.is_welcome(advert, now):
            return
        self.graph.put(advert)
        if known is None or known.neighbours != advert.neighbours:
            self._next_look = 0.0
        if known is None or known.address != advert.address:
            self._dial(advert, now)
        self._pass_on(advert, peer.name, now)
        if known is not None and len(self._told) > FEW_NEIGHBOURS:
            # Whoever was to hear things from the other end of a link that broke may have missed some.
            for lost in known.neighbours.keys() - advert.neighbours.keys():
                other = self._fabric.peers.get(lost)
                if other is not None and self.direct_link(lost) is not None:
                    self._tell_seen(other, True)

    def _pass_on(self, advert: Advert, came_from: str, now: float) -> None:
        sender = self.graph.adverts.get(came_from)
        neighbours = self._neighbours()
        have_it = sender.neighbours if sender is not None and len(neighbours) > FEW_NEIGHBOURS else {}
        for peer in neighbours:
            if peer.name != came_from and peer.name != advert.name and peer.name not in have_it:
                peer.send(advert.frame(now))

    def _neighbours(self) -> list[Peer]:
        found: list[Peer] = []
        for peer in self._fabric.peers.values():
            if peer.link is not None and not peer.link.relayed:
                found.append(peer)
        return found

    def _dial(self, advert: Advert, now: float) -> None:
        before = self._dialed.pop(advert.name, "")
        if before and before != advert.address:
            self._fabric.forget_address(before, _wanted_by(advert.name))
        if advert.address and self._fabric.broadcast.links_all:
            self._dialed[advert.name] = advert.address
            self._fabric.dial(advert.address, now, advert.name, _wanted_by(advert.name))

    def _drop(self, name: str) -> None:
        self.graph.drop(name)
        address = self._dialed.pop(name, "")
        if address:
            self._fabric.forget_address(address, _wanted_by(name))
        for table in (self._retry_at, self._retry_s, self._wanted_since):
            table.pop(name, None)

    def _distances(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for peer in self._neighbours():
            link = peer.link
            found[peer.name] = 1 if link is None else max(1, round(link.rtt_ms))
        return found

    def _advertise(self, now: float) -> None:
        fabric = self._fabric
        distances = self._distances()
        self._told = distances
        self._told_address = self.address
        self._changed = False
        self._advertised_at = now
        self.graph.changed()
        advert = graph.written(fabric.name, fabric.stamp(now), self.address, distances, now)
        self.graph.put(advert)
        for peer in self._neighbours():
            peer.send(advert.frame(now))

    def _is_news(self, now: float) -> bool:
        """Whether what was told last is no longer true enough."""
        if self._told_address != self.address or now - self._advertised_at > REFRESH_S:
            return True
        distances = self._distances()
        if distances.keys() != self._told.keys():
            return True
        for name, distance in distances.items():
            told = self._told[name]
            if abs(distance - told) > 2 + told // 2:
                return True
        return False

    def ways(self) -> dict[str, list[str]]:
        """The shortest way to every broker that can be reached, both ends included."""
        return self.graph.ways(self._distances())

    # --- streams --------------------------------------------------------------------------------------------------------

    def _routed(self, peer: Peer, content: bytes, now: float) -> None:
        fields = Fields(content)
        place = fields.number()
        count = fields.number()
        if not 1 <= place < count <= MAX_HOPS + 1 or place >= 128:
            raise ValueError("a way that is none")
        way = [fields.blob().decode("utf-8") for _ in range(count)]
        if way[place] != self._fabric.name or way[place - 1] != peer.name:
            raise ValueError("a way that does not lead here")
        if place < count - 1:
            link = self.direct_link(way[place + 1])
            if link is not None and link.connection.out_bytes < RELAYED_BYTES:
                self.relayed_bytes += len(content)
                link.send(frame(frames.ROUTED, bytes([place + 1]), content[2:]))
                return
            self.refused_pieces += 1
        token = fields.number()
        kind = fields.number()
        offset = fields.number()
        back = [way[index] for index in range(place, -1, -1)]
        if place < count - 1:
            if kind != _CLOSED:
                self._answer_closed(back, token)
            return
        self._arrived(back, token, kind, offset, content[fields.position :], now)

    def _answer_closed(self, way: list[str], token: int) -> None:
        link = self.direct_link(way[1])
        if link is not None:
            link.send(frame(frames.ROUTED, routed_head(way, token), number(_CLOSED), number(0)))

    def _arrived(self, back: list[str], token: int, kind: int, offset: int, piece: bytes, now: float) -> None:
        """A piece of a stream that ends here. ``back`` leads to its other end, or to whoever could not pass a piece on."""
        if kind == _CLOSED:
            for other in self.relays:
                if other.token == token and back[len(back) - 1] in other.way:
                    self._lose(other, now)
            return
        source = back[len(back) - 1]
        relay = self._relays.get((source, token))
        if relay is None:
            if kind == _TAKEN or offset != 0:
                self._answer_closed(back, token)
                return
            relay = self._open(Relay(self, token, back, False), "", now)
        link = relay.link
        connection = relay.connection
        if link is None or connection is None:
            return
        if kind == _TAKEN:
            relay.taken_bytes = max(relay.taken_bytes, offset)
            if connection.congested and relay.sent_bytes - relay.taken_bytes < WINDOW_BYTES // 2:
                self._fabric.writable(link, now)
            return
        if offset != relay.received_bytes:
            relay.close()
            self._lose(relay, now)
            return
        relay.received_bytes += len(piece)
        if relay.received_bytes - relay.confirmed_bytes >= WINDOW_BYTES // 4:
            relay.confirmed_bytes = relay.received_bytes
            relay.pass_on(_TAKEN, relay.received_bytes)
        self._fabric.receive(link, piece, now)

    def _open(self, relay: Relay, dialed: str, now: float) -> Relay:
        self._relays[(relay.other, relay.token)] = relay
        link = self._fabric.open_link(relay, TransportPeer(relay.other, "relayed"), dialed, relay.other, now)
        link.relayed = True
        relay.link = link
        relay.connection = link.connection
        return relay

    def forget(self, relay: Relay) -> None:
        """A stream is over."""
        relay.closed = True
        self._relays.pop((relay.other, relay.token), None)

    def _lose(self, relay: Relay, now: float) -> None:
        """A stream broke: its link ends, and another way is looked for."""
        self.forget(relay)
        link = relay.link
        if link is None:
            return
        was_up = link.is_up
        relay.link = None
        self._fabric.lost(link, now)
        self._next_look = 0.0
        if not was_up:
            self._back_off(relay.other, now)

    def _back_off(self, name: str, now: float) -> None:
        retry_s = self._retry_s.get(name, FIRST_RETRY_S)
        self._retry_s[name] = min(2 * retry_s, LAST_RETRY_S)
        self._retry_at[name] = now + retry_s * (0.5 + self._fabric.rng.random())

    # --- time -----------------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        if self.broken:
            broken, self.broken = self.broken, []
            for relay in broken:
                if not relay.closed:
                    self._lose(relay, now)
        if self._changed and now >= self._advertised_at + ADVERTISE_S:  # as next_deadline has it, to the last bit
            self._advertise(now)

    def tick(self, now: float) -> None:
        if now < self._next_look and not self.broken and not self._changed:
            return
        self._next_look = now + LOOK_S
        if self._is_news(now):
            self._changed = True
        self.settle(now)
        for name in self.graph.expired(now):
            self._drop(name)
        ways = self.ways()
        for relay in self.relays:
            link = relay.link
            if not self._stands(relay.way) or (link is not None and not link.is_up and not self._is_needed(relay.other)):
                relay.close()
                self._lose(relay, now)
        for name, way in ways.items():
            if len(way) > 2 and self._is_needed(name):
                self._ask_for(name, way, now)

    def _is_needed(self, name: str) -> bool:
        """Whether there is no link to a broker at all."""
        peer = self._fabric.peers.get(name)
        return peer is None or peer.link is None

    def _stands(self, way: list[str]) -> bool:
        """Whether all links of a way are there, as far as is known here."""
        return self.direct_link(way[1]) is not None and self.graph.stands(way)

    def _ask_for(self, name: str, way: list[str], now: float) -> None:
        """Open a stream to a broker that only others reach, unless it is being dialled, or it is the other end's to open."""
        if name < self._fabric.name or now < self._retry_at.get(name, 0.0):
            return
        since = self._wanted_since.get(name, -1.0)
        if since < 0.0:
            since = now
            self._wanted_since[name] = now
        dialing = self._fabric.dialing_of(name)
        tried = all(item.failures > 0 for item in dialing)
        if dialing and not tried and now - since < PATIENCE_S:
            return
        for relay in self.relays:
            if relay.other == name and relay.opened_here:
                return
        self._open(Relay(self, self._fabric.rng.getrandbits(60), way, True), f"relayed:{name}", now)

    def next_deadline(self) -> float:
        if self.broken:
            return 0.0
        if self._changed:
            return self._advertised_at + ADVERTISE_S
        return self._next_look
