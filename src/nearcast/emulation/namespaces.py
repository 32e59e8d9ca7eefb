"""Hosts of the emulated WAN: network namespaces with one TUN device each, made with system calls only.

Owns everything about one host's surroundings: its namespaces, the device ``wan0`` and its address, the names it resolves, and
how a process is started inside. Refuses to know what happens to packets (:mod:`nearcast.emulation.router`) and to processes
after their start (the keeper).

Nothing here has a name in the system. Namespaces are anonymous and live as long as a descriptor or a process holds them; the
device is not persistent and goes with its descriptor; the private ``/etc/hosts`` is a file of a file system that is mounted in
the host's own mount namespace only. When the process that made them dies, however it dies, the kernel removes all of it.

A host gets three namespaces: network; mount, for ``/etc/hosts``, so that unmodified programs find ``broker-1``; UTS, so that
programs that advertise their host name (Spark does) are reached. IPv6 exists on ``lo`` only.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import ipaddress
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from nearcast.errors import EmulationError, EmulationUnavailable

SUBNET: Final = "10.77.0.0/16"
"""Where hosts' addresses come from: the first is 10.77.0.1. They exist inside only; the machine never sees them."""

DEVICE: Final = "wan0"
QUEUE_PACKETS: Final = 4000
"""Packets that may wait in a device for the router; the kernel drops more. A tenth of a second at the router's best rate."""

_MANY_FILES: Final = 1 << 20

_CLONE_FS: Final = 0x00000200
_CLONE_NEWNS: Final = 0x00020000
_CLONE_NEWUTS: Final = 0x04000000
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000

_MS_BIND: Final = 0x1000
_MS_REC: Final = 0x4000
_MS_PRIVATE: Final = 0x40000
_MNT_DETACH: Final = 2

_TUNSETIFF: Final = 0x400454CA
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_SIOCSIFADDR: Final = 0x8916
_SIOCSIFNETMASK: Final = 0x891C
_SIOCSIFMTU: Final = 0x8922
_SIOCSIFTXQLEN: Final = 0x8943
_IFF_UP: Final = 0x1

_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


def available() -> str | None:
    """Why this process cannot make hosts, in one line that says what to do; None when it can. Tries it: a few milliseconds."""
    try:
        HostNamespace.create(0, str(address_of(0)), 1500, name="probe", hosts={"probe": str(address_of(0))}).close()
    except EmulationUnavailable as unavailable:
        return str(unavailable)
    return None


def address_of(index: int, subnet: str = SUBNET) -> ipaddress.IPv4Address:
    """The address of the host with this index."""
    network = ipaddress.IPv4Network(subnet)
    if not 0 <= index < network.num_addresses - 2:
        raise EmulationError(f"{subnet} has room for {network.num_addresses - 2} hosts, not for number {index + 1}")
    return network[index + 1]


def create_hosts(names: Sequence[str], mtu_bytes: int, subnet: str = SUBNET) -> list[HostNamespace]:
    """A namespace for each name, all knowing each other by name; either all are made or none."""
    raise_file_limit()
    addresses = {name: str(address_of(index, subnet)) for index, name in enumerate(names)}
    made: list[HostNamespace] = []
    try:
        for index, (name, address) in enumerate(addresses.items()):
            made.append(HostNamespace.create(index, address, mtu_bytes, name=name, hosts=addresses, subnet=subnet))
    except BaseException:
        for host in made:
            host.close()
        raise
    return made


def raise_file_limit() -> None:
    """Take the file descriptors this process may have: a host needs five. Not more than a million: where a billion are allowed
    (containers), programs that look at every possible one would never end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HostNamespace:
    """One host: hold it to keep it, close it (or die) to remove it."""

    def __init__(
        self, index: int, name: str, address: str, tun_fd: int, counters_fd: int, namespace_fds: tuple[int, ...]
    ) -> None:
        self.index = index
        self.name = name
        self.address = address
        self.tun_fd = tun_fd
        """Non-blocking. Each read is one IP packet that the host sends; each write is one it receives. For the router."""
        self._counters_fd = counters_fd
        self._namespace_fds = namespace_fds

    @classmethod
    def create(
        cls,
        index: int,
        address: str,
        mtu_bytes: int = 1500,
        *,
        name: str = "",
        hosts: dict[str, str] | None = None,
        subnet: str = SUBNET,
    ) -> HostNamespace:
        """Make a host. ``hosts`` (name to address) becomes its ``/etc/hosts``; None leaves the machine's."""
        if sys.platform != "linux":
            raise EmulationUnavailable("network namespaces exist on Linux only; use loopback mode")

        def make() -> HostNamespace:
            _unshare()
            descriptors: list[int] = []
            try:
                if name:
                    socket.sethostname(name)
                if hosts is not None:
                    _mount_hosts_file(hosts)
                _confine_ipv6()
                descriptors.append(_open_device(DEVICE))
                _configure(address, ipaddress.IPv4Network(subnet), mtu_bytes)
                for file in ("net/dev", "ns/net", "ns/mnt", "ns/uts"):
                    descriptors.append(os.open(f"/proc/thread-self/{file}", os.O_RDONLY | os.O_CLOEXEC))
            except OSError as problem:
                for descriptor in descriptors:
                    os.close(descriptor)
                raise EmulationUnavailable(_explain(problem, "configuring a network namespace")) from problem
            except BaseException:
                for descriptor in descriptors:
                    os.close(descriptor)
                raise
            return cls(index, name or address, address, descriptors[0], descriptors[1], tuple(descriptors[2:]))

        return _in_thread(make)

    def call(self, function: Callable[[], T]) -> T:
        """What ``function`` returns, called inside: a socket that it opens belongs to this host wherever it is used later."""

        def inside() -> T:
            self._enter()
            return function()

        return _in_thread(inside)

    def spawn(self, command: Sequence[str], **arguments: Any) -> subprocess.Popen[Any]:
        """Start a process on this host, in a session (and process group) of its own. ``arguments`` are those of ``Popen``."""
        arguments.setdefault("start_new_session", True)
        if arguments.get("cwd") is None:
            arguments["cwd"] = os.getcwd()  # entering a mount namespace goes to its root
        return self.call(lambda: subprocess.Popen(command, **arguments))  # noqa: S603

    def dropped_packets(self) -> int:
        """Packets that the host's kernel dropped because the router did not fetch them in time."""
        if self._counters_fd < 0:
            return 0
        for line in os.pread(self._counters_fd, 1 << 16, 0).decode().splitlines():
            device, _, counters = line.partition(":")
            if device.strip() == DEVICE:
                return int(counters.split()[11])
        return 0  # the device was removed from inside

    def close(self) -> None:
        """Let go: what no process uses any more is removed at once. Closing twice is fine."""
        descriptors, self._namespace_fds = (self.tun_fd, self._counters_fd, *self._namespace_fds), ()
        self.tun_fd = self._counters_fd = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def _enter(self) -> None:
        if not self._namespace_fds:
            raise EmulationError(f"host {self.name} is closed")
        # A thread shares root and working directory with the others, and may not change its mount namespace while it does.
        _check(_libc.unshare(_CLONE_FS), "unshare")
        for descriptor in self._namespace_fds:
            _check(_libc.setns(descriptor, 0), "setns")


