"""How a broker introduces itself at the cloud, and the topics on which brokers speak there.

=============================  ==========================================================================================
``<prefix>/leaders/<region>``  leaders' announcements
``<prefix>/marks/<name>``      a broker's markers, to itself (:mod:`nearcast.fabric.cloud_markers`)
``<prefix>/filters/<name>/…``  what a broker is subscribed to, to itself (:mod:`nearcast.fabric.cloud_memory`)
=============================  ==========================================================================================
"""

from __future__ import annotations

from typing import Final

from nearcast.config import Limits
from nearcast.fabricconfig import Groups
from nearcast.mqtt.client_events import ClientSettings
from nearcast.mqtt.packets import MQTT_3_1_1, MQTT_5

WINDOW_MESSAGES: Final = 1_000
WINDOW_MESSAGES_3_1_1: Final = 20
"""Messages on their way to the cloud that it has not acknowledged. A 3.1.1 server cannot say how many it takes: this is what
Mosquitto does by default, which throws out whoever sends more."""

MAX_WAITING: Final = 1_000_000
"""Whoever asks :meth:`~nearcast.fabric.cloud.Cloud.has_room` before each publication never gets near: it bounds a mistake."""

MAX_PACKET_IDENTIFIER: Final = 2_048
"""Enough for the window and for requests, and few enough to release them all after a crash."""

SESSION_SECONDS: Final = 86_400
"""How long the cloud is asked to keep the session of a broker that is away: as long as other brokers keep its messages."""

KEEP_ALIVE_SECONDS: Final = 10
PING_TIMEOUT_SECONDS: Final = 5.0

PACKET_OVERHEAD_BYTES: Final = 65_536
"""What a packet of the cloud may be longer than one of a client: identities come on top."""


def cloud_version(settings: Groups) -> int:
    """The MQTT version that is spoken with the cloud."""
    return MQTT_5 if settings.cloud_version == "5" else MQTT_3_1_1


def client_settings(settings: Groups, name: str, limits: Limits) -> ClientSettings:
    """How a broker of this name introduces itself at the cloud."""
    version = cloud_version(settings)
    return ClientSettings(
        client_id=f"{settings.prefix}/{name}",
        version=version,
        clean_start=False,
        keep_alive_seconds=KEEP_ALIVE_SECONDS,
        ping_timeout_seconds=PING_TIMEOUT_SECONDS,
        username=settings.cloud_username,
        session_expiry_seconds=SESSION_SECONDS,
        max_packet_bytes=limits.max_packet_bytes + PACKET_OVERHEAD_BYTES,
        max_inflight=WINDOW_MESSAGES if version == MQTT_5 else WINDOW_MESSAGES_3_1_1,
        max_waiting=MAX_WAITING,
        resubscribe=False,
        max_packet_identifier=MAX_PACKET_IDENTIFIER,
        releases_forgotten=True,
        lowers_publishes=True,
    )


def topic_level(name: str) -> str:
    """A name as one level of a topic: what has a meaning there is written as in a URL."""
    for special in "%/+#":
        name = name.replace(special, f"%{ord(special):02X}")
    return name


def marks_topic(settings: Groups, name: str) -> str:
    """Where a broker's markers go to and come from."""
    return f"{settings.prefix}/marks/{topic_level(name)}"


def memory_topic(settings: Groups, name: str) -> str:
    """What the topics begin with where a broker writes down its subscriptions."""
    return f"{settings.prefix}/filters/{topic_level(name)}/"
