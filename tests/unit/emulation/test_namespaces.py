"""What needs no privilege of the hosts: addresses, and what people are told when they cannot have them."""

from __future__ import annotations

import errno
import os

import pytest

from nearcast.emulation.namespaces import _explain, address_of
from nearcast.errors import EmulationError


def test_addresses_are_counted_from_one() -> None:
    assert str(address_of(0)) == "10.77.0.1"
    assert str(address_of(255)) == "10.77.1.0"
    assert str(address_of(65_533)) == "10.77.255.254"
    assert str(address_of(1, "192.168.7.0/24")) == "192.168.7.2"


@pytest.mark.parametrize("index", [-1, 65_534])
def test_a_subnet_has_its_bounds(index: int) -> None:
    with pytest.raises(EmulationError, match="room for 65534 hosts"):
        address_of(index)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (OSError(errno.ENOENT, "No such file", "/dev/net/tun"), "modprobe tun"),
        (OSError(errno.ENOSYS, "Function not implemented"), "no network namespaces"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError(errno.ENOSPC, "No space left on device"), "max_net_namespaces"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
)
def test_every_obstacle_is_one_line(problem: OSError, expected: str) -> None:
    line = _explain(problem, "making a network namespace")
    assert expected in line
    assert "\n" not in line


def test_who_may_not_is_told_what_would_help() -> None:
    line = _explain(OSError(errno.EPERM, "Operation not permitted"), "making a network namespace")
    assert ("sudo" if os.geteuid() else "--cap-add") in line
