"""Plan where owned topics belong, from what brokers report (ePulsar §3.2, §3.3), and publish the plan.

Three places to read from:

- the durable topics ``$nearcast/telemetry/#`` of all brokers (``--url`` for each, for each keeps its own): whenever reports
  came, the newest of every broker are planned on, and the plan is published to ``$nearcast/plan``, at the first broker that
  answers; a controller with ``planner = "spark"`` takes it. ``--available-now`` plans once and ends, ``--dry-run`` publishes
  nothing;
- an archive of these topics (``--archive DIR``, what the job ``archive`` wrote), as it stood at its end;
- tables of single clients (``--tables DIR``): Parquet in the directories ``samples``, ``topics`` and ``brokers`` of it.

Plans remember nothing: what counts is read again, so that the job may be stopped and started at any time, and a plan that is
published twice is carried out once (its moves name epochs).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from nearcast.errors import ConfigError, PipelineError
from nearcast.mqtt.topics import filter_fault
from nearcast.pipeline.options import parse_connection, parse_read
from nearcast.pipeline.queries import await_queries, forget_queries
from nearcast.pipeline.telemetry_rounds import CLIENTS, FILTER, TOPICS, Rounds, topic_of
from nearcast.pipeline.user_jobs import DEFAULT_URL, connection_options
from nearcast.placement.topics import PlacementSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from nearcast.pipeline.progress import Progress
    from nearcast.pipeline.telemetry_summaries import Bound, Totals
    from nearcast.placement.deciding import Plan
    from nearcast.placement.plans import PlanRecord
    from nearcast.placement.topics import Fleet

SHOWN_MOVES: Final = 10
FORGET_SECONDS: Final = 3_600.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    url: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            description=f"The bulk port of a broker. Repeatable: each broker keeps its own reports. Default {DEFAULT_URL}.",
            extra={"metavar": "URL"},
        ),
    ] = ()
    username: Annotated[str | None, msgspec.Meta(description="Who we are, for the broker.", extra={"metavar": "NAME"})] = None
    password_file: Annotated[
        str | None, msgspec.Meta(description="A file whose first line is the password.", extra={"metavar": "FILE"})
    ] = None
    ca_file: Annotated[str | None, msgspec.Meta(description="Certificates to trust, PEM.", extra={"metavar": "FILE"})] = None
    certificate_file: Annotated[str | None, msgspec.Meta(description="Our own, PEM.", extra={"metavar": "FILE"})] = None
    key_file: Annotated[str | None, msgspec.Meta(description="Its private key, PEM.", extra={"metavar": "FILE"})] = None
    archive: Annotated[
        str | None,
        msgspec.Meta(description="Plan on an archive of telemetry topics instead.", extra={"metavar": "DIR"}),
    ] = None
    tables: Annotated[
        str | None,
        msgspec.Meta(description="Plan on Parquet in DIR/samples, DIR/topics, DIR/brokers instead.", extra={"metavar": "DIR"}),
    ] = None
    available_now: Annotated[bool, msgspec.Meta(description="Plan once on what is there, and end.")] = False
    dry_run: Annotated[bool, msgspec.Meta(description="Publish no plan.")] = False
    every: Annotated[
        Annotated[float, msgspec.Meta(ge=0)],
        msgspec.Meta(description="Least seconds between plans.", extra={"metavar": "SECONDS"}),
    ] = 5.0
    stale: Annotated[
        Annotated[float, msgspec.Meta(gt=0)],
        msgspec.Meta(
            description="Seconds for which a report counts: some of the brokers' telemetry intervals.",
            extra={"metavar": "SECONDS"},
        ),
    ] = 15.0
    bound: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            description="Latency bound of topics, in milliseconds, instead of what brokers report. The first that matches "
            "counts. Repeatable.",
            extra={"metavar": "FILTER=MS"},
        ),
    ] = ()
    placement: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            description="How topics are placed: out_rate_limit=20000, hysteresis_ms=1, ... Repeatable.",
            extra={"metavar": "NAME=VALUE"},
        ),
    ] = ()
    out: Annotated[
        str | None,
        msgspec.Meta(
            description="Write summaries of all topics there, as Parquet, and plan.json.",
            extra={"metavar": "DIR", "short": "o"},
        ),
    ] = None
    partitions: Annotated[
        Annotated[int, msgspec.Meta(ge=1)],
        msgspec.Meta(description="Tasks that topics are shared out to at most.", extra={"metavar": "N"}),
    ] = 16
    timeout: Annotated[
        Annotated[float, msgspec.Meta(gt=0)] | None,
        msgspec.Meta(description="Stop after so many seconds.", extra={"metavar": "SECONDS"}),
    ] = None

    def connections(self) -> list[dict[str, str]]:
        """The data source's options for where each broker is."""
        common = connection_options(self)
        return [{**common, "url": url} for url in self.url or (DEFAULT_URL,)]

    def bounds(self) -> tuple[Bound, ...]:
        """What ``--bound`` gave."""
        found = []
        for rule in self.bound:
            topic_filter, equals, text = rule.rpartition("=")
            fault = filter_fault(topic_filter, 1 << 16) if equals else "write FILTER=MS, sensors/#=40"
            if fault:
                raise ConfigError(f"--bound {rule}: {fault}")
            try:
                bound_ms = float(text)
            except ValueError:
                bound_ms = -1.0
            if not 0 <= bound_ms < float("inf"):
                raise ConfigError(f"--bound {rule}: {text!r} is no number of milliseconds")
            found.append((topic_filter, bound_ms))
        return tuple(found)

    def placement_settings(self) -> PlacementSettings:
        """What ``--placement`` gave."""
        given = {}
        for setting in self.placement:
            name, equals, value = setting.partition("=")
            if not equals:
                raise ConfigError(f"--placement {setting}: write NAME=VALUE")
            given[name.strip()] = value.strip()
        try:
            return msgspec.convert(given, PlacementSettings, strict=False)
        except msgspec.ValidationError as error:
            names = ", ".join(field.name for field in msgspec.structs.fields(PlacementSettings))
            raise ConfigError(f"--placement: {error}; there are {names}") from None


