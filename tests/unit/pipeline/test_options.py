"""Options of the data source: what they become, and the line that a wrong one gets."""

from __future__ import annotations

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict

from nearcast.errors import PipelineError
from nearcast.pipeline.options import Positions, ReadOptions, parse_read


def read(*, streaming: bool = False, **options: str) -> ReadOptions:
    return parse_read({"url": "nearcast://broker", "topics": "a/#", **options}, streaming=streaming)


def test_defaults() -> None:
    batch, stream = read(), read(streaming=True)
    assert batch.connection.url == "nearcast://broker:7883"
    assert batch.filters == ("a/#",)
    assert (batch.start, batch.end) == (Positions("earliest"), Positions("latest"))
    assert stream.start == Positions("latest")
    assert batch.fail_on_data_loss


def test_keys_come_in_any_case() -> None:
    options = CaseInsensitiveDict(
        {"URL": "nearcast://broker", "Topics": "a", "STARTINGOFFSETS": "latest", "failondataloss": "False"}
    )
    found = parse_read(options, streaming=False)
    assert found.start == Positions("latest")
    assert not found.fail_on_data_loss


def test_topics() -> None:
    assert read(topics=" a/# , b/+/c,a/#").filters == ("a/#", "b/+/c")
    assert read(topics='["a,b", "c"]').filters == ("a,b", "c")
    options = {"url": "nearcast://broker", "path": "x/#"}
    assert parse_read(options, streaming=False).filters == ("x/#",)


def test_offsets_and_times() -> None:
    found = read(startingOffsets='{"a/b": 17, "a/c": "latest"}', endingTime="2026-05-01T12:00:00.000001+02:00")
    assert found.start == Positions("earliest", {"a/b": 17, "a/c": "latest"})
    assert found.end.time_us == 1_777_629_600_000_001
    assert read(startingTime="2026-05-01").start.time_us == 1_777_593_600_000_000


def test_sizes() -> None:
    found = read(streaming=True, maxBytesPerTrigger="64m", maxRecordsPerTrigger="10_000")
    assert (found.max_bytes_per_trigger, found.max_records_per_trigger) == (64 << 20, 10_000)


def test_credentials_are_used_and_never_shown() -> None:
    for options in (
        {"url": "nearcast://me:s%40crete@[::1]:99"},
        {"url": "nearcast://[::1]:99", "username": "me", "password": "s@crete"},
    ):
        found = parse_read({**options, "topics": "a"}, streaming=False)
        assert (found.connection.username, found.connection.password) == ("me", "s@crete")
        assert found.connection.full_url == "nearcast://me:s%40crete@[::1]:99"
        assert "crete" not in repr(found)
        assert "crete" not in str(found)
    assert read(url="nearcast://a:1").connection.full_url == "nearcast://a:1"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"url": ""}, "option url is missing"),
        ({"url": "mqtt://me:secret@broker"}, "begins with mqtt://: Spark reads from the bulk port"),
        ({"url": "nearcast://me:secret@broker:port"}, "is not a URL"),
        ({"url": "nearcast://me:secret@broker/x"}, "and no more"),
        ({"topics": " "}, "option topics is missing"),
        ({"topics": "a/#/b"}, "# must be the whole last level"),
        ({"topics": "a,,b"}, "must not be empty"),
        ({"topics": "[1]"}, "begins like a JSON list"),
        ({"topics": "$share/g/a"}, "shared subscription"),
        ({"topics": ",".join(map(str, range(65)))}, "has 65 filters and may have 64"),
        ({"startingOffset": "latest"}, "unknown option startingOffset for reading: did you mean startingOffsets?"),
        ({"zzz": "1"}, "unknown option zzz"),
        ({"startingOffsets": "first"}, 'must be "earliest", "latest" or JSON'),
        ({"startingOffsets": '{"a/#": 1}'}, "is a filter"),
        ({"startingOffsets": '{"a": 0}'}, "must have an index"),
        ({"startingOffsets": '{"a": true}'}, "must have an index"),
        ({"startingOffsets": "[]"}, 'must be "earliest"'),
        ({"startingOffsets": "latest", "startingTime": "2026-05-01"}, "exclude each other"),
        ({"startingTime": "yesterday"}, "must be a time such as"),
        ({"startingTime": "2026-05-02", "endingTime": "2026-05-01"}, "is after endingTime"),
        ({"minPartitions": "0"}, "must be a whole number above 0"),
        ({"rowsPerPartition": "many"}, "must be a whole number above 0"),
        ({"failOnDataLoss": "maybe"}, "must be true or false"),
        ({"reconnectSeconds": "nan"}, "must be a number, 0 or more"),
        ({"maxRecordsPerTrigger": "5"}, "is for spark.readStream"),
        ({"caFile": "ca.pem"}, "give the url as nearcasts://"),
    ],
)
def test_a_wrong_option_gets_a_clear_line(options: dict[str, str], line: str) -> None:
    with pytest.raises(PipelineError) as caught:
        read(streaming=False, **options)
    assert line in str(caught.value)
    assert "secret" not in str(caught.value)


def test_streams_have_no_end() -> None:
    with pytest.raises(PipelineError, match=r"endingOffsets is for spark\.read, which has an end"):
        read(streaming=True, endingOffsets="latest")
