"""What docs/concepts/network-model.md shows in Python is what Python says."""

from __future__ import annotations

import doctest
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "concepts" / "network-model.md"


def test_the_page_of_the_network_model() -> None:
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried > 5
    assert failed == 0
