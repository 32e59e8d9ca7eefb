"""Frames of replica sets that are longer than a link takes."""

from __future__ import annotations

import pytest

from nearcast.errors import RemoteProtocolError
from nearcast.fabric import frames
from nearcast.fabric.frames import LENGTH_BYTES, frame
from nearcast.fabric.set_parts import MAX_WHOLE_BYTES, PART_BYTES, Parts, cut


def test_what_is_short_goes_as_it_is() -> None:
    assert cut(frames.SET_RAFT, [b"eu", b"x"]) == [frame(frames.SET_RAFT, b"eu", b"x")]


@pytest.mark.parametrize("size", [PART_BYTES - 1, PART_BYTES, 2 * PART_BYTES - 1, 2 * PART_BYTES, 5 * PART_BYTES + 7])
def test_what_is_long_arrives_whole(size: int) -> None:
    content = bytes(range(251)) * (size // 251 + 1)
    content = content[:size]
    sent = cut(frames.SET_RAFT, [content[:100], content[100:]])
    assert all(len(each) <= PART_BYTES + LENGTH_BYTES + 2 for each in sent)
    if len(sent) == 1:
        assert sent[0][LENGTH_BYTES:] == bytes([frames.SET_RAFT]) + content
        return
    parts = Parts()
    found = [parts.add("b1", each[LENGTH_BYTES:]) for each in sent]
    assert found[:-1] == [None] * (len(sent) - 1)
    assert found[-1] == bytes([frames.SET_RAFT]) + content


def test_a_link_that_breaks_leaves_nothing_behind() -> None:
    first = cut(frames.SET_RAFT, [b"a" * (2 * PART_BYTES)])
    second = cut(frames.SET_RAFT, [b"b" * (2 * PART_BYTES)])
    parts = Parts()
    assert parts.add("b1", first[0][LENGTH_BYTES:]) is None
    found = [parts.add("b1", each[LENGTH_BYTES:]) for each in second][-1]
    assert found == bytes([frames.SET_RAFT]) + b"b" * (2 * PART_BYTES)


def test_parts_without_end_and_parts_of_nothing_end_the_link() -> None:
    more = bytes([frames.SET_PART, 1]) + bytes(PART_BYTES)
    parts = Parts()
    parts.add("b1", bytes([frames.SET_PART, 3]) + bytes(PART_BYTES))
    for _ in range(MAX_WHOLE_BYTES // PART_BYTES - 1):
        parts.add("b1", more)
    with pytest.raises(RemoteProtocolError, match="allowed"):
        parts.add("b1", more)
    for rest in (b"", b"\0", b"\7a", b"\0a", b"\1a"):
        with pytest.raises(RemoteProtocolError, match="nothing"):
            Parts().add("b2", bytes([frames.SET_PART]) + rest)
