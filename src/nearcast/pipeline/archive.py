"""Stream topics to Parquet, partitioned by topic and date, each record exactly once; small files are put together.

The job reads topics as a stream and adds every micro-batch to a directory (:mod:`nearcast.pipeline.archive_files` says how,
and why a crash at any point loses and doubles nothing). Run it all the time, or now and then with ``--available-now``;
``--compact`` only tidies up. :func:`read_archive` reads it back.

Files have the columns of the source. The directories are called ``topic_key=...`` after the topic, escaped where a directory
cannot have its name and cut off where it is too long; ``date=...`` (and ``hour=...``) after the time at the broker, in UTC.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec

from nearcast.errors import PipelineError
from nearcast.pipeline.archive_files import CHECKPOINT, Archive, Gap
from nearcast.pipeline.options import parse_read
from nearcast.pipeline.queries import await_queries
from nearcast.pipeline.user_jobs import DEFAULT_URL, connection_options

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from nearcast.pipeline.progress import Progress

MEBIBYTE = 1_048_576
ROWS_PER_TASK = 250_000
"""Records of one topic beyond this are written by several tasks."""

PLAIN_TOPIC = "^[ -$&-~]{1,70}$"
"""Topics that name their directory themselves: printable ASCII without %, short enough when Spark escapes all of it."""

MAX_ENCODED_CHARACTERS = 120
PREFIX_CHARACTERS = 80


class Options(msgspec.Struct, frozen=True, kw_only=True):
    topics: Annotated[
        tuple[str, ...],
        msgspec.Meta(description="Topics to archive: MQTT filters.", extra={"argument": True, "metavar": "FILTER..."}),
    ] = ()
    url: Annotated[str, msgspec.Meta(description="The broker's bulk port.", extra={"metavar": "URL"})] = DEFAULT_URL
    username: Annotated[str | None, msgspec.Meta(description="Who we are, for the broker.", extra={"metavar": "NAME"})] = None
    password_file: Annotated[
        str | None, msgspec.Meta(description="A file whose first line is the password.", extra={"metavar": "FILE"})
    ] = None
    ca_file: Annotated[str | None, msgspec.Meta(description="Certificates to trust, PEM.", extra={"metavar": "FILE"})] = None
    certificate_file: Annotated[str | None, msgspec.Meta(description="Our own, PEM.", extra={"metavar": "FILE"})] = None
    key_file: Annotated[str | None, msgspec.Meta(description="Its private key, PEM.", extra={"metavar": "FILE"})] = None
    out: Annotated[str, msgspec.Meta(description="Directory of the archive.", extra={"metavar": "DIR", "short": "o"})]
    available_now: Annotated[
        bool, msgspec.Meta(description="Archive what is there and end: for cron. Otherwise the job goes on.")
    ] = False
    hourly: Annotated[bool, msgspec.Meta(description="Directories by hour too; for topics with many records.")] = False
    compact: Annotated[bool, msgspec.Meta(description="Only put small files together.")] = False
    compact_every: Annotated[
        Annotated[int, msgspec.Meta(ge=0)],
        msgspec.Meta(description="Put small files together after so many micro-batches; 0: never.", extra={"metavar": "N"}),
    ] = 60
    compact_files: Annotated[
        Annotated[int, msgspec.Meta(ge=2)],
        msgspec.Meta(description="Leave directories with fewer small files alone.", extra={"metavar": "N"}),
    ] = 8
    file_mebibytes: Annotated[
        Annotated[int, msgspec.Meta(ge=1)],
        msgspec.Meta(description="Size up to which small files are put together.", extra={"metavar": "MIB"}),
    ] = 128
    trigger_seconds: Annotated[
        Annotated[float, msgspec.Meta(ge=0)],
        msgspec.Meta(description="A micro-batch every so often: fewer and larger files, later.", extra={"metavar": "SECONDS"}),
    ] = 10.0
    max_records: Annotated[
        Annotated[int, msgspec.Meta(ge=1)],
        msgspec.Meta(
            description="Most records of one micro-batch: bounds memory and what a crash repeats.", extra={"metavar": "N"}
        ),
    ] = 5_000_000
    max_mebibytes: Annotated[
        Annotated[int, msgspec.Meta(ge=1)],
        msgspec.Meta(description="The same in MiB, by the average record of each topic.", extra={"metavar": "MIB"}),
    ] = 1_024
    fail_on_gap: Annotated[
        bool,
        msgspec.Meta(
            description="End when records are gone before they were archived; otherwise they are noted in _gaps.jsonl."
        ),
    ] = False


def check(options: Options) -> None:
    """Refuse what cannot work before a JVM is started."""
    output_directory(options.out)
    if options.compact:
        if not Path(options.out).is_dir():
            raise PipelineError(f"{options.out} is no directory: there is nothing to compact")
        return
    if not options.topics:
        raise PipelineError('say which topics to archive: nearcast pipeline run archive "sensors/#" --out DIR')
    parse_read(_source_options(options), streaming=True)


def output_directory(text: str) -> Path:
    """The directory, which the driver and all executors have to share as files."""
    parts = urlsplit(text)
    if parts.scheme == "file":
        return Path(parts.path)
    if "://" in text:
        raise PipelineError(f"--out {text}: an archive is a directory of files, local or mounted; {parts.scheme}:// is not")
    return Path(text).absolute()


def run(spark: SparkSession, options: Options, progress: Progress) -> Mapping[str, object]:
    """Run until stopped, or until what is there is archived."""
    with Archive(output_directory(options.out)) as archive:
        if options.compact:
            progress.step("compacting")
            return {"files saved": compact(archive, options, progress)}
        progress.step(f"archiving {', '.join(options.topics)}")
        filling = Filling(archive, options, progress)
        rows_before = archive.state.rows if archive.state is not None else 0
        stream = spark.readStream.format("nearcast").options(**_source_options(options)).load()
        writer = stream.writeStream.queryName("archive").option("checkpointLocation", str(archive.directory / CHECKPOINT))
        if options.available_now:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{options.trigger_seconds} seconds")
        writer.foreachBatch(filling.batch).start()
        await_queries(spark)
        rows = (archive.state.rows if archive.state is not None else 0) - rows_before
        return {"records": rows, "gaps": filling.gaps, "files saved": filling.saved, "archive": str(archive.directory)}


class Filling:
    """Adds micro-batches to an archive."""

    def __init__(self, archive: Archive, options: Options, progress: Progress) -> None:
        self._archive = archive
        self._options = options
        self._progress = progress
        self._since_compaction = 0
        self.gaps = 0
        self.saved = 0

    def batch(self, rows: DataFrame, number: int) -> None:
        """One micro-batch; Spark repeats it after a crash with the same number."""
        query = rows.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        self._archive.begin(str(query))
        if self._archive.is_in(number):
            self._require_known(rows, number)
            return
        write_partitioned(rows, self._archive.work_directory(number), hourly=self._options.hourly)
        for gap in self._archive.add(number):
            self.gaps += 1
            self._progress.note(describe(gap))
        self._since_compaction += 1
        if self._options.compact_every and self._since_compaction >= self._options.compact_every:
            self._since_compaction = 0
            self.saved += compact(self._archive, self._options, self._progress)

    def _require_known(self, rows: DataFrame, number: int) -> None:
        """A batch that is repeated is the same, unless the checkpoint lost it: Spark does not flush what it writes there, and
        after a power cut makes another batch of the same number, which must not be passed over."""
        from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention

        known = self._archive.state.next_indexes if self._archive.state is not None else {}
        for row in rows.groupBy("topic").agg(F.max("index").alias("last")).collect():
            if row.last >= known.get(row.topic, 1):
                raise PipelineError(
                    f"the checkpoint in {self._archive.directory / CHECKPOINT} lost batch {number} (a power cut, or an older "
                    f"copy): record {row.last} of {row.topic!r} would be left out. Begin a new archive in another directory"
                )


def describe(gap: Gap) -> str:
    """A gap in words."""
    count = gap.next_index - gap.first_index
    removed = "was removed" if count == 1 else "were removed"
    return f"{gap.topic}: {count:,} records from index {gap.first_index} on {removed} before they were archived"


def write_partitioned(rows: DataFrame, directory: Path, *, hourly: bool) -> None:
    """Write rows in the archive's layout; one file per directory, more for topics with very many records."""
    from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention

    keys = ["topic_key", "date", "hour"] if hourly else ["topic_key", "date"]
    keyed = rows.withColumn("topic_key", topic_key(F.col("topic"))).withColumn("date", F.to_date("time"))
    if hourly:
        keyed = keyed.withColumn("hour", F.date_format("time", "HH"))
    spread = keyed.repartition(*keys, F.floor(F.col("index") / ROWS_PER_TASK))
    # Of this micro-batch's own session. Spark's default, INT96, has no statistics, and other readers take it for nanoseconds.
    rows.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    ordered = spread.sortWithinPartitions(*keys, "topic", "index")
    ordered.write.partitionBy(*keys).option("compression", "zstd").parquet(str(directory))


