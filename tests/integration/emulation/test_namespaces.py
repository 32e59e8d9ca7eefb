"""Hosts as namespaces: what a process inside sees, and that nothing of them stays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearcast.emulation.namespaces import HostNamespace, create_hosts
from nearcast.errors import EmulationError
from tests.integration.emulation.wans import require_namespaces, wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def hosts() -> Iterator[list[HostNamespace]]:
    require_namespaces()
    made = create_hosts(["broker-1", "broker-2"], 1400)
    yield made
    for host in made:
        host.close()


def output(host: HostNamespace, program: str) -> str:
    """What a Python program prints on a host."""
    process = host.spawn([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return str(text).strip()


def test_hosts_know_each_other_by_name(hosts: list[HostNamespace]) -> None:
    program = "import socket; print(*(socket.gethostbyname(name) for name in ('broker-1', 'broker-2', 'localhost')))"
    assert output(hosts[0], program) == "10.77.0.1 10.77.0.2 127.0.0.1"


def test_a_hosts_name_is_its_host_name(hosts: list[HostNamespace]) -> None:
    assert output(hosts[1], "import socket; print(socket.gethostname())") == "broker-2"
    assert socket.gethostname() != "broker-2"


def test_a_host_has_its_device_and_loopback_only(hosts: list[HostNamespace]) -> None:
    assert output(hosts[0], "import socket; print(*(name for _, name in socket.if_nameindex()))") == "lo wan0"


def test_the_device_is_silent_and_without_ipv6(hosts: list[HostNamespace]) -> None:
    addresses = output(hosts[0], "print(open('/proc/net/if_inet6').read())")
    assert "wan0" not in addresses
    with pytest.raises(BlockingIOError):
        os.read(hosts[0].tun_fd, 2000)


def test_the_device_has_the_topologys_mtu(hosts: list[HostNamespace]) -> None:
    with hosts[0].call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sender:
        sender.sendto(bytes(1400 - 28), (hosts[1].address, 9))
        assert len(os.read(hosts[0].tun_fd, 2000)) == 1400
        sender.sendto(bytes(1400 - 27), (hosts[1].address, 9))  # in two fragments
        sizes = sorted(len(os.read(hosts[0].tun_fd, 2000)) for _ in range(2))
        assert sizes[-1] <= 1400


def test_the_machine_sees_nothing_of_it(hosts: list[HostNamespace]) -> None:
    assert "wan0" not in [name for _, name in socket.if_nameindex()]
    assert "broker-1" not in Path("/etc/hosts").read_text()
    assert "nearcast" not in Path("/proc/self/mounts").read_text()


def test_a_process_has_its_own_session_and_the_callers_directory(
    hosts: list[HostNamespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = "import os; print(os.getcwd(), os.getsid(0) == os.getpid() == os.getpgid(0))"
    assert output(hosts[0], program) == f"{tmp_path} True"


def test_a_process_inherits_no_descriptor(hosts: list[HostNamespace]) -> None:
    assert output(hosts[0], "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:4])") == "[0, 1, 2, 3]"


def test_a_program_that_is_not_there_fails_where_it_was_asked_for(hosts: list[HostNamespace]) -> None:
    with pytest.raises(FileNotFoundError):
        hosts[0].spawn(["no-such-program"])


def test_closing_twice_is_fine_and_a_closed_host_says_so() -> None:
    require_namespaces()
    before = sorted(os.listdir("/proc/self/fd"))
    (host,) = create_hosts(["alone"], 1500)
    host.close()
    host.close()
    assert sorted(os.listdir("/proc/self/fd")) == before
    with pytest.raises(EmulationError, match="host alone is closed"):
        host.spawn(["true"])


def test_a_hundred_hosts() -> None:
    require_namespaces()
    before = len(os.listdir("/proc/self/fd"))
    made = create_hosts([f"host-{number}" for number in range(100)], 1500)
    try:
        program = "import socket; print(socket.gethostbyname('host-99'))"
        assert output(made[0], program) == "10.77.0.100"
    finally:
        for host in made:
            host.close()
    assert len(os.listdir("/proc/self/fd")) == before


HOLDER = """
import os, sys, time
from nearcast.emulation.measurement import line_topology
from nearcast.emulation.namespaces import create_hosts
from nearcast.emulation.router import Router
hosts = create_hosts(["host-1", "host-2"], 1500)
router = Router.start(line_topology(1.0), hosts)
inodes = [host.call(lambda: os.readlink("/proc/thread-self/ns/net")) for host in hosts]
print(router.process.pid, *inodes, flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_when_the_holder_is_killed() -> None:
    require_namespaces()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    router, *namespaces = holder.stdout.readline().split()
    assert len(namespaces) == 2
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    wait_until(lambda: not _alive(int(router)), "the router's end")
    assert not namespaces_in_use() & set(namespaces)
    holder.stdin.close()
    holder.stdout.close()


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state != "Z"


def namespaces_in_use() -> set[str]:
    """Network namespaces that a process is in or holds open."""
    found = set()
    for link in [*Path("/proc").glob("[0-9]*/ns/net"), *Path("/proc").glob("[0-9]*/fd/*")]:
        try:
            found.add(os.readlink(link))
        except OSError:
            continue  # it ended while we looked
    return found


UNPRIVILEGED = """
import os
from nearcast.emulation import namespaces
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
print(namespaces.available())
"""


def test_without_root_the_reason_is_one_line() -> None:
    if os.geteuid() != 0:
        pytest.skip("giving up root needs root")
    result = subprocess.run([sys.executable, "-c", UNPRIVILEGED], capture_output=True, text=True, check=True, timeout=30)
    assert result.stdout == "network namespaces need root: run this with sudo\n"
