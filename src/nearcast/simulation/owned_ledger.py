"""What a fabric with owned topics promises its clients, checked against everything that happens in a simulated run.

It is what :mod:`nearcast.simulation.fabric_invariants` says of any fabric, with these differences for messages to such topics:

- *Owed.* A message is owed to a subscriber from the moment all brokers that are meant to run do run, and know that it is
  wanted where the subscriber's session is: any of them may own the topic when the message gets there.
- *One order.* Where no link was lost, all subscribers get the messages of a topic, of one QoS, in one order, whoever published
  them and however often the topic changed its owner meanwhile. Behind a gateway they do unless they were moved: a session that
  moves brings along what it had not delivered.
- *Order.* That of a publisher is kept across migrations. An owner that is lost ends it for what was on its way: what it brings
  back comes late. So does a link that is lost while a topic moves: nobody waits longer than
  :data:`~nearcast.fabric.ownership.WAIT_S` for what is behind it.
- *Once.* If the broker of a subscriber died since, a message may come to it twice: it was sent to an owner that died, and what
  a broker has had is remembered only while it runs (N16).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nearcast.errors import InvariantViolated
from nearcast.scenario.expansion import Client
from nearcast.scenario.identity import decode_identity
from nearcast.simulation import mqtt_facts as facts
from nearcast.simulation.fabric_invariants import LATE_S, Brokers, FabricLedger
from nearcast.simulation.hosts import Host
from nearcast.simulation.mqtt_invariants import Key, Sent, Stream, Subscriber
from nearcast.simulation.owned_tables import OwnedRules

Line = tuple[str, int]
"""A topic, and the QoS that its messages were published at."""


class OwnedLedger(FabricLedger):
    """Keeps account of every message of a run; see the module. ``cut_off`` tells whether the network is cut anywhere now."""

    def __init__(
        self,
        clients: tuple[Client, ...],
        brokers: Brokers,
        gateways: set[tuple[str, int]],
        world_now: Callable[[], float],
        rules: OwnedRules,
        cut_off: Callable[[], bool],
    ) -> None:
        super().__init__(clients, brokers, gateways, world_now)
        self._rules = rules
        self._cut_off = cut_off
        # The message that is being looked at, and what each subscriber got for the first time, in order.
        self._message: facts.Message | None = None
        self._lines: dict[Line, dict[str, list[Key]]] = {}
        self._links_lost: dict[str, int] = {}
        self._links_lost_s = -LATE_S - 1.0
        self.in_time = 0
        self.late = 0

    # --- what happens ---------------------------------------------------------------------------------------------------

    def _on_published(self, message: facts.Message) -> None:
        self._message = message if self._rules.is_owned(message.topic) else None
        super()._on_published(message)
        self._message = None

    def _is_covered(self, known: Subscriber) -> bool:
        if self._message is not None and not self._fabric.all_open():
            return False
        return super()._is_covered(known)

    def _on_delivered(self, host: Host, fact: facts.Delivered) -> None:
        delivered = self.delivered
        super()._on_delivered(host, fact)
        if self.delivered == delivered or not self._rules.is_owned(fact.topic):
            return
        identity = decode_identity(fact.payload)
        if identity is None:
            return
        sent = self._streams[identity.publisher].messages[identity.sequence]
        line = self._lines.setdefault((fact.topic, min(sent.message.qos, 1)), {})
        line.setdefault(fact.client, []).append((identity.publisher, identity.sequence))
        bound_ms = self._rules.bound_ms(fact.topic)
        if bound_ms:
            in_time = (self._now() - sent.message.sent_s) * 1e3 <= bound_ms
            self.in_time += in_time
            self.late += not in_time

    def figures(self) -> dict[str, Any]:
        """How long messages of topics with a bound took."""
        if not self.in_time + self.late:
            return {}
        return {"within_bound": round(self.in_time / (self.in_time + self.late), 4)}

    def _look_at_links(self) -> None:
        """See when a link between brokers was lost last."""
        lost = {broker.name: broker.links.lost_links for broker in self._fabric.open()}
        changed = any(lost.get(name, 0) != count for name, count in self._links_lost.items())
        changed = changed or any(count and name not in self._links_lost for name, count in lost.items())
        if changed or self._cut_off() or not self._fabric.all_open():
            self._links_lost_s = self._now()
        self._links_lost = lost

    # --- what is excused ------------------------------------------------------------------------------------------------

    def _may_overtake(self, known: Subscriber, message: facts.Message) -> bool:
        if super()._may_overtake(known, message):
            return True
        if not self._rules.is_owned(message.topic):
            return False
        self._look_at_links()
        return max(self._links_lost_s, *self._broker_died_s.values(), -LATE_S - 1.0) >= message.sent_s - LATE_S

    def _may_repeat(self, known: Subscriber, sent: Sent) -> bool:
        if super()._may_repeat(known, sent):
            return True
        # What was sent to an owner that died is sent again, and what a broker has had is remembered only while it runs.
        if not self._rules.is_owned(sent.message.topic):
            return False
        return self._broker_died_s.get(self._place(known), -1.0) >= sent.message.sent_s

    # --- what must hold -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self._look_at_links()
        super().check()

    def _check_complete(self) -> None:
        if self._links_lost_s < 0.0:  # with a link goes what was on its way at QoS 0; the rest is owed, and looked at as such
            super()._check_complete()

    def _may_be_older(self, topic: str, stream: Stream) -> bool:
        """What a broker or a link that was lost held up comes late, is ordered last then, and retained (N9, N16)."""
        last = stream.messages.get(stream.acknowledged_retained)
        if last is None or not self._rules.is_owned(topic):
            return False
        return max(self._links_lost_s, *self._broker_died_s.values(), -LATE_S - 1.0) >= last.message.sent_s - LATE_S

    def _check_calm(self) -> None:
        super()._check_calm()
        if self._links_lost_s < 0.0:
            for (topic, qos), line in self._lines.items():
                self._check_one_order(topic, qos, line)

    def _check_one_order(self, topic: str, qos: int, line: dict[str, list[Key]]) -> None:
        still = [name for name in line if not self._was_moved(name)]
        for index, one in enumerate(still):
            place = {key: number for number, key in enumerate(line[one])}
            for other in still[index + 1 :]:
                last = -1
                for key in line[other]:
                    number = place.get(key, last)
                    if number < last:
                        raise InvariantViolated(
                            f"{one} and {other} got the messages to {topic} (QoS {'1 and 2' if qos else '0'}) in different "
                            "orders, and nothing was disturbed",
                            [self._subscribers[one].client.host, self._subscribers[other].client.host],
                        )
                    last = number

    def _was_moved(self, client: str) -> bool:
        return self._is_behind_gateway(self._subscribers[client].client)
