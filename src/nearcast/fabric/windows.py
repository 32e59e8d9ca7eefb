"""Which messages a session has had, where it went on after its broker was lost: what the rest of
:mod:`nearcast.fabric.leftovers` is decided by, and how it is written down.

A :class:`Window` is opened when filters are subscribed to. From broker X the session then gets everything beyond c(X), X's
sequence when it confirmed the interest; and of what X numbered before, whatever arrives from then on, for filters that others
had there already (``passed``).
"""

from __future__ import annotations

from nearcast.fabric.session_state import pack_ids
from nearcast.mqtt.records import Fields, blob, number
from nearcast.mqtt.session import packet_ids_of
from nearcast.mqtt.topics import matches, parse_shared


class Window:
    """Since when a session itself gets what these filters want; ``whole``: it always did."""

    def __init__(self, filters: list[str], whole: bool, version: int) -> None:
        self.filters = filters
        self.whole = whole
        #: The version of our interest that has them.
        self.version = version
        #: By broker: everything beyond this sequence; and up to it these stretches, all of which arrived.
        self.since: dict[str, int] = {}
        self.passed: dict[str, list[tuple[int, int]]] = {}
        #: Brokers of which nothing is missing any more.
        self.complete: set[str] = set()
        #: Where in the log of what passes each broker's stretches begin.
        self.begins: dict[str, int] = {}

    def wants(self, topic: str) -> bool:
        return any(matches(each, topic) for each in self.filters)

    def has(self, name: str, sequence: int) -> bool:
        if self.whole or sequence > self.since.get(name, sequence):
            return True
        return any(first <= sequence <= last for first, last in self.passed.get(name, []))


class Lost:
    """A broker that a session's client was lost at: ``had`` are the QoS 2 identifiers that the client has of it, ``unwanted``
    the filters it has unsubscribed from since."""

    def __init__(self, had: set[int], windows: list[Window]) -> None:
        self.had = had
        self.windows = windows
        self.unwanted: set[str] = set()


def plain_filters(filters: list[str]) -> list[str]:
    """Those that are not shared."""
    return [name for name in filters if not parse_shared(name)[0]]


def any_has(windows: list[Window], name: str, sequence: int) -> bool:
    """Whether a message of a broker was had through one of them."""
    return any(window.has(name, sequence) for window in windows)


def encode_lost(entries: dict[str, Lost]) -> bytes:
    """What is known of the brokers that lost a session, by name, as bytes. What is not complete is found out anew."""
    parts = [number(len(entries))]
    for name, lost in entries.items():
        parts.append(blob(name.encode("utf-8")) + blob(pack_ids(sorted(lost.had))))
        parts.append(_names(sorted(lost.unwanted)))
        parts.append(number(len(lost.windows)))
        for window in lost.windows:
            parts.append(number(1 if window.whole else 0) + _names(window.filters))
            known = [each for each in window.since if each in window.complete]
            parts.append(number(len(known)))
            for each in known:
                passed = window.passed.get(each, [])
                parts.append(blob(each.encode("utf-8")) + number(window.since[each]) + number(len(passed)))
                parts.extend([number(first) + number(last) for first, last in passed])
    return b"".join(parts)


def decode_lost(data: bytes) -> dict[str, Lost]:
    """The opposite."""
    entries: dict[str, Lost] = {}
    if not data:
        return entries
    fields = Fields(b"\x00" + data)
    for _ in range(fields.number()):
        name = fields.blob().decode("utf-8")
        lost = Lost(set(packet_ids_of(fields.blob())), [])
        lost.unwanted = set(_read_names(fields))
        for _ in range(fields.number()):
            whole = fields.number() != 0
            window = Window(_read_names(fields), whole, 0)
            for _ in range(fields.number()):
                each = fields.blob().decode("utf-8")
                window.since[each] = fields.number()
                window.complete.add(each)
                window.passed[each] = [(fields.number(), fields.number()) for _ in range(fields.number())]
            lost.windows.append(window)
        entries[name] = lost
    return entries


def _names(names: list[str]) -> bytes:
    return number(len(names)) + b"".join([blob(name.encode("utf-8")) for name in names])


def _read_names(fields: Fields) -> list[str]:
    return [fields.blob().decode("utf-8") for _ in range(fields.number())]
