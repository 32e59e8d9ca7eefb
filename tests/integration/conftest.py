"""Shows the logs of the brokers that were running when a test failed, and spares their processes the compiler."""

from __future__ import annotations

import os
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


@pytest.fixture(scope="session", autouse=True)
def bytecode_is_kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where Python may not write bytecode beside the sources, every process compiles all of them, which takes most of its
    start: processes that these tests start share a directory for it instead."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("PYTHONDONTWRITEBYTECODE"):
            patch.delenv("PYTHONDONTWRITEBYTECODE")
            patch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.mktemp("bytecode")))
        yield
