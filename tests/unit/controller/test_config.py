"""What a controller can be told, and how it says no."""

from __future__ import annotations

from typing import Any

import pytest

from nearcast.controller.config import ControllerConfig


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"port": 99_999}, "--port must be between 0 and 65,535"),
        ({"http_port": -1}, "--http-port must be"),
        ({"interval_seconds": float("nan")}, "--interval must be between 0.1 and 86,400"),
        ({"interval_seconds": float("inf")}, "--interval must be"),
        ({"period_seconds": 0.0}, "--period must be"),
        ({"ping_interval_ms": 0.001}, "--ping-interval-ms must be between 1 and"),
        ({"pings": 0}, "--pings must be between 1 and"),
        ({"pings": 1_000_000}, "--pings must be"),
        ({"threshold": 3.0}, "--threshold must be between 0 and 1"),
        ({"name": ""}, "--name must be"),
        ({"name": "x" * 129}, "--name must be"),
        ({"name": "a\nb"}, "--name must be"),
        ({"certificate_file": "c"}, "--certificate and --key go together"),
        ({"http_key_file": "k"}, "--http-certificate and --http-key go together"),
    ],
)
def test_what_makes_no_sense_is_refused_by_the_name_of_its_option(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ControllerConfig(secret_file="secret", **given)


def test_the_defaults_are_the_papers() -> None:
    config = ControllerConfig(secret_file="secret")
    assert (config.control().interval_s, config.control().policy.threshold) == (15.0, 0.1)
    assert (config.monitoring().pings, config.monitoring().ping_interval_s) == (10, 0.25)
