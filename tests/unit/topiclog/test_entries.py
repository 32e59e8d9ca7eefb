"""The wire form of an entry: what goes in comes out, and nothing else is taken for one."""

from __future__ import annotations

import struct
from random import Random

import pytest

from nearcast.errors import LocalProtocolError, RemoteProtocolError
from nearcast.topiclog.blocks import RECORDS, encode, encode_records
from nearcast.topiclog.entries import Deletion, EntryWriter, Item, Run, decode
from nearcast.topiclog.marks import FORGOTTEN, Mark


def random_entry(random: Random) -> EntryWriter:
    writer = EntryWriter(random.randrange(1_000))
    for _ in range(random.randrange(12)):
        choice = random.randrange(8)
        if choice == 0:
            writer.delete(random.randbytes(random.randrange(1, 9)))
        elif choice == 1:
            writer.mark(Mark(producer=random.choice("pq"), batch=random.randrange(FORGOTTEN, 9), body=random.randbytes(3)))
        else:
            payloads = [random.randbytes(random.choice([0, 1, 60, 3_000])) for _ in range(random.choice([1, 1, 2, 50]))]
            writer.run(
                random.choice([b"a", b"b/c", b"\xc3\xa4" * 90]),
                random.randbytes(random.choice([0, 23])),
                random.choice([0, 1, 2, 4, 5, 6]),
                random.randbytes(random.choice([0, 0, 9])),
                payloads,
                random.randrange(2_000),
            )
    return writer


def entry_of(writer: EntryWriter) -> bytes:
    return b"".join(writer.finish())


@pytest.mark.parametrize("seed", range(40))
def test_what_was_written_is_read(seed: int) -> None:
    writer = random_entry(Random(seed))
    items = writer.items
    data = entry_of(writer)
    assert len(data) == writer.size
    assert decode(data) == items


def test_a_run_has_what_was_published() -> None:
    writer = EntryWriter()
    writer.run(b"t", b"client", 5, b"\x03\x00\x01x", [b"one", b"", b"three"], 1_234)
    (run,) = decode(entry_of(writer))
    assert isinstance(run, Run)
    assert (run.topic, run.flags, run.time_us, run.count) == (b"t", 5, 1_234, 3)
    assert (run.publisher(), run.properties()) == (b"client", b"\x03\x00\x01x")
    assert run.payloads() == [b"one", b"", b"three"]


def test_large_payloads_are_pieces_as_they_are() -> None:
    payload = bytes(8_192)
    writer = EntryWriter()
    for _ in range(3):
        writer.run(b"t", b"client", 1, b"", [payload], 1)
    pieces = writer.finish()
    assert sum(piece is payload for piece in pieces) == 3
    assert len(pieces) == 7, "what lies between is joined"


def test_a_body_is_that_of_the_block() -> None:
    for payloads in ([b"x"], [b"x" * 3_000], [b"x", b"y" * 500]):
        writer = EntryWriter()
        writer.run(b"t", b"client", 1, b"props", payloads, 77)
        (run,) = decode(entry_of(writer))
        assert isinstance(run, Run)
        pieces: list[bytes] = []
        size = encode_records(
            pieces, 1, 9, 3, 77, run.count, run.publisher_bytes, run.properties_bytes, run.body, run.body_bytes
        )
        expected = encode(RECORDS, 1, 9, 3, 77, b"client", b"props", payloads)
        assert b"".join(pieces) == expected
        assert size == len(expected)


def test_times_never_fall() -> None:
    writer = EntryWriter(earliest_us=50)
    for time_us in (10, 60, 55):
        writer.run(b"t", b"", 0, b"", [b""], time_us)
    assert [item.time_us for item in decode(entry_of(writer)) if isinstance(item, Run)] == [50, 60, 60]


def test_a_run_of_another_entry_is_taken_over() -> None:
    first = EntryWriter()
    first.run(b"t", b"client", 1, b"", [b"x" * 5_000], 10)
    second = EntryWriter(20)
    for item in decode(entry_of(first)):
        assert isinstance(item, Run)
        second.take(item, 15)
    (run,) = decode(entry_of(second))
    assert isinstance(run, Run)
    assert (run.time_us, run.payloads()) == (20, [b"x" * 5_000])


def test_an_entry_may_be_empty() -> None:
    assert decode(entry_of(EntryWriter())) == []


