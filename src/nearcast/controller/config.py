"""What a controller can be told, on the command line or in the table ``[controller]`` of a TOML file; written by the rules of
:mod:`nearcast.config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from nearcast.config import Listener
from nearcast.configfile import Document
from nearcast.errors import ConfigError
from nearcast.fabric.controlling import ControlSettings
from nearcast.fabric.migrations import Workflow
from nearcast.fabric.topic_settings import TopicSettings
from nearcast.membership.monitoring import MonitorSettings
from nearcast.placement.assignment import Policy
from nearcast.placement.topics import PlacementSettings

OPTIONS = {
    "secret_file": "--fabric-secret",
    "name": "--name",
    "port": "--port",
    "certificate_file": "--certificate",
    "key_file": "--key",
    "http_port": "--http-port",
    "http_certificate_file": "--http-certificate",
    "http_key_file": "--http-key",
    "interval_seconds": "--interval",
    "threshold": "--threshold",
    "ping_interval_ms": "--ping-interval-ms",
    "pings": "--pings",
    "period_seconds": "--period",
    "planner": "--planner",
    "executors": "--executors",
    "plan_interval_seconds": "--plan-interval",
}
"""What settings are called on the command line, where that is not after their own name."""


class ControllerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One controller."""

    secret_file: str = ""
    """File with the secret that all nodes of the fabric share. Needed."""

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

    threshold: float = 0.1
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

    planner: Literal["own", "spark", "none"] = "own"
    """Who decides where topics of class ``owned`` belong. "own": the controller, from what brokers report. "spark": whoever
    publishes plans on ``$nearcast/plan``, as ``nearcast pipeline run telemetry`` does. "none": nobody. Topics of a broker that
    dies or stops get another owner in any case."""

    executors: int = 16
    """Topics that change owners at the same time. Too low takes long when many have to; more than some dozens gains little."""

    plan_interval_seconds: float = 1.0
    """Least seconds between two plans. One is made when reports have come, so a broker's ``fabric.telemetry.interval_seconds``
    decides how soon a violated bound is noticed. Too low costs the controller's processor; too high leaves topics where they
    are."""

    migration_timeout_seconds: float = 30.0
    """How long a broker may say nothing of a topic that it was to hand over. Then it is tried again."""

    settle_seconds: float = 10.0
    """How long a controller that was just started waits for brokers that others know of, before it makes new owners of topics.
    Too low may take a topic away from a broker that is slow to come back; too high keeps messages waiting if one is dead."""

    migration_workflow: Workflow = "handover"
    """How topics change owners. "release" is the baseline of a published study, which loses order; for comparison only."""

    placement: PlacementSettings = PlacementSettings()
    """How owners of topics are chosen: when a broker is overloaded, what a move has to gain."""

    def __post_init__(self) -> None:
        for field in ("port", "http_port"):
            port = getattr(self, field)
            if port is not None and not 0 <= port <= 65_535:
                raise ValueError(f"`{field}` must be between 0 and 65,535")
        for field, least, most in (
            ("interval_seconds", 0.1, 86_400),
            ("ping_interval_ms", 1, 60_000),
            ("pings", 1, 1_000),
            ("period_seconds", 0.1, 86_400),
            ("threshold", 0, 1),
            ("probe_interval_seconds", 0.01, 3_600),
            ("fail_after_seconds", 0.01, 86_400),
            ("executors", 1, 10_000),
            ("plan_interval_seconds", 0.01, 3_600),
            ("migration_timeout_seconds", 0.1, 3_600),
            ("settle_seconds", 0, 3_600),
        ):
            if not least <= getattr(self, field) <= most:  # which a value that is no number is not, either
                raise ValueError(f"`{field}` must be between {least:g} and {most:,}")
        if self.name is not None and not (0 < len(self.name.encode()) <= 128 and self.name.isprintable()):
            raise ValueError("`name` must be 1 to 128 characters")
        for certificate, key in (("certificate_file", "key_file"), ("http_certificate_file", "http_key_file")):
            if (getattr(self, certificate) is None) != (getattr(self, key) is None):
                raise ValueError(f"`{certificate}` and `{key}` go together")

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
        return ControlSettings(
            interval_s=self.interval_seconds,
            policy=Policy(threshold=self.threshold),
            topics=TopicSettings(
                planner=self.planner,
                executors=self.executors,
                plan_interval_s=self.plan_interval_seconds,
                migration_timeout_s=self.migration_timeout_seconds,
                settle_s=self.settle_seconds,
                workflow=self.migration_workflow,
                placement=self.placement,
            ),
        )

    def monitoring(self) -> MonitorSettings:
        """How nodes measure."""
        return MonitorSettings(pings=self.pings, ping_interval_s=self.ping_interval_ms / 1e3, period_s=self.period_seconds)


class _ControllerFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    controller: ControllerConfig = ControllerConfig()


def load_controller_config(path: str | Path) -> ControllerConfig:
    """Read the table ``[controller]`` of a TOML file. File names in it are taken relative to its own directory."""
    read = Document.read(path, "the configuration").convert(_ControllerFile).controller
    base = Path(path).parent
    files = {}
    for field in (
        "secret_file",
        "certificate_file",
        "key_file",
        "http_certificate_file",
        "http_key_file",
        "token_file",
    ):
        value = getattr(read, field)
        if value:
            files[field] = str(base / value)
    return msgspec.structs.replace(read, **files)


def with_options(config: ControllerConfig, given: dict[str, Any]) -> ControllerConfig:
    """With what the command line says; ``None`` leaves the file's word. Errors name the options."""
    changed = {name: value for name, value in given.items() if value is not None}
    try:
        made = msgspec.structs.replace(config, **changed)
        made.__post_init__()
    except (ValueError, msgspec.ValidationError) as error:
        words = str(error)
        for field, option in OPTIONS.items():
            words = words.replace(f"`{field}`", option)
        raise ConfigError(words) from error
    if not made.secret_file:
        raise ConfigError("a fabric has a secret: give its file with --fabric-secret (`nearcast secret FILE` makes one)")
    return made
