"""Transcripts: what clients send and must be sent, as literal bytes, and the two ways to play them.

A file holds cases. A case begins with ``== [clauses] version: what it shows``; lines that begin with ``!`` set its stage; the
others are played in order::

    a connect5          shorthand: CONNECT of client "a", clean start, no problem information wanted, and its CONNACK
    a keep5             the same for a session that outlives the connection; ``a back5`` comes back to it (session present)
    a > c0 00           client "a" sends these bytes
    a < d0 00           client "a" must be sent exactly this packet next; ``??`` is any byte, ``~`` any rest of the packet
    a x                 the server must close "a"
    a -                 the transport of "a" breaks
    wait 5              time passes (in memory only)

Bytes are hex digits; ``"text"`` stands for its UTF-8 bytes, ``"x"*100`` for a hundred of them. When a case is over, no client
may have been sent anything that was not asked for.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nearcast.config import Limits
from nearcast.mqtt.wire import split_packets
from tests.engine_harness import Client, World

FEEDS = ("whole", "byte by byte", "with the next packet's first byte")

_TOKEN = re.compile(r'"(?P<text>[^"]*)"(?:\*(?P<times>\d+))?|(?P<hex>[0-9a-f]{2})|(?P<any>\?\?)|(?P<rest>~)|\s+')

CONNECT = {
    "connect4": '10 0d 0004 "MQTT" 04 02 0000 0001 ID',
    "keep4": '10 0d 0004 "MQTT" 04 00 0000 0001 ID',
    "back4": '10 0d 0004 "MQTT" 04 00 0000 0001 ID',
    "connect5": '10 10 0004 "MQTT" 05 02 0000 02 1700 0001 ID',
    "keep5": '10 15 0004 "MQTT" 05 00 0000 07 11ffffffff 1700 0001 ID',
    "back5": '10 15 0004 "MQTT" 05 00 0000 07 11ffffffff 1700 0001 ID',
}
CONNACK = {
    "connect4": "20 02 00 00",
    "keep4": "20 02 00 00",
    "back4": "20 02 01 00",
    # receive maximum 1000, topic alias maximum 64, maximum packet size 1 MiB
    "connect5": "20 0e 00 00 0b 21 03e8 22 0040 27 00100000",
    "keep5": "20 0e 00 00 0b 21 03e8 22 0040 27 00100000",
    "back5": "20 0e 01 00 0b 21 03e8 22 0040 27 00100000",
}


@dataclass
class Step:
    line: int
    client: str
    action: str
    data: str = ""


@dataclass
class Case:
    """One transcript. ``stage`` holds the words of its ``!`` lines."""

    path: Path
    line: int
    title: str
    steps: list[Step] = field(default_factory=list)
    stage: dict[str, str] = field(default_factory=dict)

    @property
    def needs_memory(self) -> bool:
        """Whether it moves the clock or needs a broker that is set up in its own way."""
        return bool(self.stage) or any(step.action == "wait" for step in self.steps)

    @property
    def name(self) -> str:
        return f"{self.path.stem}:{self.title}"


def load(path: Path) -> list[Case]:
    cases: list[Case] = []
    for number, raw in enumerate(path.read_text().splitlines(), 1):
        line = re.sub(r"\s+#.*$", "", raw).strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("=="):
            cases.append(Case(path, number, line[2:].strip()))
        elif line.startswith("!"):
            key, _, value = line[1:].strip().partition(" ")
            cases[-1].stage[key] = value
        elif line.startswith("wait "):
            cases[-1].steps.append(Step(number, "", "wait", line[5:]))
        else:
            client, _, rest = line.partition(" ")
            action, _, data = rest.strip().partition(" ")
            assert action in "<>x-" or action in CONNECT, f"{path}:{number}: {raw}"
            cases[-1].steps.append(Step(number, client, action, data))
    return cases


def bytes_of(text: str) -> bytes:
    """Literal bytes; no wildcards."""
    found = bytearray()
    for token in _tokens(text):
        assert isinstance(token, bytes), text
        found += token
    return bytes(found)


def _tokens(text: str) -> list[bytes | None]:
    """The bytes of a line, one item per token. ``None`` is "any byte"; an empty item is "any rest"."""
    found: list[bytes | None] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        assert match is not None, f"not bytes: {text[position:]}"
        position = match.end()
        if match["text"] is not None:
            found.append(match["text"].encode() * int(match["times"] or 1))
        elif match["hex"] is not None:
            found.append(bytes.fromhex(match["hex"]))
        elif match["any"] is not None:
            found.append(None)
        elif match["rest"] is not None:
            found.append(b"")
    return found


def matches(expected: str, packet: bytes) -> bool:
    position = 0
    for token in _tokens(expected):
        if token is None:
            position += 1
        elif token == b"":
            return position <= len(packet)
        elif packet[position : position + len(token)] != token:
            return False
        else:
            position += len(token)
    return position == len(packet)


class Party(Protocol):
    """One client of a transport."""

    def send(self, data: bytes) -> None: ...

    def next_packet(self, expected: str) -> bytes:
        """The next packet; empty when the transport ended before a whole one came."""

    def ended(self) -> bool:
        """Whether the server closes the transport and sends nothing more."""

    def drop(self) -> None: ...

    def is_quiet(self) -> bool:
        """Whether nothing is there that was not read."""


class Transport(Protocol):
    def open(self) -> Party: ...

    def wait(self, seconds: float) -> None: ...


class MemoryParty:
    """A client of the engine in this process. With a journal, output that waits for it may be overtaken by other output."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._in_order = not client.world.settings.durable

    def send(self, data: bytes) -> None:
        self._client.send(data)

    def next_packet(self, expected: str) -> bytes:
        packets = split_packets(self._client.take())
        if not packets:
            return b""
        wanted = 0
        if not self._in_order:
            wanted = next((at for at, packet in enumerate(packets) if matches(expected, packet)), 0)
        packet = packets.pop(wanted)
        self._client.output[:0] = b"".join(packets)
        return packet

    def ended(self) -> bool:
        return self._client.closed and self.is_quiet()

    def drop(self) -> None:
        self._client.lose()

    def is_quiet(self) -> bool:
        return not self._client.output


