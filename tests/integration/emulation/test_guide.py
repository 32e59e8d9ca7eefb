"""Every command of the guide works, in its order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from nearcast.emulation import namespaces
from tests.integration.emulation.wans import marked_wan, wait_until

pytestmark = pytest.mark.integration

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "emulating.md"


def commands() -> list[list[str]]:
    """The ``nearcast wan`` commands of all console blocks, without ``nearcast wan``."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE):
        for line in re.findall(r"^\$ (?:sudo )?nearcast wan (.*)$", block, re.MULTILINE):
            found.append(shlex.split(line))
    return found


def test_the_commands_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in re.findall(r"^```toml\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE):
        (tmp_path / text.partition("\n")[0].removeprefix("# ")).write_text(text)
    mode = "--namespaces" if namespaces.available() is None else "--loopback"
    given = commands()
    assert len(given) > 20
    assert given.pop(1) == ["up", "two-sites.toml"]
    with marked_wan(tmp_path) as wan:
        wan.up((tmp_path / "two-sites.toml").read_text(), mode)
        wan.wait_for_line("is up")
        for arguments in given:
            if arguments[0] == "exec":
                done = wan.execute(*arguments[1:])
            elif arguments[0] in ("up", "watch"):
                continue  # these go on, or are tried as processes of their own
            else:
                done = wan.run(*arguments)
            assert done.returncode == 0, (arguments, done.stderr)
        # The broker was told to come back half a second after its host's crash.
        wait_until(lambda: '"state":"running"' in wan.run("status", "--json").stdout, "the broker after its crash")
        assert (
            "sydney/door open"
            in wan.execute("sensor", "--", "nearcast", "sub", "-u", "mqtt://{broker}", "#", "-v", "-c", "1").stdout
        )
        assert wan.run("down").returncode == 0
        wan.end()
    for arguments in given:
        if arguments[0] == "up":
            with marked_wan(tmp_path) as wan:
                process = wan.up((tmp_path / arguments[1]).read_text(), mode, *arguments[2:])
                output, complaints = process.communicate(timeout=60)
                assert process.returncode == 0, (arguments, output, complaints)
    assert (tmp_path / "results" / "logs" / "mqtt.log").exists()
