"""What a broker measures of itself: its processor, and a TCP connection as the kernel knows it."""

from __future__ import annotations

import socket
import sys

import pytest

from nearcast.broker.capability import REFRESH_SECONDS, CapabilityMeter, engine_messages_per_s, idle_share, tcp_bytes_per_s


def test_the_engine_passes_messages_on() -> None:
    assert engine_messages_per_s() > 100.0


def test_idle_is_a_share() -> None:
    assert 0.0 <= idle_share() <= 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what it knows of a connection")
def test_a_connection_has_a_bandwidth() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        there, _ = server.accept()
        with there:
            here.sendall(bytes(10_000))
            received = 0
            while received < 10_000:
                received += len(there.recv(10_000))
            assert tcp_bytes_per_s(here) > 1e5


def test_what_is_no_connection_has_none() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        assert tcp_bytes_per_s(datagrams) == 0.0


def test_it_is_measured_again_after_a_while_and_when_the_way_changed() -> None:
    now = 0.0
    meter = CapabilityMeter(lambda: now)
    assert meter.refresh(None, 0, 0) is not None
    assert meter.refresh(None, 0, 0) is None
    now = REFRESH_SECONDS
    assert meter.refresh(None, 10, 10_000) is not None
    assert meter.capability.message_bytes > 256.0
    meter.soon()
    assert meter.refresh(None, 10, 10_000) is not None
