"""``$SYS/broker/...``: the broker's own figures as retained messages, under the names that Mosquitto's users know.

Values that did not change are not published again. Load figures are moving averages per minute, over 1, 5 and 15 minutes, of
events per minute.

The names mean what they mean there: *messages* are MQTT packets of any type, *publish/messages* are PUBLISH packets,
*connections* are CONNECT packets and *sockets* are transports. ``messages/sent`` is not among them: the engine does not count
its answers, and a figure of something else under a known name would be worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nearcast import __version__
from nearcast.mqtt.effects import Stats

_WINDOWS_MINUTES = (1, 5, 15)


def counters(stats: Stats, subscriptions: int) -> dict[str, int]:
    """Topic (below ``$SYS/broker/``) and value of everything that is simply counted."""
    return {
        "clients/connected": stats.connected_clients,
        "clients/total": stats.sessions,
        "clients/disconnected": max(0, stats.sessions - stats.connected_clients),
        "clients/expired": stats.sessions_expired,
        "bytes/received": stats.bytes_received,
        "bytes/sent": stats.bytes_sent,
        "messages/received": packets_received(stats),
        "publish/messages/received": sum(stats.publishes_received),
        "publish/messages/sent": publishes_sent(stats),
        "publish/messages/dropped": dropped(stats),
        "publish/bytes/received": stats.publish_bytes_received,
        "publish/bytes/sent": stats.publish_bytes_sent,
        "messages/stored": stats.queued_messages + stats.retained_messages,
        "store/messages/count": stats.queued_messages + stats.retained_messages,
        "store/messages/bytes": stats.queued_bytes + stats.retained_bytes,
        "retained messages/count": stats.retained_messages,
        "subscriptions/count": subscriptions,
    }


def packets_received(stats: Stats) -> int:
    """MQTT packets of any type. The engine counts PUBLISH packets by QoS, and ``packets_received`` are all others."""
    return stats.packets_received + sum(stats.publishes_received)


def publishes_sent(stats: Stats) -> int:
    """PUBLISH packets sent, those sent again after a reconnect included."""
    return sum(stats.publishes_sent) + stats.resent


def dropped(stats: Stats) -> int:
    """Messages that some receiver did not get, whatever the reason."""
    return (
        stats.dropped_slow_consumer
        + stats.dropped_queue_full
        + stats.dropped_expired
        + stats.dropped_too_large
        + stats.dropped_not_authorized
    )


class LoadAverage:
    """Exponentially weighted events per minute over several windows."""

    def __init__(self) -> None:
        self._averages = [0.0 for _ in _WINDOWS_MINUTES]
        self._last_total = 0
        self._started = False

    def update(self, total: int, seconds: float) -> list[float]:
        per_minute = (total - self._last_total) * 60.0 / seconds
        self._last_total = total
        for index, minutes in enumerate(_WINDOWS_MINUTES):
            weight = math.exp(-seconds / (minutes * 60.0)) if self._started else 0.0
            self._averages[index] = self._averages[index] * weight + per_minute * (1.0 - weight)
        self._started = True
        return self._averages


class SysTopics:
    """Publishes the figures through ``publish(topic, payload)``, which retains them. ``others`` adds what only we have."""

    def __init__(
        self,
        stats: Stats,
        subscriptions: Callable[[], int],
        publish: Callable[[str, bytes], None],
        others: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self._stats = stats
        self._subscriptions = subscriptions
        self._publish = publish
        self._others = others
        self._published: dict[str, bytes] = {}
        self._maximum_clients = 0
        self._loads = {
            name: LoadAverage()
            for name in (
                "messages/received",
                "publish/received",
                "publish/sent",
                "publish/dropped",
                "bytes/received",
                "bytes/sent",
                "connections",
                "sockets",
            )
        }

    def update(self, uptime_seconds: float, elapsed_seconds: float) -> None:
        """Publish what changed since the last call, ``elapsed_seconds`` ago."""
        stats = self._stats
        figures: dict[str, str] = {
            "version": f"nearcast version {__version__}",
            "uptime": f"{int(uptime_seconds)} seconds",
        }
        figures.update((name, str(value)) for name, value in counters(stats, self._subscriptions()).items())
        figures.update((name, str(value)) for name, value in self._others().items())
        self._maximum_clients = max(self._maximum_clients, stats.connected_clients)
        figures["clients/maximum"] = str(self._maximum_clients)
        totals = {
            "messages/received": packets_received(stats),
            "publish/received": sum(stats.publishes_received),
            "publish/sent": publishes_sent(stats),
            "publish/dropped": dropped(stats),
            "bytes/received": stats.bytes_received,
            "bytes/sent": stats.bytes_sent,
            "connections": stats.connects_accepted + stats.connects_refused,
            "sockets": stats.connections_opened,
        }
        for name, load in self._loads.items():
            averages = load.update(totals[name], max(elapsed_seconds, 0.001))
            for minutes, average in zip(_WINDOWS_MINUTES, averages, strict=True):
                figures[f"load/{name}/{minutes}min"] = f"{average:.2f}"
        for name, text in figures.items():
            payload = text.encode("ascii")
            if self._published.get(name) != payload:
                self._published[name] = payload
                self._publish(f"$SYS/broker/{name}", payload)
