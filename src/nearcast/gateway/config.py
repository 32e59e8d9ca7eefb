"""What a gateway can be told, on the command line or in a TOML file; written by the rules of :mod:`nearcast.config`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from nearcast.config import LINK_KINDS, Limits, Listener, Observability
from nearcast.configfile import Document
from nearcast.errors import ConfigError
from nearcast.fabricconfig import Fabric
from nearcast.serving.links import join_address, split_address

PLAIN_SCHEMES = {"mqtt": 1883, "mqtts": 8883}
"""Brokers that are not part of a fabric, and the port of each scheme."""


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise ValueError(f"`{field}` {message}")


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything ``nearcast gateway`` can be told."""

    listeners: tuple[Listener, ...] = (Listener(),)
    """Where clients connect: ``tcp``, ``tls``, ``ws``, ``wss`` or ``unix``, as for a broker."""

    fabric: Fabric = Fabric()
    """The fabric this gateway belongs to: its ``name`` there, ``secret_file``, ``controller``, TLS of links. ``peers`` mean
    nothing to a gateway; brokers are named in ``brokers`` or by the controller."""

    brokers: tuple[str, ...] = ()
    """Brokers to use, with or without a controller: link addresses (``host:port``) of brokers of the fabric, or URLs
    (``mqtt://host:port``, ``mqtts://host:port``) of any other MQTT brokers. One gateway has one kind or the other."""

    limits: Limits = Limits()
    """Bounds on clients. ``max_connections``, ``connect_timeout_seconds``, ``max_packet_bytes``, ``max_output_bytes`` and
    ``stall_timeout_seconds`` count here; the rest is the brokers' business."""

    connect_rate_per_second: float = 0.0
    """New connections per second from one address (an IPv6 /64), after a burst of ``connect_burst``; 0 sets no limit."""

    connect_burst: int = 100
    """See ``connect_rate_per_second``."""

    patience_seconds: float = 10.0
    """How long a client waits for a broker when there is none, before it is sent away. Too low sends clients away in a short
    outage; too high keeps them from trying elsewhere."""

    max_kept_bytes: int = 4_194_304
    """Bytes of one client that no broker has acknowledged and that are kept to be sent again. A client that has more is not
    read from until some are acknowledged."""

    moves_at_once: int = 64
    """Clients that may be on their way to another broker at the same time. Too low empties a broker slowly; too high makes
    the brokers do much at once."""

    move_timeout_seconds: float = 10.0
    """How long a move may take before it is given up and the client stays where it is."""

    replay_timeout_seconds: float = 5.0
    """In front of brokers that are not part of a fabric: how long connecting a client to another one may take."""

    shutdown_timeout_seconds: float = 5.0
    """Time that clients get to take their last bytes when the gateway stops."""

    observability: Observability = Observability()
    """Logs, metrics, health. ``sys_interval_seconds`` and ``top_n`` mean nothing to a gateway."""

    def __post_init__(self) -> None:
        for listener in self.listeners:
            served = not listener.kind.startswith("bulk") and listener.kind not in LINK_KINDS
            _require(served, "listeners", f"names {listener.name}: a gateway has listeners for MQTT clients only")
        _require(bool(self.listeners), "listeners", "must not be empty")
        plain = [address for address in self.brokers if "://" in address]
        _require(
            len(plain) in (0, len(self.brokers)), "brokers", "are of one kind: link addresses, or mqtt:// and mqtts:// URLs"
        )
        for address in self.brokers:
            try:
                if "://" in address:
                    plain_address(address)
                else:
                    split_address(address)
            except ConfigError as error:
                raise ValueError(f"`brokers`: {error}") from error
        for field in ("patience_seconds", "move_timeout_seconds", "replay_timeout_seconds"):
            _require(getattr(self, field) > 0, field, "must be above 0")
        for field in ("max_kept_bytes", "moves_at_once", "connect_burst"):
            _require(getattr(self, field) >= 1, field, "must be at least 1")

    def check(self) -> None:
        """Whether a gateway can begin with this. Not checked before: a file may leave to the command line what is missing."""
        if self.plain:
            if self.fabric.controller is not None:
                message = (
                    "brokers that are not part of a fabric have no controller: leave out one of --broker and --controller"
                )
                raise ConfigError(message, key="fabric.controller")
            return
        if not self.brokers and self.fabric.controller is None:
            message = "no brokers are known: name some (--broker HOST:PORT), or a controller that knows them (--controller)"
            raise ConfigError(message, key="brokers")
        if self.fabric.secret_file is None:
            message = "the secret that the brokers have is needed: --fabric-secret FILE"
            raise ConfigError(message, key="fabric.secret_file")

    @property
    def plain(self) -> bool:
        """Whether the brokers behind this gateway are not part of a fabric."""
        return bool(self.brokers) and "://" in self.brokers[0]


def plain_address(url: str) -> tuple[str, int, bool]:
    """Host, port and whether TLS is spoken, of ``mqtt://host:port`` or ``mqtts://host:port``."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    bad = parts.scheme not in PLAIN_SCHEMES or not parts.hostname or port == -1 or parts.path not in ("", "/")
    if bad or parts.query or parts.fragment or parts.username or parts.password:
        raise ConfigError(f"{url!r} is no broker's address: write mqtt://host:port or mqtts://host:port")
    return parts.hostname or "", port or PLAIN_SCHEMES[parts.scheme], parts.scheme == "mqtts"


def plain_name(url: str) -> str:
    """What a broker that is not part of a fabric is called: ``host:port``."""
    host, port, _ = plain_address(url)
    return join_address(host, port)


def load_gateway_config(path: str | Path) -> GatewayConfig:
    """Read a gateway's TOML file. File names in it are taken relative to its own directory."""
    config = Document.read(path, "the configuration").convert(GatewayConfig)
    directory = Path(path).parent

    def anchored(name: str | None) -> str | None:
        return None if name is None else str(directory / name)

    fabric = config.fabric
    return msgspec.structs.replace(
        config,
        listeners=tuple(
            msgspec.structs.replace(
                listener,
                certificate_file=anchored(listener.certificate_file),
                key_file=anchored(listener.key_file),
                ca_file=anchored(listener.ca_file),
                path=anchored(listener.path) if listener.kind == "unix" else listener.path,
            )
            for listener in config.listeners
        ),
        fabric=msgspec.structs.replace(
            fabric,
            secret_file=anchored(fabric.secret_file),
            ca_file=anchored(fabric.ca_file),
            certificate_file=anchored(fabric.certificate_file),
            key_file=anchored(fabric.key_file),
        ),
    )
