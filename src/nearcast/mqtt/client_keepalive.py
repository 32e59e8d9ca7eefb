"""The client's sense of silence: when a ping is due, and when its answer is overdue (section 3.1.2.10).

Silence in either direction is worth a ping: a publisher at QoS 0 hears nothing unless it asks. Any byte counts as an answer,
and while the driver does not read, a missing answer proves nothing.
"""

from __future__ import annotations

from typing import Final

from nearcast.mqtt.client_events import ClientSettings

NEVER: Final = float("inf")

#: A PINGREQ leaves before the keep-alive is over, so that its way to the server fits in.
PING_AT_FRACTION: Final = 0.8


class KeepAlive:
    """One connection at a time: :meth:`opened` with its transport, :meth:`start` with its CONNACK, :meth:`stop` at its end."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._keep_alive_seconds = 0
        self._reading = True
        self._last_sent = 0.0
        self._last_received = 0.0
        self._answer_deadline = NEVER

    def opened(self, now: float) -> None:
        self._reading = True
        self._last_received = now

    def start(self, keep_alive_seconds: int) -> None:
        """The interval that holds on this connection; 0 sends no pings."""
        self._keep_alive_seconds = keep_alive_seconds
        self._answer_deadline = NEVER

    def stop(self) -> None:
        self._answer_deadline = NEVER

    def set_reading(self, reading: bool, now: float) -> None:
        self._reading = reading
        if reading:
            self.received(now)

    def sent(self, now: float) -> None:
        self._last_sent = now

    def received(self, now: float) -> None:
        """Bytes came: the peer lives. A long message in front of the PINGRESP must not end the connection."""
        self._last_received = now
        if self._answer_deadline != NEVER:
            self._answer_deadline = now + self._settings.ping_timeout_seconds

    def pinged(self, now: float) -> None:
        self._answer_deadline = now + self._settings.ping_timeout_seconds

    def answered(self) -> None:
        """PINGRESP."""
        self._answer_deadline = NEVER

    def ping_due(self, now: float) -> bool:
        return self._answer_deadline == NEVER and now >= self._ping_at()

    def answer_overdue(self, now: float) -> bool:
        return self._reading and now >= self._answer_deadline

    def next_deadline(self) -> float:
        """When one of the two may become true."""
        if self._answer_deadline == NEVER:
            return self._ping_at()
        return self._answer_deadline if self._reading else NEVER

    def _ping_at(self) -> float:
        if self._keep_alive_seconds == 0:
            return NEVER
        return min(self._last_sent, self._last_received) + self._keep_alive_seconds * PING_AT_FRACTION
