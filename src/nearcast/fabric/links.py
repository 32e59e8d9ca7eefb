"""One link: a stream between two nodes, from the first byte to an authenticated exchange of frames, and its pulse.

Both ends speak at once. Each says HELLO (protocol version, role, name, epoch, a nonce, its facts), and, once it has the
other's, PROOF: an HMAC over both HELLOs with the fabric's secret, so that neither can be forged, replayed or reflected. What
comes before the other's PROOF is bounded and not acted upon::

    GREETING ──HELLO──► PROVING ──PROOF──► UP ──► CLOSED

A link that is UP is probed when it is silent (PING, PONG): that gives the round-trip time, and a link that stays silent is
given up whatever TCP thinks. Output goes through a :class:`~nearcast.mqtt.connection.Connection`, so that what must wait for
the disk does (``push_held``), and back-pressure is the same as for clients.
"""

from __future__ import annotations

import hashlib
import hmac
import random
from typing import Final

from nearcast.errors import RemoteProtocolError
from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.mqtt import reasons
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.records import Fields, blob, number

MAGIC: Final = b"nearcast link"
VERSION: Final = 1

GREETING: Final = 0
PROVING: Final = 1
UP: Final = 2
CLOSED: Final = 3

# Roles.
BROKER: Final = 1
GATEWAY: Final = 2
CONTROLLER: Final = 3
ROLES: Final = {BROKER: "broker", GATEWAY: "gateway", CONTROLLER: "controller"}

MAX_GREETING_BYTES: Final = 16_384
NONCE_BYTES: Final = 16


class Greeting:
    """What a node says of itself: ``facts`` is msgpack or empty, and the business of whoever uses the role."""

    def __init__(self, role: int, name: str, epoch: int, facts: bytes = b"") -> None:
        self.role = role
        self.name = name
        self.epoch = epoch
        self.facts = facts


