"""The fabric's secret: made for its owner, read with care."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from nearcast.errors import ConfigError
from nearcast.serving.secrets import make_secret, read_secret


def test_a_secret_is_long_and_nobody_elses(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    make_secret(first)
    make_secret(second)
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert len(read_secret(first)) >= 43
    assert read_secret(first) != read_secret(second)


def test_one_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("a secret that others use, too")
    with pytest.raises(ConfigError, match="there is such a file already"):
        make_secret(path)
    assert read_secret(path) == b"a secret that others use, too"


def test_white_space_around_it_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("  sixteen characters and more\r\n\n")
    path.chmod(0o600)
    assert read_secret(path) == b"sixteen characters and more"


@pytest.mark.parametrize("content", [b"", b"too short\n", b"x" * 5_000])
def test_what_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="has 16 to 4,096 characters"):
        read_secret(path)


def test_a_missing_one_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`nearcast secret FILE` makes one"):
        read_secret(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot write the secret"):
        make_secret(tmp_path / "no" / "directory")


def test_one_that_everybody_can_read_is_complained_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "secret"
    make_secret(path)
    path.chmod(0o644)
    logger = logging.getLogger("nearcast")
    logger.addHandler(caplog.handler)
    try:
        read_secret(path)
    finally:
        logger.removeHandler(caplog.handler)
    assert "every user of this machine can read" in caplog.text
    assert path.read_text().strip() not in caplog.text
