"""Spark sessions: local and light by default, quiet, with one log file each, and gone without a trace when they end.

The settings are in :mod:`nearcast.pipeline.settings`, the search for Java in :mod:`nearcast.pipeline.java`. A process has one
session at a time (Spark's own rule).
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearcast.errors import PipelineError
from nearcast.pipeline import gateway as gateways
from nearcast.pipeline.java import ensure_java
from nearcast.pipeline.settings import JAVA_OPTIONS, effective, is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = "local[*]"
_STOP_SECONDS = 30.0

_LOGGING = """\
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = File
appender.file.name = file
appender.file.fileName = {file}
appender.file.append = true
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{yyyy-MM-dd'T'HH:mm:ss.SSS'Z'}}{{UTC}} %-5p %c{{1}}: %m%n%ex
status = error
"""


def require_pyspark() -> None:
    """A clear line where the extra is missing."""
    for package in ("pyspark", "pyarrow", "pandas"):
        if importlib.util.find_spec(package) is None:
            raise PipelineError(f"this needs Spark, and {package} is missing: pip install 'nearcast[pipeline]'")
    import pyspark

    if int(pyspark.__version__.partition(".")[0]) < 4:
        found = f"pyspark {pyspark.__version__}"
        raise PipelineError(f"this needs Spark 4.3, and {found} is installed: pip install 'nearcast[pipeline]'")


def build_session(
    app_name: str,
    master: str = LOCAL,
    *,
    java_home: str | None = None,
    cache_directory: Path | None = None,
    log_file: Path | None = None,
    settings: Mapping[str, str] | None = None,
    **overrides: str,
) -> SparkSession:
    """A session with ours and these ``settings`` of Spark, by their keys: ``{"spark.driver.memory": "4g"}``, or as keywords.

    Warnings and errors of Spark and what Python workers print go to ``log_file`` (default: a file that goes with the session).
    Stop it with :func:`stop_session`, which also ends the JVM; the end of the process does the same.
    """
    require_pyspark()
    from pyspark import SparkConf, SparkContext
    from pyspark.logger import PySparkLogger
    from pyspark.sql import SparkSession

    java = ensure_java(java_home, cache_directory=cache_directory)
    if SparkContext._active_spark_context is not None:
        raise PipelineError("this process has a Spark session already: stop it first (nearcast.pipeline.session.stop_session)")
    directory = Path(tempfile.mkdtemp(prefix="nearcast-spark-"))
    try:
        log_file = (log_file or directory / "spark.log").absolute()
        log_settings = directory / "log4j2.properties"
        log_settings.write_text(_LOGGING.format(file=log_file))
        conf = effective(master, {**(settings or {}), **overrides})
        executor_python = conf.setdefault("spark.pyspark.python", sys.executable)
        conf.setdefault("spark.sql.warehouse.dir", str(directory / "warehouse"))
        java_options = [*JAVA_OPTIONS, f"-Dlog4j2.configurationFile={log_settings.as_uri()}"]
        if given := conf.get("spark.driver.extraJavaOptions"):
            java_options.append(given)
        conf |= {
            "spark.master": master,
            "spark.app.name": app_name,
            "spark.driver.extraJavaOptions": " ".join(java_options),
        }
        _end_jvm()
        gateway = gateways.start_gateway(
            conf, java_home=java.home, executor_python=executor_python, log_file=log_file, loopback=is_local(master)
        )
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    try:
        context = SparkContext(conf=SparkConf().setAll(list(conf.items())), gateway=gateway)
        # PySpark would take it from the environment.
        context.pythonExec = executor_python
        session = SparkSession(context)
        if is_local(master):
            _without_checksum_files(session)
    except BaseException:
        _end_jvm()
        shutil.rmtree(directory, ignore_errors=True)
        raise
    if not is_local(master):
        from nearcast.pipeline.cluster import ship_package

        ship_package(context, directory)
    logging.getLogger().addFilter(_not_of_py4j)
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        # They would print the errors that are raised, as JSON with all of Java's stack.
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)
    _directories[id(context)] = directory
    atexit.register(stop_session, session)
    return session


def _without_checksum_files(session: SparkSession) -> None:
    """No .crc file beside every file of checkpoints and results: disks check themselves, and each costs a micro-batch time.

    Naming RawLocalFileSystem in the settings would do the same, but RocksDB's state store (transformWithState) casts what it
    gets to LocalFileSystem, and fails.
    """
    jvm: Any = session._jvm
    jvm.org.apache.hadoop.fs.FileSystem.getLocal(session._jsc.hadoopConfiguration()).setWriteChecksum(False)


def _not_of_py4j(record: logging.LogRecord) -> bool:
    """py4j tells the root logger about every connection that ends with a JVM, stack included; what matters of it is raised."""
    return "py4j" not in Path(record.pathname).parts


_directories: dict[int, Path] = {}
"""Temporary files of the sessions that :func:`build_session` made, by the identity of their context."""


def stop_session(session: SparkSession) -> None:
    """Stop a session, its JVM and its temporary files; nothing happens if it is stopped already."""
    atexit.unregister(stop_session)
    context = session.sparkContext
    directory = _directories.pop(id(context), None)
    if directory is None:
        return
    # In a thread, for a JVM that hangs does not answer; it is ended below in any case.
    stopping = threading.Thread(target=_stop, args=(session,), name="stopping", daemon=True)
    stopping.start()
    try:
        stopping.join(_STOP_SECONDS)
    finally:
        _end_jvm()
        shutil.rmtree(directory, ignore_errors=True)


def _stop(session: SparkSession) -> None:
    try:
        session.stop()
    except Exception:  # noqa: BLE001, S110  # a JVM that died cannot be asked
        pass


def _end_jvm() -> None:
    """End the JVM of an earlier session, so that the next one starts with its own settings, memory among them."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    if gateway is not None:
        gateways.end_gateway(gateway)
