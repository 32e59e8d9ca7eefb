"""Markers: messages that a broker sends to itself through the cloud. One that is back says that all that the cloud took before
it, and had for us, is here.

They are signed, so that nobody else can make one, and carry a number drawn for this process, so that those of an earlier one,
which may still come, are not taken for them. A marker is sent once the cloud is known to give it back, and again with each
connection until it is: whichever of them comes was sent after it was asked for.

Besides those that the owner asks for there are some of the cloud's own, about subscriptions. A new subscription brings the
messages that are retained at the cloud, and nothing in them tells them from messages that were just published with the retain
flag. What comes with that flag between the SUBSCRIBE and a marker sent after its SUBACK *may* be such a one
(:attr:`Markers.is_replaying`).
"""

from __future__ import annotations

import hashlib
import hmac
import random
from typing import Final

from nearcast.mqtt.records import Fields, blob, number

TAG_BYTES: Final = 16

OWNERS: Final = 0
REPLAYS: Final = 1


class Markers:
    """See the module. What :meth:`take_unsent` gives is published to ``topic``; what comes there is handed to :meth:`back`."""

    def __init__(self, topic: str, secret: bytes, rng: random.Random) -> None:
        self.topic = topic
        #: Whether retained messages that a subscription brought may still come.
        self.is_replaying = False
        self._key = hmac.digest(secret, b"nearcast markers at the cloud", hashlib.sha256)
        self._nonce = rng.getrandbits(64).to_bytes(8, "big")
        self._tokens: dict[int, None] = {}
        self._unsent: list[bytes] = []
        self._replay = 0
        self._replay_due = False

    @property
    def waiting(self) -> bool:
        """Whether the owner waits for one."""
        return bool(self._tokens)

    def ask(self, token: int, connected: bool) -> None:
        """The owner wants one."""
        self._tokens[token] = None
        if connected:
            self._unsent.append(self._marker(OWNERS, token))

    def connected(self) -> None:
        """There is a new connection: all that is not back is to be sent."""
        self._unsent = [self._marker(OWNERS, token) for token in self._tokens]
        self._replay_due = self.is_replaying

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

    def take_unsent(self) -> list[bytes]:
        """Markers to send now, once the cloud is known to give them back."""
        taken = self._unsent
        if taken:
            self._unsent = []
        return taken

    def _marker(self, kind: int, token: int) -> bytes:
        said = blob(self._nonce) + number(kind) + number(token)
        return self._tag(said) + said

    def _tag(self, said: bytes) -> bytes:
        return hmac.digest(self._key, said, hashlib.sha256)[:TAG_BYTES]

    def back(self, payload: bytes) -> int:
        """Something came; returns the token of the owner's marker that it is, or -1."""
        said = payload[TAG_BYTES:]
        if not hmac.compare_digest(payload[:TAG_BYTES], self._tag(said)):
            return -1
        fields = Fields(b"\x00" + said)
        if fields.blob() != self._nonce:
            return -1
        kind = fields.number()
        token = fields.number()
        if kind == REPLAYS:
            if token == self._replay and not self._replay_due:
                self.is_replaying = False
        elif token in self._tokens:
            del self._tokens[token]
            return token
        return -1
