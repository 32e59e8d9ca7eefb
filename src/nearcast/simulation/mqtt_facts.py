"""What simulated MQTT brokers and clients tell about themselves: what invariants, figures and recordings are made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a workload, as its publisher sent it."""

    publisher: int
    """Number of the stream, see :func:`nearcast.scenario.identity.publisher_number`."""

    sequence: int
    client: str
    stream: int
    topic: str
    qos: int
    retain: bool
    payload: bytes
    due_s: float
    sent_s: float


@dataclass(frozen=True, slots=True)
class BrokerStarted:
    """A broker's process began. What it knew before, if it keeps nothing, is gone."""

    broker: str


@dataclass(frozen=True, slots=True)
class BrokerOpened:
    """A broker has recovered what it kept, and lets clients in."""

    broker: str


@dataclass(frozen=True, slots=True)
class BrokerFailed:
    """A broker's disk failed, and its process ends."""

    broker: str
    reason: str


@dataclass(frozen=True, slots=True)
class TopicsCommitted:
    """Readers of a broker's topic log can see more than before."""

    broker: str
    port: int


@dataclass(frozen=True, slots=True)
class ClientStarted:
    """A client's process began; ``fresh`` when it knows nothing of an earlier one."""

    client: str
    fresh: bool


@dataclass(frozen=True, slots=True)
class ClientConnected:
    """A broker accepted a client's CONNECT."""

    client: str
    session_present: bool


@dataclass(frozen=True, slots=True)
class ClientDisconnected:
    """A client knows that its connection is over."""

    client: str
    reason: str


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """A client disconnects for good, as it was meant to."""

    client: str


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The broker granted a client all its subscriptions."""

    client: str


@dataclass(frozen=True, slots=True)
class Published:
    """A client was given a message to publish."""

    message: Message


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The broker took responsibility for a message: PUBACK, PUBCOMP."""

    message: Message


@dataclass(frozen=True, slots=True)
class Refused:
    """The broker answered a message with an error."""

    message: Message
    reason: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """A message was due and not sent."""

    message: Message
    reason: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """A client's application got a message."""

    client: str
    topic: str
    payload: bytes
    qos: int
    retained: bool


@dataclass(frozen=True, slots=True)
class MergeBegan:
    """The leader of a broadcast group asked another one to merge."""

    broker: str


@dataclass(frozen=True, slots=True)
class GroupChanged:
    """A broker knows its broadcast group otherwise than before: who leads it, and who is in it."""

    broker: str
    leader: str
    version: int
    members: tuple[str, ...]