def settings(options: Options) -> dict[str, str]:
    """How rows get from Java to Python. With a limit in bytes, Spark measures the batch anew for every row, in time that grows
    with the batch where lists are null: a million rows took a minute. So there is none, and batches have fewer rows: of
    telemetry's 64 KiB a record these are 256 MB at most."""
    return {
        "spark.sql.shuffle.partitions": str(options.partitions),
        "spark.sql.execution.arrow.maxRecordsPerBatch": "4096",
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
    }


def check(options: Options) -> None:
    """Refuse what cannot work before a JVM is started."""
    options.bounds()
    options.placement_settings()
    if options.archive is not None and options.tables is not None:
        raise PipelineError("--archive and --tables exclude each other: say which of them to plan on")
    if options.tables is not None:
        for name in TABLES:
            if not (Path(options.tables) / name).exists():
                raise PipelineError(f"--tables {options.tables}: there is no {name} in it; it takes {', '.join(TABLES)}")
    elif options.archive is not None:
        if not Path(options.archive).is_dir():
            raise PipelineError(f"--archive {options.archive}: there is no such directory")
    else:
        for connection in options.connections():
            parse_read({**connection, "topics": FILTER}, streaming=True)


TABLES: Final = ("samples", "topics", "brokers")


def run(spark: SparkSession, options: Options, progress: Progress) -> Mapping[str, object]:
    """Plan once, or until stopped."""
    if options.tables is not None:
        from nearcast.pipeline.telemetry_files import read_tables

        progress.step(f"planning on {options.tables}")
        rows, fleet, now = read_tables(spark, Path(options.tables))
        return _Planning(spark, options, progress).plan(rows, fleet, now)
    planning = _Planning(spark, options, progress)
    if options.archive is not None:
        from nearcast.pipeline.archive import read_archive

        progress.step(f"planning on {options.archive}")
        return planning.plan_records(_of_telemetry(read_archive(spark, options.archive)), None)
    if options.available_now:
        progress.step(planning.what)
        since = datetime.fromtimestamp(time.time() - options.stale, UTC).isoformat()
        return planning.plan_records(planning.reader().option("startingTime", since).load(), time.time())
    return planning.follow()


