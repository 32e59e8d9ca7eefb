"""The broker's configuration: defaults, refusals that name file, line and key, and file names relative to the file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nearcast.config import BrokerConfig, Limits, Listener, Observability, Persistence, Retention, Security
from nearcast.configfile import load_broker_config
from nearcast.errors import ConfigError


def load(directory: Path, text: str) -> BrokerConfig:
    path = directory / "broker.toml"
    path.write_text(text, encoding="utf-8")
    return load_broker_config(path)


def refused(directory: Path, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(directory, text)
    assert str(caught.value).startswith(f"{directory}/broker.toml")
    return caught.value


def test_an_empty_file_is_one_listener_on_loopback(tmp_path: Path) -> None:
    config = load(tmp_path, "")
    assert config == BrokerConfig()
    assert [listener.name for listener in config.listeners] == ["tcp:127.0.0.1:1883"]
    assert config.persistence.directory is None
    assert config.persistence.sync == "fsync"
    assert config.security.allow_anonymous is None


def test_every_field_has_a_paragraph() -> None:
    source = Path(__file__).parents[2].joinpath("src/nearcast/config.py").read_text(encoding="utf-8").splitlines()
    names = [
        field.name
        for struct in (Limits, Listener, Security, Persistence, Observability, BrokerConfig)
        for field in msgspec.structs.fields(struct)
    ]
    for name in names:
        declared = [number for number, line in enumerate(source) if line.startswith(f"    {name}: ")]
        assert declared, name
        for number in declared:
            assert source[number + 1].startswith('    """'), name


def test_all_tables_together(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
        server_reference = "other:1883"
        [[listeners]]
        port = 0
        [[listeners]]
        kind = "unix"
        path = "run/broker.sock"
        mode = 0o600
        [limits]
        max_inflight = 20
        [security]
        password_file = "passwords"
        acl = [{ action = "deny", access = "publish", topic = "a/%c", user = "x*" }]
        [persistence]
        directory = "data"
        sync = "os"
        [observability]
        http_port = 9090
        """,
    )
    assert config.listeners[1].path == str(tmp_path / "run/broker.sock")
    assert config.listeners[1].mode == 0o600
    assert config.security.password_file == str(tmp_path / "passwords")
    assert config.security.acl[0].user == "x*"
    settings = config.engine_settings()
    assert settings.durable
    assert settings.limits.max_inflight == 20
    assert settings.server_reference == "other:1883"


def test_absolute_file_names_stay(tmp_path: Path) -> None:
    assert load(tmp_path, '[persistence]\ndirectory = "/var/lib/x"').persistence.directory == "/var/lib/x"


@pytest.mark.parametrize(
    ("text", "line", "key", "says"),
    [
        ("listener = []", 1, "listener", "did you mean `listeners`?"),
        ("\n[limits]\nmax_qoss = 1", 3, "limits.max_qoss", "did you mean `max_qos`?"),
        ("[limits]\n# max_qos = 9\nmax_qos = 3", 3, "limits.max_qos", "must be 0, 1 or 2"),
        ("[limits]\nmax_inflight = 'x'", 2, "limits.max_inflight", "expected `int`"),
        ("limits.receive_maximum = 0", 1, "limits.receive_maximum", "between 1 and 65,535"),
        ("limits = {max_qos = 1, max_packet_bytes = 1}", 1, "limits.max_packet_bytes", "between 64"),
        ("[[listeners]]\n[[listeners]]\nkind = 'tls'", 2, "listeners[1].certificate_file", "is needed by a tls listener"),
        ("[[listeners]]\nkind = 'udp'", 2, "listeners[0].kind", '"tcp" or "tls"'),
        ("[[listeners]]\nkind = 'unix'", 1, "listeners[0].path", "the socket's file"),
        ("[[listeners]]\nport = 70000", 2, "listeners[0].port", "between 0 and 65,535"),
        ("[[listeners]]\nkind = 'ws'\npath = 'mqtt'", 3, "listeners[0].path", 'must start with "/"'),
        ("[[listeners]]\nclient_certificates = 'required'", 2, "listeners[0].client_certificates", "use tls or wss"),
        ("[[listeners]]\n[[listeners]]", 1, "listeners", "repeat tcp:127.0.0.1:1883"),
        ("listeners = []", 1, "listeners", "at least one"),
        ("[[security.acl]]\naction = 'allow'", 1, "security.acl[0].topic", "is missing"),
        (
            "[security]\nacl = [\n {action = 'allow', topic = '#'},\n {action='deny', tpic = '#'},\n]",
            4,
            "security.acl[1].tpic",
            "`topic`",
        ),
        ("[persistence]\nsync = 'never'", 2, "persistence.sync", '"os" or "fsync"'),
        ("'observability'.\"http_port\" = -1", 1, "observability.http_port", "between 0"),
        (
            'response_information = """\n[limits]\nmax_qos = 7\n"""\n[limits]\nmax_qos = 7',
            6,
            "limits.max_qos",
            "0, 1 or 2",
        ),
        ("server_reference = '''\nmax = 1'''\nshutdown_timeout_seconds = -1", 3, "shutdown_timeout_seconds", "negative"),
    ],
)
def test_refusals_name_line_and_key(tmp_path: Path, text: str, line: int, key: str, says: str) -> None:
    error = refused(tmp_path, text)
    assert (error.line, error.key) == (line, key)
    assert says in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(("text", "line"), [("a = ", 1), ("\n\n[limits\n", 3), ("x = 1\nx = 2", 2), ("a = 'b", 1)])
def test_broken_toml_names_the_line(tmp_path: Path, text: str, line: int) -> None:
    assert refused(tmp_path, text).line == line


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration: No such file"):
        load_broker_config(tmp_path / "none.toml")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "broker.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load_broker_config(tmp_path / "broker.toml")


def test_values_are_checked_in_python_too() -> None:
    with pytest.raises(ValueError, match="`max_connections` must be at least 1"):
        Limits(max_connections=0)


@pytest.mark.parametrize("bound", [-1, 2**63, float("inf"), float("nan")])
@pytest.mark.parametrize("field", ["max_records", "max_bytes", "max_age_seconds"])
def test_bounds_of_retention_are_numbers_that_can_be_kept(field: str, bound: float) -> None:
    with pytest.raises(ValueError, match=f"`{field}` must be between 0 and"):
        Retention(**{field: bound})  # type: ignore[arg-type]
