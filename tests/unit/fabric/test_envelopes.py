"""Messages on their way through the cloud: what goes along, what is believed, what clients see."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearcast.errors import RequestRefused
from nearcast.fabric.envelopes import MAX_SERVED, PROPERTY, Envelopes, payload_of
from nearcast.fabric.identities import Identity
from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.inbound import forwarded_properties
from nearcast.mqtt.packets import MQTT_3_1_1, MQTT_5, Properties, Publish
from nearcast.mqtt.publication import Publication, build, build_all

SECRET = b"what these brokers share"
IDENTITY = Identity("edge-1", 2**60 - 1, 42, ["$share/g/x/#"], "edge-2", 2**62)


def through(publication: Publication, index: int = 0, version: int = MQTT_5, now: float = 0.0) -> Publish:
    """A message as it comes out of the cloud: over the wire, which knows nothing of it."""
    message = Envelopes(SECRET, version).put(publication, index, IDENTITY, publication.qos, publication.retain, now)
    message.packet_id = 1 if message.qos else 0
    [packet] = PacketReader(version, 1_000_000).feed(encode(message, version))
    assert isinstance(packet, Publish)
    return packet


def same(one: Identity | None, other: Identity) -> bool:
    return one is not None and facts(one) == facts(other)


def facts(identity: Identity) -> tuple[object, ...]:
    one = identity
    return one.origin, one.epoch, one.sequence, one.served, one.leader, one.stamp


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40)
IDENTITIES = st.builds(
    Identity,
    NAMES,
    st.integers(0, 2**64),
    st.integers(0, 2**64),
    st.lists(NAMES, max_size=4),
    NAMES,
    st.integers(0, 2**64),
)


@given(IDENTITIES, st.binary(max_size=50), NAMES.map(str.encode))
def test_what_is_sealed_is_read_again(identity: Identity, payload: bytes, topic: bytes) -> None:
    envelopes = Envelopes(SECRET, MQTT_5)
    assert same(envelopes.unseal(envelopes.seal(identity, topic, payload), topic, payload), identity)


@given(st.integers(0, 200), st.integers(1, 255))
def test_a_sealed_identity_that_was_changed_is_not_believed(place: int, change: int) -> None:
    envelopes = Envelopes(SECRET, MQTT_5)
    data = bytearray(base64.b64decode(envelopes.seal(IDENTITY, b"x", b"payload")))
    data[place % len(data)] ^= change
    assert envelopes.unseal(base64.b64encode(bytes(data)).decode(), b"x", b"payload") is None


@given(st.text(max_size=80))
def test_garbage_is_no_identity(text: str) -> None:
    assert Envelopes(SECRET, MQTT_5).unseal(text, b"x", b"payload") is None


def test_an_identity_belongs_to_its_message_and_its_fabric() -> None:
    envelopes = Envelopes(SECRET, MQTT_5)
    sealed = envelopes.seal(IDENTITY, b"x", b"payload")
    assert envelopes.unseal(sealed, b"x", b"other") is None
    assert envelopes.unseal(sealed, b"y", b"payload") is None
    assert envelopes.unseal(sealed, b"xp", b"ayload") is None
    assert Envelopes(b"another fabric's", MQTT_5).unseal(sealed, b"x", b"payload") is None


def test_only_so_many_groups_are_named() -> None:
    envelopes = Envelopes(SECRET, MQTT_5)
    identity = Identity("a", 1, 1, [f"$share/{number}/x" for number in range(1_000)])
    found = envelopes.unseal(envelopes.seal(identity, b"x", b""), b"x", b"")
    assert found is not None
    assert found.served == identity.served[:MAX_SERVED]


PROPERTIES = Properties(
    payload_format_indicator=1,
    content_type="text/plain",
    response_topic="answers",
    correlation_data=b"7",
    user_properties=[("a", "1"), (PROPERTY, "a client's own"), ("b", "2")],
)


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("retain", [False, True])
def test_a_message_comes_out_as_it_went_in(qos: int, retain: bool) -> None:
    publication = build(b"x/1", b"payload", qos, retain, forwarded_properties(PROPERTIES))
    message = through(publication)
    assert message.properties is not None
    assert message.properties.user_properties is not None
    assert len(message.properties.user_properties) == 4
    found, identity = Envelopes(SECRET, MQTT_5).take(message, 0.0)
    assert same(identity, IDENTITY)
    assert (found.topic, found.payloads(), found.qos, found.retain) == (b"x/1", [b"payload"], qos, retain)
    assert found.properties == publication.properties


def test_a_message_of_a_bystander_keeps_everything() -> None:
    message = Publish("x/1", b"payload", 0, False, False, 0, PROPERTIES)
    found, identity = Envelopes(SECRET, MQTT_5).take(message, 0.0)
    assert identity is None
    assert found.properties == forwarded_properties(PROPERTIES)


def test_what_has_been_at_the_cloud_does_not_go_there_again() -> None:
    """As where a broker is its own cloud: it would never end."""
    message = through(build(b"x/1", b"payload", 1, False))
    assert message.properties is not None
    again = build(b"x/1", b"payload", 1, False, forwarded_properties(message.properties))
    with pytest.raises(RequestRefused, match="has been at the cloud"):
        through(again)
    other = build(b"x/1", b"another", 1, False, forwarded_properties(message.properties))
    assert same(Envelopes(SECRET, MQTT_5).take(through(other), 0.0)[1], IDENTITY), "it only looks as if"


def test_the_time_a_message_has_left_goes_along() -> None:
    publication = build(b"x/1", b"payload", 1, False, b"", 10.0)
    message = through(publication, now=4.5)
    assert message.properties is not None
    assert message.properties.message_expiry_interval == 6
    found, _ = Envelopes(SECRET, MQTT_5).take(message, 100.0)
    assert found.expires_at == 106.0


def test_in_3_1_1_nothing_goes_along() -> None:
    message = through(build(b"x/1", b"payload", 1, False, forwarded_properties(PROPERTIES)), version=MQTT_3_1_1)
    assert message.properties is None
    found, identity = Envelopes(SECRET, MQTT_3_1_1).take(message, 0.0)
    assert identity is None
    assert (found.payloads(), found.properties) == ([b"payload"], b"")


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("size", [0, 1, 100, 130, 20_000])
@pytest.mark.parametrize("properties", [b"", forwarded_properties(PROPERTIES)])
def test_each_message_of_a_publication_by_itself(qos: int, size: int, properties: bytes) -> None:
    payloads = [bytes([number]) * size for number in range(3)]
    found: list[bytes] = []
    for publication in build_all(b"x", payloads, qos, False, properties):
        for index in range(publication.count):
            found.append(payload_of(publication, index))
            assert through(publication, index).payload == found[-1]
    assert found == payloads


def test_messages_of_different_sizes_in_one_publication() -> None:
    packets = b"".join(encode(Publish("x", payload), MQTT_3_1_1) for payload in (b"1", b"22"))
    publication = Publication(b"x", packets, 2, 0, False, 3, b"", 0.0, True)
    assert [payload_of(publication, index) for index in range(2)] == [b"1", b"22"]
