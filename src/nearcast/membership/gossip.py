"""Every node's coordinate, learned by probing others; and others to probe, learned from those (ePulsar §3.2, §4).

A driver hands datagrams in (:meth:`Gossip.handle`), calls :meth:`Gossip.tick` and sends :meth:`Gossip.take_outgoing`;
addresses are text, ``host:port``, and mean nothing here. One member after another is probed, in a random order. Its answer has
its coordinate, which together with the round trip's time moves ours (:mod:`nearcast.coordinates.vivaldi`), and a few members
that it has heard itself. So a node needs one address to begin with, and who it knows of is known to all soon.

What is believed of whom:

- *An answer* is from the node at the address that was asked: it carries the probe's random number. Only answers move the
  coordinate.
- *A probe* tells who probes and where it is. None counts twice, nor is answered twice: its life and number have to rise, or to
  be among the last few and new, for datagrams overtake each other.
- *Hearsay*, the members in a packet, is somebody to probe and no more: nothing is passed on but what answered here, so the
  dead are forgotten everywhere; and no word of others moves a member that answers to another address.

Who stops to answer is forgotten, and asked now and then all the same: after a partition the two halves have to find each other
without help. So have a node and its seeds, which are seeds again once the node that answered there is forgotten.

Everything is tagged with a key of the fabric, and bounded: members, probes under way, answers a second.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Final

import msgspec

from nearcast.coordinates.coordinate import Coordinate
from nearcast.coordinates.settings import VivaldiSettings
from nearcast.coordinates.vivaldi import Vivaldi
from nearcast.membership import gossip_packets
from nearcast.membership.gossip_members import Lost, Member
from nearcast.membership.gossip_packets import ANSWER, PROBE, Heard, Packet
from nearcast.membership.packets import monitoring_key

SAVED_FORMAT: Final = 1
MAX_SAVED_MEMBERS: Final = 64
MAX_SEEDS: Final = 64
LEAST_SEED_SHARE: Final = 0.02
LOST_SHARE: Final = 0.02
"""Of all probes, how many go to members that stopped to answer, however many those are."""

ALONE_SHARE: Final = 0.5
"""The same of a node that reaches nobody; the others go to its seeds."""

UPSET_ERROR: Final = 0.5
UPSET_INTERVAL_S: Final = 60.0
MAX_NUMBER: Final = 0xFFFFFFFF


class GossipSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How eagerly a node looks around. The defaults cost about 400 bytes a second each way, headers included."""

    interval_s: float = 1.0
    """Seconds between probes of a node that knows where it is."""

    eager_interval_s: float = 0.2
    """The same for one that does not: it was started, or nothing fits any more."""

    eager_probes: int = 100
    """How many of those there are."""

    timeout_s: float = 3.0
    """An answer that takes longer is none. Paths above this have no coordinate."""

    give_up: int = 3
    """Probes in a row without an answer after which a member is forgotten, unless somebody said that it is there."""

    neighbours: int = 64
    """With more members than this only so many are probed, the nearer half for detail and the rest, others every time round,
    for the whole. Too few leaves the space uncertain; too many makes each sample old."""

    members_per_packet: int = 6
    max_members: int = 2_000

    answers_per_second: float = 200.0
    """Probes answered at most: anybody may repeat one that he saw."""


