"""What a scenario's ``settings`` may say to the protocol ``fabric``; what each means is told in its module."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from nearcast.errors import ConfigError
from nearcast.fabricconfig import Fabric as LinkSettings
from nearcast.scenario.scenario import Scenario
from nearcast.simulation.cloud_streams import split_url
from nearcast.simulation.mqtt import MqttSettings

NO_FILE: Final = "the secret of a simulated fabric"
"""In the place of a ``secret_file``, which no simulated node reads."""


class FabricSettings(MqttSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    links: tuple[tuple[str, str], ...] | None = None
    fabric: LinkSettings = LinkSettings()
    moves_per_minute: float = 0.0
    lcm: dict[str, float] = msgspec.field(default_factory=dict)
    merge_kills: float = 0.0
    migrations_per_minute: float = 0.0
    migrations_at_once: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.moves_per_minute <= 1e6:
            raise ValueError("`moves_per_minute` must be between 0 and 1,000,000")
        if not 0.0 <= self.migrations_per_minute <= 1e6:
            raise ValueError("`migrations_per_minute` must be between 0 and 1,000,000")
        if not 1 <= self.migrations_at_once <= 10_000:
            raise ValueError("`migrations_at_once` must be between 1 and 10,000")
        if not 0.0 <= self.merge_kills <= 1.0:
            raise ValueError("`merge_kills` is a share: between 0 and 1")
        if any(lcm < 0.0 for lcm in self.lcm.values()):
            raise ValueError("`lcm` must not be negative")

    @property
    def has_owned(self) -> bool:
        """Whether there are topics of class ``owned``."""
        return any(rule.topic_class == "owned" and not rule.replica_set for rule in self.fabric.classes)

    @property
    def has_sets(self) -> bool:
        """Whether there are topics that replica sets keep."""
        return any(rule.replica_set for rule in self.fabric.classes)

    @property
    def cloud(self) -> tuple[str, int] | None:
        """Host and port of the cloud's broker."""
        url = self.fabric.groups.cloud
        return None if url is None else split_url(url)


def settings_of(scenario: Scenario) -> FabricSettings:
    """The settings of a scenario; raises :class:`~nearcast.errors.ConfigError`."""
    settings: dict[str, Any] = dict(scenario.settings)
    links = settings.get("fabric")
    if isinstance(links, dict):
        settings["fabric"] = {"secret_file": NO_FILE, **links}
    try:
        return msgspec.convert(settings, FabricSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"`settings` of protocol fabric: {error}", key="settings") from None
