"""The settings of sessions, and that the guide shows them."""

from __future__ import annotations

from pathlib import Path

from nearcast.pipeline.settings import SETTINGS, effective, is_local
from scripts.pipeline_settings import BEGIN, END, table

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "pipelines.md"


def test_what_counts_where() -> None:
    assert is_local("local")
    assert is_local("local[2]")
    assert is_local("local[*]")
    assert not is_local("spark://host:7077")
    assert not is_local("local-cluster[2,1,1024]")


def test_a_cluster_gets_what_is_not_for_one_machine() -> None:
    local, cluster = effective("local[2]", {}), effective("spark://host:7077", {})
    assert set(local) - set(cluster) == {each.key for each in SETTINGS if each.local_only}
    assert "spark.driver.host" not in cluster
    assert "spark.sql.shuffle.partitions" not in cluster


def test_what_is_given_wins() -> None:
    assert effective("local[2]", {"spark.driver.memory": "4g", "own": "x"})["spark.driver.memory"] == "4g"
    assert effective("local[2]", {"own": "x"})["own"] == "x"


def test_every_setting_has_a_reason_and_is_named_once() -> None:
    assert all(each.why for each in SETTINGS)
    assert len({each.key for each in SETTINGS}) == len(SETTINGS)


def test_the_guide_shows_these_settings() -> None:
    text = GUIDE.read_text()
    shown = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()
    assert shown == table().strip(), "run scripts/pipeline_settings.py"
