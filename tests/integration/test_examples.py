"""The Python programs in the documentation run as they stand, against a real broker."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.brokers import NearcastBroker, nearcast_broker

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTED_URL = "mqtt://127.0.0.1:1883"
DOCUMENTED_BULK_URL = "nearcast://127.0.0.1:7883"

RUN_ELSEWHERE = {
    "simulating": "tests/simulation/test_guide.py",
    "spark": "tests/integration/spark/test_spark_guide.py",
    "spark-sink": "tests/integration/spark/test_spark_sink_guide.py",
}
"""Pages whose programs need no broker, or Spark, and what runs them."""


def programs() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        if page.stem in RUN_ELSEWHERE:
            continue
        for number, text in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE), 1):
            # Others need what is not on any page; their own tests have it.
            topics_alone = DOCUMENTED_BULK_URL in text and "spark" not in text.lower()
            if DOCUMENTED_URL in text or topics_alone or any(name in text for name in files()):
                found.append((f"{page.stem}-{number}", text))
    return found


def files() -> dict[str, str]:
    """The files that pages show and programs on them may open: TOML blocks that begin with ``# name.toml``."""
    found = {}
    for page in PAGES:
        if page.stem in RUN_ELSEWHERE:
            continue
        for text in re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            named = re.match(r"# ([\w-]+\.toml)\n", text)
            if named is not None:
                found[named.group(1)] = text
    return found


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NearcastBroker]:
    with nearcast_broker(tmp_path_factory, data=True) as running:
        yield running


@pytest.mark.parametrize("program", [text for _, text in programs()], ids=[name for name, _ in programs()])
def test_program_runs(broker: NearcastBroker, program: str, tmp_path: Path) -> None:
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    program = program.replace(DOCUMENTED_URL, broker.url).replace(DOCUMENTED_BULK_URL, broker.bulk_url)
    command = [sys.executable, "-W", "error", "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout
