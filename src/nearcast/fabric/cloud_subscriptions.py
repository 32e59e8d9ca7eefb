"""What one broker is subscribed to at the cloud: what it wants, what it asked for, what the cloud granted.

Changes of the wanted filters come with a version; what differs from what was asked before is asked for: SUBSCRIBEs first,
then UNSUBSCRIBEs, a bounded number of them unanswered at a time. A version is reached when every SUBSCRIBE that it needs is
answered. A refused filter counts as answered, is listed in ``refused``, and is tried again on the next connection.

Options of MQTT 5: No Local (we know what we published; shared subscriptions must not have it [MQTT-3.8.3-4]), Retain As
Published (the flag means the same to our clients as to the publisher's), retained messages only for a subscription that is
new. Shared subscriptions have a subscription identifier each, because what comes by one is for its members only; so have
filters that overlap, so that copies are known as such (:mod:`nearcast.fabric.cloud_copies`). It is made from the filter: the
same whichever process of this broker subscribed. A server without identifiers is asked for filters that do not overlap, and
for no shared subscriptions.

What an earlier process of this broker subscribed to and this one does not want is given up
(:mod:`nearcast.fabric.cloud_memory`).
"""

from __future__ import annotations

import zlib
from typing import Final

from nearcast.errors import RequestRefused
from nearcast.fabric.cloud_collapse import Collapsed
from nearcast.fabric.cloud_filters import FilterTree, disjoint
from nearcast.fabric.cloud_markers import Markers
from nearcast.fabric.cloud_memory import MAX_RECALLED, FilterMemory, bucket_of
from nearcast.mqtt.client_events import ServerLimits, SubscribeCompleted, UnsubscribeCompleted
from nearcast.mqtt.client_machine import ClientMachine
from nearcast.mqtt.packets import Properties, Publish, SubscriptionRequest
from nearcast.mqtt.reasons import (
    PACKET_TOO_LARGE,
    SHARED_SUBSCRIPTIONS_NOT_SUPPORTED,
    TOPIC_FILTER_INVALID,
    WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED,
)
from nearcast.mqtt.topics import MAX_TOPIC_BYTES, SHARE_PREFIX

MAX_REQUESTS: Final = 64
"""SUBSCRIBEs and UNSUBSCRIBEs that wait for their answers."""

MAX_FILTERS: Final = 100
MAX_FILTER_BYTES: Final = 16_384
"""In one request; fewer where the cloud takes smaller packets."""

FILTER_BYTES: Final = 3
REQUEST_BYTES: Final = 32
"""What a request takes at most beside the texts of its filters: for each of them, and at all."""

MAX_SHARES: Final = 10_000
"""Shared subscriptions whose identifiers are known."""

HIGHEST_IDENTIFIER: Final = 268_435_455


class Terms:
    """How a filter is subscribed to. ``identifier`` 0 is none."""

    def __init__(self, qos: int, no_local: bool, identifier: int) -> None:
        self.qos = qos
        self.no_local = no_local
        self.identifier = identifier

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Terms)
            and self.qos == other.qos
            and self.no_local == other.no_local
            and self.identifier == other.identifier
        )


#: Of a filter that an earlier process subscribed to, nobody knows how.
UNKNOWN: Final = Terms(-1, False, 0)


