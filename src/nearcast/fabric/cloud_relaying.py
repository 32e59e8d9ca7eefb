"""Messages on their way to the cloud: the window of those that it has not acknowledged, and what became of the others.

A message is over for its owner when the cloud acknowledged it, at once at QoS 0, or when it can never be sent: because it
expired, because the cloud refuses it, or because it is on a topic where only brokers speak. What a cloud does not serve (QoS,
the retain flag) is lowered to what it serves, also if the cloud of a later connection serves less.
"""

from __future__ import annotations

from typing import Final

from nearcast.errors import LocalProtocolError, RequestRefused
from nearcast.fabric.cloud_copies import Echoes
from nearcast.fabric.cloud_owner import CloudOwner
from nearcast.fabric.cloud_subscriptions import CloudSubscriptions
from nearcast.fabric.envelopes import Envelopes
from nearcast.fabric.identities import Identity
from nearcast.mqtt.client_events import PublishCompleted
from nearcast.mqtt.client_machine import ClientMachine
from nearcast.mqtt.packets import MQTT_5, Publish
from nearcast.mqtt.publication import Publication

WINDOW_BYTES: Final = 4_194_304
"""Bytes of messages on their way to the cloud that it has not acknowledged."""


class _Relaying:
    """A message on its way to the cloud."""

    def __init__(self, token: int, message: Publish, size: int, now: float) -> None:
        self.token = token
        self.message = message
        self.size = size
        self.since = now


class CloudRelaying:
    """See the module. ``prefix`` is what the topics begin with on which only brokers speak."""

    def __init__(
        self, owner: CloudOwner, machine: ClientMachine, envelopes: Envelopes, subscriptions: CloudSubscriptions, prefix: bytes
    ) -> None:
        self.relayed_messages = 0
        self.relayed_bytes = 0
        self.unconfirmed_bytes = 0
        self.refused_messages = 0
        self.expired_messages = 0
        self.dropped_messages = 0
        #: How long the cloud takes to confirm a message, smoothed; 0 before the first.
        self.confirm_ms = 0.0
        #: What an MQTT 3.1.1 cloud will send us back.
        self.echoes = Echoes()
        self._owner = owner
        self._machine = machine
        self._envelopes = envelopes
        self._subscriptions = subscriptions
        self._prefix = prefix
        self._relaying: dict[int, _Relaying] = {}

    def has_room(self) -> bool:
        """Whether the window takes another QoS 1 or 2 message."""
        machine = self._machine
        return machine.unacknowledged < machine.settings.max_inflight and self.unconfirmed_bytes < WINDOW_BYTES

    def relay(self, publication: Publication, index: int, identity: Identity, token: int, connected: bool, now: float) -> None:
        """Publish one of a publication's messages at the cloud."""
        limits = self._machine.limits
        if publication.expired(now):
            self.expired_messages += 1
            self._owner.relayed(token, True, now)
            return
        qos = min(publication.qos, limits.maximum_qos)
        if publication.topic.startswith(self._prefix):
            self._refuse(token, now)
            return
        if qos == 0 and not connected:
            self.dropped_messages += 1
            self._owner.relayed(token, False, now)
            return
        retain = publication.retain and limits.retain_available
        try:
            message = self._envelopes.put(publication, index, identity, qos, retain, now)
            number_here = self._machine.publish(message, now)
        except (RequestRefused, LocalProtocolError):
            self._refuse(token, now)
            return
        size = len(message.topic) + len(message.payload)
        self.relayed_messages += 1
        self.relayed_bytes += size
        self._expect_echo(message, now)
        if qos == 0:
            self._owner.relayed(token, True, now)
        else:
            self._relaying[number_here] = _Relaying(token, message, size, now)
            self.unconfirmed_bytes += size

    def _refuse(self, token: int, now: float) -> None:
        self.refused_messages += 1
        self._owner.relayed(token, False, now)

    def _expect_echo(self, message: Publish, now: float) -> None:
        # MQTT 5 has No Local for this.
        if self._machine.settings.version != MQTT_5 and self._subscriptions.matches(message.topic):
            self.echoes.expect(message.topic, message.qos, message.payload, now)

    def greeted(self, session_kept: bool, now: float) -> None:
        """There is a connection."""
        if not session_kept:
            self.echoes.clear()
            return
        # What was in flight went out again, and an echo may come for each time.
        for relaying in self._relaying.values():
            if relaying.message.qos == 1:
                self._expect_echo(relaying.message, now)

    def completed(self, event: PublishCompleted, now: float) -> None:
        """The cloud has a message, or refused it."""
        relaying = self._relaying.pop(event.token, None)
        if relaying is None:
            return  # a broker's own
        self.unconfirmed_bytes -= relaying.size
        accepted = event.reason_code < 0x80
        if accepted:
            took_ms = (now - relaying.since) * 1e3
            self.confirm_ms = took_ms if self.confirm_ms == 0.0 else self.confirm_ms + 0.125 * (took_ms - self.confirm_ms)
        else:
            self.refused_messages += 1
        self._owner.relayed(relaying.token, accepted, now)
