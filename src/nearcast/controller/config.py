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
        for field in ("port", "http_port"):
            value = getattr(self, field)
            if value is not None and not 0 <= value <= 65_535:
                raise ValueError(f"`{field}` must be between 0 and 65,535")
        for field in ("interval_seconds", "ping_interval_ms", "period_seconds", "probe_interval_seconds"):
            if getattr(self, field) <= 0:
                raise ValueError(f"`{field}` must be above 0")
        if self.pings < 1:
            raise ValueError("`pings` must be at least 1")
        if not 0 <= self.threshold <= 1:
            raise ValueError("`threshold` must be between 0 and 1")
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("`certificate_file` and `key_file` go together")

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