class Link:
    """See the module. ``theirs`` is known once the link is PROVING and to be believed once it is UP.

    ``dialed`` is the address that was dialled, or empty for a link that was accepted. ``expected`` is the name that the node
    there must have, where only that one is meant. ``relayed`` says that the stream goes through other brokers. ``left``: the
    other end said goodbye.
    """

    def __init__(
        self,
        ours: Greeting,
        secret: bytes,
        connection: Connection,
        dialed: str,
        rng: random.Random,
        now: float,
        expected: str = "",
    ) -> None:
        self.ours = ours
        self.theirs: Greeting | None = None
        self.connection = connection
        self.dialed = dialed
        self.expected = expected
        self.relayed = False
        self.met_itself = False
        self.was_up = False
        self.left = False
        self.state = GREETING
        self.opened_at = now
        self.last_seen = now
        self.last_ping = now
        self.last_pong = now
        self.rtt_ms = 0.0
        self.rtt_deviation_ms = 0.0
        self.frames_in = 0
        self.bytes_in = 0
        self.close_reason = ""
        self.max_frame_bytes = MAX_GREETING_BYTES
        self.max_frame_bytes_up = MAX_GREETING_BYTES
        self._secret = secret
        # What arrived of a frame that is not complete yet, and how many bytes it takes to go on.
        self._partial: bytearray | None = None
        self._needed_bytes = 0
        self._ping_number = 0
        self._pinged_at = 0.0
        nonce = rng.getrandbits(8 * NONCE_BYTES).to_bytes(NONCE_BYTES, "big")
        self._our_hello = b"".join(
            (
                blob(MAGIC),
                number(VERSION),
                number(ours.role),
                blob(ours.name.encode("utf-8")),
                number(ours.epoch),
                blob(nonce),
                blob(ours.facts),
            )
        )
        self._their_hello = b""
        self.send(frame(frames.HELLO, self._our_hello))

    @property
    def is_up(self) -> bool:
        return self.state == UP

    @property
    def name(self) -> str:
        """What the other end calls itself; empty before it said so."""
        return "" if self.theirs is None else self.theirs.name

    @property
    def role(self) -> str:
        """What the other end is, in a word."""
        return "node" if self.theirs is None else ROLES.get(self.theirs.role, "node")

    # --- output ---------------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send a frame that waits for nothing."""
        if self.state != CLOSED:
            self.connection.push(data)

    def send_held(self, data: bytes) -> None:
        """Send a frame that must not leave before the records that are pending now are durable."""
        if self.state != CLOSED:
            self.connection.push_held(data)

    def close(self, reason: str) -> None:
        """Say why and close once that is out."""
        if self.state == CLOSED:
            return
        self.send(frame(frames.GOODBYE, blob(reason.encode("utf-8"))))
        self.close_reason = self.close_reason or reason
        self.state = CLOSED
        self.connection.closing = True
        self.connection.touch()

    def end(self) -> None:
        """The other end said goodbye, and everything before that was dealt with."""
        self.state = CLOSED
        self.connection.closing = True
        self.connection.touch()

    # --- input ----------------------------------------------------------------------------------------------------------

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Bytes arrived; returns the contents of complete frames that are not the link's own. Raises RemoteProtocolError."""
        self.last_seen = now
        self.bytes_in += len(data)
        partial = self._partial
        if partial is not None:
            partial += data
            if len(partial) < self._needed_bytes:
                return []
            data = bytes(partial)
            self._partial = None
        found: list[bytes] = []
        position = 0
        end = len(data)
        needed = frames.LENGTH_BYTES
        while end - position >= frames.LENGTH_BYTES and self.state != CLOSED and not self.left:
            size = int.from_bytes(data[position : position + frames.LENGTH_BYTES], "big")
            if size == 0 or size > self.max_frame_bytes:
                raise RemoteProtocolError(reasons.PACKET_TOO_LARGE, f"a frame of {size} bytes, {self.max_frame_bytes} allowed")
            start = position + frames.LENGTH_BYTES
            if start + size > end:
                needed = frames.LENGTH_BYTES + size
                break
            needed = frames.LENGTH_BYTES
            content = data[start : start + size]
            position = start + size
            self.frames_in += 1
            if self.state == UP and content[0] > frames.GOODBYE:
                found.append(content)
            else:
                self._own(content, now)
        if position < end:
            self._partial = bytearray(data[position:])
            self._needed_bytes = needed
        return found

    def _own(self, content: bytes, now: float) -> None:
        kind = content[0]
        try:
            if kind == frames.HELLO and self.state == GREETING:
                self._hello(content)
            elif kind == frames.PROOF and self.state == PROVING:
                self._prove(content)
            elif kind == frames.PING and self.state == UP:
                self.send(frame(frames.PONG, content[1:]))
            elif kind == frames.PONG and self.state == UP:
                self._pong(content, now)
            elif kind == frames.GOODBYE:
                self.close_reason = Fields(content).blob().decode("utf-8", "replace")
                self.left = True
            else:
                raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"frame {kind} does not belong here")
        except ValueError as error:
            raise RemoteProtocolError(reasons.MALFORMED_PACKET, f"frame {kind}: {error}") from error

    def _hello(self, content: bytes) -> None:
        fields = Fields(content)
        if fields.blob() != MAGIC:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "the other end does not speak the link protocol")
        version = fields.number()
        if version != VERSION:
            raise RemoteProtocolError(
                reasons.UNSUPPORTED_PROTOCOL_VERSION,
                f"the other end speaks version {version} of the link protocol, this node version {VERSION}",
            )
        role = fields.number()
        name = fields.blob().decode("utf-8")
        epoch = fields.number()
        nonce = fields.blob()
        if len(nonce) != NONCE_BYTES or not name or not name.isprintable():  # what is not is for sessions that are no broker's
            raise ValueError("a HELLO without a name or nonce")
        if role == self.ours.role and name == self.ours.name:
            self.met_itself = epoch == self.ours.epoch
            raise RemoteProtocolError(
                reasons.NOT_AUTHORIZED,
                "this node itself" if self.met_itself else f"two nodes are called {name}: every node needs a name of its own",
            )
        if self.expected and name != self.expected:
            raise RemoteProtocolError(reasons.NOT_AUTHORIZED, f"{name} answers where {self.expected} was expected")
        self.theirs = Greeting(role, name, epoch, fields.blob())
        self._their_hello = content[1:]
        self.state = PROVING
        self.send(frame(frames.PROOF, blob(self._tag(self._our_hello, self._their_hello))))

    def _tag(self, speaker: bytes, listener: bytes) -> bytes:
        return hmac.digest(self._secret, blob(MAGIC) + blob(speaker) + blob(listener), hashlib.sha256)

    def _prove(self, content: bytes) -> None:
        if not hmac.compare_digest(Fields(content).blob(), self._tag(self._their_hello, self._our_hello)):
            raise RemoteProtocolError(reasons.NOT_AUTHORIZED, "the other end does not have this fabric's secret")
        self.state = UP
        self.was_up = True
        self.max_frame_bytes = self.max_frame_bytes_up

    # --- the pulse ------------------------------------------------------------------------------------------------------

    def probe(self, now: float) -> None:
        """Ask for a sign of life."""
        self._ping_number += 1
        self._pinged_at = now
        self.last_ping = now
        self.send(frame(frames.PING, number(self._ping_number)))

    def _pong(self, content: bytes, now: float) -> None:
        self.last_pong = now
        if Fields(content).number() != self._ping_number:
            return
        measured = (now - self._pinged_at) * 1e3
        if self.rtt_ms == 0.0:
            self.rtt_ms = measured
            self.rtt_deviation_ms = measured / 2
        else:  # as TCP does, RFC 6298
            self.rtt_deviation_ms += 0.25 * (abs(measured - self.rtt_ms) - self.rtt_deviation_ms)
            self.rtt_ms += 0.125 * (measured - self.rtt_ms)
