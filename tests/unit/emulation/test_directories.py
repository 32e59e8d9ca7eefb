"""Where WANs are found: private, one name once, and dead ones recognised by their lock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nearcast.emulation import directories
from nearcast.errors import NearcastError


def test_a_name_is_taken_while_its_lock_is_held(tmp_path: Path) -> None:
    base = tmp_path / "base"
    directory, lock = directories.reserve(base, "one")
    assert directories.running(base) == [directory]
    with pytest.raises(NearcastError, match="one is running already"):
        directories.reserve(base, "one")
    os.close(lock)
    (directory.path / "left" / "over").mkdir(parents=True)
    assert directories.running(base) == []
    assert not directory.path.exists()
    assert directories.running(base) == []


def test_a_dead_name_can_be_taken_again(tmp_path: Path) -> None:
    first, lock = directories.reserve(tmp_path / "base", "one")
    os.close(lock)
    (first.path / "old").touch()
    second, lock = directories.reserve(tmp_path / "base", "one")
    assert not (second.path / "old").exists()
    os.close(lock)


def test_releasing_does_not_touch_a_successor(tmp_path: Path) -> None:
    first, lock = directories.reserve(tmp_path / "base", "one")
    first.remove()
    second, other = directories.reserve(tmp_path / "base", "one")
    first.release(lock)
    assert second.is_alive()
    second.release(other)
    assert not second.path.exists()


def test_finding(tmp_path: Path) -> None:
    base = tmp_path / "base"
    with pytest.raises(NearcastError, match="no WAN is running"):
        directories.find(base, None)
    one, _ = directories.reserve(base, "one")
    assert directories.find(base, None) == one
    directories.reserve(base, "two")
    with pytest.raises(NearcastError, match=r"several WANs are running \(one, two\): say which with --name"):
        directories.find(base, None)
    assert directories.find(base, "one") == one
    with pytest.raises(NearcastError, match="no WAN called three is running; running: one, two"):
        directories.find(base, "three")


@pytest.mark.parametrize("name", ["", "../up", "a/b", "-x", ".", "a" * 41, "a b", "ä", "a\n"])
def test_names_that_cannot_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(NearcastError, match="cannot name a WAN"):
        directories.reserve(tmp_path / "base", name)


def test_a_base_that_others_could_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(NearcastError, match="not a private directory of this user"):
        directories.reserve(tmp_path / "open", "one")
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(NearcastError, match="not a private directory"):
        directories.reserve(tmp_path / "link", "one")
    (tmp_path / "file").touch()
    with pytest.raises(NearcastError, match="cannot use"):
        directories.reserve(tmp_path / "file", "one")


def test_what_is_not_a_wans_is_never_touched(tmp_path: Path) -> None:
    """Whoever gives their home directory as the base keeps it."""
    base = tmp_path / "home"
    base.mkdir(mode=0o700)
    for name in ("documents", "locked", "half-written"):
        (base / name).mkdir()
        (base / name / "precious").write_text("mine")
    (base / "locked" / "lock").write_text("of something else")
    (base / "file").write_text("mine")
    (base / "link").symlink_to(base / "documents")
    dead, lock = directories.reserve(base, "dead")
    os.close(lock)
    (base / "empty").mkdir()
    assert directories.running(base) == []
    assert not dead.path.exists()
    assert (base / "empty").exists()
    for name in ("documents", "locked", "file", "link"):
        with pytest.raises(NearcastError, match=f"{name} is in the way, and not a WAN's: use another --name"):
            directories.reserve(base, name)
    assert [path.read_text() for path in sorted(base.glob("*/precious"))] == ["mine"] * 4
    assert (base / "file").read_text() == "mine"
    os.close(directories.reserve(base, "empty")[1])  # as a WAN leaves it that is killed before it has its lock
