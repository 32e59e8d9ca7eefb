"""Markers: messages that a broker sends to itself through the cloud. One that is back says that all that the cloud took before
it, and had for us, is here.

They are signed, so that nobody else can make one, and carry a number drawn for this process, so that those of an earlier one,
which may still come, are not taken for them. A marker is sent once the cloud is known to give it back, and again with each
connection until it is: whichever of them comes was sent after it was asked for.

Besides those that the owner asks for there are some of the cloud's own, about subscriptions. A new subscription brings the
messages that are retained at the cloud, and nothing in them tells them from messages that were just published with the retain
flag. What comes with that flag between the SUBSCRIBE and a marker sent after its SUBACK *may* be such a one
(:attr:`Markers.is_replaying`).

A cloud may keep markers from coming back, mostly by its access rules. They are given up then, and :attr:`Markers.problem` says
so: at once if the cloud says that it refuses them; :data:`QUIET_S` after it took one, if it sends no messages in that time, as
it would if it had many for us before the marker; and :data:`LONGEST_S` after they were sent in any case. Whoever waited for
one goes on as if it were back: better that a message is missed at a cloud that is not set up than that nobody joins anybody.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import random
from typing import Final

from nearcast.mqtt.records import Fields, blob, number

TAG_BYTES: Final = 16

OWNERS: Final = 0
REPLAYS: Final = 1

QUIET_S: Final = 30.0
LONGEST_S: Final = 600.0

NEVER: Final = math.inf


class Markers:
    """See the module. What :meth:`take_unsent` gives is published to ``topic``; what comes there is handed to :meth:`back`."""

    def __init__(self, topic: str, secret: bytes, rng: random.Random) -> None:
        self.topic = topic
        #: Whether retained messages that a subscription brought may still come.
        self.is_replaying = False
        #: Why they do not come back, in words for people; empty while they do.
        self.problem = ""
        self._key = hmac.digest(secret, b"nearcast markers at the cloud", hashlib.sha256)
        self._nonce = rng.getrandbits(64).to_bytes(8, "big")
        self._tokens: dict[int, None] = {}
        self._unsent: list[bytes] = []
        self._replay = 0
        self._replay_due = False
        # On the present connection: since when some are on their way, and since when the cloud has one and sends nothing.
        self._sent_at = NEVER
        self._quiet_since = NEVER

    @property
    def waiting(self) -> bool:
        """Whether the owner waits for one."""
        return bool(self._tokens)

    @property
    def has_unsent(self) -> bool:
        """Whether there are some to send."""
        return bool(self._unsent)

    def ask(self, token: int, connected: bool) -> None:
        """The owner wants one."""
        self._tokens[token] = None
        if connected:
            self._unsent.append(self._marker(OWNERS, token))

    def connected(self) -> None:
        """There is a new connection: all that is not back is to be sent."""
        self._unsent = [self._marker(OWNERS, token) for token in self._tokens]
        self._replay_due = self.is_replaying
        self._sent_at = NEVER
        self._quiet_since = NEVER

    def subscribing(self) -> None:
        """A SUBSCRIBE is sent."""
        self.is_replaying = True
        self._replay_due = True

    def subscribed(self) -> None:
        """All SUBSCRIBEs are answered."""
        if self._replay_due:
            self._replay_due = False
            self._replay += 1
            self._unsent.append(self._marker(REPLAYS, self._replay))

    def take_unsent(self, now: float) -> list[bytes]:
        """Markers to send now, once the cloud is known to give them back."""
        taken = self._unsent
        if taken:
            self._unsent = []
            self._sent_at = min(self._sent_at, now)
        return taken

    def _marker(self, kind: int, token: int) -> bytes:
        said = blob(self._nonce) + number(kind) + number(token)
        return self._tag(said) + said

    def _tag(self, said: bytes) -> bytes:
        return hmac.digest(self._key, said, hashlib.sha256)[:TAG_BYTES]

    def back(self, payload: bytes, now: float) -> int:
        """Something came; returns the token of the owner's marker that it is, or -1."""
        said = payload[TAG_BYTES:]
        if not hmac.compare_digest(payload[:TAG_BYTES], self._tag(said)):
            return -1
        fields = Fields(b"\x00" + said)
        if fields.blob() != self._nonce:
            return -1
        self.problem = ""
        kind = fields.number()
        token = fields.number()
        found = -1
        if kind == REPLAYS:
            if token == self._replay and not self._replay_due:
                self.is_replaying = False
        elif token in self._tokens:
            del self._tokens[token]
            found = token
        if self._tokens or self.is_replaying:
            self.heard(now)
        else:
            self._sent_at = NEVER
            self._quiet_since = NEVER
        return found

    # --- those that do not come back --------------------------------------------------------------------------------------

    def taken(self, now: float) -> None:
        """The cloud took one."""
        if self._sent_at < NEVER:
            self._quiet_since = now

    def heard(self, now: float) -> None:
        """The cloud sent a message: there may be others before ours."""
        if self._quiet_since < NEVER:
            self._quiet_since = now

    def give_up_at(self) -> float:
        """When those that are on their way are given up."""
        return min(self._quiet_since + QUIET_S, self._sent_at + LONGEST_S)

    def give_up(self, reason: str) -> list[int]:
        """They will not come back; returns the owner's."""
        self.problem = f"markers {reason}: let this broker publish and subscribe to {self.topic!r} there"
        self.is_replaying = False
        self._replay_due = False
        self._unsent = []
        self._sent_at = NEVER
        self._quiet_since = NEVER
        tokens = list(self._tokens)
        self._tokens.clear()
        return tokens