class MemoryTransport:
    """The engine in this process, on a clock that the case moves."""

    def __init__(self, world: World) -> None:
        self.world = world

    def open(self) -> Party:
        return MemoryParty(self.world.open())

    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)


class TcpParty:
    """A socket to a broker process."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self._ended = False
        self.is_connected = False

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def _read(self) -> bool:
        if not self._ended:
            try:
                data = self._socket.recv(65_536)
            except ConnectionResetError:
                data = b""
            self._received += data
            self._ended = not data
        return not self._ended

    def _packet_size(self) -> int:
        """The size of the first packet in the buffer; 0 while it is not whole."""
        size = 0
        for position, byte in enumerate(self._received[1:5]):
            size |= (byte & 0x7F) << (7 * position)
            if byte < 0x80:
                whole = position + 2 + size
                return whole if whole <= len(self._received) else 0
        return 0

    def next_packet(self, expected: str = "") -> bytes:
        while not self._packet_size():
            if not self._read():
                return b""
        size = self._packet_size()
        packet = bytes(self._received[:size])
        del self._received[:size]
        if packet[0] == 0x20 and packet[3] == 0:
            self.is_connected = True
        return packet

    def ended(self) -> bool:
        while self._read():
            pass
        return not self._received

    def drop(self) -> None:
        # The server must have noticed before the case goes on: it closes its side, too.
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        while self._read():
            pass
        self._socket.close()

    def close(self) -> None:
        self._socket.close()

    def settle(self) -> None:
        """Wait until the server has dealt with everything that was sent: it answers a PINGREQ in turn."""
        if not self.is_connected or self._ended:
            return
        try:
            self.send(b"\xc0\x00")
        except OSError:
            self._ended = True
            return
        kept = bytearray()
        while True:
            packet = self.next_packet()
            if not packet:
                break
            if packet == b"\xd0\x00":
                break
            kept += packet
        self._received[:0] = kept

    def is_quiet(self) -> bool:
        self.settle()
        return not self._received


class TcpTransport:
    """A broker process; whatever a case leaves behind in it is removed by :meth:`clean`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._parties: list[TcpParty] = []

    def open(self) -> TcpParty:
        party = TcpParty(self._port)
        self._parties.append(party)
        return party

    def wait(self, seconds: float) -> None:
        raise AssertionError("a real broker's clock cannot be moved")

    def clean(self, clients: list[str]) -> None:
        for name in clients:
            party = self.open()
            party.send(bytes_of(CONNECT["connect4"].replace("ID", f'"{name}"')))
            party.next_packet()
            party.send(b"\xe0\x00")
            party.ended()
        broom = self.open()
        broom.send(bytes_of('10 11 0004 "MQTT" 04 02 0000 0005 "broom" 82 06 0001 0001 "#" 00 c0 00'))
        while (packet := broom.next_packet()) not in (b"\xd0\x00", b""):
            if packet[0] & 0xF1 == 0x31:
                size_bytes = 1 if packet[1] < 0x80 else 2 if packet[2] < 0x80 else 3
                start = 1 + size_bytes
                topic = packet[start : start + 2 + int.from_bytes(packet[start : start + 2], "big")]
                broom.send(b"\x31" + bytes([len(topic)]) + topic)
        for party in self._parties:
            party.close()


