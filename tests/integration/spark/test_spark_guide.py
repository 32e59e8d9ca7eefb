"""The programs of the guide to reading with Spark run as they stand, in the order of the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from nearcast.client.blocking_topics import BlockingTopics
from nearcast.pipeline.options import READ_OPTIONS
from nearcast.pipeline.source import SCHEMA, NearcastDataSource
from tests.integration.spark.conftest import LogBroker

pytestmark = pytest.mark.integration

PAGE = Path(__file__).resolve().parents[3] / "docs/guides/spark.md"
DOCUMENTED_URL = "nearcast://127.0.0.1:7883"


def test_the_programs_run(
    spark: SparkSession, log_broker: LogBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with BlockingTopics(log_broker.bulk_url) as topics:
        topics.publish_many("sensors/a", [str(number) for number in range(1, 21)])
        topics.publish("sensors/b", "1")
    # A process has one session: the page's is the one of all tests.
    monkeypatch.setattr("nearcast.pipeline.session.build_session", lambda name: spark)
    names: dict[str, object] = {}
    for program in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(program.replace(DOCUMENTED_URL, log_broker.bulk_url), names)  # noqa: S102 - our own page
    shown = capsys.readouterr().out
    assert "|sensors/a|   20|" in shown
    assert "|sensors/b|    1|" in shown


def test_all_options_and_columns_are_on_the_page_and_in_the_docstring() -> None:
    page = PAGE.read_text()
    docstring = NearcastDataSource.__doc__ or ""
    for name in [*READ_OPTIONS, *SCHEMA.names]:
        if name != "path":
            assert f"`{name}`" in page, name
            assert name in docstring, name
