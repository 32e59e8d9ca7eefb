"""A gateway's end of its link to one broker: the channels on it. The broker's end is :mod:`nearcast.fabric.trunks`."""

from __future__ import annotations

from nearcast.fabric import frames
from nearcast.fabric.direct_lines import DirectLine
from nearcast.fabric.frames import frame
from nearcast.fabric.links import Link
from nearcast.fabric.places import LineMemory
from nearcast.fabric.trunks import peer_fields
from nearcast.fabric.tunnels import Channel, Tunnel
from nearcast.mqtt.records import blob, number


class TrunkLine:
    """One broker that is there, and the clients of this gateway it serves. ``leaving``: it said that it stops soon."""

    def __init__(self, name: str, link: Link) -> None:
        self.name = name
        self.link = link
        self.leaving = False
        self.channels: dict[int, Channel] = {}
        self.direct = DirectLine(link)
        self.idle_since = 0.0
        self.memory = LineMemory()
        self._next_number = 1

    def channel(self, tunnel: Tunnel, max_packet_bytes: int) -> Channel:
        """A new channel. Its number is never used again on this link."""
        channel = Channel(tunnel, self, self._next_number, max_packet_bytes)
        self._next_number += 1
        self.channels[channel.number] = channel
        self.memory.untold.append(channel)
        return channel

    def end(self, channel: Channel) -> None:
        """Nothing more is said on a channel."""
        channel.closed = True
        self.channels.pop(channel.number, None)

    def open(self, channel: Channel) -> None:
        """A client that connects."""
        self.link.send(frame(frames.CLIENT_OPEN, number(channel.number), peer_fields(channel.tunnel.peer)))

    def resume(self, channel: Channel, facts: bytes) -> None:
        """A client whose broker was lost."""
        self.link.send(frame(frames.RESUME, number(channel.number), peer_fields(channel.tunnel.peer), facts))

    def move(self, channel: Channel, move_number: int, target: str) -> None:
        self.link.send(frame(frames.MOVE, number(channel.number), number(move_number), blob(target.encode("utf-8"))))

    def freeze(self, channel: Channel, move_number: int) -> None:
        self.link.send(frame(frames.FREEZE, number(channel.number), number(move_number)))

    def adopt(self, channel: Channel, move_number: int, client_id: str) -> None:
        self.link.send(frame(frames.ADOPT, number(channel.number), number(move_number), blob(client_id.encode("utf-8"))))
