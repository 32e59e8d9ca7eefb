"""Streams of clients whose records are in logs that others have, or in several.

A broker that does not host a replica set reads for its client: a :class:`SetReading` goes on wherever there is a member, over
lines (:mod:`nearcast.broker.set_lines`), and :class:`Relayed` passes on what it brings, by the client's credit. What is on its
way for a client that takes nothing is bounded by :data:`WINDOW_BYTES` for each log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from nearcast.errors import NearcastError, RequestRefused
from nearcast.mqtt import reasons
from nearcast.topiclog import wire
from nearcast.topiclog.conversation import Reading
from nearcast.topiclog.streams import MAX_CREDIT

if TYPE_CHECKING:
    from nearcast.broker.set_lines import Line, SetLines

WINDOW_BYTES: Final = 2_097_152
"""Of a stream, on their way from a member and not yet taken by the client: what a slow one makes this broker hold."""


class SetReading(Reading):
    """A stream's part that one log has: that of replica set ``source``, or this broker's own if that is empty."""

    def __init__(self, source: str, asked: wire.Open) -> None:
        super().__init__(asked, WINDOW_BYTES)
        self.source = source
        self.follow = asked.follow
        #: Topics that are named for the first time, to be told to the client.
        self.news: list[wire.Name] = []
        self.named: set[str] = set()
        self.line: Line | None = None
        #: Until when somebody is looked for who has it.
        self.deadline = 0.0
        self.avoided: set[str] = set()
        self.is_misplaced = False

    def heard(self, content: wire.FromBroker) -> None:
        if isinstance(content, wire.Names):
            self.news += [name for name in content.names if name.topic not in self.named]
            self.named.update(name.topic for name in content.names)
        self.deadline = 0.0
        super().heard(content)
        if self.wake is not None:
            self.wake()

    def fail(self, error: NearcastError) -> None:
        if isinstance(error, RequestRefused) and error.reason_code == reasons.USE_ANOTHER_SERVER:
            self.is_misplaced = True
        else:
            super().fail(error)


class Relayed:
    """A client's stream over logs that others have, or over several: :class:`SetReading` for each, one after the other.

    What a number means in DATA is each log's own. The client is told anew where it means something else than before.
    """

    def __init__(
        self, number: int, readings: list[SetReading], asked: wire.Open, lines: SetLines, wake: Callable[[], bool]
    ) -> None:
        self.number = number
        self.opened = False
        self.credit = 0
        self.listed_count = len(asked.start_indexes) + len(asked.end_indexes)
        self._readings = readings
        self._bounded = asked.follow and (asked.end_index is not None or len(asked.end_indexes) > 0)
        self._lines = lines
        self._wake = wake
        self._told: dict[int, str] = {}
        self._turn = 0
        self.grant(asked.credit)
        for reading in readings:
            reading.wake = self._woken
            lines.attach(reading)

    def _woken(self) -> None:
        self._wake()

    def grant(self, credit: int) -> None:
        """The reader takes so many bytes more."""
        self.credit = min(MAX_CREDIT, self.credit + max(0, credit))

    def close(self) -> None:
        """The client is gone, or has all."""
        for reading in self._readings:
            self._lines.detach(reading)

    def news(self) -> list[wire.Message]:
        """What to tell before anything else: topics that are new, and that all are there."""
        found: list[wire.Message] = []
        for reading in self._readings:
            if reading.news:
                names, reading.news = reading.news, []
                self._told.update((name.number, name.topic) for name in names)
                found.append(wire.Names(names))
        if not self.opened and all(reading.opened for reading in self._readings):
            self.opened = True
            found.append(wire.Opened())
        return found

    @property
    def finished(self) -> bool:
        """Whether everything was sent."""
        if not self.opened or any(reading.ready and not reading.ended for reading in self._readings):
            return False
        going_on = [reading for reading in self._readings if not reading.over]
        # A log that has none of the topics never comes to their end.
        return not going_on or (
            self._bounded and len(going_on) < len(self._readings) and not any(reading.named for reading in going_on)
        )

    def take(self) -> tuple[list[wire.Message], memoryview, wire.Progress] | None:
        """What is next: messages that come first, blocks, and how far they go; None: nothing yet. Raises what went wrong."""
        for _ in self._readings:
            reading = self._readings[self._turn % len(self._readings)]
            self._turn += 1
            batch = reading.take()
            if batch is None:
                continue
            self._lines.used(reading)
            before: list[wire.Message] = []
            numbers = [number for number, _ in batch.next_indexes]
            gaps: list[wire.Message] = []
            if batch.gaps:
                number_of = {topic: number for number, topic in batch.topics.items()}
                for gap in batch.gaps:
                    numbers.append(number_of[gap.topic])
                    gaps.append(wire.Gap(number_of[gap.topic], gap.first_index, gap.next_index))
            renamed = {number: batch.topics[number] for number in numbers if self._told.get(number) != batch.topics[number]}
            if renamed:
                self._told.update(renamed)
                before.append(wire.Names([wire.Name(number, topic, 1, None) for number, topic in renamed.items()]))
            self.credit -= len(batch.data)
            return before + gaps, batch.data, wire.Progress(batch.next_indexes)
        return None