@pytest.mark.parametrize("seed", range(15))
def test_every_shorter_or_longer_one_is_garbage(seed: int) -> None:
    data = entry_of(random_entry(Random(seed)))
    for end in range(0, len(data), max(1, len(data) // 200)):
        with pytest.raises(RemoteProtocolError):
            decode(data[:end])
    with pytest.raises(RemoteProtocolError):
        decode(data + b"\1")


@pytest.mark.parametrize("seed", range(15))
def test_flipped_bits_raise_nothing_else(seed: int) -> None:
    random = Random(seed)
    data = entry_of(random_entry(random))
    for _ in range(300):
        changed = bytearray(data)
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        try:
            items = decode(bytes(changed))
        except RemoteProtocolError:
            continue
        for item in items:
            if isinstance(item, Run):  # what was taken can be used
                assert len(item.payloads()) == item.count
                assert sum(map(len, item.payloads())) <= len(data)


def malformed() -> dict[str, bytes]:
    head = struct.pack("<B3xI", 1, 1)
    time = struct.pack("<Bq", 2, 5)
    body = struct.pack("<2I", 0, 0)
    run = struct.pack("<BBHHxxIII", 1, 0, 1, 0, 0, 1, 8) + b"t"
    mark = b"\x93\xa5$raft\x01\x01"
    two = struct.pack("<B3xI", 1, 2)
    return {
        "an unknown format": struct.pack("<B3xI", 9, 0),
        "an unknown kind": head + b"\x09",
        "no time": head + run + body,
        "no topic": two + time + struct.pack("<BBHHxxIII", 1, 0, 0, 0, 0, 1, 8) + body,
        "quality of service 3": two + time + struct.pack("<BBHHxxIII", 1, 3, 1, 0, 0, 1, 8) + b"t" + body,
        "an unknown flag": two + time + struct.pack("<BBHHxxIII", 1, 8, 1, 0, 0, 1, 8) + b"t" + body,
        "no records": two + time + struct.pack("<BBHHxxIII", 1, 0, 1, 0, 0, 0, 8) + b"t" + body,
        "more records than fit": two + time + struct.pack("<BBHHxxIII", 1, 0, 1, 0, 0, 1 << 31, 8) + b"t" + body,
        "offsets that begin late": two + time + run + struct.pack("<2I", 1, 0),
        "offsets beyond the end": two + time + run + struct.pack("<2I", 0, 1),
        "times that fall": two + time + struct.pack("<Bq", 2, 4),
        "a time before 1970": head + struct.pack("<Bq", 2, -4),
        "a topic without a name": head + struct.pack("<BI", 3, 0),
        "a mark that is none": head + struct.pack("<BI", 4, 3) + b"\xc1\xc1\xc1",
        "a mark of the log's own": head + struct.pack("<BI", 4, len(mark)) + mark,
        "a mark of nobody": head + struct.pack("<BI", 4, 2) + b"\x91\xa0",
    }


@pytest.mark.parametrize("what", malformed())
def test_what_makes_no_sense_is_refused(what: str) -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        decode(malformed()[what])
    assert refused.value.reason_code == 0x81


def test_an_entry_has_a_bound() -> None:
    writer = EntryWriter()
    writer.run(b"t", b"", 0, b"", [b"x" * 100], 1)
    data = entry_of(writer)
    assert decode(data, max_bytes=len(data))
    with pytest.raises(RemoteProtocolError):
        decode(data, max_bytes=len(data) - 1)


def test_nobody_writes_what_nobody_reads() -> None:
    writer = EntryWriter()
    for topic, publisher, flags, payloads in (
        (b"", b"", 0, [b""]),
        (b"t" * 65_536, b"", 0, [b""]),
        (b"t", b"p" * 65_536, 0, [b""]),
        (b"t", b"", 3, [b""]),
        (b"t", b"", 8, [b""]),
        (b"t", b"", 0, []),
    ):
        with pytest.raises(LocalProtocolError):
            writer.run(topic, publisher, flags, b"", payloads, 1)
    for producer in ("", "$raft", "$raft/terms"):
        with pytest.raises(LocalProtocolError):
            writer.mark(Mark(producer=producer))
    with pytest.raises(LocalProtocolError):
        writer.delete(b"")


def test_items_are_compared_by_what_they_say() -> None:
    items: list[Item] = [Deletion(b"a"), Deletion(b"a")]
    assert items[0] == items[1] != Deletion(b"b")
