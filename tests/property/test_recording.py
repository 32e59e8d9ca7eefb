"""Whatever is recorded is read back the same."""

from __future__ import annotations

import tempfile

from hypothesis import given, settings
from hypothesis import strategies as st

from nearcast.recording import EventWriter, MessageEvent, check, read_events

NUMBERS = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=30)
EVENTS = st.builds(
    MessageEvent,
    kind=st.sampled_from(["connected", "disconnected", "unconnected", "refused"]),
    at_ns=NUMBERS,
    client=TEXT,
    message_id=st.none() | NUMBERS,
    stream=st.none() | st.integers(0, 2**31 - 1),
    sequence=st.none() | NUMBERS,
    topic=st.none() | TEXT,
    publisher=st.none() | TEXT,
    subscriber=st.none() | TEXT,
    due_ns=st.none() | NUMBERS,
    sent_ns=st.none() | NUMBERS,
    received_ns=st.none() | NUMBERS,
    qos=st.none() | st.integers(0, 2),
    retained=st.none() | st.booleans(),
    size_bytes=st.none() | st.integers(0, 268_435_455),
    path=st.lists(TEXT, max_size=4).map(tuple),
    reason=st.none() | TEXT,
)


@settings(max_examples=50)
@given(st.lists(EVENTS, max_size=20), st.integers(1, 10), st.integers(1, 5), TEXT)
def test_round_trip(events: list[MessageEvent], rows_per_file: int, flush_every: int, run: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        with EventWriter(directory, run, rows_per_file=rows_per_file) as writer:
            for number, event in enumerate(events):
                writer.write(event)
                if number % flush_every == 0:
                    writer.flush()
        assert list(read_events(directory)) == events
        assert check(directory).problems == ()
