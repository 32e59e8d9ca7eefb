"""What a user sees of wrong options: one line, no traceback."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from nearcast.bench.commands import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["load", "--url", "http://x"], "mqtt://127.0.0.1:1883 is needed"),
        (["load", "--url", "mqtt://127.0.0.1:1"], "cannot connect to 127.0.0.1:1"),
        (["load", "--pattern", "pairs", "--publishers", "2"], "as many publishers as subscribers"),
        (["load", "--self-test", "--pattern", "fanout"], "one-to-one or pairs"),
        (["compare", "--only", "nothing"], "no scenario is called nothing"),
        (["compare", "--brokers", "nobody"], "no broker is called nobody"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output
