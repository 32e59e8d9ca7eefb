"""What a controller has to know. All of it comes from the command line: there is little, and no state to configure."""

from __future__ import annotations

import msgspec

from nearcast.config import Listener
from nearcast.fabric.controlling import ControlSettings
from nearcast.membership.monitoring import MonitorSettings
from nearcast.placement.assignment import MIGRATION_THRESHOLD, Policy


class ControllerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One controller."""

    secret_file: str
    """File with the secret that all nodes of the fabric share."""

    name: str | None = None
    """What it is called in logs of others. Unset: after its machine."""

    host: str = "127.0.0.1"
    """Address for nodes, over TCP and, for monitoring, over UDP. The default is reachable from this machine only."""

    port: int = 1885
    """Port of both. 0 takes a free one."""

    certificate_file: str | None = None
    """PEM file with the certificate for links; nodes then need ``tls``. Unset: links are authenticated but not encrypted."""

    key_file: str | None = None
    """PEM file with that certificate's private key."""

    http_host: str = "127.0.0.1"
    """Address of the HTTP API."""

    http_port: int | None = 8885
    """Port of the HTTP API. 0 takes a free one; unset: no API."""

    http_certificate_file: str | None = None
    """PEM file with the certificate of the HTTP API. Unset: plain HTTP, for this machine or behind a proxy."""

    http_key_file: str | None = None
    """PEM file with that certificate's private key."""

    token_file: str | None = None
    """Further tokens for the API, one per line. The one that ``nearcast`` derives from the secret always counts."""

    interval_seconds: float = 15.0
    """Seconds between reconfigurations."""

    threshold: float = MIGRATION_THRESHOLD
    """θ of the reconfiguration: the share of a group's connections by which two brokers must differ to move for balance."""

    ping_interval_ms: float = 250.0
    """Milliseconds between the pings of a measurement."""

    pings: int = 10
    """Pings of a measurement."""

    period_seconds: float = 15.0
    """How old a measured path may get."""

    probe_interval_seconds: float = 1.0
    """How often a silent link is probed."""

    fail_after_seconds: float = 10.0
    """A link that is silent for so long is closed. Whether its node is alive is found out before, and otherwise."""

    def __post_init__(self) -> None:
        # Options are named as on the command line, where all of it comes from.
        for option, port in (("--port", self.port), ("--http-port", self.http_port)):
            if port is not None and not 0 <= port <= 65_535:
                raise ValueError(f"{option} must be between 0 and 65,535")
        for option, value, least, most in (
            ("--interval", self.interval_seconds, 0.1, 86_400),
            ("--ping-interval-ms", self.ping_interval_ms, 1, 60_000),
            ("--pings", self.pings, 1, 1_000),
            ("--period", self.period_seconds, 0.1, 86_400),
            ("--threshold", self.threshold, 0, 1),
            ("probe_interval_seconds", self.probe_interval_seconds, 0.01, 3_600),
            ("fail_after_seconds", self.fail_after_seconds, 0.01, 86_400),
        ):
            if not least <= value <= most:  # which a value that is no number is not, either
                raise ValueError(f"{option} must be between {least:g} and {most:,}")
        if self.name is not None and not (0 < len(self.name.encode()) <= 128 and self.name.isprintable()):
            raise ValueError("--name must be 1 to 128 characters")
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("--certificate and --key go together")
        if (self.http_certificate_file is None) != (self.http_key_file is None):
            raise ValueError("--http-certificate and --http-key go together")

    def listener(self) -> Listener:
        """Where nodes connect."""
        if self.certificate_file is not None:
            return Listener(
                kind="link-tls",
                host=self.host,
                port=self.port,
                certificate_file=self.certificate_file,
                key_file=self.key_file,
            )
        return Listener(kind="link", host=self.host, port=self.port)

    def control(self) -> ControlSettings:
        """What the machine needs of it."""
        return ControlSettings(interval_s=self.interval_seconds, policy=Policy(threshold=self.threshold))

    def monitoring(self) -> MonitorSettings:
        """How nodes measure."""
        return MonitorSettings(pings=self.pings, ping_interval_s=self.ping_interval_ms / 1e3, period_s=self.period_seconds)
