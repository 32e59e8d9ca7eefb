"""A gateway's settings: what can be used, what cannot, and the file in the guide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nearcast.errors import ConfigError
from nearcast.fabricconfig import Fabric
from nearcast.gateway.config import GatewayConfig, load_gateway_config, plain_address, plain_name

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("mqtt://host", ("host", 1883, False)),
        ("mqtts://host", ("host", 8883, True)),
        ("mqtt://10.0.0.1:1999", ("10.0.0.1", 1999, False)),
        ("mqtt://[::1]:1883/", ("::1", 1883, False)),
    ],
)
def test_addresses_of_other_brokers(url: str, parts: tuple[str, int, bool]) -> None:
    assert plain_address(url) == parts


@pytest.mark.parametrize("url", ["http://h", "mqtt://", "mqtt://h:x", "mqtt://h/path", "mqtt://u:p@h", "mqtt://h?x", "h:1"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="write mqtt://host:port"):
        plain_address(url)


def test_an_ipv6_broker_has_a_name_that_can_be_written() -> None:
    assert plain_name("mqtt://[::1]:1883") == "[::1]:1883"


def test_one_kind_of_brokers() -> None:
    with pytest.raises(ValueError, match="one kind"):
        GatewayConfig(brokers=("mqtt://a", "b:1"))
    assert GatewayConfig(brokers=("mqtt://a",)).plain
    assert not GatewayConfig(brokers=("a:1",)).plain


def test_what_is_missing_is_said() -> None:
    with pytest.raises(ConfigError, match="no brokers are known"):
        GatewayConfig().check()
    with pytest.raises(ConfigError, match="--fabric-secret"):
        GatewayConfig(brokers=("a:1",)).check()
    with pytest.raises(ConfigError, match="no controller"):
        GatewayConfig(brokers=("mqtt://a",), fabric=Fabric(controller="c:1", secret_file="s")).check()
    GatewayConfig(brokers=("mqtt://a",)).check()
    GatewayConfig(fabric=Fabric(controller="c:1", secret_file="s")).check()


def test_listeners_are_for_clients(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text('brokers = ["a:1"]\n[[listeners]]\nkind = "bulk"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="listeners for MQTT clients only"):
        load_gateway_config(path)


def test_files_are_found_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text('brokers = ["a:1"]\n[fabric]\nsecret_file = "s"\n', encoding="utf-8")
    assert load_gateway_config(path).fabric.secret_file == str(tmp_path / "s")


def test_the_file_in_the_guide(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides" / "gateway.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    path = tmp_path / "gateway.toml"
    path.write_text(text, encoding="utf-8")
    config = load_gateway_config(path)
    config.check()
    assert [listener.kind for listener in config.listeners] == ["tcp", "wss"]
    assert config.patience_seconds == GatewayConfig().patience_seconds
    assert config.moves_at_once == GatewayConfig().moves_at_once
    assert config.max_kept_bytes == GatewayConfig().max_kept_bytes
