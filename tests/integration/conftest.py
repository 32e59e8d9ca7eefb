"""Shows the logs of the brokers that were running when a test failed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import brokers

SHOWN_CHARACTERS = 6_000


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report: pytest.TestReport = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed:
        for broker in brokers.running:
            report.sections.append((f"log of the broker in {broker.directory}", broker.log()[-SHOWN_CHARACTERS:]))