class MemberView(msgspec.Struct, frozen=True):
    """A node that answers, as far as this one knows. ``rtt_ms``: of its last answer, negative before the first."""

    name: str
    address: str
    coordinate: Coordinate | None
    rtt_ms: float
    heard_at: float
    failures: int


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What a node keeps over a restart."""

    format: int
    vector: list[float]
    height: float
    adjustment: float
    error: float
    members: tuple[Heard, ...] = ()


class Gossip:
    """See the module. ``address`` is where this node is reached; ``:port`` means wherever its packets come from. ``life`` has
    to be higher after each start; wall-clock microseconds are."""

    def __init__(
        self,
        name: str,
        address: str,
        secret: bytes,
        settings: GossipSettings,
        rng: random.Random,
        now: float,
        *,
        life: int = 0,
        vivaldi: VivaldiSettings | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.settings = settings
        self.vivaldi = Vivaldi(rng, vivaldi)
        self.packets_sent = 0
        self.packets_received = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self.ignored = 0
        self.unanswered = 0
        self._key = monitoring_key(secret)
        self._rng = rng
        self._life = life
        self._number = 0
        self._members: dict[str, Member] = {}
        self._seeds: dict[str, int] = {}
        """Addresses of nodes that have not said their name yet, and how often they were asked."""
        self._seed_names: dict[str, str] = {}
        """Addresses of those that have, and the name."""
        self._lost: dict[str, Lost] = {}
        self._pending: dict[int, tuple[str, str, float]] = {}
        self._new: deque[str] = deque(maxlen=settings.max_members)
        self._round: list[str] = []
        self._outgoing: list[tuple[str, bytes]] = []
        self._probe_at = now
        self._eager = settings.eager_probes
        self._eager_again_at = now + UPSET_INTERVAL_S
        self._answers = settings.answers_per_second
        self._answers_at = now

    # --- who there is ---------------------------------------------------------------------------------------------------

    def know(self, name: str, address: str, now: float) -> None:
        """A node is there, at this address, from now on. Without a name: somebody is, who will tell."""
        if not address or name == self.name or not gossip_packets.fits(name) or not gossip_packets.fits(address):
            return
        if not name:
            if address not in self._seed_names and len(self._seeds) + len(self._seed_names) < MAX_SEEDS:
                self._seeds.setdefault(address, 0)
            return
        member = self._members.get(name)
        if member is None:
            self._add(name, address, pinned=True)
            return
        member.pinned = True
        if member.address != address:
            member.address = address
            member.failures = 0
            self._new.append(name)

    def forget(self, name: str) -> None:
        """A node is there no more. Should it be heard again, it is."""
        self._lost.pop(name, None)
        self._drop(name)

    def _drop(self, name: str) -> None:
        if self._members.pop(name, None) is None:
            return
        self.vivaldi.forget(name)
        for address in [address for address, other in self._seed_names.items() if other == name]:
            del self._seed_names[address]
            self._seeds[address] = 0

    def members(self) -> list[MemberView]:
        """Nodes that have been heard, this one not included."""
        return [
            MemberView(member.name, member.address, member.coordinate, member.rtt_ms, member.heard_at, member.failures)
            for member in self._members.values()
            if member.coordinate is not None
        ]

    @property
    def coordinate(self) -> Coordinate:
        """Where this node is."""
        return self.vivaldi.coordinate

    def coordinate_of(self, name: str) -> Coordinate | None:
        """Where another one is, by its own word; or this one."""
        if name == self.name:
            return self.vivaldi.coordinate
        member = self._members.get(name)
        return None if member is None else member.coordinate

    def _add(self, name: str, address: str, *, pinned: bool) -> Member | None:
        if len(self._members) >= self.settings.max_members and not pinned:
            return None
        member = self._members[name] = Member(name, address, pinned)
        lost = self._lost.pop(name, None)
        if lost is not None:
            member.life, member.number, member.seen = lost.member.life, lost.member.number, lost.member.seen
        self._new.append(name)
        return member

    # --- datagrams ------------------------------------------------------------------------------------------------------

    def handle(self, data: bytes, source: str, now: float, waited_s: float = 0.0) -> bool:
        """A datagram arrived, ``waited_s`` before it was read. False: it is not ours. What makes no sense is ignored."""
        if not gossip_packets.is_gossip(data):
            return False
        self.packets_received += 1
        self.bytes_received += len(data)
        packet = gossip_packets.unpack(data, self._key)
        if packet is None or packet.name == self.name:
            self.ignored += 1
        elif packet.kind == PROBE:
            self._probed(packet, source, now, waited_s)
        else:
            self._answered(packet, source, now, waited_s)
        return True

    def _probed(self, packet: Packet, source: str, now: float, waited_s: float) -> None:
        lost = self._lost.get(packet.name)
        member = self._members.get(packet.name)
        known = member if member is not None or lost is None else lost.member
        newest = known is None or (packet.life, packet.number) > (known.life, known.number)
        reborn = known is not None and packet.life > known.life
        if (known is not None and not known.takes(packet.life, packet.number)) or not self._may_answer(now):
            self.ignored += 1
            return
        address = _place(packet.address, source)
        self._send(source, ANSWER, packet.identifier, waited_s)
        if not newest:
            return  # overtaken by what it said later
        if member is None:
            member = self._add(packet.name, address, pinned=False)
            if member is None:
                return
            member.takes(packet.life, packet.number)
        elif reborn and not member.pinned:
            member.address = address
        self._heard(member, packet, now)

    def _answered(self, packet: Packet, source: str, now: float, waited_s: float) -> None:
        asked = self._pending.pop(packet.identifier, None)
        if asked is None:
            self.ignored += 1
            return
        name, address, sent_at = asked
        if name and packet.name != name:
            self.ignored += 1  # somebody else is at this address now
            self._lost.pop(name, None)
            self._missed(name, now)
            return
        member = self._members.get(packet.name)
        if member is None:
            member = self._add(packet.name, address, pinned=False)
            if member is None:
                return
        if self._seeds.pop(address, None) is not None:
            self._seed_names[address] = packet.name
        if packet.life < member.life:
            # It is there now, so this is its life; its clock was put back.
            member.life, member.number, member.seen = packet.life, 0, 0
        member.takes(packet.life, packet.number)
        self._heard(member, packet, now)
        rtt_s = now - sent_at - waited_s
        # What the other end says it kept the probe for is no network's; but it cannot say more than there is.
        rtt_ms = max(rtt_s - min(packet.dwell_us / 1e6, rtt_s / 2), 0.0) * 1e3
        member.rtt_ms = rtt_ms
        self.vivaldi.observe(packet.name, packet.coordinate, rtt_ms)
        self._listen(packet.members, now)
        if self.vivaldi.coordinate.error > UPSET_ERROR and not self._eager and now >= self._eager_again_at:
            self._eager = self.settings.eager_probes
            self._eager_again_at = now + UPSET_INTERVAL_S

    def _heard(self, member: Member, packet: Packet, now: float) -> None:
        member.heard_at = now
        member.failures = 0
        member.coordinate = packet.coordinate

    def _listen(self, members: tuple[Heard, ...], now: float) -> None:
        """Hearsay: somebody to probe."""
        for heard in members:
            if heard.name == self.name or not heard.name or not heard.address:
                continue
            member = self._members.get(heard.name)
            if member is None:
                lost = self._lost.get(heard.name)
                if lost is None or lost.hearsay_from <= now:
                    self._add(heard.name, heard.address, pinned=False)
            elif member.failures and not member.pinned and heard.life > member.life:
                member.address = heard.address
                self._new.append(heard.name)

    def _may_answer(self, now: float) -> bool:
        limit = self.settings.answers_per_second
        self._answers = min(self._answers + (now - self._answers_at) * limit, limit)
        self._answers_at = now
        if self._answers < 1.0:
            return False
        self._answers -= 1.0
        return True

    # --- probing --------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time passed: probe whoever is next, give up those that do not answer."""
        oldest = now - self.settings.timeout_s
        for identifier, (name, _, sent_at) in list(self._pending.items()):
            if sent_at > oldest:
                break  # in the order in which they were sent
            del self._pending[identifier]
            self.unanswered += 1
            self._missed(name, now)
        if now < self._probe_at:
            return
        target = self._next_target(now)
        if target is not None:
            name, address = target
            identifier = self._rng.getrandbits(64)
            self._pending[identifier] = (name, address, now)
            self._send(address, PROBE, identifier, 0.0)
        interval_s = self.settings.interval_s
        if self._eager:
            interval_s = min(self.settings.eager_interval_s, interval_s)
            self._eager -= target is not None
        self._probe_at = now + interval_s * (0.9 + 0.2 * self._rng.random())  # not all in step

    def _missed(self, name: str, now: float) -> None:
        member = self._members.get(name)
        if member is None:
            return
        member.failures += 1
        if member.failures >= self.settings.give_up and not member.pinned:
            self._drop(name)
            if len(self._lost) >= self.settings.max_members:
                del self._lost[next(iter(self._lost))]
            self._lost[name] = Lost(member, now)

    def _next_lost(self, now: float) -> Member | None:
        """Somebody to ask whether he is back."""
        while self._lost and next(iter(self._lost.values())).ask_until <= now:
            del self._lost[next(iter(self._lost))]  # in the order in which they were given up
        if not self._lost or self._rng.random() >= (LOST_SHARE if self._members else ALONE_SHARE):
            return None
        return self._rng.choice(list(self._lost.values())).member

    def _next_target(self, now: float) -> tuple[str, str] | None:
        lost = self._next_lost(now)
        if lost is not None:
            return lost.name, lost.address
        if self._seeds:
            # Behind a seed may be all others, so it comes first; and never last, for it may be back some day.
            address = min(self._seeds, key=self._seeds.__getitem__)
            if not self._members or self._rng.random() < max(1.0 / (1 + self._seeds[address]), LEAST_SEED_SHARE):
                self._seeds[address] += 1
                return "", address
        while self._new:
            member = self._members.get(self._new.popleft())
            if member is not None:
                return member.name, member.address
        while True:
            while self._round:
                member = self._members.get(self._round.pop())
                if member is not None:
                    return member.name, member.address
            if not self._members:
                return None
            self._round = self._another_round()

    def _another_round(self) -> list[str]:
        """Whom to probe next, in reverse order."""
        names = list(self._members)
        most = self.settings.neighbours
        if len(names) > most:
            mine = self.vivaldi.coordinate
            placed = [
                (mine.distance_ms(member.coordinate), member.name)
                for member in self._members.values()
                if member.coordinate is not None and len(member.coordinate.vector) == len(mine.vector)
            ]
            near = [name for _, name in sorted(placed)[: most // 2]]
            others = list(set(names).difference(near))
            names = near + self._rng.sample(sorted(others), min(most - len(near), len(others)))
        self._rng.shuffle(names)
        return names

    # --- time and output ------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next."""
        return self._probe_at

    def take_outgoing(self) -> list[tuple[str, bytes]]:
        """Datagrams to send, with their addresses."""
        taken, self._outgoing = self._outgoing, []
        return taken

    def _send(self, address: str, kind: int, identifier: int, waited_s: float) -> None:
        if self._number == MAX_NUMBER:
            self._life += 1
            self._number = 0
        self._number += 1
        alive = [member for member in self._members.values() if member.coordinate is not None and not member.failures]
        most = self.settings.members_per_packet
        told = alive if len(alive) <= most else self._rng.sample(alive, most)
        packet = Packet(
            kind=kind,
            identifier=identifier,
            life=self._life,
            number=self._number,
            dwell_us=min(int(waited_s * 1e6), MAX_NUMBER),
            coordinate=self.vivaldi.coordinate,
            name=self.name,
            address=self.address,
            members=tuple(Heard(member.name, member.address, member.life) for member in told),
        )
        data = gossip_packets.pack(packet, self._key)
        self.packets_sent += 1
        self.bytes_sent += len(data)
        self._outgoing.append((address, data))

    # --- over a restart -------------------------------------------------------------------------------------------------

    def save(self) -> bytes:
        """The coordinate, and some members to begin with."""
        mine = self.vivaldi.coordinate
        alive = [member for member in self._members.values() if member.coordinate is not None and not member.failures]
        saved = Saved(
            format=SAVED_FORMAT,
            vector=mine.vector,
            height=mine.height,
            adjustment=mine.adjustment,
            error=mine.error,
            members=tuple(Heard(member.name, member.address, member.life) for member in alive[:MAX_SAVED_MEMBERS]),
        )
        return msgspec.json.encode(saved)

    def restore(self, data: bytes) -> bool:
        """Begin with what was saved. False: it is damaged, or of other dimensions, and nothing was taken."""
        try:
            saved = msgspec.json.decode(data, type=Saved)
        except msgspec.MsgspecError:
            return False
        where = Coordinate(saved.vector, saved.height, saved.adjustment, saved.error)
        if saved.format != SAVED_FORMAT or not self.vivaldi.restore(where):
            return False
        for heard in saved.members[:MAX_SAVED_MEMBERS]:
            if heard.name not in self._members and heard.name != self.name and heard.name and heard.address:
                self._add(heard.name, heard.address, pinned=False)
        return True


def _place(address: str, source: str) -> str:
    """Where a node is that says to be at ``address``, and whose packet came from ``source``."""
    return source if not address or address.startswith(":") else address