def topic_key(topic: Column) -> Column:
    """A directory's name for a topic: different for different topics, ASCII, and short enough for any file system.

    Most topics are their own; Spark escapes what a path cannot have (``/`` as %2F) and undoes it when reading.
    """
    from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention

    encoded = F.url_encode(topic)
    cut = F.concat(F.substring(encoded, 1, PREFIX_CHARACTERS), F.lit("~"), F.sha2(topic, 256))
    return F.when(topic.rlike(PLAIN_TOPIC), topic).when(F.length(encoded) <= MAX_ENCODED_CHARACTERS, encoded).otherwise(cut)


def compact(archive: Archive, options: Options, progress: Progress) -> int:
    """Put small files together in all directories; how many files that saved."""
    partitions = list(archive.partitions())
    saved = 0
    for number, partition in enumerate(partitions):
        saved += archive.compact(partition, min_files=options.compact_files, target_bytes=options.file_mebibytes * MEBIBYTE)
        progress.advance((number + 1) / len(partitions))
    return saved


def read_archive(spark: SparkSession, directory: str | Path) -> DataFrame:
    """The records of an archive, with the columns of the source and ``date`` (and ``hour``, if there are any).

    Filters on ``topic_key`` and ``date`` only open the directories they name.
    """
    from pyspark.sql import types

    from nearcast.pipeline.source import SCHEMA

    fields = [*SCHEMA.fields, types.StructField("topic_key", types.StringType()), types.StructField("date", types.DateType())]
    if next(Path(directory).glob("topic_key=*/date=*/hour=*"), None) is not None:
        fields.append(types.StructField("hour", types.StringType()))
    return spark.read.schema(types.StructType(fields)).parquet(str(directory))


def _source_options(options: Options) -> dict[str, str]:
    return {
        **connection_options(options),
        "topics": msgspec.json.encode(list(options.topics)).decode(),
        "startingOffsets": "earliest",
        "maxRecordsPerTrigger": str(options.max_records),
        "maxBytesPerTrigger": f"{options.max_mebibytes}m",
        "failOnDataLoss": str(options.fail_on_gap).lower(),
    }
