"""Frames of replica sets that are longer than a link takes: cut where they are sent, joined where they arrive.

An entry of a set may be larger than any message of a client (it has what one turn of a leader's loop brought, or all that a
function published), and a link gives up whoever sends more than it allows in one frame. So what is long goes as SET_PARTs, one
behind the other on the same link: flags (this is the first, another follows), then some of the content, its kind first.
"""

from __future__ import annotations

from typing import Final

from nearcast.errors import RemoteProtocolError
from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.mqtt import reasons

PART_BYTES: Final = 786_432
"""Of content in one frame: every node takes that."""

MAX_WHOLE_BYTES: Final = 67_108_864
"""Of the content of all parts together."""

_MORE: Final = 1
_FIRST: Final = 2


def cut(kind: int, fields: list[bytes]) -> list[bytes]:
    """A frame, or the parts of it, ready to be sent in this order."""
    size = 1
    for field in fields:
        size += len(field)
    if size <= PART_BYTES:
        return [frame(kind, *fields)]
    content = b"".join([bytes([kind]), *fields])
    found: list[bytes] = []
    at = 0
    while at < size:
        end = at + PART_BYTES
        flags = (0 if at else _FIRST) | (_MORE if end < size else 0)
        found.append(frame(frames.SET_PART, bytes([flags]), content[at:end]))
        at = end
    return found


class Parts:
    """Parts that arrived from other brokers and are not whole yet."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[bytes]] = {}
        self._bytes: dict[str, int] = {}

    def add(self, name: str, content: bytes) -> bytes | None:
        """The content of a SET_PART; the content of the whole frame once it is there."""
        flags = content[1] if len(content) > 2 else -1
        if flags > 0 and flags & _FIRST:
            self.forget(name)  # of an earlier link
        elif name not in self._by_name:
            flags = -1
        if flags < 0 or flags & ~(_FIRST | _MORE):
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "a part of nothing")
        gathered = self._by_name.setdefault(name, [])
        gathered.append(content[2:])
        size = self._bytes.get(name, 0) + len(content) - 2
        self._bytes[name] = size
        if size > MAX_WHOLE_BYTES:
            raise RemoteProtocolError(reasons.PACKET_TOO_LARGE, f"parts of {size} bytes, {MAX_WHOLE_BYTES} allowed")
        if flags & _MORE:
            return None
        self.forget(name)
        return b"".join(gathered)

    def forget(self, name: str) -> None:
        """What was on its way from a broker will not be whole."""
        self._by_name.pop(name, None)
        self._bytes.pop(name, None)
