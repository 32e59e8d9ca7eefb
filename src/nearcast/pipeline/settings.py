"""The Spark settings of every Nearcast job: the one place where they are, each with its reason.

The table in docs/guides/pipelines.md is made from here (``scripts/pipeline_settings.py``), and a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DRIVER_MEMORY = "2g"


@dataclass(frozen=True)
class Setting:
    """One setting, why it is set, and where: everywhere, or only where driver and executors are one process."""

    key: str
    value: str
    why: str
    local_only: bool = False


SETTINGS = (
    Setting("spark.ui.enabled", "false", "Saves a web server, its port and its threads; progress is in the terminal."),
    Setting("spark.ui.showConsoleProgress", "false", "Spark's bar would write into ours."),
    Setting("spark.driver.memory", DRIVER_MEMORY, "The JVM's heap; in local mode all work happens in it. `--driver-memory`."),
    Setting("spark.driver.host", "127.0.0.1", "Nothing listens beyond this machine, whatever its name resolves to.", True),
    Setting("spark.driver.bindAddress", "127.0.0.1", "The same for the listening sockets.", True),
    Setting(
        "spark.sql.shuffle.partitions",
        "4",
        "200 is made for clusters: each partition costs a task, and each stateful one files in every micro-batch.",
        True,
    ),
    Setting("spark.sql.session.timeZone", "UTC", "Topic times are UTC; results do not depend on where a job runs."),
    Setting("spark.sql.execution.arrow.pyspark.enabled", "true", "Rows pass between Spark and Python as Arrow batches."),
    Setting(
        "spark.sql.python.filterPushdown.enabled",
        "true",
        "Filters on topic, index and time reach the broker; off by default in Spark 4.",
    ),
    Setting(
        "spark.sql.streaming.checkpointFileManagerClass",
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager",
        "Checkpoints by plain files and renames: a third less time per micro-batch on a local disk.",
        True,
    ),
    Setting(
        "spark.sql.streaming.checkpoint.fileChecksum.enabled",
        "false",
        "No checksum file beside every file. Given up: Spark noticing that two queries share a checkpoint.",
        True,
    ),
)

JAVA_OPTIONS = ("-XX:+UseSerialGC",)
"""Options of the driver's JVM: the collector with the least memory and threads for heaps of a few gigabytes."""


def is_local(master: str) -> bool:
    """Whether driver and executors are one process."""
    return master == "local" or master.startswith("local[")


def effective(master: str, overrides: Mapping[str, str]) -> dict[str, str]:
    """The settings for this master; what the caller gives wins."""
    settings = {each.key: each.value for each in SETTINGS if is_local(master) or not each.local_only}
    return settings | dict(overrides)
