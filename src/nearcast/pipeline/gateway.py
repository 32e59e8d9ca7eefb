"""The JVM that Spark's driver lives in: started, connected to, and ended, without leaving one behind.

PySpark would start it too, but out of the environment: with the Java, the Python and the Spark that happen to be named there,
with its messages on our terminal, and with nothing to end it by. Here all of that is given, the messages go to a log file, and
the process is ours. It runs in a session of its own, so that a terminal's Ctrl-C reaches Python alone, which then ends things
in order; and it watches its standard input, so that it ends when Python is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nearcast.errors import PipelineError

if TYPE_CHECKING:
    from py4j.clientserver import ClientServer

_POLL_SECONDS = 0.05
_START_SECONDS = 120.0
_END_SECONDS = 10.0


def spark_home() -> Path:
    """The Spark that belongs to the installed ``pyspark``: another one, as SPARK_HOME may name, would not fit it."""
    import pyspark

    package = Path(pyspark.__file__).parent
    return package if (package / "jars").is_dir() else package.parent.parent


def start_gateway(
    conf: Mapping[str, str], *, java_home: Path, executor_python: str, log_file: Path, loopback: bool
) -> ClientServer:
    """Start a JVM with these settings and connect to it; ``loopback`` keeps it off the network. ``proc`` is its process."""
    from py4j.clientserver import ClientServer, JavaParameters, PythonParameters
    from py4j.java_gateway import java_import

    exchange = Path(tempfile.mkdtemp(prefix="nearcast-gateway-"))
    answer = exchange / "connection"
    home = spark_home()
    variables = {
        "JAVA_HOME": str(java_home),
        "SPARK_HOME": str(home),
        "SPARK_CONNECT_MODE": "0",
        "PYSPARK_PYTHON": executor_python,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "_PYSPARK_DRIVER_CONN_INFO_PATH": str(answer),
    }
    if loopback:
        variables["SPARK_LOCAL_IP"] = "127.0.0.1"
    # env(1) adds to the environment that the child inherits; this module does not read it.
    command = ["/usr/bin/env", *(f"{name}={value}" for name, value in variables.items()), str(home / "bin" / "spark-submit")]
    for key, value in conf.items():
        command += ["--conf", f"{key}={value}"]
    command.append("pyspark-shell")
    process: subprocess.Popen[bytes] | None = None
    try:
        with log_file.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603  # Spark's own script
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        port, secret = _connection(process, answer, log_file)
    except BaseException:
        if process is not None:
            end_process(process)
        raise
    finally:
        shutil.rmtree(exchange, ignore_errors=True)
    gateway = ClientServer(
        java_parameters=JavaParameters(port=port, auth_token=secret, auto_convert=True),
        python_parameters=PythonParameters(port=0, eager_load=False),
    )
    gateway.proc = process
    for name in _IMPORTS:
        java_import(gateway.jvm, name)
    return gateway


_IMPORTS = (
    "org.apache.spark.SparkConf",
    "org.apache.spark.api.java.*",
    "org.apache.spark.api.python.*",
    "org.apache.spark.ml.python.*",
    "org.apache.spark.mllib.api.python.*",
    "org.apache.spark.resource.*",
    "org.apache.spark.sql.Encoders",
    "org.apache.spark.sql.OnSuccessCall",
    "org.apache.spark.sql.functions",
    "org.apache.spark.sql.classic.*",
    "org.apache.spark.sql.api.python.*",
    "org.apache.spark.sql.hive.*",
    "scala.Tuple2",
)
"""Classes that PySpark's Python code names without their package."""


def _connection(process: subprocess.Popen[bytes], answer: Path, log_file: Path) -> tuple[int, str]:
    """Port and secret, once the JVM has written them: a 4-byte port, a 4-byte length, the secret."""
    deadline = time.monotonic() + _START_SECONDS
    while not answer.exists():
        if process.poll() is not None:
            raise PipelineError(f"Spark's Java did not start: {_last_words(log_file)} (log: {log_file})")
        if time.monotonic() > deadline:
            raise PipelineError(f"Spark's Java did not start within {_START_SECONDS:.0f} s (log: {log_file})")
        time.sleep(_POLL_SECONDS)
    # The JVM renames the file into place, so it is whole.
    data = answer.read_bytes()
    return int.from_bytes(data[:4], "big"), data[8:].decode()


def _last_words(log_file: Path) -> str:
    """The line of the log that says most about why a JVM ended at once."""
    try:
        lines = [line.strip() for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return "it says nothing"
    for line in lines:
        if line.startswith("Error: Could not create the Java Virtual Machine"):
            continue
        if "rror" in line or "xception" in line or "Invalid" in line:
            return line
    return lines[-1] if lines else "it says nothing"


def end_gateway(gateway: ClientServer) -> None:
    """End the connection and the JVM."""
    try:
        gateway.shutdown()
    except Exception:  # noqa: BLE001, S110  # py4j raises what its sockets raise; the process is ended below in any case
        pass
    process = getattr(gateway, "proc", None)
    if isinstance(process, subprocess.Popen):
        end_process(process)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a JVM that :func:`start_gateway` started: closing its standard input is enough, unless it hangs."""
    if process.stdin is not None:
        try:
            process.stdin.close()
        except OSError:
            pass
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
