"""The generator's own ceiling: a peer that only passes bytes on.

Speaks just enough MQTT for the handshake, then pipes whatever publisher n sends to subscriber n, and whatever subscriber n
answers back to publisher n. Acknowledgements thus go end to end and every QoS works, with nothing parsed in between: what
the generator reaches against it is what the generator can do.
"""

from __future__ import annotations

import select
import socket
import sys

from nearcast.bench.wire import RECEIVE_BYTES, read_packet


def _greet(peer: socket.socket) -> tuple[str, int]:
    """Answer CONNECT; returns whether a publisher ("pub") or a subscriber ("sub") called, and its number."""
    _, body = read_packet(peer)
    version = body[6]
    position = 10
    if version == 5:
        position += 1 + body[position]
    client_id = body[position + 2 :].decode()
    peer.sendall(b"\x20\x03\x00\x00\x00" if version == 5 else b"\x20\x02\x00\x00")
    role, number = client_id.rsplit("-", 2)[1:]
    if role == "sub":
        _, body = read_packet(peer)
        granted = bytes((body[-1] & 3,))
        properties = b"\x00" if version == 5 else b""
        answer = body[:2] + properties + granted
        peer.sendall(bytes((0x90, len(answer))) + answer)
    return role, int(number)


def serve(listener: socket.socket, pairs: int) -> None:
    """Pipe ``pairs`` publishers to as many subscribers until the first connection ends."""
    ends: dict[tuple[str, int], socket.socket] = {}
    for _ in range(2 * pairs):
        peer, _ = listener.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ends[_greet(peer)] = peer
    partner = {}
    epoll = select.epoll()
    for (role, number), peer in ends.items():
        partner[peer.fileno()] = (peer, ends["sub" if role == "pub" else "pub", number])
        epoll.register(peer.fileno(), select.EPOLLIN)
    buffer = memoryview(bytearray(RECEIVE_BYTES))
    while True:
        for descriptor, _ in epoll.poll():
            source, target = partner[descriptor]
            count = source.recv_into(buffer)
            if count <= 2:  # the end of the stream, or the DISCONNECT before it
                return
            target.sendall(buffer[:count])


def main() -> None:
    """Child process: prints the port it listens on, serves one run."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        try:
            serve(listener, int(sys.argv[1]))
        except OSError:
            pass  # the generator has gone: the run is over


if __name__ == "__main__":
    main()
