"""Where a broker is: URLs, server references, TLS options. Parses and describes; opens nothing."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

from nearcast.errors import ConfigError

DEFAULT_PORTS = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443, "unix": 0}
_ALIASES = {"tcp": "mqtt", "mqtt+tls": "mqtts", "ssl": "mqtts", "tls": "mqtts"}
BULK_PORTS = {"nearcast": 7883, "nearcasts": 7884}
_SECURE = ("mqtts", "wss", "nearcasts")


@dataclass(frozen=True)
class TlsOptions:
    """How to trust the broker, and how to be trusted by it."""

    ca_file: str | None = None
    """Certificates to trust, PEM; unset uses the system's."""

    certificate_file: str | None = None
    """Our own certificate (chain), PEM, for brokers that ask for one."""

    key_file: str | None = None
    """The certificate's private key, when it is not in the same file."""

    key_password: str | None = None
    """The password of the private key."""

    check_hostname: bool = True
    """Whether the certificate must name the host of the URL."""

    verify: bool = True
    """Whether the certificate is checked at all. Without, anyone on the way can read and change everything."""

    def context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if not self.check_hostname or not self.verify:
                context.check_hostname = False
            if not self.verify:
                context.verify_mode = ssl.CERT_NONE
            if self.certificate_file is not None:
                context.load_cert_chain(self.certificate_file, self.key_file, self.key_password)
        except OSError as error:
            files = ", ".join(name for name in (self.ca_file, self.certificate_file, self.key_file) if name)
            raise ConfigError(f"cannot use the TLS files {files}: {error.strerror or error}") from error
        return context


@dataclass(frozen=True)
class Endpoint:
    """One broker's address. ``scheme`` is mqtt, mqtts, ws, wss or unix; ``path`` is that of the WebSocket or Unix socket."""

    scheme: str
    host: str
    port: int
    path: str = ""
    username: str | None = None
    password: str | None = None

    @property
    def secure(self) -> bool:
        return self.scheme in _SECURE

    def __str__(self) -> str:
        """The URL without its credentials: this ends up in messages and logs."""
        if self.scheme == "unix":
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    def credentials(self, username: str | None, password: str | bytes | None) -> tuple[str | None, bytes | None]:
        """User name and password to send: those given, else the URL's."""
        password = password if password is not None else self.password
        encoded = password.encode() if isinstance(password, str) else password
        return (username if username is not None else self.username), encoded

    def referred(self, reference: str) -> Endpoint:
        """The endpoint a Server Reference names (section 4.11): a URL or ``host[:port]``; of several, the first.

        The credentials go along, so a reference never leads from an encrypted to an unencrypted connection."""
        first = reference.split()[0] if reference.split() else ""
        if "://" in first:
            other = parse_url(first)
        else:
            scheme = "mqtt" if self.scheme == "unix" else self.scheme
            other = parse_url(f"{scheme}://{first}{self.path if scheme in ('ws', 'wss') else ''}")
        if self.secure and not other.secure:
            raise ConfigError(f"{self} refers to {other}, which is not encrypted: not following")
        return replace(other, username=self.username, password=self.password)


def parse_url(url: str) -> Endpoint:
    """An endpoint from ``mqtt://``, ``mqtts://``, ``ws://``, ``wss://`` or ``unix://``; without a scheme, ``mqtt://``."""
    try:
        parts = urlsplit(url if "://" in url else f"mqtt://{url}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{_shown(url)} is not a URL: {error}") from error
    scheme = _ALIASES.get(parts.scheme, parts.scheme)
    if scheme not in DEFAULT_PORTS:
        raise ConfigError(f"{_shown(url)}: unknown scheme {parts.scheme!r}, use mqtt://, mqtts://, ws://, wss:// or unix://")
    username = unquote(parts.username) if parts.username is not None else None
    password = unquote(parts.password) if parts.password is not None else None
    if scheme == "unix":
        path = unquote(parts.path)
        if parts.hostname or not path:
            raise ConfigError(
                f"{_shown(url)}: write a Unix socket with three slashes and its full path, unix:///run/broker.sock"
            )
        return Endpoint(scheme, "", 0, path, username, password)
    if not parts.hostname:
        raise ConfigError(f"{_shown(url)} names no host: write it as {scheme}://HOST:PORT")
    if port == 0:
        raise ConfigError(f"{_shown(url)}: port 0 cannot be connected to")
    path = ""
    if scheme in ("ws", "wss"):
        path = (parts.path if parts.path not in ("", "/") else "/mqtt") + (f"?{parts.query}" if parts.query else "")
    elif parts.path not in ("", "/"):
        raise ConfigError(f"{_shown(url)}: an {scheme}:// URL has no path; topics are given separately")
    return Endpoint(scheme, parts.hostname, port or DEFAULT_PORTS[scheme], path, username, password)


def parse_bulk_url(url: str) -> Endpoint:
    """The endpoint of a bulk port from ``nearcast://[USER:PASSWORD@]HOST[:PORT]``, or ``nearcasts://`` for TLS."""
    try:
        parts = urlsplit(url if "://" in url else f"nearcast://{url}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{_shown(url)} is not a URL: {error}") from error
    if parts.scheme not in BULK_PORTS:
        raise ConfigError(
            f"{_shown(url)}: topic logs are served on the bulk port; write nearcast://HOST:7883, or nearcasts:// for TLS"
        )
    if not parts.hostname:
        raise ConfigError(f"{_shown(url)} names no host: write it as {parts.scheme}://HOST:PORT")
    if parts.path not in ("", "/") or parts.query:
        raise ConfigError(f"{_shown(url)}: a {parts.scheme}:// URL has no path; topics are given separately")
    username = unquote(parts.username) if parts.username is not None else None
    password = unquote(parts.password) if parts.password is not None else None
    return Endpoint(parts.scheme, parts.hostname, port or BULK_PORTS[parts.scheme], "", username, password)


def _shown(url: str) -> str:
    """A URL for a message: whatever looks like credentials is cut out."""
    scheme, separator, rest = url.rpartition("://")
    return repr(f"{scheme}{separator}{rest.rpartition('@')[2]}")
