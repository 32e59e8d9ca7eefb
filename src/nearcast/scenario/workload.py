"""Who publishes and subscribes what, as data; one vocabulary for simulated and real clients."""

from __future__ import annotations

from typing import Literal

import msgspec

from nearcast.errors import InvalidValue
from nearcast.scenario.identity import SHORT_IDENTITY_BYTES
from nearcast.scenario.placeholders import placeholders
from nearcast.scenario.rules import require, require_range, require_seconds

MAX_CLIENTS = 1_000_000
"""Clients of one scenario."""

OWN_HOST = "{host}"
"""In place of a broker's host: the one that the client is on, which has a broker or gateway of its own."""

PLACEHOLDERS = ("client", "index", "host")
"""What may stand in braces in a topic or filter."""


def _require_topic(text: str, field: str, wildcards: bool) -> None:
    """Refuse what no broker would take, while it can be said which line it is."""
    try:
        names = placeholders(text)
    except ValueError as error:
        raise InvalidValue(f"`{field}`: {error}", key=field) from None
    for name in names:
        require(name in PLACEHOLDERS, field, f"knows {{client}}, {{index}} and {{host}}, not {{{name}}}")
    require(0 < len(text.encode()) <= 65_535 and "\0" not in text, field, "must be 1 to 65,535 bytes without NUL")
    levels = text.split("/")
    for position, level in enumerate(levels):
        if "+" in level or "#" in level:
            require(wildcards, field, f"must not contain the wildcard in {level!r}: it names one topic")
            whole = level == "+" or (level == "#" and position == len(levels) - 1)
            require(whole, field, "may have `+` as a whole level and `#` as the whole last one, nothing in between")


class Publishing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stream of messages of every client in a group."""

    topic: str
    """``{client}`` is the client's name, ``{index}`` its number in its group from 0, ``{host}`` its host."""

    rate_hz: float = 1.0
    """Messages per second, evenly spaced from a random first moment; with ``poisson``, that many on average."""

    poisson: bool = False
    """Whether the gaps between messages are random (exponential), as of many independent causes."""

    payload_bytes: int = 100
    """Size of the payload, at least 20: it begins with the message's identity (``nearcast.scenario.identity``)."""

    qos: int = 0
    """0, 1 or 2."""

    retain: bool = False
    """Whether the broker keeps the last message for later subscribers."""

    bound_ms: float | None = None
    """How long a delivery may take, in milliseconds, before it violates the bound; unset, as long as it likes. It changes
    nothing in a run: evaluation (``nearcast pipeline run evaluate``) compares with it."""

    def __post_init__(self) -> None:
        _require_topic(self.topic, "topic", wildcards=False)
        require_range(self.rate_hz, 1e-6, 1_000_000, "rate_hz")
        require_range(self.payload_bytes, SHORT_IDENTITY_BYTES, 268_000_000, "payload_bytes")
        require(self.qos in (0, 1, 2), "qos", "must be 0, 1 or 2")
        if self.bound_ms is not None:
            require_range(self.bound_ms, 1e-3, 1e9, "bound_ms")


class Subscribing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One subscription of every client in a group."""

    filter: str
    """A topic filter, with the same placeholders as a topic that is published to."""

    qos: int = 0
    """0, 1 or 2."""

    def __post_init__(self) -> None:
        _require_topic(self.filter, "filter", wildcards=True)
        require(self.qos in (0, 1, 2), "qos", "must be 0, 1 or 2")


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What clients want from a moment on, and what they do not want any more."""

    at_s: float
    """When, in seconds after the start."""

    subscribe: tuple[Subscribing, ...] = ()
    """Subscriptions that they make."""

    unsubscribe: tuple[str, ...] = ()
    """Filters that they give up; before they subscribe to new ones."""

    def __post_init__(self) -> None:
        require_seconds(self.at_s, "at_s")
        require(len(self.subscribe) + len(self.unsubscribe) > 0, "subscribe", "and `unsubscribe` are both empty")
        for given_up in self.unsubscribe:
            _require_topic(given_up, "unsubscribe", wildcards=True)


class Clients(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of alike MQTT clients on a host."""

    name: str
    """Unique; clients are called ``name`` or, with ``count`` above 1, ``name-1``, ``name-2``, ..."""

    host: str
    """A host, or with a trailing ``*`` all that begin so: then each gets such a group, and its name is ``name@host``."""

    broker: str
    """Host of the broker or gateway they connect to; with a trailing ``*``, the hosts that begin so in turn; ``{host}``, each
    client's own."""

    roam: bool = False
    """Whether they are connected to the broker or gateway at the site that their host is at, the first there of those that
    ``broker`` names with a trailing ``*``, and go on to another when the host moves to its site. A site without one keeps them
    where they are. They keep their session. Emulated WAN only."""

    port: int = 1883
    """The port of that broker or gateway."""

    count: int = 1
    """How many such clients on each host."""

    publish: tuple[Publishing, ...] = ()
    """What each of them publishes."""

    subscribe: tuple[Subscribing, ...] = ()
    """What each of them subscribes to."""

    changes: tuple[Change, ...] = ()
    """What each of them subscribes to, and does not any more, later. Emulated WAN only."""

    protocol: Literal["5.0", "3.1.1"] = "5.0"
    """The version of MQTT they speak."""

    clean_start: bool = True
    """False keeps the session over reconnects and restarts."""

    keepalive_s: int = 30
    """Seconds of silence after which a client sends a ping, and after one and a half times which the broker gives it up; 0
    turns both off."""

    start_s: float = 0.0
    """When they connect, in seconds after the start."""

    stop_s: float | None = None
    """When they stop publishing, in seconds after the start; unset goes on until the scenario's ``duration_s``."""

    leave: bool = False
    """Whether they also disconnect at ``stop_s``, with a DISCONNECT, and are gone for the rest of the run."""

    def __post_init__(self) -> None:
        plain = 0 < len(self.name) <= 200 and not set(self.name) & set("/+#@*\0")
        require(plain, "name", "must be 1 to 200 characters, none of / + # @ *")
        require_range(self.count, 1, MAX_CLIENTS, "count")
        require_range(self.port, 1, 65_535, "port")
        require_range(self.keepalive_s, 0, 65_535, "keepalive_s")
        require_seconds(self.start_s, "start_s")
        require_seconds(self.stop_s, "stop_s")
        require(self.stop_s is None or self.stop_s > self.start_s, "stop_s", "must be after `start_s`")
        require(not self.leave or self.stop_s is not None, "leave", "needs `stop_s`: it says when")
        require(not self.roam or self.broker.endswith("*"), "roam", "needs a `broker` with a trailing `*`: those to go on to")
        moments = [change.at_s for change in self.changes]
        require(moments == sorted(moments), "changes", "must be in the order of their time")
