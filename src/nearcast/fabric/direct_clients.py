"""What a gateway remembers of one client that publishes owned topics: who it is, and which way its messages went.

A client whose messages go to several brokers gets its answers from several brokers, and must get its PUBACKs in the order of
its PUBLISHes all the same [MQTT-4.6.0-2]: those that come early wait here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from nearcast.fabric.mirrors import body_start, packet_end
from nearcast.mqtt.wire import PUBACK, PUBLISH

if TYPE_CHECKING:
    from nearcast.fabric.trunk_lines import TrunkLine

MAX_USES: Final = 1_024
"""Topics of one client of which the way is remembered; the one that was used longest ago is forgotten first."""

MARKED_S: Final = 10.0
"""How long messages on a new way say what has to come before them: longer than any broker waits for it."""

_WAITS: Final = b""


class Use:
    """Which way a client's messages of one topic went last: straight to a broker (``line``), or by way of its ``home``.

    Until ``marked_until`` they say that something has to come before them: the word ``closing`` from the broker ``behind``.
    """

    def __init__(self) -> None:
        self.line: TrunkLine | None = None
        self.epoch = 0
        self.home = ""
        self.behind = ""
        self.closing = 0
        self.marked_until = 0.0


NO_MARK: Final = Use()


class DirectClient:
    """See the module. ``username`` is who the client is, by the word of the broker that let it in, its ``home`` until now."""

    def __init__(self, username: str | None, home: str, now: float) -> None:
        self.username = username
        self._home = home
        self._began_at = now
        self.uses: dict[bytes, Use] = {}
        #: When the home broker heard of this client last; one that only publishes elsewhere would seem to be silent.
        self.home_told_at = 0.0
        #: Whether what it sent next is for another broker and has to wait.
        self.waits = False
        # PUBLISHes at QoS 1 without an answer at the client, in their order, and answers that came early.
        self._answers: dict[int, bytes] = {}
        self._early = 0

    def use_of(self, topic: bytes, now: float) -> Use:
        """The way of a topic's messages, known from now on."""
        use = self.uses.pop(topic, None)
        if use is None:
            use = Use()
            if now - self._began_at < MARKED_S:
                use.home = self._home  # it may have published this, too, before anybody looked
            if len(self.uses) >= MAX_USES:
                del self.uses[next(iter(self.uses))]
        self.uses[topic] = use
        return use

    # --- answers --------------------------------------------------------------------------------------------------------

    def published(self, packet_id: int) -> None:
        """A PUBLISH at QoS 1 leaves, whichever way. One that leaves again keeps its place."""
        if packet_id not in self._answers:
            self._answers[packet_id] = _WAITS

    def pass_by(self, run: bytes) -> None:
        """Whole packets leave for the home broker, no owned topic being known."""
        position: i64 = 0
        end: i64 = len(run)
        while position < end:
            stop = packet_end(run, position, end)
            if run[position] >> 4 == PUBLISH and run[position] & 6 == 2:
                self.published(publish_id(run, position, stop))
            position = stop

    def answered(self, packet_id: int, answer: bytes) -> list[bytes]:
        """A PUBACK came; returns those that the client may get now."""
        before = self._answers.get(packet_id)
        if before is None:
            return [answer]
        if not before:
            self._early += 1
        self._answers[packet_id] = answer
        return self._due()

    def _due(self) -> list[bytes]:
        due: list[bytes] = []
        while self._early:
            first = next(iter(self._answers))
            answer = self._answers[first]
            if not answer:
                break
            del self._answers[first]
            self._early -= 1
            due.append(answer)
        return due

    @property
    def unanswered(self) -> int:
        """How many PUBLISHes at QoS 1 the client has no PUBACK of."""
        return len(self._answers)

    def in_order(self, run: bytes) -> bytes:
        """Whole packets of the home broker, with its PUBACKs where they belong among those of others."""
        if not self._answers:
            return run
        parts: list[bytes] = []
        position: i64 = 0
        end: i64 = len(run)
        start: i64 = 0
        while position < end:
            stop = packet_end(run, position, end)
            if run[position] >> 4 == PUBACK:
                at = body_start(run, position)
                if at + 2 <= stop:
                    if start < position:
                        parts.append(run[start:position])
                    parts.extend(self.answered(run[at] << 8 | run[at + 1], run[position:stop]))
                    start = stop
            position = stop
        if start == 0:
            return run
        if start < end:
            parts.append(run[start:end])
        return b"".join(parts)


def publish_id(run: bytes, position: i64, stop: i64) -> int:
    """The identifier of a PUBLISH at QoS 1 or 2; 0 where the packet ends before it."""
    at: i64 = body_start(run, position)
    if at + 2 <= stop:
        at += 2 + (run[at] << 8 | run[at + 1])
        if at + 2 <= stop:
            return run[at] << 8 | run[at + 1]
    return 0


def puback(packet_id: int, reason_code: int) -> bytes:
    """A PUBACK; with a reason where there is one to give, which MQTT 3 has no place for."""
    if reason_code:
        return b"\x40\x03" + packet_id.to_bytes(2, "big") + bytes((reason_code,))
    return b"\x40\x02" + packet_id.to_bytes(2, "big")