class _Version:
    """A version that somebody waits for. ``last_request`` is the last SUBSCRIBE it needs; -1 while that is not sent."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.last_request = -1


class CloudSubscriptions:
    """See the module. ``machine`` is asked to subscribe; its answers are handed in."""

    def __init__(self, machine: ClientMachine, has_options: bool, memory: FilterMemory, markers: Markers) -> None:
        """``has_options``: the cloud is spoken to in MQTT 5. What is subscribed to is written down in ``memory``."""
        self.memory = memory
        self._markers = markers
        self.refused: dict[str, int] = {}
        self._machine = machine
        self._has_options = has_options
        self._limits = machine.limits
        self._control: dict[str, tuple[int, bool]] = {}
        self._collapsed = Collapsed()
        self._wanted: dict[str, Terms] = {}
        self._asked: dict[str, Terms] = {}
        # Plain ones, of a cloud that sends us what we publish.
        self._asked_tree = FilterTree()
        self._shares: dict[int, str] = {}
        self._outdated = True
        # In the order in which they are asked for, as keys.
        self._adding: dict[str, None] = {}
        self._dropping: dict[str, None] = {}
        self._subscribing: dict[int, list[str]] = {}
        self._unsubscribing: dict[int, list[str]] = {}
        # What an earlier process subscribed to, by all we know, and this one did not.
        self._stale: dict[str, None] = {}
        self._has_earlier = False
        self._greeted_before = False
        self._last_request = 0
        self._versions: list[_Version] = []

    # --- what is wanted -------------------------------------------------------------------------------------------------

    def control(self, topics: dict[str, tuple[int, bool]]) -> None:
        """The topics that brokers talk on, with QoS and No Local."""
        self._control = topics
        self._outdated = True

    def change_filters(self, changes: dict[str, int], version: int) -> None:
        """These are wanted from now on at this QoS, or, with -1, no longer."""
        collapsed = self._collapsed
        for topic_filter, qos in changes.items():
            if qos >= 0:
                collapsed.put(topic_filter, qos)
            else:
                collapsed.drop(topic_filter)
        self._versions.append(_Version(version))

    @property
    def waiting(self) -> bool:
        """Whether something is to be asked for, or to be answered."""
        return self.is_subscribing or bool(self._dropping or self._unsubscribing)

    @property
    def is_subscribing(self) -> bool:
        """Whether a SUBSCRIBE is to be sent, or to be answered."""
        return bool(self._outdated or self._collapsed.changed or self._adding or self._subscribing)

    def has(self, topic_filter: str) -> bool:
        """Whether the cloud is known to have this one."""
        if topic_filter not in self._asked or topic_filter in self.refused:
            return False
        return all(topic_filter not in names for names in self._subscribing.values())

    def matches(self, topic: str) -> bool:
        """Whether what is published there may come to us: because we asked for it, or an earlier process may have."""
        return self._has_earlier or self._asked_tree.matches(topic)

    def shares(self, identifiers: list[int]) -> list[str]:
        """The shared subscriptions among those of these identifiers."""
        found: list[str] = []
        for identifier in identifiers:
            topic_filter = self._shares.get(identifier)
            if topic_filter is not None:
                found.append(topic_filter)
        return found

    def _plan(self) -> None:
        """Find out what to ask for."""
        distinct = self._has_options and self._limits.subscription_identifier_available
        if distinct and not self._outdated:
            for topic_filter in self._collapsed.changed:
                self._plan_one(topic_filter, self._collapsed.qos(topic_filter), distinct)
        else:
            self._plan_all(distinct)
        self._collapsed.changed.clear()
        if len(self._adding) > MAX_FILTERS:
            # So that each piece of the list is written few times.
            self._adding = dict.fromkeys(sorted(self._adding, key=bucket_of))

    def _plan_all(self, distinct: bool) -> None:
        self._outdated = False
        tops = self._collapsed.tops()
        former = {**self._wanted, **self._asked}
        self._wanted = {}
        for topic_filter, qos in (tops if distinct else disjoint(tops)).items():
            self._plan_one(topic_filter, qos, distinct)
        for topic, (qos, no_local) in self._control.items():
            self._set_terms(topic, Terms(qos, no_local, 0))
        for topic_filter in former:
            if topic_filter not in self._wanted:
                self._set_terms(topic_filter, None)

    def _plan_one(self, topic_filter: str, qos: int, distinct: bool) -> None:
        """``qos`` -1: it is not wanted any more."""
        if topic_filter in self._control:
            return
        code = self._unavailable(topic_filter, distinct) if qos >= 0 else 0
        if qos < 0 or code:
            self._set_terms(topic_filter, None)
            if code:
                self.refused[topic_filter] = code
            return
        shared = topic_filter.startswith(SHARE_PREFIX)
        numbered = shared or topic_filter in self._collapsed.overlapping
        identifier = identifier_of(topic_filter) if numbered and distinct else 0
        self._set_terms(topic_filter, Terms(qos, not shared, identifier))

    def _set_terms(self, topic_filter: str, terms: Terms | None) -> None:
        """A filter is wanted like this, or not at all."""
        self._adding.pop(topic_filter, None)
        self._dropping.pop(topic_filter, None)
        asked = self._asked.get(topic_filter)
        if terms is None:
            self._wanted.pop(topic_filter, None)
            if asked is not None:
                self._dropping[topic_filter] = None
            else:
                self.refused.pop(topic_filter, None)
            return
        self._wanted[topic_filter] = terms
        if asked != terms:
            self._adding[topic_filter] = None

    def _unavailable(self, topic_filter: str, distinct: bool) -> int:
        """Why the cloud need not be asked for a filter; 0 if it may have it."""
        if topic_filter.startswith(SHARE_PREFIX):
            if not (distinct and self._limits.shared_subscription_available):
                return SHARED_SUBSCRIPTIONS_NOT_SUPPORTED
        elif not self._limits.wildcard_subscription_available and ("+" in topic_filter or "#" in topic_filter):
            return WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED
        # What a client's filter and a rule have in common may be longer than either.
        size = len(topic_filter.encode("utf-8"))
        if size > MAX_TOPIC_BYTES:
            return TOPIC_FILTER_INVALID
        return PACKET_TOO_LARGE if size + REQUEST_BYTES > self._limits.maximum_packet_bytes else 0

    # --- asking ---------------------------------------------------------------------------------------------------------

    def greeted(self, session_kept: bool, limits: ServerLimits, now: float) -> None:
        """There is a connection."""
        self._limits = limits
        self._outdated = True
        for topic_filter in self.refused:
            self._forget(topic_filter)
        self.refused.clear()
        first, self._greeted_before = not self._greeted_before, True
        self._has_earlier = session_kept and (first or self._has_earlier)
        if session_kept and first and limits.retain_available and limits.wildcard_subscription_available:
            # What an earlier process wrote down. Before anything is written: the retained messages come at this.
            recall = SubscriptionRequest(f"{self.memory.topic}+", 0, True, True, 0)
            self._machine.subscribe([recall], None, now)
        if not session_kept:
            self.memory.clear()
            for topic_filter in list(self._asked):
                self._forget(topic_filter)
            for waiting in self._versions:
                waiting.last_request = -1

    def _forget(self, topic_filter: str) -> None:
        if self._asked.pop(topic_filter, None) is not None:
            self._asked_tree.remove(topic_filter)

    def pump(self, now: float) -> list[int]:
        """While connected: ask for what is missing; returns the versions that are reached. Of those that need the same
        requests only the last counts."""
        if self._outdated or self._collapsed.changed:
            self._plan()
        while (self._adding or self._dropping) and len(self._subscribing) + len(self._unsubscribing) < MAX_REQUESTS:
            if self._adding:
                self._subscribe(now)
            else:
                self._unsubscribe(now)
        if not self._versions:
            return []
        if not self._adding:
            for waiting in self._versions:
                if waiting.last_request < 0:
                    waiting.last_request = self._last_request
        while len(self._versions) > 1 and self._versions[-2].last_request == self._versions[-1].last_request:
            del self._versions[-2]
        # Answered in the order of asking or not: the oldest that is unanswered decides.
        oldest = next(iter(self._subscribing), self._last_request + 1)
        reached = [one.version for one in self._versions if 0 <= one.last_request < oldest]
        if reached:
            self._versions = [one for one in self._versions if not 0 <= one.last_request < oldest]
        return reached

    def _subscribe(self, now: float) -> None:
        """One SUBSCRIBE: as many filters as it takes, all with the same identifier or none."""
        names = self._first_of(self._adding)
        identifier = self._wanted[names[0]].identifier
        if identifier:
            names = names[:1]
        else:
            for place, topic_filter in enumerate(names):
                if self._wanted[topic_filter].identifier:
                    del names[place:]
                    break
        requests: list[SubscriptionRequest] = []
        for topic_filter in names:
            terms = self._wanted[topic_filter]
            if self._has_options:
                requests.append(SubscriptionRequest(topic_filter, terms.qos, terms.no_local, True, 1))
            else:
                requests.append(SubscriptionRequest(topic_filter, terms.qos))
            del self._adding[topic_filter]
            self._asked[topic_filter] = terms
            if topic_filter.startswith(SHARE_PREFIX):
                # It stays when the subscription goes: what came by it may be on its way.
                self._shares[terms.identifier] = topic_filter
                if len(self._shares) > MAX_SHARES:
                    del self._shares[next(iter(self._shares))]
            elif not self._has_options:
                self._asked_tree.add(topic_filter)
        others = [one for one in names if one not in self._control]
        self._write(self.memory.add(others), now)
        properties = Properties(subscription_identifiers=[identifier]) if identifier else None
        self._last_request = self._machine.subscribe(requests, properties, now)
        self._subscribing[self._last_request] = names
        if others:
            self._markers.subscribing()

    def _unsubscribe(self, now: float) -> None:
        names = self._first_of(self._dropping)
        for topic_filter in names:
            del self._dropping[topic_filter]
            self._forget(topic_filter)
            self.refused.pop(topic_filter, None)
        self._unsubscribing[self._machine.unsubscribe(names, None, now)] = names

    def _first_of(self, filters: dict[str, None]) -> list[str]:
        """As many as one request takes. Looked for in one go: a dict is slow to find its first key once many are gone."""
        names: list[str] = []
        room = min(MAX_FILTER_BYTES, self._limits.maximum_packet_bytes - REQUEST_BYTES)
        for topic_filter in filters:
            room -= len(topic_filter.encode("utf-8")) + FILTER_BYTES
            if names and room < 0:
                break
            names.append(topic_filter)
            if len(names) == MAX_FILTERS:
                break
        return names

    def _write(self, pieces: list[tuple[str, bytes]], now: float) -> None:
        if self._limits.retain_available:
            for topic, payload in pieces:
                try:
                    self._machine.publish(Publish(topic, payload, min(1, self._limits.maximum_qos), True), now)
                except RequestRefused:
                    continue  # too large for this cloud: a later process finds a list that is older

    # --- what is left of an earlier process -----------------------------------------------------------------------------

    def recall(self, payload: bytes, now: float) -> None:
        """A piece of the list of an earlier process."""
        recalled, pieces = self.memory.recall(payload)
        self._write(pieces, now)
        for topic_filter in recalled:
            if topic_filter in self._asked:
                continue
            if topic_filter.startswith(SHARE_PREFIX):
                # At once: others have members, and get what comes to us for nobody.
                self._asked[topic_filter] = UNKNOWN
                self._outdated = True
            elif len(self._stale) < MAX_RECALLED:
                self._stale[topic_filter] = None

    def drop_stale(self) -> None:
        """Nobody who was covered by the earlier process depends on it any more: give up what this one does not want."""
        self._asked.setdefault(f"{self.memory.topic}+", UNKNOWN)
        for topic_filter in self._stale:
            self._asked.setdefault(topic_filter, UNKNOWN)
        self._stale.clear()
        self._has_earlier = False
        self._outdated = True

    # --- answers --------------------------------------------------------------------------------------------------------

    def subscribed(self, event: SubscribeCompleted) -> None:
        """A SUBSCRIBE is answered."""
        names = self._subscribing.pop(event.token, None)
        if names is None:
            return
        for topic_filter, code in zip(names, event.reason_codes, strict=True):
            if code >= 0x80:
                self.refused[topic_filter] = code
            else:
                self.refused.pop(topic_filter, None)

    def unsubscribed(self, event: UnsubscribeCompleted, now: float) -> None:
        """An UNSUBSCRIBE is answered."""
        names = self._unsubscribing.pop(event.token, [])
        self._write(self.memory.remove([one for one in names if one not in self._asked]), now)


def identifier_of(topic_filter: str) -> int:
    """The subscription identifier of a filter: the same in every process."""
    return 1 + zlib.crc32(topic_filter.encode("utf-8")) % HIGHEST_IDENTIFIER
