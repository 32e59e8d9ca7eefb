"""Publications: whatever form a receiver needs, decoding it gives the messages that were published."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.inbound import forwarded_properties
from nearcast.mqtt.packets import Packet, Properties, Publish
from nearcast.mqtt.publication import V5_FLAG, Publication, build
from nearcast.mqtt.routing import encode_identifier
from nearcast.mqtt.wire import split_packets
from tests.engine_harness import World

_user_properties = st.lists(st.tuples(st.text("kx", max_size=3), st.text("vy", max_size=3)), min_size=1, max_size=2)
properties = st.builds(
    Properties,
    payload_format_indicator=st.none() | st.integers(0, 1),
    content_type=st.none() | st.just("text/plain"),
    response_topic=st.none() | st.just("answer/here"),
    correlation_data=st.none() | st.binary(max_size=4),
    user_properties=st.none() | _user_properties,
    message_expiry_interval=st.none() | st.integers(1, 100),
)
topics = st.sampled_from(["t", "a/b/c", "x" * 130])
payload_sizes = st.sampled_from([0, 1, 5, 110, 125, 126, 127, 128, 130, 16_380, 16_400])


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, list[Publish]]:
    """PUBLISH packets as one publisher sends them back to back: of equal or varying size, alike in all else."""
    version = draw(st.sampled_from([4, 5]))
    qos = draw(st.integers(0, 2))
    topic = draw(topics)
    retain = draw(st.booleans())
    dup = qos > 0 and draw(st.booleans())
    own = draw(st.none() | properties) if version == 5 else None
    count = draw(st.integers(1, 6))
    equal = draw(st.booleans())
    size = draw(payload_sizes)
    found = []
    for number in range(count):
        if not equal:
            size = draw(payload_sizes)
        payload = bytes([number]) * size
        found.append(Publish(topic, payload, qos, retain, dup, number + 7 if qos else 0, own))
    return version, found


@given(
    runs(), st.sampled_from([4, 5]), st.integers(0, 2), st.booleans(), st.sampled_from([0, 1, 300]), st.sampled_from([0, 9])
)
def test_what_is_published_arrives_whatever_the_receiver_speaks(
    run: tuple[int, list[Publish]], version: int, qos: int, retain_as_published: bool, identifier: int, aliases: int
) -> None:
    publisher_version, published = run
    world = World()
    publisher = world.connect("publisher", publisher_version)
    receiver = world.connect("receiver", version, properties=Properties(topic_alias_maximum=aliases) if version == 5 else None)
    options: dict[str, bool | int] = {"retain_as_published": retain_as_published} if version == 5 else {}
    receiver.subscribe("#", qos, identifier=identifier if identifier and version == 5 else None, **options)
    publisher.send(*published)
    got = receiver.messages()
    assert [message.payload for message in got] == [message.payload for message in published]
    known: dict[int, str] = {}
    for sent, message in zip(published, got, strict=True):
        alias = message.properties.topic_alias if message.properties is not None else None
        topic = message.topic
        if alias is not None:
            if topic:
                known[alias] = topic
            topic = known[alias]
        assert topic == sent.topic
        assert message.qos == min(qos, sent.qos)
        assert message.retain == (sent.retain and retain_as_published and version == 5)
        assert not message.dup
        expected = Properties()
        if version == 5:
            if sent.properties is not None:
                expected = Properties(**sent.properties.present())  # type: ignore[arg-type]
            expected.subscription_identifiers = [identifier] if identifier else None
            expected.topic_alias = alias
        assert (message.properties or Properties()) == expected
    if qos and published[0].qos:
        assert [message.packet_id for message in got] == list(range(1, len(got) + 1))
    world.validate()


@st.composite
def publications(draw: st.DrawFn) -> tuple[Publication, list[bytes], Properties | None, bool]:
    """A publication built from bytes, as the hot path builds it."""
    version, packets = draw(runs())
    first = packets[0]
    own = first.properties
    if own is not None:
        own = Properties(**own.present())  # type: ignore[arg-type]
        own.message_expiry_interval = None
    encoded = [encode(Publish(p.topic, p.payload, p.qos, p.retain, p.dup, p.packet_id, own), version) for p in packets]
    sizes = {len(item) for item in encoded}
    if first.qos and len(sizes) > 1:
        encoded = encoded[:1]
        packets = packets[:1]
        sizes = {len(encoded[0])}
    topic = first.topic.encode()
    head = len(topic) + 2
    if version == 5:
        head += len(encode(Publish("t", b"", 0, properties=own), 5)) - 2 - 3
    publication = Publication(
        topic,
        b"".join(encoded),
        len(encoded),
        sizes.pop() if len(sizes) == 1 else 0,
        version == 5,
        head,
        forwarded_properties(own),
        0.0,
        True,
    )
    return publication, [packet.payload for packet in packets], own, first.retain


@given(
    publications(), st.sampled_from([4, 5]), st.integers(0, 2), st.booleans(), st.sampled_from([0, 1, 300]), st.integers(-3, 3)
)
def test_every_form_decodes_to_the_messages(
    made: tuple[Publication, list[bytes], Properties | None, bool],
    version: int,
    qos: int,
    retain: bool,
    identifier: int,
    alias: int,
) -> None:
    publication, payloads, own, _ = made
    qos = min(qos, publication.qos)
    if version == 4:
        alias = 0
        identifier = 0
    flags = (V5_FLAG if version == 5 else 0) | qos << 1 | retain
    form = publication.form(flags, encode_identifier(identifier), alias, 0.0)
    assert publication.payloads() == payloads
    if qos:
        chunk = form.numbered(0, publication.count, 65_535 - publication.count)
    else:
        chunk = form.packets
    packets = PacketReader(version).feed(chunk)
    assert len(packets) == publication.count
    for number, packet in enumerate(packets):
        assert isinstance(packet, Publish)
        check(packet, publication, payloads[number], own if version == 5 else None, qos, retain, identifier, alias)
        if qos:
            assert packet.packet_id == 65_535 - publication.count + number
            again = PacketReader(version).feed(form.duplicate(number, 77))[0]
            assert isinstance(again, Publish)
            assert (again.dup, again.packet_id, again.payload) == (True, 77, payloads[number])
    if form.stride:
        raw = split_packets(form.packets)
        assert {len(packet) for packet in raw} == {form.stride}
        for start in range(publication.count):
            for count in range(1, publication.count - start + 1):
                assert form.slice(start, count) == b"".join(raw[start : start + count])


def check(
    packet: Publish,
    publication: Publication,
    payload: bytes,
    own: Properties | None,
    qos: int,
    retain: bool,
    identifier: int,
    alias: int,
) -> None:
    assert packet.topic == ("" if alias < 0 else publication.topic.decode())
    assert (packet.payload, packet.qos, packet.retain, packet.dup) == (payload, qos, retain, False)
    expected = Properties(**own.present()) if own is not None else Properties()  # type: ignore[arg-type]
    expected.subscription_identifiers = [identifier] if identifier else None
    expected.topic_alias = abs(alias) or None
    assert (packet.properties or Properties()) == expected


@given(publications(), st.integers(1, 8))
def test_parts_are_the_whole(made: tuple[Publication, list[bytes], Properties | None, bool], pieces: int) -> None:
    publication, payloads, _, _ = made
    publication.sequence = 100
    parts = publication.parts(pieces)
    assert [payload for part in parts for payload in part.payloads()] == payloads
    sequence = 100
    for part in parts:
        assert part.sequence == sequence
        assert (part.topic, part.qos, part.retain, part.properties) == (
            publication.topic,
            publication.qos,
            publication.retain,
            publication.properties,
        )
        sequence += part.count
    for index, payload in enumerate(payloads):
        single = publication.single(index)
        assert single.payloads() == [payload] if publication.count > 1 else payloads
        assert single.sequence == 100 + index


@given(topics, st.binary(max_size=200), st.integers(0, 2), st.booleans(), properties)
def test_build_makes_what_the_codec_makes(topic: str, payload: bytes, qos: int, retain: bool, own: Properties) -> None:
    own.message_expiry_interval = None
    forwarded = forwarded_properties(own)
    message = build(topic.encode(), payload, qos, retain, forwarded)
    version = 5 if forwarded else 4
    packet: Packet = Publish(topic, payload, qos, retain, False, 1 if qos else 0, own if forwarded else None)
    form = message.form((V5_FLAG if forwarded else 0) | qos << 1 | retain, b"", 0, 0.0)
    assert (form.numbered(0, 1, 1) if qos else form.packets) == encode(packet, version)
