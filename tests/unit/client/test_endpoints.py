"""URLs and server references."""

from __future__ import annotations

import pytest

from nearcast.client.endpoints import Endpoint, TlsOptions, parse_url
from nearcast.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mqtt://host", Endpoint("mqtt", "host", 1883)),
        ("host:77", Endpoint("mqtt", "host", 77)),
        ("mqtts://host/", Endpoint("mqtts", "host", 8883)),
        ("mqtt://[::1]:5", Endpoint("mqtt", "::1", 5)),
        ("ws://host", Endpoint("ws", "host", 80, "/mqtt")),
        ("wss://host:1/a?b=c", Endpoint("wss", "host", 1, "/a?b=c")),
        ("unix:///run/b.sock", Endpoint("unix", "", 0, "/run/b.sock")),
        ("mqtt://u%40x:p%2Fq@host", Endpoint("mqtt", "host", 1883, "", "u@x", "p/q")),
        ("tcp://host", Endpoint("mqtt", "host", 1883)),
    ],
)
def test_urls(url: str, expected: Endpoint) -> None:
    assert parse_url(url) == expected


@pytest.mark.parametrize(
    "url",
    ["http://host", "mqtt://", "mqtt://host:99999", "mqtt://host:x", "mqtt://host/topic", "unix://relative", "mqtt://h:0"],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://me:secret@host", "mqtt://me:secret@host/topic", "mqtt://me:secret@host:99999"])
def test_messages_do_not_show_passwords(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)


def test_an_endpoint_shows_no_password() -> None:
    assert str(parse_url("ws://me:secret@[::1]:8080/x")) == "ws://[::1]:8080/x"


@pytest.mark.parametrize(
    ("start", "reference", "expected"),
    [
        ("mqtt://a:1", "b", "mqtt://b:1883"),
        ("mqtt://a:1", "b:2 c:3", "mqtt://b:2"),
        ("mqtts://a", "b", "mqtts://b:8883"),
        ("mqtts://a", "mqtts://b:9", "mqtts://b:9"),
        ("ws://a/path", "b:2", "ws://b:2/path"),
        ("unix:///run/b.sock", "[::1]:2", "mqtt://[::1]:2"),
    ],
)
def test_references(start: str, reference: str, expected: str) -> None:
    assert str(parse_url(start).referred(reference)) == expected


def test_credentials_follow_a_reference() -> None:
    referred = parse_url("mqtts://me:secret@a").referred("b")
    assert (referred.username, referred.password) == ("me", "secret")


def test_a_reference_does_not_lead_out_of_encryption() -> None:
    with pytest.raises(ConfigError, match="not encrypted"):
        parse_url("mqtts://me:secret@a").referred("mqtt://b")


def test_tls_files_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot use the TLS files /nonexistent"):
        TlsOptions(ca_file="/nonexistent").context()
