"""Load processes that begin together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nearcast.errors import ConfigError, StorageUnavailable
from nearcast.load import meeting
from nearcast.load.spec import SharedClock


def test_all_get_the_same_moment_and_it_is_still_to_come(tmp_path: Path) -> None:
    clock = SharedClock()

    async def meet() -> tuple[int, list[int]]:
        loads = [asyncio.create_task(meeting.begin(str(tmp_path), name)) for name in ("a", "b")]
        moment = await meeting.start_together(tmp_path, ["a", "b"], clock)
        assert moment > clock.now_ns()
        return moment, await asyncio.gather(*loads)

    moment, theirs = asyncio.run(meet())
    assert theirs == [moment, moment]


def test_a_process_that_never_comes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PATIENCE_S", 0.05)
    with pytest.raises(ConfigError, match="not every load was ready"):
        asyncio.run(meeting.start_together(tmp_path, ["absent"], SharedClock()))
    with pytest.raises(ConfigError, match="nobody started the load"):
        asyncio.run(meeting.begin(str(tmp_path), "alone"))


def test_a_place_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailable, match="cannot meet"):
        asyncio.run(meeting.begin(str(tmp_path / "absent"), "a"))
