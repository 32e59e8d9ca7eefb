"""Listening TCP and Unix sockets, with errors that say what is in the way."""

from __future__ import annotations

import errno
import os
import socket
import stat

from nearcast.errors import ConfigError

#: First probe after five minutes of silence, then one a minute, and five unanswered ones end the connection.
KEEP_ALIVE_OPTIONS = tuple(
    (getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 300), ("TCP_KEEPINTVL", 60), ("TCP_KEEPCNT", 5))
    if hasattr(socket, name)
)


ANOTHER_PROCESS = "is another broker running?"


def bind_tcp(
    host: str, port: int, backlog: int, key: str = "listeners", when_taken: str = ANOTHER_PROCESS
) -> list[socket.socket]:
    """Listening sockets for every address of ``host``, all on the same port also when it is 0."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else "not a host name"
        raise ConfigError(f"cannot listen on {host}: {reason}", key=key) from error
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listening = socket.socket(family, kind, protocol)
            sockets.append(listening)
            listening.setblocking(False)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted sockets inherit these. Probes find peers that vanished, also those that asked for no MQTT keep-alive.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, seconds in KEEP_ALIVE_OPTIONS:
                listening.setsockopt(socket.IPPROTO_TCP, option, seconds)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind((address[0], port, *address[2:]))
            listening.listen(backlog)
            port = listening.getsockname()[1]
    except OSError as error:
        for listening in sockets:
            listening.close()
        hint = f"; {when_taken}" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}{hint}", key=key) from error
    return sockets


def bind_unix(path: str, mode: int, backlog: int) -> socket.socket:
    """A listening Unix socket. A socket file that nobody answers on is a leftover and replaced; anything else stays."""
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)
                else:
                    raise ConfigError(f"cannot listen on {path}: another process answers there", key="listeners")
        else:
            raise ConfigError(f"cannot listen on {path}: a file that is no socket is in the way", key="listeners")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}", key="listeners") from error
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        # Nobody else gets in between bind and chmod.
        previous = os.umask(0o177)
        try:
            listening.bind(path)
        finally:
            os.umask(previous)
        os.chmod(path, mode)
        listening.listen(backlog)
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror}", key="listeners") from error
    return listening
