"""The two passes over the events that Spark runs: a survey of connections and runs, and the judging of all messages.

The second deals events out by topic (one shuffle, of blocks of columns instead of rows), large topics in pieces, and judges
each part on its own, so memory is bounded by the size of a part. Owns what is asked of the events and how large parts are;
:mod:`reading`, :mod:`dealing` and :mod:`judging` do the work. Tables of any size are written where they are made; what spans
parts comes back as sums.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from nearcast.errors import PipelineError
from nearcast.pipeline.evaluation import dealing, reading, tables, topics
from nearcast.pipeline.evaluation.clients import Clients
from nearcast.pipeline.evaluation.judging import Question, Run, judge
from nearcast.pipeline.evaluation.places import MAX_SITES, Bound, sites_of
from nearcast.recording.schema import arrow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from nearcast.pipeline.evaluation.inputs import Inputs
    from nearcast.pipeline.progress import Progress

Links = Literal["auto", "linked", "separate"]

ROWS_PER_PART = 1_000_000
"""Of events that are judged together, on average; about 400 MB of memory."""

SLOTS = 120
"""About so many pieces of time, unless told otherwise."""

MAX_SLOTS = 100_000
FINAL = ("flows", "topics", "episodes", "losses")
"""The tables that parts make for good; the others are sums that are added up."""

_NICE_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 86_400)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked of the passes."""

    bounds: Sequence[Bound] = ()
    sites: str | Path | None = None
    slot_ns: int | None = None
    settle_ns: int = 1_000_000_000
    links: Links = "auto"


class Passes:
    """Makes the passes when it is made. Tables go to ``directory``, sums to ``work``."""

    def __init__(
        self, spark: SparkSession, inputs: Inputs, wanted: Wanted, directory: Path, work: Path, progress: Progress
    ) -> None:
        self._spark = spark
        self._inputs = inputs
        self._wanted = wanted
        self._tasks = reading.tasks(inputs)
        self.directory, self.work = directory.absolute(), work.absolute()
        self.notes: list[str] = []
        progress.step("looking at connections")
        surveys = self._survey()
        self.question = self._ask(surveys)
        self.plan = self._plan(surveys)
        progress.step("judging messages")
        self._judge()

    @property
    def slot_ns(self) -> int:
        return self.question.slot_ns

    @property
    def runs(self) -> list[Run]:
        return self.question.runs

    @property
    def bounds(self) -> Sequence[Bound]:
        return self._wanted.bounds

    def files(self, name: str) -> list[Path]:
        """Those that a table, or a sum, is in."""
        return sorted(((self.directory if name in FINAL else self.work) / f"{name}.parquet").glob("part-*.parquet"))

    # -- the survey --------------------------------------------------------------------------------------------------------

    def _survey(self) -> list[reading.Survey]:
        look = functools.partial(_survey, self._tasks, self._wanted.links == "auto")
        number = len(self._tasks)
        rows = self._spark.range(0, number, 1, number).mapInArrow(look, "data binary").collect()
        return [msgspec.msgpack.decode(row.data, type=reading.Survey) for row in rows]

    def _ask(self, surveys: Sequence[reading.Survey]) -> Question:
        events: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for survey in surveys:
            for connection in survey.connections:
                events[connection["run"]].append(connection)
        spans = [_span(number, surveys) for number in range(len(self._inputs.runs))]
        if not any(spans):
            raise PipelineError("the files hold no events of a kind that this version knows")
        times = [span or (0, 0) for span in spans]
        longest_ns = max(end - start for start, end in times)
        slot_ns = self._wanted.slot_ns or _nice_ns(longest_ns)
        if longest_ns // slot_ns > MAX_SLOTS:
            raise PipelineError(
                f"{longest_ns / 1e9:,.0f} s are more than {MAX_SLOTS:,} pieces of {slot_ns / 1e9:g} s: lengthen --bucket"
            )
        names = [run.name for run in self._inputs.runs]
        starts = {name: start for name, (start, _) in zip(names, times, strict=True)}
        places = self._places(starts)
        linked = self._linked(surveys)
        runs = []
        for number, (name, (start_ns, end_ns)) in enumerate(zip(names, times, strict=True)):
            cutoff_ns = end_ns - self._wanted.settle_ns
            clients = Clients(events[number])
            processed = any(number in survey.processed for survey in surveys)
            runs.append(Run(name, start_ns, end_ns, cutoff_ns, number in linked, clients, places[name], processed))
        given_up = sum(run.clients.given_up for run in runs)
        if given_up:
            self.notes.append(f"{given_up:,} subscriptions were given up before the end: what they missed is not judged")
        shared = sum(run.clients.shared for run in runs)
        if shared:
            self.notes.append(f"{shared:,} shared subscriptions: nobody is expected to get what one of a group gets")
        return Question(runs, slot_ns, tuple(self._wanted.bounds))

    def _linked(self, surveys: Sequence[reading.Survey]) -> set[int]:
        """The runs in which messages get from one broker to another: as told, or as seen."""
        if self._wanted.links != "auto":
            return set(range(len(self._inputs.runs))) if self._wanted.links == "linked" else set()
        homes: dict[tuple[int, str], set[str]] = defaultdict(set)
        for survey in surveys:
            for run, publisher, broker, delivered in survey.ways:
                if not delivered:
                    homes[run, publisher].add(broker)
        found = {run for survey in surveys for run in survey.crossed}
        for survey in surveys:
            for run, publisher, broker, delivered in survey.ways:
                if delivered and (run, publisher) in homes and broker not in homes[run, publisher]:
                    found.add(run)
        return found

    def _places(self, starts_ns: dict[str, int]) -> dict[str, dict[str, list[tuple[int, int, int]]]]:
        """By run and client: ``from_ns, until_ns, site``."""
        places = sites_of(self._inputs.runs, self._wanted.sites, starts_ns)
        if len({place.site for place in places}) > MAX_SITES:
            self.notes.append(f"more than {MAX_SITES:,} sites: pairs of them are left out")
            places = []
        self.site_names = sorted({place.site for place in places})
        codes = {site: number for number, site in enumerate(self.site_names)}
        found: dict[str, dict[str, list[tuple[int, int, int]]]] = {run.name: {} for run in self._inputs.runs}
        for place in places:
            found[place.run].setdefault(place.client, []).append((place.from_ns, place.until_ns, codes[place.site]))
        return found

    # -- the judging -------------------------------------------------------------------------------------------------------

    def _plan(self, surveys: Sequence[reading.Survey]) -> dealing.Plan:
        loads = np.zeros((dealing.BUCKETS, 2), dtype=np.int64)
        for survey in surveys:
            loads += np.frombuffer(survey.loads, dtype=np.int64).reshape(loads.shape)
        return dealing.plan(loads[:, 0], loads[:, 1], ROWS_PER_PART)

    def _judge(self) -> None:
        parts = self.plan.parts
        number = len(self._tasks)
        dealt = self._spark.range(0, number, 1, number).mapInArrow(
            functools.partial(_deal, self._tasks, self.plan), "part int, data binary"
        )
        dealt = dealt.repartitionById(parts, "part") if parts > 1 else dealt.coalesce(1)
        judging = functools.partial(_judge, self.question, self.plan, str(self.directory), str(self.work))
        dealt.mapInArrow(judging, "part int").collect()
        if self.plan.splits:
            whole = [
                topics.merged([tables.read(path) for path in self.files(name)], keys)
                for name, keys in (("topic_sums", ("run_code", "topic")), ("topic_cells", ("run_code", "topic", "bucket")))
            ]
            write(self.directory / "topics.parquet", parts, topics.table(self.question, *whole))