def _in_thread(function: Callable[[], T]) -> T:
    """Call ``function`` in a thread of its own, whose namespaces end with it, and return or raise what it does."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as failure:  # noqa: BLE001 - raised again below, in the caller's thread
            failures.append(failure)

    thread = threading.Thread(target=run, name="namespace", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def _unshare() -> None:
    try:
        _check(_libc.unshare(_CLONE_NEWNET | _CLONE_NEWNS | _CLONE_NEWUTS), "unshare")
    except OSError as problem:
        raise EmulationUnavailable(_explain(problem, "making a network namespace")) from problem


def _explain(problem: OSError, doing: str) -> str:
    """One line: what is missing here, and what to do about it."""
    if problem.filename == "/dev/net/tun" and problem.errno in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
        return "/dev/net/tun is missing: run `modprobe tun`, or give the container `--device /dev/net/tun`"
    if problem.errno in (errno.EPERM, errno.EACCES):
        if os.geteuid() != 0:
            return "network namespaces need root: run this with sudo"
        what = "/dev/net/tun" if problem.filename == "/dev/net/tun" else doing
        return (
            f"root may not do everything here ({what}: {problem.strerror}): run the container with `--privileged`, or with "
            "`--cap-add SYS_ADMIN --cap-add NET_ADMIN --device /dev/net/tun` and without seccomp and AppArmor profiles"
        )
    if problem.errno in (errno.ENOSYS, errno.EINVAL):
        return f"this kernel has no network namespaces or TUN devices ({doing}: {problem.strerror})"
    if problem.errno in (errno.EMFILE, errno.ENFILE):
        return "too many open files: a host needs five; raise `ulimit -n`"
    if problem.errno == errno.ENOSPC:
        return "the kernel allows no more network namespaces: raise /proc/sys/user/max_net_namespaces"
    return f"{doing} failed: {problem}"


def _mount_hosts_file(hosts: dict[str, str]) -> None:
    """Give this mount namespace its own ``/etc/hosts``, on a file system that nobody else sees and that dies with it."""
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    text = "127.0.0.1 localhost\n::1 localhost ip6-localhost\n" + "".join(f"{at} {name}\n" for name, at in hosts.items())
    # Kept open across the mount below, which hides it.
    target = os.open("/etc/hosts", os.O_PATH | os.O_CLOEXEC)
    try:
        _mount("nearcast", "/etc", "tmpfs", 0, "size=16m,mode=755")
        Path("/etc/hosts").write_text(text, encoding="utf-8")
        _mount("/etc/hosts", f"/proc/thread-self/fd/{target}", "", _MS_BIND)
        _check(_libc.umount2(b"/etc", _MNT_DETACH), "umount")
    finally:
        os.close(target)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(result, f"mount {target}")


def _confine_ipv6() -> None:
    """No IPv6 on devices made from now on, so that the router never hears router solicitations. Where ``/proc/sys`` cannot be
    written it drops them."""
    try:
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    except OSError:
        pass


def _open_device(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _configure(address: str, network: ipaddress.IPv4Network, mtu_bytes: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        device = DEVICE.encode()

        def request(number: int, layout: str, *values: object, name: bytes = device) -> bytes:
            return fcntl.ioctl(control, number, struct.pack(f"16s{layout}", name, *values).ljust(40, b"\0"))

        def bring_up(name: bytes) -> None:
            (flags,) = struct.unpack_from("H", request(_SIOCGIFFLAGS, "", name=name), 16)
            request(_SIOCSIFFLAGS, "H", flags | _IFF_UP, name=name)

        bring_up(b"lo")
        request(_SIOCSIFMTU, "i", mtu_bytes)
        try:
            request(_SIOCSIFTXQLEN, "i", QUEUE_PACKETS)
        except PermissionError:
            pass  # in a user namespace, where only the machine's root may: the device keeps its 500
        request(_SIOCSIFADDR, "HH4s", socket.AF_INET, 0, ipaddress.IPv4Address(address).packed)
        request(_SIOCSIFNETMASK, "HH4s", socket.AF_INET, 0, network.netmask.packed)
        bring_up(device)


def _check(result: int, call: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
