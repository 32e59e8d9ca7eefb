"""One link: the greeting, who is let in, frames in any pieces, the pulse, the end."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearcast.config import Limits
from nearcast.errors import RemoteProtocolError
from nearcast.fabric import frames, links
from nearcast.fabric.frames import frame
from nearcast.fabric.links import BROKER, GATEWAY, Greeting, Link
from nearcast.mqtt.access import Peer
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.records import Fields, blob, number

SECRET = b"what all of them know"


def make(name: str, *, secret: bytes = SECRET, role: int = BROKER, epoch: int = 7, expected: str = "") -> Link:
    connection = Connection(Effects(gated=False), Peer("test"), object(), 0.0, Limits())
    link = Link(Greeting(role, name, epoch, b"facts"), secret, connection, "", random.Random(name), 0.0, expected)
    link.max_frame_bytes_up = 1_000_000
    return link


def output(link: Link) -> bytes:
    return b"".join(link.connection.take())


def up(link: Link) -> bool:
    return link.is_up


def greet(one: Link, other: Link) -> None:
    """Let both say everything they have to say."""
    for _ in range(3):
        other.feed(output(one), 0.0)
        one.feed(output(other), 0.0)


def test_both_ends_know_each_other_in_one_round_trip() -> None:
    one, other = make("a", epoch=1), make("b", epoch=2, role=GATEWAY)
    hello_of_one, hello_of_other = output(one), output(other)
    one.feed(hello_of_other, 0.0)
    other.feed(hello_of_one, 0.0)
    assert not up(one)
    one.feed(output(other), 0.0)
    other.feed(output(one), 0.0)
    assert up(one)
    assert up(other)
    assert one.theirs is not None
    assert (one.theirs.name, one.theirs.role, one.theirs.epoch, one.theirs.facts) == ("b", GATEWAY, 2, b"facts")
    assert (one.name, one.role, other.name, other.role) == ("b", "gateway", "a", "broker")


def test_another_secret_is_refused() -> None:
    one, other = make("a"), make("b", secret=b"something else entirely")
    with pytest.raises(RemoteProtocolError, match="does not have this fabric's secret"):
        greet(one, other)
    assert not up(one)


def test_a_proof_cannot_be_reflected() -> None:
    """Whoever only sends back what it gets proves nothing, also under another name."""
    one = make("a")
    mirror = make("b")  # says HELLO as somebody else, and answers with the proof that it got
    output(mirror)
    one.feed(frame(frames.HELLO, mirror._our_hello), 0.0)
    output_of_one = output(one)
    proof = output_of_one[output_of_one.index(bytes([frames.PROOF]), 4) - 4 :]
    with pytest.raises(RemoteProtocolError, match="secret"):
        one.feed(proof, 0.0)


def test_a_proof_cannot_be_replayed() -> None:
    one, other = make("a"), make("b")
    hello = output(other)
    other.feed(output(one), 0.0)
    proof = output(other)
    one.feed(hello + proof, 0.0)
    assert up(one)
    connection = Connection(Effects(gated=False), Peer("test"), object(), 0.0, Limits())
    later = Link(Greeting(BROKER, "a", 7), SECRET, connection, "", random.Random("later"), 0.0)
    with pytest.raises(RemoteProtocolError, match="secret"):
        later.feed(hello + proof, 0.0)


def test_a_changed_hello_is_noticed() -> None:
    one, other = make("a"), make("b", epoch=5)
    hello = output(other)
    one.feed(hello.replace(b"facts", b"fancy"), 0.0)
    with pytest.raises(RemoteProtocolError, match="secret"):
        other.feed(output(one), 0.0)
    with pytest.raises(RemoteProtocolError, match="secret"):
        one.feed(output(other), 0.0)


def test_a_node_knows_itself_and_its_namesakes() -> None:
    one, itself = make("a", epoch=1), make("a", epoch=1)
    with pytest.raises(RemoteProtocolError, match="this node itself"):
        one.feed(output(itself), 0.0)
    assert one.met_itself
    one, namesake = make("a", epoch=1), make("a", epoch=2)
    with pytest.raises(RemoteProtocolError, match="two nodes are called a"):
        one.feed(output(namesake), 0.0)
    assert not one.met_itself


@pytest.mark.parametrize("name", ["", "\0", "a\nb"])
def test_a_node_has_a_name_that_can_be_printed(name: str) -> None:
    one, other = make("one"), make(name)
    with pytest.raises(RemoteProtocolError, match="without a name"):
        one.feed(output(other), 0.0)


def test_who_is_not_expected_gets_no_proof() -> None:
    one, other = make("a", expected="c"), make("b")
    output(one)
    with pytest.raises(RemoteProtocolError, match="b answers where c was expected"):
        one.feed(output(other), 0.0)
    assert output(one) == b""


def test_another_version_says_which() -> None:
    hello = frame(
        frames.HELLO, blob(links.MAGIC), number(99), number(BROKER), blob(b"b"), number(1), blob(bytes(16)), blob(b"")
    )
    with pytest.raises(RemoteProtocolError, match="version 99 of the link protocol, this node version 1"):
        make("a").feed(hello, 0.0)


@pytest.mark.parametrize(
    "data",
    [
        b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\x00\x00",  # a client that took the wrong port
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff",
        frame(frames.HELLO, b"\x05short"),
        frame(frames.PROOF, blob(bytes(32))),
        frame(frames.MESSAGES, b"before any greeting"),
        frame(frames.PING, number(1)),
    ],
)
def test_what_is_no_greeting_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        make("a").feed(data, 0.0)


def test_little_is_kept_of_a_stranger_and_much_of_a_friend() -> None:
    with pytest.raises(RemoteProtocolError, match="16384 allowed"):
        make("a").feed((links.MAX_GREETING_BYTES + 1).to_bytes(4, "big"), 0.0)
    one, other = make("a"), make("b")
    hello = output(other)
    other.feed(output(one), 0.0)
    # In one piece with the proof: from there on, frames may be large.
    large = frame(frames.INTEREST, bytes(500_000))
    assert one.feed(hello + output(other) + large, 0.0) == [large[4:]]
    with pytest.raises(RemoteProtocolError, match="1000000 allowed"):
        one.feed(frame(frames.INTEREST, bytes(1_000_000)), 0.0)


def conversation() -> tuple[bytes, list[bytes]]:
    """What the other end sends a link made by ``make("a")``, and the frames of it that are not the link's own."""
    one, other = make("a"), make("b")
    stream = output(other)
    other.feed(output(one), 0.0)
    stream += output(other)
    contents = [bytes([frames.INTEREST]) + b"x" * size for size in (0, 1, 70_000)]
    stream += b"".join(frame(content[0], content[1:]) for content in contents)
    return stream + frame(frames.PING, number(3)) + frame(frames.RECEIVED, number(9)), [*contents, b"\x0b\x09"]


