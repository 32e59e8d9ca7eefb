"""Streams of readers over a log that grows under them: each committed record, once, in order, whenever they are opened."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nearcast.mqtt import topics as names
from nearcast.topiclog import wire
from nearcast.topiclog.batches import parse
from nearcast.topiclog.log import TopicLog
from nearcast.topiclog.storage import MemoryStorage
from nearcast.topiclog.streams import ReadStream

TOPICS = ("load/a", "load/b", "kept/c")

steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from(TOPICS), st.integers(1, 5)),
        st.tuples(st.just("write"), st.just(""), st.just(0)),
        st.tuples(st.just("commit"), st.just(""), st.integers(0, 3)),
        st.tuples(st.just("step"), st.just(""), st.sampled_from((1, 200, 1 << 20))),
        st.tuples(st.just("open"), st.just(""), st.just(0)),
    ),
    max_size=60,
)


class Reader:
    """A driver of one stream: looks, plans, reads, takes, a step at a time."""

    def __init__(self, log: TopicLog, filters: list[str], start: str) -> None:
        self.stream = ReadStream(1, wire.Open(filters, start=start, follow=True, credit=1 << 40), log)  # type: ignore[arg-type]
        self.skipped = {topic.text(): topic.committed_index - 1 if start == "latest" else 0 for topic in log.topics.values()}
        self.seen: list[tuple[str, int]] = []
        self._topics: dict[int, str] = {}
        # What is the latest is settled when the stream looks at a topic, so that has to be now.
        while start == "latest" and not self.stream.opened:
            self.step(1)

    def step(self, max_bytes: int) -> bool:
        """Whether there may be more to do at once."""
        stream = self.stream
        opening = not stream.opened
        self._topics.update({name.number: name.topic for name in stream.look(1)})
        if opening:
            return True
        extents = stream.plan(max_bytes)
        assert stream.take_gaps() == []
        if extents is None:
            return not stream.waiting
        batch = stream.take(extents.gather())
        assert stream.take_gaps() == []
        if batch is not None:
            self.seen += [(record.topic, record.index) for record in parse(b"".join(batch.chunks), self._topics)]
        return True


@settings(max_examples=300, deadline=None)
@given(steps, st.sampled_from((["load/#"], ["#"], ["load/a"], ["load/a", "kept/+"])), st.sampled_from(("earliest", "latest")))
def test_a_stream_that_follows_misses_nothing(todo: list[tuple[str, str, int]], filters: list[str], start: str) -> None:
    log = TopicLog(MemoryStorage(), 65_536, 100)
    log.recover()
    positions: list[int] = []
    reader: Reader | None = None
    written: list[tuple[str, int]] = []
    for verb, name, number in [*todo, ("open", "", 0), ("write", "", 0), ("commit", "", -1)]:
        if verb == "append":
            topic = log.topic(name.encode())
            assert topic is not None
            first = log.append(topic, b"p", 1, b"", [b"x" * 50] * number, 1_000)
            written += [(name, index) for index in range(first, first + number)]
        elif verb == "write":
            positions.append(log.write())
        elif verb == "commit" and positions:
            log.commit(positions[max(-len(positions), -1 - number) if number >= 0 else -1])
        elif verb == "step" and reader is not None:
            reader.step(number)
        elif verb == "open" and reader is None:
            reader = Reader(log, filters, start)
    assert reader is not None
    while reader.step(1 << 20):
        pass
    wanted = [
        (name, index)
        for name, index in written
        if any(names.matches(topic_filter, name) for topic_filter in filters) and index > reader.skipped.get(name, 0)
    ]
    assert reader.seen == wanted
