"""What goes wrong on the way to a bulk port, in one line that says what to look at."""

from __future__ import annotations

import socket
import ssl

from nearcast.client.endpoints import Endpoint
from nearcast.errors import ConnectionClosed, NearcastError, RequestRefused
from nearcast.topiclog.conversation import FINAL_REASONS


def cannot_reach(endpoint: Endpoint, error: OSError, timeout_seconds: float) -> ConnectionClosed:
    """Why no connection could be made."""
    if isinstance(error, TimeoutError):
        return ConnectionClosed(f"cannot reach {endpoint}: no answer within {timeout_seconds:g} s")
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "name its CA (tls=TlsOptions(ca_file=...))"
        return ConnectionClosed(f"cannot trust {endpoint}: {error.verify_message}: {hint}")
    if isinstance(error, ssl.SSLError):
        return ConnectionClosed(f"cannot speak TLS with {endpoint}: {error.reason or error}: is it a bulk-tls port?")
    if isinstance(error, socket.gaierror):
        return ConnectionClosed(f"cannot reach {endpoint}: the host name is unknown ({error.strerror})")
    if isinstance(error, ConnectionRefusedError):
        return ConnectionClosed(f"cannot reach {endpoint}: nothing listens there; does the broker run, with a bulk port?")
    return ConnectionClosed(f"cannot reach {endpoint}: {error.strerror or error}")


def ended_by_broker(endpoint: Endpoint, failure: RequestRefused) -> NearcastError:
    """The broker ended the connection and said why: what may be tried again over a new one is :class:`ConnectionClosed`."""
    message = f"{endpoint} ended the connection: {failure}"
    if failure.reason_code in FINAL_REASONS:
        return RequestRefused(failure.reason_code, message)
    return ConnectionClosed(message, failure.reason_code)


def as_closed(endpoint: Endpoint, error: BaseException) -> ConnectionClosed:
    """Why a connection that was there is gone."""
    if isinstance(error, ConnectionClosed):
        return error
    if isinstance(error, OSError):
        return ConnectionClosed(f"the connection to {endpoint} was lost: {error.strerror or error}")
    return ConnectionClosed(f"the connection to {endpoint} was given up: {error}")
