"""What happened, in words: kept while a failed run is replayed, and never while it runs the first time.

A tracer only listens. It draws no randomness and plans nothing, so a run with one is the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from nearcast.simulation.hosts import Host
    from nearcast.simulation.world import World

WORLD = -1
"""In the place of a host's index: what nobody did, such as a fault."""

MAX_TEXT = 160
MAX_SENT_LINES = 200_000


class Line(msgspec.Struct, frozen=True):
    """One thing that happened. ``number`` is the message it is about, ``cause`` the one it is an answer to; -1 is none."""

    at_s: float
    host: int
    text: str
    number: int
    cause: int
    order: int
    """Of telling."""


class Tracer:
    """Keeps the last lines of every host, and tells each line to ``sink`` if there is one."""

    def __init__(self, lines_per_host: int = 200, sink: Callable[[Line], None] | None = None) -> None:
        self.world: World | None = None
        self.lines: dict[int, deque[Line]] = {}
        self.sent_lines: dict[int, Line] = {}
        self.told = 0
        self._lines_per_host = lines_per_host
        self._sink = sink

    def line(self, host: int, text: str, number: int = -1) -> Line | None:
        world = self.world
        if world is None:
            return None
        cause = world.cause if world.cause in self.sent_lines else -1
        made = Line(world.now, host, text, number, cause, self.told)
        self.told += 1
        kept = self.lines.get(host)
        if kept is None:
            kept = self.lines[host] = deque(maxlen=self._lines_per_host)
        kept.append(made)
        if self._sink is not None:
            self._sink(made)
        return made

    def note(self, host: Host, text: str) -> None:
        self.line(host.index, text)

    def fault(self, text: str) -> None:
        self.line(WORLD, text)

    def sent(self, source: Host, target: Host, number: int, message: object, arrives: float) -> None:
        """A datagram is on its way."""
        made = self.line(source.index, f"sends #{number} to {target.name}: {shortened(message)}", number)
        if made is not None:
            self._remember(made)

    def carried(self, source: Host, target: Host, number: int, what: str) -> None:
        """A stream's packet is on its way: no line of its own, but it may be the cause of others."""
        world = self.world
        if world is not None:
            cause = world.cause if world.cause in self.sent_lines else -1
            text = f"sends #{number} to {target.name}: {what}"
            self._remember(Line(world.now, source.index, text, number, cause, self.told))

    def _remember(self, line: Line) -> None:
        self.sent_lines[line.number] = line
        if len(self.sent_lines) > MAX_SENT_LINES:
            del self.sent_lines[next(iter(self.sent_lines))]

    def lost(self, source: Host, target: Host, what: str, why: str) -> None:
        self.line(source.index, f"sends to {target.name}: {what} -- lost: {why}")

    def arrived(self, target: Host, source: Host, number: int, message: object) -> None:
        sent = self.sent_lines.get(number)
        when = "" if sent is None else f", sent {sent.at_s:.6f} s"
        self.line(target.index, f"receives #{number} from {source.name}{when}: {shortened(message)}", number)

    def not_taken(self, target: Host, source: Host, number: int, message: object, why: str) -> None:
        """A datagram reached a host that did not take it."""
        self.line(target.index, f"#{number} from {source.name} is lost: {why}: {shortened(message)}", number)


def shortened(message: object) -> str:
    """A message in at most ``MAX_TEXT`` characters on one line."""
    if isinstance(message, bytes | bytearray):
        text = f"{len(message)} bytes {bytes(message[:24])!r}"
    else:
        text = " ".join(repr(message).split())
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."
