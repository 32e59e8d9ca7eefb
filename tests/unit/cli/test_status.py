"""``nearcast status`` and its relatives: what is shown is safe to show."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from nearcast.cli.controller_client import ControllerClient, quoted
from nearcast.cli.status import _clients_table, _plain, _span
from nearcast.errors import ConfigError


def test_names_cannot_steer_a_terminal() -> None:
    assert _plain("evil\x1b[2Jclient\n").plain == "evil\\x1b[2Jclient\\n"
    console = Console(width=120, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    client = {"client": "[red]c\x1b[0m", "username": None, "gateway": None, "broker": "b", "connected_since": 0.0}
    console.print(_clients_table([client]))
    shown = console.export_text()
    console.file.close()
    assert "[red]c\\x1b[0m" in shown


def test_names_are_safe_in_a_path() -> None:
    assert quoted("a/b c?d#e") == "a%2Fb%20c%3Fd%23e"


def test_spans_are_readable() -> None:
    assert [_span(seconds) for seconds in (None, 3.2, 119, 600, 8_000)] == ["-", "3 s", "119 s", "10 min", "2 h"]


def test_a_token_is_asked_for_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEARCAST_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="--fabric-secret FILE"):
        ControllerClient("http://127.0.0.1:1", None, None)
    with pytest.raises(ConfigError, match="cannot read the token"):
        ControllerClient("http://127.0.0.1:1", None, str(tmp_path / "none"))
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match="no token in the file"):
        ControllerClient("http://127.0.0.1:1", None, str(empty))
    with pytest.raises(ConfigError, match="write http://HOST:PORT"):
        ControllerClient("ftp://127.0.0.1", None, None)
