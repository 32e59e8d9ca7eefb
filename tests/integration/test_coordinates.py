"""Coordinates of real brokers: they find each other over UDP, and know where they are after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nearcast.serving.secrets import make_secret
from tests.integration.broker.running import wait_for
from tests.integration.brokers import NearcastBroker

pytestmark = pytest.mark.integration


def saved(broker: NearcastBroker) -> dict[str, Any]:
    """What a broker that has stopped wrote of where it was."""
    (path,) = broker.directory.rglob("coordinate.json")
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def test_a_broker_that_is_started_again_is_where_it_was(tmp_path: Path) -> None:
    secret = tmp_path / "fabric.secret"
    make_secret(secret)
    homes = [tmp_path / name for name in ("b1", "b2")]
    for home in homes:
        home.mkdir()
    given = ["--fabric-secret", str(secret)]
    with NearcastBroker(homes[0], data=True, arguments=["--name", "b1", *given]) as first:
        with NearcastBroker(homes[1], arguments=["--name", "b2", *given, "--peer", first.link_address]) as second:
            wait_for("brokers meeting", lambda: second.sees("b1"))
            wait_for("a coordinate", lambda: first.metric("coordinate_samples_total") >= 5)
        first.stop()
        before = saved(first)
        assert any(before["vector"])
        assert [member[0] for member in before["members"]] == ["b2"]
        first.start()  # alone: nothing moves it
        assert first.metric("coordinate_samples_total") == 0
        first.stop()
        after = saved(first)
        assert (after["vector"], after["height"]) == (before["vector"], before["height"])
        assert after["error"] >= before["error"]  # it may have been moved
        next(homes[0].rglob("coordinate.json")).write_text("{}")
        first.start()
        assert "the saved coordinate is of no use" in first.log()
