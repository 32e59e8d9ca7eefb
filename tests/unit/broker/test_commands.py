"""``nearcast broker`` and ``nearcast passwd``: options over the file, and the file that passwd writes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from nearcast.broker.commands import Overrides, effective_config, register
from nearcast.broker.passwords import load_passwords
from nearcast.config import BrokerConfig
from nearcast.errors import ConfigError

APP = typer.Typer()
register(APP)


def test_without_options_the_defaults_hold() -> None:
    assert effective_config(None, Overrides()) == BrokerConfig()


def test_options_stand_above_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broker.toml"
    path.write_text('[[listeners]]\nkind = "unix"\npath = "s"\n[[listeners]]\nport = 1\nbacklog = 7\n', encoding="utf-8")
    config = effective_config(
        str(path), Overrides(port=2, data="d", sync="os", http_port=0, log_level="debug", allow_anonymous=False)
    )
    assert [listener.kind for listener in config.listeners] == ["unix", "tcp"]
    assert (config.listeners[1].port, config.listeners[1].backlog) == (2, 7)
    assert (config.persistence.directory, config.persistence.sync) == ("d", "os")
    assert (config.observability.http_port, config.observability.log_level) == (0, "debug")
    assert config.security.allow_anonymous is False


def test_a_port_adds_a_tcp_listener_where_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "broker.toml"
    path.write_text('[[listeners]]\nkind = "unix"\npath = "s"\n', encoding="utf-8")
    config = effective_config(str(path), Overrides(host="::1"))
    assert config.listeners[0].name == "tcp:[::1]:1883"
    assert len(config.listeners) == 2


@pytest.mark.parametrize("overrides", [Overrides(sync="never"), Overrides(log_level="loud"), Overrides(port=99_999)])
def test_bad_options_are_refused(overrides: Overrides) -> None:
    with pytest.raises(ConfigError):
        effective_config(None, overrides)


def test_a_bad_word_is_named_with_its_option_and_the_words_there_are() -> None:
    with pytest.raises(ConfigError, match="--log-level cannot be 'loud': use debug, info, warning or error"):
        effective_config(None, Overrides(log_level="loud"))
    with pytest.raises(ConfigError, match="--sync cannot be 'never': use os or fsync"):
        effective_config(None, Overrides(sync="never"))


def test_a_missing_password_file_says_how_to_make_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(APP, ["broker", "--check", "--password-file", str(tmp_path / "users")])
    assert isinstance(result.exception, ConfigError)
    assert f"`nearcast passwd {tmp_path / 'users'} USER` makes it" in str(result.exception)


def test_a_ready_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(APP, ["broker", "--port", "0", "--ready-file", str(tmp_path / "none" / "ready")])
    assert isinstance(result.exception, ConfigError)
    assert "cannot write the ready file" in str(result.exception)


def test_check_only_checks(tmp_path: Path) -> None:
    result = CliRunner().invoke(APP, ["broker", "--check"])
    assert result.exit_code == 0
    assert "good" in result.output
    result = CliRunner().invoke(APP, ["broker", "--check", "--acl-file", str(tmp_path / "none")])
    assert isinstance(result.exception, ConfigError)


def passwd(path: Path, *arguments: str, password: str = "") -> str:
    result = CliRunner().invoke(APP, ["passwd", str(path), *arguments], input=password)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.output


def test_passwd_adds_changes_and_deletes(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    assert "added ann" in passwd(path, "ann", "--password-stdin", password="one\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "one" not in path.read_text(encoding="utf-8")
    assert load_passwords(str(path)).verify("ann", b"one")
    assert "changed" in passwd(path, "ann", "--password-stdin", password="two\r\n")
    assert load_passwords(str(path)).verify("ann", b"two")
    assert "removed" in passwd(path, "ann", "--delete")
    assert len(load_passwords(str(path))) == 0


def test_passwd_asks_twice_without_showing(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    output = passwd(path, "ann", password="secret\nsecret\n")
    assert "secret" not in output
    assert load_passwords(str(path)).verify("ann", b"secret")


def test_passwd_can_keep_scram_keys(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    passwd(path, "ann", "--scram", "--password-stdin", password="one\n")
    assert ":$scram-sha-256$" in path.read_text(encoding="utf-8")
    assert load_passwords(str(path)).verify("ann", b"one")


@pytest.mark.parametrize(
    ("arguments", "password", "says"),
    [
        (["a:b", "--password-stdin"], "x\n", "must not contain"),
        (["ann", "--password-stdin"], "\n", "must not be empty"),
        (["ann", "--password-stdin"], "x" * 65_536, "at most 65,535 bytes"),
        (["ann", "--delete"], "", "there is no user ann"),
    ],
)
def test_passwd_refusals(tmp_path: Path, arguments: list[str], password: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        passwd(tmp_path / "passwords", *arguments, password=password)
    assert list(tmp_path.iterdir()) == []


def test_passwd_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the password file"):
        passwd(tmp_path / "no" / "such" / "passwords", "ann", "--password-stdin", password="x\n")


def ports(config: BrokerConfig) -> list[tuple[str, int]]:
    return [(listener.kind, listener.effective_port) for listener in config.listeners]


def test_a_data_directory_brings_a_bulk_port_beside_the_mqtt_port(tmp_path: Path) -> None:
    assert ports(effective_config(None, Overrides(data="d"))) == [("tcp", 1883), ("bulk", 7883)]
    config = effective_config(None, Overrides(data="d", host="::1", port=2883))
    assert [listener.name for listener in config.listeners] == ["tcp:[::1]:2883", "bulk:[::1]:8883"]
    assert ports(effective_config(None, Overrides(data="d", port=0))) == [("tcp", 0), ("bulk", 0)]
    assert ports(effective_config(None, Overrides(data="d", port=60_000))) == [("tcp", 60_000)]
    path = tmp_path / "broker.toml"
    path.write_text('[persistence]\ndirectory = "d"\n', encoding="utf-8")
    assert ports(effective_config(str(path), Overrides())) == [("tcp", 1883), ("bulk", 7883)]


def test_listeners_that_the_file_names_are_meant_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "broker.toml"
    path.write_text("[[listeners]]\n", encoding="utf-8")
    assert ports(effective_config(str(path), Overrides(data="d"))) == [("tcp", 1883)]
    assert ports(effective_config(str(path), Overrides(data="d", bulk_port=1))) == [("tcp", 1883), ("bulk", 1)]
    path.write_text('[[listeners]]\nkind = "bulk"\nhost = "::1"\n', encoding="utf-8")
    config = effective_config(str(path), Overrides(bulk_port=1))
    assert [listener.name for listener in config.listeners] == ["bulk:[::1]:1"]


def test_the_bulk_port_can_be_chosen_or_left_out() -> None:
    assert ports(effective_config(None, Overrides(data="d", bulk_port=0))) == [("tcp", 1883), ("bulk", 0)]
    assert ports(effective_config(None, Overrides(data="d", no_bulk_port=True))) == [("tcp", 1883)]
    assert ports(effective_config(None, Overrides())) == [("tcp", 1883)]
    with pytest.raises(ConfigError, match="port"):
        effective_config(None, Overrides(bulk_port=99_999))
    result = CliRunner().invoke(APP, ["broker", "--check", "--bulk-port", "1", "--no-bulk-port"])
    assert result.exit_code == 2


def test_durable_topics_of_the_command_line_stand_behind_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broker.toml"
    path.write_text('[[topics]]\ntopic = "a/#"\nretention = { max_records = 5 }\n', encoding="utf-8")
    config = effective_config(str(path), Overrides(data="d", durable=("a/b", "c", "#", "c", "d")))
    assert [rule.topic for rule in config.topics] == ["a/#", "c", "#"]


def test_durable_topics_need_a_data_directory() -> None:
    result = CliRunner().invoke(APP, ["broker", "--check", "--durable", "a"])
    assert isinstance(result.exception, ConfigError)
    assert "--data DIRECTORY" in str(result.exception)


def test_a_secret_brings_a_port_for_links_beside_the_mqtt_port(tmp_path: Path) -> None:
    assert ports(effective_config(None, Overrides(fabric_secret="s"))) == [("tcp", 1883), ("link", 1884)]
    config = effective_config(None, Overrides(fabric_secret="s", host="::1", port=2883))
    assert [(listener.kind, listener.host, listener.port) for listener in config.listeners][1] == ("link", "::1", 2884)
    assert ports(effective_config(None, Overrides(fabric_secret="s", port=0))) == [("tcp", 0), ("link", 0)]
    with pytest.raises(ConfigError, match="`port` must be between 0 and 65,535"):
        effective_config(None, Overrides(fabric_secret="s", port=65_535))
    config = effective_config(None, Overrides(fabric_secret="s", link_host="10.0.0.7", link_port=7))
    assert [(listener.kind, listener.host, listener.port) for listener in config.listeners][1] == ("link", "10.0.0.7", 7)


def test_a_file_that_names_listeners_has_links_only_where_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "broker.toml"
    path.write_text('[[listeners]]\nkind = "tcp"\n[fabric]\nsecret_file = "s"\npeers = ["a:1"]\n')
    config = effective_config(str(path), Overrides(peers=("b:2",)))
    assert ports(config) == [("tcp", 1883)]
    assert config.fabric.peers == ("a:1", "b:2")
    assert config.fabric.secret_file == str(tmp_path / "s")
    assert ports(effective_config(str(path), Overrides(link_port=9))) == [("tcp", 1883), ("link", 9)]
    path.write_text('[[listeners]]\nkind = "link"\nport = 5\n[fabric]\nsecret_file = "s"\n')
    assert ports(effective_config(str(path), Overrides(link_port=6))) == [("link", 6)]


def test_a_link_listener_needs_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "broker.toml"
    path.write_text('[[listeners]]\nkind = "link"\n')
    with pytest.raises(ConfigError, match=r"needs fabric\.secret_file"):
        effective_config(str(path), Overrides())


def test_broadcast_groups_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "broker.toml"
    path.write_text(
        '[fabric]\nsecret_file = "s"\n[[fabric.classes]]\ntopic = "cars/raw"\ntopic_class = "local"\n'
        '[fabric.groups]\ncloud = "mqtt://a:1"\nleave_threshold_ms = 6.0\nregion = "europe"\ncloud_password_file = "p"\n'
    )
    config = effective_config(str(path), Overrides(cloud="mqtts://b:2", broadcast=("cars/#",), group_threshold=8.0, lcm=7.0))
    groups = config.fabric.groups
    assert (groups.cloud, groups.region, groups.threshold_ms, groups.lcm) == ("mqtts://b:2", "europe", 8.0, 7.0)
    assert groups.effective_leave_threshold_ms == 10.0  # the file's would be below the other
    assert groups.cloud_password_file == str(tmp_path / "p")
    assert [(rule.topic, rule.topic_class) for rule in config.fabric.classes] == [
        ("cars/raw", "local"),
        ("cars/#", "broadcast"),
    ]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (Overrides(cloud="mqtt://a:1"), "`secret_file` .*is needed"),
        (Overrides(cloud="http://a:1", fabric_secret="s"), "`cloud` must be mqtt://"),
        (Overrides(cloud="mqtt://a:1", fabric_secret="s", group_threshold=-1.0), "`threshold_ms` must not be negative"),
        (Overrides(cloud="mqtt://a:1", fabric_secret="s", region="a/b"), "`region` must be one topic level"),
        (Overrides(fabric_secret="s", group_threshold=5.0), "--group-threshold says nothing without a cloud"),
        (Overrides(fabric_secret="s", cloud_password_file="p"), "--cloud-password-file says nothing without a cloud"),
        (Overrides(broadcast=("a/#",)), "--broadcast is for brokers of a fabric"),
    ],
)
def test_group_options_that_make_no_sense(overrides: Overrides, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        effective_config(None, overrides)
