"""Asking a controller over its HTTP API: where it is, the token, one request, and errors that say what to do."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

from nearcast.errors import ConfigError, NearcastError

DEFAULT_API = "http://127.0.0.1:8885"
TIMEOUT_SECONDS = 10.0
PANEL = "Controller"

Api = Annotated[
    str, typer.Option("--api", envvar="NEARCAST_API", metavar="URL", help="The controller's API.", rich_help_panel=PANEL)
]
Secret = Annotated[
    str | None,
    typer.Option(
        "--fabric-secret",
        envvar="NEARCAST_FABRIC_SECRET",
        metavar="FILE",
        help="The fabric's secret, from which a token follows.",
        rich_help_panel=PANEL,
    ),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="A token for the API instead (or $NEARCAST_TOKEN).",
        rich_help_panel=PANEL,
    ),
]
CaFile = Annotated[
    str | None,
    typer.Option("--ca", metavar="FILE", help="Authorities (PEM) that vouch for an https API.", rich_help_panel=PANEL),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


class ControllerClient:
    """One controller's API."""

    def __init__(self, api: str, secret: str | None, token_file: str | None, ca: str | None = None) -> None:
        parts = urllib.parse.urlsplit(api)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"{api!r} is no address of a controller: write http://HOST:PORT")
        self._api = api.rstrip("/")
        self._token = _token(secret, token_file)
        self._context: ssl.SSLContext | None = None
        if parts.scheme == "https":
            try:
                self._context = ssl.create_default_context(cafile=ca)
            except OSError as error:
                raise ConfigError(f"the certificate authorities cannot be read: {error.strerror or error}", path=ca) from error

    def get(self, path: str, **query: object) -> Any:
        """What the API says; values that are ``None`` are left out of the query."""
        given = {name: value for name, value in query.items() if value is not None}
        suffix = f"?{urllib.parse.urlencode(given)}" if given else ""
        return self._ask("GET", path + suffix, None)

    def send(self, method: str, path: str, content: object = None) -> Any:
        """Ask for a change."""
        return self._ask(method, path, content)

    def _ask(self, method: str, path: str, content: object) -> Any:
        request = urllib.request.Request(f"{self._api}/api/v1{path}", method=method)  # noqa: S310  # the scheme was checked
        request.add_header("Authorization", f"Bearer {self._token}")
        data = None
        if content is not None:
            data = json.dumps(content).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, data, TIMEOUT_SECONDS, context=self._context) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise NearcastError(self._explain(error)) from error
        except urllib.error.URLError as error:
            reason = getattr(error.reason, "strerror", None) or error.reason
            raise NearcastError(f"no controller answers at {self._api}: {reason}; --api says where it is") from error
        except OSError as error:
            raise NearcastError(f"no controller answers at {self._api}: {error}; --api says where it is") from error
        except (ValueError, http.client.HTTPException) as error:  # whose words are what it sent: not for a terminal
            raise NearcastError(f"what answers at {self._api} is no controller; --api says where it is") from error

    def _explain(self, error: urllib.error.HTTPError) -> str:
        if error.code == 401:
            return f"the controller at {self._api} does not know this token: is it of another fabric?"
        try:
            detail = str(json.load(error)["detail"])
        except (ValueError, KeyError, TypeError, OSError):
            detail = ""
        if not detail or (error.code == 404 and detail == "Not Found"):  # Litestar's words for a path that is none
            return f"what answers at {self._api} is no controller (HTTP {error.code}); --api says where it is"
        return detail


def quoted(name: str) -> str:
    """A name as a part of a path."""
    return urllib.parse.quote(name, safe="")


def _token(secret: str | None, token_file: str | None) -> str:
    if token_file is not None:
        try:
            words = Path(token_file).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"cannot read the token: {reason}", path=token_file) from error
        if not words:
            raise ConfigError("there is no token in the file", path=token_file)
        return words[-1]
    given = os.environ.get("NEARCAST_TOKEN")
    if given and secret is None:
        return given
    if secret is None:
        raise ConfigError("a token is needed: give the fabric's secret with --fabric-secret FILE, or a --token-file")
    # Imported here: whoever has a token needs none of it.
    from nearcast.controller.tokens import derived_token
    from nearcast.serving.secrets import read_secret

    return derived_token(read_secret(secret))
