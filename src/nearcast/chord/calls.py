"""Asking a replica set something, whoever leads it.

The believed leader is asked first. One that does not lead says who does, and is believed; one that does not answer in time, or
cannot be reached, is passed over for the next replica. While a set elects nobody leads it: it is asked again, until one
answers as leader or the set is taken as failed. What a set's last known leader is, is remembered apart from contacts: a new
leader changes no list on the ring.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from nearcast.chord.contacts import Contact
from nearcast.chord.effects import FOREVER, Effect, Send
from nearcast.chord.messages import AnyBody, Message, NotLeader
from nearcast.chord.settings import RingSettings

MAX_CALLS: Final = 10_000
MAX_LEADERS: Final = 4_096
ELECTING_S: Final = 0.05
"""Before a set that does not know its leader is asked again."""

Answered = Callable[[AnyBody | None, float], None]
"""Takes the answer, or none if the set is taken as failed; and the time."""


class Call:
    """One question."""

    __slots__ = ("answered", "asked", "at", "body", "contact", "ends_at", "hints", "turn")

    def __init__(self, contact: Contact, body: AnyBody, answered: Answered, now: float, ends_at: float) -> None:
        self.contact = contact
        self.body = body
        self.answered = answered
        self.ends_at = ends_at
        self.at = now
        """When to go on with another replica."""
        self.asked = ""
        """The replica that is to answer; none while the set elects."""
        self.turn = -1
        self.hints = 0
        """How often a replica that does not lead named another one."""


class Caller:
    """Open questions of one machine. ``outgoing`` collects what is to be sent; ``leader_changes`` counts answers by others
    than the believed leader."""

    def __init__(self, settings: RingSettings, rng: random.Random, outgoing: list[Effect]) -> None:
        self._settings = settings
        self._outgoing = outgoing
        self._calls: dict[int, Call] = {}
        self._leaders: dict[str, str] = {}
        self._suspects: dict[str, float] = {}
        self._next_number = rng.getrandbits(48)
        self.leader_changes = 0

    def __len__(self) -> int:
        return len(self._calls)

    def ask(self, contact: Contact, body: AnyBody, answered: Answered, now: float, within_s: float | None = None) -> None:
        """Ask a set. With too many questions open the answer is that it failed."""
        if len(self._calls) >= MAX_CALLS:
            answered(None, now)
            return
        call = Call(contact, body, answered, now, now + (self._settings.failed_s if within_s is None else within_s))
        leader = self._leaders.get(contact.name, contact.leader)
        self._send(call, leader if leader in contact.replicas else contact.replicas[0], now)

    def leader_of(self, contact: Contact) -> str:
        """Who is believed to lead a set."""
        leader = self._leaders.get(contact.name, contact.leader)
        return leader if leader in contact.replicas else ""

    def is_suspect(self, name: str, now: float) -> bool:
        return self._suspects.get(name, 0.0) > now

    def suspect(self, name: str, until: float) -> None:
        """Leave a set out of routes for a while."""
        if len(self._suspects) >= MAX_LEADERS:
            self._suspects.clear()
        self._suspects[name] = until

    def trust(self, name: str) -> None:
        self._suspects.pop(name, None)

    def forget(self) -> None:
        """Nobody waits for anything any more."""
        self._calls.clear()

    # --- what happens ----------------------------------------------------------------------------------------------------

    def receive(self, broker: str, message: Message, now: float) -> None:
        """An answer."""
        call = self._calls.get(message.number)
        if call is None or call.asked != broker:
            return
        del self._calls[message.number]
        if isinstance(message.body, NotLeader):
            leader = message.body.leader
            call.hints += 1
            if leader in call.contact.replicas and leader != broker and call.hints <= 2 * len(call.contact.replicas):
                self._note_leader(call.contact.name, leader)
                self._send(call, leader, now)
            else:
                self._wait(call, now)
            return
        self._note_leader(call.contact.name, broker)
        self._suspects.pop(call.contact.name, None)
        call.answered(message.body, now)

    def unreachable(self, broker: str, now: float) -> None:
        """There is no way to this broker: whoever waits for it asks another one."""
        for number, call in list(self._calls.items()):
            if call.asked == broker:
                del self._calls[number]
                self._wait(call, now)

    def tick(self, now: float) -> None:
        for number, call in list(self._calls.items()):
            if now < call.at and now < call.ends_at:
                continue
            del self._calls[number]
            if now >= call.ends_at:
                self.suspect(call.contact.name, now + self._settings.suspect_s)
                call.answered(None, now)
            else:
                self._send(call, self._next_replica(call), now)

    def next_deadline(self) -> float:
        return min((min(call.at, call.ends_at) for call in self._calls.values()), default=FOREVER)

    # --- how it is done --------------------------------------------------------------------------------------------------

    def _send(self, call: Call, broker: str, now: float) -> None:
        call.asked = broker
        call.at = now + self._settings.try_s
        number = self._number()
        self._calls[number] = call
        self._outgoing.append(Send(broker, Message(call.contact.name, number, call.body)))

    def _wait(self, call: Call, now: float) -> None:
        """Nobody answered as leader, and nobody said who is: ask the next replica, at once before all were asked."""
        is_first_round = call.turn + 1 < len(call.contact.replicas) - 1
        if is_first_round:
            self._send(call, self._next_replica(call), now)
            return
        call.asked = ""
        call.at = now + ELECTING_S
        self._calls[self._number()] = call

    def _next_replica(self, call: Call) -> str:
        call.turn += 1
        replicas = call.contact.replicas
        first = replicas.index(call.asked) if call.asked in replicas else 0
        return replicas[(first + 1) % len(replicas)] if call.asked else replicas[call.turn % len(replicas)]

    def _note_leader(self, name: str, leader: str) -> None:
        known = self._leaders.get(name)
        if known == leader:
            return
        if known is not None:
            self.leader_changes += 1
            del self._leaders[name]
        elif len(self._leaders) >= MAX_LEADERS:
            del self._leaders[next(iter(self._leaders))]
        self._leaders[name] = leader

    def _number(self) -> int:
        self._next_number = (self._next_number + 1) & ((1 << 61) - 1)
        return self._next_number