def _span(run: int, surveys: Sequence[reading.Survey]) -> tuple[int, int] | None:
    """From a run's first message, or event if it has none, to its last event."""
    found = [(of_messages, low, high) for each in surveys for code, of_messages, low, high in each.spans if code == run]
    if not found:
        return None
    firsts = [low for of_messages, low, _ in found if of_messages] or [low for _, low, _ in found]
    return min(firsts), max(high for _, _, high in found)


def _nice_ns(span_ns: int) -> int:
    wanted_s = span_ns / 1e9 / SLOTS
    return round(next((each for each in _NICE_S if each >= wanted_s), wanted_s) * 1e9)


# -- what runs in Spark's workers ------------------------------------------------------------------------------------------


def _survey(tasks: list[list[reading.Piece]], ways: bool, batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            found = msgspec.msgpack.encode(reading.survey(tasks[number], ways=ways))
            yield arrow().record_batch({"data": arrow().array([found], arrow().binary())})


def _deal(tasks: list[list[reading.Piece]], plan: dealing.Plan, batches: Iterable[Any]) -> Iterator[Any]:
    pyarrow = arrow()
    for batch in batches:
        for number in batch.column(0).to_pylist():
            for part, data in reading.deal(tasks[number], plan):
                yield pyarrow.record_batch(
                    {"part": pyarrow.array([part], pyarrow.int32()), "data": pyarrow.array([data], pyarrow.binary())}
                )


def _judge(question: Question, plan: dealing.Plan, directory: str, work: str, batches: Iterable[Any]) -> Iterator[Any]:
    from pyspark import TaskContext

    context = TaskContext.get()
    part = 0 if context is None else context.partitionId()
    blocks = [block.as_buffer() for batch in batches for block in batch.column("data")]
    if not blocks and part:
        return
    for name, table in judge(reading.gathered(blocks), question, plan.share(part)).items():
        write(Path(directory if name in FINAL else work) / f"{name}.parquet", part, table)
    yield arrow().record_batch({"part": arrow().array([part], arrow().int32())})


def write(directory: Path, part: int, table: Any) -> None:
    """Whole or not at all: a task that is tried again writes the same once more."""
    from pyarrow import parquet

    directory.mkdir(parents=True, exist_ok=True)
    aside = directory / f".part-{part:05}-{os.getpid()}"
    parquet.write_table(table, aside, compression="zstd")
    aside.replace(directory / f"part-{part:05}.parquet")
