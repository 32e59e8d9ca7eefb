"""The spool's files on a real disk."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from nearcast.broker.spool_files import SPOOL, SpoolFiles, clear_spool
from nearcast.errors import StorageUnavailable


class Written:
    """What the writer's thread reported; waits for it."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, int, StorageUnavailable | None]] = []
        self._arrived = threading.Semaphore(0)

    def __call__(self, session_number: int, file_number: int, failed: StorageUnavailable | None) -> None:
        self.reports.append((session_number, file_number, failed))
        self._arrived.release()

    def wait(self) -> None:
        assert self._arrived.acquire(timeout=20)


@pytest.mark.parametrize("fsync", [True, False])
def test_files_are_written_read_listed_and_removed(tmp_path: Path, fsync: bool) -> None:
    written = Written()
    files = SpoolFiles(tmp_path / "spool", written, fsync=fsync)
    files.write(3, 7, b"content")
    written.wait()
    assert written.reports == [(3, 7, None)]
    assert files.read(3, 7) == b"content"
    (tmp_path / "spool" / "something else").write_bytes(b"")
    assert files.files() == [(3, 7)]
    files.remove(3, 7)
    files.remove(3, 7)
    assert files.files() == []
    with pytest.raises(StorageUnavailable, match="cannot be read"):
        files.read(3, 7)
    files.close()
    with pytest.raises(StorageUnavailable, match="is closed"):
        files.write(3, 8, b"late")


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    written = Written()
    files = SpoolFiles(tmp_path / "spool", written, fsync=True)
    (tmp_path / "spool" / "1-1").mkdir()
    files.write(1, 1, b"content")
    written.wait()
    ((_, _, failed),) = written.reports
    assert failed is not None
    assert "cannot be written" in str(failed)
    files.close()


def test_who_leaves_a_fabric_leaves_no_files(tmp_path: Path) -> None:
    clear_spool(None)
    clear_spool(str(tmp_path))
    (tmp_path / SPOOL).mkdir()
    (tmp_path / SPOOL / "3-7").write_bytes(b"content")
    (tmp_path / SPOOL / "something else").write_bytes(b"")
    clear_spool(str(tmp_path))
    assert [path.name for path in (tmp_path / SPOOL).iterdir()] == ["something else"]


def test_a_place_that_is_none_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "spool").write_bytes(b"a file")
    with pytest.raises(StorageUnavailable, match="cannot be made"):
        SpoolFiles(tmp_path / "spool", Written(), fsync=True)
