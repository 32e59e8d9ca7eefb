"""Addresses of nodes, and TLS for links that are opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearcast.errors import ConfigError
from nearcast.fabricconfig import Fabric
from nearcast.serving.links import client_context, join_address, split_address


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("localhost:1884", ("localhost", 1884)),
        ("10.0.0.7:1", ("10.0.0.7", 1)),
        ("[::1]:65535", ("::1", 65_535)),
        ("[fe80::1%eth0]:1884", ("fe80::1%eth0", 1_884)),
    ],
)
def test_addresses_are_taken_apart_and_put_together(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize("address", ["", "localhost", ":1884", "localhost:", "localhost:0", "localhost:65536", "localhost:x"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="write host:port"):
        split_address(address)


def test_an_ipv6_address_needs_brackets() -> None:
    with pytest.raises(ConfigError, match=r"\[address\]:port"):
        split_address("::1:1884")


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere.pem")
    with pytest.raises(ConfigError, match="certificate authorities cannot be read"):
        client_context(Fabric(ca_file=missing))
    with pytest.raises(ConfigError, match="cannot be used"):
        client_context(Fabric(certificate_file=missing, key_file=missing))
