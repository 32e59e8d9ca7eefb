"""The way to the cloud: one broker's session at an MQTT broker that knows nothing of fabrics.

:class:`Cloud` is a pure machine over the client machine (:mod:`nearcast.mqtt.client_machine`). It owns the connection and its
repetition, the subscriptions that the group needs there, the window of messages that are on their way, and the markers. It
refuses to know groups, leaders, members and who gets what: that is its owner's (``cloud_owner``), which says what is wanted
and is told what happened. Its parts have their own homes: ``cloud_dialling`` (when to connect), ``cloud_subscriptions``,
``cloud_relaying`` (messages on their way there), ``cloud_markers``.

States and what moves them::

    idle ──want()──► waiting ──time──► dialling ──opened()──► greeting ──CONNACK──► connected
      ▲                 ▲                  │dial_failed()         │ refused, lost       │ lost(), an error
      │                 └──────────────────┴──────────────────────┴─────────────────────┤
      └──────────────────────── not wanted, and nothing left to confirm ────────────────┘

What holds whatever happens:

- *Nothing is acknowledged before it is safe.* All output goes through ``push_held`` of a
  :class:`~nearcast.mqtt.connection.Connection`, so that PUBACK and PUBREC of what arrived wait for the journal.
- *The session stays.* It has the same client identifier for ever and no clean start, so the cloud keeps messages for us while
  we are away. ``connected(session_kept)`` says whether it did. The client machine is not kept over a restart: messages have an
  identity of their own that tells repetitions, and packet identifiers that an earlier process may have left half-way are
  released first (:attr:`~nearcast.mqtt.client_events.ClientSettings.releases_forgotten`).
- *Subscriptions are made before others are given up*, so that going from ``a/b`` to ``a/#`` and back misses nothing.
- *A marker* is a message to ourselves. When it is back, all that the cloud took before it and had for us is here.

Contract for the driver: after every call let out what the connection has, ask :meth:`Cloud.wants_dial`, and call
:meth:`Cloud.tick` at :meth:`Cloud.next_deadline`. The owner may call any method from within its callbacks.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Final

from nearcast.config import Limits
from nearcast.errors import LocalProtocolError, RequestRefused
from nearcast.fabric.cloud_copies import Copies
from nearcast.fabric.cloud_dialling import NEVER, CloudDialling
from nearcast.fabric.cloud_markers import Markers
from nearcast.fabric.cloud_memory import FilterMemory
from nearcast.fabric.cloud_owner import CloudOwner
from nearcast.fabric.cloud_relaying import CloudRelaying
from nearcast.fabric.cloud_settings import client_settings, cloud_version, marks_topic, memory_topic
from nearcast.fabric.cloud_subscriptions import CloudSubscriptions
from nearcast.fabric.envelopes import Envelopes
from nearcast.fabric.identities import Identity
from nearcast.fabricconfig import Groups
from nearcast.groups import leaders
from nearcast.mqtt.access import Peer as TransportPeer
from nearcast.mqtt.client_events import (
    Connected,
    Disconnected,
    MessageReceived,
    PublishCompleted,
    Refused,
    SubscribeCompleted,
    UnsubscribeCompleted,
)
from nearcast.mqtt.client_machine import CLOSED, CONNECTED, ClientMachine
from nearcast.mqtt.client_reconnection import is_final, is_temporary
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.packets import MQTT_5, Publish
from nearcast.mqtt.publication import Publication

OUTPUT_BYTES: Final = 16_777_216
"""Bytes kept for a cloud that takes them too slowly; as of a link."""

REFUSED_SHOWN: Final = 3

STALE_S: Final = 60.0
"""How long a process leaves the subscriptions of an earlier one alone that it does not want itself: brokers that depended on
them have found another way by then."""


class Cloud:
    """See the module. ``connected`` and ``session_kept`` are of the present connection; the rest are figures."""

    def __init__(
        self,
        owner: CloudOwner,
        settings: Groups,
        name: str,
        limits: Limits,
        effects: Effects,
        secret: bytes,
        rng: random.Random,
        now: float,
    ) -> None:
        self.connected = False
        self.session_kept = False
        #: The connection, from the moment its transport is there until that is gone.
        self.connection: Connection | None = None
        #: The shared subscriptions, as whole filters, by which the message came that :meth:`CloudOwner.arrived` is told of.
        #: Only their members are to have it then, one of each; a plain subscription of ours gets a copy of its own. Empty: it
        #: came by a plain one.
        self.arrived_by: list[str] = []
        #: Whether that message may be one that was retained at the cloud before, and not one that was just published.
        self.may_be_stored = False
        self.arrived_messages = 0
        self.echoes = 0
        self.copies = 0
        self.connects = 0
        self._owner = owner
        self._limits = limits
        self._effects = effects
        self._version = cloud_version(settings)
        self._address = settings.cloud or ""
        self.machine = ClientMachine(client_settings(settings, name, limits))
        self._envelopes = Envelopes(secret, self._version)
        self._prefix = settings.prefix + "/"
        self._leaders_topic = leaders.topic(settings.prefix, settings.region)
        memory = FilterMemory(memory_topic(settings, name), secret)
        self._memory_topic = memory.topic
        self._markers = Markers(marks_topic(settings, name), secret, rng)
        self._marking: set[int] = set()
        self._subscriptions = CloudSubscriptions(self.machine, self._version == MQTT_5, memory, self._markers)
        self._subscriptions.control({self._markers.topic: (1, False), self._leaders_topic: (0, True)})
        #: The messages on their way there.
        self.relaying = CloudRelaying(owner, self.machine, self._envelopes, self._subscriptions, self._prefix.encode("utf-8"))
        self._copies = Copies()
        self._drop_stale_at = NEVER
        self._dialling = CloudDialling(rng)
        self._wanted = False
        self._ending = False
        self._acting = False

    def set_password(self, password: bytes | None) -> None:
        """What the connections from now on say."""
        self.machine.settings.password = password

    # --- the connection -------------------------------------------------------------------------------------------------

    def want(self, wanted: bool, now: float) -> None:
        """Whether there is to be a connection. One that is not wanted ends once all that was relayed is confirmed."""
        self._wanted = wanted
        self._wake(now)
        self._act(now)

    def _wake(self, now: float) -> None:
        if self._needed():
            self._dialling.wake(now)

    @property
    def problem(self) -> str:
        """Why there is no connection, or what the cloud does not allow, in words for people; empty while all is well."""
        if not self.connected:
            return self._dialling.problem
        refused = self._subscriptions.refused
        if not refused:
            return self._markers.problem
        shown = ", ".join(sorted(refused)[:REFUSED_SHOWN])
        return f"it refuses {len(refused):,} subscriptions ({shown}{', …' if len(refused) > REFUSED_SHOWN else ''})"

    @property
    def state(self) -> str:
        """In a word, for people."""
        if self.connected:
            return "connected"
        if self.connection is not None or self._dialling.under_way:
            return "connecting"
        return "waiting" if self._needed() else "idle"

    def _needed(self) -> bool:
        unfinished = self.machine.unacknowledged > 0 or self._markers.waiting or self._drop_stale_at < NEVER
        return not self._ending and (self._wanted or unfinished)

    def wants_dial(self, now: float) -> bool:
        """Whether the driver is to connect now; it is answered by :meth:`opened` or :meth:`dial_failed`."""
        dialling = self._dialling
        if dialling.under_way or self.connection is not None or dialling.due_at > now or not self._needed():
            return False
        dialling.under_way = True
        return True

    def opened(self, handle: object, now: float) -> Connection:
        """The transport is there."""
        self._dialling.under_way = False
        connection = Connection(self._effects, TransportPeer(self._address, "cloud"), handle, now, self._limits)
        connection.max_output_bytes = max(connection.max_output_bytes, OUTPUT_BYTES)
        self.connection = connection
        self.machine.connect(now)
        self._act(now)
        return connection

    def end(self, now: float) -> None:
        """This broker stops: say goodbye. The cloud keeps the session, and what was relayed and not confirmed is its origin's
        to relay again."""
        self._ending = True
        self.machine.disconnect(now)
        self._act(now)

    def dial_failed(self, now: float, reason: str = "nobody answers there") -> None:
        """Nobody answered. It is tried again, less and less often."""
        self._dialling.under_way = False
        self._dialling.failed(reason, False, now)

    def receive(self, data: bytes, now: float) -> None:
        """Bytes arrived."""
        self.machine.receive(data, now)
        self._act(now)

    def writable(self, now: float) -> None:
        """The transport has room again."""
        connection = self.connection
        if connection is not None:
            connection.congested = False
            connection.starved = False
            connection.touch()

    def lost(self, now: float, reason: str = "the connection was lost") -> None:
        """The transport is gone."""
        connection = self.connection
        if connection is None:
            return
        self.machine.lose(now, reason)
        self._act(now)
        self.connection = None
        connection.out = []
        connection.held = None
        connection.out_bytes = 0

    def tick(self, now: float) -> None:
        """Time passed."""
        self.machine.tick(now)
        if self.connected:
            if self._drop_stale_at <= now:
                self._drop_stale()
            if self._markers.give_up_at() <= now:
                self._give_up_markers("do not come back", now)
        self._act(now)

    @property
    def keeps_stale(self) -> bool:
        """Whether subscriptions of an earlier process are left alone for now (:data:`STALE_S`)."""
        return self._drop_stale_at < NEVER

    def _drop_stale(self) -> bool:
        """Give up what only an earlier process wanted; false if that is done."""
        if self._drop_stale_at == NEVER:
            return False
        self._drop_stale_at = NEVER
        self._subscriptions.drop_stale()
        return True

    def next_deadline(self) -> float:
        """When :meth:`tick`, or a look at :meth:`wants_dial`, is needed next."""
        if self.connection is not None:
            deadline = self.machine.next_deadline()
            return min(deadline, self._drop_stale_at, self._markers.give_up_at()) if self.connected else deadline
        return self._dialling.due_at if not self._dialling.under_way and self._needed() else NEVER

    def take_news(self) -> list[tuple[bool, str]]:
        """Connections that came (true) and new reasons why there is none (false) since the last call, for logs."""
        return self._dialling.take_news()

    # --- what is wanted -------------------------------------------------------------------------------------------------

    def change_filters(self, changes: dict[str, int], version: int, now: float) -> None:
        """These subscriptions are wanted from now on at this QoS, or, with -1, no longer; :meth:`CloudOwner.subscribed`
        follows, perhaps from within this call. Filters need not be collapsed."""
        self._subscriptions.change_filters(changes, version)
        self._act(now)

    @property
    def markers_problem(self) -> str:
        """Why markers do not come back, in words for people; empty while they do."""
        return self._markers.problem

    @property
    def refused_filters(self) -> list[str]:
        """Subscriptions that the cloud does not allow."""
        return list(self._subscriptions.refused)

    # --- messages -------------------------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether another QoS 1 or 2 message may be relayed now. To be asked again after every event."""
        return self.relaying.has_room() and self.takes_unreliable()

    def takes_unreliable(self) -> bool:
        """Whether a QoS 0 message finds its way now: those do not wait for what is unconfirmed."""
        connection = self.connection
        return self.connected and connection is not None and connection.has_room()

    def relay(self, publication: Publication, index: int, identity: Identity, token: int, now: float) -> None:
        """Publish one of a publication's messages at the cloud. :meth:`CloudOwner.relayed` follows once the cloud has it: from
        within this call at QoS 0, and for what can never be sent."""
        self.relaying.relay(publication, index, identity, token, self.connected, now)
        self._wake(now)
        self._act(now)

    def publish(self, topic: str, payload: bytes, now: float) -> None:
        """Say something to other brokers, at QoS 0; nothing happens without a connection."""
        if self.connected:
            with suppress(RequestRefused, LocalProtocolError):  # too large for this cloud; a connection that just ended
                self.machine.publish(Publish(topic, payload), now)
            self._act(now)

    # --- markers --------------------------------------------------------------------------------------------------------

    def mark(self, token: int, now: float) -> None:
        """Send a marker; :meth:`CloudOwner.marked` follows when it is back. It waits for a connection, and is sent again with
        each: one that is back was sent after this call in any case."""
        self._markers.ask(token, self.connected)
        self._wake(now)
        self._act(now)

    def _send_markers(self, now: float) -> None:
        markers, subscriptions = self._markers, self._subscriptions
        if not subscriptions.is_subscribing:
            markers.subscribed()
        if not markers.has_unsent:
            return
        if markers.topic in subscriptions.refused:
            self._give_up_markers("are refused", now)
        elif subscriptions.has(markers.topic):
            qos = min(1, self.machine.limits.maximum_qos)
            for marker in markers.take_unsent(now):
                try:
                    self._marking.add(self.machine.publish(Publish(markers.topic, marker, qos), now))
                except RequestRefused:
                    self._give_up_markers("are too large for it", now)
                    return
            if qos == 0:
                markers.taken(now)

    def _give_up_markers(self, reason: str, now: float) -> None:
        for token in self._markers.give_up(reason):
            self._owner.marked(token, now)

    # --- the machine ----------------------------------------------------------------------------------------------------

    def _act(self, now: float) -> None:
        """What follows every call into the client machine: its events, its output."""
        if self._acting:
            return  # the owner called from within a callback: the loop below sees to it
        self._acting = True
        try:
            machine = self.machine
            busy = True
            while busy:
                events = machine.take_events()
                for event in events:
                    self._handle(event, now)
                reached = self._subscriptions.pump(now) if machine.state == CONNECTED else []
                for version in reached:
                    self._owner.subscribed(version, now)
                if self.connected:
                    self._send_markers(now)
                busy = bool(events or reached)
                if not busy and self.connected and not self._wanted and not self._markers.waiting:
                    busy = self._drop_stale()  # nobody depends on us, hence neither on an earlier process
                if not busy and machine.state == CONNECTED and not self._needed() and not self._subscriptions.waiting:
                    machine.disconnect(now)
                    busy = True
            self._let_out()
        finally:
            self._acting = False

    def _let_out(self) -> None:
        connection = self.connection
        output = self.machine.take()
        if connection is None:
            return
        if output:
            connection.push_held(output[0] if len(output) == 1 else b"".join(output))
        if self.machine.state == CLOSED and not connection.closing:
            connection.closing = True
            connection.touch()

    def _handle(self, event: object, now: float) -> None:
        if isinstance(event, MessageReceived):
            self._arrived(event.message, now)
        elif isinstance(event, PublishCompleted):
            self._completed(event, now)
        elif isinstance(event, SubscribeCompleted):
            self._subscriptions.subscribed(event)
            self._copies.clear()
        elif isinstance(event, UnsubscribeCompleted):
            self._subscriptions.unsubscribed(event, now)
            self._copies.clear()
        elif isinstance(event, Connected):
            self._greeted(event, now)
        elif isinstance(event, Refused):
            self._dialling.failed(event.message, not is_temporary(event.reason_code), now)
        elif isinstance(event, Disconnected):
            self._ended(event, now)

    def _greeted(self, event: Connected, now: float) -> None:
        self.connected = True
        self.connects += 1
        self.session_kept = event.session_present
        self._dialling.connected(now)
        self._markers.connected()
        self.relaying.greeted(event.session_present, now)
        if self.connects == 1 and event.session_present:
            self._drop_stale_at = now + STALE_S
        if not event.session_present:
            self._copies.clear()
        self._subscriptions.greeted(event.session_present, event.limits, now)
        self._owner.connected(event.session_present, now)

    def _ended(self, event: Disconnected, now: float) -> None:
        was_connected, self.connected = self.connected, False
        self._dialling.lost(now)
        if self._needed():
            self._dialling.failed(event.message, is_final(event), now)
        else:
            self._dialling.rest()
        if was_connected:
            self._owner.lost(now)

    def _completed(self, event: PublishCompleted, now: float) -> None:
        if event.token not in self._marking:
            self.relaying.completed(event, now)
            return
        self._marking.discard(event.token)
        if event.reason_code < 0x80:
            self._markers.taken(now)
        else:
            self._give_up_markers("are refused", now)

    def _arrived(self, message: Publish, now: float) -> None:
        topic = message.topic
        if topic.startswith(self._prefix):
            if topic == self._markers.topic:
                token = self._markers.back(message.payload, now)
                if token >= 0:
                    self._owner.marked(token, now)
            elif topic.startswith(self._memory_topic):
                if self._drop_stale_at < NEVER:
                    self._subscriptions.recall(message.payload, now)
            elif topic == self._leaders_topic:
                self._owner.control(topic, message.payload, now)
            return
        self._markers.heard(now)
        identifiers = None if message.properties is None else message.properties.subscription_identifiers
        publication, identity = self._envelopes.take(message, now)
        self.arrived_by = [] if identifiers is None else self._subscriptions.shares(identifiers)
        if identity is None and not self.arrived_by:
            if self._version != MQTT_5:
                if self.relaying.echoes.is_echo(topic, message.qos, message.payload, now):
                    self.echoes += 1
                    return
            elif identifiers is not None and self._copies.is_copy(topic, message.payload, identifiers, now):
                self.copies += 1
                return
        self.arrived_messages += 1
        self.may_be_stored = message.retain and self._markers.is_replaying
        self._owner.arrived(publication, identity, now)
        self.arrived_by = []
