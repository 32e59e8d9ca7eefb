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


def programs() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for number, text in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE), 1):
            found.append((f"{page.stem}-{number}", text))
    return found


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NearcastBroker]:
    with nearcast_broker(tmp_path_factory) as running:
        yield running


@pytest.mark.parametrize("program", [text for _, text in programs()], ids=[name for name, _ in programs()])
def test_program_runs(broker: NearcastBroker, program: str) -> None:
    assert DOCUMENTED_URL in program
    command = [sys.executable, "-W", "error", "-c", program.replace(DOCUMENTED_URL, broker.url)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout
