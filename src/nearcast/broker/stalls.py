"""Clients that do not take their output: who they are, since when, and when they are cut off."""

from __future__ import annotations

from nearcast.broker.transports import ClientTransport

#: A connection that we closed and whose client does not take the rest is cut off after this, whatever the configuration.
CLOSING_STALL_SECONDS = 10.0


class StallWatch:
    """The transports whose output the kernel did not take at once."""

    def __init__(self) -> None:
        self._watched: dict[ClientTransport, None] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, handle: ClientTransport, now: float) -> None:
        """The transport has output that waits."""
        handle.stall_bytes = handle.write_buffer_bytes()
        handle.stall_since = now
        self._watched[handle] = None

    def unwatch(self, handle: ClientTransport) -> None:
        """The transport has drained, or is gone."""
        self._watched.pop(handle, None)

    def check(self, now: float, timeout_seconds: float) -> None:
        """Cut off whoever took not a byte for too long; 0 waits for ever, except for those that we closed."""
        for handle in list(self._watched):
            waiting = handle.write_buffer_bytes()
            if waiting < handle.stall_bytes:
                handle.stall_bytes = waiting
                handle.stall_since = now
                continue
            closing = handle.transport is None or handle.transport.is_closing()
            limit = CLOSING_STALL_SECONDS if closing else timeout_seconds
            if limit and now - handle.stall_since >= limit:
                if handle.connection is not None and not handle.connection.close_reason:
                    handle.connection.close_reason = "took no data for too long"
                handle.abort()
