"""What a controller can be told, and how it says no."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nearcast.controller.config import ControllerConfig, load_controller_config, with_options
from nearcast.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"port": 99_999}, "`port` must be between 0 and 65,535"),
        ({"http_port": -1}, "`http_port` must be"),
        ({"interval_seconds": float("nan")}, "`interval_seconds` must be between 0.1 and 86,400"),
        ({"interval_seconds": float("inf")}, "`interval_seconds` must be"),
        ({"period_seconds": 0.0}, "`period_seconds` must be"),
        ({"ping_interval_ms": 0.001}, "`ping_interval_ms` must be between 1 and"),
        ({"pings": 0}, "`pings` must be between 1 and"),
        ({"pings": 1_000_000}, "`pings` must be"),
        ({"threshold": 3.0}, "`threshold` must be between 0 and 1"),
        ({"name": ""}, "`name` must be"),
        ({"name": "x" * 129}, "`name` must be"),
        ({"name": "a\nb"}, "`name` must be"),
        ({"certificate_file": "c"}, "`certificate_file` and `key_file` go together"),
        ({"executors": 0}, "`executors` must be between 1 and 10,000"),
        ({"plan_interval_seconds": float("nan")}, "`plan_interval_seconds` must be"),
        ({"migration_timeout_seconds": 0}, "`migration_timeout_seconds` must be"),
        ({"settle_seconds": -1}, "`settle_seconds` must be"),
        ({"http_key_file": "k"}, "`http_certificate_file` and `http_key_file` go together"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ControllerConfig(secret_file="secret", **given)


def test_the_defaults_are_the_papers() -> None:
    config = ControllerConfig(secret_file="secret")
    assert (config.control().interval_s, config.control().policy.threshold) == (15.0, 0.1)
    assert (config.monitoring().pings, config.monitoring().ping_interval_s) == (10, 0.25)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"port": 99_999}, "--port must be between 0 and 65,535"),
        ({"interval_seconds": 0.0}, "--interval must be between 0.1 and 86,400"),
        ({"http_key_file": "k"}, "--http-certificate and --http-key go together"),
        ({"executors": 0}, "--executors must be between 1 and 10,000"),
        ({"secret_file": ""}, "a fabric has a secret: give its file with --fabric-secret (`nearcast secret FILE` makes one)"),
    ],
)
def test_on_the_command_line_it_is_called_by_its_option(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_options(ControllerConfig(secret_file="secret"), given)
    assert str(refused.value) == words


FILE = """
[controller]
secret_file = "fabric.secret"
port = 1900
planner = "spark"
executors = 32

[controller.placement]
high_watermark = 0.7
"""


def test_a_file_says_what_the_command_line_does_not(tmp_path: Path) -> None:
    file = tmp_path / "controller.toml"
    file.write_text(FILE)
    config = with_options(load_controller_config(file), {"port": 2000, "name": None})
    assert (config.port, config.planner, config.executors) == (2000, "spark", 32)
    assert config.secret_file == str(tmp_path / "fabric.secret")
    topics = config.control().topics
    assert (topics.planner, topics.executors, topics.placement.high_watermark) == ("spark", 32, 0.7)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[controller]\nplaner = 'own'", "2: unknown key `controller.planer`; did you mean `planner`?"),
        ("[controller]\nplanner = 'me'", '`controller.planner` must be "own" or "spark" or "none"'),
        ("[controller]\nport = 1\nexecutors = 0", "3: `controller.executors` must be between 1 and 10,000"),
        ("[control]\n", "unknown key `control`"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "controller.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_controller_config(file)
    assert words in str(refused.value)
