"""Tokens of the API: derived, read from a file, and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearcast.controller.tokens import derived_token, read_tokens
from nearcast.errors import ConfigError


def test_the_derived_token_depends_on_the_secret_and_does_not_show_it() -> None:
    token = derived_token(b"the secret of a fabric")
    assert token == derived_token(b"the secret of a fabric")
    assert token != derived_token(b"the secret of another")
    assert "secret" not in token


def test_tokens_of_a_file_have_their_rights(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# comment\n\nwriting-token-1234\nread reading-token-1234\n")
    tokens = read_tokens(str(path), b"secret")
    assert tokens.right_of("writing-token-1234") == "write"
    assert tokens.right_of("reading-token-1234") == "read"
    assert tokens.right_of(derived_token(b"secret")) == "write"
    for wrong in ("", "read", "reading-token-123", "read reading-token-1234", "# comment"):
        assert tokens.right_of(wrong) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [("short\n", ":1: a token has at least 16"), ("ok-token-123456789\nwrite another-token-123\n", ":2: write one token")],
)
def test_a_file_that_makes_no_sense_says_where(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_tokens(str(path), b"secret")


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the tokens"):
        read_tokens(str(tmp_path / "none"), b"secret")