def feed(link: Link, pieces: list[bytes]) -> list[bytes]:
    found: list[bytes] = []
    for piece in pieces:
        found += link.feed(piece, 0.0)
    return found


@pytest.mark.parametrize(
    "cut",
    [
        lambda stream: [stream],
        lambda stream: [bytes([byte]) for byte in stream],
        lambda stream: [stream, b"\x00\x00"],
    ],
    ids=["whole", "byte by byte", "with trailing bytes"],
)
def test_pieces_do_not_matter(cut: Callable[[bytes], list[bytes]]) -> None:
    stream, contents = conversation()
    link = make("a")
    assert feed(link, cut(stream)) == contents
    assert output(link).endswith(frame(frames.PONG, number(3)))


@given(cuts=st.lists(st.integers(0, 71_000), max_size=12))
@settings(deadline=None)
def test_no_cut_matters(cuts: list[int]) -> None:
    stream, contents = conversation()
    places = sorted({min(place, len(stream)) for place in cuts} | {0, len(stream)})
    pieces = [stream[start:end] for start, end in itertools.pairwise(places)]
    assert feed(make("a"), pieces) == contents


@given(data=st.binary(max_size=200), after=st.sampled_from(["nothing", "hello", "all"]))
@settings(deadline=None)
def test_garbage_raises_nothing_else(data: bytes, after: str) -> None:
    one, other = make("a"), make("b")
    if after == "all":
        greet(one, other)
    elif after == "hello":
        one.feed(output(other), 0.0)
    try:
        one.feed(data, 0.0)
    except RemoteProtocolError as error:
        assert error.message  # noqa: PT017  # nothing else may come, and often nothing comes


def test_what_was_said_before_the_goodbye_counts() -> None:
    one, other = make("a"), make("b")
    greet(one, other)
    other.send(frame(frames.RECEIVED, number(1)))
    other.close("enough")
    other.send(frame(frames.RECEIVED, number(2)))
    assert one.feed(output(other), 0.0) == [b"\x0b\x01"]
    assert one.left
    assert one.close_reason == "enough"
    assert up(one)  # until what came before was dealt with
    one.end()
    assert not up(one)
    assert one.connection.closing


def test_a_pulse_gives_the_round_trip_time() -> None:
    one, other = make("a"), make("b")
    greet(one, other)
    for sent_at, answered_at in ((10.0, 10.040), (11.0, 11.040), (12.0, 12.080)):
        one.probe(sent_at)
        other.feed(output(one), sent_at)
        one.feed(output(other), answered_at)
    assert 40.0 < one.rtt_ms < 50.0
    assert one.rtt_deviation_ms > 0
    before = one.rtt_ms
    one.feed(frame(frames.PONG, number(1)), 13.0)  # an answer to a question of long ago says nothing
    assert one.rtt_ms == before


def test_a_closed_link_sends_nothing_more() -> None:
    one, other = make("a"), make("b")
    greet(one, other)
    one.close("because")
    one.close("again")
    one.send(frame(frames.RECEIVED, number(1)))
    sent = output(one)
    assert Fields(sent[4:]).blob() == b"because"
    assert len(sent) == 4 + 1 + 1 + len(b"because")