def limits_of(case: Case) -> Limits:
    values: dict[str, int | bool | float] = {}
    for word in case.stage.get("limits", "").split():
        key, _, value = word.partition("=")
        values[key] = int(value)
    if "retain_available" in values:
        values["retain_available"] = bool(values["retain_available"])
    return Limits(**values)  # type: ignore[arg-type]


def play(case: Case, transport: Transport, feed: str) -> None:
    """Play a case; fails with the line that did not hold."""
    parties: dict[str, Party] = {}
    sends = _sends(case)
    begun: dict[str, bytes] = {}
    last: Party | None = None
    for index, step in enumerate(case.steps):
        where = f"{case.path}:{step.line}"
        if step.action == "wait":
            transport.wait(float(step.data))
            continue
        if step.client not in parties or step.action in CONNECT:
            parties[step.client] = transport.open()
            begun[step.client] = b""
        party = parties[step.client]
        if isinstance(last, TcpParty) and (last is not party or step.action == ">"):
            last.settle()  # connections have no order among them but the one that answers make; and no line joins the next
        last = party
        if step.action in CONNECT or step.action == ">":
            data, ahead = sends[index]
            begun[step.client] = _feed(party, data, ahead, begun[step.client], feed)
        if step.action == "<" or step.action in CONNACK:
            expected = step.data if step.action == "<" else CONNACK[step.action]
            packet = party.next_packet(expected)
            assert matches(expected, packet), f"{where}: expected {expected}, got {packet.hex(' ') or 'nothing'}"
        elif step.action == "x":
            assert party.ended(), f"{where}: {step.client} should have been closed, with nothing more sent"
        elif step.action == "-":
            party.drop()
    dropped = {step.client for step in case.steps if step.action in "x-"}
    for name, party in parties.items():
        if name not in dropped:
            assert party.is_quiet(), f"{case.path}:{case.line}: {name} was sent more: {party.next_packet('').hex(' ')}"


def _sends(case: Case) -> dict[int, tuple[bytes, bytes]]:
    """For each sending step its bytes, and the first byte of what the same transport sends next (a PINGREQ's, if nothing)."""
    found: dict[int, tuple[bytes, bytes]] = {}
    following: dict[str, bytes] = {}
    for index in range(len(case.steps) - 1, -1, -1):
        step = case.steps[index]
        if step.action in CONNECT:
            data = bytes_of(CONNECT[step.action].replace("ID", f'"{step.client}"'))
        elif step.action == ">":
            data = bytes_of(step.data)
        else:
            if step.action in "x-":
                following.pop(step.client, None)
            continue
        found[index] = (data, following.get(step.client, b"\xc0"))
        if step.action in CONNECT:  # a new transport: what came before it goes elsewhere
            following.pop(step.client, None)
        else:
            following[step.client] = data[:1]
    return found


def _feed(party: Party, data: bytes, ahead: bytes, begun: bytes, feed: str) -> bytes:
    """Send ``data``, less what of it was sent before; returns what was already sent of the next packet."""
    if feed == FEEDS[0]:
        party.send(data)
    elif feed == FEEDS[1]:
        for at in range(len(data)):
            party.send(data[at : at + 1])
    else:
        party.send(data[len(begun) :] + ahead)
        return ahead
    return b""
