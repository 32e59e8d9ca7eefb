"""Finding the protocol that a scenario names."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearcast.errors import ConfigError
from nearcast.simulation.probes import Probes
from nearcast.simulation.protocols import BUILT_IN, load_protocol

MINE = """
from nearcast.simulation import Protocol
class Mine(Protocol):
    def report(self):
        return {"mine": NUMBER}
NUMBER = %d
class Other: pass
"""


def test_by_name() -> None:
    assert isinstance(load_protocol("probes"), Probes)
    for name in BUILT_IN:
        load_protocol(name)


def test_by_module() -> None:
    assert isinstance(load_protocol("nearcast.simulation.probes:Probes"), Probes)


def test_by_file_beside_the_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "mine.py").write_text(MINE % number)
    assert load_protocol("mine.py:Mine", tmp_path / "1").report() == {"mine": 1}
    assert load_protocol("mine.py:Mine", tmp_path / "2").report() == {"mine": 2}
    assert load_protocol(f"{tmp_path}/1/mine.py:Mine").report() == {"mine": 1}
    monkeypatch.chdir(tmp_path / "2")
    assert load_protocol("mine.py:Mine", tmp_path).report() == {"mine": 2}


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("raft", "raft is neither chord, fabric, groups, mqtt, probes nor `package.module:Class` nor `path/to/file.py:Class`"),
        ("missing.py:Mine", "there is no file .*missing.py"),
        ("mine.py:Yours", "mine.py has no Yours"),
        ("mine.py:Other", "must be a subclass of nearcast.simulation.Protocol"),
        ("no_such_package.module:Class", "cannot import no_such_package.module: no module no_such_package"),
    ],
)
def test_what_cannot_be_found(tmp_path: Path, name: str, complaint: str) -> None:
    (tmp_path / "mine.py").write_text(MINE % 3)
    with pytest.raises(ConfigError, match=complaint):
        load_protocol(name, tmp_path)


def test_a_file_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1 +\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"broken.py cannot be loaded: SyntaxError: .*line 1"):
            load_protocol("broken.py:Mine", tmp_path)
