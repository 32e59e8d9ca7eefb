"""The formation study on a real Spark: its function on workers, and the whole of it as a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from nearcast.experiments.groups_runs import form
from nearcast.pipeline.sweep import sweep

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_workers_find_what_one_process_does(spark: SparkSession, tmp_path: Path) -> None:
    frame = sweep(spark, form, {"brokers": [40], "threshold_ms": [0.0, 50.0]}, [7], tmp_path / "out")
    rows = {row.threshold_ms: row.asDict() for row in frame.collect()}
    assert rows[0.0]["groups"] == 40
    here = form({"brokers": 40, "threshold_ms": 50.0}, 7)
    assert {name: rows[50.0][name] for name in here if name != "cpu_s"} == {
        name: value for name, value in here.items() if name != "cpu_s"
    }


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "nearcast", "experiment", "groups", "--json", "--out", str(out)]
    for setting in ("brokers=30,60,90", "thresholds_ms=0,50,100", "timed_brokers=50", "changed_brokers=50"):
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    outcome = json.loads(done.stdout)
    assert outcome["complete"], done.stderr
    bars = {bar["name"]: bar for bar in outcome["bars"]}
    assert bars["runs"]["ok"], done.stderr
    assert bars["timed_run_s"]["value"] > 0
    assert set(bars) == {
        "runs",
        "timed_run_s",
        "change_joins_share",
        "operations_linear_r2",
        "messages_linear_r2",
        "operations_exponent",
        "notifications_per_member_join",
        "groups_exponent",
    }
    assert (out / "sweep" / "results.parquet").is_file()
    assert (out / "plots" / "tradeoff.png").is_file()
