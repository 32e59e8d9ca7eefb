"""What clients may send the engine: anything at all, cut anywhere. It answers or closes; it never raises."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nearcast.config import Limits
from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.packets import Connect, Packet, Properties, Publish, Subscribe, SubscriptionRequest
from tests.engine_harness import Client, World
from tests.property.strategies import any_packet, chunks

connect_packets = st.sampled_from(
    [
        encode(Connect("c", 4, True), 4),
        encode(Connect("c", 5, True, properties=Properties(session_expiry_interval=100)), 5),
        encode(Connect("c", 5, False, properties=Properties(receive_maximum=2, maximum_packet_size=60)), 5),
        encode(Connect("c", 3, True), 3),
    ]
)


@given(st.data())
@settings(max_examples=300)
def test_arbitrary_bytes_raise_nothing(data: st.DataObject) -> None:
    world = World(limits=Limits(max_packet_bytes=300), durable=data.draw(st.booleans()))
    witness = world.connect("witness", 5)
    witness.subscribe("#", 2)
    client = world.open()
    if data.draw(st.booleans()):
        client.send(data.draw(connect_packets))
    for chunk in data.draw(st.lists(st.binary(max_size=60), max_size=6)):
        client.send(chunk)
        world.validate()
    client.lose()
    world.validate()


@given(st.data())
@settings(max_examples=300)
def test_damaged_packets_raise_nothing(data: st.DataObject) -> None:
    """Real packets with a few bytes changed get further into the engine than noise does."""
    world = World(durable=data.draw(st.booleans()))
    first = data.draw(connect_packets)
    client = world.open()
    client.send(first)
    # Somebody to receive: the client itself.
    version = client.connection.version
    client.version = version
    client.send(Subscribe(1, [SubscriptionRequest("#", 2)]))
    for _ in range(data.draw(st.integers(1, 5))):
        raw = bytearray(encode(data.draw(any_packet(version)), version))
        for _ in range(data.draw(st.integers(0, 2))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        client.send(bytes(raw))
        world.validate()
    client.lose()
    world.validate()


@st.composite
def scripts(draw: st.DrawFn) -> tuple[int, bytes]:
    """What one client sends from CONNECT on: valid packets with an answer or an effect, in runs."""
    version = draw(st.sampled_from([4, 5]))
    properties = Properties(session_expiry_interval=100, topic_alias_maximum=4) if version == 5 else None
    parts = [encode(Connect("c", version, True, properties=properties), version)]
    parts.append(encode(Subscribe(9, [SubscriptionRequest("#", 2)]), version))
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.integers(0, 5))
        if kind <= 2:
            qos = draw(st.integers(0, 2))
            topic = draw(st.sampled_from(["t", "t/u", "v" * 120]))
            size = draw(st.sampled_from([0, 3, 120, 128]))
            varying = draw(st.booleans())
            first_id = draw(st.integers(1, 50))
            for number in range(draw(st.integers(1, 12))):
                payload = b"p" * (size + (number % 3 if varying else 0))
                packet: Packet = Publish(topic, payload, qos, packet_id=first_id + number if qos else 0)
                parts.append(encode(packet, version))
        else:
            # Acknowledgements for what we were or were not sent; PUBREL for what we sent or did not.
            first = (0x40, 0x50, 0x62, 0x70)[draw(st.integers(0, 3))]
            low = draw(st.integers(1, 30))
            parts.extend(bytes([first, 2, 0, number]) for number in range(low, low + draw(st.integers(1, 10))))
    return version, b"".join(parts)


def outcome(world: World, client: Client, version: int) -> tuple[object, ...]:
    """What came out, one stream per kind of packet: how acknowledgements and messages mingle is nobody's promise."""
    world.validate()
    client.version = version
    streams: dict[str, list[object]] = {}
    aliases: dict[int, str] = {}
    for packet in PacketReader(version).feed(client.take()):
        if isinstance(packet, Publish) and packet.properties is not None and packet.properties.topic_alias is not None:
            # A run defines its alias in each of its packets, single packets in the first of them.
            alias = packet.properties.topic_alias
            packet.topic = packet.topic or aliases[alias]
            aliases[alias] = packet.topic
        streams.setdefault(type(packet).__name__, []).append(packet)
    return streams, client.closed, world.engine.stats.inflight_messages, world.engine.stats.queued_messages


@given(scripts(), st.data())
@settings(max_examples=150)
def test_any_chunking_gives_the_same_output(script: tuple[int, bytes], data: st.DataObject) -> None:
    version, raw = script
    results = []
    for pieces in ([raw], [raw[at : at + 1] for at in range(len(raw))], data.draw(chunks(raw))):
        world = World()
        client = world.open()
        for piece in pieces:
            client.send(piece)
        results.append(outcome(world, client, version))
    assert results[0] == results[1] == results[2]