def _of_telemetry(records: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention

    from nearcast.pipeline.telemetry_rounds import PREFIX

    return records.where(F.col("topic").startswith(PREFIX)).select("topic", "index", "time", "payload")


class _Planning:
    """One run's plans."""

    def __init__(self, spark: SparkSession, options: Options, progress: Progress) -> None:
        self._spark = spark
        self._options = options
        self._progress = progress
        self._settings = options.placement_settings()
        self._bounds = options.bounds()
        self._rounds = Rounds()
        self._number = 0
        self.plans = 0
        self.moves = 0

    # --- reading --------------------------------------------------------------------------------------------------------

    def reader(self) -> Any:
        return self._source(self._spark.read)

    def _source(self, reader: Any) -> Any:
        from nearcast.pipeline.telemetry_source import NAME, TelemetrySource

        self._spark.dataSource.register(TelemetrySource)
        connections = self._options.connections()
        options = {**connections[0], "topics": FILTER, "failOnDataLoss": "false"}
        del options["url"]
        return reader.format(NAME).options(urls=json.dumps([each["url"] for each in connections]), **options)

    @property
    def what(self) -> str:
        """What is planned on, for people."""
        urls = [parse_connection(each).url for each in self._options.connections()]
        return f"planning on the telemetry of {urls[0] if len(urls) == 1 else f'{len(urls)} brokers'}"

    def follow(self) -> dict[str, object]:
        """Plan whenever there is news, until stopped."""
        options = self._options
        self._progress.step(self.what)
        forget_queries(self._spark)
        since = datetime.fromtimestamp(time.time() - options.stale, UTC).isoformat()
        stream = self._source(self._spark.readStream).option("startingTime", since).load()
        with tempfile.TemporaryDirectory(prefix="nearcast-telemetry-", ignore_cleanup_errors=True) as checkpoint:
            # Nothing is kept over runs: a plan is made of what counts now.
            writer = stream.writeStream.queryName("telemetry").option("checkpointLocation", checkpoint)
            writer.trigger(processingTime=f"{options.every} seconds").foreachBatch(self._batch).start()
            await_queries(self._spark, options.timeout)
        return {"plans": self.plans, "moves": self.moves, "refused": self._rounds.refused}

    def _batch(self, records: DataFrame, _: int) -> None:
        if not self._look(records):
            return
        now = time.time()
        self._rounds.forget(now - FORGET_SECONDS)
        self._plan_newest(self.reader().load(), now)

    def plan_records(self, records: DataFrame, now: float | None) -> dict[str, object]:
        """Plan once; ``now`` None: at the time of the last record."""
        self._look(records)
        if now is None:
            now = self._rounds.latest
        return self._plan_newest(records, now)

    def _look(self, records: DataFrame) -> bool:
        """Take note of which records came; whether there is news."""
        from nearcast.pipeline.telemetry_records import SEEN, headers, seen_of

        found: Any = records.mapInArrow(headers, SEEN).toArrow()
        seen, refused = seen_of(found.to_pylist())
        if refused:
            self._rounds.refused += refused
            self._progress.note(f"{refused:,} records of {FILTER} are no telemetry and were passed over")
        return self._rounds.take(seen)

    # --- planning -------------------------------------------------------------------------------------------------------

    def _plan_newest(self, records: DataFrame, now: float) -> dict[str, object]:
        from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention

        from nearcast.pipeline.telemetry_records import contents
        from nearcast.pipeline.telemetry_tables import ROWS
        from nearcast.placement.gathering import fleet_of

        since = now - self._options.stale
        topics, clients = self._rounds.whole(TOPICS, since), self._rounds.whole(CLIENTS, since)
        chosen = [topic_of(TOPICS, name) for name in topics] + [topic_of(CLIENTS, name) for name in clients]
        began = min((found.began for found in (*topics.values(), *clients.values())), default=0.0)
        # Both conditions are answered by the brokers: nothing else is read.
        first = datetime.fromtimestamp(began, UTC)
        wanted = records.where(F.col("topic").isin(chosen) & (F.col("time") >= first)) if chosen else records.limit(0)
        fleet = fleet_of(self._rounds.reports(since))
        return self.plan(wanted.mapInArrow(contents(topics, clients), ROWS), fleet, now)

    def plan(self, rows: DataFrame, fleet: Fleet, now: float) -> dict[str, object]:
        """Plan on rows, write and publish what came out."""
        from pyspark import StorageLevel

        from nearcast.pipeline import telemetry_plans

        options = self._options
        if not len(fleet):
            self._progress.note("no broker has reported lately: nothing to plan with")
            return {"brokers": 0, "topics": 0, "moves": 0}
        found = telemetry_plans.summaries(rows, fleet, self._settings, self._bounds, everything=options.out is not None)
        if options.out is not None:
            found = found.persist(StorageLevel.DISK_ONLY)
        try:
            made, totals = telemetry_plans.plan(found, fleet, self._settings, now)
            # Above every number that this planner, restarted or not, gave before; a plan may need several.
            self._number = max(self._number, int(time.time() * 1e6))
            record = made.record(self._number, now, telemetry_plans.PLANNER)
            self._number += len(record.moves) + 1
            if options.out is not None:
                self._write(found, made, msgspec.json.format(msgspec.json.encode(record)))
        finally:
            if options.out is not None:
                found.unpersist()
        self.plans += 1
        self.moves += len(record.moves)
        live = options.archive is None and options.tables is None
        if live and record.moves and not options.dry_run:
            self._publish(record)
        self._show(made, totals)
        return _result(made, totals)

    def _publish(self, record: PlanRecord) -> None:
        """At any broker: whichever takes it tells the controller."""
        from nearcast.pipeline import telemetry_plans
        from nearcast.pipeline.failures import in_one_line

        connections = self._options.connections()
        for number, connection in enumerate(connections):
            try:
                telemetry_plans.publish(self._spark, record, {"reconnectSeconds": "2", **connection})
            except Exception as error:  # Spark raises many kinds
                if number == len(connections) - 1:
                    raise
                self._progress.note(f"{parse_connection(connection).url} takes no plan: {in_one_line(error, None, '')}")
            else:
                return

    def _write(self, found: DataFrame, made: Plan, record: bytes) -> None:
        assert self._options.out is not None  # noqa: S101 - the caller's
        directory = Path(self._options.out)
        topics = found.where("topic IS NOT NULL").drop("totals")
        topics.write.mode("overwrite").option("compression", "zstd").parquet(str(directory / "summaries"))
        (directory / "plan.json").write_bytes(record)

    def _show(self, made: Plan, totals: Totals) -> None:
        if not (self._options.archive or self._options.tables or self._options.available_now):
            self._progress.note(
                f"{totals.topics:,} topics, {totals.violated:,} above their bound, {int(made.overloaded.sum())} brokers "
                f"overloaded: {len(made.moves):,} moves"
            )
            return
        rows = [
            (
                move.topic,
                move.origin,
                move.target,
                move.reason,
                move.worst_ms,
                made.topics.bound_ms[move.row],
                move.expected_ms,
            )
            for move in made.moves[:SHOWN_MOVES]
        ]
        if rows:
            columns = ("topic", "from", "to", "because of", "worst ms", "bound ms", "expected ms")
            self._progress.table(f"first {len(rows)} of {len(made.moves):,} moves", columns, [tuple(row) for row in rows])


def _result(made: Plan, totals: Totals) -> dict[str, object]:
    return {
        "brokers": len(made.fleet),
        "overloaded": int(made.overloaded.sum()),
        **msgspec.to_builtins(totals),
        "looked_at": len(made.topics),
        "moves": len(made.moves),
    }
