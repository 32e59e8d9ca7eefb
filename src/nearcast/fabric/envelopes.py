"""Messages on their way through the cloud: the identity that goes with them, and how it is known to be ours.

At the cloud a message of the fabric is an ordinary PUBLISH with one more user property, :data:`PROPERTY`: its identity and a
tag over that, its topic and its payload, made with the fabric's secret. Whoever has the secret believes it; to everybody else
it is a property like any other. It is taken off before clients see the message. A property of that name whose tag is not ours
(a client's, another fabric's) is left alone, and the message counts as one that somebody published at the cloud.

The tag covers the payload so that an identity cannot be moved to another message: that one would be taken in its place, and
the real one for a repetition. QoS, retain flag and expiry are not covered: a server may change them. It is a keyed BLAKE2b: as
good as an HMAC with SHA-256 for a third of the time, which counts where it is made for every message.

MQTT 3.1.1 has no properties: there every message comes without an identity (:mod:`nearcast.fabric.cloud_copies`).
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
from typing import Final

from nearcast.errors import RequestRefused
from nearcast.fabric.identities import Identity
from nearcast.mqtt import reasons
from nearcast.mqtt.inbound import forwarded_properties
from nearcast.mqtt.packets import MQTT_5, Properties, Publish
from nearcast.mqtt.properties import MAX_USER_PROPERTIES, decode_properties
from nearcast.mqtt.publication import Publication, build
from nearcast.mqtt.records import Fields, blob, number
from nearcast.mqtt.wire import PUBLISH, encode_varint

PROPERTY: Final = "nearcast"
TAG_BYTES: Final = 16
VERSION: Final = 1

MAX_HEADS: Final = 10_000

MAX_SERVED: Final = 256
"""Shared subscriptions named in one identity. Beyond, members elsewhere may get a message that another member had."""

MAX_TRIED: Final = 2
"""Properties of our name that are looked into, from the last one on, which is where we put ours. Each costs a hash over the
whole payload, and a client of the cloud can send tens of thousands."""


class Envelopes:
    """Puts messages into the form they have at the cloud, and takes them out of it."""

    def __init__(self, secret: bytes, version: int) -> None:
        """``version`` is the MQTT version spoken with the cloud."""
        self._key = hmac.digest(secret, b"nearcast messages at the cloud", hashlib.sha256)
        # What identities of one origin by one leader have in common, encoded.
        self._heads: dict[tuple[str, int, str], bytes] = {}
        self._has_properties = version == MQTT_5

    # --- there ----------------------------------------------------------------------------------------------------------

    def put(self, publication: Publication, index: int, identity: Identity, qos: int, retain: bool, now: float) -> Publish:
        """One of a publication's messages as it is published at the cloud. ``RequestRefused`` if it has so many properties
        that ours has no place; or comes from there: a broker that is its own cloud, or two that are each other's, would send
        it round and round."""
        topic = publication.topic
        payload = payload_of(publication, index)
        properties: Properties | None = None
        if self._has_properties:
            encoded = publication.properties
            if encoded:
                properties, _ = decode_properties(encode_varint(len(encoded)) + encoded, 0, PUBLISH)
            if properties is None:
                properties = Properties()
            if publication.expires_at > 0:
                properties.message_expiry_interval = max(1, int(publication.expires_at - now + 0.999))
            sealed = (PROPERTY, self.seal(identity, topic, payload))
            pairs = properties.user_properties
            if pairs is not None and len(pairs) >= MAX_USER_PROPERTIES:
                raise RequestRefused(
                    reasons.QUOTA_EXCEEDED, f"a message has {MAX_USER_PROPERTIES - 1} user properties at most"
                )
            if pairs is not None and self._take_out(pairs, topic, payload) is not None:
                raise RequestRefused(reasons.NOT_AUTHORIZED, "this message has been at the cloud")
            properties.user_properties = [sealed] if pairs is None else [*pairs, sealed]
        return Publish(topic.decode("utf-8"), payload, qos, retain, False, 0, properties)

    def seal(self, identity: Identity, topic: bytes, payload: bytes) -> str:
        """An identity as the value of its user property."""
        served = identity.served
        key = (identity.origin, identity.epoch, identity.leader)
        head = None if served else self._heads.get(key)
        if head is None:
            served = served[:MAX_SERVED]
            parts = [
                number(VERSION),
                number(identity.epoch),
                blob(identity.origin.encode("utf-8")),
                blob(identity.leader.encode("utf-8")),
                number(len(served)),
            ]
            for topic_filter in served:
                parts.append(blob(topic_filter.encode("utf-8")))
            head = b"".join(parts)
            if not served:
                if len(self._heads) >= MAX_HEADS:
                    self._heads.clear()
                self._heads[key] = head
        record = head + number(identity.sequence) + number(identity.stamp)
        return binascii.b2a_base64(self._tag(record, topic, payload) + record, newline=False).decode("ascii")

    def _tag(self, record: bytes, topic: bytes, payload: bytes) -> bytes:
        return hashlib.blake2b(blob(record) + blob(topic) + payload, key=self._key, digest_size=TAG_BYTES).digest()

    # --- and back -------------------------------------------------------------------------------------------------------

    def take(self, message: Publish, now: float) -> tuple[Publication, Identity | None]:
        """A message of the cloud as clients are to see it, and its identity if it has one that is ours."""
        topic = message.topic.encode("utf-8")
        identity: Identity | None = None
        properties = message.properties
        encoded = b""
        expires_at = 0.0
        if properties is not None:
            pairs = properties.user_properties
            if pairs is not None:
                identity = self._take_out(pairs, topic, message.payload)
                if not pairs:
                    properties.user_properties = None
            encoded = forwarded_properties(properties)
            if properties.message_expiry_interval is not None:
                expires_at = max(now + properties.message_expiry_interval, 1e-9)
        return build(topic, message.payload, message.qos, message.retain, encoded, expires_at), identity

    def _take_out(self, pairs: list[tuple[str, str]], topic: bytes, payload: bytes) -> Identity | None:
        tried = 0
        for place in range(len(pairs) - 1, -1, -1):
            key, value = pairs[place]
            if key == PROPERTY:
                identity = self.unseal(value, topic, payload)
                if identity is not None:
                    del pairs[place]
                    return identity
                tried += 1
                if tried == MAX_TRIED:
                    break
        return None

    def unseal(self, sealed: str, topic: bytes, payload: bytes) -> Identity | None:
        """The identity in a user property; None unless it was made with this fabric's secret for this very message."""
        try:
            data = binascii.a2b_base64(sealed.encode("ascii"), strict_mode=True)
        except (binascii.Error, ValueError):
            return None
        record = data[TAG_BYTES:]
        if not hmac.compare_digest(data[:TAG_BYTES], self._tag(record, topic, payload)):
            return None
        try:
            return _read(Fields(b"\x00" + record))
        except ValueError:
            return None  # of a later version of this software: a message like any other


def _read(fields: Fields) -> Identity:
    if fields.number() != VERSION:
        raise ValueError("another version")
    epoch = fields.number()
    origin = fields.blob().decode("utf-8")
    leader = fields.blob().decode("utf-8")
    served = [fields.blob().decode("utf-8") for _ in range(fields.number())]
    sequence = fields.number()
    stamp = fields.number()
    return Identity(origin, epoch, sequence, served, leader, stamp)


def payload_of(publication: Publication, index: int) -> bytes:
    """One message's payload, without going over the others where they are of one size."""
    stride = publication.stride
    if stride == 0:
        return publication.payloads()[index]
    packets = publication.packets
    start = index * stride
    skip = 2
    while packets[start + skip - 1] >= 0x80:
        skip += 1
    skip += publication.head_size + (2 if publication.qos else 0)
    return packets[start + skip : start + stride]
