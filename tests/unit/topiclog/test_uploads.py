"""Rows packed by a producer and taken apart by the broker: the same rows, in the order of their topics; damage is found."""

from __future__ import annotations

import random

import pytest

from nearcast.errors import BatchRefused, RemoteProtocolError
from nearcast.topiclog.uploads import StagedRows, UploadReader

Row = tuple[str, bytes, bytes, int]


def pack(rows: list[Row], max_frame_bytes: int = 1 << 20) -> list[bytes]:
    return list(StagedRows(max_frame_bytes).encode(rows))


def unpack(pieces: list[bytes]) -> list[Row]:
    reader = UploadReader()
    found = []
    for piece in pieces:
        for rows in reader.read(piece):
            assert rows.largest == max(map(len, rows.payloads))
            found += [(rows.topic.decode(), payload, rows.properties, rows.flags) for payload in rows.payloads]
    assert reader.rows == len(found)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_rows_come_back(seed: int) -> None:
    rng = random.Random(seed)
    topics = [f"t/{number}" for number in range(rng.randint(1, 6))]
    rows = [
        (rng.choice(topics), rng.randbytes(rng.choice((0, 10, 3_000))), rng.choice((b"", b"\x01\x01")), rng.choice((0, 1, 5)))
        for _ in range(rng.randint(0, 400))
    ]
    pieces = pack(rows, rng.choice((8_192, 1 << 20)))
    assert all(len(piece) <= 1 << 20 for piece in pieces)
    found = unpack(pieces)
    for topic in topics:
        assert [row for row in found if row[0] == topic] == [row for row in rows if row[0] == topic]


def test_no_piece_is_larger_than_the_broker_takes() -> None:
    rows: list[Row] = [("topic/of/some/length", bytes(size), b"", 1) for size in (1, 7_900, 7_000, 50, 3_000, 5_000, 7_900)]
    assert max(map(len, pack(rows, 8_192))) <= 8_192
    with pytest.raises(BatchRefused, match="row 1 has 9,000 bytes"):
        pack([("t", b"", b"", 1), ("t", bytes(9_000), b"", 1)], 8_192)


def test_rows_that_share_much_share_blocks() -> None:
    rows: list[Row] = [(f"t/{number % 10}", bytes(100), b"", 1) for number in range(1_000)]
    assert sum(map(len, pack(rows))) < 1_000 * 106


def test_every_damaged_byte_is_found() -> None:
    (piece,) = pack([("a", b"payload", b"", 1), ("b", b"other", b"", 1)])
    for place in range(len(piece)):
        damaged = bytearray(piece)
        damaged[place] ^= 0x10
        with pytest.raises(RemoteProtocolError):
            unpack([bytes(damaged)])
    for size in range(1, len(piece)):
        try:
            found = unpack([piece[:size]])
        except RemoteProtocolError:
            continue
        assert len(found) < 2
