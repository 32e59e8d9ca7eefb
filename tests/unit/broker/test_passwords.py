"""The password file: lines, hashes, atomic replacement."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from nearcast.broker.passwords import (
    PasswordTable,
    ScramVerifier,
    ScryptVerifier,
    load_passwords,
    parse_verifier,
    store_user,
    username_fault,
)
from nearcast.errors import ConfigError

CHEAP = 10


def cheap(password: bytes) -> ScryptVerifier:
    return ScryptVerifier.create(password, CHEAP)


def test_a_hash_verifies_its_password_and_no_other() -> None:
    verifier = parse_verifier(str(cheap(b"secret")))
    assert verifier.verify(b"secret")
    assert not verifier.verify(b"Secret")
    assert not verifier.verify(b"")


def test_the_default_cost_is_at_least_two_to_the_fifteen() -> None:
    assert str(ScryptVerifier.create(b"x")).startswith("$scrypt$ln=15,r=8,p=1$")


def test_two_hashes_of_one_password_differ() -> None:
    assert str(cheap(b"x")) != str(cheap(b"x"))


def test_a_known_vector() -> None:
    """RFC 7914 section 12, third vector, of which ours are the first 32 bytes."""
    digest = bytes.fromhex("7023bdcb3afd7348461c06cd81fd38ebfda8fbba904f8e3ea9b543f6545da1f2")
    assert ScryptVerifier(14, 8, 1, b"SodiumChloride", digest).verify(b"pleaseletmein")


def test_scram_keys_verify_plain_passwords_too() -> None:
    verifier = parse_verifier(str(ScramVerifier.create(b"pencil", 4_096)))
    assert verifier.verify(b"pencil")
    assert not verifier.verify(b"pen")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "$scrypt$ln=15,r=8,p=1$salt",
        "$scrypt$ln=9,r=8,p=1$AAAAAAAAAAAAAAAAAAAAAA$" + "A" * 43,
        "$scrypt$ln=30,r=8,p=1$AAAAAAAAAAAAAAAAAAAAAA$" + "A" * 43,
        "$scrypt$ln=20,r=32,p=16$AAAAAAAAAAAAAAAAAAAAAA$" + "A" * 43,
        "$scrypt$ln=15,r=8,p=1$A$" + "A" * 43,
        "$scrypt$ln=15,r=8,p=1$AAAAAAAAAAAAAAAAAAAAAA$A",
        "$scram-sha-256$i=10$AAAAAAAAAAAAAAAAAAAAAA$" + "A" * 43 + "$" + "A" * 43,
        "$scram-sha-256$i=4000$AAAAAAAAAAAAAAAAAAAAAA$" + "A" * 43 + "$" + "A" * 43,
    ],
)
def test_unusable_hashes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_verifier(text)


def test_unknown_users_are_refused_after_the_same_work() -> None:
    table = PasswordTable({"ann": cheap(b"secret")})
    assert table.verify("ann", b"secret")
    assert not table.verify("ann", b"wrong")
    assert not table.verify("bob", b"secret")
    assert table.fingerprint("bob") == b""
    assert table.fingerprint("ann")
    assert not PasswordTable({}).verify("bob", b"x")
    assert not PasswordTable({"ann": ScramVerifier.create(b"x", 4_096)}).verify("bob", b"x")


def test_store_add_change_delete(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    assert not store_user(str(path), "ann", cheap(b"one"))
    assert not store_user(str(path), "bob", cheap(b"two"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    table = load_passwords(str(path))
    assert len(table) == 2
    assert table.verify("ann", b"one")
    assert store_user(str(path), "ann", cheap(b"three"))
    table = load_passwords(str(path))
    assert table.verify("ann", b"three")
    assert table.verify("bob", b"two")
    assert store_user(str(path), "ann", None)
    assert load_passwords(str(path)).lookup("ann") is None
    assert not store_user(str(path), "ann", None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["passwords"]


def test_comments_and_order_stay(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    path.write_text(f"# the team\nann:{cheap(b'1')}\n\nbob:{cheap(b'2')}\n", encoding="utf-8")
    store_user(str(path), "ann", cheap(b"3"))
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# the team"
    assert [line.partition(":")[0] for line in lines[1:]] == ["ann", "", "bob"]


def test_a_link_to_the_file_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    link = tmp_path / "link"
    real.write_text("", encoding="utf-8")
    link.symlink_to(real)
    store_user(str(link), "ann", cheap(b"1"))
    assert link.is_symlink()
    assert load_passwords(str(real)).lookup("ann") is not None


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("# x\nann\n", 2, "none that `nearcast passwd` writes"),
        ("ann:secret\n", 1, "none that `nearcast passwd` writes"),
        (f":{cheap(b'1')}\n", 1, "must not be empty"),
        (f"ann:{cheap(b'1')}\nann:{cheap(b'2')}\n", 2, "twice"),
        (f" ann:{cheap(b'1')}\n", 1, "printable"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, line: int, says: str) -> None:
    path = tmp_path / "passwords"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says) as caught:
        load_passwords(str(path))
    assert caught.value.line == line
    assert caught.value.path == str(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_passwords(str(tmp_path / "none"))


@pytest.mark.parametrize("name", ["", "a:b", "#a", " a", "a\n", "a\x00"])
def test_user_names_that_the_file_cannot_hold(name: str) -> None:
    assert username_fault(name)


def test_ordinary_user_names() -> None:
    assert not username_fault("ann@example.org")
    assert not username_fault("Jörg Müller")
