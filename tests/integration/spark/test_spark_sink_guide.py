"""The programs of the guide to writing with Spark run as they stand, in the order of the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from nearcast.pipeline import sink
from nearcast.pipeline.sink_rows import COLUMNS
from tests.integration.spark.conftest import LogBroker
from tests.integration.spark.publishing import contents

pytestmark = pytest.mark.integration

PAGE = Path(__file__).resolve().parents[3] / "docs/guides/spark-sink.md"
DOCUMENTED_URL = "nearcast://127.0.0.1:7883"


def test_the_programs_run(
    spark: SparkSession,
    log_broker: LogBroker,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    # A process has one session: the page's is the one of all tests.
    monkeypatch.setattr("nearcast.pipeline.session.build_session", lambda name: spark)
    page = PAGE.read_text().replace(DOCUMENTED_URL, log_broker.bulk_url).replace('"/data/', f'"{tmp_path}/')
    names: dict[str, object] = {}
    for program in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(program, names)  # noqa: S102 - our own page
    assert contents(log_broker, "forecasts/kitchen") == [{"celsius": 21.5}, {"celsius": 21.5}], "written, and once by name"
    assert len(contents(log_broker, "copies/forecasts/+")) == 4
    assert "|forecasts/kitchen|   21.5|" in capsys.readouterr().out


def test_all_options_and_columns_are_on_the_page_and_in_the_docstring() -> None:
    page = PAGE.read_text()
    docstring = sink.__doc__ or ""
    for name in [*sink.WRITE_OPTIONS, *COLUMNS]:
        if name != "path":
            assert f"`{name}`" in page, name
            assert name in docstring, name
