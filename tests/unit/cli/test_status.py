"""``nearcast status`` and its relatives: what is shown is safe to show."""

from __future__ import annotations

import socketserver
import threading
from pathlib import Path

import pytest
from rich.console import Console

from nearcast.cli.controller_client import ControllerClient, quoted
from nearcast.cli.main import main
from nearcast.cli.status import _clients_table
from nearcast.cli.tables import counted, plain, span
from nearcast.errors import ConfigError, NearcastError


def test_names_cannot_steer_a_terminal() -> None:
    assert plain("evil\x1b[2Jclient\n").plain == "evil\\x1b[2Jclient\\n"
    console = Console(width=120, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    client = {"client": "[red]c\x1b[0m", "username": None, "gateway": None, "broker": "b", "connected_since": 0.0}
    console.print(_clients_table([client]))
    shown = console.export_text()
    console.file.close()
    assert "[red]c\\x1b[0m" in shown


def test_names_are_safe_in_a_path() -> None:
    assert quoted("a/b c?d#e") == "a%2Fb%20c%3Fd%23e"


def test_spans_are_readable() -> None:
    assert [span(seconds) for seconds in (None, 3.2, 119, 600, 8_000)] == ["-", "3 s", "119 s", "10 min", "2 h"]


def test_one_is_not_many() -> None:
    assert [counted(number, "client") for number in (0, 1, 1_200)] == ["0 clients", "1 client", "1,200 clients"]


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status", "--moves", "20000"], "--moves"),
        (["nodes", "--role", "toaster"], "use broker or gateway"),
        (["move", "b"], "--client NAME or --gateway NAME"),
        (["drain", "b", "--rate", "nan"], "--rate must be above 0"),
        (["drain", "b", "--rate", "inf"], "--rate must be above 0"),
        (["drain", "b", "--stop", "--wait", "3"], "--stop goes alone"),
        (["class", "--remove"], "--remove takes the topics"),
        (["class", "a/#", "local", "--remove"], "--remove takes the topics"),
        (["class", "a/#"], "say which class"),
    ],
)
def test_wrong_usage_is_told_before_anybody_is_asked(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main([*arguments, "--api", "http://127.0.0.1:1"])
    assert exit_code.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_what_is_no_controller_is_not_quoted(tmp_path: Path) -> None:
    """Whatever answers there may send anything; a terminal does not get it."""

    class Speaker(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(b"\x1b[2J\x00\x07 nearcast link\r\n\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Speaker) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        token = tmp_path / "token"
        token.write_text("0123456789abcdef")
        client = ControllerClient(f"http://127.0.0.1:{server.server_address[1]}", None, str(token))
        with pytest.raises(NearcastError, match=r"is no controller; --api says where it is$"):
            client.get("/status")
